"""Ranks that run the same and may stand for each other, and the coordinates that do."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from trainverify.axes.system import System
from trainverify.domains.arrays import Array
from trainverify.graph.program import Op


class RankClasses:
    """Which ranks stand for which: along every mesh axis the first coordinates of each kind, the others together.

    `mesh_cells` are the cells of digits of mesh axes by the id of their axis, `sizes` by their size: what counts ranks is cut as they are.
    """

    def __init__(self, system: System, rows: set[int], single: int, all_ranks: int):
        self.system = system
        self.rows = rows
        self.single = single
        self.all_ranks = all_ranks
        self.mesh_cells: dict[int, Array] = {}
        self.sizes: dict[int, Array] = {}
        self.kept = self._ranks()
        if not self._alike():  # every rank by itself
            self.mesh_cells, self.sizes = {}, {}
            self.kept = {a: np.arange(system.plan.mesh.length(a)) for a in system.plan.mesh.names}
            del self.stand_in
        self.there = frozenset(int(r) for r in np.unique(self.stand_in))

    def _ranks(self) -> Mapping[str, Array]:
        """For every mesh axis the coordinate that stands for each one; cells of its digits are noted."""
        system, mesh = self.system, self.system.plan.mesh
        found = {a: np.arange(mesh.length(a)) for a in mesh.names}
        if mesh.size > self.all_ranks:
            sorts = self._sorts().reshape([mesh.length(a) for a in mesh.names])
            separate = self._separate()
            leaves = {a: system.inference.axes.leaves([system.inference.mesh_axis(mesh, a)]) for a in mesh.names}
            seen = [id(x) for several in leaves.values() for x in several]
            for n, a in enumerate(mesh.names):
                if a in separate or any(x.pieces is not None or id(x) in self.rows or seen.count(id(x)) > 1 for x in leaves[a]):
                    continue
                flat = np.moveaxis(sorts, n, 0).reshape(mesh.length(a), -1)
                kinds = np.unique(flat, axis=0, return_inverse=True)[1].reshape([x.size for x in leaves[a]])
                digits = []
                for i, x in enumerate(leaves[a]):
                    alike = np.unique(np.moveaxis(kinds, i, 0).reshape(x.size, -1), axis=0, return_inverse=True)[1].reshape(-1)
                    cells = self._few(alike)
                    self.mesh_cells[id(x)] = cells
                    self.sizes.setdefault(x.size, cells)
                    first = np.unique(cells, return_index=True)[1]
                    digits.append(first[cells])
                stands = np.zeros(1, dtype=np.int64)
                for x, d in zip(leaves[a], digits, strict=True):
                    stands = (stands[:, None] * x.size + d[None, :]).reshape(-1)
                found[a] = stands
        return found

    def _few(self, kinds: Array) -> Array:
        """Cells of positions of several kinds: of each the first ones alone, the others together."""
        cells = np.empty(len(kinds), dtype=np.int64)
        names: dict[tuple[int, int], int] = {}
        seen: dict[int, int] = {}
        for i, k in enumerate(kinds.tolist()):
            n = seen[k] = seen.get(k, -1) + 1
            cells[i] = names.setdefault((k, min(n, self.single)), len(names))
        return cells

    def _sorts(self) -> Array:
        """What is known of every rank but its coordinates, as a number."""
        system = self.system
        columns = [np.zeros(system.plan.mesh.size, dtype=np.int64)]
        for i, k in enumerate(system.schedule.classes):
            columns[0][list(k.ranks)] = i + 1
        for holders in {frozenset(ranks) for _, ranks in system.holdings()}:
            if len(holders) < system.plan.mesh.size:
                column = np.zeros(system.plan.mesh.size, dtype=np.int64)
                column[list(holders)] = 1
                columns.append(column)
        return np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)[1].reshape(-1)

    def _separate(self) -> set[str]:
        """Mesh axes along which ranks talk to each other by name: rings, roots, groups that are no whole axes; and lineage by rank."""
        system, mesh, talk = self.system, self.system.plan.mesh, self.system.talk
        found: set[str] = set()
        seen: set[object] = set()
        for meeting in system.meetings:
            for c, op in meeting.ops:
                key = (c, op.get("peer"), op.get("root"), op.get("group"), meeting.lowered is None or meeting.mesh_axes is None)
                if key in seen:
                    continue
                seen.add(key)
                for r in system.schedule.classes[c].ranks:
                    at = mesh.coordinates(r)
                    named = [talk.value(r, op.get(name)) for name in ("peer", "root") if op.get(name) is not None]
                    if meeting.lowered is not None and meeting.mesh_axes is None:
                        named += talk.groups[str(talk.value(r, op.get("group")))]
                    for other in named:
                        if isinstance(other, int):
                            found.update(a for a, i in mesh.coordinates(other).items() if i != at[a])
                    if op.get("root") is not None and meeting.mesh_axes is not None:
                        found.update(meeting.mesh_axes)
                    if found >= set(mesh.names):
                        return found
        return found

    def _alike(self) -> bool:
        """Whether all ranks meet those whom the ranks meet that stand for them, in the same order."""
        talk, stands = self.system.talk, self.stand_in
        images: dict[str, Array] = {}

        def met(rank: int, op: Op) -> Array:
            name = talk.value(rank, op.get("peer") if op.get("group") is None else op.get("group"))
            if isinstance(name, int):
                return stands[[name]]
            if str(name) not in images:
                images[str(name)] = stands[list(talk.groups[str(name)])]
            return images[str(name)]

        seen: set[object] = set()
        for meeting in self.system.meetings:
            for c, op in meeting.ops:
                key = (c, op.get("peer"), op.get("group"))
                if key not in seen:
                    seen.add(key)
                    for r in self.system.schedule.classes[c].ranks:
                        mine, others = met(r, op), met(int(stands[r]), op)
                        if mine is not others and not np.array_equal(mine, others):
                            return False
        return True

    @cached_property
    def stand_in(self) -> Array:
        """The rank that stands for each rank."""
        mesh = self.system.plan.mesh
        stands = np.zeros(1, dtype=np.int64)
        for a in mesh.names:
            stands = (stands[:, None] * mesh.length(a) + self.kept[a][None, :]).reshape(-1)
        return stands

    @cached_property
    def members(self) -> dict[int, Array]:
        """The ranks that each one stands for."""
        order = np.argsort(self.stand_in, kind="stable")
        chosen, starts = np.unique(self.stand_in[order], return_index=True)
        return {int(r): some for r, some in zip(chosen, np.split(order, starts[1:]), strict=True)}
