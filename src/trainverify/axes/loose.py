"""Axes by size alone: digits in another order are matched by their sizes, so that they can shrink.

A wrong transpose reads `[2, 2048]` as `[2048, 2]`. Aligned, the axis of 4096 positions is twelve digits of 2, none of which
shrinks. Here both factors stay as they are: the two readings are as long as each other at any sizes, whatever positions are which.
Programs at such sizes are what the same code does with shorter axes. They say nothing about a plan that is right: two orders may
agree at one size and not at another, so nothing is proved over these axes, and what they refute has to be looked at more closely.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trainverify.axes.structure import Axes, Axis


class LooseAxes(Axes):
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
