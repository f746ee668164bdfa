"""torchtitan: its Trainer with its own options, as a reference on one device and as the ranks of a mesh.

`job` reads the options once; `Alone` and `Ranks` are what is captured: each builds a Trainer and returns its `train_step`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainverify.frameworks.job import Job, in_process
from trainverify.frameworks.shims import Shim
from trainverify.frameworks.versions import KNOWN, TORCH, remark
from trainverify.graph.mesh import Mesh
from trainverify.torch.discover import Found
from trainverify.torch.inputs import Batch, Ids
from trainverify.translate.targets import CaptureError

IGNORED: Final = -100  # torchtitan's label of a token without a loss
BACKEND: Final = "partial_dtensor"
DATA_AXES: Final = ("dp_replicate", "dp_shard")


def _trainer() -> Any:
    """torchtitan.trainer, imported as on a machine whose only device is the processor."""
    import torch

    torch._utils._get_available_device_type = lambda: "cpu"
    try:
        return importlib.import_module("torchtitan.trainer")
    except ImportError as error:
        missing = error.name or "torchtitan"
        hint = f"torchtitan=={KNOWN['torchtitan'][-1]} triton" if missing in ("torchtitan", "triton") else missing
        raise CaptureError(f"torchtitan needs {missing}: pip install {hint}, next to torch=={TORCH}") from error


def _module(name: str) -> Any:
    return importlib.import_module(f"torchtitan.{name}")


# -- shims ----------------------------------------------------------------------------------------------------------------


def _device(config: Any) -> None:
    import torch

    _module("tools.utils").get_local_device = lambda: torch.device("cpu")


class _Stub:
    """A component that is configured, and is not there."""

    def build(self, **kwargs: Any) -> Any:
        return self


def _data(config: Any) -> None:
    config.tokenizer = config.dataloader = _Stub()


def _options(config: Any) -> None:
    config.training.disable_cuda_graphs = True
    config.validator.enable = False
    config.debug.seed = 0
    config.metrics.log_freq = 1 << 30


class _NoMemory:
    device_name = "cpu"
    max_reserved_gib = max_reserved_pct = max_active_gib = max_active_pct = 0.0
    num_alloc_retries = num_ooms = 0

    def get_peak_stats(self) -> _NoMemory:
        return self

    def reset_peak_stats(self) -> None:
        pass


def _memory(config: Any) -> None:
    _module("components.metrics").build_device_memory_monitor = _NoMemory


def _logged(config: Any) -> None:
    import torch

    _trainer().int = lambda x: x if isinstance(x, torch.Tensor) else int(x)


def _initial_values(config: Any) -> None:
    import torch

    torch.nn.init._no_grad_trunc_normal_ = lambda tensor, *args, **kwargs: tensor


def _empty(config: Any) -> None:
    import torch
    from torch.distributed.tensor import DTensor

    original = torch.nn.Module.to_empty

    def to_empty(self: Any, *, device: Any, recurse: bool = True) -> Any:
        if any(isinstance(p, DTensor) for p in self.parameters()):
            return original(self, device=device, recurse=recurse)
        made: dict[int, Any] = {}
        for module in self.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    module._parameters[name] = made.setdefault(
                        id(p), torch.nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
                    )
            for name, b in module._buffers.items():
                if b is not None:
                    module._buffers[name] = made.setdefault(id(b), torch.empty_like(b, device=device))
        return self

    torch.nn.Module.to_empty = to_empty


def _attention(config: Any) -> None:
    import torch.nn.functional as F

    attention = _module("models.common.attention")

    def causal(q: Any, k: Any, v: Any, *, score_mod: Any, scale: Any, enable_gqa: bool, **kwargs: Any) -> Any:
        if score_mod is not None:
            raise CaptureError("FlexAttention with a score_mod is not captured")
        if enable_gqa and k.shape[1] != q.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=True), None

    def masks(*args: Any, **kwargs: Any) -> Any:
        return attention.BlockMask.__new__(attention.BlockMask)

    attention.FlexAttention.compiled_flex_attn = staticmethod(causal)
    attention.create_attention_mask = masks
    _module("models.common.decoder").create_attention_mask = masks


def _pipeline(config: Any) -> None:
    if config.parallelism.pipeline_parallel_degree == 1:
        return
    if config.parallelism.tensor_parallel_degree > 1:
        raise CaptureError("pipeline with tensor parallelism: stages that exchange DTensors are not captured")
    _stages(config)
    from torch.distributed.pipelining import schedules

    def step(original: Any) -> Any:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if "kwarg_mbs" not in kwargs:
                return original(self, *args, **kwargs)
            for stage in getattr(self, "_stages", None) or [self._stage]:
                stage.has_backward = self._has_backward
                stage.clear_runtime_states()
            return self._step_microbatches(*args, **kwargs)

        return run

    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        kind.step = step(kind.step)


def _stages(config: Any) -> None:
    """Stages that know the shapes of what they exchange: hidden states of a micro-batch."""
    import torch

    pipelines = _module("distributed.pipeline_parallel")
    stage = pipelines.PipelineStage
    rows, length = config.parallelism.pipeline_parallel_microbatch_size, config.training.seq_len
    dtype = getattr(torch, config.training.mixed_precision_param)
    chunked = isinstance(config.loss, _module("components.loss").ChunkedLossWrapper.Config)
    model = config.model_spec.model

    def hidden(width: int) -> Any:
        return torch.empty(rows, length, width, dtype=dtype, requires_grad=True)

    def made(part: Any, index: int, count: int, device: Any, **kwargs: Any) -> Any:
        last = index == count - 1
        given = torch.empty(rows, length, dtype=torch.int64) if index == 0 else hidden(model.dim)
        result = hidden(model.vocab_size if last and not chunked else model.dim)
        grads = {"input_grads": None if index == 0 else given.detach(), "output_grads": None if last else result.detach()}
        return stage(part, index, count, device, input_args=given, output_args=result, **grads, **kwargs)

    pipelines.PipelineStage = made


SHIMS: Final = (
    Shim("data", "tokenizer and data loader: micro-batches are rows of the batch, one after the other", "the batch is symbolic", _data),
    Shim("options", "no CUDA graphs, no validation, seed 0, nothing logged", "they need an accelerator, or values", _options),
    Shim("device", "tools.utils.get_local_device gives the processor", "there is no accelerator", _device),
    Shim("memory", "components.metrics.build_device_memory_monitor measures nothing", "it asks the accelerator", _memory),
    Shim("logged", "trainer: int() of token counts that are only logged is left out", "fake tensors have no values", _logged),
    Shim("initial values", "nn.init.trunc_normal_ does nothing", "parameters stand for any values", _initial_values),
    Shim("empty", "nn.Module.to_empty of a model without DTensors makes new parameters", "fake ones cannot be swapped in place", _empty),
    Shim(
        "attention",
        "FlexAttention and its mask are scaled_dot_product_attention(is_causal=True)",
        "Flex compiles for an accelerator. Every row of the batch is one document: the mask is then the causal one",
        _attention,
    ),
    Shim(
        "pipeline",
        "a schedule's step with micro-batches calls _step_microbatches; stages get the shapes of hidden states",
        "PyTorch 2.13 has no such step, and ranks that are captured one by one cannot ask each other for shapes",
        _pipeline,
    ),
)


# -- a job ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """What the options say about ranks and batch."""

    mesh: dict[str, int]
    rows: int
    length: int
    vocabulary: int
    version: str
    backend: str  # of SPMD, as configured

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
        """A rank's loss is its sum over the number of tokens of all: ranks with other rows add up."""
        return dict.fromkeys(self.data, "sum") or "whole"


