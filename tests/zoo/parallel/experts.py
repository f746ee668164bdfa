"""A mixture of experts on a mesh, and its plans with a mistake."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from trainverify.graph.plan import Plan
from trainverify.graph.program import Program, Ref
from trainverify.zoo.deepseek import Config, Gate
from trainverify.zoo.parallel import Degrees, deepseek_plan, deepseek_step
from verdicts.changes import Change, attrs

GATE = Gate(12, 3, "sigmoid", normalize=True, scale=2.5, groups=4, top_groups=2, group_score="top2", bias=True)
CONFIG = Config(1, 0, 24, 6, 20, 10, 2, GATE, 14, sequence=6, q_rank=10, kv_rank=14, head=8, rotary=4, value=6, batch=4)
HOW = Degrees(dp=4, ep=2, tp=2, normalise="loss")
AT, MLP = "mb0/layers.0.", "layers.0.mlp."


@cache
def base(kind: str) -> tuple[Program, Plan]:
    how = replace(HOW, sp=kind == "sp", zero=1 if kind == "zero1" else 0)
    return deepseek_step(CONFIG), deepseek_plan(CONFIG, how)


def turned(output: str) -> Change:
    """The group of an op lists its ranks in the other order."""

    def apply(plan: Plan) -> Plan:
        (t,) = plan.templates
        groups = {f"{g}.turned": tuple(reversed(plan.groups[str(g)])) for g in t.bindings["group.ep"]}
        bound = replace(t, bindings={**t.bindings, "group.turned": tuple(f"{g}.turned" for g in t.bindings["group.ep"])})
        return attrs("pp0", output, group=Ref("group.turned"))(replace(plan, templates=(bound,), groups={**plan.groups, **groups}))

    return apply
