"""Megatron-core as it is installed: PROVED under every parallelism that is captured, REFUTED with an edit in a copy of its files."""

from __future__ import annotations

from pathlib import Path

import pytest

core = pytest.importorskip("megatron.core", reason="Megatron-core is absent: make frameworks has an environment with it")

from frameworks.planted import Edit  # noqa: E402
from frameworks.planted_megatron import DATA, EDITS, GATED, PIPELINE, SEQUENCE, SHARDED, TENSOR  # noqa: E402
from frameworks.running import edited, refuted_there, verdict  # noqa: E402

SIZES = ("--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "2", "--vocab-size", "12", "--seq-length", "4")
SMALL = ("megatron", *SIZES)


@pytest.mark.parametrize("options", [TENSOR, SEQUENCE, GATED, DATA, SHARDED, PIPELINE], ids=" ".join)
def test_proved(options: tuple[str, ...], tmp_path: Path) -> None:
    report = verdict((*SMALL, *options), [], tmp_path)
    assert report["verdict"] == "PROVED", report["reason"]
    assert "shims" in report["reason"]


@pytest.mark.parametrize("edit", EDITS, ids=lambda e: e.name)
def test_refuted(edit: Edit, tmp_path: Path) -> None:
    folder = edited(core, edit, tmp_path / "site-packages")
    refuted_there(verdict((*SMALL, *edit.options), [folder], tmp_path), edit, core, folder)
