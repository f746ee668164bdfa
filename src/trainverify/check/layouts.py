"""One layout by itself: what it names exists, its shapes fit, and what of the logical tensor all ranks hold together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from trainverify.check.coverage import Box, Positions, TooFine, plain
from trainverify.graph.lineage import (
    Layout,
    LineageError,
    Part,
    Partial,
    Parts,
    Pattern,
    Placements,
    Replicate,
    Run,
    Shard,
    local_digits,
    pattern_dims,
)
from trainverify.graph.mesh import Mesh

_MOST_PIECES: Final = 1_000_000


def stray(lay: Layout, mesh: Mesh) -> str | None:
    """A mesh axis, coordinate or rank that a layout names and that does not exist."""
    axes, size = dict(mesh.axes), mesh.size
    for axis, index in lay.where:
        if axis not in axes:
            return f"{mesh} has no axis {axis!r}"
        if type(index) is not int or not 0 <= index < axes[axis]:
            return f"{mesh} has no {axis}={index}"
    if len({a for a, _ in lay.where}) != len(lay.where):
        return "a coordinate is given twice"
    form: object = lay.form
    match form:
        case Placements(placed):
            named = [a for a, _ in placed]
        case Pattern():
            named = [a for a, _ in form.partial]
        case Parts(by_rank):
            named = []
            seen: set[int] = set()
            for r, _ in by_rank:
                if type(r) is not int or not 0 <= r < size:
                    return f"{mesh} has no rank {r!r}"
                if r in seen:
                    return f"rank {r} is given twice"
                seen.add(r)
            if lay.where and not seen <= set(mesh.ranks(**dict(lay.where))):
                return f"parts of ranks that are not on {', '.join(f'{a}={i}' for a, i in lay.where)}"
        case _:
            return f"{lay.form!r} is no spelling of lineage"
    for axis in named:
        if axis not in axes:
            return f"{mesh} has no axis {axis!r}"
    if len(set(named)) != len(named):
        return "an axis is placed twice"
    return None


def ill_formed(lay: Layout, mesh: Mesh, shape: tuple[int, ...]) -> str | None:
    """Why a layout cannot be read as one of a logical tensor of this shape."""
    match lay.form:
        case Placements(axes):
            placements: list[object] = [p for _, p in axes]
            for placement in placements:
                if isinstance(placement, Shard):
                    if type(placement.dim) is not int or not 0 <= placement.dim < len(shape):
                        return f"{placement} of a tensor with {len(shape)} dimensions"
                elif not isinstance(placement, Replicate | Partial):
                    return f"{placement!r} is not a placement"
            return _mixed(str(p.op) for _, p in axes if isinstance(p, Partial))
        case Pattern(text, fixed, partial):
            try:
                dims = pattern_dims(text)
                used = {n for d in dims for n in d}
                for name, index, size in fixed:
                    if name in mesh.names:
                        return f"{name} is an axis of {mesh} and cannot be fixed"
                    if name not in used:
                        return f"the pattern has no {name!r}"
                    if type(index) is not int or type(size) is not int or not 0 <= index < size:
                        return f"{name}={index} of {size}"
                if len({n for n, _, _ in fixed}) != len(fixed):
                    return "a name is fixed twice"
                for axis, _ in partial:
                    if axis in used:
                        return f"{axis} is in the pattern and partial"
                ranks = mesh.ranks(**dict(lay.where))
                lay.parts(mesh, ranks[0], shape)
            except LineageError as error:
                return str(error)
            return _mixed(str(op) for _, op in partial)
        case Parts():
            return None


def _mixed(ops: Iterator[str]) -> str | None:
    found = set(ops)
    if not found <= {"sum", "avg"}:
        return f"partial {sorted(found)[0]!r}: only sums and averages are known"
    return "partial sum and partial average of one tensor cannot be mixed" if len(found) > 1 else None


def part_problem(part: Part, local: tuple[int, ...], logical: tuple[int, ...]) -> str | None:
    """Why an explicit part does not fit its two tensors."""
    inside, outside = ((math.prod(local),), (math.prod(logical),)) if part.flat else (local, logical)
    if len(part.local) != len(inside) or len(part.logical) != len(inside):
        what = "the size of" if part.padding else "the positions of"
        return f"{part}: {len(part.logical)} runs at {len(part.local)} starts; {what} each of {len(inside)} dimensions is needed"
    if not part.padding and len(outside) != len(inside):
        return f"{part}: a tensor with {len(inside)} dimensions holds one with {len(outside)}; use flat parts"
    for d, (start, run) in enumerate(zip(part.local, part.logical, strict=True)):
        numbers = (start, run.start, run.block, run.count, run.stride)
        if any(type(n) is not int or n < 0 for n in numbers) or run.count < 1:
            return f"{part}: {run} at {start} is not a range"
        if run.count > 1 and run.stride < run.block:
            return f"{part}: blocks of {run.block} every {run.stride} overlap"
        if start + run.size > inside[d]:
            return f"{part}: {start}:{start + run.size} in dimension {d} of a local tensor {list(inside)}"
        if not part.padding and run.stop > outside[d]:
            return f"{part}: positions up to {run.stop} in dimension {d} of a logical tensor {list(outside)}"
    if part.partial is not None:
        op, i, n = part.partial
        if op not in ("sum", "avg") or type(i) is not int or type(n) is not int or not 0 <= i < n:
            return f"{part}: share {i} of {n} ({op})"
    return None


class Layouts:
    """Layouts over one mesh, with a memo for what only depends on coordinates."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._stride = {}
        stride = 1
        for name, size in reversed(mesh.axes):
            self._stride[name] = stride
            stride *= size
        self._distinct: dict[Any, list[int]] = {}

    def representatives(self, key: object, ranks: Sequence[int], axes: tuple[str, ...]) -> list[int]:
        """One of the ranks for every combination of coordinates along these axes. `key` names the list of ranks."""
        memo = (key, axes)
        if memo not in self._distinct:
            if axes:
                numbers = np.asarray(ranks, dtype=np.int64)
                code = np.zeros(len(numbers), dtype=np.int64)
                for a in axes:
                    size = self.mesh.length(a)
                    code = code * size + numbers // self._stride[a] % size
                first = np.unique(code, return_index=True)[1]
                self._distinct[memo] = [int(numbers[i]) for i in sorted(first)]
            else:
                self._distinct[memo] = [ranks[0]]
        return self._distinct[memo]

    def shapes(self, lay: Layout, shape: tuple[int, ...], key: object, ranks: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(rank, shape its local tensor must have), for ranks that stand for all."""
        uneven: tuple[str, ...] = ()
        if isinstance(lay.form, Placements):
            for d, axes in _sharding(lay.form).items():
                if shape[d] % math.prod(self.mesh.length(a) for a in axes):
                    uneven += axes
        for rank in self.representatives(key, ranks, uneven):
            (part,) = lay.parts(self.mesh, rank, shape)
            yield rank, tuple(r.size for r in part.logical)

    def reach(self, lay: Layout, shape: tuple[int, ...]) -> list[tuple[bool, Box]]:
        """What all ranks together hold of the logical tensor: (flat, box)."""
        match lay.form:
            case Parts(by_rank):
                distinct = dict.fromkeys(ps for _, ps in by_rank)
                parts = dict.fromkeys((p.flat, p.logical) for ps in distinct for p in ps if not p.padding)
                return [(f, tuple((r,) for r in runs)) for f, runs in parts]
            case Placements():
                sharding = _sharding(lay.form)
                return [(False, tuple(self._chunks(sharding.get(d, ()), s, dict(lay.where)) for d, s in enumerate(shape)))]
            case Pattern(text):
                dims = pattern_dims(text)
                return [(False, tuple(self._digits(names, s, lay) for names, s in zip(dims, shape, strict=True)))]

    def _chunks(self, axes: tuple[str, ...], size: int, where: dict[str, int]) -> Positions:
        if not any(a in where for a in axes):
            return plain(0, size)
        lengths = [self.mesh.length(a) for a in axes]
        spans = [[where[a]] if a in where else range(n) for a, n in zip(axes, lengths, strict=True)]
        if math.prod(map(len, spans)) > _MOST_PIECES:
            raise TooFine(f"more than {_MOST_PIECES:,} pieces")
        found = []
        for at in itertools.product(*spans):
            low, high = 0, size
            for index, n in zip(at, lengths, strict=True):  # as torch.chunk
                chunk = -(-(high - low) // n)
                low, high = min(low + chunk * index, high), min(low + chunk * (index + 1), high)
            found.append(Run(low, high - low))
        return tuple(found)

    def _digits(self, names: tuple[str, ...], size: int, lay: Layout) -> Positions:
        assert isinstance(lay.form, Pattern)
        where = dict(lay.where)
        fixed = {n: (i, s) for n, i, s in lay.form.fixed}
        if not size:
            return (Run(0, 0),)
        named = local_digits(names, {*self.mesh.names, *fixed})
        given = math.prod(self.mesh.length(n) if n in self.mesh.names else fixed[n][1] if n in fixed else k or 1 for n, k in named)
        digits: list[tuple[int | None, int]] = []  # slow first: (index, or None for all; size)
        for n, k in named:
            if n in self.mesh.names:
                digits.append((where.get(n), self.mesh.length(n)))
            else:
                digits.append(fixed[n] if n in fixed else (None, k or size // given))
        return _product(digits)


def _product(digits: list[tuple[int | None, int]]) -> Positions:
    """Numbers in a mixed radix with some digits fixed, as runs."""
    start, weight, block = 0, 1, 1
    free: list[tuple[int, int]] = []  # (weight, size), fast first; neighbours joined
    for index, size in reversed(digits):
        if index is not None:
            start += index * weight
        elif free and free[-1][0] * free[-1][1] == weight:
            free[-1] = (free[-1][0], free[-1][1] * size)
        else:
            free.append((weight, size))
        weight *= size
    free = [f for f in free if f[1] > 1]
    if free and free[0][0] == 1:
        block = free.pop(0)[1]
    count, stride = 1, 0
    if free:
        stride, count = free.pop()
    if math.prod(n for _, n in free) > _MOST_PIECES:
        raise TooFine(f"more than {_MOST_PIECES:,} pieces")
    offsets = itertools.product(*(range(0, w * n, w) for w, n in free))
    return tuple(Run(start + sum(o), block, count, stride) for o in offsets)


def _sharding(form: Placements) -> dict[int, tuple[str, ...]]:
    found: dict[int, tuple[str, ...]] = {}
    for axis, placement in form.axes:
        if isinstance(placement, Shard):
            found[placement.dim] = (*found.get(placement.dim, ()), axis)
    return found
