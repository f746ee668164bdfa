"""Integers of few bits wrap around in JAX: what may not fit has no verdict, what fits is followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from running import run, translated

import jax
import trainverify.jax as tvj
from jax import lax
from trainverify.jax.values import Opaque

X = np.arange(15, dtype=np.float32).reshape(3, 5)
I8, U8 = np.array([100, 50, -128], np.int8), np.array([200, 50, 3], np.uint8)
I16, BIG = np.array([7, 30000], np.int16), np.array([2**30, 5], np.int32)


@pytest.mark.parametrize(
    ("fn", "array"),
    [
        (lambda i: i + i, I8),
        (lambda i: i - np.uint8(5), U8),
        (lambda i: -i, I8),
        (lambda i: jnp.abs(i), I8),
        (lambda i: jnp.sum(i, dtype=jnp.int8), I8),
        (lambda i: jnp.cumsum(i, dtype=jnp.uint8), U8),
        (lambda i: i.astype(jnp.int8), U8),
        (lambda i: i * i, I16),
        (lambda i: i * i, BIG),
        (lambda i: i + BIG + BIG, BIG),
        (lambda x: x.astype(jnp.uint8), X),
        (lambda x: x + (lax.iota(jnp.uint8, 5) - np.uint8(2)), X),
        (lambda x: x + lax.iota(jnp.int32, 5) * 1_000_000_000, X),
        (lambda x: x + lax.iota(jnp.uint16, 5), X),
        (lambda i: lax.dot(i[None], i[:, None]), I8),
    ],
)
def test_unknown_integers_that_may_wrap(fn: Callable[..., Any], array: Any) -> None:
    _, i, found = translated(fn, array)
    assert all(isinstance(x, Opaque) for x in found)
    assert any("wrap" in m.reason or "uint16" in m.reason for m in i.missing.values()), i.missing


@pytest.mark.parametrize(
    ("fn", "array"),
    [
        (lambda i: jnp.maximum(i, np.uint8(5)), U8),
        (lambda i: i.astype(jnp.int32) * 2 - 1, U8),
        (lambda i: jnp.sum((i > 0).astype(jnp.int8), dtype=jnp.int8), I8),
        (lambda i: jnp.sign(i) * np.int8(100), I8),
        (lambda x: x + (lax.iota(jnp.uint8, 5) + np.uint8(2)), X),
        (lambda x: x + lax.iota(jnp.int32, 5) * 1_000, X),
        (lambda x: x[:, jnp.array([-1, 0])], X),
        (lambda x: jnp.dot(x > 3, x.T > 3), X),
        (lambda x: lax.select_n(jnp.int32(7), x, 2 * x, 3 * x), X),
        (lambda x: lax.select_n(jnp.int32(-7), x, 2 * x, 3 * x), X),
    ],
)
def test_proved_integers_that_fit(fn: Callable[..., Any], array: Any) -> None:
    found, _ = run(fn, array)
    np.testing.assert_array_equal(found[0], fn(jnp.asarray(array)))


@pytest.mark.parametrize(("arg", "verdict"), [(jax.ShapeDtypeStruct((6,), jnp.int32), "UNKNOWN"), (tvj.Ids((6,), 9), "PROVED")])
def test_integers_need_a_range(arg: Any, verdict: str) -> None:
    """UNKNOWN, and not an invalid step, without one."""

    def distributed(mesh: Any) -> Any:
        def step(w: Any, i: Any) -> Any:
            return w, lax.psum(jnp.sum(i), "dp") * jnp.sum(w)

        return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()))

    report = tvj.verify(lambda w, i: (w, jnp.sum(i) * jnp.sum(w)), distributed, (tvj.Reals((5,)), arg), {"dp": 2})
    assert report.verdict == verdict, report.reason


def counted(cast: Callable[[Any], Any]) -> Any:
    """The sum of rounded numbers, in integers on the ranks."""

    def one(w: Any, x: Any) -> Any:
        return w, jnp.sum(jnp.floor(x).astype(jnp.int32).astype(jnp.float32))

    def ranks(mesh: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            return w, lax.psum(cast(jnp.floor(x)), "dp").astype(jnp.float32)

        return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()), check_vma=False)

    return tvj.verify(one, ranks, (tvj.Reals((3,)), tvj.Reals((4, 5))), {"dp": 2}, points=1)


def test_integers_made_of_real_numbers_are_assumed_to_fit() -> None:
    """Those of 32 bits by an assumption that is listed. Nobody knows whether smaller ones do; products of booleans are known not to."""
    report = counted(lambda x: jnp.sum(x.astype(jnp.int32)))
    assert report.verdict == "PROVED"
    assert any("made of real numbers, do not wrap around" in a for a in report.assumptions)
    assert counted(lambda x: jnp.sum(x.astype(jnp.int16))).verdict == "UNKNOWN"
    assert counted(lambda x: jnp.sum((x > 0).astype(jnp.int32) * (2**31 - 1))).verdict == "UNKNOWN"


def total(dtype: Any) -> Any:
    """Weights times the sum of all integers."""
    return lambda w, n: (w * 0.5, jnp.sum(n, dtype=dtype).astype(w.dtype) * jnp.sum(w))


@pytest.mark.parametrize(("dtype", "verdict"), [(jnp.int8, "UNKNOWN"), (jnp.int32, "PROVED")])
def test_a_sum_of_shares_that_may_wrap_outside_of_shard_map(dtype: Any, verdict: str) -> None:
    """UNKNOWN: 16 integers below 100 in 8 bits. PROVED: in 32."""

    def distributed(mesh: Any) -> Any:
        cut = jax.shard_map(lambda n: n, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
        return lambda w, n: total(dtype)(w, cut(n))

    report = tvj.verify(total(jnp.int32), distributed, (tvj.Reals((3,)), tvj.Ids((16,), 100, jnp.int8)), {"dp": 4})
    assert report.verdict == verdict, report.reason


@pytest.mark.parametrize(("dtype", "verdict"), [(jnp.int8, "UNKNOWN"), (jnp.int32, "PROVED")])
def test_a_sum_over_partitions_that_may_wrap(dtype: Any, verdict: str) -> None:
    """UNKNOWN: two integers below 60 on every device fit in 8 bits, eight of them do not. PROVED: in 32 bits."""

    def distributed(mesh: Any) -> Any:
        whole, cut = (NamedSharding(mesh, p) for p in (P(), P("dp")))
        return jax.jit(total(dtype), in_shardings=(whole, cut), out_shardings=(whole, whole), keep_unused=True)

    report = tvj.verify(total(jnp.int32), distributed, (tvj.Reals((3,)), tvj.Ids((8,), 60, jnp.int8)), {"dp": 4}, reader="hlo")
    assert report.verdict == verdict, report.reason
