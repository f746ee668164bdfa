"""Communication: groups, members that agree, messages that arrive, nobody waiting for ever.

Ranks are compared by the sequence of what they do on a group or with a peer; a sequence is made once per
distinct use and has a number, so that comparing ranks is comparing numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from trainverify.check.bodies import where
from trainverify.check.findings import Report, names, others
from trainverify.check.operators import Operators
from trainverify.graph.communication import Communication, Event, Waiting, schedule
from trainverify.graph.plan import Plan, Template
from trainverify.graph.program import CALL, CallError, Op, Ref, Value, bind

_DIMS: Final = ("dim", "split_dim", "concat_dim")
_SHOWN: Final = 12  # waiting ranks that a message lists


def check_talk(plan: Plan, units: Sequence[Template], operators: Operators, report: Report) -> None:
    """All communication of a plan whose programs can be followed and whose ranks run one program each."""
    sound = _groups(plan, report)
    try:
        talk = Communication(plan, units, operators.table)
    except CallError as error:
        report.add("TV107", str(error))
        return
    _Talk(plan, units, operators, report, talk, sound).check()
    for unit in units:
        _unused(plan, unit, operators, report)


def _groups(plan: Plan, report: Report) -> dict[str, frozenset[int]]:
    """Groups that are lists of distinct ranks of the mesh, as sets."""
    found = {}
    for name, ranks in plan.groups.items():
        if not isinstance(name, str) or not isinstance(ranks, tuple) or any(type(r) is not int for r in ranks):
            report.add("TV201", f"group {name!r}: {ranks!r} is not a list of ranks")
        elif not ranks:
            report.add("TV201", f"group {name} has no members")
        elif len(set(ranks)) != len(ranks):
            twice = next(r for i, r in enumerate(ranks) if r in ranks[:i])
            report.add("TV201", f"group {name} {list(ranks)}: rank {twice} is in it twice")
        elif min(ranks) < 0 or max(ranks) >= plan.size:
            out = next(r for r in ranks if not 0 <= r < plan.size)
            report.add("TV201", f"group {name} {list(ranks)}: there is no rank {out} in {plan.mesh}")
        else:
            found[name] = frozenset(ranks)
    return found


@dataclass
class _Sequence:
    """What a rank does on a group or with a peer: a number that is equal for equal sequences, and the events."""

    number: int
    signature: tuple[Any, ...]
    events: tuple[int, ...]


@dataclass
class _Mismatch:
    """Findings that differ only in ranks are told once."""

    message: str
    rank: int
    source: Any
    hint: str | None
    count: int = field(default=0)


class _Talk:
    def __init__(
        self,
        plan: Plan,
        units: Sequence[Template],
        operators: Operators,
        report: Report,
        talk: Communication,
        sound: Mapping[str, frozenset[int]],
    ):
        self.plan = plan
        self.units = units
        self.operators = operators
        self.report = report
        self.talk = talk
        self.sound = sound
        self._numbers: dict[Any, int] = {}
        self._sequences: dict[Any, _Sequence] = {}
        self._messages: dict[Any, dict[tuple[bool, Value], _Sequence]] = {}
        self._merged: dict[Any, tuple[tuple[int, ...], tuple[str, ...]]] = {}
        self._described: dict[Any, Any] = {}
        self._mismatches: dict[Any, _Mismatch] = {}
        self._by_target = [_by_target(es, ts) for es, ts in zip(talk.events, talk.targets, strict=True)]

    def check(self) -> None:
        for u, unit in enumerate(self.units):
            self._targets(u, unit)
            self._roots(u, unit)
            for e in self.talk.events[u]:
                if isinstance(e.op.get("batch"), Ref):
                    self.report.add("TV106", f"{e.op}: `batch` cannot differ between ranks", source=where(e.op), severity="unsupported")
        if self.report.has("TV201", "TV202", "TV204", "TV106"):
            return
        self._agreement()
        self._channels()
        for (code, *_), m in self._mismatches.items():
            what = "groups" if code == "TV203" else "pairs of ranks"
            self.report.add(code, m.message + others(m.count, what), rank=m.rank, source=m.source, hint=m.hint)
        if not self.report.has("TV203", "TV204"):
            self._deadlock()

    # -- every rank knows its groups and peers ------------------------------------------------------------------------

    def _targets(self, u: int, unit: Template) -> None:
        for i, (is_group, target) in enumerate(self.talk.targets[u]):
            if target is None:
                continue  # the checks of attributes say so
            op = self.talk.events[u][self._by_target[u][i][0]].op
            told: dict[tuple[str, str], tuple[str, int, int]] = {}
            for rank in unit.ranks:
                value = self.talk.value(rank, target)
                problem = self._group(rank, value) if is_group else self._peer(rank, value)
                if problem is not None:
                    code, kind, text = problem
                    first, at, n = told.get((code, kind), (text, rank, -1))
                    told[code, kind] = (first, at, n + 1)
            for (code, _), (text, rank, n) in told.items():
                self.report.add(code, f"{unit.program.name}: {op}: {text}{others(n, 'ranks')}", rank=rank, source=where(op))

    def _group(self, rank: int, value: Value) -> tuple[str, str, str] | None:
        if not isinstance(value, str) or value not in self.plan.groups:
            return "TV201", "unknown", f"there is no group {value!r}"
        members = self.sound.get(value)
        if members is not None and rank not in members:
            return "TV202", "outside", f"rank {rank} is not in group {value} {_list(self.plan.groups[value])}"
        return None

    def _peer(self, rank: int, value: Value) -> tuple[str, str, str] | None:
        if type(value) is not int or not 0 <= value < self.plan.size:
            return "TV204", "unknown", f"there is no rank {value!r} in {self.plan.mesh}"
        return ("TV204", "self", f"rank {rank} talks to itself") if value == rank else None

    def _roots(self, u: int, unit: Template) -> None:
        """A root is a member; exactly senders pass a tensor, exactly receivers get one."""
        done: set[Any] = set()
        for e in self.talk.events[u]:
            definition = self.operators.definition(e.op.name)
            if definition is None or not e.collective or "all" == definition.senders == definition.receivers:
                continue
            gives, gets = any(i is not None for i in e.op.inputs), bool(e.op.outputs)
            root = e.op.get("root")
            key = (e.op.name, e.target, root, gives, gets)
            if key in done:
                continue
            done.add(key)
            for rank in unit.ranks:
                value, group = self.talk.value(rank, root), self.talk.value(rank, e.target)
                members = self.sound.get(group) if isinstance(group, str) else None
                if members is None:
                    continue
                text = f"{unit.program.name}: {e.op}: "
                if value not in members:
                    text += f"root {value} is not in group {group} {_list(self.plan.groups[str(group)])}"
                    self.report.add("TV202", text, rank=rank, source=where(e.op))
                    break
                sends = definition.senders == "all" or rank == value
                receives = definition.receivers == "all" or rank == value
                who = "the root" if rank == value else f"not the root ({value})"
                if gives != sends:
                    text += f"rank {rank} is {who} and passes {'a' if gives else 'no'} tensor"
                elif gets != receives:
                    text += f"rank {rank} is {who} and has {'a' if gets else 'no'} result"
                else:
                    continue
                self.report.add("TV203", text, rank=rank, source=where(e.op))
                break

    # -- sequences ----------------------------------------------------------------------------------------------------

    def _events(self, u: int, uses: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Events on these targets in order, and the references they have besides."""
        key = (u, uses)
        if key not in self._merged:
            found = sorted(i for t in uses for i in self._by_target[u][t])
            refs = dict.fromkeys(
                v.name for i in found for k, v in self.talk.events[u][i].op.attrs if isinstance(v, Ref) and k not in ("group", "peer")
            )
            self._merged[key] = (tuple(found), tuple(refs))
        return self._merged[key]

    def _sequence(self, rank: int, uses: tuple[int, ...]) -> _Sequence:
        u = self.talk.unit_of[rank]
        found, refs = self._events(u, uses)
        bound = {n: self.talk.value(rank, Ref(n)) for n in refs}
        key = (u, uses, tuple(bound.values()))
        if key not in self._sequences:
            signature = tuple(self._describe(self.talk.events[u][i], bound) for i in found)
            self._sequences[key] = _Sequence(self._numbers.setdefault(signature, len(self._numbers)), signature, found)
        return self._sequences[key]

    def _describe(self, event: Event, bound: Mapping[str, Value]) -> Any:
        """Kind, attributes with defaults, and the types on which all members have to agree."""
        key = (event.op.name, repr(event.op.attrs), event.given, event.result, tuple(bound.items()))
        if key not in self._described:
            definition = self.operators.definition(event.op.name)
            assert definition is not None
            given = bind(event.op, bound).attributes
            attrs = []
            kind = event.given or event.result
            for a in definition.attributes:
                value = given.get(a.name, None if a.required else a.default)
                if a.name in _DIMS and type(value) is int and value < 0 and kind is not None:
                    value += len(kind.shape)
                if a.name not in ("group", "peer"):
                    attrs.append((a.name, value))
            passes = event.given if definition.senders == "all" else None
            gets = event.result if definition.receivers == "all" else None
            self._described[key] = (event.op.name, tuple(attrs), passes, gets)
        return self._described[key]

    def _mismatch(self, key: Any, rank: int, event: Event | None, message: str, hint: str | None = None) -> None:
        if key in self._mismatches:
            self._mismatches[key].count += 1
        else:
            self._mismatches[key] = _Mismatch(message, rank, None if event is None else where(event.op), hint)

    def _agreement(self) -> None:
        """All members do the same on every group."""
        reached = self.talk.reached
        used = {v for here in reached.values() for v in here if isinstance(v, str)}
        for group in sorted(used):
            ranks = self.plan.groups[group]
            first = ranks[0]
            mine = self._sequence(first, reached[first].get(group, ()))
            for rank in ranks[1:]:
                theirs = self._sequence(rank, reached[rank].get(group, ()))
                if theirs.number != mine.number:
                    self._disagree(group, first, mine, rank, theirs)
                    break

    def _disagree(self, group: str, a: int, mine: _Sequence, b: int, theirs: _Sequence) -> None:
        ua, ub = self.talk.unit_of[a], self.talk.unit_of[b]
        pairs = zip(mine.signature, theirs.signature, strict=False)
        n = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(mine.signature), len(theirs.signature)))
        ea = self.talk.events[ua][mine.events[n]] if n < len(mine.events) else None
        eb = self.talk.events[ub][theirs.events[n]] if n < len(theirs.events) else None
        key = ("TV203", ua, ub, ea and ea.index, eb and eb.index)
        over = f"{group} {_list(self.plan.groups[group])}"
        hint = None
        if ea is None or eb is None:
            more, less, e = (b, a, eb) if ea is None else (a, b, ea)
            assert e is not None
            longer = max(len(mine.events), len(theirs.events))
            shorter = min(len(mine.events), len(theirs.events))
            text = f"{e.op.name} over {over}: rank {more} has {longer} collectives on it, rank {less} has {shorter}; "
            text += f"rank {less} has nothing for number {n + 1} of rank {more}{_at(e)}"
        else:
            x, y = mine.signature[n], theirs.signature[n]
            position = f" (number {n + 1} on it)"
            text = f"{ea.op.name} over {over}{position}: "
            if x[0] != y[0]:
                text = f"collectives over {over}{position}: rank {a} calls {x[0]}{_at(ea)}, rank {b} calls {y[0]}{_at(eb)}"
                hint = "all members must call the same collectives in the same order"
            elif x[1] != y[1]:
                k, v, w = next((k, v, w) for (k, v), (_, w) in zip(x[1], y[1], strict=True) if v != w)
                text += f"rank {a} has {k}={v}{_at(ea)}, rank {b} has {k}={w}{_at(eb)}"
            elif x[2] != y[2]:
                text += f"rank {a} passes {x[2]}{_at(ea)}, rank {b} passes {y[2]}{_at(eb)}"
            else:
                text += f"rank {a} gets {x[3]}{_at(ea)}, rank {b} gets {y[3]}{_at(eb)}"
        self._mismatch(key, a if ea is not None else b, ea or eb, text, hint)

    # -- messages -----------------------------------------------------------------------------------------------------

    def _messages_of(self, rank: int, uses: tuple[int, ...]) -> dict[tuple[bool, Value], _Sequence]:
        """(is a send, tag) → messages in order."""
        u = self.talk.unit_of[rank]
        found, refs = self._events(u, uses)
        bound = {n: self.talk.value(rank, Ref(n)) for n in refs}
        key = (u, uses, tuple(bound.values()))
        if key not in self._messages:
            lists: dict[tuple[bool, Value], list[int]] = {}
            for i in found:
                op = self.talk.events[u][i].op
                tag = bind(op, bound).get("tag", 0)
                lists.setdefault((op.name == "send", tag), []).append(i)
            made = {}
            for channel, indices in lists.items():
                es = [self.talk.events[u][i] for i in indices]
                types = tuple(e.given if channel[0] else e.result for e in es)
                made[channel] = _Sequence(self._numbers.setdefault(types, len(self._numbers)), types, tuple(indices))
            self._messages[key] = made
        return self._messages[key]

    def _channels(self) -> None:
        """Every message that is sent is received, in order, with its type; nothing else is received."""
        reached = self.talk.reached
        for rank, here in reached.items():
            for peer, uses in here.items():
                if not isinstance(peer, int):
                    continue
                mine = self._messages_of(rank, uses)
                theirs = self._messages_of(peer, reached[peer].get(rank, ()))
                for (sends, tag), sequence in mine.items():
                    other = theirs.get((not sends, tag))
                    if other is not None and other.number == sequence.number:
                        continue
                    if other is None or sends:  # a channel with both ends is told by its sender
                        self._lost(rank, peer, tag, sends, sequence, other)

    def _lost(self, rank: int, peer: int, tag: Value, sends: bool, mine: _Sequence, theirs: _Sequence | None) -> None:
        ua, ub = self.talk.unit_of[rank], self.talk.unit_of[peer]
        other = theirs.signature if theirs is not None else ()
        events = theirs.events if theirs is not None else ()
        pairs = zip(mine.signature, other, strict=False)
        n = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(mine.signature), len(other)))
        ea = self.talk.events[ua][mine.events[n]] if n < len(mine.events) else None
        eb = self.talk.events[ub][events[n]] if n < len(events) else None
        channel = "" if tag == 0 else f" with tag {tag}"
        verb, answer = ("sends", "receives") if sends else ("receives", "sends")
        key = ("TV204", ua, ub, ea and ea.index, eb and eb.index)
        if ea is not None and eb is not None:
            text = f"message {n + 1} from rank {rank} to rank {peer}{channel}: sent as {mine.signature[n]}{_at(ea)}, "
            text += f"received as {other[n]}{_at(eb)}"
        else:
            way, back = ("to", "from") if sends else ("from", "to")
            text = f"rank {rank} {verb} {len(mine.events)} messages {way} rank {peer}{channel}, "
            text += f"rank {peer} {answer} {len(other)} {back} rank {rank}"
            if ea is not None:
                text += f"; nothing answers {bind(ea.op, self._known(rank))}{_at(ea)} on rank {rank}"
            elif eb is not None:
                text += f"; nothing answers {bind(eb.op, self._known(peer))}{_at(eb)} on rank {peer}"
        self._mismatch(key, rank, ea or eb, text)

    def _known(self, rank: int) -> dict[str, Value]:
        unit = self.units[self.talk.unit_of[rank]]
        return unit.bound(rank)

    # -- deadlock -----------------------------------------------------------------------------------------------------

    def _deadlock(self) -> None:
        cycle = schedule(self.talk).cycle
        if not cycle:
            return
        lines = [self._waits(w) for w in cycle[:_SHOWN]]
        if len(cycle) > _SHOWN:
            lines.append(f"… {len(cycle) - _SHOWN} more …")
        closed = cycle[-1].waits_for == cycle[0].rank
        end = f", and so back to rank {cycle[0].rank}" if closed else f", and rank {cycle[-1].waits_for} has finished"
        hint = "batch sends and recvs that belong together, or change their order on one side"
        text = "; ".join(lines) + end
        self.report.add("TV205", text, rank=cycle[0].rank, source=where(cycle[0].event.op), hint=hint if closed else None)

    def _waits(self, w: Waiting) -> str:
        return f"rank {w.rank} at {bind(w.event.op, self._known(w.rank))}{_at(w.event)} waits for rank {w.waits_for}"


