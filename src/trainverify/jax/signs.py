"""Signs of tensors in JAX programs: what is never negative, and zeros that have a sign."""

from __future__ import annotations

from typing import Final

from trainverify.graph.program import Op
from trainverify.jax.emit import RankEmitter
from trainverify.translate.integers import tensor_bounds
from trainverify.translate.signs import Signs


def never_negative(e: RankEmitter, name: str) -> bool:
    """Whether no element of a real tensor is below 0, wherever it is defined."""
    if "signs" not in e.kept:
        e.kept["signs"] = Signs(e, lambda n: n in e.nonnegative or e.bounds.get(n, (-1, 0))[0] >= 0, e.column, e.shared)
    return bool(e.kept["signs"].never_negative(name))


_DEEPEST: Final = 24  # operators between a mask and what it makes 0
_SAME: Final = frozenset(  # elements stay what they are, or are one of several; the first argument of a choice is its condition
    (
        *("reshape", "expand", "permute", "slice", "select", "flip", "identity", "to", "concat", "stack", "pad", "where", "masked_fill"),
        *("apply_mask", "maximum", "minimum", "amax", "amin", "relu", "clamp", "all_gather", "all_to_all", "index_select"),
    )
)
_ODD: Final = frozenset(("tanh", "erf", "sin", "sqrt", "sign", "div"))  # 0 of 0, with its sign


def _elements(op: Op) -> list[str]:
    """The arguments that elements of a result come from."""
    given = [str(i) for i in op.inputs if i is not None]
    return given[1:] if op.name == "where" else given[:1] if op.name in ("masked_fill", "apply_mask") else given


def _has_zeros(e: RankEmitter, name: str, depth: int = _DEEPEST) -> bool:
    """Whether elements may be 0 otherwise than by chance: masked, rounded, or integers."""
    op = e.made.get(name)
    if e.kind(name) != "real":
        found = tensor_bounds(e, name)
        return found is None or found[0] <= 0 <= found[1]
    if op is None or depth == 0:
        return False
    if op.name == "full":
        return any(v == 0 for v in e.column(op.get("value")))
    if op.name in ("relu", "floor", "apply_mask", "one_hot") or (op.name == "pad" and op.get("value", 0) == 0):
        return True
    if op.name in ("maximum", "minimum", "masked_fill", "clamp", "mul") and any(op.get(a) == 0 for a in ("value", "min", "max")):
        return True
    if op.name == "add":
        return len(op.inputs) > 1 and all(_has_zeros(e, i, depth - 1) for i in _elements(op))
    if op.name in _SAME | {"mul", "neg", "abs", "square"}:
        return any(_has_zeros(e, i, depth - 1) for i in _elements(op))
    return op.name in _ODD and _has_zeros(e, _elements(op)[0], depth - 1)


def may_be_negative_zero(e: RankEmitter, name: str, depth: int = _DEEPEST) -> bool:
    """Whether elements may be -0.0 otherwise than by chance: a mask times what is negative, the negative of a mask, a rounded number."""
    op = e.made.get(name)
    if op is None or depth == 0 or e.kind(name) != "real":
        return False
    given = _elements(op)
    if op.name in ("mul", "div"):
        signed = not all(never_negative(e, i) for i in given) or any(v is not None and v < 0 for v in e.column(op.get("value")))
        return signed and _has_zeros(e, given[0] if op.name == "div" else name, depth - 1)
    if op.name == "neg":
        return _has_zeros(e, given[0], depth - 1)
    if op.name == "floor":
        return True
    if op.name == "add":
        return len(given) > 1 and all(may_be_negative_zero(e, i, depth - 1) for i in given)
    if op.name == "sub":
        return may_be_negative_zero(e, given[0], depth - 1)
    return op.name in _SAME | _ODD and any(may_be_negative_zero(e, i, depth - 1) for i in given)


__all__ = ["may_be_negative_zero", "never_negative"]
