"""Collectives against what JAX lowers them to: a row with other members, another order or another dimension gives no verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj
from jax import lax
from trainverify.graph.types import TensorType
from trainverify.jax.mappings import MAPPINGS
from trainverify.jax.mappings.communication import axes_of, groups
from trainverify.jax.mappings.table import Arguments

ARGS = (tvj.Reals((8, 5)), tvj.Reals((8, 5)))
MESH = {"a": 2, "b": 2}


def step_of(send: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def distributed(mesh: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            return w, lax.psum(jnp.sum(send(x) * jnp.arange(5.0)), ("a", "b"))

        rows = P(("a", "b"))
        return jax.shard_map(step, mesh=mesh, in_specs=(rows, rows), out_specs=(rows, P()), check_vma=False)

    return distributed


def over(name: str, turned: bool, **attrs: Any) -> Callable[[Arguments], Any]:
    """A row that may take the axes in another order."""

    def row(a: Arguments) -> Any:
        axes = axes_of(a.params.get("axes", a.params.get("axis_name")))
        names, _ = groups(a.e, axes[::-1] if turned else axes)
        a.ignore(*a.params)
        return a.e.communicate(name, (a.tensor(0),), {"group": names, **attrs}, TensorType(a.shape, a.dtype))

    return row


GATHER = step_of(lambda x: lax.all_gather(x, ("a", "b"), tiled=True)[:2])
EXCHANGE = step_of(lambda x: lax.all_to_all(jnp.concatenate([x, x]), ("a", "b"), 0, 0, tiled=True))


@pytest.mark.parametrize(
    ("step", "primitive", "row", "refused"),
    [
        (GATHER, "all_gather", over("all_gather", False, dim=0), False),
        (GATHER, "all_gather", over("all_gather", True, dim=0), True),
        (EXCHANGE, "all_to_all", over("all_to_all", False, split_dim=0, concat_dim=0), False),
        (EXCHANGE, "all_to_all", over("all_to_all", True, split_dim=0, concat_dim=0), True),
        (EXCHANGE, "all_to_all", over("all_to_all", False, split_dim=0, concat_dim=1), True),
        (GATHER, "psum", over("all_reduce", False), False),
        (GATHER, "psum", over("all_reduce", False, op="max"), True),
    ],
)
def test_a_row_is_what_jax_lowers(
    monkeypatch: pytest.MonkeyPatch, step: Any, primitive: str, row: Callable[[Arguments], Any], refused: bool
) -> None:
    monkeypatch.setitem(MAPPINGS, primitive, row)
    made = tvj.pair(lambda w, x: (w, jnp.sum(x)), step, ARGS, MESH)
    assert any("JAX makes" in m.reason for p in made.parts for m in p.missing.values()) == refused
    assert bool(made.parts[1].unknown) == refused


@pytest.mark.parametrize(("axes", "verdict"), [(("a", "b"), "PROVED"), (("b", "a"), "PROVED"), (("b",), "REFUTED")])
def test_a_permutation_counts_along_the_mesh(axes: tuple[str, ...], verdict: str) -> None:
    """Positions of a permutation follow the mesh, whichever axis is named first."""

    def reference(w: Any, x: Any) -> Any:
        return w, jnp.sum(jnp.roll(x, 2, 0) * w)

    def distributed(mesh: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            ring = [(i, (i + 1) % 4) for i in range(4)] if len(axes) == 2 else [(0, 1), (1, 0)]
            return w, lax.psum(jnp.sum(lax.ppermute(x, axes, ring) * w), ("a", "b"))

        rows = P(("a", "b"))
        return jax.shard_map(step, mesh=mesh, in_specs=(rows, rows), out_specs=(rows, P()), check_vma=False)

    report = tvj.verify(reference, distributed, ARGS, MESH)
    assert report.verdict == verdict, report.reason


def test_a_mesh_with_its_axes_in_another_order() -> None:
    """No verdict: a permutation over several axes counts along the mesh that runs."""

    def distributed(mesh: Any) -> Any:
        turned = jax.sharding.AbstractMesh((2, 2), ("b", "a"))
        return jax.shard_map(lambda w, x: (w, lax.psum(jnp.sum(x), ("a", "b"))), mesh=turned, in_specs=(P(), P()), out_specs=(P(), P()))

    report = tvj.verify(lambda w, x: (w, 4 * jnp.sum(x)), distributed, ARGS, MESH)
    assert report.verdict == "UNKNOWN"
    assert "another order" in str(report.reason) or "not on" in str(report.reason)
