"""Operators that move elements without computing: views, slices, joins, copies."""

from __future__ import annotations

from trainverify.ops.table import dtype_kind, op
from trainverify.primitives import node as F
from trainverify.primitives.node import Node

_SHAPING = "shape"


@op("identity", _SHAPING)
def identity(x: Node) -> Node:
    """The tensor itself."""
    return x


@op("multiref", _SHAPING)
def multiref(x: Node, *, times: int) -> tuple[Node, ...]:
    """`times` copies of a tensor; its gradient is the sum of theirs."""
    return (x,) * times


@op("to", _SHAPING)
def to(x: Node, *, dtype: str) -> Node:
    """Another dtype. Between floats this is the identity; a float becomes an integer by truncation."""
    return F.cast(x, dtype_kind(dtype))


@op("reshape", _SHAPING)
def reshape(x: Node, *, shape: tuple[int, ...]) -> Node:
    """The same elements in row-major order under another shape; one size may be −1."""
    return F.reshape(x, shape)


@op("transpose", _SHAPING)
def transpose(x: Node, *, dim0: int = 0, dim1: int = 1) -> Node:
    """Two dimensions exchanged."""
    order = list(range(x.ndim))
    a, b = F.axis(dim0, x.ndim), F.axis(dim1, x.ndim)
    order[a], order[b] = b, a
    return F.transpose(x, order)


@op("permute", _SHAPING)
def permute(x: Node, *, dims: tuple[int, ...]) -> Node:
    """Dimensions in another order."""
    return F.transpose(x, dims)


@op("slice", _SHAPING)
def slice_(x: Node, *, dim: int = 0, start: int = 0, stop: int, step: int = 1) -> Node:
    """x[start:stop:step] along one dimension."""
    return F.take(x, dim, start, stop, step)


@op("concat", _SHAPING)
def concat(*xs: Node, dim: int = 0) -> Node:
    """Tensors one after the other along a dimension."""
    return F.concat(xs, dim)


@op("split", _SHAPING)
def split(x: Node, *, sizes: tuple[int, ...], dim: int = 0) -> tuple[Node, ...]:
    """Consecutive pieces of the given sizes along a dimension."""
    d = F.axis(dim, x.ndim)
    if sum(sizes) != x.shape[d] or any(s < 0 for s in sizes):
        raise F.ShapeError(f"sizes {list(sizes)} do not add up to {x.shape[d]}")
    pieces = []
    start = 0
    for size in sizes:
        pieces.append(F.take(x, d, start, start + size))
        start += size
    return tuple(pieces)
