import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import trainverify.torch as tvt

VOCAB, WIDTH, HEADS, SEQ, BATCH, MICRO = 29, 12, 3, 10, 8, 4
MAX_NORM = 0.5

batch = {
    "tokens": tvt.Ids((BATCH, SEQ), "b s", below=VOCAB),
    "labels": tvt.Ids((BATCH, SEQ), "b s", below=VOCAB, ignore=-100),
}
mesh = {"pp": 3}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wv = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ffn_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.w1 = nn.Linear(WIDTH, 20, bias=False)
        self.w2 = nn.Linear(20, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, 20, bias=False)

    def forward(self, x):
        b, s, _ = x.shape
        h = self.attention_norm(x)
        q, k, v = (w(h).view(b, s, HEADS, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(o.transpose(1, 2).reshape(b, s, WIDTH))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Transformer(nn.Module):
    """Parts that belong to another stage are None, or missing from `layers`; names stay those of the full model."""

    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(SEQ, WIDTH)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(3)})
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.output = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x):
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x) + self.positions(torch.arange(x.size(1)))
        for layer in self.layers.values():
            x = layer(x)
        if self.output is not None:
            x = self.output(self.norm(x))
        return x


def cut(model, rank, world):
    if rank > 0:
        model.tok_embeddings = model.positions = None
    if rank < world - 1:
        model.norm = model.output = None
    for name in list(model.layers):
        if int(name) * world // 3 != rank:
            del model.layers[name]
    return model


def make_stage(model, rank, world):
    rows = BATCH // MICRO
    hidden = torch.zeros(rows, SEQ, WIDTH)
    first, last = rank == 0, rank == world - 1
    inputs = torch.zeros(rows, SEQ, dtype=torch.long) if first else hidden.clone().requires_grad_()
    outputs = (torch.zeros(rows, SEQ, VOCAB) if last else hidden.clone()).requires_grad_()
    return PipelineStage(
        model,
        rank,
        world,
        torch.device("cpu"),
        input_args=(inputs,),
        output_args=(outputs,),
        input_grads=(None if first else hidden.clone(),),
        output_grads=(None if last else hidden.clone(),),
    )


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)


def summed(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


@torch.no_grad()
def clip_over_stages(parameters, max_norm):
    grads = [p.grad for p in parameters]
    total = sum(g.pow(2).sum() for g in grads)
    dist.all_reduce(total)
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(factor)
    return norm


def reference():
    model = Transformer()
    optimizer = build_optimizer(model)

    def step(batch):
        optimizer.zero_grad()
        tokens = (batch["labels"] != -100).sum()
        loss = summed(model(batch["tokens"]), batch["labels"]) / tokens
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return {"loss": loss.detach(), "grad_norm": norm}

    return step


def run(schedule, rank, world, batch):
    """Tokens go in at the first stage, labels at the last, whose losses come back."""
    losses = []
    if rank == 0:
        schedule.step(batch["tokens"])
    elif rank == world - 1:
        schedule.step(target=batch["labels"], losses=losses)
    else:
        schedule.step()
    return losses


def report(losses, norm):
    if not losses:
        return {"grad_norm": norm}
    return {"loss": torch.stack([l.detach() for l in losses]).sum(), "grad_norm": norm}


def right_1(rank, world):
    model = cut(Transformer(), rank, world)
    optimizer = build_optimizer(model)
    tokens = torch.ones((), dtype=torch.long)

    def loss_fn(logits, labels):
        return summed(logits, labels) / tokens

    schedule = Schedule1F1B(make_stage(model, rank, world), MICRO, loss_fn=loss_fn, scale_grads=False)

    def step(batch):
        optimizer.zero_grad()
        tokens.copy_((batch["labels"] != -100).sum())
        losses = run(schedule, rank, world, batch)
        norm = clip_over_stages(list(model.parameters()), MAX_NORM)
        optimizer.step()
        return report(losses, norm)

    return step


def right_2(rank, world):
    model = cut(Transformer(), rank, world)
    optimizer = build_optimizer(model)
    schedule = ScheduleGPipe(make_stage(model, rank, world), MICRO, loss_fn=summed, scale_grads=False)

    def step(batch):
        losses = run(schedule, rank, world, batch)
        tokens = batch["labels"].ne(-100).sum()
        for p in model.parameters():
            p.grad /= tokens
        norms = torch.stack([p.grad.norm() for p in model.parameters()])
        square = norms.norm() ** 2
        dist.all_reduce(square)
        norm = square.sqrt()
        nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, norm)
        optimizer.step()
        optimizer.zero_grad()
        return report([l / tokens for l in losses], norm)

    return step


def wrong_1(rank, world):
    model = cut(Transformer(), rank, world)
    optimizer = build_optimizer(model)

    def loss_fn(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100) / MICRO

    schedule = Schedule1F1B(make_stage(model, rank, world), MICRO, loss_fn=loss_fn, scale_grads=False)

    def step(batch):
        optimizer.zero_grad()
        losses = run(schedule, rank, world, batch)
        norm = clip_over_stages(list(model.parameters()), MAX_NORM)
        optimizer.step()
        return report(losses, norm)

    return step


def wrong_2(rank, world):
    model = cut(Transformer(), rank, world)
    optimizer = build_optimizer(model)
    tokens = torch.ones((), dtype=torch.long)

    def loss_fn(logits, labels):
        return summed(logits, labels) / tokens

    schedule = Schedule1F1B(make_stage(model, rank, world), MICRO, loss_fn=loss_fn)

    def step(batch):
        optimizer.zero_grad()
        tokens.copy_((batch["labels"] != -100).sum())
        losses = run(schedule, rank, world, batch)
        norm = clip_over_stages(list(model.parameters()), MAX_NORM)
        optimizer.step()
        return report(losses, norm)

    return step


def wrong_3(rank, world):
    model = cut(Transformer(), rank, world)
    optimizer = build_optimizer(model)
    schedule = ScheduleGPipe(make_stage(model, rank, world), MICRO, loss_fn=summed, scale_grads=False)

    def step(batch):
        losses = run(schedule, rank, world, batch)
        tokens = batch["labels"].ne(-100).sum()
        for p in model.parameters():
            p.grad /= tokens
        square = sum(p.grad.square().sum() for p in model.parameters())
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        dist.all_reduce(square)
        optimizer.step()
        optimizer.zero_grad()
        return report([l / tokens for l in losses], square.sqrt())

    return step
