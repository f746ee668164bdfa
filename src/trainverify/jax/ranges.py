"""What is known about the integers of a tensor: the smallest and the largest, on any rank. Follows from how it was made."""

from __future__ import annotations

from typing import Final

from trainverify.jax.emit import RankEmitter
from trainverify.jax.values import Grid, Number, Opaque, Table, Value

Bounds = tuple[int, int] | None
_KEEPS: Final = frozenset(
    (*("reshape", "slice", "expand", "permute", "identity", "to", "flip", "select", "all_gather"), "take_along_dim", "index_select")
)
_JOINS: Final = frozenset(("concat", "stack"))


def bounds(e: RankEmitter, value: Value | None) -> Bounds:
    """Bounds of integers; None where nothing is known."""
    if isinstance(value, Grid):
        return value.bounds()
    if isinstance(value, Table):
        return (int(value.data.min()), int(value.data.max())) if value.data.size else (0, 0)
    if value is None or isinstance(value, Opaque | Number) or e.kind(value) == "real":
        return None
    if e.kind(value) == "bool":
        return 0, 1
    return _made(e, value)


def _made(e: RankEmitter, name: str) -> Bounds:
    op = e.made.get(name)
    if op is None:
        return e.bounds.get(name)
    if op.name == "all_gather" and not e.shared:
        return None
    if op.name in _KEEPS:
        return bounds(e, op.inputs[0])
    if op.name in _JOINS:
        return _hull([bounds(e, i) for i in op.inputs])
    if op.name == "where":
        return _hull([bounds(e, i) for i in op.inputs[1:]])
    if op.name in ("argmax", "argmin", "argsort") or (op.name in ("topk", "sort") and name == op.outputs[1]):
        dim = op.get("dim", -1)
        return 0, e.shape(str(op.inputs[0]))[dim] - 1 if isinstance(dim, int) else max(e.shape(str(op.inputs[0])), default=1) - 1
    if op.name == "one_hot":
        return 0, 1
    if op.name == "full":
        column = e.column(op.get("value"))
        return (min(column), max(column)) if all(isinstance(v, int) for v in column) else None
    if op.name == "arange":
        first, last = e.column(op.get("start", 0)), e.column(op.get("stop"))
        step = op.get("step", 1)
        return (min(first), max(last) - 1) if step > 0 else (min(last) + 1, max(first))
    if op.name == "clamp":
        low, high = op.get("min"), op.get("max")
        return (min(e.column(low)), max(e.column(high))) if low is not None and high is not None else None
    return _computed(e, op.name, [bounds(e, i) for i in op.inputs], e.column(op.get("value")))


def _computed(e: RankEmitter, name: str, found: list[Bounds], value: tuple[object, ...]) -> Bounds:
    """Interval arithmetic."""
    if value != (None,) and all(isinstance(v, int) for v in value):
        numbers = [v for v in value if isinstance(v, int)]
        found = [*found, (min(numbers), max(numbers))]
    if len(found) != 2 or found[0] is None or found[1] is None:
        return None
    (a, b), (c, d) = found[0], found[1]
    match name:
        case "add":
            return a + c, b + d
        case "sub":
            return a - d, b - c
        case "mul":
            corners = (a * c, a * d, b * c, b * d)
            return min(corners), max(corners)
        case "maximum":
            return max(a, c), max(b, d)
        case "minimum":
            return min(a, c), min(b, d)
    return None


def _hull(found: list[Bounds]) -> Bounds:
    known = [b for b in found if b is not None]
    return (min(a for a, _ in known), max(b for _, b in known)) if known and len(known) == len(found) else None


def within(e: RankEmitter, value: Value, low: int, high: int) -> bool:
    """Whether all integers are from `low` to `high`."""
    found = bounds(e, value)
    return found is not None and low <= found[0] and found[1] <= high


__all__ = ["Bounds", "bounds", "within"]
