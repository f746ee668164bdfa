"""The campaign with counts as literals: every seed gives a correct plan and a twin with a wrong count, judged against a plain simulation.

A correct plan must agree with the logical program on all ranks at full size, a wrong one must differ; else the generator is at fault.
Correct plans are never REFUTED and never end a verification with an error, wrong ones are never PROVED.
"""

from __future__ import annotations

import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final, Literal

import trainverify as tv
from tools.campaign import counted_places, counted_statistics, counted_steps
from tools.campaign.counted import Counted, Draw
from tools.campaign.workers import judged
from trainverify.graph.plan import Plan
from trainverify.limits import OutOfTime, limited
from trainverify.mutate.causes import generic
from trainverify.mutate.simulate import worst

FAMILIES: Final = (*counted_steps.FAMILIES, *counted_statistics.FAMILIES, *counted_places.FAMILIES)
AGREES: Final = 1e-9  # relative, in float64
DIFFERS: Final = 1e-7
POINTS: Final = 2  # at which plans are simulated

Group = Literal["correct", "open", "wrong"]  # "open": correct, and rightly UNKNOWN: a rounded literal, or a spelling that no law covers
GROUPS: Final[tuple[Group, ...]] = ("correct", "open", "wrong")
NO_VERDICT: Final = ("UNKNOWN", "TIME")


@dataclass(frozen=True)
class Outcome:
    seed: int
    group: Group
    family: str
    mistake: str  # of a wrong plan
    verdict: str  # of verify; TIME where it took too long, CRASH where it failed, GENERATOR where the case is not what it should be
    bad: bool
    reason: str
    ranks: int
    elements: int  # of the sources of the logical program
    seconds: float
    simulated: float  # seconds
    scope: str = ""


def make(seed: int) -> tuple[Counted, str]:
    """The case of a seed, and which of its wrong twins is judged."""
    rng = random.Random(seed)
    case = rng.choice(FAMILIES)(Draw(rng))
    return case, rng.choice(sorted(case.wrong))


def judge(seed: int, seconds: float = 20.0) -> list[Outcome]:
    """The correct plan of a seed and its wrong twin."""
    case, mistake = make(seed)
    group: Group = "open" if case.open else "correct"
    return [_judge(seed, case, group, "", case.right, seconds), _judge(seed, case, "wrong", mistake, case.wrong[mistake](), seconds)]


def _judge(seed: int, case: Counted, group: Group, mistake: str, plan: Plan, seconds: float) -> Outcome:
    began = time.perf_counter()
    types = case.logical.tensors
    elements = sum(_product(types[n].shape) for n in case.logical.sources)
    fault = _generator_fault(case, plan, group)
    simulated = time.perf_counter() - began

    def outcome(verdict: str, bad: bool, reason: str, scope: str = "") -> Outcome:
        took = time.perf_counter() - began - simulated
        return Outcome(seed, group, case.family, mistake, verdict, bad, reason, plan.size, elements, took, simulated, scope)

    if fault:
        return outcome("GENERATOR", False, fault)
    try:
        with limited(seconds, None):
            report = tv.verify(case.logical, plan)
    except OutOfTime:
        return outcome("TIME", False, f"no verdict in {seconds:g} s")
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return outcome("CRASH", True, f"{type(error).__name__} in {where.filename.rsplit('/', 1)[-1]}:{where.name}: {error}")
    bad = report.verdict.startswith("PROVED") if group == "wrong" else report.verdict in ("REFUTED", "INVALID")
    reason = report.reason
    if report.verdict == "UNKNOWN":
        reason = next((n for n in report.notes if n.startswith("not proved")), reason)
    return outcome(report.verdict, bad, reason, next((n for n in report.notes if n.startswith("counterexample")), ""))


