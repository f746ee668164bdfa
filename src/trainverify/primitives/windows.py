"""Windows along a dimension, and the sum of what overlaps in them.

The algebra sees a `window` as one map between positions. Everybody else sees pads, slices and a concatenation, which
`plain.py` makes of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainverify.primitives import node as F
from trainverify.primitives.node import Literal, Node, ShapeError

WINDOW, OVERLAP = "window", "overlap"


@dataclass(frozen=True)
class Windows:
    """Element k of window p is element p·stride + k·dilation − low of a row of `size`; outside of it stands `filler`."""

    size: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    low: int = 0
    high: int = 0
    filler: Literal = 0

    @property
    def count(self) -> int:
        return (self.low + self.size + self.high - self.dilation * (self.kernel - 1) - 1) // self.stride + 1

    def place(self, p: int, k: int) -> int:
        return p * self.stride + k * self.dilation - self.low

    def within(self, k: int) -> range:
        """The windows of which element k lies in the row."""
        first = max(0, -(self.place(0, k) // self.stride))
        last = min(self.count - 1, (self.size - 1 - self.place(0, k)) // self.stride)
        return range(first, last + 1)

    def seen(self) -> int:
        """The positions of the row that some window has, as bits of a number."""
        found, gap = 0, (1 << self.stride) - 1
        for k in range(self.kernel):
            if some := self.within(k):
                found |= ((1 << (len(some) * self.stride)) - 1) // gap << self.place(some[0], k)
        return found

    def all_reached(self) -> bool:
        """Whether some element of every window lies in the row."""
        return len({p for k in range(self.kernel) for p in self.within(k)}) == self.count

    def inside(self) -> range:
        """The windows that lie in the row as a whole."""
        first, last = self.within(0), self.within(self.kernel - 1)
        return range(max(first.start, last.start), min(first.stop, last.stop))


def window(x: Node, dim: int, how: Windows) -> Node:
    """A new last dimension of size `kernel`; along `dim` remain the places where the window starts."""
    d = F.axis(dim, x.ndim)
    if min(how.kernel, how.stride, how.dilation, how.count) < 1 or min(how.low, how.high) < 0 or how.size != x.shape[d]:
        raise ShapeError(f"a window of {how.kernel} (dilation {how.dilation}) in a dimension of size {x.shape[d] + how.low + how.high}")
    if (how.kernel, how.stride, how.low, how.high) == (1, 1, 0, 0):
        return F.reshape(x, (*x.shape, 1))
    return Node(WINDOW, (x,), (d, how), (*x.shape[:d], how.count, *x.shape[d + 1 :], how.kernel), x.kind)


def overlap(g: Node, dim: int, how: Windows) -> Node:
    """The sum of windows, each at its place: the adjoint of `window`."""
    d = F.axis(dim, g.ndim - 1)
    if (g.shape[d], g.shape[-1]) != (how.count, how.kernel):
        raise ShapeError(f"{how.count} windows of {how.kernel} in {list(g.shape)}")
    return Node(OVERLAP, (g,), (d, how), (*g.shape[:d], how.size, *g.shape[d + 1 : -1]), g.kind)
