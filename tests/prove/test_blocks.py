"""Layers and micro-batches are worked out once: what is said again of the others must be true of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import trainverify as tv
from prove.meaning import check_program, system_of
from trainverify.check import validate
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.prove.algebra.engine import Prover
from trainverify.verdicts import single
from trainverify.zoo import llama
from trainverify.zoo.parallel import Degrees, llama_plan, llama_step

LAYERS = 6
CONFIG = llama.Config(layers=5, hidden=12, heads=6, kv_heads=2, ffn=10, vocabulary=14, sequence=10, batch=12)
HOW = Degrees(dp=2, tp=2, sp=True, pp=2, microbatches=3)


def failed(logical: Program, plan: Plan | Program, blocks: bool = True) -> int:
    plan = single(plan) if isinstance(plan, Program) else plan
    system, wanted = system_of(logical, plan)
    prover = Prover(system, blocks=blocks)
    return len(prover.prove(wanted).failed)


# -- layers ----------------------------------------------------------------------------------------------------------


def twice(wrong: int | None = None) -> Program:
    """Layers that are handed silu of their input and compute it again; in one of them it is silu of something else."""
    b = tv.program("twice")
    z = b.input("z", (3, 4))
    given = []
    for i in range(LAYERS):
        x = b.input(f"x{i}", (3, 4))
        y = z if i == wrong else x
        for _ in range(2):  # the same first steps, so that the two look alike from outside
            y = b.silu(b.mul(y, value=2.0))
        given.append((x, y))
    total = []
    for x, y in given:
        own = x
        for _ in range(2):
            own = b.silu(b.mul(own, value=2.0))
        d = b.sub(b.mul(own, own), b.mul(y, y))
        e = b.add(b.mul(b.exp(d), x), b.mul(b.tanh(x), d))
        total.append(b.sum(b.mul(b.sigmoid(e), e)))
    loss = total[0]
    for t in total[1:]:
        loss = b.add(loss, t)
    b.loss(b.identity(loss, name="loss"))
    return b.build()


def test_layers_are_said_again() -> None:
    assert failed(twice(), twice()) == 0
    compared = check_program(twice(), 0)
    assert compared.wrong == []
    assert compared.without == []


@pytest.mark.parametrize("layer", range(LAYERS))
def test_found_again_in_one_layer_is_not_found_in_another(layer: int) -> None:
    assert failed(twice(), twice(layer)) == 1
    compared = check_program(twice(layer), layer)
    assert compared.wrong == []


# -- a plan ----------------------------------------------------------------------------------------------------------


def edit(plan: Plan, tensor: str, change: Callable[[tv.Op], tv.Op]) -> Plan:
    """The op that makes a tensor, changed on all ranks that run it."""
    found = 0
    templates = []
    for t in plan.templates:
        ops = []
        for op in t.program.ops:
            hit = tensor in op.outputs
            found += hit
            ops.append(change(op) if hit else op)
        templates.append(replace(t, program=replace(t.program, ops=tuple(ops))))
    assert found == 1, tensor
    return replace(plan, templates=tuple(templates))


def other_input(n: int, name: str) -> Callable[[tv.Op], tv.Op]:
    return lambda op: replace(op, inputs=(*op.inputs[:n], name, *op.inputs[n + 1 :]))


WRONG = {
    "eps of one norm in one micro-batch": ("mb1/layers.1.ffn.normed", lambda op: op.with_attrs(eps=2e-5)),
    "a micro-batch goes through another layer's weight": ("mb2/layers.1.ffn.up", other_input(1, "layers.0.feed_forward.w3")),
    "a layer reads the residual of another micro-batch": ("mb1/layers.2.ffn.normed", other_input(0, "mb0/layers.2.attention.residual")),
    "the backward pass reads another layer's activations": ("mb1/layers.1.ffn.silu.grad", other_input(0, "mb1/layers.0.ffn.silu")),
    "the keys of one micro-batch are its values": ("mb2/layers.4.attention.k", other_input(1, "layers.4.attention.wv")),
}


def test_the_plan_is_proved_with_and_without() -> None:
    logical, plan = llama_step(CONFIG), llama_plan(CONFIG, HOW)
    assert failed(logical, plan) == failed(logical, plan, blocks=False) == 0


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_fails_as_it_does_without(name: str) -> None:
    tensor, change = WRONG[name]
    logical, plan = llama_step(CONFIG), edit(llama_plan(CONFIG, HOW), tensor, change)
    assert validate(logical, plan) == []  # nothing but the value is wrong
    without = failed(logical, plan, blocks=False)
    assert without > 0
    assert failed(logical, plan) >= without


@pytest.mark.parametrize("op", ["ffn.silu", "attention.input", "attention.k.turned"])
def test_a_whole_backward_pass_over_another_micro_batch_fails(op: str) -> None:
    """In all layers: the blocks are wired like the right ones, and only what comes in is of another micro-batch."""
    plan = llama_plan(CONFIG, HOW)
    templates, changed = [], 0
    for t in plan.templates:
        made = {o for x in t.program.ops for o in x.outputs}
        ops = []
        for x in t.program.ops:
            saved = {i: i.replace("mb1/", "mb0/") for i in x.inputs if i is not None and i.startswith("mb1/") and i.endswith(op)}
            saved = {i: j for i, j in saved.items() if x.phase == "backward" and j in made}
            changed += len(saved)
            ops.append(replace(x, inputs=tuple(i if i is None else saved.get(i, i) for i in x.inputs)))
        templates.append(replace(t, program=replace(t.program, ops=tuple(ops))))
    assert changed >= CONFIG.layers
    wrong, logical = replace(plan, templates=tuple(templates)), llama_step(CONFIG)
    assert validate(logical, wrong) == []
    without = failed(logical, wrong, blocks=False)
    assert without > 0
    assert failed(logical, wrong) >= without
