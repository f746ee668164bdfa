"""Windows along a dimension as sums over a row, with the places of their elements as 0/1 indicators. Trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainverify.primitives.node import Node
from trainverify.primitives.windows import Windows
from trainverify.prove.algebra.elements import Elements
from trainverify.prove.algebra.places import Dims, Value
from trainverify.prove.algebra.terms import BORDERED, Index, Poly, Unsupported, constant, scale

Digits = Sequence[tuple[Index, int]]  # (index, size), slow first


@dataclass
class Windowed(Elements):
    """Elements of rows, window by window."""

    def window(self, node: Node, value: Value, given: Dims, dims: Dims) -> Value:
        """Element k of window p is Σ_t [t is its place]·x[t]. Where the border is not zero, it is a function of the row, of p and k."""
        d, how = node.attrs
        k, new = self.kernel, self.grid(dims)
        row, places, element = self._whole(given, d), self._whole(dims, d), self._whole(dims, len(dims) - 1)
        bound = [(k.bound(), size) for _, size in row]
        over = dict(bound)
        names = self._beside(given, dims[:-1], d) | {v: b for (v, _), (b, _) in zip(row, bound, strict=True)}
        covered = how.seen() == (1 << how.size) - 1
        out: Value = {}
        for key in new.blocks():
            if how.filler != 0:
                at = dict([*places, *element])
                out[key] = k.row(_bordered(how), k.substitute(value[key], names), over, list(at), list(at.values()))
            else:  # what no window has may be infinite
                x = k.substitute(k.finite(value[key]) if covered else k.number(value[key]), names)
                out[key] = k.sum(k.times(self._hit(how, bound, places, element), k.single(x)), over) if x else {}
        return out

    def overlap(self, node: Node, value: Value, given: Dims, dims: Dims) -> Value:
        """Σ over windows p and their elements k of [t is the place of k in p]·g[p, k]."""
        d, how = node.attrs
        k, new = self.kernel, self.grid(dims)
        places, element, row = self._whole(given, d), self._whole(given, len(given) - 1), self._whole(dims, d)
        windows, elements = ([(k.bound(), size) for _, size in digits] for digits in (places, element))
        names = self._beside(given[:-1], dims, d)
        names |= {v: b for (v, _), (b, _) in zip([*places, *element], [*windows, *elements], strict=True)}
        inside = all(len(how.within(n)) == how.count for n in range(how.kernel))
        out: Value = {}
        for key in new.blocks():  # what lies outside may be infinite
            g = k.substitute(k.finite(value[key]) if inside else k.number(value[key]), names)
            out[key] = k.sum(k.times(self._hit(how, row, windows, elements), k.single(g)), dict([*windows, *elements])) if g else {}
        return out

    def _whole(self, dims: Dims, d: int) -> list[tuple[Index, int]]:
        """The digits of a dimension, which must not be cut into pieces."""
        grid = self.grid(dims)
        if any(grid.leaves[i].tag or grid.leaves[i].owner is not None for i in grid.spans[d]):
            raise Unsupported("windows along unequal pieces")
        return [(-1 - i, grid.leaves[i].axis.size) for i in grid.spans[d]]

    def _hit(self, how: Windows, row: Digits, places: Digits, element: Digits) -> Poly:
        """1 where a position of the row is the place of an element of a window."""
        k = self.kernel
        at = [self._number(row), scale(self._number(places), -how.stride), scale(self._number(element), -how.dilation)]
        return k.indicator_of("eq0", k.add(*at, constant(how.low)))


def _bordered(how: Windows) -> str:
    """The name of windows with something else than zeros outside."""
    if math.isinf(how.filler):
        if how.filler > 0:
            raise Unsupported("windows that are infinite outside")
        return f"{BORDERED}{how.size} {how.kernel} {how.stride} {how.dilation} {how.low} {how.high}"
    raise Unsupported("windows with something else than zero or −∞ outside")
