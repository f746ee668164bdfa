"""Branches on data: the step is captured once for every combination of ways, and holds if it holds on all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.compare import DIFFERENT, suspects
from trainverify.evaluate.run import NotComputed, PlanValues, random_inputs, run_logical, run_plan
from trainverify.evaluate.small import Small, shrink_system
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import Plan, units
from trainverify.graph.program import Program
from trainverify.ops.table import OpTable
from trainverify.report import Report
from trainverify.torch.capture import Captured, condition_name
from trainverify.torch.launch import Reads
from trainverify.torch.reading import MOST_BRANCHES
from trainverify.torch.remembered import told
from trainverify.translate.targets import CaptureError
from trainverify.verdicts import FULL, MAX_ELEMENTS, related

Choices = tuple[bool, ...]
Run = Callable[[Choices], tuple[Captured, list[Captured]]]
SEEDS: Final = 4  # random points at which a difference is looked for, among those at which a way is taken
SIZES: Final = (1.0, 4.0, 16.0, 0.25)  # and their values, larger and smaller


@dataclass(frozen=True)
class Way:
    """One combination of ways: what was captured, and which branches were taken."""

    reference: Captured
    ranks: tuple[Captured, ...]
    later: bool = False  # captured after a step that ran before

    @property
    def choices(self) -> Choices:
        return tuple(b.taken for b in self.reference.branches)

    def __str__(self) -> str:
        taken = [f"{b.name} is {b.taken}" for b in self.reference.branches]
        return ", ".join([*taken, "it is the second step, after one that ran before"] if self.later else taken)

    def same(self, other: Way) -> bool:
        """Whether the same programs were captured."""
        if self.reference.program != other.reference.program or len(self.ranks) != len(other.ranks):
            return False
        pairs = zip((self.reference, *self.ranks), (other.reference, *other.ranks), strict=True)
        return all(a.program == b.program and a.findings == b.findings and a.ledger.messages == b.ledger.messages for a, b in pairs)

    def disagreement(self) -> str | None:
        """Ranks that decide on other things than the reference."""
        for r, c in enumerate(self.ranks):
            mine = tuple(b.taken for b in c.branches)
            if mine != self.choices:
                lines = ", ".join(str(b.source) for b in (*self.reference.branches, *c.branches))
                return f"rank {r} has {len(mine)} conditions on data and the reference {len(self.choices)} ({lines}): no verdict"
        return None


def all_ways(run: Callable[[Choices, bool], tuple[Captured, list[Captured]]], once: bool = False) -> tuple[Way, ...]:
    """All combinations in the first step; and in the second, if the first leaves something behind that another step may read.

    With `once` it is assumed that later steps do what the first does. Where the second step cannot be captured there is no verdict."""
    first = tuple(ways(lambda choices: run(choices, False)))
    processes = [c for w in first for c in (w.reference, *w.ranks)]
    places = list(dict.fromkeys(p for c in processes for p in c.remembered))
    if not places:
        return first
    try:
        second = () if once else tuple(replace(w, later=True) for w in ways(lambda choices: run(choices, True)))
    except CaptureError as error:
        raise Reads(f"the step leaves something else in {told(places)}, and the second step cannot be captured: {error}") from error
    which = "steps after the second do what that" if second else "later steps do what this one"
    text = f"{which} does, although it leaves something else in {told(places)}"
    one = replace(first[0].reference, assumed=[*first[0].reference.assumed, text])
    return (replace(first[0], reference=one), *first[1:], *(w for w in second if not any(w.same(f) for f in first)))


def ways(run: Run) -> Iterator[Way]:
    """All combinations, one after the other."""
    waiting: list[Choices] = [()]
    done = 0
    while waiting:
        given = waiting.pop(0)
        one, ranks = run(given)
        way = Way(one, tuple(ranks))
        done += 1
        yield way
        if done >= 2**MOST_BRANCHES or way.disagreement() is not None:
            return
        waiting += [(*way.choices[:i], False) for i in range(len(given), len(way.choices))]


def joined(reports: Sequence[tuple[Way, Report]]) -> Report:
    """The verdict on all ways: the worst one."""
    way, first = reports[0]
    if len(reports) == 1 and not way.choices:
        return first
    later = sum(w.later for w, _ in reports)
    worst = ("INVALID", "REFUTED", "UNKNOWN", "PROVED(sampled)", "PROVED(reduced)", "PROVED")
    way, report = min(reports, key=lambda r: worst.index(r[1].verdict))
    lines = ", ".join(dict.fromkeys(str(b.source) for w, _ in reports for b in w.reference.branches))
    notes = []
    if way.choices or reports[0][0].choices:
        notes.append(f"conditions on data ({lines}): captured {len(reports) - later} ways; the conditions are compared too")
    if later:
        notes.append("the second step is another program than the first: both are compared")
    reason = report.reason if report.verdict == "PROVED" or not str(way) else f"{report.reason} (where {way})"
    more = [f for w, r in reports if w.later for f in r.findings if f.severity == "warning" and f not in report.findings]
    return replace(report, reason=reason, notes=(*report.notes, *notes), findings=(*report.findings, *dict.fromkeys(more)))


def happens(logical: Program, plan: Plan, ops: OpTable, choices: Choices) -> bool:
    """Whether some data leads this way on one device and on all ranks, and to a difference, if only in the next condition."""
    parts = units(plan)
    wanted, _ = obligations(logical, plan, parts)
    small = shrink_system(related(logical, plan, ops, parts, wanted), base=FULL, most=MAX_ELEMENTS)
    for seed, size in itertools.product(range(SEEDS), SIZES):
        try:
            inputs = random_inputs(small, seed)
            given = {n: v * size if v.dtype.kind == "f" and n not in small.domains else v for n, v in inputs.items()}
            with np.errstate(all="ignore"):
                one, ranks = run_logical(small, given, NUMERIC), run_plan(small, plan.lineage, given, NUMERIC)
            for i, choice in enumerate(choices):
                values = [bool(v) for v in _conditions(i, logical, small, one, ranks)]
                if len(set(values)) > 1:
                    return True
                if values and values[0] != choice:
                    break
            else:
                if any(s.distance > DIFFERENT for s in suspects(small, wanted, one, ranks)[0]):
                    return True
        except (NotComputed, ArithmeticError, ValueError):
            continue
    return False


def _conditions(i: int, logical: Program, small: Small, one: Mapping[str, Array], ranks: PlanValues) -> Iterator[float]:
    """The values of a condition on one device and on all ranks."""
    name = logical.output("metric", condition_name(i))
    if name is not None:
        yield float(one[name])
    for c, k in enumerate(small.classes):
        local = k.program.output("metric", condition_name(i))
        for row in range(len(k.ranks)) if local is not None else ():
            value = ranks.get(c, row, str(local))
            if value is None:
                raise NotComputed(condition_name(i))
            yield float(value)


__all__ = ["Choices", "Way", "all_ways", "happens", "joined", "ways"]
