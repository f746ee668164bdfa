"""Folding and expanding, edits, inlining."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

import trainverify as tv
from check.plans import op, small_plan, types
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Edit, Plan, PlanError, Template, expand, fold, units
from trainverify.graph.program import CallError, Function, Output, Program, Ref, inline

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import mlp


@pytest.mark.parametrize("plan", [mlp.plan(), small_plan()], ids=["mlp", "small"])
def test_fold_of_expanded_ranks_is_the_plan(plan: Plan) -> None:
    programs = [expand(plan, r) for r in range(plan.size)]
    folded = fold(plan.name, plan.mesh, programs, plan.groups, plan.lineage)
    assert [t.ranks for t in folded.templates] == [t.ranks for t in plan.templates]
    assert [expand(folded, r) for r in range(plan.size)] == programs
    assert len(programs[0].ops) == len(plan.templates[0].program.ops)


def test_expanded_programs_have_no_references() -> None:
    plan = mlp.plan()
    assert "$" not in str(expand(plan, 5))
    sends = [o.get("peer") for o in expand(plan, 4).ops if o.name == "send"]
    assert sends == [6, 6]


def test_fold_keeps_programs_apart_that_differ_in_more_than_integers() -> None:
    def rank(name: str, factor: float) -> Program:
        return Program(
            "p", types(x=(2,), y=(2,)), ("x",), ops=(op(name, ("x",), ("y",), value=factor),), outputs=(Output("y", "metric", "m"),)
        )

    plan = fold("p", Mesh(dp=3), [rank("mul", 0.5), rank("mul", 0.25), rank("mul", 0.5)], {})
    assert [t.ranks for t in plan.templates] == [(0, 2), (1,)]


def test_fold_needs_a_program_per_rank() -> None:
    with pytest.raises(PlanError, match="1 programs for mesh"):
        fold("p", Mesh(dp=2), [Program("p", {})], {})


def nested() -> Plan:
    inner = Function("inner", types(a=(3,), b=(3,)), ("a",), ("b",), (op("mul", ("a",), ("b",), value=Ref("k")),))
    outer = Function(
        "outer",
        types(a=(3,), b=(3,), c=(3,)),
        ("a",),
        ("c",),
        (op("call", ("a",), ("b",), function="inner", k=Ref("k")), op("call", ("b",), ("c",), function="inner", k=7)),
    )
    program = Program("p", types(x=(3,), y=(3,), z=(3,)), ("x",), outputs=(Output("z", "metric", "m"),))
    calls = (op("call", ("x",), ("y",), function="outer", k=Ref("mine")), op("call", ("y",), ("z",), function="outer", k=5))
    template = Template(replace(program, ops=calls), (0, 1, 2), {"mine": (2, 3, 11)})
    return Plan("nested", Mesh(dp=3), (template,), functions={"inner": inner, "outer": outer})


def factors(program: Program) -> list[object]:
    return [o.get("value") for o in inline(program).ops]


def test_inline_binds_innermost_first() -> None:
    plan = nested()
    assert [factors(expand(plan, r)) for r in range(3)] == [[2, 7, 5, 7], [3, 7, 5, 7], [11, 7, 5, 7]]
    flat = inline(expand(plan, 0))
    assert flat.ops[0].inputs + flat.ops[0].outputs == ("x", "outer.0/b")
    assert flat.ops[-1].outputs == ("z",)
    assert set(flat.tensors) >= {i for o in flat.ops for i in o.inputs} | {o for s in flat.ops for o in s.outputs}


def test_inline_of_results_that_are_inputs_or_returned_twice() -> None:
    body = Function("f", types(a=(3,), b=(3,)), ("a",), ("a", "b", "b"), (op("relu", ("a",), ("b",)),))
    program = Program("p", types(x=(3,), u=(3,), v=(3,), w=(3,)), ("x",), ops=(op("call", ("x",), ("u", "v", "w"), function="f"),))
    flat = inline(replace(program, functions={"f": body}))
    made = [o for s in flat.ops for o in s.outputs]
    assert sorted(made) == ["u", "v", "w"]
    source = {o: s.inputs[0] for s in flat.ops for o in s.outputs}
    assert source["u"] == "x"
    assert {source["v"], source["w"]} == {"x", "v"} or {source["v"], source["w"]} == {"x", "w"}


def test_inline_rejects() -> None:
    program = Program("p", types(x=(3,), y=(3,)), ("x",), ops=(op("call", ("x",), ("y",), function="f"),))
    with pytest.raises(CallError, match="no such function"):
        inline(program)
    loop = Function("f", types(a=(3,), b=(3,)), ("a",), ("b",), (op("call", ("a",), ("b",), function="f"),))
    with pytest.raises(CallError, match="nested too deeply"):
        inline(replace(program, functions={"f": loop}))


def test_edits_change_one_rank_and_leave_the_others() -> None:
    plan = nested()
    changed = replace(plan, edits=(Edit(1, (0, 1, 0), (op("mul", ("a",), ("b",), value=-1),)),))
    assert [u.ranks for u in units(changed)] == [(0, 2), (1,)]
    assert [factors(expand(changed, r)) for r in range(3)] == [[2, 7, 5, 7], [3, -1, 5, 7], [11, 7, 5, 7]]


def test_two_edits_below_one_call() -> None:
    plan = nested()
    first = Edit(2, (0, 0, 0), (op("mul", ("a",), ("b",), value=-1),))
    second = Edit(2, (0, 1, 0), (op("mul", ("a",), ("b",), value=-2),))
    assert factors(expand(replace(plan, edits=(first, second)), 2)) == [-1, -2, 5, 7]


def test_edits_that_insert_and_delete() -> None:
    plan = small_plan()
    ops = plan.templates[0].program.ops
    removed = replace(plan, edits=(Edit(4, (1,), ()),))
    assert len(expand(removed, 4).ops) == len(ops) - 1
    assert len(expand(removed, 3).ops) == len(ops)
    extra = op("relu", ("y",), ("extra",))
    inserted = replace(plan, edits=(Edit(4, (0,), (ops[0], extra), types(extra=(2, 5))),))
    program = expand(inserted, 4)
    assert program.ops[1] == extra
    assert "extra" in program.tensors


def test_edits_that_do_not_apply() -> None:
    for edit, message in (
        (Edit(1, (9,), ()), "there are 2 ops"),
        (Edit(1, (0, 1, 0, 0), ()), "calls no function"),
        (Edit(8, (0,), ()), "runs no program"),
        (Edit(1, (), ()), "without a path"),
    ):
        with pytest.raises(PlanError, match=message):
            units(replace(nested(), edits=(edit,)))


def test_mesh() -> None:
    mesh = tv.Mesh(dp=2, pp=3, tp=5)
    assert mesh.ranks(pp=1) == (5, 6, 7, 8, 9, 20, 21, 22, 23, 24)
    assert mesh.ranks(dp=1, pp=2, tp=3) == (28,)
    assert mesh.ranks() == tuple(range(30))
    assert [mesh.rank(mesh.coordinates(r)) for r in range(30)] == list(range(30))
    assert mesh.group(17, ("dp", "pp")) == (2, 7, 12, 17, 22, 27)
    with pytest.raises(ValueError, match="has no pp=3"):
        mesh.ranks(pp=3)
