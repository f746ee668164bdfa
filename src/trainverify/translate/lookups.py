"""Rows looked up by a function of an id, brought to one form: a lookup of the ids themselves, in the rows from `start` on.

With v an id, f and m functions of it and j a row: m(v)·[f(v) = j] = c·[v = start + j] for all v that occur and all rows there are. Then
- m(v)·table[f(v)], and where(m(v), table[f(v)], 0), are c·embedding(v, table, start), which is 0 for ids without a row;
- the same of one_hot(f(v)) is c·one_hot(v, start), so Σ one_hot(f(v))·where(m(v), g, 0) is c·Σ one_hot(v, start)·g.
Any spelling of f and m is as good as another (`functions.py`). Conditions, for each of which a wrong twin is tested:
- f(v) is a row for every v that occurs, masked or not: PyTorch refuses other rows, so nothing is said of them;
- a table by which a mask is multiplied is finite: 0·∞ is no 0. A gradient that is multiplied stays in the sum as h − h, which is 0 only
  where h is a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from string import ascii_lowercase
from typing import Any, Final

from trainverify.graph.program import Op
from trainverify.translate.emit import Emitter
from trainverify.translate.finite import is_finite
from trainverify.translate.functions import POSITIONS, Function, beside, each, function, spread_of
from trainverify.translate.layouts import MOVES, Digit, Layout, free
from trainverify.translate.pieces import (
    IDENTITY,
    INTEGERS,
    Pieces,
    Range,
    Refused,
    constant,
    floored,
    inside,
    inverted,
    linear,
    picked,
    same,
)

_IDS: Final = {"embedding": 0, "one_hot": 0, "index_select": 1, "take_along_dim": 1}  # which argument of a lookup has the ids
_ONE: Final = Function(None, Layout(0, ()), (constant(1),))
Found = tuple[
    Fraction | int, tuple[int, ...], int
]  # a factor, where rows start on all ranks or on each, and where positions are counted from


@dataclass(frozen=True)
class Lookup:
    """A lookup, and the moves after it."""

    op: Op
    steps: tuple[Op, ...]  # the last one first
    row: Function  # of the ids, as they lie in the result
    shape: tuple[int, ...]
    rows: int
    start: tuple[int, ...]


def rewritten(e: Emitter, name: str, inputs: Sequence[str | None], attrs: Mapping[str, Any]) -> str | None:
    """The result of an op as a lookup of ids; None if it is none."""
    try:
        match name:
            case "embedding" | "one_hot" | "index_select" | "take_along_dim":
                return _computed_ids(e, Op(name, tuple(inputs), (), tuple(attrs.items())))
            case "where" | "masked_fill" | "apply_mask":
                return _masked(e, name, inputs, attrs)
            case "mul" if len(inputs) == 2:
                return _times(e, inputs) or _times(e, inputs[::-1])
            case "einsum" if len(inputs) == 2:
                return _summed(e, inputs, attrs["spec"])
            case "put_along_dim":
                return _written(e, inputs, attrs["dim"])
            case "eq" if len(inputs) == 2:
                return _numbered(e, inputs) or _numbered(e, inputs[::-1])
            case "to" if (op := e.made.get(inputs[0])) is not None and op.name == "to" and e.kind(str(inputs[0])) == "bool":
                hot = e.made.get(op.inputs[0])
                return e.cast(hot.outputs[0], attrs["dtype"]) if hot is not None and hot.name == "one_hot" else None
    except Refused:
        pass
    return None


def looked(e: Emitter, name: str | None) -> Lookup:
    """What a tensor was looked up by; refused if it was not."""
    steps: list[Op] = []
    while (op := e.ids.spelled.get(str(name), e.made.get(name))) is not None and op.name in (*MOVES, "to"):
        steps.append(op)
        name = op.inputs[0]
    changed = any(s.name == "to" and e.kind(str(s.inputs[0])) != e.kind(s.outputs[0]) for s in steps)
    if op is None or op.name not in _IDS or (changed and op.name != "one_hot"):
        raise Refused
    return _lookup(e, op, tuple(steps))


def _lookup(e: Emitter, op: Op, steps: tuple[Op, ...] = ()) -> Lookup:
    row = function(e, op.inputs[_IDS[op.name]])
    if row is None or row.source is None:
        raise Refused
    ids, layout = e.shape(str(op.inputs[_IDS[op.name]])), row.layout
    start = tuple(e.column(op.get("start", 0)))
    if op.name == "one_hot":
        rows, shape, dims = op.get("num_classes"), (*ids, op.get("num_classes")), (*layout.dims, *free((op.get("num_classes"),)))
    else:
        if e.kind(str(op.inputs[1 - _IDS[op.name]])) != "real":
            raise Refused
        table = e.shape(str(op.inputs[1 - _IDS[op.name]]))
        d = op.get("dim", 0) % len(table)
        rows, shape, dims = table[d], (*table[:d], *ids, *table[d + 1 :]), (*free(table[:d]), *layout.dims, *free(table[d + 1 :]))
        if op.name == "take_along_dim":
            if d != len(table) - 1 or ids[:-1] != table[:-1]:
                raise Refused
            shape, dims = ids, layout.dims
    at = Layout(layout.offset, dims)
    for s in reversed(steps):
        if s.name != "to":
            after = e.shape(s.outputs[0])
            at, shape = at.moved(s.name, dict(s.attrs), shape, after), after
    return Lookup(op, steps, Function(row.source, Layout(at.offset, at.own), row.columns), shape, rows, start)


def _found(e: Emitter, look: Lookup, weight: Function, before: Sequence[int], shape: Sequence[int]) -> Found:
    """The factor and the start of a lookup that is weighted; both tensors are broadcast to a shape."""
    f, (row, weights) = beside([(look.row, look.shape), (weight, before)], shape)
    within = spread_of(e, f)
    if look.op.name != "one_hot" and look.op.get("start") is None and not all(inside(x, look.rows, within) for x in row):
        raise Refused
    found = each(lambda x, w, start: _one(linear(1, x, -1, constant(start)), w, look.rows, within), row, weights, look.start)
    if None in found or len({factor for factor, _ in found}) > 1:
        raise Refused
    return found[0][0], tuple(start for _, start in found), f.layout.offset - look.row.layout.offset


def _one(row: Pieces, weight: Pieces, rows: int, within: Range) -> tuple[Fraction | int, int] | None:
    """The same for all integers, if it can be: ranks whose rows no id has start where they would."""
    return picked(row, weight, rows, INTEGERS) or picked(row, weight, rows, within)


def _made(e: Emitter, look: Lookup, found: Found) -> str:
    """A lookup by the ids themselves, moved as before."""
    factor, starts, by = found
    op, first = look.op, look.row.layout.offset + by
    if look.row.source == POSITIONS and first < 0:  # counted from 0 on
        starts, by = tuple(s - first for s in starts), by - first
    start: Any = starts[0] if len(starts) == 1 else list(starts)
    place = _IDS[op.name]
    ids, lead = _witness(e, str(op.inputs[place]), by)
    rest = () if op.name == "one_hot" else e.shape(str(op.inputs[1 - place]))
    d = op.get("dim", 0) % max(len(rest), 1)
    if op.name == "one_hot" or op.name == "take_along_dim" or d:
        name = e.reshape(e.op("one_hot", (ids,), {"num_classes": look.rows, "start": start}), (*lead, look.rows))
        if op.name != "one_hot":
            name = _chosen(e, op, name, d)
    else:
        table = e.reshape(str(op.inputs[1 - place]), (rest[0], math.prod(rest[1:])))
        name = e.reshape(e.op("embedding", (ids, table), {"start": start}), (*lead, *rest[1:]))
    for s in reversed(look.steps):
        name = e.op(s.name, (name,), dict(s.attrs))
    return name if factor == 1 else e.op("neg", (name,)) if factor == -1 else e.op("mul", (name,), {"value": factor})


def _chosen(e: Emitter, op: Op, hot: str, d: int) -> str:
    """Elements of a tensor by one-hots."""
    x = str(op.inputs[0])
    hot, shape = e.cast(hot, e.tensors[x].dtype), e.shape(x)
    letters = ascii_lowercase[: len(shape)]
    if op.name == "index_select":
        return e.op("einsum", (x, hot), {"spec": f"{letters},z{letters[d]}->{letters.replace(letters[d], 'z')}"})
    lead, count = letters[:-1], e.shape(hot)[-2]
    if count == 1:
        made = e.op("einsum", (x, e.reshape(hot, shape)), {"spec": f"{letters},{letters}->{lead}"})
        return e.reshape(made, (*shape[:-1], 1))
    return e.op("einsum", (x, hot), {"spec": f"{letters},{lead}z{letters[-1]}->{lead}z"})


def _witness(e: Emitter, ids: str, by: int = 0) -> tuple[str, tuple[int, ...]]:
    """The first tensor with the ids that a tensor is a function of, and the shape in which they are wanted."""
    f, shape = function(e, ids), e.shape(ids)
    assert f is not None
    layout, line, first = f.layout, f.layout.line, f.layout.offset + by
    name = e.ids.witnesses.get((f.source, first, line))
    if name is None and f.source == POSITIONS and len(line) == 1:
        ((n, step),) = line
        assert step is not None
        name = e.op("arange", (), {"start": first, "stop": first + n * step, "step": step, "dtype": "i64"})
    if name is None:
        raise Refused
    repeated = [any(stride == 0 for _, stride in dim) for dim in layout.dims]
    if any(repeated):
        if any(r and len(dim) > 1 for r, dim in zip(repeated, layout.dims, strict=True)):
            raise Refused
        thin = tuple(1 if r else n for r, n in zip(repeated, shape, strict=True))
        name = e.op("expand", (e.reshape(name, thin),), {"shape": shape})
    return name, shape


def _computed_ids(e: Emitter, op: Op) -> str | None:
    """A lookup by computed ids."""
    ids = op.inputs[_IDS[op.name]]
    f, made = function(e, ids), e.made.get(ids)
    if f is None or f.source is None or (_as_given(f) and (f.source == ids or made is None or made.name in (*MOVES, "to", "arange"))):
        return None
    look = _lookup(e, op)
    try:
        return _made(e, look, _found(e, look, _ONE, (), look.shape))
    except Refused:
        made_of = _of_digits(e, look, f.columns, spread_of(e, f))
        e.ids.spelled[made_of] = op
        return made_of


def _of_digits(e: Emitter, look: Lookup, columns: Sequence[Pieces], within: Range) -> str:
    """A lookup by v mod n, or by v // n: one-hots of v, of which one digit counts."""
    ((low, high),) = within if len(within) == 1 else ((1, 0),)
    if low != 0 or math.isinf(high) or (high + 1) % look.rows or look.start != (0,) or look.op.get("dim", 0) != 0:
        raise Refused
    count = int(high + 1) // look.rows
    slow, fast = floored(IDENTITY, count, within), linear(1, IDENTITY, -look.rows, floored(IDENTITY, look.rows, within))
    if not all(same(x, fast, within) for x in columns) and not all(same(x, slow, within) for x in columns):
        raise Refused
    d = -2 if same(columns[0], fast, within) else -1
    place = _IDS[look.op.name]
    ids, lead = _witness(e, str(look.op.inputs[place]))
    hot = e.op("one_hot", (ids,), {"num_classes": count * look.rows})
    hot = e.op("sum", (e.reshape(hot, (*lead, count, look.rows) if d == -2 else (*lead, look.rows, count)),), {"dim": (d,)})
    if look.op.name == "one_hot":
        return hot
    table = str(look.op.inputs[1 - place])
    rest = e.shape(table)[1:]
    flat = e.cast(e.reshape(hot, (math.prod(lead), look.rows)), e.tensors[table].dtype)
    return e.reshape(e.op("matmul", (flat, e.reshape(table, (look.rows, math.prod(rest))))), (*lead, *rest))


