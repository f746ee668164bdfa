"""Reductions over dimensions, and running sums."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

from trainverify.ops.arithmetic import divided
from trainverify.ops.table import op
from trainverify.primitives import node as F
from trainverify.primitives.node import Node

_REDUCTION = "reduction"
Dims = int | tuple[int, ...] | None


def dims_of(x: Node, dim: Dims) -> tuple[int, ...]:
    """The dimensions that a `dim` attribute names; None is all of them."""
    if dim is None:
        return tuple(range(x.ndim))
    return (dim,) if isinstance(dim, int) else dim


def count_of(x: Node, dims: Iterable[int]) -> int:
    """How many elements a reduction over `dims` combines."""
    return math.prod(x.shape[d] for d in {F.axis(d, x.ndim) for d in dims})


def mean_over(x: Node, dims: Iterable[int], keepdim: bool = False) -> Node:
    dims = tuple(dims)
    return divided(F.total(x, dims, keepdim), count_of(x, dims))


@op("sum", _REDUCTION, example="x[a,b]; dim=1")
def sum_(x: Node, *, dim: Dims = None, keepdim: bool = False) -> Node:
    """Sum over dimensions (all of them by default)."""
    return F.total(x, dims_of(x, dim), keepdim)


@op("mean", _REDUCTION, example="x[a,b]; dim=1")
def mean(x: Node, *, dim: Dims = None, keepdim: bool = False) -> Node:
    """Mean over dimensions (all of them by default)."""
    return mean_over(x, dims_of(x, dim), keepdim)


@op("var", _REDUCTION, example="x[a,b]; dim=1")
def var(x: Node, *, dim: Dims = None, correction: int = 1, keepdim: bool = False) -> Node:
    """Σ (x − mean)² / (count − correction) over dimensions (all of them by default)."""
    return variance(x, dims_of(x, dim), correction, keepdim)


def variance(x: Node, dims: tuple[int, ...], correction: int, keepdim: bool) -> Node:
    centred = x - mean_over(x, dims, keepdim=True)
    return divided(F.total(centred * centred, dims, keepdim), count_of(x, dims) - correction)


@op("std", _REDUCTION, example="x[a,b]; dim=1")
def std(x: Node, *, dim: Dims = None, correction: int = 1, keepdim: bool = False) -> Node:
    """Square root of the variance."""
    return F.power(variance(x, dims_of(x, dim), correction, keepdim), Fraction(1, 2))


@op("amax", _REDUCTION, example="x[a,b]; dim=1")
def amax(x: Node, *, dim: Dims = None, keepdim: bool = False) -> Node:
    """Maximum over dimensions; at ties the gradient is shared equally."""
    return F.reduce("max", x, dims_of(x, dim), keepdim)


@op("amin", _REDUCTION, example="x[a,b]; dim=1")
def amin(x: Node, *, dim: Dims = None, keepdim: bool = False) -> Node:
    """Minimum over dimensions; at ties the gradient is shared equally."""
    return F.reduce("min", x, dims_of(x, dim), keepdim)


@op("any", _REDUCTION, example="x:bool[a,b]; dim=1")
def any_(x: Node, *, dim: Dims = None, keepdim: bool = False) -> Node:
    """Whether one or more are true (not zero)."""
    return F.reduce("max", F.cast(x, "bool"), dims_of(x, dim), keepdim)


@op("all", _REDUCTION, example="x:bool[a,b]; dim=1")
def all_(x: Node, *, dim: Dims = None, keepdim: bool = False) -> Node:
    """Whether all are true (not zero)."""
    return F.reduce("min", F.cast(x, "bool"), dims_of(x, dim), keepdim)


@op("prod", _REDUCTION, example="x[a,b]; dim=1")
def prod(x: Node, *, dim: Dims = None, keepdim: bool = False) -> Node:
    """Product over dimensions (all of them by default)."""
    return F.reduce("prod", x, dims_of(x, dim), keepdim)


def position(fn: str, x: Node, dim: int | None, keepdim: bool) -> Node:
    """argmax or argmin; without a dimension, of the flattened tensor."""
    if dim is None:
        found = F.rowwise(fn, F.reshape(x, (-1,)), 0)
        return F.reshape(found, (1,) * x.ndim) if keepdim else found
    d = F.axis(dim, x.ndim)
    found = F.rowwise(fn, x, d)
    return F.reshape(found, (*x.shape[:d], 1, *x.shape[d + 1 :])) if keepdim else found


@op("argmax", _REDUCTION, example="x[a,b]; dim=1")
def argmax(x: Node, *, dim: int | None = None, keepdim: bool = False) -> Node:
    """Position of the maximum (the first one) along a dimension, or in the flattened tensor."""
    return position("argmax", x, dim, keepdim)


@op("argmin", _REDUCTION, example="x[a,b]; dim=1")
def argmin(x: Node, *, dim: int | None = None, keepdim: bool = False) -> Node:
    """Position of the minimum (the first one) along a dimension, or in the flattened tensor."""
    return position("argmin", x, dim, keepdim)


@op("norm", _REDUCTION, example="x[a,b]; dim=1")
def norm(x: Node, *, p: float = 2, dim: Dims = None, keepdim: bool = False) -> Node:
    """(Σ |x|ᵖ)^(1/p) over dimensions, p > 0; p = ∞ is the maximum of |x|."""
    dims = dims_of(x, dim)
    if p == math.inf:
        return F.reduce("max", F.call("abs", x), dims, keepdim)
    if p <= 0:
        raise F.ShapeError("norm needs p > 0")
    powers = x * x if p == 2 else F.power(F.call("abs", x), p)
    return F.power(F.total(powers, dims, keepdim), 1 / Fraction(p))


@op("grad_norm", _REDUCTION, example="x[a,b] y[c]")
def grad_norm(*xs: Node) -> Node:
    """√(Σ x²) over all elements of all tensors."""
    if not xs:
        raise F.ShapeError("grad_norm of nothing")
    sums = [F.total(x * x, range(x.ndim)) for x in xs]
    while len(sums) > 1:  # in pairs: one after the other, thousands of gradients cost their square to add up
        sums = [sum(sums[n + 1 : n + 2], start=sums[n]) for n in range(0, len(sums), 2)]
    return F.power(sums[0], Fraction(1, 2))


def shift_of(x: Node, dims: Iterable[int]) -> Node:
    """The maximum, subtracted before exp. Any shift gives the same result, so it has no derivative."""
    return F.detach(F.reduce("max", x, dims, keepdim=True))


@op("logsumexp", _REDUCTION, example="x[a,b]; dim=1")
def logsumexp(x: Node, *, dim: Dims = None, keepdim: bool = False) -> Node:
    """log Σ exp(x) over dimensions, with the maximum subtracted first."""
    dims = dims_of(x, dim)
    shift = shift_of(x, dims)
    result = shift + F.call("log", F.total(F.call("exp", x - shift), dims, keepdim=True))
    gone = {F.axis(d, x.ndim) for d in dims}
    return result if keepdim else F.reshape(result, tuple(s for d, s in enumerate(x.shape) if d not in gone))


@op("cumsum", _REDUCTION, example="x[a,b]; dim=1")
def cumsum(x: Node, *, dim: int) -> Node:
    """Running sum along a dimension: y[i] = Σ over j ≤ i of x[j]."""
    return F.rowwise("cumsum", x, dim)
