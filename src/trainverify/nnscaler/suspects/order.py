"""Cells that run before what they need, or in another order than on the other devices of their stage; adapters that run twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from trainverify.nnscaler.dump import Cell, Dump, Slice, Step
from trainverify.nnscaler.edit import sequenced
from trainverify.nnscaler.suspects.kinds import Change, Member, Mend, Suspect, every, grouped, instead


def order(dump: Dump) -> Iterator[Suspect]:
    yield from grouped(dump, _twice(dump))
    for device in dump.devices:
        for segment in {id(s.cell): s.cell for s in dump.sequences[device] if s.cell.nodes}.values():
            for node, maker, t in _early(segment.nodes):
                better = replace(segment, nodes=tuple(_sorted(list(segment.nodes))))
                members = tuple(Member(device, c, every(dump)) for c in (node, maker))
                yield Suspect(members, f"the first takes {t.full.name} before the second makes it", instead(device, segment, better))
                break
    yield from _steps(dump)
    yield from _unlike(dump)


def _twice(dump: Dump) -> Iterator[tuple[object, int, Cell, str, Change | None]]:
    """Adapters that stand twice in a segment."""
    for device in dump.devices:
        for segment in {id(s.cell): s.cell for s in dump.sequences[device]}.values():
            counts = Counter(n.cid for n in segment.nodes if n.kind == "IRAdapter")
            for cid in (c for c, n in counts.items() if n > 1):
                places = [i for i, n in enumerate(segment.nodes) if n.cid == cid]
                nodes = tuple(n for i, n in enumerate(segment.nodes) if i not in places[1:])
                why = f"it stands {counts[cid]} times in segment {segment.cid}"
                yield cid, device, segment.nodes[places[0]], why, (segment, replace(segment, nodes=nodes))


def _early(nodes: tuple[Cell, ...]) -> Iterator[tuple[Cell, Cell, Slice]]:
    """Nodes that take what only a later one makes."""
    last = {t.tid: i for i, n in reversed(list(enumerate(nodes))) for t in n.results()}  # the first that makes it
    for i, node in enumerate(nodes):
        for t in node.tensors():
            if last.get(t.tid, i) > i and not t.full.weight:
                yield node, nodes[last[t.tid]], t


def _sorted(left: list[Cell]) -> Iterator[Cell]:
    """The nodes in an order in which everything is made before it is taken, otherwise as it was."""
    while left:
        waiting = [{t.tid for t in n.results()} for n in left]
        ready = next(
            (n for i, n in enumerate(left) if not any({t.tid for t in n.tensors()} & made for j, made in enumerate(waiting) if j != i)),
            left[0],
        )
        left.remove(ready)
        yield ready


def _steps(dump: Dump) -> Iterator[Suspect]:
    """Steps that take what only a later one makes."""
    for device in dump.devices:
        steps = dump.sequences[device]
        first: dict[int, int] = {}
        for i, step in enumerate(steps):
            for t in step.outputs:
                if isinstance(t, Slice):
                    first.setdefault(t.tid, i)
        for i, step in enumerate(steps):
            late = [(first[t.tid], t) for t in step.inputs if isinstance(t, Slice) and first.get(t.tid, i) > i]
            if late:
                at, t = max(late, key=lambda p: p[0])
                members = (Member(device, step.cell, every(dump)), Member(device, steps[at].cell, every(dump)))
                why = f"the first takes {t.full.name} before the second makes it"
                yield Suspect(members, why, _after(device, step, steps[at]))
                break


def _after(device: int, step: Step, maker: Step) -> Mend:
    """The step right after the one that it needs."""

    def mend(dump: Dump) -> Dump:
        rest = [s for s in dump.sequences[device] if s is not step]
        at = next((i for i, s in enumerate(rest) if s is maker), len(rest) - 1)
        return sequenced(dump, device, (*rest[: at + 1], step, *rest[at + 1 :]))

    return mend


def _unlike(dump: Dump) -> Iterator[Suspect]:
    """Devices that run the same cells as another one, in another order."""
    orders = {d: [s.cell.cid for s in dump.sequences[d] if s.cell.kind != "IRWeightReducer"] for d in dump.devices}
    for device, own in orders.items():
        for other, theirs in orders.items():
            if other != device and own != theirs and Counter(own) == Counter(theirs):
                at = next(i for i, (a, b) in enumerate(zip(own, theirs, strict=True)) if a != b)
                steps = [s for s in dump.sequences[device] if s.cell.kind != "IRWeightReducer"]
                why = f"it runs where device {other} runs cell {theirs[at]}"
                yield Suspect((Member(device, steps[at].cell, every(dump)),), why, _like(device, theirs))
                break


def _like(device: int, wanted: list[int]) -> Mend:
    """The steps in the order of another device."""

    def mend(dump: Dump) -> Dump:
        queues: dict[int, list[Step]] = {}
        for s in dump.sequences[device]:
            queues.setdefault(s.cell.cid, []).append(s)
        if any(len(queues.get(cid, ())) != n for cid, n in Counter(wanted).items()):
            return dump
        found = [queues[cid].pop(0) for cid in wanted]
        return sequenced(dump, device, (*found, *(s for q in queues.values() for s in q)))

    return mend
