"""Whether regions cover a tensor, at full size and without looking at elements.

A region is one set of positions per dimension, each a union of runs. Positions of a dimension between two
bounds behave alike, so one of each kind is enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from trainverify.graph.lineage import Run

Positions = tuple[Run, ...]
Box = tuple[Positions, ...]
Span = tuple[tuple[int, int], ...]

MOST_INTERVALS: Final = 4_000_000


class TooFine(Exception):
    """Regions of more intervals than can be looked at."""


def plain(start: int, stop: int) -> Positions:
    return (Run(start, stop - start),)


def uncovered(boxes: Iterable[Box], shape: Sequence[int]) -> Span | None:
    """Some positions (a range per dimension) that no box covers, or None."""
    if 0 in shape:
        return None
    return _uncovered(frozenset(boxes), tuple(shape), {})


def _uncovered(boxes: frozenset[Box], shape: tuple[int, ...], known: dict[frozenset[Box], Span | None]) -> Span | None:
    if not boxes:
        return tuple((0, s) for s in shape)
    if not shape:
        return None
    if boxes in known:
        return known[boxes]
    by_first: dict[Positions, set[Box]] = {}
    for box in boxes:
        by_first.setdefault(box[0], set()).add(box[1:])
    rest: dict[frozenset[Positions], tuple[int, int]] = {}  # what is there → where that is first so
    result: Span | None = None
    for active, span in segments(list(by_first), shape[0]):
        rest.setdefault(active, span)
        if not active:
            break
    for active, span in rest.items():
        inner = frozenset(b for p in active for b in by_first[p])
        missing = _uncovered(inner, shape[1:], known)
        if missing is not None:
            result = (span, *missing)
            break
    known[boxes] = result
    return result


def segments(sets: list[Positions], size: int) -> Iterator[tuple[frozenset[Positions], tuple[int, int]]]:
    """[0, size) cut where one of the sets begins or ends; which sets hold each piece. Kinds may repeat."""
    period = _period(sets, size)
    if period is not None:
        size = period
    bounds: dict[int, list[tuple[int, int]]] = {}
    total = 0
    for k, runs in enumerate(sets):
        for run in runs:
            count, block = (1, run.block) if period is not None else (run.count, run.block)
            if period is not None and run.block > period:
                block = period
            total += count
            if total > MOST_INTERVALS:
                raise TooFine(f"more than {MOST_INTERVALS:,} intervals")
            if block:
                for i in range(count):
                    at = run.start + i * run.stride
                    bounds.setdefault(at, []).append((k, 1))
                    bounds.setdefault(at + block, []).append((k, -1))
    depth = [0] * len(sets)
    active: set[int] = set()
    position = 0
    for at in sorted(b for b in bounds if b < size):
        if at > position:
            yield frozenset(sets[k] for k in active), (position, at)
            position = at
        for k, change in bounds[at]:
            depth[k] += change
            if depth[k]:
                active.add(k)
            else:
                active.discard(k)
    if position < size:
        yield frozenset(sets[k] for k in active), (position, size)


def _period(sets: list[Positions], size: int) -> int | None:
    """A period of all sets: strided runs of one stride through the whole dimension, or everything."""
    strided = {(r.count, r.stride) for runs in sets for r in runs if r.count > 1}
    if len(strided) != 1:
        return None
    ((count, stride),) = strided
    fits = all(
        (r.count > 1 and r.start + r.block <= stride) or (r.count == 1 and r.start == 0 and r.block == size) for runs in sets for r in runs
    )
    return stride if fits and count * stride == size else None


def flat(box: Box, shape: Sequence[int]) -> Box:
    """The box as positions of the flattened tensor."""
    inner, dims = 1, list(zip(box, shape, strict=True))
    while dims and _whole(dims[-1][0], dims[-1][1]):
        inner *= dims.pop()[1]
    if not dims:
        return (plain(0, inner),)
    last, size = dims.pop()
    runs = [Run(r.start * inner, r.block * inner, r.count, r.stride * inner) for r in last]
    weight = size * inner
    for positions, length in reversed(dims):
        count = sum(r.size for r in positions)
        if count * len(runs) > MOST_INTERVALS:
            raise TooFine(f"more than {MOST_INTERVALS:,} intervals")
        runs = [Run(p * weight + r.start, r.block, r.count, r.stride) for run in positions for p in map(int, run.positions()) for r in runs]
        weight *= length
    return (tuple(runs),)


def _whole(positions: Positions, size: int) -> bool:
    return any(r.start == 0 and r.count == 1 and r.block >= size for r in positions)


def volume(box: Box) -> int:
    """Elements of a box whose runs do not overlap."""
    return math.prod(sum(r.size for r in positions) for positions in box)


def overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Two boxes of plain ranges that meet, by index."""
    order = sorted(range(len(boxes)), key=lambda i: boxes[i][0][0].start if boxes[i] else 0)
    open_: list[int] = []
    for i in order:
        if not boxes[i]:  # a scalar: any other box meets it
            if open_:
                return open_[0], i
            open_.append(i)
            continue
        start = boxes[i][0][0].start
        open_ = [j for j in open_ if boxes[j][0][0].stop > start]
        for j in open_:
            if all(a[0].start < b[0].stop and b[0].start < a[0].stop for a, b in zip(boxes[i], boxes[j], strict=True)):
                return (j, i) if j < i else (i, j)
        if volume(boxes[i]):
            open_.append(i)
    return None


def show(span: Span) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in span) + "]"
