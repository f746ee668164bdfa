"""Dropout: masks are the same wherever the key and the shape are. A key folded with the rank is another key."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj
from jax import lax

KEY = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
ARGS = ({"w1": tvj.Reals((6, 8)), "w2": tvj.Reals((8, 6))}, tvj.Reals((4, 6)), KEY)


def dropped(key: Any, x: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0.0)


def forward(params: Any, x: Any, key: Any, over: Any = None, which: int = 1) -> Any:
    first, *rest = jax.random.split(key, 3)
    y = dropped(first, x @ params["w1"]) if over is None else jax.nn.relu(x @ params["w1"])
    return dropped(rest[which], y @ params["w2"])


def stepped(forward: Any, mean: Any) -> Any:
    def step(params: Any, x: Any, key: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: mean(jnp.mean(forward(p, x, key) ** 2)))(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

    return step


def alone(params: Any, x: Any, key: Any) -> Any:
    """Only the second dropout: its activation is whole on every rank of tp."""
    return dropped(jax.random.split(key, 3)[2], jax.nn.relu(x @ params["w1"]) @ params["w2"])


def tensor_parallel(which: int = 2, fold: bool = False) -> Any:
    def local(params: Any, x: Any, key: Any) -> Any:
        key = jax.random.fold_in(key, lax.axis_index("tp")) if fold else key
        y = lax.psum(jax.nn.relu(x @ params["w1"]) @ params["w2"], "tp")
        return dropped(jax.random.split(key, 3)[which], y)

    def made(mesh: Any) -> Any:
        where = {"w1": P(None, "tp"), "w2": P("tp", None)}
        step = stepped(local, lambda loss: loss if not fold else lax.pmean(loss, "tp"))
        return jax.shard_map(step, mesh=mesh, in_specs=(where, P(), P()), out_specs=(where, P()))

    return made


def data_parallel(mesh: Any) -> Any:
    """Every rank draws the mask of its own rows, with the same key: not the rows of the whole mask."""
    where = {"w1": P(), "w2": P()}
    step = stepped(alone, lambda loss: lax.pmean(loss, "dp"))
    return jax.shard_map(step, mesh=mesh, in_specs=(where, P("dp"), P()), out_specs=(where, P()))


REFERENCE = stepped(alone, lambda loss: loss)


def test_the_same_key_and_shape_is_the_same_mask() -> None:
    report = tvj.verify(REFERENCE, tensor_parallel(), ARGS, {"tp": 2})
    assert report.verdict == "PROVED", report.reason
    assert any("random numbers (uniform) are the same" in a for a in report.assumptions)


@pytest.mark.parametrize(
    ("many", "mesh"), [(tensor_parallel(which=1), {"tp": 2}), (tensor_parallel(fold=True), {"tp": 2}), (data_parallel, {"dp": 2})]
)
def test_another_key_or_shape_is_refuted(many: Any, mesh: Any) -> None:
    report = tvj.verify(REFERENCE, many, ARGS, mesh)
    assert report.verdict == "REFUTED", report.reason
    assert report.place is not None
    assert report.place.line is not None
    assert report.place.line.file.endswith("test_randomness.py")


def test_what_draws_is_not_replayed() -> None:
    with pytest.raises(tvj.CaptureError, match="random numbers"):
        tvj.replay(REFERENCE, tensor_parallel(), ARGS, tvj.pair(REFERENCE, tensor_parallel(), ARGS, {"tp": 2}))


def test_a_function_that_is_only_called_so_is_not_jaxs() -> None:
    @jax.jit
    def _uniform(key: Any, low: Any, high: Any) -> Any:
        return jax.random.uniform(key, (4, 6)) ** 2 * (high - low)

    def step(params: Any, x: Any, key: Any) -> Any:
        return params, jnp.sum(x * _uniform(key, 0.0, 1.0))

    made = tvj.pair(step, lambda mesh: jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P()), ARGS, {"dp": 2})
    assert any(op.name in ("square", "mul") and "uniform" in str(op) for op in made.logical.ops)


def scanned(turned: bool, chosen: bool = False) -> Any:
    """A mask for each of two blocks of rows, drawn with keys of their own."""

    def step(params: Any, x: Any, key: Any) -> Any:
        keys = jax.random.split(key, 2)
        keys = keys[::-1] if turned else keys
        if chosen:
            keys = jnp.where(jnp.arange(2) == 1, keys[0], keys)  # one key for both

        def block(total: Any, row: Any) -> Any:
            mask = jax.random.bernoulli(row[0], 0.9, (2, 6))
            return total + jnp.sum(jnp.where(mask, row[1], 0.0)), None

        total, _ = lax.scan(block, jnp.zeros(()), (keys, (x @ params["w1"] @ params["w2"]).reshape(2, 2, 6)))
        return params, total

    return step


@pytest.mark.parametrize(("turned", "chosen", "verdict"), [(False, False, "PROVED"), (True, False, None), (False, True, None)])
def test_keys_that_a_scan_takes_one_by_one(turned: bool, chosen: bool, verdict: str | None) -> None:
    """Another order of keys, or one key for all steps, is not PROVED."""

    def made(mesh: Any) -> Any:
        where = {"w1": P(), "w2": P()}
        return jax.shard_map(scanned(turned, chosen), mesh=mesh, in_specs=(where, P(), P()), out_specs=(where, P()), check_vma=False)

    report = tvj.verify(scanned(False), made, ARGS, {"tp": 2})
    assert (report.verdict == "PROVED") == (verdict == "PROVED"), report.reason


def test_keys_of_another_generator() -> None:
    """Not PROVED: the same seed, and another generator."""

    def step(impl: str) -> Any:
        def made(params: Any, x: Any) -> Any:
            mask = jax.random.bernoulli(jax.random.key(7, impl=impl), 0.9, x.shape)
            return params, jnp.sum(jnp.where(mask, x @ params["w1"] @ params["w2"], 0.0))

        return made

    def distributed(mesh: Any, impl: str) -> Any:
        where = {"w1": P(), "w2": P()}
        return jax.shard_map(step(impl), mesh=mesh, in_specs=(where, P()), out_specs=(where, P()), check_vma=False)

    one = step("threefry2x32")
    assert tvj.verify(one, lambda mesh: distributed(mesh, "threefry2x32"), ARGS[:2], {"tp": 2}).verdict == "PROVED"
    assert tvj.verify(one, lambda mesh: distributed(mesh, "rbg"), ARGS[:2], {"tp": 2}).verdict != "PROVED"


def drawing(f: Any, args: Any, specs: Any) -> tuple[Any, Any, Any]:
    """A step that multiplies rows by what is drawn with keys; arguments besides, and how they are cut."""

    def step(p: Any, x: Any, *rest: Any) -> Any:
        return {"z": p["z"] * 0.5}, x * f(*rest)

    def made(mesh: Any) -> Any:
        return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("d"), *specs), out_specs=(P(), P("d")), check_vma=False)

    return step, made, ({"z": tvj.Reals((3,))}, tvj.Reals((8, 6)), *args)


def judged(one: Any, many: Any, args: Any = (), specs: Any = ()) -> str:
    reference, _, given = drawing(one, args, specs)
    return tvj.verify(reference, drawing(many, args, specs)[1], given, {"d": 2}, roles=("parameters", "metric")).verdict


def uniform(key: Any, shape: Any = (6,)) -> Any:
    return jax.random.uniform(key, shape)


def keys(*shape: int) -> Any:
    return jax.random.split(jax.random.key(0), shape)


def each(keys: Any) -> Any:
    return jax.vmap(lambda k: uniform(k, ()))(keys)


@pytest.mark.parametrize(
    ("one", "right", "wrong"),
    [
        (lambda: each(keys(3, 6)[0]), lambda: jnp.stack([uniform(k, ()) for k in keys(6)]), lambda: uniform(keys(3, 6)[0, 0])),
        (lambda: uniform(keys(2)[1]), lambda: uniform(keys(3)[1]), lambda: uniform(keys(3)[2])),
        (lambda: uniform(keys(2)[1]), lambda: uniform(jax.random.fold_in(jax.random.key(0), 1)), lambda: uniform(keys(1)[0])),
        (lambda: uniform(keys(1)[0]), lambda: uniform(keys(1)[0], (5, 6))[0], lambda: uniform(keys(1)[0], (5, 6))[1]),
        (lambda: uniform(jax.random.key(3)), lambda: uniform(jax.random.PRNGKey(3)), lambda: uniform(jax.random.PRNGKey(4))),
        (
            lambda: 3 * uniform(jax.random.key(3)) - 1,
            lambda: jax.random.uniform(jax.random.key(3), (6,), minval=-1, maxval=2),
            lambda: jax.random.uniform(jax.random.key(3), (6,), minval=-1, maxval=3),
        ),
        (
            lambda: jnp.repeat(jnp.stack([uniform(k) for k in keys(2)]), 4, 0),
            lambda: uniform(keys(2)[lax.axis_index("d")]),
            lambda: uniform(keys(2)[1 - lax.axis_index("d")]),
        ),
    ],
)
def test_keys_and_numbers_by_their_places(one: Any, right: Any, wrong: Any) -> None:
    """PROVED: one stream of numbers for each key, one key for each number. REFUTED: the next one."""
    assert judged(one, right) == "PROVED"
    assert judged(one, wrong) == "REFUTED"


def test_a_key_from_a_share_of_seeds_has_no_name() -> None:
    """UNKNOWN: the first of a rank's seeds is not the first seed."""

    def first(seeds: Any) -> Any:
        return uniform(jax.vmap(jax.random.key)(seeds)[0])

    assert judged(first, first, [tvj.Ids((8,), 50)], [P("d")]) == "UNKNOWN"


