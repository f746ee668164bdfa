"""The prover: walk the logical program, then the plan, and compare forms obligation by obligation.

Both walks use the same operators over the same axes and one kernel, so a plan tensor *is* a logical tensor when their
forms are identical. Nothing is assumed about intermediate tensors; inputs, parameters and state live as lineage says.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trainverify.axes.system import LoweredOp, MeetingAxes, Scope, System
from trainverify.graph.obligations import Obligation
from trainverify.graph.outline import Block
from trainverify.graph.program import Op, Program
from trainverify.progress import Counted, Progress, silent
from trainverify.prove.algebra.collectives import Collectives
from trainverify.prove.algebra.folding import fold
from trainverify.prove.algebra.forms import Forms
from trainverify.prove.algebra.grids import Grid, Offset
from trainverify.prove.algebra.held import Held
from trainverify.prove.algebra.kernel import Kernel
from trainverify.prove.algebra.masked import MaskedSums
from trainverify.prove.algebra.meetings import Meetings
from trainverify.prove.algebra.memo import Memo, inside
from trainverify.prove.algebra.notation import show
from trainverify.prove.algebra.places import Value
from trainverify.prove.algebra.ranks import Ranks
from trainverify.prove.algebra.terms import NOTHING, Need, Poly, TooLarge, Ungranted, Unsupported
from trainverify.prove.algebra.values import Missing, Values, get
from trainverify.prove.strict import Step, Strict

WRITTEN_OUT = 10_000  # ops of a plan up to which a failed proof is tried again without blocks
ENUMERATED = 16  # ranks of a plan up to which a failed proof is tried again without folding
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


@dataclass(frozen=True)
class _Sum:
    """A tensor that only an addition takes in: summands, added up when somebody asks for it."""

    parts: tuple[Value | _Sum, ...]
    total: Callable[[list[Value]], Value | Exception]

    def value(self, _: int) -> Value | Exception:
        found: list[Value] = []
        left: list[Value | _Sum] = [self]
        while left:
            x = left.pop()
            if isinstance(x, _Sum):
                left += reversed(x.parts)
            else:
                found.append(x)
        return self.total(found)


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


class Prover:
    def __init__(
        self, system: System, enumerate_all: bool = False, blocks: bool = True, progress: Progress = silent, cancelling: bool = False
    ):
        """With `blocks`, what is repeated is worked out once. With `cancelling`, sums are opened to see whether their terms cancel."""
        self.system = system = system.windowed
        self.progress = progress
        self.kernel = Kernel()
        self.kernel.cancels = cancelling
        self.forms = Forms(self.kernel, system.inference.axes, dict(system.logical.domains))
        self.instances = fold(system, enumerate_all)
        self.masked: MaskedSums | None = None  # of the logical program, once it is known
        self.ranks = Ranks(system, self.instances)
        self.meetings = Meetings(system, self.instances)
        self.forms.mesh_sizes.update({v: a.size for leaves in self.ranks.mesh_vars.values() for v, a in leaves})
        for n, d in system.logical.domains.items():
            if d.kind == "ids" and d.size is not None and (d.ignore is None or 0 <= d.ignore < d.size):
                self.kernel.always_valid.add(n)
        self.memo = Memo(self.kernel, self.forms) if blocks and not any(n.startswith("@") for n in system.logical.domains) else None
        self._outputs: dict[int, tuple[int, ...]] = {}  # of a kind of block: which of the tensors made are used elsewhere
        self._context_of = self._contexts()
        self._names: dict[int, str] = {}
        self._added: set[tuple[int, int]] = set()  # additions whose axes fit
        self._fitting: set[tuple[int, ...]] = set()  # ops whose inputs have the axes that they are worked out over
        self.logical = Values()
        self.local = [Values() for _ in self.instances]
        self.held = Held(self.ranks, self.forms, self.logical)
        self.collectives = Collectives(self.ranks, self.forms)

    # -- running -----------------------------------------------------------------------------------------------------

    def prove(self, wanted: Sequence[Obligation]) -> Proof:
        self.kernel.assuming = NOTHING  # only nodes of the logical program that must have a value say what they need
        self._run_logical()
        if self.kernel.reasons or self.forms.doubtful:  # once more, with all that is known
            self._forget()
            self._run_logical()
        needed = set(self.kernel.needs)
        stable = {rest for rest, uses in self.forms.exps.items() if all(safe for _, safe in uses)}
        self.forms.exps = {}
        self.kernel.keep_constants = False  # a micro-batch or rank is a constant that any other could replace
        self.kernel.named = len(self.kernel.atoms)
        if self.memo is not None:
            self.memo.forget_signatures()
        self.masked = MaskedSums(self.kernel)
        self.kernel.only_block, self.kernel.joined = self.masked.only, self.masked.whole
        self.kernel.forget_cancelled()
        self._run_plan()
        extra = {n for n in self.kernel.needs - needed if not self.kernel.certain(n, needed)}
        result = Proof(instances=len(self.instances), atoms=len(self.kernel.atoms), prover=self)
        for done, o in enumerate(wanted):
            self.progress(Counted("proving", done, len(wanted), "obligations"))
            why = self._check(o)
            if why is None and extra:
                why = self._show(min(extra))
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

    def _forget(self) -> None:
        """What the logical program computes, but not what is known of it."""
        for name in list(self.logical):
            del self.logical[name]
        self.logical.later.clear()
        self.forms.exps = {}
        if self.memo is not None:
            self.memo = Memo(self.kernel, self.forms)

    def _show(self, need: Need) -> str:
        what, u, _ = need
        which = f"{self.name_of(u)} must be {what}"
        return f"the plan divides by (or takes a root or log of) something that the logical program does not: {which}"

    def _why(self, p: Poly) -> str:
        """What the plan would have to know, if it has a function of its own that no law takes apart."""
        waiting = [u for m in p for u, _, _ in m]
        seen: set[int] = set()
        while waiting:
            u = waiting.pop()
            if u < self.kernel.named or u in seen:
                continue
            seen.add(u)
            reason = self.kernel.reasons.get(u)
            if isinstance(reason, Ungranted):
                return f"{self._show(reason.need)}; "
            waiting += inside(self.kernel.atoms[u])
        return ""

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
                flags["indicator"] = (domain is not None and domain.kind == "indicator") or system.logical.tensors[n].kind == "bool"
                flags["nonnegative"] = flags["indicator"] or (domain is not None and domain.kind in ("positive", "nonnegative"))
                self.logical[n] = {key: self._source(n, grid, key, flags) for key in grid.blocks()}
            except (Unsupported, TooLarge) as error:
                self.logical[n] = error
        loose = _loose(system.logical)
        lowered = [system.logical_ops[n][0].lowered for n in range(len(system.logical.ops))]
        ops = [Step(op.inputs, op.outputs, x.outputs) for op, x in zip(system.logical.ops, lowered, strict=True)]
        strict = Strict([o.tensor for o in system.logical.outputs], ops)

        def run(n: int, env: Values) -> None:
            self.forms.strict, self.forms.roots = strict.nodes[n], strict.roots[n]
            self._apply(system.logical_ops[n][0], system.logical.ops[n], env, {}, loose, system.scope)
            self.forms.strict, self.forms.roots = (), ()

        for block in system.logical_blocks:
            self._block(block, self.logical, tuple([strict.outputs[n] for n in block.ops]), loose, run)

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
        if block.kind is not None and not block.sums and self.memo is not None:
            given = [x for t in block.inputs if (x := env.given(t)) is not None]
            if len(given) == len(block.inputs):
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
                    return
        for n in block.ops:
            run(n, env)

    def _apply(self, x: LoweredOp, op: Op, env: Values, offsets: Mapping[int, Offset], loose: set[str], scope: Scope) -> None:
        self.forms.where = f"{op.name}{f' ({op.source})' if op.source else ''}"
        try:
            self._fits(x, op, scope)
            if op.outputs[0] in loose and x.lowered.adds:
                return self._later(x, op, env, scope)
            inputs = [None if i is None else get(env, i) for i in op.inputs]
            made = self.forms.op(x.lowered, x.axes, inputs, offsets)
            for n, (name, node) in enumerate(zip(op.outputs, x.lowered.outputs, strict=True)):
                if self.system.flat and len(scope.dims[name]) == 1:
                    made[n] = self.forms.flat.recast(made[n], x.axes.dims[id(node)], scope.dims[name])
                else:
                    self.forms.aligned(x.axes.dims[id(node)], scope.dims[name])
            for name, value in zip(op.outputs, made, strict=True):
                env[name] = {key: self._kept(p, name in loose) for key, p in value.items()}
        except (Unsupported, TooLarge, Missing, RecursionError) as error:
            for name in op.outputs:
                env[name] = error if isinstance(error, Missing) else Missing(f"{op.name} ({op.source}): {error}")

    def _fits(self, x: LoweredOp, op: Op, scope: Scope) -> None:
        """An op of a block has the axes of another one like it; after a clash its own inputs may have others."""
        pairs = [(i, x.axes.dims.get(id(node))) for i, node in zip(op.inputs, x.lowered.inputs, strict=True)]
        given = [(scope.dims[i], own) for i, own in pairs if i is not None and own is not None]  # what an op does not use may have none
        key = (id(x), *[id(dims) for dims, _ in given])  # the system keeps them
        if key not in self._fitting:
            for dims, own in given:
                self.forms.aligned(dims, own)
            self._fitting.add(key)

    def _later(self, x: LoweredOp, op: Op, env: Values, scope: Scope) -> None:
        """A sum of two tensors that another sum will take in: many micro-batches are added up once, not one by one."""
        (made,) = x.lowered.outputs
        dims = x.axes.dims[id(made)]
        if (id(x), id(scope.dims[op.outputs[0]])) not in self._added:  # the system keeps both
            for node in made.args:
                self.forms.aligned(x.axes.dims[id(node)], dims)
            self.forms.aligned(dims, scope.dims[op.outputs[0]])
            self._added.add((id(x), id(scope.dims[op.outputs[0]])))
        parts: list[Value | _Sum] = []
        for i in op.inputs:
            waiting, _ = env.later.get(str(i), (None, 0))
            parts.append(waiting if isinstance(waiting, _Sum) else get(env, str(i)))

        def total(values: list[Value]) -> Value | Exception:
            try:
                return {key: self._kept(self.forms.added([v[key] for v in values]), True) for key in self.forms.grid(dims).blocks()}
            except (Unsupported, TooLarge, RecursionError) as error:
                return Missing(f"{op.name} ({op.source}): {error}")

        env.later[op.outputs[0]] = _Sum(tuple(parts), total), 0

    def _kept(self, p: Poly, loose: bool) -> Poly:
        """How a tensor is kept: sums under a short name, unless one addition alone will take them in."""
        if self.forms.flat.used:
            p = self.forms.flat.joined(p)
            (lifted,), frames = self.forms.flat.lift([p])
            if frames:
                return self.forms.flat.lower(self._named(lifted, loose), frames)
        return self._named(p, loose)

    def _named(self, p: Poly, loose: bool) -> Poly:
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
        self._whole: list[set[int]] = []  # of every instance: communication within blocks that run as a whole
        pending: list[_Pending] = []
        for i, instance in enumerate(self.instances):
            unit = self.ranks.unit(i)
            self.held.sources(self.local[i], instance, unit)
            pending.append(_Pending(self._work(i), system.unit_programs[unit], self.local[i]))
        for i in range(len(self.instances)):
            self._advance(i, pending[i])
        for done, meeting in enumerate(system.meetings):
            if done % 64 == 0:
                self.progress(Counted("normalising the plan", done, len(system.meetings), "collectives and messages"))
            touched = self._meet(meeting)
            for i in touched:
                for c, op in meeting.ops:
                    if c == self.instances[i].class_index:
                        pending[i].arrived(op.outputs)
                self._advance(i, pending[i])

    def _contexts(self) -> list[int]:
        """Of every instance its ranks, as rows of their unit with coordinates: equal numbers for instances that stand alike."""
        mesh, numbers = self.system.plan.mesh, dict[Hashable, int]()
        found = []
        for i, x in enumerate(self.instances):
            where = [mesh.coordinates(r) for r in self.system.talk.units[self.ranks.unit(i)].ranks]
            rows = tuple((row, *(at[a] for a in x.folded)) for row, at in enumerate(where) if all(at[a] == c for a, c in x.fixed))
            found.append(numbers.setdefault((x.folded, rows), len(numbers)))
        return found

    def _work(self, i: int) -> list[Block | int]:
        """What an instance runs by itself, in order: blocks within which it meets nobody else, and local ops."""
        unit, c = self.ranks.unit(i), self.instances[i].class_index
        talking = set(self.system.talking[unit])
        known: dict[int, bool] = {}
        found: list[Block | int] = []
        whole: set[int] = set()
        for block in self.system.unit_blocks[unit]:
            if block.kind is not None and not block.sums and self.memo is not None:
                inside = [n for n in block.ops if n in talking]
                if block.kind not in known:
                    known[block.kind] = all(self.meetings.parties(self.meetings.at[c, n])[i] == [i] for n in inside)
                if known[block.kind]:
                    found.append(block)
                    whole.update(inside)
                    continue
            found += [n for n in block.ops if n not in talking]
        self._whole.append(whole)
        return found

    def _advance(self, i: int, pending: _Pending) -> None:
        """Run what has its inputs, in program order."""
        program = self.system.unit_programs[self.ranks.unit(i)]
        while pending.ready:
            x = pending.next()
            if isinstance(x, Block):
                unit = self.ranks.unit(i)
                self._block(x, self.local[i], self._context_of[i], self._loose_of[unit], lambda n, env: self._run_op(i, n, env))
                pending.arrived(x.outputs)
            else:
                self._run_op(i, x, self.local[i])
                pending.arrived(program.ops[x].outputs)

    def _run_op(self, i: int, n: int, env: Values) -> None:
        """One op of an instance; communication only if it meets nobody else."""
        instance, unit = self.instances[i], self.ranks.unit(i)
        op = self.system.unit_programs[unit].ops[n]
        known = self.meetings.at.get((instance.class_index, n))
        if known is not None:
            ours, self.local[i] = self.local[i], env
            try:
                self._met(known, [i])
            finally:
                self.local[i] = ours
            return
        x = self.ranks.own(unit, n, instance.rank)
        try:
            offsets = self.ranks.offsets(instance, unit, n, x)
        except Unsupported as error:
            env.update({o: Missing(f"{op.name} ({op.source}): {error}") for o in op.outputs})
        else:
            self._apply(x, op, env, offsets, self._loose_of[unit], self.system.unit_scopes[unit])

    # -- communication -----------------------------------------------------------------------------------------------

    def _meet(self, meeting: MeetingAxes) -> list[int]:
        if meeting.lowered is None:
            return self._send(meeting)
        position = {c: self.meetings.op(c, e) for c, e in meeting.step}
        touched: list[int] = []
        seen: set[int] = set()
        for i, party in self.meetings.parties(meeting).items():
            if i in seen or (len(party) == 1 and position[self.instances[i].class_index] in self._whole[i]):
                continue  # met, or meets itself within a block
            seen.update(party)
            self._met(meeting, party)
            touched += party
        return touched

    def _met(self, meeting: MeetingAxes, party: list[int]) -> None:
        ops = dict(meeting.ops)
        try:
            for i, (name, value) in self.collectives.meet(meeting, ops, party, self.local).items():
                loose = name in self._loose_of[self.ranks.unit(i)]
                self.local[i][name] = {key: self._kept(p, loose) for key, p in value.items()}
        except (Unsupported, TooLarge, Missing, RecursionError) as error:
            for i in party:
                op = ops[self.instances[i].class_index]
                self.local[i].update({o: Missing(f"{op.name} ({op.source}): {error}") for o in op.outputs})

    def _send(self, meeting: MeetingAxes) -> list[int]:
        touched = []
        for i, source, j, target in self.meetings.messages(meeting):
            try:
                self.local[j][target] = self._sent(i, source, j, target)
            except (Unsupported, TooLarge, Missing) as error:
                self.local[j][target] = error if isinstance(error, Missing) else Missing(str(error))
            touched.append(j)
        return touched

    def _sent(self, i: int, source: str, j: int, target: str) -> Value:
        """A tensor of an instance as another one gets it."""
        self.forms.aligned(self.ranks.scope(i).dims[source], self.ranks.scope(j).dims[target])
        return get(self.local[i], source)

    # -- comparing ---------------------------------------------------------------------------------------------------

    def _check(self, o: Obligation) -> str | None:
        """None if every rank that must hold this output holds it; else what is missing."""
        for h in o.holdings:
            ranks = set(h.ranks)
            covered = 0
            for i, instance in enumerate(self.instances):
                if instance.rank not in ranks:
                    continue
                covered += self.ranks.count(instance)
                unit = self.system.schedule.classes[instance.class_index].unit
                try:
                    held = get(self.local[i], h.layout.local)
                    for got, want in self.held.expected(h.layout, instance, unit, held):
                        for key in want:
                            if not self._equal(got[key], want[key]):
                                forms = f"{self._why(got[key])}got {show(self.kernel, got[key])}, want {show(self.kernel, want[key])}"
                                return f"rank {instance.rank}: {h.layout.local} is not {h.layout.logical}: {forms}"
                    for rest in self.held.padding(h.layout, instance, unit, held) if o.stays else ():
                        if not all(self._equal(p, {}) for p in rest.values()):
                            return f"rank {instance.rank}: the padding of {h.layout.local} is not zero after the step"
                except (Missing, Unsupported, TooLarge, RecursionError) as error:
                    return f"rank {instance.rank}: {error}"
            if covered != len(ranks):
                return f"{len(ranks) - covered} of {len(ranks)} ranks are not covered"
        return None

    def _equal(self, got: Poly, want: Poly) -> bool:
        k = self.kernel
        if got == want:
            return True
        difference = k.collapse(k.add(k.written_out(got), {m: -c for m, c in k.written_out(want).items()}))
        return not difference or not k.collapse(k.made_anew(difference))


def _loose(program: Program) -> set[str]:
    """Tensors that one addition alone consumes: they stay open, so that the order of additions does not matter."""
    once: dict[str, bool] = {}  # whether it is used once, by something linear
    for op in program.ops:
        linear = op.name in _LINEAR
        for i in op.inputs:
            if i is not None:
                once[i] = linear and i not in once
    outputs = {o.tensor for o in program.outputs}
    return {t for t, alone in once.items() if alone and t not in outputs}


def prove(system: System, wanted: Sequence[Obligation], progress: Progress = silent) -> Proof:
    """Try to prove every obligation at full size."""
    return Prover(system, blocks=not system.flat, progress=progress).prove(wanted)


def prove_again(system: System, wanted: Sequence[Obligation], best: Proof) -> Proof:
    """What blocks or folding hide in a small plan is tried again without them, and with sums opened that may cancel."""
    tries: list[tuple[bool, bool]] = []  # whether all ranks are enumerated, whether blocks are used
    if sum(len(p.ops) for p in system.unit_programs) <= WRITTEN_OUT:
        tries.append((False, not system.flat))
        if any(b.kind is not None for b in system.logical_blocks):
            tries.append((False, False))
    if best.instances < system.plan.size <= ENUMERATED:
        tries.append((True, False))
    for how in tries:
        if best.failed:
            best = min(best, Prover(system, *how, cancelling=True).prove(wanted), key=lambda p: len(p.failed))
    return best
