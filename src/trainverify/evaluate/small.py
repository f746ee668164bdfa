"""A logical program and a plan at small sizes: axes inferred over both together, every op shrunk alike.

Nothing here looks at values. The result is a pair of `Small*` recipes that any array domain can run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np

from trainverify.axes.inference import Dims, Inference, Line, NodeAxes
from trainverify.axes.reduction import Sizes
from trainverify.axes.shrink import shrink
from trainverify.axes.structure import Axis, Clash
from trainverify.graph.communication import Communication, Schedule, is_communication
from trainverify.graph.lineage import Layout, Part, Run
from trainverify.graph.obligations import Obligation
from trainverify.graph.plan import Plan
from trainverify.graph.program import Domain, Op, Program, Ref, has_ref, inline, resolve
from trainverify.ops.table import Lowered, OpTable
from trainverify.primitives.node import Node, rebuild, topological


@dataclass(frozen=True)
class Step:
    """One op for some rows (ranks of its class): what to compute, from which tensors, into which."""

    op: Op
    index: int  # position in the flat program
    rows: tuple[int, ...]
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Meeting:
    """One rendezvous. `senders` and `receivers` list (class, row, tensor) in group order, one list per group."""

    op: Op
    senders: tuple[tuple[tuple[int, int, str], ...], ...]
    receivers: tuple[tuple[tuple[int, int, str], ...], ...]
    nodes: tuple[Node, ...] | None  # None: point to point, the value itself


@dataclass
class SmallClass:
    """The flat program of a class of ranks; `order` are local steps, communication happens in `Small.meetings`."""

    ranks: tuple[int, ...]
    program: Program
    order: list[Step] = field(default_factory=list)


@dataclass
class Small:
    logical: Program
    logical_steps: list[Step]
    classes: list[SmallClass]
    meetings: list[Meeting]
    shapes: dict[str, tuple[int, ...]]  # of logical tensors
    local_shapes: list[dict[str, tuple[int, ...]]]  # by class
    domains: dict[str, Domain]
    parts: dict[tuple[Layout, int], tuple[Part, ...]]  # what a rank holds, at small size
    reduced: bool  # whether any size shrank
    clashes: tuple[Clash, ...]
    elements: int  # of the largest tensor
    logical_axes: dict[str, tuple[int, ...]]  # per logical tensor, which axis each dimension is (equal numbers: one axis)


_Places = list[list[tuple[int, int, str]]]


class _Scope:
    """Axes of the tensors of one flat program."""

    def __init__(self, inference: Inference, program: Program):
        self.program = program
        self.dims: dict[str, Dims] = {n: inference.fresh(t.shape) for n, t in program.tensors.items()}
        self.lines: dict[str, Line | None] = {}
        for n in program.sources:
            if program.tensors[n].kind == "int":
                d = program.domains.get(n)
                self.lines[n] = inference.line(inference.fresh([d.size])[0] if d is not None and d.size else None)

    def args(self, op: Op) -> tuple[list[Dims | None], list[Line | None]]:
        return (
            [None if i is None else self.dims[i] for i in op.inputs],
            [None if i is None else self.lines.get(i) for i in op.inputs],
        )


class SmallBuilder:
    """Collects constraints from both programs, then shrinks."""

    def __init__(self, logical: Program, plan: Plan, table: OpTable, talk: Communication, plan_order: Schedule):
        self.table = table
        self.plan = plan
        self.talk = talk
        self.schedule = plan_order
        self.inference = Inference()
        self.logical = inline(logical)
        self.scope = _Scope(self.inference, self.logical)
        flat = [inline(u.program, plan.functions) for u in talk.units]
        self.unit_programs = flat
        self.unit_scopes = [_Scope(self.inference, p) for p in flat]
        # (index, rows, lowered, node axes) per scope
        self._logical_ops: list[tuple[int, Lowered, NodeAxes]] = []
        self._unit_ops: list[list[tuple[int, tuple[int, ...], Lowered, NodeAxes]]] = []
        self._meetings: list[tuple[Op, _Places, _Places, Lowered | None, NodeAxes | None]] = []

    def build(self, obligations: Sequence[Obligation], base: int = 2, scale_literals: bool = False) -> Small:
        inf = self.inference
        for index, op in enumerate(self.logical.ops):
            lowered = self._lower(op, self.logical, {})
            self._logical_ops.append((index, lowered, self._apply(self.scope, op, lowered)))
        for u, program in enumerate(self.unit_programs):
            self._unit_ops.append(list(self._unit(u, program)))
        self._communicate()
        self._lineage(obligations)
        inf.finish()
        sizes = Sizes(inf.axes, inf.all, base)
        return self._shrunk(sizes, obligations, scale_literals)

    # -- constraints -------------------------------------------------------------------------------------------------

    def _lower(self, op: Op, program: Program, bindings: Mapping[str, object], members: int = 0) -> Lowered:
        attrs = {k: resolve(v, bindings) for k, v in op.attrs}  # type: ignore[arg-type]
        return self.table.lower(op.name, attrs, tuple(None if i is None else program.tensors[i] for i in op.inputs), members)

    def _apply(self, scope: _Scope, op: Op, lowered: Lowered) -> NodeAxes:
        self.inference.axes.where = str(op)
        dims, lines = scope.args(op)
        found = self.inference.op(lowered, dims, lines)
        for name, node in zip(op.outputs, lowered.outputs, strict=True):
            self.inference.same_dims(scope.dims[name], found.dims[id(node)])
            scope.lines[name] = self.inference.same_line(scope.lines.get(name), found.lines[id(node)])
        return found

    def _unit(self, u: int, program: Program) -> list[tuple[int, tuple[int, ...], Lowered, NodeAxes]]:
        unit = self.talk.units[u]
        found = []
        for index, op in enumerate(program.ops):
            if is_communication(op, self.table):
                continue
            names = sorted({r for _, v in op.attrs if has_ref(v) for r in _refs(v)})
            rows_of: dict[tuple[object, ...], list[int]] = {}
            for row in range(len(unit.ranks)):
                rows_of.setdefault(tuple(unit.bindings[n][row] for n in names), []).append(row)
            for values, rows in rows_of.items():
                lowered = self._lower(op, program, dict(zip(names, values, strict=True)))
                found.append((index, tuple(rows), lowered, self._apply(self.unit_scopes[u], op, lowered)))
        return found

    def _communicate(self) -> None:
        talk, inf = self.talk, self.inference
        classes = self.schedule.classes
        place = {r: (c, row) for c, k in enumerate(classes) for row, r in enumerate(k.ranks)}
        ops = [[(op) for op in p.ops if is_communication(op, self.table)] for p in self.unit_programs]
        for step in self.schedule.steps:
            met = {c: ops[classes[c].unit][e] for c, e in step}
            events = {(c, e): talk.events[classes[c].unit][e] for c, e in step}
            first = events[step[0]]
            if not first.collective:
                self._point_to_point(step, ops, place)
                continue
            definition = self.table[first.op.name]
            groups = {str(talk.value(r, events[c, e].target)) for c, e in step for r in classes[c].ranks}
            senders, receivers = [], []
            lowered: Lowered | None = None
            axes: NodeAxes | None = None
            for name in sorted(groups):
                members = talk.groups[name]
                rows = [(place[m][0], place[m][1], met[place[m][0]]) for m in members]
                roots = [i for i, m in enumerate(members) if m == talk.value(m, rows[i][2].get("root"))]
                giving = rows if definition.senders == "all" else [rows[i] for i in roots]
                taking = rows if definition.receivers == "all" else [rows[i] for i in roots]
                senders.append([(c, row, str(op.inputs[0])) for c, row, op in giving])
                receivers.append([(c, row, op.outputs[0]) for c, row, op in taking])
                dims = [self.unit_scopes[classes[c].unit].dims[t] for c, _, t in senders[-1]]
                lines = [self.unit_scopes[classes[c].unit].lines.get(t) for c, _, t in senders[-1]]
                if lowered is None:
                    c0, _, t0 = senders[-1][0]
                    op = giving[0][2]
                    attrs = {k: talk.value(members[0], v) for k, v in op.attrs}
                    kind = self.unit_programs[classes[c0].unit].tensors[t0]
                    lowered = self.table.lower(op.name, attrs, (kind,), len(members))
                    lead = Axis(len(giving), fixed=True)
                    inf.axes.where = str(op)
                    axes = inf.op(lowered, [[lead, *dims[0]]], [lines[0]])
                    inf.same_dims([Axis(len(taking), fixed=True)], axes.dims[id(lowered.outputs[0])][:1])
                assert axes is not None
                assert lowered.inputs[0] is not None
                for d, line in zip(dims, lines, strict=True):
                    inf.same_dims(axes.dims[id(lowered.inputs[0])][1:], d)
                    inf.same_line(lines[0], line)
                out = lowered.outputs[0]
                for c, _, t in receivers[-1]:
                    scope = self.unit_scopes[classes[c].unit]
                    inf.same_dims(axes.dims[id(out)][1:], scope.dims[t])
                    scope.lines[t] = inf.same_line(scope.lines.get(t), axes.lines[id(out)])
            self._meetings.append((first.op, senders, receivers, lowered, axes))

    def _point_to_point(self, step: tuple[tuple[int, int], ...], ops: list[list[Op]], place: Mapping[int, tuple[int, int]]) -> None:
        talk, inf, classes = self.talk, self.inference, self.schedule.classes
        sends = [(c, e) for c, e in step if talk.events[classes[c].unit][e].op.name == "send"]
        recvs = {c: ops[classes[c].unit][e] for c, e in step if talk.events[classes[c].unit][e].op.name == "recv"}
        senders, receivers = [], []
        for c, e in sends:
            op = ops[classes[c].unit][e]
            for row, rank in enumerate(classes[c].ranks):
                d, other = place[talk.value(rank, op.get("peer"))]  # type: ignore[index]
                source, target = str(op.inputs[0]), recvs[d].outputs[0]
                senders.append([(c, row, source)])
                receivers.append([(d, other, target)])
                a, b = self.unit_scopes[classes[c].unit], self.unit_scopes[classes[d].unit]
                inf.same_dims(a.dims[source], b.dims[target])
                b.lines[target] = inf.same_line(b.lines.get(target), a.lines.get(source))
        self._meetings.append((ops[classes[sends[0][0]].unit][sends[0][1]], senders, receivers, None, None))

    def _holdings(self, obligations: Sequence[Obligation]) -> list[tuple[Layout, tuple[int, ...]]]:
        declared = [(lay, lay.holders(self.plan.mesh)) for lay in self.plan.lineage]
        return declared + [(h.layout, h.ranks) for o in obligations for h in o.holdings]

    def _lineage(self, obligations: Sequence[Obligation]) -> None:
        for lay, ranks in self._holdings(obligations):
            by_unit: dict[int, list[int]] = {}
            for r in ranks:
                by_unit.setdefault(self.talk.unit_of[r], []).append(r)
            for u, members in by_unit.items():
                scope = self.unit_scopes[u]
                self.inference.layout(lay, self.plan.mesh, members, self.scope.dims[lay.logical], scope.dims[lay.local])
                joined = self.inference.same_line(self.scope.lines.get(lay.logical), scope.lines.get(lay.local))
                if joined is not None:
                    self.scope.lines[lay.logical] = scope.lines[lay.local] = joined

    # -- shrinking ---------------------------------------------------------------------------------------------------

    def _shrunk(self, sizes: Sizes, obligations: Sequence[Obligation], scale_literals: bool) -> Small:
        def small(lowered: Lowered, axes: NodeAxes) -> tuple[Node, ...]:
            nodes = tuple(shrink(lowered.outputs, axes, sizes))
            return tuple(scaled(lowered.outputs, nodes, axes, sizes)) if scale_literals else nodes

        logical_steps = [
            Step(op := self.logical.ops[i], i, (0,), op.inputs, op.outputs, small(low, axes)) for i, low, axes in self._logical_ops
        ]
        shrunk_units = [[(i, rows, small(low, axes)) for i, rows, low, axes in ops] for ops in self._unit_ops]
        classes = []
        local_shapes = []
        for k in self.schedule.classes:
            program, unit = self.unit_programs[k.unit], self.talk.units[k.unit]
            own = SmallClass(k.ranks, program)
            row_of = {r: row for row, r in enumerate(k.ranks)}
            for i, rows, nodes in shrunk_units[k.unit]:
                mine = tuple(row_of[unit.ranks[row]] for row in rows if unit.ranks[row] in row_of)
                if mine:
                    op = program.ops[i]
                    own.order.append(Step(op, i, mine, op.inputs, op.outputs, nodes))
            classes.append(own)
            scope = self.unit_scopes[k.unit]
            local_shapes.append({n: tuple(sizes(a) for a in dims) for n, dims in scope.dims.items()})
        meetings = [
            Meeting(op, tuple(map(tuple, s)), tuple(map(tuple, r)), None if low is None or axes is None else small(low, axes))
            for op, s, r, low, axes in self._meetings
        ]
        shapes = {n: tuple(sizes(a) for a in dims) for n, dims in self.scope.dims.items()}
        domains = {n: self._domain(n, d, sizes) for n, d in self.logical.domains.items()}
        parts = {}
        for lay, ranks in self._holdings(obligations):
            full = self.logical.tensors[lay.logical].shape
            for r in ranks:
                local = self.unit_scopes[self.talk.unit_of[r]].dims[lay.local]
                found = lay.parts(self.plan.mesh, r, full)
                parts[lay, r] = tuple(self._part(p, self.scope.dims[lay.logical], local, sizes) for p in found)
        reduced = any(s != t.shape for n, t in self.logical.tensors.items() for s in [shapes[n]])
        largest = max(
            (int(np.prod(s)) for group in [shapes, *local_shapes] for s in group.values()),
            default=0,
        )
        clashes = tuple(self.inference.axes.clashes)
        names = {n: tuple(id(a.root()) for a in dims) for n, dims in self.scope.dims.items()}
        return Small(self.logical, logical_steps, classes, meetings, shapes, local_shapes, domains, parts, reduced, clashes, largest, names)

    def _domain(self, name: str, domain: Domain, sizes: Sizes) -> Domain:
        line = self.scope.lines.get(name)
        root = None if line is None else line.root()
        return replace(domain, size=sizes(root.axis)) if root is not None and root.axis is not None else domain

    def _part(self, part: Part, whole: Dims, local: Dims, sizes: Sizes) -> Part:
        if part.padding:
            return part
        product = self.inference.axes.product
        if part.flat:
            whole, local = [product(whole)], [product(local)]
        runs, starts = [], []
        for at, run, a, b in zip(part.local, part.logical, whole, local, strict=True):
            start = sizes.position(a, run.start)
            block = sizes.position(a, run.start + run.block) - start
            if run.count == 1:
                runs.append(Run(start, block))
            else:
                stride = sizes.position(a, run.start + run.stride) - start
                length = sizes.position(b, at + run.size) - sizes.position(b, at)
                runs.append(Run(start, block, length // block, stride))
            starts.append(sizes.position(b, at))
        return replace(part, local=tuple(starts), logical=tuple(runs))


def _refs(value: object) -> list[str]:
    if isinstance(value, Ref):
        return [value.name]
    return [n for v in value for n in _refs(v)] if isinstance(value, tuple) else []


def scaled(full: Sequence[Node], small: Sequence[Node], axes: NodeAxes, sizes: Sizes) -> list[Node]:
    """The other reading of literals: a constant that equals a size of its op (or one over it) shrinks with that size."""
    known: dict[Fraction, Fraction] = {}

    def note(before: int, after: int) -> None:
        if before > 1 and before != after:
            known.setdefault(Fraction(before), Fraction(after))
            known.setdefault(Fraction(1, before), Fraction(1, after))

    for node in topological(full):
        dims = [a.root() for a in axes.dims[id(node)]]
        counts = [(a.size, sizes(a)) for a in dims]
        for i in range(len(counts)):
            before = after = 1
            for b, s in counts[i:]:
                before, after = before * b, after * s
                note(before, after)

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        attrs = node.attrs
        value = attrs[0] if node.prim == "const" and node.kind == "real" else None
        if isinstance(value, int | Fraction | float) and value == value and abs(value) != float("inf"):
            attrs = (known.get(Fraction(value), value),)
        return Node(node.prim, args, attrs, node.shape, node.kind)

    return rebuild(small, change)
