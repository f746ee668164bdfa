"""Encoder-decoder with bucketed relative position bias, trained with label smoothing on 2 x 2 ranks.

Attention heads, feed-forward units and the vocabulary of the head are cut over `tp`; the bias tables are kept whole on every rank
and read in part. Rows go to `dp`; padded target positions are -100.
"""
from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
import trainverify.torch as tvt

VOCAB, D_MODEL, D_KV, HEADS, D_FF = 34, 12, 5, 4, 22
SOURCE, TARGET, ROWS = 9, 7, 6
BUCKETS, MAX_DISTANCE = 8, 16
SMOOTHING, LR = 0.1, 4e-3

batch = {
    "source": tvt.Ids((ROWS, SOURCE), "(dp b) s", below=VOCAB),
    "inputs": tvt.Ids((ROWS, TARGET), "(dp b) t", below=VOCAB),
    "labels": tvt.Ids((ROWS, TARGET), "(dp b) t", below=VOCAB, ignore=-100),
}
mesh = {"dp": 2, "tp": 2}
cuts = {
    "*.q.weight": "(tp o) k",
    "*.k.weight": "(tp o) k",
    "*.v.weight": "(tp o) k",
    "*.o.weight": "o (tp k)",
    "*.wi.weight": "(tp o) k",
    "*.wo.weight": "o (tp k)",
    "lm_head.weight": "(tp v) k",
}

class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None

class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x
    @staticmethod
    def backward(ctx, grad):
        return grad, None

class Alone:
    """One device: nothing to say to anybody."""
    size, rank = 1, 0
    copy = reduce = staticmethod(lambda x: x)

class Group:
    def __init__(self, group):
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    def copy(self, x):
        return _Copy.apply(x, self.group)

    def reduce(self, x):
        return _Reduce.apply(x, self.group)

    def highest(self, x):
        x = x.detach().clone()
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x

def bucket_table(queries: int, keys: int, bidirectional: bool) -> torch.Tensor:
    def bucket(n: int) -> int:
        buckets, first = BUCKETS, 0
        if bidirectional:
            buckets //= 2
            first, n = buckets if n < 0 else 0, abs(n)
        n, exact = max(n, 0), buckets // 2
        if n >= exact:
            n = min(exact + int(math.log(n / exact) / math.log(MAX_DISTANCE / exact) * (buckets - exact)), buckets - 1)
        return first + n

    return torch.tensor([[bucket(i - j) for j in range(keys)] for i in range(queries)])

