"""Operators as functions of others, in PyTorch: those that its own table of formulas lacks, or writes with NaN or an order of its own.

Each is run beside its kernel where it is called, like a row. One that is not made for some arguments raises: the call is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F

from trainverify.torch.private import _disable_current_modes, decomposition_table

Tensor: TypeAlias = torch.Tensor
Composition = Callable[..., Any]
COMPOSITIONS: Final[dict[str, Composition]] = {}
A: Final = torch.ops.aten


def _composed(*names: str) -> Callable[[Composition], Composition]:
    def add(fn: Composition) -> Composition:
        COMPOSITIONS.update(dict.fromkeys((f"aten::{n}" for n in names), fn))
        return fn

    return add


def adjoint(fn: Callable[[Tensor], Tensor], shape: Sequence[int], grad: Tensor) -> Tensor:
    """The gradient of a linear function's argument, which has this shape."""
    with torch.overrides.enable_reentrant_dispatch(), torch.enable_grad():
        x = grad.new_zeros(shape).requires_grad_()
        (made,) = torch.autograd.grad(fn(x), x, grad.detach())
    return made.detach()


def _each(value: Any, n: int) -> list[int]:
    """One number for each of n dimensions."""
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * n if len(numbers) == 1 else numbers


def _tensor(value: Any, like: Any) -> Tensor:
    return value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=like.dtype if like.is_floating_point() else None)


# -- numbers --------------------------------------------------------------------------------------------------------------


@_composed("fmax")
def fmax(self: Tensor, other: Tensor) -> Tensor:
    return torch.where(self.isnan(), other, torch.where(other.isnan(), self, torch.maximum(self, other)))


@_composed("fmin")
def fmin(self: Tensor, other: Tensor) -> Tensor:
    return torch.where(self.isnan(), other, torch.where(other.isnan(), self, torch.minimum(self, other)))


@_composed("hypot")
def hypot(self: Tensor, other: Tensor) -> Tensor:
    return (self * self + other * other).sqrt()


@_composed("ldexp")
def ldexp(self: Tensor, other: Tensor) -> Tensor:
    return self * torch.pow(2.0, other)


@_composed("round")
def round_(self: Tensor, *, decimals: int = 0) -> Tensor:
    """Halves go to the even neighbour."""
    if not self.is_floating_point():
        raise NotImplementedError
    scale = 10 ** abs(decimals)
    x = self * scale if decimals > 0 else self / scale
    up = (x + 0.5).floor()
    odd = (up - x == 0.5) & (up - 2 * (up / 2).floor() == 1)
    made = up - odd.to(self.dtype)
    return made / scale if decimals > 0 else made * scale


def _times_log(x: Any, y: Any, log: Callable[[Tensor], Tensor]) -> Tensor:
    """x·log y, which is 0 where x is, whatever y, if that is a number."""
    a, b = _tensor(x, y), _tensor(y, x)
    return torch.where(b.isnan(), b, torch.where(a == 0, 0.0, a * log(b)))


@_composed("xlogy")
def xlogy(self: Any, other: Any) -> Tensor:
    return _times_log(self, other, torch.log)


@_composed("special_xlog1py")
def xlog1py(self: Any, other: Any) -> Tensor:
    return _times_log(self, other, torch.log1p)


@_composed("softshrink_backward")
def softshrink_backward(grad_output: Tensor, self: Tensor, lambd: float) -> Tensor:
    return torch.where((self >= -lambd) & (self <= lambd), 0.0, grad_output)


@_composed("hardshrink_backward")
def hardshrink_backward(grad_out: Tensor, self: Tensor, lambd: float) -> Tensor:
    return softshrink_backward(grad_out, self, lambd)


# -- diagonals ------------------------------------------------------------------------------------------------------------


