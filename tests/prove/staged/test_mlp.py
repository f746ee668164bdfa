"""An MLP on dp2×pp2×tp2 by stages alone: the plan is proved at reduced sizes, mistakes in it are refuted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prove.staged.mistakes import MISTAKES
from tools.campaign.agree import staged
from trainverify.evaluate import full_size
from trainverify.prove import scope
from trainverify.prove.propose.search import DIFFERS
from trainverify.verdicts import verify
from verdicts.mlp import logical, plan


def test_plan_is_proved() -> None:
    report = verify(logical(), plan(), engine="smt", points=1)
    assert report.verdict == "PROVED(reduced)", report.notes
    assert report.exit_code == 3
    assert {(o.engine, o.scope, o.status) for o in report.obligations} == {("smt", "reduced sizes", "proved")}
    assert replace(report, accept_reduced=True).exit_code == 0


def test_workers_say_the_same() -> None:
    report = verify(logical(), plan(), engine="smt", points=1, workers=2)
    assert report.verdict == "PROVED(reduced)", report.notes


def test_both_engines_agree() -> None:
    report = verify(logical(), plan(), engine="both", points=1)
    assert report.verdict == "PROVED"
    assert {o.engine for o in report.obligations} == {"algebra"}


def test_what_is_too_large_for_stages_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: a mistake is seen also where nothing is cut, and nothing is proved."""
    monkeypatch.setattr(scope, "MAX_ELEMENTS", 100)
    assert set(staged(logical(), plan()).failed.values()) == {"too large, even at reduced sizes"}
    _, change = MISTAKES["other micro-batch"]
    assert DIFFERS in staged(logical(), change(plan())).failed.values()
    monkeypatch.setattr(full_size, "ELEMENTS", 10)
    assert DIFFERS not in staged(logical(), change(plan())).failed.values()


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refuted(name: str) -> None:
    stage, change = MISTAKES[name]
    report = verify(logical(), change(plan()), engine="smt", points=1)
    assert report.verdict == "REFUTED"
    assert any(f"; stage {stage} " in n for n in report.notes), report.notes
