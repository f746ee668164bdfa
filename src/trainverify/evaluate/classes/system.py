"""Cells for all axes and ranks of a system, and both programs as tasks on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Final

import numpy as np

from trainverify.axes.cells import Cells, NoCells, Partition, cells_of, product, whole
from trainverify.axes.inference import Dims
from trainverify.axes.loose import LooseAxes
from trainverify.axes.structure import Axis
from trainverify.axes.system import LoweredOp, MeetingAxes, System
from trainverify.domains.arrays import Array
from trainverify.evaluate.classes.ops import ClassOp
from trainverify.evaluate.classes.ranks import RankClasses
from trainverify.evaluate.flow import Task, needed
from trainverify.evaluate.small import Meeting, Step, Wires, mesh_axes
from trainverify.graph.lineage import Layout, Part
from trainverify.primitives.node import Node, ordered

SINGLE: Final = 2  # positions of an axis that are cells of their own
ALL_RANKS: Final = 16  # up to which every rank is one
ELEMENTS: Final = 150_000_000  # on cells, of all tensors together
STEPS: Final = 150_000  # ops of all classes of ranks together
_ONE: Final = whole(1)


@dataclass(frozen=True)
class ClassStep(Step):
    """An op for some rows; `variants` are what the ranks do that these rows stand for."""

    variants: tuple[LoweredOp, ...] = ()


class Classes:
    """Cells for all axes and ranks of a system."""

    def __init__(self, system: System, single: int = SINGLE, all_ranks: int = ALL_RANKS, positions: bool = False):
        """With `positions`, every position of an axis along which an op counts is a cell of its own: masks tell them apart."""
        if system.flat or system.lists or isinstance(system.inference.axes, LooseAxes):
            raise NoCells("axes that are not aligned position by position")
        self.system = system
        self.single = single
        self._rows: set[int] = set()
        for some in system.inference.choices:
            self._rows.update(id(a) for a in system.inference.axes.leaves([axis for axis in some if axis is not None]))
        self._counted = counted(system) if positions else set[int]()
        self.ranks = RankClasses(system, self._rows, single, all_ranks)
        self.cells = Partition(system.inference.axes, self._choose)
        self.wires = Wires(system, self.ranks.there, joined=False)
        self._orders: dict[tuple[int, ...], tuple[object, ClassOp]] = {}

    @cached_property
    def place(self) -> dict[int, tuple[int, int]]:
        """Class and row of every rank that stands for some."""
        return {r: (c, row) for c, mine in enumerate(self.wires._classes) for row, r in enumerate(mine)}

    def _choose(self, a: Axis) -> Cells:
        if id(a) in self.ranks.mesh_cells:
            return cells_of(self.ranks.mesh_cells[id(a)], a.size)
        if a.fixed and a.size in self.ranks.sizes and id(a) not in self._rows:
            return cells_of(self.ranks.sizes[a.size], a.size)
        if a.fixed or a.frozen or a.size <= self.single + 1 or id(a) in self._counted:
            return whole(a.size)
        return cells_of(np.minimum(np.arange(a.size), self.single), a.size)

    def dims(self, dims: Dims) -> list[Cells]:
        return [self.cells(a) for a in dims]

    def elements(self) -> int:
        """Of all tensors, on cells."""
        scopes = [(self.system.scope, 1)]
        scopes += [(self.system.unit_scopes[u], len(rows)) for u, rows in zip(self.wires._units, self.wires._classes, strict=True)]
        known: dict[int, int] = {}
        total = 0
        for scope, rows in scopes:
            for dims in scope.dims.values():
                if id(dims) not in known:
                    known[id(dims)] = math.prod(len(c) for c in self.dims(dims))
                total += rows * known[id(dims)]
        return total

    def elements_for(self, logical: Sequence[str], local: Sequence[tuple[int, str]]) -> list[int]:
        """Elements that ops make on their way to some tensors of both programs, on cells."""
        found = []
        for tasks, names in ((self.logical_tasks, [(0, n) for n in logical]), (self.plan_tasks, local)):
            for step in (tasks[n].what for n in needed(tasks, names)):
                if isinstance(step, ClassStep):
                    found += [len(step.rows) * math.prod(map(len, cells)) for cells in self.op(step.variants).cells]
        return found

    # -- what is computed -------------------------------------------------------------------------------------------------

    @cached_property
    def logical_tasks(self) -> list[Task]:
        ops = self.system.logical.ops
        found = []
        for n, (x,) in self.system.logical_ops.items():
            step = ClassStep(ops[n], n, (0,), ops[n].inputs, ops[n].outputs, x.lowered.outputs, (x.lowered, x.axes), (x,))
            found.append(Task(step, 0, tuple((0, i) for i in step.inputs if i is not None), tuple((0, o) for o in step.outputs)))
        return found

    @cached_property
    def plan_tasks(self) -> list[Task]:
        system = self.system
        found: list[Task] = []
        for c, (u, mine) in enumerate(zip(self.wires._units, self.wires._classes, strict=True)):
            program, unit = system.unit_programs[u], system.talk.units[u]
            place = {r: row for row, r in enumerate(unit.ranks)}
            behind = [[place[int(r)] for r in self.ranks.members[rep]] for rep in mine]  # rows of the unit, by row of the class
            for n, variants in system.unit_ops[u].items():
                op = program.ops[n]
                for rows, some in self._variants(variants, behind):
                    first = some[0]
                    step = ClassStep(op, n, rows, op.inputs, op.outputs, first.lowered.outputs, (first.lowered, first.axes), some)
                    found.append(Task(step, c, tuple((c, i) for i in op.inputs if i is not None), tuple((c, o) for o in op.outputs)))
        for m, axes in zip(self.wires.meetings(), system.meetings, strict=True):
            self._axes_of[id(m)] = axes
            found.append(Task(m, -1, tuple(m.given.items()), tuple(m.taken.items())))
        return found

    @cached_property
    def _axes_of(self) -> dict[int, MeetingAxes]:
        return {}

    def groups(self, meeting: Meeting) -> list[Array]:
        """The members of all groups of a rendezvous, also those that others stand for, in the order of its wiring."""
        talk = self.system.talk
        ops = self._axes_of[id(meeting)].ops
        names = {str(talk.value(r, op.get("group"))): None for c, op in ops for r in self.wires._classes[c]}
        return [np.asarray(talk.groups[name]) for name in names]

    def fits(self, cells: Sequence[Cells], dims: Dims) -> None:
        """Raise NoCells unless a tensor has these cells."""
        if len(cells) != len(dims) or not all(c.same(self.cells(a)) for c, a in zip(cells, dims, strict=True)):
            raise NoCells("a tensor that is cut otherwise where it is used")

    @staticmethod
    def _variants(
        variants: Sequence[LoweredOp], behind: Sequence[Sequence[int]]
    ) -> Iterator[tuple[tuple[int, ...], tuple[LoweredOp, ...]]]:
        """Rows that stand for the same variants of an op."""
        if len(variants) == 1:
            yield tuple(range(len(behind))), (variants[0],)
            return
        of = {row: k for k, x in enumerate(variants) for row in x.rows}
        found: dict[tuple[int, ...], list[int]] = {}
        for row, mine in enumerate(behind):
            found.setdefault(tuple(dict.fromkeys(of[m] for m in mine if m in of)), []).append(row)
        for which, rows in found.items():
            if which:
                yield tuple(rows), tuple(variants[k] for k in which)

    def op(self, variants: tuple[LoweredOp, ...]) -> ClassOp:
        key = tuple(n for x in variants for n in (id(x.lowered), id(x.axes)))
        if key not in self._orders:
            self._orders[key] = variants, ClassOp(self.system.inference.axes, self.dims, [(x.lowered, x.axes) for x in variants])
        return self._orders[key][1]

    # -- lineage ----------------------------------------------------------------------------------------------------------

    def index(self, lay: Layout, rank: int) -> Array:
        """For every cell of a local tensor the cell of the logical one that it holds, counted in the flattened tensor; −1 for padding."""
        key = (id(lay), rank)
        if key not in self._indices:
            found: Array | None = None
            for r, at in self._told_apart(lay, rank):
                other = self._index(lay, r, at)
                if found is not None and other is not found and (other != found).any():
                    raise NoCells(f"{lay} differs within a class of ranks")
                found = other
            assert found is not None
            self._indices[key] = lay, found
        return self._indices[key][1]

    @cached_property
    def _indices(self) -> dict[tuple[int, int], tuple[Layout, Array]]:
        return {}

    @cached_property
    def _parts(self) -> dict[object, Array]:
        return {}

    def _told_apart(self, lay: Layout, rank: int) -> Iterator[tuple[int, tuple[int, ...] | None]]:
        """The ranks that a rank stands for, but one of those that hold the same, and the coordinates on which that depends."""
        mesh = self.system.plan.mesh
        used = mesh_axes(lay, mesh)
        if used is None:
            yield from ((int(r), None) for r in self.ranks.members[rank])
            return
        at = dict(zip(mesh.names, np.unravel_index(self.ranks.members[rank], [mesh.length(a) for a in mesh.names]), strict=True))
        seen: set[tuple[int, ...]] = set()
        columns = [at[a].tolist() for a in used]
        for r, where in zip(self.ranks.members[rank].tolist(), zip(*columns, strict=True) if columns else repeat(()), strict=False):
            if where not in seen:
                seen.add(where)
                yield r, where

    def _index(self, lay: Layout, rank: int, at: tuple[int, ...] | None) -> Array:
        system = self.system
        logical = self.dims(system.scope.dims[lay.logical])
        local = self.dims(system.unit_scopes[system.talk.unit_of[rank]].dims[lay.local])
        key = None if at is None else (lay.form, at, tuple(map(id, logical)), tuple(map(id, local)))
        if key is None or key not in self._parts:
            made = np.full(tuple(map(len, local)), -2)
            for part in lay.parts(system.plan.mesh, rank, system.logical.tensors[lay.logical].shape):
                if part.partial is not None:
                    raise NoCells("shares of a sum")
                self._part(part, made, local, logical)
            if key is None:
                return made
            self._parts[key] = made
        return self._parts[key]

    def _part(self, part: Part, made: Array, local: Sequence[Cells], logical: Sequence[Cells]) -> None:
        inside, outside = ([product([_ONE, *local])], [product([_ONE, *logical])]) if part.flat else (local, logical)
        flat = made.reshape(-1) if part.flat else made
        maps = []
        for at, run, a, b in zip(part.local, part.logical, inside, outside if not part.padding else inside, strict=True):
            mine = a.of[at : at + run.size]
            theirs = np.zeros(run.size, dtype=np.int64) if part.padding else b.of[run.positions()]
            maps.append(_matched(mine, theirs, a))
        index, stride = np.zeros((1,) * len(maps), dtype=np.int64), 1
        known = np.ones((1,) * len(maps), dtype=bool)
        for d in reversed(range(len(maps))):
            shape = [1] * len(maps)
            shape[d] = -1
            index = index + np.maximum(maps[d], 0).reshape(shape) * stride
            known = known & (maps[d] >= 0).reshape(shape)
            stride *= len(outside[d])
        target = np.broadcast_to(known, flat.shape)
        flat[target] = -1 if part.padding else np.broadcast_to(index, flat.shape)[target]


def counted(system: System) -> set[int]:
    """Axes along which an op counts positions, and those that are cut out of them or joined from them."""
    found: set[int] = set()
    together: dict[int, set[int]] = {}

    def leaves(x: LoweredOp, node: Node) -> set[int]:
        return {id(a.root()) for a in system.inference.axes.leaves(x.axes.dims[id(node)])}

    for x in (x for ops in (system.logical_ops, *system.unit_ops) for variants in ops.values() for x in variants):
        for node in ordered(tuple(x.lowered.outputs)):
            if node.prim == "iota":
                found |= leaves(x, node)
            elif node.prim in ("slice", "concat", "pad"):
                parts = [leaves(x, n) for n in (node, *node.args)]
                changed = parts[0].union(*parts) - parts[0].intersection(*parts)
                for a in changed:
                    together.setdefault(a, set()).update(changed)
    ahead = list(found)
    while ahead:
        new = together.get(ahead.pop(), set()) - found
        found |= new
        ahead += new
    return found


def _matched(mine: Array, theirs: Array, cells: Cells) -> Array:
    """For every cell the one that all of its positions map to; −1 for a cell of which no position is there."""
    low = np.full(len(cells), np.iinfo(np.int64).max)
    high = np.full(len(cells), -1)
    np.minimum.at(low, mine, theirs)
    np.maximum.at(high, mine, theirs)
    there = np.bincount(mine, minlength=len(cells))
    if ((there > 0) & ((there != cells.count) | (low != high))).any():
        raise NoCells("lineage that cuts a class of positions")
    return np.where(there > 0, high, -1)
