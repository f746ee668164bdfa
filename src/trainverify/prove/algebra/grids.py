"""Leaf positions of tensors, and how a piece lies in a whole.

The dimensions of a tensor are lists of leaf axes. An atom gets a position variable. An axis of unequal pieces gets a
*tag* (which piece) followed by the leaves of all its pieces; a tensor has one form per combination of tags, its *blocks*,
and a block depends on the leaves of its own pieces only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trainverify.axes.structure import Axes, Axis
from trainverify.prove.algebra.terms import Index, Unsupported

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
        self._known: dict[tuple[int, ...], tuple[Grid, list[Axis]]] = {}  # ids of axes → grid, those axes

    def of(self, dims: Sequence[Axis]) -> Grid:
        roots = [d.root() for d in dims]
        key = tuple(map(id, roots))
        known = self._known.get(key)
        if known is None:
            leaves: list[Leaf] = []
            spans = []
            for d in roots:
                start = len(leaves)
                self._expand(d, None, leaves)
                spans.append(range(start, len(leaves)))
            tags = tuple(i for i, leaf in enumerate(leaves) if leaf.tag)
            known = self._known[key] = Grid(tuple(leaves), tuple(spans), tags), roots
        return known[0]

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
        strides: list[list[tuple[Index, int]]] = [[] for _ in units]  # within sums
        for variable, stride in offset.strides:
            if mesh_sizes[variable] == 1:
                continue
            hits = [i for i, w in enumerate(weights) if w == stride and sizes[i] == mesh_sizes[variable] and digits[i] == 0]
            inside = [i for i, w in enumerate(weights) if stride % w == 0 and abs(stride) < w * sizes[i] and units[i].pieces is not None]
            if hits and units[hits[0]].pieces is None:
                digits[hits[0]] = variable
            elif inside:
                strides[inside[0]].append((variable, stride // weights[inside[0]]))
            else:
                raise Unsupported(f"an offset of {stride} per mesh coordinate on an axis of {sizes}")
        spots: list[list[Spot]] = [[] for _ in units]
        left = list(kept)
        weight = step  # the weight that the next kept leaf must have
        for i in range(len(units) - 1, -1, -1):
            unit = units[i]
            if left and left[-1] is unit and weights[i] == weight and digits[i] == 0 and not strides[i]:
                left.pop()
                weight *= unit.size
                spots[i] = [Spot("kept", self._offset(kept[: len(left)], n)) for n in range(self.width(unit))]
            elif unit.pieces is not None:
                taken = self._pieces(unit, Offset(int(digits[i]), tuple(strides[i])), left, weights[i] == weight, kept, mesh_sizes)
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

    def _pieces(
        self, total: Axis, offset: Offset, left: list[Axis], aligned: bool, kept: list[Axis], mesh_sizes: dict[Index, int]
    ) -> tuple[list[Spot], int] | None:
        """A sum of which one piece, a part of one, or several in a row are looked at."""
        assert total.pieces is not None
        starts = list(itertools.accumulate((p.size for p in total.pieces), initial=0))
        at = offset.base
        first = max(t for t, start in enumerate(starts[:-1]) if start <= at)
        inner = Offset(at - starts[first], offset.strides)
        mine = left if aligned else []  # of a part of the sum nothing slower is left
        size = math.prod(a.size for a in mine)
        reach = at + size + sum(max(0, s) * (mesh_sizes[v] - 1) for v, s in offset.strides)
        if reach <= starts[first + 1] and all(s > 0 for _, s in offset.strides):
            found = self.place(total.pieces[first], self.axes.product(mine) if mine else Axis(1), inner, mesh_sizes)
            base = self._offset(kept[: len(left) - len(mine)], 0)
            spots = [Spot("fixed", first)]
            for t, p in enumerate(total.pieces):
                if t == first:
                    spots += [replace(s, value=s.value + base) if s.kind in ("kept", "shifted") else s for s in found]
                else:
                    spots += [Spot("none", 0)] * self.width(p)
            return spots, len(mine)
        if offset.strides or at not in starts[:-1]:
            return None
        if aligned and left and left[-1].pieces is not None:
            group = [p.root() for p in left[-1].pieces]
            same = [p.root() for p in total.pieces[first : first + len(group)]]
            if len(same) == len(group) and all(x is y for x, y in zip(same, group, strict=True)):
                base = self._offset(kept[: len(left) - 1], 0)
                spots = [Spot("shifted", base, first, len(group))]
                at_leaf = base + 1
                for t, p in enumerate(total.pieces):
                    inside = first <= t < first + len(group)
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
    """A number that may depend on the mesh: (base + Σ stride · mesh variable) / over; only literals have an `over`."""

    base: int
    strides: tuple[tuple[Index, int], ...] = ()
    over: int = 1


def mixed_radix(value: int, sizes: Sequence[int]) -> list[int]:
    """Digits, slow first."""
    if 0 in sizes:
        raise Unsupported("a position in an axis that has none")
    found = []
    for s in reversed(sizes):
        value, d = divmod(value, s)
        found.append(d)
    if value:
        raise Unsupported("an offset beyond the end of its axis")
    return found[::-1]
