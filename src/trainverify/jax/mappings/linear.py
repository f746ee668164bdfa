"""Products of tensors, and convolutions."""

from __future__ import annotations

import string
from typing import Any

from trainverify.jax.infinities import is_number
from trainverify.jax.mappings.table import Arguments, rows
from trainverify.jax.values import Number, Value
from trainverify.translate.emit import Unmapped

ROWS, row = rows()


@row("dot_general", ignores=("precision", "preferred_element_type", "out_sharding"))
def dot_general(a: Arguments) -> Value:
    """Batch dimensions, then those of the left, then those of the right."""
    (left_c, right_c), (left_b, right_b) = a.param("dimension_numbers")
    for i in (0, 1):
        if a.number(i) == 0 and (isinstance(x := a.operand(1 - i), Number) or (isinstance(x, str) and is_number(a.e, x))):
            return Number(0, a.shape, a.dtype)
    letters = iter(string.ascii_letters)
    left = {d: next(letters) for d in range(len(a.types[0].shape))}
    right: dict[int, str] = {int(r): left[int(x)] for x, r in (*zip(left_c, right_c, strict=True), *zip(left_b, right_b, strict=True))}
    for d in range(len(a.types[1].shape)):
        if d not in right:
            right[d] = next(letters)
    free_left = [left[d] for d in left if d not in {*map(int, left_c), *map(int, left_b)}]
    free_right = [right[d] for d in sorted(right) if d not in {*map(int, right_c), *map(int, right_b)}]
    out = "".join([*(left[int(d)] for d in left_b), *free_left, *free_right])
    spec = f"{''.join(left[d] for d in sorted(left))},{''.join(right[d] for d in sorted(right))}->{out}"
    if a.dtype != "bool":
        return a.e.op("einsum", (a.tensor(0), a.tensor(1)), {"spec": spec})
    numbers = [a.e.cast(a.tensor(i), "i64") for i in (0, 1)]  # whether there is any pair that is true
    return a.e.op("gt", (a.e.op("einsum", numbers, {"spec": spec}),), {"value": 0})


@row("conv_general_dilated", ignores=("precision", "preferred_element_type", "out_sharding"))
def convolution(a: Arguments) -> Value:
    """Cross-correlation over one or two dimensions; padding and dilated inputs are written out."""
    numbers = a.param("dimension_numbers")
    stride, padding = tuple(a.param("window_strides")), a.param("padding")
    spaced, dilation = tuple(a.param("lhs_dilation")), tuple(a.param("rhs_dilation"))
    groups, batches = a.param("feature_group_count"), a.param("batch_group_count")
    n = len(stride)
    if n not in (1, 2):
        raise Unmapped(f"a convolution over {n} dimensions")
    x, w = _ordered(a, a.tensor(0), numbers.lhs_spec), _ordered(a, a.tensor(1), numbers.rhs_spec)
    if batches != 1:
        x, w, groups = _batches_as_groups(a, x, w, batches, groups)
    for d in range(n):
        x = _between(a, x, 2 + d, spaced[d] - 1)
    pads = tuple(int(p) for low_high in reversed(padding) for p in low_high)
    if any(pads):
        x = a.e.op("pad", (x,), {"pads": pads})
    attrs: dict[str, Any] = {"stride": stride if n > 1 else stride[0], "dilation": dilation if n > 1 else dilation[0], "groups": groups}
    y = a.e.op(f"conv{n}d", (x, w), attrs)
    back = [0] * (n + 2)
    for i, d in enumerate(numbers.out_spec):
        back[d] = i
    return y if back == sorted(back) else a.e.op("permute", (y,), {"dims": tuple(back)})


def _ordered(a: Arguments, name: str, spec: Any) -> str:
    dims = tuple(int(d) for d in spec)
    return name if dims == tuple(range(len(dims))) else a.e.op("permute", (name,), {"dims": dims})


def _between(a: Arguments, name: str, d: int, inner: int) -> str:
    """`inner` zeros between neighbours along a dimension."""
    if not inner:
        return name
    shape = a.e.shape(name)
    apart = a.e.reshape(name, (*shape[: d + 1], 1, *shape[d + 1 :]))
    wide = a.e.op("pad", (apart,), {"pads": tuple([0, 0] * (len(shape) - d - 1) + [0, inner])})
    joined = a.e.reshape(wide, (*shape[:d], shape[d] * (inner + 1), *shape[d + 1 :]))
    return a.e.op("slice", (joined,), {"dim": d, "start": 0, "stop": shape[d] * (inner + 1) - inner})


def _batches_as_groups(a: Arguments, x: str, w: str, batches: int, groups: int) -> tuple[str, str, int]:
    """Group g of the batch meets group g of the filters: the batch groups become groups of channels."""
    if groups != 1:
        raise Unmapped("a convolution with groups of batches and of features")
    shape = a.e.shape(x)
    cut = a.e.reshape(x, (batches, shape[0] // batches, *shape[1:]))
    order = (1, 0, *range(2, len(shape) + 1))
    moved = a.e.op("permute", (cut,), {"dims": order})
    return a.e.reshape(moved, (shape[0] // batches, batches * shape[1], *shape[2:])), w, batches
