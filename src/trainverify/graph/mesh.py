"""The device mesh: named axes over global ranks, the last axis varying fastest."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, init=False)
class Mesh:
    axes: tuple[tuple[str, int], ...]
    names: tuple[str, ...] = field(compare=False, repr=False)
    _strides: tuple[tuple[str, int, int], ...] = field(compare=False, repr=False)  # (name, ranks per step, steps)

    def __init__(self, axes: Mapping[str, int] | tuple[tuple[str, int], ...] = (), **named: int):
        pairs = tuple(axes.items() if isinstance(axes, Mapping) else axes) + tuple(named.items())
        object.__setattr__(self, "axes", tuple((str(n), int(s)) for n, s in pairs))
        if len({n for n, _ in self.axes}) != len(self.axes) or any(s < 1 for _, s in self.axes):
            raise ValueError(f"mesh axes need distinct names and sizes of at least 1: {self.axes}")
        object.__setattr__(self, "names", tuple(n for n, _ in self.axes))
        strides = ((n, math.prod(x for _, x in self.axes[i + 1 :]), s) for i, (n, s) in enumerate(self.axes))
        object.__setattr__(self, "_strides", tuple(strides))

    @property
    def size(self) -> int:
        return math.prod(s for _, s in self.axes)

    def length(self, axis: str) -> int:
        return dict(self.axes)[axis]

    def coordinates(self, rank: int) -> dict[str, int]:
        return {name: rank // stride % size for name, stride, size in self._strides}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinates[name]
        return rank

    def step(self, axis: str) -> tuple[int, int]:
        """(how far apart in rank neighbours along an axis are, how many there are)."""
        return next((stride, size) for name, stride, size in self._strides if name == axis)

    def moved(self, rank: int, axis: str, to: int) -> int:
        """The rank with another coordinate along one axis."""
        stride, size = self.step(axis)
        return rank + (to - rank // stride % size) * stride

    def ranks(self, **fixed: int) -> tuple[int, ...]:
        """All ranks with the given coordinates, in order."""
        for name, index in fixed.items():
            if name not in self.names or not 0 <= index < self.length(name):
                raise ValueError(f"{self} has no {name}={index}")
        return _ranks(self.axes, tuple(sorted(fixed.items())))

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` only, in rank order."""
        fixed = {n: c for n, c in self.coordinates(rank).items() if n not in axes}
        return self.ranks(**fixed)

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{n}={s}' for n, s in self.axes)})"

    def __str__(self) -> str:
        return f"mesh({', '.join(f'{n}={s}' for n, s in self.axes)})"


@functools.lru_cache(maxsize=256)
def _ranks(axes: tuple[tuple[str, int], ...], fixed: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
    chosen = dict(fixed)
    spans, stride = [], 1
    for name, size in reversed(axes):
        spans.append([chosen[name] * stride] if name in chosen else range(0, size * stride, stride))
        stride *= size
    return tuple(map(sum, itertools.product(*reversed(spans))))
