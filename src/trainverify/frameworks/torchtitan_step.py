"""torchtitan's Trainer with its own options, as a reference on one device and as the ranks of a mesh.

`facts` is what the options say; `Alone` and `Ranks` are what is captured: each builds a Trainer and returns its `train_step`.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainverify.frameworks.torchtitan_shims import part, shims_of, trainer_module
from trainverify.frameworks.torchtitan_tiny import Tiny
from trainverify.torch.discover import Found
from trainverify.torch.inputs import Batch, Ids
from trainverify.translate.targets import CaptureError

IGNORED: Final = -100  # torchtitan's label of a token without a loss
BACKEND: Final = "partial_dtensor"
DATA_AXES: Final = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class Facts:
    """What the options say about ranks and batch."""

    mesh: dict[str, int]
    rows: int
    length: int
    vocabulary: int
    version: str
    backend: str  # of SPMD, as configured
    shims: tuple[str, ...] = ()  # by name

    @property
    def data(self) -> dict[str, int]:
        return {a: self.mesh[a] for a in DATA_AXES if a in self.mesh}

    @property
    def batch(self) -> Batch:
        """Rows are cut over the data-parallel axes, as `annotate_input_spmd_types` declares."""
        rows = f"({' '.join(self.data)} b)" if self.data else "b"
        shape = (self.rows, self.length)
        return {
            "input": Ids(shape, f"{rows} s", below=self.vocabulary),
            "positions": Ids(shape, f"{rows} s", below=self.length),
            "labels": Ids(shape, f"{rows} s", below=self.vocabulary, ignore=IGNORED),
        }

    @property
    def loss(self) -> Any:
        """A rank's loss is its sum over the number of tokens of all: ranks with other rows, or parts of rows, add up."""
        return dict.fromkeys([*self.data, *(a for a in ("cp",) if a in self.mesh)], "sum") or "whole"


def configured(options: tuple[str, ...], tiny: Tiny | None = None) -> Any:
    """torchtitan's configuration from its own command line, or a tiny one with the same parallelism."""
    trainer_module()
    manager = part("config.manager").ConfigManager()
    try:
        config = manager.parse_args(list(options))
    except (ValueError, ImportError) as error:
        raise CaptureError(str(error)) from error
    except SystemExit as error:
        raise CaptureError("torchtitan refuses these options; it says why above") from error
    if tiny is not None:
        tiny.apply(config)
    return config


def facts(options: tuple[str, ...], world: int | None, tiny: Tiny | None = None) -> Facts:
    config = configured(options, tiny)
    p = config.parallelism
    given = {
        "pp": p.pipeline_parallel_degree,
        "dp_replicate": p.data_parallel_replicate_degree,
        "dp_shard": p.data_parallel_shard_degree,
        "cp": p.context_parallel_degree,
        "tp": p.tensor_parallel_degree,
    }
    rest = math.prod(n for axis, n in given.items() if axis != "dp_shard")
    if given["dp_shard"] < 0:
        given["dp_shard"] = (world or rest) // rest
    ranks = rest * given["dp_shard"]
    if world not in (None, ranks):
        raise CaptureError(f"{world} ranks, but the degrees of parallelism are {', '.join(f'{a} {n}' for a, n in given.items())}")
    if ranks == 1:
        raise CaptureError("one rank only: say --world-size N, or degrees of parallelism")
    if p.expert_parallel_degree > 1:
        raise CaptureError("expert parallelism is not captured")
    t = config.training
    rows = t.global_batch_size if t.global_batch_size > 0 else t.local_batch_size * given["dp_replicate"] * given["dp_shard"]
    mesh = {a: n for a, n in given.items() if n > 1}
    version = importlib.metadata.version("torchtitan")
    names = tuple(s.name for s in shims_of(config))
    return Facts(mesh, rows, t.seq_len, config.model_spec.model.vocab_size, version, p.spmd_backend, names)


