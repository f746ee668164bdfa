"""Bugs planted into a GPipe schedule with stages of unequal size: each is refuted and the planted tensor named, or the plan is invalid."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.verdicts import verify
from trainverify.zoo.llama import Config
from trainverify.zoo.parallel import Degrees, llama_plan, llama_step
from verdicts.changes import Change, in_program, inputs
from zoo.parallel.evaluation import evaluated
from zoo.parallel.mistakes import exchanged_sends

CONFIG = Config(layers=3, hidden=24, heads=6, kv_heads=2, ffn=10, vocabulary=14, sequence=8, batch=6)


@cache
def base() -> tuple[Program, Plan]:
    return llama_step(CONFIG), llama_plan(CONFIG, Degrees(pp=2, microbatches=3, schedule="gpipe", stages=(2, 1)))


def layer_left_out(program: Program) -> Program:
    """Micro-batch 1 goes on before the stage's last layer has seen it."""
    here, sooner = "mb1/layers.1.residual", "mb1/layers.0.residual"
    (i,) = [n for n, o in enumerate(program.ops) if o.name == "send" and o.inputs == (here,)]
    return replace(program, ops=(*program.ops[:i], replace(program.ops[i], inputs=(sooner,)), *program.ops[i + 1 :]))


def first_backward_waits(program: Program) -> Program:
    """The first gradient is awaited before the first activation is handed over."""
    ops = list(program.ops)
    received = next(n for n, o in enumerate(ops) if o.name == "recv")
    sent = next(n for n, o in enumerate(ops) if o.name == "send")
    assert sent < received
    ops.insert(sent, ops.pop(received))
    return replace(program, ops=tuple(ops))


BUGS: dict[str, tuple[str, str, Change]] = {
    # bug: (verdict, the wrong tensor or the finding's code, the change)
    "activations handed over in the other order": ("REFUTED", "mb0/received", exchanged_sends("pp0")),
    "a layer of the longer stage left out": ("REFUTED", "mb1/received", in_program("pp0", layer_left_out)),
    "backward with another micro-batch's activation": (
        "REFUTED",
        "layers.2.feed_forward.w2.grad.1",
        inputs(
            "pp1", "layers.2.feed_forward.w2.grad.1", "mb2/layers.2.ffn.hidden", "layers.2.feed_forward.w2", "mb1/layers.2.ffn.out.grad"
        ),
    ),
    "both stages wait for the other": ("INVALID", "TV205", in_program("pp0", first_backward_waits)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bug_is_found(bug: str) -> None:
    verdict, where, change = BUGS[bug]
    logical, plan = base()
    report = evaluated(logical, change(plan), points=1)
    assert report.verdict == verdict, report.reason
    if verdict == "INVALID":
        assert where in {f.code for f in report.findings}
    else:
        assert report.place is not None
        assert report.place.tensor == where


def test_without_the_bugs_it_is_proved() -> None:
    report = verify(*base(), points=1)
    assert report.verdict == "PROVED", report.notes
