"""Plans of the zoo with one random mistake each: what the verifier says, and whether a PROVED one is harmless.

A PROVED mutant is evaluated again, apart from its proof: at two sets of small sizes and other points, unfolded, with the edited
ranks among those evaluated; at tiny widths also by the simulator, rank by rank at full size. If that sees a difference, the proof is wrong.
"""

from __future__ import annotations

import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from trainverify.axes.reduction import NotABoundary
from trainverify.evaluate.compare import DIFFERENT, calm, compare
from trainverify.evaluate.run import NotComputed
from trainverify.evaluate.sample import sampled
from trainverify.evaluate.small import TooMuch, shrink_system
from trainverify.explain.place import Place
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import Plan, units
from trainverify.graph.program import Program
from trainverify.limits import OutOfTime, limited
from trainverify.mutate.causes import generic
from trainverify.mutate.mutations import Mutant, mutate
from trainverify.mutate.simulate import worst
from trainverify.ops import OPS
from trainverify.verdicts import MAX_ELEMENTS, Disagreement, related, verify
from trainverify.zoo import deepseek, gpt, llama, resnet
from trainverify.zoo.recipes import Wish, family_of


def _nowhere(*_: Any) -> Place:
    """Where the mistake is was not asked."""
    return Place("", None, 0, "", None, "")


HARMLESS: Final = "harmless: evaluation agrees"
UNCHECKED: Final = "not checked: the evaluation apart from the proof took too long"
POINTS: Final = (101, 102)  # none of those that `verify` takes
BASES: Final = (2, 3)


@dataclass(frozen=True)
class Outcome:
    seed: int
    kind: str
    text: str  # what was changed
    verdict: str  # INVALID, REFUTED, PROVED, UNKNOWN, TIME
    reason: str
    bad: str | None  # what must never happen
    seconds: float

    def json(self) -> dict[str, Any]:
        return {**vars(self), "seconds": round(self.seconds, 2)}


@dataclass
class Summary:
    """Counts over a campaign."""

    verdicts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    open: list[Outcome] = field(default_factory=list)
    bad: list[Outcome] = field(default_factory=list)
    unchecked: int = 0  # PROVED, and not evaluated apart from the proof
    stopped: str | None = None  # why it ended before its last mutant

    def add(self, o: Outcome) -> None:
        self.verdicts[o.verdict] += 1
        self.kinds[o.kind, o.verdict] += 1
        if o.verdict in ("UNKNOWN", "TIME"):
            self.causes[generic(o.reason)] += 1
            self.open.append(o)
        self.unchecked += o.reason == UNCHECKED
        if o.bad is not None:
            self.bad.append(o)

    @property
    def unknown(self) -> float:
        """Share without a verdict."""
        return (self.verdicts["UNKNOWN"] + self.verdicts["TIME"]) / max(self.judged, 1)

    @property
    def judged(self) -> int:
        return sum(self.verdicts.values())

    def json(self) -> dict[str, Any]:
        return {
            "judged": self.judged,
            "verdicts": dict(self.verdicts),
            "unknown_share": round(self.unknown, 4),
            "kinds": {f"{k}: {v}": n for (k, v), n in sorted(self.kinds.items())},
            "causes": dict(self.causes.most_common()),
            "unknown": [o.json() for o in self.open],
            "bad": [o.json() for o in self.bad],
            "unchecked": self.unchecked,
            "stopped": self.stopped,
        }


def small(wish: Wish) -> tuple[Program, Plan]:
    """The model of a wish at tiny widths, so that every rank can be simulated at full size."""
    family, config = family_of(wish.name), wish.config()
    if isinstance(config, llama.Config):
        config = replace(config, hidden=12, heads=6, kv_heads=2, ffn=20, vocabulary=12, sequence=8)
    elif isinstance(config, deepseek.Config):
        gate = replace(config.gate, experts=8, active=2, groups=1 if config.gate.groups == 1 else 2, top_groups=1)
        widths: dict[str, Any] = {"hidden": 24, "heads": 6, "ffn": 20, "expert_ffn": 8, "vocabulary": 56, "sequence": 6, "kv_rank": 14}
        ranks: dict[str, Any] = {"head": 8, "rotary": 4, "value": 6, "q_rank": None if config.q_rank is None else 10}
        config = replace(config, gate=gate, **widths, **ranks)
    elif isinstance(config, gpt.Config):
        config = replace(config, hidden=18, heads=6, ffn=24, vocabulary=30, sequence=12)
    elif isinstance(config, resnet.Config):
        config = replace(config, width=6, classes=10, size=(32, 32))
    if family.plan is None:
        raise ValueError(f"there are no plans for {family.title}")
    return family.step(config), family.plan(config, wish.how)


