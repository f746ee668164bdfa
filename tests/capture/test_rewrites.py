"""Exact rewrites: each fires where it holds and gives the same numbers; its twin, off by one, is left alone."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import math  # noqa: E402
from fractions import Fraction  # noqa: E402

from capture.tracing import agree  # noqa: E402
from trainverify.torch.literals import Literals, recovered, root  # noqa: E402


def real(*shape: int):
    return torch.rand(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def ops(translator) -> list[str]:
    return [op.name for op in translator.emitter.ops]


def test_norm_of_norms() -> None:
    found = agree(lambda a, b: torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in (a, b)])), real(2, 3), real(5))
    assert found.emitter.ops[-1].name == "grad_norm"
    assert found.emitter.ops[-1].inputs == ("x0", "x1")


def test_other_norms_are_left_alone() -> None:
    """The 3-norm of 2-norms, and the 2-norm of 3-norms, are no norm of all elements."""
    found = agree(lambda a, b: torch.linalg.vector_norm(torch.stack([a.norm(), b.norm()]), 3), real(2, 3), real(5))
    assert "grad_norm" not in ops(found)
    found = agree(lambda a, b: torch.linalg.vector_norm(torch.stack([a.norm(3), b.norm(3)])), real(2, 3), real(5))
    assert found.emitter.ops[-1].inputs != ("x0", "x1")


def test_functions_of_stacks() -> None:
    found = agree(lambda a, b: torch.stack([a.sum(), b.sum()]).pow(2).mul(3).div(7)[1:], real(2, 3), real(5))
    assert "slice" not in ops(found)


def cut_embedding(ids, weight, start: int, stop: int):
    """As DTensor looks up a part of the vocabulary."""
    outside = (ids < start) | (ids >= stop)
    shifted = ids - start
    shifted[outside] = 0
    rows = torch.nn.functional.embedding(shifted, weight)
    rows[outside, :] = 0.0
    return rows


def test_cut_vocabulary() -> None:
    ids = torch.tensor([[0, 3, 4, 8], [5, 4, 7, 9]])
    found = agree(lambda i, w: cut_embedding(i, w, 4, 9), ids, real(5, 3))
    assert [op.get("start") for op in found.emitter.ops if op.name == "embedding"][-1] == 4


def test_cut_vocabulary_off_by_one() -> None:
    """One row less than the weight has: an id that the weight has a row for gives zeros. Not rewritten, and still equal in numbers."""
    ids = torch.tensor([[0, 3, 4, 8], [5, 4, 7, 9]])
    found = agree(lambda i, w: cut_embedding(i, w, 4, 8), ids, real(5, 3))
    assert all(op.get("start", 0) == 0 for op in found.emitter.ops if op.name == "embedding")


def test_literals() -> None:
    assert recovered(1 - 0.9) == Fraction(1, 10)
    assert recovered(9.999999747378752e-06) == Fraction(1, 100000)
    assert recovered(1 / 3) == Fraction(1, 3)
    assert recovered(2.0) == 2
    assert root(math.sqrt(2)) == 2
    assert root(1 / math.sqrt(128)) == Fraction(1, 128)
    assert root(0.5) is None
    for value in (0.123456789123, math.pi, 1e-30, 1.0000001, 0.1 + 1e-9):
        found = recovered(value)
        assert abs(found - Fraction(value)) <= Fraction(value) / 2**23
    assert recovered(0.1 + 1e-9) != Fraction(1, 10)
    assert root(math.sqrt(2) + 1e-9) is None
    assert recovered(math.inf) == math.inf


def test_literals_that_become_one_are_listed() -> None:
    literals = Literals()
    literals(0.1)
    assert literals.merged() == []
    literals(1 - 0.9)
    assert literals.merged() == ["0.09999999999999998, 0.1 count as 1/10"]
    literals(3)
    assert 3 not in literals.known


def test_positions_from_a_literal_on() -> None:
    found = agree(lambda x: x * (torch.arange(5) + 7) + (torch.arange(5).double() - 2.0), real(5))
    assert [(op.get("start"), op.get("stop")) for op in found.emitter.ops if op.name == "arange"][-1] == (-2, 3)
    assert (7, 12) in [(op.get("start"), op.get("stop")) for op in found.emitter.ops if op.name == "arange"]


def test_positions_in_steps_are_moved_too() -> None:
    """2 · i + 3 counts in steps of 2; a fraction and a tensor that is no range are left alone."""
    found = agree(lambda x: x * (torch.arange(0, 10, 2) + 3) + (torch.arange(5).double() + 0.5) + (x + 1), real(5))
    assert [(op.get("start"), op.get("stop")) for op in found.emitter.ops if op.name == "arange"][:2] == [(0, 10), (3, 13)]
    assert ops(found).count("arange") == 3
