"""The page on approximations holds: its Python runs, its tables are complete, its commands print what it shows."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from trainverify.approximate import APPROXIMATIONS
from trainverify.cli import run
from trainverify.zoo.parallel.deviations import Deviations

PAGE = (Path(__file__).parents[2] / "docs" / "approximations.md").read_text("utf-8")
CONSOLE = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)[0]


def test_blocks_run() -> None:
    space: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "approximations.md", "exec"), space)


def test_every_approximation_and_option_is_on_the_page() -> None:
    rows = dict(re.findall(r"^\| `(\w[\w-]+)` \| (.*?) \|", PAGE, re.MULTILINE))
    assert {n: set(re.findall(r"`(\w+)`", text)) for n, text in rows.items()} == {n: set(a.options) for n, a in APPROXIMATIONS.items()}


def test_every_deviation_of_the_zoo_is_on_the_page() -> None:
    for f in fields(Deviations):
        assert f"| `--{f.name.replace('_', '-')}" in PAGE


@pytest.mark.long
def test_commands_print_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Shown lines come in this order; `…` stands for anything."""
    for part in CONSOLE.split("$ trainverify ")[1:]:
        command, *shown = part.splitlines()
        run(shlex.split(command))
        found = capsys.readouterr()
        pattern = "".join(re.escape(line).replace("…", ".*") + r"\n(?:.*\n)*?" for line in shown if line != "…")
        assert re.match(pattern, found.out + found.err), found.out + found.err
