"""`p.ranks(...)`: which ranks run a program, and on which of them the lineage declared in it holds."""

from __future__ import annotations

import itertools

import pytest

import trainverify as tv
from trainverify.build.plan import RankBuilder, boxes
from trainverify.build.tape import BuildError
from trainverify.ops import OPS

MESH = tv.Mesh(dp=2, tp=3)


def model() -> tv.Program:
    b = tv.program("model")
    x, w = b.input("x", (10, 7)), b.parameter("w", (7,))
    b.loss(b.sum(b.square(b.mul(x, w, name="y"), name="sq"), name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.5))


def step(r: RankBuilder, suffix: str, op: str = "sum") -> None:
    """Tensors of every program have names of their own: lineage on other ranks is lineage of nothing."""
    x, w = r.input("x" + suffix, (5, 7), "(dp b) k", "x"), r.parameter("w" + suffix, (7,), "k", "w")
    loss = r.sum(r.square(r.mul(x, w, name="y"), name="sq"), name="loss.local")
    r.backward(loss)
    r.loss(r.all_reduce(loss, group="dp", name="loss"))
    grad = r.all_reduce(r.gradient(w), group="dp", op=op, name="w.grad.sum")
    r.output(grad, "gradient", "w" + suffix)
    r.update(w, r.sgd(w, grad, lr=0.5, name="w.new"))


def plan(*programs: tuple[int, ...], op: str = "sum") -> tv.Plan:
    p = tv.plan("plan", MESH)
    for ranks in programs:
        with p.ranks(*ranks) as r:
            step(r, str(ranks[0]), op)
    return p.build()


PROGRAMS = {
    "one rank each": ((0,), (1,), (2,), (3,), (4,), (5,)),
    "ranks in any order": ((5, 0), (4, 1), (3, 2)),
    "no box of the mesh": ((0, 1, 5), (2, 3, 4)),
    "all but one": ((0, 1, 2, 4, 5), (3,)),
    "all": ((0, 1, 2, 3, 4, 5),),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_proved(name: str) -> None:
    assert tv.verify(model(), plan(*PROGRAMS[name])).verdict == "PROVED"


@pytest.mark.parametrize("name", PROGRAMS)
def test_refuted(name: str) -> None:
    report = tv.verify(model(), plan(*PROGRAMS[name], op="avg"))
    assert report.verdict == "REFUTED"
    assert report.reason.startswith("gradient of w differs on rank 0; first wrong tensor: w.grad.sum")


def test_lineage_holds_on_these_ranks_only() -> None:
    lineage = plan((0, 1, 5), (2, 3, 4)).lineage
    held = {local: sorted(r for x in lineage if x.local == local for r in x.holders(MESH)) for local in ("x0", "w0", "x2", "w2")}
    assert held == {"x0": [0, 1, 5], "w0": [0, 1, 5], "x2": [2, 3, 4], "w2": [2, 3, 4]}


def test_boxes_are_the_ranks_each_once() -> None:
    mesh = tv.Mesh(a=2, b=2, c=3)
    for n in range(1, 13):
        for ranks in itertools.islice(itertools.combinations(range(12), n), 120):
            found = list(boxes(mesh, frozenset(ranks)))
            assert sorted(r for where in found for r in mesh.ranks(**where)) == list(ranks)
    assert list(boxes(mesh, frozenset(mesh.ranks(a=1)))) == [{"a": 1}]
    assert list(boxes(mesh, frozenset(mesh.ranks(c=2)))) == [{"c": 2}]
    assert list(boxes(mesh, frozenset((4,)))) == [{"a": 0, "b": 1, "c": 1}]


@pytest.mark.parametrize(
    ("numbers", "where", "reason"),
    [
        ((6,), {}, "mesh(dp=2, tp=3) has no rank 6"),
        ((-1,), {}, "mesh(dp=2, tp=3) has no rank -1"),
        ((2, 0, 2), {}, "rank 2 is given twice"),
        ((1,), {"dp": 0}, "ranks by their numbers, or by their coordinates, not both"),
        ((), {"dp": 2}, "mesh(dp=2, tp=3) has no dp=2"),
        ((), {"cp": 0}, "mesh(dp=2, tp=3) has no cp=0"),
    ],
)
def test_ranks_that_are_not_there(numbers: tuple[int, ...], where: dict[str, int], reason: str) -> None:
    p = tv.plan("plan", MESH)
    with pytest.raises(BuildError) as error, p.ranks(*numbers, **where):
        pass
    assert str(error.value) == reason


def test_no_attribute_of_a_builder_hides_an_operator() -> None:
    """`r.where(...)` is an op; what builders redefine on purpose takes more than an op does."""
    p = tv.plan("plan", MESH)
    with p.ranks() as r:
        hidden = [d.name for b in (r, tv.program("model")) for d in OPS if d.name in vars(b) or hasattr(type(b), d.name)]
    assert hidden == ["broadcast", "send", "recv"]
