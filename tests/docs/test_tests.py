"""Tests lie where the code lies that they test, and share helpers, not test modules."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
SOURCE = ROOT / "src" / "trainverify"

# Not a package: PyTorch captured (a folder named torch would hide it), pages and the layout, examples, tools.
OTHERS = {"capture", "docs", "examples", "tools"}


def test_folders_are_those_of_the_package() -> None:
    for folder in {p.parent.relative_to(TESTS) for p in TESTS.rglob("test_*.py")}:
        assert folder.parts[0] in OTHERS or (SOURCE / folder).is_dir(), folder


def test_no_test_module_is_imported() -> None:
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = [*(node.module or "").split("."), *(a.name for a in node.names)]
                assert not any(n.startswith("test_") for n in names), path
