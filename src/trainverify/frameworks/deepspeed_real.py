"""DeepSpeed's training step for real at a tiny size: its files as they are installed, nothing replaced, ranks that talk by gloo."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from trainverify.frameworks.deepspeed_options import MODEL, parsed, written
from trainverify.frameworks.deepspeed_shims import cpu
from trainverify.frameworks.deepspeed_step import Alone, Ranks, Step, facts, started
from trainverify.frameworks.job import Job, Trial, in_process
from trainverify.frameworks.torchtitan_real import free_port
from trainverify.graph.mesh import Mesh
from trainverify.torch.inputs import Batch, Flags, Ids

MOST: Final = 2  # ranks and micro-batches


def tiny(options: tuple[str, ...]) -> tuple[str, ...]:
    """The small model with the same configuration."""
    said = parsed(options)
    config = {k: v for k, v in said.config.items() if k not in ("optimizer", "train_batch_size", "train_micro_batch_size_per_gpu")}
    config["gradient_accumulation_steps"] = min(MOST, said.micro_batches)
    return (MODEL, "--deepspeed_config", json.dumps(config), *(() if said.whole else ("--mean-of-micro-batches",)))


def trial(options: tuple[str, ...], folder: Path) -> Trial:
    """The same configuration at a tiny size: captured with shims, and run without them."""
    small = in_process(lambda: tiny(options), "deepspeed")
    f = in_process(lambda: facts(small, MOST), "deepspeed")
    job = Job("deepspeed", Mesh({"dp": MOST}), f.batch, {"dp": "avg"}, Alone(small, MOST), Ranks(small, f.shims), f.shims)
    return Trial(job, Alone(small, MOST), RealRanks(small, free_port()), "a tiny model")


@dataclass
class Drawn(Step):
    """A step on rows of its own, which are noted."""

    batch: dict[str, Any] = field(default_factory=dict)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return super().__call__(batch or self.batch)


def drawn(batch: Batch, count: int, rank: int) -> dict[str, Any]:
    """Random micro-batches of a rank."""
    import torch

    torch.manual_seed(rank + 1)
    found = {}
    for name, spec in batch.items():
        shape = (spec.shape[0] * count, *spec.shape[1:])
        if isinstance(spec, Ids):
            found[name] = torch.randint(spec.below, shape, dtype=getattr(torch, spec.dtype))
        else:
            found[name] = torch.rand(shape) < 0.5 if isinstance(spec, Flags) else torch.randn(shape)
    return found


@dataclass(frozen=True)
class RealRanks:
    """The engine as one rank of many that talk to each other."""

    options: tuple[str, ...]
    port: int

    def __call__(self, rank: int, world: int) -> Drawn:
        import torch

        cpu()
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(self.port)}
        said = parsed(self.options)
        torch.manual_seed(0)  # DeepSpeed broadcasts the parameters of rank 0: here they are those of every rank
        step: Drawn = started(said, rank, world, Drawn, real=True)
        step.batch = drawn(written(said).batch, step.count, rank)
        return step


__all__ = ["RealRanks", "trial"]
