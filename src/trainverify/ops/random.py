"""Randomness: a number is a fixed function of (key, offset, place in the logical tensor)."""

from __future__ import annotations

import math

from trainverify.ops.table import op
from trainverify.primitives import node as F
from trainverify.primitives.node import Node, Shape

_RANDOM = "random"


def word(name: str, value: int) -> int:
    """A key or an offset, 64 bits with or without sign (as seeds of torch), as the signed number of the same bits: all that is hashed."""
    if not -F.WORD <= value < 2 * F.WORD:
        raise F.ShapeError(f"the {name} is not a number of 64 bits")
    return (value + F.WORD) % (2 * F.WORD) - F.WORD


def place(shape: Shape, origin: tuple[int, ...], logical_shape: Shape) -> Node:
    """Row-major number, in the logical tensor, of every element of the block of `shape` that starts at `origin`."""
    if not len(shape) == len(origin) == len(logical_shape):
        raise F.ShapeError("origin and logical_shape need one number for each dimension")
    steps = []
    for d, size in enumerate(shape):
        if not 0 <= origin[d] <= origin[d] + size <= logical_shape[d]:
            raise F.ShapeError(f"block {list(shape)} at {list(origin)} is not inside {list(logical_shape)}")
        stride = math.prod(logical_shape[d + 1 :])
        steps.append(F.broadcast(F.iota(size, origin[d] * stride, stride), shape, (d,)))
    return sum(steps[1:], start=steps[0]) if steps else F.const(0)


@op("uniform", _RANDOM, example="; shape=(2, 3), key=7")
def uniform(
    *,
    shape: tuple[int, ...],
    key: int,
    offset: int = 0,
    origin: tuple[int, ...] | None = None,
    logical_shape: tuple[int, ...] | None = None,
) -> Node:
    """Numbers between 0 and 1, fixed by (key, offset, place in the logical tensor), of the block at `origin`."""
    index = place(shape, origin or (0,) * len(shape), logical_shape or shape)
    return F.call("uniform", word("key", key), word("offset", offset), index)


@op("dropout", _RANDOM, example="x[a,b]; p=0.5, key=7")
def dropout(
    x: Node,
    *,
    p: float,
    key: int,
    offset: int = 0,
    origin: tuple[int, ...] | None = None,
    logical_shape: tuple[int, ...] | None = None,
    training: bool = True,
) -> Node:
    """x / (1 − p), or 0 with probability p. Which elements stay is fixed by (key, offset, place in the logical tensor).

    x is the block of a tensor of `logical_shape` that starts at `origin`: a block of a dropout is the dropout of the block."""
    if not 0 <= p <= 1:
        raise F.ShapeError("p is a probability")
    if not training or p == 0:
        return x
    index = place(x.shape, origin or (0,) * x.ndim, logical_shape or x.shape)
    if p == 1:
        return F.select(F.full(False, x.shape), x, 0)
    dropped = F.call("uniform", word("key", key), word("offset", offset), index) < p
    return F.select(dropped, 0, x / (1 - F.as_node(p)))
