"""Where a refuted plan goes wrong: the rank unlike its like, else the first wrong tensor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from trainverify.axes.reduction import NotABoundary
from trainverify.check import validate
from trainverify.domains.arrays import Array
from trainverify.evaluate.compare import DIFFERENT, Difference, Suspect, calm
from trainverify.evaluate.counting import counting
from trainverify.evaluate.moved import Change, Moved, PointName
from trainverify.evaluate.rank_values import told_apart
from trainverify.evaluate.run import NotComputed, elements
from trainverify.evaluate.sample import RANKS, sampled
from trainverify.evaluate.small import Small, TooMuch, shrink_system
from trainverify.explain.locate import handed, locate, unexplained, used
from trainverify.explain.odd import Odd, mended, odd
from trainverify.explain.place import Known, Place
from trainverify.explain.watch import Stopped, Watch
from trainverify.graph.obligations import obligations
from trainverify.prove.algebra.discover import covered
from trainverify.verdicts import budgets
from trainverify.verdicts.case import Case, compare_at
from trainverify.verdicts.prepared import related


def located(case: Case, small: Small, wrong: list[Suspect], difference: Difference, inputs: Mapping[str, Array] | None) -> Place:
    """The place to report with a difference; `inputs` are those of the solver, if it found them."""
    small, searched, seed = searchable(case, small, wrong, difference.seed)
    watch = Watch.started()
    locator = case.locator or partial(locate, watch=watch)
    try:
        place = outlier(case, small, seed, watch) if inputs is None and (case.kept or case.locator is None) else None
    except Stopped:
        place = unexplained(difference.obligation, difference.layout, difference.rank)
    if place is None and elements(small) > budgets.SEARCHED and case.locator is None:
        place = Place(difference.obligation.output.tensor, None, difference.rank, difference.layout.local, None, "too large to search")
    if place is None:
        seed, clear = clearer(case, small, searched, seed) if inputs is None else (seed, searched)
        place = locator(small, case.plan, case.wanted, clear, seed, case.system.table, known(case), inputs)
        return handed(small, used(small, place))
    return place


Differing = tuple[Small, list[Suspect], PointName]


def searchable(case: Case, small: Small, wrong: list[Suspect], seed: PointName) -> Differing:
    """Sizes at which the first wrong tensor is searched for, with what differs there.

    At reduced sizes more may differ than the bug makes: the 1/n of a mean keeps its n. Then such counts are reduced too. What is too large
    to search as it is, is searched at reduced sizes in any case: for what differs at full size.
    """
    full, bad = not case.less(small), {s.obligation for s in wrong}

    def invented(found: list[Suspect]) -> bool:
        clear = [s.obligation for s in found if s.distance > DIFFERENT]
        return any(o in case.proof.proved or (full and o not in bad) for o in clear)

    chosen = small, wrong, seed
    if case.smaller is not None and search_smaller(case, case.smaller, elements(small) > budgets.CLOSE_LOOK):
        chosen = case.smaller
    if not case.less(chosen[0]) or not invented(chosen[1]):
        return chosen
    try:
        counted = shrink_system(case.system, kept=case.kept, most=budgets.LOCATED, own_counts=True)
        found, _ = compare_at(counted, case.plan, case.wanted, seed)
    except (NotABoundary, TooMuch, NotComputed):
        found = []
    if any(s.distance > DIFFERENT for s in found) and not invented(found):
        return counted, found, seed
    if full and elements(small) <= budgets.LOCATED:
        return small, wrong, seed
    return chosen[0], [s for s in chosen[1] if s.obligation in bad] or chosen[1], chosen[2]


def search_smaller(case: Case, smaller: Differing, large: bool) -> bool:
    """Whether the first wrong tensor is searched for at reduced sizes: something is clearly off there, beside numbers that are not 0,
    and no literal makes other things differ, or full size is large."""
    clear = any(DIFFERENT < s.distance < 1 / DIFFERENT for s in smaller[1])
    return clear and (large or counting(case.system, smaller[0]) is None)


def clearer(case: Case, small: Small, wrong: list[Suspect], seed: PointName) -> tuple[PointName, list[Suspect]]:
    """A point at which what differs is further apart, where floats cannot tell what it comes from."""
    if any(s.distance > DIFFERENT for s in wrong) or isinstance(seed, Moved):
        return seed, wrong
    bad = {s.obligation for s in wrong}
    for factor in (4.0, 1 / 4, 16.0, 1 / 16):
        point = Moved(seed, f"all × {factor:g}", tuple((n, Change(factor)) for n in small.logical.sources))
        try:
            found = [s for s in compare_at(small, case.plan, case.wanted, point)[0] if s.distance > DIFFERENT]
            found = calm(small, case.plan.lineage, found, point) if found else []
        except NotComputed:
            continue
        if any(s.obligation in bad for s in found):
            return point, found
    return seed, wrong


def outlier(case: Case, small: Small, seed: PointName, watch: Watch) -> Place | None:
    """The op in which one rank differs from its like, if the plan agrees without that."""
    for n, found in enumerate(odd(case.plan)):
        if n:  # one is always tried
            watch.look()
        try:
            if not wrong_without(case, small, found, seed):
                return found.place("the whole plan agrees")
        except (NotABoundary, TooMuch, NotComputed):
            continue
    return None


def wrong_without(case: Case, small: Small, found: Odd, seed: PointName) -> list[Suspect]:
    """What differs if a rank does as the others do; where one op is all that changes, the plan is not built again."""
    changed, wanted = mended(small, found), case.wanted
    if changed is None:
        if any(f.severity != "warning" for f in validate(case.system.logical, found.plan, case.system.table)):
            raise NotComputed("not well-formed without it")
        parts = told_apart(found.plan, case.system.table)
        wanted, missing = obligations(case.system.logical, found.plan, parts)
        if missing:
            raise NotComputed("an output is missing")
        system = related(case.system.logical, found.plan, case.system.table, parts, wanted)
        changed = shrink_system(system, kept=sampled(system, [found.rank], 0 if case.kept else RANKS), most=budgets.EVALUATED)
    wrong, _ = compare_at(changed, found.plan, wanted, seed)
    return calm(changed, found.plan.lineage, wrong, seed) if wrong else []


def known(case: Case) -> Known:
    """Which logical tensors the proof attempt found in the plan, for every rank."""
    prover = case.proof.prover
    if prover is None:
        return Known()
    held, whole = covered(prover)
    first: dict[int, int] = {}  # rank → the rank that its instance is known by
    mesh = case.plan.mesh
    for instance in prover.instances:
        for r in prover.system.schedule.classes[instance.class_index].ranks:
            at = mesh.coordinates(r)
            if all(at[a] == i for a, i in instance.fixed):
                first[r] = instance.rank
    by_rank: dict[int, list[tuple[str, str]]] = {}
    for (r, tensor), name in held.items():
        by_rank.setdefault(r, []).append((tensor, name))
    everywhere = {(r, tensor): name for r, f in first.items() for tensor, name in by_rank.get(f, ())}
    return Known(everywhere, frozenset(whole))
