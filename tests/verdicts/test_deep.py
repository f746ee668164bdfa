"""Deep programs that differ at reduced sizes: those sizes decide, unless a literal may count what was reduced."""

from __future__ import annotations

from fractions import Fraction

import pytest

import trainverify as tv
from trainverify.evaluate.full_size import ByClasses
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.verdicts import budgets

ROWS, INNER, OUTER = 4096, 3072, 1536


@pytest.fixture(autouse=True)
def every_program_is_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "DEEP", 0)


def model() -> Program:
    b = tv.program("deep")
    x, w, v = b.input("x", (ROWS, INNER)), b.input("w", (OUTER, INNER)), b.input("v", (INNER, OUTER))
    y = b.linear(b.silu(b.linear(x, w, name="h"), name="a"), v, name="y")
    b.loss(b.mean(b.mul(y, y, name="sq"), name="loss"))
    return b.build()


def plan(summed: bool = True, count: int | None = None) -> Plan:
    """`count`: the mean over all elements is a sum times a literal."""
    p = tv.plan("deep", tv.Mesh(dp=2, tp=4))
    with p.ranks() as r:
        x = r.input("x", (ROWS // 2, INNER), "(dp b) i")
        w, v = r.input("w", (OUTER // 4, INNER), "(tp o) i"), r.input("v", (INNER, OUTER // 4), "i (tp o)")
        y = r.linear(r.silu(r.linear(x, w, name="h"), name="a"), v, name="y.part")
        y = r.all_reduce(y, group="tp", name="y") if summed else y
        sq = r.mul(y, y, name="sq")
        if count is None:
            r.loss(r.all_reduce(r.mean(sq, name="mean"), group="dp", op="avg", name="loss"))
        else:
            r.loss(r.all_reduce(r.mul(r.sum(sq, name="sum"), value=Fraction(1, count), name="mean"), group="dp", name="loss"))
    return p.build()


def test_without_counts_reduced_sizes_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """REFUTED at the share that is not added up; nothing is evaluated at full size."""
    monkeypatch.setattr(ByClasses, "seen", lambda *args: pytest.fail("evaluated on classes"))
    report = tv.verify(model(), plan(summed=False))
    assert report.verdict == "REFUTED"
    assert report.place is not None
    assert report.place.tensor == "y.part"


def test_the_right_plan() -> None:
    assert tv.verify(model(), plan()).verdict == "PROVED"


def test_a_count_as_a_literal() -> None:
    """PROVED, and REFUTED with another count: at reduced sizes both differ."""
    assert tv.verify(model(), plan(count=ROWS * INNER)).verdict == "PROVED"
    assert tv.verify(model(), plan(count=2 * ROWS * INNER)).verdict == "REFUTED"
