"""The prover over listed axes: small plans, rank by rank, in which nothing that is cut has to align.

The kernel, its laws and the walks are those of `prove/algebra`. What a plan computes is compared with the logical tensor that
it seems to be, with sums written out, and goes on under the logical name if they are equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from trainverify.axes.listed import ListedAxes
from trainverify.axes.system import LoweredOp, MeetingAxes, Scope, System
from trainverify.graph.obligations import Obligation
from trainverify.graph.program import Op
from trainverify.primitives.node import Node
from trainverify.prove.algebra.engine import Proof, Prover
from trainverify.prove.algebra.grids import Offset
from trainverify.prove.algebra.places import Dims, Value
from trainverify.prove.algebra.terms import Index, Poly, TooLarge, Unsupported, scale
from trainverify.prove.algebra.values import Missing, Values, get
from trainverify.prove.listed.claims import BlockClaim, Propose, Proposer
from trainverify.prove.listed.collectives import ListedCollectives
from trainverify.prove.listed.forms import ListedForms
from trainverify.prove.listed.held import ListedHeld
from trainverify.prove.listed.opened import Opened

RANKS: Final = 16  # of a plan
OPS: Final = 20_000  # of all ranks
BLOCKS: Final = 50_000  # of all tensors of all ranks
LOST: Final = 30_000  # terms written out for equations that seem to hold and are not shown, before the rest is not tried


def prove(system: System, wanted: Sequence[Obligation], propose: Propose) -> Proof:
    """Try to prove every obligation at full size, with listed digits."""
    if system.plan.size > RANKS:
        return Proof(failed=dict.fromkeys(wanted, f"{system.plan.size} ranks are too many to list"))
    if sum(len(system.unit_programs[k.unit].ops) * len(k.ranks) for k in system.schedule.classes) > OPS:
        return Proof(failed=dict.fromkeys(wanted, "too many ops to take ranks one by one"))
    prover = ListedProver(system.listed(), propose)
    count = prover.blocks()
    if count > BLOCKS:
        return Proof(failed=dict.fromkeys(wanted, f"{count:,} blocks are too many to list"))
    try:
        return prover.prove(wanted)
    except Lost as error:
        return Proof(failed=dict.fromkeys(wanted, str(error)))


class Lost(Exception):
    """Too much was tried in vain to show that what seems to be a logical tensor is one: the rest would not be shown either."""


class ListedProver(Prover):
    forms: ListedForms

    def __init__(self, system: System, propose: Propose):
        super().__init__(system, enumerate_all=True, blocks=False)
        self.forms = ListedForms(self.kernel, system.inference.axes, dict(system.logical.domains))
        self.held = ListedHeld(self.ranks, self.forms, self.logical, self.local)
        self.collectives = ListedCollectives(self.ranks, self.forms)
        self._propose = propose
        self.proposer: Proposer | None = None
        self._spoken: dict[int, tuple[str, Value, Dims]] = {}  # what is proposed, by number
        self.opened = Opened(self.kernel)
        self._shown: dict[object, Poly] = {}  # form of a plan → the logical one that it equals
        self._once: dict[object, Poly] = {}
        self._done: dict[object, list[Value]] = {}  # ops by what they do and get → what they make
        self._steps: list[tuple[Op, list[tuple[Node, Value, Dims]]]] = []  # within logical ops
        self._here: int | None = None  # the instance at hand; none for the logical program

    def blocks(self) -> int:
        """Of all tensors of all ranks."""
        scopes = [self.system.scope, *(self.ranks.scope(i) for i in range(len(self.instances)))]
        known = {scope: sum(map(self._count, scope.dims.values())) for scope in set(scopes)}
        return sum(known[scope] for scope in scopes)

    def _count(self, dims: Dims) -> int:
        return math.prod(a.size for a in self.system.inference.axes.leaves(dims) if ListedAxes.listed(a))

    def _forget(self) -> None:
        super()._forget()
        self._steps.clear()

    def _run_plan(self) -> None:
        self.kernel.keep_constants = True  # every rank and micro-batch is written out: constants are what they are
        self.proposer = proposer = self._propose(self.system, self.forms.grid)
        if proposer is None:
            raise Lost("the plan is too large to be run at full size")
        for name, value in self.logical.all_items():
            if not isinstance(value, Exception):
                dims: Dims = self.system.scope.dims[name]
                self._name(proposer.add(name, dims), name, value, dims)
        for op, steps in self._steps:
            values = proposer.steps(op, [node for node, _, _ in steps])
            for (_, value, its), found in zip(steps, values, strict=False):
                name = f"a step of {op.outputs[0]}"
                self._name(proposer.add(name, its, found), name, value, its)
        super()._run_plan()

    def _name(self, number: int | None, name: str, value: Value, dims: Dims) -> None:
        if number is not None:
            self._spoken[number] = (name, value, dims)

    def _claimed(self, claim: BlockClaim, dims: Dims) -> Poly:
        """The form that a block of a tensor is claimed to have."""
        _, forms, other = self._spoken[claim.tensor]
        here, there = self.forms.grid(dims).active(claim.block), self.forms.grid(other).active(claim.other)
        names: dict[Index, Index] = {-1 - there[o]: -1 - here[i] for i, o in enumerate(claim.order)}
        return scale(self.kernel.substitute(forms[claim.other], names), claim.factor)

    def _run_op(self, i: int, n: int, env: Values) -> None:
        self._here = i
        super()._run_op(i, n, env)

    def _apply(self, x: LoweredOp, op: Op, env: Values, offsets: Mapping[int, Offset], loose: set[str], scope: Scope) -> None:
        self.forms.where = f"{op.name}{f' ({op.source})' if op.source else ''}"
        try:
            inputs = [None if i is None else get(env, i) for i in op.inputs]
            same = (id(x.lowered), id(x.axes), tuple(name in loose for name in op.outputs), tuple(map(_content, inputs)))
            if self._here is not None and same in self._done:  # another rank had the same
                env.update(zip(op.outputs, self._done[same], strict=True))
                return
            made = self.forms.op(x.lowered, x.axes, inputs, offsets)
            if self._here is None:
                self._steps.append((op, self.forms.steps))
            for name, node, value in zip(op.outputs, x.lowered.outputs, made, strict=True):
                local = self.forms.viewed(value, x.axes.dims[id(node)], scope.dims[name])
                kept = {key: self._kept(p, name in loose) for key, p in local.items()}
                if self._here is None:
                    self.forms.tensors |= {u for p in kept.values() if len(p) == 1 for m in p for u, _, w in m if w == 1}
                env[name] = self._known(kept, name, scope)
            if self._here is not None:
                self._done[same] = [get(env, name) for name in op.outputs]
        except (Unsupported, TooLarge, Missing, RecursionError) as error:
            for name in op.outputs:
                env[name] = error if isinstance(error, Missing) else Missing(f"{op.name} ({op.source}): {error}")

    def _kept(self, p: Poly, loose: bool) -> Poly:
        same = (self.kernel.named, loose, frozenset(p.items()))
        if same not in self._once:
            self._once[same] = super()._kept(p, loose)
        return self._once[same]

    def _met(self, meeting: MeetingAxes, party: list[int]) -> None:
        super()._met(meeting, party)
        for i in party:
            self._here = i
            for c, op in meeting.ops:
                if c == self.instances[i].class_index:
                    for o in op.outputs:
                        value = self.local[i].get(o)
                        if isinstance(value, dict):
                            self.local[i][o] = self._known(value, o, self.ranks.scope(i))

    def _known(self, value: Value, name: str, scope: Scope) -> Value:
        """Blocks of a plan's tensor under the names that the logical program has for them, where that can be shown."""
        if self._here is None or self.proposer is None:
            return value
        k = self.kernel
        strange = {key: frozenset(p.items()) for key, p in value.items() if any(u >= k.named for m in p for u, _, _ in m)}
        rank = self.instances[self._here].rank
        fresh = [key for key, p in strange.items() if p not in self._shown]
        dims = scope.dims[name]
        for claim in self.proposer.of(rank, name, dims, fresh) if fresh else ():
            key, same = claim.block, self._claimed(claim, dims)
            if strange[key] not in self._shown and self.opened.vanishes(k.add(value[key], scale(same, -1))):
                self._shown[strange[key]] = same
            elif self.opened.lost > LOST:
                raise Lost(f"{name} on rank {rank} seems to be {self._spoken[claim.tensor][0]}, but their forms differ")
        return {key: self._shown.get(strange[key], p) if key in strange else p for key, p in value.items()}

    def _sent(self, i: int, source: str, j: int, target: str) -> Value:
        return self.forms.viewed(get(self.local[i], source), self.ranks.scope(i).dims[source], self.ranks.scope(j).dims[target])

    def _equal(self, got: Poly, want: Poly) -> bool:
        return super()._equal(got, want) or self.opened.vanishes(self.kernel.add(got, scale(want, -1)))


def _content(value: Value | None) -> object:
    return None if value is None else tuple((key, frozenset(p.items())) for key, p in value.items())
