"""Fine-tuning on packed rows.

A row holds several documents one after the other. `doc` numbers the documents of a row, `pos` counts within a
document, labels are -100 where nothing is learned (prompts, the last token of a document, padding).
The loss of a step is the mean over all labelled tokens of the global batch, over micro-batches and ranks.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import trainverify.torch as tvt

VOCAB = 37
LENGTH = 14
MICRO = 2
ROWS = 4
IGNORED = -100

_shape = (MICRO, ROWS, LENGTH)
_cut = "m (dp b) s"
batch = {
    "ids": tvt.Ids(_shape, _cut, below=VOCAB),
    "doc": tvt.Ids(_shape, _cut, below=LENGTH),
    "pos": tvt.Ids(_shape, _cut, below=LENGTH),
    "labels": tvt.Ids(_shape, _cut, below=VOCAB, ignore=IGNORED),
}
mesh = {"dp": 2}


class DocumentAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
        rows, length, width = x.shape

        def split(t: torch.Tensor) -> torch.Tensor:
            return t.unflatten(-1, (self.heads, width // self.heads)).transpose(1, 2)

        y = F.scaled_dot_product_attention(
            split(self.query(x)),
            split(self.key(x)),
            split(self.value(x)),
            attn_mask=allowed,
            is_causal=allowed is None,
        )
        return self.out(y.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = DocumentAttention(width, heads)
        self.inner = nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width))

    def forward(self, x: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
        x = x + self.attention(self.first(x), allowed)
        return x + self.inner(self.second(x))


class PackedLM(nn.Module):
    def __init__(self, width: int = 15, heads: int = 3, inner: int = 26, depth: int = 2):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Layer(width, heads, inner) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def mask(self, doc: torch.Tensor) -> torch.Tensor | None:
        same = doc.unsqueeze(-1) == doc.unsqueeze(-2)
        return same.tril().unsqueeze(1)

    def forward(self, ids, doc, pos, labels):
        x = self.tokens(ids) + self.positions(pos)
        allowed = self.mask(doc)
        for layer in self.layers:
            x = layer(x, allowed)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


class FastPackedLM(PackedLM):
    """Without a mask the fused kernel is taken."""

    def mask(self, doc: torch.Tensor) -> torch.Tensor | None:
        return None


def micro_batches(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name: t[m] for name, t in batch.items()} for m in range(MICRO)]


def labelled(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (batch["labels"] != IGNORED).sum()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def reference():
    model = PackedLM()
    optimizer = make_optimizer(model)

    def step(batch):
        optimizer.zero_grad()
        tokens = labelled(batch)
        sums = [model(**micro) for micro in micro_batches(batch)]
        result = sum(sums) / tokens
        result.backward()
        optimizer.step()
        return {"loss": result, "tokens": tokens}

    return step


def with_ddp(world, model):
    optimizer = make_optimizer(model)
    wrapped = DistributedDataParallel(model)

    def step(batch):
        optimizer.zero_grad()
        tokens = labelled(batch)
        dist.all_reduce(tokens)
        total = torch.zeros(())
        for m, micro in enumerate(micro_batches(batch)):
            last = m == MICRO - 1
            with contextlib.nullcontext() if last else wrapped.no_sync():
                part = wrapped(**micro) / tokens
                (part * world).backward()
            total += part.detach()
        dist.all_reduce(total)
        optimizer.step()
        return {"loss": total, "tokens": tokens}

    return step


def right_1(rank, world):
    return with_ddp(world, PackedLM())


def right_2(rank, world):
    """No wrapper: gradients of sums are added up over micro-batches and ranks, and divided once at the end."""
    model = PackedLM()
    optimizer = make_optimizer(model)
    parameters = list(model.parameters())

    def step(batch):
        sums = [torch.zeros_like(p) for p in parameters]
        facts = torch.zeros(2)
        for micro in micro_batches(batch):
            part = model(**micro)
            for kept, new in zip(sums, torch.autograd.grad(part, parameters)):
                kept += new
            facts += torch.stack([part.detach(), labelled(micro).to(part.dtype)])
        handles = [dist.all_reduce(t, async_op=True) for t in [facts, *sums]]
        for handle in handles:
            handle.wait()
        for p, g in zip(parameters, sums):
            p.grad = g / facts[1]
        optimizer.step()
        return {"loss": facts[0] / facts[1], "tokens": facts[1]}

    return step


def wrong_1(rank, world):
    model = PackedLM()
    optimizer = make_optimizer(model)
    wrapped = DistributedDataParallel(model)

    def step(batch):
        optimizer.zero_grad()
        tokens = labelled(batch)
        facts = torch.stack([torch.zeros(()), tokens.to(torch.get_default_dtype())])
        for m, micro in enumerate(micro_batches(batch)):
            with contextlib.nullcontext() if m == MICRO - 1 else wrapped.no_sync():
                part = wrapped(**micro)
                (part / tokens).backward()
            facts[0] += part.detach()
        dist.all_reduce(facts)
        optimizer.step()
        return {"loss": facts[0] / facts[1], "tokens": facts[1]}

    return step


def wrong_2(rank, world):
    model = PackedLM()
    optimizer = make_optimizer(model)
    parameters = list(model.parameters())

    def step(batch):
        optimizer.zero_grad(set_to_none=False)
        loss, tokens = torch.zeros(()), torch.zeros(())
        for micro in micro_batches(batch):
            part = model(**micro)
            part.backward()
            loss += part.detach()
            tokens += labelled(micro)
            dist.all_reduce(tokens)
        dist.all_reduce(loss)
        for p in parameters:
            dist.all_reduce(p.grad)
            p.grad /= tokens
        optimizer.step()
        return {"loss": loss / tokens, "tokens": tokens}

    return step


def wrong_3(rank, world):
    return with_ddp(world, FastPackedLM())
