"""Counts that operators bring along, such as the 1/n of a mean, at reduced sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

from trainverify.axes.inference import NodeAxes
from trainverify.axes.reduction import Sizes
from trainverify.graph.program import Op, Ref
from trainverify.primitives.node import Node, ordered, rebuild


def own(op: Op) -> bool:
    """Whether fractions in an op are the operator's: none of its attributes is one, or differs between ranks."""
    return not any(isinstance(v, Fraction | Ref) for _, v in op.attrs)


def shrunk(full: Sequence[Node], small: Sequence[Node], axes: NodeAxes, sizes: Sizes) -> list[Node]:
    """An op at reduced sizes whose fractions one over a size of its dimensions are one over the reduced size."""
    counts: dict[int, int] = {}
    for node in ordered(tuple(full)):
        dims = [(a.root().size, sizes(a)) for a in axes.dims[id(node)]]
        for a, b in itertools.combinations(range(len(dims) + 1), 2):
            before, after = math.prod(x for x, _ in dims[a:b]), math.prod(y for _, y in dims[a:b])
            if before != after:
                counts.setdefault(before, after)
                counts.setdefault(before - 1, max(after - 1, 1))

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        attrs = node.attrs
        if node.prim == "const" and isinstance(attrs[0], Fraction) and attrs[0].numerator == 1 and attrs[0].denominator in counts:
            attrs = (Fraction(1, counts[attrs[0].denominator]),)
        return Node(node.prim, args, attrs, node.shape, node.kind)

    return rebuild(small, change)
