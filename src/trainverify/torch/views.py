"""Strided views of dense memory as reads and writes of boxes.

A tensor lies densely in memory: in the order of its strides it is one row-major block. A view (offset, shape, stride) of that
block is a box of it after some dimensions are joined or split: `box` finds it, or says that there is none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

APART = 16  # positions with gaps between them that are written one by one
Ints = tuple[int, ...]
Step = tuple[str, dict[str, object]]  # an operator and its attributes, applied to the result of the one before


@dataclass(frozen=True, slots=True)
class View:
    """Elements offset + Σ iₖ·strideₖ of a storage."""

    offset: int
    shape: Ints
    stride: Ints

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """One past the last element; `offset` if there is none."""
        return self.offset if not self.size else self.offset + 1 + sum((s - 1) * t for s, t in zip(self.shape, self.stride, strict=True))

    @property
    def repeats(self) -> bool:
        """Whether a dimension with stride 0 shows elements several times."""
        return any(s > 1 and t == 0 for s, t in zip(self.shape, self.stride, strict=True))


def memory_order(view: View) -> Ints:
    """Dimensions from the slowest to the fastest; those of size 1 keep their place among equals."""
    return tuple(sorted(range(len(view.shape)), key=lambda d: (-view.stride[d], d)))


def is_dense(view: View) -> bool:
    """Whether the elements are one block of memory, each of them once."""
    expected = 1
    for d in reversed([d for d in memory_order(view) if view.shape[d] > 1]):
        if view.stride[d] != expected:
            return False
        expected *= view.shape[d]
    return True


@dataclass(frozen=True, slots=True)
class Digit:
    """One dimension of the block after joining and splitting: positions start, start + step, … (`count` of them) of `size`."""

    size: int
    start: int
    count: int
    step: int = 1


@dataclass(frozen=True)
class Box:
    """How a view lies in a block: the block's dimensions in memory order, as `digits`, each cut to a range.

    `sorted_shape` is the shape of the box with the view's own dimensions, in memory order; `order[k]` is the view's dimension that
    dimension k of it is.
    """

    order_of_block: Ints
    digits: tuple[Digit, ...]
    sorted_shape: Ints
    order: Ints
    view: View


def box(view: View, block: View, split_steps: bool = False) -> Box | None:
    """Where `view` lies in the dense `block`; None where it is no box. With `split_steps` no digit has a step (for writing)."""
    if view.offset < block.offset or view.stop > block.offset + block.size or not view.size:
        return None
    order_of_block = memory_order(block)
    dims = sorted(
        (d for d in range(len(view.shape)) if view.shape[d] > 1 and view.stride[d] > 0), key=lambda d: (-view.stride[d], -view.shape[d])
    )
    below = 0
    for d in reversed(dims):
        if view.stride[d] <= below:
            return None  # elements that are shown twice, or dimensions that interleave
        below += (view.shape[d] - 1) * view.stride[d]
    sizes = [block.shape[d] for d in order_of_block if block.shape[d] > 1]
    digits: list[Digit] = []
    for size, start, inner in _grouped(view, sizes, dims, view.offset - block.offset):
        cut = _digits(size, start, inner, split_steps)
        if cut is None:
            return None
        factors = _taken(sizes, size)
        digits += _rows(cut[0], factors) if len(cut) == 1 else cut
    return Box(order_of_block, tuple(digits), tuple(view.shape[d] for d in dims), tuple(dims), view)


def _grouped(view: View, sizes: list[int], dims: list[int], offset: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Dimensions of the block, joined until every dimension of the view lies in one: (size, first position, [(count, step)])."""
    sizes = sizes or [1]
    while True:
        strides = [math.prod(sizes[j + 1 :]) for j in range(len(sizes))]
        starts = [offset // t % s for s, t in zip(sizes, strides, strict=True)]
        inner: list[list[tuple[int, int]]] = [[] for _ in sizes]
        join: int | None = None  # join this dimension with the one before it
        for d in dims:
            s, t = view.shape[d], view.stride[d]
            j = next(j for j in range(len(sizes)) if strides[j] <= t or j == len(sizes) - 1)
            if t % strides[j]:
                join = j + 1
                break
            inner[j].append((s, t // strides[j]))
        if join is None:
            for j in reversed(range(len(sizes))):
                if starts[j] + sum((s - 1) * k for s, k in inner[j]) >= sizes[j]:
                    join = j
                    break
        if join is None:
            return list(zip(sizes, starts, inner, strict=True))
        assert 0 < join < len(sizes)
        sizes = [*sizes[: join - 1], sizes[join - 1] * sizes[join], *sizes[join + 1 :]]


def _taken(sizes: list[int], size: int) -> list[int]:
    """The first sizes, whose product is `size`; they are taken away."""
    taken: list[int] = []
    while math.prod(taken) < size:
        taken.append(sizes.pop(0))
    return taken


def _rows(digit: Digit, factors: list[int]) -> list[Digit]:
    """A run of positions of joined dimensions by those dimensions: whole rows, or a run in one row. Another run stays as it is."""
    if len(factors) < 2 or digit.step > 1:
        return [digit]
    row = math.prod(factors[1:])
    first, within = divmod(digit.start, row)
    if not within and digit.count % row == 0:
        return [Digit(factors[0], first, digit.count // row), *(Digit(f, 0, f) for f in factors[1:])]
    if within + digit.count <= row:
        return [Digit(factors[0], first, 1), *_rows(Digit(row, within, digit.count), factors[1:])]
    return [digit]


def _digits(size: int, start: int, inner: list[tuple[int, int]], split_steps: bool) -> list[Digit] | None:
    """One dimension and the view's dimensions in it, slowest first."""
    if not inner:
        return [Digit(size, start, 1)]
    if inner[-1][1] == 1 and all(inner[i][1] == inner[i + 1][1] * inner[i + 1][0] for i in range(len(inner) - 1)):
        return [Digit(size, start, math.prod(s for s, _ in inner))]
    count, step = inner[0]
    if len(inner) == 1 and not split_steps:
        return [Digit(size, start, count, step)]
    if size % step:
        return [Digit(size, start, count, step)] if len(inner) == 1 and count <= APART else None
    row, rest = divmod(start, step)
    if rest + sum((s - 1) * k for s, k in inner[1:]) >= step:
        return None
    below = _digits(step, rest, inner[1:], split_steps)
    return None if below is None else [Digit(size // step, row, count), *below]


def _permutation(dims: Ints) -> list[Step]:
    return [] if dims == tuple(range(len(dims))) else [("permute", {"dims": dims})]


def _reshape(old: Ints, new: Ints) -> list[Step]:
    return [] if old == new else [("reshape", {"shape": new})]


def reading(found: Box, block: View) -> list[Step]:
    """The operators that make the view from the block's tensor."""
    ordered = tuple(block.shape[d] for d in found.order_of_block)
    steps = [] if ordered == block.shape and _trivial(found.order_of_block, block.shape) else _permutation(found.order_of_block)
    sizes = tuple(d.size for d in found.digits)
    plain = tuple(s for s in ordered if s > 1) == tuple(s for s in sizes if s > 1)
    if plain:  # keep dimensions of size 1 where they are: fewer reshapes
        cut: list[Digit] = []
        rest = iter([d for d in found.digits if d.size > 1])
        cut = [Digit(1, 0, 1) if s == 1 else next(rest) for s in ordered]
    else:
        steps += _reshape(ordered, sizes)
        cut = list(found.digits)
    for i, d in enumerate(cut):
        if (d.start, d.count) != (0, d.size):
            last = d.start + (d.count - 1) * d.step + 1
            cut_to: dict[str, object] = {"dim": i, "start": d.start, "stop": last}
            steps.append(("slice", cut_to | ({"step": d.step} if d.step > 1 else {})))
    shape = tuple(d.count for d in cut)
    view = found.view
    kept = [d for d in range(len(view.shape)) if view.shape[d] == 1 or view.stride[d] == 0 or d in found.order]
    unrepeated = tuple(1 if view.stride[d] == 0 else view.shape[d] for d in kept)
    in_order = tuple(sorted(found.order))
    if found.order == in_order:
        steps += _reshape(shape, unrepeated)
    else:
        steps += _reshape(shape, found.sorted_shape)
        steps += _permutation(tuple(found.order.index(d) for d in in_order))
        steps += _reshape(tuple(view.shape[d] for d in in_order), unrepeated)
    if unrepeated != view.shape:
        steps.append(("expand", {"shape": view.shape}))
    return steps


def _trivial(order: Ints, shape: Ints) -> bool:
    """Whether an order of dimensions moves only dimensions of size 1."""
    moved = [d for d in order if shape[d] > 1]
    return moved == sorted(moved)


@dataclass(frozen=True)
class Writing:
    """How to write into a box: block → digits, value → shape of the box, and back to the block's shape."""

    to_digits: tuple[Step, ...]
    of_value: tuple[Step, ...]
    digits: tuple[Digit, ...]
    back: tuple[Step, ...]


def writing(found: Box, block: View) -> Writing:
    """The operators around the replacement of a box."""
    ordered = tuple(block.shape[d] for d in found.order_of_block)
    sizes = tuple(d.size for d in found.digits)
    to_digits = _permutation(found.order_of_block) + _reshape(ordered, sizes)
    view = found.view
    in_order = tuple(sorted(found.order))
    squeezed = tuple(view.shape[d] for d in in_order)
    value = _reshape(view.shape, squeezed) + _permutation(tuple(in_order.index(d) for d in found.order))
    value += _reshape(found.sorted_shape, tuple(d.count for d in found.digits))
    inverse = tuple(found.order_of_block.index(d) for d in range(len(block.shape)))
    back = _reshape(sizes, ordered) + _permutation(inverse)
    return Writing(tuple(to_digits), tuple(value), found.digits, tuple(back))
