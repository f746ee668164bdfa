"""Logical elements that are 0 whatever the inputs are, by the ops that make them: a query that sees one key has no gradient.

Only a proposal: that they are 0 is a claim, and a stage proves it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from trainverify.domains.element import Element
from trainverify.domains.polynomials import Scalars, TooLarge, Unsupported
from trainverify.prove.propose.structure import Structure
from trainverify.prove.propose.table import NOISE
from trainverify.prove.propose.values import Values
from trainverify.prove.staged.check import solved
from trainverify.prove.staged.graphs import LARGE, LOGICAL, NOTHING, Place
from trainverify.prove.staged.terms import Term, symbol, value

SECONDS: Final = 0.3  # for one element that was 0 on all points; those that are made alike are looked at once
PATIENTLY: Final = 3.0  # for one that was rounding only
TERMS: Final = 10_000
MISSES: Final = (3, 50)  # elements of a tensor that are not 0 after all, different ones and all, after which no more are looked at
BEFORE: Final = 2  # gradients that are looked behind, for what is 0 by how they are made


@dataclass(frozen=True)
class Leaf:
    number: int  # equal for equal ones; NOTHING for those that are 0
    kind: tuple[str, Any]  # what is known of it


@dataclass(frozen=True)
class TermTree:
    """A term, and what its leaves are."""

    term: Term
    leaves: tuple[TermTree | Leaf, ...]


class Known:
    """Elements that were looked at."""

    def __init__(self) -> None:
        self._known: dict[Any, bool] = {}
        self.missed = 0  # looks in vain

    def zero(self, made: TermTree, faint: bool = False) -> bool:
        """Whether an element is 0 for all values of its leaves. Faint ones, which were rounding only, get more time."""
        key = _key(made, {NOTHING: NOTHING})
        if key not in self._known:
            self._known[key] = _zero(made, PATIENTLY if faint else SECONDS)
            self.missed += not self._known[key]
        return self._known[key]


class Zeros:
    """Of the tensors of a logical program, in its order."""

    def __init__(self, values: Values, structure: Structure):
        self.values = values
        self.elements = values.elements
        self.graph = values.graph
        self.structure = structure
        self._known = Known()

    def name(self, tensor: str) -> None:
        """Names elements that are 0 by definition, or by the op that makes them from others; of gradients that are rounding only, by ops
        before it too."""
        place, first, quiet = (LOGICAL, 0, tensor), self.elements.start[tensor], self.values.quiet
        span = slice(first, first + math.prod(self.values.small.shapes[tensor]))
        sizes, usable, same = np.abs(self.values.table.values[:, span]), self.values.usable[span], self.structure.same
        maybe = usable & ~sizes.any(axis=0)
        faint = usable & (sizes[:quiet].max(axis=0, initial=0.0) <= NOISE * sizes[:quiet].max(initial=0.0))
        call = self.graph.makers[place]
        if not (maybe | faint).any() or self.graph.work(place) > LARGE:
            return
        different, every = self._known.missed + MISSES[0], MISSES[1]
        for n, at in enumerate(np.flatnonzero(maybe | faint).tolist()):
            if self._known.missed > different or (n > every and not (same[span] == NOTHING).any()):
                return
            for before in (0, BEFORE) if call.backward else (0,):
                made = self._made_of(place, at, before)
                if made is not None and self._known.zero(made, bool(faint[at] and not maybe[at])):
                    same[first + at] = NOTHING
                    break

    def _made_of(self, place: Place, at: int, before: int) -> TermTree | None:
        """How an element of a logical tensor is made, back behind so many gradients, and of what; None if some of it may be infinite."""
        a = self.elements
        term, leaves = self.graph.definition(place, at)
        found: list[TermTree | Leaf] = []
        for p, q in leaves:
            i = int(a.ids[p[2]].reshape(-1)[q])
            owner, position = a.where(i)
            call = self.graph.makers.get(owner)
            kind = a.symbol_kind(i)
            if kind[0] == "real" and not self.values.usable[i]:
                return None
            deeper = before and self.structure.same[i] != NOTHING and call is not None and call.backward
            if deeper and self.graph.work(owner) <= LARGE:
                made = self._made_of(owner, position, before - 1)
                if made is None:
                    return None
                found.append(made)
            else:
                number = int(self.structure.places[p][q])
                found.append(Leaf(NOTHING if number == self.structure.nothing else number, kind))
        return TermTree(term, tuple(found))


def _key(made: TermTree | Leaf, order: dict[int, int]) -> Any:
    """Names go, structure stays."""
    if isinstance(made, Leaf):
        return order.setdefault(made.number, len(order)), made.kind
    return made.term, tuple([_key(m, order) for m in made.leaves])


def _zero(made: TermTree, seconds: float) -> bool:
    scalars = Scalars(TERMS, time.process_time() + seconds)
    domain = Element(scalars)
    symbols: dict[int, Any] = {NOTHING: {}}

    def of(m: TermTree | Leaf) -> Any:
        if isinstance(m, TermTree):
            return value(m.term, lambda k: of(m.leaves[k]), domain)
        if m.number not in symbols:
            symbols[m.number] = symbol(scalars, m.number, *m.kind)
        return symbols[m.number]

    try:
        return not solved(scalars, domain.real(of(made)))
    except (Unsupported, TooLarge, RecursionError):
        return False
