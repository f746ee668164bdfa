"""SARIF and JUnit of every verdict."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

import trainverify as tv
from cli.models import model, plan
from report.schemas import SARIF, check_junit
from trainverify import files
from trainverify.cli import run
from trainverify.graph.program import Op, Source
from trainverify.report import Report
from trainverify.report.junit import junit
from trainverify.report.sarif import sarif
from trainverify.verdicts import verify

VERDICTS = ("PROVED", "REFUTED", "INVALID", "UNKNOWN", "PROVED(reduced)")


def changed(**changes: Any) -> tv.Plan:
    p = plan()
    (t,) = p.templates
    first: Op = replace(t.program.ops[0], **changes)
    return replace(p, templates=(replace(t, program=replace(t.program, ops=(first, *t.program.ops[1:]))),))


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    found = {
        "PROVED": verify(model(), plan(), points=1),
        "REFUTED": verify(model(), plan("sum"), points=1),
        "INVALID": verify(model(), changed(inputs=("x", "y")), points=1),
        "UNKNOWN": verify(model(), changed(name="mystery"), points=1),
        "PROVED(reduced)": verify(model(), plan(), points=1, engine="smt"),
        "odd": Report("UNKNOWN", "no \x00, no \ud800, {0} [x](y)", "<&> \"'"),
    }
    assert all(found[v].verdict == v for v in VERDICTS)
    return found


@pytest.mark.parametrize("name", [*VERDICTS, "odd"])
def test_valid(reports: dict[str, Report], name: str) -> None:
    jsonschema.validate(json.loads(sarif(reports[name], "plans/my plan.json")), SARIF)
    jsonschema.validate(json.loads(sarif(reports[name])), SARIF)
    check_junit(ElementTree.fromstring(junit(reports[name])))


def test_the_constraints_can_fail(reports: dict[str, Report]) -> None:
    tree = json.loads(sarif(reports["REFUTED"]))
    for path, value in ((("level",), "bad"), (("message",), "text"), (("locations", 0, "physicalLocation", "region", "startLine"), 0)):
        wrong = copy.deepcopy(tree)
        at = wrong["runs"][0]["results"][0]
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, SARIF)
    root = ElementTree.fromstring(junit(reports["REFUTED"]))
    del root[0].attrib["tests"]
    with pytest.raises(AssertionError):
        check_junit(root)


def test_sarif_of_a_refuted_plan(reports: dict[str, Report]) -> None:
    (result,) = json.loads(sarif(reports["REFUTED"]))["runs"][0]["results"]
    assert result["ruleId"] == "wrong-reduction"
    assert result["level"] == "error"
    text = "models.py:22: all_reduce(group=dp, op=sum) where all_reduce with avg over dp is needed."
    assert re.match(rf"Repair: at \S*{re.escape(text)}", result["message"]["text"])
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"].endswith("models.py")
    assert place["region"] == {"startLine": 22}
    assert result["relatedLocations"][0]["physicalLocation"]["region"] == {"startLine": 11}


def test_sarif_of_other_verdicts(reports: dict[str, Report]) -> None:
    assert json.loads(sarif(reports["PROVED"]))["runs"][0]["results"] == []
    finding, other = json.loads(sarif(reports["INVALID"], "p.json"))["runs"][0]["results"]
    assert finding["ruleId"] == reports["INVALID"].findings[0].code
    assert finding["level"] == other["level"] == "error"
    assert finding["locations"][0]["physicalLocation"]["region"]["startLine"] == 19
    (odd,) = json.loads(sarif(reports["odd"], "plans/my plan.json"))["runs"][0]["results"]
    assert odd["locations"][0]["physicalLocation"]["artifactLocation"] == {"uri": "plans/my%20plan.json", "uriBaseId": "SRCROOT"}
    assert odd["message"]["text"] == "UNKNOWN: no \x00, no \ud800, {{0}} [x] (y)"
    assert odd["level"] == "warning"


def test_files_here_and_elsewhere(reports: dict[str, Report]) -> None:
    place = reports["REFUTED"].place
    assert place is not None
    assert place.op is not None
    for file, uri in ((str(Path.cwd() / "a" / "ü.py"), "a/%C3%BC.py"), ("/far away/b.py", "file:///far%20away/b.py")):
        report = replace(reports["REFUTED"], place=replace(place, op=replace(place.op, source=Source(file, 3))))
        (result,) = json.loads(sarif(report))["runs"][0]["results"]
        assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == uri
    nowhere = replace(reports["REFUTED"], place=replace(place, op=replace(place.op, source=Source("<stdin>", 3))))
    assert "locations" not in json.loads(sarif(nowhere))["runs"][0]["results"][0]


@pytest.mark.parametrize(
    ("name", "failures", "errors"),
    [("PROVED", 0, 0), ("REFUTED", 3, 0), ("INVALID", 3, 0), ("UNKNOWN", 0, 2), ("PROVED(reduced)", 0, 4), ("odd", 0, 1)],
)
def test_junit_counts(reports: dict[str, Report], name: str, failures: int, errors: int) -> None:
    (suite,) = ElementTree.fromstring(junit(reports[name]))
    assert (int(suite.attrib["failures"]), int(suite.attrib["errors"])) == (failures, errors)
    assert (len(suite.findall("testcase/failure")), len(suite.findall("testcase/error"))) == (failures, errors)
    assert len(suite.findall("testcase")) == int(suite.attrib["tests"]) == 1 + len(reports[name].findings) + len(reports[name].obligations)


def test_an_accepted_proof_passes(reports: dict[str, Report]) -> None:
    (suite,) = ElementTree.fromstring(junit(replace(reports["PROVED(reduced)"], accept_reduced=True)))
    assert (suite.attrib["failures"], suite.attrib["errors"]) == ("0", "0")


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    files.write("model.json", model())
    files.write("wrong.json", plan("sum"))
    assert run(["verify", "model.json", "wrong.json", "--sarif", "r.sarif", "--junit", "r.xml", "--points", "1"]) == 1
    assert json.loads(Path("r.sarif").read_text())["runs"][0]["properties"]["verdict"] == "REFUTED"
    assert ElementTree.parse("r.xml").getroot()[0].attrib["failures"] == "3"
    assert run(["verify", "model.json", "wrong.json", "--sarif", "none/r.sarif"]) == 2
    capsys.readouterr()
    assert run(["verify", "model.json", "wrong.json", "--timeout", "0.001", "--sarif", "late.sarif"]) == 3
    (result,) = json.loads(Path("late.sarif").read_text())["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "wrong.json"
