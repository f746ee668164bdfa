"""Both programs at reduced sizes as graphs of tensors on ranks: who made what from what. No values here.

A `Place` is a tensor on one rank: (class, row, tensor). Class −1 is the logical program.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from trainverify.domains.arrays import Array
from trainverify.evaluate.small import Meeting, Small, Step
from trainverify.primitives.node import Node, topological
from trainverify.prove.staged.inner import Inner, Piece
from trainverify.prove.staged.terms import CanonicalTerm, Term, Terms

Place = tuple[int, int, str]
LOGICAL: Final = -1
NOTHING: Final = -1  # the id of the constant 0
LARGE: Final = 2_000_000  # expressions of an op that are looked through
_MOVES: Final = ("input", "reshape", "transpose", "slice", "concat", "broadcast")


@dataclass(frozen=True)
class Call:
    """One run of an op for one rank, or of a collective for one group. `at` is its place in the order of execution."""

    at: int
    row: int  # of the rank, or number of the group, or of the piece of a logical op
    inputs: tuple[Place | None, ...]
    outputs: tuple[Place, ...]
    nodes: tuple[Node, ...] | None  # None: a message
    signature: int
    collective: bool
    backward: bool
    text: str


class Graph:
    """Every tensor of every rank, and the call that makes it."""

    def __init__(self, small: Small):
        self.small = small
        self.makers: dict[Place, Call] = {}
        self.order: list[Place] = []  # of execution, logical program first
        self._first: dict[Place, Place] = {}  # tensor → the first one that is the same
        self._signatures: dict[Any, int] = {}
        self._by_nodes: dict[tuple[Node, ...], int] = {}
        self.terms = Terms()
        self.same = self.terms.make("leaf", 0)  # what only passes on
        self._rows: dict[int, list[list[Term]]] = {}  # by signature
        self._placed: dict[int, list[Array] | None] = {}
        self._canonical: dict[Term, CanonicalTerm] = {}
        self._compares: dict[int, bool] = {}  # by signature
        self._chooses: dict[int, bool] = {}
        self._work: dict[int, int] = {}
        self._sizes: dict[int, int] = {}  # signature of a collective → elements of one member
        inner = Inner()
        for at, step in enumerate(small.logical_steps):
            for n, piece in enumerate(inner.pieces(step)):
                self._logical(at, n, step, piece)
        at = len(small.logical_steps)
        for c, event in _events(small):
            if isinstance(event, Step):
                self._step(at, c, event, event.rows)
            else:
                self._meeting(at, event)
            at += 1

    def _step(self, at: int, c: int, step: Step, rows: tuple[int, ...]) -> None:
        signature = self.signature(step.nodes)
        for row in rows:
            inputs = tuple(None if i is None else (c, row, i) for i in step.inputs)
            outputs = tuple((c, row, o) for o in step.outputs)
            call = Call(at, row, inputs, outputs, step.nodes, signature, False, step.op.phase == "backward", str(step.op))
            for o in outputs:
                self.makers[o] = call
                self.order.append(o)

    def _logical(self, at: int, n: int, step: Step, piece: Piece) -> None:
        inputs = tuple([None if i is None else (LOGICAL, 0, i) for i in piece.inputs])
        outputs = tuple([(LOGICAL, 0, o) for o in piece.outputs])
        backward = step.op.phase == "backward"
        call = Call(at, n, inputs, outputs, piece.nodes, self.signature(piece.nodes), False, backward, str(step.op))
        for o in outputs:
            self.makers[o] = call
            self.order.append(o)

    def _meeting(self, at: int, meeting: Meeting) -> None:
        signature = -1 if meeting.nodes is None else self.signature(meeting.nodes)
        for g, (senders, receivers) in enumerate(zip(meeting.senders, meeting.receivers, strict=True)):
            backward = meeting.op.phase == "backward"
            call = Call(at, g, tuple(senders), tuple(receivers), meeting.nodes, signature, True, backward, str(meeting.op))
            for o in receivers:
                self.makers[o] = call
                self.order.append(o)

    def first(self, place: Place) -> Place:
        """The tensor that stands for all that are the same as this one."""
        return self._first.get(place, place)

    def merge(self, sources: Mapping[Place, Array]) -> None:
        """Lets one tensor stand for all tensors of the plan that are the same by how they are made: sources of the same logical elements,
        what a collective gives to all of its group, what one op makes of the same tensors on several ranks."""
        known: dict[Hashable, Place] = {}
        for place, ids in sources.items():
            self._first[place] = known.setdefault((self.kind(place), ids.shape, tuple(ids.reshape(-1).tolist())), place)
        made: dict[Hashable, Call] = {}
        seen: set[tuple[int, int]] = set()
        for place in self.order:
            call = self.makers[place]
            if place[0] != LOGICAL and (call.at, call.row) not in seen:
                seen.add((call.at, call.row))
                self._merge(replace(call, inputs=tuple([None if i is None else self.first(i) for i in call.inputs])), made)
        self.order = [p for p in self.order if self.first(p) == p]

    def _merge(self, call: Call, made: dict[Hashable, Call]) -> None:
        """A call whose inputs stand for all that are the same, after those that it may be the same as."""
        outputs = made.setdefault((call.signature, call.collective, call.inputs), call).outputs
        for n, place in enumerate(call.outputs):
            self.makers[place] = call
            same: Place | None
            if call.nodes is None or call.collective:
                same = outputs[0 if call.nodes is not None and _given_to_all(call.nodes) else n]
            else:
                node = call.nodes[n]
                same = call.inputs[node.attrs[0]] if node.prim == "input" else outputs[n]
            assert same is not None
            self._first[place] = same

    def signature(self, nodes: tuple[Node, ...]) -> int:
        """A number for what an op does: equal for equal nodes."""
        known = self._by_nodes.get(nodes)
        if known is not None:
            return known
        number: dict[Node, int] = {}
        rows = []
        for node in topological(nodes):
            number[node] = len(number)
            rows.append((node.prim, tuple(number[a] for a in node.args), repr(node.attrs), node.shape, node.kind))
        key = (tuple(rows), tuple(number[n] for n in nodes))
        found = self._signatures.setdefault(key, len(self._signatures))
        self._by_nodes[nodes] = found
        return found

    def work(self, place: Place) -> int:
        """About how many expressions there are in all elements of an op's outputs."""
        call = self.makers[place]
        if call.nodes is None:
            return 0
        if call.signature not in self._work:
            self._work[call.signature] = _work(call.nodes)
        return self._work[call.signature]

    def term(self, place: Place, at: int) -> Term:
        """An element as a term over elements of the inputs of the call that makes it, not a message; `leaf` says which those are."""
        placed = self.placed(place)
        if placed is not None:
            number = int(placed["number"][at])
            begin = placed["begin"][at].tolist()
            return self.terms.there(number, tuple([(i, begin[i]) for i in self.terms.inputs(number)]))
        call = self.makers[place]
        rows = self._terms_of(call)
        output = call.outputs.index(place)
        if call.collective:
            return rows[0][at + output * (len(rows[0]) // len(call.outputs))]
        return rows[output][at]

    def placed(self, place: Place) -> Array | None:
        """All elements of a tensor that an op makes as numbers for how they are made, and where positions in each input begin; None for ops
        whose elements have to be looked at one by one."""
        call = self.makers[place]
        if call.signature not in self._placed:
            assert call.nodes is not None
            self._placed[call.signature] = self.terms.placed(call.nodes, self._shapes(call))
        outputs = self._placed[call.signature]
        if outputs is None:
            return None
        output = call.outputs.index(place)
        if call.collective:
            size = len(outputs[0]) // len(call.outputs)
            return outputs[0][output * size : (output + 1) * size]
        return outputs[output]

    def leaf(self, call: Call, info: tuple[int, int]) -> tuple[Place, int]:
        """The element that a leaf of a term of this call is."""
        n, p = info
        if call.collective:
            n, p = divmod(p, self._sizes[call.signature])
        place = call.inputs[n]
        assert place is not None
        return place, p

    def sent(self, place: Place) -> Place | None:
        """The tensor that a message brings; None for what an op makes."""
        call = self.makers[place]
        return call.inputs[call.outputs.index(place)] if call.nodes is None else None

    def definition(self, place: Place, at: int) -> tuple[Term, list[tuple[Place, int]]]:
        """An element up to names: a term over numbered leaves, and the elements that they are."""
        sender = self.sent(place)
        if sender is not None:
            return self.same, [(sender, at)]
        raw = self.term(place, at)
        made = self._canonical.get(raw)
        if made is None:
            made = self._canonical[raw] = self.terms.canonical(raw)
        term, leaves = made
        call = self.makers[place]
        return term, [self.leaf(call, info) for info in leaves]

    def positions(self, place: Place, at: int) -> tuple[int, Array]:
        """An element that an op of one rank makes, up to names: a number for how it is made, and of what, as rows of input and position."""
        return self.terms.relative(self.term(place, at))

    def compares(self, call: Call) -> bool:
        """Whether an op says which of two real numbers is larger."""
        if call.nodes is None:
            return False
        if call.signature not in self._compares:
            less = [n for n in topological(call.nodes) if n.prim == "map" and n.attrs[0] == "lt"]
            self._compares[call.signature] = any(a.kind == "real" for n in less for a in n.args)
        return self._compares[call.signature]

    def chooses(self, call: Call) -> bool:
        """Whether an op takes one of two values."""
        if call.nodes is None:
            return False
        if call.signature not in self._chooses:
            self._chooses[call.signature] = any(n.prim == "select" for n in topological(call.nodes))
        return self._chooses[call.signature]

    def _terms_of(self, call: Call) -> list[list[Term]]:
        """For every output of a call and every element of it a term."""
        rows = self._rows.get(call.signature)
        if rows is None:
            rows = self._rows[call.signature] = self._elements(call)
        return rows

    def _elements(self, call: Call) -> list[list[Term]]:
        assert call.nodes is not None
        return self.terms.elements(call.nodes, self._shapes(call))

    def _shapes(self, call: Call) -> list[tuple[int, ...] | None]:
        """Of the inputs of a call; those of a collective are one."""
        if call.collective:
            shape = self.shape(next(i for i in call.inputs if i is not None))
            self._sizes[call.signature] = math.prod(shape)
            return [(len(call.inputs), *shape)]
        return [None if i is None else self.shape(i) for i in call.inputs]

    def kind(self, place: Place) -> str:
        c, _, name = place
        program = self.small.logical if c == LOGICAL else self.small.classes[c].program
        return program.tensors[name].kind

    def shape(self, place: Place) -> tuple[int, ...]:
        c, _, name = place
        return self.small.shapes[name] if c == LOGICAL else self.small.local_shapes[c][name]

    def show(self, place: Place) -> str:
        c, row, name = place
        if c < LOGICAL:
            return "a scalar's value"
        return name if c == LOGICAL else f"{name} on rank {self.small.classes[c].ranks[row]}"


def _work(outputs: tuple[Node, ...]) -> int:
    """Expressions that are made for all elements."""
    return sum(math.prod(n.shape) * _row(n) for n in topological(outputs))


def _row(node: Node) -> int:
    """How many elements of an argument one element of a node is made of."""
    match node.prim:
        case "contract":
            sizes = {i: d for term, a in zip(node.attrs[0], node.args, strict=True) for i, d in zip(term, a.shape, strict=True)}
            return math.prod(d for i, d in sizes.items() if i not in node.attrs[1])
        case "reduce":
            return math.prod(node.args[0].shape[d] for d in node.attrs[1])
        case "rowwise":
            return int(node.args[0].shape[node.attrs[1]])
        case "gather":
            return int(node.args[0].shape[node.attrs[0]])
    return 1


def _given_to_all(nodes: tuple[Node, ...]) -> bool:
    """Whether every member of a group gets the same from a collective."""
    return all(n.prim == "broadcast" and 0 not in n.attrs[0] for n in nodes)


def moves_only(nodes: tuple[Node, ...]) -> bool:
    """Whether an op only moves elements of its inputs."""
    return all(n.prim in _MOVES or (n.prim == "map" and n.attrs[0] == "detach") for n in topological(nodes))


def _events(small: Small) -> Iterator[tuple[int, Step | Meeting]]:
    """Steps and meetings in an order in which they can run (as `evaluate.run` runs them)."""
    done: list[dict[str, set[int]]] = [{n: set(range(len(k.ranks))) for n in k.program.sources} for k in small.classes]
    users: list[dict[str, list[int]]] = [{} for _ in small.classes]
    ready = [list(range(len(k.order))) for k in small.classes]
    started: list[set[int]] = [set() for _ in small.classes]
    for c, k in enumerate(small.classes):
        for at, step in enumerate(k.order):
            for i in step.inputs:
                if i is not None:
                    users[c].setdefault(i, []).append(at)

    def arrived(c: int, tensor: str, rows: set[int]) -> None:
        done[c].setdefault(tensor, set()).update(rows)
        for n in users[c].get(tensor, ()):
            if n not in started[c]:
                heapq.heappush(ready[c], n)

    def advance(c: int) -> Iterator[tuple[int, Step | Meeting]]:
        while ready[c]:
            n = heapq.heappop(ready[c])
            step = small.classes[c].order[n]
            if n in started[c] or not all(i is None or done[c].get(i, set()).issuperset(step.rows) for i in step.inputs):
                continue
            started[c].add(n)
            yield c, step
            for o in step.outputs:
                arrived(c, o, set(step.rows))

    for c in range(len(small.classes)):
        yield from advance(c)
    for meeting in small.meetings:
        yield -1, meeting
        for group in meeting.receivers:
            for c, row, tensor in group:
                arrived(c, tensor, {row})
        for c in sorted({c for group in meeting.receivers for c, _, _ in group}):
            yield from advance(c)
