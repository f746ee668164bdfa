# Context parallelism: every rank has a slice of every sequence; keys and values travel around a ring.
#
# Two forms of the same attention:
#   RingAttention      blocks are joined by their log-sum-exp, the backward pass is a second trip around the ring
#   running_attention  online softmax with a running maximum; autograd sends gradients back hop by hop

import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import trainverify.torch as tvt

B, S, V, D, H = 5, 12, 26, 14, 2

batch = {
    "ids": tvt.Ids((B, S), "b (cp s)", below=V),
    "labels": tvt.Ids((B, S), "b (cp s)", below=V, ignore=-100),
}
mesh = {"cp": 3}


def shift(x, rank, world, by=1):
    """Hands x to the neighbour `by` further, returns what the neighbour on the other side had."""
    x = x.contiguous()
    got = torch.empty_like(x)
    to, source = (rank + by) % world, (rank - by) % world
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, to), dist.P2POp(dist.irecv, got, source)])
    for w in works:
        w.wait()
    return got


def block_scores(q, k, diagonal):
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if diagonal:
        above = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
        s = s.masked_fill(above, float("-inf"))
    return s


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, rank, world):
        kv = torch.stack([k, v])
        out = lse = None
        for hop in range(world):
            owner = (rank - hop) % world
            if owner <= rank:
                s = block_scores(q, kv[0], owner == rank)
                block_lse = torch.logsumexp(s, dim=-1, keepdim=True)
                block_out = torch.exp(s - block_lse) @ kv[1]
                if out is None:
                    out, lse = block_out, block_lse
                else:
                    joined = torch.logaddexp(lse, block_lse)
                    out = out * torch.exp(lse - joined) + block_out * torch.exp(block_lse - joined)
                    lse = joined
            if hop < world - 1:
                kv = shift(kv, rank, world)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.where = rank, world
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        rank, world = ctx.where
        scale = 1 / math.sqrt(q.shape[-1])
        delta = (dout * out).sum(-1, keepdim=True)
        dq = torch.zeros_like(q)
        kv, dkv = torch.stack([k, v]), torch.zeros((2, *k.shape))
        for hop in range(world):
            owner = (rank - hop) % world
            if owner <= rank:
                p = torch.exp(block_scores(q, kv[0], owner == rank) - lse)
                ds = p * (dout @ kv[1].transpose(-1, -2) - delta) * scale
                dq = dq + ds @ kv[0]
                dkv = dkv + torch.stack([ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout])
            if hop < world - 1:
                kv = shift(kv, rank, world)
            dkv = shift(dkv, rank, world)
        return dq, dkv[0], dkv[1], None, None


class RingAttentionShortTrip(RingAttention):
    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        rank, world = ctx.where
        scale = 1 / math.sqrt(q.shape[-1])
        delta = (dout * out).sum(-1, keepdim=True)
        dq = torch.zeros_like(q)
        kv, dkv = torch.stack([k, v]), torch.zeros((2, *k.shape))
        for hop in range(world):
            owner = (rank - hop) % world
            if owner <= rank:
                p = torch.exp(block_scores(q, kv[0], owner == rank) - lse)
                ds = p * (dout @ kv[1].transpose(-1, -2) - delta) * scale
                dq = dq + ds @ kv[0]
                dkv = dkv + torch.stack([ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout])
            if hop < world - 1:
                kv, dkv = shift(kv, rank, world), shift(dkv, rank, world)
        return dq, dkv[0], dkv[1], None, None


class Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rank, world):
        ctx.where = rank, world
        return shift(x, rank, world)

    @staticmethod
    def backward(ctx, grad):
        return shift(grad, *ctx.where, by=-1), None, None


def came_from(rank, hop, world):
    return (rank - hop) % world


def going_to(rank, hop, world):
    return (rank + hop) % world


def renewed(den, num, fade, p, v):
    return den * fade + p.sum(-1, keepdim=True), num * fade + p @ v


def renewed_numerator(den, num, fade, p, v):
    return den + p.sum(-1, keepdim=True), num * fade + p @ v


def running_attention(q, k, v, rank, world, owner_of=came_from, renew=renewed):
    n = q.shape[-2]
    rows = rank * n + torch.arange(n).unsqueeze(1)
    kv = torch.stack([k, v])
    peak = torch.full((*q.shape[:-1], 1), -1e30)
    den, num = torch.zeros_like(peak), torch.zeros_like(q)
    for hop in range(world):
        columns = owner_of(rank, hop, world) * n + torch.arange(n)
        s = q @ kv[0].transpose(-1, -2) * q.shape[-1] ** -0.5
        s = s.masked_fill(columns > rows, float("-inf"))
        higher = torch.maximum(peak, s.detach().amax(-1, keepdim=True))
        den, num = renew(den, num, torch.exp(peak - higher), torch.exp(s - higher), kv[1])
        peak = higher
        if hop + 1 < world:
            kv = Shift.apply(kv, rank, world)
    return num / den


def local_attention(q, k, v, rank, world):
    return torch.softmax(block_scores(q, k, True), dim=-1) @ v


class Layer(nn.Module):
    def __init__(self, attend, rank, world):
        super().__init__()
        self.attend, self.rank, self.world = attend, rank, world
        self.pre = nn.LayerNorm(D)
        self.wq, self.wk = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.wv, self.wo = nn.Linear(D, D), nn.Linear(D, D)
        self.ffn = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 19), nn.SiLU(), nn.Linear(19, D))

    def forward(self, x):
        b, s, _ = x.shape
        y = self.pre(x)
        q, k, v = [w(y).reshape(b, s, H, D // H).transpose(1, 2) for w in (self.wq, self.wk, self.wv)]
        a = self.attend(q, k, v, self.rank, self.world)
        x = x + self.wo(a.transpose(1, 2).reshape(b, s, D))
        return x + self.ffn(x)


class Net(nn.Module):
    def __init__(self, attend, rank, world):
        super().__init__()
        self.first = rank * (S // world)
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(S, D)
        self.layers = nn.Sequential(*[Layer(attend, rank, world) for _ in range(2)])
        self.fin, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, ids):
        at = torch.arange(ids.shape[1]) + self.first
        return self.head(self.fin(self.layers(self.tok(ids) + self.pos(at))))


def build(attend, rank=0, world=1):
    net = Net(attend, rank, world)
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.05, eps=1e-6)

    def total(t):
        if world > 1:
            dist.all_reduce(t)
        return t

    def step(batch):
        labels = batch["labels"]
        count = total((labels != -100).sum())
        logits = net(batch["ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / count
        opt.zero_grad()
        loss.backward()
        for p in net.parameters():
            total(p.grad)
        nn.utils.clip_grad_norm_(net.parameters(), 0.7)
        opt.step()
        return total(loss.detach().clone())

    return step


def reference():
    return build(local_attention)


def right_1(rank, world):
    return build(RingAttention.apply, rank, world)


def right_2(rank, world):
    return build(running_attention, rank, world)


def wrong_1(rank, world):
    return build(lambda *a: running_attention(*a, owner_of=going_to), rank, world)


def wrong_2(rank, world):
    return build(lambda *a: running_attention(*a, renew=renewed_numerator), rank, world)


def wrong_3(rank, world):
    return build(RingAttentionShortTrip.apply, rank, world)
