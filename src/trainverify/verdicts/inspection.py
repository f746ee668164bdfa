"""What the commands `lineage` and `reduce` show: where every tensor of a plan comes from, and its reduced shapes."""

from __future__ import annotations

from collections.abc import Sequence

from trainverify.approximate import as_declared
from trainverify.check import ill_formed, validate
from trainverify.check.findings import Finding
from trainverify.evaluate.rank_values import told_apart
from trainverify.graph.gradients import with_gradients
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.ops import OPS
from trainverify.ops.table import OpTable
from trainverify.prove.algebra.discover import Found, discover
from trainverify.prove.algebra.engine import Prover
from trainverify.prove.staged.reduce import Shape, reduced, shapes
from trainverify.verdicts.case import Progress, silent
from trainverify.verdicts.prepared import related, single


def lineage(logical: Program, plan: Plan | Program, ops: OpTable = OPS, progress: Progress = silent) -> list[Found] | list[Finding]:
    """Where every tensor of the plan comes from, discovered; findings instead if the plan is not well-formed."""
    progress("checking the plan")
    logical, plan = _declared(logical, plan, ops)
    wrong = [f for f in validate(logical, plan, ops) if f.severity != "warning"]
    if wrong:
        return wrong
    parts = told_apart(plan, ops)
    wanted, _ = obligations(logical, plan, parts)
    progress("inferring axes")
    prover = Prover(related(logical, plan, ops, parts, wanted))
    progress("proving")
    prover.prove(wanted)
    return list(discover(prover))


def reduction(logical: Program, plan: Plan | Program, ops: OpTable = OPS) -> Sequence[Shape] | Sequence[Finding]:
    """The shapes of all tensors at the sizes of staged proofs; findings instead if the plan is not well-formed."""
    logical, plan = _declared(logical, plan, ops)
    wrong = [f for f in validate(logical, plan, ops) if f.severity != "warning"]
    if wrong:
        return wrong
    parts = told_apart(plan, ops)
    wanted, _ = obligations(logical, plan, parts)
    return list(shapes(reduced(related(logical, plan, ops, parts, wanted))))


def _declared(logical: Program, plan: Plan | Program, ops: OpTable) -> tuple[Program, Plan]:
    """Both programs, with the approximations that the plan declares."""
    plan = single(plan) if isinstance(plan, Program) else plan
    if plan.allow and not ill_formed(logical, ops):
        found = as_declared(logical, plan, ops)
        logical, plan = found.logical, found.plan
    return logical, with_gradients(logical, plan)
