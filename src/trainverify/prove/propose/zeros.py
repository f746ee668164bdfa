"""Logical elements that are 0 whatever the inputs are, by the ops that make them: a query that sees one key has no gradient.

Only a proposal, like all of alignment: that they are 0 is a claim, and a stage proves it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from trainverify.domains.element import Element
from trainverify.domains.polynomials import Scalars, TooLarge, Unsupported
from trainverify.prove.staged.check import solved
from trainverify.prove.staged.graphs import NOTHING
from trainverify.prove.staged.terms import Term, symbol, value

SECONDS: Final = 0.3  # for one element that was 0 on all points; those that are made alike are looked at once
PATIENTLY: Final = 3.0  # for one that was rounding only
TERMS: Final = 10_000


@dataclass(frozen=True)
class Leaf:
    number: int  # equal for equal ones; NOTHING for those that are 0
    kind: tuple[str, Any]  # what is known of it


@dataclass(frozen=True)
class Made:
    """A term, and what its leaves are."""

    term: Term
    leaves: tuple[Made | Leaf, ...]


class Zeros:
    """Elements that were looked at."""

    def __init__(self) -> None:
        self._known: dict[Any, bool] = {}
        self.missed = 0  # looks in vain

    def zero(self, made: Made, faint: bool = False) -> bool:
        """Whether an element is 0 for all values of its leaves. Faint ones, which were rounding only, get more time."""
        key = _key(made, {NOTHING: NOTHING})
        if key not in self._known:
            self._known[key] = _zero(made, PATIENTLY if faint else SECONDS)
            self.missed += not self._known[key]
        return self._known[key]


def _key(made: Made | Leaf, order: dict[int, int]) -> Any:
    """Names go, structure stays."""
    if isinstance(made, Leaf):
        return order.setdefault(made.number, len(order)), made.kind
    return made.term, tuple([_key(m, order) for m in made.leaves])


def _zero(made: Made, seconds: float) -> bool:
    scalars = Scalars(TERMS, time.process_time() + seconds)
    domain = Element(scalars)
    symbols: dict[int, Any] = {NOTHING: {}}

    def of(m: Made | Leaf) -> Any:
        if isinstance(m, Made):
            return value(m.term, lambda k: of(m.leaves[k]), domain)
        if m.number not in symbols:
            symbols[m.number] = symbol(scalars, m.number, *m.kind)
        return symbols[m.number]

    try:
        return not solved(scalars, domain.real(of(made)))
    except (Unsupported, TooLarge, RecursionError):
        return False
