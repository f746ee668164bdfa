"""Numbers for elements of both programs: made by the same term from elements with the same numbers means the same number.

Sums are compared by what is added up, in whatever order and however many steps: parts of a batch, shares of ranks. Only a guide for
alignment: what is said with it is a claim like all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from trainverify.domains.arrays import Array
from trainverify.prove.staged.graphs import LOGICAL, Call, Graph, Place
from trainverify.prove.staged.lookup import NOTHING
from trainverify.prove.staged.terms import Term

LARGE: Final = 2_000_000  # expressions of an op that are looked through for it
SUMMANDS: Final = 256  # of the longest sums that are compared that way
Sum = tuple[tuple[int, ...], ...]  # products of numbers, sorted
Key = tuple[tuple[str, Any] | None, tuple[int, ...] | Sum]


class Structure:
    """Logical elements first, then the plan's, in the order of execution."""

    def __init__(self, graph: Graph, same: Array):
        self.graph = graph
        self.same = same  # logical element → the first one with its values, or NOTHING
        self.elements: list[int] = []  # number of every logical element, by id
        self.first: dict[int, int] = {}  # number → the first logical element that has it
        self.places: dict[Place, list[int]] = {}
        self._numbers: dict[Key, int] = {}
        self._sums: dict[int, Sum] = {}  # what numbers are sums of
        self._call: Call | None = None  # the last one that was looked at
        self._inside: dict[Term, int] = {}  # its terms
        self.nothing = self.number((None, (NOTHING,)))
        self.first[self.nothing] = NOTHING

    def number(self, key: Key) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def source(self, i: int) -> None:
        """A logical element that nothing is known of."""
        self._logical(i, self.number((None, (i,))))

    def _logical(self, i: int, number: int) -> None:
        assert i == len(self.elements)
        first = int(self.same[i])
        self.first.setdefault(number, first)
        self.elements.append(self.nothing if first == NOTHING else number if first == i else self.elements[first])

    def named(self, place: Place, ids: Iterable[int]) -> None:
        """A tensor by the logical elements that it is said to be."""
        known = len(self.elements)
        if self._call is not None and place in self._call.inputs:
            self._call = None
        self.places[place] = [self.elements[i] if 0 <= i < known else self.number((None, (i,))) for i in ids]

    def logical(self, name: str, first: int) -> None:
        """The elements of a logical tensor, whose ids start at `first`."""
        made = self.made((LOGICAL, 0, name))
        if made is None:
            for i in range(first, first + math.prod(self.graph.shape((LOGICAL, 0, name)))):
                self.source(i)
        else:
            for at, number in enumerate(made):
                self._logical(first + at, number)

    def made(self, place: Place) -> list[int] | None:
        """Numbers of the elements of a tensor, from those of the op's inputs; None if that is too much, or those are not known."""
        call = self.graph.makers[place]
        if any(i is not None and i not in self.places for i in call.inputs) or self.graph.work(place) > LARGE:
            return None
        sender = self.graph.sent(place)
        if sender is not None:
            return self.places[sender]
        if self._call is not call:
            self._call, self._inside = call, {}
        return [self._of(self.graph.term(place, at)) for at in range(math.prod(self.graph.shape(place)))]

    def _of(self, term: Term) -> int:
        found = self._inside.get(term)
        if found is None:
            assert self._call is not None
            if term.op == "leaf":
                place, at = self.graph.leaf(self._call, term.info)
                found = self.places[place][at]
            else:
                numbers = tuple([self._of(a) for a in term.args])
                added = self._sum(term, numbers)
                found = self.number(((term.op, term.info), numbers)) if added is None else added
            self._inside[term] = found
        return found

    def _sum(self, term: Term, numbers: tuple[int, ...]) -> int | None:
        """The number of a sum of products; None for all other terms."""
        lengths: Sequence[int]
        if term.op == "dot" and 0 not in term.info:
            lengths = term.info
        elif term.op == "map" and term.info[0] == "add":
            lengths = (1, 1)
        else:
            return None
        products: list[tuple[int, ...]] = []
        at = 0
        for n in lengths:
            factors = tuple(sorted(numbers[at : at + n]))
            at += n
            products += self._sums.get(factors[0], [factors]) if n == 1 else [factors]
            if len(products) > SUMMANDS:
                return None
        added = tuple(sorted(products))
        number = self.number((None, added))
        self._sums[number] = added
        return number

    def meant(self, numbers: Sequence[int]) -> list[int] | None:
        """The logical elements that have these numbers; None if one has none."""
        found = [self.first[n] for n in numbers if n in self.first]
        return found if len(found) == len(numbers) else None
