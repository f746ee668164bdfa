"""Meshes: ours, JAX's without devices, and JAX's of host devices."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
from jax.sharding import AbstractMesh, AxisType

import jax
from trainverify.graph.mesh import Mesh
from trainverify.translate.targets import CaptureError

T = TypeVar("T")


def our_mesh(mesh: Any) -> Mesh:
    if isinstance(mesh, Mesh):
        return mesh
    return Mesh(dict(mesh) if isinstance(mesh, Mapping) else dict(mesh.shape))


def plain(mesh: Mesh) -> Mesh:
    """The same with names that layouts can be written with: "data-parallel" is data_parallel."""
    found: list[str] = []
    for name in mesh.names:
        word = re.sub(r"\W", "_", name)
        word = word if word.isidentifier() else f"axis_{word}"
        others = {*found, *(n for n in mesh.names if n != name)}
        found.append(next(w for w in itertools.chain((word,), (f"{word}_{k}" for k in itertools.count())) if w not in others))
    return Mesh(tuple(zip(found, (size for _, size in mesh.axes), strict=True)))


def abstract(mesh: Mesh) -> AbstractMesh:
    """A mesh without devices."""
    return AbstractMesh(tuple(n for _, n in mesh.axes), mesh.names, axis_types=(AxisType.Auto,) * len(mesh.axes))


def real_mesh(mesh: Mesh) -> jax.sharding.Mesh:
    """The mesh of host devices."""
    if len(jax.devices()) < mesh.size:
        hint = f"XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size}"
        raise CaptureError(f"{mesh} needs {mesh.size} devices, there are {len(jax.devices())}: set {hint}")
    devices = np.array(jax.devices()[: mesh.size]).reshape([n for _, n in mesh.axes])
    return jax.sharding.Mesh(devices, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.axes))


def of_context() -> Mesh | None:
    """The mesh that `jax.set_mesh` has set."""
    found = jax.sharding.get_abstract_mesh()
    return None if found.empty else our_mesh(found)


def without() -> AbstractContextManager[Any]:
    """No mesh of the context: what is lowered here has meshes of its own."""
    nothing: AbstractContextManager[Any] = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    return nothing


def within(mesh: Mesh | None, real: bool, run: Callable[[], T]) -> T:
    """What runs only where the context has a mesh gets this one; if that does not help, the error is that without it."""
    try:
        return run()
    except CaptureError:
        if mesh is None or of_context() is not None:
            raise
        with contextlib.suppress(CaptureError), jax.set_mesh(real_mesh(mesh)) if real else jax.sharding.use_abstract_mesh(abstract(mesh)):
            return run()
        raise


__all__ = ["abstract", "of_context", "our_mesh", "plain", "real_mesh", "within", "without"]