def _on_diagonal(values: Tensor, sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Tensor:
    """Zeros but for a diagonal, which the last dimension of `values` runs along."""
    dim1, dim2 = dim1 % len(sizes), dim2 % len(sizes)
    rows, columns, n = sizes[dim1], sizes[dim2], values.shape[-1]
    if not n:
        return values.new_zeros(sizes)
    square = values.unsqueeze(-1).expand(*values.shape, n).tril().triu()
    above, left = max(0, -offset), max(0, offset)
    return F.pad(square, (left, columns - left - n, above, rows - above - n)).movedim((-2, -1), (dim1, dim2))


@_composed("diagonal_backward")
def diagonal_backward(grad_output: Tensor, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Tensor:
    return _on_diagonal(grad_output, input_sizes, offset, dim1, dim2).contiguous()


@_composed("diagonal_scatter")
def diagonal_scatter(self: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    there = _on_diagonal(torch.ones_like(src), self.shape, offset, dim1, dim2) > 0
    return torch.where(there, _on_diagonal(src, self.shape, offset, dim1, dim2), self)


# -- positions ------------------------------------------------------------------------------------------------------------


@_composed("index_fill")
def index_fill(self: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    x = self if self.ndim else self.reshape(1)
    d = dim % x.ndim
    size, at = x.shape[d], index.reshape(-1, 1)
    places = torch.arange(size)
    there = ((places == at) | (places == at + size)).any(0)
    fill = value.to(x.dtype) if isinstance(value, torch.Tensor) else torch.full((), value, dtype=x.dtype)
    return torch.where(there.reshape(-1, *(1,) * (x.ndim - d - 1)), fill, x).reshape(self.shape)


@_composed("take")
def take(self: Tensor, index: Tensor) -> Tensor:
    """A negative position counts from the end; others than these are errors."""
    return self.reshape(-1)[index.remainder(self.numel()).reshape(-1)].reshape(index.shape)


@_composed("put")
def put(self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Where several elements go to one place any of them may be there, unless they are added up."""
    if not accumulate:
        raise NotImplementedError
    return self.reshape(-1).index_put((index.remainder(self.numel()).reshape(-1),), source.reshape(-1), True).reshape(self.shape)


@_composed("scatter_reduce")
def scatter_reduce(self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True) -> Tensor:
    if not (self.ndim and index.ndim and src.ndim):
        flat = (t.reshape(-1) for t in (index, src))
        return scatter_reduce(self.reshape(-1), 0, *flat, reduce, include_self=include_self).reshape(self.shape)
    d, src = dim % self.ndim, src[tuple(slice(0, s) for s in index.shape)]
    if not self.is_floating_point() or not index.numel():
        raise NotImplementedError
    hits = torch.zeros_like(self).scatter_add(d, index, torch.ones_like(src))
    if reduce in ("sum", "mean"):
        total = (self if include_self else torch.where(hits > 0, 0.0, self)).scatter_add(d, index, src)
        return total if reduce == "sum" else total / (hits + 1 if include_self else hits.clamp(min=1))
    neutral = {"prod": 1.0, "amax": -math.inf, "amin": math.inf}[reduce]
    places = torch.arange(self.shape[d]).reshape(-1, *(1,) * (self.ndim - d))
    spread = torch.where(index.unsqueeze(d) == places, src.unsqueeze(d), neutral)
    made = getattr(torch, reduce)(spread, d + 1)
    beside = [n for e in reversed(range(self.ndim)) for n in (0, self.shape[e] - made.shape[e])]
    made = F.pad(made, beside, value=neutral)
    join = {"prod": torch.mul, "amax": torch.maximum, "amin": torch.minimum}[reduce]
    return torch.where(hits > 0, join(self, made) if include_self else made, self)


@_composed("index_reduce")
def index_reduce(self: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True) -> Tensor:
    if not self.ndim:
        return index_reduce(self.reshape(1), 0, index, source.reshape(1), reduce, include_self=include_self).reshape(())
    d = dim % self.ndim
    ids = index.reshape(-1, *(1,) * (self.ndim - d - 1)).expand(source.shape)
    return scatter_reduce(self, d, ids, source, reduce, include_self=include_self)


# -- windows and sizes ----------------------------------------------------------------------------------------------------


def _elements(x: Tensor, d: int, at: Sequence[int]) -> Tensor:
    """Elements along a dimension by their positions, as slices and repetitions side by side."""
    runs: list[tuple[int, int, int]] = []  # first, count, step: 0 or 1
    for i in at:
        first, count, step = runs[-1] if runs else (-1, 0, 0)
        if count == 1 and i - first in (0, 1):
            step = i - first
        if count and i == first + count * step:
            runs[-1] = (first, count + 1, step)
        else:
            runs.append((i, 1, 1))
    alike = len({count for _, count, _ in runs}) == 1 and [first for first, _, _ in runs] == list(range(x.shape[d]))
    if alike and not any(step for _, _, step in runs):  # every element as often as the others
        return x.unsqueeze(d + 1).expand(*x.shape[: d + 1], runs[0][1], *x.shape[d + 1 :]).flatten(d, d + 1)
    parts = [x.narrow(d, first, n) if step else x.narrow(d, first, 1).expand(*x.shape[:d], n, *x.shape[d + 1 :]) for first, n, step in runs]
    return torch.cat(parts, d)


@_composed(*(f"replication_pad{n}d_backward" for n in (1, 2, 3)))
def replication_pad_backward(grad_output: Tensor, self: Tensor, padding: Sequence[int]) -> Tensor:
    def padded(x: Tensor) -> Tensor:
        for i in range(0, len(padding), 2):
            d = x.ndim - 1 - i // 2
            size = x.shape[d]
            x = _elements(x, d, [min(max(j, 0), size - 1) for j in range(-padding[i], size + padding[i + 1])])
        return x

    return adjoint(padded, self.shape, grad_output)


def _windows(x: Tensor, d: int, kernel: int, stride: int, padding: int, count: int) -> Tensor:
    """Sums over windows along a dimension, with zeros around."""
    size = x.shape[d]
    if kernel == stride and not padding and count * kernel <= size:
        return x.narrow(d, 0, count * kernel).unflatten(d, (count, kernel)).sum(d + 1)
    beyond = (count - 1) * stride + kernel - padding - size
    x = F.pad(x, [0, 0] * (x.ndim - 1 - d) + [padding, beyond])
    steps = (slice(None),) * d
    parts = [x[(*steps, slice(k, k + (count - 1) * stride + 1, stride))] for k in range(kernel)]
    return sum(parts[1:], parts[0])


def _pooled(x: Tensor, counts: Sequence[int], kernel: Any, stride: Any, padding: Any, include: bool, divisor: int | None) -> Tensor:
    """Means over windows of the last dimensions, of which there are so many."""
    n = len(counts)
    kernels, pads = _each(kernel, n), _each(padding, n)
    strides = _each(stride, n) if stride else kernels
    for i, (k, s, p, count) in enumerate(zip(kernels, strides, pads, counts, strict=True)):
        d = x.ndim - n + i
        size = x.shape[d]
        x = _windows(x, d, k, s, p, count)
        ends = [(j * s - p, min(j * s - p + k, size + p)) for j in range(count)]
        elements = [end - start if include else min(end, size) - max(start, 0) for start, end in ends]
        if divisor is None and len(set(elements)) == 1:
            x = x / elements[0]
        elif divisor is None:
            x = x / torch.tensor(elements, dtype=x.dtype).reshape(-1, *(1,) * (x.ndim - 1 - d))
    return x if divisor is None else x / divisor


@_composed("avg_pool2d", "avg_pool3d")
def avg_pool(
    self: Tensor,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    n: int = 0,
) -> Tensor:
    n = n or len(kernel_size)
    kernels, pads = _each(kernel_size, n), _each(padding, n)
    strides = _each(stride, n) if stride else kernels
    counts = []
    for size, k, s, p in zip(self.shape[-n:], kernels, strides, pads, strict=True):
        count = (size + 2 * p - k + (s - 1 if ceil_mode else 0)) // s + 1
        counts.append(count - 1 if ceil_mode and (count - 1) * s >= size + p else count)
    return _pooled(self, counts, kernel_size, stride, padding, count_include_pad, divisor_override)


@_composed("avg_pool2d_backward", "avg_pool3d_backward")
def avg_pool_backward(
    grad_output: Tensor,
    self: Tensor,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    counts = grad_output.shape[-len(kernel_size) :]
    options = kernel_size, stride, padding, count_include_pad, divisor_override
    return adjoint(lambda x: _pooled(x, counts, *options), self.shape, grad_output)


@_composed("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def adaptive_avg_pool(self: Tensor, output_size: Sequence[int]) -> Tensor:
    """Means over windows from ⌊i·size/count⌋ to ⌈(i + 1)·size/count⌉."""
    x = self
    for i, count in enumerate(output_size):
        d = x.ndim - len(output_size) + i
        size = x.shape[d]
        if size % count == 0:
            x = x.unflatten(d, (count, size // count)).mean(d + 1)
        else:
            x = torch.cat([x.narrow(d, a, b - a).mean(d, True) for a, b in _bounds(size, count)], d)
    return x


@_composed("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward")
def adaptive_avg_pool_backward(grad_output: Tensor, self: Tensor) -> Tensor:
    """Dimensions that are not pooled keep their size: each of their windows is one element."""
    return adjoint(lambda x: adaptive_avg_pool(x, grad_output.shape), self.shape, grad_output)


def _bounds(size: int, count: int) -> list[tuple[int, int]]:
    return [(j * size // count, -(-(j + 1) * size // count)) for j in range(count)]


@_composed("adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(self: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Maxima over windows, and where they are in the dimensions that are pooled, as one: of equal elements the first one."""
    n = len(output_size)
    x, at = self, torch.arange(math.prod(self.shape[-n:])).reshape(self.shape[-n:]).expand(self.shape)
    for i in reversed(range(n)):
        d = self.ndim - n + i
        found = [(x.narrow(d, a, b - a).max(d, True), at.narrow(d, a, b - a)) for a, b in _bounds(self.shape[d], output_size[i])]
        x = torch.cat([largest.values for largest, _ in found], d)
        at = torch.cat([where.gather(d, largest.indices) for largest, where in found], d)
    return x, at


def _to_positions(n: int) -> Composition:
    def backward(grad_output: Tensor, self: Tensor, *options: Any) -> Tensor:
        """To the element of the last n dimensions that was chosen."""
        made = grad_output.new_zeros(self.shape).flatten(-n)
        return made.scatter_add(-1, options[-1].flatten(-n), grad_output.flatten(-n)).reshape(self.shape)

    return backward


for _n in (2, 3):
    for _name in ("max_pool{}d_with_indices_backward", "adaptive_max_pool{}d_backward"):
        COMPOSITIONS["aten::" + _name.format(_n)] = _to_positions(_n)


def _nearest(name: str, n: int) -> tuple[Composition, Composition]:
    kernel = getattr(A, name.replace(f"{n}d", "1d")).default

    def chosen(x: Tensor, sizes: Sequence[int], scales: Sequence[float | None]) -> Tensor:
        """Elements along each of the last dimensions, those that the kernel chooses."""
        for i, (count, scale) in enumerate(zip(sizes, scales, strict=True)):
            d = x.ndim - n + i
            size = x.shape[d]
            with _disable_current_modes():
                at = kernel(torch.arange(size, dtype=torch.float64).reshape(1, 1, -1), [count], scale).long().reshape(-1).tolist()
            x = _elements(x, d, at)
        return x

    def forward(self: Tensor, output_size: Sequence[int], *scales: float | None) -> Tensor:
        return chosen(self, output_size, scales or (None,) * n)

    def backward(grad_output: Tensor, output_size: Sequence[int], input_size: Sequence[int], *scales: float | None) -> Tensor:
        return adjoint(lambda x: chosen(x, output_size, scales or (None,) * n), input_size, grad_output)

    return forward, backward


for _n in (1, 2, 3):
    for _name in (f"upsample_nearest{_n}d", f"_upsample_nearest_exact{_n}d"):
        COMPOSITIONS[f"aten::{_name}"], COMPOSITIONS[f"aten::{_name}_backward"] = _nearest(_name, _n)


def _interpolated_backward(name: str) -> Composition:
    def backward(grad_output: Tensor, output_size: Sequence[int], input_size: Sequence[int], *options: Any) -> Tensor:
        formula = decomposition_table[getattr(A, name).default]
        return adjoint(lambda x: formula(x, output_size, *options), input_size, grad_output)

    return backward


for _name in ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"):
    COMPOSITIONS[f"aten::{_name}_backward"] = _interpolated_backward(_name)


# -- products and distances -----------------------------------------------------------------------------------------------


@_composed("_trilinear")
def trilinear(i1: Tensor, i2: Tensor, i3: Tensor, *dims: Any) -> Tensor:
    """The product of three tensors, each with dimensions of size 1 put in, added up over some dimensions."""
    given, sumdim = [i1, i2, i3], dims[3]
    for k in range(3):
        for d in dims[k]:
            given[k] = given[k].unsqueeze(d)
    return (given[0] * given[1] * given[2]).sum(list(sumdim))


def _between(x1: Tensor, x2: Tensor) -> Tensor:
    return x1.unsqueeze(-2) - x2.unsqueeze(-3)


@_composed("_cdist_forward")
def cdist(x1: Tensor, x2: Tensor, p: float, compute_mode: int | None) -> Tensor:
    return torch.linalg.vector_norm(_between(x1, x2), p, dim=-1)


@_composed("_cdist_backward")
def cdist_backward(grad: Tensor, x1: Tensor, x2: Tensor, p: float, cdist: Tensor) -> Tensor:
    """The derivative is 0 where a distance is."""
    gap, far, g = _between(x1, x2), cdist.unsqueeze(-1), grad.unsqueeze(-1)
    if p == 0:
        return torch.zeros_like(x1)
    if p == math.inf:
        slope = gap.sign() * (gap.abs() == far)
    elif p == 1:
        slope = gap.sign()
    else:
        flat = (gap == 0) | (far == 0)
        slope = torch.where(flat, 0.0, gap.sign() * (gap.abs() / far) ** (p - 1))
    return (g * slope).sum(-2)