def _is_zero(e: Emitter, name: str | None) -> bool:
    f = function(e, name)
    return f is not None and f.source is None and set(f.columns) == {constant(0)}


def _mask(e: Emitter, name: str, inputs: Sequence[str | None], attrs: Mapping[str, Any]) -> tuple[str, Function, tuple[int, ...]]:
    """What an op leaves where a mask holds, and that mask, if there is 0 elsewhere."""
    if name == "where":
        mask, x, y = map(str, inputs)
        flip = _is_zero(e, x)
        kept, zero = (y, True) if flip else (x, _is_zero(e, y))
    else:
        kept, mask = map(str, inputs)
        flip, zero = name == "masked_fill", attrs.get("value") == 0
    f = function(e, mask)
    if not zero or f is None or f.source is None:
        raise Refused
    return kept, Function(f.source, f.layout, each(inverted, f.columns)) if flip else f, e.shape(mask)


def _masked(e: Emitter, name: str, inputs: Sequence[str | None], attrs: Mapping[str, Any]) -> str | None:
    """where(m(v), table[f(v)], 0)."""
    kept, weight, before = _mask(e, name, inputs, attrs)
    return _weighted(e, looked(e, kept), kept, weight, before)


def _weighted(e: Emitter, look: Lookup, kept: str, weight: Function, before: Sequence[int]) -> str:
    found = _found(e, look, weight, before, look.shape)
    return kept if found == (1, look.start, 0) and _as_given(look.row) else _made(e, look, found)


