"""Data and tensor parallelism by hand on a grid of ranks: sequence-parallel norms, micro-batches, clipping, a sharded optimizer."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import Config, Norm, loss_of
from torch import nn

DP, TP, LR, PARTS = 2, 2, 0.1, 3
GROUPS: dict[str, dist.ProcessGroup] = {}


def make_groups() -> None:
    """Ranks of a row talk over tp, ranks of a column over dp; every rank makes all groups."""
    rows = [[d * TP + t for t in range(TP)] for d in range(DP)]
    columns = [[d * TP + t for d in range(DP)] for t in range(TP)]
    for name, groups in (("tp", rows), ("dp", columns)):
        for ranks in groups:
            made = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                GROUPS[name] = made


def own_part(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(TP, 1)[dist.get_rank() % TP].contiguous()


def joined(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(TP)]
    dist.all_gather(parts, x.contiguous(), group=GROUPS["tp"])
    return torch.cat(parts, 1)


def added(x: torch.Tensor) -> torch.Tensor:
    """The sum over ranks, cut along the sequence."""
    made = torch.empty_like(own_part(x))
    dist.reduce_scatter(made, [p.contiguous() for p in x.chunk(TP, 1)], group=GROUPS["tp"])
    return made


class Split(torch.autograd.Function):
    """From a whole sequence to the own part of it."""

    @staticmethod
    def forward(ctx, x):
        return own_part(x)

    @staticmethod
    def backward(ctx, grad):
        return joined(grad)


class Join(torch.autograd.Function):
    """The whole sequence, which every rank uses in the same way."""

    @staticmethod
    def forward(ctx, x):
        return joined(x)

    @staticmethod
    def backward(ctx, grad):
        return own_part(grad)


class Gather(torch.autograd.Function):
    """The whole sequence, of which every rank computes other features."""

    @staticmethod
    def forward(ctx, x):
        return joined(x)

    @staticmethod
    def backward(ctx, grad):
        return added(grad)


class Scatter(torch.autograd.Function):
    """Summands of the whole sequence become the own part of their sum."""

    @staticmethod
    def forward(ctx, x):
        return added(x)

    @staticmethod
    def backward(ctx, grad):
        return joined(grad)


class Block(nn.Module):
    def __init__(self, c: Config, cut: int):
        super().__init__()
        self.cut = cut
        self.norm = Norm(c.dim)
        self.up = nn.Linear(c.dim, c.hidden // cut)
        self.down = nn.Linear(c.hidden // cut, c.dim, bias=False)
        self.bias = nn.Parameter(torch.zeros(c.dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if self.cut > 1:
            y = Gather.apply(y)
        y = self.down(F.gelu(self.up(y)))
        if self.cut > 1:
            y = Scatter.apply(y)
        y = y + self.bias
        return x + y


class Model(nn.Module):
    def __init__(self, c: Config, cut: int = 1):
        super().__init__()
        self.cut = cut
        self.embedding = nn.Embedding(c.vocab, c.dim)
        self.blocks = nn.ModuleList(Block(c, cut) for _ in range(c.layers))
        self.head = nn.Linear(c.dim, c.vocab, bias=False)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale
        if self.cut > 1:
            x = Split.apply(x)
        for block in self.blocks:
            x = block(x)
        if self.cut > 1:
            x = Join.apply(x)
        return loss_of(self.head(x), labels)


def reference(c: Config):
    model = Model(c)

    def step(batch):
        losses = []
        for tokens, labels in zip(batch["tokens"].chunk(DP * PARTS), batch["labels"].chunk(DP * PARTS), strict=True):
            loss = model(tokens, labels)
            (loss / (DP * PARTS)).backward()
            losses.append(loss.detach())
        squares = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum()
        factor = (1.0 / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        with torch.no_grad():
            for p in model.parameters():
                p -= LR * factor * p.grad
                p.grad = None
        return {"loss": torch.stack(losses).mean()}

    return step


def distributed(c: Config):
    make_groups()
    model = Model(c, TP)
    cut = [p for n, p in model.named_parameters() if "up." in n or "down." in n]
    partial = [p for n, p in model.named_parameters() if "norm." in n or (n.endswith(".bias") and "up." not in n)]

    def step(batch):
        losses = []
        for tokens, labels in zip(batch["tokens"].chunk(PARTS), batch["labels"].chunk(PARTS), strict=True):
            loss = model(tokens, labels)
            (loss / PARTS).backward()
            losses.append(loss.detach())
        for p in partial:
            dist.all_reduce(p.grad, group=GROUPS["tp"])
        shards = {p: reduced(p.grad) for p in model.parameters()}
        factor = clipped(shards, cut)
        for p, grad in shards.items():
            updated(p, grad, factor)
        return {"loss": mean(torch.stack(losses).mean())}

    return step


def reduced(grad: torch.Tensor) -> torch.Tensor:
    """The own part of the mean over dp."""
    shard = torch.empty(grad.numel() // DP)
    dist.reduce_scatter_tensor(shard, grad.flatten(), group=GROUPS["dp"])
    return shard / DP


def clipped(shards, cut) -> torch.Tensor:
    whole = torch.stack([g.square().sum() for p, g in shards.items() if not any(p is q for q in cut)]).sum()
    squares = torch.stack([g.square().sum() for p, g in shards.items() if any(p is q for q in cut)]).sum()
    dist.all_reduce(squares, group=GROUPS["tp"])
    total = squares + whole
    dist.all_reduce(total, group=GROUPS["dp"])
    return (1.0 / (total.sqrt() + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def updated(p: torch.Tensor, grad: torch.Tensor, factor: torch.Tensor) -> None:
    flat = p.data.view(-1)
    own = flat.chunk(DP)[dist.get_rank() // TP].clone()
    own -= LR * factor * grad
    dist.all_gather_into_tensor(flat, own, group=GROUPS["dp"])
    p.grad = None


def mean(loss: torch.Tensor) -> torch.Tensor:
    """Over the data-parallel ranks."""
    dist.all_reduce(loss, op=dist.ReduceOp.SUM, group=GROUPS["dp"])
    return loss / DP


CUTS = {"blocks.*.up.weight": "(tp o) k", "blocks.*.up.bias": "(tp o)", "blocks.*.down.weight": "o (tp k)"}
