"""Files of the package import each other downwards only."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter

from docs.imported import imports, reached, trees


def test_nothing_uses_the_tools() -> None:
    """Tools and tests import the package, never the other way round."""
    for path, tree in trees().items():
        names: set[str] = set()
        for node in ast.walk(tree):
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
    joints = {"trainverify.prove.propose.joints"}
    assert not reached(found, "trainverify.prove.joints") & proposing
    assert proposing - joints <= reached(found, "trainverify.prove.attempt")  # which joins both
    assert joints <= reached(found, "trainverify.verdicts.at_joints")
