"""What both programs compute at their own sizes, on classes of positions and ranks: for plans too large to be run as they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
from flint import arb

from trainverify.axes.cells import NoCells
from trainverify.axes.system import System
from trainverify.domains.ball import Ball, precision
from trainverify.domains.numeric import EXTENDED
from trainverify.evaluate.classed import EXACT, Classed, ClassedDomain, NoValue, Real
from trainverify.evaluate.classes import ELEMENTS, STEPS, Classes, Compared, Run, compared, digits_of, inputs_of
from trainverify.evaluate.compare import EQUAL, MOVED, MOVES, Decision, Difference
from trainverify.evaluate.moved import Moved, PointName
from trainverify.graph.lineage import Layout
from trainverify.graph.obligations import Obligation
from trainverify.primitives.scalars import Undecided

MAGNITUDES: Final = (0.5, 0.05, 0.005, 0.0005)
LARGE: Final = (4.0, 32.0)  # tried too where nothing differs: a condition may fall the other way there
NOISE: Final = 1e-10  # relative, between float64 and more digits
BITS: Final = (128, 256, 512)
EVERYWHERE: Final = 5_000_000  # up to which other magnitudes are tried
COUNTED: Final = 1_500_000_000  # elements that ops make on their way to one obligation, where positions are told apart
LARGEST: Final = 40_000_000  # of any of these
ENCLOSED: Final = 300_000  # elements on cells up to which enclosures decide
TRIED: Final = 8  # of what differs, decided one after the other


@dataclass(frozen=True)
class Point:
    seed: int
    magnitude: float
    digits: int
    moved: Moved | None = None


@dataclass(frozen=True)
class Seen:
    """What classes say of every obligation."""

    differs: tuple[Compared, ...]  # of every such obligation the first rank that is clearly off
    agrees: frozenset[Obligation]  # on every rank that was compared, all of which have some value
    point: Point
    known: bool = True  # whether anything has a value

    def says(self, o: Obligation) -> Literal["differs", "agrees", "no value"]:
        if any(c.obligation == o for c in self.differs):
            return "differs"
        return "agrees" if o in self.agrees else "no value"


class ByClasses:
    """Both programs on classes, at one random point. Raises NoCells where there are none."""

    def __init__(self, system: System, lineage: Sequence[Layout], wanted: Sequence[Obligation], seed: int):
        self.classes = self._classes(system)
        self.lineage = lineage
        self.wanted = wanted
        self.seed = seed
        self.size = self._checked()
        self._known: dict[tuple[tuple[Obligation, ...], bool, PointName], Seen] = {}

    def _classes(self, system: System) -> Classes:
        return Classes(system)

    def _checked(self) -> int:
        """The elements of everything, if these are not too many."""
        size = self.classes.elements()
        steps = len(self.classes.logical_tasks) + len(self.classes.plan_tasks)
        if size > ELEMENTS or steps > STEPS:
            raise NoCells(f"{size:,} elements on classes, in {steps:,} ops")
        return size

    @cached_property
    def point(self) -> Point:
        """Inputs at which most outputs of the logical program have a value, and float64 keeps its digits."""
        names = [o.output.tensor for o in self.wanted]

        def run(point: Point, domain: ClassedDomain) -> Mapping[str, Classed]:
            return Run(self.classes, inputs_of(self.classes, point.seed, point.magnitude, point.digits), domain).logical(names)

        best, most = Point(self.seed, MAGNITUDES[0], 0), 0
        for magnitude in MAGNITUDES:
            for digits in range(digits_of(self.classes) + 1):
                point = Point(self.seed, magnitude, digits)
                found = run(point, ClassedDomain())
                known = sum(_some(found.get(n)) for n in names)
                if known > most:
                    best, most = point, known
                if known == len(names):
                    break
            if most == len(names):
                break
        if not most:
            raise NoCells("no output of the logical program has a value on classes")
        quietest = -1
        for magnitude in [m for m in MAGNITUDES if m <= best.magnitude]:
            point = replace(best, magnitude=magnitude)
            found, exact = run(point, ClassedDomain()), run(point, ClassedDomain(EXTENDED))
            quiet = sum(_some(found.get(n)) and _quiet(found.get(n), exact.get(n)) for n in names)
            if quiet > quietest:
                best, quietest = point, quiet
            if quiet >= most:
                break
        return best

    def seen(self, wanted: Sequence[Obligation], everywhere: bool = False, name: PointName = 0) -> Seen:
        """What is said of some obligations; `everywhere`: if nothing differs, also at other magnitudes, and as `name` moves inputs."""
        key = (tuple(wanted), everywhere, name if isinstance(name, Moved) else 0)
        if key not in self._known:
            self._known[key] = self._everywhere(wanted, name) if everywhere else self._seen(wanted, self.point)
        return self._known[key]

    def _everywhere(self, wanted: Sequence[Obligation], name: PointName) -> Seen:
        found = self._seen(wanted, self.point)
        if found.differs or not found.known:
            return found
        if isinstance(name, Moved):
            found = self._seen(wanted, replace(self.point, moved=name))
        for magnitude in (*LARGE, *MAGNITUDES) if not found.differs and self.size <= EVERYWHERE else ():
            if magnitude != self.point.magnitude:
                other = self._seen(wanted, replace(self.point, magnitude=magnitude))
                if other.differs:
                    return other
        return found

    def _seen(self, wanted: Sequence[Obligation], point: Point) -> Seen:
        by: dict[Obligation, list[Compared]] = {}
        for c in self._compared(ClassedDomain(), ClassedDomain(), wanted, point):
            by.setdefault(c.obligation, []).append(c)
        differs = tuple(next(c for c in cs if c.gap > EQUAL) for cs in by.values() if any(c.gap > EQUAL for c in cs))
        agrees = frozenset(o for o, cs in by.items() if all(c.known and c.gap <= EQUAL for c in cs))
        return Seen(differs, agrees, point, any(c.known for cs in by.values() for c in cs))

    def _compared(
        self, logical: ClassedDomain, plan: ClassedDomain, wanted: Sequence[Obligation], point: Point, place: int | None = None
    ) -> Iterator[Compared]:
        inputs = inputs_of(self.classes, point.seed, point.magnitude, point.digits, point.moved)
        names, local = self._outputs(wanted)
        made = Run(self.classes, inputs, logical).logical(names)
        held = Run(self.classes, inputs, plan).plan(self.lineage, local)
        yield from compared(self.classes, made, held, wanted, place)

    def _outputs(self, wanted: Sequence[Obligation]) -> tuple[list[str], list[tuple[int, str]]]:
        """What is compared: names in the logical program, and classes of ranks with names in the plan."""
        where = {r: c for c, mine in enumerate(self.classes.wires._classes) for r in mine}
        local = dict.fromkeys((where[r], h.layout.local) for o in wanted for h in o.holdings for r in h.ranks if r in where)
        return [o.output.tensor for o in wanted], list(local)

    def decide(self, seen: Seen) -> tuple[Decision, Difference | None]:
        """The first of what differs that certainly does."""
        last: Decision = "equal"
        for c in sorted(seen.differs, key=lambda c: c.gap < 1e-3)[:TRIED]:
            decision, difference = self._decide(c, seen.point)
            if difference is not None:
                return decision, difference
            last = decision if last == "equal" else last
        return last, None

    def _decide(self, suspect: Compared, point: Point) -> tuple[Decision, Difference | None]:
        if self.size > ENCLOSED:
            exact = self._again(suspect, point, ClassedDomain(EXTENDED), ClassedDomain(EXTENDED))
            stable = exact.gap == suspect.gap == math.inf or abs(_gap(exact) - _gap(suspect)) <= abs(_gap(suspect)) / 1000
            if exact.known and stable and exact.gap > EQUAL:  # a unit of a literal, or noise, would be far less
                return "different", _difference(suspect, exact, point)
            return ("equal", None) if exact.gap * 64 < suspect.gap else ("undecided", None)
        for bits in BITS:
            with precision(bits):
                try:
                    exact = self._enclosed(suspect, point, Ball(), Ball())
                    if not exact.known:  # a comparison that this precision does not decide, or no value at all
                        continue
                    if not _apart(exact):
                        if _tiny(exact):
                            return "equal", None
                        continue
                    wide = self._enclosed(suspect, point, Ball(widen_literals=True), Ball(widen_literals=True))
                    if (wide.known and _apart(wide)) or self._stays(suspect, point, exact):
                        return "different", _difference(suspect, exact, point)
                    return "literal rounding", None
                except (Undecided, NoValue):
                    continue
        return "undecided", None

    def _again(self, suspect: Compared, point: Point, logical: ClassedDomain, plan: ClassedDomain) -> Compared:
        """One element of one rank, in other arithmetic; only what it is made of is computed."""
        holdings = tuple(replace(h, ranks=(suspect.rank,)) for h in suspect.obligation.holdings if h.layout == suspect.layout)[:1]
        one = replace(suspect.obligation, holdings=holdings)
        (found,) = self._compared(logical, plan, [one], point, suspect.place)
        return found

    def _enclosed(self, suspect: Compared, point: Point, logical: Ball, plan: Ball) -> Compared:
        return self._again(suspect, point, ClassedDomain(logical), ClassedDomain(plan))

    def _stays(self, suspect: Compared, point: Point, exact: Compared) -> bool:
        """Whether the difference hardly changes when float literals move by a unit in the last place (see `compare`)."""
        gap = _gap(exact)
        for one, other in MOVES:
            moved = self._enclosed(suspect, point, Ball(move=one), Ball(move=other))
            if not moved.known or not _apart(moved) or not abs(_gap(moved) - gap) <= abs(gap) / MOVED:
                return False
        return True


class ByPositions(ByClasses):
    """One obligation where every position that the programs count is a cell of its own, and as many others as fit are one."""

    def __init__(self, system: System, lineage: Sequence[Layout], wanted: Sequence[Obligation], seed: int, single: int):
        """`single` positions of each other axis are cells of their own too: ids need some."""
        self.single = single
        super().__init__(system, lineage, wanted, seed)

    def _classes(self, system: System) -> Classes:
        return Classes(system, self.single, positions=True)

    def _checked(self) -> int:
        made = self.classes.elements_for(*self._outputs(self.wanted))
        if sum(made) > COUNTED or max(made, default=0) > LARGEST:
            raise NoCells(f"{sum(made):,} elements where positions are told apart")
        return sum(made)

    @cached_property
    def point(self) -> Point:
        return Point(self.seed, MAGNITUDES[0], 0)


def _difference(suspect: Compared, exact: Compared, point: Point) -> Difference:
    got, want = (v.str(12, radius=False) if isinstance(v, arb) else f"{float(v):.12g}" for v in (exact.got, exact.want))  # type: ignore[arg-type]
    return Difference(suspect.obligation, suspect.layout, suspect.rank, exact.index, got, want, point.seed, _gap(exact))


def _some(x: Classed | None) -> bool:
    if x is None:
        return False
    return bool(np.any(x.exact)) if not isinstance(x, Real) else x.kind is None or bool((x.kind == EXACT).any())


def _quiet(x: Classed | None, exact: Classed | None) -> bool:
    """Whether what is known of a tensor is finite, and float64 computes it well enough."""
    if not isinstance(x, Real) or not isinstance(exact, Real):
        return x is not None
    known = np.ones(x.shape, dtype=bool) if x.kind is None else x.kind == EXACT
    a, b = x.value[known], exact.value[known]
    if not np.isfinite(a).all():
        return False
    return bool(np.abs(a - b).max(initial=0) <= NOISE * np.abs(a).max(initial=0))


def _apart(c: Compared) -> bool:
    got: Any = c.got
    want: Any = c.want
    if isinstance(got, arb) and isinstance(want, arb):
        if want.is_finite() and not got.is_finite():
            return bool(got.is_nan()) or not got.overlaps(want)
        return not got.overlaps(want)
    return bool(got != want)


def _tiny(c: Compared) -> bool:
    got: Any = c.got
    want: Any = c.want
    return not isinstance(got, arb) or bool((got - want).abs_upper() < arb(10) ** -20 * (1 + abs(want).abs_upper()))


def _gap(c: Compared) -> float:
    got: Any = c.got
    want: Any = c.want
    return float((got - want).mid()) if isinstance(got, arb) else float(got) - float(want)
