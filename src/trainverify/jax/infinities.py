"""Where −∞ and ∞ come from: computed values are real numbers, only literals are infinite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from trainverify.graph.program import Op
from trainverify.jax.emit import Fact, RankEmitter
from trainverify.jax.lines_of_masks import finite_lines
from trainverify.jax.signs import never_negative
from trainverify.translate.integers import hull, tensor_bounds

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
        return told.infinities if told is not None else NONE if sent is None else may_be_infinite(e, sent)
    given = [
        NONE if told is None else told.infinities,
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
    dims = op.get("dim")
    found = finite_lines(e, str(op.inputs[0]), lambda name: not may_be_infinite(e, name))
    return bool(found & set(dims if isinstance(dims, tuple) else (dims,)))


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
    if told is not None and not told.defined:
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


def why_not_finite(e: RankEmitter, name: str) -> str | None:
    """Why a tensor need not be a number: a root or a logarithm of what may be negative is in it, or a divisor that may be 0."""
    waiting, seen = [name], {name}
    while waiting:
        op = e.made.get(waiting.pop())
        if op is None:
            continue
        exponent = op.get("exponent") if op.name == "pow" else 1
        if (op.name in _OF_POSITIVE or not isinstance(exponent, int)) and not never_negative(e, str(op.inputs[0])):
            return "a root or logarithm of what may be negative: it need not be a number"
        divisor = op.inputs[-1] if op.name in ("div", "reciprocal", "log", "rsqrt") or _partial_power(exponent) else None
        if divisor is not None and not (op.name == "div" and len(op.inputs) == 1) and not never_zero(e, divisor):
            return (
                f"{op.name} by what may be 0: it need not be finite"
                if op.name == "div"
                else f"{op.name} of what may be 0: it need not be finite"
            )
        told = _told(e, op)
        if told is not None and not told.finite:
            return "a value of other ranks that need not be finite"
        more = op.inputs if op.name != "recv" else [] if told is not None else [e.kept.get(("sent", op.get("batch")))]
        fresh = [i for i in more if i is not None and i not in seen]
        seen.update(fresh)
        waiting += fresh
    return None


_SAME_ZEROS: Final = frozenset(
    (
        *("reshape", "expand", "permute", "slice", "select", "flip", "identity", "to", "concat", "stack", "all_gather", "all_to_all"),
        *("abs", "square", "sqrt", "pow", "reciprocal", "rsqrt", "mul", "div", "prod", "neg", "minimum", "amin", "amax", "index_select"),
    )
)
_SUMS: Final = frozenset(("add", "sum", "mean", "all_reduce", "reduce_scatter", "maximum", "cumsum"))


def never_zero(e: RankEmitter, name: str) -> bool:
    """Whether no element of a tensor is 0: exponentials, what is added to an eps, and what is made of those."""
    key = ("nonzero", name)
    if key not in e.kept:
        op = e.made.get(name)
        e.kept[key] = op is not None and _never_zero(e, op)
    return bool(e.kept[key])


def _never_zero(e: RankEmitter, op: Op) -> bool:
    values = [v for v in e.column(op.get("value")) if v is not None]
    given = [str(i) for i in op.inputs if i is not None]
    match op.name:
        case "exp" | "sigmoid" | "softplus":
            return not may_be_infinite(e, given[0])
        case "full":
            return all(v != 0 for v in values)
        case "where":
            return all(v != 0 for v in values) and all(never_zero(e, i) for i in given[1:])
        case "to":
            return e.kind(given[0]) == e.kind(op.outputs[0]) and never_zero(e, given[0])
    if e.labels.get(op.outputs[0]) is not None and not e.shared:
        return False
    if op.name in _SAME_ZEROS:
        return all(v != 0 for v in values) and all(never_zero(e, i) for i in given)
    if op.name == "sum" and _has_exponentials(e, op):
        return True
    if op.name not in _SUMS or op.get("alpha", 1) != 1 or not all(never_negative(e, i) for i in given):
        return False
    return any(v > 0 for v in values) if any(v != 0 for v in values) else any(never_zero(e, i) for i in given)


def _has_exponentials(e: RankEmitter, op: Op) -> bool:
    """Whether exponentials are summed, of which one at least in every sum is not that of −∞."""
    inner, dims = e.made.get(op.inputs[0]), op.get("dim")
    if inner is None or inner.name != "exp":
        return False
    found = finite_lines(e, str(inner.inputs[0]), lambda name: not may_be_infinite(e, name))
    return bool(found & set(dims if isinstance(dims, tuple) else (dims,)))


_UNKNOWN: Final = Fact(BOTH, False, None, False)


def _told(e: RankEmitter, op: Op) -> Fact | None:
    """What is known about the values of an op that come from other ranks, if these run other programs."""
    labels = e.labels.get(op.outputs[0]) if op.outputs else None
    return None if labels is None or e.facts is None else _all([e.facts.get(n, _UNKNOWN) for n in labels])


def _all(facts: Sequence[Fact]) -> Fact:
    """What holds whichever of them does."""
    infinities = NONE.union(*(f.infinities for f in facts))
    return Fact(infinities, all(f.defined for f in facts), hull([f.bounds for f in facts]), all(f.finite for f in facts))


def exchanged(e: RankEmitter) -> dict[str, Fact]:
    """What is known about everything that is sent."""
    found: dict[str, Fact] = {}
    for labels, inputs in e.traffic:
        given = [i for i in inputs if e.kind(i) == "real"]
        limits = hull([tensor_bounds(e, i) for i in inputs if e.kind(i) != "real"])
        infinities = NONE.union(*(may_be_infinite(e, i) for i in given))
        finite = all(why_not_finite(e, i) is None for i in given)
        found.update(dict.fromkeys(labels, Fact(infinities, all(_is_defined(e, i) for i in given), limits, finite)))
    return found


def agrees(e: RankEmitter, traffic: Mapping[str, Fact], facts: Mapping[str, Fact]) -> bool:
    """Whether others send what these ranks send, wherever they meet."""
    met = {n for labels in (*e.labels.values(), *(sent for sent, _ in e.traffic)) for n in labels}
    return all(n in traffic and traffic[n] == facts[n] for n in met)


def joined(traffic: Sequence[Mapping[str, Fact]]) -> dict[str, Fact]:
    """What holds whoever sends."""
    labels = dict.fromkeys(n for one in traffic for n in one)
    return {n: _all([one[n] for one in traffic if n in one]) for n in labels}


def covers(facts: Mapping[str, Fact], traffic: Mapping[str, Fact]) -> bool:
    """Whether what was taken for granted is so."""

    def inside(label: str, fact: Fact) -> bool:
        return label in facts and _all([facts[label], fact]) == facts[label]

    return all(inside(label, fact) for label, fact in traffic.items())


__all__ = ["agrees", "covers", "exchanged", "is_number", "joined", "may_be_infinite", "never_zero", "why_not_finite"]
