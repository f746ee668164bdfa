"""Phases with counts and times, the first failure at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.models import model, plan
from trainverify import files
from trainverify.cli import run
from trainverify.progress import Counted, Failure, Phases
from trainverify.verdicts import verify


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def told(every: bool, *events: tuple[float, str]) -> tuple[list[str], Phases]:
    clock, lines = Clock(), list[str]()
    phases = Phases(lines.append, every, clock)
    for at, text in events:
        clock.now = at
        phases.tell(text)
    return lines, phases


EVENTS = (
    (0.2, "checking the plan"),
    (0.3, "proving"),
    (0.4, Counted("proving", 1, 1200, "obligations")),
    (7.0, Counted("proving", 700, 1200, "obligations")),
    (9.3, "evaluating 3 points"),
    (9.5, Failure("loss differs on rank 0")),
    (9.6, Failure("another one")),
)


def test_on_a_terminal_long_phases_are_kept() -> None:
    lines, phases = told(False, *EVENTS)
    assert lines == ["   9.0 s  proving (1,200 obligations)", "   9.5 s  loss differs on rank 0"]
    assert phases.line() == "evaluating 3 points  0 s, 10 s in all"


def test_a_report_that_comes_as_soon_is_not_announced() -> None:
    lines, _ = told(False, (0.1, "evaluating 3 points"), (0.2, Failure("loss differs on rank 0")))
    assert lines == []


def test_every_phase_in_a_log() -> None:
    lines, _ = told(True, *EVENTS)
    assert lines == [
        "   0.2 s  checking the plan",
        "   0.3 s  proving",
        "   7.0 s  proving: 700 of 1,200 obligations",
        "   9.3 s  evaluating 3 points",
        "   9.5 s  loss differs on rank 0",
    ]


def test_what_verify_tells() -> None:
    heard: list[str] = []
    verify(model(), plan("sum"), points=1, progress=heard.append)
    assert [e for e in heard if isinstance(e, Counted)][-1] == "proving: 2 of 3 obligations"
    (failure,) = [e for e in heard if isinstance(e, Failure)]
    assert failure == "gradient of w differs on rank 0: got 0.0883653595335, want 0.0294551198445"
    assert heard.index(failure) < heard.index("locating the first wrong tensor")


def test_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    files.write("model.json", model())
    files.write("wrong.json", plan("sum"))
    assert run(["verify", "model.json", "wrong.json", "--progress", "--fail-fast"]) == 1
    shown = capsys.readouterr()
    assert " s  checking the plan\n" in shown.err
    assert " s  gradient of w differs on rank 0: got 0.08" in shown.err
    assert shown.out.startswith("REFUTED ")
