"""Llama on dp2×tp2×pp2 with two micro-batches, by stages alone: the plan is proved, and mistakes of every class of the paper are refuted
(or invalid) at the right stage."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from parallel.test_planted import LLAMA, MANY, again, exchanged_sends, other_batch, skipped, synced_early, together
from trainverify.graph.plan import Plan
from trainverify.graph.program import Op, Program, Ref
from trainverify.verify import verify
from trainverify.zoo.parallel import Degrees, llama_plan, llama_step
from verify.changes import Change, attrs, in_program, inputs, on_rank, replaced


@cache
def base() -> tuple[Program, Plan]:
    return llama_step(LLAMA), llama_plan(LLAMA, MANY)


def test_plan_is_proved() -> None:
    config = replace(LLAMA, layers=1, batch=4)
    how = Degrees(dp=2, tp=2, microbatches=2, normalise="loss")
    report = verify(llama_step(config), llama_plan(config, how), engine="smt", points=1)
    assert report.verdict == "PROVED(reduced)", report.notes
    assert {o.status for o in report.obligations} == {"proved"}


def gathered(program: Program) -> Program:
    """An all_gather, and the first part of it, where an all_reduce should be."""
    name = "mb0/layers.0.ffn.out"
    i = next(n for n, o in enumerate(program.ops) if name in o.outputs)
    op, kind = program.ops[i], program.tensors[name]
    wide = replace(kind, shape=(*kind.shape[:-1], 2 * kind.shape[-1]))
    gather = Op("all_gather", op.inputs, (name + ".wide",), (("dim", 2), ("group", Ref("group.tp"))), op.phase)
    cut = Op("slice", (name + ".wide",), (name,), (("dim", 2), ("start", 0), ("stop", kind.shape[-1])), op.phase)
    return replace(program, ops=(*program.ops[:i], gather, cut, *program.ops[i + 1 :]), tensors={**program.tensors, name + ".wide": wide})


CLASSES: dict[str, tuple[str, str, Change]] = {
    # class: (verdict, the stage that fails or the code of the finding, the change)
    "missing all_reduce": ("REFUTED", "layers.0.attention.out", skipped("pp0", "mb0/layers.0.attention.out")),
    "extra all_reduce": ("REFUTED", "layers.0.residual", again("pp0", "mb0/layers.0.ffn.out", "group.tp")),
    "all_gather for all_reduce": ("REFUTED", "layers.0.ffn.down", in_program("pp0", gathered)),
    "wrong group": (
        "REFUTED",
        "layers.0.attention.wq.grad",
        attrs("pp0", "layers.0.attention.wq.grad.dp", group=Ref("group.tp")),
    ),
    "wrong slice": ("REFUTED", "layers.1.attention.q.turned", attrs("pp1", "rope.cos.rows", start=1, stop=11)),
    "wrong mask offset": ("REFUTED", "layers.1.attention.mixed", attrs("pp1", "mb0/layers.1.attention.mixed", query_offset=1)),
    "wrong gradient scale": ("REFUTED", "tok_embeddings.grad", attrs("pp1", "mb1/loss.share.grad", value=0.5)),
    "norm of one stage only": ("REFUTED", "grad_norm", together(skipped("pp0", "squares"), skipped("pp1", "squares"))),
    "micro-batches exchanged": ("REFUTED", "loss.sum", other_batch("tokens")),
    "activations exchanged": ("REFUTED", "loss.sum", exchanged_sends("pp0")),
    "backward segment dropped": (
        "REFUTED",
        "layers.0.feed_forward.w2.grad",
        replaced("pp0", "layers.0.feed_forward.w2.grad.2", lambda op: replace(op, name="identity", inputs=op.inputs[:1])),
    ),
    "sync before the last backward": ("REFUTED", "layers.0.attention.wo.grad", synced_early("pp0", "layers.0.attention.wo")),
    "dangling backward tensor": ("INVALID", "TV101", inputs("pp0", "layers.0.ffn_norm.grad.1", "nowhere", "layers.0.ffn_norm.grad")),
    "other constant on one rank": (
        "REFUTED",
        "layers.0.attention.q",
        on_rank(1, "mb0/layers.0.attention.normed", lambda op: op.with_attrs(eps=1e-3)),
    ),
}


@pytest.mark.parametrize("name", CLASSES)
def test_mistakes_are_found(name: str) -> None:
    verdict, where, change = CLASSES[name]
    logical, plan = base()
    report = verify(logical, change(plan), engine="smt", points=1)
    assert report.verdict == verdict, report.reason
    if verdict == "INVALID":
        assert where in [f.code for f in report.findings]
    else:
        assert report.difference is not None
        assert any(f"; stage {where} from " in n for n in report.notes), report.notes
