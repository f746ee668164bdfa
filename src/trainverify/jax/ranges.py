"""The smallest and the largest integer of a value, on any rank: of known integers, or as follows from how a tensor was made."""

from __future__ import annotations

from trainverify.jax.emit import RankEmitter
from trainverify.jax.values import Grid, Number, Opaque, Table, Value
from trainverify.translate.integers import Bounds, tensor_bounds


def bounds(e: RankEmitter, value: Value | None) -> Bounds:
    """Bounds of integers; None where nothing is known."""
    if isinstance(value, Grid):
        return value.bounds()
    if isinstance(value, Table):
        return (int(value.data.min()), int(value.data.max())) if value.data.size else (0, 0)
    if value is None or isinstance(value, Opaque | Number):
        return None
    return tensor_bounds(e, value)


def within(e: RankEmitter, value: Value, low: int, high: int) -> bool:
    """Whether all integers are from `low` to `high`."""
    found = bounds(e, value)
    return found is not None and low <= found[0] and found[1] <= high


__all__ = ["Bounds", "bounds", "within"]
