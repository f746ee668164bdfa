"""Plans of the zoo with one random mistake each: what the verifier says, and whether a PROVED one is harmless.

A PROVED mutant is evaluated again, apart from its proof: at two sets of small sizes and other points, unfolded, with the edited
ranks among those evaluated; at tiny widths also by the simulator, rank by rank at full size. If that sees a difference, the proof is wrong.
"""

from __future__ import annotations

import random
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
from trainverify.graph.rebuilt import Rebuilt
from trainverify.limits import OutOfTime, limited
from trainverify.mutate.causes import generic
from trainverify.mutate.mutations import Mutant, mutate
from trainverify.mutate.simulate import worst
from trainverify.ops import OPS
from trainverify.verdicts import MAX_ELEMENTS, Disagreement, related, verify
from trainverify.zoo.tiny import Tiny


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


def campaign(
    logical: Program, plan: Plan, count: int, seed: int, seconds: float | None = 60.0, simulate: bool = False, tiny: Tiny | None = None
) -> Iterator[Outcome]:
    """Mutants of one plan, each judged; `tiny` has the same programs at other sizes."""
    for n in range(seed, seed + count):
        mutant = mutate(plan, random.Random(n))
        yield judged(logical, mutant, n, seconds, simulate, () if tiny is None else at_other_sizes(mutant, tiny, n))


def at_other_sizes(mutant: Mutant, tiny: Tiny, seed: int) -> tuple[Rebuilt, ...]:
    """The same mistake in the same programs at other sizes; none where the draw is another one there."""
    other = mutate(tiny.plan, random.Random(seed))
    if (other.kind, _without_numbers(other.text)) != (mutant.kind, _without_numbers(mutant.text)):
        return ()
    return (Rebuilt(tiny.sizes, lambda: (tiny.logical, other.plan)),)


def _without_numbers(text: str) -> tuple[str, str]:
    """Where something was changed, and what, whatever the sizes are."""
    where, _, what = text.partition(": ")
    return where, re.sub(r"\d+", "#", what)


def judged(logical: Program, mutant: Mutant, seed: int, seconds: float | None, simulate: bool, also: Sequence[Rebuilt] = ()) -> Outcome:
    began = time.perf_counter()

    def outcome(verdict: str, reason: str, bad: str | None = None) -> Outcome:
        return Outcome(seed, mutant.kind, mutant.text, verdict, reason, bad, time.perf_counter() - began)

    try:
        with limited(seconds, None):
            report = verify(logical, mutant.plan, locator=_nowhere, also=also)
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
    logical: Program,
    plan: Plan,
    count: int,
    seed: int,
    seconds: float | None,
    simulate: bool,
    told: Told,
    whole: float | None = None,
    tiny: Tiny | None = None,
) -> Summary:
    """Mutants judged one after the other; an interruption, or more than `whole` seconds, ends it with those that were."""
    summary = Summary()
    began = time.perf_counter()
    try:
        for o in campaign(logical, plan, count, seed, seconds, simulate, tiny):
            summary.add(o)
            told(o)
            if whole is not None and time.perf_counter() - began > whole and summary.judged < count:
                summary.stopped = f"time limit of {whole:g} s"
                break
    except KeyboardInterrupt:
        summary.stopped = "interrupted"
    return summary
