"""torchtitan on a machine without an accelerator: how it is imported, and what is replaced in it so that it can be captured."""

from __future__ import annotations

import importlib
from typing import Any, Final

from trainverify.frameworks.shims import PLACED, Shim
from trainverify.frameworks.versions import KNOWN, TORCH
from trainverify.translate.targets import CaptureError


def trainer_module() -> Any:
    """torchtitan.trainer, imported as on a machine whose only device is the processor."""
    import torch

    torch._utils._get_available_device_type = lambda: "cpu"
    try:
        return importlib.import_module("torchtitan.trainer")
    except ImportError as error:
        missing = error.name or "torchtitan"
        hint = f"torchtitan=={KNOWN['torchtitan'][-1]} triton" if missing in ("torchtitan", "triton") else missing
        raise CaptureError(f"torchtitan needs {missing}: pip install {hint}, next to torch=={TORCH}") from error


def part(name: str) -> Any:
    return importlib.import_module(f"torchtitan.{name}")


def _device(config: Any) -> None:
    import torch

    part("tools.utils").get_local_device = lambda: torch.device("cpu")


class _Stub:
    """A component that is configured, and is not there."""

    def build(self, **kwargs: Any) -> Any:
        return self


def _data(config: Any) -> None:
    config.tokenizer = config.dataloader = _Stub()


def _graphs(config: Any) -> None:
    config.training.disable_cuda_graphs = True


def _options(config: Any) -> None:
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
    part("components.metrics").build_device_memory_monitor = _NoMemory


def _logged(config: Any) -> None:
    import torch

    trainer_module().int = lambda x: x if isinstance(x, torch.Tensor) else int(x)


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

    attention = part("models.common.attention")

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
    part("models.common.decoder").create_attention_mask = masks


def _masked(config: Any) -> None:
    """FlexAttention over what `mask_mod` says for every pair of positions, also after PyTorch rewrote it for a part of the queries."""
    import torch

    from trainverify.torch.private import context_parallel

    contexts = context_parallel()

    if config.parallelism.context_parallel_load_balancer == "ptrr":
        raise CaptureError("the load balancer ptrr is not captured: it reads the mask of a batch")
    attention, decoder = part("models.common.attention"), part("models.common.decoder")

    class Laid(torch.autograd.Function):  # type: ignore[misc]
        """Keys or values whose gradient lies in memory as they do, rows after rows, as FlexAttention's does."""

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad.transpose(1, 2).contiguous().transpose(1, 2)

    def masks(mask_mod: Any, rows: int, heads: int | None, queries: int, keys: int, **kwargs: Any) -> Any:
        made = attention.BlockMask.__new__(attention.BlockMask)
        made.mask_mod, made.seq_lengths = mask_mod, (queries, keys)
        made.kv_num_blocks = torch.empty(rows, heads or 1, 1)
        return made

    def masked(q: Any, k: Any, v: Any, *, score_mod: Any, block_mask: Any, scale: Any, enable_gqa: bool, **kwargs: Any) -> Any:
        if score_mod is not None:
            raise CaptureError("FlexAttention with a score_mod is not captured")
        k, v = Laid.apply(k), Laid.apply(v)
        if enable_gqa and k.shape[1] != q.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        nothing = torch.zeros((), dtype=torch.int64)
        seen = block_mask.mask_mod(nothing, nothing, torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :])
        scores = (q @ k.transpose(-2, -1)) * (q.shape[-1] ** -0.5 if scale is None else scale)
        return torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1) @ v, None

    attention.FlexAttention.compiled_flex_attn = staticmethod(masked)
    attention.create_attention_mask = decoder.create_attention_mask = contexts._compiled_create_block_mask = masks
    decoder.get_efficient_causal_mask_mod_for_packed_document = lambda positions: lambda b, h, q, k: torch.ones((), dtype=torch.bool)


def _schedule(config: Any) -> None:
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
    if config.parallelism.tensor_parallel_degree > 1:
        raise CaptureError("pipeline with tensor parallelism: stages that exchange DTensors are not captured")
    import torch

    pipelines = part("distributed.pipeline_parallel")
    stage = pipelines.PipelineStage
    rows, length = config.parallelism.pipeline_parallel_microbatch_size, config.training.seq_len
    dtype = getattr(torch, config.training.mixed_precision_param)
    chunked = isinstance(config.loss, part("components.loss").ChunkedLossWrapper.Config)
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


_FLEX: Final = "Flex compiles for an accelerator. Every row of the batch is one document: the mask is then the causal one"
SHIMS: Final = (
    Shim("data", "tokenizer and data loader: micro-batches are rows of the batch, one after the other", "the batch is symbolic", _data),
    Shim("options", "no validation, seed 0, nothing logged", "they need values", _options),
    Shim("device", "tools.utils names the processor as the device", "there is no accelerator", _device, "there is no accelerator", PLACED),
    Shim("memory", "components.metrics.build_device_memory_monitor measures nothing", "it asks the accelerator", _memory),
    Shim("logged", "trainer: int() of token counts that are only logged is left out", "fake tensors have no values", _logged),
    Shim("initial values", "nn.init.trunc_normal_ does nothing", "parameters stand for any values", _initial_values),
    Shim("empty", "nn.Module.to_empty of a model without DTensors makes new parameters", "fake ones cannot be swapped in place", _empty),
)
ATTENTION: Final = Shim("attention", "FlexAttention and its mask are scaled_dot_product_attention(is_causal=True)", _FLEX, _attention)
CONTEXT: Final = Shim("masks", "FlexAttention is its formula, with mask_mod for every query and key", _FLEX, _masked)
GRAPHS: Final = Shim(
    "graphs",
    "no CUDA graphs",
    "they need CUDA",
    _graphs,
    "they need CUDA (--training.disable_cuda_graphs leaves them out)",
    "a graph repeats the calls that were recorded",
)
PIPELINE: Final = (
    Shim(
        "schedule",
        "a schedule's step with micro-batches calls _step_microbatches",
        "PyTorch 2.13 has no such step",
        _schedule,
        "PyTorch 2.13 has no such step",
    ),
    Shim("stages", "stages get the shapes of hidden states", "ranks that are captured one by one cannot ask each other", _stages),
)
ALL_SHIMS: Final = (*SHIMS, ATTENTION, CONTEXT, GRAPHS, *PIPELINE)


def shims_of(config: Any, masks: bool = False) -> tuple[Shim, ...]:
    """Those that a configuration needs; with `masks`, those of attention that context parallelism needs."""
    attention = CONTEXT if masks or config.parallelism.context_parallel_degree > 1 else ATTENTION
    graphs = () if config.training.disable_cuda_graphs else (GRAPHS,)
    return (*SHIMS, attention, *graphs, *(PIPELINE if config.parallelism.pipeline_parallel_degree > 1 else ()))
