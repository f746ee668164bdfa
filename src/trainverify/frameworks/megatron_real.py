"""Megatron-core's training step for real at a tiny size: its files as they are installed, ranks that talk by gloo.

What stands in for an accelerator is here: the processor is the device, and Megatron's states of random numbers are those of the
processor's generator. The norm of gradients, parameter groups that ranks tell each other, and norms of layers without sequence
parallelism are Megatron's own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainverify.frameworks.job import Job, Trial, in_process
from trainverify.frameworks.megatron_options import alone, parsed
from trainverify.frameworks.megatron_shims import BEFORE, RMS_NORM, SHIMS, _module, apex, transformer_engine
from trainverify.frameworks.megatron_step import SEED, Alone, Facts, Ranks, Step, built, config_type, facts
from trainverify.frameworks.shims import Shim
from trainverify.graph.mesh import Mesh
from trainverify.translate.targets import CaptureError

SIZES: Final = {"hidden-size": 12, "num-attention-heads": 2, "vocab-size": 14, "seq-length": 6, "micro-batch-size": 3}
GIVEN: Final = {"ffn_hidden_size": 20, "kv_channels": 6, "num_query_groups": 2, "global_batch_size": None}
UNEVEN: Final = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout")


def shims_of(f: Facts) -> tuple[Shim, ...]:
    return tuple(s for s in SHIMS if s is not RMS_NORM or f.rms_norm)


def tiny(options: tuple[str, ...], f: Facts) -> tuple[str, ...]:
    """The same options with small sizes, and two ranks along every axis."""
    given = parsed(options, config_type())
    if any(given.get(n) is not None for n in UNEVEN):
        raise CaptureError("there is no tiny run of stages that are not equally long")
    virtual = given["num_layers_per_virtual_pipeline_stage"] is not None
    layers = 1 if "pp" not in f.mesh else 4 if virtual else 2
    sizes: dict[str, Any] = {**SIZES, "num-layers": layers}
    sizes |= {n.replace("_", "-"): v for n, v in GIVEN.items() if given[n] is not None and v is not None}
    if virtual:
        sizes["num-layers-per-virtual-pipeline-stage"] = 1
    for axis, name in (("tp", "tensor"), ("pp", "pipeline")):
        sizes[f"{name}-model-parallel-size"] = 2 if axis in f.mesh else 1
    micro = 2 if f.micro_batches > 1 else 1
    sizes["global-batch-size"] = micro * SIZES["micro-batch-size"] * (2 if "dp" in f.mesh else 1)
    return (*options, *(x for n, v in sizes.items() for x in (f"--{n}", str(v))))


def trial(options: tuple[str, ...], f: Facts, folder: Path) -> Trial:
    """The same parallelism at a tiny size: captured with shims, and run without them."""

    def read() -> tuple[tuple[str, ...], Facts]:
        small = tiny(options, f)
        return small, facts(small, 2 ** len(f.mesh))

    small, g = in_process(read, "megatron")
    counts = g.rows // g.micro_rows, g.micro_batches
    job = Job("Megatron-core", Mesh(g.mesh), g.batch, "whole", Alone(small, counts[0]), Ranks(small, counts[1]), shims_of(g))
    return Trial(job, RealAlone(small, counts[0], folder), RealRanks(small, counts[1], g, folder), "a tiny GPT")


# -- what stands in for an accelerator --------------------------------------------------------------------------------------


def _states() -> None:
    """States of the processor's generator, where Megatron asks for those of the accelerator."""
    import torch

    module = _module("tensor_parallel.random")
    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    torch.cuda.get_rng_state, torch.cuda.manual_seed = torch.get_rng_state, torch.manual_seed
    logging.getLogger(module.__name__).setLevel(logging.ERROR)  # it warns that a fork changes the processor's state, as it has to here
    module.model_parallel_cuda_manual_seed(SEED)


def _imported(sequence_parallel: bool) -> Any:
    for shim in BEFORE:
        if shim.name == "device":
            shim.apply(None)
    if sequence_parallel:  # for which Megatron-core wants kernels of others: here by their definitions
        apex(_layer_norm)
    found = config_type()
    if sequence_parallel:
        transformer_engine(_rms_norm)
    return found


def _layer_norm(x: Any, weight: Any, bias: Any, shape: Any, eps: float) -> Any:
    centred = x - x.mean(-1, keepdim=True)
    return centred / ((centred * centred).mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def _rms_norm(x: Any, weight: Any, eps: float) -> Any:
    return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * weight


def _begun(folder: Path, rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")
    name = "store" if world > 1 else "alone"
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / name), world), rank=rank, world_size=world)


# -- steps ------------------------------------------------------------------------------------------------------------------


def rows(f: Facts) -> dict[str, Any]:
    """A batch: ids by a formula, and tokens without a loss, not as many in every row."""
    import torch

    shape = f.rows, f.length
    place = torch.arange(f.rows * f.length).view(shape)
    return {
        "tokens": (place * place * 5 + place) % f.vocabulary,
        "position_ids": place % f.length,
        "labels": (place * place * 3 + place * 7 + 1) % f.vocabulary,
        "loss_mask": (place % 5 > place // f.length % 3).float(),
    }


class Dealt(Step):
    """A step on the rows that Megatron-LM's sampler would give this rank."""

    batch: Mapping[str, Any]

    def deal(self, whole: Mapping[str, Any]) -> None:
        import torch

        state = _module("parallel_state")
        ranks, rank, count = state.get_data_parallel_world_size(), state.get_data_parallel_rank(), self.given["micro_batch_size"]
        first = [i * count * ranks + rank * count for i in range(self.count)]
        self.batch = {n: torch.cat([t[i : i + count] for i in first]) for n, t in whole.items()}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return super().__call__(self.batch)


@dataclass(frozen=True)
class RealRanks:
    """Megatron-core as one rank of many that talk to each other."""

    options: tuple[str, ...]
    count: int
    facts: Facts
    folder: Path

    def __call__(self, rank: int, world: int) -> Dealt:
        _begun(self.folder, rank, world)
        kind = _imported(self.facts.sequence_parallel)
        step = built(parsed(self.options, kind), kind, self.count, _states)
        dealt = Dealt(step.given, step.chunks, step.optimizer, step.count, step.found)
        dealt.deal(rows(self.facts))
        return dealt


@dataclass(frozen=True)
class RealAlone:
    """The same without parallelism, on a given batch."""

    options: tuple[str, ...]
    count: int
    folder: Path

    grouped: bool = True

    def __call__(self) -> Step:
        _begun(self.folder, 0, 1)
        kind = _imported(False)
        return built(alone(parsed(self.options, kind)), kind, self.count, _states)


__all__ = ["RealAlone", "RealRanks", "shims_of", "tiny", "trial"]
