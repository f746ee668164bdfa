"""Running a plan again with a few tensors changed: only what depends on them, only as far as asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.run import NotComputed, PlanValues
from trainverify.evaluate.small import Meeting, Small, Step
from trainverify.explain.watch import NO_LIMIT, Watch
from trainverify.graph.program import Op

MANY: Final = 40_000  # tensors up to which it is kept of each which others depend on it
Node = tuple[int, str]  # (class of ranks, tensor); its value has one row per rank of the class


@dataclass(frozen=True)
class Task:
    """A local step of a class, or a rendezvous."""

    what: Step | Meeting
    reads: tuple[Node, ...]
    makes: tuple[Node, ...]
    class_index: int = -1  # of a step


@dataclass(frozen=True)
class Edit:
    """New values for a tensor. `make` gets what it reads; `raw` tensors are taken as their ops make them, unedited."""

    reads: tuple[Node, ...]
    make: Callable[[Callable[[Node], Array]], Array]
    raw: frozenset[Node] = frozenset()


Edits = Mapping[Node, Edit]


class Circular(Exception):
    """An edit that needs what depends on it."""


@dataclass(frozen=True)
class Reached:
    """A set of tensors as bits of a number."""

    bits: int
    position: Mapping[Node, int]

    def __contains__(self, node: object) -> bool:
        at = self.position.get(node)  # type: ignore[call-overload]
        return at is not None and bool(self.bits >> at & 1)


class Graph:
    """Which task makes which tensor from which others, for all classes of ranks together."""

    def __init__(self, small: Small, watch: Watch = NO_LIMIT):
        self.small = small
        self.watch = watch
        self.tasks: list[Task] = []
        for c, k in enumerate(small.classes):
            for step in k.order:
                reads = tuple((c, i) for i in dict.fromkeys(step.inputs) if i is not None)
                self.tasks.append(Task(step, reads, tuple((c, o) for o in step.outputs), c))
        for meeting in small.meetings:
            given = tuple(dict.fromkeys((c, t) for group in meeting.senders for c, _, t in group))
            taken = tuple(dict.fromkeys((c, t) for group in meeting.receivers for c, _, t in group))
            self.tasks.append(Task(meeting, given, taken))
        self.makers: dict[Node, list[int]] = {}
        self.users: dict[Node, list[int]] = {}
        for i, task in enumerate(self.tasks):
            for n in task.makes:
                self.makers.setdefault(n, []).append(i)
            for n in task.reads:
                self.users.setdefault(n, []).append(i)
        self.ops: dict[Node, Op] = {(c, o): op for c, k in enumerate(small.classes) for op in k.program.ops for o in op.outputs}
        self.nodes = [(c, n) for c, k in enumerate(small.classes) for n in k.program.sources]
        self.order = self._order()
        self.nodes += [n for i in self.order for n in self.tasks[i].makes]
        self.position = {n: i for i, n in reversed(list(enumerate(self.nodes)))}

    def _order(self) -> list[int]:
        """Tasks so that each comes after the tasks whose results it reads."""
        waits = [sum(len(self.makers.get(n, ())) for n in t.reads) for t in self.tasks]
        ready = [i for i, n in enumerate(waits) if not n]
        found: list[int] = []
        while ready:
            i = ready.pop()
            found.append(i)
            for n in self.tasks[i].makes:
                for j in self.users.get(n, ()):
                    waits[j] -= 1
                    if not waits[j]:
                        ready.append(j)
        return found

    def after(self, start: Sequence[Node]) -> set[Node]:
        """All tensors that depend on some."""
        found = set(start)
        todo = list(found)
        while todo:
            for i in self.users.get(todo.pop(), ()):
                for n in self.tasks[i].makes:
                    if n not in found:
                        found.add(n)
                        todo.append(n)
        return found

    def reached(self, start: Iterable[Node]) -> Reached | set[Node]:
        """The same as something to ask: whether a tensor depends on these."""
        if len(self.position) > MANY:
            return self.after([*start])
        bits, reach = 0, self._reach
        for n in start:
            bits |= reach.get(n, 0)
        return Reached(bits, self.position)

    @cached_property
    def _reach(self) -> dict[Node, int]:
        """Of every tensor, itself and all that depend on it, as bits of a number by their positions."""
        found = {n: 1 << i for n, i in self.position.items()}
        for i in reversed(self.order):
            task, bits = self.tasks[i], 0
            for n in task.makes:
                bits |= found[n]
            for n in task.reads:
                found[n] = found.get(n, 0) | bits
        return found

    def marks(self, given: Mapping[Node, int]) -> dict[Node, int]:
        """Bits of tensors, handed back to everything that they depend on."""
        found = dict(given)
        for i in reversed(self.order):
            task = self.tasks[i]
            bits = 0
            for n in task.makes:
                bits |= found.get(n, 0)
            if bits:
                for n in task.reads:
                    found[n] = found.get(n, 0) | bits
        return found


class Replay(PlanValues):
    """The values of a plan with some tensors edited, computed when asked for."""

    def __init__(self, graph: Graph, base: PlanValues, edits: Edits):
        super().__init__(base.values, base.done)
        self.graph = graph
        self.edits = edits
        self.changed = graph.reached(edits)
        self.new: dict[Node, Array] = {}
        self.unedited: dict[Node, Array] = {}
        self.runs = 0

    def get(self, c: int, row: int, tensor: str) -> Array | None:
        if row not in self.done[c].get(tensor, ()):
            return None
        return self.value((c, tensor))[row, ...]

    def value(self, node: Node) -> Array:
        if node not in self.changed:
            return self.values[node[0]][node[1]]
        if node not in self.new:
            self._fill(node)
        return self.new[node]

    def _fill(self, wanted: Node) -> None:
        """Depth first with a stack of its own: a model may be deeper than Python's."""
        todo: list[tuple[Node, bool]] = [(wanted, False)]
        entered: set[tuple[Node, bool]] = set()
        while todo:
            node, raw = todo[-1]
            if self._has(node, raw):
                todo.pop()
                continue
            edit = None if raw else self.edits.get(node)
            if edit is not None:
                missing = [(n, n in edit.raw) for n in edit.reads if not self._has(n, n in edit.raw)]
            else:
                missing = [
                    (n, False) for i in self.graph.makers.get(node, ()) for n in self.graph.tasks[i].reads if not self._has(n, False)
                ]
            if missing:
                if (node, raw) in entered:
                    raise Circular(node[1])
                entered.add((node, raw))
                todo += missing
                continue
            todo.pop()
            if edit is not None:
                self.new[node] = edit.make(lambda n, edit=edit: self._read(n, n in edit.raw))  # type: ignore[misc]
            else:
                self._run(node, raw)

    def _has(self, node: Node, raw: bool) -> bool:
        if node not in self.changed:
            return True
        if raw and node in self.edits:
            return node in self.unedited
        return node in self.new

    def _read(self, node: Node, raw: bool) -> Array:
        if raw and node in self.edits and node in self.changed:
            return self.unedited[node]
        return self.new[node] if node in self.changed else self.values[node[0]][node[1]]

    def _run(self, node: Node, raw: bool) -> None:
        """The ops that make a tensor, on what they read now."""
        self.graph.watch.look()
        c, tensor = node
        makers = self.graph.makers.get(node)
        if makers is None:  # a source
            self._store(node, self.values[c][tensor], raw)
            return
        count = len(self.graph.small.classes[c].ranks)
        first = self.graph.tasks[makers[0]].what
        if isinstance(first, Step) and len(first.rows) == count:
            self.runs += 1
            args = [None if n is None else self._read((c, n), False) for n in first.inputs]
            for name, value in zip(first.outputs, NUMERIC.run(first.nodes, args, (count,)), strict=True):
                if name == tensor or (c, name) not in self.edits:
                    self._store((c, name), value, raw and name == tensor)
            return
        result = np.array(self.values[c][tensor])
        for i in makers:
            self.runs += 1
            task = self.graph.tasks[i]
            if isinstance(task.what, Step):
                step = task.what
                args = [None if n is None else self._read((c, n), False)[list(step.rows)] for n in step.inputs]
                made = NUMERIC.run(step.nodes, args, (len(step.rows),))
                result[list(step.rows)] = made[step.outputs.index(tensor)]
            else:
                meet(task.what, lambda d, r, t: self._read((d, t), False)[r, ...], node, result)
        self._store(node, result, raw)

    def _store(self, node: Node, value: Array, raw: bool) -> None:
        if raw and node in self.edits:
            self.unedited[node] = value
        else:
            self.new[node] = value


def meet(meeting: Meeting, given: Callable[[int, int, str], Array], node: Node, result: Array) -> None:
    """What a rendezvous leaves in a tensor, row by row into `result`."""
    for senders, receivers in zip(meeting.senders, meeting.receivers, strict=True):
        if not any((c, t) == node for c, _, t in receivers):
            continue
        stack = np.stack([np.asarray(given(*s)) for s in senders])[None]
        out = stack if meeting.nodes is None else NUMERIC.run(meeting.nodes, [stack], (1,))[0]
        for i, (c, row, t) in enumerate(receivers):
            if (c, t) == node:
                result[row] = out[0, i, ...]


__all__ = ["Circular", "Edit", "Edits", "Graph", "Node", "NotComputed", "Replay", "Task", "meet"]
