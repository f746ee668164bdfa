"""Classes of positions: an axis as a few cells, each a set of positions that counts as often as it has members.

A cell of an atom is any set of its positions. A cell of a product is a product of cells, and those of a sum are those of its
pieces, one after the other. So a view of a tensor whose axes are aligned is a view of its cells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from trainverify.axes.structure import Axes, Axis
from trainverify.domains.arrays import Array

LISTED: Final = 1 << 22  # positions of an axis up to which the cell of every one is written down


class NoCells(Exception):
    """Positions that do not fall into the cells at hand."""


@dataclass(frozen=True, eq=False)
class Cells:
    """Cells of an axis of `size` positions, in order: how many positions each has, the first and the last of them."""

    size: int
    count: Array
    first: Array
    last: Array
    _of: Callable[[], Array]

    def __len__(self) -> int:
        return len(self.count)

    @cached_property
    def whole(self) -> bool:
        """Whether every position is a cell of its own, in order."""
        return len(self.count) == self.size and bool((self.first == np.arange(self.size)).all())

    @cached_property
    def of(self) -> Array:
        """The cell of every position."""
        if self.size > LISTED:
            raise NoCells(f"an axis of {self.size:,} positions")
        return self._of()

    @cached_property
    def ordered(self) -> bool:
        """Whether cells are ranges of positions, one after the other."""
        return bool((self.last - self.first + 1 == self.count).all() and (np.diff(self.first) > 0).all())

    def same(self, other: Cells) -> bool:
        if self is other:
            return True
        if self.size != other.size or len(self) != len(other):
            return False
        return (self.whole and other.whole) or bool((self.of == other.of).all())

    def picked(self, source: Array) -> Array:
        """For every cell of this axis, the entry of `source` (one per position) that all of its positions have; −1 where they differ."""
        low = np.full(len(self), np.iinfo(np.int64).max)
        high = np.full(len(self), -1)
        np.minimum.at(low, self.of, source)
        np.maximum.at(high, self.of, source)
        return np.where(low == high, low, -1)


def cells_of(of: Array, size: int) -> Cells:
    """Cells of an atom from the cell of every position."""
    n = int(of.max(initial=-1)) + 1
    at = np.arange(size)
    first, last = np.full(n, size), np.full(n, -1)
    np.minimum.at(first, of, at)
    np.maximum.at(last, of, at)
    return Cells(size, np.bincount(of, minlength=n), first, last, lambda: of)


def whole(size: int) -> Cells:
    at = np.arange(size)
    return Cells(size, np.ones(size, dtype=np.int64), at, at, lambda: at)


def product(parts: list[Cells]) -> Cells:
    """Cells of a product, slow digit first."""
    made = parts[0]
    for p in parts[1:]:
        made = _times(made, p)
    return made


def _times(a: Cells, b: Cells) -> Cells:
    def both(x: Array, y: Array) -> Array:
        return (x[:, None] * b.size + y[None, :]).reshape(-1)

    return Cells(
        a.size * b.size,
        (a.count[:, None] * b.count[None, :]).reshape(-1),
        both(a.first, b.first),
        both(a.last, b.last),
        lambda: (a.of[:, None] * len(b) + b.of[None, :]).reshape(-1),
    )


def joined(parts: list[Cells]) -> Cells:
    """Cells of a sum."""
    starts = np.cumsum([0, *(p.size for p in parts)])
    firsts = np.cumsum([0, *(len(p) for p in parts)])
    return Cells(
        int(starts[-1]),
        np.concatenate([p.count for p in parts]),
        np.concatenate([p.first + s for p, s in zip(parts, starts, strict=False)]),
        np.concatenate([p.last + s for p, s in zip(parts, starts, strict=False)]),
        lambda: np.concatenate([p.of + n for p, n in zip(parts, firsts, strict=False)]),
    )


class Partition:
    """Cells for all axes, from those of atoms; `choose` gives the cells of an atom."""

    def __init__(self, axes: Axes, choose: Callable[[Axis], Cells]):
        self.axes = axes
        self._choose = choose
        self._known: dict[int, tuple[Axis, Cells]] = {}

    def __call__(self, axis: Axis) -> Cells:
        a = axis.root()
        known = self._known.get(id(a))
        if known is None:
            known = self._known[id(a)] = a, self._made(a)
        return known[1]

    def _made(self, a: Axis) -> Cells:
        if a.factors is not None:
            return product([self(f) for f in a.factors])
        if a.pieces is not None:
            return joined([self(p) for p in a.pieces])
        return self._choose(a)
