"""The campaign: cases from seeds, what the verifier says to each, what must never happen.

A case is a seed: the same seed gives the same program, plan and mistake. Correct plans must never be REFUTED or
INVALID. A mistake that is PROVED must be harmless: every rank's outputs equal at full size on several random points.
"""

from __future__ import annotations

import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

import trainverify as tv
from tools.campaign import autograd
from tools.campaign.plans import partition, setting
from tools.campaign.programs import step
from tools.campaign.workers import judged
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.limits import OutOfTime, limited
from trainverify.mutate.causes import generic
from trainverify.mutate.mutations import Mutant, mutate
from trainverify.mutate.simulate import worst
from trainverify.verdicts import Disagreement

DIFFERENT: Final = 1e-6
AUTOGRAD: Final = 0.15  # share of plans whose backward is per-rank reverse mode
LARGE: Final = tuple((point, times) for times in (64.0, 512.0) for point in range(2))  # larger inputs: gradients are clipped there
FULL_SIZE: Final = 3  # points evaluated at full size behind a PROVED mistake

# what a case can be; the ones that must never happen say so
SAME: Final = 1e-14  # enclosures tell apart what float64 hardly does: an eps of 1e-8 with the wrong sign
BAD: Final = ("crash", "disagreement", "wrong PROVED", "correct plan REFUTED", "correct plan INVALID", "REFUTED but equal", "generator")


@dataclass(frozen=True)
class Case:
    logical: Program
    plan: Plan
    family: str
    mutant: Mutant | None = None


@dataclass(frozen=True)
class Outcome:
    seed: int
    mutant: bool
    verdict: str  # of verify; TIME where it took too long, CRASH where it failed
    bad: str | None  # one of BAD
    reason: str
    kind: str  # family of plans, or kind of mistake
    ops: int
    ranks: int
    seconds: float
    detail: str = ""

    @property
    def cause(self) -> str:
        """The reason without names and numbers, for counting."""
        return generic(self.reason)


def make(seed: int, mutant: bool = False) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    if rng.random() < AUTOGRAD:
        logical, plan = autograd.case(rng)
        family = "uneven rows" if logical.name == "uneven" else "reverse mode"
    else:
        made = step(rng)
        logical = made.logical()
        source = made.spelled(rng) if rng.random() < 0.4 else logical
        how = setting(rng)
        plan = partition(source, logical, how, rng)
        family = how.family
    if not mutant:
        return Case(logical, plan, family)
    wrong = mutate(plan, rng)
    return Case(logical, wrong.plan, family, wrong)


def run(seed: int, mutant: bool, seconds: float = 10.0, oracle: float = 1.0) -> Outcome:
    """One case, judged. `oracle` is the share of cases also run at full size (PROVED mistakes always are)."""
    began = time.perf_counter()
    try:
        case = make(seed, mutant)
    except Exception:
        detail = traceback.format_exc(limit=-6)
        return Outcome(seed, mutant, "CRASH", "generator", detail.strip().splitlines()[-1], "", 0, 0, time.perf_counter() - began, detail)
    kind = case.family if case.mutant is None else case.mutant.kind
    ops = sum(len(t.program.ops) for t in case.plan.templates)

    def outcome(verdict: str, bad: str | None, reason: str, detail: str = "") -> Outcome:
        shown = "\n".join(x for x in (detail, "" if case.mutant is None else case.mutant.text) if x)
        return Outcome(seed, mutant, verdict, bad, reason, kind, ops, case.plan.size, time.perf_counter() - began, shown)

    try:
        with limited(seconds, None):
            report = tv.verify(case.logical, case.plan)
    except OutOfTime as error:
        place = traceback.extract_tb(error.__traceback__)[-2]
        return outcome("TIME", None, f"time: no verdict in {seconds:g} s", f"in {place.filename.rsplit('/', 1)[-1]}:{place.name}")
    except Disagreement as error:
        return outcome("CRASH", "disagreement", str(error))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__} in {where.filename.rsplit('/', 1)[-1]}:{where.name}: {error}"
        return outcome("CRASH", "crash", reason, traceback.format_exc(limit=-6))
    reason = report.reason
    if report.verdict == "UNKNOWN" and report.notes and report.notes[-1].startswith("not proved"):
        reason = next(n for n in report.notes if n.startswith("not proved"))
    if report.verdict == "INVALID":
        reason = next(str(f) for f in report.findings if f.severity == "error") if report.findings else report.reason
        return outcome("INVALID", None if mutant else "correct plan INVALID", reason)
    if not mutant and report.verdict == "REFUTED":
        return outcome("REFUTED", "correct plan REFUTED", reason)
    if not mutant and random.Random(seed).random() >= oracle:
        return outcome(report.verdict, None, reason)
    if mutant and report.verdict == "UNKNOWN" and random.Random(seed).random() >= oracle:
        return outcome(report.verdict, None, reason)
    try:
        points = [*((p, 1.0) for p in range(FULL_SIZE)), *LARGE] if report.verdict == "PROVED" and mutant else [(0, 1.0)]
        gap, name = max(worst(case.logical, case.plan, *p) for p in points)
    except Exception:
        if report.verdict == "UNKNOWN":  # an op that neither supports
            return outcome(report.verdict, None, reason)
        return outcome("CRASH", "generator", "the oracle failed: " + traceback.format_exc(limit=-6).strip().splitlines()[-1])
    if report.verdict == "PROVED" and gap > DIFFERENT:
        return outcome("PROVED", "wrong PROVED" if mutant else "generator", f"{name} differs by {gap:.2g} at full size")
    claim = report.difference is not None and report.difference.obligation.output.role == "declared"
    if report.verdict == "REFUTED" and gap < SAME and not claim:  # the oracle looks at outputs, not at claims
        gap = max(worst(case.logical, case.plan, *p)[0] for p in (*((n, 1.0) for n in range(1, 1 + FULL_SIZE)), *LARGE))
        if gap < SAME:
            return outcome("REFUTED", "REFUTED but equal", reason)
    return outcome(report.verdict, None, reason, "full size differs" if gap > DIFFERENT else "")


