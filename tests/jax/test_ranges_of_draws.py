"""Draws have a range: uniform numbers are at least 0 and below 1, and what is only true or false beyond that is no difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj

Draw = Callable[[Any], Any]
KEY = jax.eval_shape(lambda: jax.random.key(0))
ARGS = ({"z": tvj.Reals((3,))}, KEY, tvj.Reals((4, 5)))


def verdict(one: Draw, many: Draw) -> str:
    """Of rows that are multiplied by what is drawn."""

    def step(draw: Draw) -> Any:
        return lambda p, key, x: ({"z": p["z"] * 0.5}, x * draw(key))

    def made(mesh: Any) -> Any:
        return jax.shard_map(step(many), mesh=mesh, in_specs=(P(), P(), P("d")), out_specs=(P(), P("d")), check_vma=False)

    return tvj.verify(step(one), made, ARGS, {"d": 2}, roles=("parameters", "metric")).verdict


def ones(key: Any) -> Any:
    return jnp.ones((5,))


def uniform(key: Any) -> Any:
    return jax.random.uniform(key, (5,))


def between(key: Any) -> Any:
    return jax.random.uniform(key, (5,), minval=-1, maxval=2)


def truncated(key: Any) -> Any:
    return jax.random.truncated_normal(key, -2.0, 1.5, (5,))


def kept(share: float) -> Draw:
    return lambda key: jax.random.bernoulli(key, share, (5,)).astype(jnp.float32)


@pytest.mark.parametrize(
    ("one", "many"),
    [
        (kept(1.0), ones),
        (kept(0.0), lambda key: jnp.zeros((5,))),
        (lambda key: (uniform(key) < 1).astype(jnp.float32), ones),
        (lambda key: (between(key) <= 2).astype(jnp.float32), ones),
        (lambda key: jnp.minimum(uniform(key), 1.0), uniform),
        (lambda key: jax.nn.relu(1 - uniform(key)), lambda key: 1 - uniform(key)),
    ],
)
def test_comparisons_that_the_range_decides(one: Draw, many: Draw) -> None:
    """PROVED: the other side of the condition is beyond the range."""
    assert verdict(one, many) == "PROVED"


@pytest.mark.parametrize(
    ("one", "many"),
    [
        (lambda key: jnp.clip(uniform(key), 0, 1), uniform),
        (lambda key: (uniform(key) ** 2 < 1).astype(jnp.float32), ones),
        (lambda key: (jnp.floor(uniform(key)) < 1).astype(jnp.float32), ones),
        (lambda key: jnp.clip(truncated(key), -2, 1.5), truncated),
        (lambda key: jnp.abs(truncated(key) - 1.5), lambda key: 1.5 - truncated(key)),
    ],
)
def test_right_programs_that_rest_on_the_range(one: Draw, many: Draw) -> None:
    """PROVED or UNKNOWN: no number within the range shows a difference."""
    assert verdict(one, many) != "REFUTED"


@pytest.mark.parametrize(
    ("one", "many"),
    [
        (kept(0.9), ones),
        (kept(0.999), ones),
        (lambda key: (between(key) < 1.75).astype(jnp.float32), ones),
        (lambda key: jnp.minimum(uniform(key), 0.99), uniform),
        (lambda key: jnp.clip(truncated(key), -2, 1.25), truncated),
        (lambda key: jnp.abs(truncated(key)), truncated),
    ],
)
def test_wrong_programs_within_the_range(one: Draw, many: Draw) -> None:
    """REFUTED: some numbers that are drawn are on the other side."""
    assert verdict(one, many) == "REFUTED"
