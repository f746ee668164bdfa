"""Where PyTorch's integers are not those of mathematics: a negative index counts from the end, and small dtypes wrap around."""

from __future__ import annotations

from typing import Final

from trainverify.translate.emit import Emitter

# Operators whose result is not negative if none of their integer arguments is
_KEEPS: Final = frozenset(
    (
        *("reshape", "slice", "expand", "permute", "concat", "stack", "identity", "to", "flip", "roll", "repeat", "add", "mul", "sum"),
        *("cumsum", "minimum", "take_along_dim", "index_select", "split"),
    )
)

NARROW: Final = {"u8": (0, 255), "i8": (-128, 127), "i16": (-(2**15), 2**15 - 1)}  # dtypes that ordinary numbers do not fit in

# Operators whose results are elements of their arguments
_MOVES: Final = frozenset(
    (
        *("reshape", "slice", "expand", "permute", "concat", "stack", "identity", "to", "flip", "roll", "repeat", "split"),
        *("minimum", "maximum", "amax", "amin", "take_along_dim", "index_select", "put_along_dim", "where", "masked_fill", "pad"),
        *("all_gather", "broadcast", "recv", "scatter", "gather", "all_to_all"),
    )
)


def fits(e: Emitter, name: str | None, dtype: str) -> bool:
    """Whether it follows from how a tensor was made that a narrow dtype holds its numbers: 200 + 100 is 44 in 8 bits."""
    if name is None:
        return False
    low, high = NARROW[dtype]
    if e.kind(name) == "bool":
        return True
    op, own = e.made.get(name), NARROW.get(e.tensors[name].dtype)
    if op is None:
        return own is not None and low <= own[0] and own[1] <= high
    numbers = [n for n in (op.get("value", 0), op.get("start", 0), op.get("stop", 0)) if n is not None]
    if op.name == "clamp":
        numbers = [op.get("min", low - 1), op.get("max", high + 1)]
    if op.name in ("all_reduce", "reduce_scatter", "reduce"):
        return op.get("op") in ("max", "min") and fits(e, op.inputs[0], dtype)
    if op.name not in (*_MOVES, "full", "arange", "clamp") or not all(low <= n <= high for n in numbers):
        return False
    if op.name in ("full", "arange", "clamp"):
        return True
    given = {"where": op.inputs[1:], "masked_fill": op.inputs[:1], "take_along_dim": op.inputs[:1], "index_select": op.inputs[:1]}
    if op.name == "put_along_dim":
        return fits(e, op.inputs[0], dtype) and fits(e, op.inputs[2], dtype)
    if op.name in ("broadcast", "recv", "scatter") and not op.inputs:
        return own is not None and low <= own[0] and own[1] <= high
    return all(fits(e, i, dtype) for i in given.get(op.name, op.inputs))


def never_negative(e: Emitter, name: str | None) -> bool:
    """Whether it follows from how a tensor was made, and from what is declared about sources."""
    op = e.made.get(name)
    if op is None:
        return name in e.nonnegative
    if name is not None and e.kind(name) == "bool":
        return True
    value = op.get("value", 0)
    if op.name == "full":
        return isinstance(value, int) and value >= 0
    if op.name == "arange":
        first, step = op.get("start", 0), op.get("step", 1)
        return isinstance(first, int) and isinstance(step, int) and first >= 0 and step > 0
    if op.name in ("one_hot", "argsort", "argmax", "argmin") or (op.name in ("topk", "sort") and name == op.outputs[1]):
        return True
    if op.name == "where":
        return _shifted_within(e, op.inputs) or all(never_negative(e, i) for i in op.inputs[1:])
    if op.name == "maximum":
        return any(never_negative(e, i) for i in op.inputs)
    if op.name == "clamp":
        low = op.get("min")
        return (isinstance(low, int) and low >= 0) or (low is None and never_negative(e, op.inputs[0]))
    if op.name in _KEEPS:
        return isinstance(value, int) and value >= 0 and all(never_negative(e, i) for i in op.inputs)
    return False


def _shifted_within(e: Emitter, inputs: tuple[str | None, ...]) -> bool:
    """where(ids < start or …, n, ids − start) with n ≥ 0."""
    mask, other, moved = inputs
    sub, either = e.made.get(moved), e.made.get(mask)
    if sub is None or sub.name != "sub" or len(sub.inputs) != 1 or not never_negative(e, other) or either is None:
        return False
    sides = [either] if either.name == "lt" else [e.made.get(i) for i in either.inputs] if either.name == "logical_or" else []
    return any(s is not None and s.name == "lt" and s.inputs == sub.inputs and s.get("value") == sub.get("value") for s in sides)
