"""What the translator knows about a value: a tensor of the program, one number everywhere, or integers that every rank knows.

Integers that follow from positions and from `axis_index` are kept as numbers: one column over the ranks that run the program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

import numpy as np

from trainverify.graph.types import DTYPES as KINDS
from trainverify.primitives.scalars import nearest_float

Column = np.ndarray[Any, np.dtype[np.int64]]  # one integer for each rank, or one for all of them
Array = np.ndarray[Any, Any]


class Rounded(Fraction):
    """What was computed from numbers that a float does not have, as 10·0.1: a float is near it, and may be above or below."""

    def __neg__(self) -> Rounded:
        return Rounded(-self.numerator, self.denominator)


Real = int | Fraction | float

DTYPES: Final[dict[str, str]] = {
    "float64": "f64",
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "bool",
}
BITS: Final = 24  # of a float32
NEAR: Final = Fraction(1, 1 << 20)  # relative: what rounding may explain
TABLE_ELEMENTS: Final = 1 << 16  # of integers that are kept as numbers, over all ranks


@dataclass(frozen=True, slots=True)
class Number:
    """One real number in every element."""

    value: Real
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, eq=False, slots=True)
class Grid:
    """Integers (or booleans, without strides): start + Σ stride[d]·index[d], with a start of its own on every rank."""

    start: Column
    strides: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def uniform(self) -> bool:
        """Whether all elements on a rank are equal."""
        return not any(self.strides)

    @property
    def literal(self) -> int | None:
        """The one integer that all elements on all ranks are."""
        return int(self.start[0]) if self.uniform and bool((self.start == self.start[0]).all()) else None

    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest element on any rank."""
        spans = [s * (n - 1) for s, n in zip(self.strides, self.shape, strict=True)]
        low, high = sum(min(s, 0) for s in spans), sum(max(s, 0) for s in spans)
        return int(self.start.min()) + low, int(self.start.max()) + high


@dataclass(frozen=True, eq=False, slots=True)
class Table:
    """Integers or booleans that follow no such rule, few enough to be listed: [one or all ranks, *shape]."""

    data: Array
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape[1:])


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value without a meaning here, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Key(Opaque):
    """Random keys, each by how it was derived. They have no numbers."""

    reason: str = "a random key that is used otherwise than to draw numbers that are followed"
    names: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    impl: str | None = None  # the generator; None of integers that may be a key of any
    raw: bool = False  # the integers that keys consist of, along the last dimension


def lost(value: Opaque) -> Opaque:
    """What follows from a value without a meaning has none. A key is not the key that something was computed from."""
    return Opaque(value.reason)


class Divergent(Exception):
    """Ranks go different ways here: one answer for each of them."""

    def __init__(self, answers: Any):
        super().__init__("ranks go different ways")
        self.answers = answers


Known = Number | Grid | Table
Value = str | Number | Grid | Table | Opaque


def computed(value: Fraction, *operands: Real) -> Real:
    """A number that was computed; it is known whether floats round on the way."""
    if not all(map(_is_float, (value, *operands))):
        return Rounded(value)
    return int(value) if value.denominator == 1 else value


def times(value: Real, count: int) -> Real:
    """A sum of equal numbers; 0 of none."""
    if not count:
        return 0
    return computed(Fraction(value) * count, value) if math.isfinite(value) else value * count


def _is_float(value: Real) -> bool:
    """Whether every float type of 32 bits or more has a number."""
    if isinstance(value, Rounded):
        return False
    exact = Fraction(value)
    return not exact.denominator & (exact.denominator - 1) and abs(exact.numerator) < 1 << BITS


def undecided(a: Real, b: Real) -> bool:
    """Whether rounding decides which of two numbers is greater."""
    if (not isinstance(a, Rounded) and not isinstance(b, Rounded)) or math.isinf(a) or math.isinf(b):
        return False
    return abs(Fraction(a) - Fraction(b)) <= NEAR * max(abs(Fraction(a)), abs(Fraction(b)))


def uniform(value: int | bool, shape: Sequence[int], dtype: str) -> Grid:
    return Grid(np.array([int(value)], np.int64), (0,) * len(shape), tuple(shape), dtype)


def grid(start: Column, shape: Sequence[int], dtype: str) -> Grid:
    """The same integer in every element of a rank."""
    return Grid(start, (0,) * len(shape), tuple(shape), dtype)


def table_of(value: Grid | Table) -> Array | None:
    """The integers themselves, [one or all ranks, *shape]; None if they are too many."""
    if isinstance(value, Table):
        return value.data
    if math.prod(value.shape) * len(value.start) > TABLE_ELEMENTS:
        return None
    data = value.start.reshape(-1, *(1,) * len(value.shape))
    for d, (stride, size) in enumerate(zip(value.strides, value.shape, strict=True)):
        data = data + (stride * np.arange(size)).reshape(-1, *(1,) * (len(value.shape) - d - 1))
    found = np.broadcast_to(data, (len(value.start), *value.shape))
    return found.astype(bool) if value.dtype == "bool" else found


def listed(data: Array, dtype: str) -> Grid | Table:
    """Listed integers, as a grid if they are one."""
    shape = data.shape[1:]
    flat = data.reshape(len(data), -1)
    if flat.shape[1] == 0:
        return Table(data, dtype)
    start = flat[:, 0].astype(np.int64)
    if (start == start[0]).all():
        start = start[:1]
    strides = []
    for d, size in enumerate(shape):
        at: tuple[Any, ...] = (slice(None), *(1 if e == d else 0 for e in range(len(shape))))
        strides.append(int(data[at][0]) - int(flat[0, 0]) if size > 1 else 0)
    found = Grid(start, tuple(strides), tuple(shape), dtype)
    if dtype == "bool" and any(strides):
        return Table(data, dtype)
    full = replace(found, start=np.broadcast_to(start, (len(data),)))
    same = table_of(full)
    return found if same is not None and bool((same == data).all()) else Table(data, dtype)


def array_of(value: Known, row: int = 0) -> Array:
    """The numbers of a known value on one of its ranks."""
    if isinstance(value, Number):
        real = kind_of(value.dtype) == "real"
        number = nearest_float(value.value) if real else value.value
        return np.full(value.shape, number, {"real": np.float64, "int": np.int64, "bool": np.bool_}[kind_of(value.dtype)])
    if isinstance(value, Table):
        return np.asarray(value.data[row if len(value.data) > 1 else 0])
    data = np.asarray(value.start[row if len(value.start) > 1 else 0])
    for d, (stride, size) in enumerate(zip(value.strides, value.shape, strict=True)):
        data = data + (stride * np.arange(size)).reshape(-1, *(1,) * (len(value.shape) - d - 1))
    found = np.broadcast_to(data, value.shape)
    return found.astype(bool) if value.dtype == "bool" else found


def kind_of(dtype: str) -> str:
    return KINDS[dtype]


__all__ = ["DTYPES", "Column", "Divergent", "Grid", "Key", "Known", "Number", "Opaque", "Real", "Rounded", "Table"]
__all__ += ["Value", "array_of", "computed", "grid", "kind_of", "listed", "lost", "times", "undecided", "uniform"]
