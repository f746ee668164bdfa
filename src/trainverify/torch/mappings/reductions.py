"""Reductions over dimensions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Final

from trainverify.graph.types import DTYPES
from trainverify.torch.mappings.table import Arguments, rows
from trainverify.torch.values import Unmapped
from trainverify.translate.emit import Emitter

ROWS, row = rows()


def dims(a: Arguments, name: str = "dim") -> dict[str, tuple[int, ...]]:
    """The attribute `dim`: an empty list is all dimensions, as in PyTorch; a tensor without dimensions counts as one with one."""
    found = a.ints(name)
    return {"dim": found} if found and a.e.shape(a.tensor("self")) else {}


def keep(a: Arguments) -> dict[str, object]:
    return {"keepdim": True} if a.raw("keepdim") else {}


def elements(a: Arguments) -> str:
    """What is combined: elements as the dtype that is asked for, booleans as integers."""
    x, dtype = a.tensor("self"), a.dtype()
    if dtype is not None and a.e.tensors[x].kind != DTYPES[dtype]:
        x = a.e.cast(x, dtype)  # 1.5 counts as 1 in a sum of integers
    return a.e.cast(x, "i64") if a.e.kind(x) == "bool" else x


@row("aten::sum")
def sum_(a: Arguments) -> str:
    x = elements(a)
    return a.e.op("sum", (x,), {**dims(a), **keep(a)})


@row("aten::mean")
def mean(a: Arguments) -> str:
    return a.e.op("mean", (a.real(elements(a)),), {**dims(a), **keep(a)})


@row("aten::var")
def var(a: Arguments) -> str:
    return _variance(a)


@row("aten::var_mean")
def var_mean(a: Arguments) -> tuple[str, str]:
    return _variance(a), a.e.op("mean", (a.tensor("self"),), {**dims(a), **keep(a)})


def _variance(a: Arguments) -> str:
    correction = a.raw("correction")
    if a.raw("unbiased") is not None:
        correction = int(bool(a.raw("unbiased")))
    exact = Fraction(1 if correction is None else a.literal(correction))
    x, over = a.tensor("self"), dims(a)
    shape = a.e.shape(x)
    count = math.prod(shape[d] for d in over.get("dim", range(len(shape))))
    if exact >= count:
        raise Unmapped(f"argument correction={correction!r} of {count} elements")
    whole = int(exact) if exact.denominator == 1 else 0
    made = a.e.op("var", (x,), {**over, **keep(a), "correction": whole})
    return made if whole == exact else a.times(made, Fraction(count - whole) / (count - exact))


def _plain(name: str, ours: str) -> None:
    @row(name)
    def reduce(a: Arguments) -> str:
        return a.e.op(ours, (a.tensor("self"),), {**dims(a), **keep(a)})


for _name in ("amax", "amin", "any", "all"):
    _plain(f"aten::{_name}", _name)


# Operators whose result is infinite where an argument is
_PASSED_ON: Final = frozenset(
    (
        *("reshape", "slice", "expand", "permute", "concat", "stack", "identity", "to", "flip", "roll", "repeat", "pad", "split"),
        *("add", "sub", "mul", "div", "neg", "where", "masked_fill", "apply_mask", "minimum", "maximum", "index_select", "take_along_dim"),
    )
)


def has_infinity(e: Emitter, name: str) -> bool:
    """Whether an infinite literal may be among the elements of a tensor."""
    seen, waiting = set[str | None](), [str(name)]
    while waiting:
        op = e.made.get(here := waiting.pop())
        if op is None or here in seen:
            continue
        seen.add(here)
        value = op.get("value", 0)
        if (isinstance(value, float) and not math.isfinite(value)) or op.name == "apply_mask":
            return True
        if op.name in _PASSED_ON:
            waiting += [i for i in op.inputs if i is not None]
    return False


@row("aten::logsumexp")
def logsumexp(a: Arguments) -> str:
    x = a.real(a.tensor("self"))
    if has_infinity(a.e, x):
        raise Unmapped("a tensor with infinite elements: where all are, the result is infinite too")
    return a.e.op("logsumexp", (x,), {**dims(a), **keep(a)})


def _extremum(name: str, of_one: str, of_two: str) -> None:
    @row(name)
    def extremum(a: Arguments) -> str | tuple[str, str]:
        """The largest (smallest) element, of all or along a dimension, or of two tensors."""
        if "other" in a.given:
            return a.e.op(of_two, (a.tensor("self"), a.tensor("other")))
        if len(a.out) == 1:
            return a.e.op(of_one, (a.tensor("self"),))
        return a.e.op(of_one, (a.tensor("self"),), {**dims(a), **keep(a)}), _position(a, f"arg{name[-3:]}")


def _position(a: Arguments, name: str) -> str:
    """Of equal elements the first one, as PyTorch's documentation has it."""
    x, dim = a.tensor("self"), a.raw("dim")
    if not a.e.shape(x):
        a.ignore("keepdim")
        return a.e.full((), 0, "i64")
    x = a.e.cast(x, "i64") if a.e.kind(x) == "bool" else x
    return a.e.op(name, (x,), {**({} if dim is None else {"dim": dim}), **keep(a)})


_extremum("aten::max", "amax", "maximum")
_extremum("aten::min", "amin", "minimum")


@row("aten::argmax")
def argmax(a: Arguments) -> str:
    return _position(a, "argmax")


@row("aten::argmin")
def argmin(a: Arguments) -> str:
    return _position(a, "argmin")


@row("aten::prod")
def prod(a: Arguments) -> str:
    x, over, kind = elements(a), dims(a), a.out[0]
    if kind is not None and 0 in (a.e.shape(x)[d] for d in over.get("dim", range(len(a.e.shape(x))))):
        keep(a)
        return a.e.full(kind.shape, 1, kind.dtype)
    return a.e.op("prod", (x,), {**over, **keep(a)})


@row("aten::linalg_vector_norm")
def vector_norm(a: Arguments) -> str:
    return norm_of(a, elements(a), a.exact("ord"), {**dims(a), **keep(a)})


def norm_of(a: Arguments, x: str, order: float, attrs: dict[str, object]) -> str:
    """(Σ |x|ᵖ)^(1/p); of order 0 how many are not 0, of order ±∞ the largest or smallest."""
    if order == 0:
        return a.e.op("sum", (a.real(a.e.op("ne", (x,), {"value": 0})),), attrs)
    if order == -math.inf:
        return a.e.op("amin", (a.e.op("abs", (x,)),), attrs)
    if order < 0:  # 0 where an element is
        size, power = a.e.op("abs", (x,)), Fraction(a.literal(float(order)))
        empty = a.e.op("eq", (size,), {"value": 0})
        powers = a.e.op("pow", (a.e.op("where", (empty, a.e.full((), 1, "f32"), size)),), {"exponent": power})
        norm = a.e.op("pow", (a.e.op("sum", (powers,), attrs),), {"exponent": 1 / power})
        return a.e.op("where", (a.e.op("any", (empty,), attrs), a.e.full((), 0, "f32"), norm))
    return a.e.op("norm", (x,), {"p": math.inf if order == math.inf else a.literal(float(order)), **attrs})


@row("aten::norm")
def norm(a: Arguments) -> str:
    order = a.raw("p")
    return norm_of(a, elements(a), 2.0 if order is None else float(order), {**dims(a), **keep(a)})


@row("aten::cumsum")
def cumsum(a: Arguments) -> str:
    x, dim = elements(a), a.integer("dim")
    return a.e.op("cumsum", (x,), {"dim": dim}) if a.e.shape(x) else x
