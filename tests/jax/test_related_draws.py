"""Several draws by one key may be the same numbers: uniform numbers and normal ones are both made from its bits. What differs only if
they are unrelated is not REFUTED; what differs for the numbers that JAX draws is."""

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

Draw = Callable[[Any], Any]
KEY = jax.eval_shape(lambda: jax.random.key(0))
OTHER = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))
TINY = float(np.finfo(np.float32).tiny)


def judged(one: Draw, many: Draw, key: Any = KEY) -> Any:
    """Of rows that are multiplied by what is drawn."""

    def step(draw: Draw) -> Any:
        return lambda p, key, x: ({"z": p["z"] * 0.5}, x * draw(key))

    def made(mesh: Any) -> Any:
        return jax.shard_map(step(many), mesh=mesh, in_specs=(P(), P(), P("d")), out_specs=(P(), P("d")), check_vma=False)

    args = ({"z": tvj.Reals((3,))}, key, tvj.Reals((4, 7)))
    return tvj.verify(step(one), made, args, {"d": 2}, roles=("parameters", "metric"))


def verdict(one: Draw, many: Draw, key: Any = KEY) -> str:
    return str(judged(one, many, key).verdict)


def uniform(key: Any, low: float = 0.0, high: float = 1.0) -> Any:
    return jax.random.uniform(key, (7,), minval=low, maxval=high)


def normal(key: Any) -> Any:
    return jax.random.normal(key, (7,))


def gumbel(key: Any) -> Any:
    return jax.random.gumbel(key, (7,))


def integers(key: Any) -> Any:
    return jax.random.randint(key, (7,), 2, 9).astype(jnp.float32)


def order(key: Any) -> Any:
    return jax.random.permutation(key, jnp.arange(7.0))


EAGER = normal(jax.random.key(5))

RIGHT: dict[str, tuple[Draw, Draw]] = {
    "normal by its sign": (lambda k: (normal(k) < 0).astype(jnp.float32), lambda k: (uniform(k, -1.0) < 0).astype(jnp.float32)),
    "gumbel by hand": (gumbel, lambda k: -jnp.log(-jnp.log(uniform(k, TINY)))),
    "integers by their span": (integers, lambda k: 2.0 + jax.random.randint(k, (7,), 0, 7).astype(jnp.float32)),
    "an order of other things": (order, lambda k: jax.random.permutation(k, 7).astype(jnp.float32)),
    "a key of one split": (lambda k: gumbel(jax.random.split(k)[1]), lambda k: -jnp.log(-jnp.log(uniform(jax.random.fold_in(k, 1), TINY)))),
    "drawn before": (lambda k: normal(jax.random.key(5)), lambda k: EAGER),
}

WRONG: dict[str, tuple[Draw, Draw]] = {
    "another function": (normal, gumbel),
    "another sign": (lambda k: (normal(k) < 0).astype(jnp.float32), lambda k: (uniform(k, -1.0) > 0).astype(jnp.float32)),
    "another scale": (gumbel, lambda k: -jnp.log(-2 * jnp.log(uniform(k, TINY)))),
    "other integers": (integers, lambda k: 3.0 + jax.random.randint(k, (7,), 0, 7).astype(jnp.float32)),
    "another order": (order, lambda k: jnp.argsort(jax.random.permutation(k, 7)).astype(jnp.float32)),
    "another key": (lambda k: normal(jax.random.split(k)[1]), lambda k: normal(jax.random.fold_in(k, 2))),
    "of another key": (lambda k: gumbel(jax.random.fold_in(k, 1)), lambda k: -jnp.log(-jnp.log(uniform(jax.random.fold_in(k, 2), TINY)))),
    "drawn before with another seed": (lambda k: normal(jax.random.key(6)), lambda k: EAGER),
    "the same draws": (lambda k: normal(k) + uniform(k), lambda k: normal(k) - uniform(k)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_the_same_numbers_by_other_functions(name: str) -> None:
    """PROVED or UNKNOWN."""
    report = judged(*RIGHT[name])
    assert report.verdict != "REFUTED", report.reason
    assert report.verdict == "PROVED" or "may be the same" in report.reason, report.reason


@pytest.mark.parametrize("name", WRONG)
def test_other_numbers_of_one_key(name: str) -> None:
    """REFUTED: what JAX draws differs."""
    assert verdict(*WRONG[name]) == "REFUTED"


def test_numbers_of_less_precision() -> None:
    """UNKNOWN: rounding of 8 bits hides what is equal."""
    half = jnp.bfloat16
    assert verdict(lambda k: jax.random.normal(k, (7,), half), lambda k: jax.random.gumbel(k, (7,), half)) == "UNKNOWN"


@pytest.mark.parametrize(
    ("one", "many"),
    [
        (lambda k: normal(jax.random.split(k, 1)[0]), lambda k: normal(jax.random.fold_in(k, 0))),
        (normal, lambda k: jax.random.normal(k, (14,))[:7]),
    ],
)
def test_generators_without_these_laws(one: Draw, many: Draw) -> None:
    """UNKNOWN: whether keys that are derived otherwise, or longer draws, give the same numbers is the generator's choice."""
    assert verdict(one, many, OTHER) == "UNKNOWN"
    assert verdict(normal, normal, OTHER) == "PROVED"
    assert verdict(normal, lambda k: 2 * normal(k), OTHER) == "REFUTED"
