"""The prover: walk the logical program, then the plan, and compare forms obligation by obligation.

Both walks use the same operators over the same axes and one kernel, so a plan tensor *is* a logical tensor when their
forms are identical. Nothing is assumed about intermediate tensors; inputs, parameters and state live as lineage says.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from trainverify.axes.structure import Axis
from trainverify.axes.system import LoweredOp, MeetingAxes, Scope, System
from trainverify.graph.communication import is_communication
from trainverify.graph.lineage import Layout, Part, Partial, Parts, Pattern, Placements, Run, Shard, local_digits, pattern_dims
from trainverify.graph.obligations import Obligation
from trainverify.graph.outline import Block
from trainverify.graph.program import Op, Program
from trainverify.ops.table import Lowered
from trainverify.primitives.node import Node, topological
from trainverify.prove.algebra.folding import Instance, fold
from trainverify.prove.algebra.forms import Forms, Value
from trainverify.prove.algebra.grids import Grid, Offset, Spot, mixed_radix
from trainverify.prove.algebra.kernel import Index, Kernel, Need, Poly, TooLarge, Unsupported, scale, variables
from trainverify.prove.algebra.masked import MaskedSums
from trainverify.prove.algebra.memo import Memo, Values
from trainverify.prove.algebra.notation import show

_MESH = -(10**6)  # mesh variables count down from here
WRITTEN_OUT = 10_000  # ops of a plan up to which a failed proof is tried again without blocks
ENUMERATED = 16  # ranks of a plan up to which a failed proof is tried again without folding
_POSITIONS = -(10**5)  # position variables are above this
_MOVES = frozenset({"identity", "to", "multiref", "reshape", "view", "reshape.grad", "view.grad"})
_LINEAR = frozenset({"add", "sub", "neg", "all_reduce", "reduce_scatter", "sum"}) | _MOVES


@dataclass
class Proof:
    """What was shown. `failed[obligation]` says on which instance and why the others were not."""

    proved: list[Obligation] = field(default_factory=list)
    failed: dict[Obligation, str] = field(default_factory=dict)
    preconditions: list[str] = field(default_factory=list)
    lint: list[str] = field(default_factory=list)  # equal over the reals, not safe in floats
    instances: int = 0
    atoms: int = 0
    prover: Prover | None = None  # with all forms, for explanations


Wires = list[tuple[object, ...]]


class Missing(Exception):
    """A tensor without a form, because an op before it has none."""


class _Pending:
    """Blocks and ops of an instance that have not run; those whose inputs are all there are ready, the first in the program first."""

    def __init__(self, work: Sequence[Block | int], program: Program, there: Collection[str]):
        self.work = work
        self.users: dict[str, list[int]] = {}
        self.missing: list[int] = []
        for n, x in enumerate(work):
            inputs = x.inputs if isinstance(x, Block) else program.ops[x].inputs
            wanted = {i for i in inputs if i is not None and i not in there}
            self.missing.append(len(wanted))
            for i in wanted:
                self.users.setdefault(i, []).append(n)
        self.ready = [n for n, left in enumerate(self.missing) if not left]

    def next(self) -> Block | int:
        return self.work[heapq.heappop(self.ready)]

    def arrived(self, tensors: Iterable[str]) -> None:
        for t in tensors:
            for n in self.users.pop(t, ()):
                self.missing[n] -= 1
                if not self.missing[n]:
                    heapq.heappush(self.ready, n)


class _Places:
    """Coordinates of some ranks on the folded axes of their instance."""

    def __init__(self, axes: tuple[str, ...], found: list[tuple[int, ...]]):
        self.axes = axes
        self.found = frozenset(found)
        self._seen: dict[tuple[int, ...], frozenset[tuple[int, ...]]] = {}

    def has(self, axis: str) -> bool:
        """Whether the rank one step along an axis from the origin is among them."""
        return tuple(int(a == axis) for a in self.axes) in self.found

    def offsets(self, steps: Mapping[str, int]) -> set[int]:
        """Σ step · coordinate on every one of the ranks."""
        used = tuple(n for n, a in enumerate(self.axes) if steps[a])
        if used not in self._seen:
            self._seen[used] = frozenset(tuple(at[n] for n in used) for at in self.found)
        weights = [steps[self.axes[n]] for n in used]
        return {sum(w * c for w, c in zip(weights, at, strict=True)) for at in self._seen[used]}


class Prover:
    def __init__(self, system: System, enumerate_all: bool = False, blocks: bool = True):
        """With `blocks`, what is repeated is worked out once."""
        self.system = system
        self.kernel = Kernel()
        self.forms = Forms(self.kernel, system.inference.axes, dict(system.logical.domains))
        self.instances = fold(system, enumerate_all)
        self.masked: MaskedSums | None = None  # of the logical program, once it is known
        self.mesh_vars: dict[str, list[tuple[Index, Axis]]] = {}
        for name in system.plan.mesh.names:
            leaves = system.inference.axes.leaves([system.inference.mesh_axis(system.plan.mesh, name)])
            self.mesh_vars[name] = []
            for a in leaves:
                v = _MESH - sum(map(len, self.mesh_vars.values()))
                self.mesh_vars[name].append((v, a))
                self.forms.mesh_sizes[v] = a.size
        for n, d in system.logical.domains.items():
            if d.kind == "ids" and d.size is not None and (d.ignore is None or 0 <= d.ignore < d.size):
                self.kernel.always_valid.add(n)
        self.memo = Memo(self.kernel, self.forms) if blocks else None
        self._outputs: dict[int, tuple[int, ...]] = {}  # of a kind of block: which of the tensors made are used elsewhere
        self._contexts: dict[Hashable, int] = {}
        self._context_of: list[int] = [self._context(i) for i in self.instances]
        self._parties_of: dict[object, dict[int, list[int]]] = {}
        self._rows: dict[int, dict[int, int]] = {}
        self._variant_table: dict[int, dict[int, list[LoweredOp]]] = {}
        self._wire_table: dict[int, tuple[Lowered, list[Node], Wires]] = {}
        self._place_table: dict[tuple[Instance, int, int], _Places] = {}
        self._holder_sets: dict[object, frozenset[int]] = {}
        self._names: dict[int, str] = {}
        self.logical = Values()
        self.local = [Values() for _ in self.instances]

    # -- running -----------------------------------------------------------------------------------------------------

    def prove(self, wanted: Sequence[Obligation]) -> Proof:
        self._run_logical()
        needed = set(self.kernel.needs)
        stable = {rest for rest, uses in self.forms.exps.items() if all(safe for _, safe in uses)}
        self.forms.exps = {}
        self.kernel.keep_constants = False  # a micro-batch or rank is a constant that any other could replace
        self.kernel.named = len(self.kernel.atoms)
        if self.memo is not None:
            self.memo.forget_signatures()
        self.masked = MaskedSums(self.kernel)
        self.kernel.only_block = self.masked.only
        self._run_plan()
        extra = {n for n in self.kernel.needs - needed if not self.kernel.certain(n, needed)}
        result = Proof(instances=len(self.instances), atoms=len(self.kernel.atoms), prover=self)
        for o in wanted:
            why = self._check(o)
            if why is None and extra:
                why = f"the plan divides by (or takes a root or log of) something that the logical program does not: {self._show(extra)}"
            if why is None:
                result.proved.append(o)
            else:
                result.failed[o] = why
        for rest, uses in self.forms.exps.items():
            risky = sorted({where for where, safe in uses if not safe})
            if rest in stable and risky:
                result.lint.append(f"stability: {risky[0]} takes exp without subtracting the maximum, as the logical program does")
        result.preconditions = list(dict.fromkeys(f"{n[0]}: {self.name_of(n[1])}" for n in sorted(needed) if not self.kernel.certain(n)))
        return result

    def _show(self, extra: set[Need]) -> str:
        what, u, _ = min(extra)
        return f"{self.name_of(u)} must be {what}"

    def name_of(self, uid: int) -> str:
        if not self._names:
            for name, value in self.logical.all_items():
                if not isinstance(value, Exception):
                    for p in value.values():
                        for m in p if len(p) == 1 else ():
                            if len(m) == 1:
                                self._names.setdefault(m[0][0], name)
        if uid in self._names:
            return self._names[uid]
        a = self.kernel.atoms[uid]
        return str(a.data) if a.kind == "input" else f"a value of kind {a.kind}"

    def _run_logical(self) -> None:
        system = self.system
        for n in system.logical.sources:
            try:
                grid = self.forms.grid(system.scope.dims[n])
                domain = system.logical.domains.get(n)
                flags = {"positive": domain is not None and domain.kind == "positive"}
                flags["nonnegative"] = domain is not None and domain.kind in ("positive", "nonnegative", "indicator")
                flags["indicator"] = (domain is not None and domain.kind == "indicator") or system.logical.tensors[n].kind == "bool"
                self.logical[n] = {key: self._source(n, grid, key, flags) for key in grid.blocks()}
            except (Unsupported, TooLarge) as error:
                self.logical[n] = error
        loose = _loose(system.logical)
        lowered = {x.index: x for x in system.logical_ops}

        def run(n: int, env: Values) -> None:
            self._apply(lowered[n], system.logical.ops[n], env, {}, loose, system.scope)

        for block in system.logical_blocks:
            self._block(block, self.logical, (), loose, run)

    def _source(self, name: str, grid: Grid, key: tuple[int, ...], flags: dict[str, bool]) -> Poly:
        """A block of an input: a tensor of its own, over the leaves that it has."""
        block = name if not key else f"{name}#{','.join(map(str, key))}"
        while key and block in self.system.logical.tensors:  # a tensor of the program may be called so
            block += "'"
        if key and name in self.forms.domains:
            self.forms.domains[block] = self.forms.domains[name]
            if name in self.kernel.always_valid:
                self.kernel.always_valid.add(block)
        active = grid.active(key)
        return self.kernel.input(block, tuple(grid.leaves[i].axis.size for i in active), [-1 - i for i in active], **flags)

    def _block(self, block: Block, env: Values, context: Hashable, loose: set[str], run: Callable[[int, Values], None]) -> None:
        """A block, by what is known of its kind, else op by op."""
        if block.kind is not None and self.memo is not None:
            given = [env.get(t) for t in block.inputs]
            if all(isinstance(v, dict) for v in given):
                if block.kind not in self._outputs:
                    used = set(block.outputs)
                    self._outputs[block.kind] = tuple(n for n, t in enumerate(block.made) if t in used)
                outputs = self._outputs[block.kind]

                def body(inputs: list[Value]) -> list[Value] | None:
                    inner = Values()
                    inner.update(zip(block.inputs, inputs, strict=True))
                    for n in block.ops:
                        run(n, inner)
                    made = [inner.get(t) for t in block.made]
                    return made if all(isinstance(v, dict) for v in made) else None

                key = (block.kind, context, tuple([block.made[n] in loose for n in outputs]))
                outcome = self.memo.outcome(key, given, outputs, body)
                if outcome is not None:
                    env.later.update({t: (outcome, n) for n, t in enumerate(block.made)})
                    for n in outputs:
                        env.get(block.made[n])
                    return
        for n in block.ops:
            run(n, env)

    def _apply(self, x: LoweredOp, op: Op, env: Values, offsets: Mapping[int, Offset], loose: set[str], scope: Scope) -> None:
        self.forms.where = f"{op.name}{f' ({op.source})' if op.source else ''}"
        try:
            inputs = [None if i is None else self._get(env, i) for i in op.inputs]
            made = self.forms.op(x.lowered, x.axes, inputs, offsets)
            for name, node in zip(op.outputs, x.lowered.outputs, strict=True):
                self.forms.aligned(x.axes.dims[id(node)], scope.dims[name])
            for name, value in zip(op.outputs, made, strict=True):
                env[name] = {key: self._kept(p, name in loose) for key, p in value.items()}
        except (Unsupported, TooLarge, Missing, RecursionError) as error:
            for name in op.outputs:
                env[name] = error if isinstance(error, Missing) else Missing(f"{op.name} ({op.source}): {error}")

    @staticmethod
    def _get(env: Mapping[str, Value | Exception], name: str) -> Value:
        value = env.get(name)
        if value is None:
            raise Missing(f"{name} is never computed")
        if isinstance(value, Exception):
            raise value if isinstance(value, Missing) else Missing(str(value))
        return value

    def _kept(self, p: Poly, loose: bool) -> Poly:
        """How a tensor is kept: sums under a short name, unless one addition alone will take them in."""
        k = self.kernel
        if self.masked is not None:
            p = self.masked.whole(self.kernel.resolved(p))
        if loose:
            return k.recognised(k.collapse(p))
        p = k.settle(p)
        if len(p) > 1:
            return k.single(p)
        return p

    def _run_plan(self) -> None:
        system = self.system
        self._loose_of = [_loose(p) for p in system.unit_programs]
        self.by_class: dict[int, list[int]] = {}
        for i, instance in enumerate(self.instances):
            self.by_class.setdefault(instance.class_index, []).append(i)
        self._positions = [[n for n, op in enumerate(p.ops) if is_communication(op, system.table)] for p in system.unit_programs]
        self._meetings = {
            (c, self._positions[system.schedule.classes[c].unit][e]): meeting for meeting in system.meetings for c, e in meeting.step
        }
        self._whole: list[set[int]] = []  # of every instance: communication within blocks that run as a whole
        pending: list[_Pending] = []
        for i, instance in enumerate(self.instances):
            unit = self._unit(i)
            self._sources(i, instance, unit)
            pending.append(_Pending(self._work(i), system.unit_programs[unit], self.local[i]))
        for i in range(len(self.instances)):
            self._advance(i, pending[i])
        for meeting in system.meetings:
            touched = self._meet(meeting)
            for i in touched:
                for c, op in meeting.ops:
                    if c == self.instances[i].class_index:
                        pending[i].arrived(op.outputs)
                self._advance(i, pending[i])

    def _unit(self, i: int) -> int:
        return self.system.schedule.classes[self.instances[i].class_index].unit

    def _context(self, instance: Instance) -> int:
        """The ranks of an instance, as rows of their unit with coordinates: equal numbers for instances that stand alike."""
        mesh, unit = self.system.plan.mesh, self.system.schedule.classes[instance.class_index].unit
        where = [mesh.coordinates(r) for r in self.system.talk.units[unit].ranks]
        rows = tuple((row, *(at[a] for a in instance.folded)) for row, at in enumerate(where) if all(at[a] == c for a, c in instance.fixed))
        return self._contexts.setdefault((instance.folded, rows), len(self._contexts))

    def _work(self, i: int) -> list[Block | int]:
        """What an instance runs by itself, in order: blocks within which it meets nobody else, and local ops."""
        unit, c = self._unit(i), self.instances[i].class_index
        talking = set(self._positions[unit])
        known: dict[int, bool] = {}
        found: list[Block | int] = []
        whole: set[int] = set()
        for block in self.system.unit_blocks[unit]:
            if block.kind is not None and self.memo is not None:
                inside = [n for n in block.ops if n in talking]
                if block.kind not in known:
                    known[block.kind] = all(self._parties(self._meetings[c, n])[i] == [i] for n in inside)
                if known[block.kind]:
                    found.append(block)
                    whole.update(inside)
                    continue
            found += [n for n in block.ops if n not in talking]
        self._whole.append(whole)
        return found

    def _advance(self, i: int, pending: _Pending) -> None:
        """Run what has its inputs, in program order."""
        program = self.system.unit_programs[self._unit(i)]
        while pending.ready:
            x = pending.next()
            if isinstance(x, Block):
                self._block(x, self.local[i], self._context_of[i], self._loose_of[self._unit(i)], lambda n, env: self._run_op(i, n, env))
                pending.arrived(x.outputs)
            else:
                self._run_op(i, x, self.local[i])
                pending.arrived(program.ops[x].outputs)

    def _run_op(self, i: int, n: int, env: Values) -> None:
        """One op of an instance; communication only if it meets nobody else."""
        instance, unit = self.instances[i], self._unit(i)
        op = self.system.unit_programs[unit].ops[n]
        known = self._meetings.get((instance.class_index, n))
        if known is not None:
            ours, self.local[i] = self.local[i], env
            try:
                self._met(known, [i])
            finally:
                self.local[i] = ours
            return
        x = self._own(unit, n, instance.rank)
        try:
            offsets = self._offsets(instance, unit, x)
        except Unsupported as error:
            env.update({o: Missing(f"{op.name} ({op.source}): {error}") for o in op.outputs})
        else:
            self._apply(x, op, env, offsets, self._loose_of[unit], self.system.unit_scopes[unit])

    def _own(self, unit: int, n: int, rank: int) -> LoweredOp:
        """A local op as a rank has it."""
        variants = self._variants(unit)[n]
        if len(variants) == 1:
            return variants[0]
        if unit not in self._rows:
            self._rows[unit] = {r: row for row, r in enumerate(self.system.talk.units[unit].ranks)}
        row = self._rows[unit][rank]
        return next(x for x in variants if row in x.rows)

    def _offsets(self, instance: Instance, unit: int, x: LoweredOp) -> dict[int, Offset]:
        """Offsets of nodes that differ between the ranks of an instance, as formulas over the mesh; checked for every rank."""
        variants = self._variants(unit).get(x.index, [])
        if len(variants) < 2 or not instance.folded:
            return {}
        nodes, wires = self._wired(x.lowered)
        table: list[tuple[_Places, list[Node]]] = []
        for v in variants:
            places = self._places(instance, unit, v.rows)
            if places.found:
                others, other_wires = self._wired(v.lowered)
                table.append((places, others))
                if other_wires != wires:
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
                one = [o[position].attrs[place] - base for places, o in table if places.has(axis)]
                steps[axis] = one[0] if one else 0
            for places, o in table:
                if places.offsets(steps) != {o[position].attrs[place] - base}:
                    raise Unsupported("an offset that is not linear in the mesh coordinates")
                here, there = _others(node.attrs, place), _others(o[position].attrs, place)
                if node.prim == "pad":  # what comes after follows from the sizes
                    here, there = (here[0], here[2]), (there[0], there[2])
                if here != there:
                    raise Unsupported("different attributes on different ranks")
            if any(steps.values()):
                result[id(node)] = Offset(base, tuple(self._strides(steps)))
        return result

    def _wired(self, lowered: Lowered) -> tuple[list[Node], Wires]:
        """The nodes of an op and how they are wired, without what may differ between ranks."""
        known = self._wire_table.get(id(lowered))
        if known is None or known[0] is not lowered:
            nodes = topological(lowered.outputs)
            at = {id(n): i for i, n in enumerate(nodes)}
            known = lowered, nodes, [(n.prim, n.shape, n.kind, *(at[id(x)] for x in n.args)) for n in nodes]
            self._wire_table[id(lowered)] = known
        return known[1], known[2]

    def _places(self, instance: Instance, unit: int, rows: tuple[int, ...]) -> _Places:
        """Where the ranks of an instance among some rows stand."""
        key = (instance, unit, id(rows))  # the system keeps the rows
        if key not in self._place_table:
            mesh, ranks, fixed = self.system.plan.mesh, self.system.talk.units[unit].ranks, instance.fixed
            at = [mesh.coordinates(ranks[row]) for row in rows]
            found = [tuple(x[a] for a in instance.folded) for x in at if all(x[a] == c for a, c in fixed)]
            self._place_table[key] = _Places(instance.folded, found)
        return self._place_table[key]

    def _strides(self, steps: Mapping[str, int]) -> Iterator[tuple[Index, int]]:
        for axis, step in steps.items():
            if step:
                leaves = self.mesh_vars[axis]
                for i, (v, _) in enumerate(leaves):
                    yield v, step * math.prod(a.size for _, a in leaves[i + 1 :])

    def _variants(self, unit: int) -> dict[int, list[LoweredOp]]:
        if unit not in self._variant_table:
            found: dict[int, list[LoweredOp]] = {}
            for x in self.system.unit_ops[unit]:
                found.setdefault(x.index, []).append(x)
            self._variant_table[unit] = found
        return self._variant_table[unit]

    # -- lineage -----------------------------------------------------------------------------------------------------

    def _sources(self, i: int, instance: Instance, unit: int) -> None:
        env = self.local[i]
        program = self.system.unit_programs[unit]
        for lay in self.system.plan.lineage:
            if lay.local in program.sources and instance.rank in self._holders(lay):
                try:
                    value = self._filled(lay, instance, unit)
                    known = env.get(lay.local)
                    if known is not None:  # a buffer that holds several logical tensors
                        value = {key: self.kernel.add(p, self._get(env, lay.local)[key]) for key, p in value.items()}
                    env[lay.local] = value
                except (Unsupported, TooLarge, Missing, RecursionError) as error:
                    env[lay.local] = Missing(f"{lay}: {error}")

    def _holders(self, lay: Layout) -> frozenset[int]:
        key = lay if isinstance(lay.form, Parts) else lay.where
        if key not in self._holder_sets:
            self._holder_sets[key] = frozenset(lay.holders(self.system.plan.mesh))
        return self._holder_sets[key]

    def _filled(self, lay: Layout, instance: Instance, unit: int) -> Value:
        """A local tensor: what lineage says it holds, zero where it holds nothing."""
        local = self.system.unit_scopes[unit].dims[lay.local]
        if self._even(lay):
            return self._even_piece(lay, instance, unit)
        total: Value | None = None
        for part in self._parts(lay, instance):
            whole_dims, local_dims = self._part_dims(part, lay, unit)
            value = self._get(self.logical, lay.logical)
            held = [self._held(run, a, b) for run, a, b in zip(part.logical, whole_dims, self._regions(part, local_dims), strict=True)]
            for d, (run, axis) in enumerate(zip(part.logical, held, strict=True)):
                dims = [*held[:d], *whole_dims[d:]]
                value = self.forms.piece(value, dims, [*held[: d + 1], *whole_dims[d + 1 :]], d, Offset(run.start), _step(run))
                assert axis is not None
            for d, at in enumerate(part.local):
                dims = [*local_dims[:d], *held[d:]]
                value = self.forms.padded(value, dims, [*local_dims[: d + 1], *held[d + 1 :]], d, Offset(at))
            total = value if total is None else {key: self.kernel.add(p, total[key]) for key, p in value.items()}
        return total if total is not None else {key: {} for key in self.forms.grid(local).blocks()}

    def _expected(self, lay: Layout, instance: Instance, unit: int, local: Value) -> Iterator[tuple[Value, Value]]:
        """(got, want) for every part of what a local tensor must hold."""
        if not isinstance(lay.form, Parts):
            lay, local = self._added_up(lay, instance, local)
        if self._even(lay):
            yield local, self._even_piece(lay, instance, unit)
            return
        for part in self._parts(lay, instance):
            whole_dims, local_dims = self._part_dims(part, lay, unit)
            want, got = self._get(self.logical, lay.logical), local
            held = [self._held(run, a, b) for run, a, b in zip(part.logical, whole_dims, self._regions(part, local_dims), strict=True)]
            for d, run in enumerate(part.logical):
                dims = [*held[:d], *whole_dims[d:]]
                want = self.forms.piece(want, dims, [*held[: d + 1], *whole_dims[d + 1 :]], d, Offset(run.start), _step(run))
            for d, at in enumerate(part.local):
                dims = [*held[:d], *local_dims[d:]]
                got = self.forms.piece(got, dims, [*held[: d + 1], *local_dims[d + 1 :]], d, Offset(at))
            yield got, want

    def _added_up(self, lay: Layout, instance: Instance, local: Value) -> tuple[Layout, Value]:
        """A claim about summands, as one about their sum over the mesh axes that it names."""
        if isinstance(lay.form, Pattern):
            partial = dict(lay.form.partial)
            whole = replace(lay, form=replace(lay.form, partial=()))
        else:
            assert isinstance(lay.form, Placements)
            partial = {a: p.op for a, p in lay.form.axes if isinstance(p, Partial)}
            whole = replace(lay, form=Placements(tuple((a, p) for a, p in lay.form.axes if not isinstance(p, Partial))))
        if not partial:
            return lay, local
        if not set(partial) <= set(instance.folded):
            raise Unsupported("summands on ranks that are not folded")
        over = {v: leaf.size for a in partial for v, leaf in self.mesh_vars[a]}
        share = Fraction(1, math.prod(self.system.plan.mesh.length(a) for a, op in partial.items() if op == "avg"))
        return whole, {key: self.kernel.settle(scale(self.kernel.sum(p, over), share)) for key, p in local.items()}

    def _parts(self, lay: Layout, instance: Instance) -> list[Part]:
        shape = self.system.logical.tensors[lay.logical].shape
        found = lay.parts(self.system.plan.mesh, instance.rank, shape)
        if any(p.partial is not None for p in found):
            raise Unsupported("a partial value")
        return [p for p in found if not p.padding]

    def _part_dims(self, part: Part, lay: Layout, unit: int) -> tuple[list[Axis], list[Axis]]:
        whole, local = self.system.scope.dims[lay.logical], self.system.unit_scopes[unit].dims[lay.local]
        if part.flat:
            product = self.system.inference.axes.product
            return [product(whole)], [product(local)]
        return list(whole), list(local)

    def _regions(self, part: Part, local: Sequence[Axis]) -> list[Axis]:
        return [self.system.inference.axes.piece(a, at, run.size) for a, at, run in zip(local, part.local, part.logical, strict=True)]

    @staticmethod
    def _held(run: Run, whole: Axis, region: Axis) -> Axis:
        if run.count > 1 and run.block > 1:
            raise Unsupported("strided blocks")
        return region

    def _even(self, lay: Layout) -> bool:
        """Whether a layout is digits of mesh axes, the same formula on every rank."""
        if isinstance(lay.form, Pattern):
            return not lay.form.partial
        return isinstance(lay.form, Placements) and self.system.inference.evenly_placed(
            lay.form, self.system.plan.mesh, self.system.logical.tensors[lay.logical].shape
        )

    def _even_piece(self, lay: Layout, instance: Instance, unit: int) -> Value:
        """The logical form with the digits that lineage fixes."""
        whole = self._get(self.logical, lay.logical)
        system = self.system
        old, new = self.forms.grid(system.scope.dims[lay.logical]), self.forms.grid(system.unit_scopes[unit].dims[lay.local])
        spots: list[Spot] = []
        for d, (span, target) in enumerate(zip(old.spans, new.spans, strict=True)):
            digits = system.inference.axes.leaves([system.scope.dims[lay.logical][d]])
            marks: list[Index | None] = []
            for digit, mark in zip(digits, self._marks(lay, instance, d, digits), strict=True):
                if mark is not None and digit.pieces is not None:
                    raise Unsupported("shards of an axis of unequal pieces")
                marks += [mark] * self.forms.grids.width(digit)  # a digit of unequal pieces is kept with all its leaves
            kept = iter(target)
            spots += [Spot("kept", next(kept, -1)) if m is None else Spot("fixed", m) for m in marks]
            here = [old.leaves[i].axis for i, m in zip(span, marks, strict=True) if m is None]
            if [id(a) for a in here] != [id(new.leaves[i].axis) for i in target]:
                raise Unsupported(f"dimension {d}: {here} held as {[new.leaves[i].axis for i in target]}")
        return self.forms._seen(whole, old, new, spots)

    def _marks(self, lay: Layout, instance: Instance, d: int, leaves: list[Axis]) -> list[Index | None]:
        """Per leaf of a logical dimension: the mesh variable or constant that fixes it, None if it is local."""
        mesh = self.system.plan.mesh
        digits: list[tuple[int, list[Index] | None]] = []  # (size, indices or None for local)
        if isinstance(lay.form, Pattern):
            given = {n: (i, s) for n, i, s in lay.form.fixed}
            listed = local_digits(pattern_dims(lay.form.text)[d], {*given, *mesh.names})
            known = math.prod(given[n][1] if n in given else mesh.length(n) if n in mesh.names else k or 1 for n, k in listed)
            rest = math.prod(a.size for a in leaves) // known
            for n, k in listed:
                if n in given:
                    digits.append((given[n][1], [given[n][0]]))
                elif n in mesh.names:
                    digits.append((mesh.length(n), self._coordinate(n, instance)))
                else:
                    digits.append((k or rest, None))
        elif isinstance(lay.form, Placements):
            size = math.prod(a.size for a in leaves)
            for n, p in lay.form.axes:
                if p == Shard(d):
                    digits += self._digits(n, instance)
                    size //= mesh.length(n)
                elif isinstance(p, Partial):
                    raise Unsupported("a partial value")
            digits.append((size, None))
        return self._spread(digits, leaves)

    def _digits(self, axis: str, instance: Instance) -> list[tuple[int, list[Index] | None]]:
        """A mesh coordinate leaf by leaf, with sizes."""
        return [(a.size, [i]) for (_, a), i in zip(self.mesh_vars[axis], self._coordinate(axis, instance), strict=True)]

    def _coordinate(self, axis: str, instance: Instance) -> list[Index]:
        """A mesh coordinate as digits over the leaves of its axis."""
        leaves = self.mesh_vars[axis]
        if axis in instance.folded:
            return [v for v, _ in leaves]
        return list(mixed_radix(instance.at()[axis], [a.size for _, a in leaves]))

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
                marks += mixed_radix(indices[0], [a.size for a in mine])
            elif not mine and size == 1:
                continue
            else:
                raise Unsupported(f"{len(indices)} digits on {mine}")
        return marks

    # -- communication -----------------------------------------------------------------------------------------------

    def _meet(self, meeting: MeetingAxes) -> list[int]:
        if meeting.lowered is None:
            return self._send(meeting)
        position = {c: self._positions[self.system.schedule.classes[c].unit][e] for c, e in meeting.step}
        touched: list[int] = []
        seen: set[int] = set()
        for i, party in self._parties(meeting).items():
            if i in seen or (len(party) == 1 and position[self.instances[i].class_index] in self._whole[i]):
                continue  # met, or meets itself within a block
            seen.update(party)
            self._met(meeting, party)
            touched += party
        return touched

    def _parties(self, meeting: MeetingAxes) -> dict[int, list[int]]:
        """Who meets whom: instances that share everything but the coordinates along the group."""
        ops, along = dict(meeting.ops), meeting.mesh_axes
        cached: object = None if along is None else (along, *ops)
        if cached is not None and cached in self._parties_of:
            return self._parties_of[cached]
        parties: dict[object, list[int]] = {}
        for i in (i for c in ops for i in self.by_class[c]):
            key: object
            if along is not None:
                key = tuple((a, c) for a, c in self.instances[i].fixed if a not in along)
            else:
                key = self.system.talk.value(self.instances[i].rank, ops[self.instances[i].class_index].get("group"))
            parties.setdefault(key, []).append(i)
        found = {i: party for party in parties.values() for i in party}
        if cached is not None:
            self._parties_of[cached] = found
        return found

    def _met(self, meeting: MeetingAxes, party: list[int]) -> None:
        ops = dict(meeting.ops)
        try:
            self._collective(meeting, ops, party)
        except (Unsupported, TooLarge, Missing, RecursionError) as error:
            for i in party:
                op = ops[self.instances[i].class_index]
                self.local[i].update({o: Missing(f"{op.name} ({op.source}): {error}") for o in op.outputs})

    def _collective(self, meeting: MeetingAxes, ops: Mapping[int, Op], party: list[int]) -> None:
        k = self.kernel
        assert meeting.lowered is not None
        assert meeting.axes is not None
        given, made = meeting.lowered.inputs[0], meeting.lowered.outputs[0]
        assert given is not None
        into, out = self.forms.grid(meeting.axes.dims[id(given)]), self.forms.grid(meeting.axes.dims[id(made)])
        if any(g.leaves[n].tag for g in (into, out) for n in g.spans[0]):
            raise Unsupported("a group cut into unequal pieces")
        first = self.instances[party[0]]
        group = self.system.talk.groups[str(self.system.talk.value(first.rank, ops[first.class_index].get("group")))]
        stacked: Value = {key: {} for key in into.blocks()}
        for i in party:
            op = ops[self.instances[i].class_index]
            if op.inputs:
                value = self._get(self.local[i], str(op.inputs[0]))
                for key, p in value.items():
                    stacked[key] = k.add(stacked[key], self._stacked(p, i, meeting, into, group, op))
        stacked = {key: k.collapse(p) for key, p in stacked.items()}
        (result,) = self.forms.op(meeting.lowered, meeting.axes, [stacked], {})
        for i in party:
            op, scope = ops[self.instances[i].class_index], self._scope(i)
            if op.inputs:
                self.forms.aligned(scope.dims[str(op.inputs[0])], meeting.axes.dims[id(given)][1:])
            if op.outputs:
                self.forms.aligned(meeting.axes.dims[id(made)][1:], scope.dims[op.outputs[0]])
        for i in party:
            op = ops[self.instances[i].class_index]
            if op.outputs:
                unit = self.system.schedule.classes[self.instances[i].class_index].unit
                loose = op.outputs[0] in _loose(self.system.unit_programs[unit])
                self.local[i][op.outputs[0]] = {
                    key: self._kept(self._unstacked(p, i, meeting, out, group), loose) for key, p in result.items()
                }

    def _scope(self, i: int) -> Scope:
        return self.system.unit_scopes[self.system.schedule.classes[self.instances[i].class_index].unit]

    def _position(self, i: int, meeting: MeetingAxes, grid: Grid, group: tuple[int, ...]) -> list[Index]:
        """Where an instance stands in its group, as digits over the leading leaves."""
        instance = self.instances[i]
        lead = [grid.leaves[n].axis for n in grid.spans[0]]
        if any(grid.leaves[n].tag for n in grid.spans[0]):
            raise Unsupported("a group cut into unequal pieces")
        if meeting.mesh_axes is not None:
            found = [d for a in meeting.mesh_axes for d in self._coordinate(a, instance)]
            if [a.size for n in meeting.mesh_axes for _, a in self.mesh_vars[n]] != [a.size for a in lead]:
                raise Unsupported(f"a group of {len(group)} on {lead}")
        else:
            found = list(mixed_radix(group.index(instance.rank), [a.size for a in lead]))
        if len(found) != len(lead):
            raise Unsupported(f"a group of {len(group)} on {lead}")
        return found

    def _stacked(self, p: Poly, i: int, meeting: MeetingAxes, grid: Grid, group: tuple[int, ...], op: Op) -> Poly:
        k = self.kernel
        n = len(grid.spans[0])
        shift = {v: v - n for v in variables(p) if v > _POSITIONS}
        if self.system.table[op.name].senders == "root":
            rank = self.system.talk.value(self.instances[i].rank, op.get("root"))
            assert isinstance(rank, int)
            at: dict[Index, Index] = {}
            for a in meeting.mesh_axes or ():
                leaves = self.mesh_vars[a]
                digits = mixed_radix(self.system.plan.mesh.coordinates(rank)[a], [x.size for _, x in leaves])
                at.update(zip((v for v, _ in leaves), digits, strict=True))
            return k.substitute(p, {**shift, **at})
        position = self._position(i, meeting, grid, group)
        moved = {d: -1 - j for j, d in enumerate(position) if d < 0}
        result = k.substitute(p, {**shift, **moved})
        for j, d in enumerate(position):
            if d >= 0:
                result = k.times(k.delta(grid.leaves[j].axis.size, -1 - j, d), result)
        return result

    def _unstacked(self, p: Poly, i: int, meeting: MeetingAxes, grid: Grid, group: tuple[int, ...]) -> Poly:
        n = len(grid.spans[0])
        digits = self._position(i, meeting, grid, group) if n else []
        names = {v: v + n for v in variables(p) if _POSITIONS < v < -n}
        return self.kernel.substitute(p, {**names, **{-1 - j: d for j, d in enumerate(digits)}})

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
                    source, target = str(send.inputs[0]), recv.outputs[0]
                    try:
                        self.forms.aligned(self._scope(i).dims[source], self._scope(j).dims[target])
                        self.local[j][target] = self._get(self.local[i], source)
                    except (Unsupported, Missing) as error:
                        self.local[j][target] = Missing(str(error))
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
                    held = self._get(self.local[i], h.layout.local)
                    for got, want in self._expected(h.layout, instance, unit, held):
                        for key in want:
                            if not self._equal(got[key], want[key]):
                                forms = f"got {show(self.kernel, got[key])}, want {show(self.kernel, want[key])}"
                                return f"rank {instance.rank}: {h.layout.local} is not {h.layout.logical}: {forms}"
                except (Missing, Unsupported, TooLarge, RecursionError) as error:
                    return f"rank {instance.rank}: {error}"
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


def _others(attrs: tuple[object, ...], place: int) -> tuple[object, ...]:
    return attrs[:place] + attrs[place + 1 :]


def _step(run: Run) -> int:
    return run.stride if run.count > 1 else 1


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
    """Try to prove every obligation at full size; what blocks or folding hide in a small plan is tried again without them."""
    best = Prover(system).prove(wanted)
    tries = []
    if sum(len(p.ops) for p in system.unit_programs) <= WRITTEN_OUT and any(b.kind is not None for b in system.logical_blocks):
        tries.append({"blocks": False})
    if best.instances < system.plan.size <= ENUMERATED:
        tries.append({"enumerate_all": True, "blocks": False})
    for how in tries:
        if best.failed:
            best = min(best, Prover(system, **how).prove(wanted), key=lambda p: len(p.failed))
    return best
