"""Literals that may count what is reduced: a right plan is never refuted because of one, a wrong one is, whatever it counts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest

import trainverify as tv
from trainverify.evaluate.compare import compare
from trainverify.evaluate.other_sizes import OtherSizes
from trainverify.evaluate.readings import Readings, _factors
from trainverify.evaluate.run import random_inputs
from trainverify.evaluate.sample import ALL
from trainverify.evaluate.small import shrink_system
from trainverify.evaluate.varied import Varied
from trainverify.graph.obligations import Obligation, obligations
from trainverify.graph.plan import units
from trainverify.mutate.mutations import mutate
from trainverify.ops import OPS
from trainverify.verdicts import related
from trainverify.zoo.parallel import Degrees
from trainverify.zoo.recipes import Wish

ROWS, WIDTH = 4096, 2048


def steps(count: Any, wrong: bool = False) -> tuple[tv.Program, tv.Plan]:
    """A mean over 4096 rows, on each of two ranks the sum over its own divided by a number. A running sum along the width has no value on
    classes, the maximum no law in the algebra, and there are more than four million elements."""

    def body(b: Any, x: Any, w: Any, plan: bool) -> Any:
        run = b.cumsum(b.mul(x, w), dim=1)
        if not plan:
            return b.relu(run)
        return b.maximum(run, b.mul(run, value=0.25 if wrong else 0))

    b = tv.program("step")
    x, w = b.input("x", (ROWS, WIDTH)), b.parameter("w", (WIDTH,))
    b.loss(b.mean(b.sum(body(b, x, w, False), dim=1), name="loss"))
    p = tv.plan("step", tv.Mesh(dp=2))
    with p.ranks() as r:
        x, w = r.input("x", (ROWS // 2, WIDTH), "(dp b) k"), r.parameter("w", (WIDTH,), "k")
        own = r.mul(r.sum(r.sum(body(r, x, w, True), dim=1)), value=count, name="literal 0")
        r.backward(own)
        r.phase = "optimizer"
        r.loss(r.all_reduce(own, group="dp"))
        grad = r.all_reduce(r.gradient(w), group="dp")
        r.output(grad, "gradient", "w")
        r.update(w, r.sgd(w, grad, lr=0.5))
    return tv.complete(b.build(), tv.SGD(lr=0.5)), p.build()


@pytest.mark.parametrize("count", [Fraction(1, ROWS), 1 / ROWS])
def test_a_right_count_is_not_refuted(count: Any) -> None:
    """Expected: UNKNOWN, since no law covers the maximum; not REFUTED, although the numbers differ at reduced sizes."""
    report = tv.verify(*steps(count))
    assert report.verdict == "UNKNOWN", report.reason


@pytest.mark.parametrize("count", [Fraction(1, ROWS // 2), 1 / (ROWS + 1), Fraction(1, 3)])
def test_a_wrong_count_is_refuted(count: Any) -> None:
    """Expected: REFUTED: no reading of it gives the mean."""
    report = tv.verify(*steps(count))
    assert report.verdict == "REFUTED", report.reason
    assert report.reason.startswith("loss differs")


def test_another_mistake_is_refuted_whatever_a_literal_counts() -> None:
    """Expected: REFUTED: a slope of 1/4 where there should be none, in every reading of 1/4096."""
    report = tv.verify(*steps(Fraction(1, ROWS), wrong=True))
    assert report.verdict == "REFUTED", report.reason
    assert any("however literals that may count are read" in n for n in report.notes), report.notes


def test_without_another_size_there_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: UNKNOWN: a mistake that is there at one size, while no size fits at which literals could be read otherwise."""
    monkeypatch.setattr(OtherSizes, "_small", lambda *_: None)
    report = tv.verify(*steps(Fraction(1, ROWS), wrong=True))
    assert report.verdict == "UNKNOWN", report.reason
    assert "may count" in report.reason


@pytest.mark.parametrize("wrong", [False, True])
def test_readings_together_are_the_same_as_one_by_one(wrong: bool) -> None:
    """A literal that a point gives, several points in one go, fails where the literal itself does: a right plan in one of two readings."""
    logical, plan = steps(Fraction(1, ROWS), wrong)
    parts = units(plan)
    wanted, _ = obligations(logical, plan, parts)
    system = related(logical, plan, OPS, parts, wanted)
    readings = Readings(system, shrink_system(system, base=3, own_counts=True))
    every = readings.every(frozenset().union(*map(readings.of, wanted)))
    assert every is not None
    assert len(every) == 2
    given = readings.given(readings.small, every[0])
    assert given is not None
    inputs = random_inputs(readings.small, 7)
    varied = Varied(given, plan.lineage, wanted, list(readings.scalars(every[0])))
    together = [set(gaps or ()) for gaps in varied.at(inputs, [readings.scalars(r) for r in every])]
    assert together == [{s.obligation for s in compare(readings.read(readings.small, r), plan.lineage, wanted, [7])[0][0]} for r in every]
    assert [bool(failing) for failing in together].count(False) == (0 if wrong else 1)


