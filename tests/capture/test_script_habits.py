"""What ordinary scripts do around their steps: data drawn for real, seeds, running losses, batches that are loaded together."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch

from capture.doors import edited, judged, lines_of
from trainverify.torch.data_draws import Draws
from trainverify.translate.targets import CaptureError

HABITS = (Path(__file__).parent / "scripts" / "habits.py").read_text("utf-8")


def written(folder: Path, *edits: tuple[str, str]) -> Path:
    (folder / "train.py").write_text(edited(HABITS, edits), "utf-8")
    return Path("train.py")


def test_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: PROVED, with what is assumed of the seed, and a running loss compared with nothing."""
    monkeypatch.chdir(tmp_path)
    report = judged(written(tmp_path))
    assert report.verdict == "PROVED", report.reason
    assert any("seeds that the code draws" in a for a in report.assumptions)
    assert any("2 batches in a step" in a for a in report.assumptions)
    assert any("train_epoch.total" in f.message for f in report.findings)


def test_a_loss_that_only_clipping_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: REFUTED. At random points the norm is above 1, and a factor of all gradients is lost; where it is below, they differ."""
    monkeypatch.chdir(tmp_path)
    clip = "        nn.utils.clip_grad_norm_(raw.parameters(), 1.0)\n        optimizer.step()\n"
    path = written(tmp_path, ("y.cuda()) / 2", "y.cuda()) / 2 / dist.get_world_size()"), ("        optimizer.step()\n", clip))
    report = judged(path)
    assert report.verdict == "REFUTED", report.reason
    line = next(i for i, text in enumerate(path.read_text("utf-8").splitlines(), 1) if "get_world_size" in text)
    assert line in lines_of(report, "train.py")


def test_a_batch_without_a_backward_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: no verdict where some of the batches that are loaded together are not trained on."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CaptureError, match=r"without a backward pass between them"):
        judged(written(tmp_path, ("for x, y in [next(batches) for _ in range(2)]:", "for x, y in [next(batches) for _ in range(2)][:1]:")))


def test_numbers_that_nobody_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: no verdict where a seed is read of a generator that the script does not seed."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match=r"value of a computed tensor is read"):
        judged(written(tmp_path, ("torch.manual_seed(5)\n", "")))


def test_what_is_drawn_for_real() -> None:
    """All that a generator draws, or from then on nothing; and nothing in a step."""
    ops, draws = torch.ops.aten, Draws()
    given = {"generator": torch.Generator().manual_seed(7)}
    drawn = draws.data(ops.randint.generator, (9, [4]), given, stepping=False)
    assert drawn is not None
    assert torch.equal(drawn, torch.randint(9, (4,), generator=torch.Generator().manual_seed(7)))
    assert draws.data(ops.normal_.default, (torch.zeros(3),), given, stepping=False) is None
    assert draws.data(ops.randint.generator, (9, [4]), given, stepping=False) is None
    other = {"generator": torch.Generator().manual_seed(7)}
    assert draws.data(ops.randint.generator, (9, [4]), other, stepping=True) is None
    assert draws.data(ops.randint.generator, (9, [4]), other, stepping=False) is None
