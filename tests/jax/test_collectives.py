"""Every communication primitive against JAX on eight host devices: the translated ranks, replayed."""

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

MESH = {"a": 2, "b": 4}
IN = P("a", "b")


def whole(x: Any) -> Any:
    return jnp.sum(x)


CASES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "psum": (lambda x: lax.psum(x, "b"), P("a", None)),
    "psum of both": (lambda x: lax.psum(x, ("b", "a")), P()),
    "psum of a number": (lambda x: x * lax.psum(1.0, "b") + lax.psum(jnp.ones(()) * 3, "a"), IN),
    "pmax": (lambda x: lax.pmax(x, "b"), P("a", None)),
    "pmin": (lambda x: lax.pmin(x, ("a", "b")), P()),
    "pmean": (lambda x: lax.pmean(x, "a"), P(None, "b")),
    "psum of groups": (lambda x: lax.psum(x, "b", axis_index_groups=[[0, 2], [1, 3]]), IN),
    "all_gather": (lambda x: lax.all_gather(x, "b", axis=1, tiled=True), P("a", None)),
    "all_gather of both, b first": (lambda x: lax.all_gather(x, ("b", "a"), axis=0, tiled=True), P(None, None)),
    "all_gather, a new dimension": (lambda x: lax.all_gather(x, "a", axis=1)[:, 1], P(None, "b")),
    "all_gather of groups": (lambda x: lax.all_gather(x, "b", axis_index_groups=[[0, 3], [2, 1]], tiled=True), P("a", "b")),
    "psum_scatter": (lambda x: lax.psum_scatter(x, "b", scatter_dimension=0, tiled=True), P(("a", "b"), None)),
    "psum_scatter of single rows": (lambda x: lax.psum_scatter(x[:4], "b"), P(("a", "b"))),
    "all_to_all": (lambda x: lax.all_to_all(x, "b", 0, 1, tiled=True), P(("a", "b"), None)),
    "all_to_all of single rows": (lambda x: lax.all_to_all(x[:4], "b", 0, 1), P(("a", "b"))),
    "ppermute": (lambda x: lax.ppermute(x, "b", [(i, (i + 1) % 4) for i in range(4)]), IN),
    "ppermute to some": (lambda x: lax.ppermute(x, "b", [(0, 1), (1, 2), (2, 3)]), IN),
    "ppermute to oneself": (lambda x: lax.ppermute(x, "b", [(0, 0), (1, 3), (3, 1)]), IN),
    "ppermute over both": (lambda x: lax.ppermute(x, ("a", "b"), [(i, (i + 3) % 8) for i in range(8)]), IN),
    "ppermute over both, b first": (lambda x: lax.ppermute(x, ("b", "a"), [(i, (i + 3) % 8) for i in range(7)]), IN),
    "psum_scatter of both, b first": (lambda x: lax.psum_scatter(x.reshape(-1)[:8], ("b", "a"), tiled=True), P(("a", "b"))),
    "all_to_all of both, b first": (lambda x: lax.all_to_all(x.reshape(-1)[:8], ("b", "a"), 0, 0, tiled=True), P(("a", "b"))),
    "axis_index": (lambda x: x * (lax.axis_index("b") + 10 * lax.axis_index("a")), IN),
    "axis_index of both": (lambda x: x + lax.axis_index(("b", "a")), IN),
    "positions": (lambda x: x * (lax.axis_index("b") * 3 + jnp.arange(3)), IN),
    "a block by rank": (lambda x: lax.dynamic_slice(x, (lax.axis_index("b"), 0), (4, 3)), IN),
    "a choice by rank": (lambda x: jnp.where(lax.axis_index("a") == 0, x, -2 * x), IN),
    "a branch by rank": (lambda x: lax.cond(lax.axis_index("b") > 1, lambda: x, lambda: x * x), IN),
    "a loop over ranks": (
        lambda x: lax.fori_loop(0, 4, lambda i, c: lax.ppermute(c, "b", [(k, (k + 1) % 4) for k in range(4)]) + x, x),
        IN,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_jax_computes(name: str) -> None:
    fn, out = CASES[name]
    shape = (16, 12)

    def distributed(mesh: Any) -> Any:
        return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=(IN,), out_specs=out, check_vma=False))

    made = tvj.pair(whole, distributed, (jax.ShapeDtypeStruct(shape, jnp.float32),), MESH)
    assert not [p.unknown for p in made.parts if p.unknown]
    found = tvj.replay(whole, distributed, (jax.ShapeDtypeStruct(shape, jnp.float32),), made)
    ranks = [m for m in found.mismatches if m.rank is not None]
    assert not ranks, str(ranks[0])
    assert found.compared == 9
