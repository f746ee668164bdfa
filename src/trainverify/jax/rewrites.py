"""Exact rewrites of what JAX computes, applied as ops are written. Each holds for all values; each has a test with a wrong twin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainverify.jax.choices import clipped_by_norm, divided_by_choice
from trainverify.jax.emit import RankEmitter
from trainverify.translate import lookups
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
    if name == "where" and (found := clipped_by_norm(e, inputs)) is not None:
        return found
    return lookups.rewritten(e, name, inputs, attrs)
