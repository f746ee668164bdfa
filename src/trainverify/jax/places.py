"""Arrays that a mesh holds in shares: how they are cut, brought together, and cut in another way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainverify.graph.lineage import Layout, Pattern
from trainverify.graph.mesh import Mesh
from trainverify.graph.types import TensorType
from trainverify.jax.emit import RankEmitter
from trainverify.jax.mappings.communication import count, gathered, groups, position
from trainverify.jax.mappings.shaping import sliced
from trainverify.jax.meshes import plain
from trainverify.jax.values import Grid, Number, Opaque, Table, Value
from trainverify.translate.emit import Unmapped

Spec = tuple[tuple[str, ...], ...]  # the mesh axes that cut every dimension, the first slowest


@dataclass(frozen=True)
class Sharded:
    """A whole array of which every rank holds a share."""

    local: Value
    spec: Spec
    shape: tuple[int, ...]  # of the whole
    checked: bool = True  # whether ranks that hold the same share are known to hold the same values


@dataclass(frozen=True)
class Free:
    """An argument that nobody has used yet: its first use says how it lies."""

    name: str
    type: TensorType


def spec_of(partition: Any, rank: int, mesh: Mesh) -> Spec:
    """A PartitionSpec with one entry for each dimension."""
    entries = list(partition) + [None] * (rank - len(partition))
    if len(entries) != rank:
        raise Unmapped(f"{partition} for {rank} dimensions")
    found = []
    for entry in entries:
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        if any(n not in mesh.names for n in names):
            raise Unmapped(f"{partition} on {mesh}")
        found.append(tuple(n for n in names if mesh.length(n) > 1))
    return tuple(found)


def local_shape(shape: Sequence[int], spec: Spec, mesh: Mesh) -> tuple[int, ...]:
    for n, axes in zip(shape, spec, strict=True):
        if n % count(mesh, axes):
            raise Unmapped(f"size {n} is not divisible by {' x '.join(axes)}")
    return tuple(n // count(mesh, axes) for n, axes in zip(shape, spec, strict=True))


def layout(logical: str, local: str, spec: Spec, mesh: Mesh) -> Layout:
    """The same in our notation: `"(dp n0) n1"`, with names that no mesh axis has."""
    names = dict(zip(mesh.names, plain(mesh).names, strict=True))
    stem = "n"
    while any(f"{stem}{d}" in names.values() for d in range(len(spec))):
        stem += "_"
    dims = [f"({' '.join((*map(names.__getitem__, axes), f'{stem}{d}'))})" if axes else f"{stem}{d}" for d, axes in enumerate(spec)]
    return Layout(logical, local, Pattern(" ".join(dims)))


def share(e: RankEmitter, whole: Value, spec: Spec) -> Value:
    """A rank's part of an array that all ranks have."""
    shape = shape_of(e, whole)
    sizes = local_shape(shape, spec, e.mesh)
    start: list[Any] = []
    for axes, n in zip(spec, sizes, strict=True):
        at = np.array([position(e.mesh, r, axes) * n for r in e.ranks], np.int64)
        start.append(int(at[0]) if (at == at[0]).all() else at)
    return sliced(e, whole, start, [p + n for p, n in zip(start, sizes, strict=True)], (1,) * len(sizes))


def whole(e: RankEmitter, value: Sharded, trusted: bool = False) -> Value:
    """The array itself, on every rank. Of replicas that may differ, which of them it is made from is XLA's choice: there is no such array,
    unless all ranks' versions of it are compared (`trusted`)."""
    found = value.local
    if any(value.spec) and not value.checked and not trusted:
        raise Unmapped("replicas that nothing compares are taken for one array: results of a shard_map with check_vma=False")
    if isinstance(found, Number) and len(e.ranks) == e.mesh.size:  # all ranks run this program
        return Number(found.value, value.shape, found.dtype)
    for d, axes in enumerate(value.spec):
        if axes:
            names, size = groups(e, axes)
            found = gathered(e, e.tensor(found), names, size, d)
    return found


def shape_of(e: RankEmitter, value: Value) -> tuple[int, ...]:
    match value:
        case str():
            return e.shape(value)
        case Number() | Grid() | Table():
            return value.shape
        case Opaque():
            raise Unmapped(value.reason)


def as_sharded(e: RankEmitter, value: Value | Sharded, spec: Spec, trusted: bool = False) -> Value:
    """A rank's share in the given cut, of a value in any."""
    if isinstance(value, Opaque):
        return value
    if not isinstance(value, Sharded):
        return share(e, value, spec)
    if value.spec == spec:
        return value.local
    if not value.checked and not trusted:
        raise Unmapped("replicas that nothing compares are cut in another way: results of a shard_map with check_vma=False")
    return share(e, whole(e, value, trusted), spec)


__all__ = ["Free", "Sharded", "Spec", "as_sharded", "layout", "local_shape", "share", "spec_of", "whole"]
