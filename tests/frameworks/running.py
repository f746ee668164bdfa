"""A command on a framework in a process of its own, and copies of a framework's files with a mistake in one."""

from __future__ import annotations

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
    source, parts = Path(package.__file__).parent, package.__name__.split(".")
    shutil.copytree(source, folder.joinpath(*parts), ignore=shutil.ignore_patterns("__pycache__"))
    path = folder.joinpath(*parts) / edit.path
    before, found, after = path.read_text("utf-8").rpartition(edit.old)
    assert found
    path.write_text(before + edit.new + after, "utf-8")
    return folder


def refuted_there(report: dict[str, Any], edit: Edit) -> None:
    """REFUTED, at a line of the framework's; an edit without a file names none."""
    assert report["verdict"] == "REFUTED", report["reason"]
    assert edit.file in json.dumps(report["first_wrong"])