def test_a_key_from_one_number() -> None:
    """PROVED: the key of this step; UNKNOWN: of the next."""

    def at(step: Any) -> Any:
        return uniform(jax.random.fold_in(jax.random.key(0), step))

    assert judged(at, at, [tvj.Count()], [P()]) == "PROVED"
    assert judged(at, lambda step: at(step + 1), [tvj.Count()], [P()]) == "UNKNOWN"


@pytest.mark.parametrize("raw", [True, False])
def test_new_keys_are_derived_as_the_references_are(raw: bool) -> None:
    """PROVED: the second key is kept, the first one used. UNKNOWN: the used one is kept. REFUTED: the kept one is used."""

    def stepped(used: int, kept: int) -> Any:
        def step(p: Any, key: Any, x: Any) -> Any:
            both = jax.random.split(key)
            return {"z": p["z"] * 0.5}, both[kept], x * uniform(both[used])

        return step

    def verdict(used: int, kept: int) -> str:
        def made(mesh: Any) -> Any:
            return jax.shard_map(stepped(used, kept), mesh=mesh, in_specs=(P(), P(), P("d")), out_specs=(P(), P(), P("d")), check_vma=False)

        given = jax.ShapeDtypeStruct((2,), jnp.uint32) if raw else KEY
        args = ({"z": tvj.Reals((3,))}, given, tvj.Reals((8, 6)))
        return tvj.verify(stepped(0, 1), made, args, {"d": 2}, roles=("parameters", "state", "metric")).verdict

    assert [verdict(0, 1), verdict(0, 0), verdict(1, 1)] == ["PROVED", "UNKNOWN", "REFUTED"]


