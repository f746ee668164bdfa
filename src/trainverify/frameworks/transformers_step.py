"""Transformers' Trainer with its own options, as a reference on one device and as the ranks of a mesh.

`facts` is what the options say; `Alone` and `Ranks` are what is captured: each builds a Trainer and returns one of its update steps.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainverify.frameworks.shims import PLACEMENT, Shim
from trainverify.frameworks.transformers_options import QUIET, Said, model_config, package, parsed
from trainverify.frameworks.transformers_shims import ADDRESSES, DATA, DEVICE, OPTIONS, TRACING, WEIGHTS
from trainverify.torch.discover import Found
from trainverify.torch.inputs import Batch, Ids
from trainverify.translate.targets import CaptureError

IGNORED: Final = -100  # Transformers' label of a token without a loss


@dataclass(frozen=True)
class Facts:
    """What the options say about ranks and batch."""

    mesh: dict[str, int]
    rows: int  # of a micro-batch of one rank
    micro_batches: int
    length: int
    vocabulary: int
    versions: Mapping[str, str]
    shims: tuple[Shim, ...]

    @property
    def data(self) -> dict[str, int]:
        return {a: n for a, n in self.mesh.items() if a != "tp"}

    @property
    def ranks(self) -> int:
        """That read rows of their own."""
        count = 1
        for n in self.data.values():
            count *= n
        return count

    @property
    def batch(self) -> Batch:
        """Rows as accelerate's data loader deals them out: the first micro-batch of every rank, then the second of every rank."""
        shape = (self.rows * self.micro_batches * self.ranks, self.length)
        cut = f"({self.micro_batches} {' '.join(self.data)} b) s" if self.data else "b s"
        return {
            "input_ids": Ids(shape, cut, below=self.vocabulary),
            "labels": Ids(shape, cut, below=self.vocabulary, ignore=IGNORED),
        }

    @property
    def loss(self) -> Any:
        """Ranks report their part of the loss times their number; the Trainer logs the mean."""
        return dict.fromkeys(self.data, "avg") or "whole"


def facts(options: tuple[str, ...], world: int | None) -> Facts:
    said = parsed(options)
    sizes = {"dp_replicate": said.job.dp_replicate_size, "fsdp": said.job.fsdp_size, "tp": said.job.tp_size}
    if not said.native:
        sizes = {"fsdp" if said.accelerated else "dp": world or 1}
    mesh = {a: n for a, n in sizes.items() if n > 1}
    if not mesh:
        raise CaptureError("one rank only: say --world-size N, --tp_size N or --fsdp_size N")
    ranks = 1
    for n in mesh.values():
        ranks *= n
    if world not in (None, ranks):
        raise CaptureError(f"{world} ranks, but the sizes of parallelism are {', '.join(f'{a} {n}' for a, n in mesh.items())}")
    versions = {p: importlib.metadata.version(p) for p in ("transformers", "accelerate")}
    shims = (DATA, *((WEIGHTS,) if said.native else ()), OPTIONS, TRACING, PLACEMENT)
    if said.native or said.accelerated:
        shims += (DEVICE,)
    if said.accelerated:
        shims += (ADDRESSES,)
    t = said.training
    vocabulary = model_config(said).get_text_config().vocab_size
    return Facts(mesh, t["per_device_train_batch_size"], t["gradient_accumulation_steps"], said.job.block_size, vocabulary, versions, shims)


class Micro(list[Any]):
    """A data loader that yields what it is given."""


