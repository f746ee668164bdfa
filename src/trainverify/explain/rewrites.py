"""Repairs of whole statements: the same change to all that a line makes, forward and backward.

Each method yields repairs of a site, as those of `repairs` do; here a change may reach the inputs of an op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.evaluate.run import PlanValues
from trainverify.evaluate.small import Meeting
from trainverify.explain.cause import COPIES, OPTIMIZERS, SUMS, Cause, base_name
from trainverify.explain.communication import REDUCTIONS, Communication
from trainverify.explain.likes import Likes
from trainverify.explain.repair import Read, Repair, Site, short
from trainverify.explain.replay import Edit, Edits, Graph, Node
from trainverify.explain.rerun import Rerun
from trainverify.explain.siblings import renumbered
from trainverify.graph.program import Op

LITERAL = frozenset({"mul", "div"})
ADDING = frozenset({"add", "identity", "reshape", "transpose", "permute", "concat", "slice", "to", "sum", "linear", "matmul"})
NEAREST = 12  # tensors that an op may have meant


class Rewrites:
    def __init__(self, graph: Graph, likes: Likes, talk: Communication, base: PlanValues):
        self.graph = graph
        self.likes = likes
        self.talk = talk
        self.base = base
        self.rerun = Rerun(graph, likes)
        self.classes = graph.small.classes
        self.shapes = graph.small.local_shapes

    def _value(self, node: Node) -> Array:
        return np.asarray(self.base.values[node[0]][node[1]])

    def _real(self, node: Node) -> bool:
        return bool(self._value(node).dtype.kind == "f")

    # -- reductions ----------------------------------------------------------------------------------------------------

    def extra_reduction(self, site: Site) -> Iterator[Repair]:
        """A sum over ranks of what all of them have already: what the rank itself gives, or its block of that."""
        edits: dict[Node, Edit] = {}
        for node in site:
            rows, op = self.likes.arrivals(node), self.graph.ops[node]
            if rows is None or op.name not in SUMS or not all(self._equal(a.senders) for a in rows):
                return
            given = (node[0], str(op.inputs[0]))
            dim, cut = int(op.get("dim", 0)), op.name == "reduce_scatter"

            def make(read: Read, given: Node = given, rows: list = rows, dim: int = dim, cut: bool = cut) -> Array:  # type: ignore[type-arg]
                value = read(given)
                if not cut:
                    return np.array(value)
                return np.stack([np.split(value[i], len(a.senders), axis=dim)[a.place] for i, a in enumerate(rows)])

            edits[node] = Edit((given,), make)
        op = self.graph.ops[site[0]]
        over = self.talk.over(site[0])
        text = f"{op.name} over {over} is one too many: {op.inputs[0]} is the same on all of these ranks already"
        yield Repair(text, edits, Cause.EXTRA_REDUCTION)

    def _equal(self, members: Sequence[tuple[int, int, str]]) -> bool:
        values = [self._value((c, t))[row] for c, row, t in members]
        return len(values) > 1 and all(np.allclose(values[0], v, rtol=1e-9, atol=0) for v in values)

    def summed_input(self, site: Site) -> Iterator[Repair]:
        """An op on a rank's share of a tensor whose sum over ranks is needed."""
        for over, partition in self.talk.partitions.items():
            edits: dict[Node, Edit] = {}
            for node in site:
                for given in self.rerun.inputs(node):
                    if given[0] == node[0] and self._real(given) and not self._same_everywhere(given):
                        total = self._summed(given, partition)
                        edit = None if total is None else self.rerun.edit(node, {given: total})
                        if edit is not None:
                            edits[node] = edit
            if len(edits) == len(site):
                op = self.graph.ops[site[0]]
                yield Repair(f"{short(op)} of a share only: its sum over {over} is needed first", edits, Cause.MISSING_REDUCTION)

    def _summed(self, node: Node, partition: object) -> Edit | None:
        """A tensor added up over ranks."""
        same = tuple((d, node[1]) for d in range(len(self.classes)) if node[1] in self.shapes[d])
        groups = self.talk.groups(same, partition)  # type: ignore[arg-type]
        if groups is None:
            return None
        member = {(c, row): (c, row, t) for c, t in same for row in range(len(self.classes[c].ranks))}
        if all(self._equal([member[m] for m in g]) for g in groups.values()):
            return None
        if len({self.shapes[c][t] for c, t in same}) > 1:
            return None
        return Edit(same, self.talk.by_groups(node[0], groups, member, lambda stack, _: REDUCTIONS["sum"](stack)))

    def moved_reduction(self, site: Site) -> Iterator[Repair]:
        """An op on a sum over ranks, where the sum over ranks of its results is meant."""
        edits: dict[Node, Edit] = {}
        for node in site:
            for given in self.rerun.inputs(node):
                rows = self.likes.arrivals(given) if given[0] == node[0] else None
                if rows is None or self.graph.ops[given].name != "all_reduce" or self.graph.ops[node].name in SUMS:
                    continue
                own = (given[0], str(self.graph.ops[given].inputs[0]))
                local = self.rerun.edit(node, {given: Edit((own,), lambda read, own=own: read(own))})  # type: ignore[misc]
                groups = [[row for _, row, _ in a.senders] for a in rows]
                if local is None or any(d != node[0] for a in rows for d, _, _ in a.senders):
                    continue

                def make(read: Read, local: Edit = local, groups: list[list[int]] = groups) -> Array:
                    value = local.make(read)
                    return np.stack([np.sum(value[g], axis=0) for g in groups])

                edits[node] = Edit(local.reads, make)
                break
        if len(edits) == len(site):
            op = self.graph.ops[site[0]]
            text = f"{op.name} of a sum over {self.talk.over(next(iter(self._reduced(site[0]))))} where the sum of its results is needed"
            yield Repair(text, edits, Cause.EARLY_REDUCTION)

    def _reduced(self, node: Node) -> Iterator[Node]:
        yield from (n for n in self.rerun.inputs(node) if n in self.graph.ops and self.graph.ops[n].name == "all_reduce")
        yield node

    def other_reduction(self, site: Site) -> Iterator[Repair]:
        """The mean in place of the sum of elements, or the other way round."""
        edits: dict[Node, Edit] = {}
        for node in site:
            op = self.graph.ops[node]
            whole = op.inputs[0]
            if whole is None:
                return
            small = node[1] if op.name == base_name(op) else str(op.inputs[-1])
            many, few = (np.prod(self.shapes[node[0]][t], dtype=float) for t in (whole, small))
            if not many or not few:  # of nothing there is no mean
                return
            count = many / few
            factor = count if base_name(op) == "mean" else 1 / count
            edits[node] = Edit((node,), lambda read, n=node, f=factor: read(n) * f, frozenset({node}))  # type: ignore[misc]
        op = self.graph.ops[site[0]]
        other = "sum" if base_name(op) == "mean" else "mean"
        yield Repair(f"{base_name(op)} of {op.inputs[0]} where the {other} is needed", edits, Cause.WRONG_REDUCTION)

    # -- inputs --------------------------------------------------------------------------------------------------------

    def stale_input(self, site: Site) -> Iterator[Repair]:
        """An op on a tensor from which another is made that nothing uses: on that one."""
        edits: dict[Node, Edit] = {}
        pair: tuple[Node, Node] | None = None
        for node in site:
            for given in self.rerun.inputs(node):
                later = next(self._later(given, node), None)
                if later is None:
                    continue
                edit = self.rerun.edit(node, {given: Edit((later,), lambda read, n=later: read(n))})  # type: ignore[misc]
                if edit is not None:
                    edits[node] = edit
                    pair = pair or (given, later)
                    break
        if pair is None or len(edits) != len(site):
            return
        op, made = self.graph.ops[site[0]], self.graph.ops[pair[1]]
        text = f"takes {pair[0][1]} in place of {pair[1][1]}, which is made from it and which nothing uses"
        early = op.name in SUMS and made.name == "add"
        kept = op.name in COPIES and made.name in OPTIMIZERS
        yield Repair(text, edits, Cause.EARLY_REDUCTION if early else Cause.MISSING_UPDATE if kept else Cause.STALE_INPUT)

    def _later(self, given: Node, user: Node) -> Iterator[Node]:
        """Tensors that nothing uses, of the same shape, made from a tensor: those that an op makes of it first."""
        if given not in self.graph.makers and given not in self.graph.users:
            return
        after = self.graph.reached([given])
        for c, names in self._unused.items():
            for t in sorted(names, key=lambda t: not self._made_of((given[0], t), given[1])) if c == given[0] else ():
                if (c, t) in after and (c, t) not in (given, user) and self._like(given, (c, t)):
                    yield c, t

    def _made_of(self, node: Node, tensor: str) -> bool:
        op = self.graph.ops.get(node)
        return op is not None and tensor in op.inputs

    def _like(self, a: Node, b: Node) -> bool:
        return self.shapes[a[0]][a[1]] == self.shapes[b[0]][b[1]] and self._value(a).dtype.kind == self._value(b).dtype.kind

    @cached_property
    def _unused(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for c, t in dict.fromkeys(self.graph.nodes):
            kept = {o.tensor for o in self.classes[c].program.outputs}
            if (c, t) not in self.graph.users and t not in kept and (c, t) in self.graph.ops:
                found.setdefault(c, []).append(t)
        return found

    @cached_property
    def unused_nodes(self) -> list[Node]:
        return [(c, t) for c, names in self._unused.items() for t in names]

    def other_input(self, site: Site, alike: bool) -> Iterator[Repair]:
        """One tensor in place of another for all of a statement, forward and backward: one that its siblings or neighbours are.

        `alike`: one that is made by the same kind of op."""
        given = dict.fromkeys(n for s in site for n in self.rerun.inputs(s) if n[0] == s[0])
        news = dict.fromkeys(t for n in given for t in self.near(n))
        for new in list(news)[:NEAREST]:
            for olds in [[n] for n in given] + [list(given)] if len(site) > 1 else [[n] for n in given]:
                usable = [n for n in olds if new in self.shapes[n[0]] and n[1] != new and self._like(n, (n[0], new))]
                if alike and not all(self._kind(n) == self._kind((n[0], new)) for n in usable):
                    continue
                swaps = {n: Edit(((n[0], new),), lambda read, o=(n[0], new): read(o)) for n in usable}  # type: ignore[misc]
                edits = {n: e for n in site if (e := self.rerun.edit(n, swaps)) is not None}
                if usable and edits and len({n[1] for n in edits}) == len({n[1] for n in site}):
                    taken = " and ".join(dict.fromkeys(n[1] for n in usable))
                    yield Repair(f"takes {taken} in place of {new}", edits, Cause.WRONG_INPUT)

    def _kind(self, node: Node) -> str | None:
        op = self.graph.ops.get(node)
        return None if op is None else op.name

    def near(self, node: Node) -> list[str]:
        """Tensors of the same ranks that could be meant: siblings by name, what ops of its kind make, what is made from it,
        what nothing uses."""
        c, name = node
        found = [n for d, n in self.likes.siblings.of(node) if d == c]
        found += [n for d, n in self.likes.siblings.cousins(node) if d == c]
        op = self.graph.ops.get(node)
        alike = (o for o in self.classes[c].program.ops if op is not None and o.name == op.name and not o.name.endswith(".grad"))
        found += [t for o in alike for t in o.outputs if self._like(node, (c, t))][:NEAREST]
        found += [t for d, t in sorted(self.graph.after([node]), key=lambda n: self.graph.position[n]) if d == c][:NEAREST]
        found += self._unused.get(c, ())
        return [t for t in dict.fromkeys(found) if t != name and self._like(node, (c, t))]

    # -- factors -------------------------------------------------------------------------------------------------------

    def scaled(self, site: Site, factors: Sequence[Fraction]) -> Iterator[Repair]:
        """A literal, or an identity in its place, that is off by a product of sizes."""
        if not all(self._real(n) for n in site):
            return
        op = self.graph.ops[site[0]]
        for f in factors:
            edits: dict[Node, Edit] = {
                n: Edit((n,), lambda read, n=n, f=float(f): read(n) / f, frozenset({n}))  # type: ignore[misc]
                for n in site
            }
            yield Repair(self._off_by(op, f), edits, self._of_scaling(site, f))

    @staticmethod
    def _off_by(op: Op, f: Fraction) -> str:
        exact = number(op)
        if exact is not None and base_name(op) in ("mul", "full", "div"):
            right = exact * f if base_name(op) == "div" else exact / f
            shown = right if right.denominator == 1 else float(right) if right.denominator <= 4096 and base_name(op) != "div" else right
            return f"{short(op)} where value={shown} is needed"
        return f"{base_name(op)} where a division by {f} is needed" if f > 1 else f"{base_name(op)} where a product with {1 / f} is needed"

    def _of_scaling(self, site: Site, f: Fraction) -> Cause:
        forward = [n for n in site if not self.graph.ops[n].name.endswith(".grad")]
        if forward and all(self._same_everywhere(n) and self._summed_over(n, f) for n in forward):
            return Cause.COUNTED_TWICE
        return Cause.UNEQUAL_WEIGHTS if self._weights(site, f) else Cause.WRONG_FACTOR

    def _summed_over(self, node: Node, f: Fraction) -> bool:
        """Whether so many ranks are summed after a tensor was added."""
        seen, todo = {node}, [node]
        while todo:
            for i in self.graph.users.get(todo.pop(), ()):
                task = self.graph.tasks[i]
                if isinstance(task.what, Meeting) and task.what.op.name in SUMS:
                    if task.what.op.get("op", "sum") == "sum" and any(len(g) == f for g in task.what.senders):
                        return True
                elif task.what.op.name in ADDING:
                    todo += [n for n in task.makes if n not in seen]
                    seen.update(task.makes)
        return False

    def _weights(self, site: Site, f: Fraction) -> bool:
        """Whether a factor is the ratio of the sizes of what a tensor and its twin of another micro-batch are made from."""
        for node in site:
            mine = self.likes.siblings.batch(node)
            for twin in self.likes.siblings.twins(node):
                if twin not in site and Fraction(mine, max(self.likes.siblings.batch(twin), 1)) in (f, 1 / f):
                    return True
        return False

    def product_with_number(self, site: Site) -> Iterator[Repair]:
        """A copy, with its gradient, where a product with a number is needed that the rank has: its own of every micro-batch."""
        c, first = site[0]
        before = self.graph.position[site[0]]
        numbers = [t for t, s in self.shapes[c].items() if s == () and self._real((c, t)) and self.graph.position[c, t] < before]
        for number in [t for t in numbers if t in self.graph.small.classes[c].program.tensors][-NEAREST:]:
            edits: dict[Node, Edit] = {}
            for n in site:
                o = (n[0], renumbered(first, n[1], number))
                if o[1] not in self.shapes[n[0]] or o == n or n in self.graph.marks({o: 1}):
                    break
                wide = (-1, *(1 for _ in self.shapes[n[0]][n[1]]))
                edits[n] = Edit((n, o), lambda read, n=n, o=o, wide=wide: read(n) * np.reshape(read(o), wide), frozenset({n}))  # type: ignore[misc]
            if len(edits) == len(site):
                yield Repair(f"{base_name(self.graph.ops[site[0]])} where a product with {number} is needed", edits, Cause.WRONG_FACTOR)

    def dropped_scale(self, site: Site, factors: Sequence[Fraction]) -> Iterator[Repair]:
        """A product with a literal, after the backward pass, that is one too many."""
        op = self.graph.ops[site[0]]
        value = number(op)
        if value is not None and (value if op.name == "mul" else 1 / value) in factors:
            for repair in self.scaled(site, [value if op.name == "mul" else 1 / value]):
                yield replace(repair, text=f"{short(op)} is one too many: {op.inputs[0]} is what is needed")

    def scaled_term(self, site: Site, factors: Sequence[Fraction]) -> Iterator[Repair]:
        """A term that all ranks add before they are summed: its share."""
        for slot in range(3):
            for f in factors:
                edits: dict[Node, Edit] = {}
                term = None
                for node in site:
                    op = self.graph.ops[node]
                    given = op.inputs[slot] if slot < len(op.inputs) else None
                    if given is None or not self._real((node[0], given)) or not self._summed_over(node, f):
                        continue
                    n = (node[0], given)
                    if not self._same_everywhere(n):
                        continue
                    swap = Edit((n,), lambda read, n=n, f=float(f): read(n) / f)  # type: ignore[misc]
                    edit = self.rerun.edit(node, {n: swap})
                    if edit is not None:
                        edits[node], term = edit, given
                if term is not None and len(edits) == len(site):
                    yield Repair(f"{term} is added on each of {f} ranks that are summed afterwards", edits, Cause.COUNTED_TWICE)

    def _same_everywhere(self, given: Node) -> bool:
        """Whether a tensor is the same on all ranks of its class."""
        value = self._value(given)
        return len(value) > 1 and all(np.allclose(value[0], v, rtol=1e-9, atol=0) for v in value[1:])

    def distributed(self, site: Site) -> Iterator[Repair]:
        """A sum that is scaled as a whole, where only one of its terms is meant to be."""
        for slot in (0, 1):
            edits: dict[Node, Edit] = {}
            cause = Cause.WRONG_FACTOR
            names: tuple[str, str] | None = None
            for node in site:
                op = self._forward(node)
                total = None if op is None else self.graph.ops.get((node[0], str(op.inputs[0])))
                if op is None or total is None or total.name != "add":
                    return
                own, kept = ((node[0], str(total.inputs[i])) for i in (slot, 1 - slot))
                if not (self._like(node, own) and self._like(node, kept)):
                    return
                names = names or (own[1], kept[1])
                if node[1] not in op.outputs:
                    continue
                part = self.rerun.edit(node, {(node[0], str(op.inputs[0])): Edit((own,), lambda read, n=own: read(n))})  # type: ignore[misc]
                if part is None:
                    return
                edits[node] = Edit((own, kept), lambda read, part=part, kept=kept: part.make(read) + read(kept))  # type: ignore[misc]
                if self._scaled_alike(kept, op):
                    cause = Cause.RESCALED_SUM
            op = self._forward(site[0])
            if names is not None and op is not None:
                text = f"{short(op)} of all of {op.inputs[0]} where only {names[0]} is meant, and {names[1]} as it is"
                for some in (edits, self._with_backward(site, edits, 1 - slot)):
                    if some:
                        yield Repair(text, some, cause)

    def _forward(self, node: Node) -> Op | None:
        """The product with a literal that makes a tensor, or whose gradient it is."""
        op = self.graph.ops[node]
        if base_name(op) not in LITERAL or number(op) is None:
            return None
        if op.name == base_name(op):
            return op
        ops = self.classes[node[0]].program.ops
        return next((o for o in ops if o.name == base_name(op) and o.inputs == op.inputs[:1] and o.source == op.source), None)

    def _scaled_alike(self, node: Node, op: Op) -> bool:
        """Whether a term was scaled by the same number before."""
        made = self.graph.ops.get(node)
        return made is not None and base_name(made) == base_name(op) and made.get("value") == op.get("value")

    def _with_backward(self, site: Site, edits: Edits, slot: int) -> dict[Node, Edit]:
        """The same, and the gradient of the term that is not scaled without the factor."""
        found = dict(edits)
        for c, t in site:
            op = self._forward((c, t))
            if op is None:
                continue
            total = self.graph.ops[c, str(op.inputs[0])]
            value = float(number(op) or 1)
            factor = 1 / value if op.name == "div" else value
            for back in self.classes[c].program.ops:
                if back.name == "add.grad" and back.inputs[:2] == total.inputs and slot in back.get("wrt", ()):
                    n = (c, back.outputs[tuple(back.get("wrt")).index(slot)])
                    found[n] = Edit((n,), lambda read, n=n, f=factor: read(n) / f, frozenset({n}))  # type: ignore[misc]
        return found


def number(op: Op) -> Fraction | None:
    """The literal of an op, if it is a number other than 0."""
    value = op.get("value")
    return Fraction(value).limit_denominator(10**6) if isinstance(value, int | float | Fraction) and value else None


def literal(op: Op) -> bool:
    """A product with a literal, its gradient, or a constant other than 1."""
    if op.name == "full":
        return op.get("value") not in (0, 1)
    return base_name(op) in LITERAL and number(op) is not None


def after_backward(op: Op) -> bool:
    """A product of a gradient with a literal: no op of the model."""
    return op.name in LITERAL and number(op) is not None and len(op.inputs) == 1


def averaging(op: Op) -> bool:
    return op.name in SUMS and op.get("op", "sum") != "sum"


def copy(op: Op) -> bool:
    return base_name(op) == "identity"


def named(*names: str) -> Callable[[Op], bool]:
    return lambda op: base_name(op) in names
