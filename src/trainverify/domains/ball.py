"""The ball domain: every real is a ball that certainly contains it (`arb` of python-flint).

Two balls that do not meet are a certain difference. Precision is the caller's (`precision(bits)`).
A comparison that the balls do not decide raises `Undecided`.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, Final

import numpy as np
from flint import arb, ctx, fmpq

from trainverify.domains.arrays import Array, ArrayDomain, labelled
from trainverify.primitives.node import Literal, Node
from trainverify.primitives.scalars import SCALARS, _lt, rational

DECIMAL: Final = 128  # bits of a decimal fraction that is made of hyperparameters


@contextmanager
def precision(bits: int) -> Iterator[None]:
    before = ctx.prec
    ctx.prec = bits
    try:
        yield
    finally:
        ctx.prec = before


def ball(value: Literal, widen: bool = False, decimals: Collection[Fraction] = ()) -> arb:
    """A literal as a ball; with `widen`, one that may be rounded stands for everything within one unit in its last place."""
    if isinstance(value, float) and not math.isfinite(value):
        return arb(str(value))
    q = rational(value)
    exact = arb(fmpq(q.numerator, q.denominator))
    if widen and _rounded(value, decimals):
        u = Fraction(math.ulp(float(value)))
        return arb(exact, arb(fmpq(u.numerator, u.denominator)))
    return exact


def _rounded(value: Literal, decimals: Collection[Fraction]) -> bool:
    """Whether a literal may be rounded: floats that are no integers may, and these decimals."""
    return math.isfinite(value) and value != int(value) if isinstance(value, float) else value in decimals


def is_decimal(value: Literal) -> bool:
    """Whether a fraction has few decimal digits, and is no float: hyperparameters are taken as they are written (0.1 is 1/10)."""
    if not isinstance(value, Fraction) or max(value.numerator.bit_length(), value.denominator.bit_length()) > DECIMAL:
        return False
    fives = value.denominator // (value.denominator & -value.denominator)  # without its factors of 2
    return fives > 1 and 5**DECIMAL % fives == 0


def balls(values: Array) -> Array:
    """A numeric array, exactly, in this domain."""
    kind = values.dtype.kind
    convert: Any = arb if kind == "f" else bool if kind == "b" else int
    return _objects([convert(v) for v in values.reshape(-1).tolist()], values.shape)


def _each(f: Any, *args: Array) -> Array:
    return _objects([f(*xs) for xs in zip(*(a.reshape(-1).tolist() for a in args), strict=True)], args[0].shape)


def _objects(entries: list[Any], shape: tuple[int, ...]) -> Array:
    out = np.empty(len(entries), dtype=object)
    out[:] = entries
    return out.reshape(shape)


class Ball(ArrayDomain):
    """With `move`, every literal that may be rounded is one unit in its last place off: "up", "down", or as a coin of that name falls.

    Floats may be, and these `decimals`: a hyperparameter that was computed (0.3 / 3) is a unit off the one that was written."""

    def __init__(self, widen_literals: bool = False, move: str = "", decimals: Collection[Fraction] = ()):
        self.widen_literals = widen_literals
        self.move = move
        self.decimals = decimals

    def literal(self, value: Literal, kind: str) -> Array:
        out = np.empty((), dtype=object)
        if self.move and _rounded(value, self.decimals):
            up = self.move == "up" or (self.move != "down" and zlib.crc32(f"{self.move} {float(value)!r}".encode()) & 1)
            value = math.nextafter(float(value), math.inf if up else -math.inf)
        out[()] = ball(value, self.widen_literals, self.decimals) if kind == "real" else value
        return out

    def integers(self, values: Array) -> Array:
        return balls(values.astype(np.int64))

    def map(self, fn: str, args: Sequence[Array], param: Any) -> Array:
        f = SCALARS[fn].ball
        if not args:
            out = np.empty((), dtype=object)
            out[()] = f() if param is None else f(param)
            return out
        return _each(f, *args) if param is None else _each(lambda *xs: f(*xs, param), *args)

    def select(self, c: Array, a: Array, b: Array) -> Array:
        return _each(lambda p, x, y: x if p else y, c, a, b)

    def _node(self, node: Node, args: list[Array], inputs: Sequence[Array], lead: tuple[int, ...]) -> Array:
        if node.prim == "map" and node.attrs == ("mul",) and node.kind == "real":
            for i, factor in enumerate(map(_fraction, node.args)):
                if factor is not None and factor not in self.decimals:  # 56·(1/7) is 8 and no ball: an exact quotient has no radius
                    return _each(lambda x, f=factor: x * f.numerator / f.denominator, args[1 - i])
        if node.prim == "contract" and node.kind == "real" and any(not a.size for a in args):  # a sum of nothing, or no sum
            return _objects([arb(0) for _ in range(math.prod(lead + node.shape))], lead + node.shape)
        return super()._node(node, args, inputs, lead)

    def contract(self, terms: Sequence[Sequence[int]], target: Sequence[int], args: Sequence[Array], lead: int) -> Array:
        gone = sorted({i for t in terms for i in t} - set(target))
        order = [*target, *gone]
        product: Array = 1
        for x, term in zip(args, terms, strict=True):
            product = product * labelled(x, term, order, lead)
        for _ in gone:
            product = np.add.reduce(product, axis=-1, initial=arb(0) if _has_reals(args) else 0)
        return _as_objects(product)

    def reduce(self, fn: str, x: Array, dims: tuple[int, ...]) -> Array:
        f = SCALARS["mul" if fn == "prod" else fn].ball
        for d in sorted(dims, reverse=True):
            x = functools.reduce(lambda a, b: _each(f, a, b), [_as_objects(row) for row in np.moveaxis(x, d, 0)])
        return x

    def rowwise(self, fn: str, x: Array, dim: int, descending: bool) -> Array:
        rows = np.moveaxis(x, dim, -1)
        if fn == "cumsum":
            return np.moveaxis(np.add.accumulate(rows, axis=-1), -1, dim)

        def compare(a: Any, b: Any) -> int:
            a, b = (b, a) if descending or fn == "argmax" else (a, b)
            return -1 if _lt(a, b) else 1 if _lt(b, a) else 0

        def order(row: Any) -> list[int]:
            return sorted(range(len(row)), key=functools.cmp_to_key(lambda i, j: compare(row[i], row[j])))

        flat = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
        if fn in ("argmax", "argmin"):
            firsts = [functools.reduce(lambda b, i: i if compare(row[i], row[b]) < 0 else b, range(len(row))) for row in flat]
            return _objects(firsts, rows.shape[:-1])
        picks = [order(row) for row in flat]
        result = np.empty(flat.shape, dtype=object)
        for i, (row, p) in enumerate(zip(flat, picks, strict=True)):
            result[i] = p if fn == "argsort" else row[p]
        return np.moveaxis(result.reshape(rows.shape), -1, dim)

    def indicator(self, hits: Array) -> Array:
        zero, one = arb(0), arb(1)
        return _objects([one if h else zero for h in hits.flat], hits.shape)


def _fraction(node: Node) -> Fraction | None:
    """The literal that a node is, if that is a fraction."""
    while node.prim == "broadcast":
        (node,) = node.args
    value = node.attrs[0] if node.prim == "const" else None
    return value if isinstance(value, Fraction) and value.denominator != 1 else None


def _has_reals(args: Sequence[Array]) -> bool:
    return any(isinstance(v, arb) for a in args for v in a.flat[:1])


def _as_objects(x: Any) -> Array:
    if isinstance(x, np.ndarray) and x.dtype == object:
        return x
    out = np.empty(np.shape(x), dtype=object)
    out[...] = x
    return out
