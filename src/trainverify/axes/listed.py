"""Axes of small plans: what cannot be aligned is listed position by position, so that nothing clashes.

Every axis is a product of digits. A digit is *whole* (one variable runs over it) or *listed* (every position is looked at by
itself). Devices and micro-batches are listed, and so are the slow digits of every cut; where two factorisations
differ (`[6]` as `[2, 3]` and as `[3, 2]`) the digits between them are. There are no sums: pieces are found by position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainverify.axes.structure import Axes, Axis


class Sealed(Exception):
    """Something would be listed after the axes were in use."""


class ListedAxes(Axes):
    lists = True

    def __init__(self) -> None:
        super().__init__()
        self.sealed = False  # once all programs are in, nothing changes any more

    @staticmethod
    def listed(axis: Axis) -> bool:
        a = axis.root()
        return a.frozen or a.fixed

    def same(self, a: Axis, b: Axis) -> None:
        a, b = a.root(), b.root()
        if a is b or a.size == b.size == 1:
            return
        if a.size != b.size:
            raise ValueError(f"axes of sizes {a.size} and {b.size}")
        if self._atom(a):
            self._join(a, b)
        elif self._atom(b):
            self._join(b, a)
        else:
            self.align([a], [b])

    def _join(self, a: Axis, b: Axis) -> None:
        """The atom a becomes b."""
        self._open()
        if self.listed(a):
            self.freeze(b)
        a.link = b

    def align(self, left: Sequence[Axis], right: Sequence[Axis]) -> None:
        """Identify two lists of axes as one sequence of positions, from the fast end."""
        lefts, rights = self.leaves(left), self.leaves(right)
        while lefts and rights:
            a, b = lefts[-1].root(), rights[-1].root()
            if a.factors is not None or b.factors is not None:  # split meanwhile
                lefts[-1:], rights[-1:] = self.leaves([a]), self.leaves([b])
            elif a is b or a.size == b.size:
                if a is not b:
                    self._join(a, b)
                del lefts[-1], rights[-1]
            elif not a.size or not b.size:
                self._align_nothing(lefts, rights)
                return
            elif (common := math.gcd(a.size, b.size)) > 1:
                for x in (a, b):
                    if x.size != common:
                        self.split(x, x.size // common)
            else:
                lefts, rights = self.leaves(lefts), self.leaves(rights)
                i, j = _segment(lefts, rights)
                self._list(lefts[-i:], rights[-j:])
                del lefts[-i:], rights[-j:]

    def _align_nothing(self, lefts: Sequence[Axis], rights: Sequence[Axis]) -> None:
        self._open()
        super()._align_nothing(lefts, rights)

    def _list(self, left: list[Axis], right: list[Axis]) -> None:
        """Digits of one stretch of positions that is cut in two ways; what the slowest have in common is not listed."""
        a, b = left[0].root(), right[0].root()
        common = math.gcd(a.size, b.size)
        if common > 1 and self._atom(a) and self._atom(b) and a is not b:
            for x in (a, b):
                if x.size != common:
                    self.split(x, common)
            (slow, *rest), (other, *others) = self.leaves([a]), self.leaves([b])
            if slow.size == other.size and len(rest) < 2 and len(others) < 2:
                self.same(slow, other)
                left, right = [*rest, *left[1:]], [*others, *right[1:]]
        for x in (*left, *right):
            self.freeze(x)

    def split(self, axis: Axis, slow: int) -> bool:
        a = axis.root()
        if not self._atom(a):
            return False
        self._open()
        a.factors = [Axis(slow), Axis(a.size // slow)]
        for p in a.factors:
            p.frozen = self.listed(a)
        return True

    def freeze(self, axis: Axis) -> None:
        for a in self.leaves([axis]):
            if not self.listed(a):
                self._open()
                a.frozen = True

    def fix(self, axis: Axis) -> None:
        """Sizes do not matter here."""

    def count(self, axis: Axis) -> None:
        self.freeze(axis)

    def _open(self) -> None:
        if self.sealed:
            raise Sealed("axes that are in use would have to be cut")

    def product(self, axes: Sequence[Axis]) -> Axis:
        axes = [a for a in axes if a.size != 1] or list(axes[:1])
        if len(axes) == 1:
            return axes[0]
        made = Axis(math.prod(a.size for a in axes))
        made.factors = list(axes)
        return made

    def cut(self, axis: Axis, at: int) -> None:
        """List the digits that are slower than a boundary."""
        a = axis.root()
        if at in (0, a.size):
            return
        weight = 1
        digits = self.leaves([a])
        for i in range(len(digits) - 1, -1, -1):
            d = digits[i]
            if at % (weight * d.size) == 0:
                weight *= d.size
                continue
            common = math.gcd(at // weight, d.size)
            if common > 1 and not self.listed(d):
                self.split(d, d.size // common)
                assert d.factors is not None
                d = d.factors[0]
            for x in (d, *digits[:i]):
                self.freeze(x)
            return

    def piece(self, axis: Axis, start: int, size: int) -> Axis:
        """The axis of positions start … start+size−1."""
        a = axis.root()
        if (start, size) == (0, a.size):
            return a
        if size == 0:
            return Axis(0, fixed=True)
        self.cut(a, start)
        self.cut(a, start + size)
        kept: list[Axis] = []
        weight = 1
        for d in reversed(self.leaves([a])):
            if start % (weight * d.size) or size % (weight * d.size):
                break
            kept.insert(0, d)
            weight *= d.size
        return self.product([Axis(size // weight, fixed=True), *kept])

    def regularise(self, axes: Sequence[Axis]) -> None:
        pass


def _segment(left: Sequence[Axis], right: Sequence[Axis]) -> tuple[int, int]:
    """How many of the fastest digits of both sides count equally far, as few as possible."""
    i = j = 1
    a, b = left[-1].size, right[-1].size
    while a != b:
        if a < b:
            i += 1
            a *= left[-i].size
        else:
            j += 1
            b *= right[-j].size
    return i, j
