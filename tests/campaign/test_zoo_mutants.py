"""A PROVED mutant that is not harmless is seen by the evaluation apart from the proof."""

from __future__ import annotations

import random
from dataclasses import replace

from trainverify.campaign.mutations import mutate
from trainverify.campaign.zoo import contradiction, judged, small
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
