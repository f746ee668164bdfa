"""Comparing what ranks hold with what the logical program says they should: numbers first, balls to decide."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from flint import arb

from trainverify.domains.arrays import Array, ArrayDomain
from trainverify.domains.ball import Ball, is_decimal, precision
from trainverify.domains.numeric import EXTENDED, NUMERIC, SHAKEN
from trainverify.evaluate.branches import Watch
from trainverify.evaluate.flow import Tensor, sliced
from trainverify.evaluate.moved import Moved, PointName
from trainverify.evaluate.run import (
    NotComputed,
    PlanValues,
    elements,
    products,
    random_inputs,
    random_points,
    run_logical,
    run_logicals,
    run_plan,
    run_plans,
)
from trainverify.evaluate.small import Small, shares
from trainverify.graph.lineage import Layout, Part, region
from trainverify.graph.obligations import Holding, Obligation
from trainverify.primitives.node import Node, ordered
from trainverify.primitives.scalars import Undecided, log_below_one, nearest_float

EQUAL, DIFFERENT = 1e-9, 1e-6  # relative to the largest entry of the tensor
PRECISIONS = (96, 192, 384, 768)
FAINTEST = 20_000  # bits below 1 down to which a constant that only one program has is told from 1
MOVES = (("up", "down"), ("up", "up"), ("a coin", "another coin"))  # of all float literals, tried
MOVED = 1000  # a difference that changes by less than this part of it is not made of units in the last place
CALMED = 64  # times smaller is rounding noise with eleven more bits
IN_DIGITS = 2_000_000_000  # products up to which there are more digits
TOGETHER = 500_000_000  # elements up to which points are run together


@dataclass(frozen=True)
class Suspect:
    """A local tensor that does not look like the part of the logical tensor it should hold."""

    obligation: Obligation
    layout: Layout
    rank: int
    distance: float  # relative; inf where the plan has no number


@dataclass(frozen=True)
class Difference:
    """A certain difference: one element, both values as enclosures that do not meet."""

    obligation: Obligation
    layout: Layout
    rank: int
    index: tuple[int, ...]  # in the logical tensor
    got: str
    want: str
    seed: PointName
    gap: float | None = None  # about got − want; None where the plan has no number


Decision = Literal["equal", "different", "literal rounding", "undecided"]


def held(small: Small, o: Obligation, layout: Layout, rank: int, whole: Array, plan: PlanValues) -> Iterator[tuple[Array, Array, Array]]:
    """(got, want, flat logical positions) for every part of a holding. A share of a sum counts together with the others.

    Padding that the next step starts with must be zero; its positions are −1.
    """
    flat = whole.reshape(-1)
    local: Array = plan.get(*places(small)[rank], layout.local)
    for part in small.parts[layout, rank]:
        if not part.padding:
            got = region(part, local) if part.partial is None else _added_up(small, layout, rank, part, plan)
            where = small.positions(part, layout.logical).reshape(-1)
            yield got, flat[where].reshape(got.shape), where.reshape(got.shape)
        elif o.stays:
            got = region(part, local)
            yield got, np.zeros_like(got), np.full(got.shape, -1)


def _place(small: Small, layout: Layout, position: int) -> tuple[int, ...]:
    """A flat position as indices; none for padding."""
    return tuple(map(int, np.unravel_index(position, small.shapes[layout.logical]))) if position >= 0 else ()


def _added_up(small: Small, layout: Layout, rank: int, part: Part, plan: PlanValues) -> Array:
    """A rank's share plus one copy of every other share of the same region."""
    assert part.partial is not None
    op, _, n = part.partial
    found = shares(small, layout, rank, part)
    if found is None:
        raise NotComputed(f"share of {layout} that no rank holds")
    at = places(small)
    total: Array = 0
    for other, p in found:
        value = plan.get(*at[other], layout.local)
        if value is None:
            raise NotComputed(f"{layout.local} on rank {other}")
        total = total + region(p, value)
    return np.asarray(total / n if op == "avg" else total)


def places(small: Small) -> dict[int, tuple[int, int]]:
    return small.places


