"""Unions of regions, against the elements themselves."""

from __future__ import annotations

import random

import numpy as np
import pytest

from trainverify.check.coverage import Box, TooFine, flat, overlap, plain, uncovered
from trainverify.graph.lineage import Run


def elements(boxes: list[Box], shape: tuple[int, ...]) -> np.ndarray:
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        axes = [np.concatenate([np.zeros(0, dtype=int), *(r.positions() for r in positions)]) for positions in box]
        np.add.at(counts, np.ix_(*axes), 1)
    return counts


def random_run(rng: random.Random, size: int) -> Run:
    if rng.random() < 0.5:
        start = rng.randrange(size)
        return Run(start, rng.randint(0, size - start))
    stride = rng.choice([s for s in range(1, size + 1) if size % s == 0])
    start = rng.randrange(stride)
    return Run(start, rng.randint(1, stride - start), size // stride, stride)


@pytest.mark.parametrize("seed", range(60))
def test_against_elements(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.choice([2, 3, 4, 6, 12]) for _ in range(rng.randint(1, 3)))
    boxes: list[Box] = [tuple((random_run(rng, s),) for s in shape) for _ in range(rng.randint(1, 14))]
    counts = elements(boxes, shape)
    gap = uncovered(boxes, shape)
    assert (gap is None) == bool((counts > 0).all())
    if gap is not None:
        assert not counts[tuple(slice(a, b) for a, b in gap)].any()
    flattened = elements([flat(b, shape) for b in boxes], (int(np.prod(shape)),))
    assert (flattened.reshape(shape) > 0).tolist() == (counts > 0).tolist()
    assert (uncovered([flat(b, shape) for b in boxes], (int(np.prod(shape)),)) is None) == (gap is None)


@pytest.mark.parametrize("seed", range(40))
def test_overlap_against_elements(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.choice([3, 5, 7]) for _ in range(rng.randint(1, 3)))
    boxes: list[Box] = []
    for _ in range(rng.randint(1, 4)):
        starts = [rng.randrange(s) for s in shape]
        boxes.append(tuple(plain(a, a + rng.randint(1, min(3, s - a))) for a, s in zip(starts, shape, strict=True)))
    pair = overlap(boxes)
    assert (pair is not None) == bool((elements(boxes, shape) > 1).any())
    if pair is not None:
        assert (elements([boxes[i] for i in pair], shape) > 1).any()


def test_full_size() -> None:
    """8192 pieces of a tensor with 2⁴⁰ elements; one is missing."""
    pieces: list[Box] = [(plain(a << 14, (a + 1) << 14), plain(b << 13, (b + 1) << 13)) for a in range(64) for b in range(128)]
    assert uncovered(pieces, (1 << 20, 1 << 20)) is None
    assert uncovered(pieces[:1000] + pieces[1001:], (1 << 20, 1 << 20)) == ((114688, 131072), (851968, 860160))


def test_strided_pieces_of_a_long_dimension() -> None:
    """Interleaved halves of 2³⁰ positions are looked at through one period."""
    halves: list[Box] = [((Run(i, 1, 1 << 29, 2),),) for i in range(2)]
    assert uncovered(halves, (1 << 30,)) is None
    assert uncovered(halves[:1], (1 << 30,)) == ((1, 2),)


def test_too_fine() -> None:
    with pytest.raises(TooFine):
        uncovered([((Run(0, 1, 1 << 29, 2),),), ((Run(0, 2, 1 << 28, 4),),)], (1 << 30,))


def test_scalars_and_empty_tensors() -> None:
    assert uncovered([()], ()) is None
    assert uncovered([], ()) == ()
    assert uncovered([], (3, 0)) is None