def _times(e: Emitter, inputs: Sequence[str | None]) -> str | None:
    """table[f(v)]·m(v), of a finite table."""
    kept, by = map(str, inputs)
    weight = function(e, by)
    if weight is None or weight.source is None:
        raise Refused
    look = looked(e, kept)
    if look.op.name != "one_hot" and not is_finite(e, str(look.op.inputs[1 - _IDS[look.op.name]])):
        raise Refused
    return _weighted(e, look, kept, weight, e.shape(by))


def _summed(e: Emitter, inputs: Sequence[str | None], spec: str) -> str | None:
    """Σ one_hot(f(v))·where(m(v), g, 0), or with m(v)·g."""
    terms = spec.partition("->")[0].split(",")
    if not all(map(str.isalpha, terms)):
        raise Refused
    for k in (0, 1):
        try:
            look = looked(e, inputs[k])
            if look.op.name != "one_hot":
                continue
            g, steps, weight, product = _unmasked(e, str(inputs[1 - k]))
        except Refused:
            continue
        labels = sorted({*terms[0], *terms[1]})
        sizes = {label: n for term, i in zip(terms, inputs, strict=True) for label, n in zip(term, e.shape(str(i)), strict=True)}
        shape = tuple(sizes[label] for label in labels)
        by_label = (_by_label(f, term, labels, sizes) for f, term in ((look.row, terms[k]), (weight, terms[1 - k])))
        row, weight = by_label
        found = _found(e, Lookup(look.op, look.steps, row, shape, look.rows, look.start), weight, shape, shape)
        hot, masked = _made(e, look, found), g
        for s in reversed(steps):
            masked = e.op(s.name, (masked,), dict(s.attrs))
        hot = e.cast(hot, e.tensors[masked].dtype)
        made = e.op("einsum", (hot, masked) if k == 0 else (masked, hot), {"spec": spec})
        if not product or is_finite(e, g):
            return made
        total = e.op("sum", (g,))
        return e.op("add", (made, e.op("sub", (total, total))))
    return None


