"""Pipelines: torch.distributed.pipelining with 1F1B, and micro-batches sent by hand."""

from __future__ import annotations

import torch
import torch.distributed as dist
from llama import Config, Llama, loss_of
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B


class Part(nn.Module):
    """Some blocks of a Llama, with their names in the whole model."""

    def __init__(self, c: Config, index: int, count: int):
        super().__init__()
        whole = Llama(c)
        per = c.layers // count
        if index == 0:
            self.embedding = whole.embedding
        self.blocks = nn.ModuleDict({str(i): whole.blocks[i] for i in range(index * per, (index + 1) * per)})
        if index == count - 1:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "embedding"):
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def optimizer_of(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1, momentum=0.9)


def accumulated(c: Config, parts: int):
    model = Llama(c)
    optimizer = optimizer_of(model)

    def step(batch):
        losses = []
        for tokens, labels in zip(batch["tokens"].chunk(parts), batch["labels"].chunk(parts), strict=True):
            loss = loss_of(model.logits(tokens), labels)
            (loss / parts).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": torch.stack(losses).mean()}

    return step


def scheduled(c: Config, rank: int, world: int, parts: int = 4, chunks: int = 1, bug: str | None = None):
    """1F1B, or interleaved with several chunks of layers on a rank."""
    count = world * chunks
    layers = [rank * chunks + i if bug == "layers in a row" else i * world + rank for i in range(chunks)]
    models = [Part(c, i, count) for i in layers]  # bug: layers in a row
    rows = c.batch // parts
    stages = []
    for i, model in enumerate(models):
        index = i * world + rank
        first = torch.zeros(rows, c.sequence, dtype=torch.int64) if index == 0 else torch.zeros(rows, c.sequence, c.dim, requires_grad=True)
        last = torch.zeros(rows, c.sequence, c.vocab if index == count - 1 else c.dim, requires_grad=True)
        grads = {"input_grads": None if index == 0 else first.detach(), "output_grads": None if index == count - 1 else last.detach()}
        stages.append(PipelineStage(model, index, count, torch.device("cpu"), input_args=first, output_args=last, **grads))
    scaled = bug not in ("not divided", "summed")
    if chunks == 1:
        schedule = Schedule1F1B(stages[0], parts, loss_fn=loss_of, scale_grads=scaled)  # bug: not divided
    else:
        schedule = ScheduleInterleaved1F1B(stages, parts, loss_fn=loss_of, scale_grads=scaled)  # bug: summed
    optimizer = optimizer_of(*models)

    def step(batch):
        losses: list[torch.Tensor] = []
        given = (batch["tokens"],) if rank == 0 else ()
        last = rank == world - 1
        schedule.step(*given, target=batch["labels"] if last else None, losses=losses if last else None)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": torch.stack(losses).mean().detach()} if last else None

    return step


def by_hand(c: Config, rank: int, world: int, bug: str | None = None):
    """Two stages and plain send and recv, one pass after the other."""
    model = Part(c, rank, world)
    optimizer = optimizer_of(model)
    parts, rows = 2, c.batch // 2

    def step(batch):
        losses, kept = [], []
        for i in range(parts):
            if rank == 0:
                y = model(batch["tokens"].chunk(parts)[i])
                dist.send(y.detach(), 1)
                kept.append(y)
            else:
                x = torch.empty(rows, c.sequence, c.dim)
                dist.recv(x, 0)
                x.requires_grad_()
                which = 0 if bug == "stale labels" else i
                loss = loss_of(model(x), batch["labels"].chunk(parts)[which])  # bug: stale labels
                (loss / parts).backward()
                losses.append(loss.detach())
                kept.append(x)
                if bug == "order":
                    dist.send(x.grad, 0)  # bug: order
        for y in kept:
            if rank == 1:
                if bug != "order":
                    dist.send(y.grad, 0)
                continue
            grad = torch.empty_like(y)
            dist.recv(grad, 1)
            y.backward(grad)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": torch.stack(losses).mean()} if losses else None

    return step
