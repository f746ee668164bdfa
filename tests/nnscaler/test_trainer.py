"""The end of the step: optimizer, clipping and ZeRO complete a plan; a completion with one thing wrong in it is refuted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from nnscaler.plans import judged, tree
from trainverify.completion.optimizers import SGD, AdamW
from trainverify.files.errors import FileError
from trainverify.graph.lineage import Layout, Part, Parts, Pattern, Run
from trainverify.graph.plan import Plan
from trainverify.graph.program import Op, Program, Ref
from trainverify.nnscaler import Trainer, parse, plan, program
from trainverify.nnscaler.trainer import optimizer_of
from trainverify.ops import OPS
from trainverify.report import Report
from trainverify.verdicts import verify

MLP = "mlp2l_v08_dp2pp2tp2nm2"
RANDOM = "mlp4b_v08_dp2pp1tp2nm1_rand1"
LLAMA = "llama1l_v03_dp2pp2tp2nm2"
ZERO = Trainer(optimizer=AdamW(lr=3e-3, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.1), clip=0.7, zero=1)


def made(name: str, trainer: Trainer = ZERO) -> tuple[Program, Plan]:
    return program(parse(tree(name.split("_dp")[0] + "_single"), "one"), OPS, trainer), plan(parse(tree(name), "plan"), OPS, trainer).plan


@pytest.mark.parametrize("name", [MLP, RANDOM, "mlp4b_v08_dp2pp2tp1nm4_zero", LLAMA])
def test_zero(name: str) -> None:
    report = judged(name, trainer=ZERO)
    assert report.verdict == "PROVED"
    weights = [f["name"] for f in tree(name.split("_dp")[0] + "_single")["full_tensors"].values() if f["is_param"] and not f["is_grad"]]
    wanted = {f"updated {kind}" for w in weights for kind in (f"parameter {w}", f"state {w}.m", f"state {w}.v")}
    assert wanted | {"loss", "metric grad_norm", "metric clip_factor"} <= {o.name for o in report.obligations}
    assert any(a.startswith("completed: ZeRO in 1 group: a rank keeps state of") for a in report.assumptions)
    assert "completed: the trainer updates with AdamW, gradients clipped at 0.7" in report.assumptions


def test_where_state_lives() -> None:
    _, local = made(LLAMA)
    found = {(lay.logical, lay.where): str(lay.form) for lay in local.lineage}
    assert found["layers.0.feed_forward.w1.weight.m", (("pp", 1),)] == '"(tp dp d0) d1"'  # cut among tensor-parallel ranks, then replicas
    assert found["layers.0.attention.wq.weight.v", (("pp", 0),)] == '"(dp d0) d1"'
    assert found["layers.0.attention.wq.weight", (("pp", 0),)] == '"d0 d1"'
    shapes = {n: t.shape for tem in local.templates for n, t in tem.program.tensors.items()}
    assert (shapes["layers.0.attention.wq.weight"], shapes["layers.0.attention.wq.weight.m"]) == ((128, 128), (64, 128))


def test_state_of_a_weight_that_tensor_parallel_ranks_share() -> None:
    """Its reducer sums over replicas and devices: shards are cut among all of them."""
    _, local = made(RANDOM)
    assert '"(dp tp d0) d1"' in {str(lay.form) for lay in local.lineage if lay.logical.endswith(".m")}


def test_groups() -> None:
    """Two groups of two ranks: each group has all of the state."""
    grouped = replace(ZERO, zero=2)
    assert judged(RANDOM, trainer=grouped).verdict == "PROVED"
    with pytest.raises(FileError, match="ZeRO in 3 groups: 4 ranks share layers"):
        made(MLP, replace(ZERO, zero=3))
    _, local = made(MLP, replace(ZERO, zero=4))  # groups of one rank
    moments = [lay.form for lay in local.lineage if lay.logical.endswith(".m")]
    assert moments
    assert all(isinstance(form, Pattern) and "dp" not in form.text for form in moments)


# -- mistakes in the completion -------------------------------------------------------------------------------------------------


def changed(local: Plan, change: Callable[[Op], Op]) -> Plan:
    templates = tuple(replace(t, program=replace(t.program, ops=tuple(change(op) for op in t.program.ops))) for t in local.templates)
    return replace(local, templates=templates)


def named(suffix: str, change: Callable[[Op], Op]) -> Callable[[Op], Op]:
    return lambda op: change(op) if op.outputs and op.outputs[0].endswith(suffix) else op


def first_piece(local: Plan) -> Plan:
    """Every rank updates its piece with the gradient of the first one."""
    return changed(local, named(".clipped.shard", lambda op: op.with_attrs(start=0, stop=32)))


def own_gradient(local: Plan) -> Plan:
    """The update of a weight takes the gradient of the own replica."""
    taken: dict[str, str] = {op.outputs[0]: str(op.inputs[0]) for t in local.templates for op in t.program.ops if op.name == "all_reduce"}

    def change(op: Op) -> Op:
        return replace(op, inputs=(taken[str(op.inputs[0])], *op.inputs[1:])) if op.inputs and op.inputs[0] in taken else op

    return changed(local, named("layers.1.weight.clipped", change))


def not_clipped(local: Plan) -> Plan:
    """Pieces of gradients are taken before clipping."""
    ops = [op for t in local.templates for op in t.program.ops]
    whole = {op.outputs[0]: op.inputs[0] for op in ops if op.outputs and op.outputs[0].endswith(".clipped")}
    return changed(local, named(".clipped.shard", lambda op: replace(op, inputs=(whole[str(op.inputs[0])],))))


def another_step(local: Plan) -> Plan:
    return changed(local, lambda op: op.with_attrs(step=2) if op.name == "adamw" else op)


def norm_of_own_rank(local: Plan) -> Plan:
    """Squares are not added up over ranks."""

    def change(op: Op) -> Op:
        return replace(op, name="identity", attrs=()) if op.outputs == ("squares",) else op

    return changed(local, change)


def shards_exchanged(local: Plan) -> Plan:
    """The state that a rank is said to have is that of another rank's piece."""
    lineage = []
    for lay in local.lineage:
        if lay.logical == "layers.0.weight.m":
            pieces = {0: 3, 1: 2, 4: 1, 5: 0}
            parts = [(r, (Part((0, 0), (Run(32 * n, 32), Run(0, 128))),)) for r, n in pieces.items()]
            lay = Layout(lay.logical, lay.local, Parts(tuple(parts)))
        lineage.append(lay)
    return replace(local, lineage=tuple(lineage))


