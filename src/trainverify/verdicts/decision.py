"""What looks different at a point, settled: REFUTED, UNKNOWN, or the same after all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from trainverify.axes.cells import NoCells
from trainverify.axes.reduction import NotABoundary
from trainverify.domains.arrays import Array
from trainverify.evaluate.classed import NoValue
from trainverify.evaluate.compare import DIFFERENT, Difference, Suspect, calm, compare, decide, gaps, unsettled
from trainverify.evaluate.counting import counting
from trainverify.evaluate.full_size import ByPositions
from trainverify.evaluate.moved import Change, Moved, PointName, described, following, seed_of
from trainverify.evaluate.one_number import differing
from trainverify.evaluate.run import NotComputed, elements, random_inputs
from trainverify.evaluate.small import Small, TooMuch, shrink_system
from trainverify.graph.obligations import Obligation
from trainverify.progress import Failure
from trainverify.prove.attempt import FULL_SIZE
from trainverify.report import Report
from trainverify.verdicts import budgets
from trainverify.verdicts.case import Case

CLASSES = "at full size, on classes of positions and ranks"
POSITIONS = "at full size, position by position where the programs count them, on classes of all else"


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
    if case.whole and elements(small) > budgets.LOCATED:  # enclosures would take hours
        special = {s.obligation: "undecided" for s in wrong}
        one_each = []
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
    """A clear difference in a plan too large for enclosures: as large in extended precision as in float64, and not just beside noise."""
    clear = [s for s in wrong if s.distance > DIFFERENT]
    first = case.soonest(s.obligation for s in clear) if clear else None
    for some in ([s for s in clear if s.obligation == first], [s for s in clear if s.obligation != first]):
        both = (gaps(small, case.plan.lineage, some, point, digits) for digits in (True, False))
        for s, exact, plain in zip(some, *both, strict=True):
            if plain.apart > 0 and (exact.apart == plain.apart or abs(exact.apart - plain.apart) < plain.apart / 1000):
                got, want = f"{exact.got:.12g}", f"{exact.want:.12g}"
                return Difference(s.obligation, s.layout, s.rank, exact.index, got, want, point, exact.gap)
    return None


def beside_full_size(case: Case, small: Small, wrong: list[Suspect], point: PointName) -> tuple[Report | None, list[Suspect]]:
    """What differs at reduced sizes, at full size: a report, or what full size says nothing about.

    A plan of up to four million elements is run as it is. Of a larger one classes of positions and ranks are evaluated, then single
    obligations with only what they are made of: what differs there is refuted. What agrees on classes is right if reduced sizes differ
    also where every input is one number: no exchange of positions is why, so it is what was reduced. A proof also stands if reduced
    sizes agree once the counts that operators bring along shrink too.
    """
    if case.full_size(budgets.LOCATED) is not None:
        raise AtFullSize(small, wrong, point)
    several = list(dict.fromkeys(s.obligation for s in wrong))
    case = replace(case, smaller=(small, wrong, point))
    if (by := case.by_classes) is not None:
        case.progress("evaluating at full size, on classes")
        seen = None
        for some in ([case.soonest(several)], several):
            seen = by.seen(some, any(o in case.proof.failed for o in some), point)
            if seen.differs and (difference := by.decide(seen)[1]) is not None:
                return refuted(case, small, wrong, difference, scope=CLASSES), []
        agreeing = [o for o in several if seen is not None and seen.says(o) == "agrees"]
        by_size = differing(small, case.plan.lineage, agreeing, point) if agreeing else set()
        several = [o for o in several if o not in by_size]
    found, agreeing = sliced(case, several, point)
    several = [o for o in several if o not in agreeing]
    if found is None and several and (seen_there := by_positions(case, case.soonest(several))) is not None:
        return refuted(case, small, wrong, seen_there, scope=POSITIONS), []
    stands = explained(case, [o for o in several if o in case.proof.proved], point) if found is None else set()
    return found, [s for s in wrong if s.obligation in several and s.obligation not in stands]


def by_positions(case: Case, o: Obligation) -> Difference | None:
    """A difference of one obligation at full size, where all positions that the programs count are told apart."""
    case.progress(f"evaluating {o} at full size, position by position")
    for single in (2, 0):
        with suppress(NoCells, NoValue, MemoryError):
            by = ByPositions(case.system, case.plan.lineage, [o], case.seed, single)
            seen = by.seen([o])
            if seen.known:
                return by.decide(seen)[1]
    return None


def sliced(case: Case, several: Sequence[Obligation], point: PointName) -> tuple[Report | None, list[Obligation]]:
    """Some obligations at full size, one after the other, the first ones first: REFUTED, or those that agree there."""
    for o in sorted(several, key=case.made_at):
        part = case.slices.of(o)
        for one in tried(case, o, point):
            if part is None or not case.slices.pays(part):
                break
            case.progress(f"evaluating {o} at full size")
            try:
                ((wrong, _),) = compare(part, case.plan.lineage, [o], [one])
            except (NotComputed, MemoryError):
                continue
            clear = [s for s in wrong if s.distance > DIFFERENT]
            found = settled(replace(case, whole=True), part, clear, one) if clear else None
            if found is None:
                case.slices.agreed.add(o)
            elif found.verdict == "REFUTED" or o in case.proof.proved:
                return found, []
            else:
                case.slices.undecided.add(o)
    return None, [o for o in several if o in case.slices.agreed - case.slices.undecided]


def tried(case: Case, o: Obligation, point: PointName) -> Iterator[PointName]:
    """A point; of what is not proved more of them: others that are like it, and larger numbers with the first and last ids."""
    yield point
    if o in case.proof.failed:
        yield following(point)
        yield Moved(seed_of(point), "all × 4, ids at the ends", tuple((n, Change(4.0, ends=True)) for n in case.system.logical.sources))


def explained(case: Case, proved: Sequence[Obligation], point: PointName) -> set[Obligation]:
    """What agrees at reduced sizes once the counts that operators bring along (the 1/n of a mean) shrink with them. A variance may divide
    by some less than it adds up: so larger sizes are tried too."""
    found: set[Obligation] = set()
    for base in (2, 6) if proved else ():
        left = [o for o in proved if o not in found]
        try:
            small = shrink_system(case.system, base, False, case.kept, budgets.MAX_ELEMENTS, own_counts=True)
            ((wrong, _),) = compare(small, case.plan.lineage, left, [point])
        except (NotABoundary, TooMuch, NotComputed):
            continue
        found |= set(left) - {s.obligation for s in wrong}
    return found


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
        if case.less(small):
            return unconfirmed(case, small, difference.obligation)
        scope = "at full size"
    case.stop_if_contested([difference.obligation])
    engine, proved = case.proof.proved.get(difference.obligation, ("", ""))
    if proved == FULL_SIZE or (engine and case.proof.strict):
        values = f"{difference.got} instead of {difference.want}"
        raise Disagreement(f"{difference.obligation} was proved by {engine}, but rank {difference.rank} computes {values}")
    case.progress(Failure(f"{difference.obligation} differs on rank {difference.rank}: got {difference.got}, want {difference.want}"))
    from trainverify.verdicts.first_wrong import located

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


def unconfirmed(case: Case, small: Small, o: Obligation) -> Report:
    """UNKNOWN: a difference at reduced sizes may be made by what does not shrink with them."""
    literal = counting(case.system, small)
    proved = "is proved, but " if o in case.proof.proved else ""
    where = f", where {literal}" if literal is not None else ""
    reason = f"{o} {proved}differs at reduced sizes{where}; at full size it is too large to evaluate"
    hint = "sizes that are written as numbers did not shrink: verify both programs at smaller sizes (captured functions: --also batch=N)"
    return Report("UNKNOWN", reason, case.subject, case.findings, case.shown("agreed"), notes=(hint, *case.attempts()))
