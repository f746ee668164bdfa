"""Models that are converted as a whole: `model.to(dtype)`."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import trainverify.torch as tvt  # noqa: E402


def stepped(ranks: int, scale: float = 1.0) -> Any:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    first = model[0].weight
    model.to(torch.bfloat16)
    assert model[0].weight is first  # as with plain tensors
    assert first.dtype == torch.bfloat16
    called = model if ranks == 1 else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(batch: Any) -> Any:
        loss = called(batch["x"].to(torch.bfloat16)).float().square().mean()
        (loss * scale).backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "PROVED"), (0.5, "REFUTED")])
def test_to_bfloat16(scale: float, verdict: str) -> None:
    batch = {"x": tvt.Reals((6, 4), "(dp b) k")}
    found = tvt.verify(lambda: stepped(1), lambda rank, world: stepped(world, scale), 2, batch, {"dp": 2}, loss={"dp": "avg"}, points=1)
    assert found.verdict == verdict, found.reason
