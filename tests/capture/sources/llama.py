"""A Llama as people write it: RMSNorm, rotary embedding, grouped queries, SwiGLU, cross entropy with ignored labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    vocab: int = 48
    dim: int = 24
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 40
    batch: int = 4
    sequence: int = 8

    @property
    def head(self) -> int:
        return self.dim // self.heads


SMALL = Config()
REAL = Config(vocab=128256, dim=4096, heads=32, kv_heads=8, hidden=14336, batch=8, sequence=4096)  # Llama-3-8B, but for its layers
IGNORE = -100


def rotate(x: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Rotary embedding of [batch, heads, sequence, size], positions from `start` on."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half).float() / half)
    angles = torch.outer(torch.arange(start, start + x.shape[2]).float(), frequencies)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1).type_as(x)


class Norm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.head = c.head
        self.wq = nn.Linear(c.dim, c.heads * c.head, bias=False)
        self.wk = nn.Linear(c.dim, c.kv_heads * c.head, bias=False)
        self.wv = nn.Linear(c.dim, c.kv_heads * c.head, bias=False)
        self.wo = nn.Linear(c.heads * c.head, c.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length = x.shape[:2]
        q, k, v = (w(x).view(rows, length, -1, self.head).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(rows, length, -1))


class MLP(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.w1 = nn.Linear(c.dim, c.hidden, bias=False)
        self.w3 = nn.Linear(c.dim, c.hidden, bias=False)
        self.w2 = nn.Linear(c.hidden, c.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.norm1, self.attention = Norm(c.dim), Attention(c)
        self.norm2, self.mlp = Norm(c.dim), MLP(c)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.embedding = nn.Embedding(c.vocab, c.dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = Norm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab, bias=False)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss_of(self.logits(tokens), labels)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


def optimizer_of(model: nn.Module, **options: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, **options)


def full(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def trained(model: nn.Module, called: nn.Module | None = None, **options: object):
    """A whole step: forward, backward, clip, AdamW."""
    optimizer = optimizer_of(model, **options)

    def step(batch):
        loss = (called or model)(batch["tokens"], batch["labels"])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": full(loss), "norm": full(norm)}

    return step
