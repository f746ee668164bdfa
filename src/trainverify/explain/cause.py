"""Why a plan is wrong: a closed list, and which of it an op that should be another one shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from fractions import Fraction
from typing import Final

from trainverify.graph.program import Op

SUMS: Final = ("all_reduce", "reduce_scatter")
COLLECTIVES: Final = (*SUMS, "all_gather", "all_to_all")
OPTIMIZERS: Final = ("sgd", "adamw")
SCALES: Final = ("mul", "div", "full")
COPIES: Final = ("identity", "to", "reshape", "slice")
JOINS: Final = ("slice", "concat", "split", "all_gather", "all_to_all")


class Cause(Enum):
    """Why a plan is wrong: a closed list, one sentence each."""

    MISSING_REDUCTION = "A rank uses its own share where the sum over ranks is needed."
    EXTRA_REDUCTION = "A value that is whole on every rank is summed over ranks once more."
    EARLY_REDUCTION = "Ranks are summed before the last contribution, or before an op that must come first."
    WRONG_REDUCTION = "A reduction combines its operands in another way: the average in place of the sum."
    WRONG_GROUP = "A collective runs over other ranks than it should."
    WRONG_DIMENSION = "A tensor is cut or joined along another dimension."
    WRONG_ORDER = "A tensor has the right elements in another order."
    WRONG_BLOCK = "A rank takes another part of a tensor than its own."
    WRONG_INPUT = "An op reads another tensor than the one that is meant."
    STALE_INPUT = "An op reads a tensor from before a step whose result nothing uses."
    COUNTED_TWICE = "A contribution is added more than once."
    LOST_CONTRIBUTION = "A contribution is not added."
    WRONG_FACTOR = "A value has a factor too much or too little."
    UNEQUAL_WEIGHTS = "Parts of different sizes are weighted as if they had one size."
    RESCALED_SUM = "A factor is applied to the whole accumulated value each time, not to each contribution."
    OPTIMIZER_SETTING = "The optimizer runs with another rule, step number or weight decay."
    MISSING_UPDATE = "A parameter or state keeps its old value."


def base_name(op: Op) -> str:
    """The op whose gradient an op is, or the op itself."""
    return op.name.removesuffix(".grad")


def of_change(mine: Op, theirs: Op) -> Cause | None:
    """What is wrong with an op that should be another one."""
    a, b = base_name(mine), base_name(theirs)
    if b in OPTIMIZERS or a in OPTIMIZERS:
        return Cause.MISSING_UPDATE if a == "identity" else Cause.OPTIMIZER_SETTING
    if a in COLLECTIVES and b in COLLECTIVES:
        return _of_collectives(mine, theirs)
    if b in SUMS:
        return Cause.MISSING_REDUCTION if a in COPIES else None
    if a in SUMS:
        return Cause.EXTRA_REDUCTION if b in COPIES else None
    if a == b:
        return _of_attributes(a, {k for k, v in mine.attrs if theirs.get(k) != v} | {k for k, _ in theirs.attrs if mine.get(k) is None})
    if (a, b) == ("identity", "add"):
        return Cause.LOST_CONTRIBUTION
    if {a, b} == {"sum", "mean"}:
        return Cause.WRONG_REDUCTION
    if a in (*SCALES, "identity") and b in (*SCALES, "identity"):
        return Cause.WRONG_FACTOR
    return Cause.OPTIMIZER_SETTING if mine.phase == theirs.phase == "optimizer" else None


def _of_collectives(mine: Op, theirs: Op) -> Cause:
    if mine.get("dim") != theirs.get("dim"):
        return Cause.WRONG_DIMENSION
    return Cause.WRONG_GROUP if mine.get("group") != theirs.get("group") else Cause.WRONG_REDUCTION


def _of_attributes(name: str, changed: set[str]) -> Cause | None:
    if not changed:
        return Cause.WRONG_INPUT
    if changed & {"dim", "split_dim", "concat_dim"} and name in JOINS:
        return Cause.WRONG_DIMENSION
    if name == "slice":
        return Cause.WRONG_BLOCK
    return Cause.WRONG_FACTOR if name in SCALES and "value" in changed else None


def of_dropped(op: Op) -> Cause | None:
    """What is wrong with an op that is one too many."""
    name = base_name(op)
    if name in SUMS:
        return Cause.EXTRA_REDUCTION
    if name == "add":
        return Cause.COUNTED_TWICE
    if name in OPTIMIZERS:
        return Cause.OPTIMIZER_SETTING
    return Cause.WRONG_FACTOR if name in SCALES else None


def of_changes(mine: Sequence[Op], theirs: Sequence[Op]) -> Cause | None:
    """What is wrong with ops that should be others: of sums what they add how often, else the op that makes the same tensor."""
    if not mine or not theirs:
        return of_dropped(mine[0]) if mine else None
    made = theirs[-1].outputs
    same = next((op for op in mine if made and made[0] in op.outputs), mine[0])
    if sum(op.name in SUMS for op in mine) > sum(op.name in SUMS for op in theirs) > 0:
        return Cause.EXTRA_REDUCTION
    found, wanted = (_terms(ops).get(made[0]) if made else None for ops in (mine, theirs))
    if found is None or wanted is None or found == wanted:
        return of_change(same, theirs[-1])
    scaled = any(base_name(op) in SCALES for op in (*mine, *theirs))
    if found.keys() == wanted.keys() and scaled:
        return Cause.WRONG_FACTOR
    if found.keys() < wanted.keys() and all(wanted[t] == n for t, n in found.items()):
        return Cause.LOST_CONTRIBUTION
    if found.keys() == wanted.keys() and all((found[t] / n).denominator == 1 and found[t] / n >= 1 for t, n in wanted.items()):
        return Cause.COUNTED_TWICE
    return of_change(same, theirs[-1])


def _terms(ops: Sequence[Op]) -> Mapping[str, Mapping[str, Fraction]]:
    """What ops add up, by the tensors they make: how often each tensor, or result of another op, is in it."""
    known: dict[str, Mapping[str, Fraction]] = {}
    for op in ops:
        if len(op.outputs) != 1:
            continue
        given = [known.get(i, {i: Fraction(1)}) for i in op.inputs if i]
        factor = op.get("value")
        if op.name == "add" and factor is None:
            terms = {t: sum((g.get(t, Fraction(0)) for g in given), Fraction(0)) for g in given for t in g}
        elif op.name == "identity":
            terms = dict(given[0])
        elif op.name in ("mul", "div") and len(given) == 1 and isinstance(factor, int | Fraction) and factor:
            by = Fraction(factor) if op.name == "mul" else 1 / Fraction(factor)
            terms = {t: n * by for t, n in given[0].items()}
        else:
            terms = {f"{op.name}{op.inputs}{op.attrs}": Fraction(1)}
        known[op.outputs[0]] = terms
    return known
