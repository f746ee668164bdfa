"""Counts that operators bring along, such as the 1/n of a mean, at reduced sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

from trainverify.axes.inference import NodeAxes
from trainverify.axes.reduction import Sizes
from trainverify.graph.program import Op, Ref
from trainverify.primitives.node import Node, ordered, rebuild

CORRECTIONS: Final = 5  # a variance divides by so many less than it adds up


def written(op: Op, value: object) -> bool:
    """Whether a literal of an op comes from one of its attributes, or may: then it is the user's, not the operator's."""
    numbers = [x for _, v in op.attrs for x in _numbers(v)]
    if any(isinstance(x, Ref) for x in numbers):
        return True
    return isinstance(value, int | float | Fraction) and any(value in (x, -x) or (x and value * x in (1, -1)) for x in numbers)


def _numbers(value: object) -> list[Any]:
    if isinstance(value, tuple):
        return [x for v in value for x in _numbers(v)]
    return [value] if isinstance(value, int | float | Fraction | Ref) and not isinstance(value, bool) else []


def shrunk(full: Sequence[Node], small: Sequence[Node], axes: NodeAxes, sizes: Sizes) -> list[Node]:
    """An op at reduced sizes whose fractions one over a size of its dimensions are one over the reduced size."""
    sums = set()
    for node in ordered(tuple(full)):
        dims = [(a.root().size, sizes(a)) for a in axes.dims[id(node)]]
        for a, b in itertools.combinations(range(len(dims) + 1), 2):
            sums.add((math.prod(x for x, _ in dims[a:b]), math.prod(y for _, y in dims[a:b])))
    counts: dict[int, int] = {}
    for less in range(CORRECTIONS):
        for before, after in sorted(sums):
            if before != after:
                counts.setdefault(before - less, max(after - less, 1))

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        attrs = node.attrs
        if node.prim == "const" and isinstance(attrs[0], Fraction) and attrs[0].numerator == 1 and attrs[0].denominator in counts:
            attrs = (Fraction(1, counts[attrs[0].denominator]),)
        elif node.prim == "const" and node.kind == "real" and isinstance(attrs[0], int) and attrs[0] in counts:
            attrs = (counts[attrs[0]],)
        return Node(node.prim, args, attrs, node.shape, node.kind)

    return rebuild(small, change)
