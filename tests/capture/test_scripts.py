"""Ordinary training scripts for GPUs, as users write them, and the same with one mistake each. There is no GPU here."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from trainverify.ops import OPS
from trainverify.report import Report
from trainverify.torch.command import script, verdict
from trainverify.torch.launch import Reads
from trainverify.translate.targets import CaptureError

SCRIPTS = Path(__file__).parent / "scripts"
ARGUMENTS: Mapping[str, tuple[str, str]] = {  # of the ranks, and of the reference
    "gpt": ("--rows 2 --dtype float16", "--rows 4 --dtype float16"),
    "fsdp": ("--rows 2", "--rows 4"),
    "accumulate": ("--rows 2", "--rows 8 --accumulate 1"),
}
DIVIDED = 'loss = F.cross_entropy(model(batch["x"][rows]), batch["labels"][rows]) / args.accumulate'
SHARDED = "fully_shard(block, mesh=mesh, mp_policy=policy)"
WRAPPED = "    if distributed:\n        model = Dist"
CASES = (
    ("PROVED", "gpt", "", "", ""),
    ("PROVED", "fsdp", "", "", ""),
    ("PROVED", "accumulate", "", "", ""),
    ("REFUTED", "gpt", WRAPPED, WRAPPED.replace("distributed", "args.rows > 4"), "its avg over dp is needed"),
    ("REFUTED", "fsdp", SHARDED, f"{SHARDED}.set_gradient_divide_factor(1.0)", "where reduce_scatter with avg"),
    ("REFUTED", "accumulate", " and not last else", " else", "its avg over dp is needed"),
    ("REFUTED", "accumulate", DIVIDED, DIVIDED.removesuffix(" / args.accumulate"), "scaled: ×2 everywhere"),
)  # fmt: skip


def judged(path: Path, arguments: str, reference: str, device: str = "cuda") -> Report:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork
        subject = script(str(path), arguments.split(), reference.split(), 2, OPS, lambda text: None, device=device)
    return verdict(subject, OPS, 3, 0, "algebra", False, None, lambda text: None)


@pytest.mark.parametrize(("expected", "name", "was", "now", "said"), CASES, ids=[f"{c[1]}-{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_scripts(expected: str, name: str, was: str, now: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (SCRIPTS / f"{name}.py").read_text("utf-8")
    assert not was or text.count(was) == 1
    (tmp_path / "train.py").write_text(text.replace(was, now) if was else text, "utf-8")
    monkeypatch.chdir(tmp_path)
    report = judged(Path("train.py"), *ARGUMENTS[name])
    assert report.verdict == expected, report.reason
    if report.place is not None:
        assert said in report.place.cause
    assert any(a.startswith("the code runs as on GPUs") for a in report.assumptions)
    assert name != "gpt" or "casts are exact: autocast to float16 changes no value" in report.assumptions
    assert name == "fsdp" or any(a.startswith("torch.cuda.is_available is True, as train.py:") for a in report.assumptions)


def test_ranks_that_load_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: no verdict where the sampler of the ranks is forgotten; the loader is named."""
    text = (SCRIPTS / "accumulate.py").read_text("utf-8")
    wrong = text.replace("if world > 1 else None\n    loader", "if world > 8 else None\n    loader")
    assert wrong != text
    (tmp_path / "train.py").write_text(wrong, "utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Reads, match=r"ranks 0 and 1 hold .* the same rows in every step: the loader at train.py:\d+.*DistributedSampler"):
        judged(Path("train.py"), *ARGUMENTS["accumulate"])


def test_no_gpu_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: an error that names the line, where the code runs as on a processor."""
    monkeypatch.chdir(tmp_path)
    for line, said in (
        ('torch.autocast("cuda")', "autocast"),
        ("torch.cuda.amp.GradScaler()", "GradScaler"),
        ("x = torch.zeros(2).cuda()", "--device cuda"),
    ):
        (tmp_path / "train.py").write_text(f"import torch\n{line}\n")
        with pytest.raises(CaptureError, match=rf"train.py:2.*{said}"):
            judged(Path("train.py"), "", "", "cpu")
