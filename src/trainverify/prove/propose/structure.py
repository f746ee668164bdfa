"""Fingerprints of the elements of both programs: made by the same ops from elements with the same ones means the same one.

Sums are compared by what is added up, in whatever order and however many steps: parts of a batch, shares of ranks. Only a
guide for proposals: what is said with it is a claim like all others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.prove.propose.prints import Prints, print_of, unknown, unknown_print
from trainverify.prove.staged.graphs import LARGE, LOGICAL, NOTHING, Call, Graph, Place


class Structure:
    """Logical elements first, then the plan's, in the order of execution."""

    def __init__(self, graph: Graph, same: Array):
        self.graph = graph
        self.same = same  # logical element → the first one with its values, or NOTHING
        self.elements = unknown_print(np.arange(len(same)))  # of every logical element, by id
        self.first: dict[int, int] = {}  # fingerprint → the first logical element that has it
        self.places: dict[Place, Array] = {}
        self._prints = Prints()
        self._call: Call | None = None  # the last one that was looked at
        self._made: list[Array] = []  # its outputs
        self.nothing = int(unknown_print(np.array([NOTHING]))[0])
        self.first[self.nothing] = NOTHING

    def named(self, place: Place, ids: Array) -> None:
        """A tensor by the logical elements that it is said to be."""
        ids = ids.reshape(-1)
        inside = (ids >= 0) & (ids < len(self.elements))
        if self._call is not None and place in self._call.inputs:
            self._call = None
        self.places[place] = np.where(inside, self.elements[np.where(inside, ids, 0)], unknown_print(ids))

    def logical(self, name: str, first: int) -> None:
        """The elements of a logical tensor, whose ids start at `first`. Nothing is known of those of an input."""
        place = (LOGICAL, 0, name)
        made = self.made(place) if place in self.graph.makers else None
        ids = np.arange(first, first + math.prod(self.graph.shape(place)))
        if made is None:
            made = unknown_print(ids)
        same = self.same[ids]
        for number, i in zip(made.tolist(), same.tolist(), strict=True):
            self.first.setdefault(number, i)
        self.elements[ids] = made
        other = same != ids
        self.elements[ids[other]] = np.where(same[other] == NOTHING, np.uint64(self.nothing), self.elements[same[other]])

    def made(self, place: Place) -> Array | None:
        """Fingerprints of the elements of a tensor, from those of the op's inputs; None if that is too much, or those are not known."""
        call = self.graph.makers[place]
        if any(i is not None and i not in self.places for i in call.inputs) or self.graph.work(place) > LARGE:
            return None
        sender = self.graph.sent(place)
        if sender is not None:
            return self.places[sender]
        if self._call is not call:
            self._call, self._made = call, self._run(call)
        return self._made[call.outputs.index(place)]

    def _run(self, call: Call) -> list[Array]:
        assert call.nodes is not None
        inputs = [None if i is None else self._input(i) for i in call.inputs]
        made = self._prints.run(call.nodes, [np.stack(inputs)] if call.collective else inputs)  # type: ignore[arg-type]
        flat = [np.ascontiguousarray(print_of(m)).reshape(-1) for m in made]
        return np.split(flat[0], len(call.outputs)) if call.collective else flat

    def _input(self, place: Place) -> Array:
        prints = self.places[place].reshape(self.graph.shape(place))
        return prints if self.graph.kind(place) == "real" else unknown(prints)

    def meant(self, numbers: Array) -> Sequence[int] | None:
        """The logical elements that have these fingerprints; None if one has none."""
        found = [self.first.get(n) for n in numbers.tolist()]
        return None if None in found else [i for i in found if i is not None]
