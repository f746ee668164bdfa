"""The system of axes of a logical program and a plan: every op lowered, its axes related with all others.

Collected once, used by everybody: evaluation shrinks it, the algebra proves over it. Nothing here looks at values.
Blocks of one kind (layers, micro-batches: see `outline`) are treated once; the others get the same axes.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from trainverify.axes.buckets import Joined, joined, taken_out
from trainverify.axes.inference import Dims, Inference, Line, NodeAxes
from trainverify.axes.listed import ListedAxes
from trainverify.axes.rows import Rows
from trainverify.axes.sorts import sorts
from trainverify.axes.structure import Axes, Axis
from trainverify.graph.communication import Communication, Schedule, is_communication
from trainverify.graph.lineage import Layout
from trainverify.graph.obligations import Obligation
from trainverify.graph.outline import Block, outline, singles
from trainverify.graph.plan import Plan
from trainverify.graph.program import Op, Program, Ref, has_ref, inline, refers, resolve
from trainverify.ops.table import Lowered, OpError, OpTable
from trainverify.primitives.node import topological

_VIEWS: Final = frozenset({"reshape", "view", "reshape.grad", "view.grad"})


@dataclass(frozen=True)
class LoweredOp:
    """A local op of a program for some rows (ranks) of its unit."""

    rows: tuple[int, ...]
    lowered: Lowered
    axes: NodeAxes


Variants = tuple[LoweredOp, ...]  # an op as the ranks of a unit have it; every rank is in one


@dataclass(frozen=True)
class MeetingAxes:
    """A rendezvous of classes: (class, op) of everybody who takes part; `lowered` is None for point to point."""

    step: tuple[tuple[int, int], ...]
    ops: tuple[tuple[int, Op], ...]
    lowered: Lowered | None = None
    axes: NodeAxes | None = None
    mesh_axes: tuple[str, ...] | None = None  # all groups run along these, in order; None: some other sets of ranks


class Scope:
    """Axes of the tensors of one flat program."""

    def __init__(self, inference: Inference, program: Program, later: Collection[str] = ()):
        """`later` are tensors that get the axes of others."""
        self.program = program
        self.dims: dict[str, Dims] = {n: inference.fresh(t.shape) for n, t in program.tensors.items() if n not in later}
        self.lines: dict[str, Line | None] = {}
        for n, t in program.tensors.items():  # every integer tensor counts somewhere; sources say where
            if t.kind == "int" and n not in later:
                d = program.domains.get(n)
                self.lines[n] = inference.line(inference.fresh([d.size])[0] if d is not None and d.size else None)

    @cached_property
    def joined(self) -> Joined:
        return joined(self.program)

    def args(self, op: Op) -> tuple[list[Dims | None], list[Line | None]]:
        return (
            [None if i is None else self.dims[i] for i in op.inputs],
            [None if i is None else self.lines.get(i) for i in op.inputs],
        )


@dataclass(frozen=True)
class _Kind:
    """A kind of blocks: the first one, and its ops as every unit has them."""

    scope: Scope
    block: Block
    ops: list[Variants]
    of_unit: dict[int | None, list[Variants]]


class System:
    """Constraints from both programs and the lineage between them."""

    def __init__(
        self,
        logical: Program,
        plan: Plan,
        table: OpTable,
        talk: Communication,
        plan_order: Schedule,
        flat: bool = False,
        axes: Axes | None = None,
        shifts: bool = False,
        windows: bool = False,
    ):
        self.table = table
        self.plan = plan
        self.talk = talk
        self.schedule = plan_order
        self.windows = windows  # whether those of convolutions are one map between positions, not slices
        self.inference = Inference(flat, axes, shifts)
        self.rows = Rows(plan.mesh, talk, plan_order)
        self.logical = inline(logical)
        self.unit_programs = [inline(u.program, plan.functions) for u in talk.units]
        programs = [self.logical, *self.unit_programs]
        apart = flat or self.lists
        outlined = [singles(p) for p in programs] if apart else outline(programs, sorts(programs, table, self.rows))
        self.logical_blocks, self.unit_blocks = outlined[0], outlined[1:]
        later = _later(outlined)
        self.scope = Scope(self.inference, self.logical, later[0])
        self.unit_scopes = [Scope(self.inference, p, names) for p, names in zip(self.unit_programs, later[1:], strict=True)]
        self.logical_ops: dict[int, Variants] = {}  # local ops by their place in the program
        self.unit_ops: list[dict[int, Variants]] = []
        self.meetings: list[MeetingAxes] = []
        self.obligations: Sequence[Obligation] = ()
        # ids of (op at types, axes of inputs) → axes of nodes, what has the ids
        self._applied: dict[Hashable, tuple[NodeAxes, object]] = {}
        self._kinds: dict[int, _Kind] = {}

    @property
    def flat(self) -> bool:
        """Tensors written in one dimension keep axes of their own: for buckets that are cut anywhere."""
        return self.inference.flat

    @property
    def lists(self) -> bool:
        return self.inference.axes.lists

    @cached_property
    def talking(self) -> list[list[int]]:
        """Where in the program of every unit it communicates."""
        talks = {n for n, d in self.table.definitions.items() if d.collective or d.point_to_point}
        return [[n for n, op in enumerate(p.ops) if op.name in talks] for p in self.unit_programs]

    def collect(self, obligations: Sequence[Obligation]) -> System:
        self.obligations = obligations
        self.logical_ops = self._program(self.scope, self.logical_blocks, None)
        self.inference.axes.begin_plan()
        for u, scope in enumerate(self.unit_scopes):
            self.unit_ops.append(self._program(scope, self.unit_blocks[u], u))
        self._number_together()
        self._communicate()
        self._lineage()
        if self.flat:
            for u, scope in enumerate(self.unit_scopes):
                for name, logical in taken_out(self.logical, self.plan, self.talk, self.unit_programs[u], u):
                    self.inference.same_dims(scope.dims[name], self.scope.dims[logical])
        self.inference.finish()
        return self

    @cached_property
    def windowed(self) -> System:
        """The same programs with windows as one map between positions; if there are none, the same system."""
        ops = [x for variants in (self.logical_ops, *self.unit_ops) for v in variants.values() for x in v]
        if self.windows or self.lists or all(x.lowered.windowed is None for x in ops):
            return self
        how = (self.flat, None, self.inference.shifts, True)
        return System(self.logical, self.plan, self.table, self.talk, self.schedule, *how).collect(self.obligations)

    def listed(self) -> System:
        """The same programs over axes of which everything that is cut is listed position by position."""
        axes = ListedAxes()
        made = System(self.logical, self.plan, self.table, self.talk, self.schedule, axes=axes).collect(self.obligations)
        axes.sealed = True
        return made

    # -- constraints -------------------------------------------------------------------------------------------------

    def _lower(self, op: Op, program: Program, bindings: Mapping[str, object], members: int = 0) -> Lowered:
        attrs = {k: resolve(v, bindings) for k, v in op.attrs}  # type: ignore[arg-type]
        found = self.table.lower(op.name, attrs, tuple(None if i is None else program.tensors[i] for i in op.inputs), members)
        return (found.windowed if self.windows else None) or found

    def _apply(self, scope: Scope, op: Op, lowered: Lowered) -> NodeAxes:
        self.inference.axes.where = op
        dims, lines = scope.args(op)
        source = self._recast(scope, op, lowered) if self.flat else None
        if source is not None:
            given, made = dims[source], scope.dims[op.outputs[0]]
            assert given is not None
            self.inference.view(given, made, op.outputs[0] not in scope.joined.tensors)
            return NodeAxes({id(n): made if n.prim == "reshape" else given for n in topological(lowered.outputs)}, {})
        roots = [None if d is None else [a.root() for a in d] for d in dims]
        key = (id(lowered), self.inference.even, tuple([None if d is None else tuple(map(id, d)) for d in roots]))
        known = None if any(lines) or self.flat or self.lists else self._applied.get(key)
        if known is None:
            found = self.inference.op(lowered, dims, lines)
            if not any(lines):
                self._applied[key] = found, (lowered, roots)
        else:
            found = known[0]
        for name, node in zip(op.outputs, lowered.outputs, strict=True):
            self.inference.same_dims(scope.dims[name], found.dims[id(node)])
            scope.lines[name] = self.inference.same_line(scope.lines.get(name), found.lines[id(node)])
        return found

    def _recast(self, scope: Scope, op: Op, lowered: Lowered) -> int | None:
        """Which input of an op is written in one dimension by it (or back), next to ops that join and cut such tensors."""
        node = lowered.outputs[0]
        given = node.args[0] if node.prim == "reshape" else node
        if op.name not in _VIEWS or given.prim != "input" or node.kind != "real" or 1 not in (len(given.shape), len(node.shape)):
            return None
        source = str(op.inputs[given.attrs[0]])
        near = scope.joined.tensors if len(given.shape) == len(node.shape) else scope.joined.rows
        return given.attrs[0] if op.outputs[0] in near or source in near else None

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _program(self, scope: Scope, blocks: Sequence[Block], u: int | None) -> dict[int, Variants]:
        found: dict[int, Variants] = {}
        for block in blocks:
            known = None if block.kind is None else self._kinds.get(block.kind)
            if known is None:
                made = [tuple(self._op(scope, index, u)) for index in block.ops]
                if block.kind is not None:
                    self._kinds[block.kind] = _Kind(scope, block, made, {u: made})
            else:
                self._like(known.scope, known.block, scope, block)
                if u not in known.of_unit:
                    rows = (0,) if u is None else self.rows.variants(u, ())[()]  # ops of blocks are the same on every rank
                    known.of_unit[u] = [tuple([replace(x, rows=rows) for x in own]) for own in known.ops]
                made = known.of_unit[u]
            found.update(zip(block.ops, made, strict=True))
        return {n: x for n, x in found.items() if x}

    def _like(self, scope: Scope, block: Block, other: Scope, twin: Block) -> None:
        """A block with the axes of another of its kind."""
        inf = self.inference
        inf.axes.where = other.program.ops[twin.ops[0]]
        for a, b in zip(block.inputs, twin.inputs, strict=True):
            inf.same_dims(scope.dims[a], other.dims[b])
            joined = inf.same_line(scope.lines.get(a), other.lines.get(b))
            if joined is not None:
                scope.lines[a] = other.lines[b] = joined
        for a, b in zip(block.made, twin.made, strict=True):
            other.dims[b] = scope.dims[a]
            if a in scope.lines:
                other.lines[b] = scope.lines[a]

    def _op(self, scope: Scope, index: int, u: int | None) -> Iterator[LoweredOp]:
        op = scope.program.ops[index]
        if u is None:
            lowered = self._lower(op, scope.program, {})
            yield LoweredOp((0,), lowered, self._apply(scope, op, lowered))
        elif not is_communication(op, self.table):
            names = sorted({r for _, v in op.attrs if has_ref(v) for r in _refs(v)}) if refers(op) else []
            variants = self.rows.variants(u, tuple(names))
            found = {rows: self._lower(op, scope.program, dict(zip(names, values, strict=True))) for values, rows in variants.items()}
            self.inference.even = not self.flat and not self.lists and op.name == "slice" and self._even(scope, op, names, found, u)
            for rows, x in found.items():
                yield LoweredOp(rows, x, self._apply(scope, op, x))
            self.inference.even = False

    def _number_together(self) -> None:
        """Ranges of integers under one name that begin where the one of another rank ends count on one line: positions of a cut axis."""
        found: dict[str, list[tuple[int, int, Line]]] = {}
        for program, ops in zip(self.unit_programs, self.unit_ops, strict=True) if not self.lists else ():
            for n, variants in ops.items():
                if program.ops[n].name == "arange":
                    for x in variants:
                        for node in topological(x.lowered.outputs):
                            line = x.axes.lines.get(id(node))
                            if node.prim == "iota" and node.attrs[1] == 1 and line is not None:
                                found.setdefault(program.ops[n].outputs[0], []).append((node.attrs[0], node.shape[0], line))
        for stretches in found.values():
            starts, sizes = {s for s, _, _ in stretches}, {size for _, size, _ in stretches}
            if len(starts) > 1 and len(sizes) == 1 and starts == set(range(0, len(starts) * min(sizes), min(sizes))):
                joined: Line | None = None
                for _, _, line in stretches:
                    joined = self.inference.same_line(joined, line)
                assert joined is not None
                joined.root().compared = True

    def _even(self, scope: Scope, op: Op, names: Sequence[str], found: Mapping[tuple[int, ...], Lowered], u: int) -> bool:
        """Whether ranks take all equal slices of a dimension; a rank with an edit takes one of those that its like take."""
        if _all_slices(list(found.values())) or len(self.talk.units) == len(self.plan.templates) or not names:
            return _all_slices(list(found.values()))
        ranks = next(set(t.ranks) for t in self.plan.templates if self.talk.units[u].ranks[0] in t.ranks)
        like = [n for n, unit in enumerate(self.talk.units) if unit.ranks[0] in ranks]  # references mean the same in one template
        values = dict.fromkeys(v for n in like for v in self.rows.variants(n, tuple(names)))
        try:
            return _all_slices([self._lower(op, scope.program, dict(zip(names, v, strict=True))) for v in values])
        except OpError:  # of a tensor that others do not have
            return False

    def _communicate(self) -> None:
        classes = self.schedule.classes
        ops = [[(n, p.ops[n]) for n in where] for p, where in zip(self.unit_programs, self.talking, strict=True)]
        at = [{n: (b.kind, i) for b in blocks if b.kind is not None for i, n in enumerate(b.ops)} for blocks in self.unit_blocks]
        alike: dict[Hashable, MeetingAxes] = {}
        for step in self.schedule.steps:
            met = tuple((c, ops[classes[c].unit][e][1]) for c, e in step)
            if self.table[met[0][1].name].collective:
                places = [at[classes[c].unit].get(ops[classes[c].unit][e][0]) for c, e in step]
                along = self.rows.all_along(met)
                key = None if along is None or None in places else (along, *places)
                known = None if key is None else alike.get(key)
                meeting = self._collective(step, met) if known is None else replace(known, step=step, ops=met)
                if key is not None:
                    alike[key] = meeting
                self.meetings.append(meeting)
            else:
                self._point_to_point(met)
                self.meetings.append(MeetingAxes(step, met))

    def _tensor(self, c: int, name: str) -> tuple[Scope, Dims]:
        scope = self.unit_scopes[self.schedule.classes[c].unit]
        return scope, scope.dims[name]

    def _collective(self, step: tuple[tuple[int, int], ...], met: tuple[tuple[int, Op], ...]) -> MeetingAxes:
        talk, inf = self.talk, self.inference
        c0, op = next((c, op) for c, op in met if op.inputs)
        rank = self.schedule.classes[c0].ranks[0]
        members = talk.groups[str(talk.value(rank, op.get("group")))]
        attrs = {k: talk.value(rank, v) for k, v in op.attrs}
        kind = self.unit_programs[self.schedule.classes[c0].unit].tensors[str(op.inputs[0])]
        lowered = self.table.lower(op.name, attrs, (kind,), len(members))
        given, made = lowered.inputs[0], lowered.outputs[0]
        assert given is not None
        inf.axes.where = op
        along = self.rows.all_along(met)
        lead = Axis(given.shape[0], fixed=True)
        inf.all.append(lead)
        if along is not None and lead.size == len(members):
            inf.axes.align([lead], [inf.mesh_axis(self.plan.mesh, a) for a in along])
        scope, dims = self._tensor(c0, str(op.inputs[0]))
        inf.members = len(members)
        axes = inf.op(lowered, [[lead, *dims]], [scope.lines.get(str(op.inputs[0]))])
        inf.members = 0
        if along is not None and made.shape[0] == len(members):
            inf.axes.align([axes.dims[id(made)][0]], [inf.mesh_axis(self.plan.mesh, a) for a in along])
        inf.axes.count(axes.dims[id(made)][0])
        for c, other in met:
            if other.inputs:
                scope, dims = self._tensor(c, str(other.inputs[0]))
                inf.same_dims(axes.dims[id(given)][1:], dims)
                inf.same_line(axes.lines[id(given)], scope.lines.get(str(other.inputs[0])))
            if other.outputs:
                scope, dims = self._tensor(c, other.outputs[0])
                inf.same_dims(axes.dims[id(made)][1:], dims)
                scope.lines[other.outputs[0]] = inf.same_line(scope.lines.get(other.outputs[0]), axes.lines[id(made)])
        return MeetingAxes(step, met, lowered, axes, along)

    def _point_to_point(self, met: tuple[tuple[int, Op], ...]) -> None:
        inf = self.inference
        (c, send), (d, recv) = sorted(met, key=lambda m: m[1].name != "send")
        source, target = str(send.inputs[0]), recv.outputs[0]
        (a, given), (b, made) = self._tensor(c, source), self._tensor(d, target)
        inf.axes.where = recv
        inf.same_dims(given, made)
        b.lines[target] = inf.same_line(b.lines.get(target), a.lines.get(source))

    def holdings(self) -> list[tuple[Layout, tuple[int, ...]]]:
        """Every layout of interest with the ranks where it holds."""
        declared = [(lay, lay.holders(self.plan.mesh)) for lay in self.plan.lineage]
        return declared + [(h.layout, h.ranks) for o in self.obligations for h in o.holdings]

    def _lineage(self) -> None:
        for lay, ranks in self.holdings():
            for u, members in self.rows.by_unit(ranks).items():
                scope = self.unit_scopes[u]
                self.inference.layout(lay, self.plan.mesh, members, self.scope.dims[lay.logical], scope.dims[lay.local])
                joined = self.inference.same_line(self.scope.lines.get(lay.logical), scope.lines.get(lay.local))
                if joined is not None:
                    self.scope.lines[lay.logical] = scope.lines[lay.local] = joined


def _all_slices(variants: Sequence[Lowered]) -> bool:
    """Whether the variants of a slice are all the equal pieces of a dimension."""
    nodes = [x.outputs[0] for x in variants]
    if len(nodes) < 2 or any(n.prim != "slice" or n.args[0].prim != "input" for n in nodes):
        return False
    d, _, step = nodes[0].attrs
    size, whole = nodes[0].shape[d], nodes[0].args[0].shape[d]
    if any((n.attrs[0], n.attrs[2], n.shape[d]) != (d, step, size) for n in nodes) or size == 0:
        return False
    return step == 1 and sorted(n.attrs[1] for n in nodes) == list(range(0, whole, size)) and whole % size == 0


def _later(outlined: Sequence[Sequence[Block]]) -> list[set[str]]:
    """Tensors of every program that are made in a block like an earlier one."""
    seen: set[int] = set()
    found: list[set[str]] = []
    for blocks in outlined:
        found.append(set())
        for b in blocks:
            if b.kind in seen:
                found[-1].update(b.made)
            elif b.kind is not None:
                seen.add(b.kind)
    return found


def _refs(value: object) -> list[str]:
    if isinstance(value, Ref):
        return [value.name]
    return [n for v in value for n in _refs(v)] if isinstance(value, tuple) else []
