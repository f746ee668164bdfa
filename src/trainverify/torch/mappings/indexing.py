"""Reading and writing by index."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from trainverify.torch.integers import never_negative
from trainverify.torch.mappings.table import Arguments, rows
from trainverify.torch.ranges import known, taken, written
from trainverify.torch.values import Unknown, Unmapped

ROWS, row = rows()


def _as_vectors(a: Arguments, *names: str) -> list[str]:
    """Tensors without dimensions as vectors of one element."""
    return [name if a.e.shape(name) else a.e.reshape(name, (1,)) for name in names]


def _dim(a: Arguments, x: str) -> int:
    return a.integer("dim") % max(1, len(a.e.shape(x)))


def _shaped(a: Arguments, made: str) -> str:
    """With the dimensions that PyTorch gives the result: none, where a vector of one element stands for none."""
    kind = a.out[0]
    assert kind is not None
    return a.e.reshape(made, ()) if kind.shape == () and a.e.shape(made) == (1,) else made


@row("aten::gather")
def gather(a: Arguments) -> str:
    a.ignore("sparse_grad")  # how the gradient is kept in memory
    x, ids = _as_vectors(a, a.tensor("self"), a.tensor("index"))
    dim = _dim(a, x)
    whole = len(a.e.shape(ids)) == len(a.e.shape(x)) and taken(a.e, x, ids, dim)
    return _shaped(a, whole or a.e.op("take_along_dim", (x, ids), {"dim": dim}))


@row("aten::index_select")
def index_select(a: Arguments) -> str:
    x, ids = _as_vectors(a, a.tensor("self"), a.tensor("index"))
    dim = _dim(a, x)
    return _shaped(a, (taken(a.e, x, ids, dim) if len(a.e.shape(ids)) == 1 else None) or a.e.op("index_select", (x, ids), {"dim": dim}))


@row("aten::scatter_add")
def scatter_add(a: Arguments) -> str:
    x, ids, src = _as_vectors(a, a.tensor("self"), a.tensor("index"), a.tensor("src"))
    if 0 in a.e.shape(ids):
        a.ignore("dim")
        return _shaped(a, x)
    return _shaped(a, a.e.op("scatter_add", (x, ids, src), {"dim": _dim(a, x)}))


@row("aten::scatter")
def scatter(a: Arguments) -> str:
    """Where several elements of `src` go to one place any of them may be there: positions must differ. One value may go there twice."""
    if a.raw("reduce") is not None:
        raise Unmapped(f"argument reduce={a.raw('reduce')!r}")
    x, ids = _as_vectors(a, a.tensor("self"), a.tensor("index"))
    dim = _dim(a, x)
    once = a.e.shape(ids)[dim] == 1 or _differ(a, ids, dim)
    if "value" not in a.given:
        if not once:
            raise Unmapped("positions that may be equal: any of the elements may be written there")
        (src,) = _as_vectors(a, a.tensor("src"))
        return _shaped(a, a.e.op("put_along_dim", (x, ids, src), {"dim": dim}))
    value, dtype = a.number("value"), a.e.tensors[x].dtype
    if once:
        return _shaped(a, a.e.op("put_along_dim", (x, ids, a.e.full(a.e.shape(ids), value, dtype)), {"dim": dim}))
    hits = a.e.op("scatter_add", (a.e.full(a.e.shape(x), 0, "f32"), ids, a.e.full(a.e.shape(ids), 1, "f32")), {"dim": dim})
    return _shaped(a, a.e.op("where", (a.e.op("gt", (hits,), {"value": 0}), a.e.full((), value, dtype), x)))


def _differ(a: Arguments, ids: str, dim: int) -> bool:
    """Whether integers along a dimension are different ones, as it follows from how they were made."""
    op = a.e.made.get(ids)
    while op is not None and op.name == "to" and a.e.kind(str(op.inputs[0])) == "int":
        ids = str(op.inputs[0])
        op = a.e.made.get(ids)
    if op is not None and op.name in ("topk", "sort") and op.outputs[1] == ids:
        return int(op.get("dim", -1)) % len(a.e.shape(ids)) == dim
    numbers = known(a.e, ids)
    if numbers is None:
        return False
    ordered = np.sort(numbers, axis=dim)
    return bool((np.diff(ordered, axis=dim) > 0).all())


def _index(a: Arguments, tensor: Any) -> str:
    """An index: integers, or a mask. Bytes are a mask too, in PyTorch."""
    ids = a.read(tensor)
    if a.e.tensors[ids].dtype == "u8":
        raise Unmapped("an index of bytes: it counts as a mask")
    return ids


def _from_the_front(a: Arguments, ids: str) -> None:
    if not never_negative(a.e, ids):
        raise Unmapped("an index that may be negative: it would count from the end")


def _positions(a: Arguments, found: list[tuple[int, Any]], x: str) -> tuple[int, str, str]:
    """Indices along one or several neighbouring dimensions as one: the first dimension, the index, and x with these dimensions joined."""
    first = found[0][0]
    if [d for d, _ in found] != list(range(first, first + len(found))):
        raise Unmapped("dimensions indexed that are no neighbours")
    ids = [_index(a, t) for _, t in found]
    if any(a.e.kind(i) != "int" for i in ids):
        raise Unmapped("elements chosen by a mask: their number depends on data")
    e, shape = a.e, a.e.shape(x)
    joined = ids[0]
    for k, i in enumerate(ids):
        if (at := known(e, i)) is None or (at < 0).any():
            _from_the_front(a, i)
        if k:
            joined = e.op("add", (e.op("mul", (joined,), {"value": shape[first + k]}), i))
    if len(ids) == 1:
        return first, joined, x
    size = int(np.prod(shape[first : first + len(ids)]))
    return first, joined, e.reshape(x, (*shape[:first], size, *shape[first + len(ids) :]))


@row("aten::index", "aten::_unsafe_index")
def index(a: Arguments) -> str:
    """x[:, ids]: rows by number along one dimension; x[i, j]: elements by several; x[arange(rows), ids]: one element of every row."""
    x = a.tensor("self")
    found = [(d, t) for d, t in enumerate(a.raw("indices")) if t is not None]
    if len(found) == 2 and (column := _one_per_row(a, found, x)) is not None:
        return a.e.reshape(a.e.op("take_along_dim", (x, column), {"dim": 1}), (a.e.shape(x)[0],))
    if len(found) == 1 and (ids := _index(a, found[0][1])) and a.e.kind(ids) == "int":
        numbers, at = known(a.e, x), known(a.e, ids)
        if numbers is not None and at is not None and (made := written(a.e, np.take(numbers, at, axis=found[0][0]))) is not None:
            return made
    dim, ids, x = _positions(a, found, x)
    shape, rest = a.e.shape(ids), a.e.shape(x)
    count = 1
    for s in shape:
        count *= s
    ids = a.e.reshape(ids, (count,))
    flat = taken(a.e, x, ids, dim) or a.e.op("index_select", (x, ids), {"dim": dim})
    return a.e.reshape(flat, (*rest[:dim], *shape, *rest[dim + 1 :]))


@row("aten::index_put", "aten::_unsafe_index_put", "aten::_index_put_impl")
def index_put(a: Arguments) -> str:
    a.ignore("unsafe")  # whether indices are checked
    x, values = a.tensor("self"), a.tensor("values")
    accumulate = a.flag("accumulate")
    found = [(d, t) for d, t in enumerate(a.raw("indices")) if t is not None]
    if len(found) == 1 and found[0][0] == 0 and a.e.kind(ids := _index(a, found[0][1])) == "bool":
        if not accumulate and a.e.shape(values) in ((), (1,)):
            shape, whole = a.e.shape(ids), a.e.shape(x)
            mask = a.e.reshape(ids, (*shape, *(1,) * (len(whole) - len(shape))))
            return a.e.op("where", (mask, a.e.reshape(values, ()), x))
        raise Unmapped("elements chosen by a mask: their number depends on data")
    if accumulate and found:
        dim, ids, joined = _positions(a, found, x)
        made = a.e.op("add", (joined, _summed(a, ids, values, a.e.shape(joined), dim)))
        return a.e.reshape(made, a.e.shape(x))
    if len(found) == 2 and (column := _one_per_row(a, found, x)) is not None:
        rows = a.e.shape(x)[0]
        if a.e.shape(values) != (rows,):
            values = a.e.op("expand", (values,), {"shape": (rows,)})
        return a.e.op("put_along_dim", (x, column, a.e.reshape(values, (rows, 1))), {"dim": 1})
    dim, ids, joined = _positions(a, found, x)
    shape, whole, count = a.e.shape(ids), a.e.shape(joined), math.prod(a.e.shape(ids))
    ids = a.e.reshape(ids, (count,))
    if not _differ(a, ids, 0):
        raise Unmapped("a write at several indices that may be equal")
    full = (*whole[:dim], *shape, *whole[dim + 1 :])
    values = values if a.e.shape(values) == full else a.e.op("expand", (values,), {"shape": full})
    flat = (*whole[:dim], count, *whole[dim + 1 :])
    ids = a.e.op("expand", (a.e.reshape(ids, (count, *(1,) * (len(whole) - dim - 1))),), {"shape": flat})
    return a.e.reshape(a.e.op("put_along_dim", (joined, ids, a.e.reshape(values, flat)), {"dim": dim}), a.e.shape(x))


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


def _summed(a: Arguments, ids: str, values: str, shape: tuple[int, ...], dim: int = 0) -> str:
    """Σ over positions of one_hot(id)·value: what is added up along a dimension."""
    letters = "abcdefgh"[: len(a.e.shape(ids))]
    before, after = "ijklmn"[:dim], "pqrstu"[: len(shape) - dim - 1]
    full = (*shape[:dim], *a.e.shape(ids), *shape[dim + 1 :])
    if a.e.shape(values) != full:
        values = a.e.op("expand", (values,), {"shape": full})
    hot = a.e.cast(a.e.op("one_hot", (ids,), {"num_classes": shape[dim]}), a.e.tensors[values].dtype)
    return a.e.op("einsum", (hot, values), {"spec": f"{letters}v,{before}{letters}{after}->{before}v{after}"})


@row("aten::index_add")
def index_add(a: Arguments) -> str:
    x, ids, source = _as_vectors(a, a.tensor("self"), a.tensor("index"), a.tensor("source"))
    made = _summed(a, ids, source, a.e.shape(x), _dim(a, x))
    return _shaped(a, a.e.op("add", (x, a.times(made, a.number("alpha")))))


# Operators that give equal elements for different arguments
_FLAT: Final = frozenset(
    (
        *("relu", "clamp", "sign", "floor", "full", "minimum", "maximum", "one_hot", "expand", "repeat", "masked_fill"),
        *("lt", "le", "gt", "ge", "eq", "ne", "logical_and", "logical_or", "logical_not"),
    )
)
_KEEPING: Final = frozenset(
    (
        *("reshape", "permute", "slice", "concat", "to", "identity", "neg", "exp", "log", "sigmoid", "softmax", "tanh"),
        *("add", "mul", "div", "sub", "log_softmax", "flip", "roll"),
    )
)


def _may_tie(a: Arguments, name: str | None) -> bool:
    """Whether it shows in how numbers are made that several may be equal: integers, or what functions with flat parts give."""
    seen: set[str | None] = set()
    waiting = [name]
    while waiting:
        here = waiting.pop()
        op = a.e.made.get(here)
        if here is None or here in seen or op is None:
            continue
        seen.add(here)
        if op.name in _FLAT or a.e.kind(here) != "real":
            return True
        if op.name in _KEEPING:
            waiting += op.inputs[:1]
    return False


_ANY: Final = "positions of the elements in order: of equal ones any may be meant"


def _ordered(a: Arguments, vector: str, op: str, attrs: dict[str, object], exact: bool = False) -> tuple[str, str | Unknown]:
    """Elements in order, and their positions, which have no value where equal elements may take turns."""
    x = a.tensor("self")
    values, ids = a.e.several(op, (vector,), {**attrs, "dim": _dim(a, x)})
    if vector != x:
        values, ids = a.e.reshape(values, ()), a.e.reshape(ids, ())
    return values, ids if exact or (a.e.kind(x) == "real" and not _may_tie(a, x)) else Unknown(_ANY, a.e.place.source)


@row("aten::topk")
def topk(a: Arguments) -> tuple[str, str | Unknown]:
    k = a.integer("k")
    if not a.flag("sorted") and k > 1:
        raise Unmapped("sorted=False: elements in any order")
    (vector,) = _as_vectors(a, a.tensor("self"))
    return _ordered(a, vector, "topk", {"k": k, "largest": a.flag("largest")})


@row("aten::sort")
def sort(a: Arguments) -> tuple[str, str | Unknown]:
    (vector,) = _as_vectors(a, a.tensor("self"))
    return _ordered(a, vector, "sort", {"descending": a.flag("descending")}, a.raw("stable") is True)


def _ranked(a: Arguments, k: int) -> tuple[str, str | Unknown]:
    """The k-th smallest element along a dimension, and its position."""
    x = a.tensor("self")
    (vector,) = _as_vectors(a, x)
    dim, kind = _dim(a, vector), a.out[0]
    assert kind is not None
    values, ids = a.e.several("topk", (vector,), {"k": k, "largest": False, "dim": dim})
    cut = {"dim": dim, "start": k - 1, "stop": k}
    value, at = (a.e.reshape(a.e.op("slice", (t,), cut), kind.shape) for t in (values, ids))
    a.ignore("keepdim")  # shapes are those of the results
    return value, Unknown(_ANY, a.e.place.source) if a.e.kind(x) != "real" or _may_tie(a, x) else at


@row("aten::kthvalue")
def kthvalue(a: Arguments) -> tuple[str, str | Unknown]:
    return _ranked(a, a.integer("k"))


@row("aten::median")
def median(a: Arguments) -> str | tuple[str, str | Unknown]:
    """Of an even number of elements the lower one of the middle."""
    x = a.tensor("self")
    if len(a.out) == 2:
        (vector,) = _as_vectors(a, x)
        return _ranked(a, (a.e.shape(vector)[_dim(a, vector)] + 1) // 2)
    count = math.prod(a.e.shape(x))
    k = (count + 1) // 2
    values = a.e.several("topk", (a.e.reshape(x, (count,)),), {"k": k, "largest": False, "dim": 0})[0]
    return a.e.reshape(a.e.op("slice", (values,), {"dim": 0, "start": k - 1, "stop": k}), ())
