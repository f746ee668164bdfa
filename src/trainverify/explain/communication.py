"""Repairs of communication: other ranks, another order or reduction, another partner, a collective that is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.evaluate.run import PlanValues
from trainverify.evaluate.small import Meeting
from trainverify.explain.cause import COLLECTIVES, COPIES, SUMS, Cause, of_change
from trainverify.explain.likes import Likes
from trainverify.explain.repair import Arrival, Read, Repair, Site, axes_of, short
from trainverify.explain.replay import Edit, Edits, Graph, Node
from trainverify.explain.siblings import Siblings, same_text
from trainverify.graph.mesh import Mesh
from trainverify.graph.program import Op

REDUCTIONS: dict[str, Callable[[Array], Array]] = {
    "sum": lambda x: np.sum(x, axis=0),
    "avg": lambda x: np.mean(x, axis=0),
    "max": lambda x: np.max(x, axis=0),
    "min": lambda x: np.min(x, axis=0),
    "prod": lambda x: np.prod(x, axis=0),
}
USUAL = ("sum", "avg", "max")


class Communication:
    def __init__(self, graph: Graph, siblings: Siblings, likes: Likes, mesh: Mesh, base: PlanValues):
        self.graph = graph
        self.siblings = siblings
        self.likes = likes
        self.mesh = mesh
        self.base = base
        self.classes = graph.small.classes
        self.shapes = graph.small.local_shapes

    @cached_property
    def partitions(self) -> dict[str, Mapping[int, tuple[int, ...]]]:
        """Groups in which ranks could talk, by rank: along mesh axes, and as collectives of the plan do."""
        ranks = self.graph.small.places  # of a large plan, some

        def group(r: int, axes: tuple[str, ...]) -> tuple[int, ...]:
            return tuple(m for m in self.mesh.group(r, axes) if m in ranks)

        found: dict[str, Mapping[int, tuple[int, ...]]] = {"+".join(a): {r: group(r, a) for r in ranks} for a in axes_of(self.mesh)}
        seen = {g for groups in found.values() for g in groups.values()}
        for m in self.graph.small.meetings:
            if m.nodes is None:
                continue
            groups = [tuple(self.classes[c].ranks[row] for c, row, _ in g) for g in m.receivers]
            if any(len(g) > 1 and tuple(sorted(g)) not in seen for g in groups):
                seen.update(tuple(sorted(g)) for g in groups)
                found[f"the group of {m.receivers[0][0][2]}"] = {r: tuple(sorted(g)) for g in groups for r in g}
        return found

    def over(self, node: Node) -> str | None:
        """The mesh axes, or the group of the plan, over which a tensor is communicated."""
        met = [w for i in self.graph.makers.get(node, ()) if isinstance(w := self.graph.tasks[i].what, Meeting)]
        groups = {tuple(sorted(self.classes[c].ranks[row] for c, row, _ in g)) for m in met for g in m.receivers}
        return next((name for name, of in self.partitions.items() if groups and groups <= set(of.values())), None)

    def in_place(self, site: Site, ways: Sequence[str]) -> Iterator[Repair]:
        """A collective among the same ranks with another reduction."""
        over, first = self.over(site[0]), self.graph.ops[site[0]]
        texts = {f"{short(first)} where {first.name} with {way} over {over} is needed" for way in ways if way != first.get("op", "sum")}
        for wider in (False, True):
            yield from (r for r in self.other_collective(site, wider) if r.text in texts)

    def other_collective(self, site: Site, wider: bool, elsewhere: bool = False) -> Iterator[Repair]:
        """A collective over other axes, in another order, or with another reduction; `wider`: among more ranks than now,
        `elsewhere`: not among the same."""
        ops = [self.graph.ops.get(n) for n in site]
        first = ops[0]
        if first is None or first.name not in COLLECTIVES or first.get("group") is None:
            return
        if any(o is None or not same_text(_anywhere(o), _anywhere(first)) for o in ops):
            return
        given = {n: o.inputs[0] for n, o in zip(site, ops, strict=True) if o is not None and o.inputs[0] is not None}
        ways = [str(first.get("op", "sum"))] if first.name in SUMS else [""]
        met = [w for i in self.graph.makers.get(site[0], ()) if isinstance(w := self.graph.tasks[i].what, Meeting)]
        now = max((len(g) for m in met for g in m.receivers), default=0)
        same = self.over(site[0]) if elsewhere else None
        for over, partition in self.partitions.items():
            if elsewhere and over == same:
                continue
            if wider != (len(partition.get(self.classes[site[0][0]].ranks[0], ())) > now):
                continue
            for way in [*ways, *(w for w in USUAL if first.name in SUMS and w not in ways)]:
                edits: dict[Node, Edit] = {}
                for nodes in self._by_name(site):
                    edits |= self._collective(nodes, {n: str(given[n]) for n in nodes}, first, partition, way) or {}
                if len(edits) == len(site):
                    what = f"{way} over {over}" if way else f"ranks in the order of {over}"
                    here = over == self.over(site[0])
                    cause = Cause.WRONG_GROUP if not here else Cause.WRONG_REDUCTION if way else Cause.WRONG_ORDER
                    yield Repair(f"{short(first)} where {first.name} with {what} is needed", edits, cause)

    def like_cousin(self, site: Site) -> Iterator[Repair]:
        """A local op, or another group, where a tensor of the same name but for one word, of another parameter say, has a collective."""
        ops = [self.graph.ops.get(n) for n in site]
        first = ops[0]
        if first is None or any(o is None or o.name != first.name or len(o.inputs) != 1 for o in ops):
            return
        given = {n: str(o.inputs[0]) for n, o in zip(site, ops, strict=True) if o is not None}
        tried: list[Op] = []
        for cousin in self.siblings.cousins(site[0]):
            theirs = self.graph.ops.get(cousin)
            if theirs is None or theirs.name not in COLLECTIVES or any(same_text(theirs, t) for t in (first, *tried)):
                continue
            if first.name != theirs.name and first.name not in COPIES:
                continue
            tried.append(theirs)
            partition = {
                self.classes[c].ranks[row]: tuple(self.classes[d].ranks[r] for d, r, _ in group)
                for i in self.graph.makers[cousin]
                if isinstance(m := self.graph.tasks[i].what, Meeting)
                for group in m.receivers
                for c, row, _ in group
            }
            edits: dict[Node, Edit] = {}
            for nodes in self._by_name(site):
                edits |= self._collective(nodes, {n: given[n] for n in nodes}, theirs, partition, str(theirs.get("op", "sum"))) or {}
            if len(edits) == len(site):
                text, cause = f"{short(first)} where {cousin[1]} has {short(theirs)}", of_change(first, theirs)
                if first.name == theirs.name and self._turned(site[0], partition):
                    text, cause = f"{first.name} has its ranks in another order than {cousin[1]}", Cause.WRONG_ORDER
                yield Repair(text, edits, cause)

    def _turned(self, node: Node, partition: Mapping[int, tuple[int, ...]]) -> bool:
        """Whether a collective is among the same ranks in another order."""
        met = [w for i in self.graph.makers.get(node, ()) if isinstance(w := self.graph.tasks[i].what, Meeting)]
        groups = [tuple(self.classes[c].ranks[row] for c, row, _ in g) for m in met for g in m.receivers]
        others = {tuple(sorted(g)): g for g in partition.values()}
        return bool(groups) and all(tuple(sorted(g)) in others for g in groups) and any(others[tuple(sorted(g))] != g for g in groups)

    def other_partner(self, site: Site) -> Iterator[Repair]:
        """What another rank along an axis sends."""
        rows = self.likes.arrivals(site[0]) if len(site) == 1 else None
        if rows is None or any(a.meeting.nodes is not None for a in rows):
            return
        places = self.graph.small.places
        ranks = self.classes[site[0][0]].ranks
        for axis, size in self.mesh.axes:
            for offset in range(size):
                new = []
                for r, a in zip(ranks, rows, strict=True):
                    at = self.mesh.coordinates(r)
                    near = self.mesh.rank({**at, axis: (at[axis] + offset) % size})
                    ((_, _, t),) = a.senders
                    if near not in places or self.shapes[places[near][0]].get(t) != self.shapes[site[0][0]][site[0][1]]:
                        break
                    new.append(Arrival(a.meeting, ((*places[near], t),), 0))
                else:
                    if any(not a.same(b) for a, b in zip(rows, new, strict=True)):
                        where = f"the one {offset} further along {axis}" if offset else "the rank itself"
                        yield Repair(f"from another rank than {where}", {site[0]: self.likes.taking(new)}, Cause.WRONG_GROUP)

    def _collective(self, site: Site, given: dict[Node, str], op: Op, partition: Mapping[int, tuple[int, ...]], way: str) -> Edits | None:
        groups = self.groups(site, partition)
        if groups is None:
            return None
        sizes = {self.shapes[c][given[c, t]] for c, t in site}
        wanted = {self.shapes[c][t] for c, t in site}
        if len(sizes) != 1 or len(wanted) != 1:
            return None
        (shape,), (target,) = sizes, wanted
        n = len(next(iter(groups.values())))
        combine = _combined(op, way)
        try:
            if combine(np.zeros((n, *shape)), 0).shape != target:
                return None
        except (IndexError, ValueError):  # does not divide
            return None
        member = {(c, row): (c, row, given[c, t]) for c, t in site for row in range(len(self.classes[c].ranks))}
        reads = tuple((c, given[c, t]) for c, t in site)
        return {(c, t): Edit(reads, self.by_groups(c, groups, member, combine)) for c, t in site}

    def groups(self, site: Site, partition: Mapping[int, tuple[int, ...]]) -> dict[tuple[int, int], list[tuple[int, int]]] | None:
        """For every rank of a site, the members of its group; None if one of them is not in the site."""
        here = {r: (c, row) for c, _ in site for row, r in enumerate(self.classes[c].ranks)}
        if len(here) != sum(len(self.classes[c].ranks) for c, _ in site):
            return None  # several tensors of one rank
        found = {}
        for r, place in here.items():
            group = partition.get(r, ())
            if len(group) < 2 or any(m not in here for m in group):
                return None
            found[place] = [here[m] for m in group]
        return found

    @staticmethod
    def by_groups(
        c: int,
        groups: dict[tuple[int, int], list[tuple[int, int]]],
        member: dict[tuple[int, int], tuple[int, int, str]],
        combine: Callable[[Array, int], Array],
    ) -> Callable[[Read], Array]:
        def make(read: Read) -> Array:
            rows = []
            for place in sorted(p for p in groups if p[0] == c):
                stack = np.stack([read((d, t))[row, ...] for d, row, t in (member[m] for m in groups[place])])
                rows.append(combine(stack, groups[place].index(place)))
            return np.stack(rows)

        return make

    def missing_sum(self, site: Site) -> Iterator[Repair]:
        """A share that is used as if it were the whole."""
        if any(np.asarray(self.base.values[c][t]).dtype.kind != "f" for c, t in site):
            return
        families = self._by_name(site)
        for over, partition in self.partitions.items():
            groups = [self.groups(nodes, partition) for nodes in families]
            if any(g is None for g in groups):
                continue
            alike = True
            made: dict[str, dict[Node, Edit]] = {way: {} for way in USUAL}
            for nodes, group in zip(families, groups, strict=True):
                assert group is not None
                member = {(c, row): (c, row, t) for c, t in nodes for row in range(len(self.classes[c].ranks))}
                values = {m: np.asarray(self.base.values[d][t][row, ...]) for m, (d, row, t) in member.items()}
                if len({v.shape for v in values.values()}) > 1:
                    return
                alike &= all(np.allclose(values[g[0]], values[m], rtol=1e-9, atol=0) for g in group.values() for m in g)
                for way, edits in made.items():
                    for c, t in nodes:
                        make = self.by_groups(c, group, member, lambda stack, _, way=way: REDUCTIONS[way](stack))  # type: ignore[misc]
                        edits[c, t] = Edit(nodes, make, frozenset(nodes))
            if not alike:
                for way, edits in made.items():
                    yield Repair(f"a share only: its {way} over {over} is needed", edits, Cause.MISSING_REDUCTION, over)

    @staticmethod
    def _by_name(site: Site) -> list[Site]:
        names = dict.fromkeys(t for _, t in site)
        return [tuple(n for n in site if n[1] == name) for name in names]


def _anywhere(op: Op) -> Op:
    """A collective without its group, which ranks name differently."""
    return replace(op, attrs=tuple((k, v) for k, v in op.attrs if k != "group"))


def _combined(op: Op, way: str) -> Callable[[Array, int], Array]:
    """What a member of a collective gets of what all of them give."""

    def combine(stack: Array, at: int) -> Array:
        n = len(stack)
        if op.name == "all_gather":
            return np.concatenate(list(stack), axis=int(op.get("dim", 0)))
        if op.name == "all_to_all":
            return np.concatenate([np.split(x, n, axis=int(op.get("split_dim")))[at] for x in stack], axis=int(op.get("concat_dim")))
        total = REDUCTIONS[way](stack)
        return total if op.name == "all_reduce" else np.split(total, n, axis=int(op.get("dim", 0)))[at]

    return combine
