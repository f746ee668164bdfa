"""Conditions that fall one way at all random points: a plan that is wrong on the other side only is refuted, its right twin proved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import trainverify as tv
from trainverify.evaluate.conditions import Watching, conditions
from trainverify.evaluate.moved import Change, changed
from trainverify.graph.plan import Edit, Plan
from trainverify.graph.program import Domain, Program
from trainverify.primitives import node as F
from trainverify.report import Report
from trainverify.verdicts import verify

Tensors = Mapping[str, Any]
Body = Callable[[Any, Tensors], Any]


def pair(logical: Body, plan: Body) -> tuple[Program, Plan]:
    """y = f(x·wᵀ, …) and its sum: rows of x on two ranks."""
    b = tv.program("logical")
    given = {
        "x": b.input("x", (6, 3)),
        "mask": b.input("mask", (6, 5)),
        "count": b.input("count", (6, 5), "i64", ids=3000),
        "w": b.state("w", (5, 3)),
        "s": b.state("s", ()),
    }
    y = logical(b, given | {"h": b.linear(given["x"], given["w"], name="h")})
    b.loss(b.sum(y, name="loss"))
    p = tv.plan("plan", tv.Mesh(dp=2))
    with p.ranks() as r:
        local = {
            "x": r.input("x", (3, 3), "(dp b) k"),
            "mask": r.input("mask", (3, 5), "(dp b) o"),
            "count": r.input("count", (3, 5), "(dp b) o", "count", "i64", ids=3000),
            "w": r.state("w", (5, 3), "o k"),
            "s": r.state("s", (), ""),
        }
        y = plan(r, local | {"h": r.linear(local["x"], local["w"], name="h")})
        r.loss(r.all_reduce(r.sum(y, name="part"), group="dp", name="loss"))
    return b.build(), p.build()


def clamped(t: Any, g: Tensors) -> Any:
    return t.clamp(g["h"], max=50.0, name="y")


def plain(t: Any, g: Tensors) -> Any:
    return t.mul(g["h"], value=1.0, name="y")


def raised(t: Any, g: Tensors) -> Any:
    return t.relu(t.add(g["h"], value=40.0), name="y")


def only_raised(t: Any, g: Tensors) -> Any:
    return t.mul(t.add(g["h"], value=40.0), value=1.0, name="y")


def bounded(t: Any, g: Tensors) -> Any:
    return t.maximum(g["h"], t.full(shape=g["h"].shape, value=-30.0), name="y")


def doubled_above(t: Any, g: Tensors) -> Any:
    return t.where(t.gt(g["h"], value=25.0, name="above"), t.mul(g["h"], value=2.0), g["h"], name="y")


def counted(t: Any, g: Tensors) -> Any:
    return t.add(g["h"], t.float(t.ge(g["h"], value=17.0, name="large")), name="y")


def away_from(t: Any, g: Tensors) -> Any:
    return t.abs(t.add(g["h"], value=30.0), name="y")


def only_moved(t: Any, g: Tensors) -> Any:
    return t.mul(t.add(g["h"], value=30.0), value=1.0, name="y")


def faint(t: Any, g: Tensors) -> Any:
    """The other side is near zero."""
    small = t.lt(t.abs(g["h"]), value=1e-5, name="small")
    return t.where(small, t.mul(g["h"], value=3.0), g["h"], name="y")


def masked(t: Any, g: Tensors) -> Any:
    """A mask of real numbers: 0 is on the other side."""
    return t.where(g["mask"], g["h"], t.mul(g["h"], value=2.0), name="y")


def two_conditions(t: Any, g: Tensors) -> Any:
    """Each falls both ways, but they never hold together."""
    both = t.logical_and(t.gt(g["h"], value=6.0, name="one"), t.lt(g["mask"], value=-8.0, name="other"), name="both")
    return t.where(both, t.mul(g["h"], value=2.0), g["h"], name="y")


def by_id(t: Any, g: Tensors) -> Any:
    """The last one of many ids."""
    return t.where(t.ge(g["count"], value=2999, name="last"), t.mul(g["h"], value=2.0), g["h"], name="y")


def by_state(t: Any, g: Tensors) -> Any:
    """Warm-up: a number that only state decides."""
    return t.where(t.gt(g["s"], value=7.0, name="warm"), t.mul(g["h"], value=2.0), g["h"], name="y")


WRONG: dict[str, tuple[Body, Body]] = {
    # the right body, and one that differs from it on the side that no random point reaches
    "clamp": (clamped, plain),
    "clamp in the plan only": (plain, clamped),
    "relu": (raised, only_raised),
    "maximum": (bounded, plain),
    "where": (doubled_above, plain),
    "comparison": (counted, plain),
    "absolute value": (away_from, only_moved),
    "near zero": (faint, plain),
    "mask of real numbers": (masked, plain),
    "two conditions at once": (two_conditions, plain),
    "id": (by_id, plain),
    "state": (by_state, plain),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_on_the_other_side_only(name: str) -> None:
    """Expected: REFUTED, at a point that the report describes."""
    report = verify(*pair(*WRONG[name]))
    assert report.verdict == "REFUTED", (report.reason, report.notes)
    assert any(n.startswith("counterexample: random inputs of seed 0, ") for n in report.notes), report.notes


@pytest.mark.parametrize("name", [n for n in WRONG if n != "clamp in the plan only"])
def test_right_twins(name: str) -> None:
    """Expected: PROVED, and evaluated on both sides: nothing is named."""
    right, _ = WRONG[name]
    report = verify(*pair(right, right))
    assert report.verdict == "PROVED", (report.reason, report.notes)
    assert not never(report)


def never(report: Report) -> list[str]:
    return [n for n in report.notes if n.startswith("never")]


def test_what_no_point_reaches_is_named() -> None:
    """Expected: PROVED, and the report says that the relu was never closed, with its line; once, not for the plan again."""

    def open_for_ever(t: Any, g: Tensors) -> Any:
        return t.relu(t.exp(g["h"], name="positive"), name="y")

    report = verify(*pair(open_for_ever, open_for_ever))
    assert report.verdict == "PROVED", report.reason
    (note,) = never(report)
    assert note.startswith("never false at the evaluated points: `y = relu(positive)` (")
    assert "test_branches.py:" in note


def test_a_bound_of_the_plan_alone_that_no_point_reaches() -> None:
    """Expected: UNKNOWN, as the algebra does not know that a square is at least −2; the plan's own maximum is named."""

    def square(t: Any, g: Tensors) -> Any:
        return t.square(g["h"], name="y")

    def bounded_square(t: Any, g: Tensors) -> Any:
        return t.maximum(t.square(g["h"], name="squares"), t.full(shape=g["h"].shape, value=-2.0, name="low"), name="y")

    report = verify(*pair(square, bounded_square))
    assert report.verdict == "UNKNOWN", report.reason
    (note,) = never(report)
    assert note.startswith("never taken at the evaluated points: the second number of max in `y = maximum(squares, low)` of the plan (")


