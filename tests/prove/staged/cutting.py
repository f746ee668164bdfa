"""Pairs of programs cut into stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from tools.campaign.run import make
from trainverify.bench.stages import BASE
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import Plan, units
from trainverify.graph.program import Program
from trainverify.ops import OPS
from trainverify.prove.propose.search import Search
from trainverify.prove.staged.records import Stage
from trainverify.prove.staged_proof import proposed
from trainverify.verdicts import related
from trainverify.zoo.deepseek import Config, Gate
from trainverify.zoo.parallel import Degrees, deepseek_plan, deepseek_step, llama_plan, llama_step


def llama() -> tuple[Program, Plan]:
    config = replace(BASE, layers=1, batch=8)
    return llama_step(config), llama_plan(config, Degrees(dp=2, tp=2, microbatches=2, zero=1))


def experts() -> tuple[Program, Plan]:
    """Every rank sends tokens to both, in two micro-batches: its stages speak of the other's tensors."""
    gate = Gate(4, 2, "softmax")
    config = Config(1, 0, 6, 2, 6, 4, 1, gate, 10, sequence=3, q_rank=4, kv_rank=4, head=4, rotary=2, value=3, batch=4)
    return deepseek_step(config), deepseek_plan(config, Degrees(dp=2, ep=2, microbatches=2, normalise="loss"))


def random_pair(seed: int) -> Callable[[], tuple[Program, Plan]]:
    def programs() -> tuple[Program, Plan]:
        case = make(seed, False)
        return case.logical, case.plan

    return programs


def cut(logical: Program, plan: Plan) -> tuple[Search, list[Stage]]:
    parts = units(plan)
    wanted, _ = obligations(logical, plan, parts)
    engine = Search(proposed(related(logical, plan, OPS, parts, wanted), wanted, plan.lineage), wanted)
    return engine, engine.first()


@cache
def cut_once(programs: Callable[[], tuple[Program, Plan]]) -> tuple[Search, list[Stage]]:
    """For whoever only looks at the stages."""
    return cut(*programs())


def shown(stage: Stage) -> object:
    return stage.tasks, stage.short, stage.identical, stage.partial, stage.foreign
