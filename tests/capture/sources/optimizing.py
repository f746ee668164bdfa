"""Optimizers with every option away from its default: for-loop alone, foreach or fused on ranks; clipping tensor by tensor or at once."""

from __future__ import annotations

import torch
from llama import Config, Llama, full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

ADAM = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.02, "amsgrad": True, "maximize": True}
SGD = {"lr": 0.03, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.02, "maximize": True}
NESTEROV = {"lr": 0.03, "momentum": 0.8, "weight_decay": 0.02, "nesterov": True}
KINDS = {
    "adam": (torch.optim.Adam, ADAM),
    "adamw": (torch.optim.AdamW, ADAM),
    "sgd": (torch.optim.SGD, SGD),
    "nesterov": (torch.optim.SGD, NESTEROV),
}


def stepped(c: Config, kind: str, how: str, world: int = 1, shard: bool = False, bug: str | None = None):
    """`how` is loop, foreach or fused."""
    model = Llama(c)
    called: nn.Module = model
    if shard:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    elif world > 1:
        called = DistributedDataParallel(model)
    build, options = KINDS[kind]
    if bug == "other decay":
        options = options | {"weight_decay": 0.01}  # bug: other decay
    if bug == "other sign":
        options = options | {"maximize": not options.get("maximize", False)}  # bug: other sign
    optimizer = build(model.parameters(), **options, foreach=how == "foreach", fused=how == "fused")

    def step(batch):
        loss = called(batch["tokens"], batch["labels"])
        loss.backward()
        limit = 0.5 if bug != "other limit" else 0.25  # bug: other limit
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit, foreach=how == "foreach")
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "norm": full(norm)}

    return step
