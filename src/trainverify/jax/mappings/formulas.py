"""Primitives that are functions of others, written in JAX: each is traced where it is called, and its body is translated.

A formula takes the operands and the parameters that it reads, by name; a call with another parameter is refused. Like a row, it is run
beside the primitive.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from trainverify.jax.mappings.table import Arguments, Result, Row
from trainverify.translate.emit import Unmapped

Formula = Callable[..., Any]
Array = np.ndarray[Any, Any]
Sizes = Sequence[int]
Padding = Sequence[tuple[int, int]]
FORMULAS: Final[dict[str, Formula]] = {}
MOST_PLACES: Final = 256  # in a window


def formula(name: str) -> Callable[[Formula], Formula]:
    def add(fn: Formula) -> Formula:
        FORMULAS[name] = fn
        return fn

    return add


def _row(fn: Formula) -> Row:
    named = [p.name for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY]

    def row(a: Arguments) -> Result:
        from trainverify.jax.control import CONTROL  # both interpret rows
        from trainverify.jax.interpret import Interpreter

        a.ignore("accuracy")
        params = {n: a.param(n) for n in named}
        given = [jax.ShapeDtypeStruct(t.shape, _DTYPES[t.kind]) for t in a.types]
        with jax.enable_x64(True):  # types of the results are set by the caller
            traced = jax.make_jaxpr(lambda *operands: fn(*operands, **params))(*given)
        i = Interpreter(a.e, a.literal, CONTROL)
        i.inside = True
        found = i.closed(traced, [a.operand(n) for n in range(len(a.operands))])
        if i.missing:
            name, missing = next(iter(i.missing.items()))
            raise Unmapped(missing.reason if missing.reason != "no mapping" else f"no mapping for {name}")
        return found  # type: ignore[return-value]

    return row


_DTYPES: Final = {"real": np.dtype("float64"), "int": np.dtype("int64"), "bool": np.dtype("bool")}


# -- functions of a number ------------------------------------------------------------------------------------------------


FORMULAS["log1p"] = lambda x: jnp.log(x + 1)
FORMULAS["expm1"] = lambda x: jnp.exp(x) - 1
FORMULAS["ceil"] = lambda x: -jnp.floor(-x)
FORMULAS["erfc"] = lambda x: 1 - lax.erf(x)
FORMULAS["sinh"] = lambda x: (jnp.exp(x) - jnp.exp(-x)) / 2
FORMULAS["cosh"] = lambda x: (jnp.exp(x) + jnp.exp(-x)) / 2
FORMULAS["tan"] = lambda x: lax.sin(x) / lax.cos(x)
FORMULAS["asinh"] = lambda x: lax.sign(x) * jnp.log(jnp.abs(x) + jnp.sqrt(x * x + 1))
FORMULAS["acosh"] = lambda x: jnp.log(x + jnp.sqrt(x * x - 1))
FORMULAS["atanh"] = lambda x: jnp.log((1 + x) / (1 - x)) / 2


@formula("round")
def round_(x: Any, *, rounding_method: lax.RoundingMethod) -> Any:
    """Halves go away from zero, or to the even neighbour."""
    if rounding_method == lax.RoundingMethod.AWAY_FROM_ZERO:
        return lax.sign(x) * jnp.floor(jnp.abs(x) + 0.5)
    up = jnp.floor(x + 0.5)
    odd = (up - x == 0.5) & (up - 2 * jnp.floor(up / 2) == 1)
    return jnp.where(odd, up - 1, up)


# -- from the first element on --------------------------------------------------------------------------------------------


def _running(x: Any, axis: int, reverse: bool, reduce: Callable[[Any, Array, Any], Any]) -> Any:
    """reduce of [… , i, j] over j: elements up to each one, the first one for those after it."""
    n = x.shape[axis]
    x = jnp.moveaxis(x, axis, -1)
    kept = np.tril(np.ones((n, n), bool))
    wide = jnp.broadcast_to(x[..., None, :], (*x.shape, n))
    found = reduce(wide, kept.T if reverse else kept, x[..., -1:, None] if reverse else x[..., :1, None])
    return jnp.moveaxis(found, -1, axis)


@formula("cumprod")
def cumprod(x: Any, *, axis: int, reverse: bool) -> Any:
    return _running(x, axis, reverse, lambda wide, kept, _: jnp.where(kept, wide, 1).prod(-1))


@formula("cummax")
def cummax(x: Any, *, axis: int, reverse: bool) -> Any:
    return _running(x, axis, reverse, lambda wide, kept, first: jnp.where(kept, wide, first).max(-1))


@formula("cummin")
def cummin(x: Any, *, axis: int, reverse: bool) -> Any:
    return _running(x, axis, reverse, lambda wide, kept, first: jnp.where(kept, wide, first).min(-1))


@formula("cumlogsumexp")
def cumlogsumexp(x: Any, *, axis: int, reverse: bool) -> Any:
    most = x.max(axis, keepdims=True)
    return jnp.log(lax.cumsum(jnp.exp(x - most), axis, reverse)) + most


# -- windows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Windows:
    """The windows of an array: one array for each position in them, and which windows have that position inside of the array."""

    parts: list[Any]
    inside: list[Any]  # arrays of booleans, or one boolean for all windows

    @classmethod
    def of(cls, x: Any, size: Sizes, strides: Sizes, padding: Padding, base: Sizes, dilation: Sizes) -> Windows:
        if math.prod(size) > MOST_PLACES:
            raise Unmapped(f"windows of {math.prod(size)} positions")
        config = [(int(low), int(high), b - 1) for (low, high), b in zip(padding, base, strict=True)]
        wide, held = (lax.pad(v, jnp.zeros((), v.dtype), config) for v in (x, jnp.ones(x.shape, float)))
        counts = [(n - (w - 1) * d - 1) // s + 1 for n, w, s, d in zip(wide.shape, size, strides, dilation, strict=True)]
        if min(counts, default=1) < 1:
            raise Unmapped("no windows")
        parts, inside = list[Any](), list[Any]()
        for at in itertools.product(*map(range, size)):
            start = [k * d for k, d in zip(at, dilation, strict=True)]
            stop = [a + (n - 1) * s + 1 for a, n, s in zip(start, counts, strides, strict=True)]
            parts.append(lax.slice(wide, start, stop, strides))
            places = [np.arange(a, b, s) - low for a, b, s, (low, _, _) in zip(start, stop, strides, config, strict=True)]
            one = [(p >= 0) & (p <= (n - 1) * b) & (p % b == 0) for p, n, b in zip(places, x.shape, base, strict=True)]
            some, every = all(here.any() for here in one), all(here.all() for here in one)
            inside.append(some if some == every else lax.slice(held, start, stop, strides) > 0)
        return cls(parts, inside)

    def best(self, pick: Callable[[Any, Any], Any]) -> Any:
        """The largest or smallest of what is inside."""
        found, known = self.parts[0], self.inside[0]
        for part, here in zip(self.parts[1:], self.inside[1:], strict=True):
            found = _where(_and(known, here), pick(found, part), _where(here, part, found))
            known = _or(known, here)
        return found

    def first(self, pick: Callable[[Any, Any], Any]) -> list[Any]:
        """Whether each position is the first one that has the best value."""
        best, taken = self.best(pick), False
        found = []
        for part, here in zip(self.parts, self.inside, strict=True):
            found.append(_and(_and(here, part == best), True if taken is False else ~taken))
            taken = _or(taken, found[-1])
        return found


def _and(x: Any, y: Any) -> Any:
    return y if x is True else x if y is True or x is False else y if y is False else x & y


def _or(x: Any, y: Any) -> Any:
    return y if x is False else x if y is False or x is True else y if y is True else x | y


def _where(known: Any, x: Any, y: Any) -> Any:
    return x if known is True else y if known is False else jnp.where(known, x, y)


def _reached(n: int, size: int, stride: int, padding: tuple[int, int], base: int, dilation: int) -> bool:
    """Whether every window along a dimension has a position inside of the array."""
    low, high, last = int(padding[0]), int(padding[1]), (n - 1) * base
    starts = range(-low, last + high - (size - 1) * dilation + 1, stride)
    return all(any(0 <= s + k * dilation <= last and (s + k * dilation) % base == 0 for k in range(size)) for s in starts)


def _plan(x: Any, *plan: Any) -> tuple[Any, ...]:
    if not all(_reached(*one) for one in zip(x.shape, *plan, strict=True)):
        raise Unmapped("windows of nothing but padding")
    return plan


@formula("reduce_window_sum")
def window_sum(
    x: Any, *, window_dimensions: Sizes, window_strides: Sizes, padding: Padding, base_dilation: Sizes, window_dilation: Sizes
) -> Any:
    return sum(Windows.of(x, window_dimensions, window_strides, padding, base_dilation, window_dilation).parts)


def _window_best(pick: Callable[[Any, Any], Any]) -> Formula:
    def best(
        x: Any, *, window_dimensions: Sizes, window_strides: Sizes, padding: Padding, base_dilation: Sizes, window_dilation: Sizes
    ) -> Any:
        plan = _plan(x, window_dimensions, window_strides, padding, base_dilation, window_dilation)
        return Windows.of(x, *plan).best(pick)

    return best


FORMULAS["reduce_window_max"] = _window_best(jnp.maximum)
FORMULAS["reduce_window_min"] = _window_best(jnp.minimum)


def _picks(select_prim: Any) -> Callable[[Any, Any], Any]:
    if select_prim.name not in ("ge", "le"):
        raise Unmapped(f"windows from which {select_prim.name} selects")
    found: Callable[[Any, Any], Any] = jnp.maximum if select_prim.name == "ge" else jnp.minimum
    return found


@formula("select_and_gather_add")
def gathered_best(
    values: Any,
    x: Any,
    *,
    select_prim: Any,
    window_dimensions: Sizes,
    window_strides: Sizes,
    padding: Padding,
    base_dilation: Sizes,
    window_dilation: Sizes,
) -> Any:
    """Of every window the value where x is the best."""
    plan = _plan(x, window_dimensions, window_strides, padding, base_dilation, window_dilation)
    chosen = Windows.of(x, *plan).first(_picks(select_prim))
    return sum(jnp.where(c, v, 0) for c, v in zip(chosen, Windows.of(values, *plan).parts, strict=True))


@formula("select_and_scatter_add")
def scattered_best(values: Any, x: Any, *, select_prim: Any, window_dimensions: Sizes, window_strides: Sizes, padding: Padding) -> Any:
    """The value of every window added where x is the best in it."""
    ones = (1,) * x.ndim
    chosen = Windows.of(x, *_plan(x, window_dimensions, window_strides, padding, ones, ones)).first(_picks(select_prim))
    found = jnp.zeros(x.shape, x.dtype)
    for at, c in zip(itertools.product(*map(range, window_dimensions)), chosen, strict=True):
        config = []
        for a, n, count, s, (low, _) in zip(at, x.shape, values.shape, window_strides, padding, strict=True):
            config.append((a - int(low), n + int(low) - a - ((count - 1) * s + 1), s - 1))
        found = found + lax.pad(jnp.where(c, values, 0), jnp.zeros((), x.dtype), config)
    return found


ROWS: Final[dict[str, Row]] = {name: _row(fn) for name, fn in FORMULAS.items()}
