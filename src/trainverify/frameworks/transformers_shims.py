"""What is replaced in Transformers and accelerate so that their Trainer runs on fake tensors, without an accelerator."""

from __future__ import annotations

import itertools
from typing import Any, Final

from trainverify.frameworks.shims import PLACED, PLACEMENT, Shim
from trainverify.frameworks.transformers_options import package


def device(config: Any) -> None:
    kinds = package("accelerate.utils").DistributedType
    package("accelerate.state").PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", kinds.MULTI_GPU)


def _nothing(config: Any) -> None:
    """What the step does by itself."""


def _tracing(config: Any) -> None:
    package("transformers.utils.import_utils").is_fake_tensor = lambda tensor: False


def _addresses(config: Any) -> None:
    import torch

    count = itertools.count(1)
    made: dict[int, int] = {}
    kept = []

    def address(self: Any) -> int:
        key = int(self.untyped_storage()._cdata)
        if key not in made:
            kept.append(self.untyped_storage())
            made[key] = next(count) << 20
        return int(made[key] + self.storage_offset() * self.element_size())

    torch.Tensor.data_ptr = address


DATA: Final = Shim(
    "data", "no data loader: micro-batches are rows of the batch, dealt out to ranks in turn", "the batch is symbolic", _nothing
)
WEIGHTS: Final = Shim(
    "weights",
    "the model is built from its configuration and made parallel as from_pretrained does it; no weights are loaded",
    "parameters stand for any values",
    _nothing,
)
OPTIONS: Final = Shim(
    "options",
    "nothing is logged, saved or evaluated; training has 8 steps (for the schedule of rates); "
    "losses are not searched for NaN (logging_nan_inf_filter)",
    "they need values",
    _nothing,
)
DEVICE: Final = Shim(
    "device",
    "accelerate's PartialState takes the processor and gloo for an accelerator",
    "there is no accelerator, and accelerate refuses other parallelism than DDP without one",
    device,
    stays="there is no accelerator",
    harmless=PLACED,
)
TRACING: Final = Shim(
    "tracing", "is_fake_tensor says no", "Transformers makes other masks for fake tensors than for those of a training run", _tracing
)
ADDRESSES: Final = Shim(
    "addresses",
    "data_ptr numbers the memory of tensors",
    "accelerate finds the optimizer's parameters by it, and fake tensors have no memory",
    _addresses,
)
ALL_SHIMS: Final = (DATA, WEIGHTS, OPTIONS, TRACING, PLACEMENT, DEVICE, ADDRESSES)
