"""Every right plan is proved and every wrong one is rejected; how good explanations are may only get better."""

from __future__ import annotations

from functools import cache

import pytest

from trainverify.bugs.case import Case
from trainverify.bugs.cases import CASES, KNOWN_OPEN
from trainverify.bugs.run import Outcome, counts, run_case

# Cases whose explanation is as expected.
FLOOR = {"cause": 80, "tensor": 72, "line": 79}


@cache
def outcome(case: Case) -> Outcome:
    return run_case(case)


def _expected(case: Case) -> object:
    if case.id not in KNOWN_OPEN:
        return pytest.param(case, id=case.id)
    return pytest.param(case, id=case.id, marks=pytest.mark.xfail(strict=True, reason=KNOWN_OPEN[case.id]))


@pytest.mark.parametrize("case", [_expected(c) for c in CASES])
def test_right_is_proved_and_wrong_is_rejected(case: Case) -> None:
    found = outcome(case)
    assert (found.right, found.wrong) in {("PROVED", "REFUTED"), ("PROVED", "INVALID")}


@pytest.mark.parametrize("id", sorted(KNOWN_OPEN))
def test_what_is_open_is_no_wrong_verdict(id: str) -> None:
    found = outcome(next(c for c in CASES if c.id == id))
    assert found.right in ("PROVED", "UNKNOWN")
    assert found.wrong != "PROVED"


def test_explanations_do_not_get_worse() -> None:
    found = counts([outcome(c) for c in CASES])
    print(found)
    for what, least in FLOOR.items():
        assert found[what] >= least, found
