"""ZeRO: what data-parallel ranks cut among them, tensor by tensor or in flat buckets, and what a rank's shard holds."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from trainverify.build.plan import RankBuilder, Spelling
from trainverify.build.tape import BuildError, Tensor
from trainverify.graph.lineage import Part, Parts, Pattern, Run, layout, pattern_dims
from trainverify.graph.mesh import Mesh
from trainverify.graph.program import Value
from trainverify.zoo.parallel.degrees import Axes, Degrees


class Holder(Protocol):
    """Who holds the weights: ranks of a stage."""

    r: RankBuilder
    how: Degrees
    axes: Axes
    weights: dict[str, Weight]
    ranks: tuple[int, ...]

    def offset(self, size: int, ends: int = 0, axes: tuple[str, ...] | None = None) -> Value: ...


ALIGNED: Final = 128  # elements of a flat bucket that stay together


@dataclass(frozen=True)
class Weight:
    """A parameter on the ranks of a stage; `shape` is what a rank computes with."""

    name: str
    shape: tuple[int, ...]
    form: str
    split: tuple[str, ...] = ()  # mesh axes along which ranks hold different pieces
    summed: tuple[str, ...] = ()  # mesh axes besides those of the data along which ranks compute summands of the gradient
    tied: Value = None  # the group of ranks that hold the same weight for another use
    counted: bool = True  # in the gradient norm: one of the tied copies is not
    data: tuple[str, ...] | None = None  # mesh axes of the data along which its gradient adds up, if not all of them
    blocks: tuple[int, ...] = ()  # how rows belong together (groups of heads, heads): no shard has parts of two blocks

    def logical(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        factors = [math.prod(mesh.length(n) for n in names if n in mesh.names) for names in pattern_dims(self.form)]
        return tuple(s * f for s, f in zip(self.shape, factors, strict=True))

    def held(self, mesh: Mesh, rank: int) -> Part:
        (part,) = layout(self.name, self.form).parts(mesh, rank, self.logical(mesh))
        return part


def buckets(stage: Holder) -> list[Bucket]:
    """Weights as they are cut: each alone, or together those of a layer that are treated alike (vectors have no weight decay)."""
    weights = list(stage.weights.values())
    if stage.how.zero == 0 or stage.how.shards == "parameter":
        return [Bucket(stage, w.name, [w], flat=False) for w in weights]
    if stage.how.shards == "chunk":
        return [Bucket(stage, w.name, [w], flat=w.shape[0] % stage.axes.size(w.data or stage.axes.data) > 0) for w in weights]
    found: dict[tuple[object, ...], list[Weight]] = {}
    for w in weights:
        layer = re.match(r"(.*?\.\d+)\.", w.name)
        unit = layer.group(1) if layer else "ends"
        found.setdefault((unit, w.split, w.summed, w.tied, w.counted, w.data, len(w.shape) > 1), []).append(w)
    names: dict[str, int] = {}
    made = []
    for (unit, *_), members in found.items():
        n = names[str(unit)] = names.get(str(unit), -1) + 1
        made.append(Bucket(stage, f"{unit}.flat{n or ''}", members, flat=True))
    return made


class Bucket:
    """One tensor that is cut among data-parallel ranks: a weight along a dimension, or several weights flattened one after the other.

    Shards are equally long; what does not divide is flattened and padded with zeros at the end, as torch does before it scatters.
    """

    def __init__(self, stage: Holder, name: str, weights: Sequence[Weight], flat: bool):
        self.stage = stage
        self.r = stage.r
        self.name = name
        self.weights = tuple(weights)
        self.flat = flat
        self.first = self.weights[0]
        self.axes = stage.axes.data if self.first.data is None else self.first.data
        self.count = stage.axes.size(self.axes) if stage.how.zero else 1
        self.sizes = [math.prod(w.shape) for w in self.weights]
        shape = (sum(self.sizes),) if flat else self.first.shape
        self.dim = 0 if flat or stage.how.shards != "parameter" else self._dim()
        self.total = shape[self.dim]
        unit = 1
        if flat and self.count > 1:  # of chunks along a dimension rows stay whole
            unit = ALIGNED if stage.how.shards == "flat" else math.prod(self.first.shape[1:])
        self.chunk = -(-self.total // (self.count * unit)) * unit
        self.padding = self.chunk * self.count - self.total
        self.shape = self._cut(shape, self.chunk)

    @property
    def zero(self) -> int:
        """The stage of ZeRO that these weights are treated by."""
        return self.stage.how.zero if self.count > 1 else 0

    def _cut(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])

    def _dim(self) -> int:
        """The first dimension that divides, into whole blocks if there is such a one; where there is none the weight stays whole."""
        able = [d for d, size in enumerate(self.first.shape) if size % self.count == 0 and self._inserted(d) is not None]
        for fits in (self._whole_blocks, self._fits):
            for d in able:
                if d > 0 or fits():
                    return d
        self.count = 1
        return 0

    def _whole_blocks(self) -> bool:
        """Whether shards of rows are whole blocks."""
        return self._fits() and math.prod(self.first.blocks) % self.count == 0 if self.first.blocks else True

    def _fits(self) -> bool:
        """Whether shards of rows are whole blocks, or blocks whole shards."""
        left = self.count
        for n in self.first.blocks:
            if n % left == 0:
                return True
            if left % n:
                return False
            left //= n
        return True

    def _inserted(self, dim: int) -> str | None:
        """The weight's pattern with the axes of the data before the local one of a dimension."""
        dims = [list(names) for names in pattern_dims(self.first.form)]
        *before, local = dims[dim]
        if any(n not in self.stage.axes.mesh.names for n in before):
            return None
        dims[dim] = [*before, *self.axes, local]
        return " ".join(f"({' '.join(names)})" if len(names) > 1 else names[0] for names in dims)

    # -- lineage ------------------------------------------------------------------------------------------------------

    def form(self, weight: Weight, alone: bool = False) -> Spelling:
        """How a shard holds (its part of) a weight, or anything else of that shape. `alone` calls all the rest padding."""
        if self.count == 1 and not self.flat:
            return weight.form
        if not self.flat and not self.padding:
            text = self._inserted(self.dim)
            if text is not None:
                return Pattern(text)
        mesh = self.stage.axes.mesh
        return Parts(tuple((rank, tuple(self._parts(weight, rank, mesh, alone))) for rank in self.stage.ranks))

    def _parts(self, weight: Weight, rank: int, mesh: Mesh, alone: bool) -> list[Part]:
        low = self.position(mesh.coordinates(rank)) * self.chunk
        high = low + self.chunk
        part = weight.held(mesh, rank)
        found: list[Part] = []
        if self.flat:
            start = sum(self.sizes[: self.weights.index(weight)])
            stop = start + math.prod(weight.shape)
            at = begin = min(max(start - low, 0), self.chunk)
            for run in within(flattened(part, weight.logical(mesh)), max(low - start, 0), min(high, stop) - start):
                found.append(Part((at,), (run,), flat=True))
                at += run.size
            empty = [(0, begin), (at, self.chunk)] if alone else []
            if not alone and weight is self.weights[-1] and high > self.total:
                empty = [(max(self.total - low, 0), self.chunk)]
            found += [Part((a,), (Run(0, b - a),), flat=True, padding=True) for a, b in empty if a < b]
            return found
        d, at = self.dim, 0
        for run in within(part.logical[d], low, min(high, self.total)):
            found.append(replace(part, local=self._cut(part.local, at), logical=(*part.logical[:d], run, *part.logical[d + 1 :])))
            at += run.size
        if high > self.total:
            rest = Run(0, high - max(low, self.total))
            found.append(
                replace(part, local=self._cut(part.local, at), logical=(*part.logical[:d], rest, *part.logical[d + 1 :]), padding=True)
            )
        return found

    def position(self, at: dict[str, int]) -> int:
        """Which shard the rank at these coordinates has."""
        mesh, found = self.stage.axes.mesh, 0
        for a in self.axes if self.count > 1 else ():
            found = found * mesh.length(a) + at[a]
        return found

    # -- ops ----------------------------------------------------------------------------------------------------------

    def joined(self, tensors: Sequence[Tensor], name: str) -> Tensor:
        """What is cut: all of it, padded."""
        r, parts = self.r, list(tensors)
        if self.flat:
            parts = [r.reshape(t, shape=(n,), name=f"{t.name}.flat") for t, n in zip(parts, self.sizes, strict=True)]
        if self.padding:
            parts.append(r.full(shape=self._cut(parts[0].shape, self.padding), value=0.0, dtype=parts[0].type.dtype, name=f"{name}.zeros"))
        return parts[0] if len(parts) == 1 else r.concat(*parts, dim=self.dim, name=f"{name}.joined")

    def divided(self, whole: Tensor, names: Sequence[str]) -> list[Tensor]:
        """The weights' tensors back, without the padding."""
        r = self.r
        if not self.flat:
            if not self.padding:
                return [whole]
            return [r.slice(whole, dim=self.dim, start=0, stop=self.total, name=names[0])]
        found, start = [], 0
        for w, size, name in zip(self.weights, self.sizes, names, strict=True):
            piece = whole
            if (start, size) != (0, whole.shape[0]):
                piece = r.slice(whole, dim=0, start=start, stop=start + size, name=f"{name}.flat")
            found.append(r.reshape(piece, shape=w.shape, name=name))
            start += size
        return found

    def scattered(self, tensors: Sequence[Tensor], name: str) -> Tensor:
        """Own shard of the sum over data-parallel ranks."""
        whole = self.joined(tensors, name)
        return whole if self.count == 1 else self.r.reduce_scatter(whole, group=self.axes, dim=self.dim, name=name)

    def own(self, tensors: Sequence[Tensor], name: str) -> Tensor:
        """Own shard of what every rank has."""
        whole = self.joined(tensors, name)
        if self.count == 1:
            return whole
        start, stop = (self.stage.offset(self.chunk, ends, self.axes) for ends in (0, 1))
        return self.r.slice(whole, dim=self.dim, start=start, stop=stop, name=name)

    def gathered(self, shard: Tensor, name: str, names: Sequence[str]) -> list[Tensor]:
        """The weights' tensors from all ranks' shards; their gradients are added up and scattered."""
        whole = shard
        if self.count > 1:
            plain = not self.flat and not self.padding
            label = names[0] if plain else name
            whole = self.r.all_gather(shard, group=self.axes, dim=self.dim, backward="reduce_scatter", name=label)
        return self.divided(whole, names)


