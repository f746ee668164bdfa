"""Forward operations that differ from those of the plan for one device: another function, constant or argument."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from trainverify.check.findings import names
from trainverify.nnscaler.dump import OPERATIONS, Cell, Dump, Slice
from trainverify.nnscaler.edit import cells
from trainverify.nnscaler.suspects.kinds import Change, Suspect, after, grouped

_INSERTED: Final = ("nnscaler.runtime.function.multiref", "nnscaler.runtime.function.identity")  # by nnScaler, as a plan needs them


def _key(cell: Cell) -> tuple[str, str, str]:
    """How an operation of a plan and that of the plan for one device are known to be the same."""
    return cell.results()[0].full.name, cell.comment, cell.module


def _forward(dump: Dump, device: int) -> Iterator[Cell]:
    return (c for c in cells(dump, device) if c.kind in OPERATIONS and c.results() and c.signature not in _INSERTED)


def operations(logical: Dump, dump: Dump) -> Iterator[Suspect]:
    """Another function, constant or argument than on one device."""
    known: dict[object, list[Cell]] = {}
    for c in _forward(logical, 0):
        known.setdefault(_key(c), []).append(c)
    siblings: dict[int, list[Cell]] = {}
    for device in dump.devices:
        for c in (c for c in cells(dump, device) if c.kind in OPERATIONS and c.results()):
            siblings.setdefault(c.results()[0].full.tid, []).append(c)
    found = []
    for device in dump.devices:
        for cell in _forward(dump, device):
            there = known.get(_key(cell), [])
            made = _unlike(cell, there[0], dump, device) if len(there) == 1 else _stranger(cell, siblings) if not there else None
            if made is not None:
                why, better = made
                found.append((cell.results()[0].full.tid, device, cell, why, None if better is None else (cell, better)))
    yield from grouped(dump, found)
    yield from grouped(dump, _lost(dump, siblings))


def _lost(dump: Dump, siblings: Mapping[int, list[Cell]]) -> Iterator[tuple[object, int, Cell, str, Change | None]]:
    """Tensors of a forward segment that nothing makes: the operation that makes them on other devices is missing."""
    for device in dump.devices:
        for segment in {id(s.cell): s.cell for s in dump.sequences[device] if s.cell.kind == "IRSegment" and s.cell.isfw}.values():
            made = {t.tid for n in segment.nodes for t in n.results()} | {t.tid for t in segment.tensors()}
            for t in dict.fromkeys(t for n in segment.nodes for t in n.tensors() if t.tid not in made and not t.full.weight):
                other = next((c for c in siblings.get(t.full.tid, ()) if t.tid in {r.tid for r in c.results()}), None)
                if other is not None:
                    why = f"it is missing: nothing makes {t}"
                    yield why, device, other, why, (segment, after(segment, other))
                    break


def _stranger(cell: Cell, siblings: Mapping[int, list[Cell]]) -> tuple[str, Cell | None] | None:
    """An operation that is not there on one device, and that nnScaler does not insert: on other devices it is something else."""
    for other in siblings[cell.results()[0].full.tid]:
        if other.signature in _INSERTED and len(other.inputs) == len(cell.inputs):
            why = f"it is {cell.signature}, on other devices {other.signature}"
            return why, replace(cell, signature=other.signature, name=other.name, kwargs=other.kwargs)
    return None


def _unlike(cell: Cell, other: Cell, dump: Dump, device: int) -> tuple[str, Cell | None] | None:
    """What differs, and the cell without that."""
    if cell.signature != other.signature:
        better = replace(cell, signature=other.signature, name=other.name) if len(cell.inputs) == len(other.inputs) else None
        return f"it is {cell.signature}, on one device {other.signature}", better
    if len(cell.inputs) != len(other.inputs):
        return f"it has {len(cell.inputs)} arguments, on one device {len(other.inputs)}", None
    inputs = list(cell.inputs)
    tensors, wanted_names = cell.tensors(), [t.full.name for t in other.tensors()]
    if [t.full.name for t in tensors] != wanted_names and sorted(t.full.name for t in tensors) == sorted(wanted_names):
        byname = {t.full.name: t for t in tensors}
        right = tuple(byname[b.full.name] if isinstance(b, Slice) else b for b in other.inputs)
        return f"its arguments are {names(t.full.name for t in tensors)}, on one device {names(wanted_names)}", replace(cell, inputs=right)
    for i, (a, b) in enumerate(zip(cell.inputs, other.inputs, strict=True)):
        if isinstance(a, Slice) and isinstance(b, Slice):
            if a.full.name != b.full.name:
                better = _argument(cell, i, b.full.name, dump, device)
                return f"argument {i + 1} is {a.full.name}, on one device {b.full.name}", better
        elif isinstance(a, Slice) or isinstance(b, Slice):
            return f"argument {i + 1} is {_shown(a)}, on one device {_shown(b)}", None
        elif a != b:
            inputs[i] = b
            return f"argument {i + 1} is {_shown(a)}, on one device {_shown(b)}", replace(cell, inputs=tuple(inputs))
    wanted = _wanted(cell, other)
    for key in sorted({*cell.kwargs, *wanted}, key=str):
        a, b = cell.kwargs.get(key), wanted.get(key)
        if a != b and not isinstance(a, Slice) and not isinstance(b, Slice):
            return f"{key} is {_shown(a)}, expected {_shown(b)}", replace(cell, kwargs={**cell.kwargs, key: b})
    return None


def _shown(value: Any) -> str:
    return value.full.name if isinstance(value, Slice) else str(list(value)) if isinstance(value, tuple) else str(value)


def _wanted(cell: Cell, other: Cell) -> dict[str, Any]:
    """The keyword arguments of an operation: as on one device, but those that say which part of its tensors a device has."""
    wanted = dict(other.kwargs)
    tensors = cell.tensors()
    shape = cell.results()[0].shape
    for key in ("size", "shape"):
        given = cell.kwargs.get(key)
        if isinstance(wanted.get(key), tuple) and isinstance(given, tuple):
            wanted[key] = tuple(b if a == b == -1 else n for a, b, n in zip(given, wanted[key], shape, strict=False))
    for first, last, at in (("start", "stop", 1), ("local_expert_start", "local_expert_end", 3)):
        if first in cell.kwargs and last in cell.kwargs and len(tensors) > at:
            wanted[first], wanted[last] = tensors[at].indmap[0]
    return wanted


def _argument(cell: Cell, at: int, name: str, dump: Dump, device: int) -> Cell | None:
    """The cell with another tensor as argument: one of that name on the device, with a gradient that the backward operation makes."""
    backward = {t.tid for c in cells(dump, device) if c.kind == "IRBpOperation" and c.mirror == cell.cid for t in c.results()}
    for c in cells(dump, device):
        for t in (*c.tensors(), *c.results()):
            fits = t.full.name == name and t.shape == cell.inputs[at].shape
            if fits and (t.grad is None or t.grad.tid in backward) and (t.grad is not None or not backward):
                return replace(cell, inputs=(*cell.inputs[:at], t, *cell.inputs[at + 1 :]))
    return None
