"""Megatron-style tensor parallelism, written out: ranks 0 1 | 2 3 are two replicas of two tensor-parallel ranks.
Losses are summed per token and divided by the number of labelled tokens of the whole global batch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import trainverify.torch as tvt

VOCAB, HIDDEN, HEADS, FFN, LAYERS = 30, 12, 4, 20, 2
MICRO, BATCH, SEQ, DP, TP = 3, 8, 7, 2, 2

batch = {
    "tokens": tvt.Ids((MICRO, BATCH, SEQ), "m (dp b) s", below=VOCAB),
    "labels": tvt.Ids((MICRO, BATCH, SEQ), "m (dp b) s", below=VOCAB, ignore=-100),
}
mesh = {"dp": DP, "tp": TP}
cuts = {name: "(tp o) i" for name in ("embed.weight", "head.weight", "*.q.weight", "*.k.weight", "*.v.weight", "*.up.weight")}
cuts |= {"*.up.bias": "(tp o)", "*.proj.weight": "o (tp i)", "*.down.weight": "o (tp i)"}


class Groups:
    def __init__(self, rank=0, world=1):
        self.tp_size = TP if world > 1 else 1
        self.tp_rank = rank % self.tp_size
        self.tp = self.dp = None
        if world > 1:
            self.tp = [dist.new_group([d * TP + t for t in range(TP)]) for d in range(DP)][rank // TP]
            self.dp = [dist.new_group([d * TP + t for d in range(DP)]) for t in range(TP)][rank % TP]


class CopyToTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def copied(x, g):
    return x if g.tp is None else CopyToTensorParallel.apply(x, g.tp)


def reduced(x, g):
    return x if g.tp is None else ReduceFromTensorParallel.apply(x, g.tp)


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, g):
        peak = logits.max(dim=-1).values
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=g.tp)
        logits = logits - peak.unsqueeze(-1)
        first = g.tp_rank * logits.size(-1)
        elsewhere = (target < first) | (target >= first + logits.size(-1))
        local = (target - first).masked_fill(elsewhere, 0)
        chosen = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        dist.all_reduce(chosen, group=g.tp)
        exps = logits.exp()
        total = exps.sum(dim=-1)
        dist.all_reduce(total, group=g.tp)
        ctx.save_for_backward(exps / total.unsqueeze(-1), elsewhere, local)
        return total.log() - chosen

    @staticmethod
    def backward(ctx, grad):
        softmax, elsewhere, local = ctx.saved_tensors
        d = softmax.scatter_add(-1, local.unsqueeze(-1), -(~elsewhere).to(softmax.dtype).unsqueeze(-1))
        return d * grad.unsqueeze(-1), None, None


class VocabParallelCrossEntropyFused(VocabParallelCrossEntropy):
    @staticmethod
    def backward(ctx, grad):
        softmax, elsewhere, local = ctx.saved_tensors
        d = softmax.scatter_add(-1, local.unsqueeze(-1), -torch.ones_like(local, dtype=softmax.dtype).unsqueeze(-1))
        return d * grad.unsqueeze(-1), None, None


class Attention(nn.Module):
    def __init__(self, g):
        super().__init__()
        self.g, self.heads = g, HEADS // g.tp_size
        width = HIDDEN // g.tp_size
        self.q, self.k, self.v = (nn.Linear(HIDDEN, width, bias=False) for _ in range(3))
        self.proj = nn.Linear(width, HIDDEN, bias=False)

    def forward(self, x):
        x = copied(x, self.g)
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return reduced(self.proj(mixed.transpose(1, 2).reshape(b, s, -1)), self.g)


class MLP(nn.Module):
    def __init__(self, g):
        super().__init__()
        self.g = g
        self.up = nn.Linear(HIDDEN, FFN // g.tp_size)
        self.down = nn.Linear(FFN // g.tp_size, HIDDEN, bias=False)

    def forward(self, x):
        return reduced(self.down(F.gelu(self.up(copied(x, self.g)))), self.g)


class LocalMLP(MLP):
    def forward(self, x):
        return reduced(self.down(F.gelu(self.up(x))), self.g)


class Block(nn.Module):
    def __init__(self, g, mlp=MLP):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.mlp = Attention(g), mlp(g)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, g, mlp=MLP, cross_entropy=VocabParallelCrossEntropy):
        super().__init__()
        self.g, self.cross_entropy = g, cross_entropy
        self.embed = nn.Embedding(VOCAB // g.tp_size, HIDDEN)
        self.layers = nn.ModuleList(Block(g, mlp) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB // g.tp_size, bias=False)

    def embedded(self, tokens):
        if self.g.tp is None:
            return self.embed(tokens)
        first, rows = self.g.tp_rank * self.embed.num_embeddings, self.embed.num_embeddings
        outside = (tokens < first) | (tokens >= first + rows)
        found = self.embed((tokens - first).masked_fill(outside, 0))
        return reduced(found.masked_fill(outside.unsqueeze(-1), 0.0), self.g)

    def losses(self, x, labels):
        logits, safe = self.head(copied(x, self.g)), labels.clamp(min=0)
        if self.g.tp is None:
            return F.cross_entropy(logits.flatten(0, 1), safe.flatten(), reduction="none").view_as(labels)
        return self.cross_entropy.apply(logits, safe, self.g)

    def forward(self, tokens, labels):
        x = self.embedded(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.losses(self.norm(x), labels).masked_fill(labels == -100, 0.0).sum()


class AutogradEntropyModel(Model):
    def losses(self, x, labels):
        g, logits = self.g, self.head(copied(x, self.g))
        peak = logits.detach().amax(-1, keepdim=True)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=g.tp)
        total = reduced((logits - peak).exp().sum(-1), g)
        names = torch.arange(logits.size(-1)) + g.tp_rank * logits.size(-1)
        mine = (labels.clamp(min=0).unsqueeze(-1) == names).to(logits.dtype)
        target = reduced((logits * mine).sum(-1), g)
        return total.log() + peak.squeeze(-1) - target


def is_cut(name):
    return name in ("embed.weight", "head.weight") or name.split(".")[-2] in ("q", "k", "v", "up", "proj", "down")


def cut_norm(model, g):
    whole = sum(p.grad.square().sum() for n, p in model.named_parameters() if not is_cut(n))
    parts = sum(p.grad.square().sum() for n, p in model.named_parameters() if is_cut(n))
    if g.tp is not None:
        dist.all_reduce(parts, group=g.tp)
    return (whole + parts).sqrt()


def flat_norm(model, g):
    squares = sum(p.grad.square().sum() for p in model.parameters())
    dist.all_reduce(squares, group=g.tp)
    return squares.sqrt()


def trainer(rank=0, world=1, kind=Model, norm_of=cut_norm, max_norm=0.05, **parts):
    g = Groups(rank, world)
    model = kind(g, **parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    def step(batch):
        optimizer.zero_grad()
        count = (batch["labels"] != -100).sum().to(torch.get_default_dtype())
        if g.dp is not None:
            dist.all_reduce(count, group=g.dp)
        reported = 0.0
        for tokens, labels in zip(batch["tokens"], batch["labels"]):
            loss = model(tokens, labels) / count
            loss.backward()
            reported = reported + loss.detach()
        if g.dp is not None:
            for p in model.parameters():
                dist.all_reduce(p.grad, group=g.dp)
            dist.all_reduce(reported, group=g.dp)
        scale = torch.clamp(max_norm / (norm_of(model, g) + 1e-6), max=1.0)
        torch._foreach_mul_([p.grad for p in model.parameters()], scale)
        optimizer.step()
        return reported

    return step


def reference():
    return trainer()


def right_1(rank, world):
    return trainer(rank, world)


def right_2(rank, world):
    return trainer(rank, world, AutogradEntropyModel)


def wrong_1(rank, world):
    return trainer(rank, world, mlp=LocalMLP)


def wrong_2(rank, world):
    return trainer(rank, world, cross_entropy=VocabParallelCrossEntropyFused)


def wrong_3(rank, world):
    return trainer(rank, world, norm_of=flat_norm)
