"""What is 0 up to rounding has its roots and powers, and what a plan certainly has no number for is REFUTED."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from torch import nn  # noqa: E402

import trainverify.torch as tvt  # noqa: E402

BATCH = {"x": tvt.Reals((4, 6), "(dp b) k")}


def differences(h: Any) -> Any:
    return h.diff(prepend=h[:, :1]).abs().pow(1.5)


def differences_by_masks(h: Any) -> Any:
    """The first one is `h - h` after two roundings."""
    first = torch.arange(6) == 0
    return (h - h.roll(1, 1) * ~first - h[:, :1] * first).abs() ** 1.5


def squares(h: Any) -> Any:
    return h.square()


def squares_by_logarithms(h: Any) -> Any:
    """Negative numbers have none."""
    return torch.exp(2 * torch.log(h))


CASES: list[tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = [
    ("PROVED", differences, differences_by_masks),
    ("PROVED", differences_by_masks, differences),
    ("REFUTED", squares, squares_by_logarithms),
]


def built(f: Callable[[Any], Any], world: int) -> Callable[[Any], Any]:
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = f(model(batch["x"])).square().mean()
        loss.backward()
        for p in model.parameters():
            if world > 1:
                torch.distributed.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize(("expected", "logical", "plan"), CASES)
def test_undefined(expected: str, logical: Callable[[Any], Any], plan: Callable[[Any], Any]) -> None:
    report = tvt.verify(lambda: built(logical, 1), lambda rank, world: built(plan, world), 2, BATCH, loss={"dp": "avg"})
    assert str(report.verdict) == expected, report.reason
