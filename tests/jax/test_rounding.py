"""Arithmetic is that of real numbers. Where rounding decides what a program does next there is no verdict."""

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

ARGS = (tvj.Reals((4,)), tvj.Reals((8, 4)), tvj.Ids((8,), 500))


def verdict_of(one: Callable[[Any], Any], many: Callable[[Any], Any]) -> str:
    """Of a step that adds the rows, each times what a function of its integer says."""

    def step(f: Callable[[Any], Any], add: Callable[[Any], Any]) -> Any:
        return lambda w, x, n: (w - 0.1 * add(jnp.sum(x * f(n)[:, None], 0)), add(jnp.sum(x @ w)))

    def distributed(mesh: Any) -> Any:
        local = step(many, lambda v: lax.psum(v, "dp"))
        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("dp"), P("dp")), out_specs=(P(), P()), check_vma=False)

    return tvj.verify(step(one, lambda v: v), distributed, ARGS, {"dp": 2}).verdict


@pytest.mark.parametrize(("dtype", "number", "verdict"), [(jnp.bfloat16, 300, "UNKNOWN"), (jnp.float32, 300, "PROVED")])
def test_integers_that_a_float_type_does_not_have(dtype: Any, number: int, verdict: str) -> None:
    """UNKNOWN: 301 is 300 as a bfloat16. PROVED: not as a float32."""
    assert verdict_of(lambda n: n == number, lambda n: n.astype(dtype) == number) == verdict


def test_such_integers_as_integers_again() -> None:
    """UNKNOWN: 257 comes back as 256."""
    assert verdict_of(lambda n: n + 1, lambda n: n.astype(jnp.bfloat16).astype(jnp.int32) + 1) == "UNKNOWN"
    assert verdict_of(lambda n: n % 100 < 50, lambda n: (n % 100).astype(jnp.bfloat16) < 50) == "PROVED"  # those below 100 are


def steps_up_to(limit: float, by: float) -> Any:
    """How often a number is added until a limit is reached."""

    def more(state: Any) -> Any:
        return state[0] + jnp.float32(by), state[1] + 1

    return lax.while_loop(lambda state: state[0] < jnp.float32(limit), more, (jnp.float32(0), 0))[1]


@pytest.mark.parametrize(("limit", "by", "verdict"), [(1.0, 0.1, "UNKNOWN"), (0.95, 0.1, "PROVED"), (1.0, 0.125, "PROVED")])
def test_a_loop_whose_end_rounding_decides(limit: float, by: float, verdict: str) -> None:
    """UNKNOWN: ten times 0.1 is 1.0000001 in 32 bits, and 0.9999999999999999 in 64. PROVED: far from the limit, or exact."""
    count = 8 if by == 0.125 else 10
    assert verdict_of(lambda n: jnp.full(n.shape, count), lambda n: jnp.full(n.shape, steps_up_to(limit, by))) == verdict


@pytest.mark.parametrize(
    ("one", "many", "verdict"),
    [
        (11, lambda: jnp.floor(jnp.float32(1.1) * 10), "UNKNOWN"),
        (12, lambda: jnp.ceil(jnp.float32(1.1) * 10), "UNKNOWN"),
        (11, lambda: (jnp.float32(1.1) * 10).astype(jnp.int32), "UNKNOWN"),
        (0, lambda: jnp.sign(jnp.float32(0.1) * 3 - 0.3), "UNKNOWN"),
        (11, lambda: jnp.floor(jnp.float32(1.15) * 10), "PROVED"),
        (2, lambda: jnp.floor(jnp.float32(0.25) * 10), "PROVED"),
        (0.3, lambda: jnp.maximum(jnp.float32(0.1) * 3, 0.2), "PROVED"),
    ],
)
def test_whole_numbers_that_rounding_decides(one: float, many: Callable[[], Any], verdict: str) -> None:
    """UNKNOWN: 11.000000000000002 is rounded down to 11 and up to 12. PROVED: what is not next to a whole number, or exact."""
    assert verdict_of(lambda n: jnp.full(n.shape, one, jnp.float32), lambda n: jnp.full(n.shape, many(), jnp.float32)) == verdict


@pytest.mark.parametrize(
    ("one", "many", "verdict"),
    [
        (lambda x, m: x * m, lambda x, m: x * m + 0.0, "UNKNOWN"),
        (lambda x, m: x * m, lambda x, m: jnp.where(m > 0, x, 0.0), "UNKNOWN"),
        (lambda x, m: jnp.where(m > 0, x, 0.0), lambda x, m: -jnp.where(m > 0, -x, 0.0), "UNKNOWN"),
        (lambda x, m: jnp.where(m > 0, x, 0.0), lambda x, m: 1.0 * jnp.where(m > 0, x, 0.0), "PROVED"),
        (lambda x, m: jnp.exp(x) * m, lambda x, m: m * jnp.exp(x), "PROVED"),
        (lambda x, m: x, lambda x, m: x * 1.0, "PROVED"),
    ],
)
def test_zeros_that_have_a_sign(one: Callable[..., Any], many: Callable[..., Any], verdict: str) -> None:
    """UNKNOWN: top_k takes -0.0, a negative number times a mask, for less than 0.0. PROVED: no zero has a sign, or the number is left."""

    def step(f: Callable[..., Any], add: Callable[[Any], Any]) -> Any:
        def chosen(w: Any, x: Any, m: Any) -> Any:
            values, ids = lax.top_k(f(x, m), 2)
            return w - 0.1 * add(jnp.sum(jax.nn.one_hot(ids, 4), (0, 1))), add(jnp.sum(values))

        return chosen

    local = step(many, lambda v: lax.psum(v, "dp"))

    def distributed(mesh: Any) -> Any:
        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("dp"), P("dp")), out_specs=(P(), P()), check_vma=False)

    report = tvj.verify(step(one, lambda v: v), distributed, (tvj.Reals((4,)), tvj.Reals((8, 4)), tvj.Ids((8, 4), 2)), {"dp": 2})
    assert report.verdict == verdict, report.reason
