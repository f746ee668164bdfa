"""Axes by size alone: digits in another order are matched by their sizes, so that they can shrink.

A wrong transpose reads `[2, 2048]` as `[2048, 2]`. Aligned, the axis of 4096 positions is twelve digits of 2, none of which
shrinks. Here both factors stay as they are: the two readings are as long as each other at any sizes, whatever positions are which.
A slice as long as a shard that begins within one (`[1:1025]` of 4 · 1024 rows) cuts nothing: it begins within a shard at any sizes.
Programs at such sizes are what the same code does with shorter axes. They say nothing about a plan that is right: two orders may
agree at one size and not at another, so nothing is proved over these axes, and what they refute has to be looked at more closely.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from trainverify.axes.structure import Axes, Axis
from trainverify.axes.views import NotABoundary


class LooseAxes(Axes):
    def __init__(self) -> None:
        super().__init__()
        self._in_plan = False
        self._slices: list[tuple[Axis, int, Axis]] = []  # (whole, start, slice) of the plan's, until it is known what they cut
        self._within: list[tuple[Axis, int, int]] = []  # (whole, start, size) of those that begin within a shard

    def begin_plan(self) -> None:
        self._in_plan = True

    def window(self, axis: Axis, start: int, size: int) -> Axis:
        if not self._in_plan or size in (0, axis.size):  # what the logical program takes within a shard is no mistake
            return self.piece(axis, start, size)
        made = Axis(size)
        self._slices.append((axis, start, made))
        return made

    def settle(self) -> None:
        """Slices that fit the digits of their axis are pieces of it; others have the size of a shard."""
        later = [x for x in self._slices if not self._fits(*x)]
        for axis, start, made in self._slices:
            if all(made is not x for _, _, x in later):
                self.same(self.piece(axis, start, made.size), made)
        for axis, start, made in later:
            digits = self.leaves([axis])
            shard = next((digits[n:] for n in range(1, len(digits)) if prod(d.size for d in digits[n:]) == made.size), None)
            if shard is None:
                raise NotABoundary(f"{start}:{start + made.size} of {axis!r}")
            self.same(made, self.product(shard))
            self._within.append((axis, start, made.size))
        self._slices = []

    def _fits(self, axis: Axis, start: int, made: Axis) -> bool:
        """Whether a slice cuts one digit only, and is not read in other digits than those after it."""
        fast = 1
        for digit in reversed(self.leaves([axis])):
            if start % (fast * digit.size) or made.size % (fast * digit.size):
                inside = start // fast // digit.size == (start + made.size - 1) // fast // digit.size
                own = self.leaves([made])
                return inside and (len(own) < 2 or any(prod(d.size for d in own[n:]) == fast for n in range(len(own))))
            fast *= digit.size
        return True

    def within(self, axis: Axis, start: int, size: int) -> bool:
        return any((s, n) == (start, size) and a.root() is axis.root() for a, s, n in self._within)

    def same(self, a: Axis, b: Axis) -> None:
        a, b = a.root(), b.root()
        if a is b or a.factors is None or b.factors is None:
            super().same(a, b)
            return
        if a.size != b.size:
            raise ValueError(f"axes of sizes {a.size} and {b.size}")
        self.align([a], [b])
        a, b = a.root(), b.root()
        if a is not b and all(x is y for x, y in zip(self.leaves([a]), self.leaves([b]), strict=False)):
            self._join(a, b)  # axes whose digits stand in another order keep their own positions

    def align(self, left: Sequence[Axis], right: Sequence[Axis]) -> None:
        lefts, rights = self.leaves(left), self.leaves(right)
        while lefts and rights and lefts[0].size == rights[0].size:
            self.same(lefts[0], rights[0])
            lefts, rights = self.leaves(lefts[1:]), self.leaves(rights[1:])
        pairs = self._reordered(lefts, rights)
        if not pairs:
            super().align(lefts, rights)
        for x, y in pairs:
            self.same(x, y)

    def _reordered(self, lefts: Sequence[Axis], rights: Sequence[Axis]) -> list[tuple[Axis, Axis]]:
        """Digits of equal sizes in two orders, those that are the same already first; none if there are others."""
        if len(lefts) < 2 or Counter(x.size for x in lefts) != Counter(x.size for x in rights):
            return []
        free, pairs = list(rights), []
        for x in sorted(lefts, key=lambda x: all(x is not y for y in rights)):
            y = next((y for y in free if y is x), None) or next(y for y in free if y.size == x.size)
            free.remove(y)
            pairs.append((x, y))
        return pairs
