"""Tensors that are finite whatever the inputs are: elements of sources, and what functions that are finite everywhere make of them."""

from __future__ import annotations

import math
from typing import Final

from trainverify.translate.emit import Emitter

_COPIES: Final = frozenset(("to", "identity", "reshape", "permute", "slice", "concat", "split", "stack", "expand", "pad", "flip", "full"))
_TOTAL: Final = frozenset(
    (
        *("add", "sub", "mul", "neg", "abs", "square", "where", "clamp", "maximum", "minimum", "matmul", "einsum", "linear", "sum", "mean"),
        *("exp", "sin", "cos", "tanh", "erf", "sigmoid", "relu", "silu", "gelu", "softmax", "log_softmax", "embedding", "take_along_dim"),
    )
)


def is_finite(e: Emitter, name: str) -> bool:
    """Whether all elements are finite. Those that other ranks send are if they are copies."""
    waiting, seen = [(name, False)], {(name, False)}
    while waiting:
        here, sent = waiting.pop()
        op = e.made.get(here)
        if op is None:
            continue
        literals = [v for a in ("value", "min", "max") for v in e.column(op.get(a)) if isinstance(v, float)]
        if not all(math.isfinite(v) for v in literals):
            return False
        if op.name not in _COPIES and op.name != "all_gather" and (sent or op.name not in _TOTAL):
            return False
        more = {(str(i), sent or op.name == "all_gather") for i in op.inputs if i is not None} - seen
        seen |= more
        waiting += more
    return True
