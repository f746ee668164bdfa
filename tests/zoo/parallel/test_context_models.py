"""Context parallelism by all-to-alls (Ulysses) in plans of GPT and DeepSeek, and bugs planted into them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from trainverify.build.tape import BuildError
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program, Ref
from trainverify.verdicts import verify
from trainverify.zoo import deepseek, gpt
from trainverify.zoo.parallel import Degrees, deepseek_plan, deepseek_step, gpt_plan, gpt_step
from verdicts.changes import Change, attrs
from zoo.parallel.evaluation import evaluated
from zoo.parallel.mistakes import skipped

ULYSSES = Degrees(cp=2, cp_kind="ulysses", normalise="loss")
GATE = deepseek.Gate(12, 3, "sigmoid", normalize=True, scale=2.5, groups=4, top_groups=2, group_score="top2", bias=True)
DEEPSEEK = deepseek.Config(1, 0, 24, 6, 20, 10, 2, GATE, 14, sequence=6, q_rank=10, kv_rank=14, head=8, rotary=4, value=6, batch=4)
GPT = gpt.Config(layers=1, hidden=24, heads=6, vocabulary=14, sequence=10, batch=4)

REAL = {
    "16b dp2 ep2 cp2 tp2 sp": ("16b", replace(ULYSSES, dp=2, ep=2, tp=2, sp=True)),
    "671b dp4 ep2 cp4 tp2 pp2 zero1": ("671b", replace(ULYSSES, dp=4, ep=2, cp=4, tp=2, pp=2, microbatches=2, zero=1)),
}


@pytest.mark.parametrize("name", REAL)
def test_deepseek_at_real_widths_is_proved(name: str) -> None:
    model, how = REAL[name]
    config = replace(deepseek.PRESETS[f"deepseek-{model}"], layers=2, dense_layers=1, batch=how.dp * how.microbatches)
    report = verify(deepseek_step(config), deepseek_plan(config, how), points=1)
    assert report.verdict == "PROVED", report.notes
    assert not report.findings


@pytest.mark.parametrize("how", [Degrees(dp=2, tp=2, sp=True), Degrees(dp=2, pp=2, microbatches=2, zero=3)])
def test_gpt_at_real_widths_is_proved(how: Degrees) -> None:
    how = replace(how, cp=3, cp_kind="ulysses")
    config = replace(gpt.PRESETS["gpt2"], layers=2, sequence=1008, vocabulary=50304, batch=how.dp * how.microbatches)
    report = verify(gpt_step(config), gpt_plan(config, how), points=1)
    assert report.verdict == "PROVED", report.notes
    assert not report.findings


@cache
def base(model: str) -> tuple[Program, Plan]:
    if model == "gpt":
        return gpt_step(GPT), gpt_plan(GPT, replace(ULYSSES, dp=2))
    return deepseek_step(DEEPSEEK), deepseek_plan(DEEPSEEK, replace(ULYSSES, dp=4, ep=2))


AT, MLP = "mb0/layers.0.", "layers.0.mlp."
BUGS: dict[str, tuple[str, str, Change]] = {
    # bug: (model, the wrong tensor, the change)
    "load of a stretch of the sequence": ("deepseek", AT + "moe.load.sum", skipped("pp0", AT + "moe.load.sum")),
    "probabilities of a stretch only": ("deepseek", AT + "moe.probability.sum", skipped("pp0", AT + "moe.probability.sum")),
    "balance counted by every context-parallel rank": ("deepseek", "balance.dp", attrs("pp0", "balance.dp", group=Ref("group.edp+ep+cp"))),
    "rotary table from the start on every rank": ("deepseek", "rope.cos.rows", attrs("pp0", "rope.cos.rows", start=0, stop=3)),
    "experts' gradients of own tokens' experts only": (
        "deepseek",
        MLP + "experts.up_proj.grad.dp",
        attrs("pp0", MLP + "experts.up_proj.grad.dp", group=Ref("group.cp")),
    ),
    "places from the start on every rank": ("gpt", "mb0/positions", attrs("pp0", "mb0/positions", start=0, stop=5)),
    "gradient added up over context-parallel ranks only": ("gpt", "wpe.grad.dp", attrs("pp0", "wpe.grad.dp", group=Ref("group.cp"))),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bug_is_refuted(bug: str) -> None:
    model, where, change = BUGS[bug]
    logical, plan = base(model)
    report = evaluated(logical, change(plan), points=1)
    assert report.verdict == "REFUTED", report.reason
    assert report.place is not None
    assert report.place.tensor == where


@pytest.mark.parametrize("model", ["gpt", "deepseek"])
def test_without_the_bug_it_is_proved(model: str) -> None:
    report = verify(*base(model), points=1)
    assert report.verdict == "PROVED", report.notes


@pytest.mark.parametrize(
    ("config", "how", "why"),
    [
        (GPT, replace(ULYSSES, cp_kind="ring"), "have cp_kind=ulysses, not ring"),
        (replace(GPT, loss="per_sequence"), ULYSSES, "no loss per sequence"),
        (GPT, replace(ULYSSES, cp=5), "6 heads of a tensor-parallel rank do not divide among 5"),
    ],
)
def test_gpt_is_refused(config: gpt.Config, how: Degrees, why: str) -> None:
    with pytest.raises(BuildError, match=why):
        gpt_plan(config, how)


def test_deepseek_with_capacity_is_refused() -> None:
    with pytest.raises(BuildError, match="drop no tokens"):
        deepseek_plan(replace(DEEPSEEK, capacity=3), ULYSSES)
