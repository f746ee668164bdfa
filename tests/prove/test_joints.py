"""Shards that do not align with heads: three heads of 4 rows on a rank, gathered from shards of 6 or of 3 rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

import trainverify as tv
from prove.meaning import system_of
from trainverify.axes.system import System
from trainverify.build.plan import RankBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.lineage import Layout, Partial, Placement, Placements, Shard
from trainverify.graph.plan import Plan, units
from trainverify.graph.program import Program
from trainverify.prove.algebra.engine import prove
from trainverify.prove.joints import Joint, cut
from trainverify.prove.propose.joints import joints
from trainverify.verdicts import budgets
from trainverify.verdicts.prepared import related, single

ADAM = tv.AdamW(lr=0.01)
CLIP = 0.5


def logical() -> Program:
    """A norm's weight, six heads of 4, each with a softmax of its own, and a projection; clipped."""
    b = tv.program("heads")
    x, t = b.input("x", (8, 5)), b.input("t", (8, 3))
    g, w, o = b.parameter("g", (5,)), b.parameter("w", (24, 5)), b.parameter("o", (3, 24))
    heads = b.reshape(b.linear(b.mul(x, g, name="n"), w, name="y"), shape=(8, 6, 4), name="y.heads")
    a = b.reshape(b.softmax(heads, dim=2, name="a"), shape=(8, 24), name="a.rows")
    e = b.sub(b.linear(a, o, name="z"), t, name="e")
    b.loss(b.mean(b.mul(e, e, name="sq"), name="loss"))
    return tv.complete(b.build(), ADAM, clip=CLIP)


def flipped(r: RankBuilder, x: Tensor, n: int) -> Tensor:
    """Pieces of n rows, the last first."""
    pieces = [r.slice(x, dim=0, start=i, stop=i + n) for i in range(0, x.shape[0], n)]
    return r.concat(*reversed(pieces), dim=0, name=f"{x.name}.wrong")


def multiplied(r: RankBuilder, x: Tensor, w: Tensor, mistake: str) -> Tensor:
    """A column-parallel layer of which FSDP has the weight: gathered for the forward pass, and again for the backward pass."""
    group = "tp" if mistake == "gathered along the other axis" else "dp"
    n = w.shape[0]

    def whole(when: str) -> Tensor:
        rows = r.all_gather(w, group=group, dim=0, name=f"w.{when}")
        if mistake == f"another order {when}":
            return flipped(r, rows, n)
        if mistake == "a piece twice":
            first = r.slice(rows, dim=0, start=0, stop=n)
            return r.concat(first, r.slice(rows, dim=0, start=0, stop=rows.shape[0] - n), dim=0, name=f"{rows.name}.wrong")
        return rows

    def backward(dy: Tensor) -> list[Tensor]:
        dx = r.matmul(dy, whole("backward"), name="n.copy.grad")
        dw = r.matmul(r.permute(dy, dims=(1, 0)), x, name="w.summand")
        if mistake == "scattered in another order":
            dw = flipped(r, dw, n)
        if mistake == "own rows of the own gradient":
            return [dx, r.own_block(dw, group="dp", dim=0, name="w.grad.own")]
        return [dx, r.reduce_scatter(dw, group="dp", dim=0, op="avg" if mistake == "averaged" else "sum", name="w.grad.own")]

    (y,) = r.by_hand([x, w], lambda: [r.matmul(x, r.permute(whole("forward"), dims=(1, 0)), name="y")], backward)
    return y


