"""Files of the package import each other downwards only."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def imports() -> dict[str, set[str]]:
    """Of every module the modules of the package that it imports, anywhere in it."""
    modules = {".".join(p.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): p for p in SOURCE.rglob("*.py")}
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        used: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                inner = {f"{node.module}.{a.name}" for a in node.names}
                used |= inner & modules.keys() if inner & modules.keys() else {node.module}
            elif isinstance(node, ast.Import):
                used |= {a.name for a in node.names}
        found[name] = (used & modules.keys()) - {name}
    return found


def test_nothing_uses_the_tools() -> None:
    """Tools and tests import the package, never the other way round."""
    for path in SOURCE.rglob("*.py"):
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names.add(node.module or "")
            elif isinstance(node, ast.Import):
                names |= {a.name for a in node.names}
        assert not {n.split(".")[0] for n in names} & {"tools", "tests"}, path


def test_there_is_no_circle() -> None:
    """Also none that an import within a function, or for types only, would hide."""
    found = imports()
    assert len(found) > 200
    order = list(TopologicalSorter(found).static_order())  # raises CycleError with the files of a circle
    assert order.index("trainverify.primitives.node") < order.index("trainverify.verdicts")


def reached(found: dict[str, set[str]], start: str) -> set[str]:
    """Everything that a module imports, and what that imports."""
    seen, stack = {start}, [start]
    while stack:
        fresh = found[stack.pop()] - seen
        seen |= fresh
        stack += fresh
    return seen


def test_what_is_trusted_sees_no_values_of_points() -> None:
    """Stages, lists and the algebra take claims, as records, from whoever proposes them; they import no values at random points."""
    found = imports()
    proposing = {m for m in found if m.startswith("trainverify.prove.propose.")}
    assert len(proposing) > 5
    for module in found:
        if module.startswith(("trainverify.prove.staged.", "trainverify.prove.algebra.", "trainverify.prove.listed.")):
            seen = reached(found, module)
            assert not seen & proposing, module
            assert not seen & {"trainverify.evaluate.run", "trainverify.evaluate.compare"}, module
    assert proposing <= reached(found, "trainverify.prove.attempt")  # which joins both
