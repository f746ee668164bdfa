"""Who talks to whom: communication events of a plan, classes of ranks that behave alike, and the order of rendezvous.

Ranks are folded by colour refinement: two ranks share a class if they run the same program and, for every group
and peer they use, meet members of the same classes with the same uses. Such ranks are in the same state after
every step of any run, so one run over classes decides matching and deadlock for all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from trainverify.graph.plan import Groups, Plan, Template
from trainverify.graph.program import CALL, MAX_CALL_DEPTH, CallError, Function, Op, Ref, Value, bind, call_bindings, refs
from trainverify.graph.types import TensorType
from trainverify.ops.table import OpTable


@dataclass(frozen=True)
class Event:
    """The n-th communication of a program: calls resolved, what differs between ranks left as references."""

    index: int
    op: Op
    given: TensorType | None
    result: TensorType | None
    used: bool = False  # something before it has used a result of its batch, which has ended by then

    @cached_property
    def collective(self) -> bool:
        return self.op.get("group") is not None

    @cached_property
    def target(self) -> Value:
        """The group of a collective, or the peer."""
        found: Value = self.op.get("group") if self.collective else self.op.get("peer")
        return found

    @cached_property
    def batch(self) -> str | None:
        return None if self.collective else self.op.get("batch")


def is_communication(op: Op, table: OpTable) -> bool:
    definition = table.definitions.get(op.name)
    return definition is not None and (definition.collective or definition.point_to_point)


def events(template: Template, functions: Mapping[str, Function], table: OpTable) -> list[Event]:
    """All communication of a program in execution order. Bodies without any are not walked."""
    bodies = {**functions, **template.program.functions}
    talks: dict[str, bool] = {}

    def talking(name: str, depth: int = 0) -> bool:
        if depth > MAX_CALL_DEPTH:
            raise CallError(f"function {name!r} calls itself")
        if name not in talks:
            body = bodies.get(name)
            talks[name] = body is not None and any(
                is_communication(op, table) or (op.name == CALL and talking(str(op.get("function")), depth + 1)) for op in body.ops
            )
        return talks[name]

    found: list[Event] = []
    arriving: list[str] = []  # results of the batch that is under way
    used = False  # whether something has used one of them

    def walk(ops: Sequence[Op], tensors: Mapping[str, TensorType], bindings: Mapping[str, Value], depth: int) -> None:
        nonlocal used
        communicates = {op.name: is_communication(op, table) for op in ops}
        for op in ops:
            if arriving and not used:
                used = any(i in arriving for i in op.inputs)
            if op.name == CALL:
                name = str(op.get("function"))
                if talking(name, depth):
                    body = bodies[name]
                    inner = {**bindings, **call_bindings(bind(op, bindings))}
                    walk(body.ops, body.tensors, inner, depth + 1)
            elif communicates[op.name]:
                given = tensors.get(op.inputs[0]) if op.inputs and op.inputs[0] is not None else None
                result = tensors.get(op.outputs[0]) if op.outputs else None
                event = Event(len(found), bind(op, bindings), given, result, used)
                if used or event.batch is None or not found or found[-1].batch != event.batch:
                    arriving.clear()
                    used = False
                if event.batch is not None:
                    arriving.extend(op.outputs)
                found.append(event)

    walk(template.program.ops, template.program.tensors, {}, 0)
    return found


@dataclass(frozen=True)
class RankClass:
    """Ranks that behave alike in all communication. `unit` is their program's index."""

    unit: int
    ranks: tuple[int, ...]


