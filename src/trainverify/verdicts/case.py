"""What is judged: both programs, the obligations, a proof attempt, and the reports that state how far it came."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from trainverify.axes.cells import NoCells
from trainverify.axes.reduction import NotABoundary
from trainverify.axes.system import System
from trainverify.check.findings import Finding
from trainverify.evaluate.classed import NoValue
from trainverify.evaluate.compare import Suspect, compare
from trainverify.evaluate.full_size import ByClasses
from trainverify.evaluate.moved import PointName
from trainverify.evaluate.sample import ALL, RANKS, Sample, sampled
from trainverify.evaluate.slices import Slices
from trainverify.evaluate.small import Small, TooMuch, fits, shrink_system
from trainverify.explain.place import Place
from trainverify.graph.obligations import Obligation
from trainverify.graph.plan import Plan
from trainverify.progress import Progress as Progress
from trainverify.progress import silent as silent
from trainverify.prove.attempt import Attempt, Contradiction
from trainverify.report import Report, Shown
from trainverify.verdicts import budgets

Locator = Callable[..., Place]  # the arguments of `locate`


@dataclass(frozen=True)
class Case:
    """A plan under judgement beside a proof attempt, and how much of it is evaluated."""

    system: System
    plan: Plan
    wanted: Sequence[Obligation]
    proof: Attempt
    points: int
    seed: int
    progress: Progress
    subject: str
    findings: tuple[Finding, ...]
    locator: Locator | None  # None: that of `explain`
    alike: bool = False  # but for few ranks: one point after the other, and all ranks of a program together
    whole: bool = False  # at the original sizes, all ranks
    most: int = budgets.EVALUATED  # elements up to which all ranks are evaluated
    smaller: tuple[Small, list[Suspect], PointName] | None = None  # where the same differs and less has to be searched
    shared: list[ByClasses | None] = field(default_factory=list)  # with other evaluations of the system
    sliced: list[Slices] = field(default_factory=list)  # likewise

    @cached_property
    def kept(self) -> Sample:
        """What is evaluated of a plan with many ranks, or with too many elements otherwise."""
        everything = self.plan.size <= RANKS and fits(self.system, self.most)
        return ALL if everything else sampled(self.system, above=0)

    @cached_property
    def slices(self) -> Slices:
        """Single obligations at full size; made once for all evaluations of a system."""
        for known in self.sliced:
            if known.system is self.system:
                return known
        self.sliced.append(Slices(self.system))
        return self.sliced[-1]

    @property
    def by_classes(self) -> ByClasses | None:
        """Made once for all evaluations of a system."""
        if not self.shared:
            try:
                found = ByClasses(self.system, self.plan.lineage, self.wanted, self.seed)
                _ = found.point
                self.shared.append(found)
            except (NoCells, NoValue):
                self.shared.append(None)
        return self.shared[0]

    def full_size(self, most: int) -> Small | None:
        """Both programs at the original sizes, if they have at most so many elements."""
        try:
            return shrink_system(self.system, base=budgets.FULL, most=most)
        except (NotABoundary, TooMuch):
            return None

    def less(self, small: Small) -> bool:
        """Whether it has fewer positions or ranks than the plan."""
        return small.reduced or len(small.places) < self.plan.size

    def open(self, reason: str, status: str, notes: tuple[str, ...] = ()) -> Report:
        """UNKNOWN: neither proved nor refuted."""
        why = f"{len(self.proof.failed)} of {len(self.wanted)} obligations not proved; " if self.proof.failed else ""
        return Report(
            "UNKNOWN",
            why + reason,
            self.subject,
            self.findings,
            self.shown(status),
            notes=(*notes, *self.attempts()),
            forms=self.forms(self.wanted),
        )

    def attempts(self) -> tuple[str, ...]:
        """Why the first obligations that are not proved are not."""
        return tuple(f"not proved: {o}: {why}" for o, why in list(self.proof.failed.items())[:5] if why)

    def forms(self, some: Iterable[Obligation]) -> tuple[str, ...]:
        """What the proof attempt has of obligations that it does not show: got and want in normal form."""
        return tuple(f"{o}: {why}" for o in some if (why := self.proof.failed.get(o)))

    def shown(self, status: str, special: dict[Obligation, str] | None = None) -> tuple[Shown, ...]:
        """The state of every obligation: `status` without a proof, unless `special` has another."""
        proved = self.proof.proved
        result = []
        for o in self.wanted:
            holders = len({r for h in o.holdings for r in h.ranks})
            if o in proved and o not in (special or {}):
                result.append(Shown(str(o), o.output.tensor, holders, "proved", *proved[o]))
            else:
                result.append(Shown(str(o), o.output.tensor, holders, (special or {}).get(o, status), "evaluation", "random points"))
        return tuple(result)

    def stop_if_contested(self, wanted: Sequence[Obligation]) -> None:
        """Raise if the engines contradict each other on one of these."""
        for why in (self.proof.contested[o] for o in wanted if o in self.proof.contested):
            raise Contradiction(why)

    def soonest(self, several: Iterable[Obligation]) -> Obligation:
        """The one that is made first: the least has to be computed for it."""
        return min(several, key=self.made_at)

    def made_at(self, o: Obligation) -> int:
        """Which op of the logical program makes an output."""
        return self._makers.get(o.output.tensor, -1)

    @cached_property
    def _makers(self) -> dict[str, int]:
        return {o: n for n, op in enumerate(self.system.logical.ops) for o in op.outputs}


def compare_at(small: Small, plan: Plan, wanted: Sequence[Obligation], point: PointName) -> tuple[list[Suspect], int]:
    """Both programs on one random point: what is not clearly equal, in the order of the logical program."""
    return compare(small, plan.lineage, wanted, [point])[0]
