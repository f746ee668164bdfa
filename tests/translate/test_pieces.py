"""Functions of one integer: every expression is evaluated at every integer of its range, and beside it."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from fractions import Fraction

import pytest

from trainverify.translate.pieces import (
    IDENTITY,
    INTEGERS,
    Pieces,
    Range,
    Refused,
    chosen,
    compared,
    constant,
    floored,
    image,
    inside,
    inverted,
    linear,
    moved,
    picked,
    product,
    same,
    stretches,
    whole,
)

Plain = Callable[[int], Fraction | int]
SIGNS = {"lt": (-1,), "le": (-1, 0), "gt": (1,), "ge": (0, 1), "eq": (0,), "ne": (-1, 1)}
RANGE: Range = ((-9, -9), (-2, 20))


def value(p: Pieces, v: int) -> Fraction | int | None:
    ((_, _, (found,)),) = stretches([p], ((v, v),))
    return None if found is None else found.at(v)


def expression(rng: random.Random, depth: int) -> tuple[Pieces, Plain]:
    """A function, and the same in Python."""
    if depth == 0:
        c = rng.randrange(-3, 8)
        return (IDENTITY, lambda v: v) if rng.random() < 0.7 else (constant(c), lambda v: c)
    (x, f), (y, g) = expression(rng, depth - 1), expression(rng, depth - 1)
    n, kind = rng.randrange(1, 6), rng.choice(("add", "mul", "floor", "mod", "where", *SIGNS))
    match kind:
        case "add":
            a, b = rng.randrange(-2, 3), rng.choice((1, Fraction(1, 2)))
            return linear(a, x, b, y), lambda v: a * f(v) + b * g(v)
        case "mul":
            return product(x, y), lambda v: f(v) * g(v)
        case "floor":
            return floored(x, n, RANGE), lambda v: f(v) // n
        case "mod":
            return linear(1, x, -n, floored(x, n, RANGE)), lambda v: f(v) % n
        case "where":
            c, h = expression(rng, 0)
            test = compared(c, constant(n), SIGNS["lt"])
            return chosen(test, x, y), lambda v: f(v) if h(v) < n else g(v)
    return compared(x, y, SIGNS[kind]), lambda v: int(getattr(operator, kind)(f(v), g(v)))


def test_every_integer_of_the_range() -> None:
    known = unknown = 0
    rng = random.Random(4)
    for _ in range(1500):
        try:
            p, f = expression(rng, rng.randrange(1, 4))
        except Refused:
            continue
        for v in (v for low, high in RANGE for v in range(int(low), int(high) + 1)):
            found = value(p, v)
            if found is None:
                unknown += 1
            else:
                known += 1
                assert found == f(v)
        stretch = image(p, RANGE)
        assert stretch is None or all(any(low <= f(v) <= high for low, high in stretch) for v in (-9, -2, 0, 7, 20))
        if whole(p, RANGE):
            assert all(f(v) == int(f(v)) for v in (-9, *range(-2, 21)))
    assert known > 5 * unknown > 0


def mask(low: int, high: int) -> Pieces:
    return product(compared(IDENTITY, constant(low), SIGNS["ge"]), compared(IDENTITY, constant(high), SIGNS["lt"]))


def clamped(x: Pieces, low: int, high: int) -> Pieces:
    x = chosen(compared(x, constant(low), SIGNS["lt"]), constant(low), x)
    return chosen(compared(x, constant(high), SIGNS["gt"]), constant(high), x)


def local(start: int) -> Pieces:
    return linear(1, IDENTITY, -start, constant(1))


@pytest.mark.parametrize("within", [INTEGERS, ((0, 30),)])
def test_masked_rows(within: Range) -> None:
    """Rows of a rank from 5 on, chosen by a mask, clipped, or both."""
    for row in (chosen(mask(5, 9), local(5), constant(0)), clamped(local(5), 0, 3)):
        assert inside(row, 4, within)
        assert picked(row, mask(5, 9), 4, within) == (1, 5)
        assert picked(row, linear(-1, mask(5, 9), 0, constant(0)), 4, within) == (-1, 5)
        for low, high in ((4, 9), (6, 9), (5, 8), (5, 10)):  # a row too many, or one too few
            assert picked(row, mask(low, high), 4, within) is None
        assert picked(row, constant(1), 4, within) is None  # others are not masked
    assert picked(local(6), mask(5, 9), 4, within) is None
    assert picked(local(5), constant(1), 4, within) == (1, 5)
    assert not inside(local(5), 4, within)


def test_ignored_labels() -> None:
    """−100 is masked; where it counts as class 0, and in a range without it, that is another function."""
    row, counted = clamped(IDENTITY, 0, 99), compared(IDENTITY, constant(-100), SIGNS["ne"])
    labels: Range = ((-100, -100), (0, 6))
    assert picked(row, counted, 7, labels) == (1, 0)
    assert picked(row, constant(1), 7, labels) is None
    assert picked(row, counted, 6, labels) == (1, 0)  # and label 6 has no row
    assert not inside(row, 6, labels)
    assert picked(row, counted, 7, ((-100, 6),)) is None
    assert same(compared(IDENTITY, constant(0), SIGNS["ge"]), counted, labels)
    assert not same(compared(IDENTITY, constant(1), SIGNS["ge"]), counted, labels)


def test_many_digits() -> None:
    """Remainders of more than 64 quotients are one piece, those of 64 are pieces."""
    within: Range = ((0, 10_000),)
    rest = linear(1, IDENTITY, -7, floored(IDENTITY, 7, within))
    assert len(rest) == 1
    assert all(value(rest, v) == v % 7 and value(floored(IDENTITY, 7, within), v) == v // 7 for v in (0, 6, 7, 9_999))
    assert image(rest, within) == ((0, 6),)
    assert value(compared(rest, constant(3), SIGNS["lt"]), 1) is None  # not known
    assert value(product(compared(rest, constant(3), SIGNS["lt"]), constant(0)), 1) == 0
    assert value(compared(rest, constant(7), SIGNS["lt"]), 9) == 1


def test_too_many_pieces() -> None:
    steps = constant(0)
    for c in range(63):
        steps = linear(1, steps, 1, compared(IDENTITY, constant(3 * c), SIGNS["ge"]))
    with pytest.raises(Refused):
        linear(1, steps, 1, compared(IDENTITY, constant(300), SIGNS["ge"]))


def test_elsewhere() -> None:
    assert [value(moved(mask(5, 9), 2), v) for v in (2, 3, 6, 7)] == [0, 1, 1, 0]
    assert [value(inverted(mask(5, 9)), v) for v in (4, 5, 8, 9)] == [1, 0, 0, 1]
