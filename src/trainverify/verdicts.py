"""`verify`: validate, then compare the plan with the logical program, obligation by obligation.

PROVED comes from a proof engine only. Random evaluation can refute, and it can agree; agreeing is UNKNOWN.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from trainverify.axes.cells import NoCells
from trainverify.axes.reduction import NotABoundary
from trainverify.axes.system import System
from trainverify.check import validate
from trainverify.check.findings import Finding, names
from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate import branches
from trainverify.evaluate.classed import NoValue
from trainverify.evaluate.compare import (
    DIFFERENT,
    Difference,
    Suspect,
    calm,
    close_look,
    compare,
    decide,
    gaps,
    suspects,
    together,
    unsettled,
)
from trainverify.evaluate.counting import counting
from trainverify.evaluate.full_size import ByClasses
from trainverify.evaluate.looser import looser
from trainverify.evaluate.moved import Change, Moved, PointName, described
from trainverify.evaluate.other_sizes import OtherSizes
from trainverify.evaluate.rank_values import told_apart
from trainverify.evaluate.run import NotComputed, elements, random_inputs, run_logical, run_plan
from trainverify.evaluate.sample import ALL, RANKS, Sample, sampled
from trainverify.evaluate.small import NotJoined, Small, TooMuch, fits, shrink_system
from trainverify.explain.locate import locate, unexplained, used
from trainverify.explain.odd import Odd, ill_formed, mended, odd
from trainverify.explain.place import Known, Place
from trainverify.explain.watch import Stopped, Watch
from trainverify.graph.communication import Communication, schedule
from trainverify.graph.lineage import Layout, Parts, Placements
from trainverify.graph.mesh import Mesh
from trainverify.graph.moves import without_moves
from trainverify.graph.obligations import Holding, Obligation, obligations
from trainverify.graph.plan import Plan, Template
from trainverify.graph.program import Output, Program
from trainverify.limits import seldom_collected
from trainverify.ops import OPS
from trainverify.ops.table import OpTable
from trainverify.prove.algebra.discover import Found, covered, discover
from trainverify.prove.algebra.engine import Prover, prove
from trainverify.prove.algebra.folding import fold
from trainverify.prove.attempt import FULL_SIZE, Attempt, Contradiction, Engine, again, attempt, listed_too
from trainverify.prove.staged.align import inputs_of
from trainverify.prove.staged.own import StageShapes, stage_shapes
from trainverify.prove.staged.reduce import Shape, reduced, shapes
from trainverify.report import Report, Shown, Verdict

MAX_ELEMENTS = 100_000_000  # of all tensors of all ranks together, in one evaluation that keeps them
EVALUATED = 2_000_000_000  # in one that drops them when they are used
FULL = 1 << 60  # nothing larger than this shrinks
ENCLOSED = 40_000_000  # elements up to which enclosures decide rounding noise on what is proved
WALKED = 500_000  # ops of all folded programs of a plan whose ranks do not fold, up to which it is proved
LOCATED = 4_000_000  # elements up to which enclosures are run one by one, and the first wrong tensor is searched for
DECIDED = 40  # obligations that enclosures look at one by one before there is no verdict
CLEAR = 1e-3  # relative difference that needs no larger one
UNREACHED = 5  # conditions named that never fell the other way
CLOSE_LOOK = 200_000  # elements up to which enclosures look at what float64 calls equal

CLASSES = "at full size, on classes of positions and ranks"

Progress = Callable[[str], None]
Locator = Callable[..., Place]  # the arguments of `locate`


def _silent(text: str) -> None:
    pass


def single(program: Program) -> Plan:
    """A program as a plan on one device: every source lives there whole."""
    lineage = tuple(Layout(n, n, Placements(())) for n in program.sources)
    return Plan(program.name, Mesh(one=1), (Template(program, (0,)),), {}, lineage)


def verify(
    logical: Program,
    plan: Plan | Program,
    ops: OpTable = OPS,
    points: int = 3,
    seed: int = 0,
    progress: Progress = _silent,
    engine: Engine = "algebra",
    workers: int = 0,
    accept_reduced: bool = False,
    locator: Locator = locate,
) -> Report:
    """Is the plan's training step the logical program's? `workers` are processes of the staged engine; 0 is this one.

    `locator` finds the first wrong tensor of a refuted plan.
    """
    began = time.perf_counter()
    if points < 1:
        raise ValueError("a proof without a random evaluation behind it is not reported: points must be 1 or more")
    if isinstance(plan, Program):
        plan = single(plan)
    subject = f"{plan.name} on {plan.mesh} against {logical.name}"
    with seldom_collected():
        report = _verify(logical, plan, ops, points, seed, progress, subject, engine, workers, locator)
    assumed = assumptions(logical, plan) + report.assumptions
    return replace(report, assumptions=assumed, seconds=time.perf_counter() - began, accept_reduced=accept_reduced)


class _AtFullSize(Exception):
    """What differs at reduced sizes, or on some ranks: both programs can be run as they are, so that decides."""

    def __init__(self, small: Small, wrong: list[Suspect], point: PointName):
        super().__init__("both programs are run as they are")
        self.smaller = small, wrong, point


class Disagreement(Exception):
    """A proof that evaluation contradicts: a bug of TrainVerify, never a verdict."""


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
    locator: Locator,
) -> Report:
    progress("checking the plan")
    findings = tuple(validate(logical, plan, ops))
    errors = [f for f in findings if f.severity == "error"]
    if errors:
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
    count, ops_walked = folded(system) if plan.size > RANKS else (0, 0)
    if count > RANKS:  # a rank unlike the others: what it is found by is cheap, a proof is not
        why = f"ranks fold to {count} programs only, {ops_walked} ops together"
        unproved = Attempt({}, dict.fromkeys(wanted, why))
        evaluation = _Evaluation(system, plan, wanted, unproved, points, seed, progress, subject, findings, locator, True, shared=shared)
        found = evaluation.report()
        if found.verdict != "UNKNOWN" or ops_walked > WALKED:
            return found
        progress("proving")
    proof = attempt(engine, prove, system, wanted, plan.lineage, workers, progress)
    evaluation = _Evaluation(system, plan, wanted, proof, points, seed, progress, subject, findings, locator, shared=shared)
    return evaluation.by_size_alone() or evaluation.report()


def folded(system: System) -> tuple[int, int]:
    """Into how many programs ranks fold, and the ops of these together."""
    instances = fold(system)
    units_of = [system.schedule.classes[i.class_index].unit for i in instances]
    return len(instances), sum(len(system.unit_programs[u].ops) for u in units_of)


def related(logical: Program, plan: Plan, ops: OpTable, parts: Sequence[Template], wanted: Sequence[Obligation]) -> System:
    """The axes of both programs together."""
    talk = Communication(plan, parts, ops)
    order = schedule(talk)
    system = best = System(logical, plan, ops, talk, order).collect(wanted)
    flat = [False, True] if any(isinstance(lay.form, Parts) for lay, _ in system.holdings()) else [False]
    shifts = [False, True] if system.inference.overlaps else [False]
    for how in [(f, s) for s in shifts for f in flat][1:]:
        if best.inference.axes.clashes:
            other = System(logical, plan, ops, talk, order, flat=how[0], shifts=how[1]).collect(wanted)
            best = min(best, other, key=lambda x: len(x.inference.axes.clashes))
    return best


def lineage(logical: Program, plan: Plan | Program, ops: OpTable = OPS, progress: Progress = _silent) -> list[Found] | list[Finding]:
    """Where every tensor of the plan comes from, discovered; findings instead if the plan is not well-formed."""
    if isinstance(plan, Program):
        plan = single(plan)
    progress("checking the plan")
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


def reduction(
    logical: Program, plan: Plan | Program, ops: OpTable = OPS, staged: bool = False
) -> Sequence[Shape] | Sequence[StageShapes] | Sequence[Finding]:
    """The shapes of all tensors at the sizes of staged proofs, or of each stage alone; findings instead if the plan is not well-formed."""
    plan = single(plan) if isinstance(plan, Program) else plan
    wrong = [f for f in validate(logical, plan, ops) if f.severity != "warning"]
    if wrong:
        return wrong
    parts = told_apart(plan, ops)
    wanted, _ = obligations(logical, plan, parts)
    system = related(logical, plan, ops, parts, wanted)
    return stage_shapes(system, wanted, plan.lineage) if staged else list(shapes(reduced(system)))


@dataclass(frozen=True)
class _Evaluation:
    """Random evaluation beside a proof attempt: it confirms a proof, refutes a plan, or leaves it open."""

    system: System
    plan: Plan
    wanted: Sequence[Obligation]
    proof: Attempt
    points: int
    seed: int
    progress: Progress
    subject: str
    findings: tuple[Finding, ...]
    locator: Locator
    alike: bool = False  # but for few ranks: one point after the other, and all ranks of a program together
    whole: bool = False  # at the original sizes, all ranks
    smaller: tuple[Small, list[Suspect], PointName] | None = None  # where the same differs and less has to be searched
    shared: list[ByClasses | None] = field(default_factory=list)  # with other evaluations of the system

    @cached_property
    def kept(self) -> Sample:
        """What is evaluated of a plan with many ranks, or with too many elements otherwise."""
        everything = self.plan.size <= RANKS and fits(self.system, EVALUATED)
        return ALL if everything else sampled(self.system, above=0)

    def report(self) -> Report:
        try:
            return self._report()
        except NotJoined:
            return replace(self, alike=False).report()
        except _AtFullSize as found:
            return replace(self, alike=False, whole=True, smaller=found.smaller).report()

    def by_size_alone(self) -> Report | None:
        """REFUTED at sizes at which axes that are read in two ways shrink too; None if that says nothing."""
        if not self.proof.failed:
            return None
        self.progress("choosing sizes for what does not align")
        loose = looser(self.system, self.plan.lineage, self.wanted, self.proof.proved.keys(), self.kept, self.seed)
        if loose is None:
            return None
        try:
            found = replace(self, system=loose, proof=replace(self.proof, once=None), shared=[]).report()
        except Disagreement:  # what is proved holds at the sizes of the plan, whatever these say
            return None
        how = "axes that are read in two ways are shrunk by size alone; the difference is there at three sizes"
        return replace(found, notes=(*found.notes, how)) if found.verdict == "REFUTED" else None

    def _report(self) -> Report:
        self.progress("choosing small sizes")
        why = ""
        try:
            try:
                small = self._small()
            except NotABoundary as error:
                why = f"no small sizes keep the structure of the plan: {error}"
                small = shrink_system(self.system, base=FULL, most=MAX_ELEMENTS)
        except TooMuch as error:
            clashes = self.system.inference.axes.clashes
            also = f": {clashes[0].text} ({clashes[0].where})" if clashes else f": {error}"
            return self._confirmed() or self._open(why or f"too large to evaluate{also}", "not compared")
        compared = 0
        points = range(self.seed, self.seed + self.points)
        self.progress(f"evaluating {self.points} points")
        results: dict[int, tuple[list[Suspect], int]] = {}
        watch = branches.watch(small)
        for point in points:
            if point not in results:
                some = [point] if self.alike or not together(small, self.points) else points
                try:
                    results.update(zip(some, compare(small, self.plan.lineage, self.wanted, some, watch), strict=True))
                except NotComputed as error:
                    return self._open(f"the plan could not be run: {error}", "not compared")
            wrong, n = results[point]
            compared += n
            if not wrong and point == self.seed:
                wrong = self._close_look(small, point)
            if wrong:
                found = self._decide(small, wrong, point)
                if found is not None and found.verdict == "UNKNOWN" and self.proof.once is not None:
                    return replace(self, proof=again(self.proof, self.system, self.wanted))._report()  # rounding, on what can be proved
                if found is not None:
                    return found
        refuted, unreached = self._other_sides(small, watch)
        if refuted is not None:
            return refuted
        note = f"{compared} comparisons of {len(self.wanted)} obligations" + (" at reduced sizes" if small.reduced else " at full size")
        if self.kept:
            note += f", on {len(small.places)} of {self.plan.size} ranks"
        notes = (note, *unreached)
        if self.proof.failed and self.proof.prover is not None:
            self.progress("proving what was not proved at once")
            proof = again(self.proof, self.system, self.wanted)
            if proof.failed:
                self.progress("listing what was not aligned")
                proof = listed_too(proof, self.system, self.wanted)
            return replace(self, proof=proof)._agreed(notes)
        return self._agreed(notes)

    def _agreed(self, evaluated: tuple[str, ...]) -> Report:
        """The verdict when evaluation found no difference."""
        if not self.whole:  # it agrees at the sizes at which the staged engine saw a difference
            self._stop_if_contested(self.wanted)
        if not self.proof.failed:
            found = self._other_sizes() if self.proof.reduced and not self.whole else None
            if found is not None:
                return found
            notes = (*self.proof.lint, *self.proof.notes, *evaluated)
            at = "full size" if not self.proof.reduced else "reduced sizes"
            reason = f"{len(self.wanted)} obligations at {at}; random evaluation agrees on {self.points} points"
            verdict: Verdict = "PROVED(reduced)" if self.proof.reduced else "PROVED"
            return Report(
                verdict, reason, self.subject, self.findings, self._shown("agreed"), assumptions=self.proof.preconditions, notes=notes
            )
        found = self._replayed() or self._beyond_sizes()
        return found or self._open(f"agreed on {self.points} random points", "agreed", (*evaluated, *self.proof.notes))

    def _other_sides(self, small: Small, watch: branches.Watch | None) -> tuple[Report | None, tuple[str, ...]]:
        """A report if both programs differ at a point on the other side of a condition; else notes about sides that none reaches.

        At such a point only a certain difference counts: rounding may hide what is there."""
        if watch is None:
            return None, (f"conditions were not watched: more than {branches.WATCHED:,} elements",)
        for point, wrong in self._beyond(small, watch):
            found = self._decide(small, wrong, point)
            if found is not None and found.verdict == "REFUTED":
                return found, ()
        never = branches.unreached(watch)
        more = [f"and {len(never) - UNREACHED} more conditions fall one way at all points"] if len(never) > UNREACHED else []
        return None, (*map(str, never[:UNREACHED]), *more)

    def _beyond(self, small: Small, watch: branches.Watch) -> Iterator[tuple[PointName, list[Suspect]]]:
        """Points on the other side of conditions at which both programs clearly differ, and what does."""
        for logical in (True, False):
            if watch.stuck():
                self.progress("looking for points on the other side of conditions")
            for point in branches.search(small, self.plan.lineage, watch, self.seed, logical, 3 if self.proof.failed else 1):  # seeds
                try:
                    ((wrong, _),) = compare(small, self.plan.lineage, self.wanted, [point], watch)
                    wrong = [s for s in wrong if s.distance > DIFFERENT or s.obligation not in self.proof.proved]
                    wrong = calm(small, self.plan.lineage, wrong, point) if wrong else []
                except NotComputed:
                    continue
                if wrong and not branches.tied(small, self.plan.lineage, watch, point):
                    yield point, wrong

    def _stop_if_contested(self, wanted: Sequence[Obligation]) -> None:
        for why in (self.proof.contested[o] for o in wanted if o in self.proof.contested):
            raise Contradiction(why)

    def _small(self) -> Small:
        """Small sizes, with 2 and 3 in turn; where that is a lot, all as small as they can be."""
        if self.whole:
            return shrink_system(self.system, base=FULL, most=MAX_ELEMENTS)
        try:
            return shrink_system(self.system, kept=self.kept, most=MAX_ELEMENTS, joined=self.alike)
        except TooMuch:
            return shrink_system(self.system, kept=self.kept, most=EVALUATED, alternate=False, joined=self.alike)

    def _other_sizes(self) -> Report | None:
        """A proof at reduced sizes must not rest on them: one evaluation at the original ones, else at larger ones, which may refute."""
        small = None if self.kept else self._full_size(LOCATED)
        if small is None:
            try:
                small = shrink_system(self.system, base=3, kept=self.kept)
            except NotABoundary:
                return None
        if elements(small) > MAX_ELEMENTS:
            return None
        self.progress("evaluating at other sizes")
        try:
            wrong, _ = compare_at(small, self.plan, self.wanted, self.seed)
        except NotComputed as error:
            return self._open(f"proved at reduced sizes only, and at others {error}", "not compared")
        return self._decide(small, wrong, self.seed) if wrong else None

    def _replayed(self) -> Report | None:
        """Inputs for which the solver says that an obligation fails, tried."""
        for o, model in self.proof.models.items():
            if not model:
                continue
            small = reduced(self.system)
            inputs = inputs_of(small, model)
            try:
                logical, local = run_logical(small, inputs, NUMERIC), run_plan(small, self.plan.lineage, inputs, NUMERIC)
                wrong, _ = suspects(small, [o], logical, local)
            except NotComputed:
                continue
            for suspect in wrong:
                decision, difference = decide(small, self.plan.lineage, suspect, inputs, -1)
                if decision == "different" and difference is not None:
                    return self._refuted(small, wrong, difference, inputs)
        return None

    def _decide(self, small: Small, wrong: list[Suspect], point: PointName) -> Report | None:
        """What looks different, settled with enclosures; None if it is the same after all."""
        special: dict[Obligation, str] = {}
        noise = [s for s in wrong if s.obligation in self.proof.proved and s.distance < float("inf")]
        if noise:  # proved, and off by rounding as it seems
            left = calm(small, self.plan.lineage, noise, point)
            wrong = [s for s in wrong if s in left or s not in noise]
            noise = [s for s in left if s.distance <= DIFFERENT]
        proved = [s for s in wrong if s.obligation in self.proof.proved]
        compared = not self._less(small)  # with what both programs compute at full size
        if proved and elements(small) > ENCLOSED and not compared:
            found_at_full_size, wrong = self._beside_full_size(small, wrong, point)
            if found_at_full_size is not None or not wrong:
                return found_at_full_size
            compared, proved = True, [s for s in wrong if s.obligation in self.proof.proved]
        if elements(small) > ENCLOSED and (found := self._stable(small, proved, point)) is not None:
            return self._refuted(small, wrong, found)
        if proved and elements(small) > ENCLOSED:  # enclosures of so many elements would take hours
            gap = max(s.distance for s in proved)
            return self._open(f"undecided: float64 agrees to {gap:.1e} only, and the plan is too large for enclosures", "undecided")
        if noise:  # proved, and off by rounding at most: of every such obligation the worst rank is decided
            worst = {s.obligation: s for s in sorted(noise, key=lambda s: s.distance)}
            wrong = [*worst.values(), *(s for s in wrong if s not in noise)]
        proved = [s for s in wrong if s.obligation in self.proof.proved]
        if len(proved) > 1:  # all together first; what remains is looked at one by one
            left = unsettled(small, self.plan.lineage, proved, random_inputs(small, point))
            wrong = [s for s in wrong if s in left or s not in proved]
        if wrong and not compared:
            found_at_full_size, wrong = self._beside_full_size(small, wrong, point)
            if found_at_full_size is not None or not wrong:
                return found_at_full_size
        worst = {s.obligation: s for s in sorted(wrong, key=lambda s: s.distance)}
        clear: dict[Obligation, Suspect] = {}
        for s in wrong:  # of every obligation the first rank that is clearly off, or about as far as any
            if s.distance >= min(worst[s.obligation].distance / 2, CLEAR):
                clear.setdefault(s.obligation, s)
        one_each = list(clear.values())
        special.update({s.obligation: "undecided" for s in one_each[DECIDED:]})
        unproved = [s for s in one_each if s.obligation not in self.proof.proved]
        if elements(small) > (LOCATED if not self.whole else CLOSE_LOOK) and (found := self._stable(small, unproved, point)) is not None:
            said = self._refuted(small, wrong, found)
            how = "too large for enclosures: the difference is as large in extended precision as in float64"
            return replace(said, notes=(*said.notes, how))
        for suspect in [x for s in one_each[:DECIDED] for x in dict.fromkeys((s, worst[s.obligation]))]:
            self.progress(f"deciding {suspect.obligation} on rank {suspect.rank}")
            decision, difference = decide(small, self.plan.lineage, suspect, random_inputs(small, point), point)
            if decision == "different" and difference is not None:
                return self._refuted(small, wrong, difference)
            if decision != "equal":
                special.setdefault(suspect.obligation, decision)
        if not special:
            return None
        first, kind = next(iter(special.items()))
        why = {
            "literal rounding": f"literal rounding: {first} differs only by what one unit in the last place of a float literal explains",
            "undecided": f"undecided: {first} differs numerically, but no enclosure separates the values",
        }[kind]
        return Report("UNKNOWN", why, self.subject, self.findings, self._shown("agreed", special), notes=self._attempts())

    def _stable(self, small: Small, wrong: list[Suspect], point: PointName) -> Difference | None:
        """A clear difference in a plan too large for enclosures: as large in extended precision as in float64."""
        clear = [s for s in wrong if s.distance > DIFFERENT]
        first = self._soonest(s.obligation for s in clear) if clear else None
        for some in ([s for s in clear if s.obligation == first], [s for s in clear if s.obligation != first]):
            for s, exact in zip(some, gaps(small, self.plan.lineage, some, point), strict=True):
                if exact.gap == s.distance or abs(exact.gap - s.distance) < s.distance / 1000:
                    got, want = f"{exact.got:.12g}", f"{exact.want:.12g}"
                    return Difference(s.obligation, s.layout, s.rank, exact.index, got, want, point, exact.gap)
        return None

    def _soonest(self, several: Iterable[Obligation]) -> Obligation:
        """The one that is made first: the least has to be computed for it."""
        made = {o: n for n, op in enumerate(self.system.logical.ops) for o in op.outputs}
        return min(several, key=lambda o: made.get(o.output.tensor, -1))

    def _close_look(self, small: Small, point: PointName) -> list[Suspect]:
        """What is not proved and only float64 calls equal."""
        left = [o for o in self.wanted if o in self.proof.failed]
        if not left or elements(small) > CLOSE_LOOK:
            return []
        return close_look(small, self.plan.lineage, left, random_inputs(small, point))

    def _refuted(
        self,
        small: Small,
        wrong: list[Suspect],
        difference: Difference,
        inputs: Mapping[str, Array] | None = None,
        scope: str | None = None,
    ) -> Report:
        """REFUTED, with the first wrong tensor; `scope` says at which sizes the difference is certain."""
        if scope is None:
            scope = "at full size" if not self._less(small) else "at reduced sizes"
            if inputs is None and self._less(small):
                if not self._sizes.differs(difference.obligation, difference.seed):
                    reason = f"{difference.obligation} differs at reduced sizes, but not at all of several; no verdict"
                    return Report("UNKNOWN", reason, self.subject, self.findings, self._shown("agreed"), notes=self._attempts())
                counts = counting(self.system, small) is not None
                literals = "however literals that may count are read" if counts else "no literal counts what was reduced"
                scope += f"; {literals}, and the difference is there at several sizes"
        self._stop_if_contested([difference.obligation])
        engine, proved = self.proof.proved.get(difference.obligation, ("", ""))
        if proved == FULL_SIZE or (engine and self.proof.strict):
            values = f"{difference.got} instead of {difference.want}"
            raise Disagreement(f"{difference.obligation} was proved by {engine}, but rank {difference.rank} computes {values}")
        self.progress("locating the first wrong tensor")
        searched, seed = wrong, difference.seed
        if self.smaller is not None and self._clearly(self.smaller, elements(small) > CLOSE_LOOK):
            small, searched, seed = self.smaller
        watch = Watch.started()
        locator = partial(locate, watch=watch) if self.locator is locate else self.locator
        try:
            place = self._odd(small, seed, watch) if inputs is None and (self.kept or self.locator is locate) else None
        except Stopped:
            place = unexplained(difference.obligation, difference.layout, difference.rank)
        if place is None and elements(small) > LOCATED and self.locator is locate:
            place = Place(difference.obligation.output.tensor, None, difference.rank, difference.layout.local, None, "too large to search")
        if place is None:
            seed, clear = self._clearer(small, searched, seed) if inputs is None else (seed, searched)
            place = used(small, locator(small, self.plan, self.wanted, clear, seed, self.system.table, self._known(), inputs))
        bad = {s.obligation: "different" for s in wrong}
        reason = f"{difference.obligation} differs on rank {difference.rank}"
        if place.tensor:  # a caller may not want it to be searched for
            reason += f"; first wrong tensor: {place.tensor} on rank {place.rank}"
        where = described(difference.seed) if inputs is None else "the solver's model"
        note = f"counterexample: {where}, {scope}"
        forms = tuple(f"{o}: {self.proof.failed[o]}" for o in bad if o in self.proof.failed)[:1]
        forms += tuple(f"violated: {difference.layout}; {self.proof.violated[o]}" for o in bad if o in self.proof.violated)[:1]
        return Report("REFUTED", reason, self.subject, self.findings, self._shown("agreed", bad), difference, place, notes=(note, *forms))

    def _clearly(self, smaller: tuple[Small, list[Suspect], PointName], large: bool) -> bool:
        """Whether the first wrong tensor is searched for at reduced sizes: something is clearly off there, beside numbers that are not 0,
        and no literal makes other things differ, or full size is large."""
        clear = any(DIFFERENT < s.distance < 1 / DIFFERENT for s in smaller[1])
        return clear and (large or counting(self.system, smaller[0]) is None)

    def _less(self, small: Small) -> bool:
        """Whether it has fewer positions or ranks than the plan."""
        return small.reduced or len(small.places) < self.plan.size

    def _clearer(self, small: Small, wrong: list[Suspect], seed: PointName) -> tuple[PointName, list[Suspect]]:
        """A point at which what differs is further apart, where floats cannot tell what it comes from."""
        if any(s.distance > DIFFERENT for s in wrong) or isinstance(seed, Moved):
            return seed, wrong
        bad = {s.obligation for s in wrong}
        for factor in (4.0, 1 / 4, 16.0, 1 / 16):
            point = Moved(seed, f"all × {factor:g}", tuple((n, Change(factor)) for n in small.logical.sources))
            try:
                found = [s for s in compare_at(small, self.plan, self.wanted, point)[0] if s.distance > DIFFERENT]
                found = calm(small, self.plan.lineage, found, point) if found else []
            except NotComputed:
                continue
            if any(s.obligation in bad for s in found):
                return point, found
        return seed, wrong

    def _beside_full_size(self, small: Small, wrong: list[Suspect], point: PointName) -> tuple[Report | None, list[Suspect]]:
        """What differs at reduced sizes, at full size: a report, or what is left to be decided at reduced sizes.

        A plan of up to four million elements is run as it is. A larger one is evaluated on classes: what differs there is refuted.
        What does not is left only if no literal can count what was reduced, or if it differs however such literals are read; else a proof
        stands, and without one there is no verdict.
        """
        if self._full_size(LOCATED) is not None:
            raise _AtFullSize(small, wrong, point)
        by, seen = self._by_classes, None
        several = list(dict.fromkeys(s.obligation for s in wrong))
        if by is not None:
            self.progress("evaluating at full size, on classes")
            for some in ([self._soonest(several)], several):
                seen = by.seen(some, any(o in self.proof.failed for o in some), point)
                if seen.differs and (difference := by.decide(seen)[1]) is not None:
                    return self._refuted(small, wrong, difference, scope=CLASSES), []
        literal = counting(self.system, small)
        if literal is None:  # a proof stands if it is an operator's own count that differs
            proved = {o for o in several if self.proof.proved.get(o, ("", ""))[1] == FULL_SIZE}
            stands = proved - self._sizes.everywhere(proved, point) if proved else set()
            return None, [s for s in wrong if s.obligation not in stands]
        left = [o for o in several if self.proof.proved.get(o, ("", ""))[1] != FULL_SIZE and (seen is None or seen.says(o) != "agrees")]
        everywhere = self._sizes.everywhere(left, point) if left else set()
        if everywhere or not left:
            return None, [s for s in wrong if s.obligation in everywhere]
        reason = f"{left[0]} differs at reduced sizes, where {literal}; at full size it is too large to evaluate"
        hint = (
            "write the count as the op that counts (mean, all_reduce with op='avg'), or verify it at sizes with at most 4 million elements"
        )
        return Report("UNKNOWN", reason, self.subject, self.findings, self._shown("agreed"), notes=(hint, *self._attempts())), []

    @property
    def _by_classes(self) -> ByClasses | None:
        """Made once for all evaluations of a system."""
        if not self.shared:
            try:
                found = ByClasses(self.system, self.plan.lineage, self.wanted, self.seed)
                _ = found.point
                self.shared.append(found)
            except (NoCells, NoValue):
                self.shared.append(None)
        return self.shared[0]

    def _beyond_sizes(self) -> Report | None:
        """A difference at full size that reduced sizes do not show, of a plan that is not proved."""
        if self.whole:
            return None
        small = self._full_size(LOCATED)
        if small is not None:
            self.progress("evaluating at full size")
            try:
                wrong, _ = compare_at(small, self.plan, self.wanted, self.seed)
            except NotComputed:
                return None
            wrong = [s for s in wrong if s.distance > DIFFERENT]
            if not wrong:
                return None
            found = replace(self, whole=True)._decide(small, wrong, self.seed)
            return found if found is not None and found.verdict == "REFUTED" else None
        if self._by_classes is None:
            return None
        self.progress("evaluating at full size, on classes")
        seen = self._by_classes.seen([o for o in self.wanted if o in self.proof.failed], everywhere=True)
        difference = self._by_classes.decide(seen)[1] if seen.differs else None
        if difference is None:
            return None
        return self._unlocated(difference)

    def _unlocated(self, difference: Difference) -> Report:
        """REFUTED by a difference on classes only."""
        o = difference.obligation
        self._stop_if_contested([o])
        place = Place(o.output.tensor, None, difference.rank, difference.layout.local, None, "seen at full size only: not searched")
        reason = f"{o} differs on rank {difference.rank}; first wrong tensor: {place.tensor} on rank {place.rank}"
        note = f"counterexample: random inputs of seed {difference.seed}, {CLASSES}"
        return Report(
            "REFUTED", reason, self.subject, self.findings, self._shown("agreed", {o: "different"}), difference, place, notes=(note,)
        )

    def _confirmed(self) -> Report | None:
        """PROVED, of a plan too large to evaluate otherwise, where classes say the same of every obligation."""
        if self.proof.failed or self.proof.reduced or self._by_classes is None:
            return None
        seen = self._by_classes.seen(self.wanted)
        if not all(seen.says(o) == "agrees" for o in self.wanted):
            return None
        reason = f"{len(self.wanted)} obligations at full size; evaluation on classes of positions agrees"
        notes = (*self.proof.lint, *self.proof.notes)
        return Report(
            "PROVED", reason, self.subject, self.findings, self._shown("agreed"), assumptions=self.proof.preconditions, notes=notes
        )

    @cached_property
    def _sizes(self) -> OtherSizes:
        return OtherSizes(self.system, self.plan.lineage, self.kept, self.seed, MAX_ELEMENTS, self.progress)

    def _full_size(self, most: int) -> Small | None:
        """Both programs at the original sizes, if they have at most so many elements."""
        try:
            return shrink_system(self.system, base=FULL, most=most)
        except (NotABoundary, TooMuch):
            return None

    def _odd(self, small: Small, seed: PointName, watch: Watch) -> Place | None:
        """The op in which one rank differs from its like, if the plan agrees without that."""
        for n, found in enumerate(odd(self.plan)):
            if n:  # one is always tried
                watch.look()
            try:
                if not self._wrong_without(small, found, seed):
                    return found.place("the whole plan agrees")
            except (NotABoundary, TooMuch, NotComputed):
                continue
        return None

    def _wrong_without(self, small: Small, found: Odd, seed: PointName) -> list[Suspect]:
        """What differs if a rank does as the others do; where one op is all that changes, the plan is not built again."""
        changed, wanted = mended(small, found), self.wanted
        if changed is None:
            if any(f.severity != "warning" for f in validate(self.system.logical, found.plan, self.system.table)):
                raise NotComputed("not well-formed without it")
            parts = told_apart(found.plan, self.system.table)
            wanted, missing = obligations(self.system.logical, found.plan, parts)
            if missing:
                raise NotComputed("an output is missing")
            system = related(self.system.logical, found.plan, self.system.table, parts, wanted)
            changed = shrink_system(system, kept=sampled(system, [found.rank], 0 if self.kept else RANKS), most=EVALUATED)
        wrong, _ = compare_at(changed, found.plan, wanted, seed)
        return calm(changed, found.plan.lineage, wrong, seed) if wrong else []

    def _known(self) -> Known:
        """Which logical tensors the proof attempt found in the plan, for every rank."""
        prover = self.proof.prover
        if prover is None:
            return Known()
        held, whole = covered(prover)
        first: dict[int, int] = {}  # rank → the rank that its instance is known by
        mesh = self.plan.mesh
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

    def _open(self, reason: str, status: str, notes: tuple[str, ...] = ()) -> Report:
        why = f"{len(self.proof.failed)} of {len(self.wanted)} obligations not proved; " if self.proof.failed else ""
        return Report("UNKNOWN", why + reason, self.subject, self.findings, self._shown(status), notes=(*notes, *self._attempts()))

    def _attempts(self) -> tuple[str, ...]:
        return tuple(f"not proved: {o}: {why}" for o, why in list(self.proof.failed.items())[:5])

    def _shown(self, status: str, special: dict[Obligation, str] | None = None) -> tuple[Shown, ...]:
        proved = self.proof.proved
        result = []
        for o in self.wanted:
            holders = len({r for h in o.holdings for r in h.ranks})
            if o in proved and o not in (special or {}):
                result.append(Shown(str(o), o.output.tensor, holders, "proved", *proved[o]))
            else:
                result.append(Shown(str(o), o.output.tensor, holders, (special or {}).get(o, status), "evaluation", "random points"))
        return tuple(result)


def compare_at(small: Small, plan: Plan, wanted: Sequence[Obligation], point: PointName) -> tuple[list[Suspect], int]:
    """Both programs on one random point: what is not clearly equal, in the order of the logical program."""
    return compare(small, plan.lineage, wanted, [point])[0]


def declared(logical: Program, plan: Plan, parts: Sequence[Template], wanted: Sequence[Obligation]) -> list[Obligation]:
    """Lineage of intermediate tensors is a claim: it becomes an obligation of its own."""
    demanded: dict[Layout, set[int]] = {}  # where a claim is an obligation already
    for h in (h for o in wanted for h in o.holdings):
        demanded.setdefault(h.layout, set()).update(h.ranks)
    sources = frozenset(logical.sources)
    given = [frozenset(u.program.sources) for u in parts]
    claims: dict[str, list[Holding]] = {}
    for lay in dict.fromkeys(plan.lineage):
        if lay.logical in sources:  # ranks that compute it, as those that gather a parameter, only say that they have it
            made = [u for u, here in zip(parts, given, strict=True) if lay.local in u.program.tensors and lay.local not in here]
            own = {r for u in made for r in u.ranks}
            ranks = tuple(r for r in lay.holders(plan.mesh) if r in own) if own else ()
        else:
            ranks = lay.holders(plan.mesh)
        if lay in demanded:
            ranks = tuple(r for r in ranks if r not in demanded[lay])
        if ranks:
            claims.setdefault(lay.logical, []).append(Holding(lay, ranks))
    return [Obligation(Output(name, "declared"), tuple(holdings)) for name, holdings in claims.items()]


def assumptions(logical: Program, plan: Plan) -> tuple[str, ...]:
    """What no plan can show: printed with every verdict."""
    found = ["arithmetic is that of real numbers: rounding, kernels and the network are out of scope"]
    replicas = sorted({lay.logical for lay in plan.lineage if lay.logical in (*logical.parameters, *logical.state)})
    if replicas and plan.mesh.size > 1:
        found.append("before the step all copies of a parameter or state element are equal on the ranks that hold it")
    for lay in plan.lineage:
        if lay.logical in logical.inputs and isinstance(plan, Plan) and plan.mesh.size > 1:
            found.append(f"the batch arrives as {lay}")
    padded = sorted(
        {lay.local for lay in plan.lineage if isinstance(lay.form, Parts) and any(p.padding for _, ps in lay.form.by_rank for p in ps)}
    )
    if padded:
        found.append(f"before the step the padding of {names(padded)} is zero")
    found += [f"input {n} holds {d}" for n, d in logical.domains.items()]
    found.append(f"the loss is the logical program's, as {logical.name!r} writes it")
    return tuple(found)
