"""Rows that are sorted, in a sample of a large plan: with fewer positions, and as many places as they have positions.

A choice of 6 among 160 experts becomes one of 2 among 6. Where some op cuts the sorted row after 5 places and another after 6,
both cuts stay, at different places: of all ways to sort a row the cuts are mapped alike. Of groups of experts one is chosen: with
more of them it would hardly matter to the choice of experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from trainverify.axes.structure import Axes, Axis
from trainverify.axes.system import System

LEAST: Final = 2  # positions of an axis or a piece that has more


@dataclass(frozen=True)
class Row:
    """An axis that is sorted somewhere."""

    digits: tuple[Axis, ...]  # that it is made of, slow first
    orders: tuple[Axis, ...]  # places in the sorted row, by every op that sorts it
    cuts: tuple[int, ...]  # where some op cuts them
    least: int = LEAST  # places between two cuts, if there are more

    @property
    def size(self) -> int:
        return math.prod(x.size for x in self.digits)

    @property
    def stretches(self) -> list[int]:
        """Places between two cuts."""
        ends = [*self.cuts, self.size]
        return [b - a for a, b in zip([0, *ends], ends, strict=False)]

    @property
    def needed(self) -> int:
        """Positions with which every stretch keeps some."""
        *first, _ = self.stretches
        return sum(min(n, self.least) for n in first) + 1 if first else min(self.size, self.least)

    def places(self, size: int) -> dict[int, int]:
        """Where the cuts are in a row of that size."""
        full = self.stretches
        small = [*(min(n, self.least) for n in full[:-1]), 1]
        left = size - sum(small)
        for i in reversed(range(len(full))):  # the last stretch is what is not chosen
            more = min(left, full[i] - small[i])
            small[i], left = small[i] + more, left - more
        found, at = {0: 0, self.size: size}, 0
        for cut, n in zip(self.cuts, small, strict=False):
            found[cut] = at = at + n
        return found


def rows(system: System) -> list[Row]:
    """All rows that are sorted."""
    axes = system.inference.axes
    by_row: dict[tuple[int, ...], tuple[tuple[Axis, ...], dict[int, Axis]]] = {}
    for row, order in system.inference.choices:
        digits = tuple(axes.leaves([row]))
        orders = by_row.setdefault(tuple(map(id, digits)), (digits, {}))[1]
        if order is not None:
            orders[id(order.root())] = order.root()
    found = []
    for digits, orders in by_row.values():
        cuts = {c for order in orders.values() for c in axes.cuts(order)}
        groups = any(len(x) > len(digits) and x[: len(digits)] == digits for x, _ in by_row.values())
        found.append(Row(digits, tuple(orders.values()), tuple(sorted(cuts)), 1 if groups else LEAST))
    return found


def grown(some: Sequence[Row], count: Mapping[int, int], least: Mapping[int, int]) -> dict[int, int]:
    """How many positions every digit needs so that all rows are long enough; `count` has those of mesh axes, `least` the others.

    The others grow first: they cost no ranks.
    """
    found = {**least, **count}
    changed = True
    while changed:
        changed = False
        for row in some:
            while math.prod(found[id(x)] for x in row.digits) < row.needed:
                x = min((x for x in row.digits if found[id(x)] < x.size), key=lambda x: (id(x) in count, found[id(x)]))
                found[id(x)] += 1
                changed = True
    return found


def pieces(axes: Axes, row: Row, size: int) -> list[tuple[Axis, int]] | None:
    """Pieces of the sorted row and how many places they keep; None where an op does more with them than cut."""
    places, found = row.places(size), []
    for order in row.orders:
        parts = [p.root() for p in order.pieces or [order]]
        if any(p.factors is not None or p.pieces is not None or p.frozen for p in parts):
            return None
        ends = [*axes.cuts(order), row.size]
        found += [(p, places[b] - places[a]) for p, a, b in zip(parts, [0, *ends], ends, strict=False)]
    return found


def agreed(several: Iterable[tuple[Axis, int]]) -> list[tuple[Axis, tuple[int, ...]]] | None:
    """Positions of axes that are left, if nothing is said about one in two ways."""
    found: dict[int, tuple[Axis, int]] = {}
    for x, n in several:
        if found.setdefault(id(x), (x, n))[1] != n:
            return None
    return [(x, tuple(range(n))) for x, n in found.values() if n < x.size]
