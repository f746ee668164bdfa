"""Moving elements: views, slices, joins, ranges."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainverify.jax.emit import RankEmitter
from trainverify.jax.mappings.table import Arguments, rows
from trainverify.jax.ranges import bounds
from trainverify.jax.values import TABLE_ELEMENTS, Array, Grid, Number, Table, Value, listed, table_of
from trainverify.translate.emit import Unmapped

ROWS, row = rows()


@row("iota", ignores=("sharding",))
def iota(a: Arguments) -> Value:
    a.ignore("dtype")
    shape, dim = tuple(a.param("shape")), a.param("dimension")
    made = Grid(np.zeros(1, np.int64), tuple(int(d == dim) for d in range(len(shape))), shape, a.dtype if a.out[0].kind == "int" else "i64")
    return made if a.out[0].kind == "int" else a.e.cast(a.e.tensor(made), a.dtype)


@row("broadcast_in_dim", ignores=("sharding",))
def broadcast_in_dim(a: Arguments) -> Value:
    shape, dims = tuple(a.param("shape")), tuple(int(d) for d in a.param("broadcast_dimensions"))
    x = a.operand(0)
    if isinstance(x, Number):
        return Number(x.value, shape, x.dtype)
    source = a.types[0].shape
    if isinstance(x, Grid):
        strides = [0] * len(shape)
        for i, d in enumerate(dims):
            strides[d] = x.strides[i] if source[i] == shape[d] else 0
        return Grid(x.start, tuple(strides), shape, x.dtype)
    slim = tuple(source[dims.index(d)] if d in dims else 1 for d in range(len(shape)))
    if isinstance(x, Table):
        data = x.data.reshape(len(x.data), *slim)
        return listed(np.broadcast_to(data, (len(data), *shape)), x.dtype)
    y = a.e.reshape(a.tensor(0), slim)
    return y if slim == shape else a.e.op("expand", (y,), {"shape": shape})


def _moved(a: Arguments, fn: Callable[[Array], Array]) -> Value | None:
    """Integers that are listed, moved as the array is; a grid becomes a list if it is small enough."""
    x = a.operand(0)
    if not isinstance(x, Grid | Table):
        return None
    data = table_of(x)
    return None if data is None else listed(fn(data), x.dtype)


@row("reshape", ignores=("sharding",))
def reshape(a: Arguments) -> Value:
    order, shape = a.param("dimensions"), tuple(a.param("new_sizes"))
    x = a.operand(0)
    if order is not None and tuple(order) != tuple(range(len(order))):
        if not isinstance(x, str):
            raise Unmapped("a reshape that also permutes")
        x = a.e.op("permute", (x,), {"dims": tuple(map(int, order))})
    return reshaped(a, x, shape)


def reshaped(a: Arguments, x: Value, shape: tuple[int, ...]) -> Value:
    if isinstance(x, Number):
        return Number(x.value, shape, x.dtype)
    if isinstance(x, Grid):
        if x.uniform:
            return Grid(x.start, (0,) * len(shape), shape, x.dtype)
        wide = [(s, n) for s, n in zip(x.strides, x.shape, strict=True) if n > 1]
        if [n for _, n in wide] == [n for n in shape if n > 1]:
            left = iter(wide)
            return Grid(x.start, tuple(next(left)[0] if n > 1 else 0 for n in shape), shape, x.dtype)
    if isinstance(x, Grid | Table) and (data := table_of(x)) is not None:
        return listed(data.reshape(len(data), *shape), x.dtype)
    return a.e.reshape(a.e.tensor(x), shape)


@row("squeeze")
def squeeze(a: Arguments) -> Value:
    gone = tuple(a.param("dimensions"))
    shape = tuple(n for d, n in enumerate(a.types[0].shape) if d not in gone)
    return reshaped(a, a.operand(0), shape)


@row("expand_dims")
def expand_dims(a: Arguments) -> Value:
    a.param("dimensions")
    return reshaped(a, a.operand(0), a.shape)


@row("transpose")
def transpose(a: Arguments) -> Value:
    order = tuple(int(d) for d in a.param("permutation"))
    x = a.operand(0)
    if isinstance(x, Number):
        return Number(x.value, tuple(x.shape[d] for d in order), x.dtype)
    if isinstance(x, Grid):
        return Grid(x.start, tuple(x.strides[d] for d in order), tuple(x.shape[d] for d in order), x.dtype)
    if (found := _moved(a, lambda v: v.transpose(0, *(d + 1 for d in order)))) is not None:
        return found
    return a.tensor(0) if order == tuple(range(len(order))) else a.e.op("permute", (a.tensor(0),), {"dims": order})


@row("slice")
def slice_(a: Arguments) -> Value:
    start, stop, step = a.param("start_indices"), a.param("limit_indices"), a.param("strides")
    return sliced(a.e, a.operand(0), start, stop, step or (1,) * len(start))


def sliced(e: RankEmitter, x: Value, start: Sequence[Any], stop: Sequence[Any], step: Sequence[int]) -> Value:
    """x[start:stop:step]; starts and stops may be columns over the ranks."""
    sizes = tuple(-(-int(_first(q) - _first(p)) // s) for p, q, s in zip(start, stop, step, strict=True))
    if isinstance(x, Number):
        return Number(x.value, sizes, x.dtype)
    if isinstance(x, Grid):
        origin = sum((np.asarray(p) * s for p, s in zip(start, x.strides, strict=True)), start=np.zeros(1, np.int64))
        return Grid(x.start + origin, tuple(s * t for s, t in zip(x.strides, step, strict=True)), sizes, x.dtype)
    if isinstance(x, Table) and not any(isinstance(p, np.ndarray) for p in start):
        where = tuple(slice(p, q, s) for p, q, s in zip(start, stop, step, strict=True))
        return listed(x.data[(slice(None), *where)], x.dtype)
    if isinstance(x, Table):
        return listed(np.stack([_row_of(x, k, start, stop, step) for k in range(len(e.ranks))]), x.dtype)
    name = e.tensor(x)
    for d, (p, q, s) in enumerate(zip(start, stop, step, strict=True)):
        if isinstance(p, np.ndarray) or (p, q, s) != (0, e.shape(name)[d], 1):
            attrs = {"dim": d, "start": p, "stop": q} | ({"step": s} if s != 1 else {})
            name = e.op("slice", (name,), attrs)
    return name


def _row_of(x: Table, k: int, start: Sequence[Any], stop: Sequence[Any], step: Sequence[int]) -> Array:
    """What the k-th rank slices out of listed integers."""

    def own(value: Any) -> int:
        return int(value[k if len(value) > 1 else 0]) if isinstance(value, np.ndarray) else int(value)

    where = tuple(slice(own(p), own(q), s) for p, q, s in zip(start, stop, step, strict=True))
    found: Array = x.data[k if len(x.data) > 1 else 0][where]
    return found


def _first(value: Any) -> int:
    return int(value[0]) if isinstance(value, np.ndarray) else int(value)


@row("rev")
def rev(a: Arguments) -> Value:
    dims = tuple(a.param("dimensions"))
    x = a.operand(0)
    if isinstance(x, Number):
        return x
    if (found := _moved(a, lambda v: np.flip(v, tuple(d + 1 for d in dims)))) is not None:
        return found
    return a.e.op("flip", (a.tensor(0),), {"dims": dims})


@row("concatenate")
def concatenate(a: Arguments) -> Value:
    dim = a.param("dimension")
    if all(isinstance(x, Number) for x in a.operands) and len({x.value for x in a.operands if isinstance(x, Number)}) == 1:
        first = a.operands[0]
        assert isinstance(first, Number)
        return Number(first.value, a.shape, a.dtype)
    if all(isinstance(x, Grid | Table) for x in a.operands):
        tables = [table_of(x) for x in a.operands if isinstance(x, Grid | Table)]
        if all(t is not None for t in tables):
            width = max(len(t) for t in tables if t is not None)
            data = [np.broadcast_to(t, (width, *t.shape[1:])) for t in tables if t is not None]
            return listed(np.concatenate(data, dim + 1), a.dtype)
    return a.e.op("concat", [a.tensor(i) for i in range(len(a.operands))], {"dim": dim})


@row("stack")
def stack(a: Arguments) -> Value:
    return a.e.op("stack", [a.tensor(i) for i in range(len(a.operands))], {"dim": a.param("axis")})


@row("unstack")
def unstack(a: Arguments) -> tuple[Value, ...]:
    dim = a.param("axis")
    return tuple(a.e.op("select", (a.tensor(0),), {"dim": dim, "index": n}) for n in range(len(a.out)))


@row("tile")
def tile(a: Arguments) -> Value:
    sizes = tuple(int(n) for n in a.param("reps"))
    x = a.operand(0)
    if isinstance(x, Number):
        return Number(x.value, a.shape, x.dtype)
    if (found := _moved(a, lambda v: np.tile(v, (1, *sizes)))) is not None and math.prod(a.shape) <= TABLE_ELEMENTS:
        return found
    return a.e.op("repeat", (a.tensor(0),), {"sizes": sizes})


@row("split")
def split(a: Arguments) -> tuple[Value, ...]:
    sizes, dim = tuple(a.param("sizes")), a.param("axis")
    found: list[Value] = []
    at, rank = 0, len(a.types[0].shape)
    for n in sizes:
        start = [at if d == dim else 0 for d in range(rank)]
        stop = [at + n if d == dim else s for d, s in enumerate(a.types[0].shape)]
        found.append(sliced(a.e, a.operand(0), start, stop, (1,) * rank))
        at += n
    return tuple(found)


@row("pad")
def pad(a: Arguments) -> Value:
    filler = a.number(1)
    config = [tuple(int(n) for n in c) for c in a.param("padding_config")]
    if filler is None:
        raise Unmapped("padding with a value that is not a literal")
    x = a.operand(0)
    if isinstance(x, Number) and x.value == filler:
        return Number(filler, a.shape, a.dtype)
    name = a.tensor(0)
    for d, (_, _, inner) in enumerate(config):
        if inner < 0:
            raise Unmapped("negative padding between elements")
        if inner:
            name = _spaced(a, name, d, inner, filler)
    pads = [n for low, high, _ in reversed(config) for n in (low, high)]
    if not any(pads):
        return name
    return a.e.op("pad", (name,), {"pads": tuple(pads)} | ({"value": filler} if filler else {}))


def _spaced(a: Arguments, name: str, d: int, inner: int, filler: Any) -> str:
    """`inner` fillers after every element but the last, along a dimension."""
    shape = a.e.shape(name)
    apart = a.e.reshape(name, (*shape[: d + 1], 1, *shape[d + 1 :]))
    after = [0, 0] * (len(shape) - d - 1) + [0, inner]
    wide = a.e.op("pad", (apart,), {"pads": tuple(after)} | ({"value": filler} if filler else {}))
    joined = a.e.reshape(wide, (*shape[:d], shape[d] * (inner + 1), *shape[d + 1 :]))
    return a.e.op("slice", (joined,), {"dim": d, "start": 0, "stop": shape[d] * (inner + 1) - inner})


@row("dynamic_slice")
def dynamic_slice(a: Arguments) -> Value:
    """A slice that begins where integers say; JAX moves it inside."""
    sizes = tuple(a.param("slice_sizes"))
    shape = a.types[0].shape
    starts = [a.known(i) for i in range(1, len(a.operands))]
    if all(isinstance(s, Grid) for s in starts):
        first = [_inside(s.start, n - size) for s, n, size in zip(starts, shape, sizes, strict=True) if isinstance(s, Grid)]
        begin: list[Any] = [int(f[0]) if len(f) == 1 else f for f in first]
        return sliced(a.e, a.operand(0), begin, [p + size for p, size in zip(begin, sizes, strict=True)], (1,) * len(sizes))
    name = a.tensor(0)
    for d, (n, size) in enumerate(zip(shape, sizes, strict=True)):
        if size != n and isinstance(known := a.known(1 + d), Grid):
            at = _inside(known.start, n - size)
            name = a.e.op("slice", (name,), {"dim": d, "start": at, "stop": at + size})
        elif size != n:
            name = _from(a, name, d, a.operand(1 + d), size)
    return name


def _inside(start: Array, most: int) -> Array:
    found = np.clip(start, 0, most)
    return found[:1] if (found == found[0]).all() else found


def _from(a: Arguments, name: str, d: int, start: Value, size: int) -> str:
    """`size` positions along a dimension from one that data say."""
    n = a.e.shape(name)[d]
    found = bounds(a.e, start)
    if found is None or found[0] < 0 or found[1] > n - size:
        raise Unmapped("a slice from a position that may be outside")
    first = a.e.reshape(a.e.tensor(start), (1,))
    ids = first if size == 1 else a.e.op("add", (a.e.tensor(Grid(np.zeros(1, np.int64), (1,), (size,), a.e.tensors[first].dtype)), first))
    return a.e.op("index_select", (name, ids), {"dim": d})


@row("dynamic_update_slice")
def dynamic_update_slice(a: Arguments) -> Value:
    """x with a block replaced, from known positions on."""
    shape, sizes = a.types[0].shape, a.types[1].shape
    first: list[Any] = []
    for s, n, size in zip([a.known(i) for i in range(2, len(a.operands))], shape, sizes, strict=True):
        if not isinstance(s, Grid):
            raise Unmapped("a write from a position that is not known")
        at = _inside(s.start, n - size)
        first.append(at if len(at) > 1 else int(at[0]))
    if math.prod(sizes) == 0:
        return a.operand(0)
    if not any(isinstance(p, np.ndarray) for p in first):
        return _written(a, a.operand(0), a.tensor(1), first)
    made = _alone(a, a.tensor(1), first)
    if a.number(0) == 0:
        return made
    mask = _alone(a, a.e.full(sizes, 1, "f32"), first)
    return a.e.op("where", (a.e.op("gt", (mask,), {"value": 0}), made, a.e.slim(a.operand(0))))


def _alone(a: Arguments, block: str, first: Sequence[Any]) -> str:
    """A block where a rank puts it, zeros elsewhere."""
    shape, sizes = a.types[0].shape, a.types[1].shape
    pads = [n for d in reversed(range(len(shape))) for n in (first[d], shape[d] - sizes[d] - first[d])]
    return a.e.op("pad", (block,), {"pads": tuple(pads)})


def _written(a: Arguments, x: Value, block: str, first: Sequence[int]) -> str:
    """Joined from what is before, the block, and what is after, dimension by dimension."""
    shape, sizes = a.types[0].shape, a.types[1].shape
    cut = [d for d in range(len(shape)) if sizes[d] != shape[d]]
    if not cut:
        return block
    if isinstance(x, Number):
        pads = [n for d in reversed(range(len(shape))) for n in (first[d], shape[d] - sizes[d] - first[d])]
        return a.e.op("pad", (block,), {"pads": tuple(pads)} | ({"value": x.value} if x.value else {}))
    made, at = block, list(first)
    for d in reversed(cut):
        low, high = [0] * len(shape), list(shape)
        for other in cut:
            if other < d:
                low[other], high[other] = at[other], at[other] + sizes[other]
        parts = []
        for begin, end in ((0, at[d]), (at[d] + sizes[d], shape[d])):
            if end > begin:
                start, stop = list(low), list(high)
                start[d], stop[d] = begin, end
                parts.append(a.e.tensor(sliced(a.e, x, start, stop, (1,) * len(shape))))
            if begin == 0:
                parts.append(made)
        made = a.e.op("concat", parts, {"dim": d}) if len(parts) > 1 else parts[0]
    return made
