"""Llama-3-8B as PyTorch code, for `trainverify bench torch`: RMSNorm, rotary embedding, grouped queries, SwiGLU, clip, AdamW.

Parallel by DTensor (tensor and sequence parallel) and by FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module

IGNORE: Final = -100


@dataclass(frozen=True)
class Sizes:
    """Of Llama-3-8B, but for a training batch."""

    layers: int = 32
    vocabulary: int = 128256
    dim: int = 4096
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    batch: int = 8
    sequence: int = 8192


def rotated(x: Any) -> Any:
    half = x.shape[-1] // 2
    frequencies = 500000.0 ** (-torch.arange(half).float() / half)
    angles = torch.outer(torch.arange(x.shape[2]).float(), frequencies)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Norm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    def __init__(self, s: Sizes):
        super().__init__()
        self.head = s.dim // s.heads
        self.wq = nn.Linear(s.dim, s.dim, bias=False)
        self.wk = nn.Linear(s.dim, s.kv_heads * self.head, bias=False)
        self.wv = nn.Linear(s.dim, s.kv_heads * self.head, bias=False)
        self.wo = nn.Linear(s.dim, s.dim, bias=False)

    def forward(self, x: Any) -> Any:
        rows, length = x.shape[:2]
        q, k, v = (w(x).view(rows, length, -1, self.head).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(rows, length, -1))


class MLP(nn.Module):
    def __init__(self, s: Sizes):
        super().__init__()
        self.w1 = nn.Linear(s.dim, s.hidden, bias=False)
        self.w3 = nn.Linear(s.dim, s.hidden, bias=False)
        self.w2 = nn.Linear(s.hidden, s.dim, bias=False)

    def forward(self, x: Any) -> Any:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, s: Sizes):
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = Norm(s.dim), Attention(s), Norm(s.dim), MLP(s)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, s: Sizes):
        super().__init__()
        self.embedding = nn.Embedding(s.vocabulary, s.dim)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = Norm(s.dim)
        self.head = nn.Linear(s.dim, s.vocabulary, bias=False)

    def forward(self, tokens: Any, labels: Any) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


def trained(model: Any) -> Callable[[Any], dict[str, Any]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

    def whole(t: Any) -> Any:
        return t.full_tensor() if hasattr(t, "full_tensor") else t

    def step(batch: Any) -> dict[str, Any]:
        loss = model(batch["tokens"], batch["labels"])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": whole(loss), "norm": whole(norm)}

    return step


def alone(s: Sizes) -> Any:
    return trained(Llama(s))


def tensor_parallel(s: Sizes, world: int) -> Any:
    """DTensor: attention and MLP cut by columns and rows, everything between them along the sequence."""
    model = Llama(s)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    column, row = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
    of_block = {f"attention.{w}": column for w in ("wq", "wk", "wv")} | {f"mlp.{w}": column for w in ("w1", "w3")}
    of_block |= {"attention": PrepareModuleInput(**gather), "attention.wo": row, "mlp": PrepareModuleInput(**gather), "mlp.w2": row}
    of_block |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, dict(of_block))
    of_model = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, of_model)
    return trained(model)


def sharded(s: Sizes, world: int) -> Any:
    """FSDP2: parameters, gradients and optimizer state cut over data-parallel ranks."""
    model = Llama(s)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return trained(model)
