"""Tensors that are there before a step is captured, made outside of the captured function, and copies of fake ones: memory is one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import trainverify.torch as tvt  # noqa: E402

BATCH = {"x": tvt.Reals((6, 4), "(dp b) k")}
SCALE, LEVEL = torch.ones(3), torch.ones(())
Write = Callable[[Any], None]


def stepped(world: int, write: Write, made: Callable[[], Any]) -> Any:
    model, scale = nn.Linear(4, 3), made()

    def step(batch: Any) -> Any:
        model.zero_grad()
        loss = model(batch["x"]).square().mean()
        loss.backward()
        if world > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        write(scale)
        with torch.no_grad():
            for p in model.parameters():
                p.grad.mul_(scale.sum())
                p -= 0.1 * p.grad
        return loss

    return step


def verdict(ranks: Write, reference: Write, made: Callable[[], Any]) -> str:
    one = lambda: stepped(1, reference, made)  # noqa: E731
    return str(tvt.verify(one, lambda r, w: stepped(w, ranks, made), 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1).verdict)


def nothing(t: Any) -> None:
    pass


def through_a_view(t: Any) -> None:
    t.detach().view(-1).mul_(2)


def directly(t: Any) -> None:
    t.mul_(2)


def after_a_view(t: Any) -> None:
    view = t.view(-1)
    t.mul_(2)
    view.add_(1)


MADE: dict[str, Callable[[], Any]] = {
    "a global tensor": lambda: SCALE,
    "a global number": lambda: LEVEL,
    "a copy of a fake one": lambda: copy.deepcopy(torch.ones(3)),
    "a tensor of its own": lambda: torch.ones(3),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
@pytest.mark.parametrize("write", [through_a_view, directly, after_a_view])
def test_written(write: Write, made: Callable[[], Any]) -> None:
    """REFUTED where only ranks write it; PROVED where both do."""
    assert verdict(write, nothing, made) == "REFUTED"
    assert verdict(write, write, made) == "PROVED"


@pytest.mark.parametrize("early", [False, True])
def test_an_average_by_deepcopy(early: bool) -> None:
    """REFUTED where ranks average before the update: an average that PyTorch keeps in a copy of the model."""

    def build(world: int, early: bool) -> Any:
        from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

        model = nn.Sequential(nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))

        def step(batch: Any) -> Any:
            optimizer.zero_grad()
            loss = model(batch["x"]).square().mean()
            loss.backward()
            if world > 1:
                for p in model.parameters():
                    dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
            if early:
                average.update_parameters(model)
            optimizer.step()
            if not early:
                average.update_parameters(model)
            return loss

        return step

    found = tvt.verify(lambda: build(1, False), lambda r, w: build(w, early), 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)
    assert found.verdict == ("REFUTED" if early else "PROVED"), found.reason
