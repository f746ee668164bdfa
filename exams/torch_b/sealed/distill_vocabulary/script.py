"""Knowledge distillation of a small causal LM. Both heads are cut over the vocabulary.

    loss = a * T^2 * KL(teacher_T || student_T) + (1 - a) * CE(student, labels),   mean over tokens with a label

Every rank runs the trunks whole (they are tiny) and owns V / world rows of the two heads, so the trunk's gradient is a share.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
import torch.nn as nn
import torch.nn.functional as F

import trainverify.torch as tvt

V, S, B, ACCUM = 27, 8, 5, 2
T, ALPHA = 2.5, 0.7

batch = {
    "ids": tvt.Ids((ACCUM, B, S), "a b s", below=V),
    "labels": tvt.Ids((ACCUM, B, S), "a b s", below=V, ignore=-100),
}
mesh = {"tp": 3}
cuts = {"*.head.weight": "(tp v) d"}


class LM(nn.Module):
    def __init__(self, d, hidden, rows=V):
        super().__init__()
        self.embed = nn.Embedding(V, d)
        self.norm = nn.LayerNorm(d)
        self.gate = nn.Linear(d, hidden)
        self.value = nn.Linear(d, hidden)
        self.back = nn.Linear(hidden, d)
        self.final = nn.LayerNorm(d)
        self.head = nn.Linear(d, rows, bias=False)

    def trunk(self, ids):
        x = self.embed(ids)
        h = self.norm(x)
        past = torch.cumsum(self.value(h), dim=1) / torch.arange(1, S + 1)[:, None]
        return self.final(x + self.back(torch.sigmoid(self.gate(h)) * past))


class Distillation(nn.Module):
    def __init__(self, rows=V):
        super().__init__()
        self.teacher = LM(16, 22, rows).requires_grad_(False)
        self.student = LM(10, 13, rows)
        self.teacher.eval()

    def logits(self, ids):
        with torch.no_grad():
            t = self.teacher.head(self.teacher.trunk(ids))
        return t, self.student.head(self.enter(self.student.trunk(ids)))

    def enter(self, x):
        return x


class _Enter(torch.autograd.Function):
    """Identity; the heads' shares of the gradient are summed on the way back."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class _SumBothWays(_Sum):
    @staticmethod
    def backward(ctx, grad):
        return _Sum.forward(ctx, grad)


class CutDistillation(Distillation):
    def enter(self, x):
        return _Enter.apply(x)


def objective(t, s, labels):
    """Sum over the tokens with a label."""
    t, s, y = t.flatten(0, -2), s.flatten(0, -2), labels.flatten()
    kl = F.kl_div(F.log_softmax(s / T, -1), F.log_softmax(t / T, -1), log_target=True, reduction="none").sum(-1)
    ce = F.cross_entropy(s, y, ignore_index=-100, reduction="none")
    return (torch.where(y != -100, kl, 0.0) * (ALPHA * T * T) + ce * (1 - ALPHA)).sum()


def log_softmax_cut(x):
    """log softmax over the vocabulary of all ranks, at this rank's part of it."""
    top = x.detach().amax(-1, keepdim=True)
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    x = x - top
    return x - _SumBothWays.apply(x.exp().sum(-1, keepdim=True)).log()


def log_softmax_mixed(x):
    return log_softmax_cut(x) if x.requires_grad else F.log_softmax(x, -1)


def label_terms(logp, y, first):
    at = y - first
    mine = (at >= 0) & (at < logp.size(-1))
    got = logp.gather(-1, torch.where(mine, at, 0)[:, None])[:, 0]
    return -torch.where(mine, got, 0.0)


def cut_objective(t, s, labels, log_softmax=log_softmax_cut, first=None):
    t, s, y = t.flatten(0, -2), s.flatten(0, -2), labels.flatten()
    if first is None:
        first = dist.get_rank() * s.size(-1)
    log_p, log_q = log_softmax(t / T), log_softmax(s / T)
    kl = _Sum.apply((log_p.exp() * (log_p - log_q)).sum(-1))
    ce = _Sum.apply(label_terms(log_softmax_cut(s), y, first))
    per_token = ALPHA * T**2 * kl + (1 - ALPHA) * ce
    return per_token.masked_fill(y == -100, 0).sum()


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        ctx.width = x.size(-1)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        return grad.narrow(-1, dist.get_rank() * ctx.width, ctx.width)


def gathered_objective(t, s, labels):
    return objective(_Whole.apply(t), _Whole.apply(s), labels)


def library_gathered_objective(t, s, labels):
    whole = torch.cat(dnn.all_gather(s.contiguous()), dim=-1)
    return objective(_Whole.apply(t), whole, labels)


def training(pair, criterion):
    optimizer = torch.optim.SGD(pair.student.parameters(), lr=0.2, momentum=0.85, weight_decay=1e-3)

    def step(batch):
        tokens = (batch["labels"] != -100).sum()
        running = 0.0
        for ids, labels in zip(batch["ids"], batch["labels"]):
            t, s = pair.logits(ids)
            part = criterion(t, s, labels) / tokens
            part.backward()
            running = running + part.detach()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": running, "tokens": tokens}

    return step


def reference():
    return training(Distillation(), objective)


def right_1(rank, world):
    return training(CutDistillation(V // world), cut_objective)


def right_2(rank, world):
    return training(CutDistillation(V // world), gathered_objective)


def wrong_1(rank, world):
    return training(CutDistillation(V // world), lambda t, s, y: cut_objective(t, s, y, log_softmax=log_softmax_mixed))


def wrong_2(rank, world):
    first = rank * (V // world + 1)
    return training(CutDistillation(V // world), lambda t, s, y: cut_objective(t, s, y, first=first))


def wrong_3(rank, world):
    return training(CutDistillation(V // world), library_gathered_objective)
