"""What is replaced in Megatron-core so that it runs without accelerator, Transformer Engine and apex."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

from trainverify.frameworks.shims import PLACED, Shim
from trainverify.translate.targets import CaptureError


def _module(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


def _device(config: Any) -> None:
    import torch
    from torch.overrides import TorchFunctionMode

    def here(device: Any) -> Any:
        return torch.device("cpu") if device is not None and torch.device(device).type == "cuda" else device

    class OnProcessor(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if func is torch.Tensor.cuda:
                return args[0]
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                return func(*args).replace("torch.", "torch.cuda.", 1)
            if "device" in kwargs:
                kwargs["device"] = here(kwargs["device"])
            return func(*args, **kwargs)

    OnProcessor().__enter__()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None


def _compiler(config: Any) -> None:
    import torch

    torch.compile = lambda function, *args, **kwargs: function


def _layer_norm(config: Any) -> None:
    import torch.nn.functional as F

    apex(lambda x, weight, bias, shape, eps: F.layer_norm(x, shape, weight, bias, eps))


def apex(layer_norm: Callable[..., Any]) -> None:
    """The module that Megatron-core imports its kernel from; Megatron's own FusedLayerNorm stays as it is."""

    class FusedLayerNormAffineFunction:
        @staticmethod
        def forward(x: Any, weight: Any, bias: Any, shape: Any, eps: float) -> Any:
            return layer_norm(x, weight, bias, shape, eps)

        apply = forward

    names = ("apex", "apex.normalization", "apex.normalization.fused_layer_norm")
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    sys.modules[names[-1]].FusedLayerNormAffineFunction = FusedLayerNormAffineFunction  # type: ignore[attr-defined]


def _rms_norm(config: Any) -> None:
    import torch.nn.functional as F

    transformer_engine(lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps))


def transformer_engine(rms_norm: Callable[..., Any]) -> None:
    """Where Megatron-core would take its RMSNorm from Transformer Engine: the weight says whether its gradient is one part of a sum."""
    import torch

    class RMSNorm(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any):
            super().__init__()
            if config.layernorm_zero_centered_gamma:
                raise CaptureError("an RMSNorm with --layernorm-zero-centered-gamma needs Transformer Engine")
            self.eps = eps
            self.weight = torch.nn.Parameter(torch.ones(hidden_size))
            self.weight.sequence_parallel = config.sequence_parallel

        def forward(self, x: Any) -> Any:
            return rms_norm(x, self.weight, self.eps)

    class Norm:
        def __new__(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
            return (RMSNorm if config.normalization == "RMSNorm" else other)(config, *args, **kwargs)

    block = _module("transformer.transformer_block")
    other, block.LayerNormImpl = block.LayerNormImpl, Norm
    _module("models.backends").WrappedTorchNorm = RMSNorm


def _norm(config: Any) -> None:
    import torch

    def l2_norm(chunk: Any, flag: Any, lists: Any, each: Any, *args: Any) -> Any:
        return torch.stack([torch.norm(t) for ts in lists for t in ts]).norm().reshape(1), None

    _module("optimizer.clip_grads").l2_norm_impl = l2_norm


def _groups(config: Any) -> None:
    import torch.distributed as dist

    package = _module("optimizer")
    original = package._get_param_groups

    def own(objects: list[Any], value: Any, group: Any = None) -> None:
        objects[:] = [value] * len(objects)

    def param_groups(*args: Any, **kwargs: Any) -> Any:
        exchange, dist.all_gather_object = dist.all_gather_object, own
        try:
            return original(*args, **kwargs)
        finally:
            dist.all_gather_object = exchange

    package._get_param_groups = param_groups


def _random(config: Any) -> None:
    @contextlib.contextmanager
    def fork(self: Any, name: str = "") -> Iterator[None]:
        yield

    _module("tensor_parallel.random").CudaRNGStatesTracker.fork = fork


BEFORE: Final = (  # Megatron-core is imported
    Shim(
        "compiler",
        "torch.compile gives the function itself",
        "what compiled functions run is not seen",
        _compiler,
        stays="PyTorch does not compile while communication is noted",
        harmless="compiled code is taken to compute what its source says",
    ),
    Shim(
        "device",
        "cuda devices are the processor; current_device, synchronize, .cuda() and names of tensor types",
        "there is none",
        _device,
        stays="there is no accelerator",
        harmless=PLACED,
    ),
    Shim(
        "layer norm",
        "apex's kernel FusedLayerNormAffineFunction is torch.nn.functional.layer_norm; Megatron's FusedLayerNorm calls it",
        "without apex, Megatron-core refuses sequence parallelism",
        _layer_norm,
    ),
)
RMS_NORM: Final = Shim(
    "RMS norm",
    "RMSNorm is torch.nn.functional.rms_norm, its weight marked as Transformer Engine marks it under sequence parallelism",
    "Megatron-core has none of its own for sequence parallelism",
    _rms_norm,
)
AFTER: Final = (
    RMS_NORM,
    Shim("random numbers", "CudaRNGStatesTracker.fork does nothing", "states of the accelerator's generator", _random),
    Shim(
        "parameter groups",
        "_get_param_groups: ranks do not tell each other which kinds of parameter groups they have",
        "ranks are captured one by one; a group that a rank has only because others have it is empty",
        _groups,
    ),
    Shim(
        "norm",
        "clip_grads: the norm of norms is computed by tensors, not by numbers that Python reads",
        "fake tensors have no values; apex's kernel reads none either",
        _norm,
    ),
)
SHIMS: Final = (*BEFORE, *AFTER)
