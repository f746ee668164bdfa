"""Which modules of the package import which."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Set
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


@cache
def trees() -> Mapping[Path, ast.Module]:
    """All files of the package, parsed."""
    return {p: ast.parse(p.read_text("utf-8")) for p in SOURCE.rglob("*.py")}


@cache
def imports() -> Mapping[str, Set[str]]:
    """Of every module the modules of the package that it imports, anywhere in it."""
    modules = {".".join(p.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): p for p in trees()}
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        used: set[str] = set()
        for node in ast.walk(trees()[path]):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                inner = {f"{node.module}.{a.name}" for a in node.names}
                used |= inner & modules.keys() if inner & modules.keys() else {node.module}
            elif isinstance(node, ast.Import):
                used |= {a.name for a in node.names}
        found[name] = (used & modules.keys()) - {name}
    return found


def reached(found: Mapping[str, Set[str]], start: str) -> set[str]:
    """Everything that a module imports, and what that imports."""
    seen, stack = {start}, [start]
    while stack:
        fresh = found[stack.pop()] - seen
        seen |= fresh
        stack += fresh
    return seen
