"""Facts about what other ranks send come from the collective that meets: the one with the same members, in the order of that group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj
from jax import lax

MESH = {"a": 2, "b": 2}


def on_mesh(step: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda mesh: jax.shard_map(step, mesh=mesh, in_specs=(P(), P("a")), out_specs=(P(), P()), check_vma=False)


def gathered(x: Any) -> Any:
    return lax.all_gather(x, "a")


def swapped(x: Any) -> Any:
    """Both rows, by a message each way."""
    other = lax.ppermute(x, "a", [(0, 1), (1, 0)])
    return jnp.where(lax.axis_index("a") == 0, jnp.stack([x, other]), jnp.stack([other, x]))


def over_b(x: Any) -> Any:
    """The same values, by way of a collective over the other axis."""
    return lax.all_gather(x, "b")[0]


def turned(x: Any) -> Any:
    return lax.ppermute(x, "b", [(0, 1), (1, 0)])


WAYS = pytest.mark.parametrize(("extra", "common"), [(over_b, gathered), (turned, swapped)], ids=["collectives", "messages"])


@WAYS
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("by", "verdict"), [(10, "PROVED"), (20, "UNKNOWN")])
def test_bounds_of_integers(extra: Any, common: Any, first: bool, by: int, verdict: str) -> None:
    """Ranks with a = 0, or those with a = 1, communicate once more over b. Twice 20 · 6 does not fit in 8 bits."""

    def one(w: Any, ids: Any) -> Any:
        rows = ids.astype(jnp.float32).reshape(2, 3) * jnp.array([[1.0], [by]])
        return w, jnp.sum((rows + rows) * w)

    def step(w: Any, ids: Any) -> Any:
        a, small = lax.axis_index("a"), ids.astype(jnp.int8)
        small = lax.cond((a == 0) == first, lambda: extra(small), lambda: small)
        rows = common(lax.cond(a == 0, lambda: small, lambda: small * np.int8(by)))
        loss = lax.cond(a == 0, lambda: jnp.sum((rows + rows).astype(jnp.float32) * w), lambda: 0.0)
        return w, lax.psum(loss, "a")

    args = (tvj.Reals((2, 3)), tvj.Ids((6,), 7))
    assert tvj.verify(one, on_mesh(step), args, MESH, points=1).verdict == verdict


@WAYS
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("fill", "verdict"), [(0.0, "PROVED"), (-np.inf, "REFUTED")])
def test_masks_of_infinity(extra: Any, common: Any, first: bool, fill: float, verdict: str) -> None:
    """The difference of an infinite number and itself is none."""

    def one(w: Any, x: Any) -> Any:
        return w, jnp.sum(x * w)

    def step(w: Any, x: Any) -> Any:
        a = lax.axis_index("a")
        y = lax.cond((a == 0) == first, lambda: extra(x), lambda: x)
        rows = common(lax.cond(a == 0, lambda: y, lambda: jnp.where(jnp.arange(3) < 2, y, fill)))
        share = lax.dynamic_slice_in_dim(w, a * 3, 3)
        loss = jnp.sum(x * share) + lax.cond(a == 0, lambda: jnp.sum(rows - rows), lambda: 0.0)
        return w, lax.psum(loss, "a")

    args = (tvj.Reals((6,)), tvj.Reals((6,)))
    assert tvj.verify(one, on_mesh(step), args, MESH, points=1).verdict == verdict


@WAYS
@pytest.mark.parametrize(("by", "verdict"), [(lambda x: jnp.exp(x), "PROVED"), (lambda x: x, "UNKNOWN")], ids=["exp", "x"])
def test_finite_numbers_of_other_programs(extra: Any, common: Any, by: Callable[[Any], Any], verdict: str) -> None:
    """Ranks with a = 0 ask whether the quotients of those with a = 1 are finite. They need not be where a divisor may be 0."""

    def one(w: Any, x: Any) -> Any:
        return w, jnp.sum(x * w) + 1 + jnp.sum(1 / by(x[3:])) - jnp.sum(1 / by(x[3:]))

    def step(w: Any, x: Any) -> Any:
        a = lax.axis_index("a")
        rows = common(lax.cond(a == 0, lambda: extra(x), lambda: 1 / by(x)))
        share = lax.dynamic_slice_in_dim(w, a * 3, 3)
        loss = jnp.sum(x * share) + lax.cond(a == 0, lambda: jnp.where(jnp.isfinite(rows).all(), 1.0, 0.0), lambda: 0.0)
        return w, lax.psum(loss, "a")

    args = (tvj.Reals((6,)), tvj.Reals((6,)))
    assert tvj.verify(one, on_mesh(step), args, MESH, points=1).verdict == verdict
