"""Real arguments for a call that was made with fake ones: float64 numbers with ties, zeros and negatives, positions within bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

WIDE: Final = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}
_SHORT: Final = (torch.float32, torch.float16, torch.bfloat16)
_POSITIONS: Final = frozenset(("index", "indices", "target"))  # arguments that count from the front of some dimension
_DIVISORS: Final = frozenset(("total_weight",))  # 0 only where nothing counts
_APART: Final = frozenset(("aten::topk",))  # of equal elements they may choose any
KEPT: Final = 64  # sizes up to this one are kept
GRID: Final = (-1.0, 0.0, 0.5, 1.0)


def wide(value: Any) -> Any:
    """A dtype as it is computed in here: that of float64 for every float."""
    return torch.float64 if value in _SHORT else WIDE.get(value, value)


class Drawing:
    """Arguments of one call: `fixed` are the values of tensors that are known, by number of the tensor."""

    def __init__(self, name: str, seed: int, positive: bool, sizes: Mapping[int, int], below: int, ignored: int | None):
        self.name, self.positive, self.sizes, self.below, self.ignored = name, positive, sizes, below, ignored
        self.rng = np.random.default_rng(seed)

    def shape(self, shape: Any) -> tuple[int, ...]:
        return tuple(self.sizes.get(int(s), int(s)) for s in shape)

    def tensor(self, argument: str, shape: tuple[int, ...], dtype: torch.dtype, nonnegative: bool) -> torch.Tensor:
        dtype, rng = wide(dtype), self.rng
        if dtype == torch.bool:
            return torch.from_numpy(np.asarray(rng.random(shape) < 0.6))
        if not dtype.is_floating_point and not dtype.is_complex:
            if argument in _POSITIONS:
                made = rng.integers(0, self.below, shape)
                if self.ignored is not None and made.size > 1:
                    made = np.where(rng.random(shape) < 0.3, self.ignored, made)
            else:
                made = rng.integers(1 if self.positive else 0 if nonnegative else -2, 5, shape)
            return torch.from_numpy(np.asarray(made, dtype=np.int64)).to(dtype)
        if dtype.is_complex:
            return torch.complex(*(torch.from_numpy(np.asarray(self._reals(shape))) for _ in range(2)))
        made = self._reals(shape)
        return torch.from_numpy(np.asarray(np.abs(made) + 0.125 if argument in _DIVISORS else made))

    def _reals(self, shape: tuple[int, ...]) -> Any:
        rng = self.rng
        if self.name in _APART:
            return (rng.permutation(math.prod(shape)).reshape(shape) - 1.0) / 7
        made = rng.uniform(-2.0, 2.0, shape)
        made = np.where(rng.random(shape) < 0.3, rng.choice(GRID, shape), made)
        return np.abs(made) + 0.125 if self.positive else made

    def plain(self, value: Any, literal: Callable[[float], Any]) -> Any:
        """An argument that is no tensor: the number that a float stands for, sizes as they are here, every device this one."""
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, int):
            return self.sizes.get(value, value)
        if isinstance(value, float):
            return float(literal(value)) if math.isfinite(value) else value
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, list | tuple):
            return type(value)(self.plain(v, literal) for v in value)
        return wide(value) if isinstance(value, torch.dtype) else value


Elements = Callable[[Mapping[int, int]], int]  # how many there are with other sizes


def smaller(sizes: Iterable[int], sums: Mapping[int, Sequence[int]], elements: Elements, most: int) -> dict[int, int]:
    """Small sizes for large ones, so that there are at most so many elements: as few of them as possible, the largest first.

    Different ones stay different and in order; what is a sum of others, or a small multiple of one, stays so."""
    large = sorted({s for s in sizes if s > KEPT})
    found: dict[int, int] = {}
    for multiple, i in ((m, i) for m in (KEPT, 1) for i in range(len(large), -1, -1)):
        found = _replaced(large[i:], sums, multiple)
        if elements(found) <= most:
            break
    return found


def _replaced(large: Sequence[int], sums: Mapping[int, Sequence[int]], multiple: int) -> dict[int, int]:
    """Small sizes for large ones, which are in order; those that are at most so many times another one stay so."""
    found: dict[int, int] = {}
    fresh = iter(range(3, KEPT))
    for size in large:
        parts = sums.get(size)
        root = max((s for s in found if size % s == 0 and size // s <= multiple), default=None)
        if parts is not None and len(parts) > 1:
            found[size] = sum(found.get(p, p) for p in parts)
        elif root is not None:
            found[size] = size // root * found[root]
        elif (number := next(fresh, None)) is not None:
            found[size] = number
    return found
