"""A point where the logical program has no value shows nothing: agreeing with it is not agreement."""

from __future__ import annotations

import numpy as np
import pytest

import trainverify as tv
from trainverify.evaluate.compare import suspects
from trainverify.evaluate.run import NotComputed, PlanValues
from trainverify.evaluate.small import Small
from trainverify.graph.lineage import layout
from trainverify.graph.obligations import Holding, Obligation
from trainverify.graph.program import Output, Program


def test_nan_on_both_sides_is_not_equal() -> None:
    small = Small.__new__(Small)
    small.classes = []
    wanted = [Obligation(Output("loss", "loss"), ())]
    with pytest.raises(NotComputed, match="loss of the logical program has no value"):
        suspects(small, wanted, {"loss": np.array(np.nan)}, PlanValues())


def test_what_no_evaluated_rank_holds_is_not_equal() -> None:
    small = Small.__new__(Small)
    small.classes = []  # a sample without the holder
    wanted = [Obligation(Output("loss", "loss"), (Holding(layout("loss", "", "loss"), (7,)),))]
    with pytest.raises(NotComputed, match="loss is held by no rank that is evaluated"):
        suspects(small, wanted, {"loss": np.array(1.0)}, PlanValues())


def test_no_points_no_proof() -> None:
    b = tv.program("p")
    b.loss(b.sum(b.input("x", (3,))))
    program = b.build()
    with pytest.raises(ValueError, match="points"):
        tv.verify(program, program, points=0)


HIDING = {"quotient": lambda b, x: b.div(x, x), "logarithm": lambda b, x: b.log(x), "root": lambda b, x: b.sqrt(x)}


def asked(kind: str, asks: bool) -> Program:
    """w where v is no number, else z; or z."""
    b = tv.program("asked")
    x, w, z = (b.input(n, (3,)) for n in "xwz")
    v = HIDING[kind](b, x)
    b.loss(b.sum(b.where(b.ne(v, v), w, z) if asks else z, name="loss"))
    return b.build()


@pytest.mark.parametrize("kind", HIDING)
def test_what_is_no_number_differs_from_itself(kind: str) -> None:
    """UNKNOWN: v ≠ v, PyTorch's `isnan`, is false of all numbers, and v is none where its operand is 0 or negative."""
    assert tv.verify(asked(kind, True), asked(kind, True)).verdict == "PROVED"
    for logical, plan in ((True, False), (False, True)):
        assert tv.verify(asked(kind, logical), asked(kind, plan), points=1).verdict != "PROVED"


def first(last: bool) -> Program:
    """The position of the largest element: of equal ones the first one, or the last one."""
    b = tv.program("first")
    x = b.input("x", (5,))
    at = b.sub(b.full(shape=(), value=4, dtype="i64"), b.argmax(b.flip(x, dims=(0,)), dim=0)) if last else b.argmax(x, dim=0)
    b.loss(b.to(at, dtype="f32"))
    return b.build()


def test_of_equal_elements_the_first_one_is_meant() -> None:
    """Expected: not PROVED, although no random point has equal elements."""
    assert tv.verify(first(False), first(False)).verdict == "PROVED"
    assert tv.verify(first(False), first(True)).verdict != "PROVED"


@pytest.mark.parametrize("op", ["mod", "floordiv"])
def test_another_divisor_gives_other_integers(op: str) -> None:
    """REFUTED: 5 is no 3, and of a negative integer the remainder is not negative."""

    def program(value: int, negated: bool = False) -> Program:
        b = tv.program("divided")
        ids = b.sub(b.input("ids", (7,), "i64", ids=19), value=9)
        made = b.neg(getattr(b, op)(b.neg(ids), value=value)) if negated else getattr(b, op)(ids, value=value)
        b.loss(b.sum(b.to(made, dtype="f32"), name="loss"))
        return b.build()

    assert tv.verify(program(3), program(3)).verdict == "PROVED"
    assert tv.verify(program(3), program(5)).verdict == "REFUTED"
    assert tv.verify(program(3), program(3, True)).verdict == "REFUTED"
