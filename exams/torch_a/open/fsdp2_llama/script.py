"""A Llama-like decoder under FSDP2: RMSNorm, rotary positions, grouped heads, SwiGLU."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import trainverify.torch as tvt


@dataclass(frozen=True)
class Args:
    dim: int = 16
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 2
    hidden: int = 22
    vocab: int = 31
    seq: int = 9
    theta: float = 500.0
    eps: float = 1e-5
    ignore: int = -100


ARGS = Args()
N_MICRO, ROWS, MAX_NORM = 2, 6, 0.4

batch = {
    "inputs": tvt.Ids((N_MICRO, ROWS, ARGS.seq), "m (dp b) s", below=ARGS.vocab),
    "targets": tvt.Ids((N_MICRO, ROWS, ARGS.seq), "m (dp b) s", below=ARGS.vocab, ignore=ARGS.ignore),
}
mesh = {"dp": 2}
loss = {"dp": "avg"}


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotary_table(a: Args) -> tuple[Tensor, Tensor]:
    size = a.dim // a.n_heads
    freqs = a.theta ** (-torch.arange(0, size, 2).to(torch.get_default_dtype()) / size)
    angles = torch.outer(torch.arange(a.seq).to(freqs.dtype), freqs)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates halves: x is [batch, seq, heads, size]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, a: Args):
        super().__init__()
        self.n_heads, self.n_kv, self.size = a.n_heads, a.n_kv_heads, a.dim // a.n_heads
        self.wq = nn.Linear(a.dim, self.n_heads * self.size, bias=False)
        self.wk = nn.Linear(a.dim, self.n_kv * self.size, bias=False)
        self.wv = nn.Linear(a.dim, self.n_kv * self.size, bias=False)
        self.wo = nn.Linear(self.n_heads * self.size, a.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = rotate(self.wq(x).view(b, s, self.n_heads, self.size), cos, sin)
        k = rotate(self.wk(x).view(b, s, self.n_kv, self.size), cos, sin)
        v = self.wv(x).view(b, s, self.n_kv, self.size)
        k, v = (t.repeat_interleave(self.n_heads // self.n_kv, dim=2) for t in (k, v))
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, a: Args):
        super().__init__()
        self.w1 = nn.Linear(a.dim, a.hidden, bias=False)
        self.w2 = nn.Linear(a.hidden, a.dim, bias=False)
        self.w3 = nn.Linear(a.dim, a.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, a: Args):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(a.dim, a.eps), RMSNorm(a.dim, a.eps)
        self.attention, self.feed_forward = Attention(a), FeedForward(a)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, a: Args):
        super().__init__()
        self.tok_embeddings = nn.Embedding(a.vocab, a.dim)
        self.layers = nn.ModuleList([Layer(a) for _ in range(a.n_layers)])
        self.norm = RMSNorm(a.dim, a.eps)
        self.output = nn.Linear(a.dim, a.vocab, bias=False)
        cos, sin = rotary_table(a)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tok_embeddings(ids)
        for layer in self.layers:
            h = layer(h, self.cos, self.sin)
        return self.output(self.norm(h))


def token_loss(logits: Tensor, targets: Tensor, reduction: str = "sum") -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=ARGS.ignore, reduction=reduction)


def sharded(world: int, reshard: bool = True) -> Llama:
    model = Llama(ARGS)
    device_mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for layer in model.layers:
        fully_shard(layer, mesh=device_mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=device_mesh, reshard_after_forward=reshard)
    return model


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)


def global_tokens(targets: Tensor) -> Tensor:
    count = (targets != ARGS.ignore).sum()
    dist.all_reduce(count)
    return count


def norm_of_whole(grads: list) -> Tensor:
    return nn.utils.get_total_norm(grads).full_tensor()


def norm_of_shards(grads: list) -> Tensor:
    return torch.stack([g.to_local().pow(2).sum() for g in grads]).sum().sqrt()


def reference():
    model = Llama(ARGS)
    optimizer = adamw(model)

    def step(batch):
        optimizer.zero_grad()
        tokens = (batch["targets"] != ARGS.ignore).sum()
        reported = 0.0
        for ids, targets in zip(batch["inputs"], batch["targets"]):
            value = token_loss(model(ids), targets) / tokens
            value.backward()
            reported += value.detach()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return reported

    return step


def right_1(rank, world):
    """Gradients are averaged over ranks by FSDP, so sums of tokens are scaled up by their number."""
    model = sharded(world)
    optimizer = adamw(model)

    def step(batch):
        optimizer.zero_grad()
        tokens = global_tokens(batch["targets"])
        reported = 0.0
        for ids, targets in zip(batch["inputs"], batch["targets"]):
            value = token_loss(model(ids), targets) * world / tokens
            value.backward()
            reported += value.detach()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return reported

    return step


def accumulating(world, boundary, norm):
    """One reduce-scatter a step, weights kept after the forward pass, clipping by hand."""
    model = sharded(world, reshard=False)
    optimizer = adamw(model)

    def step(batch):
        optimizer.zero_grad()
        tokens = global_tokens(batch["targets"])
        reported = []
        for i in range(N_MICRO):
            model.set_requires_gradient_sync(i == boundary)
            value = token_loss(model(batch["inputs"][i]), batch["targets"][i]) / (tokens / world)
            value.backward()
            reported.append(value.detach())
        grads = [p.grad for p in model.parameters()]
        scale = torch.clamp(MAX_NORM / (norm(grads) + 1e-6), max=1.0)
        for g in grads:
            g.to_local().mul_(scale)
        optimizer.step()
        return sum(reported)

    return step


def right_2(rank, world):
    return accumulating(world, N_MICRO - 1, norm_of_whole)


def wrong_1(rank, world):
    model = sharded(world)
    optimizer = adamw(model)

    def step(batch):
        optimizer.zero_grad()
        reported = 0.0
        for ids, targets in zip(batch["inputs"], batch["targets"]):
            value = token_loss(model(ids), targets, reduction="mean") / N_MICRO
            value.backward()
            reported += value.detach()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return reported

    return step


def wrong_2(rank, world):
    return accumulating(world, 0, norm_of_whole)


def wrong_3(rank, world):
    return accumulating(world, N_MICRO - 1, norm_of_shards)