@dataclass
class Summary:
    """Counts over a campaign."""

    verdicts: dict[str, Counter[str]] = field(default_factory=lambda: {"correct": Counter(), "mistake": Counter()})
    causes: dict[str, Counter[str]] = field(default_factory=lambda: {"correct": Counter(), "mistake": Counter()})
    kinds: dict[str, Counter[tuple[str, str]]] = field(default_factory=lambda: {"correct": Counter(), "mistake": Counter()})
    examples: dict[tuple[str, str], Outcome] = field(default_factory=dict)  # smallest case of every cause
    bad: list[Outcome] = field(default_factory=list)
    missed: int = 0  # UNKNOWN mistakes that evaluation at full size sees
    slowest: float = 0.0
    interrupted: bool = False

    def add(self, o: Outcome) -> None:
        group = "mistake" if o.mutant else "correct"
        self.verdicts[group][o.verdict] += 1
        self.slowest = max(self.slowest, o.seconds)
        self.kinds[group][o.kind, o.verdict] += 1
        if o.bad is not None:
            self.bad.append(o)
        if o.verdict in ("UNKNOWN", "TIME"):
            self.causes[group][o.cause] += 1
            if o.mutant and "full size differs" in o.detail:
                self.missed += 1
            best = self.examples.get((group, o.cause))
            if best is None or o.ops < best.ops:
                self.examples[group, o.cause] = o

    def json(self) -> dict[str, Any]:
        return {
            "verdicts": {g: dict(c) for g, c in self.verdicts.items()},
            "proved_share": self.share(),
            "unknown": {g: dict(c.most_common()) for g, c in self.causes.items()},
            "kinds": {g: {f"{k}: {v}": n for (k, v), n in sorted(c.items())} for g, c in self.kinds.items()},
            "unknown_but_different": self.missed,
            "bad": [asdict(o) for o in self.bad],
            "interrupted": self.interrupted,
            "slowest_seconds": round(self.slowest, 2),
        }

    def share(self) -> float:
        counts = self.verdicts["correct"]
        return counts["PROVED"] / max(1, sum(counts.values()))


def campaign(
    seeds: Iterable[tuple[int, bool]],
    workers: int = 1,
    seconds: float = 10.0,
    oracle: float = 1.0,
    done: Callable[[Outcome], None] | None = None,
) -> Summary:
    """All cases, in `workers` processes; after Ctrl-C those that were judged."""
    summary = Summary()
    try:
        for o in judged(partial(_run, seconds=seconds, oracle=oracle), seeds, workers):
            summary.add(o)
            if done is not None:
                done(o)
    except KeyboardInterrupt:
        summary.interrupted = True
    return summary


def _run(case: tuple[int, bool], seconds: float, oracle: float) -> Outcome:
    seed, mutant = case
    return run(seed, mutant, seconds, oracle)
