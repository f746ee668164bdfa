"""A slice of the campaign with counts as literals, and what its outcomes mean."""

from __future__ import annotations

import random
from typing import Any

import pytest

import trainverify as tv
from tools.campaign import counts
from tools.campaign.counted import Counted, Draw, around
from tools.campaign.counted_steps import step
from tools.campaign.counts import FAMILIES, Outcome, Summary, campaign, judge, make
from trainverify.mutate.simulate import worst
from trainverify.report import Report

CASES, BLOCKS = 15, 3


def few_ranks(seed: int) -> bool:
    return make(seed)[0].right.size <= 128


@pytest.mark.parametrize("block", range(BLOCKS))
def test_slice(block: int) -> None:
    """Expected: no correct plan REFUTED, no wrong one PROVED, no error; hardly any without a verdict."""
    seeds = [s for s in range(200) if few_ranks(s)][:CASES][block::BLOCKS]
    summary = campaign(seeds, seconds=10)
    assert not summary.generator, list(summary.lines())
    assert not summary.bad, list(summary.lines())
    assert summary.simulated == 2 * len(seeds)
    assert summary.no_verdict("wrong") <= 0.2, list(summary.lines())
    assert summary.verdicts["correct"]["PROVED"] > 0


def test_cases_come_from_seeds() -> None:
    for seed in (3, 8):
        (a, one), (b, other) = make(seed), make(seed)
        assert (a.logical, a.right, one) == (b.logical, b.right, other)
        assert a.wrong[one]() == b.wrong[one]() != a.right
    assert make(3)[0].logical != make(8)[0].logical


@pytest.mark.parametrize("family", dict.fromkeys(FAMILIES), ids=lambda f: f.__name__)
def test_every_twin_of_a_family_is_wrong_in_the_simulation(family: Any) -> None:
    case = small_case(family)
    assert worst(case.logical, case.right)[0] < counts.AGREES
    for mistake, plan in case.wrong.items():
        assert max(worst(case.logical, plan(), point)[0] for point in range(counts.POINTS)) > counts.DIFFERS, mistake


def small_case(family: Any) -> Counted:
    for seed in range(100):
        case: Counted = family(Draw(random.Random(seed)))
        if case.right.size <= 8:
            return case
    for seed in range(100):
        case = family(Draw(random.Random(seed)))
        if case.right.size <= 128:
            return case
    raise AssertionError("only plans of many ranks")


def test_counts_are_spelled_in_all_ways() -> None:
    """Integers, floats, fractions, and columns over ranks are among the literals; and so are many ranks."""
    kinds: set[str] = set()
    sizes: set[int] = set()
    for seed in range(60):
        case, _ = make(seed)
        sizes.add(case.right.size)
        for t in case.right.templates:
            values = [op.get("value") for op in t.program.ops if op.name in ("div", "mul", "add", "sub", "le", "full")]
            kinds |= {type(v).__name__ for v in values}
            kinds |= {f"column of {type(c[0]).__name__}" for c in t.bindings.values()}
    assert kinds >= {"int", "float", "Fraction", "Ref", "column of int", "column of float"}
    assert sizes >= {65, 72, 96, 128}
    assert max(sizes) >= 1000


def test_wrong_counts_are_near_and_far() -> None:
    assert around(12, dp=4) == {
        "one more": 13,
        "one less": 11,
        "doubled": 24,
        "forgotten": 1,
        "divided twice": 144,
        "times dp": 48,
        "over dp": 3,
    }
    assert 0 not in around(1).values()


def verdicts(monkeypatch: pytest.MonkeyPatch, verify: Any) -> list[str]:
    monkeypatch.setattr(tv, "verify", verify)
    return [o.verdict + ("!" if o.bad else "") for o in judge(small_seed(), 5.0)]


def small_seed() -> int:
    return next(s for s in range(100) if make(s)[0].right.size <= 8 and not make(s)[0].open)


def test_what_must_not_happen_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    def report(verdict: Any) -> Any:
        return lambda *_: Report(verdict, "", "")

    def fails(*_: Any) -> Any:
        raise RuntimeError("internal")

    assert verdicts(monkeypatch, report("PROVED")) == ["PROVED", "PROVED!"]
    assert verdicts(monkeypatch, report("PROVED(reduced)")) == ["PROVED(reduced)", "PROVED(reduced)!"]
    assert verdicts(monkeypatch, report("REFUTED")) == ["REFUTED!", "REFUTED"]
    assert verdicts(monkeypatch, report("UNKNOWN")) == ["UNKNOWN", "UNKNOWN"]
    assert verdicts(monkeypatch, fails) == ["CRASH!", "CRASH!"]


def test_a_case_that_is_not_what_it_should_be_is_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = small_seed()
    case, mistake = make(seed)
    swapped = Counted(case.family, case.logical, case.wrong[mistake](), {mistake: lambda: case.right})
    monkeypatch.setattr(counts, "make", lambda _: (swapped, mistake))
    summary = Summary()
    for o in judge(seed, 5.0):
        summary.add(o)
    assert [o.verdict for o in summary.generator] == ["GENERATOR", "GENERATOR"]
    assert not any(summary.verdicts.values())
    assert summary.simulated == 2


def test_the_table_says_what_was_judged_and_simulated() -> None:
    summary = Summary()
    summary.add(Outcome(7, "correct", "step", "", "REFUTED", True, "loss differs", 65, 130, 0.5, 0.1))
    summary.add(Outcome(7, "wrong", "step", "one more", "UNKNOWN", False, "different forms", 65, 130, 0.5, 0.1))
    text = "\n".join(summary.lines())
    assert "correct plans: 1: 1 REFUTED" in text
    assert "without a verdict 100.0 %" in text
    assert "simulated with all ranks at full size: 2 plans; of those judged 2 have more than 64 ranks" in text
    assert "REFUTED of a correct plan: seed 7, step, 65 ranks" in text
    assert summary.json()["no_verdict"] == {"correct": 0.0, "open": 0.0, "wrong": 1.0}


def test_a_plan_that_is_open_is_correct() -> None:
    seed = next(s for s in range(300) if step(Draw(random.Random(s))).open and step(Draw(random.Random(s))).right.size < 200)
    case = step(Draw(random.Random(seed)))
    assert case.open.endswith("spelled in another way")
    assert worst(case.logical, case.right)[0] < counts.AGREES