def plan(dp: int, mistake: str = "") -> Plan:
    p = tv.plan("heads", tv.Mesh(dp=dp, tp=2))
    with p.ranks() as r:
        x, t = r.input("x", (8 // dp, 5), "(dp b) k"), r.input("t", (8 // dp, 3), "(dp b) o")
        g, w, o = r.parameter("g", (5,), "k"), r.parameter("w", (12 // dp, 5), "(tp dp o) k"), r.parameter("o", (3, 12), "o (tp h)")
        n = r.mul(x, g, name="n")
        if mistake != "norm gradients are not added over tp":
            n = r.copy(n, "tp", name="n.copy")
        y = multiplied(r, n, w, mistake)
        heads = r.reshape(y, shape=(8 // dp, *((4, 3) if mistake == "four heads of 3" else (3, 4))), name="y.heads")
        a = r.reshape(r.softmax(heads, dim=2, name="a"), shape=(8 // dp, 12), name="a.rows")
        z = r.all_reduce(r.linear(a, o, name="z.part"), group="tp", backward="identity", name="z")
        e = r.sub(z, t, name="e")
        loss = r.div(r.sum(r.mul(e, e, name="sq"), name="loss.sum"), value=24, name="loss.local")
        r.backward(loss)
        r.loss(r.all_reduce(loss, group="dp", name="loss"))
        updated(r, {q: r.gradient(q) if q is w else r.all_reduce(r.gradient(q), group="dp") for q in (g, w, o)}, mistake)
    return p.build()


def updated(r: RankBuilder, grads: dict[Tensor, Tensor], mistake: str) -> None:
    """The norm of all gradients, each shard once, and the update."""
    r.phase = "optimizer"
    squares = []
    for q, grad in grads.items():
        axes = {"g": (), "w": ("dp", "tp"), "o": ("tp",)}[q.name]
        square = r.sum(r.mul(grad, grad))
        axes = ("tp",) if mistake == "the norm of own shards" and axes else axes
        squares.append(r.all_reduce(square, group=axes) if axes else square)
    norm = r.sqrt(r.add(r.add(squares[0], squares[1]), squares[2]), name="norm")
    factor = r.clip_factor(norm, max_norm=CLIP, name="factor")
    r.metric("grad_norm", norm)
    r.metric("clip_factor", factor)
    for q, grad in grads.items():
        r.output(grad, "gradient", q.name)
        r.optimizer(ADAM, q, r.mul(grad, factor, name=f"{q.name}.grad.clipped"))


@pytest.mark.parametrize("dp", [2, 4])
def test_proved(dp: int) -> None:
    report = tv.verify(logical(), plan(dp), points=1)
    assert report.verdict == "PROVED", report.reason
    assert {o.engine for o in report.obligations} == {"algebra, cut"}
    assert any(n.startswith("both programs are cut at 2 tensors") for n in report.notes)


def test_evaluated_on_some_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """PROVED where few ranks of a large plan are evaluated: sums over all of them are not."""
    monkeypatch.setattr(budgets, "MAX_ELEMENTS", 10)
    monkeypatch.setattr("trainverify.verdicts.at_joints.evaluable", lambda _: False)
    report = tv.verify(logical(), plan(4), points=1)
    assert report.verdict == "PROVED", report.reason
    assert "random evaluation of the cut programs agrees" in report.reason
    assert "1 claims about sums over ranks are proved and not evaluated" in report.notes
    assert len(report.obligations) == len(tv.verify(logical(), plan(2), points=1).obligations)


MISTAKES = [
    "another order forward",
    "another order backward",
    "gathered along the other axis",
    "a piece twice",
    "scattered in another order",
    "own rows of the own gradient",
    "averaged",
    "norm gradients are not added over tp",
    "four heads of 3",
    "the norm of own shards",
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_refuted(mistake: str) -> None:
    assert tv.verify(logical(), plan(2, mistake), points=1).verdict == "REFUTED"


def forged(system: System, wrong: bool) -> list[Joint]:
    """The joints of the right plan, in another one: before a mistake, or after it."""
    right, _ = system_of(logical(), plan(2))
    found = {j.logical: j for j in joints(right)}
    assert [lay.local for lay in found["w"].layouts] == ["w.forward", "w.backward"]
    assert [lay.local for lay in found["w.grad"].layouts] == ["w.summand"]
    made = {o for op in system.unit_programs[0].ops for o in op.outputs}
    return [
        replace(j, layouts=tuple(replace(x, local=f"{x.local}.wrong") if wrong and f"{x.local}.wrong" in made else x for x in j.layouts))
        for j in found.values()
    ]


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("mistake", ["", *MISTAKES])
def test_proposals_are_not_believed(mistake: str, wrong: bool) -> None:
    """With the joints of the right plan something is not proved of a wrong one, wherever it is cut."""
    system, _ = system_of(logical(), plan(2, mistake))
    found = cut(system, forged(system, wrong))
    assert found is not None
    wanted = [*found.wanted, *found.claims]
    proof = prove(related(found.logical, found.plan, system.table, units(found.plan), wanted), wanted)
    assert bool(proof.failed) == bool(mistake)


def test_the_claims_are_what_fails() -> None:
    """A tensor that is not the gathered weight is used as if it were: of the rest everything is proved."""
    system, _ = system_of(logical(), plan(2, "another order forward"))
    found = cut(system, forged(system, True))
    assert found is not None
    wanted = [*found.wanted, *found.claims]
    proof = prove(related(found.logical, found.plan, system.table, units(found.plan), wanted), wanted)
    assert [str(o) for o in proof.failed] == ["declared lineage of w"]


SUM: Placement = Partial("sum")


def summands(mesh: tv.Mesh, axes: tuple[tuple[str, Placement], ...], **where: int) -> bool:
    """Whether both programs may be cut where ranks have summands as placements say."""
    b = tv.program("sum")
    x = b.input("x", (4, 6))
    b.metric("m", b.mul(b.mul(x, x, name="s"), value=2, name="t"))
    p = tv.plan("sum", mesh)
    with p.ranks() as r:
        y = r.input("x", (4, 6), "i j")
        r.metric("m", r.mul(r.mul(y, y, name="s"), value=2, name="t"))
    system, _ = system_of(b.build(), p.build())
    joint = Joint("s", (Layout("s", "s", Placements(axes), tuple(where.items())),), frozenset({1}))
    return cut(system, [joint]) is not None


def test_copies_of_a_summand() -> None:
    """Only their sum is shown: copies of a summand might differ, and are no joint."""
    assert summands(tv.Mesh(dp=2), (("dp", SUM),))
    assert summands(tv.Mesh(dp=2, one=1), (("dp", SUM),))
    assert summands(tv.Mesh(dp=2, tp=3), (("dp", SUM), ("tp", SUM)))
    assert not summands(tv.Mesh(dp=2, tp=3), (("dp", SUM),))
    assert not summands(tv.Mesh(dp=2, tp=3), (("dp", SUM), ("tp", Partial("avg"))))
    assert not summands(tv.Mesh(dp=2, tp=3), (("dp", SUM),), tp=0)  # not all ranks of the program
    assert not summands(tv.Mesh(dp=2), (("dp", Shard(0)),))  # of another shape


def test_what_may_be_infinite() -> None:
    """1/x is infinite where x is 0, and 1/(1 + 1/x) is 0 there: a new input in place of 1/x is always a number."""
    for infinite in (True, False):
        b = tv.program("inverse")
        s = b.reciprocal(b.input("x", (4,), domain="nonnegative"), name="s")
        more = b.add(s, value=1, name="more")
        b.metric("m", b.reciprocal(more, name="t") if infinite else b.mul(more, value=2, name="t"))
        program = b.build()
        system, _ = system_of(program, single(program))
        joint = Joint("s", (Layout("s", "s", Placements(())),), frozenset({1}))
        assert (cut(system, [joint]) is None) == infinite
