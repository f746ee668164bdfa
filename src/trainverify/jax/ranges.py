"""The smallest and the largest number of a value, on any rank: of known numbers, or as follows from how a tensor was made.

Of real numbers only literals and random numbers have bounds, and what is moved about, scaled or shifted of them.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Final

from trainverify.graph.program import Op
from trainverify.jax.emit import RankEmitter
from trainverify.jax.values import Grid, Number, Opaque, Table, Value, kind_of
from trainverify.translate.emit import Unmapped
from trainverify.translate.integers import Bounds, tensor_bounds

Interval = tuple[Fraction, Fraction] | None
DEEPEST: Final = 16  # operators between a random number and what has bounds because of it
_MOVES: Final = frozenset(("reshape", "expand", "permute", "slice", "select", "flip", "identity"))


def bounds(e: RankEmitter, value: Value | None) -> Bounds:
    """Bounds of integers; None where nothing is known."""
    if isinstance(value, Grid):
        return value.bounds()
    if isinstance(value, Table):
        return (int(value.data.min()), int(value.data.max())) if value.data.size else (0, 0)
    if value is None or isinstance(value, Opaque | Number):
        return None
    return tensor_bounds(e, value)


def decisive(e: RankEmitter, value: Value | None) -> Bounds | Interval:
    """Bounds of integers or of real numbers, for a comparison."""
    if isinstance(value, Number) and kind_of(value.dtype) == "real":
        return _exactly(value.value)
    if isinstance(value, str) and e.kind(value) == "real":
        return interval(e, value)
    return bounds(e, value)


def interval(e: RankEmitter, name: str, depth: int = DEEPEST) -> Interval:
    """Bounds of real numbers; None where nothing is known."""
    op = e.made.get(name)
    if op is None:
        return e.limits.get(name)
    if depth == 0 or e.kind(name) != "real":
        return None
    if op.name == "full":
        return _exactly(op.get("value"))
    parts = [None if i is None or e.kind(i) != "real" else interval(e, i, depth - 1) for i in op.inputs]
    known = [p for p in parts if p is not None]
    if op.name in _MOVES:
        return parts[0]
    if not known or len(known) < len(parts):
        return None
    if op.name == "concat":
        return min(low for low, _ in known), max(high for _, high in known)
    return _computed(op, known)


def _exactly(value: Any) -> Interval:
    number = isinstance(value, int | float | Fraction) and math.isfinite(value)
    return (Fraction(value), Fraction(value)) if number else None


def _computed(op: Op, given: list[tuple[Fraction, Fraction]]) -> Interval:
    """Of sums, differences and products; the second operand may be an attribute."""
    (low, high), *rest = given
    if op.name == "neg":
        return -high, -low
    other = rest[0] if rest else _exactly(op.get("value"))
    if other is None:
        return None
    match op.name:
        case "add":
            return low + other[0], high + other[1]
        case "sub":
            return low - other[1], high - other[0]
        case "mul":
            ends = [p * q for p in (low, high) for q in other]
            return min(ends), max(ends)
    return None


_EXACT: Final = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8, "f8e4m3": 4, "f8e5m2": 3}  # bits: 257 is no bfloat16


def refuse_rounded(e: RankEmitter, value: Value | None) -> None:
    """Refuse real numbers that are integers in a float type which does not have all of them, where they count as integers again."""
    if not isinstance(value, str) or e.kind(value) != "real":
        return
    name, least = value, e.tensors[value].dtype
    while (op := e.made.get(name)) is not None and op.name in (*_MOVES, "to"):
        name = str(op.inputs[0])
        dtype = e.tensors[name].dtype
        if e.kind(name) == "int":
            found = tensor_bounds(e, name)
            if max(map(abs, found)) > 1 << _EXACT[least] if found is not None else _EXACT[least] < _EXACT["f32"]:
                raise Unmapped(f"integers that {least} may not have: they are rounded to others")
            return
        if e.kind(name) == "real" and _EXACT[dtype] < _EXACT[least]:
            least = dtype


def within(e: RankEmitter, value: Value, low: int, high: int) -> bool:
    """Whether all integers are from `low` to `high`."""
    found = bounds(e, value)
    return found is not None and low <= found[0] and found[1] <= high


__all__ = ["Bounds", "Interval", "bounds", "decisive", "interval", "refuse_rounded", "within"]
