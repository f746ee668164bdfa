"""Tensors that are never negative, by how they were made: a sum of exponentials is its own absolute value."""

from __future__ import annotations

from typing import Final

from trainverify.jax.emit import RankEmitter

_NEVER: Final = frozenset(("exp", "sigmoid", "softplus", "square", "sqrt", "rsqrt", "abs", "relu", "norm", "grad_norm", "one_hot"))
_KEEPS: Final = frozenset(
    (
        *("reshape", "expand", "permute", "slice", "select", "flip", "identity", "to", "sum", "mean", "amax", "amin", "prod", "cumsum"),
        *("concat", "stack", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "add", "mul", "div", "minimum", "index_select"),
        "reciprocal",
    )
)


def never_negative(e: RankEmitter, name: str) -> bool:
    """Whether no element of a real tensor is below 0, wherever it is defined."""
    key = ("never negative", name)
    if key not in e.kept:
        e.kept[key] = _never(e, name)
    return bool(e.kept[key])


def _never(e: RankEmitter, name: str) -> bool:
    op = e.made.get(name)
    if e.kind(name) == "bool":
        return True
    if op is None:
        return name in e.nonnegative or e.bounds.get(name, (-1, 0))[0] >= 0
    if op.name in _NEVER:
        return True
    given = [i for i in op.inputs if i is not None]
    if op.name == "full":
        return all(v >= 0 for v in e.column(op.get("value")))
    if op.name == "pow":
        exponent = op.get("exponent")
        return (isinstance(exponent, int) and exponent % 2 == 0) or never_negative(e, given[0])
    if op.name == "maximum":
        return any(never_negative(e, i) for i in given)
    if op.name == "where":
        return all(never_negative(e, i) for i in given[1:])
    if op.name == "pad":
        return op.get("value", 0) >= 0 and never_negative(e, given[0])
    if name in e.labels and not e.shared:  # from ranks that run other programs
        return False
    if op.name not in _KEEPS or op.get("alpha", 1) != 1:
        return False
    value = e.column(op.get("value"))
    return all(v is None or v >= 0 for v in value) and all(never_negative(e, i) for i in given)


__all__ = ["never_negative"]