def _product(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


def _generator_fault(case: Counted, plan: Plan, group: Group) -> str:
    """Why a case is not what it should be, by a simulation of all ranks at full size; empty if it is."""
    gap, name = max(worst(case.logical, plan, point) for point in range(POINTS if plan.size <= 1000 else 1))
    if group == "wrong":
        return "" if gap > DIFFERS else f"wrong, but {name or 'everything'} agrees to {gap:.2g}"
    return "" if gap < AGREES else f"correct, but {name} differs by {gap:.2g}"


@dataclass
class Summary:
    """Counts over a campaign."""

    verdicts: dict[str, Counter[str]] = field(default_factory=lambda: {g: Counter() for g in GROUPS})
    families: dict[str, Counter[tuple[str, str]]] = field(default_factory=lambda: {g: Counter() for g in GROUPS})
    causes: dict[str, Counter[str]] = field(default_factory=lambda: {g: Counter() for g in GROUPS})
    examples: dict[tuple[str, str], int] = field(default_factory=dict)  # (group, cause) → the first seed
    ranks: Counter[int] = field(default_factory=Counter)
    bad: list[Outcome] = field(default_factory=list)
    generator: list[Outcome] = field(default_factory=list)
    simulated: int = 0
    slowest: float = 0.0
    interrupted: bool = False

    def add(self, o: Outcome) -> None:
        self.simulated += 1
        if o.verdict == "GENERATOR":
            self.generator.append(o)
            return
        self.verdicts[o.group][o.verdict] += 1
        self.families[o.group][o.family, o.verdict] += 1
        self.ranks[o.ranks] += 1
        self.slowest = max(self.slowest, o.seconds)
        if o.bad:
            self.bad.append(o)
        if o.verdict in NO_VERDICT:
            cause = generic(o.reason)
            self.causes[o.group][cause] += 1
            self.examples.setdefault((o.group, cause), o.seed)

    def no_verdict(self, group: Group) -> float:
        """The share of plans without a verdict."""
        counts = self.verdicts[group]
        return sum(counts[v] for v in NO_VERDICT) / max(1, sum(counts.values()))

    def json(self) -> dict[str, Any]:
        return {
            "verdicts": {g: dict(c) for g, c in self.verdicts.items()},
            "no_verdict": {g: self.no_verdict(g) for g in GROUPS},
            "causes": {g: dict(c.most_common()) for g, c in self.causes.items()},
            "families": {g: {f"{k}: {v}": n for (k, v), n in sorted(c.items())} for g, c in self.families.items()},
            "ranks": dict(sorted(self.ranks.items())),
            "simulated": self.simulated,
            "bad": [asdict(o) for o in self.bad],
            "generator": [asdict(o) for o in self.generator],
            "interrupted": self.interrupted,
            "slowest_seconds": round(self.slowest, 2),
        }

    def lines(self) -> Iterator[str]:
        """The final table."""
        for group in GROUPS:
            counts = self.verdicts[group]
            total = sum(counts.values())
            if total:
                shown = ", ".join(f"{n} {v}" for v, n in counts.most_common())
                yield f"{group} plans: {total}: {shown}; without a verdict {100 * self.no_verdict(group):.1f} %"
                for name in sorted({k for k, _ in self.families[group]}):
                    own = sorted((v, n) for (k, v), n in self.families[group].items() if k == name)
                    yield f"    {name}: " + ", ".join(f"{n} {v}" for v, n in own)
                for cause, n in self.causes[group].most_common(12):
                    yield f"  {n:5}  {cause}   (first: seed {self.examples[group, cause]})"
        many = sum(n for r, n in self.ranks.items() if r > 64)
        yield f"simulated with all ranks at full size: {self.simulated} plans; of those judged {many} have more than 64 ranks"
        for o in self.generator:
            yield f"the generator is at fault: {shown_case(o)}"
        for o in self.bad:
            yield f"{o.verdict} of a {o.group} plan: {shown_case(o)}"
        yield "nothing that must not happen" if not self.bad else f"{len(self.bad)} cases that must not happen"


def shown_case(o: Outcome) -> str:
    what = f" ({o.mistake})" if o.mistake else ""
    return f"seed {o.seed}, {o.family}{what}, {o.ranks} ranks, {o.seconds:.1f} s: {o.reason[:160]} {o.scope}"


def campaign(seeds: Iterable[int], workers: int = 1, seconds: float = 20.0, done: Callable[[Outcome], None] | None = None) -> Summary:
    """All cases, in `workers` processes; after Ctrl-C those that were judged."""
    summary = Summary()
    try:
        for outcomes in judged(partial(judge, seconds=seconds), seeds, workers):
            for o in outcomes:
                summary.add(o)
                if done is not None:
                    done(o)
    except KeyboardInterrupt:
        summary.interrupted = True
    return summary
