"""Steps as users write them: meshes of the context, results in containers of their own, optimizers written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj
from jax import lax

PARAMS = {"w": tvj.Reals((3, 5)), "b": tvj.Reals((5,))}
ARGS = (PARAMS, tvj.Reals((4, 3)), tvj.Reals((4, 5)))
REDUCTIONS = pytest.mark.parametrize(("reduce", "verdict"), [(lax.pmean, "PROVED"), (lax.psum, "REFUTED")])
Reduce = Callable[[Any, str], Any]


def loss_of(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)


def updated(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)


def reference(params: Any, x: Any, y: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(params, x, y)
    return updated(params, grads), loss


def local(reduce: Reduce) -> Callable[..., Any]:
    def step(params: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        return updated(params, reduce(grads, "dp")), lax.pmean(loss, "dp")

    return step


@REDUCTIONS
@pytest.mark.parametrize("made", [True, False])
def test_the_mesh_of_the_context(reduce: Reduce, verdict: str, made: bool) -> None:
    def many(params: Any, x: Any, y: Any) -> Any:
        mapped = jax.shard_map(local(reduce), in_specs=(P(), P("dp"), P("dp")), out_specs=P(), check_vma=False)
        return mapped(params, x, y)

    assert tvj.verify(reference, (lambda mesh: many) if made else many, ARGS, {"dp": 2}, points=1).verdict == verdict


@REDUCTIONS
def test_a_mesh_that_the_user_has_set(reduce: Reduce, verdict: str) -> None:
    """Collectives are lowered for comparison without it; it is the mesh of the step if that names none."""
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("dp",))):
        report = tvj.verify(reference, jax.shard_map(local(reduce), **SPECS), ARGS, points=1)
    assert report.verdict == verdict, report.reason


SPECS: dict[str, Any] = {"in_specs": (P(), P("dp"), P("dp")), "out_specs": P(), "check_vma": False}


@jax.tree_util.register_dataclass
@dataclass
class State:
    params: Any
    momentum: Any
    step: Any


@jax.tree_util.register_dataclass
@dataclass
class Found:
    state: State
    loss: Any


@REDUCTIONS
@pytest.mark.parametrize("wrapped", [True, False])
def test_dataclasses(reduce: Reduce, verdict: str, wrapped: bool) -> None:
    """As an argument, as its new value, and as what holds the results."""

    def stepped(state: State, x: Any, y: Any, over: Any = lambda v: v, mean: Any = lambda v: v) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state.params, x, y)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state.momentum, over(grads))
        new = State(updated(state.params, momentum), momentum, state.step + 1)
        return Found(new, mean(loss)) if wrapped else new

    def many(mesh: Any) -> Any:
        def step(state: State, x: Any, y: Any) -> Any:
            return stepped(state, x, y, lambda g: reduce(g, "dp"), lambda v: lax.pmean(v, "dp"))

        return jax.shard_map(step, mesh=mesh, **SPECS)

    report = tvj.verify(stepped, many, (State(PARAMS, PARAMS, tvj.Count()), *ARGS[1:]), {"dp": 2}, points=1)
    assert report.verdict == verdict, report.reason
    shown = {o.name for o in report.obligations}
    assert "updated parameter state.params.w" in shown
    assert "updated state state.momentum.w" in shown


@REDUCTIONS
def test_adam_by_hand(reduce: Reduce, verdict: str) -> None:
    """That second moments are not negative follows from what the reference makes of them."""

    def stepped(params: Any, opt: Any, x: Any, y: Any, over: Any = lambda v: v, mean: Any = lambda v: v) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        grads, t = over(grads), opt["t"] + 1
        m = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, opt["m"], grads)
        v = jax.tree.map(lambda a, g: 0.99 * a + 0.01 * g * g, opt["v"], grads)
        new = jax.tree.map(lambda w, a, b: w - 0.01 * (a / (1 - 0.9**t)) / (jnp.sqrt(b / (1 - 0.99**t)) + 1e-8), params, m, v)
        return new, {"m": m, "v": v, "t": t}, mean(loss)

    def many(mesh: Any) -> Any:
        def step(params: Any, opt: Any, x: Any, y: Any) -> Any:
            return stepped(params, opt, x, y, lambda g: reduce(g, "dp"), lambda v: lax.pmean(v, "dp"))

        specs = (P(), P(), P("dp"), P("dp"))
        return jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)

    args = (PARAMS, {"m": PARAMS, "v": PARAMS, "t": tvj.Count()}, *ARGS[1:])
    assert tvj.verify(stepped, many, args, {"dp": 2}, points=1).verdict == verdict
    domains = tvj.pair(stepped, many, args, {"dp": 2}).logical.domains
    assert {n for n, d in domains.items() if d.kind == "nonnegative"} == {"opt.v.w", "opt.v.b", "opt.t"}


def test_what_may_become_negative_is_not_said_to_be_positive() -> None:
    """A sum that grows by what may be negative, though a root is taken of it."""

    def stepped(params: Any, opt: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        v = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g * jnp.abs(g), opt, grads)
        return jax.tree.map(lambda w, a: w - 0.1 * jnp.sqrt(a + 1.0), params, v), v, loss

    made = tvj.pair(stepped, lambda mesh: jax.shard_map(stepped, mesh=mesh, in_specs=P(), out_specs=P()), (PARAMS, *ARGS), {"dp": 2})
    assert not made.logical.domains
