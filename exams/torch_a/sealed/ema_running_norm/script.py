"""Regression with a running input standardiser and an exponential moving average of the weights.

The average ("ema") is a second model that is only evaluated. It follows the weights after every optimizer step,
with a decay that warms up, and takes over the buffers as they are.
"""

import copy
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import trainverify.torch as tvt

ACCUMULATE = 2
IN, OUT, ROWS = 9, 4, 6

batch = {
    "x": tvt.Reals((ACCUMULATE, ROWS, IN), "m (dp b) f"),
    "target": tvt.Reals((ACCUMULATE, ROWS, OUT), "m (dp b) o"),
}
mesh = {"dp": 2}
loss = {"dp": "avg"}


def own(sums):
    return sums


def over_ranks(sums):
    dist.all_reduce(sums)
    return sums


class Standardise(nn.Module):
    """Like a batch norm that normalises with its running moments, also while training."""

    def __init__(self, features, gather, momentum=0.2):
        super().__init__()
        self.gather, self.momentum = gather, momentum
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("var", torch.ones(features))

    @torch.no_grad()
    def observe(self, x):
        n = torch.full((1,), float(x.shape[0]), dtype=x.dtype)
        sums = self.gather(torch.cat([x.sum(0), x.square().sum(0), n]))
        total, squares, n = sums.split([x.shape[1], x.shape[1], 1])
        mean = total / n
        self.mean.lerp_(mean, self.momentum)
        self.var.lerp_(squares / n - mean.square(), self.momentum)

    def forward(self, x):
        if self.training:
            self.observe(x)
        return (x - self.mean) * torch.rsqrt(self.var + 1e-3)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.a, self.b = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x):
        return x + self.b(F.silu(self.a(self.norm(x))))


def network(gather):
    return nn.Sequential(Standardise(IN, gather), nn.Linear(IN, 11), Residual(11), Residual(11), nn.Linear(11, OUT))


class Average:
    """Keeps the moving average of a model's weights."""

    def __init__(self, model, ema, decay=0.95):
        self.model, self.ema, self.decay = model, ema, decay
        self.updates = 0

    def rate(self):
        self.updates += 1
        return min(self.decay, self.updates / (self.updates + 3))

    @torch.no_grad()
    def update(self):
        d = self.rate()
        for e, p in zip(self.ema.parameters(), self.model.parameters()):
            e.mul_(d).add_(p, alpha=1 - d)
        for e, b in zip(self.ema.buffers(), self.model.buffers()):
            e.copy_(b)


class ForeachAverage(Average):
    @torch.no_grad()
    def update(self):
        weight = 1 - self.rate()
        torch._foreach_lerp_(list(self.ema.parameters()), list(self.model.parameters()), weight)
        torch._foreach_copy_(list(self.ema.buffers()), list(self.model.buffers()))


def shadow(model):
    return copy.deepcopy(model).eval().requires_grad_(False)


def optimiser(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.02, eps=1e-5)


def training(wrap=lambda m: m, gather=own):
    model = network(gather)
    ema = shadow(model)
    average = Average(model, ema)
    called = wrap(model)
    opt = optimiser(model)

    def step(batch):
        opt.zero_grad()
        result = 0.0
        for i in range(ACCUMULATE):
            hold = isinstance(called, DDP) and i + 1 < ACCUMULATE
            with called.no_sync() if hold else nullcontext():
                part = F.mse_loss(called(batch["x"][i]), batch["target"][i]) / ACCUMULATE
                part.backward()
            result += part.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.8)
        opt.step()
        average.update()
        return {"loss": result, "grad_norm": norm}

    return step


def training_early(wrap, gather):
    model = network(gather)
    ema = shadow(model)
    average = Average(model, ema)
    called = wrap(model)
    opt = optimiser(model)

    def step(batch):
        opt.zero_grad()
        result = 0.0
        for i in range(ACCUMULATE):
            last = i == ACCUMULATE - 1
            with nullcontext() if last else called.no_sync():
                part = F.mse_loss(called(batch["x"][i]), batch["target"][i]) / ACCUMULATE
                part.backward()
            result += part.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.8)
        average.update()
        opt.step()
        return {"loss": result, "grad_norm": norm}

    return step


def training_hooks(rank, world, every_micro=False):
    """Without DDP: a hook sends every gradient off as soon as its last micro-batch is in it."""
    model = network(over_ranks)
    ema = shadow(model)
    average = ForeachAverage(model, ema)
    opt = optimiser(model)
    pending, seen = [], {}

    def send(p):
        seen[p] = seen.get(p, 0) + 1
        if seen[p] == ACCUMULATE:
            p.grad.div_(world)
            pending.append(dist.all_reduce(p.grad, async_op=True))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(send)

    def step(batch):
        opt.zero_grad()
        seen.clear()
        losses = []
        for i, (x, target) in enumerate(zip(batch["x"], batch["target"])):
            value = (model(x) - target).square().mean()
            (value / ACCUMULATE).backward()
            losses.append(value.detach())
            if i == ACCUMULATE - 1:
                while pending:
                    pending.pop().wait()
                norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
                for p in model.parameters():
                    p.grad.mul_((0.8 / (norm + 1e-6)).clamp(max=1.0))
                opt.step()
            if every_micro or i == ACCUMULATE - 1:
                average.update()
        return {"loss": sum(losses) / ACCUMULATE, "grad_norm": norm}

    return step


def reference():
    return training()


def right_1(rank, world):
    return training(DDP, over_ranks)


def right_2(rank, world):
    return training_hooks(rank, world)


def wrong_1(rank, world):
    return training_early(DDP, over_ranks)


def wrong_2(rank, world):
    return training_hooks(rank, world, every_micro=True)


def wrong_3(rank, world):
    return training(DDP)
