"""FSDP2 and the mean over tokens that are not ignored, of which ranks have different numbers: sums divided by the count of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import IGNORE, Config, Llama, full, optimizer_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method


def sharded(c: Config, world: int, bug: str | None = None):
    model = Llama(c)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "logits")
    for module in (*model.blocks, model):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sum of products
        if bug != "divided twice":
            module.set_gradient_divide_factor(1.0)  # summands of one mean are added up
    optimizer = optimizer_of(model)

    def step(batch):
        labels = batch["labels"].flatten()
        total = F.cross_entropy(model.logits(batch["tokens"]).flatten(0, 1), labels, ignore_index=IGNORE, reduction="sum")
        count = (labels != IGNORE).sum()
        if bug != "ranks' means":
            dist.all_reduce(count)
        loss = total / count if bug != "ranks' means" else total / count / world  # bug: ranks' means
        loss.backward()  # bug: divided twice
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        whole: torch.Tensor = loss.detach().clone()
        dist.all_reduce(whole)
        return {"loss": whole, "norm": full(norm)}

    return step
