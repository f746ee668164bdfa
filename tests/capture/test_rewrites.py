"""Exact rewrites: each fires where it holds and gives the same numbers; its twin, off by one, is left alone."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import itertools  # noqa: E402
import math  # noqa: E402
from dataclasses import replace  # noqa: E402
from fractions import Fraction  # noqa: E402

import numpy as np  # noqa: E402

from capture.tracing import agree, computed  # noqa: E402
from trainverify.graph.program import Output  # noqa: E402
from trainverify.graph.types import TensorType  # noqa: E402
from trainverify.torch.rewrites import rewritten, uncut  # noqa: E402
from trainverify.translate.emit import Emitter  # noqa: E402
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
    return [op.get("start") for op in found.emitter.ops if op.name == "one_hot" and op.get("start") is not None]


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


def picked_by_place(scores, labels, start: int, stop: int, turned: bool = False):
    """As Megatron-core 0.16 picks scores of a sequence of rows, and lowers their shares: flattened, then masked in their shape."""
    outside = (labels < start) | (labels >= stop)
    shifted = labels - start
    shifted[outside] = 0
    flat, places = scores.reshape(-1, scores.shape[-1]), torch.arange(labels.numel())
    found = flat[places, shifted.reshape(-1)].clone().reshape(labels.shape)
    mask = outside.t().reshape(outside.shape) if turned else outside
    found[mask] = 0.0
    made = flat.clone()
    made[places, shifted.reshape(-1)] -= 1.0 - mask.reshape(-1).to(scores.dtype)
    return found, made


def test_picked_by_place() -> None:
    found = agree(lambda x, t: picked_by_place(x, t, 4, 9), real(2, 3, 5), LABELS.reshape(2, 3))
    assert starts(found) == [4, 4]
    assert "put_along_dim" not in ops(found)


def test_picked_by_place_off_by_one_or_masked_in_another_order() -> None:
    """Not taken for scores of the classes from 4 on. Equal in numbers."""
    for stop, turned in ((8, False), (9, True)):
        found = agree(lambda x, t, s=stop, o=turned: picked_by_place(x, t, 4, s, o), real(2, 3, 5), LABELS.reshape(2, 3))
        assert 4 not in starts(found)


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


def test_results_of_float32_arithmetic_stand_for_exact_ones() -> None:
    """0.01/0.19 in float32 is 1/19, where it is known to be that quotient; by itself, or too far away, it is not."""
    single = (torch.tensor(0.01) / 0.19).item()
    literals = Literals()
    assert isinstance(literals(single), float)
    literals.rounds(single, 0.01 / 0.18999)
    assert isinstance(literals(single), float)
    literals.rounds(single, 0.01 / 0.19)
    assert literals(single) == Fraction(1, 19)


def test_positions_from_a_literal_on() -> None:
    found = agree(lambda x: x * (torch.arange(5) + 7) + (torch.arange(5).double() - 2.0), real(5))
    assert [(op.get("start"), op.get("stop")) for op in found.emitter.ops if op.name == "arange"][-1] == (-2, 3)
    assert (7, 12) in [(op.get("start"), op.get("stop")) for op in found.emitter.ops if op.name == "arange"]


def test_positions_in_steps_are_moved_too() -> None:
    """2 · i + 3 counts in steps of 2; a fraction and a tensor that is no range are left alone."""
    found = agree(lambda x: x * (torch.arange(0, 10, 2) + 3) + (torch.arange(5).double() + 0.5) + (x + 1), real(5))
    assert [(op.get("start"), op.get("stop")) for op in found.emitter.ops if op.name == "arange"][:2] == [(0, 10), (3, 13)]
    assert ops(found).count("arange") == 3


def clamped_embedding(ids, weight, start: int, stop: int, least: int = 0):
    """As torchtitan looks up a part of the vocabulary."""
    inside = (ids >= start) & (ids < stop)
    rows = torch.nn.functional.embedding((ids - start).clamp(least, weight.shape[0] - 1), weight)
    return rows * inside.unsqueeze(-1).to(rows.dtype)


IDS = torch.tensor([[0, 3, 4, 8], [5, 4, 7, 9]])


def test_clamped_vocabulary() -> None:
    found = agree(lambda i, w: clamped_embedding(i, w, 4, 9), IDS, real(5, 3))
    assert [op.get("start") for op in found.emitter.ops if op.name == "embedding"][-1] == 4


def test_clamped_vocabulary_off_by_one() -> None:
    """A mask that ends a row early or late, or ids clamped to another range: not rewritten, and still equal in numbers."""
    for start, stop, least in ((4, 8, 0), (4, 10, 0), (4, 9, 1)):
        found = agree(lambda i, w, at=(start, stop, least): clamped_embedding(i, w, *at), IDS, real(5, 3))
        assert all(op.get("start", 0) == 0 for op in found.emitter.ops if op.name == "embedding")


def test_clamped_vocabulary_of_rows_that_may_be_infinite() -> None:
    """0 · ∞ is no 0: rows that are computed are not taken to be finite."""
    found = agree(lambda i, w: clamped_embedding(i, 1 / w, 4, 9), IDS, real(5, 3) + 1)
    assert all(op.get("start", 0) == 0 for op in found.emitter.ops if op.name == "embedding")


def gradient_of_rows(ids, weight, start: int, stop: int):
    weight = weight.detach().requires_grad_()
    (clamped_embedding(ids, weight, start, stop) * torch.arange(1, 4)).sum().backward()
    return weight.grad


def test_clamped_vocabulary_backwards() -> None:
    found = agree(lambda i, w: gradient_of_rows(i, w, 4, 9), IDS, real(5, 3))
    assert 4 in starts(found)
    found = agree(lambda i, w: gradient_of_rows(i, w, 4, 8), IDS, real(5, 3))
    assert 4 not in starts(found)


def test_masks_of_scores_with_a_dimension_more() -> None:
    """As torchtitan's cross entropy masks what it looked up."""

    def scores(x, labels, start: int, stop: int):
        safe = torch.where(labels != -100, labels, 0)
        outside = (safe < start) | (safe >= stop)
        shifted = safe - start
        shifted[outside] = 0
        found = torch.gather(x, -1, shifted.unsqueeze(-1))
        found[outside.unsqueeze(-1)] = 0
        return found

    assert starts(agree(lambda x, t: scores(x, t, 4, 9), real(6, 5), LABELS)) == [4]
    assert starts(agree(lambda x, t: scores(x, t, 4, 8), real(6, 5), LABELS)) == []


