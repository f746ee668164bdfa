"""Both programs at their own sizes and on all of their ranks, evaluated on a few classes of positions and of ranks.

Every axis is cut into cells (`axes.cells`): the first positions one by one, the others together. Inputs have one value on each
cell; sums count a cell as often as it has positions (`evaluate.classed`). Ranks that run one program are cells of mesh axes. So a
literal keeps its meaning: a mean over 4096 is one, and so is a division by the number of ranks. What depends on the order of
positions within a cell is unknown, and what is unknown is not compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Final

import numpy as np

from trainverify.axes.cells import Cells, NoCells, Partition, cells_of, product, whole
from trainverify.axes.inference import Dims, NodeAxes
from trainverify.axes.loose import LooseAxes
from trainverify.axes.structure import Axis
from trainverify.axes.system import LoweredOp, MeetingAxes, Scope, System
from trainverify.domains.arrays import Array
from trainverify.evaluate.classed import EXACT, Classed, ClassedDomain, NoValue, Real, Whole, moved, together
from trainverify.evaluate.flow import Task, levels, needed
from trainverify.evaluate.moved import Moved, changed
from trainverify.evaluate.small import Groups, Meeting, Step, Wires, mesh_axes
from trainverify.graph.lineage import Layout, Part
from trainverify.graph.obligations import Obligation
from trainverify.graph.program import Domain, Op, Program
from trainverify.ops.table import Lowered
from trainverify.primitives.node import Node, ordered
from trainverify.primitives.scalars import Undecided

SINGLE: Final = 2  # positions of an axis that are cells of their own
ALL_RANKS: Final = 16  # up to which every rank is one
ELEMENTS: Final = 150_000_000  # on cells, of all tensors together
STEPS: Final = 150_000  # ops of all classes of ranks together


@dataclass(frozen=True)
class ClassStep(Step):
    """An op for some rows; `variants` are what the ranks do that these rows stand for."""

    variants: tuple[LoweredOp, ...] = ()


@dataclass(frozen=True)
class Compared:
    """What a rank holds beside what it should: numbers where both are known."""

    obligation: Obligation
    layout: Layout
    rank: int
    known: int  # elements that were compared
    gap: float  # the largest difference, relative to the largest known entry
    got: object = None
    want: object = None
    index: tuple[int, ...] = ()  # in the logical tensor: the first position of the cell
    place: int = 0  # in the flattened cells of the local tensor


class Classes:
    """Cells for all axes and ranks of a system. `apart` are (mesh axis, digit) values that must be cells of their own."""

    def __init__(self, system: System, single: int = SINGLE, all_ranks: int = ALL_RANKS):
        if system.flat or system.lists or isinstance(system.inference.axes, LooseAxes):
            raise NoCells("axes that are not aligned position by position")
        self.system = system
        self.single = single
        self.all_ranks = all_ranks
        self._mesh_cells: dict[int, Array] = {}
        self._sizes: dict[int, Array] = {}  # cells of mesh axes by their size: what counts ranks is cut as they are
        self._rows: set[int] = set()
        for some in system.inference.choices:
            self._rows.update(id(a) for a in system.inference.axes.leaves([axis for axis in some if axis is not None]))
        self.kept = self._ranks()
        if not self._alike():  # every rank by itself
            self._mesh_cells, self._sizes = {}, {}
            self.kept = {a: np.arange(system.plan.mesh.length(a)) for a in system.plan.mesh.names}
            del self.stand_in
        self.cells = Partition(system.inference.axes, self._choose)
        self.there = frozenset(int(r) for r in np.unique(self.stand_in))
        self.wires = Wires(system, self.there, joined=False)
        self._orders: dict[tuple[int, ...], tuple[object, _Op]] = {}

    # -- ranks -------------------------------------------------------------------------------------------------------

    def _ranks(self) -> Mapping[str, Array]:
        """For every mesh axis the coordinate that stands for each one; cells of its digits are noted."""
        system, mesh = self.system, self.system.plan.mesh
        found = {a: np.arange(mesh.length(a)) for a in mesh.names}
        if mesh.size > self.all_ranks:
            sorts = self._sorts().reshape([mesh.length(a) for a in mesh.names])
            separate = self._separate()
            leaves = {a: system.inference.axes.leaves([system.inference.mesh_axis(mesh, a)]) for a in mesh.names}
            seen = [id(x) for several in leaves.values() for x in several]
            for n, a in enumerate(mesh.names):
                if a in separate or any(x.pieces is not None or id(x) in self._rows or seen.count(id(x)) > 1 for x in leaves[a]):
                    continue
                flat = np.moveaxis(sorts, n, 0).reshape(mesh.length(a), -1)
                kinds = np.unique(flat, axis=0, return_inverse=True)[1].reshape([x.size for x in leaves[a]])
                digits = []
                for i, x in enumerate(leaves[a]):
                    alike = np.unique(np.moveaxis(kinds, i, 0).reshape(x.size, -1), axis=0, return_inverse=True)[1].reshape(-1)
                    cells = self._few(alike)
                    self._mesh_cells[id(x)] = cells
                    self._sizes.setdefault(x.size, cells)
                    first = np.unique(cells, return_index=True)[1]
                    digits.append(first[cells])
                stands = np.zeros(1, dtype=np.int64)
                for x, d in zip(leaves[a], digits, strict=True):
                    stands = (stands[:, None] * x.size + d[None, :]).reshape(-1)
                found[a] = stands
        return found

    def _few(self, kinds: Array) -> Array:
        """Cells of positions of several kinds: of each the first ones alone, the others together."""
        cells = np.empty(len(kinds), dtype=np.int64)
        names: dict[tuple[int, int], int] = {}
        seen: dict[int, int] = {}
        for i, k in enumerate(kinds.tolist()):
            n = seen[k] = seen.get(k, -1) + 1
            cells[i] = names.setdefault((k, min(n, self.single)), len(names))
        return cells

    def _sorts(self) -> Array:
        """What is known of every rank but its coordinates, as a number."""
        system = self.system
        columns = [np.zeros(system.plan.mesh.size, dtype=np.int64)]
        for i, k in enumerate(system.schedule.classes):
            columns[0][list(k.ranks)] = i + 1
        for holders in {frozenset(ranks) for _, ranks in system.holdings()}:
            if len(holders) < system.plan.mesh.size:
                column = np.zeros(system.plan.mesh.size, dtype=np.int64)
                column[list(holders)] = 1
                columns.append(column)
        return np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)[1].reshape(-1)

    def _separate(self) -> set[str]:
        """Mesh axes along which ranks talk to each other by name: rings, roots, groups that are no whole axes; and lineage by rank."""
        system, mesh, talk = self.system, self.system.plan.mesh, self.system.talk
        found: set[str] = set()
        seen: set[object] = set()
        for meeting in system.meetings:
            for c, op in meeting.ops:
                key = (c, op.get("peer"), op.get("root"), op.get("group"), meeting.lowered is None or meeting.mesh_axes is None)
                if key in seen:
                    continue
                seen.add(key)
                for r in system.schedule.classes[c].ranks:
                    at = mesh.coordinates(r)
                    named = [talk.value(r, op.get(name)) for name in ("peer", "root") if op.get(name) is not None]
                    if meeting.lowered is not None and meeting.mesh_axes is None:
                        named += talk.groups[str(talk.value(r, op.get("group")))]
                    for other in named:
                        if isinstance(other, int):
                            found.update(a for a, i in mesh.coordinates(other).items() if i != at[a])
                    if op.get("root") is not None and meeting.mesh_axes is not None:
                        found.update(meeting.mesh_axes)
                    if found >= set(mesh.names):
                        return found
        return found

    def _alike(self) -> bool:
        """Whether all ranks meet those whom the ranks meet that stand for them, in the same order."""
        talk, stands = self.system.talk, self.stand_in
        images: dict[str, Array] = {}

        def met(rank: int, op: Op) -> Array:
            name = talk.value(rank, op.get("peer") if op.get("group") is None else op.get("group"))
            if isinstance(name, int):
                return stands[[name]]
            if str(name) not in images:
                images[str(name)] = stands[list(talk.groups[str(name)])]
            return images[str(name)]

        seen: set[object] = set()
        for meeting in self.system.meetings:
            for c, op in meeting.ops:
                key = (c, op.get("peer"), op.get("group"))
                if key not in seen:
                    seen.add(key)
                    for r in self.system.schedule.classes[c].ranks:
                        mine, others = met(r, op), met(int(stands[r]), op)
                        if mine is not others and not np.array_equal(mine, others):
                            return False
        return True

    @cached_property
    def stand_in(self) -> Array:
        """The rank that stands for each rank."""
        mesh = self.system.plan.mesh
        stands = np.zeros(1, dtype=np.int64)
        for a in mesh.names:
            stands = (stands[:, None] * mesh.length(a) + self.kept[a][None, :]).reshape(-1)
        return stands

    @cached_property
    def place(self) -> dict[int, tuple[int, int]]:
        """Class and row of every rank that stands for some."""
        return {r: (c, row) for c, mine in enumerate(self.wires._classes) for row, r in enumerate(mine)}

    @cached_property
    def members(self) -> dict[int, Array]:
        """The ranks that each one stands for."""
        order = np.argsort(self.stand_in, kind="stable")
        chosen, starts = np.unique(self.stand_in[order], return_index=True)
        return {int(r): some for r, some in zip(chosen, np.split(order, starts[1:]), strict=True)}

    # -- axes --------------------------------------------------------------------------------------------------------

    def _choose(self, a: Axis) -> Cells:
        if id(a) in self._mesh_cells:
            return cells_of(self._mesh_cells[id(a)], a.size)
        if a.fixed and a.size in self._sizes and id(a) not in self._rows:
            return cells_of(self._sizes[a.size], a.size)
        if a.fixed or a.frozen or a.size <= self.single + 1:
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

    # -- what is computed --------------------------------------------------------------------------------------------

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
            behind = [[place[int(r)] for r in self.members[rep]] for rep in mine]  # rows of the unit, by row of the class
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

    def op(self, variants: tuple[LoweredOp, ...]) -> _Op:
        key = tuple(n for x in variants for n in (id(x.lowered), id(x.axes)))
        if key not in self._orders:
            self._orders[key] = variants, _Op(self, [(x.lowered, x.axes) for x in variants])
        return self._orders[key][1]

    # -- lineage -----------------------------------------------------------------------------------------------------

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
            yield from ((int(r), None) for r in self.members[rank])
            return
        at = dict(zip(mesh.names, np.unravel_index(self.members[rank], [mesh.length(a) for a in mesh.names]), strict=True))
        seen: set[tuple[int, ...]] = set()
        columns = [at[a].tolist() for a in used]
        for r, where in zip(self.members[rank].tolist(), zip(*columns, strict=True) if columns else repeat(()), strict=False):
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


_ONE: Final = whole(1)


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


class _Op:
    """An op on cells: its nodes in order, attributes of all variants, cells of all dimensions."""

    def __init__(self, classes: Classes, variants: Sequence[tuple[Lowered, NodeAxes]]):
        lowered, axes = variants[0]
        self.order = ordered(tuple(lowered.outputs))
        place = {id(n): i for i, n in enumerate(self.order)}
        self.args = [[place[id(a)] for a in n.args] for n in self.order]
        self.ends = [place[id(o)] for o in lowered.outputs]
        leaves = classes.system.inference.axes.leaves
        self.cells = [classes.dims(axes.dims[id(n)]) for n in self.order]
        for n, made, args in zip(self.order, self.cells, self.args, strict=True):
            if not _fit(n, made, [self.cells[i] for i in args]):
                raise NoCells(f"{n.prim} of what is cut in several ways")
        attrs: list[dict[str, tuple[object, ...]]] = [{repr(n.attrs): n.attrs} for n in self.order]
        self.aligned = [
            n.prim == "reshape" and [id(a) for a in leaves(axes.dims[id(n)])] == [id(a) for a in leaves(axes.dims[id(n.args[0])])]
            for n in self.order
        ]
        form = [(n.prim, n.shape, n.kind, args) for n, args in zip(self.order, self.args, strict=True)]
        for other, own in variants[1:]:
            nodes = ordered(tuple(other.outputs))
            there = {id(n): i for i, n in enumerate(nodes)}
            if [(n.prim, n.shape, n.kind, [there[id(x)] for x in n.args]) for n in nodes] != form:
                raise NoCells("an op that has another form on other ranks of a class")
            for k, n in enumerate(nodes):
                if not all(a.same(b) for a, b in zip(self.cells[k], classes.dims(own.dims[id(n)]), strict=True)):
                    raise NoCells("an op that cuts axes otherwise on other ranks of a class")
                if _but_its_start(n) != _but_its_start(self.order[k]):
                    raise NoCells("an op that does something else on other ranks of a class")
                attrs[k].setdefault(repr(n.attrs), n.attrs)
        self.attrs = [tuple(a.values()) for a in attrs]
        self.inputs = {n.attrs[0]: k for k, n in enumerate(self.order) if n.prim == "input"}
        self.nodes: list[Node] = list(self.order)

    def run(self, domain: ClassedDomain, inputs: Mapping[int, Classed], lead: int) -> list[Classed]:
        values: list[Classed] = []
        for k, node in enumerate(self.nodes):
            if node.prim == "input":
                values.append(inputs[node.attrs[0]])
                continue
            args = [values[i] for i in self.args[k]]
            if self.aligned[k]:
                values.append(domain.aligned(args[0], self.cells[k], self.cells[self.args[k][0]], lead))
            else:
                values.append(domain.node(node, self.attrs[k], args, self.cells[k], [self.cells[i] for i in self.args[k]], lead))
        return [domain.settled(values[k]) for k in self.ends]


def _but_its_start(node: Node) -> object:
    """What a node does, apart from the literals that may differ between the ranks of a class."""
    match node.prim:
        case "const":
            return None
        case "iota":
            return node.attrs[1]
        case "slice":
            return node.attrs[0], node.attrs[2]
        case "one_hot":
            return None
    return repr(node.attrs)


def _fit(node: Node, cells: Sequence[Cells], given: Sequence[Sequence[Cells]]) -> bool:
    """Whether the dimensions that a node takes for the same ones have the same cells."""

    def alike(a: Sequence[Cells], b: Sequence[Cells]) -> bool:
        return len(a) == len(b) and all(x.same(y) for x, y in zip(a, b, strict=True))

    def but(dims: Sequence[Cells], *gone: int) -> list[Cells]:
        return [c for d, c in enumerate(dims) if d not in gone]

    match node.prim:
        case "map" | "select":
            return all(alike(cells, g) for g in given)
        case "broadcast":
            return alike([cells[d] for d in node.attrs[0]], given[0])
        case "transpose":
            return alike(cells, [given[0][p] for p in node.attrs[0]])
        case "contract":
            label: dict[int, Cells] = {}
            for term, own in zip(node.attrs[0], given, strict=True):
                if not all(c.same(label.setdefault(i, c)) for i, c in zip(term, own, strict=True)):
                    return False
            return alike(cells, [label[i] for i in node.attrs[1]])
        case "reduce":
            return alike(cells, but(given[0], *node.attrs[1]))
        case "slice" | "concat" | "pad":
            return all(alike(but(cells, node.attrs[0]), but(g, node.attrs[0])) for g in given)
        case "one_hot":
            return alike(cells[:-1], given[0])
        case "gather":
            return alike(cells, given[1]) and alike(but(given[0], node.attrs[0]), but(given[1], node.attrs[0]))
        case "rowwise":
            fn, d, _ = node.attrs
            if fn in ("argmax", "argmin"):
                return alike(cells, but(given[0], d))
            if fn == "cumsum":
                return alike(cells, given[0])
            return alike(but(cells, d), but(given[0], d)) and given[0][d].whole == cells[d].whole
    return True


class Run:
    """Both programs on classes, at one point."""

    def __init__(self, classes: Classes, inputs: Mapping[str, Array], domain: ClassedDomain):
        self.classes = classes
        self.domain = domain
        self.inputs = {n: self._given(v) for n, v in inputs.items()}

    def _given(self, value: Array) -> Classed:
        if value.dtype.kind == "f":
            return Real(self.domain.real(value)[None])
        plain = value.astype(np.int64)[None]
        return Whole(plain, plain)

    def logical(self, only: Sequence[str] | None = None) -> dict[str, Classed]:
        tasks = self.classes.logical_tasks
        if only is not None:
            chosen = needed(tasks, [(0, n) for n in only])
            tasks = [t for n, t in enumerate(tasks) if n in chosen]
        values: list[_Rows] = [_Rows(1, dict(self.inputs))]
        self._run(tasks, values, [self.classes.system.scope], {(0, n) for n in only} if only is not None else None)
        return values[0].whole

    def plan(self, lineage: Sequence[Layout], only: Sequence[tuple[int, str]] | None = None) -> list[_Rows]:
        tasks = self.classes.plan_tasks
        if only is not None:
            chosen = needed(tasks, only)
            tasks = [t for n, t in enumerate(tasks) if n in chosen]
        read = {t for task in tasks for t in task.reads} | set(only or ())
        values = [_Rows(len(mine), {}) for mine in self.classes.wires._classes]
        held: dict[tuple[int, str], list[Layout]] = {}
        for lay in lineage:
            for r in lay.holders(self.classes.system.plan.mesh):
                if r in self.classes.there:
                    held.setdefault((r, lay.local), []).append(lay)
        for c, (u, mine) in enumerate(zip(self.classes.wires._units, self.classes.wires._classes, strict=True)):
            for name in self.classes.system.unit_programs[u].sources:
                if (c, name) in read or only is None:
                    with suppress(NoCells):  # its value is not there
                        if rows := [self._source(held.get((r, name), []), r) for r in mine]:
                            values[c].whole[name] = together(rows, np.stack)
        scopes = [self.classes.system.unit_scopes[u] for u in self.classes.wires._units]
        self._run(tasks, values, scopes, None if only is None else set(only))
        return values

    def _source(self, layouts: Sequence[Layout], rank: int) -> Classed:
        found: Classed | None = None
        missing: Array | None = None
        for lay in layouts:
            index = self.classes.index(lay, rank)
            flat = moved(self.inputs[lay.logical], lambda v: v.reshape(-1))
            part = moved(flat, lambda v, i=index: v[np.maximum(i, 0).reshape(-1)].reshape(i.shape))
            if (index == -1).any():
                part = self._zero(part, index == -1)
            found = part if found is None else _merged(found, part, index != -2)
            missing = index == -2 if missing is None else missing & (index == -2)
        if found is None or missing is None or missing.any():
            raise NoCells("a source without lineage")
        return found

    def _zero(self, x: Classed, where: Array) -> Classed:
        if isinstance(x, Whole):
            return Whole(np.where(where, 0, x.low), np.where(where, 0, x.high))
        return Real(np.where(where, self.domain.base.literal(0, "real"), x.value), x.kind)

    def _run(self, tasks: Sequence[Task], values: list[_Rows], scopes: Sequence[Scope], keep: set[tuple[int, str]] | None) -> None:
        """Everything in order; what is not in `keep` is dropped after its last use."""
        order = levels(tasks)
        gone: list[list[tuple[int, str]]] = [[] for _ in order]
        if keep is not None:
            last = {t: n for n, batches in enumerate(order) for b in batches for task in b for t in (*task.makes, *task.reads)}
            for t, n in last.items():
                if t not in keep:
                    gone[n].append(t)
        for batches, used in zip(order, gone, strict=True):
            for task in (t for batch in batches for t in batch):
                try:
                    if isinstance(task.what, ClassStep):
                        self._step(task.what, values[task.c], scopes[task.c])
                    elif isinstance(task.what, Meeting):
                        self._meet(task.what, values, scopes)
                except (NoValue, NoCells, KeyError, Undecided):
                    continue  # its results are not there, nor what needs them
            for c, name in used:
                values[c].drop(name)

    def _step(self, step: ClassStep, values: _Rows, scope: Scope) -> None:
        op = self.classes.op(step.variants)
        inputs = {}
        for i, k in op.inputs.items():
            name = step.inputs[i]
            assert name is not None
            self.classes.fits(op.cells[k], scope.dims[name])
            inputs[i] = values.get(name, step.rows)
        for name, k in zip(step.outputs, op.ends, strict=True):
            self.classes.fits(op.cells[k], scope.dims[name])
        for name, made in zip(step.outputs, op.run(self.domain, inputs, len(step.rows)), strict=True):
            values.put(name, step.rows, made)

    def _meet(self, meeting: Meeting, values: list[_Rows], scopes: Sequence[Scope]) -> None:
        given = self._given_to(meeting, values)
        made = given
        if meeting.full is None:
            dims = [scopes[c].dims[name] for some in (meeting.given, meeting.taken) for c, name in some.items()]
            for other in dims[1:]:
                self.classes.fits(self.classes.dims(dims[0]), other)
        else:
            lowered, axes = meeting.full
            op = self.classes.op((LoweredOp((), lowered, axes),))
            ((i, k),) = op.inputs.items()
            (end,) = op.ends
            self._members(meeting, meeting.wiring.senders, op.cells[k], meeting.given, scopes)
            self._members(meeting, meeting.wiring.receivers, op.cells[end], meeting.taken, scopes)
            (made,) = op.run(self.domain, {i: given}, len(meeting.wiring.senders))
        for g, group in enumerate(meeting.wiring.receivers):
            for n, (c, row) in enumerate(group):
                values[c].put(meeting.taken[c], (row,), moved(made, lambda v, g=g, n=n: v[g : g + 1, n]))

    def _given_to(self, meeting: Meeting, values: list[_Rows]) -> Classed:
        """What the members of all groups give: [group, member, …]."""
        giving = tuple(dict.fromkeys(c for group in meeting.wiring.senders for c, _ in group))
        start, at = {}, 0
        parts = []
        for c in giving:
            start[c] = at
            parts.append(values[c].get(meeting.given[c], None))
            at += values[c].count
        if len({len(g) for g in meeting.wiring.senders}) != 1:
            raise NoValue("groups of several sizes")
        rows = np.asarray([[start[c] + row for c, row in group] for group in meeting.wiring.senders])
        return moved(together(parts, np.concatenate), lambda v: v[rows])

    def _members(self, meeting: Meeting, groups: Groups, cells: Sequence[Cells], names: Mapping[int, str], scopes: Sequence[Scope]) -> None:
        """Raise NoCells unless cells of members are the ranks that the ones at hand stand for."""
        lead, stands, ranks = cells[0], self.classes.stand_in, self.classes.wires._classes
        for group, members in zip(groups, self.classes.groups(meeting), strict=True):
            here = np.asarray([ranks[c][row] for c, row in group])
            some = members if lead.size == len(members) else here
            if lead.size != len(some) or len(lead) != len(here) or (here[lead.of] != stands[some]).any():
                raise NoCells("a group whose members are no classes of ranks")
        for c, name in names.items():
            self.classes.fits(cells[1:], scopes[c].dims[name])


def _merged(a: Classed, b: Classed, where: Array) -> Classed:
    if isinstance(a, Whole):
        assert isinstance(b, Whole)
        return Whole(np.where(where, b.low, a.low), np.where(where, b.high, a.high))
    assert isinstance(a, Real)
    assert isinstance(b, Real)
    return Real(np.where(where, b.value, a.value))


class _Rows:
    """Tensors of a class of ranks: one row per rank, some of them made row by row."""

    def __init__(self, count: int, whole: dict[str, Classed]):
        self.count = count
        self.whole = whole
        self.parts: dict[str, dict[int, Classed]] = {}

    def put(self, name: str, rows: tuple[int, ...], value: Classed) -> None:
        if len(rows) == self.count and rows == tuple(range(self.count)):
            self.whole[name] = value
            return
        known = self.parts.setdefault(name, {})
        for i, row in enumerate(rows):
            known[row] = moved(value, lambda v, i=i: v[i : i + 1])
        if len(known) == self.count:
            self.whole[name] = together([known[r] for r in range(self.count)], np.concatenate)

    def drop(self, name: str) -> None:
        self.whole.pop(name, None)
        self.parts.pop(name, None)

    def get(self, name: str, rows: tuple[int, ...] | None) -> Classed:
        if name in self.whole:
            value = self.whole[name]
            return value if rows is None or len(rows) == self.count else moved(value, lambda v: v[list(rows)])
        known = self.parts[name]
        return together([known[r] for r in (rows if rows is not None else range(self.count))], np.concatenate)


def inputs_of(classes: Classes, seed: int, magnitude: float, digits: int = 0, moved_by: Moved | None = None) -> dict[str, Array]:
    """Random values on cells. With `digits`, labels are ignored but where the last so many digits of their position come before all
    classes of several positions: what a causal model computes there does not depend on what comes later."""
    rng = np.random.default_rng(seed)
    program: Program = classes.system.logical
    values = {n: _sample(classes, rng, n, program, program.domains.get(n), magnitude, digits) for n in program.sources}
    for n, change in moved_by.changes if moved_by is not None else ():
        if not change.ends:
            values[n] = changed(values[n], change, program.tensors[n].kind, program.domains.get(n), rng)
    return values


def _sample(
    classes: Classes, rng: np.random.Generator, name: str, program: Program, domain: Domain | None, magnitude: float, digits: int
) -> Array:
    dims = classes.system.scope.dims[name]
    shape = tuple(len(c) for c in classes.dims(dims))
    kind = program.tensors[name].kind
    if kind == "bool":
        return rng.random(shape) < 0.6
    if kind == "int":
        line = classes.system.scope.lines.get(name)
        root = None if line is None else line.root()
        choices = np.arange(min(4, domain.size or 4) if domain is not None else 4)
        if root is not None and root.axis is not None:
            cells = classes.cells(root.axis)
            choices = cells.first[cells.count == 1]
        if not len(choices):
            raise NoCells(f"no id of {name} is a class of its own")
        ids = rng.choice(choices, shape)
        if domain is not None and domain.ignore is not None and ids.size:
            drop = (rng.random(shape) < 0.2) | ~_first_ones(classes, dims, digits).reshape(shape)
            drop.reshape(-1)[0] = False  # never all ignored
            ids = np.where(drop, domain.ignore, ids)
        return ids
    values = rng.uniform(-0.9, 0.9, shape) * magnitude
    match domain.kind if domain is not None else None:
        case "nonnegative" | "positive":
            return np.abs(values) + 0.05 * magnitude
        case "indicator":
            return (values > -0.3 * magnitude).astype(np.float64)
    return values


def _first_ones(classes: Classes, dims: Dims, digits: int) -> Array:
    """Which cells of a tensor come before all cells of several positions, by the last digits of their position."""
    leaves = classes.system.inference.axes.leaves(dims)
    if not digits or not leaves:
        return np.ones(math.prod(len(c) for c in classes.dims(dims)), dtype=bool)
    last = product([classes.cells(a) for a in leaves[-digits:]])
    later = last.first[last.count > 1].min(initial=last.size)
    rest = math.prod(len(classes.cells(a)) for a in leaves[:-digits])
    return np.tile((last.count == 1) & (last.first < later), rest)


def digits_of(classes: Classes) -> int:
    """The most digits that the position of a label has."""
    program = classes.system.logical
    labels = [n for n, d in program.domains.items() if d.ignore is not None]
    return max((len(classes.system.inference.axes.leaves(classes.system.scope.dims[n])) for n in labels), default=0)


def compared(
    classes: Classes, logical: Mapping[str, Classed], plan: Sequence[_Rows], wanted: Sequence[Obligation], place: int | None = None
) -> Iterator[Compared]:
    """What ranks hold beside what they should, of all obligations and ranks; at one place, if that is given."""
    places = classes.place
    for o in wanted:
        for h in o.holdings:
            for r in [r for r in h.ranks if r in places]:
                want = logical.get(o.output.tensor)
                c, row = places[r]
                try:
                    got, index = plan[c].get(h.layout.local, (row,)), classes.index(h.layout, r)
                except (KeyError, NoCells):
                    want = None
                if want is None:
                    yield Compared(o, h.layout, r, 0, 0.0)
                    continue
                yield _beside(classes, o, h.layout, r, moved(got, lambda v: v[0, ...]), want, index, place)


def _beside(
    classes: Classes, o: Obligation, lay: Layout, rank: int, got: Classed, want: Classed, index: Array, place: int | None
) -> Compared:
    flat = moved(want, lambda v: v.reshape(-1)[np.maximum(index, 0).reshape(-1)].reshape(index.shape))
    padding = index < 0
    known = _known(got) & (_known(flat) | padding) & (index != -2)
    if not o.stays:
        known &= ~padding
    count = int(known.sum())
    if not count:
        return Compared(o, lay, rank, 0, 0.0)
    a, b = _numbers(got), np.where(padding, 0.0, _numbers(flat))
    scale = max(float(np.abs(b[known]).max()), 1e-300)
    with np.errstate(all="ignore"):
        gap = np.abs(a - b)
    gap = np.where(a == b, 0.0, gap)
    gap = np.where(known, np.where(np.isnan(gap), np.where(np.isnan(b), 0.0, np.inf), gap), 0.0)
    worst = int(gap.reshape(-1).argmax()) if place is None else place
    if not known.reshape(-1)[worst]:
        return Compared(o, lay, rank, 0, 0.0)
    cell = int(index.reshape(-1)[worst])
    shape = [len(c) for c in classes.dims(classes.system.scope.dims[lay.logical])]
    firsts = classes.dims(classes.system.scope.dims[lay.logical])
    at = tuple(int(c.first[i]) for c, i in zip(firsts, np.unravel_index(cell, shape), strict=True)) if cell >= 0 else ()
    return Compared(o, lay, rank, count, float(gap.reshape(-1)[worst]) / scale, _entry(got, worst), _entry(flat, worst), at, worst)


def _known(x: Classed) -> Array:
    if isinstance(x, Whole):
        return np.asarray(x.exact)
    return np.ones(x.shape, dtype=bool) if x.kind is None else x.kind == EXACT


def _numbers(x: Classed) -> Array:
    values = x.low if isinstance(x, Whole) else x.value
    return (
        np.asarray(values, dtype=np.float64)
        if values.dtype != object
        else np.asarray([float(v) for v in values.reshape(-1)]).reshape(values.shape)
    )


def _entry(x: Classed, n: int) -> object:
    return (x.low if isinstance(x, Whole) else x.value).reshape(-1)[n]
