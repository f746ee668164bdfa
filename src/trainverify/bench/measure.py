"""One proof, phase by phase: seconds of processor time and peak memory. The steps are those of `verify`."""

from __future__ import annotations

import gc
import math
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from trainverify.axes.system import System
from trainverify.check import validate
from trainverify.evaluate.run import elements
from trainverify.evaluate.small import shrink_system
from trainverify.graph.communication import Communication, schedule
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import units
from trainverify.limits import seldom_collected
from trainverify.ops import OPS
from trainverify.prove.algebra.engine import Prover
from trainverify.verify import MAX_ELEMENTS, compare_at
from trainverify.zoo.llama import Config
from trainverify.zoo.parallel import Degrees, llama_plan, llama_step

PROVE: Final = ("validate", "schedule", "axes", "fold", "logical", "plan", "compare")  # what a proof needs
CROSS_CHECK: Final = ("shrink", "evaluate")  # one random point, all ranks
PHASES: Final = ("build", *PROVE, *CROSS_CHECK)
SHORT: Final = 3.0  # seconds; a proof or an evaluation that takes longer is measured once


@dataclass
class Clock:
    """Processor seconds and, if memory is traced, peak bytes above the start, by phase."""

    seconds: dict[str, float] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        traced = tracemalloc.is_tracing()
        if traced:
            tracemalloc.reset_peak()
        began = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - began
        if traced:
            self.peak[name] = max(self.peak.get(name, 0), tracemalloc.get_traced_memory()[1])


class _Timed(Prover):
    """The prover, with its two walks timed."""

    def __init__(self, system: System, clock: Clock):
        self.clock = clock
        super().__init__(system)

    def _run_logical(self) -> None:
        with self.clock.phase("logical"):
            super()._run_logical()

    def _run_plan(self) -> None:
        with self.clock.phase("plan"):
            super()._run_plan()


@dataclass(frozen=True)
class Case:
    """A plan of Llama to prove."""

    config: Config
    how: Degrees


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
    clock = Clock()
    with clock.phase("build"):
        logical, plan = llama_step(case.config), llama_plan(case.config, case.how)
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
        prover = _Timed(system, clock)
    with clock.phase("compare"):
        proof = prover.prove(wanted)
    clock.seconds["compare"] -= clock.seconds["logical"] + clock.seconds["plan"]
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
    return {p: b / 1e6 for p, b in clock.peak.items()}


def measure(cases: Sequence[Case], repeat: int = 3, memory: bool = True, evaluate: bool = True) -> list[Measurement]:
    """Medians. The cases take turns, so that a machine that becomes slower does so for all of them."""
    once(cases[0], evaluate)  # imports, caches
    found: list[Measurement | None] = [None] * len(cases)
    runs: list[list[dict[str, float]]] = [[] for _ in cases]
    for turn in range(repeat):
        for i, case in enumerate(cases):
            first = runs[i][0] if turn else {}
            if sum(first.get(p, 0.0) for p in PROVE) < SHORT:
                long = sum(first.get(p, 0.0) for p in CROSS_CHECK) > SHORT
                made, clock = once(case, evaluate and not long)
                found[i] = found[i] or made
                runs[i].append(clock.seconds)
    result = []
    for m, case, mine in zip(found, cases, runs, strict=True):
        assert m is not None
        m.seconds = {p: median(r[p] for r in mine if p in r) for p in PHASES if p in mine[0]}
        if memory:
            m.megabytes = traced(case, evaluate)
        result.append(m)
    return result


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The e of y = c·xᵉ that fits best: least squares of the logarithms."""
    a, b = [math.log(x) for x in xs], [math.log(max(y, 1e-9)) for y in ys]
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    spread = sum((x - mean_a) ** 2 for x in a)
    return sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True)) / spread
