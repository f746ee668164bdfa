"""What looks different at a point, settled: REFUTED, UNKNOWN, or the same after all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trainverify.domains.arrays import Array
from trainverify.evaluate.compare import DIFFERENT, Difference, Suspect, calm, decide, gaps, unsettled
from trainverify.evaluate.counting import counting
from trainverify.evaluate.moved import PointName, described
from trainverify.evaluate.one_number import differing
from trainverify.evaluate.run import elements, random_inputs
from trainverify.evaluate.small import Small
from trainverify.graph.obligations import Obligation
from trainverify.progress import Failure
from trainverify.prove.attempt import FULL_SIZE
from trainverify.report import Report
from trainverify.verdicts import budgets
from trainverify.verdicts.case import Case
from trainverify.verdicts.first_wrong import located

CLASSES = "at full size, on classes of positions and ranks"


class AtFullSize(Exception):
    """What differs at reduced sizes, or on some ranks: both programs can be run as they are, so that decides."""

    def __init__(self, small: Small, wrong: list[Suspect], point: PointName):
        super().__init__("both programs are run as they are")
        self.smaller = small, wrong, point


class Disagreement(Exception):
    """A proof that evaluation contradicts: a bug of TrainVerify, never a verdict."""


def settled(case: Case, small: Small, wrong: list[Suspect], point: PointName) -> Report | None:
    """What looks different, settled with enclosures; None if it is the same after all."""
    noise = [s for s in wrong if s.obligation in case.proof.proved and s.distance < float("inf")]
    if noise:  # proved, and off by rounding as it seems
        left = calm(small, case.plan.lineage, noise, point)
        wrong = [s for s in wrong if s in left or s not in noise]
        noise = [s for s in left if s.distance <= DIFFERENT]
    proved = [s for s in wrong if s.obligation in case.proof.proved]
    compared = not case.less(small)  # with what both programs compute at full size
    if proved and elements(small) > budgets.ENCLOSED and not compared:
        found_at_full_size, wrong = beside_full_size(case, small, wrong, point)
        if found_at_full_size is not None or not wrong:
            return found_at_full_size
        compared, proved = True, [s for s in wrong if s.obligation in case.proof.proved]
    if elements(small) > budgets.ENCLOSED and (found := stable(case, small, proved, point)) is not None:
        return refuted(case, small, wrong, found)
    if proved and elements(small) > budgets.ENCLOSED:  # enclosures of so many elements would take hours
        gap = max(s.distance for s in proved)
        return case.open(f"undecided: float64 agrees to {gap:.1e} only, and the plan is too large for enclosures", "undecided")
    if noise:  # proved, and off by rounding at most: of every such obligation the worst rank is decided
        worst = {s.obligation: s for s in sorted(noise, key=lambda s: s.distance)}
        wrong = [*worst.values(), *(s for s in wrong if s not in noise)]
    proved = [s for s in wrong if s.obligation in case.proof.proved]
    if len(proved) > 1:  # all together first; what remains is looked at one by one
        left = unsettled(small, case.plan.lineage, proved, random_inputs(small, point))
        wrong = [s for s in wrong if s in left or s not in proved]
    if wrong and not compared:
        found_at_full_size, wrong = beside_full_size(case, small, wrong, point)
        if found_at_full_size is not None or not wrong:
            return found_at_full_size
    return by_enclosures(case, small, wrong, point)


def by_enclosures(case: Case, small: Small, wrong: list[Suspect], point: PointName) -> Report | None:
    """The same for what is left, rank by rank."""
    worst = {s.obligation: s for s in sorted(wrong, key=lambda s: s.distance)}
    clear: dict[Obligation, Suspect] = {}
    for s in wrong:  # of every obligation the first rank that is clearly off, or about as far as any
        if s.distance >= min(worst[s.obligation].distance / 2, budgets.CLEAR):
            clear.setdefault(s.obligation, s)
    one_each = list(clear.values())
    special = dict.fromkeys((s.obligation for s in one_each[budgets.DECIDED :]), "undecided")
    unproved = [s for s in one_each if s.obligation not in case.proof.proved]
    most = budgets.CLOSE_LOOK if case.whole else budgets.LOCATED
    if elements(small) > most and (found := stable(case, small, unproved, point)) is not None:
        said = refuted(case, small, wrong, found)
        how = "too large for enclosures: the difference is as large in extended precision as in float64"
        return replace(said, notes=(*said.notes, how))
    for suspect in [x for s in one_each[: budgets.DECIDED] for x in dict.fromkeys((s, worst[s.obligation]))]:
        case.progress(f"deciding {suspect.obligation} on rank {suspect.rank}")
        decision, difference = decide(small, case.plan.lineage, suspect, random_inputs(small, point), point)
        if decision == "different" and difference is not None:
            return refuted(case, small, wrong, difference)
        if decision != "equal":
            special.setdefault(suspect.obligation, decision)
    if not special:
        return None
    first, kind = next(iter(special.items()))
    why = {
        "literal rounding": f"literal rounding: {first} differs only by what one unit in the last place of a float literal explains",
        "undecided": f"undecided: {first} differs numerically, but no enclosure separates the values",
    }[kind]
    return Report("UNKNOWN", why, case.subject, case.findings, case.shown("agreed", special), notes=case.attempts())


def stable(case: Case, small: Small, wrong: list[Suspect], point: PointName) -> Difference | None:
    """A clear difference in a plan too large for enclosures: as large in extended precision as in float64."""
    clear = [s for s in wrong if s.distance > DIFFERENT]
    first = case.soonest(s.obligation for s in clear) if clear else None
    for some in ([s for s in clear if s.obligation == first], [s for s in clear if s.obligation != first]):
        for s, exact in zip(some, gaps(small, case.plan.lineage, some, point), strict=True):
            if exact.gap == s.distance or abs(exact.gap - s.distance) < s.distance / 1000:
                got, want = f"{exact.got:.12g}", f"{exact.want:.12g}"
                return Difference(s.obligation, s.layout, s.rank, exact.index, got, want, point, exact.gap)
    return None


def beside_full_size(case: Case, small: Small, wrong: list[Suspect], point: PointName) -> tuple[Report | None, list[Suspect]]:
    """What differs at reduced sizes, at full size: a report, or what is left to be decided at reduced sizes.

    A plan of up to four million elements is run as it is. A larger one is evaluated on classes: what differs there is refuted.
    Of deep programs reduced sizes decide, if no literal can count what was reduced and nothing was proved.
    What does not is left only if no literal can count what was reduced, or if it differs however such literals are read; else a proof
    stands, and without one there is no verdict. What agrees there is not left if reduced sizes differ also where every input is one number:
    no exchange of positions is why, so it is what was reduced.
    """
    if case.full_size(budgets.LOCATED) is not None:
        raise AtFullSize(small, wrong, point)
    several = list(dict.fromkeys(s.obligation for s in wrong))
    literal = counting(case.system, small)
    if literal is None and len(case.system.logical.ops) > budgets.DEEP and not any(o in case.proof.proved for o in several):
        return None, wrong
    by, seen = case.by_classes, None
    if by is not None:
        case.progress("evaluating at full size, on classes")
        for some in ([case.soonest(several)], several):
            seen = by.seen(some, any(o in case.proof.failed for o in some), point)
            if seen.differs and (difference := by.decide(seen)[1]) is not None:
                return refuted(case, small, wrong, difference, scope=CLASSES), []
        agreeing = [] if seen is None else [o for o in several if seen.says(o) == "agrees"]
        by_size = differing(small, case.plan.lineage, agreeing, point) if agreeing else set()
        wrong, several = [s for s in wrong if s.obligation not in by_size], [o for o in several if o not in by_size]
        if not wrong:
            return None, []
    if literal is None:  # a proof stands if it is an operator's own count that differs
        proved = {o for o in several if case.proof.proved.get(o, ("", ""))[1] == FULL_SIZE}
        stands = proved - case.sizes.everywhere(proved, point) if proved else set()
        return None, [s for s in wrong if s.obligation not in stands]
    left = [o for o in several if case.proof.proved.get(o, ("", ""))[1] != FULL_SIZE and (seen is None or seen.says(o) != "agrees")]
    everywhere = case.sizes.everywhere(left, point) if left else set()
    if everywhere or not left:
        return None, [s for s in wrong if s.obligation in everywhere]
    reason = f"{left[0]} differs at reduced sizes, where {literal}; at full size it is too large to evaluate"
    hint = "verify it at sizes with at most 4 million elements"
    if not literal.positions:
        hint = f"write the count as the op that counts (mean, all_reduce with op='avg'), or {hint}"
    return Report("UNKNOWN", reason, case.subject, case.findings, case.shown("agreed"), notes=(hint, *case.attempts())), []


def refuted(
    case: Case,
    small: Small,
    wrong: list[Suspect],
    difference: Difference,
    inputs: Mapping[str, Array] | None = None,
    scope: str | None = None,
) -> Report:
    """REFUTED, with the first wrong tensor; `scope` says at which sizes the difference is certain."""
    if scope is None:
        scope = "at full size" if not case.less(small) else "at reduced sizes"
        if inputs is None and case.less(small):
            if not case.sizes.differs(difference.obligation, difference.seed):
                reason = f"{difference.obligation} differs at reduced sizes, but not at all of several; no verdict"
                return Report("UNKNOWN", reason, case.subject, case.findings, case.shown("agreed"), notes=case.attempts())
            counts = counting(case.system, small) is not None
            literals = "however literals that may count are read" if counts else "no literal counts what was reduced"
            scope += f"; {literals}, and the difference is there at several sizes"
    case.stop_if_contested([difference.obligation])
    engine, proved = case.proof.proved.get(difference.obligation, ("", ""))
    if proved == FULL_SIZE or (engine and case.proof.strict):
        values = f"{difference.got} instead of {difference.want}"
        raise Disagreement(f"{difference.obligation} was proved by {engine}, but rank {difference.rank} computes {values}")
    case.progress(Failure(f"{difference.obligation} differs on rank {difference.rank}: got {difference.got}, want {difference.want}"))
    case.progress("locating the first wrong tensor")
    place = located(case, small, wrong, difference, inputs)
    bad = {s.obligation: "different" for s in wrong}
    reason = f"{difference.obligation} differs on rank {difference.rank}"
    if place.tensor:  # a caller may not want it to be searched for
        reason += f"; first wrong tensor: {place.named} on rank {place.rank}"
    where = described(difference.seed) if inputs is None else "the solver's model"
    note = f"counterexample: {where}, {scope}"
    stages = tuple(f"violated: {difference.layout}; {case.proof.violated[o]}" for o in bad if o in case.proof.violated)[:1]
    shown = case.shown("agreed", bad)
    return Report("REFUTED", reason, case.subject, case.findings, shown, difference, place, notes=(note, *stages), forms=case.forms(bad))
