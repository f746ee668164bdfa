"""Copies and rearrangements that are no views."""

from __future__ import annotations

from typing import Any

from trainverify.torch.mappings.table import Arguments, rows
from trainverify.torch.values import Unmapped

ROWS, row = rows()


@row("aten::clone", "aten::_to_copy", "aten::_conj_physical", "aten::lift_fresh_copy", "aten::alias_copy")
def copy_of(a: Arguments) -> str:
    a.ignore("memory_format", "device", "layout", "pin_memory", "non_blocking", "dtype")
    return a.tensor("self")


@row("aten::copy")
def copy(a: Arguments) -> str:
    """src in the place of self: broadcast to its shape."""
    a.ignore("non_blocking", "self")
    src = a.operand("src")
    kind = a.out[0]
    assert kind is not None
    if not isinstance(src, str):
        return a.e.full(kind.shape, src, kind.dtype)
    return src if a.e.shape(src) == kind.shape else a.e.op("expand", (src,), {"shape": kind.shape})


@row("aten::cat")
def cat(a: Arguments) -> str:
    tensors, dim = a.tensors("tensors"), a.integer("dim")
    tensors = [t for t in tensors if a.e.shape(t) != (0,)] or tensors[:1]
    return tensors[0] if len(tensors) == 1 else a.e.op("concat", tensors, {"dim": dim})


@row("aten::stack")
def stack(a: Arguments) -> str:
    return a.e.op("stack", a.tensors("tensors"), {"dim": a.integer("dim")})


@row("aten::repeat")
def repeat(a: Arguments) -> str:
    return a.e.op("repeat", (a.tensor("self"),), {"sizes": a.ints("repeats")})


@row("aten::flip")
def flip(a: Arguments) -> str:
    return a.e.op("flip", (a.tensor("self"),), {"dims": a.ints("dims")})


@row("aten::roll")
def roll(a: Arguments) -> str:
    shifts, dims = a.ints("shifts"), a.ints("dims")
    if not dims:
        raise Unmapped("a roll of the flattened tensor")
    return a.e.op("roll", (a.tensor("self"),), {"shifts": shifts, "dims": dims})


@row("aten::constant_pad_nd")
def pad(a: Arguments) -> str:
    """With zeros; with another number, say a label that counts as none, it is a concatenation."""
    x, pads, value = a.tensor("self"), a.ints("pad"), a.number("value")
    if not pads:
        return x
    if value == 0 or min(pads) < 0:
        return a.e.op("pad", (x,), {"pads": pads, "value": value})
    for i in range(0, len(pads), 2):
        shape, d = a.e.shape(x), len(a.e.shape(x)) - 1 - i // 2

        def around(size: int, shape: tuple[int, ...] = shape, d: int = d) -> list[str]:
            return [a.e.full((*shape[:d], size, *shape[d + 1 :]), value, a.e.tensors[a.tensor("self")].dtype)] if size else []

        parts = [*around(pads[i]), x, *around(pads[i + 1])]
        x = a.e.op("concat", parts, {"dim": d}) if len(parts) > 1 else x
    return x


def _padded(a: Arguments, x: str, dim: int, start: int, size: int) -> str:
    """Zeros around x along a dimension."""
    rank = len(a.e.shape(x))
    d = dim % rank
    behind = size - start - a.e.shape(x)[d]
    if start == 0 and behind == 0:
        return x
    pads: list[int] = [0, 0] * (rank - 1 - d) + [start, behind]
    return a.e.op("pad", (x,), {"pads": tuple(pads), "value": 0})


def _bounds(start: Any, end: Any, size: int) -> tuple[int, int]:
    start = 0 if start is None else start + size if start < 0 else start
    end = size if end is None else end + size if end < 0 else end
    return max(0, min(start, size)), max(0, min(end, size))


@row("aten::slice_backward")
def slice_backward(a: Arguments) -> str:
    grad, sizes, dim = a.tensor("grad_output"), a.ints("input_sizes"), a.integer("dim")
    assert sizes is not None
    start, _ = _bounds(a.raw("start"), a.raw("end"), sizes[dim])
    if a.integer("step") != 1:
        return _spread(a, grad, dim % len(sizes), start, a.integer("step"), sizes)
    return _padded(a, grad, dim, start, sizes[dim])


def _spread(a: Arguments, grad: str, dim: int, start: int, step: int, sizes: tuple[int, ...]) -> str:
    """Zeros between: every element of grad becomes (element, 0, …) along a new dimension that is joined afterwards."""
    shape = a.e.shape(grad)
    column = a.e.reshape(grad, (*shape[: dim + 1], 1, *shape[dim + 1 :]))
    wide = _padded(a, column, dim + 1, 0, step)
    flat = a.e.reshape(wide, (*shape[:dim], shape[dim] * step, *shape[dim + 1 :]))
    room = sizes[dim] - start
    if shape[dim] * step > room:
        flat = a.e.op("slice", (flat,), {"dim": dim, "start": 0, "stop": room})
    return _padded(a, flat, dim, start, sizes[dim])


@row("aten::select_backward")
def select_backward(a: Arguments) -> str:
    grad, sizes, dim, index = a.tensor("grad_output"), a.ints("input_sizes"), a.integer("dim"), a.integer("index")
    assert sizes is not None
    d = dim % len(sizes)
    shape = a.e.shape(grad)
    return _padded(a, a.e.reshape(grad, (*shape[:d], 1, *shape[d:])), d, index % sizes[d], sizes[d])


@row("aten::split_with_sizes_copy")
def split_with_sizes_copy(a: Arguments) -> list[str]:
    return list(a.e.several("split", (a.tensor("self"),), {"sizes": a.ints("split_sizes"), "dim": a.integer("dim")}))


@row("aten::view_copy")
def reshape_copy(a: Arguments) -> str:
    a.ignore("size")
    kind = a.out[0]
    assert kind is not None
    return a.e.reshape(a.tensor("self"), kind.shape)
