"""`trainverify bench needle`: one op changed on one rank of L3's 8192, at random places: is it found, and what does that cost?"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from trainverify.bench.case import Case
from trainverify.bench.phases import verified
from trainverify.bench.table3 import ROWS
from trainverify.campaign.mutations import Mutant, at_one_rank
from trainverify.graph.plan import Plan
from trainverify.report import Report


@dataclass(frozen=True)
class Needle:
    """One changed op and what was said of it."""

    seed: int
    rank: int
    text: str  # the change
    verdict: str
    reason: str
    named: str  # what the report points at
    rank_named: bool
    op_named: bool  # the changed op itself, with its layer and micro-batch
    seconds: float
    times: float  # of the time of the correct plan

    def json(self) -> dict[str, Any]:
        return vars(self)


def case(layers: int | None = None) -> Case:
    return replace(next(r.case for r in ROWS if r.case.name == "L3"), layers=layers)


def bench(
    count: int = 10, seed: int = 0, layers: int | None = None, progress: Callable[[str], None] = lambda text: None
) -> Iterator[Needle]:
    """The correct plan first, then the others; every one is built and verified from the start."""
    progress("the correct plan")
    base, report, _ = verified(case(layers))
    if report.verdict != "PROVED":
        raise ValueError(f"the correct plan is {report.verdict}: {report.reason}")
    for n in range(seed, seed + count):
        made: list[Mutant] = []

        def change(plan: Plan, made: list[Mutant] = made, n: int = n) -> Plan:
            rng = random.Random(n)
            made.append(at_one_rank(plan, rng.randrange(plan.size), rng))
            return made[0].plan

        progress(f"needle {n - seed + 1} of {count}")
        run, report, plan = verified(case(layers), change)
        (edit,) = plan.edits
        old = next(t for t in plan.templates if edit.rank in t.ranks).program.ops[edit.path[0]]
        named = pointed(report)
        words = {*old.outputs, *(o for op in edit.ops for o in op.outputs), *(str(i) for i in old.inputs if old.name == "send")}
        yield Needle(
            n,
            edit.rank,
            made[0].text,
            report.verdict,
            report.reason,
            named,
            bool(re.search(rf"\brank {edit.rank}\b", named)),
            any(w in named.split() for w in words),
            round(run.total, 1),
            round(run.total / base.total, 2),
        )


def pointed(report: Report) -> str:
    """The place that a report names: the first wrong tensor, or the first error of an ill-formed plan."""
    if report.place is not None:
        p = report.place
        return f"{p.tensor} on rank {p.rank} : {p.op} : {p.cause}"
    return next((re.sub(r"[,:;()'\"]", " ", str(f)) for f in report.findings if f.severity == "error"), report.reason)
