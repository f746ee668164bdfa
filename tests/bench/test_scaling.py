"""Growth with one variable: the fit is right, what is measured is a whole verification, the picture is well-formed."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from trainverify.bench import scaling
from trainverify.bench.case import Case
from trainverify.bench.phases import Run
from trainverify.bench.plot import Plot, svg
from trainverify.bench.scaling import CONSTANT, LINEAR, SERIES, Result, Series
from trainverify.cli import run
from trainverify.zoo.parallel import Degrees

SVG = "{http://www.w3.org/2000/svg}"
TINY = {"hidden": 24, "heads": 6, "kv_heads": 2, "ffn": 20, "vocabulary": 40, "sequence": 10}


def tiny(dp: int) -> Case:
    return Case("tiny", "llama3-8b", Degrees(dp=dp, tp=2, zero=1), 1, 12, tuple(TINY.items()))


def timed(total: float, verdict: str = "PROVED") -> Run:
    return Run("x", verdict, "", 4, 1, 10, 3, {"axes": total / 4, "plan": total * 3 / 4}, 0.0, 1)


def test_variables_are_those_of_the_papers_figure_and_table() -> None:
    assert {s.name: s.figure for s in SERIES} == {
        "batch": "7b",
        "hidden": "7c",
        "sequence": "7d",
        "heads": "7e",
        "pp": "7f",
        "layers": "7g",
        "dp": "7h",
        "micro-batches": "7i",
        "tp": "7j",
    }
    assert {s.name for s in SERIES if s.aim == LINEAR} == {"pp", "layers", "micro-batches"}
    assert all(len(s.values) >= 4 and s.values[-1] >= 8 * s.values[0] for s in SERIES)


@pytest.mark.parametrize("name", [s.name for s in SERIES])
def test_one_thing_changes(name: str) -> None:
    s = next(s for s in SERIES if s.name == name)
    cases = [s.case(v) for v in s.values]
    fields = [{**vars(c.how), **dict(c.sizes), "layers": c.layers, "batch": c.batch} for c in cases]
    changed = {k for k in fields[0] if fields[0][k] != fields[-1][k]}
    field = {"micro-batches": "microbatches"}.get(name, name)
    assert changed == ({"hidden", "ffn"} if name == "hidden" else {field})
    assert [f[field] for f in fields] == list(s.values)


@pytest.mark.parametrize("power", [0.0, 0.09, 1.0, 1.7])
def test_exponent_of_whole_runs(power: float) -> None:
    s = Series("dp", "7h", (2, 6, 18), (2,), tiny, CONSTANT)
    runs = tuple((timed(9 * v**power), timed(3 * v**power), timed(2 * v**power)) for v in s.values)  # the quickest counts
    r = Result(s, s.values, runs)
    assert r.totals == pytest.approx([2 * v**power for v in s.values])
    assert r.exponent == pytest.approx(power)
    assert r.exponents() == {"axes": pytest.approx(power), "plan": pytest.approx(power)}
    assert ("missed" in r.text) == (power > 0.5)


def test_one_run_without_a_proof_counts() -> None:
    s = Series("dp", "7h", (2, 4), (2,), tiny, CONSTANT)
    assert Result(s, (2, 4), ((timed(1.0),), (timed(1.0),))).proved
    assert not Result(s, (2, 4), ((timed(1.0),), (timed(1.0), timed(1.0, "UNKNOWN")))).proved


def test_points_of_a_plot_are_where_they_belong() -> None:
    root = ET.fromstring(svg("a < b & c", [Plot("up", "slope 1", (1, 2, 4), (1, 2, 4)), Plot("flat", "", (1, 8), (3, 3))], "s"))
    lines = [[tuple(map(float, p.split(","))) for p in x.attrib["points"].split()] for x in root.iter(f"{SVG}polyline")]
    up, flat = lines
    assert len(up) == 3
    assert up[1][0] - up[0][0] == pytest.approx(up[2][0] - up[1][0], abs=0.2)  # logarithmic across
    assert up[0][1] - up[1][1] == pytest.approx(up[1][1] - up[2][1], abs=0.2)  # and upwards
    assert up[0][1] > up[2][1]
    assert flat[0][1] == flat[1][1]
    assert "a < b & c" in [t.text for t in root.iter(f"{SVG}text")]


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    series = (Series("dp", "7h", (2, 3, 6), (2, 6), tiny, CONSTANT), Series("tp", "7j", (1, 2), (1, 2), lambda n: tiny(2), CONSTANT))
    monkeypatch.setattr(scaling, "SERIES", series)
    file = tmp_path / "growth.svg"
    assert run(["bench", "scaling", "--only", "dp", "--repeat", "2", "--json", "--out", str(file)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["command"] == "bench scaling"
    (found,) = shown["series"]
    assert (found["variable"], found["figure"], found["aim"]) == ("dp", "7h", 0.1)
    assert [(c["value"], c["verdict"], c["ranks"], len(c["runs"])) for c in found["cases"]] == [
        (2, "PROVED", 4, 2),
        (3, "PROVED", 6, 2),
        (6, "PROVED", 12, 2),
    ]
    for c in found["cases"]:
        assert {"build", "validate", "axes", "logical", "plan", "compare", "cross-check"} == set(c["seconds"])
        assert c["total_seconds"] == pytest.approx(min(c["runs"]), abs=0.002)
    root = ET.parse(file).getroot()
    assert root.tag == f"{SVG}svg"
    assert len(list(root.iter(f"{SVG}circle"))) == 3


def test_wrong_usage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["bench", "scaling", "--only", "width"]) == 2
    assert "width" in capsys.readouterr().err
    assert run(["bench", "scaling", "--out", str(tmp_path / "none" / "x.svg")]) == 2
    assert "none/x.svg" in capsys.readouterr().err.replace("\n", "")
