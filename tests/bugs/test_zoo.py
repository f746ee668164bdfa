"""Bugs of the corpus inside plans of the zoo at real widths: rejected, with the planted cause, tensor and sites."""

from __future__ import annotations

import json

import pytest

from trainverify.bugs.cases import CASES
from trainverify.bugs.zoo_cases import PLANTED, SYSTEMATIC, ZooCase
from trainverify.bugs.zoo_run import run_zoo_case
from trainverify.cli import run

QUICK = ("B07", "B22")
OPEN = {  # cases whose explanation is not the planted one, and what it says instead
    "B28": "all-to-all over edp in place of ep: no tensor matches",
    "B72": "weight of the balance of experts: no tensor matches",
}
NO_VERDICT = {"B76": "UNKNOWN: 1/4096 in the balance of experts may count what was reduced"}


def test_bugs_are_those_of_the_corpus() -> None:
    causes = {c.id: c.cause for c in CASES}
    assert len(PLANTED) >= 30
    assert len({c.id for c in PLANTED}) == len(PLANTED)
    for case in PLANTED:
        assert causes[case.id] is case.cause, case.id
    assert len({c.id for c in SYSTEMATIC}) == 10
    assert len(SYSTEMATIC) == 30


def test_every_bug_finds_its_ops() -> None:
    for case in (*PLANTED, *SYSTEMATIC):
        _, plan, sites = case.build()
        assert sites
        if case.systematic and case.plants[0].most is not None:
            assert len(sites) == case.plants[0].most
        assert plan.size >= 4


def _check(case: ZooCase) -> None:
    found = run_zoo_case(case)
    if case.id in NO_VERDICT:
        assert found.verdict == "UNKNOWN"
        return
    assert found.verdict_holds, found.verdict
    if case.id not in OPEN:
        assert found.cause_holds, (found.found.cause, found.found.text)
        assert found.tensor_holds, found.found.tensor
        assert found.sites_hold, found.named


@pytest.mark.parametrize("case", [c for c in PLANTED if c.id in QUICK], ids=lambda c: c.id)
def test_planted(case: ZooCase) -> None:
    _check(case)


@pytest.mark.long
@pytest.mark.parametrize("case", [c for c in PLANTED if c.id not in QUICK], ids=lambda c: c.id)
def test_all_planted(case: ZooCase) -> None:
    _check(case)


@pytest.mark.long
@pytest.mark.parametrize("case", SYSTEMATIC, ids=lambda c: f"{c.id}-{c.plants[0].most or 'all'}")
def test_several_sites(case: ZooCase) -> None:
    _check(case)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bugs", "--zoo", "B07", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdicts"], found["cause"], found["tensor"], found["sites"]) == (1, 1, 1, 1)
    assert found["planted"][0]["cause"] == {**found["planted"][0]["cause"], "expected": "MISSING_REDUCTION", "found": "MISSING_REDUCTION"}
    assert run(["bugs", "--several"]) == 2
    assert run(["bugs", "--zoo", "B129"]) == 2
    assert "B129: not planted in the zoo; those that are: B06, B07" in capsys.readouterr().err
