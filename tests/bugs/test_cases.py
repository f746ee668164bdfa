"""The corpus is what it claims to be: 80 pairs that differ where the bug is, with expectations that follow from the bug."""

from __future__ import annotations

import re
from pathlib import PurePath

import pytest

from bugs.pairs import changed
from trainverify.bugs.case import Case
from trainverify.bugs.cases import CASES, KNOWN_OPEN
from trainverify.explain.cause import Cause

MANY = {"B124"}  # Muon in place of AdamW: a rule of several ops
by_id = pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)


def test_there_are_80_cases() -> None:
    assert len({c.id for c in CASES}) == len(CASES) == 80  # the last one is the paper's case study
    assert len({c.title for c in CASES}) == len(CASES)
    assert KNOWN_OPEN.keys() <= {c.id for c in CASES}


def test_causes_are_a_closed_list() -> None:
    assert len(Cause) <= 20
    assert {c.cause for c in CASES} == set(Cause)  # each is the cause of some case
    for cause in Cause:
        assert re.fullmatch(r"[A-Z][^.]*\.", cause.value), cause


@by_id
def test_case_is_described(case: Case) -> None:
    assert re.fullmatch(r"B\d+", case.id)
    assert re.search(r"[#@]\w+|paper", case.reference)
    assert re.fullmatch(r"[A-Z].*\.", case.mechanism)
    assert len(case.mechanism) <= 140


@by_id
def test_plans_differ_where_the_bug_is(case: Case) -> None:
    (first, right), (second, wrong) = case.build(True), case.build(False)
    assert first.ops == second.ops
    assert first.outputs == second.outputs
    assert right.size >= 2
    ops = changed(right, wrong)
    assert 1 <= len(ops) <= (12 if case.id in MANY else 9), [str(op) for op in ops]
    assert set(case.tensors) <= {o for op in ops for o in op.outputs}
    gone = changed(wrong, right)  # an op that the bug leaves out marks the line as well
    lines = {(PurePath(op.source.file).name, op.source.line) for op in ops + gone if op.source is not None}
    assert case.lines()
    assert case.lines() <= lines
