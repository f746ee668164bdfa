"""Branches on data: the step is captured once for every combination of ways, and holds if it holds on all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
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
from trainverify.torch.by_hand import settled, weighed
from trainverify.torch.capture import LATER, STEPS
from trainverify.torch.captured import Captured, compared_name, condition_name
from trainverify.torch.launch import Reads
from trainverify.torch.reading import MOST_BRANCHES
from trainverify.torch.way import Choices, Way
from trainverify.verdicts import FULL, MAX_ELEMENTS, related

Processes = tuple[Captured, list[Captured]]  # the reference, and ranks
Run = Callable[[Sequence[Choices]], Sequence[Processes]]  # given the choices in every step, what was captured in every step
DEPENDS: Final = "depends on the way that the step before it took at a condition on data"
SEEDS: Final = 4  # random points at which a difference is looked for, among those at which a way is taken
SIZES: Final = (1.0, 4.0, 16.0, 0.25)  # and their values, larger and smaller


def all_ways(run: Run) -> tuple[Way, ...]:
    """All combinations of ways in all captured steps, each program once.

    Where there are several, every way is also taken after another one: a step whose program depends on which way the step before it took
    has no verdict."""
    runs: list[list[Way]] = []
    given: list[Choices] = []
    waiting: list[Choices] = [()]
    while waiting and len(runs) < 2**MOST_BRANCHES:
        choices = waiting.pop(0)
        steps = _steps(run, (choices,) * STEPS)
        runs.append(steps)
        given.append(choices)
        if any(w.disagreement() is not None for w in steps):
            break
        for w in steps:
            flipped = [(*w.choices[:i], False) for i in range(len(choices), len(w.choices))]
            waiting += [c for c in flipped if c not in given and c not in waiting]
    found: list[Way] = []
    for w in (w for steps in runs for w in steps):
        if not any(w.same(f) and w.settled() for f in found):
            found.append(w)
    if len(runs) > 1:
        _after_each_other(run, runs, given)
    assumed = [LATER]
    if len(runs) > 2:
        assumed.append("a step does not depend on which way the step before it took (every way was tried after itself and after one other)")
    assumed += [a for steps in runs for w in steps for c in (w.reference, *w.ranks) for a in c.assumed]  # also of what is not judged again
    first = replace(found[0].reference, assumed=list(dict.fromkeys([*found[0].reference.assumed, *assumed])))
    return tuple(settled([replace(found[0], reference=first), *found[1:]]))


def _steps(run: Run, choices: Sequence[Choices]) -> list[Way]:
    return [Way(one, tuple(ranks), i + 1) for i, (one, ranks) in enumerate(run(choices))]


def _after_each_other(run: Run, runs: Sequence[Sequence[Way]], given: Sequence[Choices]) -> None:
    """Take every way after another one, of two ways in every order, and compare with what it was after itself.

    Numbers that a step counts or returns may depend on the ways before it: then they are to be those of the reference."""
    count = len(given)
    every = itertools.product(range(count), repeat=STEPS) if count == 2 else [[(i + k) % count for k in range(STEPS)] for i in range(count)]
    for turns in every:
        if len(set(turns)) == 1:
            continue
        for w, turn in zip(_steps(run, [given[t] for t in turns]), turns, strict=True):
            alone = runs[turn][w.number - 1]
            if not w.same(alone):
                raise Reads(f"what step {w.number} does {DEPENDS}: no verdict")
            if alone.settled() and (why := w.unsettled()) is not None:
                raise Reads(f"what step {w.number} counts, returns or leaves behind {DEPENDS}, and is another thing then: {why}")


def joined(reports: Sequence[tuple[Way, Report]]) -> Report:
    """The verdict on all ways: the worst one."""
    reports = weighed(_accumulating(reports))
    way, first = reports[0]
    if len(reports) == 1 and not way.choices:
        return first
    later = sum(w.number > 1 for w, _ in reports)
    worst = ("INVALID", "REFUTED", "UNKNOWN", "PROVED(sampled)", "PROVED(reduced)", "PROVED")
    way, report = min(reports, key=lambda r: worst.index(r[1].verdict))
    lines = ", ".join(dict.fromkeys(str(b.source) for w, _ in reports for b in w.reference.branches))
    notes = []
    if way.choices or reports[0][0].choices:
        notes.append(f"conditions on data ({lines}): captured {len(reports) - later} ways; the conditions are compared too")
    if later:
        notes.append(f"{later} later programs differ from those of the first step: all are compared")
    reason = report.reason if report.verdict == "PROVED" or not str(way) else f"{report.reason} (where {way})"
    more = [f for w, r in reports if w.number > 1 for f in r.findings if f.severity == "warning" and f not in report.findings]
    others = [a for _, r in reports for a in r.assumptions if a not in report.assumptions]
    return replace(
        report,
        reason=reason,
        notes=(*report.notes, *notes),
        findings=(*report.findings, *dict.fromkeys(more)),
        assumptions=(*report.assumptions, *dict.fromkeys(others)),
    )


def _accumulating(reports: Sequence[tuple[Way, Report]]) -> list[tuple[Way, Report]]:
    """Gradients that a step leaves for a later one to add to may be those of a rank's own rows there: no difference in them is an error."""
    updated = {n for w, _ in reports for n in _updated(w.reference.program)}
    found = [(w, _left_for_later(w, r, updated - _updated(w.reference.program))) for w, r in reports]
    if all(a is b for (_, a), (_, b) in zip(found, reports, strict=True)):
        return list(reports)
    return [(w, _unknown(r) if any(c.left for c in (w.reference, *w.ranks)) else r) for w, r in found]


def _left_for_later(way: Way, report: Report, names: set[str]) -> Report:
    """The report on a step that may accumulate gradients of some parameters."""
    gradients = {f"gradient of {n}" for n in names}
    if report.verdict == "REFUTED":
        alone = {o.name for o in report.obligations if o.status == "different"} <= gradients
    else:
        alone = all(any(f.message.endswith(f"has no {g}") for g in gradients) for f in report.findings if f.severity == "error")
    return _unknown(report) if alone and gradients else report


def _unknown(report: Report) -> Report:
    if report.verdict not in ("REFUTED", "INVALID"):
        return report
    text = "gradients that this step leaves for a later one to add to are not the same on ranks, which is right if they are reduced there"
    return replace(report, verdict="UNKNOWN", reason=f"{text}: {report.reason}")


def _updated(program: Program) -> set[str]:
    """Parameters that a step changes."""
    kept = {op.outputs[0]: op.inputs[0] for op in program.ops if op.name == "identity"}
    return {str(o.of) for o in program.outputs if o.role == "parameter" and kept.get(o.tensor) != o.of and o.tensor != o.of}


def happens(logical: Program, plan: Plan, ops: OpTable, choices: Choices) -> bool:
    """Whether some data leads this way on one device and on all ranks, and to a difference, if only in the next condition.

    Numbers that conditions are functions of may differ where the conditions do not: of two finite ones, whether they are finite."""
    parts = units(plan)
    wanted, _ = obligations(logical, plan, parts)
    numbers = {compared_name(i) for i in range(len(choices))}
    wanted = [o for o in wanted if not (o.output.role == "metric" and o.output.of in numbers)]
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


__all__ = ["Choices", "Processes", "Way", "all_ways", "happens", "joined"]
