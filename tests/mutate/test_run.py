"""A PROVED mutant that is not harmless is seen by the evaluation apart from the proof."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from trainverify.cli import run
from trainverify.graph.plan import Edit, Plan
from trainverify.graph.program import Program
from trainverify.mutate import run as mutants
from trainverify.mutate.mutations import mutate
from trainverify.mutate.run import UNCHECKED, Outcome, Summary, contradiction, judged
from trainverify.zoo.parallel import Degrees
from trainverify.zoo.recipes import Wish
from trainverify.zoo.tiny import tiny


def small(wish: Wish) -> tuple[Program, Plan]:
    found = tiny(wish)
    return found.logical, found.plan


def test_a_mistake_contradicts_a_proof_and_a_correct_plan_does_not() -> None:
    logical, plan = small(Wish("llama3-8b", Degrees(dp=2, tp=2), layers=1))
    (template,) = plan.templates
    i = next(n for n, op in enumerate(template.program.ops) if op.name == "silu" or "ffn" in op.outputs[0])
    wrong = replace(
        plan,
        edits=(Edit(3, (i,), (replace(template.program.ops[i], name="identity", inputs=template.program.ops[i].inputs[:1], attrs=()),)),),
    )
    assert contradiction(logical, plan, simulate=True) is None
    assert contradiction(logical, plan, simulate=False) is None
    assert "differs" in str(contradiction(logical, wrong, simulate=True))
    assert "is off by" in str(contradiction(logical, wrong, simulate=False))


def test_inputs_that_no_op_looks_at_may_differ_in_size() -> None:
    """Gradients of transposes do not need what was transposed; here one gets a tensor that is as large but shrinks otherwise."""
    logical, plan = Wish("llama3-8b", Degrees(dp=2, tp=2, microbatches=2, zero=1), layers=2).build()
    outcome = judged(logical, mutate(plan, random.Random(1192)), 1192, None, simulate=False)
    assert (outcome.verdict, outcome.bad) == ("PROVED", None)


SMALL = ["mutate", "--zoo", "llama3-8b", "--tiny", "--layers", "1", "--dp", "2", "--count", "9"]


def three(*given: object, **_: object) -> Iterator[Outcome]:
    for seed, verdict in ((7, "REFUTED"), (8, "UNKNOWN"), (9, "INVALID")):
        yield Outcome(seed, "drop", "one op", verdict, "because", None, 0.1)


def test_every_mutant_is_printed_when_it_is_judged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is ended from outside has said what it knows: each line is out before the next mutant."""
    seen: list[str] = []

    def looked_at(*given: object, **_: object) -> Iterator[Outcome]:
        for o in three():
            yield o
            seen.append(capsys.readouterr().out)

    monkeypatch.setattr(mutants, "campaign", looked_at)
    assert run(SMALL) == 0
    assert seen == [f"{n} {v} in 0.1 s: drop: because\n" for n, v in ((7, "REFUTED"), (8, "UNKNOWN"), (9, "INVALID"))]
    assert capsys.readouterr().out.startswith("3 mutants of llama3-8b")
    seen.clear()
    assert run([*SMALL, "--json"]) == 0
    assert [json.loads(line)["mutant"]["verdict"] for line in seen] == ["REFUTED", "UNKNOWN", "INVALID"]
    assert json.loads(capsys.readouterr().out)["verdicts"] == {"REFUTED": 1, "UNKNOWN": 1, "INVALID": 1}


def test_a_time_limit_ends_a_campaign_with_what_was_judged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def slowly(*given: object, **_: object) -> Iterator[Outcome]:
        for o in three():
            time.sleep(0.02)
            yield o

    monkeypatch.setattr(mutants, "campaign", slowly)
    assert run([*SMALL, "--timeout", "0.001"]) == 0
    assert "1 of 9 mutants of llama3-8b" in (shown := capsys.readouterr().out)
    assert "(time limit of 0.001 s): 1 REFUTED" in shown


def test_a_check_without_time_does_not_hide_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """PROVED in time, and the evaluation apart from the proof is not: the verdict stands, and that it was not checked is counted."""
    logical, plan = small(Wish("gpt2", Degrees(dp=3, cp=2, cp_kind="ulysses"), layers=2))

    def endless(*given: object) -> str | None:
        while True:
            pass

    monkeypatch.setattr(mutants, "contradiction", endless)
    outcome = judged(logical, mutate(plan, random.Random(77021)), 77021, 6.0, simulate=True)
    assert (outcome.verdict, outcome.reason, outcome.bad) == ("PROVED", UNCHECKED, None)
    summary = Summary()
    summary.add(outcome)
    assert (summary.unknown, summary.unchecked) == (0.0, 1)


@pytest.mark.parametrize(("name", "how"), [("gpt2", Degrees(dp=3, tp=3)), ("llama3-8b", Degrees(tp=2))])
def test_tiny_models_are_simulated_at_once(name: str, how: Degrees) -> None:
    """Fewer than a hundred thousand elements of all tensors on one device: GPT had its real widths."""
    logical, plan = small(Wish(name, how, layers=1))
    assert sum(math.prod(t.shape) for t in logical.tensors.values()) < 100_000
    assert contradiction(logical, plan, simulate=True) is None


def test_an_interrupted_campaign_says_what_was_judged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """130, with the two mutants that were judged before the interruption."""

    def interrupted(*given: object, **_: object) -> Iterator[Outcome]:
        for seed, verdict in ((7, "REFUTED"), (8, "UNKNOWN")):
            yield Outcome(seed, "drop", "one op", verdict, "because", None, 0.1)
        raise KeyboardInterrupt

    monkeypatch.setattr(mutants, "campaign", interrupted)
    code = run(["mutate", "--zoo", "llama3-8b", "--tiny", "--layers", "1", "--dp", "2", "--count", "9"])
    assert code == 130
    assert "2 of 9 mutants of llama3-8b" in capsys.readouterr().out
