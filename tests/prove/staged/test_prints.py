"""Fingerprints: every op's elements, against the terms that they are and the values that they have."""

from __future__ import annotations

import numpy as np
import pytest

from ops.references import REFERENCES
from trainverify.domains.numeric import NUMERIC
from trainverify.ops import OPS
from trainverify.primitives import node as F
from trainverify.prove.propose.prints import Prints, print_of, unknown, unknown_print
from trainverify.prove.staged.terms import Terms

LOCAL = [d.name for d in OPS if not d.collective and not d.point_to_point]


@pytest.mark.parametrize("name", LOCAL)
def test_elements_of_every_op(name: str) -> None:
    """One term, one fingerprint; one fingerprint, one value on random inputs."""
    for sample in REFERENCES[name][1]:
        nodes = OPS.lower(name, sample.attrs, sample.types).outputs
        shapes = [None if t is None else t.shape for t in sample.types]
        starts = np.cumsum([0, *(0 if s is None else np.prod(s, dtype=int) for s in shapes)])
        names = [
            None if s is None else unknown_print(np.arange(np.prod(s, dtype=int)) + i).reshape(s)
            for s, i in zip(shapes, starts, strict=False)
        ]
        inputs = [p if t is None or t.kind == "real" else unknown(p) for p, t in zip(names, sample.types, strict=True)]
        prints = [print_of(v).reshape(-1).tolist() for v in Prints().run(nodes, inputs)]
        values = [NUMERIC.run(nodes, sample.draw(seed)) for seed in (1, 2, 3)]
        for n, terms in enumerate(Terms().elements(nodes, shapes)):
            at = {t: k for k, t in enumerate(terms)}
            assert [prints[n][at[t]] for t in terms] == prints[n]
            first = {p: k for k, p in enumerate(prints[n])}
            same = [first[p] for p in prints[n]]
            for v in values:
                flat = v[n].reshape(-1).astype(float)
                np.testing.assert_allclose(flat[same], flat, rtol=1e-9, atol=1e-12)


def made(node: F.Node, *inputs: np.ndarray) -> list[int]:
    return [int(v) for v in print_of(Prints().run([node], inputs)[0]).reshape(-1)]


def test_sums_in_any_order_and_nothing_else() -> None:
    a, b, c = (F.input_(n, (4,), "real") for n in range(3))
    inputs = [unknown_print(np.arange(4) + 10 * n) for n in range(3)]
    left, right = F.call("add", F.call("add", a, b), c), F.call("add", b, F.call("add", c, a))
    assert made(left, *inputs) == made(right, *inputs)
    for other in (F.call("add", F.call("sub", a, b), c), F.call("add", F.call("add", a, b), b), F.call("add", F.call("mul", a, b), c)):
        assert not set(made(left, *inputs)) & set(made(other, *inputs))
    assert not set(made(F.call("sub", a, b), *inputs)) & set(made(F.call("sub", b, a), *inputs))


def test_parts_of_a_sum_of_products() -> None:
    x, y = F.input_(0, (2, 6), "real"), F.input_(1, (6,), "real")
    prints = [unknown_print(np.arange(12)).reshape(2, 6), unknown_print(np.arange(6) + 20)]
    whole = made(F.contract("i k, k -> i", x, y), *prints)
    u, v = F.input_(0, (2, 3), "real"), F.input_(1, (3,), "real")
    parts = [made(F.contract("k, i k -> i", v, u), prints[0][:, k : k + 3], prints[1][k : k + 3]) for k in (3, 0)]
    assert whole == np.add(*np.array(parts, dtype=np.uint64)).tolist()
    wrong = made(F.contract("k, i k -> i", v, u), prints[0][:, :3], prints[1][3:])
    assert np.add(np.array(wrong, dtype=np.uint64), np.array(parts[1], dtype=np.uint64)).tolist() != whole
