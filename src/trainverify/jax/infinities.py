"""Where −∞ and ∞ come from: computed values are real numbers, only literals are infinite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from trainverify.graph.program import Op
from trainverify.jax.emit import RankEmitter
from trainverify.jax.lines_of_masks import full_lines
from trainverify.jax.signs import never_negative

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
    told = _told(e, op)
    if op.name == "recv":
        sent = e.kept.get(("sent", op.get("batch")))
        return told[0] if told is not None else NONE if sent is None else may_be_infinite(e, sent)
    given = [
        NONE if told is None else told[0],
        *(may_be_infinite(e, i) if i is not None and e.kind(i) == "real" else NONE for i in op.inputs),
    ]
    literals = frozenset(v for a in ("value", "min", "max") for v in e.column(op.get(a)) if isinstance(v, float) and math.isinf(v))
    found = literals.union(*given)
    if not found:
        return NONE
    if op.name in ("exp", "relu", "sigmoid"):
        return found - BELOW  # 0 at −∞
    if op.name == "neg":
        return frozenset(-v for v in found)
    if op.name == "sub":
        return given[1] | frozenset(-v for v in literals.union(*given[2:]))
    if op.name == "maximum" and found == BELOW and NONE in given[1:]:
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


_PARTIAL: Final = frozenset(("div", "reciprocal", "log", "sqrt", "rsqrt", "norm", "grad_norm", "std"))


def is_number(e: RankEmitter, name: str) -> bool:
    """Whether a tensor has a finite value whatever the inputs are: nothing in it divides, or takes a root or logarithm."""
    return _is_defined(e, name) and not may_be_infinite(e, name)


def _is_defined(e: RankEmitter, name: str) -> bool:
    key = ("defined", name)
    if key not in e.kept:
        op = e.made.get(name)
        e.kept[key] = op is None or (_is_total(e, op) and all(_is_defined(e, i) for i in op.inputs if i is not None))
    return bool(e.kept[key])


def _is_total(e: RankEmitter, op: Op) -> bool:
    """Whether an op has a value, perhaps an infinite one, wherever its inputs have."""
    told = _told(e, op)
    if told is not None and not told[1]:
        return False
    if op.name == "recv":
        sent = e.kept.get(("sent", op.get("batch")))
        return told is not None or (sent is not None and _is_defined(e, sent))
    infinite = sum(bool(may_be_infinite(e, i)) for i in op.inputs if i is not None and e.kind(i) == "real")
    if infinite and (op.name not in _ORDERED | {"exp", "relu", "sigmoid", "sub", "neg"} or (op.name in ("add", "sub") and infinite > 1)):
        return False
    if op.name == "pow":
        return not _partial_power(op.get("exponent"))
    return op.name not in _PARTIAL or (op.name == "div" and len(op.inputs) == 1)


def _partial_power(exponent: object) -> bool:
    return not isinstance(exponent, int) or exponent < 0


_OF_POSITIVE: Final = frozenset(("log", "sqrt", "rsqrt"))


def may_be_nan(e: RankEmitter, name: str) -> bool:
    """Whether a root or a logarithm of what may be negative is in a tensor. That a divisor is 0 is taken for an exception."""
    waiting, seen = [name], {name}
    while waiting:
        op = e.made.get(waiting.pop())
        if op is None:
            continue
        power = op.name == "pow" and not isinstance(op.get("exponent"), int)
        if (op.name in _OF_POSITIVE or power) and not never_negative(e, str(op.inputs[0])):
            return True
        more = [e.kept.get(("sent", op.get("batch")))] if op.name == "recv" else op.inputs
        fresh = [i for i in more if i is not None and i not in seen]
        seen.update(fresh)
        waiting += fresh
    return False


Fact = tuple[Infinities, bool]  # the infinities that may be in it, and whether it has a value whatever the inputs are


def _told(e: RankEmitter, op: Op) -> Fact | None:
    """What is known about the values of an op that come from other ranks, if these run other programs."""
    label = e.labels.get(op.outputs[0]) if op.outputs else None
    return None if label is None or e.facts is None else e.facts.get(label, (BOTH, False))


def exchanged(e: RankEmitter) -> dict[str, Fact]:
    """What is known about everything that is sent."""
    found: dict[str, Fact] = {}
    for label, inputs in e.traffic:
        given = [i for i in inputs if e.kind(i) == "real"]
        found[label] = frozenset().union(*(may_be_infinite(e, i) for i in given)), all(_is_defined(e, i) for i in given)
    return found


def joined(traffic: Sequence[Mapping[str, Fact]]) -> dict[str, Fact]:
    """What holds whoever sends."""
    found: dict[str, Fact] = {}
    for one in traffic:
        for label, (inf, defined) in one.items():
            old = found.get(label, (NONE, True))
            found[label] = old[0] | inf, old[1] and defined
    return found


def covers(facts: Mapping[str, Fact], traffic: Mapping[str, Fact]) -> bool:
    """Whether what was taken for granted is so."""
    return all(label in facts and inf <= facts[label][0] and defined >= facts[label][1] for label, (inf, defined) in traffic.items())


__all__ = ["Fact", "covers", "exchanged", "is_number", "joined", "may_be_infinite", "may_be_nan"]
