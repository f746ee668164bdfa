"""Convolution and pooling: windows, and a contraction or a reduction of them."""

from __future__ import annotations

import math

from trainverify.ops.arithmetic import divided
from trainverify.ops.table import op
from trainverify.primitives import node as F
from trainverify.primitives.node import Literal, Node
from trainverify.primitives.windows import Windows, window

_CONVOLUTION = "convolution"
Sizes = int | tuple[int, ...]


def each(value: Sizes, n: int) -> tuple[int, ...]:
    """One number for each of n dimensions."""
    sizes = (value,) * n if isinstance(value, int) else value
    if len(sizes) != n:
        raise F.ShapeError(f"{list(sizes)} for {n} dimensions")
    return sizes


def windows(x: Node, d: int, kernel: int, stride: int, padding: int, dilation: int, filler: Literal = 0) -> Node:
    """A new last dimension of size `kernel`; along `d` remain the places where the window starts."""
    if min(stride, dilation) < 1:
        raise F.ShapeError(f"a stride of {stride} and a dilation of {dilation}")
    return window(x, d, Windows(x.shape[d], kernel, stride, dilation, padding, padding, filler))


def convolved(x: Node, weight: Node, bias: Node | None, options: tuple[Sizes, Sizes, Sizes], groups: int) -> Node:
    n = weight.ndim - 2
    if x.ndim != n + 2 or x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        raise F.ShapeError(f"convolution of {list(x.shape)} with {list(weight.shape)} in {groups} groups")
    stride, padding, dilation = (each(o, n) for o in options)
    for i in range(n):
        x = windows(x, 2 + i, weight.shape[2 + i], stride[i], padding[i], dilation[i])
    places, kernel = [f"p{i}" for i in range(n)], [f"k{i}" for i in range(n)]
    x = F.reshape(x, (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))
    w = F.reshape(weight, (groups, weight.shape[0] // groups, *weight.shape[1:]))
    y = F.contract_labels([x, w], [["b", "g", "c", *places, *kernel], ["g", "o", "c", *kernel]], ["b", "g", "o", *places])
    y = F.reshape(y, (y.shape[0], weight.shape[0], *y.shape[3:]))
    return y if bias is None else y + F.reshape(bias, (-1, *(1,) * n))


@op("conv1d", _CONVOLUTION, example="x[b,c,l=9] weight[o,c,k=2]")
def conv1d(
    x: Node, weight: Node, bias: Node | None = None, *, stride: Sizes = 1, padding: Sizes = 0, dilation: Sizes = 1, groups: int = 1
) -> Node:
    """Cross-correlation of x [b, c, l] with weight [o, c/groups, k]."""
    return convolved(x, weight, bias, (stride, padding, dilation), groups)


@op("conv2d", _CONVOLUTION, example="x[b,c,h=9,w=14] weight[o,c,2,2]")
def conv2d(
    x: Node, weight: Node, bias: Node | None = None, *, stride: Sizes = 1, padding: Sizes = 0, dilation: Sizes = 1, groups: int = 1
) -> Node:
    """Cross-correlation of x [b, c, h, w] with weight [o, c/groups, kh, kw]."""
    return convolved(x, weight, bias, (stride, padding, dilation), groups)


@op("conv3d", _CONVOLUTION, example="x[b,c,d=5,h=6,w=7] weight[o,c,2,2,2]")
def conv3d(
    x: Node, weight: Node, bias: Node | None = None, *, stride: Sizes = 1, padding: Sizes = 0, dilation: Sizes = 1, groups: int = 1
) -> Node:
    """Cross-correlation of x [b, c, d, h, w] with weight [o, c/groups, kd, kh, kw]."""
    return convolved(x, weight, bias, (stride, padding, dilation), groups)


def pooled(x: Node, kernel: Sizes, stride: Sizes | None, padding: Sizes, filler: Literal) -> Node:
    """The windows of the last two dimensions, as two new last dimensions."""
    size, pads = each(kernel, 2), each(padding, 2)
    step = size if stride is None else each(stride, 2)
    for i, d in enumerate((x.ndim - 2, x.ndim - 1)):
        x = windows(x, d, size[i], step[i], pads[i], 1, filler)
    return x


@op("max_pool2d", _CONVOLUTION, example="x[h=6,w=8]; kernel=2")
def max_pool2d(x: Node, *, kernel: Sizes, stride: Sizes | None = None, padding: Sizes = 0) -> Node:
    """Maximum over windows of the last two dimensions; at ties the gradient is shared equally (PyTorch: the first one)."""
    return F.reduce("max", pooled(x, kernel, stride, padding, -math.inf), [-2, -1])


@op("avg_pool2d", _CONVOLUTION, example="x[h=6,w=8]; kernel=2")
def avg_pool2d(x: Node, *, kernel: Sizes, stride: Sizes | None = None, padding: Sizes = 0) -> Node:
    """Mean over windows of the last two dimensions; padding counts as zeros."""
    return divided(F.total(pooled(x, kernel, stride, padding, 0), [-2, -1]), math.prod(each(kernel, 2)))
