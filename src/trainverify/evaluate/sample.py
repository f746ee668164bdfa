"""Which ranks of a large plan are evaluated: some coordinates of every mesh axis, so that every sort of rank is among them.

Coordinates along an axis are alike if ranks that differ by them only behave alike; two of each sort stay. Groups then
have fewer members, and sizes that count devices shrink with them, in both programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trainverify.axes.system import System

RANKS: Final = 64  # up to which all are evaluated
_OF_A_SORT: Final = 2

Kept = dict[str, tuple[int, ...]]  # mesh axis → coordinates that stay


def sampled(system: System) -> Kept:
    """Coordinates that stay, for every axis that loses some."""
    mesh = system.plan.mesh
    if mesh.size <= RANKS:
        return {}
    kept = {a: _sorts(system, a) for a in mesh.names}
    changed = True
    while changed:
        changed = False
        for axis, needed in _needed(system, kept):
            missing = (set(range(mesh.length(axis))) if needed is None else {needed}) - set(kept[axis])
            if missing:
                kept[axis] = tuple(sorted({*kept[axis], *missing}))
                changed = True
    return {a: c for a, c in kept.items() if len(c) < mesh.length(a)}


def ranks(system: System, kept: Kept) -> frozenset[int]:
    """The ranks at these coordinates."""
    mesh = system.plan.mesh
    return frozenset(r for r in range(mesh.size) if all(mesh.coordinates(r)[a] in c for a, c in kept.items()))


def _sorts(system: System, axis: str) -> tuple[int, ...]:
    """Coordinates of an axis: the first and the last of every sort."""
    mesh = system.plan.mesh
    if len(system.inference.axes.leaves([system.inference.mesh_axis(mesh, axis)])) != 1:
        return tuple(range(mesh.length(axis)))
    class_of = {r: i for i, k in enumerate(system.schedule.classes) for r in k.ranks}
    seen: dict[int, list[int | None]] = {c: [] for c in range(mesh.length(axis))}
    for r in range(mesh.size):  # ranks in order: equal places of two lists differ along the axis only
        seen[mesh.coordinates(r)[axis]].append(class_of.get(r))
    alike: dict[tuple[int | None, ...], list[int]] = {}
    for c, classes in seen.items():
        alike.setdefault(tuple(classes), []).append(c)
    return tuple(sorted(c for cs in alike.values() for c in {cs[0], cs[-1]}))


def _needed(system: System, kept: Kept) -> Iterator[tuple[str, int | None]]:
    """(axis, coordinate) that the ranks which stay talk to; None for all of them."""
    mesh, talk = system.plan.mesh, system.talk
    there = ranks(system, kept)
    seen: set[object] = set()
    for meeting in system.meetings:
        for c, op in meeting.ops:
            key = (c, op.get("peer"), op.get("root"), op.get("group"))
            if key in seen:
                continue
            seen.add(key)
            for r in system.schedule.classes[c].ranks:
                if r not in there:
                    continue
                others = [talk.value(r, op.get(name)) for name in ("peer", "root") if op.get(name) is not None]
                for other in others:
                    if isinstance(other, int):
                        yield from mesh.coordinates(other).items()
                if meeting.lowered is not None and meeting.mesh_axes is None:
                    at = [mesh.coordinates(m) for m in talk.groups[str(talk.value(r, op.get("group")))]]
                    yield from ((a, None) for a in mesh.names if len({x[a] for x in at}) > 1)
