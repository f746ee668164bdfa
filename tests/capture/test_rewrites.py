"""Exact rewrites: each fires where it holds and gives the same numbers; its twin, off by one, is left alone."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import math  # noqa: E402
from fractions import Fraction  # noqa: E402

from capture.tracing import agree  # noqa: E402
from trainverify.translate.literals import Literals, recovered, root  # noqa: E402


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


def cut_scores(scores, labels, start: int, stop: int):
    """As `loss_parallel` looks up the score of a label among the classes that a rank has, ignored ones as class 0."""
    safe = torch.where(labels != -100, labels, 0).unsqueeze(1)
    outside = (safe < start) | (safe >= stop)
    shifted = safe - start
    shifted[outside] = 0
    found = torch.gather(scores, 1, shifted)
    found[outside] = 0.0
    return found


def cut_hits(scores, labels, start: int, stop: int, less: float = 1.0):
    """As `loss_parallel` writes −1 where a rank has the class of a label."""
    outside = (labels < start) | (labels >= stop)
    shifted = labels - start
    shifted[outside] = 0
    made = torch.zeros_like(scores)
    made[torch.arange(len(labels)), shifted] = outside.to(scores.dtype) - less
    return made


LABELS = torch.tensor([4, -100, 0, 8, 7, 3])


def starts(found) -> list[int]:
    return [op.get("start") for op in found.emitter.ops if op.name == "one_hot"]


def test_cut_scores() -> None:
    found = agree(lambda x, t: cut_scores(x, t, 4, 9), real(6, 5), LABELS)
    assert starts(found) == [4]


def test_cut_scores_off_by_one() -> None:
    """Not rewritten: the mask ends a class early, or begins one late. Still equal in numbers."""
    for start, stop in ((4, 8), (5, 9)):
        found = agree(lambda x, t, start=start, stop=stop: cut_scores(x, t, start, stop), real(6, 5), LABELS)
        assert not starts(found)


def test_cut_hits() -> None:
    found = agree(lambda x, t: cut_hits(x, t, 4, 9), real(6, 5), LABELS)
    assert starts(found) == [4]
    assert "put_along_dim" not in ops(found)


def test_cut_hits_off_by_one() -> None:
    """Not taken for hits of the classes from 4 on: the mask ends a class early, or another number is written. Equal in numbers."""
    for stop, less in ((8, 1.0), (9, 2.0)):
        found = agree(lambda x, t, stop=stop, less=less: cut_hits(x, t, 4, stop, less), real(6, 5), LABELS)
        assert 4 not in starts(found)


def lowered_hits(scores, labels, start: int, stop: int, more: float = 1.0):
    """As Megatron's cross entropy takes 1 from the share of the label where a rank has its class."""
    outside = (labels < start) | (labels >= stop)
    shifted = labels - start
    shifted[outside] = 0
    made = scores.clone()
    made[torch.arange(len(labels)), shifted] -= more - outside.to(scores.dtype)
    return made


def test_lowered_hits() -> None:
    found = agree(lambda x, t: lowered_hits(x, t, 4, 9), real(6, 5), LABELS)
    assert starts(found) == [4]
    assert "put_along_dim" not in ops(found)


def test_lowered_hits_off_by_one() -> None:
    """Not taken for hits of the classes from 4 on. Equal in numbers."""
    for stop, more in ((8, 1.0), (9, 2.0)):
        found = agree(lambda x, t, stop=stop, more=more: lowered_hits(x, t, 4, stop, more), real(6, 5), LABELS)
        assert 4 not in starts(found)


def picked_scores(scores, labels, start: int, stop: int, rows):
    """As Megatron's cross entropy looks up scores, with two indices."""
    outside = (labels < start) | (labels >= stop)
    shifted = labels - start
    shifted[outside] = 0
    found = scores[rows, shifted].clone()
    found[outside] = 0.0
    return found


def test_picked_scores() -> None:
    found = agree(lambda x, t: picked_scores(x, t, 4, 9, torch.arange(6)), real(6, 5), LABELS)
    assert starts(found) == [4]


def test_picked_scores_off_by_one() -> None:
    found = agree(lambda x, t: picked_scores(x, t, 4, 8, torch.arange(6)), real(6, 5), LABELS)
    assert not starts(found)


def cut_backward(ids, grad, start: int, stop: int, again: int):
    """The gradient of rows that a rank looks up, masked as the lookup was."""
    outside = (ids < start) | (ids >= stop)
    shifted = ids - start
    shifted[outside] = 0
    masked = grad.masked_fill(((ids < start) | (ids >= again)).unsqueeze(-1), 0.0) if again != stop else grad.clone()
    if again == stop:
        masked[outside, :] = 0.0
    return torch.ops.aten.embedding_dense_backward(masked, shifted, 5, -1, False)


def test_cut_backward() -> None:
    ids = torch.tensor([[0, 3, 4, 8], [5, 4, 7, 9]])
    found = agree(lambda i, g: cut_backward(i, g, 4, 9, 9), ids, real(2, 4, 3))
    assert starts(found)[-1] == 4


def test_cut_backward_masked_otherwise() -> None:
    """Not rewritten: gradients are masked elsewhere than ids are, or rows end a class early. Equal in numbers."""
    ids = torch.tensor([[0, 3, 4, 8], [5, 4, 7, 9]])
    for stop, again in ((9, 8), (8, 8)):
        found = agree(lambda i, g, stop=stop, again=again: cut_backward(i, g, 4, stop, again), ids, real(2, 4, 3))
        assert 4 not in starts(found)


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