def configured(options: tuple[str, ...]) -> Any:
    """torchtitan's configuration from its own command line."""
    _trainer()
    manager = _module("config.manager").ConfigManager()
    try:
        return manager.parse_args(list(options))
    except (ValueError, ImportError) as error:
        raise CaptureError(str(error)) from error
    except SystemExit as error:
        raise CaptureError("torchtitan refuses these options; it says why above") from error


def with_module(options: tuple[str, ...]) -> tuple[str, ...]:
    """The options with `--module`, which the name of most configurations begins with."""
    given = [o.split("=", 1) for o in options]
    if any(o[0] == "--module" for o in given):
        return options
    _trainer()
    name = next(
        (o[1] if len(o) > 1 else (given[i + 1][0] if i + 1 < len(given) else "") for i, o in enumerate(given) if o[0] == "--config"), ""
    )
    found = [m for m in _module("models")._supported_models if name.startswith(f"{m}_")]
    if not found:
        raise CaptureError("say --module and --config as torchtitan has them: --module llama3 --config llama3_8b")
    return ("--module", max(found, key=len), *options)


def facts(options: tuple[str, ...], world: int | None) -> Facts:
    config = configured(options)
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
    if given["cp"] > 1:
        raise CaptureError("context parallelism is not captured: its attention is FlexAttention over masks that ranks cut")
    if p.expert_parallel_degree > 1:
        raise CaptureError("expert parallelism is not captured")
    t = config.training
    rows = t.global_batch_size if t.global_batch_size > 0 else t.local_batch_size * given["dp_replicate"] * given["dp_shard"]
    mesh = {a: n for a, n in given.items() if n > 1}
    version = importlib.metadata.version("torchtitan")
    return Facts(mesh, rows, t.seq_len, config.model_spec.model.vocab_size, version, p.spmd_backend)


