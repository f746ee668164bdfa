"""Every row of the mapping against JAX on numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import jax.numpy as jnp
import numpy as np
from running import run, translated

import jax
from jax import lax
from trainverify.jax.mappings import MAPPINGS, communication
from trainverify.jax.values import Opaque

RNG = np.random.default_rng(0)
X, Y = (RNG.standard_normal((3, 5)).astype(np.float32) for _ in range(2))
POS = np.abs(X) + np.float32(0.5)
Z = RNG.standard_normal((2, 3, 7)).astype(np.float32)
IDS = RNG.integers(0, 5, (3, 2)).astype(np.int32)
B = X > 0
IMAGE, KERNEL = RNG.standard_normal((2, 3, 8, 7)).astype(np.float32), RNG.standard_normal((5, 3, 3, 2)).astype(np.float32)
TIES = np.round(2 * IMAGE)


def dot(x: Any, y: Any) -> Any:
    return lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,))))


def conv(**options: Any) -> Callable[..., Any]:
    return lambda x, w: lax.conv_general_dilated(x, w, **options)


def pooled(kind: str, x: Any) -> Any:
    """Windows that overlap, with some of the padding, of ties too."""
    reduce, start = {"sum": (lax.add, 0.0), "max": (lax.max, -jnp.inf), "min": (lax.min, jnp.inf)}[kind]
    return lax.reduce_window(x, start, reduce, (1, 1, 3, 2), (1, 1, 2, 1), ((0, 0), (0, 0), (1, 1), (0, 1)))


def take(x: Any, i: Any) -> Any:
    return x[:, i]


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "add": (lambda x, y: x + y + 2.5, (X, Y)),
    "sub": (lambda x, y: 1 - x - y - 0.5, (X, Y)),
    "mul": (lambda x, y: 3 * x * y * 0.1, (X, Y)),
    "div": (lambda x, y: 1 / x / y / 7 / 0.3, (POS, POS + 1)),
    "max": (lambda x, y: jnp.maximum(jnp.maximum(x, y), 0.1) + jnp.maximum(x, 0) + jnp.maximum(-jnp.inf, x), (X, Y)),
    "min": (lambda x, y: jnp.minimum(jnp.minimum(x, y), 0.1), (X, Y)),
    "neg": (lambda x: -x, (X,)),
    "exp": (lambda x: jnp.exp(x) + lax.exp2(x) + jnp.expm1(x), (X,)),
    "log": (lambda x: jnp.log(x) + jnp.log1p(x), (POS,)),
    "trig": (lambda x: jnp.sin(x) + jnp.cos(x), (X,)),
    "smooth": (lambda x: jnp.tanh(x) + lax.erf(x) + lax.erfc(x) + lax.logistic(x), (X,)),
    "roots": (lambda x: jnp.sqrt(x) + lax.rsqrt(x), (POS,)),
    "sign": (lambda x: jnp.abs(x) + jnp.sign(x) + jnp.floor(x) + jnp.ceil(3 * x), (X,)),
    "numbered": (lambda x, i: lax.select_n(jnp.tile(i[:, :1] - 1, (1, 5)), x, 2 * x, x * x), (X, IDS)),
    "hyperbolic": (lambda x: jnp.sinh(x) + jnp.cosh(x) * lax.tan(x / 3) + lax.asinh(x) + lax.atanh(x / 5), (X,)),
    "acosh": (lambda x: lax.acosh(x + 1), (POS,)),
    "rounded": (lambda x: (jnp.round(2 * x), lax.round(2 * x), jnp.fmod(x, y := 0.75), jnp.remainder(x, y)), (X,)),
    "divided": (lambda i: (i // 3, i % 3, (i - 2) // 3, (i - 2) % 2, lax.div(i - 2, -2), lax.rem(i - 3, -2)), (IDS,)),
    "running": (lambda z: [f(z, 2, reverse=r) for f in (lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp) for r in (0, 1)], (Z,)),
    "running, backward": (jax.grad(lambda z: jnp.sum(lax.cumlogsumexp(z, 1) ** 2)), (Z,)),
    "pooled": (lambda x: [pooled(f, x) for f in ("sum", "max", "min")], (TIES,)),
    "pooled, backward": (jax.grad(lambda x: jnp.sum(pooled("sum", x) ** 2) + jnp.sum(pooled("max", x) ** 3)), (TIES,)),
    "pooled, forward": (lambda x: jax.jvp(lambda v: pooled("max", v), (x,), (x * x,))[1], (TIES,)),
    "stack": (lambda x, y: jnp.stack([x, y, x], 1) * sum(jnp.unstack(y, axis=1))[:, None, None], (X, Y)),
    "tile": (lambda x: jnp.tile(x, (2, 1, 3)) + jnp.tile(jnp.arange(3), 5), (X,)),
    "subtract": (lambda x, i: x.at[i[:, 0]].subtract(2.0, mode="drop"), (np.tile(X, (2, 1)), IDS)),
    "powers": (lambda x: x**3 + x**-2 + jnp.square(x) + lax.square(x) + x**2.5 + 0.9**x, (POS,)),
    "compared": (lambda x, y: (x < y) | (x <= 0) & (x > y) ^ (x >= 1) | ~(x == y) & (x != y) & (x > 0.5), (X, Y)),
    "where": (lambda x, y: jnp.where(x > 0, x, y) + jnp.where(x > y, 1.0, x), (X, Y)),
    "clip": (lambda x: lax.clamp(-0.5, x, 0.5) + lax.clamp(x[0, 0], x, x[1, 1]) + lax.clamp(0.5, x, -0.5), (X,)),
    "cast": (lambda x: x.astype(jnp.int32) + (x > 0).astype(jnp.int32) + jnp.arange(5), (X,)),
    "same": (lambda x: lax.stop_gradient(x) + jnp.copy(x) + lax.optimization_barrier(x), (X,)),
    "iota": (lambda x: x * jnp.arange(5) + jnp.arange(3, 18, 5)[:, None] + lax.iota(jnp.float32, 5), (X,)),
    "tril": (lambda x: jnp.tril(x) + jnp.triu(x, 1) * jnp.eye(3, 5), (X,)),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (2, 3, 4, 5), (1, 3)), (X,)),
    "reshape": (lambda x: x.reshape(5, 3).T[:, None].squeeze(1) + jnp.expand_dims(x, 0)[0], (X,)),
    "transpose": (lambda z: jnp.transpose(z, (2, 0, 1)), (Z,)),
    "slice": (lambda z: lax.slice(z, (0, 1, 1), (2, 3, 6), (1, 1, 2)) * z[:1, 1:, :3], (Z,)),
    "rev": (lambda z: jnp.flip(z, (0, 2)), (Z,)),
    "concatenate": (lambda x, y: jnp.concatenate([x, y, x[:, :2]], 1), (X, Y)),
    "split": (lambda z: jnp.split(z, [2, 3], 2)[2] + jnp.split(z, [4], 2)[0], (Z,)),
    "pad": (lambda x: lax.pad(x, np.float32(2), ((1, 2, 1), (-1, 3, 2))), (X,)),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i[0, 0], 4), (1, 3)), (np.tile(X, (2, 1)), IDS)),
    "dynamic_update_slice": (lambda z, x: lax.dynamic_update_slice(z, x[None, :2, :4], (1, 1, 9)), (Z, X)),
    "reduce": (lambda z: z.sum((0, 2)) + z.max((0, 2)) + z.min((0, 2)) + z.prod((0, 2)), (Z,)),
    "printed": (lambda x: (jax.debug.print("{}", x[0, 0]), x * 2)[1], (X,)),
    "prod, backward": (jax.grad(lambda z: jnp.sum(z.prod(1) ** 2)), (Z,)),
    "closed over, whole numbers": (lambda x: x * np.arange(5.0, dtype=np.float32) + np.array([[2.0], [4.0], [6.0]], np.float32), (X,)),
    "any": (lambda b: b.any(0) & ~b.all(0), (B,)),
    "argmax": (lambda z: jnp.argmax(z, 1) + jnp.argmin(z, 1), (Z,)),
    "cumsum": (lambda z: jnp.cumsum(z, 1) + lax.cumsum(z, 1, reverse=True), (Z,)),
    "top_k": (lambda z: lax.top_k(z, 3), (Z,)),
    "sort": (lambda z: (jnp.sort(z, 1), jnp.argsort(z, 2), *lax.sort_key_val(z, z * z)), (Z,)),
    "dot_general": (dot, (Z, Z.reshape(2, 7, 3).copy())),
    "einsum": (lambda x, z: jnp.einsum("ab,cad->dbc", x, z), (X, Z)),
    "convolution": (conv(window_strides=(2, 1), padding=((1, 2), (0, 1)), rhs_dilation=(1, 2)), (IMAGE, KERNEL)),
    "convolution, grouped": (conv(window_strides=(1, 1), padding="SAME", feature_group_count=3), (IMAGE, KERNEL[:, :1][[0, 1, 2]])),
    "convolution, nhwc": (
        conv(window_strides=(1, 1), padding="VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        (IMAGE.transpose(0, 2, 3, 1).copy(), KERNEL.transpose(2, 3, 1, 0).copy()),
    ),
    "convolution, backward": (
        jax.grad(lambda w, x: jnp.sum(conv(window_strides=(2, 1), padding="SAME")(x, w) ** 2)),
        (KERNEL, IMAGE),
    ),
    "convolution, batches": (
        jax.grad(lambda w, x: jnp.sum(conv(window_strides=(1, 1), padding="SAME", feature_group_count=3)(x, w) ** 2)),
        (KERNEL[:, :1][[0, 1, 2]].copy(), IMAGE),
    ),
    "bits": (lambda i: ((i - 3) & 3) + (i << 2) + ((i - 3) >> 1) * lax.shift_right_logical(i & 7, 1), (IDS,)),
    "quotients": (lambda i: (i - 3) // 2 + 5 * ((i - 3) % 3) + 7 * lax.div(i - 4, 3) + 11 * lax.rem(i - 4, 3), (IDS,)),
    "rows": (lambda x, i: x[i], (np.tile(X, (2, 1)), IDS)),
    "columns": (take, (X, IDS)),
    "rows, backward": (jax.grad(lambda x, i: jnp.sum(x[i] ** 3)), (np.tile(X, (2, 1)), IDS)),
    "columns, backward": (jax.grad(lambda z, i: jnp.sum(take(z, i) ** 3)), (Z[:, :, :5].reshape(6, 5), IDS)),
    "take_along": (lambda x, i: jnp.take_along_axis(x, i, 1), (X, IDS)),
    "take_along, backward": (jax.grad(lambda x, i: jnp.sum(jnp.take_along_axis(x, i, 1) ** 2)), (X, IDS)),
    "pairs": (lambda z, i: z[0][jnp.minimum(i[:, 1], 2), i[:, 0]], (Z, IDS)),
    "pairs, backward": (jax.grad(lambda z, i: jnp.sum(z[0][jnp.minimum(i[:, 1], 2), i[:, 0]] ** 2)), (Z, IDS)),
    "last": (lambda z: z[:, -1] + z[:, 0], (Z,)),
    "last, backward": (jax.grad(lambda z: jnp.sum(z[:, -1] ** 2)), (Z,)),
    "windows": (lambda z, i: jax.vmap(lambda k: lax.dynamic_slice(z, (0, 0, k), (2, 3, 3)))(i[:, 0]), (Z, IDS)),
    "set": (lambda z: z.at[1, 2].set(5.0).at[0].add(1.0), (Z,)),
    "set at an index": (lambda x, i: x.at[:, i[0, 0]].set(7.0), (X, IDS)),
    "scan": (lambda z: lax.scan(lambda c, x: (c * 2 + x, jnp.sin(c)), z[0], z), (Z,)),
    "scan, backward": (jax.grad(lambda z: jnp.sum(lax.scan(lambda c, x: (jnp.sin(c + x), c), z[0], z, reverse=True)[0])), (Z,)),
    "while": (lambda x: lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, c[1] * 1.5), (0, x))[1], (X,)),
    "fori": (lambda x: lax.fori_loop(0, 3, lambda i, c: c + i * x, x), (X,)),
    "cond, known": (lambda x: lax.cond(jnp.int32(3) > 2, lambda: x, lambda: -x), (X,)),
    "cond, on data": (lambda x: lax.cond(jnp.sum(x) > 0, jnp.sin, jnp.cos, x), (X,)),
    "switch": (lambda x: lax.switch(jnp.int32(1), [jnp.sin, jnp.cos, jnp.exp], x), (X,)),
    "remat": (jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)))(x))), (X,)),
    "custom": (jax.grad(lambda x: jnp.sum(jax.nn.relu(x) + jax.nn.silu(x) + jax.nn.gelu(x) + jax.nn.softmax(x) ** 2)), (X,)),
    "closed over": (lambda x: x * jnp.asarray(Y) + np.array([3, 1, 4, 1, 5]), (X,)),
    "logsumexp": (jax.grad(lambda x: jnp.sum(jax.nn.logsumexp(x, 1) + jax.nn.log_softmax(x, 1)[:, 2])), (X,)),
    "one_hot": (lambda i: jax.nn.one_hot(i, 5), (IDS,)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_row_computes_what_jax_computes(name: str) -> None:
    fn, arrays = CASES[name]
    found, _ = run(fn, *arrays)
    wanted = jax.tree_util.tree_leaves(jax.jit(fn)(*arrays))
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def test_proved_finite_where_nothing_is_negative() -> None:
    """The right twins of what is refused: a root of what is never negative, writes at known places."""
    found, _ = run(lambda x: (jnp.isfinite(jnp.sqrt(x * x + 1)), x.at[jnp.array([2, 0])].set(5.0, unique_indices=True)), X)
    assert found[0].all()
    np.testing.assert_array_equal(found[1], [[5] * 5, X[1], [5] * 5])


def test_every_row_has_a_case() -> None:
    seen: set[str] = set()
    for fn, arrays in CASES.values():
        seen |= set(translated(fn, *arrays)[1].calls)
    unmapped = {
        "erf_inv",
        "asin",
        "acos",
        "atan",
        "cbrt",
        "atan2",
        "nextafter",
        "lgamma",
    }
    only_meshes = {"pvary", "pcast", "mesh_cast", "sharding_constraint", "reshard"}
    other_names = {"scatter_add", "copy", "copy_p", "reduce_precision", "expand_dims", "add_any", "xor"}
    assert not MAPPINGS.keys() - seen - communication.ROWS.keys() - unmapped - only_meshes - other_names


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: lax.cbrt(x), "no operator for cbrt"),
        (lambda x: lax.reduce_precision(x, 8, 7), "rounding to fewer bits"),
        (lambda x: x ** jnp.abs(x), "a power of two tensors"),
        (lambda x: jnp.linalg.cholesky(x[:3, :3]), "no mapping"),
        (lambda x: lax.while_loop(lambda c: c[0, 0] < 4, lambda c: c * 2, x), "depends on data"),
        (lambda x: x[jnp.floor(x[0]).astype(jnp.int32)], "outside of the tensor"),
        (lambda x: lax.erf_inv(x) + x, "no operator for erf_inv"),
        (lambda x: jax.random.uniform(jax.random.key(0), x.shape, minval=x[0, 0]) + x, "not between two numbers"),
        (lambda x: 7 // x.astype(jnp.int32), "by what is not known"),
        (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), ((0, 0), (2, 0))), "nothing but padding"),
        (lambda x: lax.div(x.astype(jnp.int32), jnp.argsort(x, 1).astype(jnp.int32)), "division of integers"),
        (lambda x: jnp.where(jnp.isfinite(jnp.log(x - 1)), x, 0), "may be negative"),
        (lambda x: jnp.where(jnp.isfinite(lax.rsqrt(x)), x, 0), "may be negative"),
        (lambda x: x.at[1].apply(jnp.sin), "applied at indices"),
        (lambda x: jnp.where(jnp.isfinite(1 / x), x, 0), "may be 0"),
        (lambda x: jnp.where(jnp.isfinite(jnp.log(jnp.abs(x))), x, 0), "may be 0"),
        (lambda x: jnp.where(jnp.isfinite(x**-2), x, 0), "may be 0"),
        (lambda x: x.at[jnp.argsort(x[:, 0])].set(1.0, unique_indices=True), "places that may be the same"),
    ],
)
def test_what_has_no_meaning_is_said(fn: Callable[..., Any], reason: str) -> None:
    _, i, found = translated(fn, POS)
    opaque = [x.reason for x in found if isinstance(x, Opaque)]
    assert opaque
    assert any(reason in m.reason for m in i.missing.values()), i.missing
    assert all(m.source is not None and m.source.file.endswith("test_mappings.py") for m in i.missing.values())
