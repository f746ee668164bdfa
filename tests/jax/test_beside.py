"""Calls that are run beside their mapping: a row that computes something else gives no verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from running import translated

import jax
import trainverify.jax as tvj
from jax import lax
from trainverify.jax import beside
from trainverify.jax.mappings import MAPPINGS
from trainverify.jax.mappings.table import Arguments
from trainverify.jax.shrink import smaller

X = np.linspace(-2, 2, 15, dtype=np.float32).reshape(3, 5)
IDS = np.array([[0, 2], [1, 1]], np.int32)
LARGE = jax.ShapeDtypeStruct((700, 2000), jnp.float32)


def plain_sum(a: Arguments) -> Any:
    """Wrong: without the last dimension that is summed over."""
    dims = a.param("axes")
    a.ignore("out_sharding")
    return a.e.op("amax", (a.tensor(0),), {"dim": tuple(dims)})


def unordered(a: Arguments) -> Any:
    """Wrong: `reverse` is not read."""
    a.ignore("reverse")
    return a.e.op("cumsum", (a.tensor(0),), {"dim": a.param("axis")})


def leaving_ties(a: Arguments) -> Any:
    """Wrong for equal values only: x ≤ y for x < y."""
    return a.e.op("le", (a.tensor(0), a.tensor(1)))


def of_positives(a: Arguments) -> Any:
    """Wrong for negative values only."""
    return a.tensor(0)


@pytest.mark.parametrize(
    ("name", "row", "fn"),
    [
        ("reduce_sum", plain_sum, lambda x: jnp.sum(x, 1)),
        ("cumsum", unordered, lambda x: lax.cumsum(x, 1, reverse=True)),
        ("lt", leaving_ties, lambda x: x < 2 * x),
        ("abs", of_positives, jnp.abs),
    ],
)
@pytest.mark.parametrize("arg", [X, LARGE], ids=["small", "large"])
def test_differs(name: str, row: Callable[[Arguments], Any], fn: Callable[..., Any], arg: Any) -> None:
    e, _, _ = translated(fn, arg)
    calls = {k: c for k, c in e.kept["calls"].items() if c.name == name}
    assert beside.run(calls, smaller).agreed == len(calls) == 1
    wrong = {("wrong", k): replace(c, row=row) for k, c in calls.items()}
    assert [c for c, _ in beside.run(wrong, smaller).differs] == [str(c) for c in calls.values()]


def test_unknown_a_row_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """UNKNOWN: both programs are translated in the same wrong way, and would be equal."""

    def reference(params: Any, x: Any) -> Any:
        return params, jnp.sum(lax.cumsum(x, 1, reverse=True) * params)

    def distributed(mesh: Any) -> Any:
        def step(params: Any, x: Any) -> Any:
            return params, lax.psum(jnp.sum(lax.cumsum(x, 1) * params), "dp")

        return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()))

    args = (tvj.Reals((5,)), tvj.Reals((6, 5)))
    assert tvj.verify(reference, distributed, args, {"dp": 2}).verdict == "REFUTED"
    monkeypatch.setitem(MAPPINGS, "cumsum", unordered)
    report = tvj.verify(reference, distributed, args, {"dp": 2})
    assert report.verdict == "UNKNOWN"
    assert "cumsum(f32[6,5]) is not translated to what JAX computes" in str(report.reason)


def test_unchecked_calls_are_listed() -> None:
    """A write into a part of both dimensions, which no rule shrinks."""
    e, _, _ = translated(lambda x: lax.dynamic_update_slice(x, jnp.ones((3, 4)), (1, 2)), LARGE)
    found = beside.run(e.kept["calls"], smaller)
    assert [c.partition("(")[0] for c, _ in found.unchecked] == ["dynamic_update_slice"]
    assert not found.differs


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.reshape(70, 10, 2000).transpose(2, 0, 1).reshape(2000, 700),
        lambda x: jnp.concatenate([x[:, :1000], -x[:, 500:]], 1).sum(0),
        lambda x: lax.pad(x, np.float32(0), ((0, 3, 0), (900, 0, 0))),
        lambda x: x @ x.T,
        lambda x: x[jnp.array([3, 5])] * jnp.split(x, [1000], 1)[0][:, :1].sum(),
        lambda x: lax.dynamic_update_slice(x, jnp.ones((3, 2000)), (1, 0)) + lax.dynamic_slice(x, (0, 7), (700, 1)),
        lambda x: lax.top_k(x, 900)[0],
    ],
)
def test_agrees_at_smaller_sizes(fn: Callable[..., Any]) -> None:
    e, _, _ = translated(fn, LARGE)
    found = beside.run(e.kept["calls"], smaller)
    assert not found.differs
    assert not found.unchecked


def test_agrees_rows_of_a_large_table() -> None:
    e, _, _ = translated(lambda x, i: x[i], LARGE, IDS)
    found = beside.run(e.kept["calls"], smaller)
    assert not found.differs
    assert not found.unchecked
