"""The whole well-formedness check of a logical program and a plan."""

from __future__ import annotations

from collections.abc import Callable

from trainverify.check.bodies import Bodies
from trainverify.check.findings import Finding, Report, others
from trainverify.check.lineage import check_lineage
from trainverify.check.malformed import malformed
from trainverify.check.operators import Operators
from trainverify.check.programs import check_program
from trainverify.check.talk import check_talk
from trainverify.graph.gradients import with_gradients
from trainverify.graph.plan import Plan, PlanError, Template, units
from trainverify.graph.program import Program
from trainverify.ops import OPS
from trainverify.ops.table import OpTable


def validate(logical: Program | None, plan: Plan | None, ops: OpTable = OPS) -> list[Finding]:
    """Everything that is wrong with them; nothing is skipped because it is not understood.

    Either may be absent: then only what the other one says by itself is checked.
    """
    report = Report()
    operators = Operators(ops)
    if logical is not None:
        _guarded(report, "the logical program", (logical,), lambda: _logical(logical, operators, report))
    found: list[Template] = []
    if plan is not None:
        _guarded(report, f"plan {getattr(plan, 'name', '?')}", (plan,), lambda: found.extend(_plan(plan, operators, report)))
    if logical is not None and plan is not None and found:
        _guarded(report, "lineage", (logical, plan), lambda: check_lineage(logical, with_gradients(logical, plan), found, report))
    return report.findings()


def _guarded(report: Report, what: str, given: tuple[object, ...], check: Callable[[], object]) -> None:
    """An object so malformed that a check fails on it is a finding; a check that fails on anything else is a bug, and is raised."""
    try:
        check()
    except Exception as error:
        wrong = next((w for w in map(malformed, given) if w is not None), None)
        if wrong is None:
            raise
        report.add("TV100", f"{what}: {wrong} ({type(error).__name__}: {error})")


def ill_formed(logical: Program, ops: OpTable) -> bool:
    """Whether a logical program makes no sense as it is, so that nothing can be changed in it."""
    return any(f.severity != "warning" for f in validate(logical, None, ops))


def _logical(program: Program, operators: Operators, report: Report) -> None:
    check_program(program, {}, Bodies(operators, report, None), True)


def _plan(plan: Plan, operators: Operators, report: Report) -> list[Template]:
    """Programs and communication. Returns the programs as they run, or nothing where that cannot be said."""
    if not (_ranks(plan, report) and _columns(plan, report)):
        return []
    try:
        found = list(units(plan))
    except PlanError as error:
        report.add("TV208", str(error))
        return []
    bodies = Bodies(operators, report, plan.groups)
    followed = []
    for u in found:
        with report.on(u.ranks[0] if len(u.ranks) == 1 and plan.size > 1 else None):
            followed.append(check_program(u.program, plan.functions, bodies, False, u))
    if all(followed) and not report.has("TV100", "TV107", "TV110"):
        check_talk(plan, found, operators, report)
    return found


def _ranks(plan: Plan, report: Report) -> bool:
    """Every rank of the mesh runs exactly one program, and every program runs on some rank."""
    seen: dict[int, str] = {}
    good = True
    for t in plan.templates:
        if not t.ranks:
            report.add("TV207", f"{t.program.name} runs on no rank")
            good = False
        for r in t.ranks:
            if type(r) is not int or not 0 <= r < plan.size:
                report.add("TV207", f"{t.program.name}: there is no rank {r!r} in {plan.mesh}")
                good = False
            elif r in seen:
                report.add("TV207", f"rank {r} runs {seen[r]} and {t.program.name}", rank=r)
                good = False
            else:
                seen[r] = t.program.name
    missing = plan.size - len(seen)
    if missing:
        first = next(r for r in range(plan.size) if r not in seen)
        report.add("TV207", f"rank {first} of {plan.mesh} runs no program{others(missing - 1, 'ranks')}", rank=first)
    return good and not missing


def _columns(plan: Plan, report: Report) -> bool:
    """Every reference that ranks bind has a value on each of them."""
    good = True
    for t in plan.templates:
        for name, column in t.bindings.items():
            if not isinstance(column, tuple) or len(column) != len(t.ranks):
                count = len(column) if isinstance(column, tuple) else repr(column)
                report.add("TV110", f"{t.program.name}: ${name} has {count} values for {len(t.ranks)} ranks")
                good = False
    return good
