"""Folding ranks: a class of ranks becomes a few instances, each over whole mesh axes.

An axis is folded for a class when the class has every coordinate on it and nothing it does depends on the coordinate
in a way that is not a formula: groups run along whole mesh axes in rank order, peers differ along other axes only,
numbers are linear in the coordinates. Every rank is checked. Axes that are not folded are enumerated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainverify.axes.system import System
from trainverify.graph.communication import Event
from trainverify.graph.lineage import Parts, Placements, Shard
from trainverify.graph.linear import uneven
from trainverify.graph.mesh import Mesh
from trainverify.graph.program import Ref


@dataclass(frozen=True)
class Instance:
    """Ranks of one class that are treated as one: `fixed` coordinates, all values of the `folded` axes."""

    class_index: int
    fixed: tuple[tuple[str, int], ...]
    folded: tuple[str, ...]
    rank: int  # the one with coordinate 0 on every folded axis

    def at(self) -> dict[str, int]:
        return dict(self.fixed)


def fold(system: System, enumerate_all: bool = False) -> list[Instance]:
    """Instances of a plan's ranks; with `enumerate_all` one for every rank."""
    mesh = system.plan.mesh
    classes = system.schedule.classes
    where = {r: mesh.coordinates(r) for k in classes for r in k.ranks}
    folded = [set() if enumerate_all else _closed(mesh, k.ranks) for k in classes]
    uneven = _uneven_axes(system)
    for c, k in enumerate(classes):
        folded[c] -= _irregular(system, c, k.ranks, folded[c], where) | uneven
    for ranks in {ranks for _, ranks in system.holdings()}:  # what a rank holds, all ranks of its instance hold
        held = set(ranks)
        for c, k in enumerate(classes):
            folded[c] -= {a for a in folded[c] if any((r in held) != (mesh.moved(r, a, 0) in held) for r in k.ranks)}
    changed = True
    while changed:  # whoever meets must fold the same axes
        changed = False
        for meeting in system.meetings:
            members = {c for c, _ in meeting.ops}
            common = set.intersection(*(folded[c] for c in members))
            targets = [(c, common) for c in members]
            if meeting.lowered is not None and meeting.mesh_axes is None:
                for c in members:  # some other set of ranks: every axis on which its members differ is enumerated
                    for r in classes[c].ranks:
                        met = [mesh.coordinates(m) for m in system.talk.members(r, _event(system, meeting.step, c))]
                        keep = {a for a in folded[c] if len({m[a] for m in met}) == 1}
                        targets.append((c, {a for a in keep if _translated(system, meeting.step, c, r, a)}))
            for c, keep in targets:
                if folded[c] - keep:
                    folded[c] &= keep
                    changed = True
    instances = []
    for c, k in enumerate(classes):
        order = tuple(a for a in mesh.names if a in folded[c])
        seen: dict[tuple[tuple[str, int], ...], int] = {}
        for r in k.ranks:
            fixed = tuple((a, i) for a, i in where[r].items() if a not in folded[c])
            if fixed not in seen and all(where[r][a] == 0 for a in order):
                seen[fixed] = r
        instances += [Instance(c, fixed, order, r) for fixed, r in seen.items()]
    return instances


def _event(system: System, step: tuple[tuple[int, int], ...], c: int) -> Event:
    index = next(e for d, e in step if d == c)
    return system.talk.events[system.schedule.classes[c].unit][index]


def _translated(system: System, step: tuple[tuple[int, int], ...], c: int, rank: int, axis: str) -> bool:
    """Whether the group of a rank is that of the rank at coordinate 0, moved along the axis."""
    mesh, event = system.plan.mesh, _event(system, step, c)
    there = mesh.coordinates(rank)[axis]
    start = system.talk.members(mesh.moved(rank, axis, 0), event)
    return system.talk.members(rank, event) == tuple(mesh.moved(m, axis, there) for m in start)


def _uneven_axes(system: System) -> set[str]:
    """Mesh axes over which some tensor is not held by one formula: uneven shards, explicit parts."""
    mesh = system.plan.mesh
    found: set[str] = set()
    for lay, _ in system.holdings():
        shape = system.logical.tensors[lay.logical].shape
        if isinstance(lay.form, Parts):
            by_rank = dict(lay.form.by_rank)
            for r, parts in by_rank.items():
                for a in mesh.names:
                    zero = mesh.moved(r, a, 0)
                    if by_rank.get(zero) != parts:
                        found.add(a)
        elif isinstance(lay.form, Placements) and not system.inference.evenly_placed(lay.form, mesh, shape):
            found |= {a for a, p in lay.form.axes if isinstance(p, Shard)}
    return found


def _closed(mesh: Mesh, ranks: tuple[int, ...]) -> set[str]:
    """Axes along which a set of ranks is complete."""
    found = set()
    for name in mesh.names:
        apart, size = mesh.step(name)
        if len({r - r // apart % size * apart for r in ranks}) * size == len(ranks):
            found.add(name)
    return found


def _irregular(system: System, c: int, ranks: tuple[int, ...], folded: set[str], where: Mapping[int, Mapping[str, int]]) -> set[str]:
    """Axes on which some binding of the class is not a formula."""
    unit = system.talk.units[system.schedule.classes[c].unit]
    row = {r: i for i, r in enumerate(unit.ranks)}
    bad: set[str] = set()
    groups = system.plan.groups
    named = system.talk.targets[system.schedule.classes[c].unit]
    targets = {v.name: is_group for is_group, v in named if isinstance(v, Ref)}
    for name, column in unit.bindings.items():
        values = {r: column[row[r]] for r in ranks}
        if all(isinstance(v, str) and v in groups for v in values.values()):
            for v in set(values.values()):
                members = groups[str(v)]
                if system.rows.along(members) is None:
                    first = where[members[0]] if members[0] in where else system.plan.mesh.coordinates(members[0])
                    bad |= {a for a in folded for m in members if system.plan.mesh.coordinates(m)[a] != first[a]}
        elif targets.get(name) is False:  # a peer
            for r, v in values.items():
                if isinstance(v, int):
                    there = system.plan.mesh.coordinates(v)
                    bad |= {a for a in folded if there[a] != where[r][a]}
        else:
            bad |= uneven(values, folded - bad, system.plan.mesh)
    return bad
