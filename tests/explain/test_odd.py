"""One rank that is unlike the others is named, however the plan says it: by an edit, by a program of its own, by a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from trainverify.explain.odd import odd
from trainverify.graph.plan import Edit, Plan, expand, fold, units
from trainverify.graph.program import Op, Program
from trainverify.verdicts import verify
from trainverify.zoo.llama import Config
from trainverify.zoo.parallel import Degrees, llama_plan, llama_step

TINY = Config(layers=2, hidden=24, heads=6, kv_heads=2, ffn=20, vocabulary=28, sequence=6, batch=8)
HOW = Degrees(dp=4, tp=2, microbatches=2, zero=1)
RANK = 5


def tiny(how: Degrees = HOW) -> tuple[Program, Plan]:
    config = replace(TINY, batch=how.dp * how.microbatches)
    return llama_step(config), llama_plan(config, how)


def edited(plan: Plan, output: str, change: Callable[[Op], tuple[Op, ...]], rank: int = RANK) -> Plan:
    home = next(t for t in plan.templates if rank in t.ranks)
    i = next(i for i, op in enumerate(home.program.ops) if output in op.outputs)
    op = next(o for o in expand(plan, rank).ops if output in o.outputs)
    return replace(plan, edits=(Edit(rank, (i,), change(op)),))


def own_template(plan: Plan) -> Plan:
    return replace(plan, templates=units(plan), edits=())


def own_program(plan: Plan) -> Plan:
    """As a reader of one program per rank makes it: the values of references are written out."""
    return fold(plan.name, plan.mesh, [expand(plan, r) for r in range(plan.size)], plan.groups, plan.lineage)


WAYS = [lambda p: p, own_template, own_program]


def reduced(plan: Plan) -> str:
    """A tensor of the second micro-batch and layer that an all-reduce over tp makes."""
    ops = plan.templates[0].program.ops
    return next(o.outputs[0] for o in ops if o.name == "all_reduce" and "mb1" in o.outputs[0] and "layers.1" in o.outputs[0])


def test_a_correct_plan_has_no_odd_rank() -> None:
    for how in (HOW, Degrees(dp=3, tp=2, pp=2, microbatches=2, sp=True, zero=1)):
        assert list(odd(tiny(how)[1])) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_dropped_collective_is_invalid_and_named(way: Callable[[Plan], Plan]) -> None:
    logical, plan = tiny()
    name = reduced(plan)
    wrong = way(edited(plan, name, lambda op: (Op("identity", op.inputs, op.outputs, (), op.phase, None, op.source),)))
    report = verify(logical, wrong)
    assert report.verdict == "INVALID"
    assert report.place is not None
    assert (report.place.rank, report.place.tensor) == (RANK, name)
    assert "where 7 other ranks have" in report.place.cause
    assert "with this changed the plan is well-formed" in report.place.cause
    assert f"rank {RANK}" in report.reason
    assert report.json()["first_wrong"]["rank"] == RANK


@pytest.mark.parametrize("way", WAYS)
def test_an_op_that_is_missing_and_one_too_many(way: Callable[[Plan], Plan]) -> None:
    logical, plan = tiny()
    name = reduced(plan)
    gone = verify(logical, way(edited(plan, name, lambda op: ())))
    assert gone.verdict == "INVALID"
    assert gone.place is not None
    assert (gone.place.rank, gone.place.tensor) == (RANK, name)
    assert gone.place.cause.startswith("nothing, where")
    assert any(f.rank == RANK for f in gone.findings)  # also where only a program is looked at: tensor that nothing defines
    twice = edited(plan, name, lambda op: (replace(op, outputs=("once",)), op))
    kind = plan.templates[0].program.tensors[name]
    twice = way(replace(twice, edits=(replace(twice.edits[0], tensors={"once": kind}),)))
    report = verify(logical, twice)
    assert report.verdict == "INVALID"
    assert report.place is not None
    assert report.place.rank == RANK
    assert "once = all_reduce" in report.place.cause


def test_a_value_out_of_line() -> None:
    """One rank takes the group of its neighbour: INVALID, and the value is named, not the program."""
    logical, plan = tiny()
    (t,) = plan.templates
    name, column = next((n, c) for n, c in t.bindings.items() if all(v in plan.groups and len(plan.groups[v]) == 2 for v in c))
    row = t.ranks.index(RANK)
    other = column[t.ranks.index(RANK - 2)]
    new = replace(t, bindings={**t.bindings, name: (*column[:row], other, *column[row + 1 :])})
    report = verify(logical, replace(plan, templates=(new,)))
    assert report.verdict == "INVALID"
    assert report.place is not None
    assert report.place.rank == RANK
    assert f"group={other}" in report.place.cause
    assert f"group={column[row]}" in report.place.cause


def test_a_plan_that_is_wrong_on_all_ranks_names_none() -> None:
    logical, plan = tiny()
    (t,) = plan.templates
    i = next(i for i, op in enumerate(t.program.ops) if reduced(plan) in op.outputs)
    program = replace(t.program, ops=(*t.program.ops[:i], *t.program.ops[i + 1 :]))
    report = verify(logical, replace(plan, templates=(replace(t, program=program),)))
    assert report.verdict == "INVALID"
    assert report.place is None


@pytest.mark.parametrize("way", WAYS[:2])
def test_one_of_many_ranks_is_refuted_and_named(way: Callable[[Plan], Plan]) -> None:
    """More ranks than are evaluated: rank 77 of 80 takes the activations of the other micro-batch."""
    logical, plan = tiny(Degrees(dp=40, tp=2, microbatches=2))
    name = next(o.outputs[0] for o in plan.templates[0].program.ops if o.name == "silu" and "mb1" in o.outputs[0])
    wrong = way(edited(plan, name, lambda op: (replace(op, inputs=(str(op.inputs[0]).replace("mb1", "mb0"),)),), 77))
    report = verify(logical, wrong)
    assert report.verdict == "REFUTED"
    assert report.place is not None
    assert (report.place.rank, report.place.tensor) == (77, name)
    assert "where 79 other ranks have" in report.place.cause
    assert "the whole plan agrees" in report.place.cause
