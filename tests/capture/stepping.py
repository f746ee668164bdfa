"""A small step on two ranks, and what is done to its gradients on ranks or in the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trainverify.torch as tvt

BATCH = {"x": tvt.Reals((6, 4), "(dp b) k")}
Ending = Callable[[Any], None]  # of the model, after the gradients are averaged


def stepped(world: int, ending: Ending) -> Any:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = model(batch["x"]).square().mean()
        loss.backward()
        if world > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        ending(model)
        optimizer.step()
        return loss

    return step


def nothing(model: Any) -> None:
    pass


def report(ranks: Ending, reference: Ending = nothing) -> Any:
    """Of ranks that end their backward pass so."""
    one = lambda: stepped(1, reference)  # noqa: E731
    return tvt.verify(one, lambda r, w: stepped(w, ranks), 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)


def double(model: Any) -> None:
    model.bias.grad.mul_(2)
