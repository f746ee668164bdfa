"""All ranks of a program as one class: the same values as class by class, or not at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trainverify.check.validate import validate
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.compare import compare
from trainverify.evaluate.run import random_inputs, run_plan
from trainverify.evaluate.small import NotJoined, Small, shrink_system
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import Edit, Plan, expand, units
from trainverify.graph.program import Program
from trainverify.ops import OPS
from trainverify.verdicts import related, verify
from trainverify.zoo.llama import Config
from trainverify.zoo.parallel import Degrees, llama_plan, llama_step

TINY = Config(layers=2, hidden=24, heads=6, kv_heads=2, ffn=20, vocabulary=28, sequence=12)


def tiny(how: Degrees) -> tuple[Program, Plan]:
    config = replace(TINY, batch=how.dp * how.microbatches)
    return llama_step(config), llama_plan(config, how)


def edited(plan: Plan, rank: int, name: str, other: str) -> Plan:
    """On one rank an op gets another input in place of its first."""
    home = next(t for t in plan.templates if rank in t.ranks)
    i = next(i for i, op in enumerate(home.program.ops) if name in op.outputs)
    op = next(o for o in expand(plan, rank).ops if name in o.outputs)
    return replace(plan, edits=(Edit(rank, (i,), (replace(op, inputs=(other, *op.inputs[1:])),)),))


PLANS = [
    (Degrees(dp=3, tp=2, pp=2, microbatches=2, zero=1), 4, "mb1/layers.0.ffn.silu", "mb0/layers.0.ffn.gate"),
    (Degrees(dp=3, tp=2, pp=2, microbatches=2), 9, "mb1/layers.1.ffn.silu", "mb0/layers.1.ffn.gate"),
    (Degrees(dp=2, tp=2, microbatches=2, sp=True), 3, "mb1/layers.1.ffn.silu", "mb0/layers.1.ffn.up"),
]


@pytest.mark.parametrize(("how", "rank", "name", "other"), PLANS)
def test_every_value_of_every_rank_is_the_same(how: Degrees, rank: int, name: str, other: str) -> None:
    logical, plan = tiny(how)
    for p, differs in ((plan, False), (edited(plan, rank, name, other), True)):
        assert validate(logical, p) == []
        parts = units(p)
        wanted, _ = obligations(logical, p, parts)
        system = related(logical, p, OPS, parts, wanted)
        apart, joined = shrink_system(system), shrink_system(system, joined=True)
        assert len(joined.classes) == len(parts) <= len(apart.classes)
        if differs:
            assert len(joined.classes) < len(apart.classes)
        assert set(joined.places) == set(apart.places) == set(range(p.size))
        inputs = random_inputs(apart, 0)
        one, two = run_plan(apart, p.lineage, inputs, NUMERIC), run_plan(joined, p.lineage, inputs, NUMERIC)
        count = 0
        for r in range(p.size):
            (c, row), (d, line) = apart.places[r], joined.places[r]
            assert one.values[c].keys() == two.values[d].keys()
            for n in one.values[c]:
                a, b = one.get(c, row, n), two.get(d, line, n)
                assert a is not None
                assert b is not None
                assert np.allclose(b, a, rtol=1e-9, atol=1e-12), (r, n)
                count += 1
        assert count > 100 * p.size
        ((found, n),), ((again, m),) = compare(apart, p.lineage, wanted, [0]), compare(joined, p.lineage, wanted, [0])
        assert bool(found) == differs
        assert n == m
        assert {(str(s.obligation), s.rank) for s in found} == {(str(s.obligation), s.rank) for s in again}


def test_ranks_of_one_program_that_do_not_do_the_same_together_are_not_joined() -> None:
    logical, plan = tiny(Degrees(dp=2, tp=2))
    parts = units(plan)
    wanted, _ = obligations(logical, plan, parts)
    system = related(logical, plan, OPS, parts, wanted)
    first, second = (m.ops[0][1] for m in system.meetings[:2])
    system.meetings[0] = replace(system.meetings[0], ops=((0, first), (0, second)))  # an op meets another op of its program
    with pytest.raises(NotJoined, match="meets another op of its program"):
        shrink_system(system, joined=True)


def test_a_circle_is_not_run() -> None:
    logical, plan = tiny(Degrees(dp=2, tp=2))
    parts = units(plan)
    wanted, _ = obligations(logical, plan, parts)
    small = shrink_system(related(logical, plan, OPS, parts, wanted), joined=True)
    (own,) = small.classes
    step = own.order[5]
    circular = replace(step, inputs=(own.order[-1].outputs[0], *step.inputs[1:]))
    broken = replace(small, classes=[replace(own, order=[*own.order[:5], circular, *own.order[6:]])])
    with pytest.raises(NotJoined, match="wait for each other"):
        run_plan(broken, plan.lineage, random_inputs(small, 0), NUMERIC)


def test_without_joining_the_verdict_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refused(*given: Any, **options: Any) -> Small:
        asked.append(options.get("joined"))
        if options.get("joined"):
            raise NotJoined("as asked for")
        return shrink_system(*given, **options)

    logical, plan = tiny(Degrees(dp=33, tp=2, microbatches=2))
    wrong = edited(plan, 64, "mb1/layers.1.ffn.silu", "mb0/layers.1.ffn.gate")
    joined = verify(logical, wrong)
    monkeypatch.setattr("trainverify.verdicts.evaluation.shrink_system", refused)
    apart = verify(logical, wrong)
    assert asked[:2] == [True, False]
    for report in (joined, apart):
        assert report.verdict == "REFUTED"
        assert report.place is not None
        assert (report.place.rank, report.place.tensor) == (64, "mb1/layers.1.ffn.silu")
    assert joined.reason == apart.reason
