"""Which ranks of a large plan are evaluated: some coordinates of every mesh axis, so that every sort of rank is among them.

Coordinates along an axis are alike if ranks that differ by them only behave alike; two or more of each sort stay, and ranks
whose integers are out of line. Groups then have fewer members, and sizes that count devices shrink with them, in both programs.
An axis that tensors cut into digits (ZeRO shards that cross heads) keeps some values of every digit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from trainverify.axes.reduction import NotABoundary, Sizes
from trainverify.axes.shrink import alike, shrink
from trainverify.axes.structure import Axis
from trainverify.axes.system import System
from trainverify.domains.arrays import Array
from trainverify.primitives.node import topological

RANKS: Final = 64  # up to which all are evaluated
_OF_A_SORT: Final = 2
_FULL: Final = 1 << 60  # nothing larger than this shrinks
_TAKES_APART: Final = ("slice", "concat", "pad", "iota", "one_hot", "reshape", "rowwise", "map")

Kept = dict[str, tuple[tuple[int, ...], ...]]  # mesh axis → for every digit of it, slow first, the values that stay


def sampled(system: System, also: Collection[int] = ()) -> Kept:
    """Digits that stay, for every axis that loses some; the ranks in `also` are among those evaluated."""
    mesh = system.plan.mesh
    if mesh.size <= RANKS:
        return {}
    digits = {a: Digits.of(system, a).known(system, a) for a in mesh.names}
    odd = [mesh.coordinates(r) for r in (*also, *_odd(system))]
    chosen = {a: d.product([*_sorts(system, a, d), *(d.split(at[a]) for at in odd)]) for a, d in digits.items()}
    changed = True
    while changed:
        changed = False
        for axis, needed in _needed(system, {a: digits[a].coordinates(c) for a, c in chosen.items()}):
            d = digits[axis]
            more = d.product([chosen[axis], tuple(range(n) for n in d.sizes) if needed is None else d.split(needed)])
            if more != chosen[axis]:
                chosen[axis] = more
                changed = True
    return {a: c for a, c in chosen.items() if math.prod(map(len, c)) < mesh.length(a)}


@dataclass(frozen=True)
class Digits:
    """What a mesh axis is made of: the tensors that are cut along it may have cut it into several axes, some of them the same."""

    leaves: tuple[Axis, ...]  # slow first
    free: frozenset[int] = frozenset()  # digits of which some values can be left out

    @staticmethod
    def of(system: System, axis: str) -> Digits:
        return Digits(tuple(system.inference.axes.leaves([system.inference.mesh_axis(system.plan.mesh, axis)])))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(x.size for x in self.leaves)

    def known(self, system: System, axis: str) -> Digits:
        """The same, and which digits are free."""
        known = {id(x): _free(system, axis, self, x) for x in self.leaves}
        return replace(self, free=frozenset(n for n, x in enumerate(self.leaves) if known[id(x)]))

    def split(self, at: int) -> tuple[tuple[int, ...], ...]:
        found: list[tuple[int, ...]] = []
        for size in reversed(self.sizes):
            at, digit = divmod(at, size)
            found.append((digit,))
        return tuple(reversed(found))

    def product(self, several: Iterable[Sequence[Iterable[int]]]) -> tuple[tuple[int, ...], ...]:
        """All digits that occur; those of one axis are the same wherever it is."""
        found: dict[int, set[int]] = {}
        for n, x in enumerate(self.leaves):
            known = found.setdefault(id(x), set())
            known.update(() if n in self.free else range(x.size))
        for digits in several:
            for x, more in zip(self.leaves, digits, strict=True):
                found[id(x)].update(more)
        return tuple(tuple(sorted(found[id(x)])) for x in self.leaves)

    def coordinates(self, kept: Sequence[Sequence[int]]) -> tuple[int, ...]:
        found = [0]
        for size, digits in zip(self.sizes, kept, strict=True):
            found = [x * size + d for x in found for d in digits]
        return tuple(found)


def coordinates(system: System, kept: Kept) -> dict[str, frozenset[int]]:
    """Coordinates that stay, by axis."""
    return {a: frozenset(Digits.of(system, a).coordinates(c)) for a, c in kept.items()}


def _free(system: System, axis: str, digits: Digits, leaf: Axis) -> bool:
    """Whether no op takes apart or puts together the positions of a digit (the halves of a rotated vector)."""
    if leaf.pieces is not None or leaf.frozen:
        return False
    sizes = Sizes(system.inference.axes, system.inference.all, base=leaf.size + _FULL, kept=[(leaf, (0,))])
    kept = digits.coordinates([(0,) if x is leaf else range(x.size) for x in digits.leaves])
    there = ranks(system, {axis: frozenset(kept)})
    prims: dict[int, bool] = {}
    seen: set[object] = set()
    for u, found in enumerate((system.logical_ops, *system.unit_ops)):
        here = None if u == 0 else frozenset(row for row, r in enumerate(system.talk.units[u - 1].ranks) if r in there)
        for x in found:
            key = id(x.lowered)
            if key not in prims:
                prims[key] = any(n.prim in _TAKES_APART for n in topological(x.lowered.outputs))
            if not prims[key] or id(x.axes) in seen or (here is not None and here.isdisjoint(x.rows)):
                continue
            seen.add(id(x.axes))
            if alike(x.lowered, x.axes) in seen or all(sizes(a) == a.size for dims in x.axes.dims.values() for a in dims):
                continue
            seen.add(alike(x.lowered, x.axes))
            try:
                shrink(x.lowered.outputs, x.axes, sizes)
            except NotABoundary:
                return False
    return True


def ranks(system: System, kept: Mapping[str, Collection[int]]) -> frozenset[int]:
    """The ranks at these coordinates."""
    mesh = system.plan.mesh
    return frozenset(r for r in range(mesh.size) if all(mesh.coordinates(r)[a] in c for a, c in kept.items()))


def _sorts(system: System, axis: str, digits: Digits) -> list[tuple[tuple[int, ...], ...]]:
    """Digits with which two coordinates of every sort stay, if there are two."""
    mesh = system.plan.mesh
    class_of = {r: i for i, k in enumerate(system.schedule.classes) for r in k.ranks}
    seen: dict[int, list[int | None]] = {c: [] for c in range(mesh.length(axis))}
    for r in range(mesh.size):  # ranks in order: equal places of two lists differ along the axis only
        seen[mesh.coordinates(r)[axis]].append(class_of.get(r))
    alike: dict[tuple[int | None, ...], list[int]] = {}
    for c, classes in seen.items():
        alike.setdefault(tuple(classes), []).append(c)
    firsts = digits.product(digits.split(cs[0]) for cs in alike.values())
    there = set(digits.coordinates(firsts))
    found = [firsts]
    for cs in alike.values():
        if len(cs) > 1 and len(there.intersection(cs)) < _OF_A_SORT:  # one more, that differs in few digits
            first, last = digits.split(cs[0]), digits.split(cs[-1])
            n = next(n for n in range(len(first)) if first[n] != last[n])
            found.append((*first[:n], last[n], *first[n + 1 :]))
    return found


def _odd(system: System) -> list[int]:
    """Ranks whose integers do not follow from their coordinates as those of the others do."""
    mesh, found = system.plan.mesh, []
    for unit in system.talk.units:
        at = np.asarray([tuple(mesh.coordinates(r).values()) for r in unit.ranks])
        for column in {c for c in unit.bindings.values() if all(type(v) is int for v in c)}:
            wrong = np.flatnonzero(predicted(at, np.asarray(column)) != np.asarray(column))
            found += [unit.ranks[i] for i in wrong[:_OF_A_SORT]]
    return found


def predicted(at: Array, values: Array) -> Array:
    """What most of the values say that the others are, if they are linear in the coordinates."""
    whole = values.copy()
    for d in range(at.shape[1]):
        order = np.lexsort((at[:, d], *(at[:, e] for e in range(at.shape[1]) if e != d)))
        next_to = np.flatnonzero((np.abs(np.diff(at[order], axis=0)).sum(1) == 1) & (np.diff(at[order, d]) == 1))
        if next_to.size:
            steps, counts = np.unique(np.diff(values[order])[next_to], return_counts=True)
            whole = whole - steps[counts.argmax()] * at[:, d]
    starts, counts = np.unique(whole, return_counts=True)
    return values - whole + starts[counts.argmax()]


def _needed(system: System, kept: Mapping[str, Collection[int]]) -> Iterator[tuple[str, int | None]]:
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
