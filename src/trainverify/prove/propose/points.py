"""Both programs on random points: their values, which proposals pair, and what is seen to differ there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import EXTENDED, NUMERIC, Numeric
from trainverify.evaluate.compare import Suspect, held, suspects
from trainverify.evaluate.run import NotComputed, PlanValues, random_inputs, random_points, run_logical, run_logicals, run_plan, run_plans
from trainverify.evaluate.small import Small
from trainverify.graph.lineage import Layout
from trainverify.graph.obligations import Obligation
from trainverify.primitives.node import Node, topological
from trainverify.prove.propose.table import FAINT
from trainverify.prove.staged.graphs import LOGICAL, Place

QUIET: Final = 6  # points with small inputs, where float64 is exact enough to tell elements apart
MOST: Final = 32  # more of them where token ids happen to be equal on all, or what is chosen now and then never was
LOUD: Final = 2  # points with large ones
LOUDER: Final = 8  # points that are tried while a bound is never reached
POINTS_AT_ONCE: Final = 3  # points that are run together; so many are enough to say where a plan is wrong
QUIETLY: Final = ((0.3, 0.1), (0.1,))  # sizes of inputs at even and odd points
VARIED: Final = ((3.0, 1.0, 0.3), (1.0, 0.3))  # where tokens have to choose otherwise than those before them: there is room for some only
LOUDLY: Final = ((1.0,), (3.0, 1.0))
PATIENCE: Final = 4  # points in a row on which nothing was chosen for the first time, after which no more is expected
BY_CHANCE: Final = 12  # where it depends on integers that have to be equal
LENIENT: Final = 1e-6  # for elements that are made alike, and for what is off
CLEAR: Final = 1e-3  # off by so much is no rounding
MAYBE: Final = 1e-7  # of the largest number of the logical program: less may be the rounding of something that is 0
FADES: Final = 0.01  # what is left of rounding with more digits, at most


@dataclass(frozen=True, eq=False)
class PointRun:
    """Both programs on one point."""

    logical: dict[str, Array]
    plan: PlanValues

    def of(self, place: Place) -> Array | None:
        c, row, name = place
        return self.logical.get(name) if c == LOGICAL else self.plan.get(c, row, name)

    @cached_property
    def largest(self) -> float:
        """Number of the logical program."""
        real = [v for v in self.logical.values() if v.dtype.kind == "f"]
        return max((float(np.abs(v).max(initial=0.0)) for v in real), default=0.0)


class Everything(Numeric):
    """As if everything were chosen, by and by: whether a position is among the best is a number between 0 and 1 that depends on both.

    With hundreds of experts most pairs of token and expert are never met on a few points. What is made alike from the same numbers has the
    same value here too, whatever was chosen; these are no inputs on which programs could differ."""

    def _node(self, node: Node, args: list[Array], inputs: Sequence[Array], lead: tuple[int, ...]) -> Array:
        if node.prim == "one_hot" and _sorted(node.args[0]):
            places = node.attrs[0] + np.arange(node.shape[-1])
            return _between(0.1, 1.0, 12.9898 * args[0][..., None] + 78.233 * places + 1.0)
        return super()._node(node, args, inputs, lead)


class Blurred(Everything):
    """And whether a real number is less than another, or equal to it, is a number that depends on their difference: 1 or more where it is
    so, less than 1 where it is not."""

    def map(self, fn: str, args: Sequence[Array], param: Any) -> Array:
        if fn in ("lt", "eq") and args[0].dtype.kind == "f":
            exact = super().map(fn, args, param)
            gap = args[0] - args[1]
            return np.where(np.isfinite(gap), exact + _between(0.1, 0.9, 12.9898 * gap + 1.0), exact)
        if fn in ("and", "or", "not"):
            args = [a >= 1 if a.dtype.kind == "f" else a for a in args]
        return super().map(fn, args, param)

    def select(self, c: Array, a: Array, b: Array) -> Array:
        if c.dtype.kind != "f":
            return super().select(c, a, b)
        if a.dtype.kind != "f":
            return super().select(c >= 1, a, b)
        return np.where(np.isfinite(a) & np.isfinite(b), c * a + (1 - c) * b, np.where(c >= 1, a, b))


def _between(low: float, high: float, x: Array) -> Array:
    """Some number between these, another one for every x."""
    return low + (high - low) * np.modf(np.abs(np.sin(x)) * 437.5853)[0]


EVERYTHING: Final = Everything()
BLURRED: Final = Blurred()


def _sorted(node: Node) -> bool:
    """Whether integers are positions in a sorted row."""
    while node.prim in ("slice", "reshape", "transpose", "broadcast"):
        node = node.args[0]
    return node.prim == "rowwise" and node.attrs[0] == "argsort"


def runs(
    small: Small, lineage: tuple[Layout, ...], points: Sequence[int], sizes: Sequence[Sequence[float]], domain: Numeric = NUMERIC
) -> list[PointRun]:
    """Both programs on random inputs, at each point of the first size that the logical program stands. Large ones reach what small ones do
    not, such as the clipping of gradients; but norms make large numbers of small ones, and what saturates drowns in rounding."""
    random_points(small, points, ())
    left = [list(sizes[p % 2]) for p in points]
    inputs = [_scaled(small, p, s.pop(0)) for p, s in zip(points, left, strict=True)]
    with np.errstate(all="ignore"):
        logical = run_logicals(small, inputs, domain)
        for n, point in enumerate(points):
            while left[n] and not defined(small, logical[n]):
                inputs[n] = _scaled(small, point, left[n].pop(0))
                logical[n] = run_logical(small, inputs[n], domain)
        return [PointRun(*both) for both in zip(logical, run_plans(small, lineage, inputs, domain), strict=True)]


def moving(small: Small, lineage: tuple[Layout, ...], known: Sequence[PointRun], points: Sequence[int]) -> list[PointRun]:
    """Of these points with large inputs those on which a smaller or larger number is another than on all so far, such as the factor that
    gradients are clipped by: while nothing is clipped, what is clipped looks like what is not."""
    first = known[0].logical
    chosen = [o for s in small.logical_steps if _bounded(s.nodes) for o in s.outputs if first[o].size == 1]
    still = {o: first[o] for o in chosen if all(run.logical[o] == first[o] for run in known)}
    made: list[PointRun] = []
    for point in points:
        if not still:
            break
        for size in LOUDLY[1]:
            inputs = _scaled(small, point, size)
            with np.errstate(all="ignore"):
                logical = run_logical(small, inputs, NUMERIC)
            if defined(small, logical):
                break
        else:
            continue
        moved = {o for o, v in still.items() if logical[o] != v}
        if moved:
            made.append(PointRun(logical, run_plan(small, lineage, inputs, NUMERIC)))
            still = {o: v for o, v in still.items() if o not in moved}
    return made


def _bounded(nodes: Sequence[Node]) -> bool:
    """Whether an op takes the smaller or the larger of two numbers."""
    return any(n.prim == "map" and n.attrs[0] in ("min", "max") for n in topological(nodes))


def defined(small: Small, logical: Mapping[str, Array]) -> bool:
    """Whether the logical program is defined on a point: a sequence with ignored labels only has no mean."""
    made = [logical[o.tensor] for o in small.logical.outputs]
    return all(v.dtype.kind != "f" or bool(np.isfinite(v).all()) for v in made)


def _scaled(small: Small, point: int, size: float) -> dict[str, Array]:
    real = {n for n in small.logical.sources if small.logical.tensors[n].kind == "real" and n not in small.domains}
    return {n: v * size if n in real else v for n, v in random_inputs(small, point).items()}


class Digits:
    """Points once more with more digits, where a difference may be the rounding of what is 0 in both programs."""

    def __init__(self, small: Small, lineage: tuple[Layout, ...]):
        self._small = small
        self._lineage = lineage
        self._made: dict[PointRun, PointRun] = {}

    def fade(self, at: PointRun, gap: Callable[[PointRun], float]) -> bool:
        """Whether a gap is small beside other numbers, and much smaller with more digits: a mistake stays as it is."""
        here = gap(at)
        if not here <= MAYBE * at.largest:
            return False
        if at not in self._made:
            inputs = {n: at.logical[n] for n in self._small.logical.sources}
            with np.errstate(all="ignore"):
                more = run_logical(self._small, inputs, EXTENDED), run_plan(self._small, self._lineage, inputs, EXTENDED)
            self._made[at] = PointRun(*more)
        return gap(self._made[at]) <= FADES * here


def clearly_different(small: Small, wanted: Collection[Obligation], lineage: tuple[Layout, ...]) -> set[Obligation]:
    """Obligations that are off by much on one of a few points: a rank that chooses otherwise may do so on some only."""
    found: set[Obligation] = set()
    digits = Digits(small, lineage)
    for point in range(POINTS_AT_ONCE):
        (at,) = runs(small, lineage, [point], QUIETLY)
        off = [x for x in suspects(small, [o for o in wanted if o not in found], at.logical, at.plan)[0] if x.distance > CLEAR]
        found.update(x.obligation for x in off if not _rounding(small, x, at, digits))
        if len(found) == len(wanted):
            break
    return found


def different(small: Small, wanted: Sequence[Obligation], runs: Sequence[PointRun], digits: Digits | None = None) -> set[Obligation]:
    """Obligations that are off on all of these that say something: on some, what should be 0 is rounding in both programs."""
    left: set[tuple[Obligation, int]] = set()
    seen: set[tuple[Obligation, int]] = set()
    for n, at in enumerate(runs):
        try:
            apart = [((x.obligation, x.rank), x) for x in suspects(small, wanted, at.logical, at.plan)[0] if x.distance > LENIENT]
        except NotComputed:
            if n == 0:
                raise
            continue
        left = left & {key for key, _ in apart} if n else {key for key, _ in apart}
        seen |= {key for key, x in apart if key in left - seen and not _rounding(small, x, at, digits)}
        if not left:
            break
    return {obligation for obligation, _ in left & seen}


def with_everything(small: Small, wanted: Sequence[Obligation], lineage: tuple[Layout, ...], points: Sequence[int]) -> list[PointRun]:
    """Both programs as if everything were chosen; nothing if none chooses, or if it tells them apart: one may rest on what a choice is."""
    domain = _chosen(small)
    if domain is None:
        return []
    try:
        made = runs(small, lineage, points, QUIETLY, domain)
        fine = all(defined(small, at.logical) and not different(small, wanted, [at]) for at in made)
    except NotComputed:
        return []
    return made if fine else []


def _chosen(small: Small) -> Numeric | None:
    """As if everything were chosen that the logical program chooses: by the order of a row, or else of two numbers."""
    if chooses_by_order(small):
        return EVERYTHING
    compared = [n for n in _nodes(small) if n.prim == "map" and n.attrs[0] in ("lt", "eq")]
    return BLURRED if any(n.args[0].kind == "real" for n in compared) else None


def ordinary_sizes(small: Small) -> Sequence[Sequence[float]]:
    """Sizes of inputs at even and odd points. On small ones all tokens choose alike, and those that are counted last never have a place."""
    counts = any(n.prim == "rowwise" and n.attrs[0] == "cumsum" for n in _nodes(small))
    return VARIED if counts and chooses_by_order(small) else QUIETLY


def chooses_by_order(small: Small) -> bool:
    return any(n.prim == "one_hot" and _sorted(n.args[0]) for n in _nodes(small))


def _nodes(small: Small) -> list[Node]:
    """All that the logical program is made of."""
    return [n for made in dict.fromkeys(s.nodes for s in small.logical_steps) for n in topological(made)]


def patience(small: Small) -> int:
    """How many points in vain are enough: tokens of a packed row see each other where two of its numbers are equal."""
    compared = [n for n in _nodes(small) if n.prim == "map" and n.attrs[0] == "eq" and n.args[0].kind == "int"]
    return BY_CHANCE if any(all(_given(a) for a in n.args) for n in compared) else PATIENCE


def _given(node: Node) -> bool:
    return any(n.prim == "input" for n in topological((node,)))


class Asleep:
    """Elements that were 0 on all points so far, of tensors in which others are 0 on some: what was never chosen looks like nothing. And
    tensors that are 0 as a whole or not at all, on each point: what is chosen looks like what does not depend on a choice."""

    def __init__(self, patience: int = PATIENCE) -> None:
        self._patience = patience
        self._ever: dict[str, Array] = {}  # where a tensor was not 0
        self._always: dict[str, Array] = {}
        self._parted: set[str] = set()  # tensors that had both on some point
        self._count = -1
        self._since = 0  # points that woke nothing

    def add(self, values: Mapping[str, Array]) -> None:
        count = 0
        for name, v in values.items():
            there = v != 0
            self._ever[name] = self._ever.get(name, False) | there
            self._always[name] = self._always.get(name, True) & there
            if there.any() and not there.all():
                self._parted.add(name)
            if (self._ever[name] != self._always[name]).any():
                count += int((~self._ever[name]).sum()) + (v.size > 1 and name not in self._parted)
        self._since = self._since + 1 if count == self._count else 0
        self._count = count

    @property
    def settled(self) -> bool:
        return self._count == 0 or self._since >= self._patience


def _rounding(small: Small, x: Suspect, at: PointRun, digits: Digits | None = None) -> bool:
    """Whether a rank is off by nothing but rounding: beside the whole tensor, as all that it holds may be elements that should be 0; or
    with more digits, as the whole tensor may be."""

    def gap(run: PointRun) -> float:
        whole = run.logical[x.obligation.output.tensor]
        gaps = [np.abs(got - want).max(initial=0.0) for got, want, _ in held(small, x.obligation, x.layout, x.rank, whole, run.plan)]
        return float(max(gaps, default=0.0))

    if not np.isfinite(x.distance):
        return False
    if gap(at) <= FAINT * np.abs(at.logical[x.obligation.output.tensor]).max(initial=0.0):
        return True
    return digits is not None and digits.fade(at, gap)


@dataclass(frozen=True)
class Drawn:
    """Points that both programs were run on."""

    runs: list[PointRun]  # all of them, those with small inputs first
    quiet: int  # how many of these there are
    ordinary: list[PointRun]  # without those on which everything is chosen: they say what may be what, not what differs
    wrong: bool  # whether there is nothing to prove, but to say where it is wrong


def drawn(
    small: Small, lineage: tuple[Layout, ...], wanted: Sequence[Obligation], named: Collection[str], digits: Digits, seed: int = 0
) -> Drawn:
    """As many as it takes until elements of logical tensors are told apart and what is chosen now and then was chosen once; `named` are the
    tensors that have elements of their own."""
    quiet, everything, first, wrong = list[PointRun](), list[PointRun](), list[PointRun](), False
    asleep, tried, looked = Asleep(patience(small)), 0, False
    sizes, by_order = ordinary_sizes(small), chooses_by_order(small)
    while not (_told_apart(small, [*quiet, *everything]) and asleep.settled) and tried < MOST:
        if quiet and not looked:
            looked, wrong = True, bool(different(small, wanted, quiet, digits))
            if wrong:
                break
        at = range(seed + tried, seed + tried + POINTS_AT_ONCE)
        fresh = with_everything(small, wanted, lineage, at) if (everything and by_order) or tried == QUIET else []
        everything += fresh
        if not fresh:
            fresh = runs(small, lineage, at, sizes)
            quiet += [run for run in fresh if defined(small, run.logical)]
            first = first or fresh[:1]
        tried += POINTS_AT_ONCE
        for run in fresh:
            asleep.add({n: v for n, v in run.logical.items() if n in named and v.dtype.kind == "f"})
    if not quiet:
        different(small, wanted, first)  # says what has no value
        quiet = first
    loud = runs(small, lineage, range(seed + MOST, seed + MOST + LOUD), LOUDLY)
    loud = [run for run in loud if defined(small, run.logical)]
    if quiet and not wrong:
        known = [*quiet, *everything, *loud]
        loud += moving(small, lineage, known, range(seed + MOST + LOUD, seed + MOST + LOUD + LOUDER))
    return Drawn([*quiet, *everything, *loud], len(quiet) + len(everything), [*quiet, *loud], wrong)


def _told_apart(small: Small, runs: Sequence[PointRun]) -> bool:
    """Whether there are enough points, and no two elements of an integer input are equal on all: what is made of them would be, too."""
    if len(runs) < QUIET:
        return False
    for name in small.logical.sources:
        if small.logical.tensors[name].kind == "int":
            columns = np.stack([run.logical[name].reshape(-1) for run in runs])
            if len(np.unique(columns, axis=1).T) < columns.shape[1]:
                return False
    return True
