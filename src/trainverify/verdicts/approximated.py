"""The verdict on a plan that deviates where it is allowed: the changed program is what it must equal, and every change must be needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from trainverify.approximate import Applied, Declared, Unfit, applied
from trainverify.check import ill_formed
from trainverify.check.findings import Finding
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.ops.table import OpTable
from trainverify.report import Report
from trainverify.verdicts.case import Progress

Judge = Callable[[Program, Plan, bool], Report]  # (logical, plan, whether no cause is searched for)


def with_approximations(
    logical: Program, plan: Plan, several: Sequence[Declared], ops: OpTable, progress: Progress, judge: Judge
) -> Report:
    """The report on the changed program; INVALID if the plan is also proved with fewer changes. Raises Unfit if one does not fit."""
    if ill_formed(logical, ops):
        return judge(logical, plan, False)
    whole = applied(logical, plan, several, ops)
    open_: list[str] = []
    for fewer in _fewer(several):
        kept = {d.text for d in fewer}
        spare = [d for d in several if d.text not in kept]
        names = " and ".join(d.approximation.name for d in spare)
        progress(f"comparing without {names}")
        try:
            part = applied(logical, plan, fewer, ops)
        except Unfit:  # it rests on one that was left out
            continue
        found = judge(part.logical, part.plan, True)
        if found.verdict.startswith("PROVED"):
            return _unneeded(found, part, spare)
        if found.verdict == "UNKNOWN":
            open_.append(f"whether {names} is needed is not known; without it: UNKNOWN: {found.reason}")
    found = judge(whole.logical, whole.plan, False)
    assumed = (*(c.assumption for c in whole.changes), *found.assumptions)
    return replace(found, approximations=whole.changes, assumptions=assumed, notes=(*found.notes, *open_))


def _fewer(several: Sequence[Declared]) -> Iterator[Sequence[Declared]]:
    """None of them; of several, all but one."""
    yield ()
    if len(several) > 1:
        for one in several:
            yield [d for d in several if d is not one]


def _unneeded(found: Report, part: Applied, spare: Sequence[Declared]) -> Report:
    names = " and ".join(d.approximation.name for d in spare)
    with_what = f"with {' and '.join(c.name for c in part.changes)} alone" if part.changes else "as it is"
    finding = [
        Finding(
            "TV311",
            f"{d.text}, declared by {d.origin}: the plan equals the logical program {with_what}",
            hint="leave it out: what is allowed and not used hides the bug that will use it",
        )
        for d in spare
    ]
    reason = f"{names} is not needed: {found.verdict} without it"
    assumed = (*(c.assumption for c in part.changes), *found.assumptions)
    return replace(
        found, verdict="INVALID", reason=reason, findings=(*finding, *found.findings), approximations=part.changes, assumptions=assumed
    )
