"""A PROVED mutant that is not harmless is seen by the evaluation apart from the proof."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from trainverify.campaign import zoo
from trainverify.campaign.mutations import mutate
from trainverify.campaign.zoo import Outcome, contradiction, judged, small
from trainverify.cli import run
from trainverify.graph.plan import Edit
from trainverify.zoo.parallel import Degrees
from trainverify.zoo.recipes import Wish


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


def test_an_interrupted_campaign_says_what_was_judged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """130, with the two mutants that were judged before the interruption."""

    def interrupted(*given: object, **_: object) -> Iterator[Outcome]:
        for seed, verdict in ((7, "REFUTED"), (8, "UNKNOWN")):
            yield Outcome(seed, "drop", "one op", verdict, "because", None, 0.1)
        raise KeyboardInterrupt

    monkeypatch.setattr(zoo, "campaign", interrupted)
    code = run(["mutate", "--zoo", "llama3-8b", "--tiny", "--layers", "1", "--dp", "2", "--count", "9"])
    assert code == 130
    assert "2 of 9 mutants of llama3-8b" in capsys.readouterr().out
