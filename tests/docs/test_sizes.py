"""Files, classes and functions of the package are small enough to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from docs.imported import trees

LINES, ATTRIBUTES, BODY = 700, 20, 60  # of a file, of a class, of a function


def attributes(node: ast.ClassDef) -> set[str]:
    """Fields of a record, and what methods set on `self`."""
    fields = {x.target.id for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)}
    stored = [x for x in ast.walk(node) if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store)]
    return fields | {x.attr for x in stored if isinstance(x.value, ast.Name) and x.value.id == "self"}


def too_large(text: str, tree: ast.Module) -> Iterator[str]:
    if (count := len(text.splitlines())) > LINES:
        yield f"{count} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= BODY:
            yield f"{node.name}: {(node.end_lineno or 0) - node.lineno + 1} lines"
        if isinstance(node, ast.ClassDef) and len(attributes(node)) > ATTRIBUTES:
            yield f"{node.name}: {len(attributes(node))} attributes"


def test_nothing_is_too_large() -> None:
    files = trees()
    assert len(files) > 300
    assert {str(p): found for p, tree in files.items() if (found := list(too_large(p.read_text("utf-8"), tree)))} == {}


def found(text: str) -> list[str]:
    return list(too_large(text, ast.parse(text)))


def test_what_is_too_large_is_seen() -> None:
    assert found("x = 1\n" * (LINES + 1)) == [f"{LINES + 1} lines"]
    assert found("def f():\n" + "    x = 1\n" * BODY) == [f"f: {BODY + 1} lines"]
    assert found("def f():\n" + "    x = 1\n" * (BODY - 1)) == []
    sets = "".join(f"        self.x{n} = {n}\n" for n in range(ATTRIBUTES))
    assert found("class A:\n    y: int\n    def f(self):\n" + sets) == [f"A: {ATTRIBUTES + 1} attributes"]
    assert found("class A:\n    def f(self):\n" + sets) == []
