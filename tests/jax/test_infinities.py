"""Where −∞ may be: a maximum over a line in which something is not masked is a number, however the mask is spelled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import jax.numpy as jnp
import numpy as np
from running import run, translated

from jax import lax
from trainverify.jax.infinities import may_be_infinite
from trainverify.jax.values import Opaque

SCORES = np.linspace(-2, 2, 30, dtype=np.float32).reshape(2, 3, 5)
ONES = np.ones((3, 5))
KEPT = np.tril(ONES, 1) > 0


RIGHT: dict[str, Callable[[Any], Any]] = {
    "kept": lambda s: jnp.where(jnp.tril(jnp.ones((3, 5), bool)), s, -jnp.inf).max(-1),
    "not kept": lambda s: jnp.where(~jnp.tril(jnp.ones((3, 5), bool)), -jnp.inf, s).max(-1),
    "numbers": lambda s: jnp.where(jnp.tril(jnp.ones((3, 5))) == 0, -jnp.inf, s).max(-1),
    "added": lambda s: (s + jnp.where(jnp.triu(jnp.ones((3, 5)), 1) > 0, -jnp.inf, 0.0)).max(-1),
    "positions": lambda s: jnp.where(lax.broadcasted_iota(int, (3, 5), 0) < lax.broadcasted_iota(int, (3, 5), 1), -jnp.inf, s).max(-1),
    "closed over": lambda s: jnp.where(KEPT, s, -jnp.inf).max(-1),
    "closed over, added": lambda s: (s + np.where(KEPT, 0, -np.inf).astype(np.float32)).max((0, 2)),
    "repeated": lambda s: jnp.where(jnp.broadcast_to(jnp.tril(jnp.ones((3, 5), bool))[None], (2, 3, 5)), s, -jnp.inf).max(2),
}
WRONG: dict[str, Callable[[Any], Any]] = {
    "a query without a key": lambda s: jnp.where(jnp.tril(jnp.ones((3, 5), bool), -1), s, -jnp.inf).max(-1),
    "the other answer": lambda s: jnp.where(jnp.tril(jnp.ones((3, 5), bool), -1), -jnp.inf, s).max(0),
    "another dimension": lambda s: jnp.where(jnp.tril(jnp.ones((3, 5), bool)), s, -jnp.inf).max(1),
    "a repeated dimension": lambda s: jnp.where(jnp.tril(jnp.ones((3, 5), bool)), s, -jnp.inf).max(0),
    "numbers": lambda s: jnp.where(jnp.tril(jnp.ones((3, 5)), -1) == 0, -jnp.inf, s).max(-1),
    "added": lambda s: (s + jnp.where(jnp.triu(jnp.ones((3, 5)), 0) > 0, -jnp.inf, 0.0)).max(-1),
    "closed over": lambda s: jnp.where(KEPT, s, -jnp.inf).max(1),
    "closed over, not kept": lambda s: jnp.where(np.tril(ONES, 3) > 0, -jnp.inf, s).max(-1),
    "closed over, added": lambda s: (s + np.where(KEPT, 0, -np.inf).astype(np.float32)).max(1),
    "both": lambda s: (jnp.where(KEPT, s, -jnp.inf) + np.where(KEPT, -np.inf, 0).astype(np.float32)).max(-1),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_number(name: str) -> None:
    e, _, found = translated(RIGHT[name], SCORES)
    assert not may_be_infinite(e, found[0])
    assert np.isfinite(run(RIGHT[name], SCORES)[0][0]).all()


@pytest.mark.parametrize("name", WRONG)
def test_minus_infinity(name: str) -> None:
    e, _, found = translated(WRONG[name], SCORES)
    assert -np.inf in may_be_infinite(e, found[0])
    assert not np.isfinite(WRONG[name](SCORES)).all()


def test_an_array_that_is_no_number_is_not_followed() -> None:
    _, _, found = translated(lambda s: s + np.array([1, np.nan, 2, 3, 4], np.float32), SCORES)
    assert "no numbers" in found[0].reason


INFINITE = np.float32(-np.inf)
NONE = np.ones((2, 0), np.float32)


@pytest.mark.parametrize(
    "fn",
    [
        lambda s: jnp.where(lax.square(jnp.asarray(INFINITE)) > 5, s, 0),
        lambda s: jnp.where(lax.pow(jnp.asarray(INFINITE), np.float32(2)) > 5, s, 0),
        lambda s: jnp.where(lax.pow(jnp.asarray(INFINITE), np.float32(-2)) < 1, s, 0),
        lambda s: s + jnp.sum(jnp.full((2, 0), INFINITE)),
        lambda s: s * jnp.any(jnp.asarray(NONE) > 0, 1).sum() + jnp.all(jnp.asarray(NONE) < 0, 1).sum(),
        lambda s: s + jnp.any(jnp.full((2, 0), True), 1).sum() + jnp.all(jnp.full((2, 0), False), 1).sum(),
    ],
)
def test_infinite_literals_and_reductions_of_nothing(fn: Callable[[Any], Any]) -> None:
    np.testing.assert_allclose(run(fn, SCORES)[0][0], fn(jnp.asarray(SCORES)), rtol=1e-6)


@pytest.mark.parametrize("fn", [lambda s: s + jnp.exp(jnp.max(jnp.full((2, 0), 1.0), 1, initial=-jnp.inf)).sum(), lambda s: s + NONE.size])
def test_the_largest_of_nothing(fn: Callable[[Any], Any]) -> None:
    """It is no number of the array; the size of nothing is 0."""
    _, i, found = translated(fn, SCORES)
    assert isinstance(found[0], Opaque) == ("reduce_max" in i.calls)
    assert not isinstance(found[0], Opaque) or "nothing" in found[0].reason
