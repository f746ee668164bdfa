"""The README holds: its Python runs, its commands print what it shows, its links and targets exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
FILES = dict(zip(("ddp.py", "tour.py"), PYTHON, strict=False))
CONSOLE = re.findall(r"```console\n(.*?)```", README, re.DOTALL)


def commands() -> list[tuple[str, list[str]]]:
    """Every command of the console blocks with the lines shown after it."""
    found: list[tuple[str, list[str]]] = []
    for line in (line for block in CONSOLE for line in block.splitlines()):
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def in_order(shown: list[str], printed: list[str]) -> None:
    """Shown lines follow each other as printed; `…` stands for lines left out."""
    at, gap = 0, False
    for line in shown:
        if line == "…":
            gap = True
            continue
        assert line in printed[at:], f"not printed: {line}"
        found = printed.index(line, at)
        assert gap or found == at, f"left out before {line!r}: {printed[at:found]}"
        at, gap = found + 1, False
    assert gap or at == len(printed), f"left out at the end: {printed[at:]}"


def test_the_plan_takes_fewer_than_forty_lines() -> None:
    assert len(FILES["tour.py"].splitlines()) < 40


def test_python_and_console_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("torch", reason="PyTorch is absent: the README is not executed")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, "utf-8")
    space: dict[str, Any] = {}
    for block in PYTHON[1:]:
        exec(compile(block, "tour.py", "exec"), space)
    for path in tmp_path.glob("*.json"):
        path.unlink()
    code = None
    for command, shown in commands():
        words = shlex.split(command)
        if words[0] == "make":
            continue
        if command == "echo $?":
            assert shown == [str(code)]
            continue
        program = [sys.executable, "-m", "trainverify"] if words[0] == "trainverify" else [sys.executable]
        run = subprocess.run([*program, *words[1:]], capture_output=True, encoding="utf-8", env={"PYTHONIOENCODING": "utf-8"})
        code = run.returncode
        assert not run.stderr
        in_order(shown, run.stdout.splitlines())
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_make_targets() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    wanted = [c.removeprefix("make ") for c, _ in commands() if c.startswith("make ")]
    assert wanted == ["demo", "test"]
    assert all(re.search(rf"^{w}:", makefile, re.MULTILINE) for w in wanted)


@pytest.mark.parametrize("page", sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]), ids=lambda p: p.name)
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text("utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target
