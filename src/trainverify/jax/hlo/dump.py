"""Compiling a step for host devices, with XLA's program after SPMD partitioning and how arguments and results lie."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from trainverify.graph.mesh import Mesh
from trainverify.jax.hlo.text import Module, parse
from trainverify.jax.inputs import shape_of
from trainverify.jax.places import Spec, spec_of
from trainverify.translate.targets import CaptureError


@dataclass(frozen=True)
class Partitioned:
    """What every device runs."""

    module: Module
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]


def partitioned(step: Callable[..., Any], args: Sequence[Any], mesh: Mesh) -> Partitioned:
    """The partitioned program of a step whose arguments, or the step itself, say how arrays lie."""
    shapes = tuple(jax.tree_util.tree_map(shape_of, a) for a in args)
    jitted = step if hasattr(step, "lower") else jax.jit(step, keep_unused=True)
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "xla_dump_to": folder,
            "xla_dump_hlo_pass_re": "spmd.*",
            "xla_dump_hlo_as_text": True,
            "xla_dump_large_constants": True,
        }
        compiled = jitted.lower(*shapes).compile(compiler_options=options)
        found = sorted(Path(folder).glob("*after_spmd-partitioning*.txt"))
        if not found:
            raise CaptureError("XLA did not partition the step: nothing says how its arguments lie, or there is one device")
        module = parse(found[-1].read_text())
    leaves = jax.tree_util.tree_leaves(shapes)
    given, made = (jax.tree_util.tree_leaves(s) for s in (compiled.input_shardings[0], compiled.output_shardings))
    out = jax.tree_util.tree_leaves(jax.eval_shape(step, *shapes))
    if len(given) != len(leaves):
        raise CaptureError("XLA left out arguments that nothing uses: jit the step with keep_unused=True")
    inputs = tuple(_spec(s, len(x.shape), mesh) for s, x in zip(given, leaves, strict=True))
    return Partitioned(module, inputs, tuple(_spec(s, len(x.shape), mesh) for s, x in zip(made, out, strict=True)))


def _spec(sharding: Any, rank: int, mesh: Mesh) -> Spec:
    if getattr(sharding, "is_fully_replicated", False):
        return ((),) * rank
    if not isinstance(sharding, jax.sharding.NamedSharding):
        raise CaptureError(f"a sharding without names: {sharding}")
    return spec_of(sharding.spec, rank, mesh)


__all__ = ["Partitioned", "partitioned"]
