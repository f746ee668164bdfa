"""Elementwise ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from trainverify.domains.arrays import Array
from trainverify.torch.mappings.table import Arguments, Number, rows
from trainverify.torch.ranges import known, written
from trainverify.torch.values import Unmapped
from trainverify.translate.literals import root

ROWS, row = rows()
WORD: Final = 31  # bits of the smallest integers that are shifted, without the sign
ROUNDED: Final = 20  # above it softplus(x) is x in float32


def _scaled(a: Arguments, value: str | Number, alpha: Number) -> str | Number:
    if alpha == 1:
        return value
    return a.e.op("mul", (value,), {"value": alpha}) if isinstance(value, str) else value * alpha


def binary(a: Arguments, op: str, x: str | Number, y: str | Number) -> str:
    """op(x, y) where either may be a literal."""
    real = a.out[0] is not None and a.out[0].kind == "real"
    if not isinstance(x, str):
        x = a.as_tensor(x, "f32" if real else None)
    if isinstance(y, str):
        return a.e.op(op, (x, y))
    if isinstance(y, bool):
        y = int(y)
    return a.e.op(op, (x,), {"value": y})


@row("aten::add")
def add(a: Arguments) -> str:
    return binary(a, "add", a.operand("self"), _scaled(a, a.operand("other"), a.number("alpha")))


@row("aten::sub")
def sub(a: Arguments) -> str:
    return binary(a, "sub", a.operand("self"), _scaled(a, a.operand("other"), a.number("alpha")))


@row("aten::rsub")
def rsub(a: Arguments) -> str:
    x, y = a.operand("self"), a.operand("other")
    return binary(a, "sub", y, _scaled(a, x, a.number("alpha")))


@row("aten::mul")
def mul(a: Arguments) -> str:
    x, y = a.operand("self"), a.operand("other")
    if isinstance(x, str) and isinstance(y, float):
        return a.times(x, y)
    if isinstance(y, str) and not isinstance(x, str):
        return a.times(y, x)
    return binary(a, "mul", x, y)


@row("aten::div")
def div(a: Arguments) -> str:
    x, y = a.operand("self"), a.operand("other")
    mode = a.raw("rounding_mode")
    x = a.real(a.as_tensor(x, "f32")) if mode is None else a.as_tensor(x)
    if isinstance(y, str):
        made = a.e.op("div", (x, a.real(y) if mode is None else y))
    elif isinstance(y, float) and (square := root(y)) is not None:
        made = a.e.op("div", (x, a.e.op("sqrt", (a.e.full((), square, "f32"),))))
    else:
        made = a.e.op("div", (x,), {"value": y})
    return made if mode is None else a.e.op("floor", (made,)) if mode == "floor" else truncated(a, made)


def truncated(a: Arguments, x: str) -> str:
    """Without the digits behind the point: sign(x)·⌊|x|⌋."""
    return a.e.op("mul", (a.e.op("sign", (x,)), a.e.op("floor", (a.e.op("abs", (x,)),))))


@row("aten::trunc")
def trunc(a: Arguments) -> str:
    return truncated(a, a.tensor("self"))


@row("aten::frac")
def frac(a: Arguments) -> str:
    x = a.tensor("self")
    return a.e.op("sub", (x, truncated(a, x)))


@row("aten::ceil")
def ceil(a: Arguments) -> str:
    return a.e.op("neg", (a.e.op("floor", (a.e.op("neg", (a.tensor("self"),)),)),))


def _rest(a: Arguments, whole: Callable[[str], str]) -> str:
    """x − y·(x / y as a whole number), of real numbers."""
    x, y = (a.as_tensor(a.operand(n), "f32") for n in ("self", "other"))
    return a.e.op("sub", (x, a.e.op("mul", (y, whole(a.e.op("div", (x, y)))))))


@row("aten::fmod")
def fmod(a: Arguments) -> str:
    if a.out[0] is None or a.out[0].kind != "real":
        raise Unmapped("of integers that data decide on")
    return _rest(a, lambda q: truncated(a, q))


def _divided(a: Arguments, op: str, what: Callable[[Array, int], Array]) -> str:
    """Of integers, by a positive literal; those that constants lead to are ranges."""
    x, y = a.operand("self"), a.operand("other")
    if not isinstance(x, str) or type(y) is not int or y < 1:
        raise Unmapped("by integers that data decide on")
    given = known(a.e, x)
    return (None if given is None else written(a.e, what(given, y))) or a.e.op(op, (x,), {"value": y})


@row("aten::floor_divide")
def floor_divide(a: Arguments) -> str:
    if a.out[0] is not None and a.out[0].kind == "real":
        x, y = (a.real(a.as_tensor(a.operand(n), "f32")) for n in ("self", "other"))
        return a.e.op("floor", (a.e.op("div", (x, y)),))
    return _divided(a, "floordiv", np.floor_divide)


@row("aten::remainder")
def remainder(a: Arguments) -> str:
    if a.out[0] is not None and a.out[0].kind == "real":
        return _rest(a, lambda q: a.e.op("floor", (q,)))
    return _divided(a, "mod", np.mod)


@row("aten::pow")
def power(a: Arguments) -> str:
    x, exponent = a.operand("self"), a.operand("exponent")
    if isinstance(exponent, str):
        if isinstance(x, str) or x <= 0:
            raise Unmapped("a power of a tensor whose exponent is a tensor")
        if a.out[0] is None or a.out[0].kind != "real":
            raise Unmapped("a power of a tensor whose exponent is a tensor")
        log = a.e.op("log", (a.e.full((), x, "f32"),))  # cˣ = exp(x·log c)
        return a.e.op("exp", (a.e.op("mul", (a.real(exponent), log)),))
    if not isinstance(x, str):
        x = a.as_tensor(x, "f32")
    if exponent == 2:
        return a.e.op("square", (x,))
    return a.e.op("pow", (x,), {"exponent": exponent})


def _unary(name: str, ours: str) -> None:
    @row(name)
    def apply(a: Arguments) -> str:
        return a.e.op(ours, (a.tensor("self"),))


def _real_unary(name: str, ours: str) -> None:
    @row(name)
    def apply(a: Arguments) -> str:
        return a.e.op(ours, (a.real(a.tensor("self")),))


for _name in ("neg", "abs", "sign", "floor", "relu"):
    _unary(f"aten::{_name}", _name)
for _name in ("reciprocal", "sqrt", "rsqrt", "exp", "log", "sin", "cos", "tanh", "erf", "sigmoid"):
    _real_unary(f"aten::{_name}", _name)
_unary("aten::logical_not", "logical_not")


def _formula(name: str, formula: Callable[[Arguments, str], str]) -> None:
    @row(name)
    def apply(a: Arguments) -> str:
        return formula(a, a.real(a.tensor("self")))


def _halves(a: Arguments, op: str, x: str) -> str:
    """(eˣ ± e⁻ˣ) / 2."""
    return a.e.op("div", (a.e.op(op, (a.e.op("exp", (x,)), a.e.op("exp", (a.e.op("neg", (x,)),)))),), {"value": 2})


def _log_to(a: Arguments, x: str, base: int) -> str:
    return a.e.op("div", (a.e.op("log", (x,)), a.e.op("log", (a.e.full((), base, "f32"),))))


def _root(a: Arguments, x: str, value: int) -> str:
    """√(x² + value)."""
    return a.e.op("sqrt", (a.e.op("add", (a.e.op("square", (x,)),), {"value": value}),))


_formula("aten::sinh", lambda a, x: _halves(a, "sub", x))
_formula("aten::cosh", lambda a, x: _halves(a, "add", x))
_formula("aten::tan", lambda a, x: a.e.op("div", (a.e.op("sin", (x,)), a.e.op("cos", (x,)))))
_formula("aten::log2", lambda a, x: _log_to(a, x, 2))
_formula("aten::log10", lambda a, x: _log_to(a, x, 10))
_formula("aten::exp2", lambda a, x: a.e.op("exp", (a.e.op("mul", (x, a.e.op("log", (a.e.full((), 2, "f32"),)))),)))
_formula("aten::asinh", lambda a, x: a.e.op("log", (a.e.op("add", (x, _root(a, x, 1))),)))
_formula("aten::acosh", lambda a, x: a.e.op("log", (a.e.op("add", (x, _root(a, x, -1))),)))
_formula("aten::erfc", lambda a, x: a.e.op("sub", (a.e.full((), 1, "f32"), a.e.op("erf", (x,)))))


@row("aten::atanh")
def atanh(a: Arguments) -> str:
    """log((1 + x) / (1 − x)) / 2."""
    x, one = a.real(a.tensor("self")), a.e.full((), 1, "f32")
    ratio = a.e.op("div", (a.e.op("add", (one, x)), a.e.op("sub", (one, x))))
    return a.e.op("div", (a.e.op("log", (ratio,)),), {"value": 2})


@row("aten::expm1")
def expm1(a: Arguments) -> str:
    return a.e.op("sub", (a.e.op("exp", (a.real(a.tensor("self")),)),), {"value": 1})


@row("aten::log1p")
def log1p(a: Arguments) -> str:
    return a.e.op("log", (a.e.op("add", (a.real(a.tensor("self")),), {"value": 1}),))


@row("aten::isnan")
def isnan(a: Arguments) -> str:
    """Only what is no number differs from itself."""
    x = a.tensor("self")
    return a.e.op("ne", (x, x)) if a.e.kind(x) == "real" else a.e.full(a.e.shape(x), False, "bool")


@row("aten::sgn")
def sgn(a: Arguments) -> str:
    return a.e.op("sign", (a.tensor("self"),))


def _comparison(name: str) -> None:
    @row(f"aten::{name}")
    def compare(a: Arguments) -> str:
        x, y = a.operand("self"), a.operand("other")
        return binary(a, name, a.as_tensor(x), int(y) if isinstance(y, bool) else y)


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _comparison(_name)


def _logical(name: str, ours: str, only_bool: bool) -> None:
    @row(name)
    def combine(a: Arguments) -> str:
        x, y = a.operand("self"), a.operand("other")
        if name in ("aten::bitwise_and", "aten::__and__") and isinstance(x, str) and type(y) is int and y > 0 and not y & (y + 1):
            return a.e.op("mod", (x,), {"value": y + 1})  # the lowest bits, also of negative integers
        x, y = a.as_tensor(x), a.as_tensor(y)
        if only_bool and any(a.e.kind(v) != "bool" for v in (x, y)):
            raise Unmapped("bits of integers")
        return a.e.op(ours, (x, y))


for _name, _ours, _only in (
    ("logical_and", "logical_and", False),
    ("logical_or", "logical_or", False),
    ("bitwise_and", "logical_and", True),
    ("bitwise_or", "logical_or", True),
    ("__and__", "logical_and", True),
    ("__or__", "logical_or", True),
):
    _logical(f"aten::{_name}", _ours, _only)


def _shift(names: tuple[str, ...], op: str) -> None:
    @row(*names)
    def shift(a: Arguments) -> str:
        """x · 2ⁿ, or ⌊x / 2ⁿ⌋, also of negative integers."""
        x, n = a.operand("self"), a.operand("other")
        if not isinstance(x, str) or type(n) is not int or not 0 <= n < WORD:
            raise Unmapped("bits of integers")
        return a.e.op(op, (x,), {"value": 1 << n})


_shift(("aten::bitwise_right_shift", "aten::__rshift__"), "floordiv")
_shift(("aten::bitwise_left_shift", "aten::__lshift__"), "mul")


@row("aten::bitwise_not")
def bitwise_not(a: Arguments) -> str:
    x = a.tensor("self")
    if a.e.kind(x) != "bool":
        raise Unmapped("bits of integers")
    return a.e.op("logical_not", (x,))


@row("aten::clamp")
def clamp(a: Arguments) -> str:
    low, high = a.raw("min"), a.raw("max")
    x = a.tensor("self")
    if isinstance(low, torch.Tensor) or isinstance(high, torch.Tensor):
        x = x if low is None else a.e.op("maximum", (x, a.as_tensor(a.operand("min"))))
        return x if high is None else a.e.op("minimum", (x, a.as_tensor(a.operand("max"))))
    bounds = {n: a.number(n) for n, v in (("min", low), ("max", high)) if v is not None}
    return a.e.op("clamp", (x,), bounds)


@row("aten::clamp_min")
def clamp_min(a: Arguments) -> str:
    if isinstance(a.raw("min"), torch.Tensor):
        return a.e.op("maximum", (a.tensor("self"), a.as_tensor(a.operand("min"))))
    return a.e.op("clamp", (a.tensor("self"),), {"min": a.number("min")})


@row("aten::clamp_max")
def clamp_max(a: Arguments) -> str:
    if isinstance(a.raw("max"), torch.Tensor):
        return a.e.op("minimum", (a.tensor("self"), a.as_tensor(a.operand("max"))))
    return a.e.op("clamp", (a.tensor("self"),), {"max": a.number("max")})


def _two(name: str, ours: str) -> None:
    @row(name)
    def apply(a: Arguments) -> str:
        x, y = a.operand("self"), a.operand("other")
        return a.e.op(ours, (a.as_tensor(x), a.as_tensor(y)))


_two("aten::minimum", "minimum")
_two("aten::maximum", "maximum")
_two("aten::logaddexp", "logaddexp")


@row("aten::where")
def where(a: Arguments) -> str:
    condition, x, y = a.tensor("condition"), a.operand("self"), a.operand("other")
    return a.e.op("where", (condition, a.as_tensor(x), a.as_tensor(y)))


@row("aten::lerp")
def lerp(a: Arguments) -> str:
    """self + weight·(end − self), as self·(1 − weight) + end·weight."""
    x, end, weight = a.tensor("self"), a.tensor("end"), a.operand("weight")
    if isinstance(weight, str):
        return a.e.op("add", (x, a.e.op("mul", (weight, a.e.op("sub", (end, x))))))
    return a.e.op("add", (a.e.op("mul", (x,), {"value": 1 - weight}), a.e.op("mul", (end,), {"value": weight})))


@row("aten::addcmul")
def addcmul(a: Arguments) -> str:
    x, y, z, value = a.tensor("self"), a.tensor("tensor1"), a.tensor("tensor2"), a.number("value")
    product = a.e.op("mul", (y, z))
    return a.e.op("add", (x, a.times(product, value)))


@row("aten::addcdiv")
def addcdiv(a: Arguments) -> str:
    x, y, z, value = a.tensor("self"), a.tensor("tensor1"), a.tensor("tensor2"), a.number("value")
    quotient = a.e.op("div", (y, z))
    return a.e.op("add", (x, a.times(quotient, value)))


@row("aten::masked_fill")
def masked_fill(a: Arguments) -> str:
    x, mask, value = a.tensor("self"), a.tensor("mask"), a.operand("value")
    if isinstance(value, str):
        return a.e.op("where", (mask, value, x))
    return a.e.op("masked_fill", (x, mask), {"value": value})


def _triangle(name: str) -> None:
    @row(f"aten::{name}")
    def cut(a: Arguments) -> str:
        return a.e.op(name, (a.tensor("self"),), {"diagonal": a.integer("diagonal")})


_triangle("tril")
_triangle("triu")


@row("aten::silu")
def silu(a: Arguments) -> str:
    return a.e.op("silu", (a.tensor("self"),))


@row("aten::silu_backward")
def silu_backward(a: Arguments) -> str:
    return a.e.op("silu.grad", (a.tensor("self"), a.tensor("grad_output")), {"wrt": (0,)})


@row("aten::gelu")
def gelu(a: Arguments) -> str:
    return a.e.op("gelu", (a.tensor("self"),), {"approximate": a.raw("approximate")})


@row("aten::gelu_backward")
def gelu_backward(a: Arguments) -> str:
    attrs = {"approximate": a.raw("approximate"), "wrt": (0,)}
    return a.e.op("gelu.grad", (a.tensor("self"), a.tensor("grad_output")), attrs)


@row("aten::softplus")
def softplus(a: Arguments) -> str:
    """log(1 + exp(βx)) / β, but x where βx > threshold: from 20 on these are equal but for rounding."""
    x, beta, threshold = a.tensor("self"), a.number("beta"), a.number("threshold")
    scaled = a.times(x, beta)
    smooth = a.e.op("softplus", (scaled,))
    smooth = smooth if beta == 1 else a.e.op("div", (smooth,), {"value": beta})
    return smooth if threshold >= ROUNDED else a.e.op("where", (a.e.op("gt", (scaled,), {"value": threshold}), x, smooth))


def _threshold(a: Arguments, grad: str, x: str) -> str:
    """Gradient where x > threshold, else 0 (relu's backward, given x or relu(x))."""
    if (threshold := a.number("threshold")) != 0:
        above = a.e.op("gt", (x,), {"value": threshold})
        return a.e.op("where", (above, grad, a.e.full((), 0, a.e.tensors[grad].dtype)))
    return a.e.op("relu.grad", (x, grad), {"wrt": (0,)})


@row("aten::threshold_backward")
def threshold_backward(a: Arguments) -> str:
    return _threshold(a, a.tensor("grad_output"), a.tensor("self"))


def _of_result(name: str, formula: Callable[[Arguments, str, str], str]) -> None:
    @row(name)
    def backward(a: Arguments) -> str:
        return formula(a, a.tensor("grad_output"), a.tensor("output"))


def _sigmoid_backward(a: Arguments, g: str, y: str) -> str:
    rest = a.e.op("sub", (a.e.full((), 1, "f32"), y))
    return a.e.op("mul", (g, a.e.op("mul", (y, rest))))


def _tanh_backward(a: Arguments, g: str, y: str) -> str:
    return a.e.op("mul", (g, a.e.op("sub", (a.e.full((), 1, "f32"), a.e.op("square", (y,))))))


_of_result("aten::sigmoid_backward", _sigmoid_backward)
_of_result("aten::tanh_backward", _tanh_backward)
