"""The commands that measure at scale, at small sizes."""

from __future__ import annotations

import json

import pytest

from trainverify.bench.case import Case
from trainverify.bench.phases import Run, verified
from trainverify.bench.table3 import ROWS
from trainverify.cli import run
from trainverify.zoo.parallel import Degrees


def test_rows_are_the_papers() -> None:
    ranks = {r.case.name: r.case.how.dp * r.case.how.tp * r.case.how.pp for r in ROWS}
    assert ranks == {"L1": 512, "L2": 512, "L3": 8192, "D1": 128, "D2": 512, "D3": 2048}
    assert all(r.case.how.zero == 1 for r in ROWS)


def test_one_layer_of_l1_in_a_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "table3", "--only", "L1", "--layers", "1", "--json"]) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert (case["verdict"], case["ranks"], case["paper_hours"]) == ("PROVED", 512, 0.5)
    assert {"build", "validate", "axes", "logical", "plan", "compare", "cross-check"} == set(case["seconds"])
    assert case["megabytes"] > 20


def test_unknown_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "table3", "--only", "L9"]) == 2
    assert "L9" in capsys.readouterr().err


def test_case_goes_to_a_process_and_back() -> None:
    case = Case("x", "llama3-8b", Degrees(dp=2, zero=1), 1, 4, (("hidden", 64),))
    assert Case.read(case.text()) == case
    assert Run(**json.loads(json.dumps(vars(verified(Case("y", "llama3-8b", Degrees(), 1))[0])))).verdict == "PROVED"


def test_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["mutate", "--zoo", "llama3-8b", "--tiny", "--layers", "1", "--dp", "2", "--tp", "2", "--count", "6", "--json"]
    assert run(arguments) == 0
    *mutants, found = map(json.loads, capsys.readouterr().out.splitlines())
    assert [m["mutant"]["seed"] for m in mutants] == list(range(6))
    assert found["bad"] == []
    assert sum(found["verdicts"].values()) == 6
    assert found["verdicts"]["INVALID"] + found["verdicts"]["REFUTED"] >= 3
