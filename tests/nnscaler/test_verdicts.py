"""Plans that nnScaler made are proved; changed ones are rejected, and the change is named with its device and micro-batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nnscaler.plans import Tree, cells, devices, judged, messages, prims, tree, verdict
from trainverify.completion.optimizers import SGD, AdamW
from trainverify.nnscaler import Trainer
from trainverify.report import Report

MLP = "mlp2l_v08_dp2pp2tp2nm2"
LLAMA = "llama1l_v03_dp2pp2tp2nm2"
PLANS = ["mlp2l_v03_dp2pp2tp2nm2", MLP, "mlp4b_v08_dp2pp1tp2nm1_rand1", "mlp4b_v08_dp2pp2tp1nm4_zero", LLAMA]


def said(report: Report) -> list[str]:
    """Findings, but for collectives in vain: nnScaler 0.8 gathers the gradient of the batch."""
    return [m for m in messages(report) if not m.startswith("TV206")]


@pytest.mark.parametrize("name", PLANS)
def test_as_nnscaler_made_it(name: str) -> None:
    report = judged(name)
    assert (report.verdict, said(report)) == ("PROVED", [])
    weights = sum(f["is_param"] for f in tree(name.split("_dp")[0] + "_single")["full_tensors"].values())
    assert report.obligations[0].name == "loss"
    assert len(report.obligations) == 1 + weights


# -- changes that do no harm ------------------------------------------------------------------------------------------------


def ranks_reversed(plan: Tree) -> None:
    """torch.distributed.new_group sorts: the order of a list of ranks means nothing."""
    for d in devices(plan):
        for cell in cells(plan, d):
            for p in cell.get("prims", ()):
                if "ranks" in p["kwargs"]:
                    p["kwargs"]["ranks"] = p["kwargs"]["ranks"][::-1]


def chunk_mislabelled(plan: Tree) -> None:
    """Device 0 sends its first half, and says in both adapters that it is the second one."""
    for d in (0, 2):
        for cell in cells(plan, d):
            for p in cell.get("prims", ()):
                for t in (*p["inputs"], *p["outputs"]):
                    if t["tid"] == 57:
                        t["indmap"] = [[0, 32], [64, 128]]


def test_the_order_of_ranks_means_nothing() -> None:
    plan = tree(MLP)
    ranks_reversed(plan)
    report = judged(MLP, plan)
    assert (report.verdict, said(report)) == ("PROVED", [])


def test_a_false_label_is_a_warning() -> None:
    plan = tree(MLP)
    chunk_mislabelled(plan)
    report = judged(MLP, plan)
    assert report.verdict == "PROVED"
    assert said(report) == [
        "TV402 warning: forward adapter 70 (ChunkPrim) on device 0: the plan says that it makes linear_1[0:32, 64:128], "
        "it makes linear_1[0:32, 0:64]",
        *(
            f"TV402 warning: forward adapter 70 (AllGatherPrim) on device {d}: the pieces that it joins do not follow each other "
            "in the order of the group, or are no summands of one tensor"
            for d in (2, 3)
        ),
    ]


def test_gradients_in_another_order_are_told_apart_by_id() -> None:
    plan = tree(LLAMA)
    (cell,) = (c for c in cells(plan, 0) if c["kind"] == "IRBpOperation" and c["mirror"] == 18)
    cell["inputs"].reverse()
    report = judged(LLAMA, plan)
    assert report.verdict == "PROVED"
    assert messages(report) == [
        f"TV405 warning: backward of cell 18 on device 0, micro-batch {m}: it takes gradients in another order than its forward operation; "
        "they were told apart by tensor id"
        for m in (0, 1)
    ]


# -- changes that break the plan --------------------------------------------------------------------------------------------


def reducers_alone(plan: Tree) -> None:
    for d in devices(plan):
        for cell in cells(plan, d):
            if cell["kind"] == "IRWeightReducer":
                cell["_scaled_device"] = {rank: [int(rank)] for rank in cell["_scaled_device"]}


def no_reducers(plan: Tree) -> None:
    for d in devices(plan):
        here = plan["execplan"][str(d)]
        here["seq"] = [s for s in here["seq"] if s["cell_kind"] != "IRWeightReducer"]


def reducer_drops_a_weight(plan: Tree) -> None:
    for d in devices(plan):
        for cell in cells(plan, d):
            if cell["kind"] == "IRWeightReducer":
                cell["inputs"] = [t for t in cell["inputs"] if t["tid"] != 19]


def old_activations(plan: Tree) -> None:
    """Stage 1 runs micro-batch 1 on what it received for micro-batch 0."""
    for d in (2, 3):
        runs = [s for s in plan["execplan"][str(d)]["seq"] if s["cell_kind"] == "IRSegment" and s["isfw"]]
        runs[1]["inputs"] = runs[0]["inputs"]


def crossed(plan: Tree) -> None:
    """Device 0 sends to 3 and 1 to 2: pieces come in the wrong order, though all agree on it."""
    other = {2: 3, 3: 2}
    first = {0: 1, 1: 0}
    for d in devices(plan):
        for cell in cells(plan, d):
            if cell.get("cid") == 299:
                for p in cell["prims"]:
                    if p["kind"] == "MovePrim":
                        k = p["kwargs"]
                        if d < 2:
                            k["dst"] = other[k["dst"]]
                        else:
                            k["src"] = first[k["src"]]


def gradient_twice(plan: Tree) -> None:
    (cell,) = (c for c in cells(plan, 0) if c["kind"] == "IRBpOperation" and c["mirror"] == 19)
    cell["inputs"] = cell["inputs"] * 2


def one_constant(plan: Tree) -> None:
    (cell,) = (c for c in cells(plan, 0) if c.get("cid") == 6 and c["kind"] == "IRDimops")
    cell["inputs"][1] = 2


REFUTED: list[tuple[str, Callable[[Tree], None], str]] = [
    (MLP, reducers_alone, "TV404 warning: device 0: no reducer sums over the 2 replicas the gradients of layers.0.weight, layers.1.weight"),
    (MLP, no_reducers, "TV404 warning: device 0: no reducer sums over the 2 replicas the gradients of layers.0.weight, layers.1.weight"),
    (MLP, reducer_drops_a_weight, "TV404 warning: device 0: no reducer sums over the 2 replicas the gradients of layers.1.weight"),
    (MLP, old_activations, "TV401 warning: cell 15 (segment) on device 2, micro-batch 1: it takes linear_1 of micro-batch 0"),
    (
        MLP,
        gradient_twice,
        "TV405 warning: backward of cell 19 on device 0, micro-batch 0: it takes glinear[0:16, 0:128] (tensor 41) 2 times",
    ),
    (LLAMA, one_constant, "TV406 warning: devices 0 and 1 differ: mb0/add = add(mb0/mean, value=2) on device 0, "),
]


@pytest.mark.parametrize(("name", "change", "said"), REFUTED, ids=[c.__name__ for _, c, _ in REFUTED])
def test_refuted(name: str, change: Callable[[Tree], None], said: str) -> None:
    plan = tree(name)
    change(plan)
    report = judged(name, plan)
    assert report.verdict == "REFUTED"
    assert any(m.startswith(said) for m in messages(report)), messages(report)
    assert any(n.startswith("first wrong tensor ") and " on device " in n for n in report.notes)


def test_crossed_pieces_are_refuted_at_the_boundary() -> None:
    plan = tree(LLAMA)
    crossed(plan)
    report = judged(LLAMA, plan)
    assert report.verdict == "REFUTED"
    assert messages(report)[0] == (
        "TV402 warning: forward adapter 299 (MovePrim) on device 3: the plan says that it makes transpose_4[0:4, 0:128, 0:4, 16:32], "
        "it makes transpose_4[0:4, 0:128, 0:4, 0:16]"
    )


def emptied(plan: Tree) -> None:
    for d in (2, 3):
        for cell in cells(plan, d):
            if cell.get("cid") == 144:
                cell["prims"] = []


def another_stage(plan: Tree) -> None:
    for d in devices(plan):
        for cell in cells(plan, d):
            if cell["kind"] == "IRAdapter" and cell["differentiable"]:
                for p in cell["prims"]:
                    p["kwargs"]["ranks"] = sorted([d, (d + 2) % 4])


def sum_for_gather(plan: Tree) -> None:
    for d in (2, 3):
        for _, p in prims(plan, d, "AllGatherPrim"):
            p["kind"] = "AllReducePrim"


def backward_twice(plan: Tree) -> None:
    for d in (0, 1):
        seq = plan["execplan"][str(d)]["seq"]
        last = max(i for i, s in enumerate(seq) if s["cell_kind"] == "IRSegment" and not s["isfw"])
        seq.insert(last + 1, seq[last])


def backward_left_out(plan: Tree) -> None:
    seq = plan["execplan"]["0"]["seq"]
    del seq[max(i for i, s in enumerate(seq) if s["cell_kind"] == "IRSegment" and not s["isfw"])]


def another_function(plan: Tree) -> None:
    for d in (2, 3):
        for cell in cells(plan, d):
            if cell["signature"] == "torch.sum":
                cell["signature"] = "torch.nn.functional.silu"


def own_rank_missing(plan: Tree) -> None:
    for _, p in prims(plan, 0, "SplitAllGatherPrim"):
        p["kwargs"]["ranks"] = [1, 2]


INVALID: list[tuple[Callable[[Tree], None], str]] = [
    (
        emptied,
        "TV101 error: forward adapter 144 (no prims) on device 2, micro-batch 0: its prims do not make linear_1[0:16, 0:128] (tensor 45)",
    ),
    (another_stage, "TV2"),
    (
        sum_for_gather,
        "TV105 error: forward adapter 70 (MovePrim, AllReducePrim) on device 2, micro-batch 0: "
        "linear_1 has the shape [32, 64], the plan says [32, 128]",
    ),
    (
        backward_twice,
        "TV403 error: cell 14 (segment) on device 0, micro-batch 2: "
        "backward segment runs for the 3. time, its forward segment 11 ran 2 times",
    ),
    (backward_left_out, "TV2"),
    (
        another_function,
        "TV105 error: cell 31 (torch.nn.functional.silu) on device 2, micro-batch 0: "
        "sum_1 part 0 of 2 has the shape [16, 128], the plan says [1]",
    ),
    (
        own_rank_missing,
        "TV202 error: forward adapter 132 (SplitAllGatherPrim) on device 0, micro-batch 0: device 0 is not in its own group [1, 2]",
    ),
]


@pytest.mark.parametrize(("change", "said"), INVALID, ids=[c.__name__ for c, _ in INVALID])
def test_invalid(change: Callable[[Tree], None], said: str) -> None:
    plan = tree(MLP)
    change(plan)
    report = judged(MLP, plan)
    assert report.verdict == "INVALID"
    assert messages(report)[0].startswith(said), messages(report)


def test_a_pass_that_is_left_out_is_counted() -> None:
    plan = tree(MLP)
    backward_left_out(plan)
    assert any("backward segment 14 runs 1 times, forward segment 11 2 times" in m for m in messages(judged(MLP, plan)))


# -- what the trainer does --------------------------------------------------------------------------------------------------

ACCUMULATED = "mlp4b_v08_dp2pp2tp1nm4_zero"


def with_mean(plan: Tree) -> Tree:
    for d in devices(plan):
        for cell in cells(plan, d):
            if cell["signature"] == "torch.sum":
                cell["signature"] = "torch.mean"
    return plan


def test_a_mean_loss_is_added_up() -> None:
    report = verdict(with_mean(tree(ACCUMULATED)), with_mean(tree("mlp4b_v08_single")))
    assert report.verdict == "REFUTED"
    (fault,) = report.at_fault
    assert fault.why == "×8 = replicas × micro-batches: a mean loss is added up; with --correction mean the trainer divides"
    assert (fault.cells, fault.mended) == (("the trainer",), 1)


def test_a_declared_correction() -> None:
    plans = with_mean(tree(ACCUMULATED)), with_mean(tree("mlp4b_v08_single"))
    report = verdict(*plans, Trainer("mean"))
    assert report.verdict == "PROVED"
    assert "declared: the trainer divides gradients and losses by 2 replicas × 4 micro-batches" in report.assumptions
    wrong = judged(ACCUMULATED, trainer=Trainer("mean"))  # a sum needs none
    assert (wrong.verdict, wrong.at_fault[0].mended) == ("REFUTED", 1)
    assert wrong.at_fault[0].why.startswith("1/8 = 1/(replicas × micro-batches): the loss is a sum over the batch")


def test_the_rest_of_the_step() -> None:
    report = judged(MLP, trainer=Trainer(optimizer=AdamW(lr=1e-3), clip=1.5))
    assert report.verdict == "PROVED"
    assert {"metric grad_norm", "updated state layers.1.weight.v"} <= {o.name for o in report.obligations}
    plan = tree(MLP)
    reducer_drops_a_weight(plan)
    broken = judged(MLP, plan, Trainer(optimizer=SGD(lr=0.1), clip=1.5))
    assert broken.verdict == "REFUTED"
    assert {o.name for o in broken.obligations if o.status == "different"} >= {"metric grad_norm", "updated parameter layers.0.weight"}


def test_a_step_of_several_batches() -> None:
    plan = tree(ACCUMULATED)
    plan["runtime_ndevs"] = 8
    for d in devices(plan):
        for cell in cells(plan, d):
            cell.pop("_scaled_device", None)
    report = judged(ACCUMULATED, plan)
    assert report.verdict == "PROVED"
    assert "a step takes 2 batches of the single-device plan: the logical step is 2 of them, losses added up" in report.assumptions
    no_reducers(plan)
    assert judged(ACCUMULATED, plan).verdict == "REFUTED"


def test_nothing_is_hidden_by_renaming() -> None:
    """Names of intermediate tensors are claims too: a plan without them gets the same verdicts."""
    plan = tree(MLP)
    for f in plan["full_tensors"].values():
        if not (f["is_param"] or f["name"] == "data"):
            f["name"] = "t"
    assert judged(MLP, plan).verdict == "PROVED"
    old_activations(plan)
    report = judged(MLP, plan)
    assert report.verdict == "REFUTED"
    assert any("it takes t of micro-batch 0" in m for m in messages(report))
