"""A logical program and a plan at small sizes: axes inferred over both together, every op shrunk alike.

Nothing here looks at values. The result is a pair of `Small*` recipes that any array domain can run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, TypeVar

import numpy as np

from trainverify.axes.inference import Dims, NodeAxes
from trainverify.axes.reduction import NotABoundary, Sizes
from trainverify.axes.shrink import alike, shrink
from trainverify.axes.structure import Clash
from trainverify.axes.system import MeetingAxes, System
from trainverify.domains.arrays import Array
from trainverify.evaluate.moved import PointName
from trainverify.evaluate.own_counts import shrunk
from trainverify.evaluate.sample import ALL, Sample
from trainverify.graph.lineage import Layout, Part, Pattern, Placements, Run, pattern_dims, positions
from trainverify.graph.mesh import Mesh
from trainverify.graph.program import Domain, Op, Program
from trainverify.ops.table import Lowered
from trainverify.primitives.node import Node, ordered

Full = tuple[Lowered, NodeAxes]  # what nodes at small sizes are made of
WITHIN: Final = 1 << 25  # elements of anything that an op makes on its way


@dataclass(frozen=True)
class Step:
    """One op for some rows (ranks of its class): what to compute, from which tensors, into which."""

    op: Op
    index: int  # position in the flat program
    rows: tuple[int, ...]
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    full: Full


Groups = tuple[tuple[tuple[int, int], ...], ...]  # (class, row) in group order, one list per group
Members = tuple[tuple[tuple[int, int, str], ...], ...]  # with the tensor


@dataclass(frozen=True, eq=False)
class Wiring:
    """Who gives and who takes; many rendezvous share one."""

    senders: Groups
    receivers: Groups


@dataclass(frozen=True, eq=False)
class Meeting:
    """One rendezvous. `given` and `taken` are the tensors by class."""

    op: Op
    wiring: Wiring
    given: Mapping[int, str]
    taken: Mapping[int, str]
    nodes: tuple[Node, ...] | None  # None: point to point, the value itself
    full: Full | None

    @cached_property
    def senders(self) -> Members:
        """(class, row, tensor) in group order, one list per group."""
        return tuple(tuple((c, row, self.given[c]) for c, row in group) for group in self.wiring.senders)

    @cached_property
    def receivers(self) -> Members:
        return tuple(tuple((c, row, self.taken[c]) for c, row in group) for group in self.wiring.receivers)


T = TypeVar("T", Step, Meeting)


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
    points: dict[PointName, dict[str, Array]] = field(default_factory=dict)  # inputs by point, once made
    joined: bool = False  # classes are all ranks of a program
    kept: Sample = ALL  # what it has of a larger plan

    @cached_property
    def _positions(self) -> dict[tuple[Part, tuple[int, ...]], Array]:
        return {}

    def positions(self, part: Part, logical: str) -> Array:
        """Flat positions that a part holds of a logical tensor: the same for many ranks."""
        key = (part, self.shapes[logical])
        if key not in self._positions:
            self._positions[key] = positions(*key)
        return self._positions[key]

    @cached_property
    def flows(self) -> dict[object, Any]:
        """In which order it runs, once known; a changed copy has its own."""
        return {}

    @cached_property
    def _indices(self) -> dict[object, Array]:
        return {}

    @cached_property
    def _asked(self) -> dict[object, tuple[Layout, Array | None]]:
        return {}

    def index(self, c: int, layout: Layout, ranks: tuple[int, ...]) -> Array | None:
        """Flat positions of a logical tensor that ranks of a class hold, in the shape of their tensors; None if it is not one region."""
        asked = (c, id(layout), ranks)
        if asked not in self._asked:
            self._asked[asked] = layout, self._index(c, layout, ranks)
        return self._asked[asked][1]

    def _index(self, c: int, layout: Layout, ranks: tuple[int, ...]) -> Array | None:
        shape = self.local_shapes[c].get(layout.local)
        found = tuple([self.parts.get((layout, r), ()) for r in ranks])
        if shape is None or not all(len(parts) == 1 and _covers(parts[0], shape) for parts in found):
            return None
        key = (found, self.shapes[layout.logical])
        if key not in self._indices:
            rows = [self.positions(parts[0], layout.logical).reshape(shape) for parts in found]
            self._indices[key] = np.stack(rows)
        return self._indices[key]

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Class and row of every rank."""
        return {r: (c, row) for c, k in enumerate(self.classes) for row, r in enumerate(k.ranks)}


