"""Arrays that code closes over have their content: what differs with it is REFUTED. Step counts may be arguments alone."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj
from jax import lax

ARGS = ({"w": tvj.Reals((3,))}, tvj.Reals((4, 3)))
MASK = np.array([1.0, 0.0, 1.0], np.float32)


def step(params: Any, x: Any, over: Any = lambda v: v, mask: Any = MASK) -> Any:
    loss = over(jnp.mean((x * mask) @ params["w"]))
    return {"w": params["w"] - 0.1 * over(jnp.mean(x * mask, 0))}, loss


def distributed(reduce: Any, mask: Any) -> Any:
    def made(mesh: Any) -> Any:
        def local(params: Any, x: Any) -> Any:
            return step(params, x, lambda v: reduce(v, "dp"), mask)

        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()), check_vma=False)

    return made


@pytest.mark.parametrize(
    ("reduce", "mask", "verdict"),
    [
        (lax.pmean, MASK, "PROVED"),
        (lax.psum, MASK, "REFUTED"),
        (lax.pmean, np.array([1.0, 1.0, 1.0], np.float32), "REFUTED"),
        (lax.pmean, MASK[:1] * MASK, "PROVED"),  # the same content
        (lax.pmean, np.array([0.0, 1.0, 2.0], np.float32), "REFUTED"),
    ],
)
def test_content(reduce: Any, mask: Any, verdict: str) -> None:
    report = tvj.verify(step, distributed(reduce, mask), ARGS, {"dp": 2})
    assert report.verdict == verdict, report.reason


@pytest.mark.parametrize(("later", "verdict"), [(1, "PROVED"), (2, "REFUTED")])
def test_a_count_that_is_an_argument_alone(later: int, verdict: str) -> None:
    args = ({"w": tvj.Reals((3,))}, tvj.Count(), tvj.Reals((4, 3)))

    def decayed(params: Any, n: Any, x: Any, over: Any = lambda v: v, later: int = 1) -> Any:
        return {"w": params["w"] - 0.1 / (n + later) * over(jnp.mean(x, 0))}, over(jnp.mean(x @ params["w"]))

    def made(mesh: Any) -> Any:
        def local(params: Any, n: Any, x: Any) -> Any:
            return decayed(params, n, x, lambda v: lax.pmean(v, "dp"), later)

        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P(), P("dp")), out_specs=(P(), P()), check_vma=False)

    report = tvj.verify(decayed, made, args, {"dp": 2})
    assert report.verdict == verdict, report.reason


@pytest.mark.parametrize(
    ("one", "right", "wrong"),
    [
        (lambda x: x / jnp.sqrt(6.0), lambda x: x * 6.0**-0.5, lambda x: x * 6.0**-0.51),
        (lambda x: jnp.exp2(x), lambda x: jnp.exp(x * np.log(2)), lambda x: jnp.exp(x * 0.69314)),
    ],
)
def test_literals_that_are_rounded_to_float32(one: Any, right: Any, wrong: Any) -> None:
    """Not REFUTED: only the rounding of literals differs. REFUTED: a literal that is another one."""

    def step(f: Any, over: Any = lambda v: v) -> Any:
        return lambda params, x: ({"w": params["w"] - over(jnp.mean(f(x), 0))}, over(jnp.mean(f(x) @ params["w"])))

    def verdict(f: Any) -> str:
        def made(mesh: Any) -> Any:
            mapped = step(f, lambda v: lax.pmean(v, "dp"))
            return jax.shard_map(mapped, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()), check_vma=False)

        return tvj.verify(step(one), made, ARGS, {"dp": 2}).verdict

    assert verdict(one) == "PROVED"
    assert verdict(right) in ("PROVED", "UNKNOWN")
    assert verdict(wrong) == "REFUTED"


@pytest.mark.parametrize(
    ("asked", "verdict"),
    [(lambda x: x / (1 + x * x), "PROVED"), (lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x)), "PROVED"), (lambda x: x / (x * x), "UNKNOWN")],
)
def test_a_quotient_that_is_asked_about(asked: Any, verdict: str) -> None:
    """PROVED: a quotient is finite if its divisor is never 0. UNKNOWN: it may be 0, and then another number is chosen."""

    def one(params: Any, x: Any) -> Any:
        return params, jnp.sum(jnp.where(jnp.isfinite(asked(x)), x, 5.0))

    def made(mesh: Any) -> Any:
        return jax.shard_map(
            lambda params, x: (params, lax.psum(jnp.sum(x), "dp")),
            mesh=mesh,
            in_specs=(P(), P("dp")),
            out_specs=(P(), P()),
            check_vma=False,
        )

    assert tvj.verify(one, made, ARGS, {"dp": 2}).verdict == verdict


@pytest.mark.parametrize(("reduce", "verdict"), [(lax.psum, "PROVED"), (lambda v, axis: v, "REFUTED")])
def test_a_convolution_that_is_differentiated(reduce: Any, verdict: str) -> None:
    """PROVED: the gradient of a kernel is summed over the rows of all ranks. REFUTED: it is not."""

    def grown(params: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.sum(lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")) ** 2)

        return jax.value_and_grad(loss)(params["w"])

    def one(params: Any, x: Any) -> Any:
        loss, grad = grown(params, x)
        return {"w": params["w"] - 0.1 * grad}, loss

    def made(mesh: Any) -> Any:
        def local(params: Any, x: Any) -> Any:
            loss, grad = grown(params, x)
            return {"w": params["w"] - 0.1 * reduce(grad, "dp")}, lax.psum(loss, "dp")

        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()), check_vma=False)

    args = ({"w": tvj.Reals((3, 2, 5))}, tvj.Reals((4, 6, 2)))
    assert tvj.verify(one, made, args, {"dp": 2}).verdict == verdict


@pytest.mark.parametrize(("reduce", "verdict"), [(lax.pmean, "PROVED"), (lax.psum, "REFUTED")])
@pytest.mark.parametrize("roles", [None, ("gradients", "loss", "parameters")])
def test_gradients_before_the_parameters(roles: Any, reduce: Any, verdict: str) -> None:
    """The results of a step by name: their order is that of the names."""

    def named(params: Any, x: Any, over: Any = lambda v: v) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
        grads = jax.tree.map(over, grads)
        return {"grads": grads, "loss": loss, "params": jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)}

    def made(mesh: Any) -> Any:
        def local(params: Any, x: Any) -> Any:
            found = named(params, x, lambda v: reduce(v, "dp"))
            return {**found, "loss": lax.pmean(found["loss"], "dp")}

        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check_vma=False)

    assert tvj.verify(named, made, ARGS, {"dp": 2}, roles).verdict == verdict


@pytest.mark.parametrize(("times", "verdict"), [(1, "PROVED"), (2, "REFUTED")])
def test_integers_of_which_there_are_none(times: int, verdict: str) -> None:
    """PROVED: no rows are taken, and nothing is added; REFUTED: the rows count twice."""
    none = np.zeros((0,), np.int32)

    def distributed(mesh: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            more = jnp.sum((x[:1, 0] > 0).astype(jnp.int32)[:0] * jnp.asarray(none))
            return w - times * lax.psum(jnp.sum(x, 0), "dp"), lax.psum(jnp.sum(x) + more, "dp")

        return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()), check_vma=False)

    report = tvj.verify(lambda w, x: (w - jnp.sum(x, 0), jnp.sum(x)), distributed, (tvj.Reals((3,)), tvj.Reals((4, 3))), {"dp": 2})
    assert report.verdict == verdict, report.reason
