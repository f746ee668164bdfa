"""Megatron-core as it is installed: PROVED under every parallelism that is captured, REFUTED with an edit in a copy of its files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="Megatron-core is absent: make frameworks has an environment with it")

from frameworks.planted import Edit
from frameworks.planted_megatron import DATA, EDITS, PIPELINE, SEQUENCE, SHARDED, TENSOR

SMALL = ("--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "2", "--vocab-size", "12", "--seq-length", "4")


def verdict(*options: str, more: Path | None = None, cwd: Path) -> dict[str, Any]:
    paths = [*([str(more)] if more else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": str(cwd)}
    command = [sys.executable, "-m", "trainverify", "megatron", *SMALL, *options, "--json", "--points", "1", "--accept-shims"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment, timeout=900)
    assert found.stdout, found.stderr[-2000:]
    report: dict[str, Any] = json.loads(found.stdout)
    return report


@pytest.mark.parametrize("options", [TENSOR, SEQUENCE, DATA, SHARDED, PIPELINE], ids=" ".join)
def test_proved(options: tuple[str, ...], tmp_path: Path) -> None:
    report = verdict(*options, cwd=tmp_path)
    assert report["verdict"] == "PROVED", report["reason"]
    assert "shims" in report["reason"]


@pytest.mark.parametrize("edit", EDITS, ids=lambda e: e.name)
def test_refuted(edit: Edit, tmp_path: Path) -> None:
    """REFUTED, at a line of the framework's."""
    import megatron.core

    folder = tmp_path / "site-packages"
    shutil.copytree(Path(megatron.core.__file__).parent, folder / "megatron" / "core", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "megatron" / "core" / edit.path
    before, found, after = path.read_text("utf-8").rpartition(edit.old)
    assert found
    path.write_text(before + edit.new + after, "utf-8")
    report = verdict(*edit.options, more=folder, cwd=tmp_path)
    assert report["verdict"] == "REFUTED", report["reason"]
    assert edit.file in json.dumps(report["first_wrong"])
