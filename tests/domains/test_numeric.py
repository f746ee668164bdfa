"""The numeric domain: leading dimensions ride along with every primitive."""

from __future__ import annotations

import numpy as np
import pytest

from ops.references import REFERENCES
from trainverify.domains.ball import Ball, ball, balls
from trainverify.domains.numeric import NUMERIC
from trainverify.ops import OPS
from trainverify.primitives import node as F
from trainverify.primitives.scalars import hashed_uniform

LOCAL = [d.name for d in OPS if not d.collective and not d.point_to_point]


@pytest.mark.parametrize("name", LOCAL)
def test_leading_dimensions_are_independent_runs(name: str) -> None:
    sample = REFERENCES[name][1][1]
    runs = [sample.draw(seed) for seed in (1, 2, 3)]
    lowered = OPS.lower(name, sample.attrs, sample.types)
    stacked = [None if vs[0] is None else np.stack(vs) for vs in zip(*runs, strict=True)]
    together = NUMERIC.run(lowered.outputs, stacked, (3,))
    apart = [NUMERIC.run(lowered.outputs, inputs) for inputs in runs]
    for result, parts in zip(together, zip(*apart, strict=True), strict=True):
        np.testing.assert_allclose(result, np.stack(parts), rtol=1e-12)


@pytest.mark.parametrize("name", ["layer_norm", "topk", "conv1d", "moe_gate", "put_along_dim", "argmax", "create_mask"])
def test_leading_dimensions_of_balls(name: str) -> None:
    sample = REFERENCES[name][1][0]
    inputs = sample.draw(1)
    lowered = OPS.lower(name, sample.attrs, sample.types)
    stacked = [None if v is None else balls(np.stack([v, v])) for v in inputs]
    wanted = NUMERIC.run(lowered.outputs, inputs)
    for result, want in zip(Ball().run(lowered.outputs, stacked, (2,)), wanted, strict=True):
        assert result.shape == (2, *want.shape)
        np.testing.assert_allclose(result.astype(np.float64)[1], want.astype(np.float64), rtol=1e-9, atol=1e-12)


def test_ids_out_of_range_give_zeros() -> None:
    x, ids = F.input_(0, (3,), "real"), F.input_(1, (4,), "int")
    value, at = np.array([2.0, 3.0, 5.0]), np.array([-1, 2, 3, 0])
    outputs = [F.gather(x, ids, 0), F.one_hot(ids, 3), F.one_hot(ids, 2, start=2)]
    wanted = [[0, 5, 0, 2], [[0, 0, 0], [0, 0, 1], [0, 0, 0], [1, 0, 0]], [[0, 0], [1, 0], [0, 1], [0, 0]]]
    assert [r.tolist() for r in NUMERIC.run(outputs, [value, at])] == wanted
    assert [r.astype(float).tolist() for r in Ball().run(outputs, [balls(value), balls(at)])] == wanted


def test_a_real_becomes_an_integer_by_truncation() -> None:
    x = F.input_(0, (4,), "real")
    value = np.array([-1.5, -0.25, 0.0, 2.75])
    for domain, given in ((NUMERIC, value), (Ball(), balls(value))):
        assert domain.run([F.cast(x, "int")], [given])[0].tolist() == [-1, 0, 0, 2]


def test_random_numbers_are_the_same_in_all_domains() -> None:
    rng = np.random.default_rng(1)
    values = [rng.integers(-(2**40), 2**40, (7,)) for _ in range(3)]
    node = F.call("uniform", *(F.input_(i, (7,), "int") for i in range(3)))
    wanted = [hashed_uniform(*(int(v) for v in vs)) for vs in zip(*values, strict=True)]
    assert NUMERIC.run([node], values)[0].tolist() == [float(w) for w in wanted]
    assert [ball(w).overlaps(b) for w, b in zip(wanted, Ball().run([node], [balls(v) for v in values])[0], strict=True)] == [True] * 7
    numbers = NUMERIC.run([F.call("uniform", 5, 0, F.iota(4096))], [])[0]
    assert abs(numbers.mean() - 0.5) < 0.02
    assert 0 < numbers.min() < 0.01 < 0.99 < numbers.max() < 1