def job(options: tuple[str, ...], world: int | None = None) -> Job:
    """What `trainverify torchtitan` verifies."""
    options = with_module(options)
    f = in_process(lambda: facts(options, world), "torchtitan")
    shims = SHIMS if "pp" in f.mesh else tuple(s for s in SHIMS if s.name != "pipeline")
    other: tuple[str, ...] = () if f.backend == BACKEND else (f"its SPMD backend {BACKEND}, not {f.backend}",)
    other += remark("torchtitan", f.version)
    return Job(f"torchtitan {f.version}", Mesh(f.mesh), f.batch, f.loss, Alone(options, f.rows), Ranks(options), shims, other)


@dataclass
class Step:
    """One call of `Trainer.train_step`: loss, norm of the gradients, and where the parameters are."""

    trainer: Any
    rows: int  # of a micro-batch
    found: Found

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        utils = _module("distributed.utils")
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


def _built(config: Any) -> Step:
    for shim in SHIMS:
        shim.apply(config)
    trainer = _trainer().Trainer(config)
    trainer.step = 2  # as after some steps: none of them is logged
    modules = dict(zip([f"model{i}" if i else "model" for i in range(len(trainer.model_parts))], trainer.model_parts, strict=True))
    t, p = config.training, config.parallelism
    rows = p.pipeline_parallel_microbatch_size if p.pipeline_parallel_degree > 1 else t.local_batch_size
    return Step(trainer, rows, Found(modules, list(trainer.optimizers)))


@dataclass(frozen=True)
class Alone:
    """The same options without parallelism: torchtitan's model, loss, clipping and optimizer on the whole batch."""

    options: tuple[str, ...]
    rows: int

    def __call__(self) -> Step:
        os.environ |= {"NGPU": "1", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
        config = configured(self.options)
        config.comm.mode = "fake_backend"
        p = config.parallelism
        p.spmd_backend = BACKEND
        p.data_parallel_replicate_degree = p.data_parallel_shard_degree = p.tensor_parallel_degree = 1
        p.pipeline_parallel_degree = p.context_parallel_degree = p.expert_parallel_degree = 1
        config.training.local_batch_size = config.training.global_batch_size = self.rows
        config.checkpoint.create_seed_checkpoint = True  # torchtitan's way to a model that no parallelism has touched
        return _built(config)


@dataclass(frozen=True)
class Ranks:
    """torchtitan as one rank of many."""

    options: tuple[str, ...]

    def __call__(self, rank: int, world: int) -> Step:
        os.environ |= {"NGPU": str(world), "WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": "0"}
        config = configured(self.options)
        config.parallelism.spmd_backend = BACKEND
        return _built(config)
