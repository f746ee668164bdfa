"""Code that runs from text (`exec`), or that a step imports: it sees what the rest of the user's code sees."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from capture.stepping import nothing, report  # noqa: E402

TYPED = "def factor(x):\n    return 0.5 if type(x) is torch.Tensor else 1.0\n"
SAME = "def factor(x):\n    return 0.5 if isinstance(x, torch.Tensor) else 1.0\n"
HANDLED = """
def factor(x):
    try:
        torch.linalg.cholesky(x)
    except RuntimeError:
        return 0.5
    return 1.0
"""
HASHED = "def factor(x):\n    return 0.5 if hash('text') % 2 else 1.0\n"
EVALUATED = "lambda x: 0.5 if type(x) is torch.Tensor else 1.0"


def by_text(text: str, evaluated: bool = False) -> Callable[[Any], None]:
    """The gradient times what a function gives that is made from text."""

    def ending(model: Any) -> None:
        space: dict[str, Any] = {"torch": torch}
        if evaluated:
            space["factor"] = eval(text, space)
        else:
            exec(text, space)
        model.bias.grad.mul_(space["factor"](model.weight.grad[:3, :3]))

    return ending


def half(model: Any) -> None:
    model.bias.grad.mul_(0.5)


@pytest.mark.parametrize(
    ("ranks", "reference", "verdict"),
    [
        pytest.param(by_text(TYPED), nothing, "REFUTED", id="type_in_text"),
        pytest.param(by_text(TYPED), half, "PROVED", id="type_in_text_on_ranks_and_half_on_one_device"),
        pytest.param(by_text(EVALUATED, True), nothing, "REFUTED", id="type_in_an_expression"),
        pytest.param(by_text(SAME), half, "PROVED", id="isinstance_in_text"),
        pytest.param(by_text(HANDLED), nothing, "UNKNOWN", id="handler_in_text"),
        pytest.param(by_text(HASHED), by_text(HASHED), "UNKNOWN", id="hash_in_text"),
    ],
)
def test_text(ranks: Any, reference: Any, verdict: str) -> None:
    found = report(ranks, reference)
    assert found.verdict == verdict, found.reason


def by_late_module(folder: Path) -> Callable[[Any], None]:
    def ending(model: Any) -> None:
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        import late_module_of_a_step  # type: ignore[import-not-found]

        model.bias.grad.mul_(late_module_of_a_step.factor(model.bias.grad))

    return ending


@pytest.mark.parametrize(("reference", "verdict"), [(nothing, "REFUTED"), (half, "PROVED")])
def test_module_that_a_step_imports(tmp_path: Path, reference: Any, verdict: str) -> None:
    (tmp_path / "late_module_of_a_step.py").write_text(f"import torch\n\n{TYPED}")
    found = report(by_late_module(tmp_path), reference)
    assert found.verdict == verdict, found.reason
