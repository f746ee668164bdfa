"""Names that say nothing: mesh axes that are called as our own dimensions, containers of another type, metrics whose paths read alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj
from jax import lax

ARGS = ({"w": tvj.Reals((3, 5))}, tvj.Reals((8, 3)))


def loss(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w) ** 2)


def reference(p: Any, x: Any) -> Any:
    return {"w": p["w"] * 0.5}, loss(p["w"], x)


def on(axes: tuple[str, str], over: Any) -> Any:
    """Rows are cut by both axes, the loss is the mean over some."""

    def made(mesh: Any) -> Any:
        def step(p: Any, x: Any) -> Any:
            return {"w": p["w"] * 0.5}, lax.pmean(loss(p["w"], x), over)

        return jax.shard_map(step, mesh=mesh, in_specs=(P(), P(axes)), out_specs=(P(), P()), check_vma=False)

    return made


@pytest.mark.parametrize("axes", [("n1", "n0"), ("n0", "n1"), ("n0", "n_0"), ("dp", "n1")])
def test_mesh_axes_with_names_of_dimensions(axes: tuple[str, str]) -> None:
    """PROVED: the mean over all ranks; REFUTED: over some."""
    mesh = dict.fromkeys(axes, 2)
    assert tvj.verify(reference, on(axes, axes), ARGS, mesh, points=1).verdict == "PROVED"
    assert tvj.verify(reference, on(axes, axes[0]), ARGS, mesh, points=1).verdict == "REFUTED"


class State(NamedTuple):
    w: Any
    b: Any


class Turned(NamedTuple):
    b: Any
    w: Any


TWO = (tvj.Reals((3,)), tvj.Reals((3,)))
OTHERS = (tvj.Reals((3,)), tvj.Reals((2,)))


def judged(one: Callable[[Any], Any], many: Callable[[Any], Any], state: Any) -> str:
    """Of new values of a state."""

    def stepped(f: Callable[[Any], Any]) -> Any:
        return lambda s, x: (f(s), jnp.sum(x))

    def made(mesh: Any) -> Any:
        def step(held: Any, rows: Any) -> Any:
            return many(held), lax.psum(jnp.sum(rows), "d")

        return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("d")), out_specs=(P(), P()), check_vma=False)

    return str(tvj.verify(stepped(one), made, (state, tvj.Reals((4, 2))), {"d": 2}, points=1).verdict)


def halved(s: Any) -> Any:
    return State(s.w * 0.5, s.b * 0.25)


@pytest.mark.parametrize("kinds", [TWO, OTHERS])
def test_tuples_by_position(kinds: Any) -> None:
    """PROVED: in order; REFUTED or INVALID: in another order, whatever the fields are called."""
    assert judged(halved, lambda s: (s.w * 0.5, s.b * 0.25), State(*kinds)) == "PROVED"
    assert judged(halved, lambda s: (s.b * 0.25, s.w * 0.5), State(*kinds)) in ("REFUTED", "INVALID")
    assert judged(halved, lambda s: Turned(s.b * 0.25, s.w * 0.5), State(*kinds)) == "INVALID"
    assert judged(halved, lambda s: [s.w * 0.5, s.b * 0.25], State(*kinds)) == "INVALID"


@pytest.mark.parametrize("kinds", [TWO, OTHERS])
def test_mappings_by_key(kinds: Any) -> None:
    """PROVED: the same keys, in any order; REFUTED: each key has the other's factor."""
    state = OrderedDict(w=kinds[0], b=kinds[1])

    def scaled(kind: Any, w: float, b: float) -> Callable[[Any], Any]:
        return lambda s: kind(w=s["w"] * w, b=s["b"] * b)

    assert judged(scaled(OrderedDict, 0.5, 0.25), scaled(dict, 0.5, 0.25), state) == "PROVED"
    assert judged(scaled(OrderedDict, 0.5, 0.25), scaled(dict, 0.25, 0.5), state) == "REFUTED"


@pytest.mark.parametrize("top", [True, False])
def test_paths_that_read_alike(top: bool) -> None:
    """PROVED: each metric; REFUTED: each is the other."""

    def metrics(x: Any, over: Callable[[Any], Any], turned: bool) -> Any:
        found = [over(jnp.sum(x)), over(jnp.sum(x**2))]
        one, other = found[::-1] if turned else found
        return {"a": {"b": one}, "a.b": other}

    def reference(x: Any) -> Any:
        found = metrics(x, lambda v: v, False)
        return {**found, "loss": jnp.sum(x)} if top else (jnp.sum(x), found)

    def made(turned: bool) -> Any:
        def step(x: Any) -> Any:
            found = metrics(x, lambda v: lax.psum(v, "d"), turned)
            loss = lax.psum(jnp.sum(x), "d")
            return {**found, "loss": loss} if top else (loss, found)

        return lambda mesh: jax.shard_map(step, mesh=mesh, in_specs=(P("d"),), out_specs=P(), check_vma=False)

    roles = ("metric", "metric", "loss") if top else None
    args = (tvj.Reals((4, 3)),)
    assert tvj.verify(reference, made(False), args, {"d": 2}, roles, points=1).verdict == "PROVED"
    assert tvj.verify(reference, made(True), args, {"d": 2}, roles, points=1).verdict == "REFUTED"


def test_arguments_whose_paths_read_alike() -> None:
    """PROVED: the same weight; REFUTED: the other one. The step calls its arguments otherwise."""

    def reference(p: Any, x: Any) -> Any:
        return p, jnp.sum(x @ p["a"]["b"])

    def made(turned: bool) -> Any:
        def step(q: Any, rows: Any) -> Any:
            return q, lax.psum(jnp.sum(rows @ (q["a.b"] if turned else q["a"]["b"])), "d")

        return lambda mesh: jax.shard_map(step, mesh=mesh, in_specs=(P(), P("d")), out_specs=(P(), P()), check_vma=False)

    args = ({"a": {"b": tvj.Reals((3,))}, "a.b": tvj.Reals((3,))}, tvj.Reals((4, 3)))
    assert tvj.verify(reference, made(False), args, {"d": 2}, points=1).verdict == "PROVED"
    assert tvj.verify(reference, made(True), args, {"d": 2}, points=1).verdict == "REFUTED"


@pytest.mark.parametrize("axes", [("data-parallel", "model (tp)"), ("0", "1"), ("a b", "a_b"), ("x.y", "x_y")])
def test_mesh_axes_that_are_no_words(axes: tuple[str, str]) -> None:
    """PROVED: the mean over all ranks; REFUTED: over some."""
    mesh = dict.fromkeys(axes, 2)
    assert tvj.verify(reference, on(axes, axes), ARGS, mesh, points=1).verdict == "PROVED"
    assert tvj.verify(reference, on(axes, axes[0]), ARGS, mesh, points=1).verdict == "REFUTED"


def test_steps_on_such_a_mesh_are_replayed() -> None:
    """PROVED, and JAX computes the same."""
    axes = ("data-parallel", "model (tp)")
    made = tvj.pair(reference, on(axes, axes), ARGS, dict.fromkeys(axes, 2))
    assert tvj.replay(reference, on(axes, axes), ARGS, made).agrees
