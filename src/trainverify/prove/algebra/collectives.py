"""Collectives over folded ranks: what each puts in, along one more axis, and what each takes out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trainverify.axes.system import MeetingAxes
from trainverify.graph.program import Op
from trainverify.prove.algebra.forms import Forms
from trainverify.prove.algebra.grids import Grid, mixed_radix
from trainverify.prove.algebra.places import Value
from trainverify.prove.algebra.ranks import Ranks
from trainverify.prove.algebra.terms import Index, Poly, Unsupported, variables
from trainverify.prove.algebra.values import Values, get

_POSITIONS = -(10**5)  # position variables are above this


class Collectives:
    def __init__(self, ranks: Ranks, forms: Forms):
        self.ranks, self.forms, self.kernel = ranks, forms, forms.kernel
        self.system = ranks.system

    def meet(
        self, meeting: MeetingAxes, ops: Mapping[int, Op], party: Sequence[int], local: Sequence[Values]
    ) -> dict[int, tuple[str, Value]]:
        """The tensor that each instance of a party takes out."""
        k = self.kernel
        assert meeting.lowered is not None
        assert meeting.axes is not None
        given, made = meeting.lowered.inputs[0], meeting.lowered.outputs[0]
        assert given is not None
        into, out = self.forms.grid(meeting.axes.dims[id(given)]), self.forms.grid(meeting.axes.dims[id(made)])
        if any(g.leaves[n].tag for g in (into, out) for n in g.spans[0]):
            raise Unsupported("a group cut into unequal pieces")
        first = self.ranks.instances[party[0]]
        group = self.system.talk.groups[str(self.system.talk.value(first.rank, ops[first.class_index].get("group")))]
        if sum(self._ranks_in(i, meeting) for i in party) != len(group):
            raise Unsupported("a group whose members do not all fold alike")
        stacked: Value = {key: {} for key in into.blocks()}
        for i in party:
            op = ops[self.ranks.instances[i].class_index]
            if op.inputs:
                self.forms.aligned(self.ranks.scope(i).dims[str(op.inputs[0])], meeting.axes.dims[id(given)][1:])
                value = get(local[i], str(op.inputs[0]))
                for key, p in value.items():
                    stacked[key] = k.add(stacked[key], self._stacked(p, i, meeting, into, group, op))
        stacked = {key: k.collapse(p) for key, p in stacked.items()}
        (result,) = self.forms.op(meeting.lowered, meeting.axes, [stacked], {})
        for i in party:
            op = ops[self.ranks.instances[i].class_index]
            if op.outputs:
                self.forms.aligned(meeting.axes.dims[id(made)][1:], self.ranks.scope(i).dims[op.outputs[0]])
        taken = {}
        for i in party:
            op = ops[self.ranks.instances[i].class_index]
            if op.outputs:
                taken[i] = op.outputs[0], {key: self._unstacked(p, i, meeting, out, group) for key, p in result.items()}
        return taken

    def _ranks_in(self, i: int, meeting: MeetingAxes) -> int:
        """How many ranks of one group an instance stands for."""
        folded = self.ranks.instances[i].folded
        return math.prod(self.system.plan.mesh.length(a) for a in meeting.mesh_axes or () if a in folded)

    def _position(self, i: int, meeting: MeetingAxes, grid: Grid, group: tuple[int, ...]) -> list[Index]:
        """Where an instance stands in its group, as digits over the leading leaves."""
        instance = self.ranks.instances[i]
        lead = [grid.leaves[n].axis for n in grid.spans[0]]
        if any(grid.leaves[n].tag for n in grid.spans[0]):
            raise Unsupported("a group cut into unequal pieces")
        if meeting.mesh_axes is not None:
            found = [d for a in meeting.mesh_axes for d in self.ranks.coordinate(a, instance)]
            if [a.size for n in meeting.mesh_axes for _, a in self.ranks.mesh_vars[n]] != [a.size for a in lead]:
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
            rank = self.system.talk.value(self.ranks.instances[i].rank, op.get("root"))
            assert isinstance(rank, int)
            at: dict[Index, Index] = {}
            for a in meeting.mesh_axes or ():
                leaves = self.ranks.mesh_vars[a]
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
