"""The page on capturing holds: its Python is saved and its commands print what it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is absent: the page on captured code is not executed")

PAGE = (Path(__file__).parents[2] / "docs" / "torch.md").read_text("utf-8")
FILES = dict(zip(("train.py", "script.py"), re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), strict=True))
CONSOLE = "".join(re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL))


def test_commands(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, "utf-8")
    lines = CONSOLE.splitlines()
    commands = [(line[2:], lines[i + 1]) for i, line in enumerate(lines) if line.startswith("$ ")]
    assert len(commands) == 3
    for command, first in commands:
        words = [sys.executable, "-m", *shlex.split(command)]
        found = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert found.stdout.splitlines()[0] == first, found.stderr
        assert found.returncode == (0 if first.startswith("PROVED") else 1)
