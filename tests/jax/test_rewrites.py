"""Exact rewrites, each with a wrong twin; literals; signs; what is only declared."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from running import run, translated

import jax
import trainverify.jax as tvj
from jax import lax
from trainverify.jax.literals import Float32Literals, rounded, simplest

RNG = np.random.default_rng(1)
X = RNG.standard_normal((3, 5)).astype(np.float32)
IDS = RNG.integers(0, 5, (3,)).astype(np.int32)


def names(fn: Any, *arrays: Any) -> list[str]:
    return [op.name for op in translated(fn, *arrays)[0].ops]


def agrees(fn: Any, *arrays: Any) -> None:
    (found, *_), _ = run(fn, *arrays)
    np.testing.assert_allclose(found, fn(*arrays), rtol=2e-5, atol=2e-6)


def clipped(x: Any, most: float, factor: float) -> Any:
    norm = jnp.sqrt(jnp.sum(x * x))
    return jnp.where(norm < most, x, x / norm * factor)


@pytest.mark.parametrize("most", [0.5, 1.0, 100.0])
def test_clipping_by_a_norm_divides_by_no_zero(most: float) -> None:
    agrees(lambda x: clipped(x, most, most), X)
    assert "where" not in names(lambda x: clipped(x, most, most), X)


def test_clipping_to_another_norm_than_it_asks_for_is_left_as_it_is() -> None:
    agrees(lambda x: clipped(x, 0.5, 0.25), X)
    assert "where" in names(lambda x: clipped(x, 0.5, 0.25), X)


def test_a_quotient_by_a_choice_of_literals() -> None:
    agrees(lambda x: x / jnp.where(x > 0, 2.0, 4.0), X)
    assert "div" not in names(lambda x: x / jnp.where(x > 0, 2.0, 4.0), X)
    assert "div" in names(lambda x: x / jnp.where(x > 0, 2.0, x - 9), X)


def test_one_hots_by_comparison_count_from_where_they_start() -> None:
    agrees(lambda i: jax.nn.one_hot(i, 5), IDS)
    assert "eq" not in names(lambda i: jax.nn.one_hot(i, 5), IDS)
    agrees(lambda i: (i[:, None] == jnp.arange(1, 6)) * 1.0, IDS)
    assert "eq" not in names(lambda i: (i[:, None] == jnp.arange(1, 6)) * 1.0, IDS)
    agrees(lambda i: (i[:, None] == 2 * jnp.arange(5)) * 1.0, IDS)
    assert "eq" in names(lambda i: (i[:, None] == 2 * jnp.arange(5)) * 1.0, IDS)


def test_what_is_never_negative_is_its_own_absolute_value() -> None:
    assert "abs" not in names(lambda x: jnp.abs(jnp.exp(x).sum(0)), X)
    assert "abs" in names(lambda x: jnp.abs(jnp.exp(x).sum(0) - 1), X)
    assert "abs" in names(lambda x: jnp.abs(-jnp.exp(x)), X)


def test_the_maximum_of_a_line_that_is_not_masked_everywhere_is_a_number() -> None:
    """−∞ minus it is −∞; where a whole line may be masked, nothing is concluded."""

    def shifted(x: Any, strict: bool) -> Any:
        rows, columns = jnp.arange(3)[:, None], jnp.arange(5)[None]
        mask = rows > columns if strict else rows >= columns
        return jnp.exp(-jnp.inf - jnp.where(mask, x, -jnp.inf).max(1))

    assert names(lambda x: shifted(x, False), X)[-1] == "amax"  # computed, and not used
    assert names(lambda x: shifted(x, True), X)[-1] == "exp"


@pytest.mark.parametrize("value", [1 / 48, 0.1, 1e-5, 1 / 3, -2 / 7, 0.7978846, 1e30, 3.0, 0.02, 1 / 1000003])
def test_a_literal_rounds_to_the_float_that_it_was(value: float) -> None:
    single = float(np.float32(value))
    found = Float32Literals()(single)
    assert float(np.float32(float(found))) == single


def test_literals_that_xla_folds() -> None:
    assert Float32Literals()(float(np.float32(1) / np.float32(48))) == Fraction(1, 48)
    assert Float32Literals()(float(np.float32(0.1))) == Fraction(1, 10)
    assert Float32Literals()(-math.inf) == -math.inf
    assert rounded(0.1) is None  # no float32
    assert simplest(Fraction(3, 10), Fraction(4, 10)) == Fraction(1, 3)
    assert Float32Literals()(float(np.nextafter(np.float32(1 / 48), np.float32(1)))) != Fraction(1, 48)


def kernel(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] * 2 + 1


def doubled(x: Any) -> Any:
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, name="doubled")(x)


def with_kernel(mesh: Any) -> Any:
    def step(w: Any, x: Any) -> Any:
        return w, lax.psum(jnp.sum(doubled(x) * w), "dp")

    return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()), check_vma=False)


@pytest.mark.parametrize(
    ("given", "verdict"), [({}, "UNKNOWN"), ({"doubled": lambda x: 2 * x + 1}, "PROVED"), ({"doubled": lambda x: 2 * x}, "REFUTED")]
)
def test_a_kernel_is_what_it_is_declared_to_be(given: Any, verdict: str) -> None:
    def one(w: Any, x: Any) -> Any:
        return w, jnp.sum((2 * x + 1) * w)

    report = tvj.verify(one, with_kernel, (tvj.Reals((6,)), tvj.Reals((4, 6))), {"dp": 2}, meanings=given)
    assert report.verdict == verdict, report.reason
    assert bool(given) == any("declared: doubled" in a for a in report.assumptions)
    assert given or "pallas_call (1 times" in report.reason


def test_arrays_are_equal_only_by_content() -> None:
    """Expected: PROVED with an equal array, REFUTED with another one, UNKNOWN where another one makes the same function."""
    table, other = RNG.standard_normal((2, 6)).astype(np.float32)

    def one(w: Any, x: Any) -> Any:
        return w, jnp.sum(w * x * table)

    def many(used: Any, times: float = 1.0) -> Any:
        def made(mesh: Any) -> Any:
            def step(w: Any, x: Any) -> Any:
                return w, lax.psum(jnp.sum(w * x * used) * times, "dp")

            return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()))

        return made

    args = (tvj.Reals((6,)), tvj.Reals((4, 6)))
    assert tvj.verify(one, many(table.copy()), args, {"dp": 2}).verdict == "PROVED"
    assert tvj.verify(one, many(other), args, {"dp": 2}).verdict == "REFUTED"
    report = tvj.verify(one, many(table / 2, 2.0), args, {"dp": 2})
    assert report.verdict == "UNKNOWN"
    assert "for some content of constant." in report.reason


def test_what_check_vma_rejects_is_jaxs_word() -> None:
    def many(mesh: Any) -> Any:
        return jax.shard_map(lambda w, x: (w, jnp.sum(x * w)), mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()))

    with pytest.raises(tvj.CaptureError, match="JAX does not trace it"):
        tvj.verify(lambda w, x: (w, jnp.sum(x * w)), many, (tvj.Reals((6,)), tvj.Reals((4, 6))), {"dp": 2})


def test_a_step_without_shard_map_is_xlas_choice() -> None:
    def step(w: Any, x: Any) -> Any:
        return w, jnp.sum(x * w)

    with pytest.raises(tvj.CaptureError, match="no shard_map"):
        tvj.verify(step, jax.jit(step), (tvj.Reals((6,)), tvj.Reals((4, 6))), {"dp": 2})


def test_an_axis_that_is_left_to_xla_is_refused() -> None:
    """Expected: UNKNOWN that names the axis: what runs along it is XLA's choice."""
    shape = jax.ShapeDtypeStruct((8, 4), jnp.float32)

    def step(x):
        return jnp.sum(x * 2)

    def distributed(mesh):
        return jax.shard_map(
            lambda x: jax.lax.psum(jnp.sum(x * 2), "dp"),
            mesh=mesh,
            in_specs=P("dp"),
            out_specs=P(),
            axis_names={"dp"},
        )

    report = tvj.verify(step, distributed, (shape,), {"dp": 2, "tp": 4})
    assert report.verdict == "UNKNOWN"
    assert "axis tp" in report.reason
