"""Of ops that should be others: which cause their difference shows."""

from __future__ import annotations

from fractions import Fraction

import pytest

from trainverify.explain.cause import Cause, of_changes
from trainverify.graph.program import Op


def add(*names: str) -> Op:
    return Op("add", names[:-1], names[-1:])


def times(given: str, made: str, factor: Fraction | int) -> Op:
    return Op("mul", (given,), (made,), (("value", factor),))


def adam(made: str) -> Op:
    return Op("adamw", ("w", "g", "m", "v"), (made, "m.new", "v.new"), (("step", 1),), "optimizer")


def summed(given: str, made: str) -> Op:
    return Op("all_reduce", (given,), (made,), (("group", "tp"),))


SUM = (add("a", "b", "c"),)
NORM = (Op("rms_norm", ("x", "w"), ("y",)),)

CASES: tuple[tuple[str, tuple[Op, ...], tuple[Op, ...], Cause | None], ...] = (
    ("a term twice", (add("a", "b", "s"), add("s", "a", "c")), SUM, Cause.COUNTED_TWICE),
    ("a term is lost", (Op("identity", ("b",), ("c",)),), SUM, Cause.LOST_CONTRIBUTION),
    ("another term", (add("a", "x", "c"),), SUM, Cause.WRONG_INPUT),
    ("all of the sum halved", (add("a", "b", "s"), times("s", "c", Fraction(1, 2))), SUM, Cause.WRONG_FACTOR),
    ("one term halved", (times("a", "s", Fraction(1, 2)), add("s", "b", "c")), SUM, Cause.WRONG_FACTOR),
    ("another op, doubled", (Op("rms_norm", ("x", "w"), ("s",)), times("s", "y", 2)), NORM, Cause.WRONG_FACTOR),
    ("the same sum in another order", (add("b", "a", "c"),), SUM, Cause.WRONG_INPUT),
    ("an optimizer's result is not used", (adam("w.unused"), Op("identity", ("w",), ("w.new",))), (adam("w.new"),), Cause.MISSING_UPDATE),
    ("summed twice", (summed("a", "once"), summed("once", "c")), (summed("a", "c"),), Cause.EXTRA_REDUCTION),
    ("one op too many", (Op("all_reduce", ("a",), ("c",)),), (), Cause.EXTRA_REDUCTION),
    ("one op too few", (), SUM, None),
)


@pytest.mark.parametrize(("mine", "theirs", "cause"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_what_ops_show(mine: tuple[Op, ...], theirs: tuple[Op, ...], cause: Cause | None) -> None:
    assert of_changes(mine, theirs) is cause