def flattened(part: Part, shape: tuple[int, ...]) -> Run:
    """The positions of a part in the flattened logical tensor."""
    *rows, last = part.logical
    if not rows:
        return last
    wide = [d for d, run in enumerate(part.logical) if run != Run(0, shape[d])]
    if len(wide) <= 1:
        d = wide[0] if wide else 0
        run, inner = part.logical[d], math.prod(shape[d + 1 :])
        outer = math.prod(shape[:d])
        if outer == 1:
            return Run(run.start * inner, run.block * inner, run.count, run.stride * inner)
        if run.count == 1:
            return Run(run.start * inner, run.block * inner, outer, shape[d] * inner)
    raise BuildError("a weight that is cut in two ways does not go into a flat bucket")


def within(run: Run, low: int, high: int) -> list[Run]:
    """The positions number low … high−1 of a run: a piece of a block, whole blocks, a piece of a block."""
    if low >= high:
        return []
    if run.count == 1:
        return [Run(run.start + low, high - low)]
    first, a = divmod(low, run.block)
    last, b = divmod(high, run.block)
    if first == last:
        return [Run(run.start + first * run.stride + a, b - a)]
    found = []
    if a:
        found.append(Run(run.start + first * run.stride + a, run.block - a))
        first += 1
    if last > first:
        count = last - first
        found.append(Run(run.start + first * run.stride, run.block, count, run.stride if count > 1 else 0))
    if b:
        found.append(Run(run.start + last * run.stride, b))
    return found
