"""Reading and writing by index, sorting.

Named `…_along_dim`, not `gather` and `scatter`: those are collectives.
"""

from __future__ import annotations

from trainverify.ops.table import op
from trainverify.primitives import node as F
from trainverify.primitives.node import Node
from trainverify.primitives.vjp import spread

_INDEXING = "indexing"


def cut_to(x: Node, ids: Node, d: int) -> Node:
    """x without what ids does not reach in the other dimensions."""
    if ids.ndim != x.ndim:
        raise F.ShapeError(f"ids {list(ids.shape)} for a tensor {list(x.shape)}")
    for i, size in enumerate(ids.shape):
        x = x if i == d else F.take(x, i, 0, size)
    return x


def spread_to(x: Node, ids: Node, src: Node, d: int) -> Node:
    """A tensor like x that holds, at ids along a dimension, the sum of what src brings there, else zeros."""
    y = spread(ids, cut_to(src, ids, -1), x.shape[d], d)
    for i, size in enumerate(x.shape):
        y = F.pad(y, i, 0, size - y.shape[i])
    return y


@op("take_along_dim", _INDEXING, example="x[a,v] ids:i64[a,j]; dim=1")
def take_along_dim(x: Node, ids: Node, *, dim: int) -> Node:
    """y[…, j, …] = x[…, ids[…, j, …], …] (`torch.gather`); ids may be smaller than x in the other dimensions."""
    d = F.axis(dim, x.ndim)
    return F.gather(cut_to(x, ids, d), ids, d)


@op("put_along_dim", _INDEXING, example="x[a,v] ids:i64[a,j] src[a,j]; dim=1")
def put_along_dim(x: Node, ids: Node, src: Node, *, dim: int) -> Node:
    """x, with src[…, j, …] written at position ids[…, j, …] (`torch.scatter`); along a dimension, ids must differ."""
    d = F.axis(dim, x.ndim)
    written = spread_to(x, ids, F.full(1, ids.shape), d)
    return F.select(written > 0, spread_to(x, ids, src, d), x)


@op("scatter_add", _INDEXING, example="x[a,v] ids:i64[a,j] src[a,j]; dim=1")
def scatter_add(x: Node, ids: Node, src: Node, *, dim: int) -> Node:
    """x, with src[…, j, …] added at position ids[…, j, …]."""
    return x + spread_to(x, ids, src, F.axis(dim, x.ndim))


@op("index_select", _INDEXING, example="x[v,h] ids:i64[j]; dim=0")
def index_select(x: Node, ids: Node, *, dim: int) -> Node:
    """The slices of x at a vector of positions along a dimension."""
    d = F.axis(dim, x.ndim)
    if ids.ndim != 1:
        raise F.ShapeError("index_select needs a vector of ids")
    return F.gather(x, F.broadcast(ids, (*x.shape[:d], ids.shape[0], *x.shape[d + 1 :]), (d,)), d)


@op("one_hot", _INDEXING, example="ids:i64[b]; num_classes=4")
def one_hot(ids: Node, *, num_classes: int, start: int = 0) -> Node:
    """A new last dimension of the classes from `start` on: 1 at the id's position, else 0 (integers); an id out of range gives zeros."""
    return F.cast(F.one_hot(ids, num_classes, start), "int")


@op("topk", _INDEXING, example="x[a,c]; k=2")
def topk(x: Node, *, k: int, dim: int = -1, largest: bool = True) -> tuple[Node, Node]:
    """The k largest (smallest) elements along a dimension in order, and their positions."""
    ids = F.take(F.rowwise("argsort", x, dim, descending=largest), dim, 0, k)
    return F.gather(x, ids, dim), ids


@op("sort", _INDEXING)
def sort(x: Node, *, dim: int = -1, descending: bool = False) -> tuple[Node, Node]:
    """The elements in order along a dimension, and where they were; equal ones keep their order."""
    return F.rowwise("sort", x, dim, descending), F.rowwise("argsort", x, dim, descending)


@op("argsort", _INDEXING)
def argsort(x: Node, *, dim: int = -1, descending: bool = False) -> Node:
    """Positions of the elements in order along a dimension; equal ones keep their order."""
    return F.rowwise("argsort", x, dim, descending)
