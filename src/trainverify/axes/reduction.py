"""Small sizes for axes, and positions on them: partition structure is kept, everything else shrinks."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from trainverify.axes.structure import Axes, Axis
from trainverify.axes.views import NotABoundary as NotABoundary
from trainverify.axes.views import Views


class Sizes:
    """Reduced sizes. Equal pieces stay equal and unequal ones unequal, in the same order. So do axes along which something is
    counted and those whose positions are numbers: a buffer that overflows still does, and one that does not never.

    With `alternate`, free axes get `base` and `base + 1` in turn; without, all are as small as they can be.
    `kept` lists the positions that are left of an axis that counts devices.
    """

    def __init__(
        self,
        axes: Axes,
        used: Iterable[Axis],
        base: int = 2,
        alternate: bool = True,
        kept: Iterable[tuple[Axis, tuple[int, ...]]] = (),
    ):
        self._axes = axes
        self._kept = {id(a.root()): positions for a, positions in kept}
        self._size: dict[int, int] = {}
        self._atoms: dict[int, Axis] = {}
        self._done: dict[int, Axis] = {}
        self._known: dict[int, tuple[Axis, int]] = {}
        self._family: dict[int, int] = {}  # atom of a sum → another of the same family; sizes are ranked within one
        for axis in used:
            self._collect(axis, None)
        self._rank_counts()
        ranks: dict[int, list[int]] = {}
        for key, a in self._atoms.items():
            if key in self._family and a.size > 1:
                ranks.setdefault(self._head(key), []).append(a.size)
        order = {head: {size: base + i for i, size in enumerate(sorted(set(sizes)))} for head, sizes in ranks.items()}
        turn = 0
        room = self._room()
        for key, a in self._atoms.items():
            if key in self._kept:
                self._size[key] = len(self._kept[key])
            elif a.fixed or a.frozen or a.size <= base:
                self._size[key] = a.size
            elif key in self._family:
                self._size[key] = min(a.size, order[self._head(key)][a.size])
            else:
                self._size[key] = min(a.size, base + turn % 2 + room.get(key, 0))  # 2 and 3 in turn: nothing fits by coincidence
                turn += alternate
        self._shorten()
        if axes.views:
            self._size.update(Views(axes, self._atoms, self._size, self._kept).sizes())
            self._known.clear()
            self._shorten()
        for a, b in ((a, b) for a in axes.counted for b in axes.numbered):
            if (a.size < b.size, a.size > b.size) != (self(a) < self(b), self(a) > self(b)):
                raise NotABoundary(f"a count along {a!r} beside the numbers of {b!r}")

    def _room(self) -> dict[int, int]:
        """By the fastest digit of an axis, how many positions its shifted pieces leave out."""
        found: dict[int, int] = {}
        for a in self._atoms.values():
            if a.shorter is not None:
                digit = id(self._axes.leaves([a.shorter[0]])[-1])
                found[digit] = max(found.get(digit, 0), a.shorter[1])
        return found

    def _shorten(self) -> None:
        """Shifted pieces lack as many positions as they do at full size."""
        for key, a in self._atoms.items():
            if a.shorter is not None:
                self._size[key] = self(a)

    def _rank_counts(self) -> None:
        """Counted and numbered axes are one family."""
        if not self._axes.counted:
            return
        members = [id(a) for a in self._axes.leaves([*self._axes.counted, *self._axes.numbered]) if id(a) in self._atoms]
        for key in members:
            self._family.setdefault(key, key)
            self._family[self._head(key)] = self._head(members[0])

    def atoms(self) -> Iterator[tuple[int, int, int | None, bool, int]]:
        """(number, full size, number of its family, whether it keeps its size, reduced size) of every axis that is no product or sum."""
        number = {key: i for i, key in enumerate(self._atoms)}
        for key, a in self._atoms.items():
            family = number[self._head(key)] if key in self._family else None
            yield number[key], a.size, family, a.fixed or a.frozen, self._size[key]

    def _head(self, key: int) -> int:
        while self._family[key] != key:
            key = self._family[key]
        return key

    def _collect(self, axis: Axis, owner: int | None) -> int | None:
        """Note the atoms below an axis; those below one sum are one family. Returns a member of the family."""
        a = axis.root()
        if a.factors is not None or a.pieces is not None:
            if owner is None:
                if id(a) in self._done:
                    return None
                self._done[id(a)] = a
            member = None
            for part in a.factors or a.pieces or ():
                found = self._collect(part, owner)
                member = member if member is not None else found
                if a.pieces is not None and owner is None:
                    owner = found
            return owner if owner is not None else member
        self._atoms[id(a)] = a
        if owner is not None or id(a) in self._family:
            self._family.setdefault(id(a), id(a))
            if owner is not None:
                self._family.setdefault(owner, owner)
                self._family[self._head(id(a))] = self._head(owner)
        return id(a)

    def __call__(self, axis: Axis) -> int:
        a = axis.root()
        known = self._known.get(id(a))
        if known is None:
            known = self._known[id(a)] = a, self._sized(a)
        return known[1]

    def _sized(self, a: Axis) -> int:
        if a.factors is not None:
            return math.prod(self(f) for f in a.factors)
        if a.pieces is not None:
            return sum(self(p) for p in a.pieces)
        if a.shorter is not None:
            size = self(a.shorter[0]) - a.shorter[1]
            if size < 2:
                raise NotABoundary(f"{a.size} of {a.shorter[0].size} positions")
            return size
        return self._size.get(id(a), a.size)  # an axis made after the count: size 0 or 1, or fixed

    def position(self, axis: Axis, at: int) -> int:
        """Where a boundary of the full axis is on the reduced one."""
        a = axis.root()
        if at == 0:
            return 0
        if at == a.size:
            return self(a)
        if self(a) == a.size:  # nothing below it shrank
            return at
        if a.pieces is not None:
            start = low = 0
            for p in a.pieces:
                if start <= at < start + p.size:
                    return low + self.position(p, at - start)
                start, low = start + p.size, low + self(p)
        if a.factors is not None:
            return self._in_digits(self._axes.leaves([a]), at)
        if id(a) in self._kept:
            return bisect_left(self._kept[id(a)], at)
        raise NotABoundary(f"position {at} of {a!r}")

    def within(self, axis: Axis, start: int, full: int, size: int) -> int | None:
        """Where a slice begins on the reduced axis that begins within a shard of the full one; None for other slices."""
        if not self._axes.within(axis, start, full):
            return None
        found, fast, small = 0, 1, 1
        for d in reversed(self._axes.leaves([axis])):
            at = start // fast % d.size
            near = min(max(at * self(d) // d.size, 1), self(d) - 1) if self._inside(d, at) else self.position(d, at)
            found, fast, small = found + near * small, fast * d.size, small * self(d)
        found = min(found, self(axis) - size)
        if found % size == 0:
            raise NotABoundary(f"{start}:{start + full} of {axis!r}, at sizes at which that is a shard")
        return found

    def _inside(self, digit: Axis, at: int) -> bool:
        """Whether a position is one of a digit without pieces that has others now."""
        return at > 0 and self(digit) != digit.size and digit.pieces is None and id(digit) not in self._kept

    def first(self, axis: Axis, start: int) -> int:
        """The first of numbers that count along an axis: where that is on longer axes that end with it, else so many of its blocks."""
        if start == 0:
            return 0
        digits = self._axes.leaves([axis])
        whole = [a for a in self._done.values() if 0 < start <= a.size - axis.size and self._ends_with(a, digits)]
        found = {self.position(a, start) for a in whole}
        if len(found) == 1:
            return found.pop()
        if found or (self(axis) != axis.size and start % axis.size):
            raise NotABoundary(f"integers from {start} on, {axis.size} of them")
        return start if self(axis) == axis.size else start // axis.size * self(axis)

    def _ends_with(self, axis: Axis, digits: Sequence[Axis]) -> bool:
        """Whether these are the last digits of an axis, or of one of its pieces; no digits are a piece of one element."""
        own = self._axes.leaves([axis])
        if digits and len(own) >= len(digits) and all(a is b for a, b in zip(own[-len(digits) :], digits, strict=True)):
            return True
        return bool(own) and any((not digits and p.size == 1) or self._ends_with(p, digits) for p in own[-1].pieces or ())

    def _in_digits(self, digits: Sequence[Axis], at: int) -> int:
        """A position, digit by digit."""
        full, small = math.prod(d.size for d in digits), math.prod(self(d) for d in digits)
        found = 0
        for d in digits:
            full, small = full // d.size, small // max(self(d), 1)
            slow, at = divmod(at, full)
            kept = self._kept.get(id(d))
            if kept is not None and slow not in kept:  # inside of what was left out
                return found + bisect_left(kept, slow) * small
            found += self.position(d, slow) * small
            if not at:
                break
        return found
