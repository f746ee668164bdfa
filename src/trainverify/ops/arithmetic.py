"""Elementwise operators and reductions."""

from __future__ import annotations

from fractions import Fraction

from trainverify.ops.table import op
from trainverify.primitives import node as F
from trainverify.primitives.node import Node

_ELEMENTWISE = "elementwise"
_REDUCTION = "reduction"


def dims_of(x: Node, dim: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """The dimensions that a `dim` attribute names; None is all of them."""
    if dim is None:
        return tuple(range(x.ndim))
    return (dim,) if isinstance(dim, int) else dim


def divided(x: Node, count: int) -> Node:
    """x / count with the exact rational, whatever the sizes become."""
    return x * Fraction(1, count)


def second(other: Node | None, value: float | None) -> Node:
    """The second operand of a binary operator: a tensor, or the literal `other`."""
    if (other is None) == (value is None):
        raise F.ShapeError("give a second tensor or the attribute `value`, not both")
    return F.as_node(value) if other is None else other  # type: ignore[arg-type]


@op("add", _ELEMENTWISE)
def add(x: Node, y: Node | None = None, *, value: float | None = None, alpha: float = 1) -> Node:
    """x + alpha·y; y is a tensor or the literal `value`."""
    b = second(y, value)
    return x + (b if alpha == 1 else b * alpha)


@op("sub", _ELEMENTWISE)
def sub(x: Node, y: Node | None = None, *, value: float | None = None) -> Node:
    """x − y; y is a tensor or the literal `value`."""
    return x - second(y, value)


@op("mul", _ELEMENTWISE)
def mul(x: Node, y: Node | None = None, *, value: float | None = None) -> Node:
    """x · y; y is a tensor or the literal `value`."""
    return x * second(y, value)


@op("div", _ELEMENTWISE)
def div(x: Node, y: Node | None = None, *, value: int | float | None = None) -> Node:
    """x / y; y is a tensor or the literal `value`. An integer literal divides exactly."""
    if isinstance(value, int) and y is None and value != 0:
        return divided(x, value)
    return x / second(y, value)


@op("neg", _ELEMENTWISE)
def neg(x: Node) -> Node:
    """−x."""
    return -x


@op("pow", _ELEMENTWISE)
def pow_(x: Node, *, exponent: float) -> Node:
    """x to a literal power."""
    return F.power(x, exponent)


@op("exp", _ELEMENTWISE)
def exp(x: Node) -> Node:
    """eˣ."""
    return F.call("exp", x)


@op("log", _ELEMENTWISE)
def log(x: Node) -> Node:
    """Natural logarithm; needs x > 0."""
    return F.call("log", x)


@op("relu", _ELEMENTWISE)
def relu(x: Node) -> Node:
    """x where positive, else 0; derivative 0 at 0."""
    return F.select(x > 0, x, 0)


def logistic(x: Node) -> Node:
    return 1 / (1 + F.call("exp", -x))


@op("silu", _ELEMENTWISE)
def silu(x: Node) -> Node:
    """x · sigmoid(x)."""
    return x * logistic(x)


@op("sum", _REDUCTION)
def sum_(x: Node, *, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Node:
    """Sum over dimensions (all of them by default)."""
    return F.total(x, dims_of(x, dim), keepdim)


@op("mean", _REDUCTION)
def mean(x: Node, *, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Node:
    """Mean over dimensions (all of them by default)."""
    dims = dims_of(x, dim)
    count = 1
    for d in dims:
        count *= x.shape[F.axis(d, x.ndim)]
    return divided(F.total(x, dims, keepdim), count)
