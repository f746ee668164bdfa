"""Ops unlike those that play the same part elsewhere: made as in another micro-batch, layer or class of ranks, from what is their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from trainverify.evaluate.small import Meeting, Step
from trainverify.explain.cause import COLLECTIVES, OPTIMIZERS, Cause, base_name, of_change, of_dropped
from trainverify.explain.repair import Arrival, Repair, Sender, Site, arriving, running, short
from trainverify.explain.replay import Edit, Graph, Node
from trainverify.explain.siblings import Siblings, same_text
from trainverify.graph.mesh import Mesh
from trainverify.graph.program import Op
from trainverify.primitives.node import Node as Primitive

SCALED = frozenset({"mul", "div", "mul.grad", "div.grad"})
NEAREST = 3  # siblings whose inputs are compared: each knows what all of them know

Inputs = list[str | None]


class Likes:
    def __init__(self, graph: Graph, siblings: Siblings, mesh: Mesh):
        self.graph = graph
        self.siblings = siblings
        self.mesh = mesh
        self.classes = graph.small.classes
        self.shapes = graph.small.local_shapes

    def one_op(self, site: Site) -> Op | None:
        """The op that makes all of a site, if one does."""
        op = self.graph.ops.get(site[0])
        return op if op is not None and all(n[0] == site[0][0] and n[1] in op.outputs for n in site) else None

    def twin(self, site: Site) -> Iterator[Repair]:
        """Another op than in the other micro-batches of the same ranks, or one on other tensors."""
        for _, repair in self.unlike(site, self.siblings.twins(site[0])):
            yield repair

    def sibling(self, site: Site) -> Iterator[Repair]:
        """Another op than its siblings have in this place, or one on other tensors."""
        for _, repair in self.unlike(site, self.siblings.of(site[0])):
            yield repair

    def unlike(self, site: Site, among: Sequence[Node]) -> Iterator[tuple[Node, Repair]]:
        """The site made as some of its siblings are, and the sibling."""
        op, node = self.one_op(site), site[0]
        if op is None:
            return
        tried: list[Op] = []
        for count, other in enumerate(among):
            theirs = self.graph.ops.get(other)
            if theirs is None or (len(theirs.outputs) != len(op.outputs) and len(site) > 1):
                continue
            same = same_text(op, theirs)
            if not same and not self._comparable(node, op, other, theirs):
                if not tried and (extra := self._on_top(node, op, theirs, other)) is not None:
                    tried.append(theirs)
                    yield other, extra
                continue
            if count >= NEAREST if same else any(same_text(theirs, t) for t in tried if other[0] == node[0]):
                continue
            tried.append(theirs)
            for inputs in self._inputs(op, node, theirs, other, same):
                for repair in self._as(site, op, other, theirs, inputs, same):
                    yield other, repair

    def _comparable(self, node: Node, op: Op, other: Node, theirs: Op) -> bool:
        """Whether two ops could be each other's model: one kind, or a copy in the place of the other; of parts of the batch of one size."""
        if base_name(op) == base_name(theirs):
            literal = op.name in SCALED and op.get("value") != theirs.get("value")
            return not literal or self.siblings.batch(node) == self.siblings.batch(other)
        if node[1] == other[1]:  # of other ranks
            return True
        kinds = {base_name(op), base_name(theirs)}
        return "identity" in kinds or kinds <= {*COLLECTIVES, "slice"} or kinds <= {"mul", "div"} or kinds <= set(OPTIMIZERS)

    # -- what a sibling takes ----------------------------------------------------------------------------------------

    def _inputs(self, op: Op, node: Node, theirs: Op, other: Node, same: bool) -> Iterator[Inputs]:
        """What is to an op what its inputs are to a sibling: of another op, those of its own that are alike; else by name."""
        first = None if same else self._named(op, node, theirs, other, True)
        second = self._named(op, node, theirs, other, False)
        if first is not None:
            yield first
        if second is not None and second != first:
            yield second

    def _named(self, op: Op, node: Node, theirs: Op, other: Node, alike: bool) -> Inputs | None:
        c, name = node
        found: Inputs = []
        for k, i in enumerate(theirs.inputs):
            own = op.inputs[k] if k < len(op.inputs) else None
            if i is None:
                found.append(None)
                continue
            if own == i and not alike:
                mine: str | None = i  # taken by both
            else:
                mine = self.siblings.mapped(other[1], name, i, (own, *op.inputs) if alike else (), c) or own  # nothing like it here
            if mine is None or self.shapes[c][mine] != self.shapes[other[0]][i]:
                return None
            found.append(mine)
        return found

    # -- made as a sibling is ----------------------------------------------------------------------------------------

    def _as(self, site: Site, op: Op, other: Node, theirs: Op, inputs: Inputs, same: bool) -> Iterator[Repair]:
        """Tensors made as a sibling is, from given ones; nothing if that is how they are made."""
        (c, name), cause = site[0], of_change(op, theirs)
        text = f"{short(op)} where {other[1]} has {short(theirs)}"
        if short(op) == short(theirs) and len(op.inputs) != len(inputs):
            text = f"{op.name} of {_and(op.inputs)} where {other[1]} shows that {_and(inputs)} are meant"
        made = [self.graph.tasks[i].what for i in self.graph.makers.get(other, ())]
        steps = [m for m in made if isinstance(m, Step)]
        if steps:
            others = sum(a != b for a, b in zip(op.inputs, inputs, strict=False))
            if same and others > 1 and Counter(inputs) == Counter(op.inputs):
                text, cause = (
                    f"takes its inputs in another order than {other[1]}: {', '.join(map(str, inputs))} is meant",
                    Cause.WRONG_ORDER,
                )
            elif same and others != 1:
                return  # several mistakes, of which one sentence would say one
            elif same:
                mine, right = next((a, b) for a, b in zip(op.inputs, inputs, strict=True) if a != b)
                extra = self._extra((c, str(mine)), (c, str(right)))
                if extra is not None:
                    yield extra
                text = f"takes {mine} where {other[1]} shows that {right} is meant"
                cause = Cause.STALE_INPUT if self._before((c, str(mine)), (c, str(right))) else cause
            reads = tuple((c, i) for i in dict.fromkeys(inputs) if i is not None)
            shift = theirs.outputs.index(other[1]) - op.outputs.index(name)
            for nodes in self.nodes_for(c, other[0], steps):
                yield Repair(text, {n: Edit(reads, running(nodes, op.outputs.index(n[1]) + shift, c, inputs)) for n in site}, cause)
        elif made and other[0] == c:
            now = self.arrivals((c, name))
            new = self._like(self.arrivals(other), (c, name), other, dict(zip(theirs.inputs, inputs, strict=True)))
            if new is None or (now is not None and all(a.same(b) for a, b in zip(now, new, strict=True))):
                return
            if now is not None and same:
                was, right = next((self._given(a), self._given(b)) for a, b in zip(now, new, strict=True) if not a.same(b))
                text = f"{op.name} brings {was} where {other[1]} shows that {right} is meant"
            if now is not None and (why := self._one_more(c, op, theirs, inputs)) is not None:
                text, cause = f"{short(op)} is one too many: {op.inputs[0]} is what is needed", why
            elif now is not None and op.name == theirs.name and all(_turned(a, b) for a, b in zip(now, new, strict=True)):
                ranks = [self.classes[d].ranks[row] for d, row, _ in now[0].senders]
                text, cause = f"{op.name} has its ranks in another order than {other[1]}: {ranks}", Cause.WRONG_ORDER
            yield Repair(text, {site[0]: self.taking(new)}, cause)

    def _before(self, mine: Node, right: Node) -> bool:
        """Whether one tensor is what the other is made from, and nothing uses the other."""
        made = self.graph.ops.get(right)
        return made is not None and mine[1] in made.inputs and not self.graph.users.get(right)

    def _one_more(self, c: int, op: Op, theirs: Op, inputs: Inputs) -> Cause | None:
        """What is wrong with a collective of what is made as a sibling is already."""
        given = self.graph.ops.get((c, str(op.inputs[0]))) if op.inputs else None  # a receive has none
        return of_dropped(op) if given is not None and same_text(given, theirs) and given.inputs == tuple(inputs) else None

    def _given(self, a: Arrival) -> str:
        names = " and ".join(dict.fromkeys(t for _, _, t in a.senders))
        return f"{names} of ranks {[self.classes[d].ranks[row] for d, row, _ in a.senders]}"

    def _extra(self, mine: Node, right: Node) -> Repair | None:
        """An op between what is meant and what is taken, if nothing like it is anywhere else: it is what is too many."""
        op = self.graph.ops.get(mine)
        if op is None or right[1] not in op.inputs or self.siblings.of(mine):
            return None
        return Repair(
            f"{short(op)} is one too many: {right[1]} is what is needed",
            {mine: Edit((right,), lambda read: np.array(read(right)))},
            of_dropped(op),
        )

    def _on_top(self, node: Node, op: Op, theirs: Op, other: Node) -> Repair | None:
        """An op of one input on top of one that is made as a sibling is: it is one too many."""
        given = op.inputs[0] if len(op.inputs) == 1 else None
        below = None if given is None else self.graph.ops.get((node[0], given))
        if below is None or given is None or not same_text(below, theirs) or self.shapes[node[0]][given] != self.shapes[node[0]][node[1]]:
            return None
        inputs = self._named(below, node, theirs, other, False)
        if inputs is None or tuple(inputs) != below.inputs:
            return None
        right = node[0], given
        edit = Edit((right,), lambda read: np.array(read(right)))
        return Repair(f"{short(op)} is one too many: {given} is what is needed", {node: edit}, of_dropped(op))

    @staticmethod
    def taking(rows: Sequence[Arrival]) -> Edit:
        return Edit(tuple(dict.fromkeys((d, t) for a in rows for d, _, t in a.senders)), arriving(rows))

    def arrivals(self, node: Node) -> list[Arrival] | None:
        """What every rank of a class gets where this tensor is made by communication alone."""
        found: dict[int, Arrival] = {}
        for i in self.graph.makers.get(node, ()):
            m = self.graph.tasks[i].what
            if not isinstance(m, Meeting):
                return None
            for senders, receivers in zip(m.senders, m.receivers, strict=True):
                found |= {row: Arrival(m, senders, k) for k, (c, row, t) in enumerate(receivers) if (c, t) == node}
        rows = range(len(self.classes[node[0]].ranks))
        return [found[row] for row in rows] if len(found) == len(rows) else None

    def _like(self, theirs: list[Arrival] | None, node: Node, other: Node, inputs: dict[str | None, str | None]) -> list[Arrival] | None:
        """A sibling's rendezvous with what is meant here by the tensors that they give there."""
        found = []
        for a in theirs or ():
            senders: list[Sender] = []
            for d, row, t in a.senders:
                mine = inputs.get(t) if d == node[0] and t in inputs else self.siblings.mapped(other[1], node[1], t, (), d)
                if mine is None or self.shapes[d][mine] != self.shapes[d][t]:
                    return None
                senders.append((d, row, mine))
            found.append(Arrival(a.meeting, tuple(senders), a.place))
        return found or None

    def nodes_for(self, c: int, d: int, steps: Sequence[Step]) -> Iterator[list[tuple[Primitive, ...]]]:
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


def _turned(a: Arrival, b: Arrival) -> bool:
    """Whether the same ranks give the same in another order."""
    return a.senders != b.senders and sorted(a.senders) == sorted(b.senders)


def _and(names: Sequence[str | None]) -> str:
    return " and ".join(str(n) for n in names if n is not None)
