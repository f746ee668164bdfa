"""The prover: walk the logical program, then the plan, and compare forms obligation by obligation.

Both walks use the same operators over the same axes and one kernel, so a plan tensor *is* a logical tensor when their
forms are identical. Nothing is assumed about intermediate tensors; inputs, parameters and state live as lineage says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trainverify.axes.structure import Axis
from trainverify.axes.system import LoweredOp, MeetingAxes, System
from trainverify.graph.lineage import Layout, Parts, Pattern, Placements, Shard, pattern_dims
from trainverify.graph.obligations import Obligation
from trainverify.graph.program import Op, Program
from trainverify.primitives.node import Node, topological
from trainverify.prove.algebra.folding import Instance, fold
from trainverify.prove.algebra.forms import Forms, Offset
from trainverify.prove.algebra.kernel import Index, Kernel, Poly, TooLarge, Unsupported, variables

_MESH = -(10**6)  # mesh variables count down from here
_LINEAR = frozenset({"add", "sub", "neg", "identity", "to", "all_reduce", "reduce_scatter", "sum", "multiref"})


@dataclass
class Proof:
    """What was shown. `failed[obligation]` says on which instance and why the others were not."""

    proved: list[Obligation] = field(default_factory=list)
    failed: dict[Obligation, str] = field(default_factory=dict)
    preconditions: list[str] = field(default_factory=list)
    instances: int = 0
    atoms: int = 0


class Missing(Exception):
    """A tensor without a form, because an op before it has none."""


class Prover:
    def __init__(self, system: System):
        self.system = system
        self.kernel = Kernel()
        self.forms = Forms(self.kernel, system.inference.axes, system.logical.domains)
        self.instances = fold(system)
        self.mesh_vars: dict[str, list[tuple[Index, Axis]]] = {}
        for name in system.plan.mesh.names:
            leaves = system.inference.axes.leaves([system.inference.mesh_axis(system.plan.mesh, name)])
            self.mesh_vars[name] = []
            for a in leaves:
                v = _MESH - sum(map(len, self.mesh_vars.values()))
                self.mesh_vars[name].append((v, a))
                self.forms.mesh_sizes[v] = a.size
        for n, d in system.logical.domains.items():
            if d.kind == "ids" and d.ignore is None:
                self.kernel.always_valid.add(n)
        self.logical: dict[str, Poly | Exception] = {}
        self.local: list[dict[str, Poly | Exception]] = [{} for _ in self.instances]

    # -- running -----------------------------------------------------------------------------------------------------

    def prove(self, wanted: Sequence[Obligation]) -> Proof:
        self._run_logical()
        needed = set(self.kernel.needs)
        self.kernel.keep_constants = False  # a micro-batch or rank is a constant that any other could replace
        self._run_plan()
        extra = {(what, u) for what, u in self.kernel.needs - needed if not self._certain(what, u)}
        result = Proof(instances=len(self.instances), atoms=len(self.kernel.atoms))
        for o in wanted:
            why = self._check(o)
            if why is None and extra:
                why = f"the plan divides by (or takes a root or log of) something that the logical program does not: {self._show(extra)}"
            if why is None:
                result.proved.append(o)
            else:
                result.failed[o] = why
        result.preconditions = [f"{what}: {self.name_of(u)}" for what, u in sorted(needed) if not self._certain(what, u)]
        return result

    def _certain(self, what: str, uid: int) -> bool:
        return self.kernel.atoms[uid].positive

    def _show(self, extra: set[tuple[str, int]]) -> str:
        what, u = min(extra)
        return f"{self.name_of(u)} must be {what}"

    def name_of(self, uid: int) -> str:
        for name, p in self.logical.items():
            if not isinstance(p, Exception) and len(p) == 1 and any(f[0] == uid for m in p for f in m if len(m) == 1):
                return name
        a = self.kernel.atoms[uid]
        return str(a.data) if a.kind == "input" else f"a value of kind {a.kind}"

    def _run_logical(self) -> None:
        system = self.system
        for n in system.logical.sources:
            leaves = system.inference.axes.leaves(system.scope.dims[n])
            try:
                self.forms.leaves(system.scope.dims[n])
                domain = system.logical.domains.get(n)
                flags = {"positive": domain is not None and domain.kind == "positive"}
                flags["nonnegative"] = domain is not None and domain.kind in ("positive", "nonnegative", "indicator")
                flags["indicator"] = (domain is not None and domain.kind == "indicator") or system.logical.tensors[n].kind == "bool"
                sizes = tuple(a.size for a in leaves)
                self.logical[n] = self.kernel.input(n, sizes, [-1 - i for i in range(len(sizes))], **flags)
            except (Unsupported, TooLarge) as error:
                self.logical[n] = error
        loose = _loose(system.logical)
        for x in system.logical_ops:
            self._apply(x, system.logical.ops[x.index], self.logical, {}, loose)

    def _apply(self, x: LoweredOp, op: Op, env: dict[str, Poly | Exception], offsets: Mapping[int, Offset], loose: set[str]) -> None:
        try:
            inputs = [None if i is None else self._get(env, i) for i in op.inputs]
            made = self.forms.op(x.lowered, x.axes, inputs, offsets)
            for name, p in zip(op.outputs, made, strict=True):
                env[name] = self._kept(p, name in loose)
        except (Unsupported, TooLarge, Missing) as error:
            for name in op.outputs:
                env[name] = error if isinstance(error, Missing) else Missing(f"{op.name} ({op.source}): {error}")

    @staticmethod
    def _get(env: Mapping[str, Poly | Exception], name: str) -> Poly:
        value = env.get(name)
        if value is None:
            raise Missing(f"{name} is never computed")
        if isinstance(value, Exception):
            raise value if isinstance(value, Missing) else Missing(str(value))
        return value

    def _kept(self, p: Poly, loose: bool) -> Poly:
        """How a tensor is kept: sums under a short name, unless one addition alone will take them in."""
        k = self.kernel
        p = k.settle(p)
        if loose:
            return p
        if len(p) > 1:
            return k.single(p)
        return p

    def _run_plan(self) -> None:
        system = self.system
        pending: list[list[LoweredOp]] = []
        loose = [_loose(p) for p in system.unit_programs]
        for i, instance in enumerate(self.instances):
            unit = system.schedule.classes[instance.class_index].unit
            self._sources(i, instance, unit)
            pending.append(self._own(instance, unit))
        self.by_class: dict[int, list[int]] = {}
        for i, instance in enumerate(self.instances):
            self.by_class.setdefault(instance.class_index, []).append(i)
        for i in range(len(self.instances)):
            pending[i] = self._advance(i, pending[i], loose)
        for meeting in system.meetings:
            touched = self._meet(meeting)
            for i in touched:
                pending[i] = self._advance(i, pending[i], loose)

    def _own(self, instance: Instance, unit: int) -> list[LoweredOp]:
        """The local ops of an instance, in order, with all variants of its ranks."""
        ranks = {r: row for row, r in enumerate(self.system.talk.units[unit].ranks)}
        base = ranks[instance.rank]
        return [x for x in self.system.unit_ops[unit] if base in x.rows]

    def _advance(self, i: int, pending: list[LoweredOp], loose: list[set[str]]) -> list[LoweredOp]:
        instance = self.instances[i]
        unit = self.system.schedule.classes[instance.class_index].unit
        program = self.system.unit_programs[unit]
        env = self.local[i]
        rest: list[LoweredOp] = []
        for x in pending:
            op = program.ops[x.index]
            if all(n is None or n in env for n in op.inputs):
                try:
                    offsets = self._offsets(instance, unit, x)
                except Unsupported as error:
                    env.update({o: Missing(f"{op.name} ({op.source}): {error}") for o in op.outputs})
                    continue
                self._apply(x, op, env, offsets, loose[unit])
            else:
                rest.append(x)
        return rest

    def _offsets(self, instance: Instance, unit: int, x: LoweredOp) -> dict[int, Offset]:
        """Offsets of nodes that differ between the ranks of an instance, as formulas over the mesh; checked for every rank."""
        variants = self._variants(unit).get(x.index, [])
        if len(variants) < 2 or not instance.folded:
            return {}
        mesh = self.system.plan.mesh
        ranks = self.system.talk.units[unit].ranks
        fixed = instance.at()
        nodes = topological(x.lowered.outputs)
        table: list[tuple[dict[str, int], list[Node]]] = []
        for v in variants:
            other = topological(v.lowered.outputs)
            for row in v.rows:
                at = mesh.coordinates(ranks[row])
                if all(at[a] == c for a, c in fixed.items()):
                    table.append((at, other))
                    if not _same_shape(nodes, other):
                        raise Unsupported("ranks that compute different things")
        result: dict[int, Offset] = {}
        for position, node in enumerate(nodes):
            place = {"slice": 1, "iota": 0, "one_hot": 0, "pad": 1}.get(node.prim)
            if place is None:
                if any(others[position].attrs != node.attrs for _, others in table):
                    raise Unsupported(f"{node.prim} with different attributes on different ranks")
                continue
            base = node.attrs[place]
            steps = {}
            for axis in instance.folded:
                one = [o[position].attrs[place] - base for at, o in table if all(at[a] == (1 if a == axis else 0) for a in instance.folded)]
                steps[axis] = one[0] if one else 0
            for at, o in table:
                if o[position].attrs[place] != base + sum(steps[a] * at[a] for a in instance.folded):
                    raise Unsupported("an offset that is not linear in the mesh coordinates")
                if _others(o[position].attrs, place) != _others(node.attrs, place) and node.prim != "pad":
                    raise Unsupported("different attributes on different ranks")
            if any(steps.values()):
                result[id(node)] = Offset(base, tuple(self._strides(steps)))
        return result

    def _strides(self, steps: Mapping[str, int]) -> Iterator[tuple[Index, int]]:
        for axis, step in steps.items():
            if step:
                leaves = self.mesh_vars[axis]
                for i, (v, _) in enumerate(leaves):
                    yield v, step * math.prod(a.size for _, a in leaves[i + 1 :])

    def _variants(self, unit: int) -> dict[int, list[LoweredOp]]:
        if not hasattr(self, "_variant_table"):
            self._variant_table: dict[int, dict[int, list[LoweredOp]]] = {}
        if unit not in self._variant_table:
            found: dict[int, list[LoweredOp]] = {}
            for x in self.system.unit_ops[unit]:
                found.setdefault(x.index, []).append(x)
            self._variant_table[unit] = found
        return self._variant_table[unit]

    # -- lineage -----------------------------------------------------------------------------------------------------

    def _sources(self, i: int, instance: Instance, unit: int) -> None:
        env = self.local[i]
        for lay in self.system.plan.lineage:
            program = self.system.unit_programs[unit]
            if lay.local in program.sources and instance.rank in self._holders(lay):
                try:
                    if lay.local in env:
                        raise Unsupported("a tensor that holds several logical ones")
                    env[lay.local] = self._cut_out(lay, instance, unit)
                except (Unsupported, TooLarge, Missing) as error:
                    env[lay.local] = Missing(f"{lay}: {error}")

    def _holders(self, lay: Layout) -> frozenset[int]:
        if not hasattr(self, "_holder_sets"):
            self._holder_sets: dict[object, frozenset[int]] = {}
        key = lay if isinstance(lay.form, Parts) else lay.where
        if key not in self._holder_sets:
            self._holder_sets[key] = frozenset(lay.holders(self.system.plan.mesh))
        return self._holder_sets[key]

    def _cut_out(self, lay: Layout, instance: Instance, unit: int) -> Poly:
        """What a local tensor must hold: the logical form with the digits that lineage fixes."""
        whole = self._get(self.logical, lay.logical)
        system = self.system
        names: dict[Index, Index] = {}
        at_whole = at_local = 0
        for d, (a, b) in enumerate(zip(system.scope.dims[lay.logical], system.unit_scopes[unit].dims[lay.local], strict=True)):
            leaves, local = self.forms.leaves([a]), self.forms.leaves([b])
            marks = self._marks(lay, instance, d, leaves)
            if [id(x) for x, m in zip(leaves, marks, strict=True) if m is None] != [id(x) for x in local]:
                raise Unsupported(f"dimension {d}: {leaves} held as {local}")
            for m in marks:
                at_whole += 1
                if m is None:
                    at_local += 1
                    names[-at_whole] = -at_local
                else:
                    names[-at_whole] = m
        return self.kernel.substitute(whole, names)

    def _marks(self, lay: Layout, instance: Instance, d: int, leaves: list[Axis]) -> list[Index | None]:
        """Per leaf of a logical dimension: the mesh variable or constant that fixes it, None if it is local."""
        mesh = self.system.plan.mesh
        digits: list[tuple[int, list[Index] | None]] = []  # (size, indices or None for local)
        match lay.form:
            case Pattern(text, fixed, partial):
                if partial:
                    raise Unsupported("a partial value")
                given = {n: (i, s) for n, i, s in fixed}
                names = pattern_dims(text)[d]
                known = math.prod(given[n][1] if n in given else mesh.length(n) for n in names if n in given or n in mesh.names)
                rest = math.prod(a.size for a in leaves) // known
                done = False
                for n in names:
                    if n in given:
                        digits.append((given[n][1], [given[n][0]]))
                    elif n in mesh.names:
                        digits.append((mesh.length(n), self._coordinate(n, instance)))
                    elif n != "1" and not done:
                        digits.append((rest, None))
                        done = True
            case Placements(axes):
                size = math.prod(a.size for a in leaves)
                for n, p in axes:
                    if p == Shard(d):
                        if size % mesh.length(n):
                            raise Unsupported("uneven shards")
                        digits.append((mesh.length(n), self._coordinate(n, instance)))
                        size //= mesh.length(n)
                    elif not isinstance(p, Shard) and hasattr(p, "op"):
                        raise Unsupported("a partial value")
                digits.append((size, None))
            case _:
                raise Unsupported("explicit parts")
        return self._spread(digits, leaves)

    def _coordinate(self, axis: str, instance: Instance) -> list[Index]:
        """A mesh coordinate as digits over the leaves of its axis."""
        leaves = self.mesh_vars[axis]
        if axis in instance.folded:
            return [v for v, _ in leaves]
        value = instance.at()[axis]
        found: list[Index] = []
        for _, a in reversed(leaves):
            value, digit = divmod(value, a.size)
            found.append(digit)
        return found[::-1]

    def _spread(self, digits: list[tuple[int, list[Index] | None]], leaves: list[Axis]) -> list[Index | None]:
        """Digits assigned to leaves by size, slow first."""
        marks: list[Index | None] = []
        i = 0
        for size, indices in digits:
            mine: list[Axis] = []
            while math.prod(a.size for a in mine) < size:
                if i == len(leaves):
                    raise Unsupported(f"{size} on {leaves}")
                mine.append(leaves[i])
                i += 1
            if math.prod(a.size for a in mine) != size:
                raise Unsupported(f"{size} on {leaves}")
            if indices is None:
                marks += [None] * len(mine)
            elif len(indices) == len(mine):
                marks += indices
            elif len(indices) == 1 and indices[0] >= 0:  # a constant over several leaves
                value, split = indices[0], []
                for a in reversed(mine):
                    value, digit = divmod(value, a.size)
                    split.append(digit)
                marks += split[::-1]
            elif not mine and size == 1:
                continue
            else:
                raise Unsupported(f"{len(indices)} digits on {mine}")
        return marks

    # -- communication -----------------------------------------------------------------------------------------------

    def _meet(self, meeting: MeetingAxes) -> list[int]:
        if meeting.lowered is None:
            return self._send(meeting)
        ops = dict(meeting.ops)
        members = [i for c in ops for i in self.by_class[c]]
        along = meeting.mesh_axes
        touched: list[int] = []
        # instances that meet share everything but the coordinates along the group
        parties: dict[object, list[int]] = {}
        for i in members:
            key: object
            if along is not None:
                key = tuple((a, c) for a, c in self.instances[i].fixed if a not in along)
            else:
                key = self.system.talk.value(self.instances[i].rank, ops[self.instances[i].class_index].get("group"))
            parties.setdefault(key, []).append(i)
        for party in parties.values():
            try:
                self._collective(meeting, ops, party)
            except (Unsupported, TooLarge, Missing) as error:
                for i in party:
                    op = ops[self.instances[i].class_index]
                    self.local[i].update({o: Missing(f"{op.name} ({op.source}): {error}") for o in op.outputs})
            touched += party
        return touched

    def _collective(self, meeting: MeetingAxes, ops: Mapping[int, Op], party: list[int]) -> None:
        k = self.kernel
        assert meeting.lowered is not None
        assert meeting.axes is not None
        given, made = meeting.lowered.inputs[0], meeting.lowered.outputs[0]
        assert given is not None
        lead = self.forms.leaves([meeting.axes.dims[id(given)][0]])
        first = self.instances[party[0]]
        group = self.system.talk.groups[str(self.system.talk.value(first.rank, ops[first.class_index].get("group")))]
        stacked: Poly = {}
        for i in party:
            op = ops[self.instances[i].class_index]
            if not op.inputs:
                continue
            value = self._get(self.local[i], str(op.inputs[0]))
            stacked = k.add(stacked, self._stacked(value, i, meeting, lead, group, op))
        stacked = k.collapse(stacked)
        (result,) = self.forms.op(meeting.lowered, meeting.axes, [stacked], {})
        out = self.forms.leaves([meeting.axes.dims[id(made)][0]])
        for i in party:
            op = ops[self.instances[i].class_index]
            if op.outputs:
                p = self._unstacked(result, i, meeting, out, group)
                unit = self.system.schedule.classes[self.instances[i].class_index].unit
                self.local[i][op.outputs[0]] = self._kept(p, op.outputs[0] in _loose(self.system.unit_programs[unit]))

    def _position(self, i: int, meeting: MeetingAxes, lead: list[Axis], group: tuple[int, ...]) -> list[Index]:
        """Where an instance stands in its group, as digits over the leading leaves."""
        instance = self.instances[i]
        if meeting.mesh_axes is not None:
            return [d for a in meeting.mesh_axes for d in self._coordinate(a, instance)]
        value, found = group.index(instance.rank), []
        for a in reversed(lead):
            value, digit = divmod(value, a.size)
            found.append(digit)
        return found[::-1]

    def _stacked(self, value: Poly, i: int, meeting: MeetingAxes, lead: list[Axis], group: tuple[int, ...], op: Op) -> Poly:
        k = self.kernel
        n = len(lead)
        shift = {v: v - n for v in variables(value) if v > _MESH + 1000 and v > -(10**5)}
        if op.get("root") is not None and self.system.table[op.name].senders == "root":
            rank = self.system.talk.value(self.instances[i].rank, op.get("root"))
            assert isinstance(rank, int)
            at: dict[Index, Index] = {}
            for a in meeting.mesh_axes or ():
                leaves = self.mesh_vars[a]
                at.update(zip((v for v, _ in leaves), _split(self.system.plan.mesh.coordinates(rank)[a], leaves), strict=True))
            return k.substitute(value, {**shift, **at})
        digits = self._position(i, meeting, lead, group)
        if len(digits) != n:
            raise Unsupported(f"a group of {len(group)} on {lead}")
        moved = {d: -1 - j for j, d in enumerate(digits) if d < 0}
        result = k.substitute(value, {**shift, **moved})
        for j, (d, leaf) in enumerate(zip(digits, lead, strict=True)):
            if d >= 0:
                result = k.times(k.delta(leaf.size, -1 - j, d), result)
        return result

    def _unstacked(self, result: Poly, i: int, meeting: MeetingAxes, lead: list[Axis], group: tuple[int, ...]) -> Poly:
        n = len(lead)
        digits = self._position(i, meeting, lead, group) if n else []
        if len(digits) != n:
            raise Unsupported(f"a group of {len(group)} on {lead}")
        names = {v: v + n for v in variables(result) if -(10**5) < v < -n}
        return self.kernel.substitute(result, {**names, **{-1 - j: d for j, d in enumerate(digits)}})

    def _send(self, meeting: MeetingAxes) -> list[int]:
        (c, send), (d, recv) = sorted(meeting.ops, key=lambda m: m[1].name != "send")
        mesh = self.system.plan.mesh
        touched = []
        for i in self.by_class[c]:
            peer = self.system.talk.value(self.instances[i].rank, send.get("peer"))
            assert isinstance(peer, int)
            at = mesh.coordinates(peer)
            for j in self.by_class[d]:
                if all(at[a] == x for a, x in self.instances[j].fixed):
                    self.local[j][recv.outputs[0]] = self.local[i].get(str(send.inputs[0]), Missing(f"{send.inputs[0]} is never computed"))
                    touched.append(j)
        return touched

    # -- comparing ---------------------------------------------------------------------------------------------------

    def _check(self, o: Obligation) -> str | None:
        """None if every rank that must hold this output holds it; else what is missing."""
        for h in o.holdings:
            ranks = set(h.ranks)
            covered = 0
            for i, instance in enumerate(self.instances):
                if instance.rank not in ranks:
                    continue
                covered += self._ranks_of(instance)
                unit = self.system.schedule.classes[instance.class_index].unit
                try:
                    want = self._cut_out(h.layout, instance, unit)
                    got = self._get(self.local[i], h.layout.local)
                except (Missing, Unsupported, TooLarge) as error:
                    return f"rank {instance.rank}: {error}"
                if not self._equal(got, want):
                    return f"rank {instance.rank}: {h.layout.local} and {h.layout.logical} have different forms"
            if covered != len(ranks):
                return f"{len(ranks) - covered} of {len(ranks)} ranks are not covered"
        return None

    def _ranks_of(self, instance: Instance) -> int:
        return math.prod(self.system.plan.mesh.length(a) for a in instance.folded)

    def _equal(self, got: Poly, want: Poly) -> bool:
        k = self.kernel
        if got == want:
            return True
        difference = k.add(k.flat(got), {m: -c for m, c in k.flat(want).items()})
        return not k.collapse(difference)


def _same_shape(a: list[Node], b: list[Node]) -> bool:
    return len(a) == len(b) and all(x.prim == y.prim and x.shape == y.shape and x.kind == y.kind for x, y in zip(a, b, strict=True))


def _others(attrs: tuple[object, ...], place: int) -> tuple[object, ...]:
    return attrs[:place] + attrs[place + 1 :]


def _split(value: int, leaves: list[tuple[Index, Axis]]) -> list[int]:
    found = []
    for _, a in reversed(leaves):
        value, digit = divmod(value, a.size)
        found.append(digit)
    return found[::-1]


_loose_cache: dict[int, tuple[Program, set[str]]] = {}


def _loose(program: Program) -> set[str]:
    """Tensors that one addition alone consumes: they stay open, so that the order of additions does not matter."""
    known = _loose_cache.get(id(program))
    if known is not None and known[0] is program:
        return known[1]
    uses: dict[str, list[str]] = {}
    for op in program.ops:
        for i in op.inputs:
            if i is not None:
                uses.setdefault(i, []).append(op.name)
    outputs = {o.tensor for o in program.outputs}
    found = {t for t, names in uses.items() if len(names) == 1 and names[0] in _LINEAR and t not in outputs}
    _loose_cache[id(program)] = (program, found)
    return found


def prove(system: System, wanted: Sequence[Obligation]) -> Proof:
    """Try to prove every obligation at full size."""
    return Prover(system).prove(wanted)
