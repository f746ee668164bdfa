"""Bias corrections with a step count that is not known: 1 − βᵗ, which is not 0 for t ≥ 1.

An optimizer divides by it where the quotient may well be infinite (under a root in a divisor), so the step being defined does not
imply that it is not 0. Its reciprocal is therefore compared too, as a metric of both programs: the condition is then one of the
logical program, and listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trainverify.graph.program import Op, Output
from trainverify.jax.emit import RankEmitter
from trainverify.jax.ranges import bounds
from trainverify.translate.emit import Emitter

_SAME: Final = ("identity", "to", "expand", "reshape", "unsqueeze")
_KEY: Final = "corrections"


def _behind(e: Emitter, name: str | None) -> tuple[str | None, Op | None]:
    """A tensor without casts and copies, and the op that makes it."""
    op = e.made.get(name)
    while op is not None and op.name in _SAME:
        name = op.inputs[0]
        op = e.made.get(name)
    return name, op


def correction(e: RankEmitter, name: str) -> tuple[str, str] | None:
    """(1 − βᵗ as a scalar, what to call it) of a tensor that is that, for 0 < β < 1 and an integer t ≥ 1."""
    divisor, sub = _behind(e, name)
    if sub is None or sub.name != "sub" or len(sub.inputs) != 2 or divisor is None or e.shape(divisor) != ():
        return None
    _, one = _behind(e, sub.inputs[0])
    _, exp = _behind(e, sub.inputs[1])
    if one is None or one.name != "full" or one.get("value") != 1 or exp is None or exp.name != "exp":
        return None
    _, product = _behind(e, exp.inputs[0])
    if product is None or product.name != "mul" or len(product.inputs) != 2:
        return None
    count, adds = _behind(e, product.inputs[0])
    _, log = _behind(e, product.inputs[1])
    base = None if log is None or log.name != "log" else _behind(e, log.inputs[0])[1]
    if base is None or base.name != "full" or not 0 < base.get("value") < 1 or count is None:
        return None
    low = bounds(e, count)
    if low is None or low[0] < 1:
        return None
    shown = count if adds is None or adds.name != "add" or len(adds.inputs) != 1 else f"({adds.inputs[0]} + {adds.get('value')})"
    return divisor, f"1/(1 - {base.get('value')}^{shown})"


def note_divisor(e: Emitter, name: str) -> None:
    """Remember a correction that something is divided by."""
    if isinstance(e, RankEmitter) and (found := correction(e, name)) is not None:
        e.kept.setdefault(_KEY, {})[found[1]] = found[0]


def reported(e: RankEmitter) -> Iterator[Output]:
    """The reciprocals of all corrections, as metrics."""
    for shown, name in e.kept.get(_KEY, {}).items():
        yield Output(e.op("reciprocal", (name,)), "metric", shown)


__all__ = ["note_divisor", "reported"]
