"""Collectives among single ranks: what each puts in is a block of its own. Trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trainverify.axes.listed import ListedAxes
from trainverify.axes.structure import Axis
from trainverify.axes.system import MeetingAxes
from trainverify.graph.program import Op
from trainverify.prove.algebra.collectives import Collectives
from trainverify.prove.algebra.grids import mixed_radix
from trainverify.prove.algebra.places import Dims, Value
from trainverify.prove.algebra.ranks import Ranks
from trainverify.prove.algebra.terms import Index, Unsupported
from trainverify.prove.algebra.values import Values, get
from trainverify.prove.listed.forms import ListedForms


class ListedCollectives(Collectives):
    def __init__(self, ranks: Ranks, forms: ListedForms):
        super().__init__(ranks, forms)
        self.listed = forms
        self._at = {instance.rank: i for i, instance in enumerate(ranks.instances)}

    def meet(
        self, meeting: MeetingAxes, ops: Mapping[int, Op], party: Sequence[int], local: Sequence[Values]
    ) -> dict[int, tuple[str, Value]]:
        talk, instances = self.system.talk, self.ranks.instances
        assert meeting.lowered is not None
        assert meeting.axes is not None
        given, made = meeting.lowered.inputs[0], meeting.lowered.outputs[0]
        assert given is not None
        into, out = meeting.axes.dims[id(given)], meeting.axes.dims[id(made)]
        op_of = {i: ops[instances[i].class_index] for i in party}
        groups: dict[str, list[int]] = {}
        for i in party:
            groups.setdefault(str(talk.value(instances[i].rank, op_of[i].get("group"))), []).append(i)
        taken: dict[int, tuple[str, Value]] = {}
        for name, members in groups.items():
            order = [self._at[r] for r in talk.groups[name]]
            if set(order) != set(members):
                raise Unsupported("a group of ranks that do not meet")
            definition = self.system.table[op_of[order[0]].name]
            givers, takers = list(order), list(order)
            if "root" in (definition.senders, definition.receivers):
                rank = talk.value(instances[order[0]].rank, op_of[order[0]].get("root"))
                assert isinstance(rank, int)
                givers = [self._at[rank]] if definition.senders == "root" else givers
                takers = [self._at[rank]] if definition.receivers == "root" else takers
            if out[0].size != len(takers):
                raise Unsupported(f"{out[0].size} results for {len(takers)} members")
            stacked = self._joined(into, [(i, str(op_of[i].inputs[0])) for i in givers], local)
            (result,) = self.forms.op(meeting.lowered, meeting.axes, [stacked], {})
            for n, i in enumerate(takers):
                target = op_of[i].outputs[0]
                taken[i] = target, self.listed.viewed(self._one_of(result, out, n), out[1:], self.ranks.scope(i).dims[target])
        return taken

    def _lead(self, axis: Axis) -> list[int]:
        leaves = self.system.inference.axes.leaves([axis])
        if not all(ListedAxes.listed(a) for a in leaves):
            raise Unsupported("members of a group that are not listed")
        return [a.size for a in leaves]

    def _joined(self, dims: Dims, members: Sequence[tuple[int, str]], local: Sequence[Values]) -> Value:
        """The values of all members, stacked."""
        sizes = self._lead(dims[0])
        if math.prod(sizes) != len(members):
            raise Unsupported(f"{len(members)} members stacked to {sizes}")
        grid = self.forms.grid(dims[1:])
        names: dict[Index, Index] = {-1 - n: -1 - n - len(sizes) for n in range(len(grid.leaves))}
        stacked: Value = {}
        for n, (i, tensor) in enumerate(members):
            value = self.listed.viewed(get(local[i], tensor), self.ranks.scope(i).dims[tensor], dims[1:])
            place = mixed_radix(n, sizes)
            for key in grid.blocks():
                stacked[(*place, *key)] = self.kernel.substitute(value[key], names)
        return stacked

    def _one_of(self, value: Value, dims: Dims, n: int) -> Value:
        """What the n-th member takes out."""
        sizes = self._lead(dims[0])
        grid = self.forms.grid(dims[1:])
        names: dict[Index, Index] = {-1 - j - len(sizes): -1 - j for j in range(len(grid.leaves))}
        place = mixed_radix(n, sizes)
        return {key: self.kernel.substitute(value[(*place, *key)], names) for key in grid.blocks()}
