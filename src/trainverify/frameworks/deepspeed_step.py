"""DeepSpeed's engine with its own configuration, as the ranks of a mesh, and the same training step of PyTorch's on one device.

`facts` is what the options say; `Alone` and `Ranks` are what is captured: each returns a training step that is not its first.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainverify.frameworks.deepspeed_layout import copies, misplaced, same_memory
from trainverify.frameworks.deepspeed_layout import optimizer as optimizer_of
from trainverify.frameworks.deepspeed_options import Said, Written, package, parsed, torch_optimizer, written
from trainverify.frameworks.deepspeed_shims import cpu, shims
from trainverify.frameworks.shims import Shim
from trainverify.torch.discover import Found, NotSupported
from trainverify.torch.inputs import Batch
from trainverify.translate.names import clean
from trainverify.translate.targets import CaptureError


@dataclass(frozen=True)
class Facts:
    """What the options say about ranks and batch."""

    world: int
    micro_batches: int
    micro_batch: Batch  # of one rank
    version: str
    shims: tuple[Shim, ...]

    @property
    def batch(self) -> Batch:
        """The first micro-batch of every rank, then the second of every rank."""
        found = {}
        for name, spec in self.micro_batch.items():
            rows, *rest = spec.shape
            dims = " ".join(f"d{i}" for i in range(len(rest)))
            shape = (rows * self.micro_batches * self.world, *rest)
            found[name] = replace(spec, shape=shape, cut=f"({self.micro_batches} dp b) {dims}".strip())
        return found


def facts(options: tuple[str, ...], world: int | None) -> Facts:
    said = parsed(options)
    if world is None:
        raise CaptureError("how many ranks? Say --world-size N")
    cpu()
    package()
    file = written(said)
    if (flat := next((n for n, spec in file.batch.items() if not spec.shape), None)) is not None:
        raise CaptureError(f"{flat} of the batch has no rows to deal out")
    return Facts(world, said.micro_batches, file.batch, importlib.metadata.version("deepspeed"), shims(said.stage))


def micro_batches(batch: Mapping[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """Rows one after the other."""
    for i in range(count):
        yield {n: t[i * (t.shape[0] // count) : (i + 1) * (t.shape[0] // count)] if count > 1 else t for n, t in batch.items()}


@dataclass
class Step:
    """A training step of the engine's: an ordinary loop over micro-batches."""

    file: Written
    engine: Any
    count: int  # of micro-batches
    found: Found | None = None

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        losses = []
        for part in micro_batches(batch, self.count):
            loss = self.file.loss(self.engine, part)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        if self.found is not None and not same_memory(self.found.copies, copies(self.engine)):
            raise NotSupported("ZeRO's flat memory is elsewhere after the step")
        norm = self.engine.get_global_grad_norm()
        return {"loss": torch.stack(losses).sum() / self.count, "grad_norm": norm.to(torch.float32)}


@dataclass
class Single:
    """The same training step of PyTorch's alone: of the whole batch, or of all micro-batches of all ranks with their mean as loss."""

    file: Written
    model: Any
    optimizer: Any
    clip: float
    count: int

    @property
    def found(self) -> Found:
        return Found({"model": self.model}, [self.optimizer])

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        total = torch.zeros(())
        for part in micro_batches(batch, self.count):
            loss = self.file.loss(self.model, part) / self.count
            loss.backward()
            total = total + loss.detach()
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if self.clip:
            norm = torch.nn.utils.clip_grad_norm_(parameters, self.clip)
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": total, "grad_norm": norm}


def warmed(step: Any, batch: Batch) -> None:
    """A step before the one that is captured: the engine prepares things in its first one."""
    import torch

    rows = step.count
    step({n: torch.zeros((spec.shape[0] * rows, *spec.shape[1:]), dtype=getattr(torch, spec.dtype)) for n, spec in batch.items()})


def started(said: Said, rank: int, world: int, kind: type[Step] = Step, real: bool = False) -> Any:
    """The engine of one rank, once there are process groups or a place to meet."""
    os.environ |= {"WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    deepspeed, file = package(), written(said)
    rows = next(iter(file.batch.values())).shape[0]
    config = {"train_micro_batch_size_per_gpu": rows, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    config |= {k: v for k, v in said.config.items() if k != "optimizer"}
    model = file.model()
    values = {clean(n): p.detach().clone() for n, p in model.named_parameters()} if real else {}
    optimizer = torch_optimizer(said, file, model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if real and (name := misplaced(copies(engine), values)) is not None:
        raise CaptureError(f"{name} does not hold what the lineage says")
    step = kind(file, engine, said.micro_batches)
    warmed(step, file.batch)
    step.found = Found({"model": engine.module}, [optimizer_of(engine)], apart=True, copies=copies(engine))
    return step


@dataclass(frozen=True)
class Alone:
    """The same model, loss and optimizer without DeepSpeed."""

    options: tuple[str, ...]
    world: int

    def __call__(self) -> Single:
        said = parsed(self.options)
        file = written(said)
        model = file.model()
        count = 1 if said.whole else said.micro_batches * self.world
        step = Single(file, model, torch_optimizer(said, file, model.parameters()), said.clip, count)
        warmed(step, file.batch)
        return step


@dataclass(frozen=True)
class Ranks:
    """The engine as one rank of many."""

    options: tuple[str, ...]
    shims: tuple[Shim, ...]

    def __call__(self, rank: int, world: int) -> Step:
        cpu()
        for shim in self.shims:
            shim.apply(None)
        step: Step = started(parsed(self.options), rank, world)
        return step
