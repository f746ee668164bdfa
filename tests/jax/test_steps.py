"""What a step keeps in Python: one whose program changes from call to call has no verdict; jitted, it runs its Python once."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import jax.numpy as jnp
import numpy as np
from jax._src import core
from jax.core import Tracer as Traced
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj
from jax import lax
from trainverify.jax.steps import fingerprint

ARGS = (tvj.Reals((5,)), tvj.Reals((6, 5)))


def reference(w: Any, x: Any) -> Any:
    loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * g, loss


def step_of(synchronises: Callable[[], bool], jitted: bool = False) -> Callable[[Any], Any]:
    def distributed(mesh: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
            g = lax.pmean(g, "dp") if synchronises() else g
            return w - 0.1 * g, lax.pmean(loss, "dp")

        mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()), check_vma=False)
        return jax.jit(mapped) if jitted else mapped

    return distributed


def counting() -> Callable[[], bool]:
    count = itertools.count()
    return lambda: next(count) % 2 == 0


def drawing() -> Callable[[], bool]:
    draw = random.Random(3)  # true, then false
    return lambda: draw.random() < 0.5


def array() -> Callable[[], bool]:
    kept = np.zeros(1)

    def synchronises() -> bool:
        kept[0] += 1
        return bool(kept[0] < 3)

    return synchronises


@pytest.mark.parametrize("make", [counting, drawing, array])
def test_unknown_a_condition_on_the_step(make: Callable[[], Callable[[], bool]]) -> None:
    """UNKNOWN: synchronised at some calls only."""
    report = tvj.verify(reference, step_of(make()), ARGS, {"dp": 2})
    assert report.verdict == "UNKNOWN"
    assert "keeps something in Python" in str(report.reason)


def test_proved_with_a_condition_that_never_changes() -> None:
    report = tvj.verify(reference, step_of(lambda: True), ARGS, {"dp": 2})
    assert report.verdict == "PROVED", report.reason
    assert any("later ones are taken to do what the third does" in n for n in report.notes)


def test_refuted_without_synchronisation() -> None:
    assert tvj.verify(reference, step_of(lambda: False), ARGS, {"dp": 2}).verdict == "REFUTED"


def test_proved_jitted() -> None:
    """JAX runs the Python of a jitted step at its first call only, which synchronises."""
    assert tvj.verify(reference, step_of(counting(), jitted=True), ARGS, {"dp": 2}).verdict == "PROVED"


def test_a_cache_of_the_reference_hides_nothing() -> None:
    """REFUTED: a jitted function that reads a global was traced with another value for the reference."""
    doubles = [False]
    loss = jax.jit(lambda w, x: jnp.mean((x @ w) ** 2) * (2 if doubles[0] else 1))

    def one(w: Any, x: Any) -> Any:
        value, g = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * g, value

    def distributed(mesh: Any) -> Any:
        doubles[0] = True

        def step(w: Any, x: Any) -> Any:
            value, g = jax.value_and_grad(loss)(w, x)
            return w - 0.1 * lax.pmean(g, "dp"), lax.pmean(value, "dp")

        return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()), check_vma=False)

    args = (tvj.Reals((5,)), tvj.Reals((6, 5)))
    jax.make_jaxpr(one)(jnp.ones(5), jnp.ones((3, 5)))  # a share's size, as the ranks call it
    assert tvj.verify(one, distributed, args, {"dp": 2}).verdict != "PROVED"


def test_a_tensor_that_is_kept_for_the_next_step() -> None:
    """UNKNOWN: what the second call finds was made in the first."""
    kept: list[Any] = []

    def step(w: Any, x: Any) -> Any:
        total = jnp.mean((x @ w) ** 2) + sum(kept)
        kept[:] = [total]
        return w, total

    assert tvj.verify(step, step_of(lambda: True), ARGS, {"dp": 2}).verdict == "UNKNOWN"


def caught_float(total: Any) -> bool:
    try:
        return float(total) >= 0
    except jax.errors.ConcretizationTypeError:
        return True


def caught_bool(total: Any) -> bool:
    try:
        return bool(total >= 0)
    except Exception:
        return True


def caught_array(total: Any) -> bool:
    with contextlib.suppress(TypeError):
        return bool(np.asarray(total) >= 0)
    return True


def caught_int(total: Any) -> bool:
    try:
        return int(total) >= 0
    finally:
        return True  # noqa: B012, SIM107


def traced_alike(total: Any) -> bool:
    with contextlib.suppress(ZeroDivisionError):
        1 / (total.ndim - 1)
    return True


CAUGHT = [(f, "UNKNOWN") for f in (caught_float, caught_bool, caught_array, caught_int)]


@pytest.mark.parametrize(("synchronises", "verdict"), [*CAUGHT, (traced_alike, "PROVED")])
@pytest.mark.parametrize("helped", [False, True])
def test_an_error_of_tracing_that_is_caught(synchronises: Callable[[Any], bool], verdict: str, helped: bool) -> None:
    """UNKNOWN: a traced array has no number, the array of a call without tracing has one. PROVED: both go the same way."""

    def distributed(mesh: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
            asked = jax.tree.map(synchronises, {"x": jnp.sum(x)})["x"] if helped else synchronises(jnp.sum(x))
            return w - 0.1 * (lax.pmean(g, "dp") if asked else g), lax.pmean(loss, "dp")

        return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()), check_vma=False)

    report = tvj.verify(reference, distributed, ARGS, {"dp": 2})
    assert report.verdict == verdict, report.reason
    assert verdict == "PROVED" or "test_steps.py" in str(report.reason)


def asks_for_the_type(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def asks_for_the_type_by_another_name(x: Any) -> bool:
    return isinstance(x, Traced)


def asks_for_content(x: Any) -> bool:
    return not core.is_concrete(x)


def asks_for_the_state(x: Any) -> bool:
    return not core.trace_state_clean()


def asks_for_an_attribute(x: Any) -> bool:
    return not hasattr(x, "sharding")


ASKS = [asks_for_the_type, asks_for_the_type_by_another_name, asks_for_content, asks_for_the_state, asks_for_an_attribute]


@pytest.mark.parametrize("asks", ASKS)
@pytest.mark.parametrize(("jitted", "verdict"), [(False, "UNKNOWN"), (True, "PROVED")])
def test_code_that_asks_whether_it_is_traced(asks: Callable[[Any], bool], jitted: bool, verdict: str) -> None:
    """UNKNOWN: a call without a trace gets the other answer. PROVED: a jitted step gets this one."""

    def distributed(mesh: Any) -> Any:
        def local(w: Any, x: Any) -> Any:
            loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
            return w - 0.1 * lax.pmean(g, "dp"), lax.pmean(loss, "dp")

        mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()), check_vma=False)

        def step(w: Any, x: Any) -> Any:
            return mapped(w, x if asks(x) else 2 * x)

        return jax.jit(step) if jitted else step

    report = tvj.verify(reference, distributed, ARGS, {"dp": 2})
    assert report.verdict == verdict, report.reason
    assert verdict == "PROVED" or "test_steps.py" in str(report.reason)


def test_equal_fingerprints_are_of_equal_programs() -> None:
    x = jnp.ones((2, 3))
    table = np.arange(6.0, dtype=np.float32).reshape(2, 3)

    def of(fn: Callable[..., Any]) -> str:
        return fingerprint(jax.make_jaxpr(fn)(x))

    assert of(lambda a: jnp.sin(a) + table) == of(lambda b: jnp.sin(b) + table.copy())
    assert of(lambda a: jnp.sin(a) + table) != of(lambda a: jnp.sin(a) + (table + (table == 5)))
    assert of(lambda a: lax.scan(lambda c, r: (c + r, r), a[0], a)) != of(lambda a: lax.scan(lambda c, r: (c - r, r), a[0], a))
    assert of(lambda a: a - 2 * a) != of(lambda a: 2 * a - a)
    assert of(lambda a: a * 2.0) != of(lambda a: a * 2.5)
