"""Plans changed at random: a check never raises, and never fails to understand what it looks at."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from check.large import large
from check.plans import small, small_plan
from trainverify.check import CODES, validate
from trainverify.graph.lineage import Layout, Part, Parts, Pattern, Placements, Run, Shard
from trainverify.graph.plan import Edit, Plan
from trainverify.graph.program import Op, Output, Program, Ref
from trainverify.graph.types import TensorType

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import mlp

VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3,
    10**12,
    0.5,
    float("nan"),
    "",
    "tp",
    "dp.0",
    Ref("group.dp"),
    Ref("nobody"),
    (),
    (1, 2),
    ("a",),
]


def changed_op(rng: random.Random, op: Op, names: list[str]) -> Op:
    what = rng.randrange(6)
    if what == 0:
        return replace(op, name=rng.choice(["relu", "all_reduce", "send", "recv", "call", "sgd", "linear.grad", "nothing", "broadcast"]))
    if what == 1:
        return replace(
            op, inputs=tuple(rng.choice([i, None, rng.choice(names)]) for i in op.inputs) + (("x",) if rng.random() < 0.3 else ())
        )
    if what == 2:
        return replace(op, outputs=op.outputs[1:] if rng.random() < 0.5 else (*op.outputs, rng.choice(names)))
    if what == 3 and op.attrs:
        key = rng.choice([k for k, _ in op.attrs])
        return replace(op, attrs=tuple((k, rng.choice(VALUES) if k == key else v) for k, v in op.attrs))
    if what == 4:
        return replace(op, attrs=(*op.attrs, (rng.choice(["dim", "group", "peer", "function", "root"]), rng.choice(VALUES))))
    return replace(op, forward=rng.choice(names), phase=rng.choice(["forward", "backward", "metric"]))


def changed_program(rng: random.Random, p: Program) -> Program:
    names = [*p.tensors, "nothing"]
    what = rng.randrange(7)
    i = rng.randrange(len(p.ops))
    if what == 0:
        return replace(p, ops=(*p.ops[:i], *p.ops[i + 1 :]))
    if what == 1:
        return replace(p, ops=(*p.ops[:i], p.ops[rng.randrange(len(p.ops))], *p.ops[i:]))
    if what == 2:
        return replace(p, outputs=(*p.outputs, Output(rng.choice(names), rng.choice(["loss", "state", "gradient"]), rng.choice(names))))
    if what == 3:
        kind = rng.choice([TensorType((3, 5)), TensorType((), "i64"), TensorType((-1,), "f31"), TensorType((10**9, 10**9)), None])
        return replace(p, tensors={**p.tensors, rng.choice(names): kind})
    if what == 4:
        return replace(p, inputs=(*p.inputs, rng.choice(names)), parameters=p.parameters[1:])
    return replace(p, ops=(*p.ops[:i], changed_op(rng, p.ops[i], names), *p.ops[i + 1 :]))


def changed_layout(rng: random.Random, lay: Layout) -> Layout:
    number = rng.choice([-1, 0, 1, 7, 10**12])
    part = Part(
        (number,) * rng.randint(0, 3), (Run(number, 3, rng.choice([0, 1, 2]), number),) * rng.randint(0, 3), None, rng.random() < 0.5
    )
    form = rng.choice(
        [
            Placements((("tp", Shard(number)),)),
            Placements((("xp", Shard(0)), ("xp", Shard(0)))),
            Pattern(rng.choice(["", "(tp", "(dp tp) k", "a b c", "k tp", "(k dp tp) 1"])),
            Pattern("(mb b) k", (("mb", number, rng.choice([0, 1, 3])),)),
            Parts(((number, (part,)),)),
            Parts(((0, (part, replace(part, partial=("sum", number, 2)))), (1, (replace(part, padding=True),)))),
        ]
    )
    return rng.choice(
        [replace(lay, form=form), replace(lay, where=((rng.choice(["tp", "zz"]), number),)), replace(lay, logical="w", local="y")]
    )


def changed_plan(rng: random.Random, plan: Plan) -> Plan:
    what = rng.randrange(8)
    if what == 0 and plan.lineage:
        i = rng.randrange(len(plan.lineage))
        return replace(plan, lineage=(*plan.lineage[:i], changed_layout(rng, plan.lineage[i]), *plan.lineage[i + 1 :]))
    if what == 1 and plan.groups:
        return replace(plan, groups={**plan.groups, rng.choice(list(plan.groups)): rng.choice([(), (0,), (0, 0), (1, 0), (99,), (0, "a")])})
    if what == 2:
        op = rng.choice(plan.templates[0].program.ops)
        path = tuple(rng.choice([0, 1, 5, 99]) for _ in range(rng.randint(0, 2)))
        return replace(plan, edits=(Edit(rng.choice([0, 1, 99]), path, rng.choice([(), (op,), (op, op)])),))
    k = rng.randrange(len(plan.templates))
    t = plan.templates[k]
    if what == 3 and t.bindings:
        name = rng.choice(list(t.bindings))
        column = list(t.bindings[name])
        column[rng.randrange(len(column))] = rng.choice(VALUES)
        t = replace(t, bindings={**t.bindings, name: tuple(column[: rng.choice([len(column), len(column), 1])])})
    elif what == 4:
        t = replace(t, ranks=rng.choice([t.ranks[1:], (*t.ranks, 0), (*t.ranks[:-1], 99), ()]))
    else:
        t = replace(t, program=changed_program(rng, t.program))
    return replace(plan, templates=(*plan.templates[:k], t, *plan.templates[k + 1 :]))


PLANS = [(small(), small_plan()), (mlp.logical(), mlp.plan()), large(2, 2, 2, 2, 3)]


@pytest.mark.parametrize("seed", range(30))
def test_changes(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        logical, plan = rng.choice(PLANS)
        for _ in range(rng.randint(1, 3)):
            if rng.random() < 0.2:
                logical = changed_program(rng, logical)
            else:
                plan = changed_plan(rng, plan)
        findings = validate(logical, plan)
        assert {f.code for f in findings} <= set(CODES)
        assert not [f for f in findings if f.code == "TV100"]
        assert all(str(f) for f in findings)
