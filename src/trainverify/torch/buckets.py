"""DDP orders its buckets anew after the first iteration, as gradients became ready.

Sums over ranks of all buckets are the same in any order, so the first order stays for DDP's own reduction and for hooks of PyTorch's that
treat every element alike. Any other hook may look at buckets: for it they are ordered anew, as in a real run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from trainverify.torch.private import TorchDispatchMode, _disable_current_modes

BY_ELEMENT: Final = (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)


class _RealIntegers(TorchDispatchMode):
    """Integer tensors are real: C++ writes the order of buckets into them, sends it, and reads it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        integers = all(t.dtype == torch.int32 for t in tensors) if tensors else kwargs.get("dtype") == torch.int32
        if not integers:
            return func(*args, **kwargs)
        with _disable_current_modes():
            return func(*args, **kwargs)


def install() -> None:
    """For the rest of this process."""
    from torch import distributed

    rebuild: Callable[[Any], bool] = distributed.Reducer._rebuild_buckets
    register: Callable[..., None] = distributed._register_comm_hook
    looking: list[Any] = []  # reducers with a hook that may look at buckets

    def rebuilt(reducer: Any) -> bool:
        if not any(r is reducer for r in looking):
            return False
        with _RealIntegers():
            return rebuild(reducer)

    def registered(reducer: Any, state: object, hook: Any) -> None:
        register(reducer, state, hook)
        if not any(hook is h for h in BY_ELEMENT):
            looking.append(reducer)

    distributed.Reducer._rebuild_buckets = rebuilt
    distributed._register_comm_hook = registered
