"""What ranks hold by lineage: the forms of their sources, and those that an output must have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

from trainverify.axes.structure import Axis
from trainverify.graph.lineage import Layout, Part, Partial, Parts, Pattern, Placements, Run, Shard, local_digits, pattern_dims
from trainverify.prove.algebra.folding import Instance
from trainverify.prove.algebra.forms import Forms
from trainverify.prove.algebra.grids import Key, Offset, Spot, mixed_radix
from trainverify.prove.algebra.places import Value
from trainverify.prove.algebra.ranks import Ranks
from trainverify.prove.algebra.terms import Index, Poly, TooLarge, Unsupported, scale
from trainverify.prove.algebra.values import Missing, Values, get


class Held:
    def __init__(self, ranks: Ranks, forms: Forms, logical: Values):
        self.ranks, self.forms, self.kernel, self.logical = ranks, forms, forms.kernel, logical
        self.system = ranks.system
        self._holder_sets: dict[object, frozenset[int]] = {}

    def sources(self, env: Values, instance: Instance, unit: int) -> None:
        """Put what an instance holds at the start into its values."""
        sources = set(self.system.unit_programs[unit].sources)
        for lay in dict.fromkeys(self.system.plan.lineage):  # said twice is said once
            if lay.local in sources and instance.rank in self._holders(lay):
                try:
                    value = self._filled(lay, instance, unit)
                    known = env.get(lay.local)
                    if known is not None:  # a buffer that holds several logical tensors
                        value = {key: self.kernel.add(p, get(env, lay.local)[key]) for key, p in value.items()}
                    env[lay.local] = value
                except (Unsupported, TooLarge, Missing, RecursionError) as error:
                    env[lay.local] = Missing(f"{lay}: {error}")

    def _holders(self, lay: Layout) -> frozenset[int]:
        key = lay if isinstance(lay.form, Parts) else lay.where
        if key not in self._holder_sets:
            self._holder_sets[key] = frozenset(lay.holders(self.system.plan.mesh))
        return self._holder_sets[key]

    def _filled(self, lay: Layout, instance: Instance, unit: int) -> Value:
        """A local tensor: what lineage says it holds, zero where it holds nothing."""
        local = self.system.unit_scopes[unit].dims[lay.local]
        if self._even(lay):
            return self._even_piece(lay, instance, unit)
        total: Value | None = None
        for part in self._parts(lay, instance):
            if part.flat and self.system.flat:
                value = {key: p for key, _, p in self._flat_pieces(part, lay, unit)}
                value = {key: value.get(key, {}) for key in self.forms.grid(local).blocks()}
                total = value if total is None else {key: self.kernel.add(p, total[key]) for key, p in value.items()}
                continue
            whole_dims, local_dims = self._part_dims(part, lay, unit)
            value = get(self.logical, lay.logical)
            held = [self._held(run, a, b) for run, a, b in zip(part.logical, whole_dims, self._regions(part, local_dims), strict=True)]
            for d, (run, axis) in enumerate(zip(part.logical, held, strict=True)):
                dims = [*held[:d], *whole_dims[d:]]
                value = self.forms.piece(value, dims, [*held[: d + 1], *whole_dims[d + 1 :]], d, Offset(run.start), _step(run))
                assert axis is not None
            for d, at in enumerate(part.local):
                dims = [*local_dims[:d], *held[d:]]
                value = self.forms.padded(value, dims, [*local_dims[: d + 1], *held[d + 1 :]], d, Offset(at))
            total = value if total is None else {key: self.kernel.add(p, total[key]) for key, p in value.items()}
        return total if total is not None else {key: {} for key in self.forms.grid(local).blocks()}

    def expected(self, lay: Layout, instance: Instance, unit: int, local: Value) -> Iterator[tuple[Value, Value]]:
        """(got, want) for every part of what a local tensor must hold."""
        if not isinstance(lay.form, Parts):
            lay, local = self._added_up(lay, instance, local)
        if self._even(lay):
            yield local, self._even_piece(lay, instance, unit)
            return
        for part in self._parts(lay, instance):
            if part.flat and self.system.flat:
                want = {key: p for key, _, p in self._flat_pieces(part, lay, unit)}
                yield {key: local[key] for key in want}, want
                continue
            whole_dims, local_dims = self._part_dims(part, lay, unit)
            want, got = get(self.logical, lay.logical), local
            held = [self._held(run, a, b) for run, a, b in zip(part.logical, whole_dims, self._regions(part, local_dims), strict=True)]
            for d, run in enumerate(part.logical):
                dims = [*held[:d], *whole_dims[d:]]
                want = self.forms.piece(want, dims, [*held[: d + 1], *whole_dims[d + 1 :]], d, Offset(run.start), _step(run))
            for d, at in enumerate(part.local):
                dims = [*held[:d], *local_dims[d:]]
                got = self.forms.piece(got, dims, [*held[: d + 1], *local_dims[d + 1 :]], d, Offset(at))
            yield got, want

    def padding(self, lay: Layout, instance: Instance, unit: int, local: Value) -> Iterator[Value]:
        """What a local tensor holds where it holds nothing of the logical one."""
        for part in lay.parts(self.system.plan.mesh, instance.rank, self.system.logical.tensors[lay.logical].shape):
            if part.padding and all(run.size for run in part.logical):
                yield self._padding(part, lay, unit, local)

    def _padding(self, part: Part, lay: Layout, unit: int, local: Value) -> Value:
        dims = list(self.system.unit_scopes[unit].dims[lay.local])
        if self.system.flat and len(dims) == 1:
            (at,), (run,), grid = part.local, part.logical, self.forms.grid(dims)
            pieces = [(t, start, n) for t, (start, n, _) in enumerate(self.forms.flat.pieces(dims[0], grid, grid.spans[0]))]
            inside = [(t, n) for t, start, n in pieces if at <= start and start + n <= at + run.size]
            if sum(n for _, n in inside) != run.size:
                raise Unsupported("padding that ends inside a piece")
            return {key: local[key] for key in ((t,) if grid.tags else () for t, _ in inside)}
        dims = [self.system.inference.axes.product(dims)] if part.flat else dims
        held = self._regions(part, dims)
        for d, at in enumerate(part.local):
            local = self.forms.piece(local, [*held[:d], *dims[d:]], [*held[: d + 1], *dims[d + 1 :]], d, Offset(at))
        return local

    def _flat_pieces(self, part: Part, lay: Layout, unit: int) -> Iterator[tuple[Key, int, Poly]]:
        """(block, start, form) of the pieces of a local tensor of one dimension that hold a stretch of a flattened logical tensor."""
        (run,), (at,) = part.logical, part.local
        (axis,) = self.system.unit_scopes[unit].dims[lay.local]
        whole = self.system.scope.dims[lay.logical]
        if run.count > 1:
            raise Unsupported("strided blocks")
        grid = self.forms.grid([axis])
        value, old = get(self.logical, lay.logical), self.forms.grid(whole)
        ranks = {id(leaf.root()) for leaves in self.ranks.mesh_vars.values() for _, leaf in leaves}
        covered = 0
        for t, (start, length, v) in enumerate(self.forms.flat.pieces(axis, grid, grid.spans[0])):
            if at <= start and start + length <= at + run.size:
                key = (t,) if grid.tags else ()
                yield key, start, self.forms.flat.region_of(value, old, run.start + start - at, length, v, ranks)
                covered += length
        if covered != run.size:
            raise Unsupported("a stretch that ends inside a piece")

    def _added_up(self, lay: Layout, instance: Instance, local: Value) -> tuple[Layout, Value]:
        """A claim about summands, as one about their sum over the mesh axes that it names."""
        if isinstance(lay.form, Pattern):
            partial = dict(lay.form.partial)
            whole = replace(lay, form=replace(lay.form, partial=()))
        else:
            assert isinstance(lay.form, Placements)
            partial = {a: p.op for a, p in lay.form.axes if isinstance(p, Partial)}
            whole = replace(lay, form=Placements(tuple((a, p) for a, p in lay.form.axes if not isinstance(p, Partial))))
        if not partial:
            return lay, local
        if not set(partial) <= set(instance.folded):
            raise Unsupported("summands on ranks that are not folded")
        over = {v: leaf.size for a in partial for v, leaf in self.ranks.mesh_vars[a]}
        share = Fraction(1, math.prod(self.system.plan.mesh.length(a) for a, op in partial.items() if op == "avg"))
        return whole, {key: self.kernel.settle(scale(self.kernel.sum(p, over), share)) for key, p in local.items()}

    def _parts(self, lay: Layout, instance: Instance) -> list[Part]:
        shape = self.system.logical.tensors[lay.logical].shape
        found = lay.parts(self.system.plan.mesh, instance.rank, shape)
        if any(p.partial is not None for p in found):
            raise Unsupported("a partial value")
        return [p for p in found if not p.padding]

    def _part_dims(self, part: Part, lay: Layout, unit: int) -> tuple[list[Axis], list[Axis]]:
        whole, local = self.system.scope.dims[lay.logical], self.system.unit_scopes[unit].dims[lay.local]
        if part.flat:
            product = self.system.inference.axes.product
            return [self.system.inference.flattened(whole)], [product(local)]
        return list(whole), list(local)

    def _regions(self, part: Part, local: Sequence[Axis]) -> list[Axis]:
        return [self.system.inference.axes.piece(a, at, run.size) for a, at, run in zip(local, part.local, part.logical, strict=True)]

    @staticmethod
    def _held(run: Run, whole: Axis, region: Axis) -> Axis:
        if run.count > 1 and run.block > 1:
            raise Unsupported("strided blocks")
        return region

    def _even(self, lay: Layout) -> bool:
        """Whether a layout is digits of mesh axes, the same formula on every rank."""
        if isinstance(lay.form, Pattern):
            return not lay.form.partial
        return isinstance(lay.form, Placements) and self.system.inference.evenly_placed(
            lay.form, self.system.plan.mesh, self.system.logical.tensors[lay.logical].shape
        )

    def _even_piece(self, lay: Layout, instance: Instance, unit: int) -> Value:
        """The logical form with the digits that lineage fixes."""
        whole = get(self.logical, lay.logical)
        system = self.system
        old, new = self.forms.grid(system.scope.dims[lay.logical]), self.forms.grid(system.unit_scopes[unit].dims[lay.local])
        spots: list[Spot] = []
        for d, (span, target) in enumerate(zip(old.spans, new.spans, strict=True)):
            digits = system.inference.axes.leaves([system.scope.dims[lay.logical][d]])
            marks: list[Index | None] = []
            for digit, mark in zip(digits, self._marks(lay, instance, d, digits), strict=True):
                if mark is not None and digit.pieces is not None:
                    raise Unsupported("shards of an axis of unequal pieces")
                marks += [mark] * self.forms.grids.width(digit)  # a digit of unequal pieces is kept with all its leaves
            kept = iter(target)
            spots += [Spot("kept", next(kept, -1)) if m is None else Spot("fixed", m) for m in marks]
            here = [old.leaves[i].axis for i, m in zip(span, marks, strict=True) if m is None]
            if [id(a) for a in here] != [id(new.leaves[i].axis) for i in target]:
                raise Unsupported(f"dimension {d}: {here} held as {[new.leaves[i].axis for i in target]}")
        return self.forms._seen(whole, old, new, spots)

    def _marks(self, lay: Layout, instance: Instance, d: int, leaves: list[Axis]) -> list[Index | None]:
        """Per leaf of a logical dimension: the mesh variable or constant that fixes it, None if it is local."""
        mesh = self.system.plan.mesh
        digits: list[tuple[int, list[Index] | None]] = []  # (size, indices or None for local)
        if isinstance(lay.form, Pattern):
            given = {n: (i, s) for n, i, s in lay.form.fixed}
            listed = local_digits(pattern_dims(lay.form.text)[d], {*given, *mesh.names})
            known = math.prod(given[n][1] if n in given else mesh.length(n) if n in mesh.names else k or 1 for n, k in listed)
            rest = math.prod(a.size for a in leaves) // known
            for n, k in listed:
                if n in given:
                    digits.append((given[n][1], [given[n][0]]))
                elif n in mesh.names:
                    digits += self.ranks.digits(n, instance)
                else:
                    digits.append((k or rest, None))
        elif isinstance(lay.form, Placements):
            size = math.prod(a.size for a in leaves)
            for n, p in lay.form.axes:
                if p == Shard(d):
                    digits += self.ranks.digits(n, instance)
                    size //= mesh.length(n)
                elif isinstance(p, Partial):
                    raise Unsupported("a partial value")
            digits.append((size, None))
        return self._spread(digits, leaves)

    def _spread(self, digits: list[tuple[int, list[Index] | None]], leaves: list[Axis]) -> list[Index | None]:
        """Digits assigned to leaves by size, slow first."""
        marks: list[Index | None] = []
        i = 0
        for size, indices in digits:
            mine: list[Axis] = []
            while math.prod(a.size for a in mine) < size:
                if i == len(leaves):
                    raise Unsupported(f"{size} on {leaves}")
                mine.append(leaves[i])
                i += 1
            if math.prod(a.size for a in mine) != size:
                raise Unsupported(f"{size} on {leaves}")
            if indices is None:
                marks += [None] * len(mine)
            elif len(indices) == len(mine):
                marks += indices
            elif len(indices) == 1 and indices[0] >= 0:  # a constant over several leaves
                marks += mixed_radix(indices[0], [a.size for a in mine])
            elif not mine and size == 1:
                continue
            else:
                raise Unsupported(f"{len(indices)} digits on {mine}")
        return marks


def _step(run: Run) -> int:
    return run.stride if run.count > 1 else 1
