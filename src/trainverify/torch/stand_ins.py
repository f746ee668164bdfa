"""Fake tensors that stand for tensors which were there before: each pair is one memory, and no call changes what is really there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainverify.torch.private import FakeTensor, FakeTensorMode


@dataclass(frozen=True)
class Given:
    """The arguments of a call as fake tensors, and what these stand for, by id."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    originals: Mapping[int, torch.Tensor]


class StandIns:
    def __init__(self) -> None:
        self.mode: FakeTensorMode | None = None  # that fake tensors are made in
        self._made: list[torch.Tensor] = []  # kept, so that there is one for each
        self._real: dict[int, int] = {}  # storage of a fake tensor → that of the real one

    def same_mode(self, t: FakeTensor) -> bool:
        self.mode = t.fake_mode if self.mode is None else self.mode
        return t.fake_mode is self.mode

    def memory(self, key: int) -> int:
        """The storage that a storage stands for."""
        return self._real.get(key, key)

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any], note: Callable[[torch.Tensor, torch.Tensor], None]) -> Given:
        """The arguments of a call; `note` is told of every pair when it is made."""
        found: dict[int, torch.Tensor] = {}
        return Given(self._one(tuple(args), found, note), {k: self._one(v, found, note) for k, v in kwargs.items()}, found)

    def _one(self, value: Any, found: dict[int, torch.Tensor], note: Callable[[torch.Tensor, torch.Tensor], None]) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._one(v, found, note) for v in value)
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        assert self.mode is not None
        fake = self.mode.from_tensor(value)
        key = int(fake.untyped_storage()._cdata)
        if key not in self._real:
            self._made.append(fake)
            note(value, fake)
            self._real[key] = int(value.untyped_storage()._cdata)
        found[id(fake)] = value
        return fake


__all__ = ["Given", "StandIns"]
