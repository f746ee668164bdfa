"""What runs outside of shard_map, on arrays that a mesh holds: conditions on data, and replicas that nothing has compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj
from jax import lax

ARGS = ({"w": tvj.Reals((3, 5))}, tvj.Count(), tvj.Reals((4, 3)))
RATES = (0.3, 0.2, 0.1)


def gradients(params: Any, x: Any) -> tuple[Any, Any]:
    return jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)


def updated(params: Any, grads: Any, n: Any, rates: tuple[float, ...] = RATES) -> Any:
    """Gradients clipped by their norm, and a rate by the number of the step."""
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.5 / (norm + 0.01)), grads)
    rate = lax.switch(jnp.clip(n, 0, 2), [lambda r=r: r for r in rates])
    return jax.tree.map(lambda w, g: w - rate * g, params, grads)


def reference(params: Any, n: Any, x: Any) -> Any:
    loss, grads = gradients(params, x)
    return updated(params, grads, n), n + 1, loss


def outside(local: Callable[..., Any], rates: tuple[float, ...] = RATES) -> Callable[[Any], Any]:
    """Gradients by shard_map, the rest as one device has it."""

    def made(mesh: Any) -> Any:
        parallel = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()), check_vma=False)

        def step(params: Any, n: Any, x: Any) -> Any:
            loss, grads = parallel(params, x)
            return updated(params, grads, n, rates), n + 1, loss

        return jax.jit(step)

    return made


def right(params: Any, x: Any) -> Any:
    return lax.pmean(gradients(params, x), "dp")


def own(params: Any, x: Any) -> Any:
    loss, grads = gradients(params, x)
    return lax.pmean(loss, "dp"), grads


def doubled(params: Any, x: Any) -> Any:
    loss, grads = gradients(params, x)
    return lax.pmean(loss, "dp"), lax.psum(grads, "dp")


def on_first(params: Any, x: Any) -> Any:
    """Replicas that differ: right on one rank."""
    loss, grads = lax.pmean(gradients(params, x), "dp")
    return loss, jax.tree.map(lambda g: jnp.where(lax.axis_index("dp") == 0, g, 2 * g), grads)


@pytest.mark.parametrize(
    ("local", "rates", "verdict"),
    [
        (right, RATES, "PROVED"),
        (own, RATES, "UNKNOWN"),
        (on_first, RATES, "UNKNOWN"),
        (doubled, RATES, "REFUTED"),
        (right, (0.3, 0.2, 0.2), "REFUTED"),
        (right, (0.3, 0.1, 0.1), "REFUTED"),
    ],
)
def test_updates_outside(local: Any, rates: Any, verdict: str) -> None:
    report = tvj.verify(reference, outside(local, rates), ARGS, {"dp": 2}, points=1)
    assert report.verdict == verdict, report.reason


def test_unknown_only_replicas_differ() -> None:
    """UNKNOWN: the sum over an array does not show that ranks hold it in another order."""

    def one(w: Any, x: Any) -> Any:
        return w, jnp.sum(x)

    def many(mesh: Any) -> Any:
        def local(x: Any) -> Any:
            every = lax.all_gather(x, "dp", tiled=True)
            return jnp.roll(every, lax.axis_index("dp"), 0)

        held = jax.shard_map(local, mesh=mesh, in_specs=P("dp"), out_specs=P(), check_vma=False)
        return lambda w, x: (w, jnp.sum(held(x)))

    report = tvj.verify(one, many, (tvj.Reals((3,)), tvj.Reals((6,))), {"dp": 2}, points=1)
    assert report.verdict == "UNKNOWN"
    assert "replicated differ" in report.reason


@pytest.mark.parametrize(("rates", "verdict"), [(RATES, "PROVED"), ((0.3, 0.2, 0.25), "REFUTED"), ((0.2, 0.3, 0.1), "REFUTED")])
def test_a_branch_of_xla(rates: Any, verdict: str) -> None:
    def many(mesh: Any) -> Any:
        def step(params: Any, n: Any, x: Any) -> Any:
            loss, grads = gradients(params, x)
            grads = lax.switch(jnp.clip(n, 0, 2), [lambda r=r: jax.tree.map(lambda g: r * g, grads) for r in rates])
            return jax.tree.map(jnp.subtract, params, grads), n + 1, loss

        place = jax.tree.map(lambda s: NamedSharding(mesh, s), ({"w": P()}, P(), P("dp")), is_leaf=lambda s: isinstance(s, P))
        return jax.jit(step, in_shardings=place, keep_unused=True)

    def one(params: Any, n: Any, x: Any) -> Any:
        loss, grads = gradients(params, x)
        rate = lax.switch(jnp.clip(n, 0, 2), [lambda r=r: r for r in RATES])
        return jax.tree.map(lambda w, g: w - rate * g, params, grads), n + 1, loss

    assert tvj.verify(one, many, ARGS, {"dp": 2}, points=1, reader="hlo").verdict == verdict


@pytest.mark.parametrize(("by", "verdict"), [(2, "PROVED"), (3, "REFUTED")])
def test_every_second_step(by: int, verdict: str) -> None:
    """Integers that are divided by a number."""

    def half(grads: Any, n: Any, by: int) -> Any:
        return jax.tree.map(lambda g: jnp.where(n % by == 0, g, 0.5 * g) / (1 + n // by), grads)

    def one(params: Any, n: Any, x: Any) -> Any:
        loss, grads = gradients(params, x)
        return jax.tree.map(jnp.subtract, params, half(grads, n, 2)), n + 1, loss

    def many(mesh: Any) -> Any:
        def step(params: Any, n: Any, x: Any) -> Any:
            loss, grads = right(params, x)
            return jax.tree.map(jnp.subtract, params, half(grads, n, by)), n + 1, loss

        return jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("dp")), out_specs=(P(), P(), P()), check_vma=False)

    assert tvj.verify(one, many, ARGS, {"dp": 2}, points=1).verdict == verdict


@pytest.mark.parametrize(("shift", "verdict"), [(1, "PROVED"), (2, "REFUTED")])
def test_labels_that_come_from_other_programs(shift: int, verdict: str) -> None:
    """The first rank runs a program of its own; the ids that ranks send to each other are still inside of the table."""

    def one(table: Any, ids: Any) -> Any:
        return table, jnp.sum(table[jnp.roll(ids, -2)] * jnp.arange(6.0))

    def many(mesh: Any) -> Any:
        def step(table: Any, ids: Any) -> Any:
            rank = lax.axis_index("dp")
            other = lax.ppermute(ids, "dp", [((n + shift) % 3, n) for n in range(3)])
            weights = lax.cond(rank == 0, lambda: jnp.arange(2.0), lambda: jnp.arange(2.0) + 2.0 * rank)
            return table, lax.psum(jnp.sum(table[other] * weights), "dp")

        return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()), check_vma=False)

    assert tvj.verify(one, many, (tvj.Reals((7,)), tvj.Ids((6,), 7)), {"dp": 3}, points=1).verdict == verdict
