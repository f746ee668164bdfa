"""Small changes to a plan that could put it right: what an engineer would try, one at a time.

A repair works on values: it says what a tensor would hold if its op were another one. Nothing here knows what
is wrong; `search` finds out which repairs make the whole plan agree with the logical program.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.run import PlanValues
from trainverify.evaluate.small import Meeting, Step
from trainverify.explain.replay import Edit, Edits, Graph, Node
from trainverify.explain.siblings import Siblings, same_text
from trainverify.graph.mesh import Mesh
from trainverify.graph.program import Op, has_ref
from trainverify.graph.types import TensorType
from trainverify.ops.table import OpError, OpTable
from trainverify.primitives.node import Node as Primitive

Site = tuple[Node, ...]
Read = Callable[[Node], Array]
REDUCTIONS: dict[str, Callable[[Array], Array]] = {
    "sum": lambda x: np.sum(x, axis=0),
    "avg": lambda x: np.mean(x, axis=0),
    "max": lambda x: np.max(x, axis=0),
    "min": lambda x: np.min(x, axis=0),
    "prod": lambda x: np.prod(x, axis=0),
}
USUAL = ("sum", "avg", "max")
SUMS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class Repair:
    text: str  # the mistake that it would undo
    edits: Edits


class Repairs:
    """Candidates by kind; each method yields repairs of a site: the same change to all of its tensors."""

    def __init__(self, graph: Graph, siblings: Siblings, mesh: Mesh, base: PlanValues, table: OpTable):
        self.graph = graph
        self.siblings = siblings
        self.mesh = mesh
        self.base = base
        self.table = table
        self.classes = graph.small.classes
        self.shapes = graph.small.local_shapes

    @cached_property
    def axes(self) -> list[tuple[str, ...]]:
        """Mesh axes along which ranks could talk: one, or two."""
        real = [n for n, s in self.mesh.axes if s > 1]
        return [combo for n in (1, 2) for combo in itertools.combinations(real, n)]

    @cached_property
    def partitions(self) -> dict[str, Mapping[int, tuple[int, ...]]]:
        """Groups in which ranks could talk, by rank: along mesh axes, and as collectives of the plan do."""
        ranks = self.graph.small.places  # of a large plan, some

        def group(r: int, axes: tuple[str, ...]) -> tuple[int, ...]:
            return tuple(m for m in self.mesh.group(r, axes) if m in ranks)

        found: dict[str, Mapping[int, tuple[int, ...]]] = {"+".join(a): {r: group(r, a) for r in ranks} for a in self.axes}
        seen = {g for groups in found.values() for g in groups.values()}
        for m in self.graph.small.meetings:
            if m.nodes is None:
                continue
            groups = [tuple(self.classes[c].ranks[row] for c, row, _ in g) for g in m.receivers]
            if any(len(g) > 1 and tuple(sorted(g)) not in seen for g in groups):
                seen.update(tuple(sorted(g)) for g in groups)
                found[f"the group of {m.receivers[0][0][2]}"] = {r: tuple(sorted(g)) for g in groups for r in g}
        return found

    # -- like its siblings -------------------------------------------------------------------------------------------

    def _one_op(self, site: Site) -> Op | None:
        """The op that makes all of a site, if one does."""
        op = self.graph.ops.get(site[0])
        return op if op is not None and all(n[0] == site[0][0] and n[1] in op.outputs for n in site) else None

    def like_twin(self, site: Site) -> Iterator[Repair]:
        """Another op than in the other micro-batches of the same ranks."""
        return self.like_sibling(site, self.siblings.twins(site[0]))

    def like_sibling(self, site: Site, among: Sequence[Node] | None = None) -> Iterator[Repair]:
        """Another op than all its siblings have in this place."""
        op, node = self._one_op(site), site[0]
        if op is None:
            return
        tried: list[Op] = []
        for other in self.siblings.of(node) if among is None else among:
            theirs = self.graph.ops.get(other)
            if theirs is None or same_text(op, theirs) or any(same_text(theirs, t) for t in tried if other[0] == node[0]):
                continue
            if len(theirs.outputs) != len(op.outputs) and len(site) > 1:
                continue
            tried.append(theirs)
            for edits in self._as(site, op, other, theirs):
                yield Repair(f"{_short(op)} where {other[1]} has {_short(theirs)}", edits)

    def _as(self, site: Site, op: Op, other: Node, theirs: Op) -> Iterator[Edits]:
        """Tensors made as a sibling is, from what is their own."""
        c, name = site[0]
        inputs: list[str | None] = []
        for i in theirs.inputs:
            mine = None if i is None else self.siblings.mapped(other[1], name, i, op.inputs, c)
            if i is not None and (mine is None or self.shapes[c][mine] != self.shapes[other[0]][i]):
                return
            inputs.append(mine)
        reads = tuple((c, i) for i in dict.fromkeys(inputs) if i is not None)
        made = [self.graph.tasks[i].what for i in self.graph.makers.get(other, ())]
        steps = [m for m in made if isinstance(m, Step)]
        shift = theirs.outputs.index(other[1]) - op.outputs.index(name)
        if steps:
            for nodes in self._nodes_for(c, other[0], steps):
                yield {n: Edit(reads, _running(nodes, op.outputs.index(n[1]) + shift, c, inputs)) for n in site}
        for m in made:
            if isinstance(m, Meeting) and self._within(m, c):
                yield {site[0]: Edit(reads, _meeting_of(m, other, c, inputs[0] if inputs else None, self.shapes[c][name]))}

    def _nodes_for(self, c: int, d: int, steps: Sequence[Step]) -> Iterator[list[tuple[Primitive, ...]]]:
        """Row by row of a class, what steps of another one do there: by the same row, or the rank next along an axis."""
        at = {row: s.nodes for s in steps for row in s.rows}
        count = len(self.classes[c].ranks)
        if c == d:
            if len(at) == count:
                yield [at[row] for row in range(count)]
            return
        if len({id(n) for n in at.values()}) == 1:
            yield [steps[0].nodes] * count
            return
        rows = {r: row for row, r in enumerate(self.classes[d].ranks)}
        for axis, size in self.mesh.axes:
            found = []
            for r in self.classes[c].ranks:
                coordinates = self.mesh.coordinates(r)
                near = (self.mesh.rank({**coordinates, axis: i}) for i in range(size))
                found.append(next((at[rows[x]] for x in near if x in rows and rows[x] in at), None))
            if all(n is not None for n in found):
                yield [n for n in found if n is not None]

    def other_input(self, site: Site) -> Iterator[Repair]:
        """An op that takes a sibling of what it should take, a tensor next to it, or any while this one is left unused."""
        op, c = self._one_op(site), site[0][0]
        if op is None:
            return
        made = [self.graph.tasks[i].what for i in self.graph.makers.get(site[0], ())]
        steps = [w for w in made if isinstance(w, Step)]
        nodes = next(self._nodes_for(c, c, steps), None) if steps else None
        for k, given in enumerate(op.inputs):
            for other in () if given is None else self._near(c, given, op):
                inputs = [*op.inputs[:k], other, *op.inputs[k + 1 :]]
                reads = tuple((c, i) for i in dict.fromkeys(inputs) if i is not None)
                text = f"takes {given} in place of {other}"
                if nodes is not None:
                    yield Repair(text, {n: Edit(reads, _running(nodes, op.outputs.index(n[1]), c, inputs)) for n in site})
                for m in made:
                    if isinstance(m, Meeting) and self._within(m, c):
                        yield Repair(text, {site[0]: Edit(reads, _meeting_of(m, site[0], c, other, self.shapes[c][site[0][1]]))})

    @staticmethod
    def _within(m: Meeting, c: int) -> bool:
        """Whether a collective stays within a class of ranks."""
        return m.nodes is not None and all(d == c for g in (*m.senders, *m.receivers) for d, _, _ in g)

    def _near(self, c: int, given: str, op: Op) -> list[str]:
        """Tensors that could be meant: siblings, what is made from this one or what this one is made from, what nobody uses."""
        shape = self.shapes[c][given]
        found = [n for d, n in self.siblings.of((c, given)) if d == c]
        around = [n for i in self.graph.users.get((c, given), ()) for n in self.graph.tasks[i].makes]
        around += [n for i in self.graph.makers.get((c, given), ()) for n in self.graph.tasks[i].reads]
        found += [n for d, n in around if d == c and self.shapes[c][n] == shape]
        found += [n for n in self._unused.get(c, ()) if self.shapes[c][n] == shape]
        kind = np.asarray(self.base.values[c][given]).dtype.kind
        usable = (n for n in dict.fromkeys(found) if n not in op.outputs and n != given)
        return [n for n in usable if np.asarray(self.base.values[c][n]).dtype.kind == kind]

    # -- communication -----------------------------------------------------------------------------------------------

    def other_collective(self, site: Site, wider: bool) -> Iterator[Repair]:
        """A collective over other axes, in another order, or with another reduction; `wider`: among more ranks than now."""
        ops = [self.graph.ops.get(n) for n in site]
        first = ops[0]
        if first is None or first.name not in ("all_reduce", "all_gather", "reduce_scatter") or first.get("group") is None:
            return
        if any(o is None or not same_text(o, first) for o in ops):
            return
        given = {n: o.inputs[0] for n, o in zip(site, ops, strict=True) if o is not None and o.inputs[0] is not None}
        ways = [str(first.get("op", "sum"))] if first.name in SUMS else [""]
        met = [w for i in self.graph.makers.get(site[0], ()) if isinstance(w := self.graph.tasks[i].what, Meeting)]
        now = max((len(g) for m in met for g in m.receivers), default=0)
        for over, partition in self.partitions.items():
            if wider != (len(partition.get(self.classes[site[0][0]].ranks[0], ())) > now):
                continue
            for way in [*ways, *(w for w in USUAL if first.name in SUMS and w not in ways)]:
                edits: dict[Node, Edit] = {}
                for nodes in self._by_name(site):
                    edits |= self._collective(nodes, {n: str(given[n]) for n in nodes}, first, partition, way) or {}
                if len(edits) == len(site):
                    what = f"{way} over {over}" if way else f"ranks in the order of {over}"
                    yield Repair(f"{_short(first)} where {first.name} with {what} is needed", edits)

    def _collective(self, site: Site, given: dict[Node, str], op: Op, partition: Mapping[int, tuple[int, ...]], way: str) -> Edits | None:
        dim = int(op.get("dim", 0))
        groups = self._groups(site, partition)
        if groups is None:
            return None
        sizes = {self.shapes[c][given[c, t]] for c, t in site}
        wanted = {self.shapes[c][t] for c, t in site}
        if len(sizes) != 1 or len(wanted) != 1:
            return None
        (shape,), (target,) = sizes, wanted
        n = len(next(iter(groups.values())))
        if op.name == "all_gather":
            result: tuple[int, ...] = (*shape[: dim % len(shape)], n * shape[dim], *shape[dim % len(shape) + 1 :])
        elif op.name == "reduce_scatter":
            if shape[dim] % n:
                return None
            result = (*shape[: dim % len(shape)], shape[dim] // n, *shape[dim % len(shape) + 1 :])
        else:
            result = shape
        if result != target:
            return None
        member = {(c, row): (c, row, given[c, t]) for c, t in site for row in range(len(self.classes[c].ranks))}

        def combine(stack: Array, at: int) -> Array:
            if op.name == "all_gather":
                return np.concatenate(list(stack), axis=dim)
            total = REDUCTIONS[way](stack)
            return total if op.name == "all_reduce" else np.split(total, n, axis=dim)[at]

        reads = tuple((c, given[c, t]) for c, t in site)
        return {(c, t): Edit(reads, self._by_groups(c, groups, member, combine)) for c, t in site}

    def _groups(self, site: Site, partition: Mapping[int, tuple[int, ...]]) -> dict[tuple[int, int], list[tuple[int, int]]] | None:
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
    def _by_groups(
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
            groups = [self._groups(nodes, partition) for nodes in families]
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
                        make = self._by_groups(c, group, member, lambda stack, _, way=way: REDUCTIONS[way](stack))  # type: ignore[misc]
                        edits[c, t] = Edit(nodes, make, frozenset(nodes))
            if not alike:
                for way, edits in made.items():
                    yield Repair(f"a share only: its {way} over {over} is needed", edits)

    @staticmethod
    def _by_name(site: Site) -> list[Site]:
        names = dict.fromkeys(t for _, t in site)
        return [tuple(n for n in site if n[1] == name) for name in names]

    def dropped(self, site: Site) -> Iterator[Repair]:
        """An op that should not be there."""
        for slot in range(3):
            edits: dict[Node, Edit] = {}
            for c, t in site:
                op = self.graph.ops.get((c, t))
                given = None if op is None or slot >= len(op.inputs) else op.inputs[slot]
                if op is None or op.name == "identity" or given is None or self.shapes[c][given] != self.shapes[c][t]:
                    return
                edits[c, t] = Edit(((c, given),), lambda read, n=(c, given): np.array(read(n)))  # type: ignore[misc]
            op = self.graph.ops[site[0]]
            yield Repair(f"{_short(op)} is one too many: {op.inputs[slot]} is what is needed", edits)

    # -- positions ---------------------------------------------------------------------------------------------------

    def other_slice(self, site: Site) -> Iterator[Repair]:
        """A slice that starts elsewhere: at a rank's own block, or somewhere else for all ranks."""
        found = [(n, self.graph.ops.get(n)) for n in site]
        if any(o is None or o.name != "slice" for _, o in found):
            return
        ops = [(n, o) for n, o in found if o is not None]
        for axes in self.axes:
            yield from self._sliced(ops, f"the block of the rank's own {'+'.join(axes)}", lambda r, axes=axes: self._own(r, axes))  # type: ignore[misc]
        (c, t), op = ops[0]
        dim = int(op.get("dim", 0))
        room = self.shapes[c][str(op.inputs[0])][dim] - self.shapes[c][t][dim]
        for at in range(room + 1) if room <= 16 else sorted(a for a in {0, *self._edges(c, str(op.inputs[0]), dim)} if a <= room):
            yield from self._sliced(ops, "another start", None, at)

    def _edges(self, c: int, tensor: str, dim: int) -> set[int]:
        """Where slices of a tensor begin and end."""
        found: set[int] = set()
        for step in self.classes[c].order:
            node = step.nodes[0] if step.op.name == "slice" and step.op.inputs[0] == tensor else None
            if node is not None and node.prim == "slice" and node.attrs[0] == dim:
                found |= {node.attrs[1], node.attrs[1] + node.shape[dim]}
        return found

    def exchanged_pieces(self, site: Site) -> Iterator[Repair]:
        """Tensors joined in another order, or slices of one tensor in each other's place."""
        if len(site) > 1:
            return
        ((c, t),) = site
        op = self.graph.ops.get((c, t))
        if op is not None and op.name == "concat":
            names = [str(i) for i in op.inputs]
            reads, dim = tuple((c, i) for i in dict.fromkeys(names)), int(op.get("dim", 0))
            for i, j in itertools.combinations(range(len(names)), 2):
                if self.shapes[c][names[i]] == self.shapes[c][names[j]]:
                    order = list(names)
                    order[i], order[j] = order[j], order[i]

                    def make(read: Read, order: list[str] = order) -> Array:
                        return np.concatenate([read((c, n)) for n in order], axis=dim % len(self.shapes[c][t]) + 1)

                    yield Repair(f"{names[i]} and {names[j]} are in each other's place in {_short(op)}", {(c, t): Edit(reads, make)})
        if op is not None and op.name == "slice":
            for step in self.classes[c].order:
                other = step.op.outputs[0] if step.op.name == "slice" and step.op.inputs[0] == op.inputs[0] else t
                if other != t and self.shapes[c][other] == self.shapes[c][t]:
                    both = frozenset({(c, t), (c, other)})
                    edits = {
                        (c, t): Edit(((c, other),), lambda read, n=(c, other): read(n), both),  # type: ignore[misc]
                        (c, other): Edit(((c, t),), lambda read, n=(c, t): read(n), both),  # type: ignore[misc]
                    }
                    yield Repair(f"holds what belongs in {other}, and the other way round", edits)

    def as_logical(self, site: Site) -> Iterator[Repair]:
        """Attributes that no op of its kind has in the logical program: those of one that it has."""
        ops = [self.graph.ops.get(n) for n in site]
        first = ops[0]
        if first is None or any(o is None or o.name != first.name or o.attrs != first.attrs for o in ops):
            return
        if first.name not in self.table or self.table[first.name].collective or any(has_ref(v) for _, v in first.attrs):
            return
        theirs = {s.op.attrs for s in self.graph.small.logical_steps if s.op.name == first.name}
        if first.attrs in theirs:
            return
        for attrs in sorted(theirs, key=repr):
            edits: dict[Node, Edit] = {}
            for (c, t), op in zip(site, ops, strict=True):
                assert op is not None
                types = self.classes[c].program.tensors
                shapes = tuple(None if i is None else TensorType(self.shapes[c][i], types[i].dtype) for i in op.inputs)
                try:
                    lowered = self.table.lower(op.name, dict(attrs), shapes)
                except OpError:
                    break
                slot = op.outputs.index(t)
                if lowered.outputs[slot].shape != self.shapes[c][t]:
                    break
                reads = tuple((c, i) for i in dict.fromkeys(op.inputs) if i is not None)
                edits[c, t] = Edit(reads, _running([lowered.outputs] * len(self.classes[c].ranks), slot, c, op.inputs))
            else:
                text = ", ".join(f"{n}={v}" for n, v in attrs if (n, v) not in first.attrs)
                yield Repair(f"{_short(first)} where the logical program has {text or 'none of these'}", edits)

    def other_number(self, site: Site) -> Iterator[Repair]:
        """A constant that should be 0 or 1."""
        ops = [self.graph.ops.get(n) for n in site]
        if any(o is None or o.name != "full" for o in ops):
            return
        for value in (0.0, 1.0):
            edits: dict[Node, Edit] = {
                n: Edit((), lambda read, n=n, value=value: np.full_like(np.asarray(self.base.values[n[0]][n[1]]), value))  # type: ignore[misc]
                for n in site
            }
            yield Repair(f"{_short(ops[0])} where {value:g} is needed", edits)  # type: ignore[arg-type]

    def _own(self, rank: int, axes: tuple[str, ...]) -> int:
        return self.mesh.group(rank, axes).index(rank)

    def _sliced(self, ops: list[tuple[Node, Op]], text: str, block: Callable[[int], int] | None, at: int = 0) -> Iterator[Repair]:
        edits: dict[Node, Edit] = {}
        for (c, t), op in ops:
            given, dim = str(op.inputs[0]), int(op.get("dim", 0))
            size, length = self.shapes[c][given][dim], self.shapes[c][t][dim]
            starts = [at if block is None else block(r) * length for r in self.classes[c].ranks]
            if any(s + length > size for s in starts):
                return

            def make(read: Read, c: int = c, given: str = given, dim: int = dim, starts: list[int] = starts, n: int = length) -> Array:
                value = read((c, given))
                return np.stack([np.take(value[row, ...], range(s, s + n), axis=dim) for row, s in enumerate(starts)])

            edits[c, t] = Edit(((c, given),), make)
        yield Repair(f"{_short(ops[0][1])} takes other positions than needed: {text}", edits)

    def exchanged(self, site: Site, in_order: bool) -> Iterator[Repair]:
        """What arrives in the place of a sibling, and the other way round: first where a later part of the batch comes first."""
        if len(site) > 1:
            return
        ((c, t),) = site
        op = self.graph.ops.get((c, t))
        if op is not None and op.name != "recv":
            return
        for other in self.siblings.pairs(c, t):
            theirs = self.graph.ops.get((c, other))
            if (theirs is None) != (op is None):
                continue
            if in_order != (self._starts(c, t) <= self._starts(c, other)):
                continue
            both = frozenset({(c, t), (c, other)})
            edits = {
                (c, t): Edit(((c, other),), lambda read, n=(c, other): read(n), both),  # type: ignore[misc]
                (c, other): Edit(((c, t),), lambda read, n=(c, t): read(n), both),  # type: ignore[misc]
            }
            yield Repair(f"holds what belongs in {other}, and the other way round", edits)

    def _starts(self, c: int, tensor: str) -> int:
        """Where a source begins in the logical tensor; 1 for what is received."""
        small = self.graph.small
        found = [
            small.positions(p, lay.logical).min()
            for (lay, r), parts in small.parts.items()
            if lay.local == tensor and r == self.classes[c].ranks[0]
            for p in parts
            if not p.padding
        ]
        return int(min(found, default=1))

    # -- terms and factors -------------------------------------------------------------------------------------------

    def missing_term(self, site: Site) -> Iterator[Repair]:
        """A sum without a tensor that nobody else uses either."""
        if len(site) > 1:
            return
        ((c, t),) = site
        real = np.asarray(self.base.values[c][t]).dtype.kind == "f"
        for other in self._unused.get(c, ()) if real else ():
            if other != t and self.shapes[c][other] == self.shapes[c][t] and np.asarray(self.base.values[c][other]).dtype.kind == "f":
                n, o = (c, t), (c, other)
                edit = Edit((n, o), lambda read, n=n, o=o: read(n) + read(o), frozenset({n}))  # type: ignore[misc]
                yield Repair(f"{other} is left out: nothing uses it", {n: edit})

    @cached_property
    def _unused(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for c, t in dict.fromkeys(self.graph.nodes):
            kept = {o.tensor for o in self.classes[c].program.outputs}
            if (c, t) not in self.graph.users and t not in kept and (c, t) in self.graph.ops:
                found.setdefault(c, []).append(t)
        return found

    def extra_term(self, site: Site) -> Iterator[Repair]:
        """An op over a list of tensors with one too many."""
        if len(site) > 1:
            return
        ((c, t),) = site
        op = self.graph.ops.get((c, t))
        if op is None or op.name not in self.table or len(op.inputs) < 2 or any(has_ref(v) for _, v in op.attrs):
            return
        definition = self.table[op.name]
        if not definition.variadic or definition.collective or definition.gradient_of is not None:
            return
        types = self.classes[c].program.tensors
        for k, left_out in enumerate(op.inputs):
            rest = [i for j, i in enumerate(op.inputs) if j != k]
            shapes = tuple(None if i is None else TensorType(self.shapes[c][i], types[i].dtype) for i in rest)
            try:
                lowered = self.table.lower(op.name, dict(op.attrs), shapes)
            except OpError:
                return
            if lowered.outputs[0].shape != self.shapes[c][t]:
                return
            nodes = [lowered.outputs] * len(self.classes[c].ranks)
            reads = tuple((c, i) for i in dict.fromkeys(rest) if i is not None)
            make = _running(nodes, op.outputs.index(t), c, rest)
            yield Repair(f"{left_out} is one too many in {op.name}", {(c, t): Edit(reads, make)})

    def scaled(self, site: Site, factors: Sequence[Fraction]) -> Iterator[Repair]:
        """A factor too many."""
        if any(np.asarray(self.base.values[c][t]).dtype.kind != "f" for c, t in site):
            return
        for f in factors:
            edits = {n: Edit((n,), lambda read, n=n, f=float(f): read(n) / f, frozenset({n})) for n in site}  # type: ignore[misc]
            yield Repair(f"scaled: ×{f} everywhere", edits)


def _running(nodes: list[tuple[Primitive, ...]], slot: int, c: int, inputs: Sequence[str | None]) -> Callable[[Read], Array]:
    """A local op, row by row; equal rows together."""

    def make(read: Read) -> Array:
        args = [None if i is None else read((c, i)) for i in inputs]
        groups: dict[int, list[int]] = {}
        for row, n in enumerate(nodes):
            groups.setdefault(id(n), []).append(row)
        result: list[Array] = [None] * len(nodes)
        for rows in groups.values():
            part = [None if a is None else a[rows] for a in args]
            made = NUMERIC.run(nodes[rows[0]], part, (len(rows),))[slot]
            for row, value in zip(rows, made, strict=True):
                result[row] = value
        return np.stack(result)

    return make


def _meeting_of(m: Meeting, other: Node, c: int, given: str | None, shape: tuple[int, ...]) -> Callable[[Read], Array]:
    """A sibling's rendezvous on another tensor."""
    assert m.nodes is not None

    def make(read: Read) -> Array:
        rows: dict[int, Array] = {}
        for senders, receivers in zip(m.senders, m.receivers, strict=True):
            stack = np.stack([read((c, str(given)))[row, ...] for _, row, _ in senders])[None]
            made = NUMERIC.run(m.nodes or (), [stack], (1,))[0]
            rows |= {row: made[0, i, ...] for i, (_, row, t) in enumerate(receivers) if t == other[1]}
        result = np.stack([rows[row] for row in sorted(rows)])
        assert result.shape[1:] == shape
        return result

    return make


def _short(op: Op) -> str:
    shown = ", ".join(f"{k}={v}" for k, v in op.attrs if k not in ("tag", "batch", "wrt", "given"))
    return f"{op.name}({shown})" if shown else op.name
