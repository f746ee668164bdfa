"""Bugs planted into plans with context parallelism: each is refuted and the planted tensor named, or the plan is invalid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from trainverify.graph.lineage import Layout, Pattern
from trainverify.graph.plan import Plan
from trainverify.graph.program import Op, Program, Ref
from trainverify.zoo.llama import Config
from trainverify.zoo.parallel import Degrees, llama_plan, llama_step
from verdicts.changes import Change, attrs, edited, in_program, inputs, lineage, op_of
from zoo.parallel.evaluation import evaluated
from zoo.parallel.mistakes import instead, together

CONFIG = Config(layers=1, hidden=24, heads=12, kv_heads=4, ffn=20, vocabulary=14, sequence=24, batch=8)  # chunks of 6 positions
AT = "mb0/layers.0.attention."


@cache
def base(kind: str) -> tuple[Program, Plan]:
    return llama_step(CONFIG), llama_plan(CONFIG, Degrees(dp=2, cp=2, cp_kind=kind, microbatches=2, normalise="loss"))  # type: ignore[arg-type]


def another_chunk(local: str, chunk: int) -> Change:
    """Lineage says that a rank's part of the batch comes from elsewhere."""

    def change(lay: Layout) -> Layout:
        assert isinstance(lay.form, Pattern)
        if dict(lay.where)["cp"] != 1:
            return lay
        return replace(lay, form=replace(lay.form, fixed=tuple((n, chunk if n == "chunk" else i, s) for n, i, s in lay.form.fixed)))

    return lineage(local, change)


def without_last_hop(program: Program) -> Program:
    """Gradients of keys and values stay with the rank before."""
    ops = list(program.ops)
    home = [i for i, o in enumerate(ops) if dict(o.attrs).get("batch") == AT + "back.home.dk"]
    assert len(home) == 4
    for n in ("dk", "dv"):
        i = op_of(program, f"{AT}back.home.{n}")
        ops[i] = replace(ops[i], name="identity", inputs=(f"{AT}back.home.{n}.out",), attrs=())
    return replace(program, ops=tuple(o for i, o in enumerate(ops) if not (i in home and o.name == "send")))


def both(change: Callable[[Program], Program]) -> Change:
    """A change of the programs of both context-parallel ranks."""
    return together(*(in_program(f"pp0cp{i}", change) for i in (0, 1)))


def exchanged(plan: Plan) -> Plan:
    def swap(program: Program) -> Program:
        ops = list(program.ops)
        i, j = [n for n, o in enumerate(ops) if o.name == "send" and dict(o.attrs).get("batch") == AT + "step1.k"]
        ops[i], ops[j] = ops[j], ops[i]
        return replace(program, ops=tuple(ops))

    return in_program("pp0cp0", swap)(plan)


def first_send_missing(program: Program) -> tuple[Op, ...]:
    i = next(n for n, o in enumerate(program.ops) if o.name == "send")
    return (*program.ops[:i], *program.ops[i + 1 :])


def unbatched(plan: Plan) -> Plan:
    def change(program: Program) -> Program:
        return replace(program, ops=tuple(replace(o, attrs=tuple(a for a in o.attrs if a[0] != "batch")) for o in program.ops))

    return both(change)(plan)


def turned_context(plan: Plan) -> Plan:
    """One of the all-to-alls lists its ranks in the other order."""
    (t,) = plan.templates
    groups = {f"{g}.turned": tuple(reversed(plan.groups[str(g)])) for g in t.bindings["group.cp"]}
    bound = replace(t, bindings={**t.bindings, "group.turned": tuple(f"{g}.turned" for g in t.bindings["group.cp"])})
    return attrs("pp0", AT + "v.positions", group=Ref("group.turned"))(replace(plan, templates=(bound,), groups={**plan.groups, **groups}))


