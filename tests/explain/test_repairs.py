"""Changes that are tried on a wrong plan: only those that can be run."""

from __future__ import annotations

import math

import pytest

import trainverify as tv
from trainverify.graph.program import Program
from trainverify.verdicts import verify


def masked(right: bool) -> Program:
    """Σ tanh of the smallest of masked rows and w, or w + low − low."""
    b = tv.program("masked")
    w, mask = b.input("w", (3,)), b.input("mask", (3, 4), dtype="bool")
    rows = b.masked_fill(b.input("rows", (3, 4)), mask, value=-math.inf, name="masked")
    low = b.amin(rows, dim=1, name="low")
    more = w if right else b.add(w, b.sub(low, low, name="nothing"), name="more")
    b.loss(b.sum(b.add(b.tanh(low, name="t"), more, name="y"), name="loss"))
    return b.build()


@pytest.mark.parametrize("seed", range(4))
def test_a_mask_is_no_candidate_for_what_it_masks(seed: int) -> None:
    """Expected: REFUTED, as −∞ − (−∞) is no number; leaving the masking out does not mean that the mask is taken for a number."""
    report = verify(masked(True), masked(False), points=1, seed=seed)
    assert report.verdict == "REFUTED"
    assert report.place is not None
