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
from trainverify.graph.program import Output


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
