"""Which element of a source an element of a tensor was made from: digits of positions, with strides in the source.

An element at position p is made from element offset + Σ stride·digit of the source, taken in row-major order. What moves elements keeps
that form, and two tensors stand side by side if they have the same digits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainverify.translate.pieces import Refused

Digit = tuple[int, int | None]  # size and stride; 0 is repeated, None is of something else
MOVES: Final = frozenset(("reshape", "expand", "permute", "slice", "identity"))


@dataclass(frozen=True)
class Layout:
    offset: int
    dims: tuple[tuple[Digit, ...], ...]  # slow digits first

    def moved(self, name: str, attrs: Mapping[str, Any], before: Sequence[int], after: Sequence[int]) -> Layout:
        """After an op of `MOVES`."""
        match name:
            case "identity":
                return self
            case "reshape":
                return self.reshaped(after)
            case "expand":
                return self.expanded(before, after)
            case "permute":
                return Layout(self.offset, tuple(self.dims[d] for d in attrs["dims"]))
            case "slice":
                return self._sliced(attrs.get("dim", 0) % len(before), attrs, after)
        raise Refused

    def reshaped(self, shape: Sequence[int]) -> Layout:
        left = [digit for dim in self.dims for digit in dim][::-1]
        dims = []
        for n in shape:
            taken: list[Digit] = []
            while n > 1:
                if not left:
                    raise Refused
                size, stride = left.pop()
                here = math.gcd(size, n)
                if here != min(size, n):
                    raise Refused
                if here < size:  # the slow part of a digit
                    left.append((size // here, stride))
                taken.append((here, stride and stride * (size // here)))
                n //= here
            dims.append(_merged(taken))
        if left:
            raise Refused
        return Layout(self.offset, tuple(dims))

    def expanded(self, before: Sequence[int], after: Sequence[int]) -> Layout:
        lead = len(after) - len(before)
        if lead < 0:
            raise Refused
        new: list[tuple[Digit, ...]] = [((n, 0),) if n > 1 else () for n in after[:lead]]
        for digits, old, n in zip(self.dims, before, after[lead:], strict=True):
            if old not in (1, n):
                raise Refused
            new.append(((n, 0),) if old != n else digits)
        return Layout(self.offset, tuple(new))

    def _sliced(self, d: int, attrs: Mapping[str, Any], after: Sequence[int]) -> Layout:
        start, step, digits = attrs.get("start", 0), attrs.get("step", 1), self.dims[d]
        if len(digits) > 1 or not all(isinstance(x, int) for x in (start, step)):
            raise Refused
        stride = digits[0][1] if digits else 0
        cut: tuple[Digit, ...] = ((after[d], stride and stride * step),) if after[d] > 1 else ()
        return Layout(self.offset + start * (stride or 0), (*self.dims[:d], cut, *self.dims[d + 1 :]))

    @property
    def own(self) -> tuple[tuple[Digit, ...], ...]:
        """The dimensions; digits of something else are as repeated."""
        return tuple(_merged([(n, stride or 0) for n, stride in dim]) for dim in self.dims)

    @property
    def line(self) -> tuple[Digit, ...]:
        """The digits of the source in their order, without what is repeated."""
        return _merged([digit for dim in self.dims for digit in dim if digit[1]])

    @property
    def reach(self) -> tuple[int, int]:
        """The smallest and the largest position in the source."""
        ends = [(n - 1) * stride for n, stride in self.line if stride]
        return self.offset + sum(e for e in ends if e < 0), self.offset + sum(e for e in ends if e > 0)


def of(shape: Sequence[int], offset: int = 0, step: int = 1) -> Layout:
    """The layout of a source itself."""
    if 0 in shape:
        raise Refused
    strides = [math.prod(shape[d + 1 :]) * step for d in range(len(shape))]
    return Layout(offset, tuple(((n, s),) if n > 1 else () for n, s in zip(shape, strides, strict=True)))


def free(shape: Sequence[int]) -> tuple[tuple[Digit, ...], ...]:
    """Dimensions that have nothing to do with the source."""
    return tuple(((n, None),) if n > 1 else () for n in shape)


def _merged(digits: Sequence[Digit]) -> tuple[Digit, ...]:
    made: list[Digit] = []
    for n, stride in digits:
        before = made[-1][1] if made else 1
        if made and (before is None) == (stride is None) and before == (stride and n * stride):
            made[-1] = made[-1][0] * n, stride
        else:
            made.append((n, stride))
    return tuple(made)


__all__ = ["MOVES", "Layout", "free", "of"]
