"""Leaf positions of tensors, and how a piece lies in a whole.

The dimensions of a tensor are lists of leaf axes. An atom gets a position variable. An axis of unequal pieces gets a
*tag* (which piece) followed by the leaves of all its pieces; a tensor has one form per combination of tags, its *blocks*,
and a block depends on the leaves of its own pieces only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainverify.axes.structure import Axes, Axis
from trainverify.prove.algebra.kernel import Index, Unsupported

Key = tuple[int, ...]  # the tags of a block, in order


@dataclass(frozen=True)
class Leaf:
    axis: Axis
    tag: bool = False
    owner: tuple[int, int] | None = None  # (position of a tag, the piece it must choose) for leaves of a piece


@dataclass(frozen=True)
class Grid:
    """The leaves of a tensor, numbered from 0; leaf n has the variable -1 - n."""

    leaves: tuple[Leaf, ...]
    spans: tuple[range, ...]  # per dimension
    tags: tuple[int, ...]

    def blocks(self) -> Iterator[Key]:
        """All blocks."""
        return itertools.product(*(range(self.leaves[t].axis.size) for t in self.tags))

    def active(self, key: Key) -> list[int]:
        """Leaves that have a variable in a block."""
        if not self.tags:
            return list(range(len(self.leaves)))
        chosen = dict(zip(self.tags, key, strict=True))
        found: list[int] = []
        alive: set[int] = set()
        for i, leaf in enumerate(self.leaves):
            if leaf.owner is None or (leaf.owner[0] in alive and chosen[leaf.owner[0]] == leaf.owner[1]):
                if leaf.tag:
                    alive.add(i)
                else:
                    found.append(i)
        return found


class Grids:
    """Makes grids; the tag axis of a sum is the same object every time."""

    def __init__(self, axes: Axes):
        self.axes = axes
        self._tags: dict[int, tuple[Axis, Axis]] = {}
        self._known: dict[tuple[int, ...], Grid] = {}

    def of(self, dims: Sequence[Axis]) -> Grid:
        roots = [d.root() for d in dims]
        key = tuple(map(id, roots))
        if key not in self._known:
            leaves: list[Leaf] = []
            spans = []
            for d in roots:
                start = len(leaves)
                self._expand(d, None, leaves)
                spans.append(range(start, len(leaves)))
            tags = tuple(i for i, leaf in enumerate(leaves) if leaf.tag)
            self._known[key] = Grid(tuple(leaves), tuple(spans), tags)
        return self._known[key]

    def _expand(self, axis: Axis, owner: tuple[int, int] | None, into: list[Leaf]) -> None:
        for a in self.axes.leaves([axis]):
            if a.pieces is None:
                into.append(Leaf(a, False, owner))
            else:
                at = len(into)
                into.append(Leaf(self.tag(a), True, owner))
                for t, p in enumerate(a.pieces):
                    self._expand(p, (at, t), into)

    def tag(self, total: Axis) -> Axis:
        a = total.root()
        if id(a) not in self._tags:
            self._tags[id(a)] = (a, Axis(len(a.pieces or ()), fixed=True))
        return self._tags[id(a)][1]

    def width(self, axis: Axis) -> int:
        """How many leaves an axis expands to."""
        return len(self.of([axis]).leaves)

    # -- a piece of an axis ------------------------------------------------------------------------------------------

    def place(self, whole: Axis, piece: Axis, offset: Offset, mesh_sizes: dict[Index, int], step: int = 1) -> list[Spot]:
        """For every leaf of `whole`: where it comes from when only `piece` (at an offset) is looked at.

        A leaf is kept (a leaf of the piece), fixed (a digit), shifted (a tag, by a number of pieces) or does not matter.
        """
        units, kept = self.axes.leaves([whole]), self.axes.leaves([piece])
        sizes = [u.size for u in units]
        weights = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        digits: list[Index] = list(mixed_radix(offset.base, sizes))
        for variable, stride in offset.strides:
            if mesh_sizes[variable] == 1:
                continue
            hits = [i for i, w in enumerate(weights) if w == stride and sizes[i] == mesh_sizes[variable] and digits[i] == 0]
            if not hits or units[hits[0]].pieces is not None:
                raise Unsupported(f"an offset of {stride} per mesh coordinate on an axis of {sizes}")
            digits[hits[0]] = variable
        spots: list[list[Spot]] = [[] for _ in units]
        left = list(kept)
        weight = step  # the weight that the next kept leaf must have
        for i in range(len(units) - 1, -1, -1):
            unit = units[i]
            if left and left[-1] is unit and weights[i] == weight and digits[i] == 0:
                left.pop()
                weight *= unit.size
                spots[i] = [Spot("kept", self._offset(kept[: len(left)], n)) for n in range(self.width(unit))]
            elif unit.pieces is not None:
                taken = self._pieces(unit, int(digits[i]), left, weights[i] == weight, kept)
                if taken is None:
                    raise Unsupported(f"a piece {kept} of {units}")
                spots[i], used = taken
                for a in left[len(left) - used :] if used else []:
                    weight *= a.size
                left = left[: len(left) - used]
            else:
                spots[i] = [Spot("fixed", digits[i])]
        if left:
            raise Unsupported(f"a piece {kept} of {units}")
        return [s for group in spots for s in group]

    def _offset(self, before: Sequence[Axis], n: int) -> int:
        return sum(self.width(a) for a in before) + n

    def _pieces(self, total: Axis, at: int, left: list[Axis], aligned: bool, kept: list[Axis]) -> tuple[list[Spot], int] | None:
        """A sum of which one piece, or several in a row, are looked at."""
        assert total.pieces is not None
        starts = list(itertools.accumulate((p.size for p in total.pieces), initial=0))
        if at not in starts[:-1]:
            return None
        first = starts.index(at)
        units = self.axes.leaves([total.pieces[first]])
        count = len(units)
        if (not units or aligned) and len(left) >= count and all(x is y for x, y in zip(left[len(left) - count :], units, strict=True)):
            spots = [Spot("fixed", first)]
            for t, p in enumerate(total.pieces):
                base = self._offset(kept[: len(left) - count], 0)
                spots += [Spot("kept", base + n) if t == first else Spot("none", 0) for n in range(self.width(p))]
            return spots, count
        if aligned and left and left[-1].pieces is not None:
            inner = [p.root() for p in left[-1].pieces]
            mine = [p.root() for p in total.pieces[first : first + len(inner)]]
            if len(mine) == len(inner) and all(x is y for x, y in zip(mine, inner, strict=True)):
                base = self._offset(kept[: len(left) - 1], 0)
                spots = [Spot("shifted", base, first, len(inner))]
                at_leaf = base + 1
                for t, p in enumerate(total.pieces):
                    inside = first <= t < first + len(inner)
                    for _ in range(self.width(p)):
                        spots.append(Spot("kept", at_leaf) if inside else Spot("none", 0))
                        at_leaf += inside
                return spots, 1
        return None


@dataclass(frozen=True)
class Spot:
    """Where a leaf of a whole comes from: leaf `value` of the piece, digit `value`, or a tag less `shift`."""

    kind: str  # "kept", "fixed", "shifted", "none"
    value: Index
    shift: int = 0
    count: int = 0


@dataclass(frozen=True)
class Offset:
    """An integer that may depend on the mesh: base + Σ stride · mesh variable."""

    base: int
    strides: tuple[tuple[Index, int], ...] = ()


def mixed_radix(value: int, sizes: Sequence[int]) -> list[int]:
    """Digits, slow first."""
    found = []
    for s in reversed(sizes):
        value, d = divmod(value, s)
        found.append(d)
    if value:
        raise Unsupported("an offset beyond the end of its axis")
    return found[::-1]
