"""Which axes can lose positions: those that no op takes apart or puts together position by position (the halves of a rotated vector)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from trainverify.axes.reduction import NotABoundary, Sizes
from trainverify.axes.shrink import alike, shrink
from trainverify.axes.structure import Axis
from trainverify.axes.system import LoweredOp, System
from trainverify.primitives.node import topological

Left = Sequence[tuple[Axis, tuple[int, ...]]]  # axes, and the positions that are left of them

_FULL: Final = 1 << 60  # nothing larger than this shrinks
_TAKES_APART: Final = ("slice", "concat", "pad", "iota", "one_hot", "reshape", "rowwise", "map")


@dataclass
class _Sort:
    """Ops that shrink alike."""

    op: LoweredOp
    logical: bool = False  # whether the logical program has one
    rows: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)  # by unit: rows that have one, by their id


class Apart:
    def __init__(self, system: System):
        self.system = system
        self._by_leaf: dict[int, list[_Sort]] = {}
        prims: dict[int, bool] = {}
        sorts: dict[object, _Sort] = {}
        known: dict[int, _Sort] = {}  # by id of axes
        for u, ops in enumerate((system.logical_ops, *system.unit_ops)):
            for x in (x for variants in ops.values() for x in variants):
                if id(x.lowered) not in prims:
                    prims[id(x.lowered)] = any(n.prim in _TAKES_APART for n in topological(x.lowered.outputs))
                if not prims[id(x.lowered)]:
                    continue
                sort = known.get(id(x.axes))
                if sort is None:
                    sort = known[id(x.axes)] = sorts.setdefault(alike(x.lowered, x.axes), _Sort(x))
                if u == 0:
                    sort.logical = True
                else:
                    sort.rows.setdefault(u - 1, {})[id(x.rows)] = x.rows
        leaves = system.inference.axes.leaves
        below: dict[int, list[int]] = {}
        for sort in sorts.values():
            roots = {id(r): r for dims in sort.op.axes.dims.values() for r in [a.root() for a in dims]}
            found: set[int] = set()
            for key, r in roots.items():
                if key not in below:
                    below[key] = [id(x) for x in _all_below(leaves([r]))]
                found.update(below[key])
            for leaf in found:
                self._by_leaf.setdefault(leaf, []).append(sort)

    def free(self, left: Left, there: Collection[int] | None = None, sorts: bool = True) -> bool:
        """Whether axes can lose positions on these ranks (all, if not said); without `sorts`, however they are sorted."""
        if any(x.pieces is not None or x.frozen for x, _ in left):
            return False
        axes = self.system.inference.axes
        sizes = Sizes(axes, self.system.inference.all if axes.views else [x for x, _ in left], base=_FULL, kept=left)
        units = self.system.talk.units
        here = None if there is None else [frozenset(row for row, r in enumerate(u.ranks) if r in there) for u in units]
        for sort in {id(s): s for x, _ in left for s in self._by_leaf.get(id(x), ())}.values():
            if not sort.logical and here is not None and all(here[u].isdisjoint(r) for u, rs in sort.rows.items() for r in rs.values()):
                continue
            try:
                shrink(sort.op.lowered.outputs, sort.op.axes, sizes, sorts)
            except NotABoundary:
                return False
        return True


def _all_below(leaves: Sequence[Axis]) -> list[Axis]:
    """Leaves, and what those that are sums are made of."""
    found, stack = [], list(leaves)
    while stack:
        x = stack.pop().root()
        found.append(x)
        stack += x.factors or x.pieces or ()
    return found
