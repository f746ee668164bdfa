"""Transformers and accelerate as installed: PROVED under every parallelism that is captured, REFUTED with an edit in a copy of their
files, and with a mistake that they have."""

from __future__ import annotations

from pathlib import Path

import pytest

accelerate = pytest.importorskip("accelerate", reason="accelerate is absent: make frameworks has an environment with it")
transformers = pytest.importorskip("transformers", reason="Transformers is absent: make frameworks has an environment with it")

from frameworks.planted import Edit  # noqa: E402
from frameworks.planted_transformers import ACCELERATE, ACCELERATED, BOTH, REPLICAS, SHARED, TENSOR, TRANSFORMERS  # noqa: E402
from frameworks.running import edited, refuted_there, verdict  # noqa: E402

MODEL = "vocab_size=24,hidden_size=16,intermediate_size=20,num_hidden_layers=1,num_attention_heads=4,num_key_value_heads=2,head_dim=4"
BATCH = ("--block_size", "6", "--per_device_train_batch_size", "1")
TWICE = ("--gradient_accumulation_steps", "2")
SMALL = ("transformers", "--config_overrides", MODEL, *BATCH)


@pytest.mark.parametrize("options", [TENSOR, SHARED, BOTH, ACCELERATED, REPLICAS], ids=" ".join)
def test_proved(options: tuple[str, ...], tmp_path: Path) -> None:
    report = verdict((*SMALL, *TWICE, *options), [], tmp_path)
    assert report["verdict"] == "PROVED", report["reason"]
    assert "shims" in report["reason"]


def test_tied_embeddings(tmp_path: Path) -> None:
    """PROVED: ranks cut the weight once."""
    tied = ("transformers", "--config_overrides", f"{MODEL},tie_word_embeddings=true", *BATCH)
    report = verdict((*tied, *TENSOR), [], tmp_path)
    assert report["verdict"] == "PROVED", report["reason"]


def test_norms_of_heads_of_accumulated_micro_batches(tmp_path: Path) -> None:
    """REFUTED, and PROVED with one micro-batch: gradients of earlier micro-batches are added up again over tensor-parallel ranks."""
    qwen = (*SMALL, "--model_type", "qwen3", *TENSOR)
    assert verdict(qwen, [], tmp_path)["verdict"] == "PROVED"
    assert verdict((*qwen, *TWICE), [], tmp_path)["verdict"] == "REFUTED"


@pytest.mark.parametrize("edit", [*TRANSFORMERS, *ACCELERATE], ids=lambda e: e.name)
def test_refuted(edit: Edit, tmp_path: Path) -> None:
    package = accelerate if edit in ACCELERATE else transformers
    folder = edited(package, edit, tmp_path / "site-packages")
    refuted_there(verdict((*SMALL, *TWICE, *edit.options), [folder], tmp_path), edit, package, folder)