def campaign(
    logical: Program, plan: Plan, count: int, seed: int, seconds: float | None = 60.0, simulate: bool = False
) -> Iterator[Outcome]:
    """Mutants of one plan, each judged."""
    for n in range(seed, seed + count):
        yield judged(logical, mutate(plan, random.Random(n)), n, seconds, simulate)


def judged(logical: Program, mutant: Mutant, seed: int, seconds: float | None, simulate: bool) -> Outcome:
    began = time.perf_counter()

    def outcome(verdict: str, reason: str, bad: str | None = None) -> Outcome:
        return Outcome(seed, mutant.kind, mutant.text, verdict, reason, bad, time.perf_counter() - began)

    try:
        with limited(seconds, None):
            report = verify(logical, mutant.plan, locator=_nowhere)
        reason = report.reason
        if report.verdict == "UNKNOWN":
            reason = next((n for n in report.notes if n.startswith("not proved")), reason)
        if report.verdict == "INVALID" and report.findings:
            reason = next((str(f) for f in report.findings if f.severity == "error"), reason)
        if report.verdict == "PROVED":
            return outcome("PROVED", *checked(logical, mutant.plan, seconds, simulate))
        return outcome(report.verdict, reason)
    except OutOfTime as error:
        return outcome("TIME", str(error))
    except MemoryError:
        return outcome("UNKNOWN", "out of memory")
    except Disagreement as error:
        return outcome("CRASH", str(error), "wrong PROVED")
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.filename.rsplit('/', 1)[-1]}:{where.name}"
        return outcome("CRASH", f"{type(error).__name__} in {place}: {error}", "crash")


def checked(logical: Program, plan: Plan, seconds: float | None, simulate: bool) -> tuple[str, str | None]:
    """Whether a PROVED mutant is harmless, in as much time as the verdict had: what is said of it, and what must never happen."""
    try:
        with limited(seconds, None):
            gap = contradiction(logical, plan, simulate)
    except OutOfTime:
        return UNCHECKED, None
    return (HARMLESS, None) if gap is None else (gap, "wrong PROVED")


def contradiction(logical: Program, plan: Plan, simulate: bool) -> str | None:
    """A difference that an evaluation apart from the proof sees; None if it agrees."""
    if simulate:
        gap, name = max(worst(logical, plan, point) for point in range(2))
        if gap > DIFFERENT:
            return f"{name} differs by {gap:.2g} at full size"
    parts = units(plan)
    wanted, _ = obligations(logical, plan, parts)
    system = related(logical, plan, OPS, parts, wanted)
    kept = sampled(system, also={e.rank for e in plan.edits})
    compared = 0
    for base in BASES:
        try:
            sizes = shrink_system(system, base=base, kept=kept, most=MAX_ELEMENTS)
            results = compare(sizes, plan.lineage, wanted, POINTS)
        except (NotABoundary, TooMuch, NotComputed):
            continue
        for point, (wrong, n) in zip(POINTS, results, strict=True):
            compared += n
            left = calm(sizes, plan.lineage, wrong, point) if wrong else []
            if left:
                return f"{left[0].obligation} on rank {left[0].rank} is off by {left[0].distance:.2g}"
    return None if compared or simulate else "could not be evaluated again"


Told = Callable[[Outcome], None]


def run(
    logical: Program, plan: Plan, count: int, seed: int, seconds: float | None, simulate: bool, told: Told, whole: float | None = None
) -> Summary:
    """Mutants judged one after the other; an interruption, or more than `whole` seconds, ends it with those that were."""
    summary = Summary()
    began = time.perf_counter()
    try:
        for o in campaign(logical, plan, count, seed, seconds, simulate):
            summary.add(o)
            told(o)
            if whole is not None and time.perf_counter() - began > whole and summary.judged < count:
                summary.stopped = f"time limit of {whole:g} s"
                break
    except KeyboardInterrupt:
        summary.stopped = "interrupted"
    return summary