class Communication:
    """The communication of a plan's units, with look-ups for every rank."""

    def __init__(self, plan: Plan, units: Sequence[Template], table: OpTable):
        self.groups: Groups = plan.groups
        self.units = units
        self.events = [events(u, plan.functions, table) for u in units]
        self.unit_of: dict[int, int] = {}
        self._row: dict[int, int] = {}
        for i, u in enumerate(units):
            for row, rank in enumerate(u.ranks):
                self.unit_of[rank] = i
                self._row[rank] = row
        self.targets = [_targets(es) for es in self.events]

    def value(self, rank: int, value: Value) -> Value:
        """What a reference means on a rank."""
        if isinstance(value, Ref):
            column = self.units[self.unit_of[rank]].bindings.get(value.name)
            return value if column is None else column[self._row[rank]]
        return value

    def members(self, rank: int, event: Event) -> tuple[int, ...]:
        return self.groups[str(self.value(rank, event.target))]

    @cached_property
    def reached(self) -> dict[int, dict[Value, tuple[int, ...]]]:
        """For every rank: group or peer → the targets of its program that reach it."""
        found: dict[int, dict[Value, tuple[int, ...]]] = {}
        for unit, targets in zip(self.units, self.targets, strict=True):
            columns = []
            for _, v in targets:
                column = unit.bindings.get(v.name) if isinstance(v, Ref) else None
                columns.append((v,) * len(unit.ranks) if column is None else column)
            for row, rank in enumerate(unit.ranks):
                here: dict[Value, tuple[int, ...]] = {}
                for i, column in enumerate(columns):
                    here[column[row]] = (*here.get(column[row], ()), i)
                found[rank] = here
        return found

    def uses(self, rank: int, group: str) -> tuple[int, ...]:
        """Which of its targets reach this group on a rank."""
        return self.reached[rank].get(group, ())

    def classes(self) -> list[RankClass]:
        """The coarsest classes of ranks that behave alike (see the module's text)."""
        reached = self.reached
        ranks = sorted(self.unit_of)
        used = {v for r in ranks for v in reached[r] if isinstance(v, str)}
        # initial colour: program, which targets coincide, and whatever else differs between ranks (tags, reductions, dimensions)
        tags = [tuple({r: None for e in es for k, v in e.op.attrs if k not in _WHOM for r in refs(v)}) for es in self.events]
        colour = _number(
            {r: (self.unit_of[r], tuple(reached[r].values()), tuple(self.value(r, t) for t in tags[self.unit_of[r]])) for r in ranks}
        )
        count = len(set(colour.values()))
        while True:
            seen: dict[object, int] = {}  # views of groups by number: they are compared many times
            view = {
                g: seen.setdefault(
                    tuple(sorted((colour.get(m, -1), reached[m].get(g, ()) if m in reached else ()) for m in self.groups.get(g, ()))),
                    len(seen),
                )
                for g in used
            }
            finer = _number(
                {
                    r: (
                        colour[r],
                        tuple(
                            (view[v], ix)
                            if isinstance(v, str)
                            else (colour.get(v, -1), reached[v].get(r, ()) if v in reached else (), ix)
                            if isinstance(v, int)
                            else ("?",)
                            for v, ix in reached[r].items()
                        ),
                    )
                    for r in ranks
                }
            )
            colour, before, count = finer, count, len(set(finer.values()))
            if count == before:
                break
        found: dict[int, list[int]] = {}
        for r in ranks:
            found.setdefault(colour[r], []).append(r)
        return [RankClass(self.unit_of[rs[0]], tuple(rs)) for rs in found.values()]


_WHOM: Final = ("group", "peer", "root")  # ranks of one class meet others here, in the same way


def _targets(found: Sequence[Event]) -> list[tuple[bool, Value]]:
    """Distinct (is a group, value) that a program's events name."""
    return list(dict.fromkeys((e.collective, e.target) for e in found))


def _number(signature: Mapping[int, object]) -> dict[int, int]:
    numbers: dict[object, int] = {}
    return {r: numbers.setdefault(s, len(numbers)) for r, s in signature.items()}


@dataclass(frozen=True)
class Waiting:
    """A rank that stands still, the event it stands at, and one rank it waits for."""

    rank: int
    event: Event
    waits_for: int


@dataclass(frozen=True)
class Schedule:
    """Rendezvous in an order in which they can happen: each step is a set of (class, event index) that meet.

    `stuck` is not empty when some classes never finish: one waiting representative for each. `cycle` then
    are ranks that wait for each other in a circle, or a chain whose last one waits for a rank that has finished.
    """

    classes: tuple[RankClass, ...]
    steps: tuple[tuple[tuple[int, int], ...], ...]
    stuck: tuple[Waiting, ...]
    cycle: tuple[Waiting, ...] = ()


def schedule(talk: Communication) -> Schedule:
    """Run all classes: program order is fixed, a rank waits at a communication until all partners stand at theirs."""
    return _Run(talk).schedule()