def test_pieces_written_one_after_the_other() -> None:
    """As a loss in chunks collects gradients: one concatenation, without slices of what was there."""

    def collected(x, at: tuple[int, ...]):
        made = torch.zeros_like(x)
        for a, b in itertools.pairwise(at):
            made[:, a:b] = x[:, a:b] * (a + 2)
        return made

    found = agree(lambda x: collected(x, (0, 2, 4, 6)), real(3, 6, 2))
    last = [op for op in found.emitter.ops if op.name == "concat"][-1]
    assert len(last.inputs) == 3
    agree(lambda x: collected(x, (0, 4, 2, 6)), real(3, 6, 2))  # they overlap
    agree(lambda x: collected(x, (1, 2, 5)), real(3, 6, 2))  # they leave gaps


def emitter(*shape: int) -> Emitter:
    made = Emitter()
    made.declare("x", TensorType(shape, "f32"))
    return made


def blocks(e: Emitter, at: list[int], dim: int, size: int) -> list[str]:
    return [e.op("slice", ("x",), {"dim": dim, "start": i * size, "stop": (i + 1) * size}) for i in at]


def test_blocks_for_a_reduce_scatter() -> None:
    """Blocks of one dimension, in the order of the ranks, along the first; in another order, or not all of them, they are left alone."""
    e = emitter(3, 6, 5)
    assert uncut(e, e.op("concat", blocks(e, [0, 1, 2], 1, 2), {"dim": 0}), 3) == ("x", 1)
    for at, size in (([1, 0, 2], 2), ([0, 1, 1], 2), ([0, 1], 2), ([0, 1, 2], 1)):
        assert uncut(e, e.op("concat", blocks(e, at, 1, size), {"dim": 0}), 3) is None
    assert uncut(e, e.op("concat", blocks(e, [0, 1, 2], 1, 2), {"dim": 2}), 3) is None


def test_gathered_blocks_side_by_side() -> None:
    """What ranks gathered along the first dimension, joined along another: a permutation. In another order it stays a concatenation."""
    for at, names in (([0, 1, 2], ["reshape", "permute", "reshape"]), ([1, 0, 2], ["concat"])):
        e = Emitter(rewritten=rewritten)
        e.declare("mine", TensorType((2, 4, 5), "f32"))
        whole = e.communicate("all_gather", ("mine",), {"group": "g", "dim": 0}, TensorType((6, 4, 5), "f32"))
        cut = [e.op("slice", (whole,), {"dim": 0, "start": 2 * i, "stop": 2 * i + 2}) for i in at]
        done = len(e.ops)
        joined = e.op("concat", cut, {"dim": 1})
        assert e.shape(joined) == (2, 12, 5)
        assert [op.name for op in e.ops[done:]] == names
        program = e.program("p", ("mine",), (), (), [Output(joined, "metric", "m")], {})
        gathered = np.arange(120.0).reshape(6, 4, 5)
        values = computed(replace(program, ops=program.ops[1:]), {str(whole): gathered})
        np.testing.assert_array_equal(values[joined], np.concatenate([gathered[2 * i : 2 * i + 2] for i in at], axis=1))


