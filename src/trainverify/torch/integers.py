"""Where PyTorch's integers are not those of mathematics: a negative index counts from the end."""

from __future__ import annotations

from typing import Final

from trainverify.translate.emit import Emitter
from trainverify.translate.integers import NARROW, fits

# Operators whose result is not negative if none of their integer arguments is
_KEEPS: Final = frozenset(
    (
        *("reshape", "slice", "expand", "permute", "concat", "stack", "identity", "to", "flip", "roll", "repeat", "add", "mul", "sum"),
        *("cumsum", "minimum", "take_along_dim", "index_select", "split", "floor", "floordiv"),
    )
)


def never_negative(e: Emitter, name: str | None) -> bool:
    """Whether it follows from how a tensor was made, and from what is declared about sources."""
    op = e.made.get(name)
    if op is None:
        return name in e.nonnegative
    if name is not None and e.kind(name) == "bool":
        return True
    value = op.get("value", 0)
    if op.name == "full":
        return bool(value >= 0)
    if op.name == "arange":
        first, step = op.get("start", 0), op.get("step", 1)
        return isinstance(first, int) and isinstance(step, int) and first >= 0 and step > 0
    if op.name in ("mod", "one_hot", "argsort", "argmax", "argmin") or (op.name in ("topk", "sort") and name == op.outputs[1]):
        return True
    if op.name == "where":
        return _shifted_within(e, op.inputs) or all(never_negative(e, i) for i in op.inputs[1:])
    if op.name == "maximum":
        return any(never_negative(e, i) for i in op.inputs)
    if op.name == "clamp":
        low = op.get("min")
        return bool(low >= 0) if low is not None else never_negative(e, op.inputs[0])
    if op.name in _KEEPS:
        return bool(value >= 0) and all(never_negative(e, i) for i in op.inputs)
    return False


def _shifted_within(e: Emitter, inputs: tuple[str | None, ...]) -> bool:
    """where(ids < start or …, n, ids − start) with n ≥ 0."""
    mask, other, moved = inputs
    sub, either = e.made.get(moved), e.made.get(mask)
    if sub is None or sub.name != "sub" or len(sub.inputs) != 1 or not never_negative(e, other) or either is None:
        return False
    sides = [either] if either.name == "lt" else [e.made.get(i) for i in either.inputs] if either.name == "logical_or" else []
    return any(s is not None and s.name == "lt" and s.inputs == sub.inputs and s.get("value") == sub.get("value") for s in sides)


__all__ = ["NARROW", "fits", "never_negative"]
