"""What a batch holds, and how ranks cut it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from trainverify.graph.lineage import Form, Layout, Placement, layout
from trainverify.graph.mesh import Mesh
from trainverify.graph.program import Domain
from trainverify.translate.pieces import Range, united

Spelling = str | Mapping[str, Placement] | Form


@dataclass(frozen=True)
class Ids:
    """Integers in [0, below), or `ignore`: tokens and labels. `cut` says how the tensor lies on the mesh: `"(dp b) s"`."""

    shape: tuple[int, ...]
    cut: Spelling | None = None
    below: int = 2
    ignore: int | None = None
    dtype: str = "int64"

    @property
    def domain(self) -> Domain | None:
        return Domain("ids", self.below, self.ignore)

    @property
    def spread(self) -> Range:
        """Where the integers lie."""
        return united(((0, self.below - 1), *(() if self.ignore is None else ((self.ignore, self.ignore),))))


@dataclass(frozen=True)
class Reals:
    """Real numbers."""

    shape: tuple[int, ...]
    cut: Spelling | None = None
    dtype: str = "float32"
    kind: Literal["any", "nonnegative", "positive", "indicator"] = "any"

    @property
    def domain(self) -> Domain | None:
        return None if self.kind == "any" else Domain(self.kind)


@dataclass(frozen=True)
class Flags:
    """Booleans."""

    shape: tuple[int, ...]
    cut: Spelling | None = None
    dtype: str = "bool"

    @property
    def domain(self) -> Domain | None:
        return None


Input = Ids | Reals | Flags
Batch = Mapping[str, Input]


def with_rows(batch: Batch, rows: int) -> Batch:
    """The same batch with another number of rows: the first dimension of its first tensor, wherever others begin with it too."""
    now = next((s.shape[0] for s in batch.values() if s.shape), None)
    return {n: replace(s, shape=(rows, *s.shape[1:])) if s.shape and s.shape[0] == now else s for n, s in batch.items()}


def lies(name: str, spec: Input) -> Layout:
    """How an input lives on the mesh; whole on every rank unless it says otherwise."""
    return layout(name, spec.cut if spec.cut is not None else {})


def local_shape(name: str, spec: Input, mesh: Mesh, rank: int) -> tuple[int, ...]:
    parts = lies(name, spec).parts(mesh, rank, spec.shape)
    if len(parts) != 1:
        raise ValueError(f"{name}: a batch tensor is one block on every rank")
    return tuple(run.size for run in parts[0].logical)
