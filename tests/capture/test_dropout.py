"""Dropout: masks are inputs that lie as their activations do, and the report says so; where that is not known there is no verdict."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import trainverify.torch as tvt  # noqa: E402


class Model(nn.Module):
    def __init__(self, rate: float = 0.2, again: bool = False, attend: bool = False):
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)
        self.dropout = nn.Dropout(rate)
        self.again, self.attend = again, attend

    def inner(self, x):
        return self.down(self.dropout(torch.relu(self.up(x))))

    def forward(self, x):
        y = checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)
        if self.attend:
            y = F.scaled_dot_product_attention(*(3 * [y[None, None]]), dropout_p=0.2)[0, 0]
        return F.dropout(y, 0.3)


def stepped(model: nn.Module, world: int):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        loss = model(batch["x"]).square().mean()
        loss.backward()
        for p in model.parameters():
            if world > 1:
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        return loss

    return step


def verdict(mesh=None, cuts=None, reference=None, **options):
    mesh = mesh or {"dp": 2}
    world = 2 * mesh.get("tp", 1)
    batch = {"x": tvt.Reals((8, 3), "(dp b) k")}

    def ranks(rank: int, world: int):
        return stepped(Model(**options), world)

    def alone():
        return stepped(Model(**(options if reference is None else reference)), 1)

    return tvt.verify(alone, ranks, world, batch, mesh, cuts=cuts, loss={"dp": "avg"}, points=1)


def test_masks_are_inputs() -> None:
    """PROVED, and the report says what is assumed of masks."""
    report = verdict()
    assert report.verdict == "PROVED", report.reason
    (said,) = [a for a in report.assumptions if a.startswith("dropout: ")]
    assert "dropout/kept.0.8.0" in said
    assert "kept.0.7.0" in said
    assert "dp: Shard(0)" in said


def test_another_rate() -> None:
    """UNKNOWN: ranks draw masks that the reference does not draw."""
    report = verdict(rate=0.25, reference={"rate": 0.2})
    assert report.verdict == "UNKNOWN"
    assert "which the reference does not draw" in report.reason


def test_no_dropout_on_ranks() -> None:
    """INVALID: masks of the reference live on no rank."""
    report = verdict(rate=0.0, reference={"rate": 0.2})
    assert report.verdict == "INVALID"
    assert "kept.0.8.0" in str(report.findings[0])


def test_two_axes_of_one_size() -> None:
    """UNKNOWN: dp or tp may cut the activation; PROVED if the user says which."""
    report = verdict({"dp": 2, "tp": 2})
    assert report.verdict == "UNKNOWN"
    assert "say how it is cut" in report.reason
    report = verdict({"dp": 2, "tp": 2}, cuts={"*kept*": "(dp b) k"})
    assert report.verdict == "PROVED", report.reason


def test_said_wrongly() -> None:
    """REFUTED: if tp cut the masks, ranks that hold the same rows would drop different elements of them."""
    assert verdict({"dp": 2, "tp": 2}, cuts={"*kept*": "(tp b) k"}).verdict == "REFUTED"


def test_recomputed_dropout_is_refused() -> None:
    """UNKNOWN: the mask of the recomputation is not known to be that of the forward pass."""
    report = verdict(again=True)
    assert report.verdict == "UNKNOWN"
    assert "random number" in report.reason


def test_dropout_within_attention_is_refused() -> None:
    """UNKNOWN: PyTorch draws that mask inside of the kernel, or for the scores of all positions."""
    assert verdict(attend=True).verdict == "UNKNOWN"
