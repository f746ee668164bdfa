"""A point where the logical program has no value shows nothing: agreeing with it is not agreement."""

from __future__ import annotations

import numpy as np
import pytest

from trainverify.evaluate.compare import suspects
from trainverify.evaluate.run import NotComputed, PlanValues
from trainverify.evaluate.small import Small
from trainverify.graph.obligations import Obligation
from trainverify.graph.program import Output


def test_nan_on_both_sides_is_not_equal() -> None:
    small = Small.__new__(Small)
    small.classes = []
    wanted = [Obligation(Output("loss", "loss"), ())]
    with pytest.raises(NotComputed, match="loss of the logical program has no value"):
        suspects(small, wanted, {"loss": np.array(np.nan)}, PlanValues())