BUGS: dict[str, tuple[str, str, str, Change]] = {
    # bug: (kind, verdict, the wrong tensor or the finding's code, the change)
    "rotary table of the next chunk": ("zigzag", "REFUTED", "rope.cos.rows.1", attrs("pp0cp1", "rope.cos.rows.1", start=12, stop=18)),
    "rotary table from the start on every rank": (
        "ulysses",
        "REFUTED",
        "rope.cos.rows",
        attrs("pp0", "rope.cos.rows", start=0, stop=12),
    ),
    "chunks of keys in the order of ranks": (
        "zigzag",
        "REFUTED",
        AT + "k.all",
        inputs("pp0cp0", AT + "k.all", *(f"{AT}k.chunk{c}" for c in (0, 3, 1, 2))),
    ),
    "late chunk before the early one": (
        "zigzag",
        "REFUTED",
        "mb1/tokens",
        inputs("pp0cp1", "mb1/tokens", "mb1/tokens.late", "mb1/tokens.early"),
    ),
    "labels of another chunk": ("zigzag", "INVALID", "TV305", another_chunk("mb0/labels.late", 1)),
    "mask of the early chunk for the late one": ("zigzag", "REFUTED", AT + "mixed.2", attrs("pp0cp1", AT + "mixed.2", query_offset=6)),
    "gradients of keys not added up": (
        "zigzag",
        "REFUTED",
        AT + "k.turned.grad",
        together(*(instead(f"pp0cp{i}", AT + "k.turned.grad", "slice", AT + "k.gathered.grad", dim=2, start=0, stop=12) for i in (0, 1))),
    ),
    "gradients added up over dp only": (
        "ulysses",
        "REFUTED",
        "lm_head.grad.dp",
        attrs("pp0", "lm_head.grad.dp", group=Ref("group.cp")),
    ),
    "tokens counted on one rank of the context": (
        "ulysses",
        "REFUTED",
        "tokens",
        attrs("pp0", "tokens", group=Ref("group.cp")),
    ),
    "heads joined instead of positions": ("ulysses", "INVALID", "TV105", attrs("pp0", AT + "q.positions", split_dim=1, concat_dim=1)),
    "groups of heads in the other order": ("ulysses", "REFUTED", AT + "v.positions", turned_context),
    "old result not rescaled": (
        "ring",
        "REFUTED",
        AT + "step1.late.0.mixed.kept",
        instead("pp0cp1", AT + "step1.late.0.mixed.kept", "identity", AT + "step0.late.1.mixed.sum"),
    ),
    "old sum not rescaled": (
        "ring",
        "REFUTED",
        AT + "step1.early.0.kept",
        instead("pp0cp1", AT + "step1.early.0.kept", "identity", AT + "step0.early.0.sum"),
    ),
    "mask in a block that is seen whole": (
        "ring",
        "REFUTED",
        AT + "step1.late.0.mixed",
        attrs("pp0cp1", AT + "step1.late.0.mixed", is_causal=True),
    ),
    "no mask on the diagonal": (
        "ring",
        "REFUTED",
        AT + "step0.early.0.mixed",
        attrs("pp0cp0", AT + "step0.early.0.mixed", is_causal=False),
    ),
    "logsumexp of the last block in the backward": (
        "ring",
        "REFUTED",
        AT + "back.step0.1.1.dq",
        inputs(
            "pp0cp1",
            AT + "back.step0.1.1.dq",
            *(AT + n for n in ("back.grad.late", "back.q.late", "back.step0.k.late", "back.step0.v.late")),
            AT + "step0.late.1.logsumexp",
            AT + "back.delta.1",
        ),
    ),
    "gradients of keys one rank from home": (
        "ring",
        "REFUTED",
        AT + "back.home.dk",  # and dv
        both(without_last_hop),
    ),
    "keys and values exchanged on the way": (
        "ring",
        "REFUTED",
        AT + "step1.k",  # what the two sends bring to the other rank
        exchanged,
    ),
    "one rank does not send on": ("ring", "INVALID", "TV204", in_program("pp0cp0", lambda p: replace(p, ops=first_send_missing(p)))),
    "the ring starts with blocking sends": ("ring", "INVALID", "TV205", unbatched),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bug_is_found(bug: str) -> None:
    kind, verdict, where, change = BUGS[bug]
    logical, plan = base(kind)
    report = evaluated(logical, change(plan))
    assert report.verdict == verdict, report.reason
    if verdict == "INVALID":
        assert where in {f.code for f in report.findings}, report.findings
        return
    assert report.place is not None
    assert report.place.tensor == where
    assert where in edited(plan, change(plan))