@dataclass
class Step:
    """One update step of the Trainer's epoch: loss, norm of the gradients, and where the parameters are."""

    trainer: Any
    model: Any
    count: int  # of micro-batches
    found: Found
    loader: Any  # of the Trainer

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        told: dict[str, Any] = {}
        t, clip = self.trainer, self.trainer._clip_grad_norm

        def clipped(model: Any) -> Any:
            told["grad_norm"] = clip(model)
            return told["grad_norm"]

        t._clip_grad_norm = clipped
        t._tr_loss = torch.tensor(0.0)
        t._total_loss_scalar, t._globalstep_last_logged = 0.0, 0
        t._run_epoch(
            model=self.model,
            epoch=0,
            train_dataloader=self.micro_batches(batch),
            steps_in_epoch=self.count,
            num_update_steps_per_epoch=1,
            trial=None,
            ignore_keys_for_eval=None,
            start_time=0.0,
            resume_from_checkpoint=None,
            epochs_trained=0,
            steps_trained_in_current_epoch=0,
        )
        return {"loss": t._tr_loss, **told}

    def micro_batches(self, batch: Mapping[str, Any]) -> Any:
        """What the data loader yields: rows of the batch one after the other."""
        rows = batch["input_ids"].shape[0] // self.count
        return Micro({n: t[i * rows : (i + 1) * rows] if self.count > 1 else t for n, t in batch.items()} for i in range(self.count))


def built(said: Said, model: Any, changes: Mapping[str, Any], data: Any = None, kind: type[Step] = Step) -> Any:
    """The step of a Trainer that is about to begin its first epoch, as `Trainer.train` brings it there."""
    transformers = package()
    arguments = transformers.TrainingArguments(**{**said.training, **QUIET, **changes})
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    trainer._train_batch_size = arguments.per_device_train_batch_size
    loader = trainer.get_train_dataloader() if data is not None else Micro()
    trainer._init_training_state(arguments.max_steps, 1, 1, None, None)
    wrapped, loader = trainer._prepare_for_training(arguments.max_steps, loader, None)
    wrapped.zero_grad()
    inner = trainer.accelerator.unwrap_model(wrapped)
    found = Found({"model": inner}, [trainer.optimizer.optimizer])
    return kind(trainer, wrapped, arguments.gradient_accumulation_steps, found, loader)


def fresh(said: Said) -> Any:
    """The model on one device, from its configuration."""
    return package().AutoModelForCausalLM.from_config(model_config(said))


def parallel(said: Said) -> Any:
    """The model as one rank has it, made parallel as `from_pretrained` does it before it loads weights."""
    transformers = package()
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config(said))]
    given, _, meshes = kind.prepare_distribute_model(distributed_config(said))
    with package("transformers.initialization").no_tie_weights():
        model = kind(model_config(said))
    model = kind.maybe_distribute_model(model, given, meshes)
    model.tie_weights(recompute_mapping=False)
    return model


def distributed_config(said: Said) -> Any:
    j = said.job
    kind = package("transformers.distributed").DistributedConfig
    return kind(tp_size=j.tp_size, fsdp_size=j.fsdp_size, dp_replicate_size=j.dp_replicate_size)


def ranked(said: Said, rank: int, world: int) -> dict[str, Any]:
    """The environment of one rank, and what changes in TrainingArguments with it."""
    os.environ |= {"WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    return {"use_cpu": not (said.native or said.accelerated)}


@dataclass(frozen=True)
class Alone:
    """The same options without parallelism: the Trainer on the whole batch at once."""

    options: tuple[str, ...]
    ranks: int

    def __call__(self) -> Step:
        said = parsed(self.options)
        for shim in (TRACING, PLACEMENT):
            shim.apply(said)
        step: Step = built(said, fresh(said), alone(said, self.ranks))
        return step


def alone(said: Said, ranks: int) -> dict[str, Any]:
    rows = said.training["per_device_train_batch_size"] * said.training["gradient_accumulation_steps"] * ranks
    whole = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 1}
    return {"use_cpu": True, "fsdp": None, "fsdp_config": None, **whole}


@dataclass(frozen=True)
class Ranks:
    """The Trainer as one rank of many."""

    options: tuple[str, ...]
    shims: tuple[Shim, ...]

    def __call__(self, rank: int, world: int) -> Step:
        said = parsed(self.options)
        changes = ranked(said, rank, world)
        for shim in self.shims:
            shim.apply(said)
        step: Step = built(said, parallel(said) if said.native else fresh(said), changes)
        return step
