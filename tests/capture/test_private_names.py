"""Names of PyTorch's own that captures rest on: each is there. Of another version, this says which are gone."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from docs.imported import SOURCE, trees


def imported() -> Iterator[tuple[str, str]]:
    """What the front end imports from modules of PyTorch that begin with an underscore, or by such a name."""
    for path, tree in trees().items():
        if path.relative_to(SOURCE).parts[:2] != ("trainverify", "torch"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
                private = "._" in str(node.module)
                yield from ((str(node.module), a.name) for a in node.names if private or a.name.startswith("_"))
            elif isinstance(node, ast.Import):
                yield from ((a.name, "") for a in node.names if a.name.startswith("torch._"))


NAMES = sorted(set(imported()))


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{m}.{n}".strip(".") for m, n in NAMES])
def test_it_is_there(module: str, name: str) -> None:
    found = importlib.import_module(module)
    assert not name or hasattr(found, name) or importlib.import_module(f"{module}.{name}")


def test_all_are_found() -> None:
    assert {("torch._subclasses.fake_tensor", "FakeTensorMode"), ("torch.utils._python_dispatch", "_disable_current_modes")} <= set(NAMES)
