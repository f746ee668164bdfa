"""Tensor parallelism by hand, as Megatron does it: `autograd.Function`s around `dist.all_reduce`."""

from __future__ import annotations

from fnmatch import fnmatch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import Config, Llama, Norm, loss_of, optimizer_of, rotate
from torch import nn


class Copy(torch.autograd.Function):
    """f: forward nothing, backward the sum over ranks."""

    @staticmethod
    def forward(ctx, x, bug):
        ctx.bug = bug
        return x

    @staticmethod
    def backward(ctx, grad):
        if ctx.bug == "no backward reduce":
            return grad, None  # bug: no backward reduce
        grad = grad.contiguous()
        if ctx.bug == "avg backward":
            dist.all_reduce(grad, op=dist.ReduceOp.AVG)  # bug: avg backward
        else:
            dist.all_reduce(grad)
        return grad, None


class Reduce(torch.autograd.Function):
    """g: forward the sum over ranks, backward nothing."""

    @staticmethod
    def forward(ctx, x, bug):
        ctx.bug = bug
        x = x.contiguous()
        if bug == "avg forward":
            dist.all_reduce(x, op=dist.ReduceOp.AVG)  # bug: avg forward
        elif bug == "missing wait":
            dist.all_reduce(x, async_op=True)
        else:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        if ctx.bug == "extra reduce":
            grad = grad.contiguous()
            dist.all_reduce(grad)  # bug: extra reduce
        return grad, None


class Attention(nn.Module):
    def __init__(self, c: Config, world: int, bug: str | None):
        super().__init__()
        self.head, self.bug = c.head, bug
        self.wq = nn.Linear(c.dim, c.heads * c.head // world, bias=False)
        self.wk = nn.Linear(c.dim, c.kv_heads * c.head // world, bias=False)
        self.wv = nn.Linear(c.dim, c.kv_heads * c.head // world, bias=False)
        self.wo = nn.Linear(c.heads * c.head // world, c.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length = x.shape[:2]
        x = Copy.apply(x, None)
        q, k, v = (w(x).view(rows, length, -1, self.head).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        y = self.wo(y.transpose(1, 2).reshape(rows, length, -1))
        return Reduce.apply(y, self.bug if self.bug in ("avg forward", "extra reduce", "missing wait") else None)  # bug: missing wait


class MLP(nn.Module):
    def __init__(self, c: Config, world: int, bug: str | None):
        super().__init__()
        self.bug = bug
        self.w1 = nn.Linear(c.dim, c.hidden // world, bias=False)
        self.w3 = nn.Linear(c.dim, c.hidden // world, bias=False)
        self.w2 = nn.Linear(c.hidden // world, c.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Copy.apply(x, self.bug if self.bug in ("no backward reduce", "avg backward") else None)
        y = self.w2(F.silu(self.w1(x)) * self.w3(x))
        if self.bug == "residual before reduce":
            return Reduce.apply(y + x, None) - x  # bug: residual before reduce
        return Reduce.apply(y, None)


class Block(nn.Module):
    def __init__(self, c: Config, world: int, bug: str | None):
        super().__init__()
        self.norm1, self.attention = Norm(c.dim), Attention(c, world, bug)
        self.norm2, self.mlp = Norm(c.dim), MLP(c, world, bug)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Sharded(Llama):
    def __init__(self, c: Config, world: int, bug: str | None):
        super().__init__(c)
        self.blocks = nn.ModuleList(Block(c, world, bug if i == 1 else None) for i in range(c.layers))


CUTS = {"*.wq.weight": "(tp o) k", "*.wk.weight": "(tp o) k", "*.wv.weight": "(tp o) k", "*.wo.weight": "o (tp k)"}
CUTS |= {"*.w1.weight": "(tp o) k", "*.w3.weight": "(tp o) k", "*.w2.weight": "o (tp k)"}


def clip(model: nn.Module, bug: str | None, cuts: dict[str, str] = CUTS) -> torch.Tensor:
    """The norm of all gradients: squares of cut weights are added up over ranks."""
    cut = [p.grad for n, p in model.named_parameters() if any(fnmatch(n, pattern) for pattern in cuts)]
    whole = [p.grad for n, p in model.named_parameters() if not any(fnmatch(n, pattern) for pattern in cuts)]
    squares = torch.stack([g.pow(2).sum() for g in cut]).sum()
    if bug != "local norm":
        dist.all_reduce(squares)
    norm = (squares + torch.stack([g.pow(2).sum() for g in whole]).sum()).sqrt()  # bug: local norm
    factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
    for g in (*cut, *whole):
        g.mul_(factor)
    return norm


def distributed(c: Config, world: int, bug: str | None = None):
    model = Sharded(c, world, bug)
    optimizer = optimizer_of(model)

    def step(batch):
        loss = loss_of(model.logits(batch["tokens"]), batch["labels"])
        loss.backward()
        norm = clip(model, bug)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "norm": norm}

    return step
