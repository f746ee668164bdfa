"""Whether a difference at reduced sizes is there at all of several, however literals that may count are read.

Then it is the plan's own: no size and no literal that was left as it is can have made it. Behind every REFUTED that was not seen at
full size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from trainverify.axes.reduction import NotABoundary
from trainverify.axes.system import System
from trainverify.evaluate import branches
from trainverify.evaluate.compare import compare, failing_at, needed_for
from trainverify.evaluate.counting import WHOLE
from trainverify.evaluate.moved import Change, Moved, PointName, seed_of
from trainverify.evaluate.readings import Place, Reading, Readings
from trainverify.evaluate.run import NotComputed, made, random_inputs
from trainverify.evaluate.sample import Sample
from trainverify.evaluate.small import Small, TooMuch, shrink_system
from trainverify.graph.lineage import Layout
from trainverify.graph.obligations import Obligation
from trainverify.graph.program import Program

SIZES: Final = (
    (3, False),
    (WHOLE, False),
    (WHOLE, True),
)  # base, and whether operators' own counts shrink: then literals are read in all ways
SMALLER: Final = ((3, True), (2, True))  # tried if those are too large
AT_ONCE: Final = 20_000_000  # elements of readings that are evaluated together
TRIED: Final = 3  # sorts of obligations, by the literals that go into them
OTHERS: Final = 4  # random points: in a small one no label may be ignored
MAGNITUDES: Final = (1.5, 2.0, 3.0, 4.0, 8.0, 16.0, 64.0, 1 / 2, 1 / 8)


class OtherSizes:
    """Both programs at several sizes. `most`: elements up to which a size is looked at."""

    def __init__(self, system: System, lineage: Sequence[Layout], kept: Sample, seed: int, most: int, progress: Callable[[str], None]):
        self.system, self.lineage, self.kept, self.seed, self.most = system, tuple(lineage), kept, seed, most
        self.progress = progress
        self._known: dict[tuple[Obligation, PointName], bool] = {}

    def differs(self, o: Obligation, point: PointName) -> bool:
        """Whether one obligation fails at all sizes and in all readings."""
        if (o, point) not in self._known:
            self.everywhere([o], point)
        return self._known[o, point]

    def everywhere(self, several: Iterable[Obligation], point: PointName) -> set[Obligation]:
        """Obligations that fail at all sizes and in all readings: of those with the fewest readings, else of others."""
        asked = list(dict.fromkeys(several))
        self.progress("evaluating at other sizes")
        first = self._small(*SIZES[0])
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
        """Those that fail at every size that can be evaluated; none if all readings could be tried at no size."""
        left, read = set(some), False
        for base, own in (*SIZES, *SMALLER):
            if not left or (read and (base, own) in SMALLER):
                break
            found = self._at(base, own, [o for o in some if o in left], point)
            if found is not None:
                left, read = found, read or own
        return left if read else set()

    def _small(self, base: int, own: bool) -> Readings | None:
        try:
            return Readings(self.system, shrink_system(self.system, base=base, kept=self.kept, most=self.most, own_counts=own))
        except (NotABoundary, TooMuch):
            return None

    def _at(self, base: int, own: bool, several: list[Obligation], point: PointName) -> set[Obligation] | None:
        """Those that fail at one size; None where it cannot be evaluated, or not in all readings."""
        readings = self._small(base, own)
        if readings is None:
            return None
        needed = needed_for(readings.small, several)
        as_it_is: list[Reading] = [{}]  # operators' counts stay only where literals do
        every = readings.every(frozenset().union(*(readings.of(o) for o in several)), made(needed)) if own else as_it_is
        if every is None:
            return None
        left = set(several)
        beyond: list[PointName] | None = None
        for reading, wrong in zip(every, self._in_each(readings, needed, every, several, point), strict=True):
            if not left <= wrong:
                if beyond is None:
                    beyond = list(self._beyond(readings.small))
                wrong |= _failing(readings.read(needed, reading), self.lineage, [o for o in several if o in left - wrong], beyond)
            left &= wrong
            if not left:
                break
        return left

    def _in_each(
        self, readings: Readings, small: Small, every: Sequence[Reading], several: list[Obligation], point: PointName
    ) -> Iterator[set[Obligation]]:
        """Those that fail in every reading at one of some points; many readings are evaluated in one go."""
        given = readings.given(small, every[0]) if len(every) > 1 else None
        if given is None:
            for reading in every:
                points = _points(self.system.logical, point)
                yield _failing(readings.read(small, reading), self.lineage, several, points)
            return
        found: list[set[Obligation]] = [set() for _ in every]
        count = max(1, AT_ONCE // max(made(small), 1))
        for each in _points(self.system.logical, point):
            inputs = random_inputs(small, each)
            todo = [n for n, wrong in enumerate(found) if len(wrong) < len(several)]
            for some in [todo[n : n + count] for n in range(0, len(todo), count)]:
                several_inputs = [{**inputs, **readings.scalars(every[n])} for n in some]
                for n, wrong in zip(some, failing_at(given, self.lineage, several, several_inputs), strict=True):
                    found[n] |= wrong
            if set.intersection(*found):  # one that fails in all of them is enough
                break
        yield from found

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


def _failing(small: Small, lineage: tuple[Layout, ...], several: list[Obligation], points: Iterable[PointName]) -> set[Obligation]:
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
