"""Values of logical elements on all points, to be looked up: which element has these values, or values proportional to them."""

from __future__ import annotations

from fractions import Fraction
from functools import cache, cached_property
from typing import Final

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.prove.staged.graphs import NOTHING

MISSING: Final = -2  # of what is not found
CLOSE: Final = 1e-8  # relative to the element
NOISE: Final = 1e-9  # relative to the largest element of the tensor
ROUGH: Final = 1e-4  # on loud points, relative to the largest element on that point
FAINT: Final = 1e-12  # relative to the largest element on any point: what is much smaller there is rounding
CANDIDATES: Final = 16  # elements that a column may be proportional to, by their fingerprints
LARGEST: Final = 10_000  # numerator times denominator of constant factors


class Table:
    """Values of logical elements on all points, to be looked up."""

    def __init__(self, values: Array, usable: Array, scale: Array, tensor: Array, quiet: int):
        self.values = values
        self.tensor = tensor
        self.scale = scale
        self.quiet = quiet
        rng = np.random.default_rng(7)
        points = len(values)
        self.weights = rng.uniform(1, 2, points)
        self.mix = rng.uniform(1, 2, points) * rng.choice([-1, 1], points)
        self.weights[quiet:] = self.mix[quiet:] = 0.0
        usable = usable & ~(values == values[:1]).all(axis=0)
        self.numbers = np.flatnonzero(usable & (np.abs(values[:quiet]).max(axis=0) > NOISE * scale[:quiet].max(axis=0)))
        self.listed = np.zeros(values.shape[1], dtype=bool)
        self.listed[self.numbers] = True
        prints = self.weights @ values[:, self.numbers]
        order = np.argsort(prints, kind="stable")
        self.numbers, self.prints = self.numbers[order], prints[order]
        with np.errstate(all="ignore"):
            shapes = values[:, self.numbers] / (self.mix @ values[:, self.numbers])
        fine = np.isfinite(shapes).all(axis=0)
        self.shape_numbers = self.numbers[fine]
        shape_prints = self.weights @ shapes[:, fine]
        order = np.argsort(shape_prints, kind="stable")
        self.shape_numbers, self.shape_prints = self.shape_numbers[order], shape_prints[order]
        self.same: Array = np.arange(values.shape[1])

    def known(self, i: int) -> bool:
        """Whether an element can be looked up: its values are finite and tell it from a constant."""
        return bool(self.listed[i])

    @cached_property
    def rays(self) -> Array:
        """For every element a number that proportional ones share."""
        found = np.arange(self.values.shape[1])
        if not self.shape_numbers.size:
            return found
        ordered = self.values[:, self.shape_numbers]
        ordered = (ordered / (self.mix @ ordered))[: self.quiet]
        near = (np.abs(ordered[:, 1:] - ordered[:, :-1]) <= CLOSE * np.abs(ordered[:, 1:]).max(axis=0, initial=0.0)).all(axis=0)
        group = np.concatenate([[0], np.cumsum(~near)])
        heads = self.shape_numbers[np.concatenate([[0], np.flatnonzero(~near) + 1])]
        found[self.shape_numbers] = heads[group]
        return found

    def first_of_equals(self, uncertain: Array) -> Array:
        """For every element the first one with the same values, for tensors all of whose elements have such ones. Elements that may have no
        value where others have one are no names for those, nor have they other names."""
        same = np.arange(self.values.shape[1])
        ordered, q = self.values[:, self.numbers], self.quiet
        gap = np.abs(ordered[:, 1:] - ordered[:, :-1])
        near = (gap[:q] <= CLOSE * np.abs(ordered[:q, 1:]).max(axis=0, initial=0.0)).all(axis=0)
        near &= (gap[q:] <= ROUGH * self.scale[q:, self.numbers[1:]]).all(axis=0)
        head = 0
        for i in range(1, len(self.numbers) + 1):
            if i < len(self.numbers) and near[i - 1]:
                continue
            if i > head + 1:
                group = self.numbers[head:i]
                group = group[~uncertain[group]]
                same[group] = group.min(initial=len(same))
            head = i
        alone = np.unique(self.tensor[same == np.arange(len(same))])  # a tensor with an element of its own keeps all
        keep = np.isin(self.tensor, alone)
        same[keep] = np.flatnonzero(keep)
        self.same = same
        return same

    def tolerance(self, v: Array) -> Array:
        """How far an element may be off these values, (points, elements)."""
        allowed = CLOSE * np.abs(v) + NOISE * np.abs(v[: self.quiet]).max(initial=0.0)
        allowed[self.quiet :] = ROUGH * np.abs(v[self.quiet :]).max(axis=1, keepdims=True, initial=0.0) + FAINT * np.abs(v).max(initial=0.0)
        return allowed

    def find(self, v: Array) -> Array:
        """Ids of elements with these values, of one tensor if possible; (points, elements) → elements."""
        scale = np.abs(v[: self.quiet]).max(initial=0.0)
        allowed = self.tolerance(v)
        prints = self.weights @ v
        slack = 4 * CLOSE * (self.weights @ np.abs(v)) + 8 * NOISE * scale
        low = np.searchsorted(self.prints, prints - slack)
        high = np.searchsorted(self.prints, prints + slack)
        found = np.full((8, v.shape[1]), MISSING)
        found[:, np.abs(v[: self.quiet]).max(axis=0, initial=0.0) <= NOISE * scale] = NOTHING
        for k in range(8):
            open_ = np.flatnonzero((found[k] == MISSING) & (low + k < high))
            if not open_.size:
                break
            numbers = self.numbers[low[open_] + k]
            gap = np.abs(self.values[:, numbers] - v[:, open_])
            good = (gap <= allowed[:, open_]).all(axis=0)
            found[k, open_[good]] = numbers[good]
        return self._of_one_tensor(found)

    def _of_one_tensor(self, found: Array) -> Array:
        tensors = _entries(self.tensor, found, -1)
        first = np.flatnonzero((found[0] != NOTHING) & (found != MISSING).any(axis=0))
        if not first.size:
            return found[0]
        for t in sorted(set(tensors[:, first[0]].tolist()) - {-1}):
            hits = tensors == t
            if (hits.any(axis=0) | (found[0] == NOTHING)).all():
                picked = found[hits.argmax(axis=0), np.arange(found.shape[1])]
                return _entries(self.same, picked, picked)
        found = _entries(self.same, found, found)
        best = np.where(found == MISSING, np.iinfo(np.int64).max, found).min(axis=0)
        several = ((found != MISSING) & (found != best)).any(axis=0)  # values that coincide: of many tensors, any would do
        return np.where((found == MISSING).all(axis=0) | several, MISSING, best)

    def multiples(self, x: Array) -> list[tuple[int, list[Fraction]]]:
        """For each column, rational factors between it and elements that are proportional to it."""
        size = self.mix @ x
        with np.errstate(all="ignore"):
            prints = self.weights @ (x / size)
            slack = 8 * CLOSE * (self.weights @ np.abs(x / size))
        prints, slack = np.nan_to_num(prints), np.nan_to_num(slack, posinf=0.0)
        low = np.searchsorted(self.shape_prints, prints - slack)
        high = np.searchsorted(self.shape_prints, prints + slack)
        of = np.flatnonzero((high > low) & (np.abs(size) > NOISE * np.abs(x).max(axis=0)))
        count = np.minimum(high - low, CANDIDATES)[of]
        column = np.repeat(of, count)
        w = self.values[:, self.shape_numbers[low[column] + np.arange(len(column)) - np.repeat(np.cumsum(count) - count, count)]]
        want, whole = w * size[column], self.mix @ w
        gap = np.abs(x[:, column] * whole - want)
        near = (gap <= 4 * CLOSE * np.abs(want) + NOISE * np.abs(want).max(axis=0, initial=0.0))[: self.quiet].all(axis=0)
        found: dict[int, set[Fraction]] = {}
        for f, number in zip(column[near].tolist(), nice(size[column[near]] / whole[near]), strict=True):
            if number is not None:
                found.setdefault(f, set()).add(number)
        return [(f, sorted(numbers, key=lambda q: (q != 1, q.denominator, abs(q), q))) for f, numbers in found.items()]


