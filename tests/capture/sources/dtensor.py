"""DTensor and FSDP2: tensor and sequence parallelism by a plan, parameters cut over data-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import IGNORE, Config, Llama, full, loss_of, optimizer_of, trained
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint


def sequence_parallel(model: Llama, tp) -> None:
    for block in model.blocks:
        gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        scatter = RowwiseParallel(output_layouts=Shard(1))
        plan = {
            "norm1": SequenceParallel(),
            "norm2": SequenceParallel(),
            "attention": PrepareModuleInput(**gather),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": scatter,
            "mlp": PrepareModuleInput(**gather),
            "mlp.w1": ColwiseParallel(),
            "mlp.w3": ColwiseParallel(),
            "mlp.w2": scatter,
        }
        parallelize_module(block, tp, plan)
    top = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, tp, top)


def tensor_parallel(c: Config, world: int, vocabulary: bool = False, loss_cut: bool = False, bug: str | None = None):
    """Tensor parallel only; the loss over a cut vocabulary with `loss_cut`."""
    model = Llama(c)
    tp = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    for block in model.blocks:
        column, row = ColwiseParallel(), RowwiseParallel()
        plan = {f"attention.{w}": column for w in ("wq", "wk", "wv")} | {"attention.wo": row}
        plan |= {"mlp.w1": column, "mlp.w3": column, "mlp.w2": row}
        parallelize_module(block, tp, plan)
    kept = {"use_local_output": False} if loss_cut else {"output_layouts": Replicate()}
    top = {"head": ColwiseParallel(**({"output_layouts": Shard(-1)} if loss_cut else {}), **kept)}
    if vocabulary:
        top["embedding"] = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, tp, top)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step(batch):
        if loss_cut:
            with loss_parallel():
                logits = model.logits(batch["tokens"])
                if bug == "count all":
                    total = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE, reduction="sum")
                    loss = total / batch["labels"].numel()  # bug: count all
                else:
                    loss = loss_of(logits, batch["labels"])
                if bug == "divided by ranks":
                    loss = loss / world  # bug: divided by ranks
                loss.backward()
        else:
            loss = model(batch["tokens"], batch["labels"])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": full(loss)}

    return step


def adamw(c: Config):
    model = Llama(c)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step(batch):
        loss = model(batch["tokens"], batch["labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss}

    return step


def both(
    c: Config,
    dp: int,
    tp: int,
    shard: bool = True,
    bf16: bool = False,
    recompute: bool = False,
    reshard: bool | None = None,
    bug: str | None = None,
):
    """FSDP2 over dp, tensor and sequence parallel over tp."""
    model = Llama(c)
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    if tp > 1:
        sequence_parallel(model, mesh["tp"])
    if recompute:
        for block in model.blocks:
            block.forward = recomputed(block.forward)
    if shard:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=reshard)
        if bug == "halved":
            model.blocks[1].register_full_backward_pre_hook(lambda module, grads: tuple(g / 2 for g in grads))  # bug: halved
        if bug == "sum for mean":
            for module in (*model.blocks, model):
                module.set_gradient_divide_factor(1.0)  # bug: sum for mean
    return trained(model)


def per_token(c: Config, world: int, bug: str | None = None):
    """FSDP2 and a mean over all tokens that count, of which ranks have unequal numbers."""
    model = Llama(c)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    register_fsdp_forward_method(model, "logits")
    optimizer = optimizer_of(model)

    def step(batch):
        logits, labels = model.logits(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
        count = (labels != IGNORE).sum()
        if bug == "mean of means":
            loss = F.cross_entropy(logits, labels, ignore_index=IGNORE) / world  # bug: mean of means
        else:
            if bug == "average count":
                count = count.float()
                dist.all_reduce(count, op=dist.ReduceOp.AVG)  # bug: average count
            else:
                dist.all_reduce(count)
            loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") / count
        scale = 1 if bug == "averaged again" else world  # FSDP2 averages over ranks
        (loss * scale).backward()  # bug: averaged again
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "norm": full(norm)}

    return step


def recomputed(forward):
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def hybrid(c: Config, replicas: int, shards: int):
    """HSDP: parameters cut over `shards`, copies over `replicas`."""
    model = Llama(c)
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicas", "dp"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model)


__all__ = ["adamw", "both", "hybrid", "optimizer_of", "per_token", "tensor_parallel"]
