"""The measurements measure what they say: phases, counts, growth."""

from __future__ import annotations

import json

import pytest

from trainverify.bench import algebra
from trainverify.bench.algebra import SERIES, Result, Series
from trainverify.bench.case import Case
from trainverify.bench.clock import Clock, exponent, in_turns, least
from trainverify.bench.measure import PHASES, PROVE, measure
from trainverify.cli import run
from trainverify.zoo.parallel import Degrees

TINY = {"layers": 1, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 48, "vocabulary": 64, "sequence": 16, "batch": 4}


def tiny(dp: int) -> Case:
    return Case("tiny", "llama3-8b", Degrees(dp=dp, tp=2), sizes=tuple(TINY.items()))


def test_growth() -> None:
    assert exponent([1, 2, 4, 8], [3, 6, 12, 24]) == pytest.approx(1)
    assert exponent([1, 2, 4, 8], [5, 5, 5, 5]) == pytest.approx(0)
    assert exponent([2, 4, 8], [4, 16, 64]) == pytest.approx(2)


def test_clock_counts_every_moment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr("time.process_time", lambda: next(now))
    clock = Clock("build")
    with clock.phase("compare"), clock.phase("plan"):
        pass
    clock.enter("")
    assert clock.seconds == {"build": 2, "compare": 2, "plan": 1}


def test_cases_take_turns() -> None:
    order: list[str] = []

    def once(case: str, before: object) -> int | None:
        order.append(case)
        return None if case == "b" and before else len(order)

    assert in_turns(["a", "b"], 3, once) == [[1, 3, 5], [2]]
    assert order == ["a", "b"] * 3
    runs = [{"x": 1.0}, {"x": 5.0, "y": 2.0}, {"x": 3.0, "y": 3.0}]
    assert least(runs, ["x", "y", "z"]) == {"x": 3.0, "y": 3.0}  # the quickest of those that have most of them
    assert least(runs, ["x"]) == {"x": 1.0}


def test_phases_and_counts() -> None:
    two, four = measure([tiny(2), tiny(4)], repeat=1)
    assert not two.failed
    assert not four.failed
    assert (two.ranks, four.ranks) == (4, 8)
    assert two.folded == four.folded == 1
    assert two.folded_ops == four.folded_ops
    assert four.ops == 8 * four.folded_ops
    assert set(two.seconds) == set(two.megabytes) == set(PHASES)
    assert all(s >= 0 for s in two.seconds.values())
    assert two.prove == pytest.approx(sum(two.seconds[p] for p in PROVE))


def test_quick_cases_are_proved() -> None:
    for s in SERIES:
        assert set(s.quick) <= set(s.values)
    (result,) = algebra.bench(quick=True, only="dp")
    assert not any(m.failed for m in result.found)
    assert result.table().row_count == len(result.values) + 1


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    one = Series("dp", (2, 4), (2, 4), tiny, False)
    monkeypatch.setattr(algebra, "SERIES", (one,))
    assert run(["bench", "algebra", "--quick", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["command"] == "bench algebra"
    (series,) = shown["series"]
    assert series["expected"] == "constant"
    assert [c["value"] for c in series["cases"]] == [2, 4]
    assert {"seconds", "prove_seconds", "ops_per_second", "ops_per_second_all_ranks"} <= set(series["cases"][0])
    assert run(["bench", "algebra", "--quick"]) == 0
    assert "prove time within" in capsys.readouterr().out


def test_cost_per_op_where_it_should_be_linear() -> None:
    s = Series("layers", (1, 2), (1, 2), tiny, True)
    found = measure([tiny(2), tiny(2)], repeat=1, memory=False, evaluate=False)
    found[1].folded_ops *= 2
    found[1].seconds = {p: 2 * t for p, t in found[0].seconds.items()}
    r = Result(s, (1, 2), tuple(found))
    assert r.ratio == pytest.approx(1)
    assert r.exponent == pytest.approx(1)
