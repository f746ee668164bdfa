"""Micro-batches: what their losses make together, auxiliary losses, buffers; against a loop in PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import trainverify as tv
from completion.running import assert_same, differing, draw, outputs
from trainverify.build.tape import BuildError
from trainverify.graph.program import Program
from trainverify.zoo.language import Loss, token_loss, tokens

MICRO, ROWS, SEQUENCE, WORDS, WIDTH = 3, 2, 5, 7, 4
IGNORED = -100


def language(convention: Loss, rows: int = ROWS) -> Program:
    b = tv.program("words")
    ids, labels = tokens(b, rows, SEQUENCE, WORDS)
    x = b.embedding(ids, b.parameter("embed", (WORDS, WIDTH)))
    b.loss(token_loss(b, b.linear(b.tanh(x), b.parameter("head", (WORDS, WIDTH))), labels, convention))
    return b.build()


def torch_losses(p: dict[str, Any], values: dict[str, Any]) -> tuple[Any, Any]:
    """Loss of every token, and which tokens count."""
    ids, labels = torch.from_numpy(values["tokens"]), torch.from_numpy(values["labels"])
    logits = torch.tanh(p["embed"][ids]) @ p["head"].T
    each = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
    return each.reshape(labels.shape), labels != IGNORED


def leaves(program: Program, values: dict[str, Any]) -> dict[str, Any]:
    return {n: torch.tensor(values[n], requires_grad=True) for n in program.parameters}


def collected(loss: Any, p: dict[str, Any], **metrics: Any) -> dict[str, Any]:
    found = {"loss": loss, **{f"gradient of {n}": w.grad for n, w in p.items()}}
    return found | {f"metric {n}": v for n, v in metrics.items()}


def parts(values: dict[str, Any], names: tuple[str, ...]) -> list[dict[str, Any]]:
    pieces = {n: np.split(values[n], MICRO) for n in names}
    return [{**values, **{n: pieces[n][m] for n in names}} for m in range(MICRO)]


def drawn(program: Program, seed: int) -> dict[str, Any]:
    """Micro-batches and sequences with different numbers of valid tokens, none without."""
    values = draw(program, seed)
    labels = values["labels"]
    labels[:, 0] = np.arange(len(labels)) % WORDS
    labels[0] = np.abs(labels[0]) % WORDS
    labels[-1, 2:] = IGNORED
    return values


# -- conventions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convention", ["per_token", "per_sequence", "sum"])
def test_the_whole_batch(convention: Loss) -> None:
    program = tv.complete(language(convention))
    values = drawn(program, 1)
    p = leaves(program, values)
    each, valid = torch_losses(p, values)
    loss = {
        "per_token": lambda: each.sum() / valid.sum(),
        "per_sequence": lambda: (each.sum(1) / valid.sum(1)).mean(),
        "sum": lambda: each.sum(),
    }[convention]()
    loss.backward()
    assert_same(outputs(program, values), collected(loss.detach(), p))


def test_conventions_differ() -> None:
    programs = [tv.complete(language(c)) for c in ("per_token", "per_sequence", "sum")]
    values = drawn(programs[0], 1)
    first, second, third = (outputs(p, values) for p in programs)
    assert differing(first, second) == differing(second, third) == differing(first, third) == set(first)


@pytest.mark.parametrize(
    ("convention", "accumulate"), [("per_token", "per_token"), ("per_token", "mean"), ("per_sequence", "mean"), ("sum", "sum")]
)
def test_accumulation_is_the_loop(convention: Loss, accumulate: Any) -> None:
    program = tv.complete(language(convention), microbatches=MICRO, accumulate=accumulate)
    values = drawn(program, 2)
    p = leaves(program, values)
    everything = int((values["labels"] != IGNORED).sum())
    total = 0.0
    for piece in parts(values, ("tokens", "labels")):
        each, valid = torch_losses(p, piece)
        if accumulate == "per_token":
            loss = each.sum() / everything
        elif convention == "per_token":
            loss = each.sum() / valid.sum() / MICRO
        elif convention == "per_sequence":
            loss = (each.sum(1) / valid.sum(1)).mean() / MICRO
        else:
            loss = each.sum()
        loss.backward()
        total += float(loss.detach())
    assert_same(outputs(program, values), collected(total, p))


@pytest.mark.parametrize(("convention", "accumulate"), [("per_token", "per_token"), ("per_sequence", "mean"), ("sum", "sum")])
def test_micro_batches_change_nothing(convention: Loss, accumulate: Any) -> None:
    cut = tv.complete(language(convention), tv.AdamW(lr=0.1), microbatches=MICRO, accumulate=accumulate, clip=0.1)
    whole = tv.complete(language(convention, MICRO * ROWS), tv.AdamW(lr=0.1), clip=0.1)
    assert {n: cut.tensors[n] for n in cut.sources} == {n: whole.tensors[n] for n in whole.sources}
    values = drawn(cut, 3)
    assert_same(outputs(cut, values), outputs(whole, values))


def test_the_mean_of_means_is_another_loss() -> None:
    means = tv.complete(language("per_token"), microbatches=MICRO, accumulate="mean")
    whole = tv.complete(language("per_token", MICRO * ROWS))
    values = drawn(means, 3)
    assert differing(outputs(means, values), outputs(whole, values)) == {"loss", "gradient of embed", "gradient of head"}


def test_a_micro_batch_without_valid_tokens_counts_for_nothing() -> None:
    program = tv.complete(language("per_token"), microbatches=MICRO, accumulate="per_token")
    values = drawn(program, 4)
    values["labels"][:ROWS] = IGNORED
    p = leaves(program, values)
    each, valid = torch_losses(p, values)
    loss = each.sum() / valid.sum()
    loss.backward()
    assert_same(outputs(program, values), collected(loss.detach(), p))


# -- auxiliary losses ---------------------------------------------------------------------------------------------------


def with_auxiliary() -> Program:
    b = tv.program("two heads")
    x, t = b.input("x", (ROWS, WIDTH)), b.input("t", (ROWS, 3))
    y = b.linear(x, b.parameter("w", (3, WIDTH)))
    b.loss(b.mse_loss(y, t))
    b.metric("size", b.mean(b.square(b.mean(y, dim=0))))  # not additive over the batch
    return b.build()


@pytest.mark.parametrize("accumulate", ["mean", "sum"])
def test_auxiliary_losses_are_weighted_and_reported(accumulate: Any) -> None:
    program = tv.complete(with_auxiliary(), microbatches=MICRO, accumulate=accumulate, auxiliary={"size": 0.25})
    values = draw(program, 5)
    p = leaves(program, values)
    share = 1 / MICRO if accumulate == "mean" else 1.0
    loss = size = 0.0
    for piece in parts(values, ("x", "t")):
        y = torch.from_numpy(piece["x"]) @ p["w"].T
        main, extra = share * functional.mse_loss(y, torch.from_numpy(piece["t"])), share * y.mean(0).square().mean()
        (main + 0.25 * extra).backward()
        loss, size = loss + float(main.detach()), size + float(extra.detach())
    assert_same(outputs(program, values), collected(loss, p, size=size))


def test_a_metric_without_weight_changes_no_gradient() -> None:
    silent, heavy = tv.complete(with_auxiliary()), tv.complete(with_auxiliary(), auxiliary={"size": 0.25})
    values = draw(silent, 5)
    assert differing(outputs(heavy, values), outputs(silent, values)) == {"gradient of w"}


# -- buffers ------------------------------------------------------------------------------------------------------------


def normalised() -> Program:
    b = tv.program("normalised")
    x, t = b.input("x", (5, 3)), b.input("t", (5, 3))
    mean, var = b.state("mean", (3,)), b.state("var", (3,), domain="nonnegative")
    y = b.linear(x, b.parameter("w", (3, 3)))
    y, _, _, new_mean, new_var = b.batch_norm(y, b.parameter("scale", (3,)), b.parameter("shift", (3,)), mean, var, momentum=0.3)
    b.loss(b.mse_loss(b.tanh(y), t))
    b.update(mean, new_mean)
    b.update(var, new_var)
    return b.build()


@pytest.mark.parametrize("micro", [1, MICRO])
def test_buffers_pass_through_micro_batches(micro: int) -> None:
    program = tv.complete(normalised(), microbatches=micro, accumulate="mean")
    values = draw(program, 6)
    p = leaves(program, values)
    mean, var = torch.tensor(values["mean"]), torch.tensor(values["var"])
    total = 0.0
    for x, t in zip(np.split(values["x"], micro), np.split(values["t"], micro), strict=True):
        y = functional.batch_norm(torch.from_numpy(x) @ p["w"].T, mean, var, p["scale"], p["shift"], True, 0.3)
        loss = functional.mse_loss(torch.tanh(y), torch.from_numpy(t)) / micro
        loss.backward()
        total += float(loss.detach())
    assert_same(outputs(program, values), collected(total, p) | {"updated state mean": mean, "updated state var": var})


# -- what is rejected -----------------------------------------------------------------------------------------------------


def test_several_micro_batches_need_a_convention() -> None:
    with pytest.raises(BuildError, match="say what their losses make together"):
        tv.complete(language("per_token"), microbatches=2)


def test_per_token_needs_a_quotient() -> None:
    with pytest.raises(BuildError, match=r"must be a total divided by a count; it is loss = cross_entropy"):
        tv.complete(language("sum"), microbatches=2, accumulate="per_token")


def test_an_unknown_auxiliary_loss() -> None:
    with pytest.raises(BuildError, match=r"reports no metric 'sise' \(it has: size\)"):
        tv.complete(with_auxiliary(), auxiliary={"sise": 1.0})


def test_a_metric_has_no_meaning_over_micro_batches() -> None:
    with pytest.raises(BuildError, match="metric 'size' of the forward pass has no meaning over several micro-batches"):
        tv.complete(with_auxiliary(), microbatches=2, accumulate="mean")


def test_a_finished_step_is_not_a_forward_program() -> None:
    with pytest.raises(BuildError, match="it has backward ops already"):
        tv.complete(tv.complete(with_auxiliary()))


def test_a_program_without_loss() -> None:
    b = tv.program("silent")
    b.metric("size", b.mean(b.parameter("w", (3,))))
    with pytest.raises(BuildError, match="no output is declared as the loss"):
        tv.complete(b.build())


def test_a_parameter_that_the_loss_does_not_reach() -> None:
    b = tv.program("cut off")
    b.loss(b.mean(b.mul(b.parameter("w", (3,)), b.detach(b.parameter("u", (3,))))))
    with pytest.raises(BuildError, match="'u' has no gradient"):
        tv.complete(b.build())


def test_an_input_without_a_batch_dimension() -> None:
    b = tv.program("scaled")
    b.loss(b.mul(b.mean(b.parameter("w", (3,))), b.input("factor", ())))
    with pytest.raises(BuildError, match="input 'factor' has no dimension that runs over the batch"):
        tv.complete(b.build(), microbatches=2, accumulate="sum")
