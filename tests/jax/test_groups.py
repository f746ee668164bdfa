"""Groups by all their members: another one with the same first members is another group."""

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
from trainverify.translate.groups import bind, joined

ARGS = ({"w": tvj.Reals((8,))}, tvj.Reals((8, 3)))


def reference(params: Any, x: Any) -> Any:
    return params, jnp.sum(jnp.sum(x, 1) * params["w"])


def gathering(first: list[int], second: list[int]) -> Callable[..., Any]:
    """Every rank has two rows. Both gathers bring all eight together, in the order of their group."""

    def distributed(mesh: Any) -> Any:
        def step(params: Any, x: Any) -> Any:
            rows = jnp.sum(x, 1)
            a = lax.all_gather(rows, "dp", tiled=True, axis_index_groups=[first])
            b = lax.all_gather(rows, "dp", tiled=True, axis_index_groups=[second])
            return params, jnp.sum((a + b) / 2 * params["w"])

        return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()), check_vma=False)

    return distributed


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3], "PROVED"),
        ([0, 1, 3, 2], [0, 1, 2, 3], "REFUTED"),
        ([0, 1, 2, 3], [0, 1, 3, 2], "REFUTED"),
    ],
)
def test_groups_with_the_same_first_members(first: list[int], second: list[int], verdict: str) -> None:
    report = tvj.verify(reference, gathering(first, second), ARGS, {"dp": 4})
    assert report.verdict == verdict, report.reason


@pytest.mark.parametrize(("parts", "verdict"), [([[0, 1]], "PROVED"), ([[0], [1]], "REFUTED")])
def test_groups_of_one_rank_beside_the_whole_axis(parts: list[list[int]], verdict: str) -> None:
    def distributed(mesh: Any) -> Any:
        def step(params: Any, x: Any) -> Any:
            whole = lax.pmean(jnp.sum(x), "dp")
            return params, lax.psum(jnp.sum(jnp.sum(x, 1) * params["w"]) + whole, "dp", axis_index_groups=parts) - 2 * whole

        return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()), check_vma=False)

    def alone(params: Any, x: Any) -> Any:
        return params, jnp.sum(jnp.sum(x, 1).reshape(2, 4) * params["w"])

    report = tvj.verify(alone, distributed, ({"w": tvj.Reals((4,))}, tvj.Reals((8, 3))), {"dp": 2})
    assert report.verdict == verdict, report.reason


def test_a_name_bound_twice_is_an_internal_error() -> None:
    groups: dict[str, tuple[int, ...]] = {}
    assert bind(groups, "dp", (0, 1)) == bind(groups, "dp", (0, 1)) == "dp"
    with pytest.raises(AssertionError, match="bound twice"):
        bind(groups, "dp", (1, 0))
    assert joined([groups, {"tp": (2, 3)}]) == {"dp": (0, 1), "tp": (2, 3)}
    with pytest.raises(AssertionError, match="bound twice"):
        joined([groups, {"dp": (0, 1, 2)}])


@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize(("sender", "verdict"), [(1, "PROVED"), (2, "REFUTED")])
def test_a_permutation_over_axes_in_another_order(axes: tuple[str, str], sender: int, verdict: str) -> None:
    """JAX numbers the ranks of a permutation by the mesh, whichever order is given; other collectives number by that order."""

    def distributed(mesh: Any) -> Any:
        def step(params: Any, x: Any) -> Any:
            rows = lax.ppermute(jnp.sum(x, 1), axes, [(sender, 0)])
            kept = lax.psum(jnp.sum(rows * lax.dynamic_slice_in_dim(params["w"], 0, 2)), axes)
            return params, kept

        return jax.shard_map(step, mesh=mesh, in_specs=(P(), P(("a", "b"))), out_specs=(P(), P()), check_vma=False)

    def one(params: Any, x: Any) -> Any:
        return params, jnp.sum(jnp.sum(x, 1).reshape(4, 2)[1] * params["w"][:2])

    report = tvj.verify(one, distributed, ARGS, {"a": 2, "b": 2})
    assert report.verdict == verdict, report.reason
