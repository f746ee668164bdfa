"""Windows and overlaps written out in the other primitives: pads, slices, concatenations and sums."""

from __future__ import annotations

from collections.abc import Sequence

from trainverify.primitives import node as F
from trainverify.primitives.node import Node
from trainverify.primitives.vjp import vjp
from trainverify.primitives.windows import OVERLAP, WINDOW, Windows


def compound(outputs: Sequence[Node]) -> bool:
    return any(n.prim in (WINDOW, OVERLAP) for n in F.topological(outputs))


def plain(outputs: Sequence[Node]) -> list[Node]:
    """The same nodes with windows and overlaps written out."""

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        if node.prim == WINDOW:
            return _slices(args[0], *node.attrs)
        if node.prim == OVERLAP:
            return _sum_of_slices(args[0], *node.attrs)
        return Node(node.prim, args, node.attrs, node.shape, node.kind)

    return F.rebuild(F.rebuild(outputs, change))


def _slices(x: Node, d: int, how: Windows) -> Node:
    """A padded row, one slice of it for each element of a window, side by side."""
    x = F.pad(x, d, how.low, how.high, how.filler)
    stop = (how.count - 1) * how.stride + 1
    slices = [F.take(x, d, i * how.dilation, i * how.dilation + stop, how.stride) for i in range(how.kernel)]
    return F.concat([F.reshape(s, (*s.shape, 1)) for s in slices], x.ndim)


def _sum_of_slices(g: Node, d: int, how: Windows) -> Node:
    """The derivative of those slices, which does not depend on the row itself."""
    row = F.input_(-1, (*g.shape[:d], how.size, *g.shape[d + 1 : -1]), "real")
    (found,) = vjp([_slices(row, d, how)], [g], [row])
    return found
