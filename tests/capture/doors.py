"""Ordinary scripts in a folder, and the bugs that are planted in them, as its `expected.json` says."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainverify.ops import OPS
from trainverify.report import Report
from trainverify.torch.command import script, verdict


@dataclass(frozen=True)
class Planted:
    """A script with a silent bug in it."""

    script: str
    name: str
    edits: Sequence[Sequence[str]]
    verdicts: Sequence[str]
    lines: Sequence[str]  # some text of each line that is to blame

    def guilty(self, text: str) -> set[int]:
        return {i for i, line in enumerate(text.splitlines(), 1) if any(part in line for part in self.lines)}


def scripts(folder: Path) -> dict[str, str]:
    """Scripts, and what is expected of each as it is."""
    return {name: said["verdict"] for name, said in _expected(folder).items()}


def planted(folder: Path) -> list[Planted]:
    return [Planted(name, **bug) for name, said in _expected(folder).items() for bug in said["bugs"]]


def _expected(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "expected.json").read_text("utf-8"))
    return found


def edited(text: str, edits: Sequence[Sequence[str]]) -> str:
    for was, now in edits:
        assert text.count(was) == 1, was
        text = text.replace(was, now)
    return text


def judged(path: Path, arguments: Sequence[str] = ()) -> Report:
    """As `trainverify torch run --world-size 2 -- script.py` does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork
        subject = script(str(path), arguments, None, 2, OPS, lambda text: None)
    return verdict(subject, OPS, 3, 0, "algebra", False, None, lambda text: None)


def lines_of(report: Report, file: str) -> set[int]:
    """The lines of a file that a report blames: the place of what is wrong, with the calls that led there."""
    assert report.place is not None
    found, line = set(), report.place.line
    while line is not None:
        if line.file == file:
            found.add(line.line)
        line = line.caller
    return found
