"""A slice of `make campaign`: random correct plans are never refuted, random mistakes never proved, nothing crashes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import trainverify as tv
from tools.campaign import autograd
from tools.campaign.minimise import minimised
from tools.campaign.plans import partition, setting
from tools.campaign.programs import step
from tools.campaign.run import Outcome, campaign, make, run
from trainverify.mutate.causes import generic
from trainverify.mutate.mutations import mutate
from trainverify.mutate.simulate import Stuck, worst

CASES, FIRST = 24, 0


def layers(seed: int) -> tuple[tv.Program, tv.Plan]:
    model = replace(autograd.model(random.Random(seed)), dp=2)
    return autograd.logical(model), autograd.plan(model)


@pytest.mark.parametrize("seed", [71, 122, 147])
def test_an_edit_of_one_rank_is_refuted(seed: int) -> None:
    """Names of values mean something else on other ranks: a slice with theirs may not exist."""
    assert run(seed, mutant=True, seconds=30.0, oracle=0.0).verdict == "REFUTED"


def test_cases_come_from_seeds() -> None:
    a, b = make(5, mutant=True), make(5, mutant=True)
    assert (a.logical, a.plan) == (b.logical, b.plan)
    assert make(5).plan != a.plan


@pytest.mark.parametrize("block", range(4))
def test_slice(block: int) -> None:
    seeds = range(FIRST + block * CASES // 4, FIRST + (block + 1) * CASES // 4)
    summary = campaign([(seed, mutant) for seed in seeds for mutant in (False, True)], seconds=3, oracle=0.5)
    assert not summary.bad, [(o.bad, o.seed, o.mutant, o.reason) for o in summary.bad]
    assert sum(summary.verdicts["correct"].values()) == sum(summary.verdicts["mistake"].values()) == CASES // 4
    assert summary.verdicts["correct"]["PROVED"] > 0
    assert summary.verdicts["mistake"]["REFUTED"] + summary.verdicts["mistake"]["INVALID"] > 0


def test_random_plans_compute_the_step_at_full_size() -> None:
    for seed in range(25):
        rng = random.Random(seed)
        made = step(rng)
        logical = made.logical()
        plan = partition(made.spelled(rng) if seed % 2 else logical, logical, setting(rng), rng)
        gap, name = worst(logical, plan)
        assert gap < 1e-8, (seed, name)


def test_plans_with_reverse_mode_compute_the_step_at_full_size() -> None:
    for seed in range(20):
        logical, plan = autograd.case(random.Random(seed))
        gap, name = worst(logical, plan)
        assert gap < 1e-8, (seed, name)


def test_oracle_sees_a_missing_reduction() -> None:
    logical, plan = layers(0)
    (t,) = plan.templates
    i = next(i for i, op in enumerate(t.program.ops) if op.name == "all_reduce" and op.get("group").name == "group.dp")
    wrong = replace(t.program.ops[i], name="identity", attrs=())
    program = replace(t.program, ops=(*t.program.ops[:i], wrong, *t.program.ops[i + 1 :]))
    gap, _ = worst(logical, replace(plan, templates=(replace(t, program=program),)))
    assert gap > 1e-3


def test_oracle_sees_ranks_that_wait() -> None:
    logical, plan = layers(1)
    (t,) = plan.templates
    i = next(i for i, op in enumerate(t.program.ops) if op.get("group") is not None)
    ops = t.program.ops
    alone = replace(t, program=replace(t.program, ops=(*ops[:i], replace(ops[i], name="identity", attrs=()), *ops[i + 1 :])), ranks=(0,))
    first = replace(alone, bindings={n: c[:1] for n, c in t.bindings.items()})
    rest = replace(t, ranks=t.ranks[1:], bindings={n: c[1:] for n, c in t.bindings.items()})
    with pytest.raises((Stuck, KeyError, ValueError)):
        worst(logical, replace(plan, templates=(first, rest)))


def test_every_kind_of_mistake_is_made() -> None:
    _, plan = layers(3)
    kinds = {mutate(plan, random.Random(s)).kind.split(",")[0] for s in range(300)}
    assert kinds >= {
        "operator",
        "drop",
        "double",
        "group",
        "constant",
        "shift",
        "inputs swapped",
        "other tensor",
        "order",
        "lineage",
        "output",
    }


def test_minimised_keeps_the_failure() -> None:
    logical, plan = layers(2)
    target = logical.outputs[1]

    def fails(small: tv.Program, part: tv.Plan) -> bool:
        return any(o == target for o in small.outputs)

    small, part = minimised(logical, plan, fails)
    assert small.outputs == (target,)
    assert len(small.ops) < len(logical.ops)
    assert len(part.templates[0].program.ops) < len(plan.templates[0].program.ops)


def test_a_case_says_what_it_is() -> None:
    outcome = run(0, mutant=True)
    assert outcome.kind
    assert outcome.detail
    assert generic("not proved: loss: rank 0: limit of 500 reached") == "limit of N reached"


def test_an_interrupted_campaign_says_what_was_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(seed: int, mutant: bool, seconds: float, oracle: float) -> Outcome:
        if seed == 2:
            raise KeyboardInterrupt
        return Outcome(seed, mutant, "PROVED", None, "", "any", 1, 1, 0.1)

    monkeypatch.setattr("tools.campaign.run.run", judged)
    summary = campaign([(seed, False) for seed in range(5)])
    assert summary.interrupted
    assert summary.verdicts["correct"] == {"PROVED": 2}
