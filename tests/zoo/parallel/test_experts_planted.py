"""Bugs planted into plans with expert parallelism: each is refuted, or the plan is invalid."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from trainverify.graph.program import Ref
from trainverify.zoo.parallel import deepseek_plan, deepseek_step
from trainverify.zoo.parallel.experts import Experts
from verdicts.changes import Change, attrs, edited, inputs
from zoo.parallel.evaluation import evaluated
from zoo.parallel.experts import AT, CONFIG, HOW, MLP, base, turned
from zoo.parallel.mistakes import again, skipped

BUGS: dict[str, tuple[str, str, str, Change]] = {
    # bug: (plan, verdict, the wrong tensor, the change)
    "experts' gradients added up over all data-parallel ranks": (
        "tp",
        "REFUTED",
        MLP + "experts.up_proj.grad.dp",
        attrs("pp0", MLP + "experts.up_proj.grad.dp", group=Ref("group.edp+ep")),
    ),
    "experts' gradients added up over the ranks of other experts": (
        "tp",
        "REFUTED",
        MLP + "experts.down_proj.grad.dp",
        attrs("pp0", MLP + "experts.down_proj.grad.dp", group=Ref("group.ep")),
    ),
    "experts' gradients not added up": (
        "tp",
        "REFUTED",
        MLP + "experts.gate_proj.grad.dp",
        skipped("pp0", MLP + "experts.gate_proj.grad.dp"),
    ),
    "experts' gradients averaged": (
        "tp",
        "REFUTED",
        MLP + "experts.gate_proj.grad.dp",
        attrs("pp0", MLP + "experts.gate_proj.grad.dp", op="avg"),
    ),
    "gate's gradient added up over tensor-parallel ranks": (
        "tp",
        "REFUTED",
        MLP + "gate.weight.grad.dp.again",
        again("pp0", MLP + "gate.weight.grad.dp", "group.tp"),
    ),
    "balance counted on every tensor-parallel rank": (
        "tp",
        "REFUTED",
        AT + "balance.grad",
        attrs("pp0", AT + "balance.grad", value=0.001 / 2),
    ),
    "load of a part of the sequence": ("sp", "REFUTED", AT + "moe.load.sum", skipped("pp0", AT + "moe.load.sum")),
    "balance of one data-parallel rank": ("tp", "REFUTED", "balance.dp", skipped("pp0", "balance.dp")),
    "choice without the bias": ("tp", "REFUTED", AT + "moe.weights", inputs("pp0", AT + "moe.weights", AT + "moe.logits")),
    "one expert fewer": ("tp", "REFUTED", AT + "moe.weights", attrs("pp0", AT + "moe.weights", top_k=2)),
    "choice among all groups": ("tp", "REFUTED", AT + "moe.weights", attrs("pp0", AT + "moe.weights", top_groups=4)),
    "weights not scaled": ("tp", "REFUTED", AT + "moe.weights", attrs("pp0", AT + "moe.weights", scale=1.0)),
    "tokens with a small weight not sent": ("tp", "REFUTED", AT + "moe.chosen", attrs("pp0", AT + "moe.chosen", value=0.7)),
    "answers brought back in the other order": ("tp", "REFUTED", AT + "moe.returned", turned(AT + "moe.returned")),
    "tokens sent in the other order": ("tp", "REFUTED", AT + "moe.received", turned(AT + "moe.received")),
    "places of the tokens before": ("tp", "REFUTED", AT + "moe.place.hot", attrs("pp0", AT + "moe.place.hot", start=1)),
    "gradient of the shared rotary key of own heads only": (
        "tp",
        "REFUTED",
        AT + "attention.k.turning.grad",
        skipped("pp0", AT + "attention.k.turning.grad"),
    ),
    "norm without the other ranks' shards of experts": (
        "zero1",
        "REFUTED",
        "squares.edp+ep+tp",
        attrs("pp0", "squares.edp+ep+tp", group=Ref("group.tp")),
    ),
    "experts' shards from ranks of other experts": (
        "zero1",
        "REFUTED",
        MLP + "experts.up_proj.grad.shard",
        attrs("pp0", MLP + "experts.up_proj.grad.shard", group=Ref("group.ep")),
    ),
    "new experts gathered from ranks of other experts": (
        "zero1",
        "REFUTED",
        MLP + "experts.down_proj.new",
        attrs("pp0", MLP + "experts.down_proj.new", group=Ref("group.ep")),
    ),
    "norm counts experts of one rank": (
        "tp",
        "REFUTED",
        "squares.ep+tp",
        attrs("pp0", "squares.ep+tp", group=Ref("group.tp")),
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bug_is_found(bug: str) -> None:
    kind, verdict, where, change = BUGS[bug]
    logical, plan = base(kind)
    report = evaluated(logical, change(plan), points=2 if "bias" in bug else 1)
    assert report.verdict == verdict, report.reason
    assert report.place is not None
    assert report.place.tensor == where
    assert where in edited(plan, change(plan))


def test_tokens_beyond_the_capacity_are_missed() -> None:
    with patch.object(Experts, "capacity", lambda self, tokens: tokens // 2):
        plan = deepseek_plan(CONFIG, HOW)
    report = evaluated(deepseek_step(CONFIG), plan, points=1)
    assert report.verdict == "REFUTED", report.reason
    assert report.place is not None
    assert report.place.tensor == AT + "moe.down"  # the first that is missing: no other values give buffers more places


@pytest.mark.parametrize("kind", ["tp", "sp", "zero1"])
def test_what_the_bugs_are_planted_into_agrees(kind: str) -> None:
    report = evaluated(*base(kind))
    assert {o.status for o in report.obligations} == {"agreed"}, report.reason
