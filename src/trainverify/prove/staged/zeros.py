"""Logical elements that are 0 whatever the inputs are, by the op that makes them: a query that sees one key has no gradient.

Only a proposal, like all of alignment: that they are 0 is a claim, and a stage proves it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from trainverify.domains.element import Element
from trainverify.domains.polynomials import Scalars, TooLarge, Unsupported
from trainverify.prove.staged.lookup import NOTHING
from trainverify.prove.staged.terms import Term, symbol, value

SECONDS: Final = 0.5  # for one element; those that are made alike are looked at once
TERMS: Final = 5_000


Leaf = tuple[int, tuple[str, Any]]  # a number that equal ones share, and what is known of it


class Zeros:
    """Terms that were looked at."""

    def __init__(self) -> None:
        self._known: dict[Any, bool] = {}

    def zero(self, term: Term, leaves: Sequence[Leaf]) -> bool:
        """Whether a term is 0 for all values of its leaves; the number NOTHING is for those that are 0."""
        order = {NOTHING: NOTHING}
        numbers = tuple(order.setdefault(n, len(order)) for n, _ in leaves)
        kinds = tuple(kind for _, kind in leaves)
        key = (term, numbers, kinds)
        if key not in self._known:
            self._known[key] = _zero(term, numbers, kinds)
        return self._known[key]


def _zero(term: Term, numbers: Sequence[int], kinds: Sequence[tuple[str, Any]]) -> bool:
    scalars = Scalars(TERMS, time.monotonic() + SECONDS)
    symbols: dict[int, Any] = {NOTHING: {}}
    try:
        for n, kind in zip(numbers, kinds, strict=True):
            if n not in symbols:
                symbols[n] = symbol(scalars, n, *kind)
        return bool(value(term, lambda k: symbols[numbers[k]], Element(scalars)) == {})
    except (Unsupported, TooLarge, RecursionError):
        return False
