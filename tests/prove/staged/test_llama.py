"""Llama on dp2×tp2×pp2 with two micro-batches, by stages alone: the plan is proved, and mistakes of every class of the paper are refuted
(or invalid) at the right stage."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from trainverify.bench.stages import BASE, HOW
from trainverify.graph.plan import Plan
from trainverify.graph.program import Op, Program, Ref
from trainverify.verdicts import verify
from trainverify.zoo.parallel import Degrees, llama_plan, llama_step
from verdicts.changes import Change, attrs, in_program, inputs, on_rank, replaced
from zoo.parallel.experts import base as experts
from zoo.parallel.mistakes import LLAMA, MANY, again, column, exchanged_sends, instead, other_batch, skipped, synced_early, together, turned

SEQUENCE = replace(MANY, sp=True)
CONTEXT = Degrees(dp=2, pp=2, cp=2, cp_kind="ulysses", microbatches=2, normalise="loss")


@cache
def base(how: Degrees = MANY) -> tuple[Program, Plan]:
    config = replace(LLAMA, sequence=12, context=12) if how == CONTEXT else LLAMA
    return llama_step(config), llama_plan(config, how)


def test_plan_is_proved() -> None:
    config = replace(LLAMA, layers=1, batch=4)
    how = Degrees(dp=2, tp=2, microbatches=2, normalise="loss")
    report = verify(llama_step(config), llama_plan(config, how), engine="smt", points=1)
    assert report.verdict == "PROVED(reduced)", report.notes
    assert {o.status for o in report.obligations} == {"proved"}


def test_packed_rows_by_sequence_are_proved() -> None:
    """What a masked softmax divides by stands inside choices in its gradient; it is not 0, as the gradient of v divides by it anyway."""
    how = Degrees(dp=2, tp=2, sp=True)
    config = replace(LLAMA, layers=1, batch=2, packed=True)
    report = verify(llama_step(config), llama_plan(config, how), engine="smt", points=1)
    assert report.verdict == "PROVED(reduced)", report.notes


def test_four_layers_at_real_widths_are_proved() -> None:
    """dp2×pp2×tp2 with two micro-batches: thousands of stages, about a hundred that differ in more than names."""
    config = replace(BASE, batch=8)
    report = verify(llama_step(config), llama_plan(config, HOW), engine="smt", points=1)
    assert report.verdict == "PROVED(reduced)", report.notes
    assert {o.status for o in report.obligations} == {"proved"}
    (shown,) = (re.search(r"stages for (\d+) tensors: .* (\d+) distinct others", n) for n in report.notes if " stages for " in n)
    assert shown is not None
    assert int(shown[1]) > 2000  # with those of replicas, which are one stage
    assert int(shown[2]) < 200


def gathered(program: Program) -> Program:
    """An all_gather, and the first part of it, where an all_reduce should be."""
    name = "mb0/layers.0.ffn.out"
    i = next(n for n, o in enumerate(program.ops) if name in o.outputs)
    op, kind = program.ops[i], program.tensors[name]
    wide = replace(kind, shape=(*kind.shape[:-1], 2 * kind.shape[-1]))
    gather = Op("all_gather", op.inputs, (name + ".wide",), (("dim", 2), ("group", Ref("group.tp"))), op.phase)
    cut = Op("slice", (name + ".wide",), (name,), (("dim", 2), ("start", 0), ("stop", kind.shape[-1])), op.phase)
    return replace(program, ops=(*program.ops[:i], gather, cut, *program.ops[i + 1 :]), tensors={**program.tensors, name + ".wide": wide})


def unsynchronised(plan: Plan) -> Plan:
    """No gradient is added up over data-parallel ranks."""
    for t in plan.templates:
        for op in t.program.ops:
            if op.outputs and op.outputs[0].endswith(".grad.dp"):
                plan = skipped(t.program.name, op.outputs[0])(plan)
    return plan


def alone(name: str, output: str) -> Change:
    """A collective over a group of one."""

    def apply(plan: Plan) -> Plan:
        plan = replace(plan, groups={**plan.groups, **{f"alone.{r}": (r,) for r in range(plan.size)}})
        return attrs(name, output, group=Ref("group.alone"))(column(name, "group.alone", lambda r: f"alone.{r}")(plan))

    return apply


AT = "mb0/layers.0."
CLASSES: dict[str, tuple[Degrees, str, str, Change]] = {
    # class: (the plan, verdict, the stage that fails or the code of the finding, the change)
    "missing all_reduce": (MANY, "REFUTED", "layers.0.attention.out", skipped("pp0", AT + "attention.out")),
    "extra all_reduce": (MANY, "REFUTED", "layers.0.residual", again("pp0", AT + "ffn.out", "group.tp")),
    "all_gather for all_reduce": (MANY, "REFUTED", "layers.0.ffn.down", in_program("pp0", gathered)),
    "wrong group": (
        MANY,
        "REFUTED",
        "layers.0.attention.wq.grad",
        attrs("pp0", "layers.0.attention.wq.grad.dp", group=Ref("group.tp")),
    ),
    "wrong rank order": (SEQUENCE, "REFUTED", "layers.0.residual", turned("pp0", AT + "ffn.input")),
    "wrong slice": (MANY, "REFUTED", "layers.1.attention.q.turned", attrs("pp1", "rope.cos.rows", start=1, stop=11)),
    "wrong mask offset": (MANY, "REFUTED", "layers.1.attention.mixed", attrs("pp1", "mb0/layers.1.attention.mixed", query_offset=1)),
    "rope not sliced": (CONTEXT, "REFUTED", "layers.0.attention.q.turned", attrs("pp0", "rope.sin.rows", start=0, stop=6)),
    "wrong gradient scale": (MANY, "REFUTED", "tok_embeddings.grad", attrs("pp1", "mb1/loss.share.grad", value=0.5)),
    "wrong loss scale": (MANY, "REFUTED", "loss", instead("pp1", "loss", "identity", "loss.total")),
    "norm of one stage only": (MANY, "REFUTED", "grad_norm", together(skipped("pp0", "squares"), skipped("pp1", "squares"))),
    "norm counts copies": (MANY, "REFUTED", "grad_norm", again("pp0", "squares.whole.local", "group.tp")),
    "micro-batches exchanged": (MANY, "REFUTED", "loss.sum", other_batch("tokens")),
    "activations exchanged": (MANY, "REFUTED", "loss.sum", exchanged_sends("pp0")),
    "backward segment dropped": (
        MANY,
        "REFUTED",
        "layers.0.feed_forward.w2.grad",
        replaced("pp0", "layers.0.feed_forward.w2.grad.2", lambda op: replace(op, name="identity", inputs=op.inputs[:1])),
    ),
    "sync before the last backward": (MANY, "REFUTED", "layers.0.attention.wo.grad", synced_early("pp0", "layers.0.attention.wo")),
    "dangling backward tensor": (MANY, "INVALID", "TV101", inputs("pp0", "layers.0.ffn_norm.grad.1", "nowhere", "layers.0.ffn_norm.grad")),
    "other constant on one rank": (
        MANY,
        "REFUTED",
        "layers.0.attention.q",
        on_rank(1, AT + "attention.normed", lambda op: op.with_attrs(eps=1e-3)),
    ),
    # what the released code of the paper accepts
    "all_reduce over self": (MANY, "REFUTED", "layers.0.ffn.down", alone("pp0", AT + "ffn.out")),
    "no data-parallel sync": (MANY, "REFUTED", "tok_embeddings.grad", unsynchronised),
    "activations of another micro-batch": (
        MANY,
        "REFUTED",
        "layers.0.attention.q",
        inputs("pp0", "mb1/layers.0.attention.q", "mb0/layers.0.attention.input", "layers.0.attention.wq"),
    ),
    "loss op replaced": (MANY, "REFUTED", "loss.sum", instead("pp1", "mb0/loss.sum", "mean", "mb0/loss.valid")),
    "cos and sin swapped": (
        MANY,
        "REFUTED",
        "layers.0.attention.q.turned",
        inputs("pp0", AT + "attention.q.turned", AT + "attention.q.heads", "rope.sin.rows", "rope.cos.rows"),
    ),
}


@pytest.mark.parametrize("name", CLASSES)
def test_mistakes_are_found(name: str) -> None:
    how, verdict, where, change = CLASSES[name]
    logical, plan = base(how)
    report = verify(logical, change(plan), engine="smt", points=1)
    assert report.verdict == verdict, report.reason
    if verdict == "INVALID":
        assert where in [f.code for f in report.findings]
    else:
        assert report.difference is not None
        assert any(n.startswith("counterexample: ") for n in report.notes)
        assert any(f"; stage {where} from " in n for n in report.notes), report.notes


def test_a_router_without_its_gradient_is_refuted() -> None:
    """The gate learns nothing from the experts' answers, only from the balance."""
    logical, plan = experts("tp")
    change = instead("pp0", "mb0/layers.0.moe.logits.grad.2", "identity", "mb0/layers.0.moe.logits.grad")
    report = verify(logical, change(plan), engine="smt", points=1)
    assert report.verdict == "REFUTED"
    assert any("; stage layers.0.moe.logits.grad.2 from " in n for n in report.notes), report.notes
