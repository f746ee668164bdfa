"""Small changes to a plan that could put it right: what an engineer would try, one at a time.

A repair works on values: it says what a tensor would hold if its op were another one. Nothing here knows what
is wrong; `search` finds out which repairs make the whole plan agree with the logical program.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.evaluate.run import PlanValues
from trainverify.evaluate.small import Step
from trainverify.explain.cause import Cause, of_dropped
from trainverify.explain.likes import Likes
from trainverify.explain.repair import Arrival, Read, Repair, Site, axes_of, running, short
from trainverify.explain.replay import Edit, Graph, Node
from trainverify.explain.siblings import Siblings, same_text
from trainverify.graph.mesh import Mesh
from trainverify.graph.program import Op, has_ref
from trainverify.graph.types import TensorType
from trainverify.ops.table import OpError, OpTable

NEAR = 8  # tensors before an op that it may have left out


class Repairs:
    """Candidates by kind; each method yields repairs of a site: the same change to all of its tensors."""

    def __init__(self, graph: Graph, siblings: Siblings, likes: Likes, mesh: Mesh, base: PlanValues, table: OpTable):
        self.graph = graph
        self.likes = likes
        self.siblings = siblings
        self.mesh = mesh
        self.base = base
        self.table = table
        self.classes = graph.small.classes
        self.shapes = graph.small.local_shapes

    # -- inputs --------------------------------------------------------------------------------------------------------

    def other_input(self, site: Site) -> Iterator[Repair]:
        """An op that takes a sibling of what it should take, a tensor next to it, or any while this one is left unused."""
        op, c = self.likes.one_op(site), site[0][0]
        if op is None:
            return
        steps = [w for i in self.graph.makers.get(site[0], ()) if isinstance(w := self.graph.tasks[i].what, Step)]
        nodes = next(self.likes.nodes_for(c, c, steps), None) if steps else None
        for k, given in enumerate(op.inputs if nodes is not None else ()):
            for other in () if given is None else self._near(c, given, op.outputs):
                inputs = [*op.inputs[:k], other, *op.inputs[k + 1 :]]
                reads = tuple((c, i) for i in dict.fromkeys(inputs) if i is not None)
                text = f"takes {given} in place of {other}"
                yield Repair(
                    text, {n: Edit(reads, running(nodes or [], op.outputs.index(n[1]), c, inputs)) for n in site}, Cause.WRONG_INPUT
                )
        if not steps:
            yield from self._other_given(site[0])

    def _other_given(self, node: Node) -> Iterator[Repair]:
        """Communication of another tensor than is meant."""
        now = self.likes.arrivals(node)
        given = {(d, t) for a in now or () for d, _, t in a.senders}
        if now is None or len(given) != 1:
            return
        ((d, tensor),) = given
        for other in self._near(d, tensor, (node[1],)):
            new = [Arrival(a.meeting, tuple((d, row, other) for d, row, _ in a.senders), a.place) for a in now]
            yield Repair(f"takes {tensor} in place of {other}", {node: self.likes.taking(new)}, Cause.WRONG_INPUT)

    def _near(self, c: int, given: str, own: Sequence[str]) -> list[str]:
        """Tensors that could be meant: siblings, what is made from this one or what this one is made from, what nobody uses."""
        shape = self.shapes[c][given]
        found = [n for d, n in self.siblings.of((c, given)) if d == c]
        around = [n for i in self.graph.users.get((c, given), ()) for n in self.graph.tasks[i].makes]
        around += [n for i in self.graph.makers.get((c, given), ()) for n in self.graph.tasks[i].reads]
        found += [n for d, n in around if d == c and self.shapes[c][n] == shape]
        found += [n for n in self._unused.get(c, ()) if self.shapes[c][n] == shape]
        kind = np.asarray(self.base.values[c][given]).dtype.kind
        usable = (n for n in dict.fromkeys(found) if n not in own and n != given)
        return [n for n in usable if np.asarray(self.base.values[c][n]).dtype.kind == kind]

    def dropped(self, site: Site) -> Iterator[Repair]:
        """An op that should not be there; of two in a row that do the same, the second."""
        if all(self._repeated(n) for n in site):
            return
        for slot in range(3):
            edits: dict[Node, Edit] = {}
            for c, t in site:
                op = self.graph.ops.get((c, t))
                given = None if op is None or slot >= len(op.inputs) else op.inputs[slot]
                if op is None or op.name == "identity" or given is None or not self._fits(c, given, t):
                    return
                edits[c, t] = Edit(((c, given),), lambda read, n=(c, given): np.array(read(n)))  # type: ignore[misc]
            op = self.graph.ops[site[0]]
            yield Repair(f"{short(op)} is one too many: {op.inputs[slot]} is what is needed", edits, of_dropped(op))

    def _fits(self, c: int, other: str, tensor: str) -> bool:
        """Whether one tensor can stand for another: it has its shape, and is no mask for numbers."""
        kinds = {np.asarray(self.base.values[c][t]).dtype.kind for t in (other, tensor)}
        return self.shapes[c][other] == self.shapes[c][tensor] and len(kinds) == 1

    def _repeated(self, node: Node) -> bool:
        """Whether an op does to this tensor once more what made it."""
        op, users = self.graph.ops.get(node), self.graph.users.get(node, ())
        after = [self.graph.ops[n] for i in users for n in self.graph.tasks[i].makes]
        return op is not None and len(users) == 1 and all(same_text(op, o) for o in after)

    # -- positions ---------------------------------------------------------------------------------------------------

    def other_slice(self, site: Site) -> Iterator[Repair]:
        """A slice that starts elsewhere: at a rank's own block, or somewhere else for all ranks."""
        found = [(n, self.graph.ops.get(n)) for n in site]
        if any(o is None or o.name != "slice" for _, o in found):
            return
        ops = [(n, o) for n, o in found if o is not None]
        for axes in axes_of(self.mesh):
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

    def turned(self, site: Site) -> Iterator[Repair]:
        """All that is joined, in the opposite order, or from another one on."""
        ops = [self.graph.ops.get(n) for n in site]
        if any(o is None or o.name not in ("concat", "stack") or len(o.inputs) < 2 for o in ops):
            return
        first = ops[0]
        assert first is not None
        for text, step in (("the opposite order", None), ("an order that begins further on", 1), ("an order that begins earlier", -1)):
            edits = {}
            for (c, t), op in zip(site, ops, strict=True):
                assert op is not None
                names = [str(i) for i in op.inputs]
                if len({self.shapes[c][n] for n in names}) > 1 or (step is not None and len(names) == 2):
                    return
                order = names[::-1] if step is None else [*names[step:], *names[:step]]
                join = np.stack if op.name == "stack" else np.concatenate
                axis = int(op.get("dim", 0)) % len(self.shapes[c][t]) + 1

                def make(read: Read, c: int = c, order: list[str] = order, join: Callable[..., Array] = join, axis: int = axis) -> Array:
                    return join([read((c, n)) for n in order], axis=axis)

                edits[c, t] = Edit(tuple((c, n) for n in dict.fromkeys(names)), make)
            yield Repair(f"{short(first)} joins its inputs in another order than needed: {text}", edits, Cause.WRONG_ORDER)

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

                    yield Repair(
                        f"{names[i]} and {names[j]} are in each other's place in {short(op)}",
                        {(c, t): Edit(reads, make)},
                        Cause.WRONG_ORDER,
                    )
        if op is not None and op.name == "slice":
            for step in self.classes[c].order:
                other = step.op.outputs[0] if step.op.name == "slice" and step.op.inputs[0] == op.inputs[0] else t
                if other != t and self.shapes[c][other] == self.shapes[c][t]:
                    both = frozenset({(c, t), (c, other)})
                    edits = {
                        (c, t): Edit(((c, other),), lambda read, n=(c, other): read(n), both),  # type: ignore[misc]
                        (c, other): Edit(((c, t),), lambda read, n=(c, t): read(n), both),  # type: ignore[misc]
                    }
                    yield Repair(f"{t} and {other} hold each other's values", edits, Cause.WRONG_ORDER)

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
            yield Repair(f"{short(ops[0])} where {value:g} is needed", edits, Cause.WRONG_FACTOR)  # type: ignore[arg-type]

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
        yield Repair(f"{short(ops[0][1])} takes other positions than needed: {text}", edits, Cause.WRONG_BLOCK)

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
            yield Repair(f"{t} and {other} hold each other's values", edits, Cause.WRONG_ORDER)

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
                yield Repair(f"{other} is left out: nothing uses it", {n: edit}, Cause.LOST_CONTRIBUTION)

    def left_out_term(self, site: Site) -> Iterator[Repair]:
        """An addition without one of the tensors before it; an identity may be what is left of one."""
        op = self.graph.ops.get(site[0]) if len(site) == 1 else None
        if op is None or op.name not in ("identity", "add"):
            return
        ((c, t),) = site
        at, n = self.graph.position, site[0]
        before = sorted((m for m in at if m[0] == c and at[m] < at[n] and self.shapes[c][m[1]] == self.shapes[c][t]), key=lambda m: -at[m])
        usable = [m for m in before if m[1] not in op.inputs and np.asarray(self.base.values[c][m[1]]).dtype.kind == "f"]
        for o in usable[:NEAR]:
            edit = Edit((n, o), lambda read, o=o: read(n) + read(o), frozenset({n}))  # type: ignore[misc]
            yield Repair(f"{op.name} without {o[1]}", {n: edit}, Cause.LOST_CONTRIBUTION)

    def other_factor(self, node: Node) -> dict[tuple[str, str], Repair]:
        """An identity as a product with a number, one that others are multiplied by or that no op uses; or a product without it.

        By what it is now, and the number."""
        op, (c, t) = self.graph.ops.get(node), node
        found: dict[tuple[str, str], Repair] = {}
        if op is not None and op.name == "identity":
            wide = (-1, *(1 for _ in self.shapes[c][t]))
            for name, behind in self._numbers.get(c, {}).items():
                if node not in behind:
                    o = (c, name)
                    edit = Edit((node, o), lambda read, o=o: read(node) * np.reshape(read(o), wide), frozenset({node}))  # type: ignore[misc]
                    found["identity", name] = Repair(f"identity where a product with {name} is needed", {node: edit}, Cause.WRONG_FACTOR)
        if op is not None and op.name == "mul" and len(op.inputs) == 2:
            given, name = (c, str(op.inputs[0])), str(op.inputs[1])
            if self.shapes[c][name] == () and self.shapes[c][given[1]] == self.shapes[c][t]:
                edit = Edit((given,), lambda read: read(given))
                found["mul", name] = Repair(f"a product with {name} where none is needed", {node: edit}, Cause.WRONG_FACTOR)
        return found

    @cached_property
    def _numbers(self) -> dict[int, dict[str, Mapping[Node, int]]]:
        """Real numbers that tensors are multiplied by, or that no op uses; the last ones of a class, and what they are made from."""
        found: dict[int, list[str]] = {}
        for c, t in dict.fromkeys(self.graph.nodes):
            users = self.graph.users.get((c, t), ())
            scales = not users or any(self.graph.tasks[i].what.op.name == "mul" for i in users)
            if scales and self.shapes[c][t] == () and np.asarray(self.base.values[c][t]).dtype.kind == "f":
                found.setdefault(c, []).append(t)
        return {c: {t: self.graph.marks({(c, t): 1}) for t in names[-NEAR:]} for c, names in found.items()}

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
            make = running(nodes, op.outputs.index(t), c, rest)
            yield Repair(f"{left_out} is one too many in {op.name}", {(c, t): Edit(reads, make)}, Cause.COUNTED_TWICE)

    def scaled(self, site: Site, factors: Sequence[Fraction]) -> Iterator[Repair]:
        """A factor too many."""
        if any(np.asarray(self.base.values[c][t]).dtype.kind != "f" for c, t in site):
            return
        for f in factors:
            edits = {n: Edit((n,), lambda read, n=n, f=float(f): read(n) / f, frozenset({n})) for n in site}  # type: ignore[misc]
            yield Repair(f"scaled: ×{f} everywhere", edits, Cause.WRONG_FACTOR)