def _by_label(f: Function, term: str, labels: Sequence[str], sizes: Mapping[str, int]) -> Function:
    own = dict(zip(term, f.layout.own, strict=True))
    dims: list[tuple[Digit, ...]] = [own.get(label, ((sizes[label], 0),) if sizes[label] > 1 else ()) for label in labels]
    return Function(f.source, Layout(f.layout.offset, tuple(dims)), f.columns)


def _unmasked(e: Emitter, name: str) -> tuple[str, list[Op], Function, bool]:
    """A tensor before it was masked, the moves after that, the mask as it lies in the tensor, and whether it was multiplied."""
    steps: list[Op] = []
    while (op := e.made.get(name)) is not None and op.name in (*MOVES, "to"):
        steps.append(op)
        name = str(op.inputs[0])
    if op is None:
        raise Refused
    shape, product = e.shape(name), op.name == "mul" and len(op.inputs) == 2
    if product:
        x, y = map(str, op.inputs)
        found = [(kept, f, e.shape(by)) for kept, by in ((x, y), (y, x)) if (f := function(e, by)) is not None and f.source is not None]
        if not found:
            raise Refused
        kept, weight, before = found[0]
    elif op.name in ("where", "masked_fill", "apply_mask"):
        kept, weight, before = _mask(e, op.name, op.inputs, dict(op.attrs))
    else:
        raise Refused
    layout = weight.layout.expanded(before, shape)
    for s in reversed(steps):
        if s.name != "to":
            layout = layout.moved(s.name, dict(s.attrs), e.shape(str(s.inputs[0])), e.shape(s.outputs[0]))
    if e.shape(kept) != shape:
        kept = e.op("expand", (kept,), {"shape": shape})
    return kept, steps, Function(weight.source, layout, weight.columns), product


