"""Llama and GPT with the tables and weights that checkpoints have, to be compared with the same models in our own operators."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from llama import IGNORE, MLP, Config, Norm
from torch import nn


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.head = c.head
        self.wq = nn.Linear(c.dim, c.heads * c.head, bias=False)
        self.wk = nn.Linear(c.dim, c.kv_heads * c.head, bias=False)
        self.wv = nn.Linear(c.dim, c.kv_heads * c.head, bias=False)
        self.wo = nn.Linear(c.heads * c.head, c.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, length = x.shape[:2]
        q, k, v = (w(x).view(rows, length, -1, self.head).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(turned(q, cos, sin), turned(k, cos, sin), v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(rows, length, -1))


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As Hugging Face writes it."""
    a, b = x.chunk(2, -1)
    return x * torch.cat([cos, cos], -1) + torch.cat([-b, a], -1) * torch.cat([sin, sin], -1)


class Block(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.norm1, self.attention = Norm(c.dim), Attention(c)
        self.norm2, self.mlp = Norm(c.dim), MLP(c)


class Llama(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.embedding = nn.Embedding(c.vocab, c.dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = Norm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab, bias=False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(c.sequence, c.head // 2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block.attention(block.norm1(x), self.cos, self.sin)
            x = x + block.mlp(block.norm2(x))
        return self.head(self.norm(x))


def stepping(model: nn.Module, logits, clip: float | None, bug: str | None = None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))

    def step(batch):
        labels = batch["labels"].flatten()
        if bug == "all labels counted":
            loss = F.cross_entropy(logits(batch["tokens"]).flatten(0, 1), labels, ignore_index=IGNORE, reduction="sum") / labels.numel()
        else:
            loss = F.cross_entropy(logits(batch["tokens"]).flatten(0, 1), labels, ignore_index=IGNORE)
        loss.backward()
        found = {"loss": loss}
        if clip is not None:
            found["grad_norm"] = nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return found

    return step


def llama(c: Config, clip: float | None = None, bug: str | None = None):
    model = Llama(c)
    return stepping(model, model, clip, bug)


def gpt(c: Config, clip: float | None = None):
    from gpt import GPT

    model = GPT(c)

    def within(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The order of checkpoints: all queries, then all keys, then all values."""
        rows, length, dim = x.shape
        q, k, v = block.qkv(block.norm1(x)).view(rows, length, 3, c.heads, dim // c.heads).unbind(2)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + block.out(y.transpose(1, 2).reshape(rows, length, dim))
        return x + block.down(F.gelu(block.up(block.norm2(x)), approximate="tanh"))

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        x = model.tokens(tokens) + model.positions(torch.arange(tokens.shape[1]))
        for block in model.blocks:
            x = within(block, x)
        return model.head(model.norm(x))

    return stepping(model, logits, clip)
