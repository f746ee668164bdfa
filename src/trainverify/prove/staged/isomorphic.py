"""Elements of one stage that differ in names only, many at a time: of those, one is looked at.

Elements are followed back through both pieces of a stage side by side, as arrays of positions, and separate where they are made
differently. Those that are together at the end are the same but for their symbols; what is left to compare is which of the symbols of an
element are equal, and what is known of each. Nothing is taken from fingerprints: everything that is said to be equal was compared.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.primitives.node import topological
from trainverify.prove.definedness import FACTS
from trainverify.prove.staged.canonical import Canonical
from trainverify.prove.staged.closures import Closure
from trainverify.prove.staged.graphs import Call, Place
from trainverify.prove.staged.records import Factor, Part, Stage

FEWEST: Final = 64  # elements of a goal that are worth it
ELEMENTS: Final = 8  # in a group, on average: below that, one by one is as good
LONGEST: Final = 20_000  # what an element is made of
CELLS: Final = 50_000_000  # of all of them
STEPS: Final = 50_000  # of all groups


class IsomorphicElements:
    """Of the stages of one elements."""

    def __init__(self, canonical: Canonical):
        self.canonical = canonical
        self.elements = canonical.elements
        self.graph = canonical.elements.graph
        self._forms: dict[int, tuple[Hashable, Array]] = {}  # how an element is made → its term, and its leaves in the order of that
        self._choosing: dict[int, bool] = {}  # by signature

    def classes(self, stage: Stage) -> Array | None:
        """For every element of the goal the first one that it differs from in names only. None where that is not known: where something is
        compared or chosen, what is said of one element may be of use for others."""
        if len(stage.goal.ids) < FEWEST or stage.nonzero or stage.extra or stage.defined or stage.divisions:
            return None
        if self.elements.divisors.asked(stage) or any(self._chooses(c) for part in stage.parts() for c in part.calls):
            return None
        found: dict[Hashable, int] = {}
        classes = np.empty(len(stage.goal.ids), dtype=np.int64)
        groups = _Walk(self, stage).groups()
        if groups is None:
            return None
        for group in sorted(groups, key=lambda g: int(g.members[0])):
            names = self._names(stage, group)
            if names is None:
                return None
            tokens = tuple(group.tokens)
            _, first, which = np.unique(names, axis=0, return_index=True, return_inverse=True)
            numbers = [found.setdefault((tokens, names[n].tobytes()), int(group.members[n])) for n in first.tolist()]
            classes[group.members] = np.array(numbers, dtype=np.int64)[which.reshape(-1)]
        return classes

    def _names(self, stage: Stage, group: _Group) -> Array | None:
        """For every element and symbol of it the first one that is the same, and what is known of it; None if more than that matters."""
        a = self.elements
        symbols = np.stack(group.symbols, axis=1) if group.symbols else np.empty((len(group.members), 0), dtype=np.int64)
        if a.supports and np.isin(symbols, self._vanishing).any():
            return None
        every, which = np.unique(symbols, return_inverse=True)
        known = np.where(every < 0, every, self.canonical.kinds(every))[which].reshape(symbols.shape)  # marks such as NOTHING stay
        return np.concatenate([_first_of_each(symbols), known, np.isin(symbols, np.array(stage.facts, dtype=np.int64))], axis=1)

    @cached_property
    def _vanishing(self) -> Array:
        """Elements that are 0 where others are, and those."""
        return np.array(sorted({*self.elements.supports, *self.elements.supported}), dtype=np.int64)

    def _chooses(self, call: Call) -> bool:
        """Whether an op compares or sorts anything, or takes one of several values."""
        if call.nodes is None:
            return False
        if call.signature not in self._choosing:
            nodes = topological(call.nodes)
            self._choosing[call.signature] = any(
                n.prim in ("select", "gather")
                or (n.prim == "map" and FACTS[n.attrs[0]].compares)
                or (n.prim == "rowwise" and n.attrs[0] != "cumsum")
                for n in nodes
            )
        return self._choosing[call.signature]

    def form(self, number: int, place: Place, at: int) -> tuple[Hashable, Array]:
        """How an element is made, up to names: a term, and where its leaves are among those that go with its number."""
        found = self._forms.get(number)
        if found is None:
            term = self.graph.term(place, at)
            canonical, leaves = self.graph.terms.canonical(term)
            ordered = [tuple(row) for row in self.graph.terms.relative(term)[1].tolist()]
            order = np.array([ordered.index(leaf) for leaf in leaves], dtype=np.int64)
            found = self._forms[number] = (canonical, order)
        return found


@dataclass(frozen=True)
class _Column:
    """An element of one tensor for every element of a group."""

    side: int  # the piece that the tensor is in
    place: Place
    positions: Array

    @cached_property
    def key(self) -> Hashable:
        return self.side, self.place, self.positions.tobytes()


@dataclass
class _Group:
    """Elements that are made alike as far as they were looked at."""

    members: Array
    todo: list[_Column | tuple[Hashable, Array]]  # the last one is next; tensors, and symbols with what is to be said of them
    tokens: list[Hashable] = field(default_factory=list)
    symbols: list[Array] = field(default_factory=list)
    seen: list[_Column] = field(default_factory=list)

    def only(self, which: Array) -> _Group:
        """Some of the elements."""
        todo = [replace(c, positions=c.positions[which]) if isinstance(c, _Column) else (c[0], c[1][which]) for c in self.todo]
        seen = [replace(c, positions=c.positions[which]) for c in self.seen]
        return _Group(self.members[which], todo, list(self.tokens), [s[which] for s in self.symbols], seen)


@dataclass(frozen=True)
class _Made:
    """How the needed elements of a tensor are made."""

    positions: Array
    numbers: Array
    begin: Array  # where the leaves of each element begin
    leaves: Array


class _Walk:
    """All elements of one stage, followed back through both pieces."""

    def __init__(self, isomorphic: IsomorphicElements, stage: Stage):
        self.isomorphic = isomorphic
        self.graph = isomorphic.graph
        self.stage = stage
        self.parts: list[Part] = [stage.plan, stage.logical]
        self._closures: list[Closure] = []
        self._made: dict[tuple[int, Place], _Made] = {}

    def groups(self) -> list[_Group] | None:
        """Groups of elements that are made alike; None if there are too many, or an element is too long."""
        done: list[_Group] = []
        cells = steps = 0
        most = len(self.stage.goal.ids) // ELEMENTS
        stack = list(self._start())
        while stack:
            group = stack.pop()
            separated = self._follow(group)
            if separated is None:
                return None
            stack += separated
            if not separated:
                done.append(group)
                cells += len(group.members) * len(group.symbols)
            steps += len(group.tokens) * (len(separated) + 1)
            if len(stack) + len(done) > most or cells > CELLS or steps > STEPS:
                return None
        return done

    def _start(self) -> Iterator[_Group]:
        """The elements of the goal by the logical tensors that they belong to."""
        stage, goal, canonical = self.stage, self.stage.goal, self.isomorphic.canonical
        closures, every = self.isomorphic.elements.closures, np.arange(len(goal.ids))
        positions = canonical.wanted(stage)
        self._closures = [
            closures.of(stage.plan, goal.wanted()),
            closures.of(stage.logical, {p: [at[at >= 0]] for p, at in positions.items()}),
        ]
        facts: list[_Column | tuple[Hashable, Array]] = []
        for f in stage.facts:
            facts.append(("fact", np.full(len(every), f)))
            if f in stage.written:
                place, at = self.isomorphic.elements.where(f)
                facts.append(_Column(len(self.parts), place, np.full(len(every), at)))
                self.parts.append(stage.written[f])
                self._closures.append(closures.of(stage.written[f], {place: [np.array([at])]}))
        shared = [*facts, *self._factor(goal.factor, len(every))]
        terms = [_Column(0, t.place, t.elements) for t in goal.terms]
        elsewhere = np.ones(len(every), dtype=bool)
        for p, at in positions.items():
            elsewhere &= at < 0
            if (at >= 0).any():
                yield _Group(every, [*shared, _Column(1, p, at), *terms]).only(np.flatnonzero(at >= 0))
        if elsewhere.any():
            yield _Group(every, [*shared, ("wanted", goal.ids), *terms]).only(np.flatnonzero(elsewhere))

    def _factor(self, factor: Factor, count: int) -> list[tuple[Hashable, Array]]:
        if factor.element is None:
            return [((factor.number, factor.power), np.full(count, -1))] if not factor.plain else []
        return [((factor.number, factor.power, "element"), np.full(count, factor.element))]

    def _follow(self, group: _Group) -> list[_Group] | None:
        """Goes back until there is nothing to do, or until elements separate: then the groups that they are in. None if it is too long."""
        seen = {c.key: n for n, c in enumerate(group.seen)}
        while group.todo:
            if len(group.tokens) > LONGEST:
                return None
            column = group.todo[-1]
            if isinstance(column, tuple):
                group.tokens.append(column[0])
                group.symbols.append(column[1])
                group.todo.pop()
                continue
            leaf = self.parts[column.side].leaves.get(column.place)
            if leaf is not None:
                ids, factor = leaf
                group.todo.pop()
                group.todo += self._factor(factor, len(group.members))
                group.tokens.append(self.graph.kind(column.place))
                group.symbols.append(ids[column.positions])
                continue
            known = seen.get(column.key)
            if known is not None:
                group.tokens.append(("again", known))
                group.todo.pop()
                continue
            separated = self._open(group, column)
            if separated:
                return separated
            seen[column.key] = len(group.seen)
            group.seen.append(column)
        return []

    def _open(self, group: _Group, column: _Column) -> list[_Group]:
        """What a column is made of is next; or, if it is made in several ways, the groups that are made in one."""
        made = self._how(column)
        call = self.graph.makers[column.place]
        where = np.searchsorted(made.positions, column.positions)
        numbers = made.numbers[where]
        if (numbers != numbers[0]).any():
            return [group.only(np.flatnonzero(numbers == n)) for n in np.unique(numbers).tolist()]
        form: Hashable = self.graph.same
        order = np.zeros(1, dtype=np.int64)
        if call.nodes is not None:
            form, order = self.isomorphic.form(int(numbers[0]), column.place, int(column.positions[0]))
        rows = made.leaves[made.begin[where][:, None] + order]
        inputs = rows[:, :, 0]
        if (inputs != inputs[0]).any():
            kinds, which = np.unique(inputs, axis=0, return_inverse=True)
            return [group.only(np.flatnonzero(which.reshape(-1) == n)) for n in range(len(kinds))]
        group.tokens.append(form)
        group.todo.pop()
        for n, at in reversed(list(zip(inputs[0].tolist(), rows[:, :, 1].T, strict=True))):
            place = call.inputs[n]
            assert place is not None
            group.todo.append(_Column(column.side, place, np.ascontiguousarray(at)))
        return []

    def _how(self, column: _Column) -> _Made:
        found = self._made.get((column.side, column.place))
        if found is None:
            closure: Closure = self._closures[column.side]
            positions = closure.numbers[column.place]
            numbers, leaves = closure.made[column.place]
            if self.graph.makers[column.place].nodes is None:
                found = _Made(positions, np.full(len(positions), -1), np.arange(len(positions)), leaves)
            else:
                every, which = np.unique(numbers, return_inverse=True)
                widths = np.array([self.graph.terms.width(n) for n in every.tolist()], dtype=np.int64)[which]
                found = _Made(positions, numbers, np.cumsum(widths) - widths, leaves)
            self._made[column.side, column.place] = found
        return found


def _first_of_each(symbols: Array) -> Array:
    """For every entry of every row where in the row its value is first."""
    order = np.argsort(symbols, axis=1, kind="stable")
    ordered = np.take_along_axis(symbols, order, axis=1)
    fresh = np.ones(symbols.shape, dtype=bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    at = np.maximum.accumulate(np.where(fresh, np.arange(symbols.shape[1]), 0), axis=1) if symbols.shape[1] else order
    found = np.empty_like(order)
    np.put_along_axis(found, order, np.take_along_axis(order, at, axis=1), axis=1)
    return found
