"""Tensors that were there before the capture: what reads their memory without PyTorch's dispatcher sees what steps have written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from capture.stepping import nothing, report  # noqa: E402

ONE, TWO = torch.zeros(1), torch.zeros(2)  # counts of steps
NEVER = torch.tensor([1.0, 2.0])
Ending = Callable[[Any], None]


def by(read: Callable[[], Any], *counts: Any) -> Ending:
    """In the third step the gradient is halved; what is read has to say that it is the third."""

    def ending(model: Any) -> None:
        for count in counts:
            count.add_(1)
        model.bias.grad.mul_(0.5 if read() == 3 else 1.0)

    return ending


def listed(model: Any) -> None:
    model.bias.grad.mul_(NEVER.tolist()[1])


def copied(model: Any) -> None:
    model.bias.grad.mul_(copy.deepcopy(NEVER).sum() - 1)


def double(model: Any) -> None:
    model.bias.grad.mul_(2)


@pytest.mark.parametrize(
    ("ranks", "reference", "verdict"),
    [
        pytest.param(by(lambda: ONE.tolist()[0], ONE), nothing, "REFUTED", id="list_of_one"),
        pytest.param(by(lambda: TWO.tolist()[0], TWO), nothing, "UNKNOWN", id="list_of_two"),
        pytest.param(by(lambda: float(ONE.numpy()[0]), ONE), nothing, "UNKNOWN", id="array_of_one"),
        pytest.param(by(lambda: copy.deepcopy(TWO).tolist()[0], TWO), nothing, "UNKNOWN", id="copy_of_two"),
        pytest.param(listed, double, "PROVED", id="list_of_what_stays"),
        pytest.param(copied, double, "PROVED", id="copy_of_what_stays"),
        pytest.param(copied, nothing, "REFUTED", id="another_factor"),
    ],
)
def test_memory_of_earlier_tensors(ranks: Ending, reference: Ending, verdict: str) -> None:
    found = report(ranks, reference)
    assert found.verdict == verdict, found.reason