def test_a_slice_of_what_literals_surround() -> None:
    """Labels that move by one: the last one is a literal."""
    found = agree(lambda a: torch.nn.functional.pad(a, (0, 1), value=-100)[..., 1:].contiguous(), torch.tensor([[3, 1, 4], [1, 5, 9]]))
    assert ops(found)[-1] == "concat"
    assert [op.inputs for op in found.emitter.ops if op.name == "slice"] == [("x0",)]
    for cut in (slice(0, 2), slice(1, 3), slice(2, 7), slice(3, 8)):
        agree(lambda a, cut=cut: torch.nn.functional.pad(a, (2, 3), value=0.5)[:, cut].clone(), real(2, 4))


def joined(a, shape: tuple[int, ...], order: tuple[int, ...]):
    return torch.cat([a[i : i + 1].clone().reshape(shape) for i in order])


def test_blocks_that_are_reshaped_and_joined() -> None:
    found = agree(lambda a: joined(a, (6,), (0, 1, 2)), real(3, 2, 3))
    assert ops(found)[-1] == "reshape"
    assert found.emitter.ops[-1].inputs == ("x0",)


def test_blocks_in_another_order_stay() -> None:
    """Not all, not in order, or not along the first dimension: no reshape, and still equal in numbers."""
    for order in ((1, 0, 2), (0, 1), (0, 1, 1)):
        found = agree(lambda a, order=order: joined(a, (6,), order), real(3, 2, 3))
        assert found.emitter.ops[-1].inputs != ("x0",)
    found = agree(lambda a: torch.cat([a[i : i + 1].clone().reshape(2, 3) for i in range(3)], dim=1), real(3, 2, 3))
    assert ops(found)[-1] == "concat"


def clip_factor(x, eps: float, bound: float):
    """As DeepSpeed writes it."""
    return 1.0 / torch.clamp((torch.linalg.vector_norm(x) + eps) / 0.5, min=bound)


def test_reciprocal_of_a_positive_number_with_a_lower_bound() -> None:
    found = agree(lambda x: clip_factor(x, 1e-6, 1.0), real(2, 3))
    assert "minimum" in ops(found)
    assert "clamp" not in ops(found)[-1]


def test_reciprocal_of_another_number_is_left_alone() -> None:
    """A number that may be negative, one that may be zero, and another bound: 1 / max(-2, 1) is not min(-1/2, 1)."""
    negative = torch.tensor(-2.0, dtype=torch.float64)
    for found in (
        agree(lambda x: 1.0 / torch.clamp(x, min=1.0), negative),
        agree(lambda x: clip_factor(x, -1e-6, 1.0), real(2, 3)),
        agree(lambda x: 1.0 / torch.clamp(torch.linalg.vector_norm(x) / 0.5, min=1.0), real(2, 3)),
        agree(lambda x: clip_factor(x, 1e-6, 2.0), real(2, 3)),
    ):
        assert "minimum" not in ops(found)


def test_scalar_times_flat_memory() -> None:
    """Goes to the pieces; a vector of the same length does not."""
    found = agree(lambda a, b, c: torch.cat([a, b]) * c.sum(), real(2), real(3), real(5))
    assert ops(found)[-1] == "concat"
    found = agree(lambda a, b, c: torch.cat([a, b]) * c, real(2), real(3), real(5))
    assert ops(found)[-1] == "mul"


def flat_memory(apart: bool) -> tuple[Emitter, str, str]:
    e = Emitter(rewritten=rewritten)
    e.apart = apart
    for name, size in (("a", 2), ("b", 3), ("c", 2), ("d", 3)):
        e.declare(name, TensorType((size,), "f32"))
    return e, e.op("concat", ("a", "b"), {"dim": 0}), e.op("concat", ("c", "d"), {"dim": 0})


def test_flat_memory_piece_by_piece() -> None:
    e, x, y = flat_memory(True)
    assert e.made[e.op("sqrt", (e.op("mul", (x, y)),))].name == "concat"
    cut = e.made[e.op("slice", (x,), {"dim": 0, "start": 1, "stop": 3})]
    assert [e.made[i].inputs for i in cut.inputs] == [("a",), ("b",)]
    e, x, y = flat_memory(False)
    assert e.made[e.op("mul", (x, y))].name == "mul"


def test_flat_memory_that_is_cut_otherwise() -> None:
    e, x, _ = flat_memory(True)
    other = e.op("concat", ("b", "a"), {"dim": 0})
    assert e.made[e.op("mul", (x, other))].name == "mul"
