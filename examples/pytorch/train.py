"""A training step on one device, and the same on several: tensor parallel by hand, data parallel by DDP.

trainverify torch examples/pytorch/train.py:reference examples/pytorch/train.py:distributed --world-size 4
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trainverify.torch as tvt

DIM, HIDDEN, ROWS = 1024, 4096, 64
mesh = {"dp": 2, "tp": 2}
batch = {"x": tvt.Reals((ROWS, DIM), "(dp b) k"), "t": tvt.Reals((ROWS, DIM), "(dp b) k")}
cuts = {"up.weight": "(tp o) k", "down.weight": "o (tp k)"}
loss = {"dp": "avg"}


class Sum(torch.autograd.Function):
    """Sum over the tensor-parallel ranks, forward or backward."""

    @staticmethod
    def forward(ctx, x, group, backward):
        ctx.group, ctx.backward = group, backward
        if not backward:
            x = x.clone()
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        if ctx.backward:
            grad = grad.clone()
            dist.all_reduce(grad, group=ctx.group)
        return grad, None, None


class MLP(nn.Module):
    def __init__(self, parts=1, group=None):
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN // parts, bias=False)
        self.down = nn.Linear(HIDDEN // parts, DIM, bias=False)

    def forward(self, x):
        h = self.norm(x)
        if self.group is not None:
            h = Sum.apply(h, self.group, True)
        y = self.down(F.gelu(self.up(h)))
        if self.group is not None:
            y = Sum.apply(y, self.group, False)
        return x + y


def trained(model, called):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch):
        result = F.mse_loss(called(batch["x"]), batch["t"])
        result.backward()
        optimizer.step()
        optimizer.zero_grad()
        return result

    return step


def reference():
    model = MLP()
    return trained(model, model)


def distributed(rank, world, forgotten=False):
    columns = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rows = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = MLP(2, columns[rank // 2])
    return trained(model, model if forgotten else DistributedDataParallel(model, process_group=rows[rank % 2]))


def forgotten(rank, world):
    """A bug: gradients are not averaged over data-parallel ranks."""
    return distributed(rank, world, forgotten=True)
