"""The mixture-of-experts plan of the paper's artifact, in our own format: experts are divided among the ranks of a stage."""

from __future__ import annotations

from dataclasses import replace

from nnscaler.plans import DATA
from trainverify import files
from trainverify.graph.plan import Plan
from trainverify.report import Report
from trainverify.verdicts import verify


def judged(plan: Plan) -> Report:
    return verify(files.read_program(DATA / "ours" / "ae_moe2l_v03_single.json.gz"), plan)


def test_experts() -> None:
    plan = files.read_plan(DATA / "ours" / "ae_moe2l_v03_dp2pp2tp2nm2.json.gz")
    ops = [op.name for t in plan.templates for op in t.program.ops]
    assert {"moe_route", "moe_experts", "moe_route.grad", "moe_experts.grad", "rotary_pair"} <= set(ops)
    assert judged(plan).verdict == "PROVED"


def test_every_rank_takes_the_first_experts() -> None:
    """Ranks hold different experts, and all of them think that theirs are those from 0 on. Not PROVED; a dump has only its own sizes, at
    which 25 billion elements are too many to evaluate."""
    plan = files.read_plan(DATA / "ours" / "ae_moe2l_v03_dp2pp2tp2nm2.json.gz")
    templates = []
    for t in plan.templates:
        ops = tuple(op.with_attrs(start=0) if op.name.startswith("moe_experts") else op for op in t.program.ops)
        templates.append(replace(t, program=replace(t.program, ops=ops)))
    report = judged(replace(plan, templates=tuple(templates)))
    assert report.verdict == "UNKNOWN"
    assert report.reason.startswith("loss differs at reduced sizes")
