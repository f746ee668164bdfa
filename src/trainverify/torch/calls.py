"""Communication as PyTorch's dispatcher sees it: a log of what a process that runs for real asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from trainverify.torch.agreement import Call, call_of
from trainverify.torch.bodies import python_body
from trainverify.torch.private import FakeTensor, TorchDispatchMode, _resolve_process_group

KINDS: Final = {
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::broadcast_": "broadcast",
    "c10d::reduce_": "reduce",
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::alltoall_": "all_to_all",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::scatter_": "scatter",
    "c10d::gather_": "gather",
    "c10d::send": "send",
    "c10d::recv_": "recv",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_reduce_coalesced": "all_reduce",
    "_c10d_functional::all_reduce_coalesced_": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::all_gather_into_tensor_out": "all_gather",
    "_c10d_functional::all_gather_into_tensor_coalesced": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor_out": "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor_coalesced": "reduce_scatter",
    "_c10d_functional::all_to_all_single": "all_to_all",
    "_c10d_functional::broadcast": "broadcast",
    "_c10d_functional::broadcast_": "broadcast",
}
_GIVEN: Final = ("input_tensors", "input_tensor", "input", "inputs", "tensors", "self")
_GROUP: Final = ("process_group", "group_name")
_NO_CALL: Final = ("c10d::barrier", "c10d::check_for_nan")
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)  # the last of those in which DTensor computes shapes


def kind_of(name: str) -> str:
    """What an op of PyTorch's does; one that is not known is its own kind, which no other equals."""
    return KINDS.get(name, name)


class Calls(TorchDispatchMode):
    """Notes all communication, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(t not in _PLAIN for t in types):
            return NotImplemented  # a subclass unwraps itself, and comes back with plain tensors
        if (body := python_body(func)) is not None:
            with self:
                return body(*args, **(kwargs or {}))
        name = str(func._schema.name)
        talks = func.namespace in ("c10d", "_c10d_functional") and name not in _NO_CALL
        if talks and any(a.name in _GROUP for a in func._schema.arguments):
            self.made += _calls(func, name, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _calls(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Call]:
    """What an op asks for: of several tensors that are gathered or scattered at once, one call for each."""
    given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    group = next(given[n] for n in _GROUP if n in given)
    if isinstance(group, str):
        group = _resolve_process_group(group)
    elif not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    members = dist.get_process_group_ranks(group)
    kind = kind_of(name)
    if kind == "send":
        kind = f"send to {members[given['dst']]}"
    elif kind == "recv":
        kind = f"recv from {members[given['src']]}"
    found = next((given[n] for n in _GIVEN if n in given), ())
    tensors = list(_flat(found))
    apart = name.endswith("_tensor_coalesced_")
    return [call_of(kind, members, ts) for ts in ([[t] for t in tensors] if apart else [tensors])]


def _flat(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _flat(v)
