"""MLP dp2×pp2×tp2, two micro-batches, whole step with SGD: the correct plan agrees, every planted bug is found and named."""

from __future__ import annotations

from dataclasses import replace

import pytest

import trainverify as tv
from trainverify.graph.lineage import Layout, Placements, layout
from trainverify.graph.plan import Plan
from trainverify.graph.program import Op, Program, Ref
from trainverify.verdicts import verify
from verdicts.changes import Change, attrs, becomes, in_program, inputs, lineage, on_rank, replaced, swapped, without_output
from verdicts.mlp import HIDDEN, MICRO, identity, logical, plan


def reordered(group: str) -> Change:
    """One collective uses a group of the same ranks in another order."""

    def apply(p: Plan) -> Plan:
        groups = dict(p.groups) | {f"{g}.turned": tuple(reversed(m)) for g, m in p.groups.items() if g.startswith(group)}
        templates = []
        for t in p.templates:
            turned = {"group.turned": tuple(f"{g}.turned" for g in t.bindings[f"group.{group}"])}
            templates.append(replace(t, bindings={**t.bindings, **turned}) if t.program.name == "pp0" else t)
        return attrs("pp0", "a1.whole", group=Ref("group.turned"))(replace(p, groups=groups, templates=tuple(templates)))

    return apply


def last_only(op: Op) -> Op:
    return replace(identity(op), inputs=op.inputs[1:])


def targets_cut_otherwise(p: Plan) -> Plan:
    for t in ("t0", "t1"):
        p = lineage(t, lambda lay: replace(lay, form=replace(lay.form, text="(mb dp b) k")))(p)
    return p


def declares(*layouts: Layout) -> Change:
    return lambda p: replace(p, lineage=(*p.lineage, *layouts))


def partial_gradient(p: Plan) -> Plan:
    """The local gradient is reported, and declared as what it is: a summand."""

    def report(program: Program) -> Program:
        outputs = tuple(replace(o, tensor="w2.grad.2") if o.tensor == "w2.grad.mean" else o for o in program.outputs)
        return replace(program, outputs=outputs)

    return declares(PARTIAL)(in_program("pp1", report)(p))


PARTIAL = layout("w2.grad", Placements((("dp", tv.Partial()), ("tp", tv.Shard(1)))), "w2.grad.2", {"pp": 1})
WRONG_H = [layout("h", "(dp mb b) (o tp)", f"h{m}", {"pp": 0}, {"mb": (m, 2)}) for m in range(MICRO)]


# name: (expected verdict, the wrong tensor or the finding's code, the change)
BUGS: dict[str, tuple[str, str, Change]] = {
    "all_reduce takes the maximum": ("REFUTED", "y0", attrs("pp1", "y0", op="max")),
    "all_reduce becomes all_gather": ("INVALID", "TV105", becomes("pp1", "y0", "all_gather", group=Ref("group.tp"))),
    "forward all_reduce missing": ("REFUTED", "y1", replaced("pp1", "y1", identity)),
    "backward all_reduce missing": ("REFUTED", "z1.grad", replaced("pp0", "z1.grad", identity)),
    "gradient summed, not averaged": ("REFUTED", "w1.grad.mean", attrs("pp0", "w1.grad.mean", op="sum")),
    "gradient synced over tp instead of dp": ("REFUTED", "w2.grad.mean", attrs("pp1", "w2.grad.mean", group=Ref("group.tp"))),
    "gradient not synced": ("REFUTED", "w0.grad.mean", replaced("pp0", "w0.grad.mean", identity)),
    "group in another order": ("REFUTED", "a1.whole", reordered("tp")),
    "wrong half taken": ("REFUTED", "a0", attrs("pp1", "a0", start=0, stop=HIDDEN // 2)),
    "halves exchanged on one rank": (
        "REFUTED",
        "a1",
        on_rank(6, "a1", lambda op: op.with_attrs(start=HIDDEN // 2, stop=HIDDEN)),
    ),
    "loss scaled by tp": ("REFUTED", "loss0", attrs("pp1", "loss0", value=2 / MICRO)),
    "loss not averaged over dp": ("REFUTED", "loss", attrs("pp1", "loss", op="sum")),
    "second micro-batch overwrites the gradient": (
        "REFUTED",
        "w1.grad.2",
        replaced("pp0", "w1.grad.2", last_only),
    ),
    "stale micro-batch": ("REFUTED", "e1", inputs("pp1", "e1", "y0", "t1")),
    "backward of the wrong micro-batch": ("REFUTED", "h1.grad", inputs("pp0", "h1.grad", "h0", "a1.grad")),
    "batch cut the other way for the targets": (
        "REFUTED",
        "e0",
        targets_cut_otherwise,
    ),
    "optimizer uses the local gradient": ("REFUTED", "w2.new", inputs("pp1", "w2.new", "w2", "w2.grad.2", "w2.momentum")),
    "momentum of another rate": ("REFUTED", "w1.new", attrs("pp0", "w1.new", momentum=0.8)),
    "learning rate of one rank": ("REFUTED", "w0.new", on_rank(5, "w0.new", lambda op: op.with_attrs(lr=0.2))),
    "gradient declared partial": (
        "INVALID",
        "TV306",
        partial_gradient,
    ),
    "updated parameter left out": ("INVALID", "TV307", without_output("pp0", "w1.new")),
    "momentum left out": ("INVALID", "TV307", without_output("pp1", "w2.momentum.new")),
    "loss left out": ("INVALID", "TV307", without_output("pp1", "loss")),
    "one rank skips its collective": ("INVALID", "TV203", on_rank(3, "w2.grad.mean", identity)),
    "receives in the other order of stages": (
        "INVALID",
        "TV205",
        swapped("pp1", lambda op: "a0.whole" in op.outputs, lambda op: op.name == "send"),
    ),
    "declared lineage of an activation is wrong": (
        "REFUTED",
        "h0",
        declares(*WRONG_H),
    ),
    "claim that the local gradients are summands": ("REFUTED", "w2.grad.2", declares(PARTIAL)),
    "tensor never defined": (
        "INVALID",
        "TV101",
        in_program("pp0", lambda p: replace(p, ops=tuple(o for o in p.ops if "z0" not in o.outputs))),
    ),
}


def test_correct_plan_is_proved() -> None:
    report = verify(logical(), plan())
    assert (report.verdict, report.exit_code) == ("PROVED", 0), report.notes
    assert not report.findings
    assert len(report.obligations) == 10
    assert {(o.status, o.engine, o.scope) for o in report.obligations} == {("proved", "algebra", "full size")}


def test_program_against_itself_is_proved() -> None:
    assert verify(logical(), logical()).verdict == "PROVED"


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug(name: str) -> None:
    verdict, named, change = BUGS[name]
    report = verify(logical(), change(plan()))
    assert report.verdict == verdict, report.reason
    assert report.exit_code == 1
    if verdict == "INVALID":
        assert named in {f.code for f in report.findings}, report.findings
    else:
        assert report.difference is not None
        assert report.difference.got != report.difference.want
        assert report.place is not None
        assert report.place.tensor == named, report.place


def test_at_least_fifteen_bugs_are_planted() -> None:
    assert len(BUGS) >= 15
