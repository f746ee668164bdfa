"""FSDP2 that keeps whole weights after the backward pass: the next step runs on old ones."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import trainverify.torch as tvt  # noqa: E402

BATCH = {"x": tvt.Reals((6, 4), "(dp b) k")}


def stepped(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> Any:
        loss = model(batch["x"]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def verdict(reshards: bool) -> str:
    def ranks(rank: int, world: int) -> Any:
        model = nn.Linear(4, 6, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        model.set_reshard_after_backward(reshards)
        return stepped(model)

    def reference() -> Any:
        return stepped(nn.Linear(4, 6, bias=False))

    try:
        return str(tvt.verify(reference, ranks, 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1).verdict)
    except tvt.CaptureError as error:
        return f"refused: {error}"


def test_weights_that_are_gathered_anew() -> None:
    assert verdict(True) == "PROVED"


def test_weights_that_are_kept() -> None:
    """INVALID: a rank has whole weights after the step, and the second step reads those of the first."""
    assert verdict(False) == "INVALID"
