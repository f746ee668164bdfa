"""Where PyTorch's integers are not those of mathematics: a negative index counts from the end."""

from __future__ import annotations

from typing import Final

from trainverify.translate.emit import Emitter
from trainverify.translate.functions import spread
from trainverify.translate.integers import NARROW, fits

# Operators whose result is not negative if none of their integer arguments is
_KEEPS: Final = frozenset(
    (
        *("reshape", "slice", "expand", "permute", "concat", "stack", "identity", "to", "flip", "roll", "repeat", "add", "mul", "sum"),
        *("cumsum", "minimum", "take_along_dim", "index_select", "split", "floor", "where", "clamp"),
    )
)


def never_negative(e: Emitter, name: str | None) -> bool:
    """Whether it follows from how a tensor was made, and from what is declared about sources."""
    if name is None or spread(e, name)[0][0] >= 0 or e.kind(name) == "bool":
        return True
    op = e.made.get(name)
    if op is None:
        return name in e.nonnegative
    if op.name in ("argsort", "argmax", "argmin") or (op.name in ("topk", "sort") and name == op.outputs[1]):
        return True
    if op.name == "clamp" and op.get("min") is not None:
        return bool(op.get("min") >= 0)
    if op.name in _KEEPS:
        given = op.inputs[1:] if op.name == "where" else op.inputs
        return bool(op.get("value", 0) >= 0) and all(never_negative(e, i) for i in given)
    return False


__all__ = ["NARROW", "fits", "never_negative"]
