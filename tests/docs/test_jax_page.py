"""The page on JAX holds: its Python is saved and its commands print what it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: the page on JAX code is not executed")

PAGE = (Path(__file__).parents[2] / "docs" / "capturing-jax.md").read_text("utf-8")
(PYTHON,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(CONSOLE,) = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("options", [[], ["--replay"]])
def test_commands(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "train.py").write_text(PYTHON.replace("512", "16").replace("2048", "32") if options else PYTHON, "utf-8")
    lines = CONSOLE.splitlines()
    commands = [(line[2:], lines[i + 1]) for i, line in enumerate(lines) if line.startswith("$ ")]
    assert len(commands) == 2
    for command, first in commands:
        words = [sys.executable, "-m", *shlex.split(command), *options]
        if options:
            words[words.index("dp=8,tp=4")] = "dp=2,tp=4"
            first = first.replace("dp=8", "dp=2")
        found = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert found.stdout.splitlines()[0] == first, found.stderr
        assert found.returncode == (0 if first.startswith("PROVED") else 1)
        assert not options or "outputs of the translated programs agree with JAX" in found.stdout
