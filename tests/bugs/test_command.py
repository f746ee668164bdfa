"""`trainverify bugs` reports verdicts and explanations, and its page is current."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trainverify.bugs.cases import CASES
from trainverify.bugs.page import page
from trainverify.cli import run


def test_page_is_current() -> None:
    assert (Path(__file__).parents[2] / "docs" / "bugs.md").read_text("utf-8") == page()


def test_two_cases_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bugs", "B06", "B37", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["command"], found["exit_code"], found["verdicts"]) == ("bugs", 0, 2)
    first, second = found["cases"]
    assert (first["right"], first["wrong"], first["cause"]["expected"]) == ("PROVED", "REFUTED", "MISSING_REDUCTION")
    assert first["tensor"]["expected"] == ["b.grad.tp"]
    assert second["known_open"] is None


def test_text_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bugs", "B33"]) == 0
    text = capsys.readouterr().out
    for part in ("B33", "PROVED", "INVALID", "WRONG_GROUP", "k.inner", "groups.py:", "ColossalAI", "verdicts 1 of 1"):
        assert part in text


def test_a_wrong_verdict_is_exit_code_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(c for c in CASES if c.id == "B37")
    monkeypatch.setattr("trainverify.cli.bugs.CASES", (replace(case, build=lambda right: case.build(True)),))
    assert run(["bugs", "B37"]) == 1
    assert "verdicts 0 of 1" in capsys.readouterr().out


def test_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bugs", "B6"]) == 2
    assert "B6: no such case; they are B06 to B130" in capsys.readouterr().err
