"""Elements that are recognised all at once, against the plain definition."""

from __future__ import annotations

import numpy as np
import pytest

from trainverify.domains.arrays import Array
from trainverify.explain.fingerprints import Fingerprints, Index, contained, plain


def tensors(seed: int) -> dict[str, Array]:
    """Random ones, some that share elements, one with zeros and one with a constant."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(4, 6)), rng.normal(size=(3, 5))
    return {"a": a, "copy": a.T.copy(), "part": a[1:3], "b": b, "zeros": np.where(b > 0, b * 7, 0), "joined": np.concatenate([a[0], b[0]])}


@pytest.mark.parametrize("seed", range(20))
def test_common_owners(seed: int) -> None:
    known = tensors(seed)
    rng = np.random.default_rng(seed + 1000)
    asked = [
        known["a"][2],
        known["b"] * (1 + 1e-12),
        known["joined"],
        np.append(known["a"][2], rng.normal()),
        np.append(known["b"][1], [0.0, np.nan]),
        np.zeros(3),
        np.empty(0),
        rng.permutation(known["zeros"].reshape(-1)),
        np.concatenate([known["a"][0], known["b"][1]]),
    ]
    for array, found in zip(asked, Index(known).common(asked), strict=True):
        values = plain(array)
        plainly = {n for n, v in known.items() if values.size and contained(np.sort(plain(v)), values).all()}
        assert found == plainly


@pytest.mark.parametrize("seed", range(10))
def test_tensors_that_are_known(seed: int) -> None:
    points = [tensors(seed), tensors(seed + 50)]
    prints = Fingerprints(points)

    def rows(*parts: tuple[str, slice]) -> list[Array | None]:
        return [np.stack([np.concatenate([p[n].reshape(-1)[s] for n, s in parts])]) for p in points]

    right = [
        rows(("a", slice(2, 9))),
        rows(("a", slice(0, 3)), ("b", slice(0, 4))),  # pieces, one after the other
        [np.stack([p["a"][0], p["a"][3]]) for p in points],
    ]
    one_wrong = [np.stack([p["a"][0], p["a"][3]]) for p in points]
    one_wrong[1][1, 2] *= 1.001
    wrong: list[list[Array | None]] = [
        [one_wrong[0], one_wrong[1]],
        [points[0]["a"][1:2], points[1]["b"][1:2]],  # another tensor at each point
        [np.ones((1, 4)), np.ones((1, 4))],
        [np.zeros((1, 4)), np.zeros((1, 4))],
        [points[0]["a"][:1], None],
        [np.stack([p["a"][:2] * [[1], [1.5]]]) for p in points],
    ]
    assert prints.known([*right, *wrong]) == [True] * len(right) + [False] * len(wrong)
