"""A rank that runs the same ops in another order is no different, but for communication."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainverify.graph.moves import _written, without_moves
from trainverify.graph.plan import Edit, Plan
from trainverify.graph.program import Op, Program
from trainverify.graph.types import TensorType
from trainverify.ops import OPS
from trainverify.verdicts import verify
from trainverify.zoo.llama import Config
from trainverify.zoo.parallel import Degrees, llama_plan, llama_step

CONFIG = Config(layers=1, hidden=24, heads=12, kv_heads=4, ffn=20, vocabulary=14, sequence=10, batch=6)


def pair() -> tuple[Program, Plan]:
    return llama_step(CONFIG), llama_plan(CONFIG, Degrees(dp=3, tp=2, zero=1))


def at(plan: Plan, output: str) -> int:
    return next(i for i, op in enumerate(plan.templates[0].program.ops) if output in op.outputs)


def exchanged(plan: Plan, rank: int, one: str, other: str) -> Plan:
    ops = plan.templates[0].program.ops
    i, j = at(plan, one), at(plan, other)
    return replace(plan, edits=(Edit(rank, (i,), (ops[j],)), Edit(rank, (j,), (ops[i],))))


W = "layers.0.attention.wk"


def test_a_rank_with_another_order_is_proved_as_if_it_had_none() -> None:
    """PROVED, folded as much as without the edit."""
    logical, plan = pair()
    other = exchanged(plan, 4, f"{W}.grad.final", "layers.0.attention.wv.grad.shard")
    assert without_moves(other, OPS) == plan
    report, plain = verify(logical, other, points=1), verify(logical, plan, points=1)
    assert report.verdict == "PROVED", report.reason
    assert report.notes == plain.notes


@pytest.mark.parametrize("way", ["add", "sub"])
def test_summands_in_another_order(way: str) -> None:
    """PROVED as if there were no edit; the same with a difference is REFUTED, at that op."""
    logical, plan = pair()
    n = at(plan, "mb0/layers.0.residual")
    op = plan.templates[0].program.ops[n]
    other = replace(plan, edits=(Edit(4, (n,), (replace(op, name=way, inputs=op.inputs[::-1]),)),))
    report = verify(logical, other, points=1)
    if way == "add":
        assert without_moves(other, OPS) == plan
        assert (report.verdict, report.notes) == ("PROVED", verify(logical, plan, points=1).notes)
    else:
        assert without_moves(other, OPS) == other
        assert report.verdict == "REFUTED"
        assert (report.place and report.place.tensor, report.place and report.place.rank) == ("mb0/layers.0.residual", 4)


@pytest.mark.parametrize("name", ["sub", "div", "mul", "matmul", "lt", "maximum", "concat", "outer"])
def test_operands_of_another_op_stay_where_they_are(name: str) -> None:
    """Their order has a meaning, or nobody has shown that it has none."""
    _, plan = pair()
    program = plan.templates[0].program
    op = Op(name, ("a", "b"), ("c",), (("dim", 0),) if name == "concat" else ())
    tensors = {**program.tensors, **dict.fromkeys("ab", TensorType((3,) if name == "outer" else (3, 3)))}
    assert _written(replace(program, tensors=tensors), op, OPS) == op
    assert _written(replace(program, tensors=tensors), replace(op, inputs=("b", "a")), OPS) != op


def test_before_its_input_it_is_invalid() -> None:
    """INVALID: validation comes first, with the order as it is."""
    logical, plan = pair()
    report = verify(logical, exchanged(plan, 4, f"{W}.grad.shard", f"{W}.grad.final"), points=1)
    assert (report.verdict, report.findings[0].code) == ("INVALID", "TV102")


def test_collectives_in_another_order_stay() -> None:
    """INVALID: the other ranks are in another collective."""
    logical, plan = pair()
    other = exchanged(plan, 4, f"{W}.grad.shard", "layers.0.attention.wv.grad.shard")
    assert without_moves(other, OPS) == other
    assert verify(logical, other, points=1).verdict in ("INVALID", "REFUTED")


def other_input(op: Op) -> Op:
    return replace(op, inputs=(op.inputs[0], op.inputs[0]))


@pytest.mark.parametrize("kind", ["changed", "dropped", "doubled", "retyped"])
def test_other_edits_stay(kind: str) -> None:
    _, plan = pair()
    i = at(plan, f"{W}.grad.final")
    op = plan.templates[0].program.ops[i]
    ops = {"changed": (other_input(op),), "dropped": (), "doubled": (op, op), "retyped": (op,)}[kind]
    edit = Edit(4, (i,), ops, {f"{W}.grad.final": TensorType((1,), "f32")} if kind == "retyped" else {})
    moved = exchanged(plan, 5, f"{W}.grad.final", "layers.0.attention.wv.grad.shard").edits
    left = without_moves(replace(plan, edits=(edit, *moved)), OPS)
    assert left.edits == (edit,)  # and that of rank 5 is gone
