"""One proof, phase by phase: seconds of processor time and peak memory. The steps are those of `verify`."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from trainverify.axes.system import System
from trainverify.bench.case import Case
from trainverify.bench.clock import Clock, in_turns, least, walks
from trainverify.check import validate
from trainverify.evaluate.run import elements
from trainverify.evaluate.small import shrink_system
from trainverify.graph.communication import Communication, schedule
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import units
from trainverify.limits import seldom_collected
from trainverify.ops import OPS
from trainverify.prove.algebra.engine import Prover
from trainverify.verdicts import MAX_ELEMENTS, compare_at

PROVE: Final = ("validate", "schedule", "axes", "fold", "logical", "plan", "compare")  # what a proof needs
CROSS_CHECK: Final = ("shrink", "evaluate")  # one random point, all ranks
PHASES: Final = ("build", *PROVE, *CROSS_CHECK)
SHORT: Final = 15.0  # seconds; a proof that takes longer is measured once
QUICK: Final = 3.0  # the same of an evaluation


@dataclass
class Measurement:
    """One case: what it is, whether it is proved, and what that costs."""

    ranks: int
    folded: int  # to so many programs
    obligations: int
    failed: int
    folded_ops: int  # of the folded programs together
    ops: int  # of all ranks together
    evaluated: bool
    suspects: int = 0  # local tensors that float64 does not call equal; `verify` decides them with enclosures
    expressions: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    megabytes: dict[str, float] = field(default_factory=dict)

    @property
    def prove(self) -> float:
        return sum(self.seconds[p] for p in PROVE)

    @property
    def rate(self) -> float:
        """Plan ops per second, as the folded programs have them."""
        return self.folded_ops / self.prove

    @property
    def rate_all(self) -> float:
        """Plan ops per second, as all ranks have them."""
        return self.ops / self.prove

    def json(self) -> dict[str, object]:
        return {
            "ranks": self.ranks,
            "folded": self.folded,
            "obligations": self.obligations,
            "failed": self.failed,
            "folded_ops": self.folded_ops,
            "ops": self.ops,
            "expressions": self.expressions,
            "evaluated": self.evaluated,
            "suspects": self.suspects,
            "seconds": {p: round(s, 4) for p, s in self.seconds.items()},
            "megabytes": {p: round(s, 2) for p, s in self.megabytes.items()},
            "prove_seconds": round(self.prove, 4),
            "ops_per_second": round(self.rate),
            "ops_per_second_all_ranks": round(self.rate_all),
        }


def once(case: Case, evaluate: bool = True) -> tuple[Measurement, Clock]:
    """All phases of one case, one time."""
    gc.collect()
    with seldom_collected():
        return _once(case, evaluate)


def _once(case: Case, evaluate: bool) -> tuple[Measurement, Clock]:
    clock = Clock("between")
    with clock.phase("build"):
        logical, plan = case.build()
    with clock.phase("validate"):
        findings = validate(logical, plan, OPS)
    if findings:
        raise ValueError(f"an ill-formed plan: {findings[0].message}")
    with clock.phase("schedule"):
        parts = units(plan)
        wanted, _ = obligations(logical, plan, parts)
        talk = Communication(plan, parts, OPS)
        order = schedule(talk)
    with clock.phase("axes"):
        system = System(logical, plan, OPS, talk, order).collect(wanted)
    with clock.phase("fold"):
        prover = Prover(system)
    with clock.phase("compare"), walks(clock):
        proof = prover.prove(wanted)
    suspects = 0
    if evaluate:
        with clock.phase("shrink"):
            small = shrink_system(system)
        evaluate = elements(small) <= MAX_ELEMENTS
        if evaluate:
            with clock.phase("evaluate"):
                wrong, _ = compare_at(small, plan, wanted, 0)
            suspects = len(wrong)
    counts = [len(p.ops) for p in system.unit_programs]
    unit = [order.classes[i.class_index].unit for i in prover.instances]
    result = Measurement(
        ranks=plan.size,
        folded=len(prover.instances),
        obligations=len(wanted),
        failed=len(proof.failed),
        folded_ops=sum(counts[u] for u in unit),
        ops=sum(counts[k.unit] * len(k.ranks) for k in order.classes),
        evaluated=evaluate,
        suspects=suspects,
        expressions=proof.atoms,
    )
    return result, clock


def traced(case: Case, evaluate: bool = True) -> dict[str, float]:
    """Peak memory of every phase in megabytes, in a run of its own: tracing is slow."""
    tracemalloc.start()
    try:
        _, clock = once(case, evaluate)
    finally:
        tracemalloc.stop()
    return {p: clock.peak[p] / 1e6 for p in PHASES if p in clock.peak}


def measure(cases: Sequence[Case], repeat: int = 3, memory: bool = True, evaluate: bool = True) -> list[Measurement]:
    """The least of some runs. The cases take turns, so that a machine that becomes slower does so for all of them."""
    once(cases[0], evaluate)  # imports, caches

    def run(case: Case, before: Sequence[tuple[Measurement, Clock]]) -> tuple[Measurement, Clock] | None:
        first = before[0][1].seconds if before else {}
        if sum(first.get(p, 0.0) for p in PROVE) >= SHORT:
            return None
        long = sum(first.get(p, 0.0) for p in CROSS_CHECK) > QUICK
        return once(case, evaluate and not long)

    result = []
    for case, runs in zip(cases, in_turns(cases, repeat, run), strict=True):
        m = runs[0][0]
        own = [clock.seconds for _, clock in runs]
        m.seconds = least(own, ("build", *PROVE)) | (least(own, CROSS_CHECK) if "shrink" in own[0] else {})
        if memory:
            m.megabytes = traced(case, evaluate)
        result.append(m)
    return result
