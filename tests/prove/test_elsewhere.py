"""A quotient in a branch has a value where it is needed, and nowhere else: plans that add t − t of another one are not proved.

Laws that would prove such a quotient against itself must not prove these: where t has no value, t − t has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import trainverify as tv
from trainverify.graph.program import Program

Build = Callable[[bool], Program]


def chosen(b: Any, m: Any, x: Any, n: Any) -> Any:
    return b.where(m, b.div(x, n), b.full(shape=(), value=0.0))


def ended(b: Any, loss: Any, t: Any) -> Program:
    """The loss, and t − t if there is one."""
    if t is not None:
        loss = b.add(loss, b.sub(t, t))
    b.loss(b.mul(loss, value=1.0, name="loss"))
    built: Program = b.build()
    return built


def inputs(b: Any, *shape: int) -> tuple[Any, Any, Any]:
    return b.input("x", shape), b.input("n", shape), b.input("m", shape, dtype="bool")


def of_a_shifted_piece(wrong: bool) -> Program:
    """Six of seven elements are needed; the wrong plan takes the last too."""
    b = tv.program("pieces")
    x, n, m = inputs(b, 7)
    first, last = ([b.slice(t, dim=0, start=s, stop=s + 6) for t in (x, n, m)] for s in (0, 1))
    loss = b.sum(chosen(b, first[2], first[0], first[1]))
    loss = b.add(loss, b.sum(b.mul(first[0], last[0])))
    loss = b.add(loss, b.sum(b.mul(first[1], last[1])))
    loss = b.add(loss, b.sum(b.where(last[2], first[0], last[0])))
    return ended(b, loss, b.sum(chosen(b, last[2], last[0], last[1])) if wrong else None)


def of_another_micro_batch(wrong: bool) -> Program:
    """Blocks alike for three of four rows, worked out once."""
    b = tv.program("rows")
    x, n, m = inputs(b, 4, 5)
    w = b.input("w", (5,))
    rows = [[b.reshape(b.slice(t, dim=0, start=k, stop=k + 1), shape=(5,)) for t in (m, x, n)] for k in range(4)]
    loss = None
    for row in rows[:3]:
        a = b.sin(b.mul(chosen(b, *row), w))
        a = b.sin(b.add(a, w))
        a = b.mul(b.cos(a), w)
        a = b.sin(b.sin(b.mul(a, a)))
        loss = b.sum(a) if loss is None else b.add(loss, b.sum(a))
    return ended(b, loss, b.sum(chosen(b, *rows[3])) if wrong else None)


def of_other_layers(wrong: bool) -> Program:
    """Layers alike with v + (t − t): of a t that is finite, then of one that may have no value."""
    b = tv.program("layers")
    x, n, m = inputs(b, 6, 5)
    c, y = b.input("c", (), dtype="bool"), b.input("y", (6, 5))
    zero = b.full(shape=(), value=0.0)
    finite = b.sum(b.amax(b.masked_fill(y, m, value=float("-inf")), dim=1))
    doubtful = b.sum(b.amax(b.div(x, n), dim=1))
    v = b.input("v", (4,))
    for t in (finite, finite, finite, doubtful, doubtful, finite):
        v = b.sin(b.mul(v, v))
        v = b.cos(b.add(v, v))
        v = b.add(v, b.sub(t, t) if wrong or t is finite else zero)
        v = b.sin(b.mul(v, v))
    return ended(b, b.add(b.add(b.where(c, doubtful, zero), finite), b.sum(v)), None)


def maximum_of_unlike_parts(wrong: bool) -> Program:
    b = tv.program("maximum")
    x, a, d, m = b.input("x", (5,)), b.input("a", (2,)), b.input("d", (3,)), b.input("m", (5,), dtype="bool")
    q = b.div(x, b.concat(b.exp(a), d, dim=0))
    loss = b.sum(b.where(m, q, b.full(shape=(), value=0.0)))
    return ended(b, loss, b.amax(q, dim=0) if wrong else None)


def compared_with_nothing_times_infinity(wrong: bool) -> Program:
    """0·(−∞) + x/n > 0 is false where all is masked; x/n > 0 need not be."""
    b = tv.program("compared")
    x, n, y, u = (b.input(k, (5,)) for k in "xnyu")
    s, m = b.input("s", (4, 7)), b.input("m", (4, 7), dtype="bool")
    peak = b.amax(b.masked_fill(s, m, value=float("-inf")), dim=1)
    zeros = b.full(shape=(5, 4), value=0.0)
    e = b.reshape(b.matmul(zeros, b.unsqueeze(peak, dim=1)), shape=(5,)) if not wrong else b.full(shape=(5,), value=0.0)
    b.loss(b.sum(b.where(b.gt(b.add(e, b.div(x, n)), value=0.0), y, u), name="loss"))
    built: Program = b.build()
    return built


def behind_a_move(wrong: bool) -> Program:
    """The maximum of an empty row less itself, moved, beside x/n: nothing may be compared with what it would be otherwise."""
    b = tv.program("moved")
    x, n, y, u = (b.input(k, (4,)) for k in "xnyu")
    s, m = b.input("s", (4, 7)), b.input("m", (4, 7), dtype="bool")
    peak = b.amax(b.masked_fill(s, m, value=float("-inf")), dim=1)
    t = b.identity(b.sub(peak, peak)) if not wrong else b.full(shape=(4,), value=0.0)
    b.loss(b.sum(b.where(b.gt(b.add(b.div(x, n), t), value=0.0), y, u), name="loss"))
    built: Program = b.build()
    return built


def of_a_divisor_that_is_granted_later(wrong: bool) -> Program:
    b = tv.program("later")
    x, n, e, a, u, y, g, h, w = (b.input(k, (5,)) for k in ("x", "n", "e", "a", "u", "y", "g", "h", "w"))
    s = b.add(w, b.div(x, n))
    f = u if wrong else b.mul(b.div(u, s), s)
    loss = b.sum(b.where(b.gt(b.add(b.div(a, e), f), value=0.0), g, h))
    b.loss(b.add(loss, b.sum(b.div(y, n)), name="loss"))
    built: Program = b.build()
    return built


@pytest.mark.parametrize("engine", ["algebra", "auto"])
@pytest.mark.parametrize(
    "build",
    [
        behind_a_move,
        of_a_divisor_that_is_granted_later,
        of_a_shifted_piece,
        of_another_micro_batch,
        of_other_layers,
        maximum_of_unlike_parts,
        compared_with_nothing_times_infinity,
    ],
)
def test_the_wrong_one_is_not_proved(build: Build, engine: Any) -> None:
    assert not tv.verify(build(False), build(True), points=1, engine=engine).verdict.startswith("PROVED")
