"""Exact rewrites of what JAX computes, applied as ops are written. Each holds for all values; each has a test with a wrong twin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainverify.jax.choices import clipped_by_norm, divided_by_choice
from trainverify.jax.emit import RankEmitter
from trainverify.jax.vocabulary import counted_hot, looked_up_backward, masked_lookup, shifted_hot
from trainverify.translate.emit import Emitter


def rewritten(e: Emitter, name: str, inputs: Sequence[str | None], attrs: Mapping[str, Any]) -> str | None:
    """The result of an op by another way; None if there is none."""
    assert isinstance(e, RankEmitter)
    first = inputs[0] if inputs else None
    op = e.made.get(first)
    if name == "reshape" and op is not None and op.name == "reshape" and attrs["shape"] == e.shape(str(op.inputs[0])):
        return op.inputs[0]  # there and back
    if name == "div" and len(inputs) == 2:
        return divided_by_choice(e, inputs)
    if name == "where":
        return clipped_by_norm(e, inputs) or masked_lookup(e, inputs)
    if name == "one_hot":
        return shifted_hot(e, first, dict(attrs))
    if name == "eq" and len(inputs) == 2:
        return counted_hot(e, inputs)
    if name == "to" and op is not None and op.name == "to" and e.kind(str(first)) == "bool" and _is_hot(e, op.inputs[0]):
        return e.cast(str(op.inputs[0]), attrs["dtype"])  # 0 and 1 as booleans and back
    if name == "einsum" and len(inputs) == 2:
        return looked_up_backward(e, inputs, attrs["spec"])
    return None


def _is_hot(e: RankEmitter, name: str | None) -> bool:
    op = e.made.get(name)
    return op is not None and op.name == "one_hot"
