"""`verify`: validate, then compare the plan with the logical program, obligation by obligation.

PROVED comes from a proof engine only. Random evaluation can refute, and it can agree; agreeing is UNKNOWN.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from trainverify.approximate import Allow
from trainverify.approximate import declared as declared_approximations
from trainverify.check import validate
from trainverify.evaluate.full_size import ByClasses
from trainverify.evaluate.rank_values import told_apart
from trainverify.evaluate.sample import RANKS
from trainverify.explain.place import Place
from trainverify.graph.gradients import with_gradients
from trainverify.graph.moves import without_moves
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.graph.rebuilt import Rebuilt
from trainverify.limits import seldom_collected
from trainverify.ops import OPS
from trainverify.ops.table import OpTable
from trainverify.prove.algebra.engine import prove
from trainverify.prove.attempt import Attempt, Engine, attempt
from trainverify.report import Compared, Report
from trainverify.verdicts import budgets
from trainverify.verdicts.approximated import with_approximations
from trainverify.verdicts.at_joints import at_joints
from trainverify.verdicts.case import Case, Locator, Progress, silent
from trainverify.verdicts.evaluation import by_size_alone, report
from trainverify.verdicts.prepared import assumptions, declared, folded, related, single

OwnLocator = Locator | None  # one in place of `explain`


def verify(
    logical: Program,
    plan: Plan | Program,
    ops: OpTable = OPS,
    points: int = 3,
    seed: int = 0,
    progress: Progress = silent,
    engine: Engine = "algebra",
    workers: int = 0,
    accept_reduced: bool = False,
    fail_fast: bool = False,
    locator: OwnLocator = None,
    allow: Allow = (),
    also: Sequence[Rebuilt] = (),
) -> Report:
    """Is the plan's training step the logical program's? `workers` are processes of the staged engine; 0 is this one.

    `locator` finds the first wrong tensor of a refuted plan, in place of `explain`. With `fail_fast`, one random point is tried before
    any proof, and a difference is reported as it is, without the search for its cause. `allow` has approximations, beside those that the
    plan declares: the logical program is changed by them, and the report says so. `also` has the same programs at other sizes: where
    there is no verdict, a difference there refutes them, and the report names those sizes.
    """
    began = time.perf_counter()
    if points < 1:
        raise ValueError("a proof without a random evaluation behind it is not reported: points must be 1 or more")
    if isinstance(plan, Program):
        plan = single(plan)

    def judge(one: Program, many: Plan, fast: bool) -> Report:
        many = with_gradients(one, many)
        subject = f"{many.name} on {many.mesh} against {one.name}"
        with seldom_collected():
            found = _verify(one, many, ops, points, seed, progress, subject, engine, workers, nowhere if fast else locator)
        if fast and found.place is not None and not found.place.tensor:
            found = replace(found, place=None, notes=(*found.notes, "the cause was not searched for (--fail-fast)"))
        return replace(found, assumptions=assumptions(one, many) + found.assumptions, compared=Compared(one, many, ops))

    if several := declared_approximations(plan, allow):
        found = with_approximations(logical, plan, several, ops, progress, lambda one, many, fast: judge(one, many, fast or fail_fast))
    else:
        found = judge(logical, plan, fail_fast)
    for other in also if found.verdict == "UNKNOWN" else ():
        progress(f"building both programs at {other.sizes}")
        small = verify(*other.build(), ops, points, seed, progress, engine, workers, fail_fast=fail_fast, locator=locator, allow=allow)
        if small.verdict == "REFUTED":
            found = refuted_at(other.sizes, found, small)
            break
    return replace(found, seconds=time.perf_counter() - began, accept_reduced=accept_reduced)


def refuted_at(sizes: str, found: Report, other: Report) -> Report:
    """The report of both programs built at other sizes, as the verdict on those that have none at their own."""
    note = f"both programs were built at {sizes}; at their own sizes there is no verdict: {found.reason}"
    return replace(other, reason=f"at {sizes}: {other.reason}", notes=(note, *other.notes))


def nowhere(*arguments: object) -> Place:
    """The locator that does not search."""
    return Place("", None, 0, "", None, "")


def _verify(
    logical: Program,
    plan: Plan,
    ops: OpTable,
    points: int,
    seed: int,
    progress: Progress,
    subject: str,
    engine: Engine,
    workers: int,
    locator: Locator | None,
) -> Report:
    progress("checking the plan")
    findings = tuple(validate(logical, plan, ops))
    errors = [f for f in findings if f.severity == "error"]
    if errors:
        from trainverify.explain.odd import ill_formed

        progress("locating the first wrong tensor")
        place = ill_formed(logical, plan, ops)
        reason = f"{len(errors)} finding{'s' if len(errors) > 1 else ''}: {errors[0].code}"
        if place is not None:
            reason += f"; rank {place.rank} is unlike the others: {place.tensor}"
        return Report("INVALID", reason, subject, findings, place=place)
    unsupported = [f for f in findings if f.severity == "unsupported"]
    if unsupported:
        return Report("UNKNOWN", f"unsupported: {unsupported[0].message}", subject, findings)
    plan = without_moves(plan, ops)
    parts = told_apart(plan, ops)
    wanted, missing = obligations(logical, plan, parts)
    if missing or not wanted:
        return Report("INVALID", missing[0].reason if missing else "no obligations", subject, findings)
    wanted += declared(logical, plan, parts, wanted)
    progress("inferring axes")
    system = related(logical, plan, ops, parts, wanted)
    progress("proving")
    shared: list[ByClasses | None] = []
    if locator is nowhere:  # what differs clearly is worth no proof
        first = Attempt({}, dict.fromkeys(wanted, ""))
        found = report(Case(system, plan, wanted, first, 1, seed, progress, subject, findings, locator, shared=shared))
        if found.verdict == "REFUTED":
            return found
    count, ops_walked = folded(system) if plan.size > RANKS else (0, 0)
    if count > RANKS:  # a rank unlike the others: what it is found by is cheap, a proof is not
        why = f"ranks fold to {count} programs only, {ops_walked} ops together"
        unproved = Attempt({}, dict.fromkeys(wanted, why))
        case = Case(system, plan, wanted, unproved, points, seed, progress, subject, findings, locator, True, shared=shared)
        found = report(case)
        if found.verdict != "UNKNOWN" or ops_walked > budgets.WALKED:
            return found
        progress("proving")
    if engine in ("algebra", "auto"):
        found_cut = at_joints(Case(system, plan, wanted, Attempt({}, {}), points, seed, progress, subject, findings, locator))
        if found_cut is not None:
            return found_cut
        progress("proving")
    algebra = prove if progress is silent else partial(prove, progress=progress)
    proof = attempt(engine, algebra, system, wanted, plan.lineage, workers, progress)
    case = Case(system, plan, wanted, proof, points, seed, progress, subject, findings, locator, shared=shared)
    return by_size_alone(case) or report(case)
