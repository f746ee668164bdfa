"""Integers and booleans on cells: an interval that holds the integer of every position.

An end that is `FAR` or further away is no bound: an integer that may be so large may be anything, and what is computed from it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC

FAR: Final = 1 << 60
_NEAR: Final = FAR // 4  # sums and products below this are exact in 64 bits


class NoValue(Exception):
    """What cannot be said on cells at all."""


@dataclass(frozen=True)
class Whole:
    """Integers, or booleans as 0 and 1: between `low` and `high`."""

    low: Array
    high: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(np.shape(self.low))

    @property
    def exact(self) -> Array:
        return self.low == self.high

    @property
    def bounded(self) -> Array:
        return np.asarray(np.maximum(abs(self.low), abs(self.high)) < _NEAR)


def exactly(values: Array) -> Whole:
    return Whole(values, values)


def within(low: Array, high: Array, known: Array) -> Whole:
    """Bounds where they are known; anything elsewhere, and where they are too far from 0."""
    fine = known & (np.maximum(abs(low), abs(high)) < _NEAR)
    return Whole(np.where(fine, low, -FAR), np.where(fine, high, FAR))


def anything(shape: tuple[int, ...]) -> Whole:
    return Whole(np.full(shape, -FAR), np.full(shape, FAR))


def integers(fn: str, args: Sequence[Whole], param: Any) -> Whole:
    """Scalar functions of integers and booleans."""
    a = args[0]
    b = args[1] if len(args) > 1 else a
    match fn:
        case "add":
            return within(a.low + b.low, a.high + b.high, a.bounded & b.bounded)
        case "sub":
            return within(a.low - b.high, a.high - b.low, a.bounded & b.bounded)
        case "neg":
            return within(-a.high, -a.low, a.bounded)
        case "mul":
            near = _most(a) * _most(b) < _NEAR
            ends = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
            return within(np.minimum.reduce(ends), np.maximum.reduce(ends), near & a.bounded & b.bounded)
        case "max" | "min":
            f = np.maximum if fn == "max" else np.minimum
            return Whole(f(a.low, b.low), f(a.high, b.high))
        case "abs":
            least = np.where((a.low <= 0) & (a.high >= 0), 0, np.minimum(abs(a.low), abs(a.high)))
            return within(least, np.maximum(abs(a.low), abs(a.high)), a.bounded)
        case "lt":
            return Whole(_int(a.high < b.low), _int(a.low < b.high))
        case "le":
            return Whole(_int(a.high <= b.low), _int(a.low <= b.high))
        case "eq":
            apart = (a.high < b.low) | (b.high < a.low)
            return Whole(_int(a.exact & b.exact & (a.low == b.low)), _int(~apart))
        case "and":
            return Whole(a.low & b.low, a.high & b.high)
        case "or":
            return Whole(a.low | b.low, a.high | b.high)
        case "not":
            return Whole(1 - a.high, 1 - a.low)
        case "floordiv" | "mod":
            if not b.exact.all() or (b.low <= 0).any():
                raise NoValue(f"{fn} by something that may not be positive")
            low, high = a.low // b.low, a.high // b.low
            if fn == "floordiv":
                return within(low, high, a.bounded)
            same = (low == high) & a.bounded
            return Whole(np.where(same, a.low % b.low, 0), np.where(same, a.high % b.low, b.low - 1))
        case "pow":
            if not isinstance(param, int) or param < 0 or not (a.exact & a.bounded).all() or (_most(a) ** param >= _NEAR).any():
                raise NoValue("a power of integers")
            return exactly(a.low**param)
    raise NoValue(f"{fn} of integers")


def total(terms: Sequence[Sequence[int]], target: Sequence[int], args: Sequence[Whole], counts: Mapping[int, Array]) -> Whole:
    """A contraction; `counts` are how often each cell of a label counts."""
    if len(args) > 1 and not all(a.exact.all() for a in args) and any((a.low < 0).any() for a in args):
        raise NoValue("a product of integers of any sign under a sum")

    def added(ends: Sequence[Array]) -> Array:
        operands = list(ends)
        for i, n in counts.items():
            at = next(k for k, term in enumerate(terms) if i in term)
            shape = [1] * operands[at].ndim
            shape[list(terms[at]).index(i) + 1] = -1
            operands[at] = operands[at] * n.reshape(shape)
        return NUMERIC.contract(terms, target, operands, 1)

    near = added([_most(a) for a in args]) < _NEAR
    return within(added([a.low for a in args]), added([a.high for a in args]), near)


def reduced(fn: str, x: Whole, axes: tuple[int, ...], alone: bool) -> Whole:
    """Maximum, minimum or product over axes; `alone` says that all cells of theirs are single positions."""
    if fn != "prod":
        f = np.max if fn == "max" else np.min
        return Whole(f(x.low, axis=axes), f(x.high, axis=axes))
    if not alone or not x.exact.all() or np.prod(np.maximum(_most(x), 1), axis=axes).max(initial=0) >= _NEAR:
        raise NoValue("a product of integers")
    return exactly(np.prod(x.low, axis=axes))


def running(x: Whole, axis: int, count: Array) -> Whole:
    """A running sum over ranges that have `count` positions each: any position of a range has from one to all of its summands."""
    near = np.cumsum(_most(x) * count, axis=axis) < _NEAR
    ends = [np.cumsum(e * count, axis=axis) for e in (x.low, x.high)]
    firsts = [end - e * (count - 1) for end, e in zip(ends, (x.low, x.high), strict=True)]
    return within(np.minimum(ends[0], firsts[0]), np.maximum(ends[1], firsts[1]), near)


def _most(x: Whole) -> Array:
    return np.maximum(abs(x.low), abs(x.high)).astype(np.float64)


def _int(x: Array) -> Array:
    return x.astype(np.int64)
