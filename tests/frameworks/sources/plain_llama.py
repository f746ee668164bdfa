"""A Llama written from its definition, with torchtitan's names: what torchtitan's own step on one device is compared with.

Nothing of torchtitan's is used: rotations are sums of products of real numbers, the loss is a sum of logarithms over the number of
tokens, clipping a scale, attention, SiLU and AdamW are PyTorch's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

IGNORED = -100


@dataclass(frozen=True)
class Sizes:
    vocabulary: int
    dim: int
    hidden: int
    heads: int
    kv_heads: int
    layers: int
    length: int
    theta: float
    lr: float
    scaled: bool = True  # long waves of rotations, as of Llama 3.1
    eps: float = 1e-5

    @property
    def head(self) -> int:
        return self.dim // self.heads


class Norm(nn.Module):
    def __init__(self, s: Sizes):
        super().__init__()
        self.eps = s.eps
        self.weight = nn.Parameter(torch.ones(s.dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Table(nn.Module):
    """e^(i position f), a row for every position: f is θ^(-2j / head) where a wave is short, an eighth of it where it is long."""

    def __init__(self, s: Sizes):
        super().__init__()
        f = s.theta ** (-torch.arange(0, s.head, 2).float() / s.head)
        wave = 2 * math.pi / f
        near = (8192 / wave - 1) / 3
        if s.scaled:
            f = torch.where(wave < 8192 / 4, f, torch.where(wave > 8192, f / 8, (1 - near) * f / 8 + near * f))
        angles = torch.outer(torch.arange(s.length).float(), f)
        self.register_buffer("cache", torch.complex(angles.cos(), angles.sin()), persistent=False)


class Fused(nn.Module):
    """Of every group of heads its queries, then its key, then its value."""

    def __init__(self, s: Sizes):
        super().__init__()
        self.wqkv = nn.Linear(s.dim, (s.heads + 2 * s.kv_heads) * s.head, bias=False)


class Attention(nn.Module):
    def __init__(self, s: Sizes):
        super().__init__()
        self.sizes = s
        self.rope, self.qkv_linear = Table(s), Fused(s)
        self.wo = nn.Linear(s.dim, s.dim, bias=False)

    def rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Neighbours as real and imaginary part of [batch, length, heads, size]."""
        turn = self.rope.cache[positions].unsqueeze(2)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * turn.real - b * turn.imag, a * turn.imag + b * turn.real], -1).flatten(3)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        s, each = self.sizes, self.sizes.heads // self.sizes.kv_heads
        made = self.qkv_linear.wqkv(x).view(*x.shape[:2], s.kv_heads, each + 2, s.head)
        q, k, v = made[..., :each, :].flatten(2, 3), made[..., each, :], made[..., each + 1, :]
        q, k = self.rotated(q, positions), self.rotated(k, positions)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, s: Sizes):
        super().__init__()
        self.w1, self.w3 = nn.Linear(s.dim, s.hidden, bias=False), nn.Linear(s.dim, s.hidden, bias=False)
        self.w2 = nn.Linear(s.hidden, s.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, s: Sizes):
        super().__init__()
        self.attention, self.feed_forward = Attention(s), Gated(s)
        self.attention_norm, self.ffn_norm = Norm(s), Norm(s)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.feed_forward(self.ffn_norm(x))


class Plain(nn.Module):
    def __init__(self, s: Sizes):
        super().__init__()
        self.tok_embeddings = nn.Embedding(s.vocabulary, s.dim)
        self.layers = nn.ModuleDict({str(i): Layer(s) for i in range(s.layers)})
        self.norm = Norm(s)
        self.lm_head = nn.Linear(s.dim, s.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, positions)
        return self.lm_head(self.norm(x))


def plain(s: Sizes, clip: float = 1.0, mask: int = IGNORED):
    """One step: loss per token, backward, clip, AdamW."""
    model = Plain(s)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False, fused=False)

    def step(batch):
        logits, labels = model(batch["input"], batch["positions"]), batch["labels"]
        told = labels != mask
        chosen = logits.log_softmax(-1).gather(-1, torch.where(told, labels, 0).unsqueeze(-1)).squeeze(-1)
        loss = -torch.where(told, chosen, 0.0).sum() / told.sum()
        loss.backward()
        norm = sum((p.grad * p.grad).sum() for p in model.parameters()).sqrt()
        for p in model.parameters():
            p.grad.mul_((clip / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
        return {"loss": loss, "grad_norm": norm}

    return step
