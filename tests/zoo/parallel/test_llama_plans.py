"""Plans of Llama agree with the step on one device: every combination of data, tensor, sequence and pipeline parallelism."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainverify.check import validate
from trainverify.verdicts import verify
from trainverify.zoo.llama import Config
from trainverify.zoo.parallel import Degrees, llama_plan, llama_step

SMALL = Config(layers=1, hidden=24, heads=6, kv_heads=2, ffn=10, vocabulary=14, sequence=10)

QUERIES = replace(SMALL, kv_heads=1)  # every rank has a copy of the one key-value head
TWO = replace(SMALL, layers=2)

PLANS = {
    "one rank": (SMALL, Degrees()),
    "dp2": (SMALL, Degrees(dp=2)),
    "mb2": (SMALL, Degrees(microbatches=2)),
    "tp2": (SMALL, Degrees(tp=2)),
    "dp2 tp2": (SMALL, Degrees(dp=2, tp=2)),
    "dp2 tp2 mb2": (SMALL, Degrees(dp=2, tp=2, microbatches=2)),
    "dp2 tp2 mb2, loss divided": (SMALL, Degrees(dp=2, tp=2, microbatches=2, normalise="loss")),
    "tp2 sp": (SMALL, Degrees(tp=2, sp=True)),
    "dp2 tp2 sp mb2": (SMALL, Degrees(dp=2, tp=2, sp=True, microbatches=2)),
    "one key-value head, tp2": (QUERIES, Degrees(tp=2)),
    "one key-value head, dp2 tp2 sp mb2": (QUERIES, Degrees(dp=2, tp=2, sp=True, microbatches=2)),
    "one head per rank, dp2 tp2 sp mb2": (replace(SMALL, heads=2), Degrees(dp=2, tp=2, sp=True, microbatches=2)),
    "pp2 mb3": (replace(SMALL, layers=3), Degrees(pp=2, microbatches=3)),
    "pp3 mb4 tp2, uneven": (replace(SMALL, layers=4), Degrees(pp=3, tp=2, microbatches=4, stages=(1, 2, 1))),
    "pp3 mb2, fewer micro-batches than stages": (replace(SMALL, layers=3), Degrees(pp=3, microbatches=2)),
    "dp2 tp2 sp pp2 mb2 gpipe": (TWO, Degrees(dp=2, tp=2, pp=2, sp=True, microbatches=2, schedule="gpipe")),
    "dp2 tp2 sp pp2 mb2": (TWO, Degrees(dp=2, tp=2, pp=2, sp=True, microbatches=2)),
    "dp2 tp2 sp pp2 mb2, loss divided": (TWO, Degrees(dp=2, tp=2, pp=2, sp=True, microbatches=2, normalise="loss")),
}


def whole(config: Config, how: Degrees, rows: int = 3) -> Config:
    return replace(config, batch=how.dp * how.microbatches * rows)


@pytest.mark.parametrize("name", PLANS)
def test_plan_is_proved(name: str) -> None:
    config, how = PLANS[name]
    config = whole(config, how)
    report = verify(llama_step(config), llama_plan(config, how), points=1)
    assert report.verdict == "PROVED", report.notes
    assert not report.findings
    weights = 9 * config.layers + 3
    assert len(report.obligations) == 1 + 2 + 4 * weights  # loss, norm and factor; gradient, weight and two moments each


# fewer key-value heads than tensor-parallel ranks: the ranks along `rep` share a head
SHARED = {
    "kv2 tp4": (Config(1, 32, 8, 2, ffn=12, vocabulary=20, sequence=8), Degrees(tp=4)),
    "kv3 dp2 tp6 sp mb2": (Config(1, 24, 6, 3, ffn=18, vocabulary=30, sequence=12), Degrees(dp=2, tp=6, sp=True, microbatches=2)),
}


def test_one_head_on_each_of_six_ranks_is_proved() -> None:
    config, how = replace(SMALL, kv_heads=6, ffn=12, vocabulary=18, batch=3), Degrees(tp=6)
    report = verify(llama_step(config), llama_plan(config, how), points=1)
    assert report.verdict == "PROVED", report.notes


@pytest.mark.parametrize("name", SHARED)
def test_plan_with_shared_heads_is_proved(name: str) -> None:
    config, how = SHARED[name]
    config = whole(config, how)
    report = verify(llama_step(config), llama_plan(config, how), points=1)
    assert report.verdict == "PROVED", report.notes


@pytest.mark.parametrize("name", SHARED)
def test_plan_with_shared_heads_is_well_formed(name: str) -> None:
    config, how = SHARED[name]
    plan = llama_plan(whole(config, how), how)
    assert plan.mesh.names == ("pp", "dp", "kv", "rep")
    assert not list(validate(llama_step(whole(config, how)), plan))


@pytest.mark.parametrize("name", PLANS)
def test_plan_at_real_widths_is_well_formed(name: str) -> None:
    config, how = PLANS[name]
    config = replace(config, hidden=4096, heads=32, kv_heads=min(config.kv_heads, 2) ** 3, ffn=14336, vocabulary=128256, sequence=8192)
    config = whole(config, how, 1)
    assert not list(validate(llama_step(config), llama_plan(config, how)))


@pytest.mark.parametrize("name", ["tp2", "tp2 sp", "dp2 tp2 mb2", "pp2 mb3", "dp2 tp2 sp pp2 mb2", "dp2 tp2 sp pp2 mb2, loss divided"])
def test_two_layers_at_real_widths_are_proved(name: str) -> None:
    _, how = PLANS[name]
    config = whole(Config(2, 4096, 32, 8, ffn=14336, vocabulary=128256, sequence=8192), how, 1)
    report = verify(llama_step(config), llama_plan(config, how), points=1)
    assert report.verdict == "PROVED", report.notes
