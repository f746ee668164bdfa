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
        found: Value = self.op.get("group") if self.collective else self.op.get("peer")
        return found

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
        used = {v for r in ranks for is_group, v in zip(kinds[r], resolved[r], strict=True) if is_group}
        while True:
            view = {g: tuple(sorted((colour.get(m, -1), use.get(m, {}).get(g, ())) for m in self.groups.get(str(g), ()))) for g in used}
            signature = {}
            for r in ranks:
                seen = tuple(
                    view[v] if is_group else (colour.get(v, -1), use.get(v, {}).get(r, ())) if isinstance(v, int) else ("?",)
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
                event = self.lists[c][rest[0]]
                stuck.append(Waiting(self.classes[c].ranks[0], event, self.blocker(c, event)))
        return Schedule(tuple(self.classes), tuple(steps), tuple(stuck))

    def start(self, c: int) -> None:
        es, i = self.lists[c], self.following[c]
        if i == len(es):
            return
        stop = i + 1
        while es[i].batch is not None and stop < len(es) and es[stop].batch == es[i].batch:
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
                if same_channel(self.lists[c][earlier], event):
                    return None
        return tuple(sorted(found))

    def blocker(self, c: int, event: Event) -> int:
        rank = self.classes[c].ranks[0]
        for p in self.partners(c, event):
            if p not in self.class_of or self.answer(rank, event, p) is None:
                return p
        return rank


def same_channel(a: Event, b: Event) -> bool:
    return a.op.name == b.op.name and a.target == b.target and a.op.get("tag", 0) == b.op.get("tag", 0)
