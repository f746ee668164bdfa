"""The same captures at the widths of Llama-3-8B, sequences of 4096: PROVED, and no slower than at small sizes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")


from capture.cases import CASES, REAL  # noqa: E402

SECONDS = 40.0  # of processor time of the proof; far below what anything linear in a size of a tensor takes


@pytest.mark.capture
@pytest.mark.parametrize("name", sorted(CASES))
def test_proved_at_real_widths(name: str) -> None:
    """No op and no obligation costs more because its tensors are large."""
    began = time.process_time()
    report = CASES[name].verify(REAL)
    assert report.verdict == "PROVED", report.reason
    assert time.process_time() - began < SECONDS


@pytest.mark.capture
def test_sequences_of_other_lengths() -> None:
    """PROVED: batch, sequence and heads that share no factor but what ranks cut."""
    odd = replace(REAL, batch=6, sequence=8190, heads=24, kv_heads=4, dim=3072, hidden=8188, vocab=50260)
    report = CASES["fsdp tp sp"].verify(odd)
    assert report.verdict == "PROVED", report.reason
