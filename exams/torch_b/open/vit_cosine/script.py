import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import trainverify.torch as tvt


@dataclass
class Config:
    image: tuple[int, int] = (8, 12)
    patch: int = 4
    channels: int = 3
    width: int = 15
    heads: int = 3
    depth: int = 2
    mlp: int = 28
    classes: int = 11
    lr: float = 3e-3
    floor: float = 1e-4
    warmup: int = 2
    total: int = 9
    weight_decay: float = 0.05
    clip: float = 0.7
    accumulate: int = 2


cfg = Config()

# The loader stacks micro-batches in front: [accumulate, batch, ...]
batch = {
    "pixels": tvt.Reals((2, 6, 3, 8, 12), "m (dp b) c h w"),
    "target": tvt.Ids((2, 6), "m (dp b)", below=11),
}
mesh = {"dp": 3}
loss = {"dp": "avg"}


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.heads = c.heads
        self.q = nn.Linear(c.width, c.width)
        self.k = nn.Linear(c.width, c.width, bias=False)
        self.v = nn.Linear(c.width, c.width)
        self.proj = nn.Linear(c.width, c.width)

    def split(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        return x.view(b, s, self.heads, w // self.heads).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x)))
        return self.proj(y.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.norm1 = nn.LayerNorm(c.width, eps=1e-6)
        self.attn = Attention(c)
        self.norm2 = nn.LayerNorm(c.width, eps=1e-6)
        self.fc1 = nn.Linear(c.width, c.mlp)
        self.fc2 = nn.Linear(c.mlp, c.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        patches = (c.image[0] // c.patch) * (c.image[1] // c.patch)
        self.embed = nn.Conv2d(c.channels, c.width, kernel_size=c.patch, stride=c.patch)
        self.cls = nn.Parameter(torch.randn(1, 1, c.width) * 0.02)
        self.pos = nn.Parameter(torch.randn(1, patches + 1, c.width) * 0.02)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.depth))
        self.norm = nn.LayerNorm(c.width, eps=1e-6)
        self.head = nn.Linear(c.width, c.classes)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embed(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.size(0), -1, -1), x], dim=1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def rate(step: int) -> float:
    """Linear warm-up, then half a cosine to the floor, as a factor of cfg.lr."""
    if step < cfg.warmup:
        return (step + 1) / (cfg.warmup + 1)
    progress = (step - cfg.warmup) / (cfg.total - cfg.warmup)
    low = cfg.floor / cfg.lr
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))


def param_groups(vit: nn.Module) -> list[dict]:
    matrices = [p for p in vit.parameters() if p.ndim > 1 and p is not vit.pos and p is not vit.cls]
    chosen = {id(p) for p in matrices}
    others = [p for p in vit.parameters() if id(p) not in chosen]
    return [{"params": matrices, "weight_decay": cfg.weight_decay}, {"params": others, "weight_decay": 0.0}]


class Trainer:
    """One optimizer step over `cfg.accumulate` micro-batches."""

    def __init__(self, vit: ViT):
        self.vit = vit
        self.model = vit
        self.optimizer = torch.optim.AdamW(param_groups(vit), lr=cfg.lr, betas=(0.9, 0.95))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)

    def last(self, i: int) -> bool:
        return i == cfg.accumulate - 1

    def context(self, i: int):
        return nullcontext()

    def micro(self, i: int, pixels: Tensor, target: Tensor) -> Tensor:
        with self.context(i):
            loss = F.cross_entropy(self.model(pixels), target) / cfg.accumulate
            loss.backward()
        return loss.detach()

    def finish(self) -> Tensor:
        norm = clip_grad_norm_(self.vit.parameters(), cfg.clip)
        self.optimizer.step()
        self.scheduler.step()
        return norm

    def __call__(self, batch: dict[str, Tensor]):
        self.optimizer.zero_grad()
        losses = [self.micro(i, batch["pixels"][i], batch["target"][i]) for i in range(cfg.accumulate)]
        norm = self.finish()
        return {"loss": sum(losses), "grad_norm": norm}


class DDPTrainer(Trainer):
    def __init__(self, vit: ViT):
        super().__init__(vit)
        self.model = DistributedDataParallel(vit, gradient_as_bucket_view=True)

    def context(self, i: int):
        return nullcontext() if self.last(i) else self.model.no_sync()


class ByHand(Trainer):
    def reduce(self):
        grads = [p.grad for p in self.vit.parameters()]
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        flat /= dist.get_world_size()
        for g, piece in zip(grads, flat.split([g.numel() for g in grads])):
            g.copy_(piece.view_as(g))

    def finish(self) -> Tensor:
        self.reduce()
        total = torch.stack([p.grad.square().sum() for p in self.vit.parameters()]).sum().sqrt()
        scale = torch.clamp(cfg.clip / (total + 1e-6), max=1.0)
        for p in self.vit.parameters():
            p.grad.mul_(scale)
        self.optimizer.step()
        self.scheduler.step()
        return total


class StepEveryMicro(DDPTrainer):
    def micro(self, i: int, pixels: Tensor, target: Tensor) -> Tensor:
        loss = super().micro(i, pixels, target)
        if not self.last(i):
            self.scheduler.step()
        return loss


class SyncFirst(DDPTrainer):
    def context(self, i: int):
        return nullcontext() if i % cfg.accumulate == 0 else self.model.no_sync()


class ClipEarly(ByHand):
    def finish(self) -> Tensor:
        norm = clip_grad_norm_(self.vit.parameters(), cfg.clip)
        self.reduce()
        self.optimizer.step()
        self.scheduler.step()
        return norm


def reference():
    return Trainer(ViT(cfg))


def right_1(rank, world):
    return DDPTrainer(ViT(cfg))


def right_2(rank, world):
    return ByHand(ViT(cfg))


def wrong_1(rank, world):
    return StepEveryMicro(ViT(cfg))


def wrong_2(rank, world):
    return SyncFirst(ViT(cfg))


def wrong_3(rank, world):
    return ClipEarly(ViT(cfg))
