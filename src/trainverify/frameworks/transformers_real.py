"""Transformers' training step for real at a tiny size: its files as they are installed, its data loader, ranks that talk by gloo.

What stands in for an accelerator is the shim `device`, and is all that is replaced.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from trainverify.frameworks.job import Job, Trial, in_process
from trainverify.frameworks.torchtitan_real import free_port
from trainverify.frameworks.transformers_options import Said, model_config, package, parsed
from trainverify.frameworks.transformers_shims import DEVICE
from trainverify.frameworks.transformers_step import IGNORED, Alone, Ranks, Step, alone, built, distributed_config, facts, fresh, ranked
from trainverify.graph.mesh import Mesh

SIZES: Final = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
}
LENGTH: Final = 7  # of a row
MOST: Final = 2  # rows of a micro-batch, micro-batches and ranks along an axis


def tiny(options: tuple[str, ...], axes: tuple[str, ...]) -> tuple[str, ...]:
    """The same model and parallelism, two ranks along every axis and few numbers."""
    said = parsed(options)
    given = dict(pair.split("=", 1) for pair in (said.job.config_overrides or "").split(",") if pair)
    config = model_config(said)
    sizes = {**given, **{n: str(v) for n, v in SIZES.items() if hasattr(config, n)}}
    t = said.training
    few = {n: min(MOST, t[n]) for n in ("per_device_train_batch_size", "gradient_accumulation_steps")}
    degrees = {f"{a}_size": MOST for a in axes if said.native}
    changed = {"config_overrides": ",".join(f"{n}={v}" for n, v in sizes.items()), "block_size": LENGTH, **few, **degrees}
    return (*options, *(word for n, v in changed.items() for word in (f"--{n}", str(v))))


def trial(options: tuple[str, ...], axes: tuple[str, ...], folder: Path) -> Trial:
    """The same parallelism at a tiny size: captured with shims, and run without them."""
    world = MOST ** len(axes)
    small = in_process(lambda: tiny(options, axes), "transformers")
    f = in_process(lambda: facts(small, world), "transformers")
    in_process(lambda: saved(small, folder), "transformers")
    job = Job("transformers", Mesh(f.mesh), f.batch, f.loss, Alone(small, f.ranks), Ranks(small, f.shims), f.shims)
    return Trial(job, RealAlone(small, f.ranks), RealRanks(small, folder, free_port(), f.batch["input_ids"].shape[0]), "a tiny model")


def saved(options: tuple[str, ...], folder: Path) -> None:
    """A checkpoint for `from_pretrained`."""
    fresh(parsed(options)).save_pretrained(folder / "model")


@dataclass
class Loaded(Step):
    """A step on what the Trainer's data loader yields, which is noted."""

    seen: list[Mapping[str, Any]] = field(default_factory=list)

    def micro_batches(self, batch: Mapping[str, Any]) -> Any:
        read = self.trainer.get_batch_samples

        def noted(*args: Any, **kwargs: Any) -> Any:
            found = read(*args, **kwargs)
            self.seen += [{n: t.clone() for n, t in b.items()} for b in found[0]]
            return found

        self.trainer.get_batch_samples = noted
        return self.loader

    @property
    def batch(self) -> dict[str, Any]:
        """All micro-batches, one after the other."""
        import torch

        return {n: torch.cat([b[n] for b in self.seen]) for n in ("input_ids", "labels")}


def rows(count: int, length: int, vocabulary: int) -> list[dict[str, list[int]]]:
    """Random rows, more of whose labels are ignored the later they come."""
    rng = random.Random(0)
    made = []
    for i in range(count):
        ids = [rng.randrange(vocabulary) for _ in range(length)]
        made.append({"input_ids": ids, "labels": [IGNORED if j <= i % length else t for j, t in enumerate(ids)]})
    return made


@dataclass(frozen=True)
class RealRanks:
    """The Trainer as one rank of many that talk to each other."""

    options: tuple[str, ...]
    folder: Path
    port: int
    count: int  # rows that all ranks read

    def __call__(self, rank: int, world: int) -> Loaded:
        said = parsed(self.options)
        changes = ranked(said, rank, world)
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(self.port)}
        if not changes["use_cpu"]:
            DEVICE.apply(said)
        data = rows(self.count, said.job.block_size, model_config(said).vocab_size)
        step: Loaded = built(said, self.loaded(said), changes, data, Loaded)
        return step

    def loaded(self, said: Said) -> Any:
        given = {"distributed_config": distributed_config(said)} if said.native else {}
        return package().AutoModelForCausalLM.from_pretrained(self.folder / "model", **given)


@dataclass(frozen=True)
class RealAlone:
    """The same without parallelism, on a given batch."""

    options: tuple[str, ...]
    ranks: int

    def __call__(self) -> Step:
        said = parsed(self.options)
        step: Step = built(said, fresh(said), alone(said, self.ranks))
        return step


__all__ = ["RealAlone", "RealRanks", "trial"]
