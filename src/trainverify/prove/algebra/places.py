"""Where elements are: moves, slices, pieces and concatenations of forms over axes. Trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainverify.axes.structure import Axes, Axis
from trainverify.graph.program import Domain
from trainverify.prove.algebra.flat import Flat, Frame
from trainverify.prove.algebra.grids import Grid, Grids, Key, Offset, Spot
from trainverify.prove.algebra.kernel import Kernel
from trainverify.prove.algebra.terms import (
    Index,
    Poly,
    Unsupported,
)

Value = dict[Key, Poly]  # blocks by their tags
Dims = Sequence[Axis]


@dataclass
class Places:
    """Elements that stay as they are, at other places."""

    kernel: Kernel
    axes: Axes
    domains: dict[str, Domain] = field(default_factory=dict)
    mesh_sizes: dict[Index, int] = field(default_factory=dict)  # of mesh leaf variables
    where: str = ""  # the op at hand

    def __post_init__(self) -> None:
        self.grids = Grids(self.axes)
        self.flat = Flat(self.kernel, self.grids)
        self._slices: set[str] = set()  # names of slices of integer inputs

    def grid(self, dims: Dims) -> Grid:
        return self.grids.of(dims)

    def aligned(self, given: Dims, dims: Dims) -> None:
        """Dimensions that are to be the same are made of the same leaves; after a clash of axes they may not be."""
        if given is dims:
            return
        old, new = self.grid(given), self.grid(dims)
        if old is not new and (
            old.spans != new.spans or [(x.axis, x.owner) for x in old.leaves] != [(x.axis, x.owner) for x in new.leaves]
        ):
            raise Unsupported(f"axes that could not be aligned: {list(given)} and {list(dims)}")

    def _sure(self, value: Value) -> None:
        if any(self.kernel.wild(p) for p in value.values()):
            raise Unsupported("positions of what may have no value")

    def _moved(self, value: Value, given: Dims, dims: Dims, into: Mapping[int, int]) -> Value:
        """Dimension d of the argument becomes dimension into[d]; the value does not depend on the others."""
        old, new = self.grid(given), self.grid(dims)
        to = {o: n for d, e in into.items() for o, n in zip(old.spans[d], new.spans[e], strict=True)}
        spots = [Spot("kept", to[o]) for o in range(len(old.leaves))]
        return self._seen(value, old, new, spots)

    def _seen(self, value: Value, old: Grid, new: Grid, spots: Sequence[Spot]) -> Value:
        """A value looked at through spots: for every leaf of the old grid, where it comes from in the new one."""
        out: Value = {}
        names = {-1 - o: -1 - s.value if s.kind == "kept" else s.value for o, s in enumerate(spots) if s.kind in ("kept", "fixed")}
        for key in new.blocks():
            tags = dict(zip(new.tags, key, strict=True))
            source = []
            for o in old.tags:
                s = spots[o]
                if s.kind == "fixed":
                    if s.value < 0:
                        raise Unsupported("a piece that differs between ranks of one program")
                    source.append(s.value)
                elif s.kind == "none":
                    source.append(0)
                else:
                    source.append(tags[s.value] + s.shift)
            out[key] = self.kernel.substitute(value[tuple(source)], names)
        return out

    def _spots(self, d: int, grid: Grid, other: Grid, inner: Sequence[Spot]) -> list[Spot]:
        """Spots of a whole tensor from those of its dimension d; the other dimensions stay as they are."""
        result: list[Spot] = []
        for e, span in enumerate(grid.spans):
            if e == d:
                if len(inner) != len(span):
                    raise Unsupported("axes that could not be aligned")
                base = other.spans[e].start
                result += [Spot(s.kind, s.value + base if s.kind in ("kept", "shifted") else s.value, s.shift, s.count) for s in inner]
            else:
                result += [Spot("kept", n) for n in other.spans[e]]
                if [grid.leaves[i].axis for i in span] != [other.leaves[i].axis for i in other.spans[e]]:
                    raise Unsupported("axes that could not be aligned")
        return result

    def piece(self, value: Value, given: Dims, dims: Dims, d: int, offset: Offset, step: int = 1) -> Value:
        """A slice along dimension d."""
        old, new = self.grid(given), self.grid(dims)
        inner = self.grids.place(given[d], dims[d], offset, self.mesh_sizes, step)
        return self._seen(value, old, new, self._spots(d, old, new, inner))

    def _shifted(self, value: Value, given: Dims, dims: Dims, d: int, start: int) -> Value:
        """A slice along dimension d that has an axis of its own: its position p is position start + p."""
        k, old, new = self.kernel, self.grid(given), self.grid(dims)
        frame, (at,) = self._frame(given[d], start, dims[d].size), new.spans[d]
        digits = self.flat.coordinates(frame, -1 - at)
        names = self._beside(given, dims, d) | {-1 - o: v for o, v in zip(old.spans[d], digits, strict=True)}
        known = {key: k.known_finite(p) for key, p in value.items()}  # of all positions, of which the slice has some
        return {key: self.flat.said(k.substitute(p, names), digits, frame, -1 - at) for key, p in known.items()}

    def _put_back(self, value: Value, given: Dims, dims: Dims, d: int, start: int) -> Value:
        """Such a slice at its place, and zeros: Σ over its positions p of [position = start + p] · value."""
        k, old, new = self.kernel, self.grid(given), self.grid(dims)
        frame, (at,), p = self._frame(dims[d], start, given[d].size), old.spans[d], k.bound()
        digits = [-1 - n for n in new.spans[d]]
        names = self._beside(given, dims, d) | {-1 - at: p}
        return {key: self.flat.put_back(k.substitute(k.finite(x), names), frame, digits, p) for key, x in value.items()}

    def _frame(self, whole: Axis, start: int, length: int) -> Frame:
        grid = self.grid([whole])
        if grid.tags:
            raise Unsupported(f"a shifted piece of unequal pieces {whole!r}")
        return Frame(tuple(leaf.axis.size for leaf in grid.leaves), start, length)

    def _beside(self, given: Dims, dims: Dims, d: int) -> dict[Index, Index]:
        """The positions of all dimensions but d."""
        old, new = self.grid(given), self.grid(dims)
        names: dict[Index, Index] = {}
        for e, (a, b) in enumerate(zip(given, dims, strict=True)):
            if e != d:
                self.aligned([a], [b])
                names.update({-1 - o: -1 - n for o, n in zip(old.spans[e], new.spans[e], strict=True)})
        return names

    def padded(self, value: Value, given: Dims, dims: Dims, d: int, offset: Offset) -> Value:
        """Zero outside: δ of the digits, and the tags, that say where the tensor lies."""
        k = self.kernel
        old, new = self.grid(given), self.grid(dims)
        inner = self.grids.place(dims[d], given[d], offset, self.mesh_sizes)
        spots = self._spots(d, new, old, inner)  # for every leaf of the result, where it comes from in the argument
        names = {-1 - s.value: -1 - n for n, s in enumerate(spots) if s.kind == "kept" and not new.leaves[n].tag}
        out: Value = {}
        for key in new.blocks():
            source: dict[int, int] = {}
            inside = True
            for n, t in zip(new.tags, key, strict=True):
                s = spots[n]
                if s.kind == "fixed":
                    inside &= s.value == t
                elif s.kind == "shifted":
                    inside &= s.shift <= t < s.shift + s.count
                    source[s.value] = t - s.shift
                elif s.kind == "kept":
                    source[s.value] = t
            if not inside:
                out[key] = {}
                continue
            if any(o not in source for o in old.tags):
                raise Unsupported("axes that could not be aligned")
            result = k.substitute(value[tuple(source[o] for o in old.tags)], names)
            for n, s in enumerate(spots):
                if s.kind == "fixed" and not new.leaves[n].tag:
                    result = k.times(k.delta(new.leaves[n].axis.size, -1 - n, s.value), result)
            out[key] = result
        return out

    def _concat(self, args: list[Value], given: list[list[Axis]], dims: Dims, d: int) -> Value:
        parts = []
        start = 0
        for value, axes in zip(args, given, strict=True):
            if axes[d].size:
                parts.append(self.padded(value, axes, dims, d, Offset(start)))
            start += axes[d].size
        return {key: self.kernel.collapse(self.kernel.add(*(p[key] for p in parts))) for key in parts[0]}
