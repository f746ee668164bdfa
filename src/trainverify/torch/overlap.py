"""Calls that read memory while they write it: what they compute depends on the order in which a kernel goes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

# Operators element by element without PyTorch's mark for them; those over lists are so for every entry
_ELEMENTWISE: Final = frozenset(("aten::copy_", "aten::masked_fill_", "aten::fill_", "aten::where"))
MOST: Final = 1 << 28  # bytes of memory in which elements are compared one by one


@dataclass(frozen=True)
class Shown:
    """The memory of one argument, in bytes; `index` is its place in a list of tensors."""

    argument: str
    index: int | None
    storage: int
    offset: int
    dims: tuple[tuple[int, int], ...]  # size and stride, of dimensions with more than one element
    item: int

    @property
    def stop(self) -> int:
        return self.offset + sum((s - 1) * t for s, t in self.dims) + self.item

    @property
    def repeats(self) -> bool:
        """Whether several elements may be at one place in memory, as of a tensor that was expanded."""
        reach = self.item
        for size, stride in sorted(self.dims, key=lambda d: d[1]):
            if stride < reach:
                return True
            reach += (size - 1) * stride
        return False

    def same_elements(self, other: Shown) -> bool:
        return (self.offset, self.dims, self.item) == (other.offset, other.dims, other.item)

    def overlaps(self, other: Shown) -> bool:
        """Whether some byte is in both."""
        if self.storage != other.storage or self.stop <= other.offset or other.stop <= self.offset:
            return False
        first, last = min(self.offset, other.offset), max(self.stop, other.stop)
        if self.item != other.item or (self.offset - other.offset) % self.item or last - first > MOST:
            return True
        marked = np.zeros((last - first) // self.item, dtype=np.bool_)
        self._elements(marked, first)[...] = True
        return bool(other._elements(marked, first).any())

    def _elements(self, memory: np.ndarray[Any, Any], first: int) -> np.ndarray[Any, Any]:
        shape, strides = [s for s, _ in self.dims], [t // self.item for _, t in self.dims]
        return np.lib.stride_tricks.as_strided(memory[(self.offset - first) // self.item :], shape, strides)


def _shown(given: Mapping[str, Any]) -> Iterator[Shown]:
    for name, value in given.items():
        entries = enumerate(value) if isinstance(value, list | tuple) else [(None, value)]
        for i, t in entries:
            if isinstance(t, torch.Tensor) and t.layout == torch.strided and math.prod(t.shape):
                item = t.element_size()
                dims = tuple((int(s), int(d) * item) for s, d in zip(t.shape, t.stride(), strict=True) if s > 1)
                yield Shown(name, i, int(t.untyped_storage()._cdata), int(t.storage_offset()) * item, dims, item)


def _meeting(given: Mapping[str, Any]) -> Iterator[tuple[Shown, Shown]]:
    """Pairs of arguments in one memory whose first and last bytes enclose common ones."""
    storages: dict[int, list[Shown]] = {}
    for s in _shown(given):
        storages.setdefault(s.storage, []).append(s)
    for shown in storages.values():
        shown.sort(key=lambda s: s.offset)
        for i, s in enumerate(shown):
            for other in shown[i + 1 :]:
                if other.offset >= s.stop:
                    break
                yield s, other


def reads_what_it_writes(func: Any, given: Mapping[str, Any], written: Collection[str]) -> bool:
    """Whether memory that a call writes is that of another argument too. The identical view may be, where elements depend on their own
    only: `x.mul_(x)`."""
    name = str(func._schema.name)
    by_element = torch.Tag.pointwise in func.tags or name in _ELEMENTWISE or name.startswith("aten::_foreach_")
    in_place = hasattr(torch.ops.aten, f"{name.removeprefix('aten::')}_")  # then `out=` may be `self`
    for one, other in _meeting(given):
        count = (one.argument in written) + (other.argument in written)
        allowed = by_element or (in_place and {one.argument, other.argument} == {"self", "out"})
        identical = allowed and count == 1 and one.index == other.index and one.same_elements(other)
        if count and not identical and one.overlaps(other):
            return True
    return False


def writes_repeatedly(given: Mapping[str, Any], written: Collection[str]) -> bool:
    """Whether a call writes memory of which several elements are at one place: kernels refuse that."""
    return any(s.repeats for s in _shown({n: v for n, v in given.items() if n in written}))


__all__ = ["reads_what_it_writes", "writes_repeatedly"]
