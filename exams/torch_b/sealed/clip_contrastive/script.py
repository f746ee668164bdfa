from __future__ import annotations

import math
from typing import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather as all_gather_with_grad
from torch.nn.parallel import DistributedDataParallel as DDP

import trainverify.torch as tvt

# Two towers, one batch of pairs. A pair's own partner is the positive, every other row of the *global* batch a negative.

PAIRS = 9
VOCAB, CONTEXT = 31, 6
IMAGE = 20
EMBED = 8

batch = {
    "image": tvt.Reals((PAIRS, IMAGE), "(dp b) f"),
    "text": tvt.Ids((PAIRS, CONTEXT), "(dp b) s", below=VOCAB),
    "pad": tvt.Flags((PAIRS, CONTEXT), "(dp b) s"),
}
mesh = {"dp": 3}
loss = {"dp": "avg"}


class ImageTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(IMAGE, 18), nn.GELU(), nn.Linear(18, EMBED, bias=False))

    def forward(self, image: Tensor) -> Tensor:
        return self.net(image)


class TextTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, 14)
        self.place = nn.Parameter(torch.randn(CONTEXT, 14) * 0.1)
        self.start = nn.Parameter(torch.randn(14) * 0.1)
        self.mix = nn.Linear(14, 14)
        self.project = nn.Linear(14, EMBED, bias=False)

    def forward(self, text: Tensor, pad: Tensor) -> Tensor:
        x = torch.tanh(self.mix(self.token(text) + self.place))
        kept = (~pad).unsqueeze(-1).to(x.dtype)
        pooled = (self.start + (x * kept).sum(1)) / (1 + kept.sum(1))
        return self.project(pooled)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual = ImageTower()
        self.textual = TextTower()
        self.log_scale = nn.Parameter(torch.full((), math.log(1 / 0.2)))

    def forward(self, image: Tensor, text: Tensor, pad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v = F.normalize(self.visual(image), dim=-1, eps=1e-8)
        t = F.normalize(self.textual(text, pad), dim=-1, eps=1e-8)
        return v, t, self.log_scale.exp()


# ------------------------------------------------------------------ losses


def symmetric(v: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    logits = scale * v @ t.T
    labels = torch.arange(v.size(0))
    return 0.5 * (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels))


def rows_against_all(v: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    """Logits of this rank's rows only: [b, world * b]."""
    all_v, all_t = torch.cat(all_gather_with_grad(v)), torch.cat(all_gather_with_grad(t))
    labels = torch.arange(v.size(0)) + v.size(0) * dist.get_rank()
    return 0.5 * (F.cross_entropy(scale * v @ all_t.T, labels) + F.cross_entropy(scale * t @ all_v.T, labels))


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor) -> Tensor:
        ctx.count = rows.size(0)
        out = rows.new_empty(rows.size(0) * dist.get_world_size(), rows.size(1))
        dist.all_gather_into_tensor(out, rows.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        mine = grad.new_empty(ctx.count, grad.size(1))
        dist.reduce_scatter_tensor(mine, grad.contiguous())
        return mine


def everything_everywhere(v: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    """The whole matrix on every rank."""
    return symmetric(GatherRows.apply(v), GatherRows.apply(t), scale)


@torch.no_grad()
def plain_gather(rows: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.contiguous())
    return parts


def own_block_has_grad(v: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    all_v, all_t = plain_gather(v), plain_gather(t)
    all_v[dist.get_rank()] = v
    all_t[dist.get_rank()] = t
    return symmetric(torch.cat(all_v), torch.cat(all_t), scale)


def rows_against_constants(v: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    all_v, all_t = torch.cat(plain_gather(v)), torch.cat(plain_gather(t))
    labels = torch.arange(v.size(0)) + v.size(0) * dist.get_rank()
    return 0.5 * (F.cross_entropy(scale * v @ all_t.T, labels) + F.cross_entropy(scale * t @ all_v.T, labels))


# ------------------------------------------------------------------ training


def optimizer_of(towers: TwoTowers) -> torch.optim.Optimizer:
    gains = [p for p in towers.parameters() if p.ndim < 2]
    weights = [p for p in towers.parameters() if p.ndim >= 2]
    groups = [{"params": gains, "weight_decay": 0.0}, {"params": weights, "weight_decay": 0.2}]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.98), eps=1e-6)


def limit_scale(towers: TwoTowers) -> None:
    with torch.no_grad():
        towers.log_scale.clamp_(0, math.log(100))


def training(towers: TwoTowers, called: nn.Module, criterion: Callable[..., Tensor], reduce: Callable[[], None] = lambda: None):
    optimizer = optimizer_of(towers)

    def step(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        optimizer.zero_grad()
        v, t, scale = called(batch["image"], batch["text"], batch["pad"])
        loss = criterion(v, t, scale)
        loss.backward()
        reduce()
        optimizer.step()
        limit_scale(towers)
        return {"loss": loss.detach(), "scale": scale.detach()}

    return step


def reference():
    towers = TwoTowers()
    return training(towers, towers, symmetric)


def right_1(rank: int, world: int):
    towers = TwoTowers()
    return training(towers, DDP(towers), rows_against_all)


def right_2(rank: int, world: int):
    towers = TwoTowers()

    def reduce() -> None:
        for p in towers.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)

    return training(towers, towers, everything_everywhere, reduce)


def wrong_1(rank: int, world: int):
    towers = TwoTowers()
    return training(towers, DDP(towers), own_block_has_grad)


def wrong_2(rank: int, world: int):
    towers = TwoTowers()
    return training(towers, DDP(towers), rows_against_constants)


def wrong_3(rank: int, world: int):
    towers = TwoTowers()

    def reduce() -> None:
        for p in towers.parameters():
            if p is not towers.log_scale:
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
            else:
                dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)

    return training(towers, towers, everything_everywhere, reduce)