def shares(small: Small, layout: Layout, rank: int, part: Part) -> list[tuple[int, Part]] | None:
    """A rank's share of a partial value and one copy of every other share of the same region; None if one is nowhere."""
    assert part.partial is not None
    _, own, n = part.partial
    found = {own: (rank, part)}
    for (other, at), parts in small.parts.items():
        for p in parts:
            if other == layout and p.partial is not None and p.logical == part.logical:
                found.setdefault(p.partial[1], (at, p))
    return list(found.values()) if len(found) >= n else None


def _covers(part: Part, shape: tuple[int, ...]) -> bool:
    """Whether a part is a whole local tensor."""
    if part.padding or part.partial is not None or any(part.local):
        return False
    return part.logical[0].size == math.prod(shape) if part.flat else tuple(r.size for r in part.logical) == shape


class TooMuch(Exception):
    """More elements than asked for."""


class NotJoined(Exception):
    """Ranks of one program that do not do the same together."""


def shrink_system(
    system: System,
    base: int = 2,
    alternate: bool = True,
    kept: Sample = ALL,
    most: int | None = None,
    joined: bool = False,
    own_counts: bool = False,
) -> Small:
    """Both programs at small sizes; `kept` leaves some ranks and positions.

    With more than `most` elements of all tensors of all ranks it gives up early. `joined` takes all ranks that run one program as one
    class, also those that meet others: fewer and larger steps. Where ranks of one program do not do the same together, NotJoined is raised.
    With `own_counts`, counts that operators bring along (the 1/n of a mean) shrink with their ops.
    """
    return _Shrinker(system, base, alternate, kept, joined, own_counts).small(most)


def fits(system: System, most: int) -> bool:
    """Whether all ranks together have at most so many elements, at the smallest sizes."""
    try:
        _Shrinker(system, 2, False, ALL, False).bounded(most)
    except TooMuch:
        return False
    except NotABoundary:  # nor would fewer ranks keep the structure
        return True
    return True


def extent(system: System, kept: Sample = ALL) -> tuple[int, int]:
    """Elements of all tensors of all ranks at the smallest sizes, and of the largest tensor."""
    return _Shrinker(system, 2, False, kept, False).extent()


