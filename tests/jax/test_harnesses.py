"""A slice of JAX's own primitive harnesses: each is equal or refused with a reason. All of them: `python -m tools.harnesses`."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")
pytest.importorskip("absl", reason="JAX's harnesses need absl-py")

import jax
from tools import harnesses
from trainverify.jax.mappings import MAPPINGS


def outcomes(every: int, only: str = "") -> list[harnesses.Outcome]:
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [harnesses.run(h) for h in harnesses.harnesses(every, only)]


def test_a_slice() -> None:
    found = outcomes(150)
    counts = Counter(o.state for o in found)
    assert not [o for o in found if o.state == "wrong"]
    assert counts["equal"] >= 10
    assert all(o.why for o in found if o.state == "refused")


def test_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is wrong for negative numbers only."""
    assert {o.state for o in outcomes(1, "abs_shape_float32")} == {"equal"}
    monkeypatch.setitem(MAPPINGS, "abs", lambda a: a.tensor(0))
    assert {o.state for o in outcomes(1, "abs_shape_float32")} == {"wrong"}
