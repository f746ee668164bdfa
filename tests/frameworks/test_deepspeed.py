"""DeepSpeed as installed: PROVED with every stage of ZeRO, REFUTED with an edit in a copy of its files."""

from __future__ import annotations

from pathlib import Path

import pytest

deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed is absent: make frameworks has an environment with it")

from frameworks.planted import Edit  # noqa: E402
from frameworks.planted_deepspeed import EDITS, zero  # noqa: E402
from frameworks.running import edited, refuted_there, verdict  # noqa: E402

SOURCES = Path(__file__).with_name("sources")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_proved(stage: int, tmp_path: Path) -> None:
    """Parameters are cut within rows; stages 1 and 2 pad the last one."""
    report = verdict(("deepspeed", *zero(stage)), [], tmp_path)
    assert report["verdict"] == "PROVED", report["reason"]
    assert "shims" in report["reason"]


@pytest.mark.parametrize("stage", [1, 2])
def test_four_ranks(stage: int, tmp_path: Path) -> None:
    assert verdict(("deepspeed", *zero(stage, 4)), [], tmp_path)["verdict"] == "PROVED"


def test_parameters_that_are_gathered_when_they_are_used(tmp_path: Path) -> None:
    """PROVED: by default, parameters as small as these stay gathered."""
    report = verdict(("deepspeed", *zero(3, stage3_param_persistence_threshold=0)), [], tmp_path)
    assert report["verdict"] == "PROVED", report["reason"]


def test_a_layer_that_is_not_used(tmp_path: Path) -> None:
    """INVALID: ZeRO decays its parameters and counts their steps, PyTorch does not."""
    report = verdict(("deepspeed", str(SOURCES / "zero_model.py"), *zero(1)), [], tmp_path)
    assert report["verdict"] == "INVALID", report["reason"]
    assert "spare.weight.step" in report["reason"]


@pytest.mark.parametrize(("more", "wanted"), [((), "REFUTED"), (("--mean-of-micro-batches",), "PROVED")])
def test_unequal_numbers_of_tokens(more: tuple[str, ...], wanted: str, tmp_path: Path) -> None:
    """A mean over all tokens is not the mean of means that ZeRO computes."""
    report = verdict(("deepspeed", str(SOURCES / "zero_tokens.py"), *more, *zero(1)), [], tmp_path)
    assert report["verdict"] == wanted, report["reason"]


def test_padding_of_stage_3_is_refused(tmp_path: Path) -> None:
    assert "stage 3 pads" in str(verdict(("deepspeed", *zero(3, 4)), [], tmp_path))


@pytest.mark.parametrize("edit", EDITS, ids=lambda e: e.name)
def test_refuted(edit: Edit, tmp_path: Path) -> None:
    folder = edited(deepspeed, edit, tmp_path / "site-packages")
    report = verdict(("deepspeed", *edit.options), [folder], tmp_path)
    refuted_there(report, edit, deepspeed, folder)
