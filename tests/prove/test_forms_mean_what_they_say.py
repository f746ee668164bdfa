"""The main soundness test of the normaliser: forms, evaluated by what their atoms mean, are the numbers that programs compute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prove.meaning import check_plan, check_program
from prove.operators import all_samples, one_op
from prove.random_programs import random_program
from prove.random_stages import stages
from trainverify.check import validate
from trainverify.ops import OPS
from trainverify.zoo.llama import Config
from trainverify.zoo.parallel import Degrees, llama_plan, llama_step
from verdicts import mlp

SAMPLES = [pytest.param(name, i, s, grad, id=f"{name}-{i}{'-grad' if grad else ''}") for name, i, s, grad in all_samples()]
TINY = Config(layers=1, hidden=4, heads=2, kv_heads=2, ffn=2, vocabulary=4, sequence=2)
PLANS = {
    "dp2": (TINY, Degrees(dp=2)),
    "tp2": (TINY, Degrees(tp=2)),
    "dp2 tp2 sp mb2": (TINY, Degrees(dp=2, tp=2, sp=True, microbatches=2)),
    "pp2 tp2 mb2": (replace(TINY, layers=2), Degrees(pp=2, tp=2, microbatches=2)),
    "one key-value head": (replace(TINY, kv_heads=1), Degrees(dp=2, tp=2)),
}
MANY = range(200)  # a slice; thousands were run


@pytest.mark.parametrize(("name", "i", "sample", "grad"), SAMPLES)
def test_every_operator(name: str, i: int, sample, grad: bool) -> None:
    made = one_op(name, sample, i, grad)
    if made is None:
        return
    program, inputs = made
    found = check_program(program, i, inputs)
    assert not found.wrong, found.wrong


@pytest.mark.parametrize("block", range(MANY.start, MANY.stop, 20))
def test_random_programs(block: int) -> None:
    tensors = without = 0
    for seed in range(block, block + 20):
        found = check_program(random_program(seed), seed)
        assert not found.wrong, (seed, found.wrong)
        tensors += found.tensors
        without += len(found.without)
    assert without < tensors / 4  # most tensors have a form, so that the test says something


def test_ranks_of_the_mlp_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"ROWS": 2, "WIDTH": 2, "HIDDEN": 4, "OUT": 2}.items():
        monkeypatch.setattr(mlp, name, size)
    found = check_plan(mlp.logical(), mlp.plan(), 0)
    assert found.tensors > 300
    assert not found.without
    assert not found.wrong, found.wrong


@pytest.mark.parametrize("name", PLANS)
def test_ranks_of_llama_plans(name: str) -> None:
    config, how = PLANS[name]
    config = replace(config, batch=how.dp * how.microbatches)
    found = check_plan(llama_step(config), llama_plan(config, how), 1)
    assert found.tensors > 200
    assert not found.wrong, found.wrong


@pytest.mark.parametrize("seed", [4, 12, 37, 90])
def test_ranks_that_run_different_programs(seed: int) -> None:
    """Also where axes do not align between the members of a group (37, 90)."""
    logical, plan = stages(seed)
    assert [f for f in validate(logical, plan, OPS) if f.severity != "warning"] == []
    compared = check_plan(logical, plan, seed)
    assert compared.wrong == []
    assert compared.tensors > 20
