"""Elementwise operators: arithmetic, functions, comparisons, logic."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from trainverify.ops.table import op
from trainverify.primitives import node as F
from trainverify.primitives.node import Node

_ELEMENTWISE = "elementwise"
_HALF = Fraction(1, 2)


def divided(x: Node, count: int) -> Node:
    """x / count with the exact rational, whatever the sizes become."""
    if not count:
        raise F.ShapeError("divided by 0: a mean of nothing?")
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


@op("floordiv", _ELEMENTWISE, example="x:i64[a,b]; value=3")
def floordiv(x: Node, *, value: int) -> Node:
    """⌊x / value⌋ of integers, value > 0."""
    return F.call("floordiv", x, _positive(value))


@op("mod", _ELEMENTWISE, example="x:i64[a,b]; value=3")
def mod(x: Node, *, value: int) -> Node:
    """What is left of integers when they are divided: x − value·⌊x / value⌋, value > 0."""
    return F.call("mod", x, _positive(value))


def _positive(value: int) -> int:
    if value < 1:
        raise F.ShapeError(f"integers divided by {value}")
    return value


@op("neg", _ELEMENTWISE)
def neg(x: Node) -> Node:
    """−x."""
    return -x


@op("pow", _ELEMENTWISE, example="x[a,b]; exponent=3")
def pow_(x: Node, *, exponent: float) -> Node:
    """x to a literal power."""
    return F.power(x, exponent)


@op("square", _ELEMENTWISE)
def square(x: Node) -> Node:
    """x²."""
    return x * x


@op("reciprocal", _ELEMENTWISE)
def reciprocal(x: Node) -> Node:
    """1 / x; needs x ≠ 0."""
    return 1 / x


@op("sqrt", _ELEMENTWISE)
def sqrt(x: Node) -> Node:
    """√x; needs x ≥ 0."""
    return F.power(x, _HALF)


@op("rsqrt", _ELEMENTWISE)
def rsqrt(x: Node) -> Node:
    """1/√x; needs x > 0."""
    return F.power(x, -_HALF)


@op("exp", _ELEMENTWISE)
def exp(x: Node) -> Node:
    """eˣ."""
    return F.call("exp", x)


@op("log", _ELEMENTWISE)
def log(x: Node) -> Node:
    """Natural logarithm; needs x > 0."""
    return F.call("log", x)


@op("sin", _ELEMENTWISE)
def sin(x: Node) -> Node:
    """Sine."""
    return F.call("sin", x)


@op("cos", _ELEMENTWISE)
def cos(x: Node) -> Node:
    """Cosine."""
    return F.call("cos", x)


@op("tanh", _ELEMENTWISE)
def tanh(x: Node) -> Node:
    """Hyperbolic tangent."""
    return F.call("tanh", x)


@op("erf", _ELEMENTWISE)
def erf(x: Node) -> Node:
    """Error function."""
    return F.call("erf", x)


@op("relu", _ELEMENTWISE)
def relu(x: Node) -> Node:
    """x where positive, else 0; derivative 0 at 0."""
    return F.select(x > 0, x, 0)


def logistic(x: Node) -> Node:
    return 1 / (1 + F.call("exp", -x))


@op("sigmoid", _ELEMENTWISE)
def sigmoid(x: Node) -> Node:
    """1 / (1 + e⁻ˣ)."""
    return logistic(x)


@op("softplus", _ELEMENTWISE)
def softplus(x: Node) -> Node:
    """log(1 + eˣ)."""
    return F.call("log", 1 + F.call("exp", x))


@op("logaddexp", _ELEMENTWISE)
def logaddexp(x: Node, y: Node) -> Node:
    """log(eˣ + eʸ), with the maximum subtracted first."""
    shift = F.detach(F.call("max", x, y))
    return shift + F.call("log", F.call("exp", x - shift) + F.call("exp", y - shift))


@op("silu", _ELEMENTWISE)
def silu(x: Node) -> Node:
    """x · sigmoid(x)."""
    return x * logistic(x)


@op("gelu", _ELEMENTWISE)
def gelu(x: Node, *, approximate: Literal["none", "tanh"] = "none") -> Node:
    """x/2 · (1 + erf(x/√2)), or its approximation by tanh(√(2/π)·(x + 0.044715·x³))."""
    if approximate == "none":
        return x * _HALF * (1 + F.call("erf", x * F.power(F.const(2), -_HALF)))
    inner = F.power(2 / F.call("pi"), _HALF) * (x + F.power(x, 3) * Fraction(44715, 10**6))
    return x * _HALF * (1 + F.call("tanh", inner))


@op("abs", _ELEMENTWISE)
def abs_(x: Node) -> Node:
    """|x|; derivative 0 at 0."""
    return F.call("abs", x)


@op("sign", _ELEMENTWISE)
def sign(x: Node) -> Node:
    """−1, 0 or 1; derivative 0."""
    return F.call("sign", x)


@op("floor", _ELEMENTWISE)
def floor(x: Node) -> Node:
    """The largest integer not above x; derivative 0."""
    return F.call("floor", x)


@op("clamp", _ELEMENTWISE, example="x[a,b]; min=-1, max=1")
def clamp(x: Node, *, min: float | None = None, max: float | None = None) -> Node:
    """x limited to [min, max]; derivative 1 inside and on the bounds, 0 outside."""
    y = x if min is None else F.select(x < min, min, x)
    return y if max is None else F.select(y > max, max, y)


@op("minimum", _ELEMENTWISE)
def minimum(x: Node, y: Node) -> Node:
    """The smaller of two elements; at a tie each gets half of the gradient."""
    return F.call("min", x, y)


@op("maximum", _ELEMENTWISE)
def maximum(x: Node, y: Node) -> Node:
    """The larger of two elements; at a tie each gets half of the gradient."""
    return F.call("max", x, y)


@op("lt", _ELEMENTWISE)
def lt(x: Node, y: Node | None = None, *, value: float | None = None) -> Node:
    """x < y; y is a tensor or the literal `value`."""
    return x < second(y, value)


@op("le", _ELEMENTWISE)
def le(x: Node, y: Node | None = None, *, value: float | None = None) -> Node:
    """x ≤ y; y is a tensor or the literal `value`."""
    return x <= second(y, value)


@op("gt", _ELEMENTWISE)
def gt(x: Node, y: Node | None = None, *, value: float | None = None) -> Node:
    """x > y; y is a tensor or the literal `value`."""
    return x > second(y, value)


@op("ge", _ELEMENTWISE)
def ge(x: Node, y: Node | None = None, *, value: float | None = None) -> Node:
    """x ≥ y; y is a tensor or the literal `value`."""
    return x >= second(y, value)


@op("eq", _ELEMENTWISE)
def eq(x: Node, y: Node | None = None, *, value: float | None = None) -> Node:
    """x = y; y is a tensor or the literal `value`."""
    return F.call("eq", x, second(y, value))


@op("ne", _ELEMENTWISE)
def ne(x: Node, y: Node | None = None, *, value: float | None = None) -> Node:
    """x ≠ y; y is a tensor or the literal `value`."""
    return ~F.call("eq", x, second(y, value))


def truth(x: Node) -> Node:
    """Numbers as booleans: true where not zero."""
    return F.cast(x, "bool")


@op("logical_and", _ELEMENTWISE)
def logical_and(x: Node, y: Node) -> Node:
    """Both; a number counts as true where it is not zero."""
    return truth(x) & truth(y)


@op("logical_or", _ELEMENTWISE)
def logical_or(x: Node, y: Node) -> Node:
    """One or both; a number counts as true where it is not zero."""
    return truth(x) | truth(y)


@op("logical_not", _ELEMENTWISE)
def logical_not(x: Node) -> Node:
    """Not; a number counts as true where it is not zero."""
    return ~truth(x)


@op("where", _ELEMENTWISE, example="condition:bool[a,b] x[a,b] y[a,b]")
def where(condition: Node, x: Node, y: Node) -> Node:
    """x where the condition holds, else y."""
    return F.select(truth(condition), x, y)
