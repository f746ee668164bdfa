"""Interleaved pipelines, losses, packed rows and master copies: whole steps at real widths are proved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainverify.verdicts import verify
from trainverify.zoo import llama
from trainverify.zoo.parallel import Degrees, gpt_plan, gpt_step, llama_plan, llama_step
from zoo.parallel.pipelines import GPT2
from zoo.parallel.schedules import passes

REAL = llama.Config(1, 4096, 32, 8, ffn=14336, vocabulary=128256, sequence=8192)
SMALL = llama.Config(1, hidden=24, heads=6, kv_heads=2, ffn=10, vocabulary=14, sequence=10)


def rounds(pp: int, microbatches: int, chunks: int = 2, **more: object) -> Degrees:
    return Degrees(pp=pp, chunks=chunks, schedule="interleaved", microbatches=microbatches, **more)  # type: ignore[arg-type]


LLAMAS: dict[str, tuple[llama.Config, Degrees]] = {
    "interleaved pp2 mb2": (replace(REAL, layers=4), rounds(2, 2)),
    "interleaved pp2 mb4, uneven": (replace(SMALL, layers=5), rounds(2, 4, stages=(2, 1, 1, 1))),
    "interleaved pp3 mb3": (replace(SMALL, layers=6), rounds(3, 3)),
    "interleaved dp2 tp2 sp pp2 mb2 zero1": (replace(REAL, layers=4), rounds(2, 2, dp=2, tp=2, sp=True, zero=1)),
    "per sequence dp2 tp2 mb2": (replace(REAL, loss="per_sequence"), Degrees(dp=2, tp=2, microbatches=2)),
    "per sequence pp2 mb2 zero2": (replace(REAL, layers=2, loss="per_sequence"), Degrees(dp=2, pp=2, microbatches=2, zero=2)),
    "sum dp2 mb2": (replace(REAL, loss="sum"), Degrees(dp=2, microbatches=2)),
    "packed dp2 mb2": (replace(REAL, packed=True), Degrees(dp=2, microbatches=2)),
    "packed dp2 tp2 sp pp2 mb2": (replace(REAL, layers=2, packed=True), Degrees(dp=2, tp=2, sp=True, pp=2, microbatches=2)),
    "master dp2 tp2": (replace(REAL, dtype="bf16"), Degrees(dp=2, tp=2)),
    "master zero1 dp2": (replace(REAL, dtype="bf16"), Degrees(dp=2, zero=1)),
    "master zero3 dp2 tp2 mb2": (replace(REAL, dtype="bf16"), Degrees(dp=2, tp=2, zero=3, microbatches=2)),
}


@pytest.mark.parametrize("name", LLAMAS)
def test_llama_is_proved(name: str) -> None:
    config, how = LLAMAS[name]
    config = replace(config, batch=how.dp * how.microbatches)
    master = "master" in name
    report = verify(llama_step(config, master=master), llama_plan(config, how, master=master), points=1)
    assert report.verdict == "PROVED", report.notes
    assert not report.findings


def test_tied_matrix_and_interleaved_stages_are_proved() -> None:
    how = rounds(2, 2, dp=2, zero=2)
    config = replace(GPT2, batch=4, dtype="bf16", loss="per_sequence")
    report = verify(gpt_step(config, master=True), gpt_plan(config, how, master=True), points=1)
    assert report.verdict == "PROVED", report.notes


def test_order_of_interleaved_passes() -> None:
    """Two stages of two chunks: micro-batches go through a chunk in pairs; the first stage runs 4 steps ahead, the last one 2."""
    config = replace(SMALL, layers=4, batch=4)
    plan = llama_plan(config, rounds(2, 4))
    assert passes(plan, 0).startswith("F0 F1 F0 F1 F2 B0 F3 B1 F2 B0 F3 B1 B2 B3 B2 B3")
    assert passes(plan, 1).startswith("F0 F1 F0 B0 F1 B1 F2 B0 F3 B1 F2 B2 F3 B3 B2 B3")


def test_one_sequence_for_every_rank_and_micro_batch_is_proved() -> None:
    """What a sequence's loss is divided by leaves all sums of a rank, and none of the whole batch."""
    config = replace(GPT2, layers=1, batch=4, loss="per_sequence")
    assert verify(gpt_step(config), gpt_plan(config, Degrees(dp=2, microbatches=2)), points=1).verdict == "PROVED"