class Attention(nn.Module):
    def __init__(self, tp):
        super().__init__()
        self.tp, self.heads = tp, HEADS // tp.size
        inner = self.heads * D_KV
        self.q, self.k, self.v = (nn.Linear(D_MODEL, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, D_MODEL, bias=False)

    def forward(self, x, memory, bias=0.0):
        def heads(t):
            return t.unflatten(-1, (self.heads, D_KV)).transpose(1, 2)

        scores = heads(self.q(x)) @ heads(self.k(memory)).transpose(-1, -2) + bias
        mixed = scores.softmax(-1) @ heads(self.v(memory))
        return self.tp.reduce(self.o(mixed.transpose(1, 2).flatten(2)))

class Layer(nn.Module):
    def __init__(self, tp, cross):
        super().__init__()
        self.tp = tp
        self.norm1, self.attention = nn.RMSNorm(D_MODEL, eps=1e-6), Attention(tp)
        self.norm2, self.cross = (nn.RMSNorm(D_MODEL, eps=1e-6), Attention(tp)) if cross else (None, None)
        self.norm3 = nn.RMSNorm(D_MODEL, eps=1e-6)
        self.wi = nn.Linear(D_MODEL, D_FF // tp.size, bias=False)
        self.wo = nn.Linear(D_FF // tp.size, D_MODEL, bias=False)

    def forward(self, x, bias, memory=None):
        h = self.tp.copy(self.norm1(x))
        x = x + self.attention(h, h, bias)
        if self.cross is not None:
            x = x + self.cross(self.tp.copy(self.norm2(x)), memory)
        h = self.tp.copy(self.norm3(x))
        return x + self.tp.reduce(self.wo(F.relu(self.wi(h))))

class Stack(nn.Module):
    def __init__(self, tp, decoder):
        super().__init__()
        self.tp, self.decoder = tp, decoder
        self.relative = nn.Embedding(BUCKETS, HEADS)
        self.layers = nn.ModuleList([Layer(tp, decoder) for _ in range(2)])
        self.norm = nn.RMSNorm(D_MODEL, eps=1e-6)

    def bias(self, length):
        table = self.table(self.relative.weight).chunk(self.tp.size, dim=1)[self.tp.rank]
        bias = table[bucket_table(length, length, not self.decoder)].permute(2, 0, 1)
        if not self.decoder:
            return bias
        return bias.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))

    def table(self, table):
        return self.tp.copy(table)

    def forward(self, x, memory=None):
        bias = self.bias(x.size(1))
        for layer in self.layers:
            x = layer(x, bias, memory)
        return self.norm(x)

class OwnHeads(Stack):
    def table(self, table):
        return table

class T5(nn.Module):
    def __init__(self, tp=Alone(), stack=Stack):
        super().__init__()
        self.tp = tp
        self.shared = nn.Embedding(VOCAB, D_MODEL)
        self.encoder, self.decoder = stack(tp, decoder=False), stack(tp, decoder=True)
        self.lm_head = nn.Linear(D_MODEL, VOCAB // tp.size, bias=False)

    def forward(self, source, inputs):
        memory = self.tp.copy(self.encoder(self.shared(source)))
        return self.lm_head(self.tp.copy(self.decoder(self.shared(inputs), memory)))

def smoothed(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=SMOOTHING, reduction="sum")

def whole_mean(x, tp):
    return tp.reduce(x.sum(-1)) / VOCAB

def part_mean(x, tp):
    return x.mean(-1)

def parallel_smoothed(logits, labels, tp, mean=whole_mean):
    n = logits.size(-1)
    shifted = logits - tp.highest(logits.amax(-1))[..., None]
    logz = tp.reduce(shifted.exp().sum(-1)).log()
    here = labels - tp.rank * n
    mine = (here >= 0) & (here < n)
    picked = shifted.gather(-1, here.clamp(0, n - 1)[..., None]).squeeze(-1)
    picked = tp.reduce(torch.where(mine, picked, 0.0))
    per_token = logz - (1 - SMOOTHING) * picked - SMOOTHING * mean(shifted, tp)
    return torch.where(labels != -100, per_token, 0.0).sum()

def by_part(logits, labels, tp):
    return parallel_smoothed(logits, labels, tp, mean=part_mean)

class _GatherVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, tp):
        ctx.tp = tp
        parts = [torch.empty_like(part) for _ in range(tp.size)]
        dist.all_gather(parts, part.contiguous(), group=tp.group)
        return torch.cat(parts, dim=-1)
    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(ctx.tp.size, dim=-1)[ctx.tp.rank].contiguous(), None

def gathered_smoothed(logits, labels, tp):
    return smoothed(_GatherVocabulary.apply(logits, tp), labels)

def reference():
    model = T5()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, betas=(0.9, 0.98), eps=1e-6)
    def step(batch):
        optimizer.zero_grad()
        tokens = (batch["labels"] != -100).sum()
        loss = smoothed(model(batch["source"], batch["inputs"]), batch["labels"]) / tokens
        loss.backward()
        optimizer.step()
        return loss.detach()
    return step

def parallel(criterion, stack=Stack, tokens_of="all"):
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = grid["dp"].get_group(), Group(grid["tp"].get_group())
    model = T5(tp, stack)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, betas=(0.9, 0.98), eps=1e-6)
    def step(batch):
        optimizer.zero_grad()
        tokens = (batch["labels"] != -100).sum()
        if tokens_of == "all":
            dist.all_reduce(tokens, group=dp)
        else:
            tokens = tokens * dist.get_world_size(dp)
        loss = criterion(model(batch["source"], batch["inputs"]), batch["labels"], tp) / tokens
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=dp)
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss, group=dp)
        return loss
    return step

def right_1(rank, world):
    return parallel(parallel_smoothed)

def right_2(rank, world):
    return parallel(gathered_smoothed)

def wrong_1(rank, world):
    return parallel(by_part)

def wrong_2(rank, world):
    return parallel(parallel_smoothed, stack=OwnHeads)

def wrong_3(rank, world):
    return parallel(gathered_smoothed, tokens_of="rank")
