"""Reductions over dimensions."""

from __future__ import annotations

import math

from trainverify.graph.types import DTYPES
from trainverify.torch.mappings.table import Arguments, rows
from trainverify.torch.values import Unknown, Unmapped

ROWS, row = rows()


def dims(a: Arguments, name: str = "dim") -> dict[str, object]:
    """The attribute `dim`: an empty list is all dimensions, as in PyTorch."""
    found = a.ints(name)
    return {"dim": found} if found else {}


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
    correction = 1 if correction is None else correction
    if not float(correction).is_integer():
        raise Unmapped(f"argument correction={correction!r}")
    return a.e.op("var", (a.tensor("self"),), {**dims(a), **keep(a), "correction": int(correction)})


def _plain(name: str, ours: str) -> None:
    @row(name)
    def reduce(a: Arguments) -> str:
        return a.e.op(ours, (a.tensor("self"),), {**dims(a), **keep(a)})


for _name in ("amax", "amin", "any", "all", "logsumexp"):
    _plain(f"aten::{_name}", _name)


def _extremum(name: str, of_one: str, of_two: str) -> None:
    @row(name)
    def extremum(a: Arguments) -> str | tuple[str, Unknown]:
        """The largest (smallest) element, of all or along a dimension, or of two tensors; the position of one is not unique."""
        if "other" in a.given:
            return a.e.op(of_two, (a.tensor("self"), a.tensor("other")))
        if len(a.out) == 1:
            return a.e.op(of_one, (a.tensor("self"),))
        positions = Unknown("positions of maxima or minima: of equal elements any may be meant", a.e.place.source)
        return a.e.op(of_one, (a.tensor("self"),), {**dims(a), **keep(a)}), positions


_extremum("aten::max", "amax", "maximum")
_extremum("aten::min", "amin", "minimum")


@row("aten::argmax", "aten::argmin")
def position(a: Arguments) -> str:
    raise Unmapped("positions of maxima")


@row("aten::prod")
def prod(a: Arguments) -> str:
    return a.e.op("prod", (elements(a),), {**dims(a), **keep(a)})


@row("aten::linalg_vector_norm")
def vector_norm(a: Arguments) -> str:
    order = a.exact("ord")
    if order <= 0:
        raise Unmapped(f"argument ord={order!r}")
    return norm_of(a, elements(a), order, {**dims(a), **keep(a)})


def norm_of(a: Arguments, x: str, order: float, attrs: dict[str, object]) -> str:
    return a.e.op("norm", (x,), {"p": math.inf if order == math.inf else a.literal(float(order)), **attrs})


@row("aten::norm")
def norm(a: Arguments) -> str:
    order = a.raw("p")
    return norm_of(a, elements(a), 2.0 if order is None else float(order), {**dims(a), **keep(a)})


@row("aten::cumsum")
def cumsum(a: Arguments) -> str:
    return a.e.op("cumsum", (elements(a),), {"dim": a.integer("dim")})
