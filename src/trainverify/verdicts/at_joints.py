"""PROVED for a plan whose axes are cut in ways that do not align, once both programs are cut at tensors between the two ways."""

from __future__ import annotations

from dataclasses import replace

from trainverify.axes.reduction import NotABoundary
from trainverify.axes.system import System
from trainverify.evaluate.rank_values import told_apart
from trainverify.evaluate.small import NotJoined, TooMuch, shrink_system
from trainverify.graph.obligations import is_partial
from trainverify.prove.algebra.engine import prove
from trainverify.prove.attempt import FULL_SIZE, Attempt, by_algebra
from trainverify.prove.joints import Cut, cut
from trainverify.prove.propose.joints import joints
from trainverify.report import Report
from trainverify.verdicts import budgets
from trainverify.verdicts.case import Case
from trainverify.verdicts.evaluation import report, small_sizes
from trainverify.verdicts.prepared import related


def at_joints(case: Case) -> Report | None:
    """PROVED if everything is proved of the cut programs, and evaluation agrees; None if nothing is known by that.

    The cut programs are evaluated, and also the plan as it is where it is not too large.
    """
    if not case.system.inference.axes.clashes:
        return None
    case.progress("cutting both programs")
    found = cut(case.system, joints(case.system))
    system = None if found is None else _related(case, found)
    if found is None or system is None:
        return None
    case.progress("proving what was cut")
    wanted = (*found.wanted, *found.claims)
    proof = by_algebra(prove(system, wanted, case.progress), system)
    if proof.failed or not all(o in proof.proved for o in wanted):
        return None
    note = f"both programs are cut at {len(found.claims)} tensors, of which all ranks are shown to have their part"
    proof = replace(proof, notes=(*proof.notes, note))
    parts = report(_evaluated(replace(case, system=system, plan=found.plan, wanted=wanted, proof=proof, shared=[])))
    if parts.verdict != "PROVED":
        return None
    shown = dict.fromkeys(case.wanted, ("algebra, cut", FULL_SIZE))
    whole = replace(case, proof=Attempt(shown, {}, proof.preconditions, proof.lint, proof.notes))
    if evaluable(whole):
        return report(whole)
    reason = f"{len(case.wanted)} obligations at full size; random evaluation of the cut programs agrees on {case.points} points"
    return replace(parts, reason=reason, obligations=whole.shown("agreed"))


def _related(case: Case, found: Cut) -> System | None:
    """The axes of the cut programs, if more of them align than before."""
    table = case.system.table
    system = related(found.logical, found.plan, table, told_apart(found.plan, table), (*found.wanted, *found.claims))
    return system if len(system.inference.axes.clashes) < len(case.system.inference.axes.clashes) else None


def _evaluated(case: Case) -> Case:
    """A large plan is evaluated on some ranks, and then without claims about summands: those of the other ranks are missing."""
    few = replace(case, most=budgets.MAX_ELEMENTS)  # nothing is refuted by it
    if not few.kept:
        return few
    kept = tuple(o for o in case.wanted if not any(is_partial(h.layout) for h in o.holdings))
    note = f"{len(case.wanted) - len(kept)} claims about sums over ranks are proved and not evaluated"
    return replace(few, wanted=kept, proof=replace(case.proof, notes=(*case.proof.notes, note)))


def evaluable(case: Case) -> bool:
    """Whether there are sizes at which a plan is not too large to be evaluated."""
    try:
        try:
            small_sizes(case)
        except NotABoundary:
            shrink_system(case.system, base=budgets.FULL, most=budgets.MAX_ELEMENTS)
    except (TooMuch, NotJoined):
        return False
    return True
