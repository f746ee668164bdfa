"""State that is never negative: declared, or made of its old value by the step itself. A metric that looks like state is none."""

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
from trainverify.jax.pair import logical_program
from trainverify.jax.trace import trace
from trainverify.report import Report

W, X = tvj.Reals((3,)), tvj.Reals((4, 3))
INTEGER = jax.ShapeDtypeStruct((), jnp.int32)
Function = Callable[..., Any]


def itself(v: Any) -> Any:
    return v


def judged(of: Callable[[Function, Function], Function], one: Function, many: Function, state: Any) -> Report:
    """Steps that differ by a function of the state, which is the second argument."""

    def made(mesh: Any) -> Any:
        step = of(many, lambda v: lax.pmean(v, "dp"))
        return jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("dp")), out_specs=P(), check_vma=False)

    return tvj.verify(of(one, itself), made, (W, state, X), {"dp": 2}, points=1)


def scaled(new: Function) -> Callable[[Function, Function], Function]:
    """The state is a number of steps: the rate of learning is a function of it."""

    def of(f: Function, over: Function) -> Function:
        return lambda w, n, x: (w - 0.1 * f(n) * over(jnp.mean(x, 0)), new(n, x), over(jnp.mean(x @ w)))

    return of


COUNTS = [
    (lambda n, x: n + 1, INTEGER, "PROVED"),
    (lambda n, x: jnp.where(n < 100, n + 1, 100), INTEGER, "PROVED"),
    (lambda n, x: n + 1, 5, "PROVED"),
    (lambda n, x: n + 1, -5, "UNKNOWN"),
    (lambda n, x: n + 1, np.int32(-5), "UNKNOWN"),
    (lambda n, x: n, 5, "PROVED"),  # never changes
    (lambda n, x: n, INTEGER, "UNKNOWN"),
    (lambda n, x: n - 1, INTEGER, "UNKNOWN"),
    (lambda n, x: n - 1, 5, "UNKNOWN"),
    (lambda n, x: -n, INTEGER, "UNKNOWN"),
    (lambda n, x: jnp.argmax(x[0]).astype(jnp.int32), INTEGER, "UNKNOWN"),  # a metric
]


@pytest.mark.parametrize(("new", "start", "verdict"), COUNTS)
def test_integers(new: Function, start: Any, verdict: str) -> None:
    """PROVED only of numbers of steps, of which it is assumed: max(n, 0) is n where n counts up from 0."""
    report = judged(scaled(new), lambda n: jnp.maximum(n, 0), itself, start)
    assert report.verdict == verdict, report.reason
    assert any("input n holds nonnegative" in a for a in report.assumptions) == (verdict == "PROVED")


def rooted(new: Function) -> Callable[[Function, Function], Function]:
    """A root is taken of the state."""

    def of(f: Function, over: Function) -> Function:
        def step(w: Any, y: Any, x: Any) -> Any:
            return w - 0.1 * over(jnp.mean(x, 0)) * jnp.sum(f(y) + jnp.sqrt(y * y + 1)), new(w, y), over(jnp.mean(x @ w))

        return step

    return of


REALS = [
    (lambda w, y: 0.9 * y + 0.1 * jnp.mean(w**2), tvj.Reals((5,)), "PROVED"),
    (lambda w, y: jnp.maximum(0.9 * y, jnp.mean(w**2)), tvj.Reals((5,)), "PROVED"),
    (lambda w, y: 0.9 * y + 0.1 * jnp.mean(w**2), np.ones(5, np.float32), "PROVED"),
    (lambda w, y: 0.9 * y + 0.1 * jnp.mean(w**2), -np.ones(5, np.float32), "REFUTED"),
    (lambda w, y: y * y, tvj.Reals((5,)), "REFUTED"),  # a metric
    (lambda w, y: y * jnp.mean(w**2), tvj.Reals((5,)), "REFUTED"),  # a metric: y are weights of examples
    (lambda w, y: y, tvj.Reals((5,)), "REFUTED"),
    (lambda w, y: y * y, tvj.Reals((5,), nonnegative=True), "PROVED"),
]


@pytest.mark.parametrize(("new", "start", "verdict"), REALS)
def test_real_numbers(new: Function, start: Any, verdict: str) -> None:
    """PROVED only of state that grows by squares: |y| is y there. REFUTED: y may be data, whose squares are a metric."""
    report = judged(rooted(new), jnp.abs, itself, start)
    assert report.verdict == verdict, report.reason


def optimizers() -> dict[str, tuple[Any, set[str]]]:
    optax = pytest.importorskip("optax")
    return {
        "adamw": (optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10)), {"0.count", "0.nu.w", "2.count"}),
        "amsgrad": (optax.amsgrad(1e-2), {"0.count", "0.nu.w", "0.nu_max.w"}),
        "adagrad": (optax.adagrad(1e-2), {"0.sum_of_squares.w"}),
        "steps": (
            optax.MultiSteps(optax.adam(1e-2), 3),
            {"mini_step", "gradient_step", "inner_opt_state.0.count", "inner_opt_state.0.nu.w"},
        ),
    }


@pytest.mark.parametrize("name", ["adamw", "amsgrad", "adagrad", "steps"])
def test_optax(name: str) -> None:
    """What optimizers keep, and know not to be negative."""
    optimizer, expected = optimizers()[name]
    params = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}

    def step(p: Any, s: Any, x: Any) -> Any:
        loss, g = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(p)
        u, s = optimizer.update(g, s, p)
        return {"w": p["w"] + u["w"]}, s, loss

    found = logical_program(trace(step, (params, jax.eval_shape(optimizer.init, params), X)))
    assert {n.removeprefix("s.") for n in (*found.program.domains, *found.nonnegative)} == expected
