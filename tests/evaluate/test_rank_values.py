"""One rank of thousands with a value of its own: told from the others, and refuted by both engines."""

from __future__ import annotations

from typing import Any, Literal

import pytest

import trainverify as tv
from trainverify.evaluate.rank_values import alike, told_apart
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.ops import OPS
from trainverify.verdicts import verify

RANKS = 8192


def step(lr: Any = 0.1, halved: int | None = None, dp: int = RANKS) -> tuple[Program, Plan]:
    """A linear model under data parallelism; the gradient is halved on the rank whose number is `halved`."""
    b = tv.program("l")
    x, w = b.input("x", (dp * 2, 5)), b.parameter("w", (3, 5))
    b.loss(b.sum(b.linear(x, w), name="loss"))
    p = tv.plan("p", tv.Mesh(dp=dp))
    with p.ranks() as r:
        x, w = r.input("x", (2, 5), "(dp b) k"), r.parameter("w", (3, 5), "o k")
        loss = r.sum(r.linear(x, w), name="loss.local")
        r.backward(loss)
        r.loss(r.all_reduce(loss, group="dp", name="loss"))
        g = r.all_reduce(r.gradient(w), group="dp", name="g")
        r.output(g, "gradient", "w")
        if halved is not None:
            number = r.full(shape=(), value=r.each_rank(lambda rank: rank), dtype="i64", name="number")
            hit = r.eq(number, r.full(shape=(), value=halved, dtype="i64", name="chosen"), name="hit")
            g = r.mul(g, r.where(hit, r.full(shape=(), value=0.5), r.full(shape=(), value=1.0), name="factor"), name="g.mine")
        r.update(w, r.sgd(w, g, lr=r.each_rank(lr) if callable(lr) else lr, name="w.new"))
    return tv.complete(b.build(), tv.SGD(lr=0.1)), p.build()


def odd_rate(rank: int) -> float:
    return 0.7 if rank == 4173 else 0.1


@pytest.mark.parametrize("engine", ["algebra", "smt"])
@pytest.mark.parametrize(("wrong", "tensor"), [({"lr": odd_rate}, "w.new"), ({"halved": 4173}, None)])
def test_one_wrong_rank_of_8192_is_refuted(engine: Literal["algebra", "smt"], wrong: dict[str, Any], tensor: str | None) -> None:
    report = verify(*step(**wrong), engine=engine, points=1)
    assert report.verdict == "REFUTED", report.reason
    assert report.reason.startswith("updated parameter w differs on rank 4173")
    assert report.place is not None
    assert report.place.rank == 4173
    assert tensor is None or report.place.tensor == tensor


def test_the_same_without_the_odd_rank_is_proved() -> None:
    assert verify(*step(lr=lambda rank: 0.1), points=1).verdict == "PROVED"
    report = verify(*step(halved=RANKS), engine="smt", points=1)
    assert report.verdict == "PROVED(reduced)", report.reason


def test_units_by_value() -> None:
    def ranks(**more: Any) -> list[int]:
        return [len(u.ranks) for u in told_apart(step(dp=70, **more)[1], OPS)]

    assert ranks() == [70]
    assert ranks(halved=41) == [69, 1] or ranks(halved=41) == [1, 69]
    assert ranks(halved=70) == [70]
    assert sorted(ranks(lr=lambda rank: 0.1 * (rank % 3 + 1))) == [23, 23, 24]
    assert ranks(lr=lambda rank: 0.1 * (rank + 1)) == [70]  # too many to tell apart …
    _, plan = step(dp=70, lr=lambda rank: 0.1 * (rank + 1))
    assert not alike(plan, told_apart(plan, OPS)[0], OPS)  # … so none stands for another


@pytest.mark.parametrize("number", [int, float])
def test_numbers_that_data_meets_make_ranks_different(number: type) -> None:
    """x·0 + rank == 77 is decided by no rank's integers alone, and true on one rank only."""
    p = tv.plan("met", tv.Mesh((("dp", 128),)))
    with p.ranks() as r:
        x = r.input("x", (3, 2), "(dp b) k")
        here = r.eq(r.add(r.mul(x, value=0.0), value=r.each_rank(lambda i: number(i))), value=77.0)
        r.loss(r.all_reduce(r.sum(r.mul(x, r.add(r.to(here, dtype="f32"), value=1.0))), group="dp", name="loss"))
    plan = p.build()
    (unit,) = told_apart(plan, OPS)
    assert not alike(plan, unit, OPS)


@pytest.mark.parametrize("number", [int, float])
def test_numbers_that_meet_constants_are_computed(number: type) -> None:
    p = tv.plan("met", tv.Mesh((("dp", 128),)))
    with p.ranks() as r:
        x = r.input("x", (3, 2), "(dp b) k")
        zero = r.full(shape=(), value=number(0), dtype="i64" if number is int else "f32")
        here = r.eq(r.add(zero, value=r.each_rank(lambda i: number(i))), value=number(77))
        r.loss(r.all_reduce(r.sum(r.mul(x, r.add(r.to(here, dtype="f32"), value=1.0))), group="dp", name="loss"))
    assert [77] in [list(u.ranks) for u in told_apart(p.build(), OPS)]


@pytest.mark.parametrize("engine", ["algebra", "smt"])
@pytest.mark.parametrize("odd", [None, 77])
def test_one_rank_of_128_that_permutes_otherwise(engine: Literal["algebra", "smt"], odd: int | None) -> None:
    """Too large to be evaluated with all ranks: the odd one is told from the others by its tuple."""
    b = tv.program("permuted")
    x, y = b.input("x", (128, 256, 256)), b.input("y", (128, 256, 256))
    b.loss(b.sum(b.mul(b.tanh(x), y), name="loss"))
    p = tv.plan("permuted", tv.Mesh(dp=128))
    with p.ranks() as r:
        x, y = r.input("x", (1, 256, 256), "(dp b) i j"), r.input("y", (1, 256, 256), "(dp b) i j")
        x = r.permute(x, dims=r.each_rank(lambda i: (0, 2, 1) if i == odd else (0, 1, 2)), name="moved")
        r.loss(r.all_reduce(r.sum(r.mul(r.tanh(x), y)), group="dp", name="loss"))
    report = verify(b.build(), p.build(), engine=engine, points=1)
    if odd is None:
        assert report.verdict == ("PROVED" if engine == "algebra" else "PROVED(reduced)")
    else:
        assert report.verdict == "REFUTED"
        assert report.place is not None
        assert (report.place.tensor, report.place.rank) == ("moved", odd)
