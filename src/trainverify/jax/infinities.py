"""Where −∞ and ∞ come from: computed values are real numbers, only literals are infinite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from trainverify.graph.program import Op
from trainverify.jax.emit import RankEmitter
from trainverify.jax.lines_of_masks import full_lines

Infinities = frozenset[float]
NONE: Final[Infinities] = frozenset()
BELOW: Final[Infinities] = frozenset((-math.inf,))
BOTH: Final[Infinities] = frozenset((-math.inf, math.inf))
_ORDERED: Final = frozenset(  # an infinite element stays what it is
    (
        *("reshape", "expand", "permute", "slice", "select", "flip", "identity", "to", "concat", "stack", "where", "add", "pad"),
        *("maximum", "minimum", "amax", "amin", "all_gather", "all_to_all", "send", "clamp", "apply_mask", "masked_fill", "full"),
    )
)


def may_be_infinite(e: RankEmitter, name: str) -> Infinities:
    """The infinities that elements of a tensor may be, if what ranks exchange is alike (`exchanged` tells)."""
    key = ("infinite", name)
    if key not in e.kept:
        op = e.made.get(name)
        e.kept[key] = NONE if op is None else _found(e, op)
    known: Infinities = e.kept[key]
    return known


def _found(e: RankEmitter, op: Op) -> Infinities:
    if op.name == "recv":
        sent = e.kept.get(("sent", op.get("batch")))
        return NONE if sent is None else may_be_infinite(e, sent)
    given = [may_be_infinite(e, i) if i is not None and e.kind(i) == "real" else NONE for i in op.inputs]
    literals = frozenset(v for a in ("value", "min", "max") for v in e.column(op.get(a)) if isinstance(v, float) and math.isinf(v))
    found = literals.union(*given)
    if not found:
        return NONE
    if op.name in ("exp", "relu", "sigmoid"):
        return found - BELOW  # 0 at −∞
    if op.name == "neg":
        return frozenset(-v for v in found)
    if op.name == "sub":
        return given[0] | frozenset(-v for v in literals.union(*given[1:]))
    if op.name == "maximum" and found == BELOW and NONE in given:
        return NONE
    if op.name == "amax" and found == BELOW and _reaches(e, op):
        return NONE
    return found if op.name in _ORDERED or (op.name == "all_reduce" and op.get("op") in ("max", "min")) else BOTH


def _reaches(e: RankEmitter, op: Op) -> bool:
    """Whether every maximum is over at least one value that is not masked."""
    choice, dims = e.made.get(op.inputs[0]), op.get("dim")
    if choice is None or choice.name != "where" or may_be_infinite(e, str(choice.inputs[1])):
        return False
    return full_lines(e, choice, dims if isinstance(dims, tuple) else (dims,))


def exchanged(e: RankEmitter) -> Iterator[tuple[str, Infinities]]:
    """Of everything that is sent, in order, the infinities that may be in it. Ranks with programs of their own must agree on them."""
    for op in e.ops:
        definition = e.table.definitions.get(op.name)
        if definition is not None and (definition.collective or op.name == "send"):
            yield op.name, frozenset().union(*(may_be_infinite(e, i) for i in op.inputs if i is not None and e.kind(i) == "real"))


__all__ = ["exchanged", "may_be_infinite"]
