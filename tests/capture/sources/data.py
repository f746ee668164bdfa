"""Data parallelism: DDP as it is, with accumulation under `no_sync`, and with ZeroRedundancyOptimizer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from llama import Config, Llama, trained
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def plain(c: Config, bug: str | None = None):
    model = Llama(c)
    if bug == "no ddp":
        return trained(model)  # bug: no ddp
    return trained(model, DistributedDataParallel(model))


class Sometimes(Llama):
    """With a second head that this step does not use."""

    def __init__(self, c: Config):
        super().__init__(c)
        self.other = nn.Linear(c.dim, 3)


def options(c: Config, unused: bool = False, bug: str | None = None, **more: object):
    """DDP with other options than its own; buckets of a few kilobytes, so that there are several."""
    model = Sometimes(c) if unused else Llama(c)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.01, **more)
    if bug == "sum by hook":
        wrapped.register_comm_hook(None, summed)
    if bug == "halved twice":
        model.norm.weight.register_hook(lambda grad: grad / dist.get_world_size())  # bug: halved twice
    return trained(model, wrapped)


def summed(state, bucket):
    """A hook of one's own that forgets to divide."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)  # bug: sum by hook
    return work.get_future().then(lambda done: done.value()[0])


def sometimes(c: Config):
    return trained(Sometimes(c))


def accumulated(c: Config, world: int, parts: int = 2, bug: str | None = None):
    """Several micro-batches; gradients are added up over ranks in the last one only."""
    model = Llama(c)
    wrapped = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch):
        tokens, labels = batch["tokens"].chunk(parts), batch["labels"].chunk(parts)
        total = 0
        for i in range(parts):
            last = i == parts - 1
            if world > 1:
                wrapped.require_backward_grad_sync = last and bug != "never synced"
            loss = wrapped(tokens[i], labels[i])
            if bug != "not divided":
                loss = loss / parts
            loss.backward()  # bug: not divided  # bug: never synced
            total = total + loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": total, "norm": norm}

    return step


def by_hand(c: Config, bug: str | None = None):
    """Gradients added up by the user, asynchronously."""
    model = Llama(c)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        loss = model(batch["tokens"], batch["labels"])
        loss.backward()
        works = []
        for p in model.parameters():
            op = dist.ReduceOp.SUM if bug == "sum for mean" else dist.ReduceOp.AVG
            works.append(dist.all_reduce(p.grad, op=op, async_op=True))  # bug: sum for mean
        if bug != "no wait":
            for work in works:
                work.wait()
        optimizer.step()  # bug: no wait
        optimizer.zero_grad()
        return {"loss": loss}

    return step


def sgd(c: Config):
    model = Llama(c)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        loss = model(batch["tokens"], batch["labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss}

    return step


def zero(c: Config):
    """Every rank keeps the optimizer state of some parameters, updates these, and broadcasts them."""
    model = Llama(c)
    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, weight_decay=0.1)

    def step(batch):
        loss = wrapped(batch["tokens"], batch["labels"])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "norm": norm}

    return step
