"""Whether a difference at reduced sizes is there at all of several, however literals that may count are read.

Then it is the plan's own: no size and no literal that was left as it is can have made it. Behind every REFUTED that was not seen at
full size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from trainverify.axes.reduction import NotABoundary
from trainverify.axes.system import System
from trainverify.evaluate import branches
from trainverify.evaluate.compare import DIFFERENT, compare, needed_for
from trainverify.evaluate.counting import WHOLE
from trainverify.evaluate.moved import Change, Moved, PointName, seed_of
from trainverify.evaluate.readings import Place, Reading, Readings
from trainverify.evaluate.run import NotComputed, made, random_inputs
from trainverify.evaluate.sample import Sample
from trainverify.evaluate.small import Small, TooMuch, shrink_system
from trainverify.evaluate.varied import Varied
from trainverify.graph.lineage import Layout
from trainverify.graph.obligations import Obligation
from trainverify.graph.program import Program

BASES: Final = (3, WHOLE)  # sizes at which all literals and operators' own counts stay
READ: Final = (WHOLE, 3, 2)  # at which operators' own counts shrink and literals are read in all ways: the first that is small enough
MOST: Final = 80  # readings of one evaluation that are always tried
QUICK: Final = 1_000_000_000  # elements of all readings together, up to which more of them are tried
TOLD: Final = 300_000_000  # the same for what is proved
TRIED: Final = 3  # sorts of obligations, by the literals that go into them
OTHERS: Final = 4  # random points: in a small one no label may be ignored
MAGNITUDES: Final = (1.5, 2.0, 3.0, 4.0, 8.0, 16.0, 64.0, 1 / 2, 1 / 8)


@dataclass(frozen=True)
class _Tries:
    """Both programs at one size, what some obligations need of them, and all readings of the literals in it."""

    readings: Readings
    needed: Small
    every: Sequence[Reading]
    varied: Varied | None  # several readings in one go


class OtherSizes:
    """Both programs at several sizes. `most`: elements up to which a size is looked at; `proved`: obligations that hold at full size."""

    def __init__(
        self,
        system: System,
        lineage: Sequence[Layout],
        kept: Sample,
        seed: int,
        most: int,
        progress: Callable[[str], None],
        proved: Collection[Obligation] = (),
    ):
        self.system, self.lineage, self.kept, self.seed, self.most = system, tuple(lineage), kept, seed, most
        self.progress, self.proved = progress, frozenset(proved)
        self._known: dict[tuple[Obligation, PointName], bool] = {}
        self._sizes: dict[tuple[int, bool], Readings | None] = {}

    def differs(self, o: Obligation, point: PointName) -> bool:
        """Whether one obligation fails at all sizes and in all readings."""
        if (o, point) not in self._known:
            self.everywhere([o], point)
        return self._known[o, point]

    def everywhere(self, several: Iterable[Obligation], point: PointName) -> set[Obligation]:
        """Obligations that fail at all sizes and in all readings: of those with the fewest readings, else of others."""
        asked = list(dict.fromkeys(several))
        self.progress("evaluating at other sizes")
        first = next((small for base in READ if (small := self._small(base, True)) is not None), None)
        alike: dict[frozenset[Place], list[Obligation]] = {}
        for o in asked:
            alike.setdefault(frozenset() if first is None else first.of(o), []).append(o)
        found: set[Obligation] = set()
        for some in [alike[places] for places in sorted(alike, key=len)[:TRIED]]:
            found = self._several(some, point)
            if found:
                break
        self._known.update({(o, point): o in found for o in asked})
        return found

    def _several(self, some: Sequence[Obligation], point: PointName) -> set[Obligation]:
        """Those that fail at every size that can be evaluated; of too many only the first. None if all readings fit at no size."""
        tries = next((found for base in READ if (found := self._tries(base, True, some, point)) is not None), None)
        if tries is None:
            return self._several([min(some, key=self._made_at)], point) if len(some) > 1 else set()
        left = set(some)
        for one in (*(self._tries(base, False, some, point) for base in BASES), tries):
            if left and one is not None:
                left &= self._failing_in(one, [o for o in some if o in left], point)
        return left

    def _small(self, base: int, own: bool) -> Readings | None:
        if (base, own) not in self._sizes:
            try:
                small = shrink_system(self.system, base=base, kept=self.kept, most=self.most, own_counts=own)
                self._sizes[base, own] = Readings(self.system, small)
            except (NotABoundary, TooMuch):
                self._sizes[base, own] = None
        return self._sizes[base, own]

    def _tries(self, base: int, own: bool, several: Sequence[Obligation], point: PointName) -> _Tries | None:
        """What has to be evaluated at one size; None where that cannot be, or is too much."""
        readings = self._small(base, own)
        every = None if readings is None else self._readings(readings, several, point) if own else [{}]
        if readings is None or not every:
            return None
        needed = needed_for(readings.small, several)
        varied = self._varied(readings, several, every[0]) if len(every) > 1 else None
        size = made(needed) if varied is None else varied.size
        return None if len(every) > max(MOST, QUICK // max(size, 1)) else _Tries(readings, needed, every, varied)

    def _failing_in(self, tries: _Tries, several: Sequence[Obligation], point: PointName) -> set[Obligation]:
        """Those that fail in every reading, at one of some points."""
        readings, needed = tries.readings, tries.needed
        if tries.varied is None:
            points = list(_points(self.system.logical, point))
            each: Iterable[set[Obligation]] = (_failing(readings.read(needed, r), self.lineage, several, points) for r in tries.every)
        else:
            each = self._in_each(readings, tries.varied, tries.every, several, point)
        left = set(several)
        beyond: list[PointName] | None = None
        for reading, wrong in zip(tries.every, each, strict=True):
            if not left <= wrong:
                if beyond is None:
                    beyond = list(self._beyond(readings.small))
                wrong |= _failing(readings.read(needed, reading), self.lineage, [o for o in several if o in left - wrong], beyond)
            left &= wrong
            if not left:
                break
        return left

    def _varied(self, readings: Readings, several: Sequence[Obligation], places: Collection[Place]) -> Varied | None:
        """The evaluation of some obligations with literals as scalars, if they can be."""
        given = readings.given(needed_for(readings.small, several), places)
        return None if given is None else Varied(given, self.lineage, several, [readings.names[p] for p in places])

    def _in_each(
        self, readings: Readings, varied: Varied, every: Sequence[Reading], several: Sequence[Obligation], point: PointName
    ) -> list[set[Obligation]]:
        """Those that fail in every reading at one of some points."""
        found: list[set[Obligation]] = [set() for _ in every]
        for each in _points(self.system.logical, point):
            todo = [n for n, wrong in enumerate(found) if len(wrong) < len(several)]
            values = [readings.scalars(every[n]) for n in todo]
            for n, gaps in zip(todo, varied.at(random_inputs(readings.small, each), values), strict=True):
                found[n] |= (gaps or {}).keys() & set(several)
            if set.intersection(*found):  # one that fails in all of them is enough
                break
        return found

    def _readings(self, readings: Readings, several: Sequence[Obligation], point: PointName) -> list[Reading] | None:
        """Readings in which nothing differs that is proved at full size: the one that is meant is among them. Proofs of what is asked
        about are not relied on."""
        places = frozenset().union(*(readings.of(o) for o in several))
        every = readings.every(places)
        if every is None or len(every) == 1 or not self.proved.isdisjoint(several):
            return every
        groups: dict[frozenset[Place], list[Obligation]] = {}
        for o in sorted(self.proved, key=self._made_at):
            groups.setdefault(readings.of(o), []).append(o)
        for theirs in sorted((g for g in groups if g & places), key=len)[:TRIED]:
            common = sorted(places & theirs)
            right = self._right(readings, theirs, groups[theirs][:TRIED], point)
            if right is not None:
                kept = {tuple(r[p] for p in common) for r in right}
                every = [r for r in every if tuple(r[p] for p in common) in kept]
            if len(every) < 2:
                break
        return every

    def _right(self, readings: Readings, places: frozenset[Place], several: Sequence[Obligation], point: PointName) -> list[Reading] | None:
        """Readings in which one of some obligations does not clearly differ: of one that is clearly equal in some reading, since what is
        always 0 is noise in all of them. None if that would take too long."""
        every = readings.every(places)
        if every is None:
            return None
        for o in several:
            varied = self._varied(readings, [o], places)
            if varied is None or len(every) * varied.size > TOLD:
                return None
            gaps = list(varied.at(random_inputs(readings.small, point), [readings.scalars(r) for r in every]))
            if any(found is not None and o not in found for found in gaps):
                return [r for r, found in zip(every, gaps, strict=True) if not DIFFERENT < (found or {}).get(o, 0.0) < math.inf]
        return []

    def _made_at(self, o: Obligation) -> int:
        return self._order.get(o.output.tensor, -1)

    @cached_property
    def _order(self) -> dict[str, int]:
        return {o: n for n, op in enumerate(self.system.logical.ops) for o in op.outputs}

    def _beyond(self, small: Small) -> Iterator[PointName]:
        """Points on the other sides of conditions that fall one way at a random point."""
        watch = branches.watch(small)
        if watch is None:
            return
        try:
            compare(small, self.lineage, [], [self.seed], watch)
            for logical in (True, False):
                for point in branches.search(small, self.lineage, watch, self.seed, logical):
                    if not branches.tied(small, self.lineage, watch, point):
                        yield point
        except NotComputed:
            return


def _failing(small: Small, lineage: tuple[Layout, ...], several: Sequence[Obligation], points: Iterable[PointName]) -> set[Obligation]:
    """Of some obligations those that fail at one of the points."""
    found: set[Obligation] = set()
    for point in points:
        left = [o for o in several if o not in found]
        if not left:
            break
        try:
            found |= {s.obligation for s in compare(small, lineage, left, [point])[0][0]}
        except NotComputed:
            continue
    return found


def _points(logical: Program, point: PointName) -> Iterator[PointName]:
    """A point; the same with larger and smaller numbers: at other sizes a condition falls otherwise there; and with other labels."""
    yield point
    known = dict(point.changes) if isinstance(point, Moved) else {}
    for factor in MAGNITUDES:
        changes = {n: known.get(n, Change()) for n in logical.sources}
        moved = tuple((n, replace(c, factor=c.factor * factor)) for n, c in changes.items())
        yield Moved(seed_of(point), f"all × {factor:g}", moved)
    yield from range(seed_of(point) + 1, seed_of(point) + 1 + OTHERS)