@dataclass
class Step:
    """One call of `Trainer.train_step`: loss, norm of the gradients, and where the parameters are."""

    trainer: Any
    rows: int  # of a micro-batch
    found: Found

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        utils = part("distributed.utils")
        told: dict[str, Any] = {}
        run, clip = self.trainer.forward_backward_step, utils.clip_grad_norm_

        def forward_backward(**kwargs: Any) -> Any:
            loss = run(**kwargs)
            if not self.trainer.parallel_dims.pp_enabled or self.trainer.pp_has_last_stage:
                told["loss"] = loss.detach() if "loss" not in told else told["loss"] + loss.detach()
            return loss

        def clipped(*args: Any, **kwargs: Any) -> Any:
            told["grad_norm"] = clip(*args, **kwargs)
            return told["grad_norm"]

        self.trainer.forward_backward_step, utils.clip_grad_norm_ = forward_backward, clipped
        self.trainer.train_step(self.micro_batches(batch))
        return told

    def micro_batches(self, batch: Mapping[str, Any]) -> Iterator[Any]:
        """What the data loader yields: rows of the batch one after the other."""
        total = batch["input"].shape[0]
        for i in range(0, total, self.rows):
            part = {n: t[i : i + self.rows] if total != self.rows else t for n, t in batch.items()}
            yield {"input": part["input"], "positions": part["positions"]}, part["labels"]


def _captured(config: Any, masks: bool = False) -> Step:
    for shim in shims_of(config, masks):
        shim.apply(config)
    return built(config)


def built(config: Any) -> Step:
    """The step of a Trainer that torchtitan builds."""
    trainer = trainer_module().Trainer(config)
    trainer.step = 2  # as after some steps; those between are not logged
    modules = dict(zip([f"model{i}" if i else "model" for i in range(len(trainer.model_parts))], trainer.model_parts, strict=True))
    t, p = config.training, config.parallelism
    rows = p.pipeline_parallel_microbatch_size if p.pipeline_parallel_degree > 1 else t.local_batch_size
    return Step(trainer, rows, Found(modules, list(trainer.optimizers)))


def alone(options: tuple[str, ...], rows: int, tiny: Tiny | None = None) -> Any:
    """The same configuration without parallelism, for the whole batch."""
    os.environ |= {"NGPU": "1", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    config = configured(options, tiny)
    p = config.parallelism
    p.spmd_backend = BACKEND
    if p.context_parallel_degree > 1 and hasattr(config.loss, "num_chunks"):
        config.loss.num_chunks = 1  # chunks of whole rows are not those of ranks' parts of rows
    p.data_parallel_replicate_degree = p.data_parallel_shard_degree = p.tensor_parallel_degree = 1
    p.pipeline_parallel_degree = p.context_parallel_degree = p.expert_parallel_degree = 1
    config.training.local_batch_size = config.training.global_batch_size = rows
    config.checkpoint.create_seed_checkpoint = True  # torchtitan's way to a model that no parallelism has touched
    return config


def ranked(options: tuple[str, ...], rank: int, world: int, tiny: Tiny | None = None) -> Any:
    """The configuration in the process of one rank."""
    os.environ |= {"NGPU": str(world), "WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": "0"}
    config = configured(options, tiny)
    config.parallelism.spmd_backend = BACKEND
    return config


@dataclass(frozen=True)
class Alone:
    """The same options without parallelism: torchtitan's model, loss, clipping and optimizer on the whole batch."""

    options: tuple[str, ...]
    rows: int
    tiny: Tiny | None = None

    def __call__(self) -> Step:
        config = alone(self.options, self.rows, self.tiny)
        config.comm.mode = "fake_backend"
        return _captured(config, configured(self.options, self.tiny).parallelism.context_parallel_degree > 1)


@dataclass(frozen=True)
class Ranks:
    """torchtitan as one rank of many."""

    options: tuple[str, ...]
    tiny: Tiny | None = None

    def __call__(self, rank: int, world: int) -> Step:
        return _captured(ranked(self.options, rank, world, self.tiny))
