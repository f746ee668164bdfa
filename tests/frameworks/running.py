"""A command on a framework in a process of its own, and copies of a framework's files with a mistake in one."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from frameworks.planted import Edit


def verdict(command: Sequence[str], paths: Sequence[Path], cwd: Path) -> dict[str, Any]:
    """The report of `trainverify COMMAND …` with shims accepted, at one point; `paths` are searched for modules first."""
    found = [*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(found), "XDG_CACHE_HOME": str(cwd)}
    run = [sys.executable, "-m", "trainverify", *command, "--accept-shims", "--json", "--points", "1"]
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=cwd, env=environment, timeout=900)
    assert done.stdout, done.stderr[-2000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def edited(package: ModuleType, edit: Edit, folder: Path) -> Path:
    """A folder to import the package from, with a mistake in one of its files."""
    assert package.__file__ is not None
    copy = _copy(package, folder)
    shutil.copytree(Path(package.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before, found, after = (copy / edit.path).read_text("utf-8").rpartition(edit.old)
    assert found
    (copy / edit.path).write_text(before + edit.new + after, "utf-8")
    return folder


def refuted_there(report: dict[str, Any], edit: Edit, package: ModuleType, folder: Path) -> None:
    """REFUTED, at the lines of the edit or where it says."""
    assert report["verdict"] == "REFUTED", report["reason"]
    place, copy = report["first_wrong"], _copy(package, folder)
    op = place["op"] or {}
    named = [line for line in (op.get("source"), *op.get("callers", ()), place["used"]) if line]
    path, text = (edit.path, "") if edit.elsewhere is None else edit.elsewhere
    lines = (copy / path).read_text("utf-8").splitlines()
    if text:
        good = [i for i, line in enumerate(lines, 1) if text in line]
    else:
        first = (copy / path).read_text("utf-8").rpartition(edit.new)[0].count("\n") + 1
        good = list(range(_statement(lines, first), first + len(edit.new.splitlines()) + edit.near))
    shown = copy.relative_to(folder).as_posix()
    assert any(line.endswith(f"{shown}/{path}:{i}") for line in named for i in good), (named, good)


def _statement(lines: Sequence[str], line: int) -> int:
    """The line on which the statement begins that a line is a part of: Python names that one for a call over several lines."""
    blocks = (ast.FunctionDef, ast.ClassDef, ast.If, ast.For, ast.While, ast.With, ast.Try)
    found = [n.lineno for n in ast.walk(ast.parse("\n".join(lines))) if _around(n, line) and not isinstance(n, blocks)]
    return max(found, default=line)


def _around(node: ast.AST, line: int) -> bool:
    return isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)


def _copy(package: ModuleType, folder: Path) -> Path:
    return folder.joinpath(*package.__name__.split("."))