def beside_a_mean(count: Any, wrong: bool = False) -> tuple[tv.Program, tv.Plan]:
    """The same loss without gradients, and a mean as metric, which the algebra shows, divided in one line."""

    def divided(r: Any, x: Any) -> Any:
        return r.mul(x, value=count)

    b = tv.program("step")
    x = b.input("x", (ROWS, WIDTH))
    b.metric("mean", b.mean(b.sum(x, dim=1)))
    b.loss(b.mean(b.sum(b.relu(b.cumsum(x, dim=1)), dim=1), name="loss"))
    p = tv.plan("step", tv.Mesh(dp=2))
    with p.ranks() as r:
        x = r.input("x", (ROWS // 2, WIDTH), "(dp b) k")
        r.metric("mean", r.all_reduce(divided(r, r.sum(r.sum(x, dim=1))), group="dp"))
        run = r.cumsum(x, dim=1)
        most = r.maximum(run, r.mul(run, value=0.25 if wrong else 0))
        r.loss(r.all_reduce(divided(r, r.sum(r.sum(most, dim=1))), group="dp"))
    return b.build(), p.build()


def other_sizes(logical: tv.Program, plan: tv.Plan, proved: Sequence[str]) -> tuple[OtherSizes, Readings, dict[str, Obligation]]:
    parts = units(plan)
    wanted, _ = obligations(logical, plan, parts)
    system = related(logical, plan, OPS, parts, wanted)
    named = {str(o): o for o in wanted}
    sizes = OtherSizes(system, plan.lineage, ALL, 0, 1 << 40, lambda _: None, [named[n] for n in proved])
    return sizes, Readings(system, shrink_system(system, base=3, own_counts=True)), named


def test_what_is_proved_says_how_literals_are_read() -> None:
    """1/4096 in a mean that is proved counts rows: that it stays as it is need not be tried. A proof of what is asked about says nothing,
    and where what is proved fails in every reading, none is taken for the one that is meant."""
    pair = beside_a_mean(Fraction(1, ROWS))
    sizes, readings, named = other_sizes(*pair, [])
    assert (every := sizes._readings(readings, [named["loss"]], 0)) is not None
    assert [set(r.values()) for r in every] == [{1}, {Fraction(ROWS, 6)}]
    sizes, readings, named = other_sizes(*pair, ["metric mean"])
    assert sizes._readings(readings, [named["loss"]], 0) == every[1:]
    assert sizes._readings(readings, [named["metric mean"]], 0) == every
    sizes, readings, named = other_sizes(*beside_a_mean(Fraction(3, ROWS)), ["metric mean"])
    assert sizes._readings(readings, [named["loss"]], 0) == []
    assert sizes.everywhere([named["loss"]], 0) == set()


@pytest.mark.parametrize("wrong", [False, True])
def test_beside_what_is_proved(wrong: bool) -> None:
    """Expected: UNKNOWN for a right plan, as no law covers the maximum; REFUTED for a wrong one, though the mean beside it is proved."""
    report = tv.verify(*beside_a_mean(Fraction(1, ROWS), wrong))
    assert report.verdict == ("REFUTED" if wrong else "UNKNOWN"), report.reason
    assert {x.name: x.status for x in report.obligations}["metric mean"] == "proved"


def test_integers_are_read_one_by_one() -> None:
    logical, plan = steps(2048)
    parts = units(plan)
    wanted, _ = obligations(logical, plan, parts)
    system = related(logical, plan, OPS, parts, wanted)
    readings = Readings(system, shrink_system(system, base=3, own_counts=True))
    assert readings.ways
    assert readings.given(readings.small, readings.ways) is None


EXPERTS = Wish("deepseek-671b", how=Degrees(dp=32, tp=8, ep=8, pp=2, microbatches=2, zero=1), layers=4)
DENSE = Wish("llama3-405b", how=Degrees(dp=64, tp=8, pp=4, microbatches=2, zero=1), layers=4)


@pytest.mark.long
@pytest.mark.parametrize(("wish", "seed"), [(EXPERTS, 5020), (EXPERTS, 5091), (DENSE, 2000)])
def test_mutants_at_full_size(wish: Wish, seed: int) -> None:
    """Expected: REFUTED: in each of 220 readings of 32 (ranks, or a part of more) and 1/4096; labels of which none is ignored at
    one size."""
    logical, plan = wish.build()
    report = tv.verify(logical, mutate(plan, random.Random(seed)).plan, fail_fast=True)
    assert report.verdict == "REFUTED", report.reason


def test_ways_to_read_a_literal() -> None:
    counts = {4096: {3}, 512: {2, 5}, 8: {4}}
    assert _factors(Fraction(1, 4096), counts) == {
        Fraction(4096, 3),
        Fraction(512, 2),
        Fraction(512, 5),
        Fraction(8 * 512, 4 * 2),
        Fraction(8 * 512, 4 * 5),
    }
    assert _factors(8, counts) == {Fraction(4, 8)}
    assert _factors(7.0, counts) == {Fraction(3, 7)}  # one less than 8
    assert _factors(0.3, counts) == set()
    assert _factors(0.3 / 4096, counts) == {Fraction(4096, 3)}
    assert _factors(1, counts) == set()


def per_channel(divided: Callable[[Any, Any, Any], Any]) -> tv.Program:
    """What a batch norm averages: all rows and places of each of 17 channels."""
    b = tv.program("channels")
    x, w = b.input("x", (8192, 17, 1000)), b.input("w", (17,))
    mean = divided(b, x, b.sum(b.square(x), dim=(0, 2), name="s"))
    b.loss(b.sum(b.mul(mean, w), name="loss"))
    return b.build()


def by_ones(b: Any, x: Any, s: Any) -> Any:
    return b.div(s, b.sum(b.full(shape=x.shape, value=1.0), dim=(0, 2), name="n"))


def by_literal(count: Any) -> Callable[[Any, Any, Any], Any]:
    return lambda b, x, s: b.div(s, value=count)


def test_a_count_of_dimensions_that_are_apart() -> None:
    """Expected: PROVED, and no internal error; REFUTED with another count; not REFUTED if the count is rounded."""
    assert tv.verify(per_channel(by_literal(8192 * 1000)), per_channel(by_ones), points=1).verdict == "PROVED"
    assert tv.verify(per_channel(by_ones), per_channel(by_literal(8192 * 1000)), points=1).verdict == "PROVED"
    assert tv.verify(per_channel(by_ones), per_channel(lambda b, x, s: b.mul(s, value=1 / 8192000)), points=1).verdict == "UNKNOWN"
    assert tv.verify(per_channel(by_ones), per_channel(by_literal(8192 * 17)), points=1).verdict == "REFUTED"


def repeated(scaled: Callable[[Any, Any], Any], turned: bool = False) -> tv.Program:
    """8192 equal rows, added up; beside it so many numbers that nothing is run at full size."""
    b = tv.program("rows")
    x, w, more = b.input("x", (1000,)), b.input("w", (1000,)), b.input("more", (8192, 1000))
    w = b.flip(w, dims=(0,)) if turned else w
    b.loss(b.sum(b.add(b.mul(scaled(b, x), w), b.sum(more, dim=0)), name="loss"))
    return b.build()


def added(b: Any, x: Any) -> Any:
    return b.sum(b.expand(b.unsqueeze(x, dim=0), shape=(8192, 1000)), dim=0)


def in_two(first: float, second: float) -> Callable[[Any, Any], Any]:
    return lambda b, x: b.mul(b.mul(x, value=first), value=second)


def by_a_root(b: Any, x: Any) -> Any:
    """√8192·√8192: not equal by a unit in the last place."""
    return b.mul(b.mul(x, value=8192**0.5), value=8192**0.5)


def test_a_count_in_two_literals() -> None:
    """Expected: PROVED, and no internal error: 64·128 counts 8192 rows, of which reduced sizes have fewer; classes of positions agree."""
    assert tv.verify(repeated(added), repeated(in_two(64.0, 128.0)), points=1).verdict == "PROVED"
    assert tv.verify(repeated(added), repeated(by_a_root), points=1).verdict == "UNKNOWN"
    assert tv.verify(repeated(added), repeated(in_two(64.0, 129.0)), points=1).verdict == "REFUTED"


def test_an_exchange_that_classes_do_not_see_is_refuted() -> None:
    """Expected: REFUTED at reduced sizes: where every input is one number, both programs agree there."""
    report = tv.verify(repeated(in_two(64.0, 128.0)), repeated(in_two(64.0, 128.0), turned=True), points=1)
    assert report.verdict == "REFUTED"
    assert "at reduced sizes" in report.notes[0]
