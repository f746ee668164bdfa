"""Reading and writing by index. Every gather and scatter is brought to one form: [batch, indexed, rest] and linear ids.

A window of several positions is the same as several ids. JAX moves ids inside, fills or drops outside of the tensor; our operators
do neither, so ids have to be inside.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainverify.jax.mappings.shaping import sliced
from trainverify.jax.mappings.table import Arguments, rows
from trainverify.jax.ranges import within
from trainverify.jax.values import Grid, Table, Value, listed, table_of
from trainverify.translate.emit import Unmapped

ROWS, row = rows()


@dataclass(frozen=True)
class Form:
    """Dimensions of the operand and of the ids, by what they are for."""

    batching: tuple[int, ...]  # of the operand, beside those of the ids
    ids_batching: tuple[int, ...]
    indexed: tuple[int, ...]
    gone: tuple[int, ...]  # not in the windows: batching ones, and those of size 1 that are dropped
    sizes: tuple[int, ...]  # of a window, in every dimension of the operand
    offset: tuple[int, ...]  # where dimensions of windows are in the result (of a gather) or the updates (of a scatter)


def _form(a: Arguments, n: Any, gather: bool) -> Form:
    """From GatherDimensionNumbers or ScatterDimensionNumbers."""
    if gather:
        sizes = tuple(a.param("slice_sizes"))
        batching, ids_batching = tuple(n.operand_batching_dims), tuple(n.start_indices_batching_dims)
        return Form(batching, ids_batching, tuple(n.start_index_map), (*n.collapsed_slice_dims, *batching), sizes, tuple(n.offset_dims))
    batching, gone = tuple(n.operand_batching_dims), (*n.inserted_window_dims, *n.operand_batching_dims)
    window = iter(n.update_window_dims)
    sizes = tuple(1 if d in gone else a.types[2].shape[next(window)] for d in range(len(a.types[0].shape)))
    indexed, where = tuple(n.scatter_dims_to_operand_dims), tuple(n.update_window_dims)
    return Form(batching, tuple(n.scatter_indices_batching_dims), indexed, gone, sizes, where)


def _fixed(a: Arguments, f: Form) -> list[Any] | None:
    """Where the only window starts, if that is known: an integer or a column over ranks for every dimension."""
    ids = a.operand(1)
    if not isinstance(ids, Grid | Table) or math.prod(a.types[1].shape[:-1]) != 1 or f.batching:
        return None
    data = table_of(ids)
    assert data is not None
    flat = data.reshape(len(data), -1)
    start: list[Any] = [0] * len(f.sizes)
    for i, d in enumerate(f.indexed):
        column = flat[:, i].astype(np.int64)
        if column.min() < 0 or column.max() > a.types[0].shape[d] - f.sizes[d]:
            raise Unmapped("an index outside of the tensor")
        start[d] = int(column[0]) if (column == column[0]).all() else column
    return start


def _component(a: Arguments, ids: Value, i: int) -> Value:
    """The i-th number of every index."""
    if isinstance(ids, Grid):
        return Grid(ids.start + ids.strides[-1] * i, ids.strides[:-1], ids.shape[:-1], ids.dtype)
    if isinstance(ids, Table):
        return listed(ids.data[..., i], ids.dtype)
    name, shape = a.e.tensor(ids), a.types[1].shape
    joined = a.e.made.get(name)
    if joined is not None and joined.name == "concat" and joined.get("dim", 0) == len(shape) - 1 and len(joined.inputs) == shape[-1]:
        return a.e.reshape(str(joined.inputs[i]), shape[:-1])
    one = name if shape[-1] == 1 else a.e.op("slice", (name,), {"dim": len(shape) - 1, "start": i, "stop": i + 1})
    return a.e.reshape(one, shape[:-1])


def _linear(a: Arguments, f: Form) -> str:
    """Numbers of positions in the flattened indexed dimensions, with a dimension for each window of more than one position."""
    shape, ids = a.types[0].shape, a.operand(1)
    lead = len(a.types[1].shape) - 1
    wide = [d for d in f.indexed if f.sizes[d] > 1]
    total: str | None = None
    for i, d in enumerate(f.indexed):
        one = _component(a, ids, i)
        most = shape[d] - f.sizes[d]
        if not within(a.e, one, 0, most) and not _drops(a, f):
            if "CLIP" in str(a.params.get("mode")):
                one = a.e.op("clamp", (a.e.tensor(one),), {"min": 0, "max": most})
            else:
                raise Unmapped("an index that may be outside of the tensor (declare integer inputs with tvj.Ids)")
        part = a.e.reshape(a.e.tensor(one), (*a.types[1].shape[:-1], *(1,) * len(wide)))
        if d in wide:
            strides = tuple(int(e == lead + wide.index(d)) for e in range(lead + len(wide)))
            size = tuple(f.sizes[d] if s else 1 for s in strides)
            offsets = a.e.tensor(Grid(np.zeros(1, np.int64), strides, size, a.e.tensors[part].dtype))
            part = a.e.op("add", (part, offsets))
        scale = math.prod(shape[q] for q in f.indexed[i + 1 :])
        part = part if scale == 1 else a.e.op("mul", (part,), {"value": scale})
        total = part if total is None else a.e.op("add", (total, part))
    if total is None:
        raise Unmapped("an index of nothing")
    full = (*a.types[1].shape[:-1], *(f.sizes[d] for d in wide))
    return total if a.e.shape(total) == full else a.e.op("expand", (total,), {"shape": full})


def _drops(a: Arguments, f: Form) -> bool:
    """Whether an update outside is dropped, as a one-hot of an id out of range is 0: one index, one position."""
    plain = len(f.indexed) == 1 and f.sizes[f.indexed[0]] == 1
    return plain and a.name != "gather" and "DROP" in str(a.params.get("mode"))


def _checked(a: Arguments, f: Form) -> tuple[list[int], list[int]]:
    """Dimensions of the operand that windows take whole, and those of the ids that are not batching ones."""
    rest = [d for d in range(len(f.sizes)) if d not in (*f.batching, *f.indexed)]
    if any(f.sizes[d] != a.types[0].shape[d] for d in rest):
        raise Unmapped("a window that is a part of a dimension without an index")
    lead = len(a.types[1].shape) - 1
    return rest, [d for d in range(lead) if d not in f.ids_batching]


def _arranged(a: Arguments, f: Form, rest: Sequence[int], own: Sequence[int]) -> list[int]:
    """Where the dimensions (batching, own, windows, rest) are in a result or in updates."""
    lead = len(a.types[1].shape) - 1
    total = lead + len(f.offset)
    plain = [d for d in range(total) if d not in f.offset]
    windows = [d for d in range(len(f.sizes)) if d not in f.gone]  # dimensions of the operand, in the order of `offset`
    place = dict(zip(windows, f.offset, strict=True))
    wide = [d for d in f.indexed if f.sizes[d] > 1]
    order = [plain[d] for d in f.ids_batching] + [plain[d] for d in own]
    order += [place[d] for d in wide] + [place[d] for d in rest if d in place]
    return order


@row("gather", ignores=("unique_indices", "indices_are_sorted"))
def gather(a: Arguments) -> Value:
    f = _form(a, a.param("dimension_numbers"), gather=True)
    a.ignore("mode", "fill_value")  # inside of the tensor they make no difference
    if (start := _fixed(a, f)) is not None:
        part = sliced(a.e, a.operand(0), start, [s + n for s, n in zip(start, f.sizes, strict=True)], (1,) * len(start))
        return a.e.reshape(a.e.tensor(part), a.shape)  # the result has the dimensions of the only window, in order, and ones
    rest, own = _checked(a, f)
    linear = _linear(a, f)
    x = _grouped(a, a.tensor(0), f, rest)
    made = _taken(a, x, linear, f, own, rest)
    order = _arranged(a, f, rest, own)
    ones = [d for d in range(len(a.shape)) if d not in order]  # windows of size 1 that are kept
    if ones:
        order = [o - sum(d < o for d in ones) for o in order]
    inverse = tuple(order.index(i) for i in range(len(order)))
    made = made if inverse == tuple(range(len(inverse))) else a.e.op("permute", (made,), {"dims": inverse})
    return a.e.reshape(made, a.shape)


def _grouped(a: Arguments, name: str, f: Form, rest: Sequence[int]) -> str:
    """The operand as [batching…, indexed, rest…], the indexed dimensions as one."""
    order = (*f.batching, *f.indexed, *rest)
    shape = a.types[0].shape
    if order != tuple(range(len(order))):
        name = a.e.op("permute", (name,), {"dims": order})
    one = math.prod(shape[d] for d in f.indexed)
    return a.e.reshape(name, (*(shape[d] for d in f.batching), one, *(shape[d] for d in rest)))


def _taken(a: Arguments, x: str, ids: str, f: Form, own: Sequence[int], rest: Sequence[int]) -> str:
    """[batching…, own…, windows…, rest…] from x [batching…, indexed, rest…] and ids."""
    shape, n = a.e.shape(x), len(f.batching)
    if not n:
        if len(shape) == 2:
            return a.e.op("embedding", (ids, x))
        flat = a.e.reshape(ids, (math.prod(a.e.shape(ids)),))
        return a.e.reshape(a.e.op("index_select", (x, flat), {"dim": 0}), (*a.e.shape(ids), *shape[1:]))
    order = (*f.ids_batching, *own, *range(len(f.ids_batching) + len(own), len(a.e.shape(ids))))
    if order != tuple(range(len(order))):
        ids = a.e.op("permute", (ids,), {"dims": order})
    inner = a.e.shape(ids)[n:]
    column = a.e.reshape(ids, (*shape[:n], math.prod(inner), *(1,) * len(rest)))
    if rest:
        column = a.e.op("expand", (column,), {"shape": (*shape[:n], math.prod(inner), *shape[n + 1 :])})
    return a.e.reshape(a.e.op("take_along_dim", (x, column), {"dim": n}), (*shape[:n], *inner, *shape[n + 1 :]))


@row("scatter-add", "scatter_add", "scatter-sub", ignores=("unique_indices", "indices_are_sorted", "update_jaxpr", "update_consts", "mode"))
def scatter_add(a: Arguments) -> Value:
    f = _form(a, a.param("dimension_numbers"), gather=False)
    if (start := _fixed(a, f)) is not None and not any(isinstance(s, np.ndarray) for s in start):
        added = _padded(a, a.tensor(2), start, f)
    else:
        added, _ = _spread(a, f, a.tensor(2))
    if a.name == "scatter-sub":
        return a.e.op("sub", (a.tensor(0), added))
    return added if a.number(0) == 0 else a.e.op("add", (a.tensor(0), added))


@row("scatter", ignores=("indices_are_sorted", "update_consts", "mode"))
def scatter(a: Arguments) -> Value:
    """Written where ids say, one to a place: that data say different places is not taken from `unique_indices`."""
    update = a.param("update_jaxpr", None)
    if update is not None and (update.eqns or update.outvars != update.invars[1:]):
        raise Unmapped("a function that is applied at indices")
    f = _form(a, a.param("dimension_numbers"), gather=False)
    a.ignore("unique_indices")
    once = math.prod(a.types[1].shape[:-1]) == 1 or _distinct(a, f)
    if (start := _fixed(a, f)) is not None and not any(isinstance(s, np.ndarray) for s in start):
        put = _padded(a, a.tensor(2), start, f)
        hit = _padded(a, a.e.full(a.types[2].shape, 1, "f32"), start, f)
    elif once:
        put, hit = _spread(a, f, a.tensor(2))
    else:
        raise Unmapped("a write at places that may be the same")
    hit = a.e.op("gt", (hit,), {"value": 0})
    return a.e.op("where", (hit, put, a.e.slim(a.operand(0))))


def _distinct(a: Arguments, f: Form) -> bool:
    """Whether known ids of single positions differ from each other on every rank."""
    ids = a.operand(1)
    if not isinstance(ids, Grid | Table) or f.batching or any(f.sizes[d] != 1 for d in f.indexed) or (data := table_of(ids)) is None:
        return False
    return all(len(np.unique(rows.reshape(-1, rows.shape[-1]), axis=0)) == math.prod(rows.shape[:-1]) for rows in data)


def _padded(a: Arguments, updates: str, start: Sequence[int], f: Form) -> str:
    """One window of zeros elsewhere."""
    shape = a.types[0].shape
    name = a.e.reshape(updates, f.sizes)
    pads = [n for d in reversed(range(len(shape))) for n in (start[d], shape[d] - f.sizes[d] - start[d])]
    return a.e.op("pad", (name,), {"pads": tuple(pads)}) if any(pads) else name


def _spread(a: Arguments, f: Form, updates: str) -> tuple[str, str]:
    """Σ one_hot(id)·update in the shape of the operand, and Σ one_hot(id), which tells where something is added."""
    rest, own = _checked(a, f)
    shape = a.types[0].shape
    ids = _linear(a, f)
    order = _arranged(a, f, rest, own)
    ones = [d for d in range(len(a.types[2].shape)) if d not in order]
    if ones:
        slim = tuple(n for d, n in enumerate(a.types[2].shape) if d not in ones)
        updates, order = a.e.reshape(updates, slim), [o - sum(d < o for d in ones) for o in order]
    if order != list(range(len(order))):
        updates = a.e.op("permute", (updates,), {"dims": tuple(order)})
    turn = (*f.ids_batching, *own, *range(len(f.ids_batching) + len(own), len(a.e.shape(ids))))
    if turn != tuple(range(len(turn))):
        ids = a.e.op("permute", (ids,), {"dims": turn})
    letters, n, m = string.ascii_lowercase, len(a.e.shape(ids)), len(f.batching)
    rests = letters[n + 1 : n + 1 + len(rest)]
    one = math.prod(shape[d] for d in f.indexed)
    hot = a.e.cast(a.e.op("one_hot", (ids,), {"num_classes": one}), a.e.tensors[updates].dtype)
    v = letters[n]
    spec = f"{letters[:n]}{v},{letters[:n]}{rests}->{letters[:m]}{v}{rests}"
    made = _back(a, a.e.op("einsum", (hot, updates), {"spec": spec}), f, rest)
    marks = a.e.full(a.e.shape(updates), 1, a.e.tensors[updates].dtype)
    where = _back(a, a.e.op("einsum", (hot, marks), {"spec": spec}), f, rest) if a.name == "scatter" else made
    return made, where


def _back(a: Arguments, name: str, f: Form, rest: Sequence[int]) -> str:
    """[batching…, indexed, rest…] as the operand has it."""
    shape, order = a.types[0].shape, (*f.batching, *f.indexed, *rest)
    name = a.e.reshape(name, tuple(shape[d] for d in order))
    inverse = tuple(order.index(d) for d in range(len(order)))
    return name if inverse == tuple(range(len(inverse))) else a.e.op("permute", (name,), {"dims": inverse})
