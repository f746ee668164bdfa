"""Laws that connect operators: what plans rely on."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from trainverify.domains.numeric import NUMERIC
from trainverify.graph.types import TensorType
from trainverify.ops import OPS
from trainverify.primitives import node as F

RNG = np.random.default_rng(3)
_DTYPES = {"f": "f64", "i": "i64", "b": "bool"}


def run(name: str, *inputs: Any, **attrs: Any) -> Any:
    lowered = OPS.lower(name, attrs, tuple(TensorType(v.shape, _DTYPES[v.dtype.kind]) for v in inputs))
    results = NUMERIC.run(lowered.outputs, list(inputs))
    return results[0] if len(results) == 1 else results


@pytest.mark.parametrize("cuts", [(1, 1), (2, 1), (1, 3), (4, 3)])
def test_dropout_of_a_block_is_the_block_of_the_dropout(cuts: tuple[int, int]) -> None:
    x = RNG.standard_normal((8, 6))
    whole = run("dropout", x, p=0.4, key=5, offset=2)
    assert 0 < np.count_nonzero(whole == 0) < whole.size
    h, w = 8 // cuts[0], 6 // cuts[1]
    for i, j in itertools.product(range(cuts[0]), range(cuts[1])):
        block = (slice(i * h, i * h + h), slice(j * w, j * w + w))
        part = run("dropout", x[block], p=0.4, key=5, offset=2, origin=(i * h, j * w), logical_shape=(8, 6))
        assert np.array_equal(part, whole[block])


def test_dropout_with_another_key_offset_or_origin_differs() -> None:
    x = np.ones((4, 6))
    base = run("dropout", x, p=0.5, key=5, logical_shape=(8, 6))
    for other in ({"key": 6}, {"offset": 1}, {"origin": (4, 0)}):
        assert not np.array_equal(base, run("dropout", x, **{"p": 0.5, "key": 5, "logical_shape": (8, 6), **other}))


def test_gradient_of_dropout_uses_the_same_mask() -> None:
    x, g = RNG.standard_normal((5, 7)), np.ones((5, 7))
    kept = run("dropout", np.ones((5, 7)), p=0.3, key=1)
    assert np.array_equal(run("dropout.grad", x, g, p=0.3, key=1, wrt=(0,)), kept)


def test_synchronised_batch_norm() -> None:
    """Sums of two uneven shards added up normalise like the whole batch."""
    x, w, b = RNG.standard_normal((7, 3, 2)), RNG.standard_normal(3), RNG.standard_normal(3)
    y, mean, variance = run("batch_norm", x, w, b)
    shards = (x[:2], x[2:])
    s, q = (sum(parts) for parts in zip(*(run("batch_norm_sums", p) for p in shards), strict=True))
    found = [run("batch_norm_apply", p, s, q, w, b, count=14) for p in shards]
    np.testing.assert_allclose(np.concatenate([f[0] for f in found]), y, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found[0][1], mean, rtol=1e-12)
    np.testing.assert_allclose(found[1][2], variance, rtol=1e-12)


def test_attention_over_blocks_of_keys_merges_by_logsumexp() -> None:
    """Ring attention: partial results weighted by exp(lse_i − lse); the block after all queries is skipped."""
    q, k, v = (RNG.standard_normal((2, 3, 4, 5)) for _ in range(3))
    first, second = slice(0, 2), slice(2, 4)
    whole, lse = run("attention", q, k, v, is_causal=True)
    late = q[:, :, second]
    parts = [
        run("attention", late, k[:, :, first], v[:, :, first], is_causal=True, query_offset=2),
        run("attention", late, k[:, :, second], v[:, :, second], is_causal=True, query_offset=2, key_offset=2),
    ]
    merged = np.logaddexp(parts[0][1], parts[1][1])
    np.testing.assert_allclose(merged, lse[:, :, second], rtol=1e-12)
    out = sum(np.exp(p[1] - merged)[..., None] * p[0] for p in parts)
    np.testing.assert_allclose(out, whole[:, :, second], rtol=1e-12)


def test_vocabulary_parallel_embedding() -> None:
    ids, w = RNG.integers(0, 7, (2, 5)), RNG.standard_normal((7, 3))
    parts = run("embedding", ids, w[:3]) + run("embedding", ids, w[3:], start=3)
    assert np.array_equal(parts, run("embedding", ids, w))


def test_a_repeated_token_accumulates() -> None:
    ids, w, g = np.array([1, 1, 0]), np.zeros((3, 2)), np.ones((3, 2))
    assert run("embedding.grad", ids, w, g, wrt=(1,)).tolist() == [[1, 1], [2, 2], [0, 0]]


def test_chunks_join_to_the_whole() -> None:
    x = RNG.standard_normal((2, 7))
    pieces = [run("chunk", x, chunks=3, index=i, dim=1) for i in range(3)]
    assert np.array_equal(run("concat", *pieces, dim=1), x)


def test_softmax_has_no_derivative_through_its_shift() -> None:
    """dx = (g − Σ g·y)·y: no comparison with the maximum is left."""
    types = (TensorType((2, 5), "f64"),)
    lowered = OPS.lower("softmax.grad", {"wrt": (0,)}, (*types, *types))
    used = {n.attrs[0] for n in F.topological(lowered.outputs) if n.prim == "map"}
    assert "eq" not in used
    assert "detach" not in used
