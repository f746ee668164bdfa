"""`verify` with the proof engine left out: what random evaluation alone says of a plan."""

from __future__ import annotations

from unittest.mock import patch

from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.prove.algebra.engine import Proof
from trainverify.report import Report
from trainverify.verdicts import verify


def evaluated(logical: Program, plan: Plan, points: int = 1) -> Report:
    with patch("trainverify.verdicts.judge.prove", lambda system, wanted: Proof(failed=dict.fromkeys(wanted, "not tried"))):
        return verify(logical, plan, points=points)
