"""All that captures import of PyTorch's own, which another version may move or rename: nothing else imports such names.

`tests/capture/test_private_names.py` has a test for each, and `make versions` runs it with every supported version. What is not loaded
with PyTorch itself is imported by a function.
"""

from __future__ import annotations

from typing import Any

import torch._refs as refs
from torch._decomp import decomposition_table
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.autograd.graph import _engine_run_backward
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter


def fake_store() -> Any:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore


def fsdp_param_group() -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    return FSDPParamGroup


def pipeline_schedule() -> Any:
    from torch.distributed.pipelining.schedules import _PipelineSchedule

    return _PipelineSchedule


def strided_shard() -> Any:
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard


def tensor_random() -> Any:
    from torch.distributed.tensor import _random

    return _random


def context_parallel() -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention


def flex_attention() -> Any:
    from torch._higher_order_ops.flex_attention import math_attention

    return math_attention


__all__ = [
    "OPDEFS",
    "DataDependentOutputException",
    "DeviceContext",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "_DatasetKind",
    "_SingleProcessDataLoaderIter",
    "_device_constructors",
    "_disable_current_modes",
    "_engine_run_backward",
    "_python_dispatch",
    "_resolve_process_group",
    "context_parallel",
    "decomposition_table",
    "fake_store",
    "flex_attention",
    "fsdp_param_group",
    "pipeline_schedule",
    "refs",
    "strided_shard",
    "tensor_random",
    "tree_leaves",
    "tree_map",
    "unset_fake_temporarily",
]
