"""An optimizer that updates a flat copy of parameters, cut among ranks and padded: the copy is compared too."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import trainverify.torch as tvt  # noqa: E402
from trainverify.torch.discover import Copy, Found  # noqa: E402

BLOCK = 8  # elements of a rank: 5 × 2 weights and 5 biases are cut within a row, and one element is padding


class Alone:
    def __init__(self) -> None:
        self.model = nn.Linear(2, 5)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125, momentum=0.5)

    def __call__(self, batch):
        loss = self.model(batch["x"]).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Copied:
    """Parameters are views of one buffer; a rank updates a copy of its block, and all blocks are gathered."""

    def __init__(self, rank: int, wrong: str) -> None:
        self.model, self.rank, self.wrong = nn.Linear(2, 5), rank, wrong
        self.params = torch.zeros(2 * BLOCK)
        first, start, copies = rank * BLOCK, 0, []
        self.flat = nn.Parameter(torch.zeros(BLOCK))
        for name, p in self.model.named_parameters():
            p.data = self.params[start : start + p.numel()].view(p.shape).copy_(p.data)
            low, high = max(start, first), min(start + p.numel(), first + BLOCK)
            if low < high:
                end = BLOCK if name == "bias" else high - first
                part = self.flat.detach()[low - first : end]
                copies.append(Copy(f"{name}.master", name, part, ((0, low - start, high - low),), self.flat, low - first))
            start += p.numel()
        self.flat.data.copy_(self.params[first:][:BLOCK])
        self.optimizer = torch.optim.SGD([self.flat], lr=0.125, momentum=0.5)
        self.found = Found({"model": self.model}, [self.optimizer], apart=True, copies=copies)

    def __call__(self, batch):
        loss = self.model(batch["x"]).square().mean()
        loss.backward()
        pieces = [p.grad.view(-1) for p in self.model.parameters()]
        bucket = torch.cat([*pieces, torch.full((1,), 1.0 if self.wrong == "padding" else 0.0)]).div_(2)
        dist.all_reduce(bucket)
        self.flat.grad = bucket[self.rank * BLOCK :][:BLOCK]
        self.optimizer.step()
        self.flat.grad = None
        block = self.params[self.rank * BLOCK :][:BLOCK]
        block.copy_(self.flat.detach())
        if self.wrong == "copy":
            self.flat.detach().mul_(0.5)
        dist.all_gather_into_tensor(self.params, block.clone())
        for p in self.model.parameters():
            p.grad = None
        return loss.detach()


@pytest.mark.parametrize(("wrong", "verdict"), [("", "PROVED"), ("copy", "REFUTED"), ("padding", "REFUTED")])
def test_copies(wrong: str, verdict: str) -> None:
    """REFUTED if the copy is wrong that the next step starts from, or if its padding does not stay zero."""
    batch = {"x": tvt.Reals((6, 2), "(dp b) k")}
    report = tvt.verify(Alone, lambda rank, world: Copied(rank, wrong), 2, batch, loss={"dp": "avg"}, points=1)
    assert report.verdict == verdict, report.reason
