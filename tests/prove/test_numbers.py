"""Roots of numbers: whole powers of them are rational again; other products stay what they are."""

from __future__ import annotations

import pytest

import trainverify as tv
from trainverify.verdicts import verify


def scaled(*squares: float, value: float | None = None) -> tv.Program:
    """Σ x, times the root of every number given, in turn."""
    b = tv.program("roots")
    x, w = b.input("x", (6, 5)), b.parameter("w", (5,))
    y = b.mul(x, w)
    for s in squares:
        root = b.sqrt(b.full(shape=(), value=s))
        y = b.mul(y, root)
    if value is not None:
        y = b.mul(y, value=value)
    b.loss(b.sum_(y))
    return tv.complete(b.build())


EQUAL = [
    ((2.0, 2.0), (), 2.0),
    ((2.0, 2.0, 2.0), (2.0,), 2.0),
    ((6.0, 3.0), (2.0,), 3.0),
    ((0.5, 0.5), (), 0.5),
    ((0.5,), (2.0,), 0.5),
    ((3.0, 0.75), (), 1.5),
]


@pytest.mark.parametrize(("left", "right", "value"), EQUAL)
def test_proved(left: tuple[float, ...], right: tuple[float, ...], value: float) -> None:
    assert verify(scaled(*left), scaled(*right, value=value)).verdict == "PROVED"


WRONG = [((2.0, 2.0), (), 3.0), ((2.0, 3.0), (), 2.0), ((2.0, 2.0), (2.0,), 2.0), ((0.5,), (2.0,), 0.25), ((2.0,), (3.0,), 1.0)]


@pytest.mark.parametrize(("left", "right", "value"), WRONG)
def test_refuted(left: tuple[float, ...], right: tuple[float, ...], value: float) -> None:
    assert verify(scaled(*left), scaled(*right, value=value)).verdict == "REFUTED"


def test_squares_of_sums_with_roots() -> None:
    """(√2·Σx)² + (Σ√2·y)² is 2·((Σx)² + (Σy)²)."""

    def program(late: bool) -> tv.Program:
        b = tv.program("squares")
        x, w = b.input("x", (6, 5)), b.parameter("w", (5,))
        root = b.sqrt(b.full(shape=(), value=2.0))
        sums = []
        for part in (b.mul(x, w), b.mul(b.square(x), w)):
            sums.append(b.square(b.sum_(part) if late else b.sum_(b.mul(part, root))))
        total = b.add(*sums)
        b.loss(b.sqrt(b.add(b.mul(total, value=2.0) if late else total, value=1.0)))
        return tv.complete(b.build())

    assert verify(program(True), program(False)).verdict == "PROVED"


@pytest.mark.parametrize(("value", "verdict"), [(2.0, "PROVED"), (4.0, "REFUTED"), (1.0, "REFUTED")])
def test_a_root_beside_a_root_of_a_sum(value: float, verdict: str) -> None:
    """(√2·√s)² is 2·s, once."""

    def program(rooted: bool) -> tv.Program:
        b = tv.program("beside")
        x, w = b.input("x", (6, 5)), b.input("w", (5,))
        s = b.add(b.sum_(b.square(b.mul(x, w))), b.sum_(b.square(w)))
        if rooted:
            b.loss(b.square(b.mul(b.sqrt(b.full(shape=(), value=2.0)), b.sqrt(s))))
        else:
            b.loss(b.mul(s, value=value))
        return b.build()

    assert verify(program(True), program(False)).verdict == verdict