@cache
def _nice_numbers() -> tuple[Array, Array, Array]:
    """Numbers that a factor is likely to be, in order: numerator times denominator is small, or a power of two."""
    up, down = np.meshgrid(np.arange(1, LARGEST + 1), np.arange(1, 101))
    few = (up * down <= LARGEST) & (np.gcd(up, down) == 1)
    two = 2 ** np.arange(14, 31)
    ups = np.concatenate([up[few], down[few], two, np.ones_like(two)])
    downs = np.concatenate([down[few], up[few], np.ones_like(two), two])
    values, first = np.unique(ups / downs, return_index=True)
    return values, ups[first], downs[first]


def nice(ratios: Array) -> list[Fraction | None]:
    """The numbers that ratios are, as far as float64 can tell; None for those that are no likely ones."""
    values, ups, downs = _nice_numbers()
    size = np.abs(ratios)
    at = np.searchsorted(values, size * (1 - CLOSE))
    inside = at < len(values)
    at = np.where(inside, at, 0)
    likely = inside & (np.abs(values[at] - size) <= CLOSE * size)
    signed = np.where(ratios > 0, ups[at], -ups[at])
    return [Fraction(int(up), int(down)) if yes else None for yes, up, down in zip(likely, signed, downs[at], strict=True)]


def _entries(table: Array, ids: Array, otherwise: Array | int) -> Array:
    """What a table has for each id; `otherwise` for what is no id but a mark."""
    made: Array = np.broadcast_to(otherwise, ids.shape).copy()
    made[ids >= 0] = table[ids[ids >= 0]]
    return made
