"""A condition that a unit in the last place of a literal turns over: neither a reason to refute nor one to say nothing."""

from __future__ import annotations

import pytest

import trainverify as tv


def chosen(scale: float, third: float = 0.1, step: float = 1e-9) -> tv.Program:
    """0.3·x < (0.1·x)·3: nobody can say it if the literals may be a unit off."""
    b = tv.program("chosen")
    x, w = b.input("x", (7,)), b.input("w", (7,))
    small = b.lt(b.mul(x, value=0.3), b.mul(b.mul(x, value=third), value=3.0))
    part = b.where(small, b.mul(w, value=step), b.mul(w, value=2 * step))
    b.loss(b.sum(b.add(b.mul(b.exp(w), value=scale), part), name="loss"))
    return b.build()


def test_another_mistake_is_refuted() -> None:
    """Expected: PROVED with itself; REFUTED with another scale, which is there on both sides of the condition."""
    assert tv.verify(chosen(0.5), chosen(0.5), points=1).verdict == "PROVED"
    report = tv.verify(chosen(0.5), chosen(0.55), points=1)
    assert report.verdict == "REFUTED", report.reason


@pytest.mark.parametrize("step", [1e-9, 1.0])
def test_a_unit_in_the_last_place_is_not_refuted(step: float) -> None:
    """Expected: UNKNOWN: 0.3/3 for 0.1 turns the condition over, however much hangs on it."""
    assert 0.3 / 3 != 0.1
    report = tv.verify(chosen(0.5, step=step), chosen(0.5, 0.3 / 3, step), points=1)
    assert report.verdict == "UNKNOWN", report.reason
    assert "literal rounding" in report.reason
