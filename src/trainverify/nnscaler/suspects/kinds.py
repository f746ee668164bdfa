"""What a suspect is, and how to mend a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from trainverify.nnscaler.dump import Cell, Dump
from trainverify.nnscaler.edit import replaced

Mend = Callable[[Dump], Dump]


@dataclass(frozen=True)
class Member:
    """A cell on a device, in some micro-batches. None for a cell that should be there and is not."""

    device: int
    cell: Cell | None
    micros: tuple[int, ...]


@dataclass(frozen=True)
class Suspect:
    members: tuple[Member, ...]
    why: str
    mend: Mend | None = None
    weights: tuple[str, ...] = ()  # whose gradients are wrong, if that is all there is to see


def every(dump: Dump) -> tuple[int, ...]:
    return tuple(range(dump.microbatches))


def together(mends: Iterable[Mend]) -> Mend:
    listed = list(mends)

    def mend(dump: Dump) -> Dump:
        for m in listed:
            dump = m(dump)
        return dump

    return mend


def instead(device: int, old: Cell, new: Cell) -> Mend:
    return lambda dump: replaced(dump, device, old, new)


Change = tuple[Cell, Cell]  # an old cell and the new one


def grouped(dump: Dump, found: Iterable[tuple[object, int, Cell, str, Change | None]]) -> Iterator[Suspect]:
    """Cells with the same trouble on several devices are one suspect: (what they have in common, device, cell, why, how to mend it)."""
    groups: dict[object, list[tuple[int, Cell, str, Change | None]]] = {}
    for key, device, cell, why, better in found:
        groups.setdefault((key, why), []).append((device, cell, why, better))
    for group in groups.values():
        mends = [instead(d, *better) for d, _, _, better in group if better is not None]
        members = tuple(Member(d, c, every(dump)) for d, c, _, _ in group)
        yield Suspect(members, group[0][2], together(mends) if len(mends) == len(group) else None)


def after(segment: Cell, new: Cell) -> Cell:
    """A segment with one more node, after those that make what it takes."""
    ids = {t.tid for t in new.tensors()}
    places = [i for i, n in enumerate(segment.nodes) if ids & {t.tid for t in n.results()}]
    at = places[-1] + 1 if places else 0
    return replace(segment, nodes=(*segment.nodes[:at], new, *segment.nodes[at:]))