def together(small: Small, points: int) -> bool:
    """Whether so many points are few enough elements to evaluate them in one go."""
    return points * elements(small) <= TOGETHER


def compare(
    small: Small, lineage: tuple[Layout, ...], wanted: Sequence[Obligation], seeds: Sequence[PointName], watch: Watch | None = None
) -> list[tuple[list[Suspect], int]]:
    """Both programs on some points: for each what is not clearly equal, and the number of comparisons made. Conditions are watched."""
    if len(seeds) > 1 and not together(small, len(seeds)):
        return [found for s in seeds for found in compare(small, lineage, wanted, [s], watch)]
    logical = random_points(small, seeds, {o.output.tensor for o in wanted} | (watch.logical if watch else set()))
    plan = _outputs(small, lineage, wanted, seeds, NUMERIC, watch.local if watch else frozenset())
    if watch is not None:
        watch.add(logical, plan, not any(isinstance(s, Moved) for s in seeds))
    return [suspects(small, wanted, *both) for both in zip(logical, plan, strict=True)]


def _outputs(
    small: Small,
    lineage: tuple[Layout, ...],
    wanted: Sequence[Obligation],
    seeds: Sequence[PointName],
    domain: ArrayDomain,
    also: frozenset[Tensor] = frozenset(),
) -> list[PlanValues]:
    """What the ranks hold that is compared, and some other tensors."""
    return run_plans(small, lineage, [random_inputs(small, s) for s in seeds], domain, held_locally(small, wanted) | also)


def held_locally(small: Small, wanted: Sequence[Obligation]) -> frozenset[Tensor]:
    return frozenset((c, h.layout.local) for c in range(len(small.classes)) for o in wanted for h in o.holdings)


def suspects(small: Small, obligations: Sequence[Obligation], logical: Mapping[str, Array], plan: PlanValues) -> tuple[list[Suspect], int]:
    """Everything that is not clearly equal, and the number of comparisons made."""
    found: list[Suspect] = []
    count = 0
    for o in obligations:
        want_all = logical[o.output.tensor]
        if want_all.dtype.kind == "f" and np.isnan(want_all).any():  # nothing could be learnt from agreeing with it
            raise NotComputed(f"{o} of the logical program has no value at this point")
        before = count
        for h in o.holdings:
            gaps = _gaps(small, o, h, want_all, plan)
            count += len(gaps)
            found += [Suspect(o, h.layout, rank, gap) for rank, gap in gaps if gap > EQUAL]
        if o.holdings and count == before:  # of a sample of ranks: what nobody in it holds was not compared
            raise NotComputed(f"{o} is held by no rank that is evaluated")
    return found, count


def _gaps(small: Small, o: Obligation, holding: Holding, whole: Array, plan: PlanValues) -> list[tuple[int, float]]:
    """How far every rank is off that holds a tensor; whole classes at once where each rank holds one region."""
    at, layout = places(small), holding.layout
    by_class: dict[int, list[int]] = {}
    for rank in holding.ranks:
        if rank in at:
            by_class.setdefault(at[rank][0], []).append(rank)
    found: list[tuple[int, float]] = []
    for c, ranks in by_class.items():
        index = small.index(c, layout, tuple(ranks))
        rows = [at[r][1] for r in ranks]
        done = plan.done[c].get(layout.local, ())
        if index is not None and all(row in done for row in rows):
            got = plan.values[c][layout.local]
            got = got if rows == list(range(len(got))) else got[rows]
            found += zip(ranks, distances(got, whole.reshape(-1)[index]), strict=True)
            continue
        for rank, row in zip(ranks, rows, strict=True):
            gap = float("inf")
            if row in done:
                gap = max((distance(got, want) for got, want, _ in held(small, o, layout, rank, whole, plan)), default=0.0)
            found.append((rank, gap))
    return found


def distance(got: Array, want: Array) -> float:
    return distances(got[None], want[None])[0]


