"""The numeric domain: float64, int64 and bool arrays; fast, never the last word. `EXTENDED` has more digits, `SHAKEN` is a little off."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np

from trainverify.domains.arrays import Array, ArrayDomain
from trainverify.primitives.node import Literal, Node
from trainverify.primitives.scalars import SCALARS, nearest_float

AT_ONCE: Final = 20_000  # products of one contraction that are added up in the order in which they come: a better one takes time to find
MANY: Final = 5_000_000  # products of two tensors from which on they are multiplied as matrices
_REDUCTIONS: dict[str, Any] = {"max": np.max, "min": np.min, "prod": np.prod}
_DTYPES: dict[str, Any] = {"real": np.float64, "int": np.int64, "bool": np.bool_}


class Numeric(ArrayDomain):
    def literal(self, value: Literal, kind: str) -> Array:
        return np.array(nearest_float(value) if kind == "real" else value, dtype=_DTYPES[kind])

    def run(self, outputs: Sequence[Node], inputs: Sequence[Array], lead: tuple[int, ...] = ()) -> list[Array]:
        with np.errstate(all="ignore"):
            return super().run(outputs, inputs, lead)

    def map(self, fn: str, args: Sequence[Array], param: Any) -> Array:
        f = SCALARS[fn].numeric
        return f(*args) if param is None else f(*args, param)

    def contract(self, terms: Sequence[Sequence[int]], target: Sequence[int], args: Sequence[Array], lead: int) -> Array:
        shift = list(range(lead))
        operands: list[Any] = []
        sizes: dict[int, int] = {}
        for x, term in zip(args, terms, strict=True):
            labels = [*shift, *(t + lead for t in term)]
            operands += [x, labels]
            sizes.update(zip(labels, x.shape, strict=True))
        products = math.prod(sizes.values())
        if len(args) == 2 and products > MANY and all(x.dtype == np.float64 for x in args):
            return _matmul(operands, [*shift, *(t + lead for t in target)], sizes)
        large = len(args) > 1 and products > AT_ONCE
        return np.asarray(np.einsum(*operands, [*shift, *(t + lead for t in target)], optimize=large))

    def reduce(self, fn: str, x: Array, dims: tuple[int, ...]) -> Array:
        return np.asarray(_REDUCTIONS[fn](x, axis=dims))

    def rowwise(self, fn: str, x: Array, dim: int, descending: bool) -> Array:
        if fn == "cumsum":
            return np.cumsum(x, axis=dim)
        if fn == "argmax":
            return np.argmax(x, axis=dim)
        if fn == "argmin":
            return np.argmin(x, axis=dim)
        key = -x if descending else x
        order = np.argsort(key, axis=dim, kind="stable")
        return order if fn == "argsort" else np.take_along_axis(x, order, axis=dim)

    def indicator(self, hits: Array) -> Array:
        return hits.astype(np.float64)


def _matmul(operands: Sequence[Any], target: list[int], sizes: Mapping[int, int]) -> Array:
    """A contraction of two tensors as a product of matrices: einsum adds up one by one where tensors share a label that stays."""
    a, left, b, right = operands
    if len(set(left)) < len(left) or len(set(right)) < len(right):
        return np.asarray(np.einsum(*operands, target, optimize=True))
    a, left = _summed(a, left, {*right, *target})
    b, right = _summed(b, right, {*left, *target})
    both = [x for x in left if x in right]
    batch, inner = [x for x in both if x in target], [x for x in both if x not in target]
    rows, columns = [x for x in left if x not in both], [x for x in right if x not in both]

    def matrix(x: Array, labels: list[int], *groups: list[int]) -> Array:
        order = [labels.index(n) for group in groups for n in group]
        return x.transpose(order).reshape([math.prod(sizes[n] for n in group) for group in groups])

    made = np.matmul(matrix(a, left, batch, rows, inner), matrix(b, right, batch, inner, columns))
    found = [*batch, *rows, *columns]
    return made.reshape([sizes[n] for n in found]).transpose([found.index(n) for n in target])


def _summed(x: Array, labels: list[int], kept: set[int]) -> tuple[Array, list[int]]:
    """A tensor without the labels that only it has."""
    alone = tuple(i for i, n in enumerate(labels) if n not in kept)
    return (x.sum(alone), [n for n in labels if n in kept]) if alone else (x, labels)


class Extended(Numeric):
    """The same in the machine's extended precision: what is rounding noise becomes smaller, what is a difference stays."""

    def literal(self, value: Literal, kind: str) -> Array:
        if kind != "real":
            return super().literal(value, kind)
        if isinstance(value, Fraction):
            return np.asarray(np.longdouble(value.numerator) / np.longdouble(value.denominator))
        return np.asarray(np.longdouble(value))

    def map(self, fn: str, args: Sequence[Array], param: Any) -> Array:
        if fn == "as_real":
            return args[0].astype(np.longdouble)
        if fn == "pow" and isinstance(param, Fraction) and args[0].dtype.kind == "f" and param != Fraction(-1, 2):
            return np.power(args[0], np.longdouble(param.numerator) / np.longdouble(param.denominator))
        return super().map(fn, args, param)

    def indicator(self, hits: Array) -> Array:
        return hits.astype(np.longdouble)


class Shaken(Numeric):
    """The same with everything a unit in its last place off, this way or that: as far as rounding may be. Equal numbers stay equal, and
    whole ones what they are."""

    def map(self, fn: str, args: Sequence[Array], param: Any) -> Array:
        return _shaken(super().map(fn, args, param))

    def contract(self, terms: Sequence[Sequence[int]], target: Sequence[int], args: Sequence[Array], lead: int) -> Array:
        return _shaken(super().contract(terms, target, [_shaken(a) for a in args], lead))


def _shaken(x: Array) -> Array:
    x = np.asarray(x)
    if x.dtype != np.float64:
        return x
    other = np.ascontiguousarray(x).view(np.int64) ^ 1  # the other of two neighbours
    return np.where(x == np.rint(x), x, other.view(np.float64).reshape(x.shape))


NUMERIC = Numeric()
SHAKEN = Shaken()
EXTENDED = Extended()
