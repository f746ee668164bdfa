"""Replicas that nothing compares: a result of a shard_map with check_vma=False that its out_specs call replicated.

What uses such a value outside of shard_map as one array takes the ranks' versions of it for equal. That they are is an output of its own
of the plan: on all of n ranks, the sum of the squares of n·x − Σ x, over the elements, is 0, as it is in the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from trainverify.graph.program import Op, Output, Program, attributes
from trainverify.graph.types import TensorType
from trainverify.jax.emit import RankEmitter
from trainverify.jax.mappings.communication import groups

_NAME: Final = "the difference of replicas, number "


def remember(e: RankEmitter, name: str, axes: Sequence[str]) -> None:
    """The ranks along these axes are to hold the same."""
    kept: list[tuple[str, tuple[str, ...]]] = e.kept.setdefault("replicas", [])
    if (name, tuple(axes)) not in kept:
        kept.append((name, tuple(axes)))


def differences(e: RankEmitter) -> Iterator[Output]:
    for n, (name, axes) in enumerate(e.kept.get("replicas", ())):
        x = name if e.kind(name) == "real" else e.cast(name, "f32")
        members, size = groups(e, axes)
        total = e.communicate("all_reduce", (x,), {"group": members}, e.tensors[x])
        gap = e.op("square", (e.op("sub", (e.op("mul", (x,), {"value": size}), str(total))),))
        yield Output(e.op("sum", (gap,), {"dim": tuple(range(len(e.shape(x))))}) if e.shape(x) else gap, "metric", f"{_NAME}{n}")


def with_none(logical: Program, plans: Sequence[Program]) -> Program:
    """The logical program, in which there are no replicas and no difference."""
    found = dict.fromkeys((str(o.of), p.tensors[o.tensor].dtype) for p in plans for o in p.outputs if is_difference(f"metric {o.of}"))
    if not found:
        return logical
    ops, tensors, outputs = list(logical.ops), dict(logical.tensors), list(logical.outputs)
    for of, dtype in found:
        tensors[of] = TensorType((), dtype)
        ops.append(Op("full", (), (of,), attributes({"shape": (), "value": 0, "dtype": dtype})))
        outputs.append(Output(of, "metric", of))
    return replace(logical, ops=tuple(ops), tensors=tensors, outputs=tuple(outputs))


def is_difference(obligation: str) -> bool:
    return _NAME in obligation


__all__ = ["differences", "is_difference", "remember", "with_none"]