def scaled(key: Any, x: Any, size: int = 8) -> Any:
    return x * jax.random.uniform(key, (size,), jnp.float32)[: x.shape[0]]


def drawn_outside(pick: Any, size: int) -> Any:
    """The numbers that a key of the arguments draws, and the sum over the ranks' shares."""

    def distributed(mesh: Any) -> Any:
        add = jax.shard_map(lambda y: lax.psum(jnp.sum(y), "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P())
        return lambda keys, x: add(scaled(pick(keys), x, size))

    return distributed


@pytest.mark.parametrize(("other", "pick"), [("rng[0]", lambda k: k["rng[0]"]), ("rng[0]", lambda k: k["rng"][0])])
def test_a_key_with_the_name_of_one_of_several(other: str, pick: Any) -> None:
    """UNKNOWN: keys are known by their names, and an argument has that of another key. PROVED: a name of its own."""
    several = jax.ShapeDtypeStruct((2,), KEY.dtype)

    def alone(keys: Any, x: Any) -> Any:
        return jnp.sum(scaled(keys["rng"][0], x))

    args = ({"rng": several, other: KEY}, tvj.Reals((4,)))
    assert tvj.verify(alone, drawn_outside(pick, 8), args, {"dp": 2}).verdict == "UNKNOWN"
    named = ({"rng": several, "other": KEY}, tvj.Reals((4,)))
    assert tvj.verify(alone, drawn_outside(lambda k: k["rng"][0], 8), named, {"dp": 2}).verdict == "PROVED"


@pytest.mark.parametrize(("inside", "verdict"), [(False, "UNKNOWN"), (True, "PROVED")])
def test_draws_by_other_laws(inside: bool, verdict: str) -> None:
    """UNKNOWN: the first four of eight numbers are not those that a draw of four gives. PROVED: by default they are."""

    def alone(key: Any, x: Any) -> Any:
        with jax.threefry_partitionable(inside):
            return jnp.sum(scaled(key, x))

    def distributed(mesh: Any) -> Any:
        def step(key: Any, x: Any) -> Any:
            with jax.threefry_partitionable(inside):
                return drawn_outside(lambda k: k, 4)(mesh)(key, x)

        return step

    report = tvj.verify(alone, distributed, (KEY, tvj.Reals((4,))), {"dp": 2})
    assert report.verdict == verdict, report.reason