class _Run:
    """One run over classes, each standing for all of its ranks."""

    def __init__(self, talk: Communication):
        self.talk = talk
        self.classes = talk.classes()
        self.class_of = {r: i for i, c in enumerate(self.classes) for r in c.ranks}
        self.lists = [talk.events[c.unit] for c in self.classes]
        # what each class has started and not finished: one event, or the rest of a batch
        self.started: list[list[int]] = [[] for _ in self.classes]
        self.following = [0] * len(self.classes)
        self._partners: dict[tuple[int, bool, Value], tuple[int, ...]] = {}

    def schedule(self) -> Schedule:
        for c in range(len(self.classes)):
            self.start(c)
        steps: list[tuple[tuple[int, int], ...]] = []
        ready = set(range(len(self.classes)))
        while ready:
            c = min(ready)
            ready.discard(c)
            meeting = next((m for index in self.started[c] if (m := self.meeting(c, index)) is not None), None)
            if meeting is None:
                continue
            steps.append(meeting)
            for other, done in meeting:
                self.started[other].remove(done)
                if not self.started[other]:
                    self.start(other)
                ready.add(other)
                for e in self.started[other]:  # whoever waits for this class may go on now
                    ready.update(self.class_of[p] for p in self.partners(other, self.lists[other][e]) if p in self.class_of)
        stuck = []
        for c, rest in enumerate(self.started):
            if rest:
                rank, event = self.classes[c].ranks[0], self.lists[c][rest[0]]
                stuck.append(Waiting(rank, event, self.absent(rank, event)))
        return Schedule(tuple(self.classes), tuple(steps), tuple(stuck), self.cycle(stuck[0].rank) if stuck else ())

    def cycle(self, rank: int) -> tuple[Waiting, ...]:
        """Follow who waits for whom, rank by rank: classes stand alike, but wait for different ranks."""
        path: dict[int, Waiting] = {}
        while rank not in path:
            c = self.class_of.get(rank)
            if c is None or not self.started[c]:
                return tuple(path.values())
            event = self.lists[c][self.started[c][0]]
            path[rank] = Waiting(rank, event, self.absent(rank, event))
            rank = path[rank].waits_for
        waiting = list(path.values())
        return tuple(waiting[[w.rank for w in waiting].index(rank) :])

    def absent(self, rank: int, event: Event) -> int:
        """The first rank that does not answer to an event of exactly this rank."""
        target = self.talk.value(rank, event.target)
        whom = self.talk.groups.get(str(target), ()) if event.collective else (target,) if isinstance(target, int) else ()
        for p in whom:
            if p != rank and (p not in self.class_of or self.answer(rank, event, p) is None):
                return p
        return rank

    def start(self, c: int) -> None:
        es, i = self.lists[c], self.following[c]
        if i == len(es):
            return
        stop = i + 1
        while es[i].batch is not None and stop < len(es) and es[stop].batch == es[i].batch and not es[stop].used:
            stop += 1
        self.started[c] = list(range(i, stop))
        self.following[c] = stop

    def partners(self, c: int, event: Event) -> tuple[int, ...]:
        """Whom the first rank of a class meets in an event: of members of one class with the same uses, one."""
        key = (c, event.collective, event.target)
        if key not in self._partners:
            rank = self.classes[c].ranks[0]
            target = self.talk.value(rank, event.target)
            if event.collective:
                kinds: dict[object, int] = {}
                for m in self.talk.groups.get(str(target), ()):
                    if m != rank:
                        kinds.setdefault((self.class_of.get(m), self.talk.uses(m, str(target)) if m in self.class_of else m), m)
                self._partners[key] = tuple(kinds.values())
            else:
                self._partners[key] = (target,) if isinstance(target, int) else ()
        return self._partners[key]

    def answer(self, rank: int, event: Event, partner: int) -> int | None:
        """The event that `partner` has started and that meets `event` of `rank`, if any."""
        value = self.talk.value
        c = self.class_of[partner]
        for index in self.started[c]:
            other = self.lists[c][index]
            if event.collective:
                if other.collective and value(partner, other.target) == value(rank, event.target):
                    return index
            elif not other.collective and {event.op.name, other.op.name} == {"send", "recv"}:
                same_tag = value(partner, other.op.get("tag", 0)) == value(rank, event.op.get("tag", 0))
                if same_tag and value(partner, other.target) == rank:
                    return index  # the first in order: point-to-point messages do not overtake each other
        return None

    def meeting(self, c: int, index: int) -> tuple[tuple[int, int], ...] | None:
        """The classes and events that meet with this one now, or None while someone is missing."""
        event = self.lists[c][index]
        rank = self.classes[c].ranks[0]
        found = {(c, index)}
        for p in self.partners(c, event):
            if p not in self.class_of or (p == rank and not event.collective):
                return None  # a message to oneself is never received
            reply = self.answer(rank, event, p)
            if reply is None:
                return None
            found.add((self.class_of[p], reply))
        if not event.collective:
            for earlier in self.started[c]:  # an earlier message of the batch to the same peer goes first
                if earlier == index:
                    break
                if self.same_channel(rank, self.lists[c][earlier], event):
                    return None
        return tuple(sorted(found))

    def same_channel(self, rank: int, a: Event, b: Event) -> bool:
        value = self.talk.value
        return (
            a.op.name == b.op.name
            and value(rank, a.target) == value(rank, b.target)
            and value(rank, a.op.get("tag", 0)) == value(rank, b.op.get("tag", 0))
        )
