"""A sharded optimizer on flat buffers in plain PyTorch: gradients are reduced to equal blocks and parameters gathered from them, and a
block ends inside a row of a parameter."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import trainverify.torch as tvt  # noqa: E402
from trainverify.torch.discover import Found  # noqa: E402

RATE = 0.125
BLOCK = 16  # elements: 3 × 2 weights, 3 biases, 7 of 4 × 3 weights; then 5 of them, 4 biases and padding


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Linear(3, 4)

    def forward(self, x):
        return self.second(self.first(x).square())


class Alone:
    def __init__(self) -> None:
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.5)

    def __call__(self, batch):
        self.optimizer.zero_grad()
        loss = self.model(batch["x"]).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss


class Sharded:
    """Parameters and gradients are views of one buffer each; a rank updates its block of both."""

    def __init__(self, rank: int, wrong: str) -> None:
        self.model, self.rank, self.wrong = Model(), rank, wrong
        self.params, self.grads = torch.zeros(2 * BLOCK), torch.zeros(2 * BLOCK)
        self.views, shards, held, start = [], [], {}, 0
        for name, p in self.model.named_parameters():
            stop = start + p.numel()
            with torch.no_grad():
                self.params[start:stop].copy_(p.view(-1))
            p.data = self.params[start:stop].view(p.shape)
            self.views.append((p, self.grads[start:stop].view(p.shape)))
            low, high = max(start, rank * BLOCK), min(stop, rank * BLOCK + BLOCK)
            if low < high:
                shard = nn.Parameter(self.params[low:high].detach())
                shards.append((shard, name, slice(low, high)))
                held[name] = {"flat": [[0, low - start, high - low]]}
            start = stop
        self.shards = shards
        self.optimizer = torch.optim.SGD([s for s, _, _ in shards], lr=RATE, momentum=0.5)
        self.found = Found({"model": self.model}, [self.optimizer], {}, held, [(s, n) for s, n, _ in shards])

    def __call__(self, batch):
        self.grads.zero_()
        loss = self.model(batch["x"]).square().mean()
        loss.backward()
        for p, g in self.views:
            g.add_(p.grad)
            p.grad = None
        if self.wrong != "sum":
            self.grads.mul_(0.5)
        dist.reduce_scatter_tensor(self.block(self.grads, self.rank), self.grads)
        for shard, _, where in self.shards:
            shard.grad = self.grads[where]
        if self.wrong == "piece" and self.rank == 1:
            self.grads[18:20].mul_(2)
        self.optimizer.step()
        given = 1 - self.rank if self.wrong == "order" else self.rank
        dist.all_gather_into_tensor(self.params, self.block(self.params, given).clone())
        return loss

    @staticmethod
    def block(buffer, n: int):
        return buffer[n * BLOCK : (n + 1) * BLOCK]


def report(wrong: str = ""):
    batch = {"x": tvt.Reals((10, 2), "(dp b) k")}
    return tvt.verify(Alone, lambda rank, world: Sharded(rank, wrong), 2, batch, {"dp": 2}, loss={"dp": "avg"}, points=1)


def test_blocks_that_end_inside_a_row() -> None:
    """PROVED."""
    found = report()
    assert found.verdict == "PROVED", found


@pytest.mark.parametrize("wrong", ["sum", "piece", "order"])
def test_wrong_buffers(wrong: str) -> None:
    """REFUTED: gradients are added up instead of averaged, two elements of a block are doubled, blocks are gathered in the wrong
    order."""
    found = report(wrong)
    assert found.verdict == "REFUTED", found
