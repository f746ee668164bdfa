"""Modules that a model holds in a plain list: it does not know their parameters, and nobody averages them by itself."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import trainverify.torch as tvt  # noqa: E402

BATCH = {"x": tvt.Reals((6, 4), "(dp b) k")}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.all = [self.first, nn.Linear(3, 2)]

    def forward(self, x: Any) -> Any:
        return self.all[1](self.first(x))


def stepped(world: int, averaged: bool) -> Any:
    model = Model()
    hidden = list(model.all[1].parameters())
    called = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.SGD([*model.parameters(), *hidden], lr=0.1)

    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = called(batch["x"]).square().mean()
        loss.backward()
        for p in hidden if world > 1 and averaged else ():
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize(("averaged", "verdict"), [(True, "PROVED"), (False, "REFUTED")])
def test_a_module_in_a_list(averaged: bool, verdict: str) -> None:
    report = tvt.verify(lambda: stepped(1, True), lambda r, w: stepped(w, averaged), 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)
    assert report.verdict == verdict, report.reason
