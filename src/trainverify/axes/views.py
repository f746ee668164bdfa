"""Small sizes of flat axes: as many positions as the tensors that are written in one dimension have elements.

The pieces of a bucket have to add up to its tensors, and shards to stay equally long. Where that has no solution in whole numbers
the tensors of a bucket are given the proportions that they have at full size.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from flint import fmpq, fmpq_mat

from trainverify.axes.structure import Axes, Axis

_ROUNDS: Final = 24
_FREE: Final = 3  # pieces whose sizes are tried, of one bucket
_LARGEST: Final = 12  # size tried for those


class NotABoundary(Exception):
    """A position that the reduction did not keep."""


@dataclass(frozen=True)
class _Equation:
    """Σ count · piece = product of the sizes of other atoms; or 0, if there is no full size."""

    pieces: tuple[tuple[int, int], ...]
    atoms: tuple[int, ...] = ()
    full: int = 0


class Views:
    def __init__(self, axes: Axes, atoms: Mapping[int, Axis], sizes: Mapping[int, int], kept: Container[int]):
        self._axes = axes
        self._atoms = atoms
        self._size = dict(sizes)
        self._kept = kept
        self._ordered = True
        self._flats: dict[tuple[int, ...], list[list[Axis]]] = {}  # by the dimensions that are written in one, the pieces of each
        found = dict.fromkeys(e for view in axes.views for e in self._related(*view))
        self._equations = [*found, *dict.fromkeys(e for flats in self._flats.values() for e in self._same_positions(flats))]

    @staticmethod
    def _same_positions(flats: list[list[Axis]]) -> Iterator[_Equation]:
        """A position of a tensor where several of its flat forms are cut is one position."""
        known: dict[int, Counter[int]] = {}
        for pieces in flats:
            at, before = 0, Counter[int]()
            for p in pieces:
                if at in known:
                    difference = Counter(before)
                    difference.subtract(known[at])
                    left = tuple(sorted((x, n) for x, n in difference.items() if n))
                    if left:
                        yield _Equation(left)
                elif at:
                    known[at] = Counter(before)
                at += p.size
                before[id(p)] += 1

    def _related(self, given: object, made: object) -> Iterator[_Equation]:
        for dims, others in ((given, made), (made, given)):
            if len(dims) == 1 and dims[0].root().flat and not any(a.root().flat for a in others):  # type: ignore[arg-type, index, attr-defined]
                flat = dims[0].root()  # type: ignore[index]
                roots = [p.root() for p in (flat.pieces or [flat])]
                pieces = Counter(map(id, roots))
                leaves = self._axes.leaves(others)  # type: ignore[arg-type]
                self._flats.setdefault(tuple(map(id, leaves)), []).append(roots)
                if all(id(a) in self._atoms for a in leaves):
                    yield _Equation(tuple(sorted(pieces.items())), tuple(sorted(id(a) for a in leaves)), flat.size)
                return

    def sizes(self) -> dict[int, int]:
        """Sizes of all atoms, of flat axes and others; those found first where there are none that fit."""
        if all(self._size[key] == a.size for key, a in self._atoms.items()):
            return self._size
        if any(p not in self._size for e in self._equations for p, _ in e.pieces):
            raise NotABoundary("pieces of a bucket are cut once more, along one of several dimensions")
        if all(sum(n * self._size[p] for p, n in e.pieces) == self._right(e) for e in self._equations):
            return self._size
        parts, before = self._connected(), dict(self._size)
        for self._ordered in (True, False):  # unequal pieces stay unequal, in the same order, if that is possible
            self._size = dict(before)
            for n in range(_ROUNDS):
                open_parts = [part for part in parts if self._solved(part) is None]
                if not open_parts:
                    break
                self._proportioned(open_parts[0], n)  # buckets share sizes: what is changed for one may open another
            solutions = [self._solved(part) for part in parts]
            if None not in solutions:
                for found in solutions:
                    self._size.update(found or {})
                return self._size
        raise NotABoundary("no small sizes for buckets of tensors that are cut at these places")

    def _connected(self) -> list[list[_Equation]]:
        """Equations that share pieces."""
        groups: list[tuple[set[int], list[_Equation]]] = []
        for e in self._equations:
            mine, together = {p for p, _ in e.pieces}, [e]
            rest = []
            for pieces, found in groups:
                if pieces & mine:
                    mine |= pieces
                    together = found + together
                else:
                    rest.append((pieces, found))
            groups = [*rest, (mine, together)]
        return [found for _, found in groups]

    def _ones(self, e: _Equation) -> int:
        """Pieces of one element."""
        return sum(n for p, n in e.pieces if self._atoms[p].size == 1)

    def _right(self, e: _Equation) -> int:
        return 0 if not e.full else math.prod(self._size[a] for a in e.atoms)

    def _solved(self, part: list[_Equation]) -> dict[int, int] | None:
        """Whole numbers from 1 on for all pieces."""
        unknown = sorted({p for e in part for p, _ in e.pieces if self._atoms[p].size > 1}, key=lambda p: (-self._atoms[p].size, p))
        equations = [[*(dict(e.pieces).get(p, 0) for p in unknown), self._right(e) - self._ones(e)] for e in part]
        reduced, rank = fmpq_mat(len(part), len(unknown) + 1, [x for row in equations for x in row]).rref()
        rows = reduced.tolist()[:rank]
        pivots = [next(c for c, x in enumerate(row) if x) for row in rows]
        if len(unknown) in pivots:  # 0 = 1
            return None
        free = [c for c in range(len(unknown)) if c not in pivots]
        if len(free) > _FREE:
            return None
        sized = next((e for e in part if e.full), None)
        scale = Fraction(0) if sized is None else Fraction(self._right(sized), sized.full)
        near = [round(self._atoms[unknown[c]].size * scale) for c in free]  # in proportion, or small
        tried = [dict.fromkeys([*range(max(1, n - 2), n + 3), *range(1, _LARGEST + 1)]) for n in near]
        for chosen in itertools.product(*tried):
            values: dict[int, Any] = dict(zip(free, map(fmpq, chosen), strict=True))
            for r, c in enumerate(pivots):
                values[c] = sum((-rows[r][f] * values[f] for f in free), rows[r][-1])
                if values[c] < 1 or values[c].q != 1:
                    break
            else:
                if not self._ordered or self._in_order([(self._atoms[unknown[c]].size, v) for c, v in values.items()]):
                    return {unknown[c]: int(v.p) for c, v in values.items()}
        return None

    @staticmethod
    def _in_order(sizes: list[tuple[int, Any]]) -> bool:
        """(full, small) sizes: what is smaller stays smaller."""
        sizes.sort()
        return all(b > a or m == n for (m, a), (n, b) in itertools.pairwise(sizes))

    def _proportioned(self, part: list[_Equation], n: int) -> None:
        """Sizes in the proportions of the full ones, or larger ones."""
        part = [e for e in part if e.full]
        if not part:
            return
        ratio = {e: Fraction(self._right(e), e.full) for e in part}
        most = max(part, key=lambda e: ratio[e])
        changed = False
        for e in part:
            times = ratio[most] / Fraction(self._right(e), e.full)
            able = [a for a in e.atoms if a not in most.atoms and self._may_grow(a)]
            if times > 1 and able:
                a = max(able, key=lambda x: (self._atoms[x].size / self._size[x], x))
                size = min(self._atoms[a].size, max(self._size[a] + 1, round(self._size[a] * times)))
                self._size[a], changed = size, True
        if not changed:
            shared = set.intersection(*(set(e.atoms) for e in part)) or set(most.atoms)
            able = sorted((a for a in shared if self._may_grow(a)), key=lambda x: (self._size[x], x))
            if able and not self._tried(part, able):
                self._size[able[n % len(able)]] += 1

    def _tried(self, part: list[_Equation], able: list[int]) -> bool:
        """Whether a somewhat larger size of one atom is a solution; then it is taken."""
        for more in range(1, _LARGEST + 1):
            for a in able:
                before = self._size[a]
                self._size[a] = before + more
                if self._size[a] <= self._atoms[a].size and self._solved(part) is not None:
                    return True
                self._size[a] = before
        return False

    def _may_grow(self, a: int) -> bool:
        axis = self._atoms[a]
        return not axis.fixed and not axis.frozen and a not in self._kept and self._size[a] < axis.size
