"""Reductions, running sums, positions, order."""

from __future__ import annotations

import math

from trainverify.jax.mappings.table import Arguments, rows
from trainverify.jax.signs import may_be_negative_zero
from trainverify.jax.values import Grid, Number, Table, Value, listed, table_of, times, uniform
from trainverify.translate.emit import Unmapped

ROWS, row = rows()


def of_ones(a: Arguments, dims: tuple[int, ...]) -> Value | None:
    """A reduction over dimensions of size 1 gives the elements themselves."""
    if any(a.types[0].shape[d] != 1 for d in dims) or not isinstance(a.operand(0), str):
        return None
    return a.e.reshape(a.tensor(0), a.shape)


@row("reduce_sum", ignores=("out_sharding",))
def reduce_sum(a: Arguments) -> Value:
    dims = tuple(a.param("axes"))
    x = a.operand(0)
    if (same := of_ones(a, dims)) is not None:
        return same
    if isinstance(x, Number):
        count = math.prod(x.shape[d] for d in dims)
        return Number(times(x.value, count), a.shape, a.dtype)
    if isinstance(x, Grid | Table) and (data := table_of(x)) is not None:
        return listed(data.sum(axis=tuple(d + 1 for d in dims), dtype=int), a.dtype)
    return a.e.op("sum", (a.tensor(0),), {"dim": dims}) if dims else a.tensor(0)


@row("reduce_max", "reduce_min", ignores=("out_sharding",))
def reduce_max(a: Arguments) -> Value:
    dims = tuple(a.param("axes"))
    x = a.operand(0)
    if (same := of_ones(a, dims)) is not None:
        return same
    if any(a.types[0].shape[d] == 0 for d in dims):
        raise Unmapped("the largest or smallest of nothing")
    if isinstance(x, Number) or (isinstance(x, Grid) and x.uniform):
        return Number(x.value, a.shape, a.dtype) if isinstance(x, Number) else Grid(x.start, (0,) * len(a.shape), a.shape, x.dtype)
    return a.e.op("amax" if a.name == "reduce_max" else "amin", (a.tensor(0),), {"dim": dims})


@row("reduce_and", "reduce_or", ignores=("out_sharding",))
def reduce_and(a: Arguments) -> Value:
    dims = tuple(a.param("axes"))
    if a.dtype != "bool":
        raise Unmapped("bits of integers")
    if (same := of_ones(a, dims)) is not None:
        return same
    if any(a.types[0].shape[d] == 0 for d in dims):
        return uniform(a.name == "reduce_and", a.shape, "bool")
    if (known := a.number(0)) is not None:
        return uniform(bool(known), a.shape, "bool")
    return a.e.op("all" if a.name == "reduce_and" else "any", (a.tensor(0),), {"dim": dims})


@row("reduce_prod", ignores=("out_sharding",))
def reduce_prod(a: Arguments) -> Value:
    return a.e.op("prod", (a.tensor(0),), {"dim": tuple(a.param("axes"))})


@row("argmax", "argmin")
def argmax(a: Arguments) -> Value:
    a.param("index_dtype")
    axes = tuple(a.param("axes"))
    if len(axes) != 1:
        raise Unmapped("the position of a maximum over several dimensions")
    return a.e.cast(a.e.op(a.name, (a.tensor(0),), {"dim": axes[0]}), a.dtype)


@row("cumsum")
def cumsum(a: Arguments) -> Value:
    dim, backwards = a.param("axis"), a.param("reverse")
    x = a.tensor(0)
    if not backwards:
        return a.e.op("cumsum", (x,), {"dim": dim})
    turned = a.e.op("cumsum", (a.e.op("flip", (x,), {"dims": (dim,)}),), {"dim": dim})
    return a.e.op("flip", (turned,), {"dims": (dim,)})


@row("top_k")
def top_k(a: Arguments) -> tuple[Value, ...]:
    k, dim = a.param("k"), a.param("axis", -1)
    if isinstance(x := a.operand(0), str) and may_be_negative_zero(a.e, x):
        raise Unmapped("zeros that may have a sign: JAX takes -0.0 for less than 0.0 here")
    values, ids = a.e.several("topk", (a.tensor(0),), {"k": k, "dim": dim, "largest": True})
    return values, a.e.cast(ids, a.out[1].dtype)


@row("sort")
def sort(a: Arguments) -> tuple[Value, ...]:
    """By one key; what comes along is put in the same order. Equal keys keep their order if JAX says so."""
    dim, keys, stable = a.param("dimension"), a.param("num_keys"), a.param("is_stable")
    if keys != 1 or (not stable and len(a.operands) > 1):
        raise Unmapped("a sort by several keys, or one that may exchange equal keys")
    values, ids = a.e.several("sort", (a.tensor(0),), {"dim": dim})
    rest = [a.e.op("take_along_dim", (a.tensor(i), ids), {"dim": dim}) for i in range(1, len(a.operands))]
    return values, *rest
