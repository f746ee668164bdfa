"""Both programs evaluated on classes, at one point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np

from trainverify.axes.cells import Cells, NoCells
from trainverify.axes.system import LoweredOp, Scope
from trainverify.domains.arrays import Array
from trainverify.evaluate.classed import Classed, ClassedDomain, NoValue, Real, Whole, moved, together
from trainverify.evaluate.classes.system import Classes, ClassStep
from trainverify.evaluate.flow import Task, levels, needed
from trainverify.evaluate.small import Groups, Meeting
from trainverify.graph.lineage import Layout
from trainverify.primitives.scalars import Undecided


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
        values: list[Rows] = [Rows(1, dict(self.inputs))]
        self._run(tasks, values, [self.classes.system.scope], {(0, n) for n in only} if only is not None else None)
        return values[0].whole

    def plan(self, lineage: Sequence[Layout], only: Sequence[tuple[int, str]] | None = None) -> list[Rows]:
        tasks = self.classes.plan_tasks
        if only is not None:
            chosen = needed(tasks, only)
            tasks = [t for n, t in enumerate(tasks) if n in chosen]
        read = {t for task in tasks for t in task.reads} | set(only or ())
        values = [Rows(len(mine), {}) for mine in self.classes.wires._classes]
        held: dict[tuple[int, str], list[Layout]] = {}
        for lay in lineage:
            for r in lay.holders(self.classes.system.plan.mesh):
                if r in self.classes.ranks.there:
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

    def _run(self, tasks: Sequence[Task], values: list[Rows], scopes: Sequence[Scope], keep: set[tuple[int, str]] | None) -> None:
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

    def _step(self, step: ClassStep, values: Rows, scope: Scope) -> None:
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

    def _meet(self, meeting: Meeting, values: list[Rows], scopes: Sequence[Scope]) -> None:
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

    def _given_to(self, meeting: Meeting, values: list[Rows]) -> Classed:
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
        lead, stands, ranks = cells[0], self.classes.ranks.stand_in, self.classes.wires._classes
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


class Rows:
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
