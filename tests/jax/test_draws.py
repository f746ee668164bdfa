"""Random numbers of any distribution are a function of their key: a rank that folds in the numbers of its own rows draws what one device
draws for these; one that counts its rows from 0 does not."""

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

TYPED = jax.eval_shape(lambda: jax.random.key(0))
RAW = jax.ShapeDtypeStruct((2,), jnp.uint32)
ARGS = ({"w": tvj.Reals((3,))}, tvj.Reals((4, 3)))

DRAWS: dict[str, Callable[[Any], Any]] = {
    "normal": lambda k: jax.random.normal(k, (3,)),
    "truncated normal": lambda k: jax.random.truncated_normal(k, -2.0, 1.5, (3,)),
    "gumbel": lambda k: jax.random.gumbel(k, (3,)),
    "integers": lambda k: jax.random.randint(k, (3,), 2, 9).astype(jnp.float32),
    "categorical": lambda k: jax.random.categorical(k, jnp.arange(5.0), shape=(3,)).astype(jnp.float32),
    "permutation": lambda k: jax.random.permutation(k, jnp.arange(3.0)),
    "exponential": lambda k: jax.random.exponential(k, (3,)),
}


def losses(draw: Callable[[Any], Any]) -> Callable[..., Any]:
    def loss(params: Any, key: Any, x: Any, rows: Any) -> Any:
        noise = jax.vmap(lambda n: draw(jax.random.fold_in(key, n)))(rows)
        return jnp.mean(((x + noise) @ params["w"]) ** 2)

    return loss


def pair(one: Callable[..., Any], other: Callable[..., Any], start: int) -> tuple[Any, Any]:
    """A rank has two rows, and counts them from `start` times its number."""

    def reference(params: Any, key: Any, x: Any) -> Any:
        return params, losses(one)(params, key, x, jnp.arange(4))

    def distributed(mesh: Any) -> Any:
        def step(params: Any, key: Any, x: Any) -> Any:
            return params, lax.pmean(losses(other)(params, key, x, lax.axis_index("dp") * start + jnp.arange(2)), "dp")

        return jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("dp")), out_specs=(P(), P()), check_vma=False)

    return reference, distributed


@pytest.mark.parametrize("key", [TYPED, RAW], ids=["typed", "raw"])
@pytest.mark.parametrize("name", DRAWS)
def test_rows_with_keys_of_their_own(name: str, key: Any) -> None:
    args = (ARGS[0], key, ARGS[1])
    report = tvj.verify(*pair(DRAWS[name], DRAWS[name], 2), args, {"dp": 2}, points=1)
    assert report.verdict == "PROVED", report.reason
    assert any("random numbers" in a for a in report.assumptions)
    if key is TYPED:
        assert tvj.verify(*pair(DRAWS[name], DRAWS[name], 1), args, {"dp": 2}, points=1).verdict == "REFUTED"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (DRAWS["integers"], lambda k: jax.random.randint(k, (3,), 2, 8).astype(jnp.float32)),
        (DRAWS["truncated normal"], lambda k: jax.random.truncated_normal(k, -2.0, 2.0, (3,))),
        (DRAWS["normal"], lambda k: jax.random.normal(k, (6,))[3:]),
        (DRAWS["permutation"], lambda k: jax.random.permutation(k, jnp.arange(4.0))[:3]),
        (DRAWS["normal"], DRAWS["gumbel"]),
    ],
)
def test_other_numbers_are_not_proved(one: Any, other: Any) -> None:
    report = tvj.verify(*pair(one, other, 2), (ARGS[0], TYPED, ARGS[1]), {"dp": 2}, points=1)
    assert report.verdict in ("REFUTED", "UNKNOWN")


def test_an_order_is_one() -> None:
    """PROVED or unknown, never REFUTED: a sum does not depend on the order of what is added."""

    def shuffled(w: Any, key: Any, x: Any) -> Any:
        return w, jnp.sum(jax.random.permutation(key, w)) + jnp.sum(x)

    def plain(mesh: Any) -> Any:
        def step(w: Any, key: Any, x: Any) -> Any:
            return w, jnp.sum(w) + lax.psum(jnp.sum(x), "dp")

        return jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("dp")), out_specs=(P(), P()), check_vma=False)

    assert tvj.verify(shuffled, plain, (tvj.Reals((5,)), TYPED, tvj.Reals((4,))), {"dp": 2}, points=1).verdict != "REFUTED"


@pytest.mark.parametrize("draw", [lambda k: jax.random.gamma(k, 2.0, (3,)), lambda k: jax.random.bits(k, (3,)).astype(jnp.float32)])
def test_unknown_other_uses_of_a_key(draw: Any) -> None:
    report = tvj.verify(*pair(draw, draw, 2), (ARGS[0], TYPED, ARGS[1]), {"dp": 2}, points=1)
    assert report.verdict == "UNKNOWN"


def rows_by(impl: str | None, many: bool) -> tuple[Any, Any]:
    """The reference draws row by row; the ranks do, or draw their rows at once."""

    def row(key: Any, n: Any) -> Any:
        return jax.random.normal(jax.random.fold_in(key, n), (3,))

    def one(w: Any, x: Any) -> Any:
        key = jax.random.key(7, impl=impl)
        return w, jnp.sum((x + jnp.stack([row(key, n) for n in range(4)])) @ w)

    def ranks(mesh: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            key, first = jax.random.key(7, impl=impl), 2 * lax.axis_index("dp")
            noise = jax.vmap(lambda n: row(key, n))(first + jnp.arange(2)) if many else jnp.stack([row(key, first + n) for n in range(2)])
            return w, lax.psum(jnp.sum((x + noise) @ w), "dp")

        return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()), check_vma=False)

    return one, ranks


@pytest.mark.parametrize(
    ("impl", "many", "verdict"),
    [
        ("threefry2x32", True, "PROVED"),
        ("rbg", False, "PROVED"),
        ("unsafe_rbg", False, "PROVED"),
        ("rbg", True, "UNKNOWN"),
        ("unsafe_rbg", True, "UNKNOWN"),
    ],
)
@pytest.mark.parametrize("default", [False, True])
def test_several_keys_at_once(impl: str, many: bool, default: bool, verdict: str) -> None:
    """XLA's generator draws by the first of several keys."""
    args = (tvj.Reals((3,)), tvj.Reals((4, 3)))
    one, ranks = rows_by(None if default else impl, many)
    with jax.default_prng_impl(impl):
        assert tvj.verify(one, ranks, args, {"dp": 2}, points=1).verdict == verdict
