"""What is replaced in DeepSpeed so that its engine runs on fake tensors, without an accelerator."""

from __future__ import annotations

import os
from typing import Any, Final

from trainverify.frameworks.deepspeed_options import package
from trainverify.frameworks.shims import PLACEMENT, Shim

_ZERO: Final = ("deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.zero.stage3")
_LATE: Final = (
    "deepspeed.runtime.zero.partition_parameters",
    "deepspeed.runtime.zero.partitioned_param_coordinator",
    "deepspeed.runtime.zero.stage3",
)


def cpu() -> None:
    """DeepSpeed's own switch for its accelerator: the processor."""
    os.environ["DS_ACCELERATOR"] = "cpu"


def _nothing(config: Any) -> None:
    """What the step does by itself."""


def _extension(config: Any) -> None:
    package("deepspeed.comm.torch").build_shm_op = lambda: None


def _finite(config: Any) -> None:
    import torch

    def combined(norms: Any, norm_type: int = 2) -> Any:
        return torch.linalg.vector_norm(torch.stack(list(norms)), ord=norm_type)

    torch.Tensor.isinf = torch.Tensor.isnan = lambda self: torch.zeros(self.shape, dtype=torch.bool)
    for name in _ZERO:
        module = package(name)
        for function, stand_in in (
            ("is_invalid_grad_norm", lambda norm: False),
            ("mask_nan_or_inf_with_val_inplace", lambda *args, **kwargs: None),
            ("combine_grad_norm_groups", combined),
        ):
            if hasattr(module, function):
                setattr(module, function, stand_in)


def _agreement(config: Any) -> None:
    import torch.distributed as dist

    def same(ints: Any) -> None:
        dist.all_gather_object([None] * dist.get_world_size(), list(ints))

    for name in _LATE:
        package(name).assert_ints_same_as_other_ranks = same


AGREEMENT: Final = Shim(
    "agreement",
    "assert_ints_same_as_other_ranks compares the captured ranks' integers with each other",
    "a rank is captured without the others",
    _agreement,
)
EXTENSION: Final = Shim(
    "extension",
    "no C++ extension is compiled (build_shm_op)",
    "it takes minutes, and only inference communicates through it",
    _extension,
)
FINITE: Final = Shim(
    "finite",
    "gradients are not searched for infinities and NaN (isinf, isnan, is_invalid_grad_norm, mask_nan_or_inf_with_val_inplace, "
    "combine_grad_norm_groups)",
    "values are real numbers here",
    _finite,
)
DATA: Final = Shim(
    "data", "no data loader: micro-batches are rows of the batch, dealt out to ranks in turn", "the batch is symbolic", _nothing
)
ALL_SHIMS: Final = (DATA, EXTENSION, FINITE, PLACEMENT, AGREEMENT)


def shims(stage: int) -> tuple[Shim, ...]:
    """Those that a stage of ZeRO needs."""
    return tuple(s for s in ALL_SHIMS if stage == 3 or s is not AGREEMENT)