def _by_target(events: Sequence[Event], targets: Sequence[tuple[bool, Value]]) -> list[list[int]]:
    index = {t: i for i, t in enumerate(targets)}
    found: list[list[int]] = [[] for _ in targets]
    for e in events:
        found[index[e.collective, e.target]].append(e.index)
    return found


def _at(event: Event) -> str:
    at = where(event.op)
    return f" ({at})" if at else ""


def _list(ranks: Iterable[int]) -> str:
    return f"[{names(map(str, ranks), 8)}]"


def _unused(plan: Plan, unit: Template, operators: Operators, report: Report) -> None:
    """Results of communication that no op and no output uses; a body's results count where a call uses them."""
    functions = {**plan.functions, **unit.program.functions}
    needed: dict[str, set[int]] = {}  # function → results that some call uses

    def walk(label: str, ops: Sequence[Op], leaves: Iterable[str], tell: bool) -> list[str]:
        used = {i for op in ops for i in op.inputs} | set(leaves)
        grown = []
        lost: dict[tuple[str, ...], list[tuple[str, Op]]] = {}
        talks = {n for n in {op.name for op in ops} if (d := operators.definition(n)) is not None and (d.collective or d.point_to_point)}
        for op in ops:
            if op.name == CALL and (name := str(op.get("function"))) in functions:
                live = {i for i, o in enumerate(op.outputs) if o in used}
                if name not in needed or not live <= needed[name]:
                    needed[name] = needed.get(name, set()) | live
                    grown.append(name)
            elif tell and op.name in talks:
                for o in op.outputs:
                    if o not in used:
                        lost.setdefault((op.name, str(op.source)) if op.source else (o,), []).append((o, op))
        for many in lost.values():  # once per line of the user's code
            o, op = many[0]
            text = f"{label}: nothing uses {o!r}, the result of {op}{others(len(many) - 1, 'of this line')}"
            report.add("TV206", text, tensor=o, source=where(op), severity="warning")
        return grown

    todo = walk(unit.program.name, unit.program.ops, [o.tensor for o in unit.program.outputs], True)
    while todo:
        f = functions[todo.pop()]
        todo += walk(f.name, f.ops, [o for i, o in enumerate(f.outputs) if i in needed[f.name]], False)
    for name, live in needed.items():
        f = functions[name]
        walk(f"{unit.program.name}: function {name}", f.ops, [o for i, o in enumerate(f.outputs) if i in live], True)
