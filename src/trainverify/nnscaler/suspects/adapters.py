"""Adapters that do not make what the plan says that they make, whose partners differ, or that are missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from trainverify.nnscaler import bridge
from trainverify.nnscaler.claims import adapters as adapters_of
from trainverify.nnscaler.claims import problems
from trainverify.nnscaler.dump import Cell, Dump
from trainverify.nnscaler.suspects.kinds import Change, Member, Suspect, after, every, grouped, instead, together


def adapters(dump: Dump) -> Iterator[Suspect]:
    """Adapters that do not make what the plan says that they make."""
    everywhere: dict[tuple[int, bool], dict[int, Cell]] = {}
    for device in dump.devices:
        for cell in adapters_of(dump, device):
            everywhere.setdefault((cell.cid, cell.isfw), {})[device] = cell
    yield from grouped(dump, _orphans(dump))
    trouble: dict[tuple[int, bool], dict[int, str]] = {}
    for p in problems(dump):
        trouble.setdefault((p.use.cell.cid, p.use.cell.isfw), {}).setdefault(p.use.device, p.text)
    for key, members in everywhere.items():
        for device, text in _alone(members):
            trouble.setdefault(key, {}).setdefault(device, text)
        for device, cell in members.items():
            made = {t.tid for t in cell.tensors()} | {t.tid for p in cell.prims for t in p.outputs}
            if not (cell.fused and cell.prims) and any(t.tid not in made for t in cell.results()):
                missing = next(t for t in cell.results() if t.tid not in made)
                trouble.setdefault(key, {}).setdefault(device, f"its prims do not make {missing}")
    for key, places in trouble.items():
        members = everywhere[key]
        better = bridge.mended(members)
        changed = [d for d in places if better is not None and _ends(better[d]) != _ends(members[d])]
        if changed:  # of two ends that do not meet, the one that has to change
            places = {d: places[d] for d in changed}
        mends = [] if better is None else [instead(d, members[d], new) for d, new in better.items()]
        found = tuple(Member(d, members[d], every(dump)) for d in sorted(places))
        yield Suspect(found, places[min(places)], together(mends) if mends else None)


def _ends(cell: Cell) -> list[tuple[int, int]]:
    return [(p.kwargs["src"], p.kwargs["dst"]) for p in cell.prims if p.kind == "MovePrim"]


def _orphans(dump: Dump) -> Iterator[tuple[object, int, Cell, str, Change | None]]:
    """Adapters inside of segments whose forward or backward adapter is not there."""
    for device in dump.devices:
        segments = {s.cell.cid: s.cell for s in dump.sequences[device] if s.cell.kind == "IRSegment"}
        there = {n.cid for s in segments.values() for n in s.nodes}
        for segment in segments.values():
            for cell in segment.nodes:
                if cell.kind != "IRAdapter" or cell.mirror is None or cell.mirror in there:
                    continue
                side = "backward" if cell.isfw else "forward"
                new, other = _conjugate(cell), segments.get(-1 if segment.mirror is None else segment.mirror)
                if new is not None and other is not None:
                    why = f"it is missing: {side} adapter of adapter {cell.cid}"
                    yield why, device, new, why, (other, after(other, new))


def _conjugate(cell: Cell) -> Cell | None:
    """The adapter of the other direction; both show the tensors of the forward one in their prims."""
    if not cell.fused or len(cell.prims) != 1 or cell.mirror is None or not cell.prims[0].inputs or not cell.prims[0].outputs:
        return None
    source, target = cell.prims[0].inputs[0], cell.prims[0].outputs[0]
    if cell.isfw:
        ends = tuple((own or [t])[0].grad or t.grad for own, t in ((cell.results(), target), (cell.tensors(), source)))
    else:
        ends = (source, target)
    if ends[0] is None or ends[1] is None:
        return None
    return replace(cell, cid=cell.mirror, mirror=cell.cid, isfw=not cell.isfw, inputs=(ends[0],), outputs=(ends[1],))


def _alone(members: Mapping[int, Cell]) -> Iterator[tuple[int, str]]:
    """Moves whose other end is not there."""
    ends: dict[int, Counter[tuple[int, int]]] = {d: Counter() for d in members}
    for d, cell in members.items():
        for p in cell.prims:
            if p.kind == "MovePrim":
                ends[d][p.kwargs["src"], p.kwargs["dst"]] += 1
    for d, moves in ends.items():
        for (source, target), count in moves.items():
            other = target if d == source else source
            if d not in (source, target):
                yield d, f"it has a move from {source} to {target}"
            elif ends.get(other, Counter())[source, target] != count:
                yield d, f"device {other} has no such move from {source} to {target}"
