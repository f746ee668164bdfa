"""Convolutions and their derivatives."""

from __future__ import annotations

from typing import Any

from trainverify.torch.mappings.table import Arguments, rows

ROWS, row = rows()
Options = dict[str, object]


def _options(a: Arguments, weight: str) -> tuple[str, Options]:
    """The operator by its number of dimensions, and its attributes."""
    n = len(a.e.shape(weight)) - 2
    each = {name: a.ints(name) or (1,) for name in ("stride", "padding", "dilation")}
    return f"conv{n}d", {**{k: v * n if len(v) == 1 else v for k, v in each.items()}, "groups": a.integer("groups")}


def _by_channel(a: Arguments, bias: str, ndim: int) -> str:
    return a.e.reshape(bias, (*a.e.shape(bias), *(1,) * (ndim - 2)))


def _places(a: Arguments, x: str, shape: tuple[int, ...], weight: str, options: Options) -> list[int]:
    """How many places a convolution of this shape has beyond those of x, for each dimension: output padding may make more."""
    steps: list[Any] = [options[name] for name in ("stride", "padding", "dilation")]
    sizes = zip(shape[2:], a.e.shape(x)[2:], a.e.shape(weight)[2:], *steps, strict=True)
    return [(size + 2 * p - d * (k - 1) - 1) // s + 1 - n for size, n, k, s, p, d in sizes]


def _grown(a: Arguments, x: str, more: list[int]) -> str:
    """With zeros behind, or cut off."""
    pads = tuple(n for m in reversed(more) for n in (0, m))
    return a.e.op("pad", (x,), {"pads": pads, "value": 0}) if any(more) else x


@row("aten::convolution")
def convolution(a: Arguments) -> str:
    """A transposed one is the derivative of one with respect to its argument."""
    x, weight, bias, kind = a.tensor("input"), a.tensor("weight"), a.optional("bias"), a.out[0]
    op, options = _options(a, weight)
    a.ignore("output_padding")  # of a transposed one: it shows in the shape
    if not a.flag("transposed"):
        return a.e.op(op, (x, weight, *([] if bias is None else [bias])), options)
    assert kind is not None
    x = _grown(a, x, _places(a, x, kind.shape, weight, options))
    made = a.e.op(f"{op}.grad", (a.e.full(kind.shape, 0, kind.dtype), weight, x), {**options, "wrt": (0,)})
    return made if bias is None else a.e.op("add", (made, _by_channel(a, bias, len(kind.shape))))


@row("aten::convolution_backward")
def convolution_backward(a: Arguments) -> tuple[str | None, str | None, str | None]:
    a.ignore("bias_sizes", "output_padding")
    g, x, weight, mask = a.tensor("grad_output"), a.tensor("input"), a.tensor("weight"), a.raw("output_mask")
    op, options = _options(a, weight)
    if a.flag("transposed"):
        more = _places(a, x, a.e.shape(g), weight, options)
        given = g, weight, _grown(a, x, more)
        of_x = _grown(a, a.e.op(op, (g, weight), options), [-n for n in more]) if mask[0] else None
    else:
        given = x, weight, g
        of_x = a.e.op(f"{op}.grad", given, {**options, "wrt": (0,)}) if mask[0] else None
    of_weight = a.e.op(f"{op}.grad", given, {**options, "wrt": (1,)}) if mask[1] else None
    over = (0, *range(2, len(a.e.shape(g))))
    return of_x, of_weight, a.e.op("sum", (g,), {"dim": over}) if mask[2] else None
