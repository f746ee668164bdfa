"""Random arguments for operators: what a sample says about one tensor, and how to draw it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainverify.graph.types import TensorType


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]
    dtype: str
    draw: Callable[[np.random.Generator, tuple[int, ...]], Any]

    @property
    def type(self) -> TensorType:
        return TensorType(self.shape, self.dtype)


@dataclass(frozen=True)
class Sample:
    """Arguments and attributes of one call; `members` is the size of the group of a collective."""

    tensors: tuple[Tensor | None, ...]
    attrs: dict[str, Any]
    members: int = 0

    @property
    def types(self) -> tuple[TensorType | None, ...]:
        return tuple(None if t is None else t.type for t in self.tensors)

    def draw(self, seed: int, lead: tuple[int, ...] = ()) -> list[Any]:
        rng = np.random.default_rng(seed)
        return [None if t is None else t.draw(rng, lead + t.shape) for t in self.tensors]


def real(*shape: int) -> Tensor:
    return Tensor(shape, "f64", lambda rng, s: rng.standard_normal(s))


def positive(*shape: int) -> Tensor:
    return Tensor(shape, "f64", lambda rng, s: rng.uniform(0.3, 2.0, s))


def unit(*shape: int) -> Tensor:
    """Strictly between 0 and 1."""
    return Tensor(shape, "f64", lambda rng, s: rng.uniform(0.05, 0.95, s))


def ids(*shape: int, high: int, low: int = 0) -> Tensor:
    return Tensor(shape, "i64", lambda rng, s: rng.integers(low, high, s))


def distinct(*shape: int, high: int, dim: int) -> Tensor:
    """Ids that differ from each other along one dimension."""

    def draw(rng: np.random.Generator, s: tuple[int, ...]) -> Any:
        whole = (*s[:dim], high, *s[dim + 1 :])
        return np.take(np.argsort(rng.random(whole), axis=dim), np.arange(s[dim]), axis=dim)

    return Tensor(shape, "i64", draw)


def bools(*shape: int) -> Tensor:
    return Tensor(shape, "bool", lambda rng, s: rng.random(s) < 0.6)


def mask(*shape: int) -> Tensor:
    """Booleans; the first of every row is true, so that no row is empty."""

    def draw(rng: np.random.Generator, s: tuple[int, ...]) -> Any:
        m = rng.random(s) < 0.6
        m[..., 0] = True
        return m

    return Tensor(shape, "bool", draw)


def given(values: Any) -> Tensor:
    """These numbers."""
    a = np.array(values)
    dtype = {"f": "f64", "i": "i64", "b": "bool"}[a.dtype.kind]
    return Tensor(a.shape, dtype, lambda rng, s: a)


def call(*tensors: Tensor | None, **attrs: Any) -> Sample:
    return Sample(tensors, attrs)


def group(members: int, *tensors: Tensor, **attrs: Any) -> Sample:
    return Sample(tensors, {"group": "g", **attrs}, members)
