"""Parameters that are updated by hand: gradients may be set to zero afterwards, or be gone."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import trainverify.torch as tvt  # noqa: E402

BATCH = {"x": tvt.Reals((6, 3), "(dp b) k")}


def built(world: int, ending: str, factor: float = 1.0) -> Any:
    model = nn.Linear(3, 2)

    def step(batch: Any) -> Any:
        if ending == "at_the_beginning":
            model.zero_grad()
        loss = model(batch["x"]).square().mean()
        (loss * factor).backward()
        with torch.no_grad():
            for p in model.parameters():
                if world > 1:
                    dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
                p -= 0.1 * p.grad
                if ending == "zero":
                    p.grad.zero_()
                elif ending == "none":
                    p.grad = None
        return loss

    return step


@pytest.mark.parametrize(
    ("ranks", "reference", "factor", "verdict"),
    [
        ("none", "zero", 1.0, "PROVED"),
        ("zero", "none", 1.0, "PROVED"),
        ("at_the_beginning", "zero", 1.0, "PROVED"),
        ("none", "zero", 2.0, "REFUTED"),
        ("never", "zero", 1.0, "UNKNOWN"),
    ],
)
def test_gradients_after_the_update(ranks: str, reference: str, factor: float, verdict: str) -> None:
    one, many = lambda: built(1, reference), lambda r, w: built(w, ranks, factor)
    report = tvt.verify(one, many, 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)
    assert report.verdict == verdict, report.reason
