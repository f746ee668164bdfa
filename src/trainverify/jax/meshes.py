"""Meshes: ours, JAX's without devices, and JAX's of host devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType

import jax
from trainverify.graph.mesh import Mesh
from trainverify.translate.targets import CaptureError


def our_mesh(mesh: Any) -> Mesh:
    if isinstance(mesh, Mesh):
        return mesh
    return Mesh(dict(mesh) if isinstance(mesh, Mapping) else dict(mesh.shape))


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


__all__ = ["abstract", "our_mesh", "real_mesh"]