class Wires:
    """Classes of the ranks that are there, and who of them meets whom."""

    def __init__(self, system: System, there: frozenset[int], joined: bool):
        self.system = system
        self.there = there
        self.joined = joined
        numbers: dict[object, int] = {}
        self._class_of = [numbers.setdefault(k.unit if joined else n, len(numbers)) for n, k in enumerate(system.schedule.classes)]
        mine: list[list[int]] = [[] for _ in numbers]
        self._units = [0] * len(numbers)
        for c, k in zip(self._class_of, system.schedule.classes, strict=True):
            mine[c] += [r for r in k.ranks if r in self.there]
            self._units[c] = k.unit
        self._classes = [tuple(sorted(found)) for found in mine]
        self._wirings: dict[object, Wiring] = {}

    def nodes(self, lowered: Lowered, axes: NodeAxes) -> tuple[Node, ...]:
        """What an op computes."""
        return lowered.outputs

    def meetings(self) -> list[Meeting]:
        if not self.joined:
            return [self._meeting(m.ops, *self._met(m)) for m in self.system.meetings]
        together: dict[tuple[int, int], int] = {}  # class and op → number of the meeting that it is part of
        found: list[tuple[dict[int, Op], tuple[Node, ...] | None, Full | None]] = []
        renamed: list[int] = []  # meetings that became part of another

        def number(n: int) -> int:
            while renamed[n] != n:
                n = renamed[n]
            return n

        for m in self.system.meetings:
            nodes, full = self._met(m)
            ops: dict[int, Op] = {}
            for c, op in m.ops:
                if ops.setdefault(self._class_of[c], op) is not op:
                    raise NotJoined(f"{op} meets another op of its program")
            keys = [(c, id(op)) for c, op in ops.items()]
            known = sorted({number(together[k]) for k in keys if k in together})
            n = known[0] if known else len(found)
            if not known:
                found.append(({}, nodes, full))
                renamed.append(n)
            for more in known[1:]:
                renamed[more] = n
            for c, op in [*ops.items(), *(x for k in known[1:] for x in found[k][0].items())]:
                if found[n][0].setdefault(c, op) is not op:
                    raise NotJoined(f"{op} meets several ops of a program")
            if any(found[k][1] is not nodes for k in known):
                raise NotJoined(f"{m.ops[0][1]} differs between ranks")
            together.update(dict.fromkeys(keys, n))
        return [self._meeting(tuple(ops.items()), nodes, full) for n, (ops, nodes, full) in enumerate(found) if renamed[n] == n]

    def _met(self, meeting: MeetingAxes) -> tuple[tuple[Node, ...] | None, Full | None]:
        if meeting.lowered is None or meeting.axes is None:
            return None, None
        return self.nodes(meeting.lowered, meeting.axes), (meeting.lowered, meeting.axes)

    def _meeting(self, ops: Sequence[tuple[int, Op]], nodes: tuple[Node, ...] | None, full: Full | None) -> Meeting:
        if nodes is None:
            ops = tuple(sorted(ops, key=lambda m: m[1].name != "send"))
        whom = "peer" if nodes is None else "group"
        key = (nodes is None, *((c, op.get(whom), bool(op.inputs), bool(op.outputs)) for c, op in ops))
        if key not in self._wirings:
            wiring = self._messages(ops) if nodes is None else self._groups(ops)
            if self.joined:
                self._complete(ops, wiring)
            self._wirings[key] = wiring
        given = {c: str(op.inputs[0]) for c, op in ops if op.inputs}
        taken = {c: op.outputs[0] for c, op in ops if op.outputs}
        return Meeting(ops[0][1], self._wirings[key], given, taken, nodes, full)

    def _complete(self, ops: Sequence[tuple[int, Op]], wiring: Wiring) -> None:
        """All ranks of all classes take part once, in groups of one size."""
        for members, which in ((wiring.senders, "inputs"), (wiring.receivers, "outputs")):
            there = sorted(x for group in members for x in group)
            due = sorted((c, row) for c, op in ops if getattr(op, which) for row in range(len(self._classes[c])))
            if there != due or len({len(group) for group in members}) > 1:
                raise NotJoined(f"{ops[0][1]} is not run by all ranks together")

    def _messages(self, ops: Sequence[tuple[int, Op]]) -> Wiring:
        there = {r: (d, i) for d, op in ops if op.name != "send" for i, r in enumerate(self._classes[d])}
        senders: list[tuple[tuple[int, int], ...]] = []
        receivers: list[tuple[tuple[int, int], ...]] = []
        for c, send in ops:
            for row, rank in enumerate(self._classes[c]) if send.name == "send" else ():
                peer = self.system.talk.value(rank, send.get("peer"))
                if self.joined and peer not in there:
                    raise NotJoined(f"{send} goes to ranks of another program")
                assert isinstance(peer, int)
                senders.append(((c, row),))
                receivers.append((there[peer],))
        return Wiring(tuple(senders), tuple(receivers))

    def _groups(self, ops: Sequence[tuple[int, Op]]) -> Wiring:
        talk = self.system.talk
        by_class = dict(ops)
        place = {r: (c, row) for c in by_class for row, r in enumerate(self._classes[c])}
        groups = {str(talk.value(r, op.get("group"))): None for c, op in ops for r in self._classes[c]}
        if self.joined and any(m in self.there and m not in place for name in groups for m in talk.groups[name]):
            raise NotJoined(f"{ops[0][1]} meets ranks of another program")
        rows = [[place[m] for m in talk.groups[name] if m in self.there] for name in groups]
        senders = tuple(tuple((c, row) for c, row in group if by_class[c].inputs) for group in rows)
        return Wiring(senders, tuple(tuple((c, row) for c, row in group if by_class[c].outputs) for group in rows))


