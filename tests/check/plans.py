"""Small programs and plans that tests bend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import trainverify as tv
from trainverify.build.plan import RankBuilder
from trainverify.check import Finding, validate
from trainverify.graph.plan import Plan, Template
from trainverify.graph.program import Op, Output, Program, Source, attributes
from trainverify.graph.types import TensorType


def op(name: str, inputs: tuple[Any, ...], outputs: tuple[str, ...], line: int = 0, phase: Any = "forward", **attrs: Any) -> Op:
    return Op(name, inputs, outputs, attributes(attrs), phase, None, Source("user.py", line) if line else None)


def types(**shapes: Any) -> dict[str, TensorType]:
    return {n: s if isinstance(s, TensorType) else TensorType(s) for n, s in shapes.items()}


def small() -> Program:
    """loss = mean(x·wᵀ), with gradients and SGD."""
    b = tv.program("small")
    x = b.input("x", (6, 8))
    w = b.parameter("w", (10, 8))
    b.loss(b.mean(b.linear(x, w, name="y"), name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.5))


def small_plan(form: Any = "(tp o) k", rows: Any = "(dp b) k", more: Callable[[RankBuilder], None] | None = None) -> Plan:
    """`small` on dp=3 × tp=2: rows over dp, columns of the result over tp."""
    p = tv.plan("small", tv.Mesh(dp=3, tp=2))
    with p.ranks() as r:
        x = r.input("x", (2, 8), rows)
        w = r.parameter("w", (5, 8), form)
        y = r.linear(x, w, name="y")
        loss = r.mean(y, name="mean")
        r.backward(loss)
        r.loss(r.all_reduce(loss, group=["dp", "tp"], op="avg", name="loss"))
        r.phase = "optimizer"
        half = r.mul(r.gradient(w), value=0.5, name="w.half")
        grad = r.all_reduce(half, group="dp", op="avg", name="w.grad.synced")
        r.output(grad, "gradient", "w")
        r.update(w, r.sgd(w, grad, lr=0.5, name=["w.new"]))
        if more is not None:
            more(r)
    return p.build()


def found(logical: Program | None, plan: Plan | None) -> list[Finding]:
    """Findings; also that validating never depends on the other half being there."""
    if logical is not None and plan is not None:
        validate(logical, None)
        validate(None, plan)
    return validate(logical, plan)


def codes(logical: Program | None, plan: Plan | None) -> list[str]:
    return [f.code for f in found(logical, plan)]


def change(program: Program, index: int, **changes: Any) -> Program:
    """A program with one op changed."""
    ops = list(program.ops)
    ops[index] = replace(ops[index], **changes)
    return replace(program, ops=tuple(ops))


def with_program(plan: Plan, program: Program, index: int = 0) -> Plan:
    templates = list(plan.templates)
    templates[index] = replace(templates[index], program=program)
    return replace(plan, templates=tuple(templates))


def index_of(program: Program, tensor: str) -> int:
    return next(i for i, o in enumerate(program.ops) if tensor in o.outputs)


def two_ranks(first: list[Op], second: list[Op], tensors: dict[str, TensorType], sources: tuple[str, ...] = ("x",), **groups: Any) -> Plan:
    """A plan of two ranks with a program each. Every op result is an output, so that nothing is unused."""

    def program(name: str, ops: list[Op]) -> Program:
        made = [o for step in ops for o in step.outputs]
        outputs = tuple(Output(o, "metric", o) for o in made)
        return Program(name, {n: t for n, t in tensors.items() if n in (*sources, *made)}, sources, (), (), tuple(ops), outputs)

    templates = (Template(program("first", first), (0,)), Template(program("second", second), (1,)))
    return Plan("two", tv.Mesh(tp=2), templates, groups or {"g": (0, 1)})