def distances(got: Array, want: Array) -> list[float]:
    """Row by row, relative to the largest entry of what should be there."""
    count = len(got)
    if not got.size:
        return [0.0] * count
    got, want = _real(got).reshape(count, -1), _real(want).reshape(count, -1)
    scale = np.maximum(np.abs(want).max(1), 1e-300)
    with np.errstate(all="ignore"):
        gap = np.abs(got - want)
    gap = np.where(got == want, 0.0, gap)  # equal infinities
    worst = np.where(np.isnan(gap), np.inf, gap).max(1)
    with np.errstate(all="ignore"):
        return [float(x) for x in np.where(np.isfinite(worst), worst / scale, np.inf)]


def _real(values: Array) -> Array:
    return values if values.dtype.kind == "f" else values.astype(np.float64)


def calm(small: Small, lineage: tuple[Layout, ...], wrong: Sequence[Suspect], seed: PointName) -> list[Suspect]:
    """Suspects that are as far off when both programs are run with more digits: rounding noise would be smaller."""
    wanted = list(dict.fromkeys(s.obligation for s in wrong))
    small = needed_for(small, wanted)
    if products(small) > IN_DIGITS:
        return list(wrong)
    (plan,) = _outputs(small, lineage, wanted, [seed], EXTENDED)
    (logical,) = run_logicals(small, [random_inputs(small, seed)], EXTENDED, {o.output.tensor for o in wanted})
    now = {(s.obligation, s.layout, s.rank): s.distance for s in suspects(small, wanted, logical, plan)[0]}
    left = [(s, now.get((s.obligation, s.layout, s.rank), 0.0)) for s in wrong]
    return [s for s, gap in left if gap * CALMED > s.distance or gap == float("inf")]


@dataclass(frozen=True)
class Gap:
    """Where a suspect is furthest off, and by how much, in extended precision."""

    index: tuple[int, ...]  # in the logical tensor
    got: float
    want: float
    gap: float  # relative to the largest entry
    apart: float  # as it is


def gaps(small: Small, lineage: tuple[Layout, ...], wrong: Sequence[Suspect], seed: PointName, digits: bool = True) -> list[Gap]:
    """Some suspects, run once more, with more `digits`; where that would take hours, with everything a unit in its last place off."""
    if not wrong:
        return []
    wanted = list(dict.fromkeys(s.obligation for s in wrong))
    small = needed_for(small, wanted)
    domain = NUMERIC if not digits else EXTENDED if products(small) <= IN_DIGITS else SHAKEN
    (plan,) = _outputs(small, lineage, wanted, [seed], domain)
    (logical,) = run_logicals(small, [random_inputs(small, seed)], domain, {o.output.tensor for o in wanted})
    found = []
    for s in wrong:
        best = Gap((), 0.0, 0.0, 0.0, 0.0)
        if plan.get(*places(small)[s.rank], s.layout.local) is not None:
            for got, want, where in held(small, s.obligation, s.layout, s.rank, logical[s.layout.logical], plan):
                far = np.abs(_real(got) - _real(want)).reshape(-1)
                if far.size:
                    far = np.where(np.isnan(far), np.inf, far)
                    n = int(far.argmax())
                    index = _place(small, s.layout, int(where.reshape(-1)[n]))
                    scale = max(float(np.abs(_real(want)).max()), 1e-300)
                    here = Gap(index, float(got.reshape(-1)[n]), float(want.reshape(-1)[n]), float(far[n]) / scale, float(far[n]))
                    best = max(best, here, key=lambda g: g.gap)
        found.append(best)
    return found


def faint(small: Small) -> int:
    """Bits below 1 at which corrections 1 − bⁿ that only one of the programs has are told from 1: so many more are computed with."""
    local = _corrections(s.nodes for k in small.classes for s in k.order) | _corrections(m.nodes or () for m in small.meetings)
    alone = _corrections(s.nodes for s in small.logical_steps) ^ local
    below = [-nearest_float(n) * log_below_one(b) / math.log(2) for b, n in alone]
    return math.ceil(min((bits for bits in below if bits <= FAINTEST), default=0.0))


def _corrections(outputs: Iterable[Sequence[Node]]) -> frozenset[tuple[Fraction, int]]:
    return frozenset(n.attrs[1] for nodes in outputs for n in ordered(tuple(nodes)) if n.attrs[:1] == ("one_minus_power",))


