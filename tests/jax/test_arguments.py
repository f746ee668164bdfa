"""What steps take: arguments belong together by position, whatever they are called and whatever they hold."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj
from jax import lax

W = tvj.Reals((3,))
X = tvj.Reals((4, 3))
SPECS: dict[str, Any] = {"in_specs": (P(), P(), P(), P(), P("dp")), "out_specs": P(), "check_vma": False}


def reference(config: Any, w: Any, first: Any, second: Any, x: Any) -> Any:
    return w, first - 0.1 * second, 0.5 * second, jnp.mean(x @ w)


def by_position(config: Any, w: Any, a: Any, b: Any, x: Any) -> Any:
    return w, a - 0.1 * b, 0.5 * b, lax.pmean(jnp.mean(x @ w), "dp")


def by_name(config: Any, w: Any, second: Any, first: Any, x: Any) -> Any:
    return w, 0.5 * second, first - 0.1 * second, lax.pmean(jnp.mean(x @ w), "dp")


@pytest.mark.parametrize("config", [{}, (), None])
@pytest.mark.parametrize(("step", "verdict"), [(by_position, "PROVED"), (by_name, "REFUTED")])
def test_an_argument_without_arrays(step: Any, verdict: str, config: Any) -> None:
    """PROVED: other names at the same places. REFUTED: the same names at other places."""
    report = tvj.verify(reference, lambda mesh: jax.shard_map(step, mesh=mesh, **SPECS), (config, W, W, W, X), {"dp": 2}, points=1)
    assert report.verdict == verdict, report.reason