WRONG: list[tuple[Callable[[Plan], Plan], str]] = [
    (first_piece, "updated parameter layers.0.weight"),
    (own_gradient, "updated parameter layers.1.weight"),
    (not_clipped, "updated parameter layers.0.weight"),
    (another_step, "updated parameter layers.0.weight"),
    (norm_of_own_rank, "metric grad_norm"),
    (shards_exchanged, "updated state layers.0.weight.m"),
]


@pytest.mark.parametrize(("change", "first"), WRONG, ids=[c.__name__ for c, _ in WRONG])
def test_mistakes(change: Callable[[Plan], Plan], first: str) -> None:
    logical, local = made(MLP)
    broken = change(local)
    assert broken != local
    report: Report = verify(logical, broken)
    assert report.verdict == "REFUTED"
    wrong = [o.name for o in report.obligations if o.status == "different"]
    assert first in wrong
    assert "loss" not in wrong
    assert "gradient of layers.0.weight" not in wrong


def test_a_piece_that_is_not_gathered() -> None:
    logical, local = made(MLP)

    def change(op: Op) -> Op:
        return replace(op, name="identity", attrs=()) if op.name == "all_gather" and op.phase == "optimizer" else op

    report = verify(logical, changed(local, change))
    assert report.verdict == "INVALID"


def test_pieces_are_columns_over_ranks() -> None:
    """Where a rank's piece starts depends on its device and its replica."""
    _, local = made(MLP)
    (template,) = (t for t in local.templates if 0 in t.ranks)
    cut = next(op for op in template.program.ops if op.outputs[:1] == ("layers.0.weight.shard",))
    start = dict(cut.attrs)["start"]
    assert isinstance(start, Ref)
    assert dict(zip(template.ranks, template.bindings[start.name], strict=True)) == {0: 0, 1: 32, 4: 64, 5: 96}


# -- what the user says of the optimizer ------------------------------------------------------------------------------------------


def test_optimizers() -> None:
    assert optimizer_of(None) is None
    assert optimizer_of("sgd", momentum=None, weight_decay=0.3) == SGD(lr=0.1, momentum=0.9, weight_decay=0.3)
    assert optimizer_of("adamw", lr=0.2, beta1=0.5, beta2=0.6, eps=0.1, weight_decay=0.0) == AdamW(0.2, 0.5, 0.6, 0.1, 0.0)
    for name, wish, said in (
        ("lion", {}, "--optimizer lion: sgd or adamw"),
        ("sgd", {"beta1": 0.9}, "--beta1: sgd has no such parameter"),
        (None, {"weight_decay": 0.1}, "--weight-decay: without --optimizer"),
    ):
        with pytest.raises(ValueError, match=said):
            optimizer_of(name, **wish)