def _decimals(small: Small) -> frozenset[Fraction]:
    """Decimal fractions that only one of the programs has: one may be the other's, rounded."""
    local = _written(s.nodes for k in small.classes for s in k.order) | _written(m.nodes or () for m in small.meetings)
    return _written(s.nodes for s in small.logical_steps) ^ local


def _written(outputs: Iterable[Sequence[Node]]) -> frozenset[Fraction]:
    return frozenset(
        n.attrs[0] for nodes in outputs for n in ordered(tuple(nodes)) if n.prim == "const" and n.kind == "real" and is_decimal(n.attrs[0])
    )


def close_look(small: Small, lineage: tuple[Layout, ...], obligations: Sequence[Obligation], inputs: Mapping[str, Array]) -> list[Suspect]:
    """What float64 calls equal and enclosures tell apart: differences of an ulp, a missing eps. Both programs are run once."""
    with precision(PRECISIONS[0] + faint(small)):
        try:
            logical, plan = run_logical(small, inputs, Ball()), run_plan(small, lineage, inputs, Ball())
        except Undecided:
            return []
        found = []
        at = places(small)
        for o in obligations:
            for h in o.holdings:
                for rank in (r for r in h.ranks if r in at):
                    if plan.get(*at[rank], h.layout.local) is None:
                        continue
                    suspect = Suspect(o, h.layout, rank, 0.0)
                    if _somewhere_apart(small, suspect, logical, plan):
                        found.append(suspect)
                        break
        return found


def decide(
    small: Small, lineage: tuple[Layout, ...], suspect: Suspect, inputs: Mapping[str, Array], seed: PointName
) -> tuple[Decision, Difference | None]:
    """Settle a suspect in the ball domain, on the same inputs."""
    part = backward_slice(small, suspect)
    more = faint(part)
    for bits in PRECISIONS:
        with precision(bits + more):
            try:
                exact = _ball_difference(part, lineage, suspect, inputs, seed, Ball(), Ball())
                if exact is None:
                    continue
                if exact == "equal":
                    return "equal", None
            except Undecided:
                continue
            wide = _widened(part, lineage, suspect, inputs, seed)
            if isinstance(wide, Difference):
                return "different", wide
            return ("different", exact) if _stays(part, lineage, suspect, inputs, exact) else ("literal rounding", None)
    return "undecided", None


def _widened(
    small: Small, lineage: tuple[Layout, ...], suspect: Suspect, inputs: Mapping[str, Array], seed: PointName
) -> Difference | Literal["equal"] | None:
    """The same with every float literal as wide as a unit in its last place; None also if a condition may fall either way then."""
    wider = Ball(widen_literals=True, decimals=_decimals(small))
    try:
        return _ball_difference(small, lineage, suspect, inputs, seed, wider, wider)
    except Undecided:
        return None


def _stays(small: Small, lineage: tuple[Layout, ...], suspect: Suspect, inputs: Mapping[str, Array], found: Difference) -> bool:
    """Whether a certain difference hardly changes when float literals move by a unit in the last place, each its own way in each program.

    Widened literals make enclosures of deep programs meet whatever the difference. What a unit makes is linear in it: a difference that
    units explain changes by as much as it is when some of them move.
    """
    gap = found.gap
    if gap == 0:  # too small for a float, and so for a comparison
        return False
    decimals = _decimals(small)
    for moves in MOVES:
        one, other = (Ball(move=move, decimals=decimals) for move in moves)
        try:
            moved = _ball_difference(small, lineage, suspect, inputs, found.seed, one, other, found.index)
        except Undecided:
            return False
        if not isinstance(moved, Difference):
            return False
        if gap is None or moved.gap is None:  # the plan has no number
            if (gap is None) != (moved.gap is None):
                return False
        elif abs(moved.gap - gap) > abs(gap) / MOVED:
            return False
    return True


