"""Which ranks of a large plan are evaluated: some coordinates of every mesh axis, so that every sort of rank is among them.

Coordinates along an axis are alike if ranks that differ by them only behave alike; two or more of each sort stay, and ranks
whose integers are out of line. Groups then have fewer members, and sizes that count devices shrink with them, in both programs.
An axis that tensors cut into digits (ZeRO shards that cross heads) keeps some values of every digit. Rows that are sorted get
shorter too, and what is chosen from them fewer (`choices`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from trainverify.axes.structure import Axis
from trainverify.axes.system import System
from trainverify.domains.arrays import Array
from trainverify.evaluate.apart import Apart, Left
from trainverify.evaluate.choices import LEAST, Row, agreed, grown, pieces, rows

RANKS: Final = 64  # up to which all are evaluated
_OF_A_SORT: Final = 2


@dataclass(frozen=True)
class Sample:
    """What is left of a plan."""

    mesh: Mapping[str, tuple[tuple[int, ...], ...]]  # axis that loses some → for every digit of it, slow first, the values that stay
    axes: Left  # that lose positions

    def __bool__(self) -> bool:
        return bool(self.axes)

    def ranks(self, system: System) -> frozenset[int]:
        return ranks(system, {a: frozenset(Digits.of(system, a).coordinates(c)) for a, c in self.mesh.items()})


ALL: Final = Sample({}, ())


def sampled(system: System, also: Collection[int] = (), above: int = RANKS, of_a_sort: int = _OF_A_SORT) -> Sample:
    """What stays of a plan with more ranks than `above`: so many of each sort; the ranks in `also` are among those evaluated."""
    mesh = system.plan.mesh
    if mesh.size <= above:
        return ALL
    others = [r for found in (*out_of_line(system), *singled_out(system)) for r in found[:_OF_A_SORT]]
    odd = [mesh.coordinates(r) for r in (*also, *others)]
    apart = Apart(system)
    return _chosen(apart, odd, rows(system), of_a_sort) or _chosen(apart, odd, [], of_a_sort) or ALL


def _chosen(apart: Apart, odd: Sequence[Mapping[str, int]], sorts: Sequence[Row], of_a_sort: int) -> Sample | None:
    """A sample with these rows shorter; None if that is not possible."""
    system = apart.system
    mesh = system.plan.mesh
    digits = {a: Digits.of(system, a).known(apart, a, sorts) for a in mesh.names}
    mine = {id(x) for d in digits.values() for x in d.leaves}
    least = {id(x): _least(apart, x) for row in sorts for x in row.digits if id(x) not in mine}
    chosen = {a: d.product([*_sorts(system, a, d, of_a_sort), *(d.split(at[a]) for at in odd)]) for a, d in digits.items()}
    changed = True
    while changed:
        changed = False
        there = {a: digits[a].coordinates(c) for a, c in chosen.items()}
        for axis, needed in itertools.chain(_needed(system, digits, there), _longer(digits, chosen, sorts, least)):
            d = digits[axis]
            more = d.product([chosen[axis], tuple(range(n) for n in d.sizes) if needed is None else needed])
            if more != chosen[axis]:
                chosen[axis] = more
                changed = True
    left = {a: c for a, c in chosen.items() if math.prod(map(len, c)) < mesh.length(a)}
    axes = {id(x): (x, c) for a in left for x, c in zip(digits[a].leaves, left[a], strict=True) if len(c) < x.size}
    shorter = _shorter(system, _counts(digits, chosen), sorts, least)
    if shorter is None:
        return None
    found = Sample(left, (*axes.values(), *shorter))
    return found if not shorter or apart.free(found.axes, found.ranks(system)) else None


def _counts(digits: Mapping[str, Digits], chosen: Mapping[str, Sequence[Sequence[int]]]) -> dict[int, int]:
    """How many values of the digits of mesh axes stay."""
    return {id(x): len(c) for a, d in digits.items() for x, c in zip(d.leaves, chosen[a], strict=True)}


def _longer(
    digits: Mapping[str, Digits], chosen: Mapping[str, Sequence[Sequence[int]]], sorts: Sequence[Row], least: Mapping[int, int]
) -> Iterator[tuple[str, list[Sequence[int]]]]:
    """(axis, values of its digits) without which a row would be too short for what is chosen from it."""
    wanted = grown(sorts, _counts(digits, chosen), least)
    for a, d in digits.items():
        for n, (x, there) in enumerate(zip(d.leaves, chosen[a], strict=True)):
            missing = wanted.get(id(x), 0) - len(there)
            if missing > 0:
                more = [i for i in range(x.size) if i not in there][:missing]
                yield a, [more if m == n else () for m in range(len(d.leaves))]


def _least(apart: Apart, leaf: Axis) -> int:
    """How many positions a digit of a row has at least, where no mesh axis says so."""
    few = min(leaf.size, LEAST + 1)  # more than are chosen from one group
    return few if apart.free([(leaf, tuple(range(few)))], sorts=False) else leaf.size


def _shorter(system: System, counts: Mapping[int, int], sorts: Sequence[Row], least: Mapping[int, int]) -> Left | None:
    """What is left of the rows that are sorted, besides digits of mesh axes; None if that does not fit together."""
    wanted = grown(sorts, counts, least)
    found = [(x, wanted[id(x)]) for row in sorts for x in row.digits if id(x) not in counts]
    for row in sorts:
        size = math.prod(wanted[id(x)] for x in row.digits)
        cut = pieces(system.inference.axes, row, size) if size < row.size else []
        if cut is None or any(id(x) in counts for x, _ in cut):
            return None
        found += cut
    return agreed(found)


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

    def known(self, apart: Apart, axis: str, sorts: Sequence[Row]) -> Digits:
        """The same, and which digits are free, if these rows can be shorter."""
        known = {}
        for x in self.leaves:
            kept = self.coordinates([(0,) if y is x else range(y.size) for y in self.leaves])
            known[id(x)] = apart.free([(x, (0,))], ranks(apart.system, {axis: frozenset(kept)}), sorts=not sorts)
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


def ranks(system: System, kept: Mapping[str, Collection[int]]) -> frozenset[int]:
    """The ranks at these coordinates."""
    mesh = system.plan.mesh
    return frozenset(r for r in range(mesh.size) if all(mesh.coordinates(r)[a] in c for a, c in kept.items()))


def _sorts(system: System, axis: str, digits: Digits, of_a_sort: int) -> list[tuple[tuple[int, ...], ...]]:
    """Digits with which so many coordinates of every sort stay, if there are as many."""
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
        first = digits.split(cs[0])
        for at in (cs[-1], *cs[1:-1]):
            if len(there.intersection(cs)) >= min(of_a_sort, len(cs)):
                break
            more = digits.split(at)  # one more, that differs in few digits
            n = next(n for n in range(len(first)) if first[n] != more[n])
            found.append((*first[:n], more[n], *first[n + 1 :]))
            there = set(digits.coordinates(digits.product(found)))
    return found


def out_of_line(system: System) -> list[list[int]]:
    """For every integer that ranks have, those whose own does not follow from their coordinates as that of the others does."""
    mesh, found = system.plan.mesh, []
    for unit in system.talk.units:
        at = np.asarray([tuple(mesh.coordinates(r).values()) for r in unit.ranks])
        for column in {c for c in unit.bindings.values() if all(type(v) is int for v in c)}:
            wrong = np.flatnonzero(predicted(at, np.asarray(column)) != np.asarray(column))
            found.append([unit.ranks[i] for i in wrong])
    return found


def singled_out(system: System) -> list[list[int]]:
    """Ranks of which something is said, or wanted, that is not said of others of their sort."""
    found = []
    for holders in {frozenset(ranks) for _, ranks in system.holdings()}:
        mine = [holders.intersection(k.ranks) for k in system.schedule.classes]
        found += [sorted(some) for some, k in zip(mine, system.schedule.classes, strict=True) if 0 < len(some) < len(k.ranks)]
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


def _needed(
    system: System, digits: Mapping[str, Digits], kept: Mapping[str, Collection[int]]
) -> Iterator[tuple[str, Sequence[Sequence[int]] | None]]:
    """(axis, digits of a coordinate) that the ranks which stay talk to; None for all of them."""
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
                        yield from ((a, digits[a].split(at)) for a, at in mesh.coordinates(other).items())
                if meeting.lowered is not None and meeting.mesh_axes is None:
                    at = [mesh.coordinates(m) for m in talk.groups[str(talk.value(r, op.get("group")))]]
                    yield from ((a, None) for a in mesh.names if len({x[a] for x in at}) > 1)
