"""Changes that make a right plan of nnScaler wrong, as they were found to happen, and what is to be named for each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nnscaler.plans import Tree, cells, devices, prims

LLAMA = "llama1l_v03_dp2pp2tp2nm2"
RANDOM = "mlp4b_v08_dp2pp1tp2nm1_rand1"
WHOLE = "linear_6[0:4, 0:128, 0:128]"
PIECE = "transpose_4[0:4, 0:128, 0:4, "


@dataclass(frozen=True)
class Wrong:
    """`faults` are cells@devices/micro-batches; `why` is in the first of them."""

    change: Callable[[Tree], None]
    verdict: str
    faults: str
    why: str
    plan: str = LLAMA


WRONG: list[Wrong] = []


def wrong(verdict: str, faults: str, why: str, plan: str = LLAMA) -> Callable[[Callable[[Tree], None]], Callable[[Tree], None]]:
    def listed(change: Callable[[Tree], None]) -> Callable[[Tree], None]:
        WRONG.append(Wrong(change, verdict, faults, why, plan))
        return change

    return listed


def cell(plan: Tree, device: int, cid: int, forward: bool = True) -> Tree:
    return next(c for c in cells(plan, device) if c["cid"] == cid and c["isfw"] == forward)


def steps(plan: Tree, device: int, kind: str, forward: bool) -> list[Tree]:
    return [s for s in plan["execplan"][str(device)]["seq"] if s["cell_kind"] == kind and s["isfw"] == forward]


def both(plan: Tree, cid: int, change: Callable[[Tree, int], None]) -> None:
    """An adapter and its mirror: they share their prims."""
    for d in devices(plan):
        for c in cells(plan, d):
            if c["kind"] == "IRAdapter" and cid in (c["cid"], c["mirror"]):
                for p in c["prims"]:
                    change(p, d)


def turned(kind: str, **more: Any) -> Callable[[Tree, int], None]:
    def change(p: Tree, d: int) -> None:
        p["kind"] = kind
        p["kwargs"] = {**p["kwargs"], **more, "ranks": [d]}

    return change


# -- those of the paper's artifact and of its authors' own list -----------------------------------------------------------


@wrong("INVALID", "855@2,3/0,1 814@2,3/0,1", "device 0 is in its group [0, 2] and has no such prim in this adapter")
def ranks_of_another_stage(plan: Tree) -> None:
    for d in devices(plan):
        for c in cells(plan, d):
            for p in c.get("prims", ()):
                if "llreduce" in p["kind"] or "AllReduce" in p["kind"]:
                    p["kwargs"]["ranks"] = [d, (d + 2) % 4]


@wrong("REFUTED", "1005+1006+1007+1008@0,1,2,3/0,1", "rank 0 sums over [0]; its weights are shared by [0, 4]")
def reducers_of_one_rank(plan: Tree) -> None:
    for d in devices(plan):
        for c in cells(plan, d):
            if c["kind"] == "IRWeightReducer":
                c["_scaled_device"] = {rank: [int(rank)] for rank in c["_scaled_device"]}


@wrong("REFUTED", "153@2,3/1", "it takes embedding of micro-batch 0, transpose_4 of micro-batch 0")
def activations_of_another_micro_batch(plan: Tree) -> None:
    for d in (2, 3):
        first, second = steps(plan, d, "IRSegment", True)
        second["inputs"] = first["inputs"]


@wrong("INVALID", "59@2,3/0,1", "it is torch.nn.functional.silu, on one device torch.sum")
def another_loss(plan: Tree) -> None:
    for d in (2, 3):
        cell(plan, d, 59).update(signature="torch.nn.functional.silu", name="silu")


@wrong("REFUTED", "855@2,3/0,1", f"the plan says that it makes {WHOLE}, it makes {WHOLE} part 0 of 2")
def no_sum_of_parts(plan: Tree) -> None:
    both(plan, 855, turned("IdentityAllreducePrim"))


@wrong("INVALID", "855@2,3/0,1", "its prims do not make linear_6")
def adapter_emptied(plan: Tree) -> None:
    for d in (2, 3):
        cell(plan, d, 855)["prims"] = []


@wrong("INVALID", "855@2,3/0,1 856@2,3/0,1", f"the plan says that it makes {WHOLE}, it makes {WHOLE} part 0 of 2")
def gather_for_sum(plan: Tree) -> None:
    both(plan, 855, turned("AllGatherPrim", dim=0))


@wrong("INVALID", "245@2,3/0,1", "the plan says that it makes embedding[0:4, 0:128, 0:128], it makes embedding[0:4, 0:128, 0:64]")
def sum_for_gather(plan: Tree) -> None:
    for d in (2, 3):
        for p in cell(plan, d, 245)["prims"]:
            if p["kind"] == "AllGatherPrim":
                p["kind"], p["kwargs"] = "AllReducePrim", {"ranks": [d]}


@wrong("REFUTED", "814@2,3/0,1", "the plan says that it makes gmul_3[0:4, 0:128, 0:128], it makes gmul_3[0:4, 0:128, 0:128] part 0 of 2")
def no_sum_of_gradients(plan: Tree) -> None:
    both(plan, 814, turned("AllReduceIdentityPrim"))


@wrong("REFUTED", "6@0/0,1", "argument 2 is 2, on one device 1e-05")
def eps_on_one_rank(plan: Tree) -> None:
    cell(plan, 0, 6)["inputs"][1] = 2


@wrong("REFUTED", "4@0/0,1", "argument 2 is 1, on one device 2")
def exponent_on_one_rank(plan: Tree) -> None:
    cell(plan, 0, 4)["inputs"][1] = 1


@wrong("REFUTED", "6@0,1/0,1", "argument 2 is 2, on one device 1e-05")
def eps_of_a_stage(plan: Tree) -> None:
    for d in (0, 1):
        cell(plan, d, 6)["inputs"][1] = 2


@wrong("REFUTED", "602@2/0,1", "it takes gfloat_4 (tensor 806) 2 times, expected 1")
def gradient_twice(plan: Tree) -> None:
    c = cell(plan, 2, 602, False)
    c["inputs"].append(c["inputs"][0])


@wrong("REFUTED", "24@0,1/0,1", "argument 2 is 4, on one device 5.656854249492381")
def attention_scale(plan: Tree) -> None:
    for d in (0, 1):
        cell(plan, d, 24)["inputs"][1] = 4


@wrong("REFUTED", "152@0/1", "it runs 1 times in a step, expected 2: micro-batch 1 is left out")
def backward_left_out(plan: Tree) -> None:
    plan["execplan"]["0"]["seq"].remove(steps(plan, 0, "IRSegment", False)[1])


@wrong("REFUTED", "missing-cell@0,1/0,1 missing-cell@2,3/0,1", "no reducer sums the gradients of tok_embeddings.weight, ")
def no_reducers(plan: Tree) -> None:
    for d in devices(plan):
        here = plan["execplan"][str(d)]
        here["seq"] = [s for s in here["seq"] if s["cell_kind"] != "IRWeightReducer"]


@wrong("REFUTED", "1005+1006@0,1/0,1", "no reducer sums the gradients of layers.0.attention.wq.weight")
def reducer_drops_a_weight(plan: Tree) -> None:
    for d in (0, 1):
        c = cell(plan, d, 1005 + d, False)
        full = plan["full_tensors"]
        c["inputs"] = [t for t in c["inputs"] if full[str(t["parent"])]["name"] != "layers.0.attention.wq.weight"]


@wrong("INVALID", "152@0,1/1", "it runs 3 times in a step, expected 2: micro-batch 1 is done again")
def backward_twice(plan: Tree) -> None:
    for d in (0, 1):
        seq = plan["execplan"][str(d)]["seq"]
        last = steps(plan, d, "IRSegment", False)[1]
        seq.insert(seq.index(last) + 1, last)


@wrong("INVALID", "814@2,3/0,1", "its prims do not make gmul_3")
def backward_adapter_emptied(plan: Tree) -> None:
    for d in (2, 3):
        cell(plan, d, 814, False)["prims"] = []


# -- more of the same kinds, elsewhere ------------------------------------------------------------------------------------


@wrong("INVALID", "23@0,1/0,1", "its arguments are transpose_3, transpose, on one device transpose, transpose_3")
def arguments_exchanged(plan: Tree) -> None:
    for d in (0, 1):
        cell(plan, d, 23)["inputs"].reverse()


@wrong("INVALID", "34@2/0,1", "argument 1 is linear_3, on one device embedding")
def another_argument(plan: Tree) -> None:
    c = cell(plan, 2, 34)
    c["inputs"][0] = copy.deepcopy(c["inputs"][1])


@wrong("INVALID", "-55@2/0,1", "cell 54 (torch.mul) is never differentiated")
def never_differentiated(plan: Tree) -> None:
    nodes = cell(plan, 2, 185, False)["nodes"]
    nodes.remove(next(n for n in nodes if n["mirror"] == 54))


@wrong("INVALID", "161@2/0,1", "it differentiates cell 56, its gradients are those of cell 52")
def another_mirror(plan: Tree) -> None:
    cell(plan, 2, 161, False)["mirror"] = 56


@wrong("INVALID", "855@2,3/0,1", "it is missing: forward adapter of adapter 856")
def adapter_missing(plan: Tree) -> None:
    for d in (2, 3):
        nodes = cell(plan, d, 153)["nodes"]
        nodes.remove(next(n for n in nodes if n["cid"] == 855))


@wrong("REFUTED", "1005+1006@0,1/0,1", "it runs before the last backward pass")
def reducer_too_early(plan: Tree) -> None:
    for d in (0, 1):
        seq = plan["execplan"][str(d)]["seq"]
        (reducer,) = steps(plan, d, "IRWeightReducer", False)
        seq.remove(reducer)
        seq.insert(seq.index(steps(plan, d, "IRSegment", False)[-1]), reducer)


@wrong("REFUTED", "1005+1006+1007+1008@0,1,2,3/0,1", "reducer_op is mean")
def reducers_average(plan: Tree) -> None:
    plan["compile_flags"]["reducer_op"] = "mean"


@wrong("REFUTED", "299@0,1/1", "it takes transpose_4 of micro-batch 0")
def old_tensor_sent(plan: Tree) -> None:
    for d in (0, 1):
        first, second = [s for s in steps(plan, d, "IRAdapter", True) if s["cell"] == "299"]
        second["inputs"] = first["inputs"]


@wrong("REFUTED", "299@2,3/0,1", f"the plan says that it makes {PIECE}0:16], it makes {PIECE}16:32]")
def pieces_crossed(plan: Tree) -> None:
    """Device 0 sends to 3 and 1 to 2: pieces come in the wrong order, though all agree on it."""
    for d in devices(plan):
        for p in cell(plan, d, 299)["prims"]:
            if p["kind"] == "MovePrim":
                k = p["kwargs"]
                k.update(dst=5 - k["dst"]) if d < 2 else k.update(src=1 - k["src"])


@wrong("INVALID", "299@0/0,1", "device 3 has no such move from 0 to 3")
def sent_elsewhere(plan: Tree) -> None:
    for p in cell(plan, 0, 299)["prims"]:
        if p["kind"] == "MovePrim":
            p["kwargs"]["dst"] = 3


@wrong("INVALID", "15@0/0,1", "size is [4, 128, 32, 4], expected [4, 128, 4, 32]")
def heads_of_another_size(plan: Tree) -> None:
    cell(plan, 0, 15)["kwargs"]["size"] = [4, 128, 32, 4]


@wrong("INVALID", "186@2/0,1", "the plan says that it makes 0:256 of dimension n, it makes 256:512")
def weight_of_the_other_rank(plan: Tree) -> None:
    """Device 2 loads the half of a weight that device 3 has."""
    cell(plan, 2, 186)["inputs"][1]["indmap"][0] = [256, 512]


@wrong("INVALID", "108@0,1/0", "the pieces that it joins do not follow each other", RANDOM)
def all_to_all_backwards(plan: Tree) -> None:
    for d in devices(plan):
        for _, p in prims(plan, d, "AllToAllAllToAllPrim"):
            p["kwargs"] |= {"idim": p["kwargs"]["odim"], "odim": p["kwargs"]["idim"]}
            break


# -- order, and cells that are there too often ----------------------------------------------------------------------------

MLP = "mlp2l_v08_dp2pp2tp2nm2"


@wrong("INVALID", "27+31@2/0,1", "the first takes linear_1 before the second makes it", MLP)
def nodes_exchanged(plan: Tree) -> None:
    nodes = cell(plan, 2, 15)["nodes"]
    first, last = (next(i for i, n in enumerate(nodes) if n["cid"] == cid) for cid in (27, 31))
    nodes[first], nodes[last] = nodes[last], nodes[first]


@wrong("INVALID", "15+70@3/0,1", "the first takes linear_1 before the second makes it", MLP)
def received_too_late(plan: Tree) -> None:
    seq = plan["execplan"]["3"]["seq"]
    receive, run = (next(s for s in seq if s["cell"] == key) for key in ("70", "15"))
    seq.remove(receive)
    seq.insert(seq.index(run) + 1, receive)


@wrong("INVALID", "122@1/0,1", "it stands 2 times in segment 11", MLP)
def adapter_twice(plan: Tree) -> None:
    nodes = cell(plan, 1, 11)["nodes"]
    at = next(i for i, n in enumerate(nodes) if n["cid"] == 122)
    nodes.insert(at, copy.deepcopy(nodes[at]))


@wrong("REFUTED", "28@3/0,1", "it is torch.exp, on other devices nnscaler.runtime.function.identity", MLP)
def another_function_on_one_rank(plan: Tree) -> None:
    cell(plan, 3, 28)["signature"] = "torch.exp"


@wrong("INVALID", "26@1/0,1", "it is missing: nothing makes float_2")
def operation_missing(plan: Tree) -> None:
    nodes = cell(plan, 1, 123)["nodes"]
    nodes.remove(next(n for n in nodes if n["cid"] == 26))
