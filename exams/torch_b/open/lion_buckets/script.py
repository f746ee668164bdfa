#!/usr/bin/env python
# char-level language model, data parallel without DDP: buckets, a fixed loss scale, Lion. Small enough to read in one sitting.
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
import trainverify.torch as tvt

V, C, S, B, STEPS = 29, 12, 9, 6, 2       # vocabulary, channels, sequence, rows, micro-batches
scale = 512.0                             # static loss scale
lr, b1, b2, wd = 1e-3, 0.9, 0.98, 0.1
bucket_cap = 400                          # elements

batch = {f"{k}{i}": tvt.Ids((B, S), "(dp b) s", below=V, ignore=-100 if k == "y" else None) for i in range(STEPS) for k in "xy"}
mesh = {"dp": 3}


class Mixer(nn.Module):
    """causal token mixing by a lower triangular matrix, then an mlp"""
    def __init__(self):
        super().__init__()
        self.ln1 = nn.LayerNorm(C)
        self.mix = nn.Parameter(torch.randn(S, S) / S)
        self.ln2 = nn.LayerNorm(C)
        self.up = nn.Linear(C, 31)
        self.down = nn.Linear(31, C)
    def forward(self, x):
        x = x + torch.tril(self.mix) @ self.ln1(x)
        return x + self.down(F.relu(self.up(self.ln2(x))).square())


class CharLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(V, C)
        self.h = nn.ModuleList([Mixer(), Mixer()])
        self.ln_f = nn.LayerNorm(C)
        self.lm_head = nn.Linear(C, V, bias=False)
    def forward(self, idx):
        x = self.wte(idx)
        for block in self.h: x = block(x)
        return self.lm_head(self.ln_f(x))


def ce_sum(logits, y):
    return F.cross_entropy(logits.view(-1, V), y.view(-1), ignore_index=-100, reduction="sum")


class Lion:
    def __init__(self, model):
        self.named = dict(model.named_parameters())
        self.m = {n: torch.zeros_like(p) for n, p in self.named.items()}
    @torch.no_grad()
    def step(self, inv_scale):
        for n, p in self.named.items():
            g, m = p.grad * inv_scale, self.m[n]
            update = torch.sign(b1 * m + (1 - b1) * g)
            if p.dim() > 1: p.mul_(1 - lr * wd)
            p.sub_(lr * update)
            m.mul_(b2).add_(g, alpha=1 - b2)
            p.grad = None


def make_buckets(model, cap=bucket_cap):
    """lists of parameters in reverse order, each of at most `cap` elements (or one parameter)"""
    out, room = [], 0
    for p in reversed(list(model.parameters())):
        if p.numel() > room:
            out.append([])
            room = cap
        out[-1].append(p)
        room -= p.numel()
    return out


def reduce_bucket(ps):
    flat = torch.cat([p.grad.flatten() for p in ps])
    dist.all_reduce(flat)
    at = 0
    for p in ps:
        p.grad.copy_(flat[at:at + p.numel()].view_as(p))
        at += p.numel()


def count(batch):
    return sum((batch[f"y{i}"] != -100).sum() for i in range(STEPS))


# ---------------------------------------------------------------------------

def reference():
    model = CharLM()
    opt = Lion(model)
    def step(batch):
        n, total = count(batch), 0.0
        for i in range(STEPS):
            loss = ce_sum(model(batch[f"x{i}"]), batch[f"y{i}"]) / n
            (loss * scale).backward()
            total += loss.detach()
        opt.step(1 / scale)
        return total
    return step


def everywhere(t):
    t = t.clone()
    dist.all_reduce(t)
    return t


def right_1(rank, world):
    model = CharLM()
    opt = Lion(model)
    buckets = make_buckets(model)
    def step(batch):
        n, total = everywhere(count(batch)), 0.0
        for i in range(STEPS):
            loss = ce_sum(model(batch[f"x{i}"]), batch[f"y{i}"]) / n
            (loss * scale).backward()
            total += loss.detach()
        for ps in buckets: reduce_bucket(ps)
        opt.step(1 / scale)
        return everywhere(total)
    return step


class Overlapped:
    """fills a flat buffer per bucket from hooks and sends it off as soon as it is full; only while `armed`"""
    def __init__(self, model):
        self.armed, self.flying = False, []
        self.buckets = make_buckets(model)
        self.todo = {}
        for b, ps in enumerate(self.buckets):
            for p in ps:
                p.register_post_accumulate_grad_hook(lambda p, b=b: self.ready(b))
    def ready(self, b):
        if not self.armed: return
        self.todo[b] = self.todo.get(b, len(self.buckets[b])) - 1
        if self.todo[b] == 0:
            flat = torch.cat([p.grad.reshape(-1) for p in self.buckets[b]])
            self.flying.append((b, flat, dist.all_reduce(flat, async_op=True)))
    def wait(self):
        for b, flat, work in self.flying:
            work.wait()
            for p, g in zip(self.buckets[b], flat.split([p.numel() for p in self.buckets[b]])):
                p.grad = g.view(p.shape)
        self.flying, self.todo, self.armed = [], {}, False


def right_2(rank, world):
    model = CharLM()
    opt = Lion(model)
    reducer = Overlapped(model)
    def step(batch):
        total = 0.0
        n = count(batch)
        dist.all_reduce(n)
        for i in range(STEPS):
            reducer.armed = i == STEPS - 1
            s = ce_sum(model(batch[f"x{i}"]), batch[f"y{i}"])
            (s * (scale / n)).backward()
            total += s.detach()
        reducer.wait()
        opt.step(1 / scale)
        dist.all_reduce(total)
        return total / n
    return step


def wrong_1(rank, world):
    model = CharLM()
    opt = Lion(model)
    buckets = make_buckets(model)
    def step(batch):
        n, total = count(batch), 0.0
        for i in range(STEPS):
            loss = ce_sum(model(batch[f"x{i}"]), batch[f"y{i}"]) / n / world
            (loss * scale).backward()
            total += loss.detach() * n * world
        for ps in buckets: reduce_bucket(ps)
        opt.step(1 / scale)
        return everywhere(total) / everywhere(n)
    return step


def wrong_2(rank, world):
    model = CharLM()
    opt = Lion(model)
    reducer = Overlapped(model)
    def step(batch):
        total = 0.0
        n = count(batch)
        dist.all_reduce(n)
        for i in range(STEPS):
            reducer.armed = True
            s = ce_sum(model(batch[f"x{i}"]), batch[f"y{i}"])
            (s * (scale / n)).backward()
            total += s.detach()
            reducer.wait()
        opt.step(1 / scale)
        dist.all_reduce(total)
        return total / n
    return step


def reduce_all(model, cap=bucket_cap):
    pending = []
    for p in model.parameters():
        pending.append(p)
        if sum(q.numel() for q in pending) >= cap:
            reduce_bucket(pending)
            pending = []


def wrong_3(rank, world):
    model = CharLM()
    opt = Lion(model)
    def step(batch):
        n, total = everywhere(count(batch)), 0.0
        for i in range(STEPS):
            loss = ce_sum(model(batch[f"x{i}"]), batch[f"y{i}"]) / n
            (loss * scale).backward()
            total += loss.detach()
        reduce_all(model)
        opt.step(1 / scale)
        return everywhere(total)
    return step
