"""More ranks than are captured: which are, and what the others are assumed to run.

A rank that was not captured is assumed to run the program of captured ranks with its coordinates: the same ops, its own groups, and
integers that are linear in the coordinates. That is an assumption and no proof: the verdict says how many ranks were captured.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import skeleton
from trainverify.graph.program import Op, Value
from trainverify.torch.captured import Captured
from trainverify.torch.collectives import TAGS, group_name, group_number, tag_of
from trainverify.torch.lineage import Axes, NoLineage
from trainverify.translate.groups import bind, joined

ALL_RANKS: Final = 64  # up to so many, every rank is captured
MORE: Final = 8  # ranks by chance, besides those along the axes
MOST_ALONG: Final = 16  # ranks along one axis
FITTING: Final = 0.75  # of the captured ranks must follow the integers that are assumed of others

Coordinates = tuple[int, ...]


class NoSample(Exception):
    """Nothing can be assumed of a rank that was not captured."""


def chosen(mesh: Mesh, most: int = ALL_RANKS, seed: int = 0) -> tuple[int, ...]:
    """The ranks to capture: all, or those along every axis (next to the first two along the others), the last, and some by chance."""
    if mesh.size <= most:
        return tuple(range(mesh.size))
    rng = random.Random(seed)
    along = {name: _along(size, rng) for name, size in mesh.axes}
    found: dict[int, None] = {0: None, mesh.size - 1: None}
    for name in mesh.names:
        others = [range(min(2, mesh.length(n))) if n != name else along[name] for n in mesh.names]
        for where in itertools.product(*others):
            found[mesh.rank(dict(zip(mesh.names, where, strict=True)))] = None
    if len(found) > most - MORE:
        kept = list(found)
        found = dict.fromkeys((*kept[:2], *rng.sample(kept[2:], most - MORE - 2)))
    found |= dict.fromkeys(rng.sample([r for r in range(mesh.size) if r not in found], min(MORE, mesh.size - len(found))))
    return tuple(sorted(found))


def _along(size: int, rng: random.Random) -> list[int]:
    if size <= MOST_ALONG:
        return list(range(size))
    return sorted({0, 1, 2, 3, size // 2, size - 2, size - 1, *rng.sample(range(size), MOST_ALONG - 7)})


def everyone(ranks: Sequence[Captured], mesh: Mesh) -> list[Captured]:
    """All ranks in order: those that were captured, and what the others are assumed to be."""
    if [c.rank for c in ranks] == list(range(mesh.size)):
        return list(ranks)
    return _Sample(ranks, mesh).all()


@dataclass(frozen=True)
class _Kind:
    """Captured ranks that run the same ops."""

    ranks: tuple[Captured, ...]


class _Sample:
    def __init__(self, ranks: Sequence[Captured], mesh: Mesh):
        self.mesh, self.axes = mesh, Axes(mesh)
        self.captured = {c.rank: c for c in ranks if c.rank is not None}
        self.groups = joined(c.groups for c in ranks)
        kinds: dict[Any, list[Captured]] = {}
        for c in ranks:
            kinds.setdefault(skeleton(c.program, self.groups), []).append(c)
        self.kinds = [_Kind(tuple(k)) for k in kinds.values()]
        self._slots: dict[int, list[list[Slot]]] = {}

    def all(self) -> list[Captured]:
        by_where, by = self._deciding()
        found = []
        for rank in range(self.mesh.size):
            if rank in self.captured:
                found.append(self.captured[rank])
                continue
            kind = by_where.get(self._at(rank, by))
            if kind is None:
                raise NoSample(f"rank {rank} was not captured, and no captured rank has its coordinates along {', '.join(by)}")
            found.append(self._made(rank, self.kinds[kind]))
        return found

    def _at(self, rank: int, axes: Iterable[str]) -> Coordinates:
        where = self.mesh.coordinates(rank)
        return tuple(where[a] for a in axes)

    def _deciding(self) -> tuple[dict[Coordinates, int], tuple[str, ...]]:
        """The fewest axes whose coordinates decide which ops a rank runs; a single rank that differs from all others decides nothing."""
        several = [i for i, k in enumerate(self.kinds) if len(k.ranks) > 1]
        missing = [r for r in range(self.mesh.size) if r not in self.captured]
        names = [n for n in self.mesh.names if self.mesh.length(n) > 1]
        last: tuple[dict[Coordinates, int], tuple[str, ...]] = {}, ()
        for which in (range(len(self.kinds)), several):
            for by in itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1)):
                found: dict[Coordinates, set[int]] = {}
                for i in which:
                    for c in self.kinds[i].ranks:
                        found.setdefault(self._at(c.rank or 0, by), set()).add(i)
                if all(len(v) == 1 for v in found.values()):
                    last = {at: min(v) for at, v in found.items()}, by
                    if all(self._at(r, by) in found for r in missing):
                        return last
                    break
        return last

    # -- a rank that was not captured -----------------------------------------------------------------------------------

    def _made(self, rank: int, kind: _Kind) -> Captured:
        first = kind.ranks[0]
        slots = self._slots.get(id(kind))
        if slots is None:
            slots = self._slots[id(kind)] = [
                self._op_slots([c.program.ops[i] for c in kind.ranks], kind) for i in range(len(first.program.ops))
            ]
        groups: dict[str, tuple[int, ...]] = {}
        ops = []
        for op, of in zip(first.program.ops, slots, strict=True):
            pairs = zip(op.attrs, of, strict=True) if of else ()
            ops.append(replace(op, attrs=tuple((k, self._value(s, rank, groups)) for (k, _), s in pairs)) if of else op)
        program = replace(first.program, ops=tuple(ops))
        placed = {n: self._placed(n, kind, rank) for n in first.placed}
        return Captured(program, rank, groups, placed, first.shapes)

    def _op_slots(self, ops: Sequence[Op], kind: _Kind) -> list[Slot]:
        """What every attribute of an op is, as a function of the rank; empty if all ranks have the same."""
        if all(op.attrs == ops[0].attrs for op in ops) and not any(self._is_group(v) for _, v in ops[0].attrs):
            return []
        ranks = [c.rank or 0 for c in kind.ranks]
        return [self._slot(k, [op.attrs[i][1] for op in ops], ranks, ops[0]) for i, (k, _) in enumerate(ops[0].attrs)]

    def _is_group(self, value: Value) -> bool:
        return isinstance(value, str) and value in self.groups

    def _slot(self, name: str, values: Sequence[Value], ranks: Sequence[int], op: Op) -> Slot:
        first = values[0]
        if isinstance(first, tuple):
            items = [v for v in values if isinstance(v, tuple)]
            return tuple(self._slot(name, [v[i] for v in items], ranks, op) for i in range(len(first)))
        if self._is_group(first):
            found = Counter((self._axes_of(self.groups[str(v)]), group_number(str(v))) for v in values)
            (which, count), *_ = found.most_common(1)
            if which[0] is None or count < FITTING * len(values):
                raise NoSample(f"{op.name} ({op.source}): the groups of the captured ranks do not lie along the same axes of {self.mesh}")
            return Along(which[0], which[1])
        if all(v == first for v in values):
            return first
        if name == "tag":
            return self._tag([int(v) for v in values if isinstance(v, int)], op)
        numbers = [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
        return self._linear(numbers, ranks, op, name)

    def _axes_of(self, members: tuple[int, ...]) -> tuple[str, ...] | None:
        try:
            return self.axes.of(members)
        except NoLineage:
            return None

    def _tag(self, values: Sequence[int], op: Op) -> Slot:
        """Tags that tell groups apart."""
        names = {tag_of(n, 0): n for n in self.groups}
        known = [names.get(v - v % TAGS) for v in values]
        found = {(self._axes_of(self.groups[n]), group_number(n), v % TAGS) for n, v in zip(known, values, strict=True) if n is not None}
        along, number, tag = min(found, key=str) if found else (None, 0, 0)
        if None in known or len(found) != 1 or along is None:
            raise NoSample(f"{op.name} ({op.source}): tags of the captured ranks follow no rule")
        return Along(along, number, tag)

    def _linear(self, values: Sequence[int], ranks: Sequence[int], op: Op, name: str) -> Slot:
        """The linear function of the coordinates that most captured ranks follow."""
        at = {r: self.mesh.coordinates(r) for r in ranks}
        by_rank = dict(zip(ranks, values, strict=True))
        slopes: dict[str, int] = {}
        for axis in self.mesh.names:
            steps: Counter[int] = Counter()
            for r in ranks:
                if at[r][axis] + 1 < self.mesh.length(axis):
                    following = self.mesh.moved(r, axis, at[r][axis] + 1)
                    if following in by_rank:
                        steps[by_rank[following] - by_rank[r]] += 1
            slopes[axis] = steps.most_common(1)[0][0] if steps else 0
        bases = Counter(v - sum(k * at[r][a] for a, k in slopes.items()) for r, v in by_rank.items())
        ((base, count),) = bases.most_common(1)
        if count < FITTING * len(values):
            raise NoSample(f"{op.name} ({op.source}): {name} of the captured ranks is not linear in their coordinates")
        return Linear(base, tuple(slopes.items()))

    def _value(self, slot: Slot, rank: int, groups: dict[str, tuple[int, ...]]) -> Value:
        if isinstance(slot, tuple):
            return tuple(self._value(s, rank, groups) for s in slot)
        if isinstance(slot, Linear):
            where = self.mesh.coordinates(rank)
            return slot.base + sum(k * where[a] for a, k in slot.slopes)
        if isinstance(slot, Along):
            members = self.mesh.group(rank, slot.axes)
            name = group_name(members, slot.number)
            if slot.tag is not None:
                return tag_of(name, slot.tag)
            return bind(groups, name, members)
        same: Value = slot
        return same

    def _placed(self, name: str, kind: _Kind, rank: int) -> dict[str, Any]:
        """How a tensor lies on a rank: as on the captured ones, along its own groups."""
        said = [c.placed.get(name) for c in kind.ranks]
        if said[0] is not None and "pattern" in said[0] and all(s == said[0] for s in said):
            return said[0]
        if any(s is not None and "axes" not in s for s in said):
            raise NoSample(f"{name} lies on every captured rank in a way of its own")
        shown = {tuple((self._axes_of(tuple(ranks)), text) for ranks, text in s["axes"]) for s in said if s is not None}
        if len(shown) != 1 or None in said or any(a is None for a, _ in next(iter(shown))):
            raise NoSample(f"{name} does not lie on all captured ranks in the same way")
        (only,) = shown
        first = said[0]
        assert first is not None
        return {"shape": first["shape"], "axes": [[list(self.mesh.group(rank, axes or ())), text] for axes, text in only]}


@dataclass(frozen=True)
class Linear:
    """base + Σ slope · coordinate."""

    base: int
    slopes: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Along:
    """The rank's own group along some axes, by its name; or the tag of its messages."""

    axes: tuple[str, ...]
    number: int = 0
    tag: int | None = None


Slot = Any  # a value that all ranks have, Linear, Along, or a tuple of these


def assumption(captured: int, world: int) -> str:
    return (
        f"{world - captured} of {world} ranks were not captured: each is assumed to run what captured ranks with its coordinates run, "
        "with groups of its own and integers that follow theirs"
    )
