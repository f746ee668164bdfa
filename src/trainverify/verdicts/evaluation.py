"""Random evaluation beside a proof attempt: it confirms a proof, refutes a plan, or leaves it open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainverify.axes.reduction import NotABoundary
from trainverify.evaluate import branches
from trainverify.evaluate.compare import DIFFERENT, Suspect, calm, close_look, compare, together
from trainverify.evaluate.looser import looser
from trainverify.evaluate.moved import PointName
from trainverify.evaluate.run import NotComputed, elements, random_inputs
from trainverify.evaluate.small import NotJoined, Small, TooMuch, shrink_system
from trainverify.graph.obligations import Obligation
from trainverify.prove.attempt import Attempt, again, listed_too
from trainverify.report import Report, Verdict
from trainverify.verdicts import budgets
from trainverify.verdicts.case import Case
from trainverify.verdicts.decision import AtFullSize, beside_full_size, settled, unconfirmed
from trainverify.verdicts.other_sizes import at_full_size, at_other_sizes, confirmed, replayed


def report(case: Case) -> Report:
    """The verdict on a case: at small sizes, and at full size where that decides."""
    try:
        return evaluated(case)
    except NotJoined:
        return report(replace(case, alike=False))
    except AtFullSize as found:
        return report(replace(case, alike=False, whole=True, smaller=found.smaller))


def by_size_alone(case: Case) -> Report | None:
    """A verdict where a plan also differs at sizes at which axes that are read in two ways shrink; None if it does not, or is small.

    Those sizes say where to look; full size decides."""
    if not case.proof.failed:
        return None
    case.progress("choosing sizes for what does not align")
    seen = looser(case.system, case.plan.lineage, case.wanted, case.proof.proved.keys(), case.kept, case.seed)
    if seen is None:
        return None
    small, wrong = seen
    try:
        found, left = beside_full_size(case, small, wrong, case.seed)
    except AtFullSize:
        return None
    if found is not None or not left:
        return found
    proof = proved_at_last(case)
    return report(replace(case, proof=proof)) if not proof.failed else unconfirmed(case, small, left[0].obligation)


def proved_at_last(case: Case) -> Attempt:
    """A proof in which nothing that failed at first was left untried."""
    if not case.proof.failed or case.proof.prover is None:
        return case.proof
    case.progress("proving what was not proved at once")
    proof = again(case.proof, case.system, case.wanted)
    if proof.failed:
        case.progress("listing what was not aligned")
        proof = listed_too(proof, case.system, case.wanted)
    return proof


def evaluated(case: Case) -> Report:
    """The verdict from random points at the sizes that the case asks for."""
    case.progress("choosing small sizes")
    why = ""
    try:
        try:
            small = small_sizes(case)
        except NotABoundary as error:
            why = f"no small sizes keep the structure of the plan: {error}"
            small = shrink_system(case.system, base=budgets.FULL, most=budgets.MAX_ELEMENTS)
    except TooMuch as error:
        clashes = case.system.inference.axes.clashes
        also = f": {clashes[0].text} ({clashes[0].where})" if clashes else f": {error}"
        return confirmed(case) or case.open(why or f"too large to evaluate{also}", "not compared")
    compared = 0
    points = range(case.seed, case.seed + case.points)
    case.progress(f"evaluating {case.points} points")
    results: dict[int, tuple[list[Suspect], int]] = {}
    watch = branches.watch(small)
    counted: set[Obligation] = set()  # what differs at these sizes only, by how literals and the counts of operators are read
    for point in points:
        if point not in results:
            some = [point] if case.alike or not together(small, case.points) else points
            try:
                results.update(zip(some, compare(small, case.plan.lineage, case.wanted, some, watch), strict=True))
            except NotComputed as error:
                return case.open(f"the plan could not be run: {error}", "not compared")
        wrong, n = results[point]
        compared += n
        if not wrong and point == case.seed:
            wrong = not_proved(case, small, point)
        if wrong:
            found = settled(case, small, wrong, point)
            if found is not None and found.verdict == "UNKNOWN" and case.proof.once is not None:
                proof = again(case.proof, case.system, case.wanted)
                more = proof.proved.keys() != case.proof.proved.keys()  # it may be rounding, on what can be proved
                return evaluated(replace(case, proof=proof)) if more else found
            if found is not None:
                return found
            counted.update(s.obligation for s in wrong if s.distance > DIFFERENT)
    refuted, unreached = other_sides(case, small, watch)
    if refuted is not None:
        return refuted
    note = f"{compared} comparisons of {len(case.wanted)} obligations" + (" at reduced sizes" if small.reduced else " at full size")
    if case.kept:
        note += f", on {len(small.places)} of {case.plan.size} ranks"
    notes = (note, *unreached)
    case = replace(case, proof=proved_at_last(case))
    found = agreed(replace(case, proof=uncontested(case, counted)), notes)
    return (further(case, small) if found.verdict == "UNKNOWN" else None) or found


def further(case: Case, small: Small) -> Report | None:
    """REFUTED at one of more points than were asked for: what steps, a sign or a count, may be the same at a few."""
    if elements(small) > budgets.CLOSE_LOOK or case.points == 0:
        return None
    case.progress("evaluating more points")
    for point in range(case.seed + case.points, case.seed + case.points + budgets.FURTHER):
        try:
            ((wrong, _),) = compare(small, case.plan.lineage, case.wanted, [point], None)
        except NotComputed:
            continue
        found = settled(case, small, wrong, point) if wrong else None
        if found is not None and found.verdict == "REFUTED":
            return found
    return None


def uncontested(case: Case, counted: set[Obligation]) -> Attempt:
    """The proof, with less to contest: what differs at reduced sizes by how counts are read there may differ in stages too."""
    return replace(case.proof, contested={o: why for o, why in case.proof.contested.items() if o not in counted})


def agreed(case: Case, compared: tuple[str, ...]) -> Report:
    """The verdict when evaluation found no difference."""
    if not case.whole:  # it agrees at the sizes at which the staged engine saw a difference
        case.stop_if_contested(case.wanted)
    if not case.proof.failed:
        found = at_other_sizes(case) if case.proof.reduced and not case.whole else None
        if found is not None:
            return found
        notes = (*case.proof.lint, *case.proof.notes, *compared)
        at = "full size" if not case.proof.reduced else "reduced sizes"
        reason = f"{len(case.wanted)} obligations at {at}; random evaluation agrees on {case.points} points"
        verdict: Verdict = "PROVED(reduced)" if case.proof.reduced else "PROVED"
        return Report(verdict, reason, case.subject, case.findings, case.shown("agreed"), assumptions=case.proof.preconditions, notes=notes)
    found = replayed(case) or at_full_size(case)
    return found or case.open(f"agreed on {case.points} random points", "agreed", (*compared, *case.proof.notes))


def other_sides(case: Case, small: Small, watch: branches.Watch | None) -> tuple[Report | None, tuple[str, ...]]:
    """A report if both programs differ at a point on the other side of a condition; else notes about sides that none reaches.

    At such a point only a certain difference counts: rounding may hide what is there."""
    if watch is None:
        return None, (f"conditions were not watched: more than {branches.WATCHED:,} elements",)
    for point, wrong in beyond(case, small, watch):
        found = settled(case, small, wrong, point)
        if found is not None and found.verdict == "REFUTED":
            return found, ()
    never = branches.unreached(watch)
    more = [f"and {len(never) - budgets.UNREACHED} more conditions fall one way at all points"] if len(never) > budgets.UNREACHED else []
    return None, (*map(str, never[: budgets.UNREACHED]), *more)


def beyond(case: Case, small: Small, watch: branches.Watch) -> Iterator[tuple[PointName, list[Suspect]]]:
    """Points on the other side of conditions at which both programs clearly differ, and what does."""
    for logical in (True, False):
        if watch.stuck():
            case.progress("looking for points on the other side of conditions")
        for point in branches.search(small, case.plan.lineage, watch, case.seed, logical, 3 if case.proof.failed else 1):  # seeds
            try:
                ((wrong, _),) = compare(small, case.plan.lineage, case.wanted, [point], watch)
                wrong = [s for s in wrong if s.distance > DIFFERENT or s.obligation not in case.proof.proved]
                wrong = calm(small, case.plan.lineage, wrong, point) if wrong else []
            except NotComputed:
                continue
            if wrong and not branches.tied(small, case.plan.lineage, watch, point):
                yield point, wrong


def small_sizes(case: Case) -> Small:
    """Small sizes, with 2 and 3 in turn; where that is a lot, all as small as they can be."""
    if case.whole:
        return shrink_system(case.system, base=budgets.FULL, most=budgets.MAX_ELEMENTS)
    try:
        return shrink_system(case.system, kept=case.kept, most=budgets.MAX_ELEMENTS, joined=case.alike)
    except TooMuch:
        return shrink_system(case.system, kept=case.kept, most=budgets.EVALUATED, alternate=False, joined=case.alike)


def not_proved(case: Case, small: Small, point: PointName) -> list[Suspect]:
    """What is not proved and only float64 calls equal."""
    left = [o for o in case.wanted if o in case.proof.failed]
    if not left or elements(small) > budgets.CLOSE_LOOK:
        return []
    return close_look(small, case.plan.lineage, left, random_inputs(small, point))
