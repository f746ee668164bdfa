"""Compiling a step for host devices, with XLA's program after SPMD partitioning and how arguments and results lie."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import jax
from trainverify.graph.mesh import Mesh
from trainverify.jax.hlo.text import Module, parse
from trainverify.jax.inputs import shape_of
from trainverify.jax.meshes import real_mesh
from trainverify.jax.places import Spec
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
    inputs = tuple(spec_on_devices(s, x.shape, mesh) for s, x in zip(given, leaves, strict=True))
    return Partitioned(module, inputs, tuple(spec_on_devices(s, x.shape, mesh) for s, x in zip(made, out, strict=True)))


def spec_on_devices(sharding: Any, shape: tuple[int, ...], mesh: Mesh) -> Spec:
    """The mesh axes that cut each dimension, read off what every device holds: XLA names no axes."""
    held = sharding.devices_indices_map(shape)
    if [d.id for d in held] != [d.id for d in real_mesh(mesh).devices.flat]:
        raise CaptureError(f"{sharding} has its devices in another order than {mesh}")
    axes = [(name, size) for name, size in mesh.axes if size > 1]
    at = np.array(list(np.ndindex(*(size for _, size in axes)))).reshape(mesh.size, len(axes))
    found = []
    for dim, size in enumerate(shape):
        starts = np.array([block[dim].indices(size)[0] for block in held.values()])
        tuples = (t for n in range(len(axes) + 1) for t in itertools.permutations(range(len(axes)), n))
        cut = next((t for t in tuples if np.array_equal(_starts(at, [axes[a][1] for a in t], t, size), starts)), None)
        if cut is None:
            raise CaptureError(f"{sharding} cuts dimension {dim} of {shape} along no axes of {mesh}")
        found.append(tuple(axes[a][0] for a in cut))
    return tuple(found)


def _starts(at: np.ndarray, sizes: Sequence[int], axes: Sequence[int], size: int) -> np.ndarray:
    """Where each device's block begins if a dimension is cut along these axes, the last one varying fastest."""
    place = np.zeros(len(at), dtype=int)
    for axis, n in zip(axes, sizes, strict=True):
        place = place * n + at[:, axis]
    return place * (size // int(np.prod(sizes, dtype=int)))


__all__ = ["Partitioned", "partitioned", "spec_on_devices"]
