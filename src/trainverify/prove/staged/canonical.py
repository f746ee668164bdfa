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
from trainverify.prove.staged.align import Alignment
from trainverify.prove.staged.graphs import LOGICAL, Call, Place
from trainverify.prove.staged.needed import Divisor
from trainverify.prove.staged.records import Factor, Part, Stage


class Canonical:
    """Forms of the stages of one alignment."""

    def __init__(self, alignment: Alignment):
        self.alignment = alignment
        numbers: dict[Hashable, int] = {}
        kinds = [numbers.setdefault(alignment.symbol_kind(alignment.start[name]), len(numbers)) for name in alignment.start]
        owners = {name: n for n, name in enumerate(alignment.start)}
        self._owner = np.array([owners[name] for name in alignment.owner], dtype=np.int64)
        self._first = np.array([alignment.start[name] for name in alignment.owner], dtype=np.int64)
        self._kind = np.array(kinds, dtype=np.int64)[self._owner] if kinds else self._owner
        self._doubtful = np.array([not alignment.numbers_only(name) for name in alignment.start], dtype=bool)[self._owner]
        self._states = np.full(len(self._owner), -1)  # of elements that may not be numbers, once known
        self._names = list(alignment.start)
        self._beyond = numbers.setdefault(("real", None), len(numbers))  # scalars of the plan
        self._kinds = len(numbers)

    @cached_property
    def supported(self) -> Array:
        """Elements with which others vanish."""
        return np.array(sorted(self.alignment.supported), dtype=np.int64)

    def form(self, stage: Stage) -> Hashable:
        return _Form(self).of(stage)

    def elements(self, stage: Stage) -> Hashable | None:
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
            self._states[i] = self.alignment.state(i)
        found[doubtful] += self._kinds * self._states[which]
        return found

    def places(self, ids: Array) -> list[tuple[int, Place]]:
        """The logical tensors that elements belong to: the number of each, and its place."""
        known = np.unique(self._owner[ids[(ids >= 0) & (ids < len(self._owner))]])
        return [(int(n), (LOGICAL, 0, self._names[int(n)])) for n in known]

    def within(self, ids: Array, owner: int) -> Array:
        """Positions of elements in a logical tensor; −1 for those of others."""
        inside = (ids >= 0) & (ids < len(self._owner))
        at = np.where(inside, ids, 0)
        return np.where(inside & (self._owner[at] == owner), ids - self._first[at], -1)


