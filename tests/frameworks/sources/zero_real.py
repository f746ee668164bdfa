"""Three steps of an ordinary loop over DeepSpeed's engine, with nothing replaced: what becomes of a layer that is not used, and the norm
of the gradients where ranks have other numbers of tokens.

`python zero_real.py 0` on one device, `torchrun --nproc-per-node N zero_real.py STAGE` through gloo.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.nn.functional as F
from zero_model import IGNORED, VOCABULARY, Model, optimizer

STEPS, ROWS = 3, 4


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The later a row, the more of its labels are ignored."""
    numbers = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(VOCABULARY, (ROWS, 5), generator=numbers) for _ in range(2))
    for i in range(ROWS):
        labels[i, : i + 1] = IGNORED
    return ids, labels


def trained(stage: int) -> None:
    torch.manual_seed(0)
    model, rank, world = Model(), int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    print(f"before: spare.weight {model.spare.weight.norm().item():.6f}") if rank == 0 else None
    used = model
    made = optimizer(model.parameters())
    if stage:
        import deepspeed

        config = {"train_micro_batch_size_per_gpu": ROWS // world, "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000}}
        used, *_ = deepspeed.initialize(model=model, optimizer=made, config={**config, "zero_allow_untested_optimizer": True})
    for step in range(STEPS):
        ids, labels = (t.chunk(world)[rank] for t in rows(step))
        loss = F.cross_entropy(used(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        if stage:
            used.backward(loss)
            used.step()
            norm = used.get_global_grad_norm()
        else:
            loss.backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            made.step()
            made.zero_grad()
        if step == 0 and rank == 0:
            print(f"first norm of gradients: {float(norm):.6f}")
    if stage == 3:
        with deepspeed.zero.GatheredParameters([model.spare.weight]):
            weight = model.spare.weight.detach().clone()
    else:
        weight = model.spare.weight.detach()
    if rank == 0:
        print(f"after {STEPS} steps, stage {stage}, {world} ranks: spare.weight {weight.norm().item():.6f}", flush=True)


if __name__ == "__main__":
    trained(int(sys.argv[1]))
