"""Gradients of parameters that tensor-parallel ranks have whole: an ordinary loop over Transformers' model, with nothing replaced.

`python tp_gradients.py save MODEL FOLDER`, then `torchrun --nproc-per-node N tp_gradients.py MICRO-BATCHES FOLDER`.
"""

from __future__ import annotations

import os
import sys

import torch
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

SIZES = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


def save(kind: str, folder: str) -> None:
    config = CONFIG_MAPPING[kind]()
    for name, value in SIZES.items():
        if hasattr(config, name):
            setattr(config, name, value)
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(config, name, None):
            setattr(config, name, getattr(config, name)[: SIZES["num_hidden_layers"]])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def gradients(micro: int, folder: str) -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    given = {"distributed_config": DistributedConfig(tp_size=world)} if world > 1 else {}
    model = AutoModelForCausalLM.from_pretrained(folder, **given).train()
    ids = torch.randint(3, 24, (4, 6), generator=torch.Generator().manual_seed(0))
    for part in ids.chunk(micro):
        (model(input_ids=part, labels=part).loss / micro).backward()
    for name, p in model.named_parameters():
        if p.grad is not None and not isinstance(p.grad, DTensor) and ("norm" in name or "act_fn" in name):
            print(f"rank {os.environ.get('RANK', '0')} of {world}, {micro} micro-batches: {name} {p.grad.norm().item():.6f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "save":
        save(*sys.argv[2:])
    else:
        gradients(int(sys.argv[1]), sys.argv[2])
