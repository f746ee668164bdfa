"""A real run in double precision: what asks for single precision gets double, so that rounding hides no difference and makes none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def _wide(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    if type(value) in (list, tuple):
        return type(value)(map(_wide, value))
    return value


class Doubled(TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double()
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("DoubleTensor", "FloatTensor")  # what the caller asked for
        return func(*_wide(args), **{k: _wide(v) for k, v in kwargs.items()})


@contextlib.contextmanager
def doubled() -> Iterator[None]:
    before, told = torch.get_default_dtype(), torch.set_default_dtype
    told(torch.float64)
    torch.set_default_dtype = lambda d: told(_wide(d))
    try:
        with Doubled():
            yield
    finally:
        torch.set_default_dtype = told
        told(before)


__all__ = ["doubled"]
