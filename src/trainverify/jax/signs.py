"""Tensors of JAX programs that are never negative."""

from __future__ import annotations

from trainverify.jax.emit import RankEmitter
from trainverify.translate.signs import Signs


def never_negative(e: RankEmitter, name: str) -> bool:
    """Whether no element of a real tensor is below 0, wherever it is defined."""
    if "signs" not in e.kept:
        e.kept["signs"] = Signs(e, lambda n: n in e.nonnegative or e.bounds.get(n, (-1, 0))[0] >= 0, e.column, e.shared)
    return bool(e.kept["signs"].never_negative(name))


__all__ = ["never_negative"]
