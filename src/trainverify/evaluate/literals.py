"""How literals may be meant when sizes shrink: as they are, or as counts of something that has become smaller.

A literal that equals a size (or one over it) shrinks with that size. Which size it means is not said anywhere: it is one of its own op's
first, then any of both programs, also a multiple of one (where a rank's positions begin). A difference has to be there in all readings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from trainverify.axes.inference import NodeAxes, literal
from trainverify.axes.reduction import Sizes
from trainverify.axes.system import System
from trainverify.primitives import node as F
from trainverify.primitives.node import Node, ordered, rebuild

Counts = Mapping[int, int]  # product of sizes → the same at small sizes


@dataclass(frozen=True)
class Reading:
    """Sizes that literals may mean besides those of their own op, or before them. Fractions are an operator's own counts and parameters."""

    sizes: Counts = field(default_factory=dict)
    before: bool = False

    def read(self, value: Any, own: Counts) -> Any:
        """A literal at small sizes; the value itself if it means no size."""
        if not isinstance(value, int | Fraction | float) or value != value or abs(value) == float("inf") or abs(value) in (0, 1):
            return value
        exact = _over(value) or Fraction(value)
        other: Counts = {} if isinstance(value, Fraction) else self.sizes
        for known in (other, own) if self.before else (own, other):
            if exact.numerator == 1 and exact.denominator in known:
                return Fraction(1, known[exact.denominator])
            if exact.denominator == 1 and exact.numerator in known:
                return type(value)(known[exact.numerator])
        if exact.denominator == 1:
            best = max((n for n in other if exact.numerator % n == 0), default=None)
            if best is not None:
                return type(value)(exact.numerator // best * other[best])
        return value


OWN = Reading()


def _over(value: object) -> Fraction | None:
    """One over an integer that a float is the nearest one to."""
    if isinstance(value, float) and 1e-300 < value < 1 and 1.0 / round(1 / value) == value:
        return Fraction(1, round(1 / value))
    return None


def everywhere(system: System, sizes: Sizes) -> Iterator[Reading]:
    """Literals mean sizes of any op: where sizes that are equal shrink differently, the smallest, then the largest of them."""
    found: dict[int, set[int]] = {}
    seen: set[int] = set()
    written: set[Any] = set()  # literals that are not an operator's own
    ops = [x for several in (system.logical_ops, *system.unit_ops) for variants in several.values() for x in variants]
    for axes in (*(x.axes for x in ops), *(m.axes for m in system.meetings if m.axes is not None)):
        if id(axes) not in seen:
            seen.add(id(axes))
            for dims in axes.dims.values():
                for before, after in _products([(a.root().size, sizes(a)) for a in dims]):
                    found.setdefault(before, set()).add(after)
    for lowered in {id(x.lowered): x.lowered for x in ops}.values():
        literals = (n.attrs[0] for n in ordered(tuple(lowered.outputs)) if n.prim == "const" and n.kind != "bool")
        written.update(v for v in literals if not isinstance(v, Fraction))
    for n in [n for n in found if n > 2]:  # one less: an unbiased variance
        found.setdefault(n - 1, {max(x - 1, 1) for x in found[n]})
    for before in (False, True):
        for choose in (min, max):
            reading = Reading({n: choose(small) for n, small in found.items()}, before)
            if any(reading.read(v, {}) != v for v in written):
                yield reading


def _products(counts: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Sizes of dimensions next to each other together; of few dimensions also of others, as a batch norm counts them."""
    for i in range(len(counts)):
        before = after = 1
        for b, s in counts[i:]:
            before, after = before * b, after * s
            if before > 1:
                yield before, after
    if len(counts) <= 5:
        for others in itertools.chain.from_iterable(itertools.combinations(counts, n) for n in range(2, len(counts))):
            if (before := math.prod(b for b, _ in others)) > 1:
                yield before, math.prod(s for _, s in others)


def scaled(full: Sequence[Node], small: Sequence[Node], axes: NodeAxes, sizes: Sizes, reading: Reading) -> list[Node]:
    """An op at small sizes with its literals read that way; what counts positions on a line has shrunk with it."""
    if not any(n.prim == "const" and n.kind != "bool" and n.attrs[0] not in (0, 1) for n in ordered(tuple(small))):
        return list(small)
    own: dict[int, int] = {}
    for node in ordered(tuple(full)):
        for before, after in _products([(a.root().size, sizes(a)) for a in axes.dims[id(node)]]):
            if before != after:
                own.setdefault(before, after)
    for n, m in list(own.items()):
        own.setdefault(n - 1, max(m - 1, 1))

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        attrs = node.attrs
        if node.prim == "const" and node.kind == "real":
            attrs = (reading.read(attrs[0], own),)
        elif node.prim == "map" and attrs[0] in ("add", "sub") and node.kind == "int" and reading.sizes:
            args = tuple([a if (v := literal(a)) is None else F.expand(F.const(reading.read(v, own)), a.shape) for a in args])
        return Node(node.prim, args, attrs, node.shape, node.kind)

    return rebuild(small, change)
