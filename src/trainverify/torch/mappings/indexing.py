"""Reading and writing by index."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainverify.torch.integers import never_negative
from trainverify.torch.mappings.table import Arguments, rows
from trainverify.torch.ranges import known, taken, written
from trainverify.torch.values import Unmapped

ROWS, row = rows()


@row("aten::gather")
def gather(a: Arguments) -> str:
    a.ignore("sparse_grad")
    x, ids, dim = a.tensor("self"), a.tensor("index"), a.integer("dim")
    whole = len(a.e.shape(ids)) == len(a.e.shape(x)) and taken(a.e, x, ids, dim)
    return whole or a.e.op("take_along_dim", (x, ids), {"dim": dim})


@row("aten::index_select")
def index_select(a: Arguments) -> str:
    x, ids, dim = a.tensor("self"), a.tensor("index"), a.integer("dim")
    return (taken(a.e, x, ids, dim) if len(a.e.shape(ids)) == 1 else None) or a.e.op("index_select", (x, ids), {"dim": dim})


@row("aten::scatter_add")
def scatter_add(a: Arguments) -> str:
    return a.e.op("scatter_add", (a.tensor("self"), a.tensor("index"), a.tensor("src")), {"dim": a.integer("dim")})


@row("aten::scatter")
def scatter(a: Arguments) -> str:
    if a.raw("reduce") is not None:
        raise Unmapped(f"argument reduce={a.raw('reduce')!r}")
    x, ids = a.tensor("self"), a.tensor("index")
    src = a.e.full(a.e.shape(ids), a.number("value"), a.e.tensors[x].dtype) if "value" in a.given else a.tensor("src")
    return a.e.op("put_along_dim", (x, ids, src), {"dim": a.integer("dim")})


def _indices(a: Arguments, name: str = "indices") -> tuple[int, str]:
    """The one dimension that is indexed, and its index."""
    found = [(d, t) for d, t in enumerate(a.raw(name)) if t is not None]
    if len(found) != 1:
        raise Unmapped("several dimensions indexed at once")
    return found[0][0], a.read(found[0][1])


def _from_the_front(a: Arguments, ids: str) -> None:
    if not never_negative(a.e, ids):
        raise Unmapped("an index that may be negative: it would count from the end")


@row("aten::index")
def index(a: Arguments) -> str:
    """x[:, ids]: rows by number along one dimension; x[arange(rows), ids]: one element of every row."""
    x = a.tensor("self")
    found = [(d, t) for d, t in enumerate(a.raw("indices")) if t is not None]
    if len(found) == 2 and (column := _one_per_row(a, found, x)) is not None:
        return a.e.reshape(a.e.op("take_along_dim", (x, column), {"dim": 1}), (a.e.shape(x)[0],))
    dim, ids = _indices(a)
    if a.e.kind(ids) == "bool":
        raise Unmapped("elements chosen by a mask: their number depends on data")
    numbers, at = known(a.e, x), known(a.e, ids)
    if numbers is not None and at is not None and (made := written(a.e, np.take(numbers, at, axis=dim))) is not None:
        return made
    if at is None or (at < 0).any():
        _from_the_front(a, ids)
    shape, rest = a.e.shape(ids), a.e.shape(x)
    count = 1
    for s in shape:
        count *= s
    ids = a.e.reshape(ids, (count,))
    flat = taken(a.e, x, ids, dim) or a.e.op("index_select", (x, ids), {"dim": dim})
    return a.e.reshape(flat, (*rest[:dim], *shape, *rest[dim + 1 :]))


@row("aten::index_put")
def index_put(a: Arguments) -> str:
    x, values = a.tensor("self"), a.tensor("values")
    accumulate = a.flag("accumulate")
    found = [(d, t) for d, t in enumerate(a.raw("indices")) if t is not None]
    if len(found) == 1 and found[0][0] == 0:
        ids = a.read(found[0][1])
        if a.e.kind(ids) == "bool" and not accumulate and a.e.shape(values) in ((), (1,)):
            mask = ids
            shape, whole = a.e.shape(ids), a.e.shape(x)
            if len(shape) < len(whole):
                mask = a.e.reshape(ids, (*shape, *(1,) * (len(whole) - len(shape))))
            return a.e.op("where", (mask, a.e.reshape(values, ()), x))
        if a.e.kind(ids) == "int" and accumulate:
            _from_the_front(a, ids)
            return a.e.op("add", (x, _summed(a, ids, values, a.e.shape(x))))
    if len(found) == 2 and not accumulate and (column := _one_per_row(a, found, x)) is not None:
        rows = a.e.shape(x)[0]
        if a.e.shape(values) != (rows,):
            values = a.e.op("expand", (values,), {"shape": (rows,)})
        return a.e.op("put_along_dim", (x, column, a.e.reshape(values, (rows, 1))), {"dim": 1})
    raise Unmapped("a write at several indices")


def _one_per_row(a: Arguments, found: list[tuple[int, Any]], x: str) -> str | None:
    """The indices along dimension 1 of x[arange(rows), ids], as a column."""
    e, rows = a.e, a.e.shape(x)[0]
    first, second = (a.read(t) for _, t in found)
    counted = e.made.get(first)
    every = counted is not None and counted.name == "arange" and e.shape(first) == (rows,) and counted.get("start", 0) == 0
    if not every or counted is None or counted.get("step", 1) != 1 or [d for d, _ in found] != [0, 1]:
        return None
    if len(e.shape(x)) != 2 or e.shape(second) != (rows,) or e.kind(second) != "int":
        return None
    _from_the_front(a, second)
    return e.reshape(second, (rows, 1))


def _summed(a: Arguments, ids: str, values: str, shape: tuple[int, ...]) -> str:
    """Σ over positions of one_hot(id)·value: what is added up along dimension 0."""
    letters = "abcdefgh"[: len(a.e.shape(ids))]
    rest = "pqrstu"[: len(shape) - 1]
    full = (*a.e.shape(ids), *shape[1:])
    if a.e.shape(values) != full:
        values = a.e.op("expand", (values,), {"shape": full})
    hot = a.e.cast(a.e.op("one_hot", (ids,), {"num_classes": shape[0]}), a.e.tensors[values].dtype)
    return a.e.op("einsum", (hot, values), {"spec": f"{letters}v,{letters}{rest}->v{rest}"})


@row("aten::index_add")
def index_add(a: Arguments) -> str:
    if a.integer("dim") != 0:
        raise Unmapped(f"argument dim={a.raw('dim')!r}")
    x = a.tensor("self")
    return a.e.op("add", (x, a.times(_summed(a, a.tensor("index"), a.tensor("source"), a.e.shape(x)), a.number("alpha"))))


@row("aten::topk")
def topk(a: Arguments) -> tuple[str, str]:
    a.ignore("sorted")  # ours are in order: one of the allowed results
    attrs = {"k": a.integer("k"), "dim": a.integer("dim"), "largest": a.flag("largest")}
    values, ids = a.e.several("topk", (a.tensor("self"),), attrs)
    return values, ids
