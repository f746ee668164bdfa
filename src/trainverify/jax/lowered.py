"""Collectives as JAX lowers them: who takes part, in which order, along which dimension. Needs no devices.

A collective cannot be run on one device. What it does follows from what JAX makes of it for a mesh: groups of devices in their order, or
pairs that send and receive. The translation of every distinct collective is compared with that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jax.sharding import PartitionSpec

import jax
from trainverify.graph.mesh import Mesh
from trainverify.graph.program import Op
from trainverify.graph.types import TensorType
from trainverify.jax.emit import RankEmitter
from trainverify.jax.mappings.communication import axes_of
from trainverify.jax.meshes import abstract, without
from trainverify.jax.values import DTYPES
from trainverify.translate.emit import Unmapped

_DIMENSIONS: Final = {"all_gather_dim": "dim", "scatter_dimension": "dim", "split_dimension": "split_dim", "concat_dimension": "concat_dim"}
_OURS: Final = {
    "stablehlo.all_reduce": "all_reduce",
    "stablehlo.all_gather": "all_gather",
    "stablehlo.reduce_scatter": "reduce_scatter",
    "stablehlo.all_to_all": "all_to_all",
}
_JAX: Final = {ours: np.dtype(theirs) for theirs, ours in DTYPES.items()}


@dataclass(frozen=True)
class Lowered:
    """One collective of JAX's program."""

    name: str
    groups: Mapping[int, tuple[int, ...]]  # of every rank, in its order
    dimensions: Mapping[str, int]
    reduction: str = ""
    pairs: tuple[tuple[int, int], ...] = ()


_KNOWN: Final[dict[Any, tuple[Lowered, ...] | str]] = {}


def lowered(primitive: Any, params: Mapping[str, Any], types: Sequence[TensorType], mesh: Mesh) -> tuple[Lowered, ...]:
    """What JAX makes of a collective on a mesh."""
    key = primitive.name, repr(sorted(params.items())), tuple(types), mesh
    if key not in _KNOWN:
        try:
            with without():
                _KNOWN[key] = tuple(_lower(primitive, params, types, mesh))
        except Exception as error:  # whatever JAX raises
            _KNOWN[key] = f"JAX does not lower it alone: {type(error).__name__}"
    found = _KNOWN[key]
    if isinstance(found, str):
        raise Unmapped(found)
    return found


def _lower(primitive: Any, params: Mapping[str, Any], types: Sequence[TensorType], mesh: Mesh) -> Iterator[Lowered]:
    invariant = primitive.name.endswith("_invariant")
    axes = axes_of(params.get("axes", params.get("axis_name")))

    def call(*given: Any) -> Any:
        varying = [jax.lax.pcast(x, axes, to="varying") for x in given] if invariant else given
        return primitive.bind(*varying, **params)

    plain = PartitionSpec()
    mapped = jax.shard_map(call, mesh=abstract(mesh), in_specs=(plain,) * len(types), out_specs=plain, check_vma=invariant)
    shapes = [jax.ShapeDtypeStruct(t.shape, _JAX[t.dtype]) for t in types]
    module = jax.jit(mapped).trace(*shapes).lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo")
    for op in _inside(module.operation):
        attributes = {a: op.attributes[a] for a in op.attributes} if op.name in _OURS or op.name == "stablehlo.collective_permute" else {}
        if op.name in _OURS:
            groups = {r: row for row in map(tuple, np.array(attributes["replica_groups"]).tolist()) for r in row}
            dims = {_DIMENSIONS[n]: int(a.value) for n, a in attributes.items() if n in _DIMENSIONS}
            inner = [o.name for o in _inside(op) if o is not op and o.name.startswith("stablehlo.")]
            yield Lowered(_OURS[op.name], groups, dims, inner[0].removeprefix("stablehlo.") if inner else "")
        elif attributes:
            pairs = tuple((int(s), int(t)) for s, t in np.array(attributes["source_target_pairs"]))
            yield Lowered("ppermute", {}, {}, pairs=pairs)


def _inside(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for op in block:
                yield op.operation
                yield from _inside(op.operation)


_REDUCTIONS: Final = {"sum": "add", "max": "maximum", "min": "minimum", "": ""}


def check(e: RankEmitter, made: Sequence[Op], theirs: Callable[[], tuple[Lowered, ...]]) -> None:
    """Refuse collectives that are not translated to what JAX makes of them."""
    ours = [op for op in made if op.name in (*_OURS.values(), "send", "recv")]
    if not ours:
        return
    lowered = theirs()
    if any(op.name in ("send", "recv") for op in ours):
        (one,) = lowered
        _check_pairs(e, ours, dict(one.pairs))
        return
    if len(ours) > len(lowered):
        raise Unmapped(f"JAX makes {len(lowered)} collectives of it, for {len(ours)} here")
    for op in ours:
        if not any(_same(e, op, one) for one in lowered):
            raise Unmapped(f"JAX makes something else of it: {lowered[0]}")


def _of_rank(e: RankEmitter, value: Any, k: int) -> Any:
    column = e.column(value)
    return column[k if len(column) > 1 else 0]


def _same(e: RankEmitter, op: Op, one: Lowered) -> bool:
    if op.name != one.name or any(op.get(n, 0) != v for n, v in one.dimensions.items()):
        return False
    if op.name in ("all_reduce", "reduce_scatter") and one.reduction != _REDUCTIONS.get(str(op.get("op", "sum"))):
        return False
    return all(e.groups[str(_of_rank(e, op.get("group"), k))] == one.groups.get(r) for k, r in enumerate(e.ranks))


def _check_pairs(e: RankEmitter, ours: Sequence[Op], sends: Mapping[int, int]) -> None:
    receives = {t: s for s, t in sends.items()}
    for k, rank in enumerate(e.ranks):
        for op in ours:
            wanted = (sends if op.name == "send" else receives).get(rank)
            if _of_rank(e, op.get("peer"), k) != wanted:
                raise Unmapped(f"JAX sends between other ranks: {sorted(sends.items())}")


__all__ = ["Lowered", "check", "lowered"]