def unsettled(small: Small, lineage: tuple[Layout, ...], wrong: Sequence[Suspect], inputs: Mapping[str, Array]) -> list[Suspect]:
    """Suspects that enclosures do not show to be equal; both programs are run once per precision, for all of them together."""
    left = list(wrong)
    at = places(small)
    more = faint(small)
    for bits in PRECISIONS:
        if not left:
            break
        with precision(bits + more):
            try:
                logical, plan = run_logical(small, inputs, Ball()), run_plan(small, lineage, inputs, Ball())
            except Undecided:
                continue
            left = [s for s in left if plan.get(*at[s.rank], s.layout.local) is None or not _all_equal(small, s, logical, plan, more)]
            if any(plan.get(*at[s.rank], s.layout.local) is not None and _somewhere_apart(small, s, logical, plan) for s in left):
                break  # a certain difference: more digits change nothing about it
    return left


def _all_equal(small: Small, suspect: Suspect, logical: Mapping[str, Array], plan: PlanValues, more: int) -> bool:
    parts = held(small, suspect.obligation, suspect.layout, suspect.rank, logical[suspect.layout.logical], plan)
    return all(not _apart(g, w) and _tiny(g, w, more) for got, want, _ in parts for g, w in zip(got.flat, want.flat, strict=True))


def _somewhere_apart(small: Small, suspect: Suspect, logical: Mapping[str, Array], plan: PlanValues) -> bool:
    parts = held(small, suspect.obligation, suspect.layout, suspect.rank, logical[suspect.layout.logical], plan)
    return any(_apart(g, w) for got, want, _ in parts for g, w in zip(got.flat, want.flat, strict=True))


def _tiny(got: Any, want: Any, more: int) -> bool:
    """Whether two enclosures that meet are so small that the values count as equal; `more` bits are looked at besides."""
    return not isinstance(got, arb) or bool((got - want).abs_upper() < arb(10) ** -40 * arb(2) ** -more * (1 + abs(want).abs_upper()))


def _ball_difference(
    small: Small,
    lineage: tuple[Layout, ...],
    suspect: Suspect,
    inputs: Mapping[str, Array],
    seed: PointName,
    domain: Ball,
    plan_domain: Ball,
    only: tuple[int, ...] | None = None,
) -> Difference | Literal["equal"] | None:
    """A certain difference (of one element, if `only` says so), "equal" (all enclosures meet and are tiny), or None (too wide to tell)."""
    logical = run_logical(small, inputs, domain)
    values = run_plan(small, lineage, inputs, plan_domain)
    local = values.get(*places(small)[suspect.rank], suspect.layout.local)
    if local is None:
        return None
    tiny, more = True, faint(small)
    whole = logical[suspect.layout.logical]
    for got, want, where in held(small, suspect.obligation, suspect.layout, suspect.rank, whole, values):
        for g, w, p in zip(got.flat, want.flat, where.flat, strict=True):
            if _apart(g, w):
                index = _place(small, suspect.layout, int(p))
                if only is None or index == only:
                    return Difference(suspect.obligation, suspect.layout, suspect.rank, index, show(g), show(w), seed, _gap(g, w))
            tiny &= _tiny(g, w, more)
    return "equal" if tiny else None


def _gap(got: Any, want: Any) -> float | None:
    """About how far apart; None where the plan has no number."""
    if isinstance(got, arb):
        return float((got - want).mid()) if got.is_finite() else None
    return float(got) - float(want)


def _apart(got: Any, want: Any) -> bool:
    if isinstance(got, arb) and isinstance(want, arb):
        if want.is_finite() and not got.is_finite():
            return bool(got.is_nan()) or not got.overlaps(want)  # the plan has no number where the logical program has one
        return not got.overlaps(want)
    return bool(got != want)


def show(value: Any) -> str:
    return value.str(12, radius=False) if isinstance(value, arb) else str(value)


def needed_for(small: Small, wanted: Sequence[Obligation]) -> Small:
    """Only what some obligations need."""
    return sliced(small, {o.output.tensor for o in wanted}, held_locally(small, wanted))


def backward_slice(small: Small, suspect: Suspect) -> Small:
    """Only the steps that the suspect tensor and its logical counterpart need. Shares of a sum live on other ranks too."""
    c, _ = places(small)[suspect.rank]
    there = [d for d, k in enumerate(small.classes) if d == c or any((suspect.layout, r) in small.parts for r in k.ranks)]
    return sliced(small, {suspect.layout.logical}, {(d, suspect.layout.local) for d in there})
