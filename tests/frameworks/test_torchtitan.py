"""torchtitan as it is installed: PROVED under every parallelism that is captured, REFUTED with an edit in a copy of its files."""

from __future__ import annotations

from pathlib import Path

import pytest

torchtitan = pytest.importorskip("torchtitan", reason="torchtitan is absent: make frameworks has an environment with it")

from frameworks.planted import DATA, EDITS, HYBRID, PIPELINE, TENSOR, Edit  # noqa: E402
from frameworks.running import edited, refuted_there, verdict  # noqa: E402

SOURCES = Path(__file__).parent / "sources"
LLAMA = ("torchtitan", "--module", "small_llama", "--config")


@pytest.mark.parametrize("options", [DATA, TENSOR, (*TENSOR, "--world-size", "4"), HYBRID, PIPELINE], ids=" ".join)
def test_proved(options: tuple[str, ...], tmp_path: Path) -> None:
    report = verdict((*LLAMA, "two_layers", *options), [SOURCES], tmp_path)
    assert report["verdict"] == "PROVED", report["reason"]
    assert "shims" in report["reason"]


def test_context_parallel(tmp_path: Path) -> None:
    """PROVED for rows that are cut one after the other; UNKNOWN where their heads and tails are dealt out, never REFUTED."""
    rows = (*LLAMA, "long_rows", "--parallelism.context_parallel_degree", "2")
    report = verdict((*rows, "--parallelism.context_parallel_load_balancer", "None"), [SOURCES], tmp_path)
    assert report["verdict"] == "PROVED", report["reason"]
    assert verdict(rows, [SOURCES], tmp_path)["verdict"] in ("PROVED", "UNKNOWN")


def test_qwen(tmp_path: Path) -> None:
    """PROVED: tied embeddings and norms of heads on tensor-parallel ranks."""
    report = verdict(("torchtitan", "--config", "qwen3_debugmodel", *TENSOR), [], tmp_path)
    assert report["verdict"] == "PROVED", report["reason"]


@pytest.mark.parametrize("edit", EDITS, ids=lambda e: e.name)
def test_refuted(edit: Edit, tmp_path: Path) -> None:
    folder = edited(torchtitan, edit, tmp_path / "site-packages")
    refuted_there(verdict((*LLAMA, "small", *edit.options), [SOURCES, folder], tmp_path), edit, torchtitan, folder)
