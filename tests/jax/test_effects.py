"""What a step does besides computing: calls of Python, memory that it gives away, questions about devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import jax.numpy as jnp
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj
from jax import lax
from trainverify.report import Report

ARGS = (tvj.Reals((3,)), tvj.Reals((4, 3)))
KEPT: list[Any] = []


def loss(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w) ** 2)


def reference(w: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(w, x)
    return w - 0.1 * grads, value


def checked(step: Callable[[Any, Any, Any], Any]) -> Report:
    """The distributed step gets the mean gradient, computed by shard_map, and makes the new weights of it."""

    def made(mesh: Any) -> Any:
        def local(w: Any, x: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(w, x)
            return lax.pmean(grads, "dp"), lax.pmean(value, "dp")

        mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()), check_vma=False)

        def whole(w: Any, x: Any) -> Any:
            grads, value = mapped(w, x)
            return step(w, grads, value)

        return whole

    return tvj.verify(reference, made, ARGS, {"dp": 2}, points=1)


# -- calls of Python ------------------------------------------------------------------------------------------------------


def keep(value: Any) -> None:
    KEPT.append(value)


def kept(value: Any) -> Any:
    KEPT.append(value)
    return value


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "print": (lambda v: jax.debug.print("loss {}", v), "PROVED"),
    "debug": (lambda v: jax.debug.callback(keep, v), "UNKNOWN"),
    "io": (lambda v: io_callback(keep, None, v), "UNKNOWN"),
    "io with a result": (lambda v: io_callback(kept, jax.ShapeDtypeStruct((), jnp.float32), v), "UNKNOWN"),
    "pure": (lambda v: jax.pure_callback(kept, jax.ShapeDtypeStruct((), jnp.float32), v), "UNKNOWN"),
    "debug in a branch": (lambda v: lax.cond(v > 0, lambda: jax.debug.callback(keep, v), lambda: None), "UNKNOWN"),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_of_python(call: str) -> None:
    """What they return is not used. They may still change what the step reads in Python."""
    run, verdict = CALLS[call]

    def step(w: Any, grads: Any, value: Any) -> Any:
        run(value)
        return w - 0.1 * grads, value

    report = checked(step)
    assert report.verdict == verdict, report.reason
    if verdict == "UNKNOWN":
        assert "calls a function of Python" in report.reason


# -- memory ---------------------------------------------------------------------------------------------------------------

UPDATE = jax.jit(lambda w, g: w - 0.1 * g, donate_argnums=0)
SCALED = jax.jit(lambda g, n: n * g, donate_argnums=0)


def right(w: Any, grads: Any, value: Any) -> Any:
    return UPDATE(w, grads), value


def returned(w: Any, grads: Any, value: Any) -> Any:
    return w - 0.1 * grads, value + 0 * UPDATE(w, grads)[0] + 0 * w[0]


def twice(w: Any, grads: Any, value: Any) -> Any:
    half = SCALED(grads, 0.5)
    return w - 0.1 * (half + 0.5 * grads), value


def at_once(w: Any, grads: Any, value: Any) -> Any:
    return w - 0.1 * (grads + UPDATE(grads, grads) - 0.9 * grads), value


def another_name(w: Any, grads: Any, value: Any) -> Any:
    other = jax.device_put(grads)
    half = SCALED(grads, 0.5)
    return w - 0.1 * (half + 0.5 * other), value


def in_a_checkpoint(w: Any, grads: Any, value: Any) -> Any:
    half = jax.checkpoint(lambda g: SCALED(g, 0.5))(grads)
    return w - 0.1 * (half + 0.5 * grads), value


DONATED = {
    "right": (right, "PROVED"),
    "compiled as a whole": (jax.jit(twice), "PROVED"),
    "read by the result": (returned, "UNKNOWN"),
    "read twice": (twice, "UNKNOWN"),
    "the same operand twice": (at_once, "UNKNOWN"),
    "another name": (another_name, "UNKNOWN"),
    "in a checkpoint": (in_a_checkpoint, "UNKNOWN"),
}


@pytest.mark.parametrize("name", DONATED)
def test_reads_after_donation(name: str) -> None:
    step, verdict = DONATED[name]
    report = checked(step)
    assert report.verdict == verdict, report.reason
    if verdict == "UNKNOWN":
        assert "donated" in report.reason
