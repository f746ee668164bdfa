"""Large plans: which ranks are evaluated, what rounding noise is, and a single rank that differs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import trainverify as tv
from trainverify.evaluate.compare import calm, compare
from trainverify.evaluate.sample import sampled
from trainverify.evaluate.small import shrink_system
from trainverify.graph.lineage import layout
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import Edit, Plan, units
from trainverify.graph.program import Program, Ref
from trainverify.ops import OPS
from trainverify.verdicts import related, verify
from trainverify.zoo.llama import Config
from trainverify.zoo.parallel import Degrees, llama_plan, llama_step

CONFIG = Config(layers=2, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256, sequence=8192, batch=96)
HOW = Degrees(dp=48, tp=4, zero=1, microbatches=2)


@pytest.fixture(scope="module")
def both() -> tuple[Program, Plan]:
    config = replace(CONFIG, hidden=6144, heads=48, kv_heads=4, ffn=9216)
    return llama_step(config), llama_plan(config, HOW)


def changed(plan: Plan, rank: int, tensor: str, **attrs: float) -> Plan:
    """One op of one rank with other attributes."""
    ops = plan.templates[0].program.ops
    i = next(n for n, op in enumerate(ops) if tensor in op.outputs)
    return replace(plan, edits=(Edit(rank, (i,), (ops[i].with_attrs(**attrs),)),))


def kept(logical: Program, plan: Plan) -> frozenset[int]:
    wanted, _ = obligations(logical, plan, units(plan))
    system = related(logical, plan, OPS, units(plan), wanted)
    return sampled(system).ranks(system)


def test_192_ranks_with_zero_are_proved_on_a_sample(both: tuple[Program, Plan]) -> None:
    report = verify(*both)
    assert report.verdict == "PROVED"
    assert any("of 192 ranks" in n for n in report.notes)
    assert 2 <= len(kept(*both)) < 64


def test_a_rank_with_an_edit_is_evaluated_and_named(both: tuple[Program, Plan]) -> None:
    logical, plan = both
    wrong = changed(plan, 77, "mb1/layers.1.attention.normed", eps=1e-3)
    assert 77 in kept(logical, wrong)
    report = verify(logical, wrong)
    assert report.verdict == "REFUTED"
    assert report.place is not None
    assert (report.place.rank, report.place.tensor) == (77, "mb1/layers.1.attention.normed")
    assert "191 other ranks have" in report.place.cause


def test_a_rank_with_an_odd_integer_is_evaluated(both: tuple[Program, Plan]) -> None:
    logical, plan = both
    (template,) = plan.templates
    op = next(op for op in template.program.ops if op.name == "slice" and isinstance(op.get("start"), Ref))
    columns = {}
    for ref in (op.get("start"), op.get("stop")):
        column = list(template.bindings[ref.name])
        column[130] = column[0]
        columns[ref.name] = tuple(column)
    wrong = replace(plan, templates=(replace(template, bindings={**template.bindings, **columns}),))
    assert 130 not in kept(logical, plan)
    assert 130 in kept(logical, wrong)


def means(metric: str) -> tuple[Program, Plan]:
    """Σ x²/70 over 70 ranks, of which one is said to hold that, or another number, besides."""
    b = tv.program("means")
    x = b.input("x", (140, 3))
    b.metric("mean", b.mul(b.sum(x, name="sum"), value=1 / 70, name="mean"))
    b.loss(b.sum(b.mul(x, x, name="xx"), name="loss"))
    p = tv.plan("means", tv.Mesh(dp=70))
    with p.ranks() as r:
        x = r.input("x", (2, 3), "(dp a) b")
        r.metric("mean", r.mul(r.all_reduce(r.sum(x, name="share"), group="dp", name="sum"), value=1 / 70, name="mean"))
        r.loss(r.all_reduce(r.sum(r.mul(x, x, name="xx"), name="part"), group="dp", name="loss"))
    return b.build(), replace(p.build(), lineage=(*p.build().lineage, layout(metric, "", "mean", where={"dp": 30})))


@pytest.mark.parametrize(("metric", "verdict"), [("mean", "PROVED"), ("sum", "REFUTED")])
def test_a_rank_of_which_more_is_said_is_evaluated(metric: str, verdict: str) -> None:
    """Expected: a claim about one rank is looked at on that rank, and rejected if it is wrong."""
    logical, plan = means(metric)
    assert 30 in kept(logical, plan)
    report = verify(logical, plan)
    assert report.verdict == verdict
    if verdict == "REFUTED":
        assert "declared lineage of sum differs on rank 30" in report.reason


def test_noise_is_calm_and_a_difference_is_not(both: tuple[Program, Plan]) -> None:
    logical, plan = both
    wrong = changed(plan, 77, "mb0/layers.0.attention.normed", eps=1e-3)
    wanted, _ = obligations(logical, wrong, units(wrong))
    system = related(logical, wrong, OPS, units(wrong), wanted)
    small = shrink_system(system, kept=sampled(system))
    ((found, _),) = compare(small, wrong.lineage, wanted, [0])
    assert found
    assert set(calm(small, wrong.lineage, found, 0)) == set(found)
    noise = [replace(s, distance=s.distance * 1e6) for s in found]  # much smaller with more digits
    assert calm(small, wrong.lineage, noise, 0) == []


def test_points_together_are_points_alone(both: tuple[Program, Plan]) -> None:
    logical, plan = both
    wrong = changed(plan, 77, "mb0/layers.0.attention.normed", eps=1e-3)
    wanted, _ = obligations(logical, wrong, units(wrong))
    system = related(logical, wrong, OPS, units(wrong), wanted)
    small = shrink_system(system, kept=sampled(system))
    together = compare(small, wrong.lineage, wanted, [0, 1])
    for seed, (found, count) in enumerate(together):
        ((alone, n),) = compare(small, wrong.lineage, wanted, [seed])
        assert (len(found), count) == (len(alone), n)
        assert np.allclose([s.distance for s in found], [s.distance for s in alone])
