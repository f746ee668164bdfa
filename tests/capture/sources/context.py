"""Context parallelism by hand: activations are cut along the sequence.

Ulysses: for attention, all-to-alls exchange sequence for heads. Ring: keys and values travel from rank to rank, softmax is summed online.
"""

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


FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def passed(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Hand tensors to the next rank, get those of the one before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    received = [torch.empty_like(t) for t in tensors]
    ops = [dist.P2POp(dist.isend, t, (rank + 1) % world) for t in tensors]
    ops += [dist.P2POp(dist.irecv, t, (rank - 1) % world) for t in received]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


class Ring(torch.autograd.Function):
    """Causal attention of the own positions to those of all ranks; every rank has a stretch of them."""

    @staticmethod
    def forward(ctx, q, k, v, bug):
        rank, world = dist.get_rank(), dist.get_world_size()
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        ctx.bug = bug
        own = k, v
        out = peak = weight = None
        for hop in range(world):
            source = (rank - hop) % world
            if hop:
                k, v = passed(k, v)
            if source > rank and bug != "sees the future":
                continue
            y, logsumexp = FLASH(q, k, v, 0.0, source == rank)  # bug: sees the future
            logsumexp = logsumexp.unsqueeze(-1)
            if out is None:
                out, peak, weight = y, logsumexp, torch.ones_like(logsumexp)
                continue
            top = torch.maximum(peak, logsumexp)
            keep, take = torch.exp(peak - top), torch.exp(logsumexp - top)
            if bug == "not rescaled":
                keep = torch.ones_like(keep)  # bug: not rescaled
            out, weight, peak = out * keep + y * take, weight * keep + take, top
        out = out / weight
        ctx.save_for_backward(q, *own, out, (peak + torch.log(weight)).squeeze(-1))
        return out

    @staticmethod
    def backward(ctx, grad):
        rank, world = dist.get_rank(), dist.get_world_size()
        q, k, v, out, logsumexp = ctx.saved_tensors
        grad = grad.contiguous()
        of_q, of_k, of_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for hop in range(world):
            source = (rank - hop) % world
            if hop:
                k, v, of_k, of_v = passed(k, v, of_k, of_v)
            if source > rank:
                continue
            dq, dk, dv = FLASH_BACKWARD(grad, q, k, v, out, logsumexp, 0.0, source == rank)
            of_q, of_k, of_v = of_q + dq, of_k + dk, of_v + dv
        if ctx.bug != "gradients stay":
            of_k, of_v = passed(of_k, of_v)  # one more hop brings them home
        return of_q, of_k, of_v, None  # bug: gradients stay


def ring_attention(self, x: torch.Tensor) -> torch.Tensor:
    """In the place of Attention.forward."""
    rows, length = x.shape[:2]
    start = dist.get_rank() * length
    q, k, v = (w(x).view(rows, length, -1, self.head).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (rotate(k, start), v))
    y = Ring.apply(rotate(q, start), k, v, self.bug)
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
        optimizer.zero_grad()
        return {"loss": loss}

    return step


def ulysses(c: Config, bug: str | None = None):
    return context_parallel(c, attention, bug)


def ring(c: Config, bug: str | None = None):
    return context_parallel(c, ring_attention, bug)


def context_parallel(c: Config, forward, bug: str | None):
    model = Llama(c)
    for block in model.blocks:
        block.attention.bug = bug
        block.attention.forward = forward.__get__(block.attention)
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
        optimizer.zero_grad()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        return {"loss": whole}

    return step


__all__ = ["ring", "sgd", "ulysses"]
