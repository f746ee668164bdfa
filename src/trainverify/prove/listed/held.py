"""What ranks hold by lineage, block by block. Trusted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from trainverify.axes.listed import Sealed
from trainverify.axes.structure import Axis
from trainverify.graph.lineage import Layout, Part
from trainverify.prove.algebra.folding import Instance
from trainverify.prove.algebra.held import Held
from trainverify.prove.algebra.places import Value
from trainverify.prove.algebra.ranks import Ranks
from trainverify.prove.algebra.terms import Unsupported, scale
from trainverify.prove.algebra.values import Values, get
from trainverify.prove.listed.forms import ListedForms


class ListedHeld(Held):
    def __init__(self, ranks: Ranks, forms: ListedForms, logical: Values, local: Sequence[Values]):
        super().__init__(ranks, forms, logical)
        self.listed, self.local = forms, local
        self._at = {instance.rank: i for i, instance in enumerate(ranks.instances)}

    def _filled(self, lay: Layout, instance: Instance, unit: int) -> Value:
        total: Value = {key: {} for key in self.forms.grid(self.system.unit_scopes[unit].dims[lay.local]).blocks()}
        for part in self._parts(lay, instance):
            whole, local = self._part_dims(part, lay, unit)
            held = self._regions(part, local)
            value = self._of_logical(part, lay, whole, held)
            for d, (at, run) in enumerate(zip(part.local, part.logical, strict=True)):
                dims = [*local[:d], *held[d:]]
                value = self.listed.written(value, dims, [*local[: d + 1], *held[d + 1 :]], d, at + np.arange(run.size))
            total = {key: self.kernel.add(p, value[key]) for key, p in total.items()}
        return total

    def expected(self, lay: Layout, instance: Instance, unit: int, local: Value) -> Iterator[tuple[Value, Value]]:
        for part in lay.parts(self.system.plan.mesh, instance.rank, self._shape(lay)):
            if part.padding:
                continue
            whole, dims = self._part_dims(part, lay, unit)
            held = self._regions(part, dims)
            got = self._of_local(part, dims, held, local)
            if part.partial is not None:
                got = self._added(lay, part, part.partial, held, got)
            yield got, self._of_logical(part, lay, whole, held)

    def _padding(self, part: Part, lay: Layout, unit: int, local: Value) -> Value:
        dims = list(self.system.unit_scopes[unit].dims[lay.local])
        dims = [self.system.inference.axes.product(dims)] if part.flat else dims
        return self._of_local(part, dims, self._regions(part, dims), local)

    def _regions(self, part: Part, local: Sequence[Axis]) -> list[Axis]:
        try:
            return super()._regions(part, local)
        except Sealed as error:
            raise Unsupported(str(error)) from error

    def _shape(self, lay: Layout) -> tuple[int, ...]:
        return self.system.logical.tensors[lay.logical].shape

    def _of_logical(self, part: Part, lay: Layout, whole: list[Axis], held: list[Axis]) -> Value:
        """What a part holds of the logical tensor."""
        value = get(self.logical, lay.logical)
        for d, run in enumerate(part.logical):
            dims = [*held[:d], *whole[d:]]
            value = self.listed.chosen(value, dims, [*held[: d + 1], *whole[d + 1 :]], d, run.positions())
        return value

    def _of_local(self, part: Part, local: list[Axis], held: list[Axis], value: Value) -> Value:
        """The region of the local tensor where a part lies."""
        for d, (at, run) in enumerate(zip(part.local, part.logical, strict=True)):
            dims = [*held[:d], *local[d:]]
            value = self.listed.chosen(value, dims, [*held[: d + 1], *local[d + 1 :]], d, at + np.arange(run.size))
        return value

    def _added(self, lay: Layout, part: Part, share: tuple[str, int, int], held: list[Axis], got: Value) -> Value:
        """The sum of what all ranks hold of a value that is shared out."""
        mesh = self.system.plan.mesh
        kind, share_index, count = share
        found = {share_index: got}
        for rank in lay.holders(mesh):
            for p in lay.parts(mesh, rank, self._shape(lay)):
                if p.partial is not None and p.logical == part.logical and p.flat == part.flat and p.partial[1] not in found:
                    i = self._at[rank]
                    _, local = self._part_dims(p, lay, self.ranks.unit(i))
                    regions = self._regions(p, local)
                    value = self._of_local(p, local, regions, get(self.local[i], lay.local))
                    found[p.partial[1]] = self.listed.viewed(value, regions, held)
        if set(found) != set(range(count)):
            raise Unsupported(f"a share of {lay} that no rank holds")
        k = self.kernel
        factor = Fraction(1, count) if kind == "avg" else 1
        if any(k.wild(p) for v in found.values() for p in v.values()):
            raise Unsupported("summands that may have no value")
        return {key: k.settle(scale(k.add(*(v[key] for v in found.values())), factor)) for key in got}
