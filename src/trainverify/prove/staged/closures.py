"""The elements that some elements of a piece of a graph are made of, tensor by tensor: of a large tensor often a few are needed."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.prove.staged.graphs import Call, Graph, Place
from trainverify.prove.staged.records import Part
from trainverify.prove.staged.terms import Term

Origins = tuple[Array, Array]  # how elements are made, as numbers; rows of input and position, those of the first element first
Divisor = tuple[Call, Any, Term]  # the op, what it does with the term (the last argument), and the term, over inputs of the op


@dataclass
class Closure:
    """What was found on the way back."""

    numbers: dict[Place, Array] = field(default_factory=dict)  # the positions that are needed, in order
    made: dict[Place, Origins] = field(default_factory=dict)
    below: list[tuple[Call, Any, int, Array]] = field(default_factory=list)  # divisors: the op, what it does, how they are made and of what

    def symbols(self, part: Part) -> list[Array]:
        """The symbols that are needed of a piece, leaf by leaf."""
        return [ids[self.numbers[p]] for p, (ids, _) in part.leaves.items() if p in self.numbers]


class Closures:
    def __init__(self, graph: Graph):
        self.graph = graph
        self._made: dict[Hashable, Origins] = {}

    def of(self, part: Part, wanted: Mapping[Place, Sequence[Array]], divisors: Sequence[Divisor] = ()) -> Closure:
        """What these positions of tensors of a piece are made of, and what these divisors of its ops are."""
        needed = {p: list(positions) for p, positions in wanted.items()}
        found = Closure()

        def use(call: Call, leaves: Array) -> None:
            for n in np.unique(leaves[:, 0]).tolist():
                place = call.inputs[n]
                assert place is not None
                needed.setdefault(place, []).append(leaves[leaves[:, 0] == n, 1])

        def divided(outside: bool, *calls: Call) -> None:
            for call, info, term in divisors:
                if any(c is call for c in calls) != outside:
                    number, leaves = self.graph.terms.relative(term)
                    found.below.append((call, info, number, leaves))
                    use(call, leaves)

        divided(True, *part.calls)  # by ops that are not in it
        for call in reversed(part.calls):
            divided(False, call)
            for o in call.outputs:
                if o in needed and o not in part.leaves:
                    found.numbers[o] = np.unique(np.concatenate(needed[o]))
                    found.made[o] = self.made(o, found.numbers[o])
                    use(call, found.made[o][1])
        for p in part.leaves:
            if p in needed:
                found.numbers[p] = np.unique(np.concatenate(needed[p]))
        return found

    def made(self, place: Place, positions: Array) -> Origins:
        """How elements of a tensor are made, and of what."""
        call = self.graph.makers[place]
        output = call.outputs.index(place)
        if call.nodes is None:
            return np.empty(0, dtype=np.int64), np.stack([np.full_like(positions, output), positions], axis=1)
        key = (call.signature, call.collective, output, positions.tobytes())
        found = self._made.get(key)
        if found is None:
            placed = self.graph.placed(place)
            if placed is None:
                rows = [self.graph.positions(place, at) for at in positions.tolist()]
                numbers = np.array([number for number, _ in rows], dtype=np.int64)
                leaves = np.concatenate([np.empty((0, 2), dtype=np.int64), *(r for _, r in rows)])
            else:
                numbers = placed["number"][positions]
                leaves = self.graph.terms.leaves(placed[positions])
            if call.collective:
                size = math.prod(self.graph.shape(next(i for i in call.inputs if i is not None)))
                leaves = np.stack(np.divmod(leaves[:, 1], size), axis=1)
            found = self._made[key] = (numbers, leaves)
        return found
