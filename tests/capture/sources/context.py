"""Ulysses by hand: activations are cut along the sequence; for attention, all-to-alls exchange sequence for heads."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import IGNORE, Config, Llama, rotate


class Exchange(torch.autograd.Function):
    """Heads for sequence (or back): [batch, heads, sequence, size], cut along one dimension and joined along the other."""

    @staticmethod
    def forward(ctx, x, cut, joined):
        ctx.dims = cut, joined
        pieces = [p.contiguous() for p in x.chunk(dist.get_world_size(), cut)]
        dist.all_to_all_single(stacked := torch.empty(len(pieces), *pieces[0].shape), torch.stack(pieces))
        received = list(stacked.unbind(0))
        return torch.cat(received, joined)

    @staticmethod
    def backward(ctx, grad):
        cut, joined = ctx.dims
        return Exchange.apply(grad, joined, cut), None, None


def attention(self, x: torch.Tensor) -> torch.Tensor:
    """In the place of Attention.forward: a rank has all heads of its positions, and attends with its heads to all positions."""
    rows, length = x.shape[:2]
    start = 0 if self.bug == "rope not offset" else dist.get_rank() * length
    q, k, v = (w(x).view(rows, length, -1, self.head).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
    q, k = rotate(q, start), rotate(k, start)  # bug: rope not offset
    q, k, v = (Exchange.apply(t, 1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    y = Exchange.apply(y, 2, 1)
    return self.wo(y.transpose(1, 2).reshape(rows, length, -1))


def sgd(c: Config):
    model = Llama(c)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        total = F.cross_entropy(
            model.logits(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE, reduction="sum"
        )
        loss = total / (batch["labels"] != IGNORE).sum()
        loss.backward()
        optimizer.step()
        return {"loss": loss}

    return step


def ulysses(c: Config, bug: str | None = None):
    model = Llama(c)
    for block in model.blocks:
        block.attention.bug = bug
        block.attention.forward = attention.__get__(block.attention)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        logits = model.logits(batch["tokens"]).flatten(0, 1)
        total = F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORE, reduction="sum")
        count = (batch["labels"] != IGNORE).sum()
        if bug != "own count":
            dist.all_reduce(count)
        loss = total / count  # bug: own count
        loss.backward()
        for p in model.parameters():
            if not (bug == "norm not reduced" and p is model.norm.weight):
                dist.all_reduce(p.grad)
        optimizer.step()  # bug: norm not reduced
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        return {"loss": whole}

    return step


__all__ = ["sgd", "ulysses"]
