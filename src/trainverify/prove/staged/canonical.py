"""A whole stage up to names: stages with one such form have the same elements to show (other ranks, rows, layers, micro-batches).

Symbols and places are numbered as they appear; what is known about a symbol is part of the form. So two stages of one form are the same
but for a renaming, and the keys of their elements, in which names do not occur, are equal, element by element.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.prove.staged.closures import Divisor
from trainverify.prove.staged.elements import Elements
from trainverify.prove.staged.graphs import LOGICAL, Call, Place
from trainverify.prove.staged.records import Factor, Part, Stage


class Canonical:
    """Forms of the stages of one elements."""

    def __init__(self, elements: Elements):
        self.elements = elements
        numbers: dict[Hashable, int] = {}
        kinds = [numbers.setdefault(elements.symbol_kind(elements.start[name]), len(numbers)) for name in elements.start]
        self._kind = np.array(kinds, dtype=np.int64)[elements.numbers]
        self._doubtful = np.array([not elements.numbers_only(name) for name in elements.start], dtype=bool)[elements.numbers]
        self._states = np.full(elements.count, -1)  # of elements that may not be numbers, once known
        self._beyond = numbers.setdefault(("real", None), len(numbers))  # scalars of the plan
        self._kinds = len(numbers)

    @cached_property
    def supported(self) -> Array:
        """Elements with which others vanish."""
        return np.array(sorted(self.elements.supported), dtype=np.int64)

    def form(self, stage: Stage) -> Hashable:
        return _Form(self).of(stage)

    def by_elements(self, stage: Stage) -> Hashable | None:
        """A form by the elements that are looked at, in whatever tensors, ranks and order of execution: dearer to make, and the same for
        more stages. None for stages that need more than both sides of a goal."""
        if stage.nonzero or stage.extra or stage.facts or stage.divisions:
            return None
        return _Elements(self).of(stage)

    def kinds(self, ids: Array) -> Array:
        """What is known about symbols, as numbers."""
        inside = ids < len(self._kind)
        if not len(self._kind):
            return np.full(ids.shape, self._beyond)
        found = np.where(inside, self._kind[np.where(inside, ids, 0)], self._beyond)
        doubtful = np.flatnonzero(inside & (ids >= 0) & self._doubtful[np.where(inside, ids, 0)])
        which = ids[doubtful]
        for i in np.unique(which[self._states[which] < 0]).tolist():
            self._states[i] = self.elements.state(i)
        found[doubtful] += self._kinds * self._states[which]
        return found

    def wanted(self, stage: Stage) -> dict[Place, Array]:
        """The logical tensors that a goal speaks of and the stage defines, and for each element its position there; −1 for others."""
        ids = stage.goal.ids
        places: list[Place] = [(LOGICAL, 0, name) for name in self.elements.owners([ids])]
        return {p: self.elements.within(ids, p[2]) for p in places if p in stage.logical}


class _Form:
    def __init__(self, canonical: Canonical):
        self.canonical = canonical
        self.places: dict[Place, int] = {}
        self.arrays: list[Array] = []  # of symbols, numbered at the end

    def of(self, stage: Stage) -> Hashable:
        goal = stage.goal
        self.arrays.append(goal.ids)
        infinite = self.canonical.elements.infinite(goal.ids)
        shape: list[Hashable] = [stage.nonzero, stage.value, infinite, len(goal.ids), self.factor(goal.factor)]
        shape += [(t.number, self.place(t.place), t.elements.tobytes()) for t in goal.terms]
        shape.append(self.part(stage.plan))
        shape += self.wanted(stage)
        shape += [(self.symbols([i]), self.place(place), self.part(part)) for i, (place, part) in stage.extra.items()]
        shape.append(self.symbols(stage.facts))
        for i in stage.facts:
            if i in stage.written:
                place, at = self.canonical.elements.where(i)
                shape.append((self.symbols([i]), self.place(place), at, self.part(stage.written[i])))
        shape.append(tuple([self.part(p) for p in stage.divisions]))
        return (tuple(shape), *self._numbered())

    def wanted(self, stage: Stage) -> list[Hashable]:
        """The logical side: the elements that are used, however large the tensors are that they are in.

        Where what the logical program divides by for other elements is looked at too, all of it, and the ops beside it."""
        at = self.canonical.wanted(stage)
        divisors = self.canonical.elements.divisors
        whole = divisors.asked(stage)
        shape: list[Hashable] = []
        if whole:
            shape.append(self.part(stage.logical))
            shape.append(self.calls(divisors.beside(stage)))
            shape += [(self.place(p), positions.tobytes()) for p, positions in at.items()]
        elif at:
            used_positions = {p: np.unique(positions[positions >= 0]) for p, positions in at.items()}
            shape.append(self.used(stage.logical, used_positions))
            for p, positions in at.items():
                shape.append((self.place(p), np.where(positions < 0, -1, np.searchsorted(used_positions[p], positions)).tobytes()))
        symbols = [ids for part in stage.parts() for ids, _ in part.leaves.values()]
        for name, part in stage.defined.items():
            place, start = (LOGICAL, 0, name), self.canonical.elements.start[name]
            every = np.arange(start, start + math.prod(self.canonical.elements.small.shapes[name]))
            if not whole:
                every = every[np.isin(every, np.concatenate(symbols))]
            self.arrays.append(every)
            shape.append((self.place(place), len(every), self.part(part) if whole else self.used(part, {place: every - start})))
        return shape

    def used(self, part: Part, wanted: dict[Place, Array]) -> Hashable:
        """What these elements of a piece are made of, element by element: those of each tensor are numbered in order."""
        graph = self.canonical.elements.graph
        closure = self.canonical.elements.closures.of(part, {p: [positions] for p, positions in wanted.items()})
        numbers = closure.numbers
        shape: list[Hashable] = []
        for p, (ids, factor) in part.leaves.items():
            if p in numbers:
                self.arrays.append(ids[numbers[p]])
                shape.append((self.place(p), graph.kind(p), len(numbers[p]), self.factor(factor)))
        for o, (terms, leaves) in closure.made.items():
            call = graph.makers[o]
            which, where = leaves[:, 0], np.empty_like(leaves[:, 1])
            for n in np.unique(which).tolist():
                where[which == n] = np.searchsorted(numbers[call.inputs[n]], leaves[which == n, 1])
            inputs = tuple([-1 if i is None else self.place(i) for i in call.inputs])
            shape.append((self.place(o), inputs, terms.tobytes(), which.tobytes(), where.tobytes()))
        return tuple(shape)

    def _numbered(self) -> tuple[bytes, bytes, tuple[tuple[int, int], ...]]:
        """All symbols by the order in which they appear, and what is known about each."""
        every = np.concatenate(self.arrays)
        known, first, inverse = np.unique(every, return_index=True, return_inverse=True)
        order = np.argsort(first)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        numbers = np.where(every < 0, every, rank[inverse.reshape(-1)])  # marks such as NOTHING stay
        listed = known[order]
        return (
            numbers.tobytes(),
            np.where(listed < 0, listed, self.canonical.kinds(listed)).tobytes(),
            self.canonical.elements.vanishing({i: n for n, i in enumerate(listed.tolist())}),
        )

    def symbols(self, ids: Sequence[int]) -> int:
        self.arrays.append(np.array(ids, dtype=np.int64))
        return len(ids)

    def factor(self, factor: Factor) -> Hashable:
        return factor.number, factor.power, self.symbols([] if factor.element is None else [factor.element])

    def place(self, place: Place) -> int:
        return self.places.setdefault(place, len(self.places))

    def calls(self, calls: Sequence[Call]) -> Hashable:
        strict = self.canonical.elements.strict.tensors
        return tuple(
            [
                (
                    c.signature,
                    c.collective,
                    tuple([-1 if i is None else self.place(i) for i in c.inputs]),
                    tuple([self.place(o) for o in c.outputs]),
                    tuple([o[0] == LOGICAL and o[2] in strict for o in c.outputs]),
                )
                for c in calls
            ]
        )

    def part(self, part: Part) -> Hashable:
        calls = self.calls(part.calls)
        leaves = []
        for place, (ids, factor) in part.leaves.items():
            self.arrays.append(ids)
            leaves.append((self.place(place), len(ids), self.factor(factor)))
        return calls, tuple(leaves)


class _Elements(_Form):
    """Tensors are named as they are met on the way back from the goal, and their elements are numbered among those that are needed."""

    def of(self, stage: Stage) -> Hashable:
        elements, goal = self.canonical.elements, stage.goal
        compares = any(elements.compares(c) for part in stage.parts() for c in part.calls)
        self.arrays.append(goal.ids)
        shape: list[Hashable] = [compares, elements.infinite(goal.ids), len(goal.ids), self.factor(goal.factor)]
        shape.append(self.side(stage.plan, goal.wanted(), [(t.number, t.place, t.elements) for t in goal.terms], []))
        owners = self.canonical.wanted(stage)
        wanted = {p: [at[at >= 0]] for p, at in owners.items()}
        shape.append(self.side(stage.logical, wanted, [(1, p, at) for p, at in owners.items()], elements.divisors.of(stage)))
        if stage.defined:
            every = np.unique(np.concatenate([ids for part in stage.parts() for ids, _ in part.leaves.values()]))
            for name, part in stage.defined.items():
                place, start = (LOGICAL, 0, name), elements.start[name]
                inside = every[elements.within(every, name) >= 0]
                self.arrays.append(inside)
                shape.append(self.side(part, {place: [inside - start]}, [(1, place, inside - start)], []))
        every = np.concatenate(self.arrays)
        return (tuple(shape), np.isin(every, self.canonical.supported).tobytes(), *self._numbered())

    def side(
        self, part: Part, wanted: Mapping[Place, Sequence[Array]], goals: Sequence[tuple[Any, Place, Array]], divisors: Sequence[Divisor]
    ) -> Hashable:
        """What these elements of a piece are made of, and what its ops divide by; goals are positions in the wanted tensors, or −1."""
        graph = self.canonical.elements.graph
        closure = self.canonical.elements.closures.of(part, wanted, divisors)
        numbers = closure.numbers
        self.places = {}
        shape: list[Hashable] = []
        stack: list[Place] = []

        def name(place: Place) -> int:
            if place not in self.places:
                stack.append(place)
            return self.place(place)

        def leaves_of(call: Call, leaves: Array) -> tuple[bytes, bytes]:
            names, where = np.empty(len(leaves), dtype=np.int64), np.empty(len(leaves), dtype=np.int64)
            for n in np.unique(leaves[:, 0]).tolist():
                place, here = call.inputs[n], leaves[:, 0] == n
                assert place is not None
                names[here] = name(place)
                where[here] = np.searchsorted(numbers[place], leaves[here, 1])
            return names.tobytes(), where.tobytes()

        def follow() -> None:
            while stack:
                p = stack.pop()
                if p in part.leaves:
                    ids, factor = part.leaves[p]
                    self.arrays.append(ids[numbers[p]])
                    shape.append((self.place(p), graph.kind(p), len(numbers[p]), self.factor(factor)))
                else:
                    terms, leaves = closure.made[p]
                    shape.append((self.place(p), terms.tobytes(), *leaves_of(graph.makers[p], leaves)))

        for number, place, positions in goals:
            shape.append((number, name(place), np.where(positions < 0, -1, np.searchsorted(numbers[place], positions)).tobytes()))
            follow()
        for call, info, term_number, leaves in reversed(closure.below):
            shape.append((info, term_number, *leaves_of(call, leaves)))
            follow()
        return tuple(shape)