def _written(e: Emitter, inputs: Sequence[str | None], dim: object) -> str | None:
    """One element of every row along the last dimension, written into zeros or made smaller: (0 or x −) one_hot(ids)·value."""
    x, column, values = map(str, inputs)
    shape = e.shape(x)
    if dim not in (-1, len(shape) - 1) or any(e.shape(t) != (*shape[:-1], 1) for t in (column, values)):
        return None
    f = function(e, column)
    if f is None or not (_as_given(f) or all(inside(p, shape[-1], spread_of(e, f)) for p in f.columns)):
        return None
    value, less = values, _before_reshapes(e, values)
    if not _is_zero(e, x):
        if less is None or less.name != "sub" or len(less.inputs) != 2 or e.shape(str(less.inputs[1])) != e.shape(less.outputs[0]):
            return None
        before = _before_reshapes(e, less.inputs[0])
        if before is None or before.name != "take_along_dim" or before.inputs[0] != x or before.get("dim") not in (-1, len(shape) - 1):
            return None
        if function(e, before.inputs[1]) != f:
            return None
        value = str(less.inputs[1])
    hot = e.op("one_hot", (e.reshape(column, shape[:-1]),), {"num_classes": shape[-1]})
    hot = e.cast(e.reshape(hot, shape), e.tensors[value].dtype)
    made = e.op("mul", (hot, e.reshape(value, (*shape[:-1], 1))))
    return made if value == values else e.op("sub", (x, made))


def _before_reshapes(e: Emitter, name: str | None) -> Op | None:
    while (op := e.made.get(name)) is not None and op.name == "reshape":
        name = op.inputs[0]
    return op


def _as_given(f: Function) -> bool:
    """Whether a tensor has the ids themselves."""
    return f.columns == (IDENTITY,)


def _numbered(e: Emitter, inputs: Sequence[str | None]) -> str | None:
    """f(v) = 0, 1, …, one after the other along a last dimension."""
    row, numbers = (function(e, i) for i in inputs)
    if row is None or numbers is None or row.source in (None, POSITIONS) or numbers.source != POSITIONS:
        return None
    before, counted = (e.shape(str(i)) for i in inputs)
    lead, n = before[:-1], counted[-1] if counted else 0
    if not before or not counted or before[-1] not in (1, n) or any(s != 1 for s in counted[:-1]) or len(counted) > len(before):
        return None
    if len(numbers.columns) > 1 or len(numbers.columns[0]) > 1:
        return None
    ((_, value),) = numbers.columns[0]
    (digit,) = numbers.layout.dims[-1] or ((n, 1),)
    if value is None or value.rest or digit[1] is None or value.slope * digit[1] != 1 or any(s != 0 for _, s in row.layout.dims[-1]):
        return None
    start = value.at(numbers.layout.offset)
    ids = str(inputs[0])
    while (op := e.made.get(ids)) is not None and op.name == "expand" and e.shape(ids)[-1] != 1:
        ids = str(op.inputs[0])
    if e.shape(ids) != (*lead, 1) or start != int(start):
        return None
    hot = e.op("one_hot", (e.reshape(ids, lead),), {"num_classes": n, "start": int(start)})
    return e.cast(e.reshape(hot, (*lead, n)), "bool")


__all__ = ["rewritten"]
