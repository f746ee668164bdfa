"""Numbers for elements of both programs: made by the same term from elements with the same numbers means the same number.

Sums are compared by what is added up, in whatever order and however many steps: parts of a batch, shares of ranks. Only a guide for
alignment: what is said with it is a claim like all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from trainverify.prove.staged.graphs import LOGICAL, Graph, Place
from trainverify.prove.staged.terms import Term

LARGE: Final = 30_000_000  # expressions of an op that are looked through for it
SUMMANDS: Final = 256  # of the longest sums that are compared that way
Sum = tuple[tuple[int, ...], ...]  # products of numbers, sorted
Key = tuple[Term | None, tuple[int, ...] | Sum]


class Structure:
    """Logical elements first, then the plan's, in the order of execution."""

    def __init__(self, graph: Graph, same: Sequence[int]):
        self.graph = graph
        self.same = same  # logical element → the first one with its values
        self.elements: list[int] = []  # number of every logical element, by id
        self.first: dict[int, int] = {}  # number → the first logical element that has it
        self.places: dict[Place, list[int]] = {}
        self._numbers: dict[Key, int] = {}
        self._sums: dict[int, Sum] = {}  # what numbers are sums of

    def number(self, key: Key) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def source(self, i: int) -> None:
        """A logical element that nothing is known of."""
        self._logical(i, self.number((None, (i,))))

    def _logical(self, i: int, number: int) -> None:
        assert i == len(self.elements)
        first = self.same[i]
        self.first.setdefault(number, first)
        self.elements.append(number if first == i else self.elements[first])

    def named(self, place: Place, ids: Iterable[int]) -> None:
        """A tensor by the logical elements that it is said to be."""
        known = len(self.elements)
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
        if call.nodes is None:
            sender = call.inputs[call.outputs.index(place)]
            assert sender is not None
            return self.places[sender]
        found = []
        for at in range(math.prod(self.graph.shape(place))):
            term, leaves = self.graph.definition(place, at)
            numbers = tuple(self.places[p][n] for p, n in leaves)
            found.append(numbers[0] if term is self.graph.same else self._of(term, numbers))
        return found

    def _of(self, term: Term, numbers: tuple[int, ...]) -> int:
        added = self._sum(term, numbers)
        return self.number((term, numbers)) if added is None else added

    def _sum(self, term: Term, numbers: tuple[int, ...]) -> int | None:
        """The number of a sum of products; None for all other terms."""
        products: list[tuple[int, ...]] = []
        for p in _products(term):
            if p is None:
                return None
            factors = tuple(sorted(numbers[n] for n in p))
            products += self._sums.get(factors[0], [factors]) if len(factors) == 1 else [factors]
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


def _products(term: Term) -> Iterator[tuple[int, ...] | None]:
    """The leaves of the products that a term adds up; None for what is not one."""
    if term.op == "leaf":
        yield (term.info,)
    elif term.op == "map" and term.info[0] == "add":
        for a in term.args:
            yield from _products(a)
    elif term.op == "dot" and 0 not in term.info:
        at = 0
        for n in term.info:
            yield tuple([a.info for a in term.args[at : at + n]]) if all(a.op == "leaf" for a in term.args[at : at + n]) else None
            at += n
    else:
        yield None
