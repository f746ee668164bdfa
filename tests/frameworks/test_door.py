"""Ordinary scripts with accelerate, Transformers' Trainer and Lightning: proved as they are, and planted bugs found at their lines."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from capture.doors import Planted, edited, judged, lines_of, planted, scripts

FOLDER = Path(__file__).parent / "door"
NEEDED = {"train_accelerate.py": "accelerate", "train_trainer.py": "transformers", "train_lightning.py": "lightning"}

NOT_YET = ("train_trainer.py",)


@pytest.mark.parametrize("name", scripts(FOLDER))
def test_as_it_is(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: PROVED, without an edit."""
    _skip_without(name)
    monkeypatch.chdir(tmp_path)
    Path(name).write_text((FOLDER / name).read_text("utf-8"), "utf-8")
    report = judged(Path(name))
    assert report.verdict == scripts(FOLDER)[name], report.reason


@pytest.mark.parametrize("bug", planted(FOLDER), ids=lambda b: f"{b.script}: {b.name}")
def test_planted(bug: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: REFUTED or INVALID, at a line that is to blame."""
    _skip_without(bug.script)
    monkeypatch.chdir(tmp_path)
    text = edited((FOLDER / bug.script).read_text("utf-8"), bug.edits)
    Path(bug.script).write_text(text, "utf-8")
    report = judged(Path(bug.script))
    assert report.verdict in bug.verdicts, report.reason
    assert lines_of(report, bug.script) & bug.guilty(text)


def _skip_without(script: str) -> None:
    if script in NOT_YET:
        pytest.skip(f"{script} is not shown to be captured yet")
    if find_spec(NEEDED[script]) is None:
        pytest.skip(f"{NEEDED[script]} is not installed")
