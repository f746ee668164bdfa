"""Gradients that a step leaves as summands of DTensor, and that the next step adds to."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402

import trainverify.torch as tvt  # noqa: E402


def step_of(model: Any, cleared: bool, rows: Any = lambda x: x) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> Any:
        loss = (rows(batch["x"]) * model.weight).square().sum()
        loss.backward()
        optimizer.step()
        if cleared:
            optimizer.zero_grad()
        return {"loss": loss.full_tensor() if isinstance(loss, DTensor) else loss}

    return step


def model() -> Any:
    made = nn.Module()
    made.weight = nn.Parameter(torch.ones(5))
    return made


def ranks(cleared: bool) -> Any:
    def build(rank: int, world: int) -> Any:
        mesh, made = init_device_mesh("cpu", (world,)), model()
        made.weight = nn.Parameter(distribute_tensor(made.weight.data, mesh, [Replicate()]))
        return step_of(made, cleared, lambda x: DTensor.from_local(x, mesh, [Shard(0)]))

    return build


@pytest.mark.parametrize(("cleared", "verdict"), [(True, "PROVED"), (False, "UNKNOWN")])
def test_summands_that_are_left(cleared: bool, verdict: str) -> None:
    """PROVED if they are cleared. Else UNKNOWN, and not INVALID: the plan may be right, but a kept value has no summands here."""
    batch = {"x": tvt.Reals((6, 5), "(dp b) k")}
    report = tvt.verify(lambda: step_of(model(), cleared), ranks(cleared), 2, batch, {"dp": 2}, points=1)
    assert report.verdict == verdict, report.reason
    assert cleared or "is zero_grad called in every step?" in report.reason
