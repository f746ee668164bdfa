"""Generated pages are current; the pages on design and command line name what is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.imported import trees
from trainverify.cli import run
from trainverify.report import EXIT, codes_page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "trainverify"
DESIGN = (DOCS / "design.md").read_text("utf-8")
PACKAGES = re.findall(r"^\| `(\w+)` \|", DESIGN, re.MULTILINE)


def test_findings_page_is_current() -> None:
    assert (DOCS / "findings.md").read_text("utf-8") == codes_page()


def test_every_package_is_described() -> None:
    there = {p.stem for p in SOURCE.iterdir() if p.name not in ("__init__.py", "__pycache__") and (p.is_dir() or p.suffix == ".py")}
    assert there == set(PACKAGES)


def test_packages_use_only_what_is_below_them() -> None:
    level = {name: i for i, name in enumerate(PACKAGES)}
    for path in SOURCE.rglob("*.py"):
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for name in modules_used(path):
            used = name.split(".")[1]
            assert level[used] <= level[own] or name.startswith("trainverify.graph.types"), f"{path.name} imports {name}"


def modules_used(path: Path) -> Iterator[str]:
    """The modules of the package that a file imports, in whichever way: `trainverify.PACKAGE…`."""
    for node in ast.walk(trees()[path]):
        if isinstance(node, ast.ImportFrom) and node.module == "trainverify":
            yield from (f"trainverify.{a.name}" for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from [node.module] if node.module.startswith("trainverify.") else []
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("trainverify."))


def test_exit_codes_are_documented() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", (DOCS / "cli.md").read_text("utf-8"), re.MULTILINE))
    for verdict, code in EXIT.items():
        assert verdict.split("(")[0] in rows[str(code)] or verdict == "PROVED(reduced)"


@pytest.mark.parametrize("command", ["verify", "nnscaler", "torch", "validate", "show", "ops", "zoo", "diff"])
def test_options_are_documented(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    page = (DOCS / "cli.md").read_text("utf-8")
    for option in set(re.findall(r"--[a-z]+", capsys.readouterr().out)) - {"--help"}:
        assert f"`{option}" in page, option