class _Shrinker(Wires):
    def __init__(self, system: System, base: int, alternate: bool, kept: Sample, joined: bool, own_counts: bool = False):
        self.own_counts = own_counts
        axes, mesh = system.inference.axes, system.plan.mesh
        super().__init__(system, kept.ranks(system) if kept else frozenset(range(mesh.size)), joined)
        self.sizes = Sizes(axes, system.inference.all, base, alternate, kept.axes)
        self.kept = kept
        self._nodes: dict[int, tuple[NodeAxes, tuple[Node, ...]]] = {}  # ops of one kind have the same axes
        self._made: dict[object, tuple[Node, ...]] = {}  # small, literals as they are
        self._shapes: dict[int, tuple[Dims, tuple[int, ...]]] = {}
        self._shrunk: dict[object, tuple[Node, ...]] = {}
        self._held: dict[object, Part] = {}
        self._alike: dict[object, tuple[Node, ...]] = {}  # ops that are equal at small sizes have the same nodes

    def nodes(self, lowered: Lowered, axes: NodeAxes) -> tuple[Node, ...]:
        known = self._nodes.get(id(axes))
        if known is None:
            key = alike(lowered, axes)
            if key not in self._shrunk:
                if key not in self._made:
                    self._made[key] = tuple(shrink(lowered.outputs, axes, self.sizes))
                made = self._made[key]
                if self.own_counts:
                    made = tuple(shrunk(lowered.outputs, made, axes, self.sizes))
                self._shrunk[key] = self._alike.setdefault(_signature(made), made)
            known = self._nodes[id(axes)] = axes, self._shrunk[key]
        return known[1]

    def small(self, most: int | None) -> Small:
        system = self.system
        if most is not None:
            self.bounded(most)
        logical_steps, classes = self._steps()
        scopes = [system.unit_scopes[u] for u in self._units]
        local_shapes = [{n: self._shape(dims) for n, dims in scope.dims.items()} for scope in scopes]
        shapes = {n: self._shape(dims) for n, dims in system.scope.dims.items()}
        domains = {n: self._domain(n, d) for n, d in system.logical.domains.items()}
        parts = {}
        mesh = system.plan.mesh
        at = {r: mesh.coordinates(r) for r in self.there}
        written: dict[object, tuple[Part, ...]] = {}  # by form, shape and the coordinates that the form looks at
        for lay, holders in system.holdings():
            full, whole, used = system.logical.tensors[lay.logical].shape, system.scope.dims[lay.logical], mesh_axes(lay, mesh)
            same: dict[object, tuple[Part, ...]] = {}  # by unit and coordinates
            for r in [r for r in holders if r in at]:
                u = system.talk.unit_of[r]
                where = r if used is None else tuple([at[r][a] for a in used])
                key = (u, where)
                if key not in same:
                    form = (lay.form if used is not None else lay, full, where)
                    if form not in written:
                        written[form] = lay.parts(mesh, r, full)
                    same[key] = tuple([self._part(p, whole, system.unit_scopes[u].dims[lay.local]) for p in written[form]])
                parts[lay, r] = same[key]
        reduced = any(full != less for _, full, _, _, less in self.sizes.atoms())
        largest = max((math.prod(s) for group in [shapes, *local_shapes] for s in group.values()), default=0)
        names = {n: tuple(id(a.root()) for a in dims) for n, dims in system.scope.dims.items()}
        return Small(
            system.logical,
            logical_steps,
            classes,
            self.meetings(),
            shapes,
            local_shapes,
            domains,
            parts,
            reduced,
            tuple(system.inference.axes.clashes),
            largest,
            names,
            joined=self.joined,
            kept=self.kept,
        )

    def _steps(self) -> tuple[list[Step], list[SmallClass]]:
        """Of the logical program, and of every class of ranks."""
        system = self.system
        ops = system.logical.ops
        logical_steps = [
            Step(ops[n], n, (0,), ops[n].inputs, ops[n].outputs, self.nodes(x.lowered, x.axes), (x.lowered, x.axes))
            for n, (x,) in system.logical_ops.items()
        ]
        classes = []
        for u, mine_all in zip(self._units, self._classes, strict=True):
            program, unit = system.unit_programs[u], system.talk.units[u]
            own = SmallClass(mine_all, program)
            row_of = {r: row for row, r in enumerate(mine_all)}
            known: dict[int, tuple[int, ...]] = {}  # rows are shared by many ops
            for n, x in ((n, x) for n, variants in system.unit_ops[u].items() for x in variants):
                if id(x.rows) not in known:
                    known[id(x.rows)] = tuple(row_of[unit.ranks[row]] for row in x.rows if unit.ranks[row] in row_of)
                mine = known[id(x.rows)]
                if mine:
                    op = program.ops[n]
                    own.order.append(Step(op, n, mine, op.inputs, op.outputs, self.nodes(x.lowered, x.axes), (x.lowered, x.axes)))
            classes.append(own)
        return logical_steps, classes

    def _shape(self, dims: Dims) -> tuple[int, ...]:
        known = self._shapes.get(id(dims))  # which many tensors share
        if known is None:
            known = self._shapes[id(dims)] = dims, tuple([self.sizes(a) for a in dims])
        return known[1]

    def bounded(self, most: int) -> None:
        total, _ = self.extent()
        if total > most:
            raise TooMuch(f"{total:,} elements on {len(self.there)} ranks")
        within = self._within_ops()
        if within > WITHIN:
            raise TooMuch(f"{within:,} elements at once within an op")

    def _within_ops(self) -> int:
        """Elements of the largest thing that an op makes on its way, as the scores of an attention are."""
        ops = (self.system.logical_ops, *(self.system.unit_ops[u] for u in self._units))
        axes = {id(x.axes): x.axes for o in ops for variants in o.values() for x in variants}
        return max((math.prod(self._shape(dims)) for a in axes.values() for dims in a.dims.values()), default=0)

    def extent(self) -> tuple[int, int]:
        known: dict[int, int] = {}

        def count(dims: Dims) -> int:
            if id(dims) not in known:
                known[id(dims)] = math.prod(self._shape(dims))
            return known[id(dims)]

        total = sum(map(count, self.system.scope.dims.values()))
        for u, mine in zip(self._units, self._classes, strict=True):
            total += len(mine) * sum(map(count, self.system.unit_scopes[u].dims.values()))
        return total, max(known.values(), default=0)

    def _domain(self, name: str, domain: Domain) -> Domain:
        line = self.system.scope.lines.get(name)
        root = None if line is None else line.root()
        return replace(domain, size=self.sizes(root.axis)) if root is not None and root.axis is not None else domain

    def _part(self, part: Part, whole: Dims, local: Dims) -> Part:
        if part.padding:
            return self._pad(part, local)
        key = (part, tuple([id(a.root()) for a in whole]), tuple([id(a.root()) for a in local]))
        if key not in self._held:
            self._held[key] = self._smaller(part, whole, local)
        return self._held[key]

    def _pad(self, part: Part, local: Dims) -> Part:
        """Padding at small sizes."""
        position, dims = self.sizes.position, [self.system.inference.axes.product(local)] if part.flat else local
        ends = [(position(a, at), position(a, at + run.size)) for at, run, a in zip(part.local, part.logical, dims, strict=True)]
        return replace(part, local=tuple([a for a, _ in ends]), logical=tuple([Run(0, b - a) for a, b in ends]))

    def _smaller(self, part: Part, whole: Dims, local: Dims) -> Part:
        sizes = self.sizes
        product = self.system.inference.axes.product
        if part.flat:
            whole, local = [self.system.inference.flattened(whole)], [product(local)]
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
            if sizes.position(b, at + run.size) - starts[-1] != runs[-1].size:  # two ways to cut an axis that shrank differently
                raise NotABoundary(f"{part}: {runs[-1].size} positions held in {sizes.position(b, at + run.size) - starts[-1]}")
        return replace(part, local=tuple(starts), logical=tuple(runs))


def _signature(outputs: Sequence[Node]) -> object:
    """What nodes compute. `repr` tells a float literal, which may be widened, from the fraction that it is equal to."""
    number: dict[int, int] = {}
    found: list[object] = []
    for node in ordered(tuple(outputs)):
        number[id(node)] = len(number)
        found.append((node.prim, repr(node.attrs), node.shape, node.kind, tuple(number[id(a)] for a in node.args)))
    return tuple(found), tuple(number[id(o)] for o in outputs)


def mesh_axes(lay: Layout, mesh: Mesh) -> list[str] | None:
    """The mesh axes on whose coordinates it depends what a rank holds; None where that is listed rank by rank."""
    match lay.form:
        case Placements(axes):
            used = {name for name, _ in axes}
        case Pattern(text, _, partial):
            used = {n for names in pattern_dims(text) for n in names} | {str(p[0]) for p in partial}
        case _:
            return None
    return [a for a in mesh.names if a in used]
