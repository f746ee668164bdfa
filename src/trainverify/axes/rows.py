"""Where ranks stand: rows of their unit, by the values of its references, and groups along axes of the mesh. Worked out once each."""

from __future__ import annotations

from collections.abc import Hashable

from trainverify.graph.communication import Communication, Schedule
from trainverify.graph.mesh import Mesh
from trainverify.graph.program import Op, Ref, Value


class Rows:
    def __init__(self, mesh: Mesh, talk: Communication, schedule: Schedule):
        self.mesh, self.talk, self.schedule = mesh, talk, schedule
        self._along: dict[tuple[int, ...], tuple[str, ...] | None] = {}
        self._of_class: dict[object, set[tuple[str, ...] | None]] = {}
        self._groups: dict[tuple[int, Value], Hashable] = {}
        self._rows: dict[tuple[int, tuple[str, ...]], dict[tuple[object, ...], tuple[int, ...]]] = {}
        self._units: dict[tuple[int, ...], dict[int, tuple[int, ...]]] = {}

    def variants(self, u: int, names: tuple[str, ...]) -> dict[tuple[object, ...], tuple[int, ...]]:
        """Rows of a unit by the values of some references."""
        key = (u, names)
        if key not in self._rows:
            unit = self.talk.units[u]
            found: dict[tuple[object, ...], list[int]] = {}
            for row, values in enumerate(zip(*(unit.bindings[n] for n in names), strict=True)):
                found.setdefault(values, []).append(row)
            self._rows[key] = {v: tuple(rows) for v, rows in found.items()} if names else {(): tuple(range(len(unit.ranks)))}
        return self._rows[key]

    def by_unit(self, ranks: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
        """Ranks by unit."""
        if ranks not in self._units:
            found: dict[int, list[int]] = {}
            for r in ranks:
                found.setdefault(self.talk.unit_of[r], []).append(r)
            self._units[ranks] = {u: tuple(rs) for u, rs in found.items()}
        return self._units[ranks]

    def column(self, u: int, value: Value) -> Hashable:
        """A value on every rank of a unit."""
        if isinstance(value, Ref):
            return ("column", self.talk.units[u].bindings[value.name])
        return tuple(self.column(u, v) for v in value) if isinstance(value, tuple) else value

    def group(self, u: int, value: Value) -> Hashable:
        """The mesh axes that the groups of all ranks of a unit run along, else the groups themselves."""
        key = (u, value)
        if key not in self._groups:
            names = {str(self.talk.value(r, value)) for r in self.talk.units[u].ranks}
            along = {self.along(self.talk.groups[n]) for n in names}
            self._groups[key] = ("along", along.pop()) if len(along) == 1 and None not in along else self.column(u, value)
        return self._groups[key]

    def along(self, members: tuple[int, ...]) -> tuple[str, ...] | None:
        """The mesh axes that a group runs along, if it is all their ranks in rank order."""
        if members not in self._along:
            first = self.mesh.coordinates(members[0])
            others = [self.mesh.coordinates(m) for m in members]
            varying = tuple(a for a in self.mesh.names if any(o[a] != first[a] for o in others))
            self._along[members] = varying if self.mesh.group(members[0], varying) == members else None
        return self._along[members]

    def all_along(self, met: tuple[tuple[int, Op], ...]) -> tuple[str, ...] | None:
        """The mesh axes that every group of a rendezvous runs along, if they are the same for all."""
        found: set[tuple[str, ...] | None] = set()
        for c, op in met:
            key = (c, op.get("group"))
            if key not in self._of_class:
                names = {str(self.talk.value(r, op.get("group"))) for r in self.schedule.classes[c].ranks}
                self._of_class[key] = {self.along(self.talk.groups[n]) for n in names}
            found |= self._of_class[key]
        return found.pop() if len(found) == 1 else None
