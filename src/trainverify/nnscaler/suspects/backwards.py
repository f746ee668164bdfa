"""Backward operations that are not the derivatives of their forward operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from trainverify.nnscaler.dump import OPERATIONS, Cell, Dump, Slice
from trainverify.nnscaler.suspects.kinds import Change, Suspect, after, grouped


def backwards(dump: Dump) -> Iterator[Suspect]:
    """Gradients that are listed twice or not at all; operations that are never differentiated, or twice."""
    found: list[tuple[object, int, Cell, str, Change | None]] = []
    for device in dump.devices:
        segments = {id(s.cell): s.cell for s in dump.sequences[device] if s.cell.kind == "IRSegment"}.values()
        there = {s.cid: s for s in segments if s.isfw}
        for segment in segments:
            if not segment.isfw and segment.mirror in there:
                ahead = {n.cid: n for n in there[segment.mirror].nodes if n.kind in OPERATIONS}
                found += ((key, device, *rest) for key, *rest in _passes(segment, ahead))  # type: ignore[misc]
    yield from grouped(dump, found)


def _passes(segment: Cell, ahead: Mapping[int, Cell]) -> Iterator[tuple[object, Cell, str, Change | None]]:
    """What is wrong with the operations of a backward segment."""
    seen: list[int | None] = []
    for cell in (n for n in segment.nodes if n.kind == "IRBpOperation"):
        better = _canonical(cell, None if cell.mirror is None else ahead.get(cell.mirror), ahead)
        meant = cell.mirror if better is None else better.mirror
        if meant in seen:
            why = f"cell {meant} is differentiated a second time"
            yield why, cell, why, (segment, replace(segment, nodes=tuple(n for n in segment.nodes if n is not cell)))
        elif better is not None:
            why, new = _gradients(cell, better)
            yield _base(better), cell, why, None if new is None else (cell, new)
        seen.append(meant)
    for number, mirror in ahead.items():
        grads = [t for t in mirror.results() if t.grad is not None]
        if grads and number not in seen and any(t.grad is not None for t in mirror.tensors()):
            new, whole = _inserted(segment, mirror)
            why = f"cell {number} ({mirror.signature}) is never differentiated"
            yield why, new, why, (segment, whole)


def _base(cell: Cell) -> object:
    return tuple(t.full.tid for t in cell.tensors())


def _canonical(cell: Cell, mirror: Cell | None, ahead: Mapping[int, Cell]) -> Cell | None:
    """A backward operation as its forward operation wants it; None if it is that, in whatever order."""
    if mirror is not None:
        wanted = _derivative(mirror)
        if all(
            Counter(t.tid for t in a) == Counter(t.tid for t in b) for a, b in zip(wanted, (cell.tensors(), cell.results()), strict=True)
        ):
            return None
        shared = {t.tid for t in wanted[0]} & {t.tid for t in cell.tensors()} or {t.tid for t in wanted[1]} & {
            t.tid for t in cell.results()
        }
        if shared:
            return replace(cell, inputs=tuple(wanted[0]), outputs=tuple(wanted[1]))
    own = {t.tid for t in cell.tensors()}
    for other in ahead.values():  # its gradients are those of another operation
        wanted = _derivative(other)
        if own and own == {t.tid for t in wanted[0]}:
            return replace(cell, mirror=other.cid, inputs=tuple(wanted[0]), outputs=tuple(wanted[1]))
    return cell


def _derivative(mirror: Cell) -> tuple[list[Slice], list[Slice]]:
    taken = [t.grad for t in mirror.results() if t.grad is not None]
    made = {t.grad.tid: t.grad for t in mirror.tensors() if t.grad is not None}
    return taken, list(made.values())


def _gradients(cell: Cell, better: Cell) -> tuple[str, Cell | None]:
    if cell.mirror != better.mirror:
        return f"it differentiates cell {cell.mirror}, its gradients are those of cell {better.mirror}", better
    for what, own, other in (("takes", cell.tensors(), better.tensors()), ("makes", cell.results(), better.results())):
        counts, wanted = Counter(t.tid for t in own), Counter(t.tid for t in other)
        for t in (*own, *other):
            if counts[t.tid] != wanted[t.tid]:
                return f"it {what} {t} (tensor {t.tid}) {counts[t.tid]} times, expected {wanted[t.tid]}", better
    return f"forward cell {cell.mirror} is not on this device", None


def _inserted(segment: Cell, mirror: Cell) -> tuple[Cell, Cell]:
    """The backward operation that is missing, and the segment with it, as early as its gradients are there."""
    taken, made = _derivative(mirror)
    new = replace(
        mirror, kind="IRBpOperation", isfw=False, inputs=tuple(taken), outputs=tuple(made), mirror=mirror.cid, cid=-mirror.cid - 1
    )
    return new, after(segment, new)
