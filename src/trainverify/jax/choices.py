"""Choices between two values, without a quotient in a branch that may not be taken. Each law holds for all values:

- x / where(m, a, b) = where(m, x/a, x/b) for literals a, b ≠ 0
- where(n < c, t, t/n·c) = t · c / max(n, c) for a literal c > 0: gradients clipped by their norm, as optax writes it
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from trainverify.graph.program import Op
from trainverify.jax.emit import RankEmitter


def unrepeated(e: RankEmitter, name: str | None) -> tuple[str | None, Op | None]:
    """A tensor before it was repeated or given other dimensions, casts between floats left out."""
    op = e.made.get(name)
    while op is not None and (op.name in ("expand", "reshape") or (op.name == "to" and _floats(e, op))):
        name = op.inputs[0]
        op = e.made.get(name)
    return name, op


def _floats(e: RankEmitter, op: Op) -> bool:
    return e.kind(str(op.inputs[0])) == "real" == e.kind(op.outputs[0])


def literal(e: RankEmitter, name: str | None) -> Any:
    _, op = unrepeated(e, name)
    return op.get("value") if op is not None and op.name == "full" else None


def divided_by_choice(e: RankEmitter, inputs: Sequence[str | None]) -> str | None:
    x, divisor = inputs
    op = e.made.get(divisor)
    if op is None or op.name != "where" or x is None:
        return None
    values = [literal(e, i) for i in op.inputs[1:]]
    if any(isinstance(v, bool) or not isinstance(v, int | Fraction) or v == 0 for v in values):
        return None
    parts = [x if v == 1 else e.op("mul", (x,), {"value": 1 / Fraction(v)}) for v in values]
    mask = str(op.inputs[0])
    made = e.op("where", (mask, *parts))
    shape = e.shape(str(divisor))
    return made if len(shape) <= len(e.shape(made)) else e.op("expand", (made,), {"shape": shape})


def clipped_by_norm(e: RankEmitter, inputs: Sequence[str | None]) -> str | None:
    mask, kept, scaled = inputs
    _, test = unrepeated(e, mask)
    if test is None or test.name not in ("lt", "le") or len(test.inputs) != 1 or kept is None:
        return None
    norm, most = test.inputs[0], test.get("value")
    if isinstance(most, bool) or not isinstance(most, int | Fraction) or most <= 0 or e.shape(str(norm)) != ():
        return None
    op = e.made.get(scaled)
    if most != 1:
        if op is None or op.name != "mul" or len(op.inputs) != 1 or op.get("value") != most:
            return None
        op = e.made.get(op.inputs[0])
    if op is None or op.name != "div" or len(op.inputs) != 2 or op.inputs[0] != kept:
        return None
    if unrepeated(e, op.inputs[1])[0] != unrepeated(e, norm)[0]:
        return None
    dtype = e.tensors[str(norm)].dtype
    largest = e.op("maximum", (norm, e.full((), most, dtype)))
    factor = e.op("reciprocal", (largest,)) if most == 1 else e.op("mul", (e.op("reciprocal", (largest,)),), {"value": most})
    return e.op("mul", (kept, factor))


__all__ = ["clipped_by_norm", "divided_by_choice"]