class _Form:
    def __init__(self, canonical: Canonical):
        self.canonical = canonical
        self.places: dict[Place, int] = {}
        self.arrays: list[Array] = []  # of symbols, numbered at the end

    def of(self, stage: Stage) -> Hashable:
        goal = stage.goal
        self.arrays.append(goal.ids)
        loose = self.canonical.alignment.loose(goal.ids)
        shape: list[Hashable] = [stage.nonzero, stage.value, loose, len(goal.ids), self.factor(goal.factor)]
        shape += [(t.number, self.place(t.place), t.elements.tobytes()) for t in goal.terms]
        shape.append(self.part(stage.plan))
        shape += self.wanted(stage)
        shape += [(self.symbols([i]), self.place(place), self.part(part)) for i, (place, part) in stage.extra.items()]
        shape.append(self.symbols(stage.facts))
        for i in stage.facts:
            if i in stage.written:
                place, at = self.canonical.alignment.where(i)
                shape.append((self.symbols([i]), self.place(place), at, self.part(stage.written[i])))
        shape.append(tuple([self.part(p) for p in stage.divisions]))
        return (tuple(shape), *self._numbered())

    def wanted(self, stage: Stage) -> list[Hashable]:
        """The logical side: the elements that are needed, however large the tensors are that they are in.

        Where what the logical program divides by for other elements is looked at too, all of it, and the ops beside it."""
        ids = stage.goal.ids
        found = [(n, p) for n, p in self.canonical.places(ids) if p in stage.logical]
        divisors = self.canonical.alignment.divisors
        whole = divisors.asked(stage)
        shape: list[Hashable] = []
        if whole:
            shape.append(self.part(stage.logical))
            shape.append(self.calls(divisors.beside(stage)))
            shape += [(self.place(p), self.canonical.within(ids, n).tobytes()) for n, p in found]
        elif found:
            at = {p: self.canonical.within(ids, n) for n, p in found}
            needed = {p: np.unique(positions[positions >= 0]) for p, positions in at.items()}
            shape.append(self.needed(stage.logical, needed))
            for p, positions in at.items():
                shape.append((self.place(p), np.where(positions < 0, -1, np.searchsorted(needed[p], positions)).tobytes()))
        symbols = [ids for part in stage.parts() for ids, _ in part.leaves.values()]
        for name, part in stage.defined.items():
            place, start = (LOGICAL, 0, name), self.canonical.alignment.start[name]
            every = np.arange(start, start + math.prod(self.canonical.alignment.small.shapes[name]))
            if not whole:
                every = every[np.isin(every, np.concatenate(symbols))]
            self.arrays.append(every)
            shape.append((self.place(place), len(every), self.part(part) if whole else self.needed(part, {place: every - start})))
        return shape

    def needed(self, part: Part, wanted: dict[Place, Array]) -> Hashable:
        """What these elements of a piece are made of, element by element: those of each tensor are numbered in order."""
        graph = self.canonical.alignment.graph
        closure = self.canonical.alignment.needed.of(part, {p: [positions] for p, positions in wanted.items()})
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
            self.canonical.alignment.vanishing({i: n for n, i in enumerate(listed.tolist())}),
        )

    def symbols(self, ids: Sequence[int]) -> int:
        self.arrays.append(np.array(ids, dtype=np.int64))
        return len(ids)

    def factor(self, factor: Factor) -> Hashable:
        return factor.number, factor.power, self.symbols([] if factor.element is None else [factor.element])

    def place(self, place: Place) -> int:
        return self.places.setdefault(place, len(self.places))

    def calls(self, calls: Sequence[Call]) -> Hashable:
        strict = self.canonical.alignment.strict.tensors
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
        alignment, goal = self.canonical.alignment, stage.goal
        compares = any(alignment.compares(c) for part in stage.parts() for c in part.calls)
        self.arrays.append(goal.ids)
        shape: list[Hashable] = [compares, alignment.loose(goal.ids), len(goal.ids), self.factor(goal.factor)]
        shape.append(self.side(stage.plan, goal.wanted(), [(t.number, t.place, t.elements) for t in goal.terms], []))
        owners = [(p, self.canonical.within(goal.ids, n)) for n, p in self.canonical.places(goal.ids) if p in stage.logical]
        wanted = {p: [at[at >= 0]] for p, at in owners}
        shape.append(self.side(stage.logical, wanted, [(1, p, at) for p, at in owners], alignment.divisors.of(stage)))
        if stage.defined:
            every = np.unique(np.concatenate([ids for part in stage.parts() for ids, _ in part.leaves.values()]))
            for name, part in stage.defined.items():
                place, start = (LOGICAL, 0, name), alignment.start[name]
                own = every[(every >= start) & (every < start + math.prod(alignment.small.shapes[name]))]
                self.arrays.append(own)
                shape.append(self.side(part, {place: [own - start]}, [(1, place, own - start)], []))
        every = np.concatenate(self.arrays)
        return (tuple(shape), np.isin(every, self.canonical.supported).tobytes(), *self._numbered())

    def side(
        self, part: Part, wanted: Mapping[Place, Sequence[Array]], goals: Sequence[tuple[Any, Place, Array]], divisors: Sequence[Divisor]
    ) -> Hashable:
        """What these elements of a piece are made of, and what its ops divide by; goals are positions in the wanted tensors, or −1."""
        graph = self.canonical.alignment.graph
        closure = self.canonical.alignment.needed.of(part, wanted, divisors)
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
