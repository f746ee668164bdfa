"""Exported tests fail for the wrong plan and pass for the right one, without TrainVerify."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cli.models import model, plan
from trainverify import files
from trainverify.bugs.cases import CASES
from trainverify.cli import run
from trainverify.counterexample import of_earlier, smallest
from trainverify.explain.place import Place
from trainverify.ops import OPS
from trainverify.refusal import Refused
from trainverify.report import Compared, Report
from trainverify.report.exported.pytest_file import Earlier, earlier, exported
from trainverify.verdicts import verify

NOWHERE = Place("", None, 0, "", None, "")
BUGS = ("B06", "B14", "B24", "B36", "B40", "B55", "B71", "B85", "B113", "B125")  # erf, ids, masks, messages, shards; reduced and not
ALONE = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTEST_ADDOPTS")}


def outcomes(*paths: Path) -> dict[str, set[str]]:
    """What pytest says of every test, by file; TrainVerify cannot be imported there."""
    for p in paths:
        assert "trainverify" not in re.findall(r"^(?:import|from) (\w+)", p.read_text("utf-8"), re.MULTILINE)
    call = [sys.executable, "-m", "pytest", "-rA", "-q", "-p", "no:cacheprovider", "--tb=no", "--import-mode=importlib", *map(str, paths)]
    done = subprocess.run(call, capture_output=True, encoding="utf-8", env=ALONE, cwd=paths[0].parent, timeout=300)
    found: dict[str, set[str]] = {p.name: set() for p in paths}
    for outcome, name in re.findall(r"^(PASSED|FAILED|ERROR) (\w+\.py)", done.stdout, re.MULTILINE):
        found[name].add(outcome)
    return found


def refuted(case_id: str) -> Report:
    case = next(c for c in CASES if c.id == case_id)
    report = verify(*case.build(False), points=1, locator=lambda *_: NOWHERE)
    assert report.verdict == "REFUTED"
    return report


def test_real_bugs(tmp_path: Path) -> None:
    cases = {c.id: c for c in CASES}
    for bug in BUGS:
        report = refuted(bug)
        text = exported(smallest(report), report.subject)
        (tmp_path / f"wrong_{bug}.py").write_text(text, "utf-8")
        right = of_earlier(Compared(*cases[bug].build(True), OPS), earlier(text, bug))
        (tmp_path / f"right_{bug}.py").write_text(exported(right, "the right plan"), "utf-8")
    found = outcomes(*(tmp_path / f"{kind}_{bug}.py" for bug in BUGS for kind in ("wrong", "right")))
    assert found == {f"{kind}_{bug}.py": {outcome} for bug in BUGS for kind, outcome in (("wrong", "FAILED"), ("right", "PASSED"))}


def test_inputs_are_short_and_sizes_are_small() -> None:
    example = smallest(verify(model(), plan("sum")))
    assert example.small.reduced
    assert example.small.shapes["x"] == (6, 2)
    assert all(np.array_equal(v, np.round(v, 1)) for v in example.inputs.values())
    assert [str(o) for o in example.wanted] == ["gradient of w", "updated parameter w"]


def test_names_cannot_become_code() -> None:
    report = verify(model(), plan("sum"))
    assert report.compared is not None
    evil = 'x"""\nimport os\n#'
    text = exported(smallest(report), evil, [evil, "\\", 'ends with "'])
    assert "\nimport os" not in text
    compile(text, "exported", "exec")


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    files.write("model.json", model())
    files.write("good.json", plan())
    files.write("wrong.json", plan("sum"))
    assert run(["verify", "model.json", "wrong.json", "--export-test", "bad.py"]) == 1
    assert "test exported: pytest bad.py\n" in capsys.readouterr().out
    assert run(["verify", "model.json", "good.json", "--export-test", "fixed.py", "--counterexample", "bad.py"]) == 0
    assert earlier(Path("bad.py").read_text(), "").obligations == earlier(Path("fixed.py").read_text(), "").obligations
    assert outcomes(tmp_path / "bad.py", tmp_path / "fixed.py") == {"bad.py": {"FAILED"}, "fixed.py": {"PASSED"}}
    capsys.readouterr()
    assert run(["verify", "model.json", "good.json", "--export-test", "nothing.py"]) == 0
    assert "no test exported: PROVED, there is no counterexample\n" in capsys.readouterr().out
    assert run(["verify", "model.json", "wrong.json", "--export-test", "nowhere/x.py"]) == 2
    assert run(["verify", "model.json", "good.json", "--counterexample", "bad.py"]) == 2
    assert sorted(p.name for p in tmp_path.glob("*.py")) == ["bad.py", "fixed.py"]


@pytest.mark.parametrize(
    "text", ["", "INPUTS = 3", "INPUTS = {}\nOBLIGATIONS = open('x')", "def (", "INPUTS={'x': ['a']}\nOBLIGATIONS=['loss']"]
)
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(Refused, match=r"^f\.py: "):
        earlier(text, "f.py")


def test_other_sizes_are_refused() -> None:
    report = verify(model(), plan())
    assert report.compared is not None
    with pytest.raises(Refused, match="other sizes"):
        of_earlier(report.compared, Earlier({"x": np.zeros((1, 1))}, ("loss",)))
    with pytest.raises(Refused, match="none of the outputs"):
        of_earlier(report.compared, Earlier({}, ("gradient of v",)))
    with pytest.raises(Refused, match="no counterexample"):
        smallest(replace(report, compared=None))
