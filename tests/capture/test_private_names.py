"""Names of PyTorch's own that captures rest on: each is there. Of another version, this says which are gone."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from functools import reduce
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch

from docs.imported import SOURCE, trees
from trainverify.torch import private

PRIVATE = SOURCE / "trainverify" / "torch" / "private.py"


def imported() -> Iterator[tuple[str, str, str]]:
    """What files import from modules of PyTorch that begin with an underscore, or by such a name, or use of such modules."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
                inner = "._" in str(node.module)
                yield from ((path.name, str(node.module), a.name) for a in node.names if inner or a.name.startswith("_"))
            elif isinstance(node, ast.Import):
                yield from ((path.name, a.name, "") for a in node.names if a.name.startswith("torch._"))


def used() -> Iterator[str]:
    """`torch._C._current_autograd_node` and its like."""
    for path, tree in trees().items():
        if path.relative_to(SOURCE).parts[:2] == ("trainverify", "torch"):
            texts = {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
            yield from (t for t in texts if t.startswith("torch.") and "._" in t and t.replace(".", "").isidentifier())


NAMES = sorted({(module, name) for file, module, name in imported() if file == PRIVATE.name})
USED = sorted({t for t in used() if ".ops." not in t})


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{m}.{n}".strip(".") for m, n in NAMES])
def test_it_is_there(module: str, name: str) -> None:
    found = importlib.import_module(module)
    assert not name or hasattr(found, name) or importlib.import_module(f"{module}.{name}")


@pytest.mark.parametrize("name", USED)
def test_it_is_used(name: str) -> None:
    parts = name.split(".")
    assert reduce(lambda of, part: getattr(of, part), parts[1:], torch) is not None


@pytest.mark.parametrize("name", sorted(private.__all__))
def test_it_is_given(name: str) -> None:
    """Those that are not loaded with PyTorch itself are loaded now."""
    found: Any = getattr(private, name)
    if inspect.isfunction(found) and found.__module__ == private.__name__:
        assert found() is not None


def test_nothing_else_imports_them() -> None:
    assert {(file, module, name) for file, module, name in imported() if file != PRIVATE.name} == set()


def test_all_are_found() -> None:
    assert {("torch._subclasses.fake_tensor", "FakeTensorMode"), ("torch.utils._python_dispatch", "_disable_current_modes")} <= set(NAMES)
    assert "torch._C._current_autograd_node" in USED
