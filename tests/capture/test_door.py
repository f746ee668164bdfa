"""Ordinary CUDA scripts for DDP and FSDP2, as a user writes them: proved as they are, and planted bugs found at their lines."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from capture.doors import Planted, edited, judged, lines_of, planted, scripts

FOLDER = Path(__file__).parent / "door"
SMALLER = {
    "train_ddp.py": (("n_layer: int = 2", "n_layer: int = 1"),),
    "train_fsdp2.py": (('"--layers", type=int, default=2', '"--layers", type=int, default=1'),),
}


@pytest.mark.capture
@pytest.mark.parametrize("name", scripts(FOLDER))
def test_as_it_is(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: PROVED, without an edit."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text((FOLDER / name).read_text("utf-8"), "utf-8")
    report = judged(Path(name))
    assert report.verdict == scripts(FOLDER)[name], report.reason


@pytest.mark.parametrize("name", scripts(FOLDER))
def test_with_one_layer(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: PROVED."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(edited((FOLDER / name).read_text("utf-8"), SMALLER[name]), "utf-8")
    report = judged(Path(name))
    assert report.verdict == scripts(FOLDER)[name], report.reason


@pytest.mark.long
@pytest.mark.parametrize("bug", planted(FOLDER), ids=lambda b: f"{b.script}: {b.name}")
def test_planted(bug: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: REFUTED or INVALID, at a line that is to blame."""
    monkeypatch.chdir(tmp_path)
    text = edited((FOLDER / bug.script).read_text("utf-8"), (*SMALLER[bug.script], *bug.edits))
    Path(bug.script).write_text(text, "utf-8")
    report = judged(Path(bug.script))
    assert report.verdict in bug.verdicts, report.reason
    assert lines_of(report, bug.script) & bug.guilty(text)
