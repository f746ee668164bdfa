"""Who talks to whom: communication events of a plan, classes of ranks that behave alike, and the order of rendezvous.

Ranks are folded by colour refinement: two ranks share a class if they run the same program and, for every group
and peer they use, meet members of the same classes with the same uses. Such ranks are in the same state after
every step of any run, so one run over classes decides matching and deadlock for all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainverify.graph.plan import Groups, Plan, Template
from trainverify.graph.program import CALL, MAX_CALL_DEPTH, CallError, Function, Op, Ref, Value, bind, call_bindings
from trainverify.graph.types import TensorType
from trainverify.ops.table import OpTable


@dataclass(frozen=True)
class Event:
    """The n-th communication of a program: calls resolved, what differs between ranks left as references."""

    index: int
    op: Op
    given: TensorType | None
    result: TensorType | None

    @property
    def collective(self) -> bool:
        return self.op.get("group") is not None

    @property
    def target(self) -> Value:
        """The group of a collective, or the peer."""
        return self.op.get("group") if self.collective else self.op.get("peer")

    @property
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

    def walk(ops: Sequence[Op], tensors: Mapping[str, TensorType], bindings: Mapping[str, Value], depth: int) -> None:
        for op in ops:
            if op.name == CALL:
                name = str(op.get("function"))
                if talking(name, depth):
                    body = bodies[name]
                    inner = {**bindings, **call_bindings(bind(op, bindings))}
                    walk(body.ops, body.tensors, inner, depth + 1)
            elif is_communication(op, table):
                given = tensors.get(op.inputs[0]) if op.inputs and op.inputs[0] is not None else None
                result = tensors.get(op.outputs[0]) if op.outputs else None
                found.append(Event(len(found), bind(op, bindings), given, result))

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

    def uses(self, rank: int, group: str) -> tuple[int, ...]:
        """Which of its targets reach this group on a rank."""
        targets = self.targets[self.unit_of[rank]]
        return tuple(i for i, (kind, v) in enumerate(targets) if kind and self.value(rank, v) == group)

    def classes(self) -> list[RankClass]:
        """The coarsest classes of ranks that behave alike (see the module's text)."""
        ranks = sorted(self.unit_of)
        resolved = {r: [self.value(r, v) for _, v in self.targets[self.unit_of[r]]] for r in ranks}
        # initial colour: program, and which targets coincide
        colour = _number({r: (self.unit_of[r], tuple(resolved[r].index(v) for v in resolved[r])) for r in ranks})
        kinds = {r: [k for k, _ in self.targets[self.unit_of[r]]] for r in ranks}
        use = {}
        for r in ranks:
            by_group: dict[Value, list[int]] = {}
            for i, v in enumerate(resolved[r]):
                by_group.setdefault(v, []).append(i)
            use[r] = {v: tuple(ix) for v, ix in by_group.items()}
        while True:
            group_view: dict[Value, tuple[tuple[int, tuple[int, ...]], ...]] = {}

            def view(group: Value, known: dict[Value, tuple[tuple[int, tuple[int, ...]], ...]] = group_view) -> tuple[object, ...]:
                if group not in known:
                    members = self.groups.get(str(group), ())
                    known[group] = tuple(sorted((colour.get(m, -1), use.get(m, {}).get(group, ())) for m in members))
                return known[group]

            signature = {}
            for r in ranks:
                seen = tuple(
                    view(v) if is_group else (colour.get(v, -1), use.get(v, {}).get(r, ())) if isinstance(v, int) else ("?",)
                    for is_group, v in zip(kinds[r], resolved[r], strict=True)
                )
                signature[r] = (colour[r], seen)
            finer = _number(signature)
            if len(set(finer.values())) == len(set(colour.values())):
                break
            colour = finer
        found: dict[int, list[int]] = {}
        for r in ranks:
            found.setdefault(colour[r], []).append(r)
        return [RankClass(self.unit_of[rs[0]], tuple(rs)) for rs in found.values()]


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

    `stuck` is not empty when some classes never finish: one waiting representative for each.
    """

    classes: tuple[RankClass, ...]
    steps: tuple[tuple[tuple[int, int], ...], ...]
    stuck: tuple[Waiting, ...]


def schedule(talk: Communication) -> Schedule:
    """Run all classes: program order is fixed, a rank waits at a communication until all partners stand at theirs."""
    classes = talk.classes()
    class_of = {r: i for i, c in enumerate(classes) for r in c.ranks}
    lists = [talk.events[c.unit] for c in classes]
    # what each class has started and not finished: one event, or the rest of a batch
    started: list[list[int]] = [[] for _ in classes]
    following = [0] * len(classes)

    def start(c: int) -> None:
        es = lists[c]
        if following[c] < len(es):
            first = es[following[c]]
            started[c] = [first.index]
            following[c] += 1
            while first.batch is not None and following[c] < len(es) and es[following[c]].batch == first.batch:
                started[c].append(following[c])
                following[c] += 1

    for c in range(len(classes)):
        start(c)
    steps: list[tuple[tuple[int, int], ...]] = []
    ready = set(range(len(classes)))
    while ready:
        c = min(ready)
        ready.discard(c)
        for index in list(started[c]):
            meeting = _meeting(talk, classes, class_of, lists, started, c, index)
            if meeting is None:
                continue
            steps.append(meeting)
            for other, done in meeting:
                started[other].remove(done)
                if not started[other]:
                    start(other)
                ready.add(other)
                for e in started[other]:  # whoever waits for this class may go on now
                    ready.update(class_of[p] for p in _partners(talk, classes[other].ranks[0], lists[other][e]) if p in class_of)
            break
    stuck = []
    for c, rest in enumerate(started):
        if rest:
            event = lists[c][rest[0]]
            rank = classes[c].ranks[0]
            stuck.append(Waiting(rank, event, _blocker(talk, class_of, lists, started, rank, event)))
    return Schedule(tuple(classes), tuple(steps), tuple(stuck))


def _partners(talk: Communication, rank: int, event: Event) -> tuple[int, ...]:
    if event.collective:
        return talk.members(rank, event)
    peer = talk.value(rank, event.target)
    return (peer,) if isinstance(peer, int) else ()


def _answer(talk: Communication, lists: Sequence[list[Event]], started: Sequence[list[int]], rank: int, event: Event, partner: int, c: int) -> int | None:
    """The event that `partner` (of class c) has started and that meets `event` of `rank`, if any."""
    for index in started[c]:
        other = lists[c][index]
        if event.collective:
            if other.collective and talk.value(partner, other.target) == talk.value(rank, event.target):
                return index
        elif not other.collective and {event.op.name, other.op.name} == {"send", "recv"}:
            same_tag = talk.value(partner, other.op.get("tag", 0)) == talk.value(rank, event.op.get("tag", 0))
            if same_tag and talk.value(partner, other.target) == rank:
                return index  # the first in order: point-to-point messages do not overtake each other
    return None


def _meeting(
    talk: Communication,
    classes: Sequence[RankClass],
    class_of: Mapping[int, int],
    lists: Sequence[list[Event]],
    started: Sequence[list[int]],
    c: int,
    index: int,
) -> tuple[tuple[int, int], ...] | None:
    """The classes and events that meet with this one now, or None while someone is missing."""
    event = lists[c][index]
    rank = classes[c].ranks[0]
    found = {(c, index)}
    for p in _partners(talk, rank, event):
        if p == rank:
            continue
        if p not in class_of:
            return None
        answer = _answer(talk, lists, started, rank, event, p, class_of[p])
        if answer is None:
            return None
        found.add((class_of[p], answer))
    if not event.collective:
        if len(found) < 2 and _partners(talk, rank, event) == (rank,):
            return None  # a message to oneself is never received
        # FIFO: an earlier message of the batch to the same peer and tag goes first
        for earlier in started[c]:
            if earlier == index:
                break
            first = lists[c][earlier]
            if first.op.name == event.op.name and first.target == event.target and first.op.get("tag", 0) == event.op.get("tag", 0):
                return None
    return tuple(sorted(found))


def _blocker(
    talk: Communication, class_of: Mapping[int, int], lists: Sequence[list[Event]], started: Sequence[list[int]], rank: int, event: Event
) -> int:
    for p in _partners(talk, rank, event):
        if p == rank and event.collective:
            continue
        if p not in class_of or _answer(talk, lists, started, rank, event, p, class_of[p]) is None:
            return p
    return rank
