"""In which order a program or a plan is computed: tasks by level, so that equal ones of a level run as one.

Values do not depend on the order of a schedule, only on what they are made of. Tasks that compute the same nodes (the
same op of other micro-batches, other stages, other layers' weights) and could run at once are stacked in front of each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainverify.domains.arrays import Array, ArrayDomain
from trainverify.evaluate.small import Meeting, Small, Step, Wiring
from trainverify.primitives.node import ordered

Tensor = tuple[int, str]  # class and name


@dataclass(frozen=True, slots=True)
class Task:
    """A step of a class, or a rendezvous."""

    what: Step | Meeting
    c: int  # class of a step
    reads: tuple[Tensor, ...]
    makes: tuple[Tensor, ...]


def tasks_of(small: Small) -> Iterator[Task]:
    for c, k in enumerate(small.classes):
        for step in k.order:
            reads = tuple([(c, i) for i in step.inputs if i is not None])
            yield Task(step, c, reads, tuple([(c, o) for o in step.outputs]))
    for m in small.meetings:
        yield Task(m, -1, tuple(m.given.items()), tuple(m.taken.items()))


def levels(tasks: Sequence[Task]) -> list[list[list[Task]]]:
    """Tasks so that each comes after those whose results it reads: by level, those of the same nodes together.

    A task that waits for what nobody makes is left out.
    """
    waiting: dict[Tensor, list[int]] = {}
    makers: dict[Tensor, int] = {}
    for task in tasks:
        for t in task.makes:
            makers[t] = makers.get(t, 0) + 1
    left = [0] * len(tasks)
    level = [0] * len(tasks)
    ready: list[int] = []
    for n, task in enumerate(tasks):
        for t in set(task.reads):
            if t in makers:
                left[n] += makers[t]
                waiting.setdefault(t, []).append(n)
        if not left[n]:
            ready.append(n)
    found: list[dict[object, list[Task]]] = []
    while ready:
        n = ready.pop()
        task, own = tasks[n], level[n]
        while len(found) <= own:
            found.append({})
        what = task.what
        found[own].setdefault((what.nodes is None, id(what.nodes), isinstance(what, Step)), []).append(task)
        for t in task.makes:
            for user in waiting.get(t, ()):
                left[user] -= 1
                level[user] = max(level[user], own + 1)
                if not left[user]:
                    ready.append(user)
    return [list(batches.values()) for batches in found]


def logical_tasks(small: Small) -> Iterator[Task]:
    """Those of the logical program, as a class of its own."""
    for s in small.logical_steps:
        yield Task(s, 0, tuple([(0, i) for i in s.inputs if i is not None]), tuple([(0, o) for o in s.outputs]))


def sliced(small: Small, logical: Collection[str], local: Collection[Tensor]) -> Small:
    """Only the steps that some tensors of both programs are made of."""
    steps = needed(list(logical_tasks(small)), [(0, n) for n in logical])
    tasks = list(tasks_of(small))
    kept = needed(tasks, local)
    classes = [replace(k, order=[]) for k in small.classes]
    meetings = []
    for n, task in enumerate(tasks):
        if n in kept:
            if isinstance(task.what, Step):
                classes[task.c].order.append(task.what)
            else:
                meetings.append(task.what)
    return replace(small, logical_steps=[s for n, s in enumerate(small.logical_steps) if n in steps], classes=classes, meetings=meetings)


def needed(tasks: Sequence[Task], tensors: Collection[Tensor]) -> set[int]:
    """The tasks that tensors are made of."""
    makers: dict[Tensor, list[int]] = {}
    for n, task in enumerate(tasks):
        for t in task.makes:
            makers.setdefault(t, []).append(n)
    found = {n for t in tensors for n in makers.get(t, ())}
    ahead = list(found)
    while ahead:
        for t in tasks[ahead.pop()].reads:
            new = [n for n in makers.get(t, ()) if n not in found]
            found.update(new)
            ahead += new
    return found


class Flow:
    """A program or plan, ready to run on several points at once: rows of a class are its ranks, once per point."""

    def __init__(self, tasks: Iterable[Task], ranks: Sequence[int], points: int, keep: Collection[Tensor] | None = None):
        """`ranks` counts rows by class; what is not in `keep` is dropped after its last use."""
        self.ranks = ranks
        self.points = points
        every = list(tasks)
        self.levels = levels(every)
        self.complete = sum(len(batch) for batches in self.levels for batch in batches) == len(every)  # else some wait for ever
        self.reads = frozenset(t for task in every for t in task.reads)
        self._rows: dict[tuple[int, tuple[int, ...]], Array | None] = {}
        self._wired: dict[int, tuple[Wiring, _Wired]] = {}
        self._drop: list[list[Tensor]] = [[] for _ in self.levels]
        if keep is not None:
            last = {t: n for n, batches in enumerate(self.levels) for b in batches for task in b for t in (*task.makes, *task.reads)}
            for t, n in last.items():
                if t not in keep:
                    self._drop[n].append(t)

    def run(self, values: list[dict[str, Array]], domain: ArrayDomain) -> list[dict[str, set[int]]]:
        """Compute everything from the sources in `values`, into it. Returns which rows of tensors made of several parts are there."""
        partly: list[dict[str, set[int]]] = [{} for _ in self.ranks]
        for batches, gone in zip(self.levels, self._drop, strict=True):
            for batch in batches:
                if isinstance(batch[0].what, Step):
                    self._steps(batch, values, partly, domain)
                else:
                    self._meetings(batch, values, domain)
            for c, name in gone:
                values[c].pop(name, None)
        return partly

    def rows(self, c: int, rows: tuple[int, ...]) -> Array | None:
        """Some ranks of a class on all points; None for all ranks."""
        key = (c, rows)
        if key not in self._rows:
            count = self.ranks[c]
            some = np.asarray(rows)
            every = np.concatenate([some + p * count for p in range(self.points)])
            self._rows[key] = None if len(rows) == count else every
        return self._rows[key]

    def _steps(self, batch: Sequence[Task], values: list[dict[str, Array]], partly: list[dict[str, set[int]]], domain: ArrayDomain) -> None:
        steps: list[tuple[Step, int, Array | None]] = []
        for task in batch:
            step = task.what
            assert isinstance(step, Step)
            if all(name in values[c] for c, name in task.reads):
                steps.append((step, task.c, self.rows(task.c, step.rows)))
        if not steps:
            return
        counts = [len(step.rows) * self.points for step, _, _ in steps]
        nodes = steps[0][0].nodes
        used = {n.attrs[0] for n in ordered(nodes) if n.prim == "input"}  # others may differ from step to step
        args: list[Array | None] = []
        for i, name in enumerate(steps[0][0].inputs):
            if name is None or i not in used:
                args.append(None)
                continue
            parts = []
            for step, c, rows in steps:
                value = values[c][step.inputs[i]]  # type: ignore[index]
                parts.append(value if rows is None else value[rows])
            args.append(parts[0] if len(parts) == 1 else np.concatenate(parts))
        made = domain.run(nodes, args, (sum(counts),))
        for i, result in enumerate(made):
            whole = np.asarray(result)
            at = 0
            for (step, c, rows), count in zip(steps, counts, strict=True):
                part = whole if len(steps) == 1 else whole[at : at + count]
                at += count
                name = step.outputs[i]
                if rows is None:
                    values[c][name] = part
                    continue
                if name not in values[c]:
                    values[c][name] = np.empty((self.ranks[c] * self.points, *part.shape[1:]), dtype=part.dtype)
                values[c][name][rows] = part
                partly[c].setdefault(name, set()).update(step.rows)

    def _meetings(self, batch: Sequence[Task], values: list[dict[str, Array]], domain: ArrayDomain) -> None:
        met: list[tuple[Meeting, _Wired]] = []
        for task in batch:
            m = task.what
            assert isinstance(m, Meeting)
            if all(name in values[c] for c, name in task.reads):
                met.append((m, self._wire(m.wiring)))
        if not met:
            return
        parts = []
        for m, wired in met:
            rows = [values[c][m.given[c]] for c in wired.giving]
            parts.append((rows[0] if len(rows) == 1 else np.concatenate(rows))[wired.senders])
        alike: dict[object, list[int]] = {}  # messages are of all sorts
        for n, part in enumerate(parts):
            alike.setdefault((part.shape[1:], part.dtype), []).append(n)
        for several in alike.values():
            given = parts[several[0]] if len(several) == 1 else np.concatenate([parts[n] for n in several])
            nodes = met[several[0]][0].nodes
            result = given if nodes is None else np.asarray(domain.run(nodes, [given], (len(given),))[0])
            at = 0
            for n in several:
                m, wired = met[n]
                own = result[at : at + len(parts[n])]
                at += len(parts[n])
                for c, group, place in wired.receivers:
                    values[c][m.taken[c]] = own[group, place]

    def _wire(self, wiring: Wiring) -> _Wired:
        known = self._wired.get(id(wiring))
        if known is None:
            known = self._wired[id(wiring)] = wiring, _Wired.of(wiring, self.ranks, self.points)
        return known[1]


@dataclass(frozen=True)
class _Wired:
    """A wiring as positions: of members in the rows of all giving classes, of rows of taking classes in the result."""

    giving: tuple[int, ...]
    senders: Array  # [group, member]
    receivers: tuple[tuple[int, Array, Array], ...]  # class, for every row its group and place

    @staticmethod
    def of(wiring: Wiring, ranks: Sequence[int], points: int) -> _Wired:
        giving = tuple(dict.fromkeys(c for group in wiring.senders for c, _ in group))
        start, at = {}, 0
        for c in giving:
            start[c] = at
            at += ranks[c] * points
        senders = [[start[c] + p * ranks[c] + row for c, row in group] for p in range(points) for group in wiring.senders]
        places: dict[int, dict[int, tuple[int, int]]] = {}
        for p in range(points):
            for g, group in enumerate(wiring.receivers):
                for i, (c, row) in enumerate(group):
                    places.setdefault(c, {})[p * ranks[c] + row] = (p * len(wiring.receivers) + g, i)
        receivers = []
        for c, found in places.items():
            both = np.asarray([found[row] for row in range(ranks[c] * points)])
            receivers.append((c, both[:, 0], both[:, 1]))
        return _Wired(giving, np.asarray(senders), tuple(receivers))