def test_points_without_a_finite_value_say_nothing() -> None:
    """Expected: PROVED. On the other side of the condition the logical program has no finite value."""

    def burst(t: Any, g: Tensors) -> Any:
        high = t.gt(g["h"], value=1e4, name="high")
        return t.where(high, t.exp(t.square(g["h"])), g["h"], name="y")

    report = verify(*pair(burst, burst))
    assert report.verdict == "PROVED", report.reason
    assert all("high" in n for n in never(report))
    assert never(report)


def test_one_rank_of_a_class_of_its_own() -> None:
    """Expected: REFUTED. Rank 1 alone has no bound, and rank 0 is right on both sides."""
    logical, plan = pair(clamped, clamped)
    i = next(n for n, op in enumerate(plan.templates[0].program.ops) if op.name == "clamp")
    op = plan.templates[0].program.ops[i]
    wrong = replace(plan, edits=(Edit(1, (i,), (replace(op, name="identity", attrs=()),)),))
    assert verify(logical, plan).verdict == "PROVED"
    report = verify(logical, wrong)
    assert report.verdict == "REFUTED", (report.reason, report.notes)
    assert report.place is not None
    assert (report.place.rank, report.place.tensor) == (1, "y")


# -- points and conditions by themselves ---------------------------------------------------------------------------------


def test_a_moved_point_keeps_domains() -> None:
    """Positive numbers stay positive, ids in their range, indicators 0 or 1."""
    rng = np.random.default_rng(0)
    x = np.array([-2.0, 0.5, 3.0])
    assert changed(x, Change(-4.0), "real", None, rng).tolist() == [8.0, -2.0, -12.0]
    assert changed(x, Change(-4.0, magnitude=True), "real", None, rng).tolist() == [-8.0, -2.0, -12.0]
    assert changed(np.abs(x), Change(-4.0), "real", Domain("positive"), rng).tolist() == [8.0, 2.0, 12.0]
    assert changed(np.abs(x), Change(value=0.0), "real", Domain("positive"), rng).tolist() == [2.0, 0.5, 3.0]
    assert changed(np.array([0.0, 1.0]), Change(8.0), "real", Domain("indicator"), rng).tolist() == [0.0, 1.0]
    assert changed(np.array([4, 2]), Change(8.0), "int", Domain("ids", 7), rng).tolist() == [4, 2]
    ends = changed(np.arange(50) % 7, Change(ends=True), "int", Domain("ids", 7, -100), rng)
    assert set(ends.tolist()) == {0, 6}


def test_which_way_a_condition_falls() -> None:
    """Rows are points: the first has both sides, the second one of them; a tie is on neither."""
    a, b = F.input_(0, (2,), "real"), F.input_(1, (2,), "real")
    (at,) = conditions((F.call("max", a, b),))
    domain = Watching((y := F.call("max", a, b),))
    domain.run((y,), [np.array([[1.0, 5.0], [1.0, 2.0], [3.0, 3.0]]), np.array([[2.0, 1.0], [2.5, 4.0], [3.0, 3.0]])], (3,))
    sides = domain.sides[at]
    assert sides.yes.tolist() == [True, False, False]
    assert sides.no.tolist() == [True, True, False]
    assert sides.to_yes.tolist() == [0.0, 1.5, 0.0]
    assert sides.tied.tolist() == [False, False, True]


def test_a_mask_of_positions_is_no_condition() -> None:
    x = F.input_(0, (3, 3), "real")
    causal = F.call("le", F.iota(3), F.reshape(F.iota(3), (3, 1)))
    assert conditions((F.select(causal, x, 0.0),)) == ()
    assert len(conditions((F.select(x < 0.5, x, 0.0),))) == 1
