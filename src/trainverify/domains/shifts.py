"""Numbers that depend on an unknown maximum, in a way that is known.

A softmax subtracts the maximum of a row before it takes exponentials, also where no result depends on it: attention takes that of
masked scores too. While an op runs, a number stands for a maximum that is unknown. With m the difference from the true one, what is
made of it is v·exp(power·m) or v + add·m, and both exponents are known. What comes out with both 0 does not depend on m.

Every position of a row has the same m, another row has another one. So `dims` says which dimensions of a tensor are those of the
maximum: two numbers have the same m only at the same place of tensors of which all dimensions are the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np

from trainverify.domains.arrays import Array, labelled

TIMES: Final = 1000  # a maximum is multiplied by integers up to this


@dataclass(frozen=True)
class Tie:
    """How numbers depend on the maximum `source`; `dims` are its dimensions, by dimension of the tensor."""

    source: int
    dims: tuple[int | None, ...]
    add: Array
    power: Array

    def like(self, add: Array, power: Array) -> Tie | None:
        return Tie(self.source, self.dims, add, power) if add.any() or power.any() else None


def one_tie(ties: Sequence[Tie | None]) -> Tie | None:
    """The tie that all have who have one; None if they have several, or no one has any."""
    found = [t for t in ties if t is not None]
    return found[0] if found and all((t.source, t.dims) == (found[0].source, found[0].dims) for t in found) else None


@dataclass(frozen=True)
class Tied:
    """An argument of a scalar function: its exponents, where it is 0 for certain, and where it is a small integer."""

    add: Array
    power: Array
    zero: Array
    times: Array  # that integer, else 0


def applied(fn: str, args: Sequence[Tied], param: Any) -> tuple[Array, Array, Array]:
    """Exponents of a result, and where it has none that are known."""
    a = args[0]
    none: Array = np.zeros(np.shape(a.add), dtype=np.int64)
    match fn:
        case "add" | "sub" | "max" | "min":
            b = args[1]
            left: Array = np.where(a.zero, b.power, a.power)  # 0·exp(m) is 0, whatever the exponent
            right: Array = np.where(b.zero, a.power, b.power)
            free = (a.add == 0) & (b.add == 0)
            if fn in ("max", "min"):
                return a.add, left, (left != right) | (a.add != b.add) | (~free & (left != 0))
            return a.add + b.add if fn == "add" else a.add - b.add, left, (left != right) | (~free & (left != 0))
        case "neg":
            return -a.add, a.power, none != 0
        case "mul":
            b = args[1]
            free = (a.add == 0) & (b.add == 0)
            plain = (a.power == 0) & (b.power == 0)
            scaled = plain & (((a.add == 0) & (a.times != 0)) | ((b.add == 0) & (b.times != 0)))
            add = np.where(a.add == 0, a.times * b.add, b.times * a.add)
            return np.where(free, 0, add), a.power + b.power, ~(free | scaled)
        case "div":
            b = args[1]
            return none, a.power - b.power, (a.add != 0) | (b.add != 0)
        case "exp":
            return none, a.add, (a.power != 0) & ~a.zero
        case "log":
            return a.power, none, a.add != 0
        case "abs":
            return none, a.power, a.add != 0
        case "pow":
            whole = isinstance(param, int) or (isinstance(param, Fraction) and not (a.power % param.denominator).any())
            power = np.asarray(a.power * Fraction(param)).astype(np.int64) if whole else none
            return none, power, (a.add != 0) | ((a.power != 0) & (not whole))
    return none, none, (a.add != 0) | (a.power != 0) | (len(args) > 1 and ((args[1].add != 0) | (args[1].power != 0)))


def spread(tie: Tie, dims: Sequence[int], count: int, f: Any) -> Tie:
    """The tie of a tensor whose dimension i becomes dimension dims[i] of `count`, where its entries are put by `f`."""
    place = {d: tie.dims[i] for i, d in enumerate(dims)}
    return Tie(tie.source, tuple(place.get(d) for d in range(count)), f(tie.add), f(tie.power))


def summed(tie: Tie, term: Sequence[int], target: Sequence[int], zero: Array, shape: tuple[int, ...]) -> tuple[Tie | None, Array]:
    """The tie of sums of products in which one factor has powers, and where they differ between summands: it says nothing there."""
    gone = tuple(i + 1 for i, t in enumerate(term) if t not in target)
    low = np.where(zero, TIMES * TIMES, tie.power).min(axis=gone, initial=TIMES * TIMES)
    high = np.where(zero, -TIMES * TIMES, tie.power).max(axis=gone, initial=-TIMES * TIMES)
    nothing = low > high
    kept = [t for t in term if t in target]
    power, lost = (
        np.broadcast_to(labelled(x, kept, list(target), 1), shape) for x in (np.where(nothing, 0, low), ~nothing & (low != high))
    )
    place = dict(zip(term, tie.dims, strict=True))
    made = Tie(tie.source, tuple(place.get(t) for t in target), power, power)
    return made.like(np.zeros(shape, dtype=np.int64), np.where(lost, 0, power)), lost
