"""The GitHub Action: what its steps run, on a repository with a change that has a planted bug."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent

import pytest

from sweep.train import TRAIN

pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

ROOT = Path(__file__).parents[2]
ACTION = (ROOT / "action.yml").read_text("utf-8")
RIGHT = "    return trained(DistributedDataParallel(model), model, scale)\n"
WRONG = "    wrapped = DistributedDataParallel(model)\n    return trained(wrapped, model, scale * world)\n"


def steps(inputs: Mapping[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """The shell scripts of the action, and their environments. What it uses of others is not run."""
    given = dict(re.findall(r"^  (\w+):\n(?:    .*\n)*?    default: \"?(.*?)\"?$", ACTION, re.MULTILINE)) | inputs
    for block in re.split(r"^    - name: ", ACTION, flags=re.MULTILINE)[1:]:
        script = re.search(r"^      run: \|\n((?:        .*\n)+)", block, re.MULTILINE)
        names = re.findall(r"^        ([A-Z]+): \$\{\{ inputs\.(\w+) \}\}$", block, re.MULTILINE)
        if script is not None:
            yield dedent(script[1]), {name: given[key] for name, key in names}


def executed(folder: Path, inputs: Mapping[str, str]) -> int:
    """As a runner does it: one step after the other, until one fails."""
    tools = folder.parent / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "trainverify").write_text(f'#!/bin/sh\nexec {sys.executable} -m trainverify "$@"\n')
    (tools / "trainverify").chmod(0o755)
    path = {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    scripts = list(steps(inputs))
    assert len(scripts) == 2
    for script, environment in scripts:
        done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", script], cwd=folder, env=os.environ | path | environment, timeout=300)
        if done.returncode:
            return done.returncode
    return 0


def committed(folder: Path, text: str) -> None:
    (folder / "train.py").write_text(text, "utf-8")
    for call in (["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a change"]):
        subprocess.run(["git", *call], cwd=folder, check=True)


def test_a_change_with_a_bug_is_annotated_at_its_line(tmp_path: Path) -> None:
    """Expected: exit code 0 before the change; 1 after it, with one SARIF result at the line that scales the loss."""
    folder = tmp_path / "repository"
    folder.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    inputs = {"arguments": "torch train.py:reference 'train.py:distributed' --world-size 2", "package": "", "sarif": "found.sarif"}
    committed(folder, TRAIN)
    assert executed(folder, inputs) == 0
    assert json.loads((folder / "found.sarif").read_text())["runs"][0]["results"] == []
    assert TRAIN.count(RIGHT) == 1
    changed = TRAIN.replace(RIGHT, WRONG)
    committed(folder, changed)
    assert executed(folder, inputs) == 1
    (result,) = json.loads((folder / "found.sarif").read_text())["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "train.py"
    assert changed.splitlines()[place["region"]["startLine"] - 1] == "        (loss * scale).backward()"
    assert "<failure" in (folder / "trainverify.xml").read_text()


def test_a_step_that_cannot_be_run_fails_the_job(tmp_path: Path) -> None:
    """Expected: exit code 2."""
    assert executed(tmp_path, {"arguments": "torch missing.py:a missing.py:b --world-size 2", "package": ""}) == 2
