"""Names that say nothing: mesh axes that are called as our own dimensions, containers of another type, metrics whose paths read alike."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj
from jax import lax

ARGS = ({"w": tvj.Reals((3, 5))}, tvj.Reals((8, 3)))


def loss(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w) ** 2)


def reference(p: Any, x: Any) -> Any:
    return {"w": p["w"] * 0.5}, loss(p["w"], x)


def on(axes: tuple[str, str], over: Any) -> Any:
    """Rows are cut by both axes, the loss is the mean over some."""

    def made(mesh: Any) -> Any:
        def step(p: Any, x: Any) -> Any:
            return {"w": p["w"] * 0.5}, lax.pmean(loss(p["w"], x), over)

        return jax.shard_map(step, mesh=mesh, in_specs=(P(), P(axes)), out_specs=(P(), P()), check_vma=False)

    return made


@pytest.mark.parametrize("axes", [("n1", "n0"), ("n0", "n1"), ("n0", "n_0"), ("dp", "n1")])
def test_mesh_axes_with_names_of_dimensions(axes: tuple[str, str]) -> None:
    """PROVED: the mean over all ranks; REFUTED: over some."""
    mesh = dict.fromkeys(axes, 2)
    assert tvj.verify(reference, on(axes, axes), ARGS, mesh, points=1).verdict == "PROVED"
    assert tvj.verify(reference, on(axes, axes[0]), ARGS, mesh, points=1).verdict == "REFUTED"
