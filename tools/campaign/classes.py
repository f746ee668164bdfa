"""`python -m tools.campaign classes`: is what evaluation by classes calls exact what a plain evaluation of all ranks computes?

Every tensor of the logical program and every local tensor of every rank is compared at full size, on every position of every
cell that has a value. Programs and plans are random: those of the campaign, correct and with a mistake, and those of
`campaign.anything`, which use every primitive and every collective in whatever way.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from tools.campaign.anything import anything
from tools.campaign.run import make
from trainverify.axes.cells import Cells, NoCells
from trainverify.axes.system import System
from trainverify.check import validate
from trainverify.domains.arrays import Array
from trainverify.domains.ball import Ball, precision
from trainverify.domains.numeric import EXTENDED, NUMERIC, Numeric
from trainverify.evaluate.classed import EXACT, Classed, ClassedDomain, Real, Whole, moved
from trainverify.evaluate.classes import Classes, Run, inputs_of
from trainverify.evaluate.rank_values import told_apart
from trainverify.evaluate.run import run_logical, run_plan
from trainverify.evaluate.small import Small, shrink_system
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.ops import OPS
from trainverify.primitives.node import Node
from trainverify.verdicts import related

FULL: Final = 1 << 60  # no axis is longer, so that none shrinks
CLOSE: Final = 1e-9  # relative to the largest entry of a tensor
DENSE: Final = 3_000_000  # elements of all tensors of all ranks
IN_BALLS: Final = 40_000  # of them, up to which enclosures settle whether a difference is rounding
BITS: Final = 200


@dataclass(frozen=True)
class Difference:
    tensor: str
    at: tuple[int, ...]
    got: object
    want: object
    gap: float = math.inf

    def __str__(self) -> str:
        return f"{self.tensor}{list(self.at)}: {self.got} on its cell, {self.want} at full size"


@dataclass
class Tally:
    """What was compared: cells of tensors, and results of primitives that have a value or not."""

    exact: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    positions: int = 0  # compared at full size
    cells: int = 0  # that they are of
    tensors: int = 0
    absent: int = 0  # tensors without a value on any cell
    differences: list[Difference] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.exact += other.exact
        self.unknown += other.unknown
        self.positions += other.positions
        self.cells += other.cells
        self.tensors += other.tensors
        self.absent += other.absent
        self.differences += other.differences


class CountingDomain(ClassedDomain):
    """Counts results by primitive."""

    def __init__(self, base: Numeric | Ball, tally: Tally):
        super().__init__(base)
        self.tally = tally

    def node(
        self, node: Node, attrs: Sequence[tuple[Any, ...]], args: list[Classed], cells: Sequence[Cells], given: list[list[Cells]], lead: int
    ) -> Classed:
        name = f"{node.prim} {node.attrs[0]}" if node.prim in ("map", "reduce", "rowwise") else node.prim
        try:
            made = super().node(node, attrs, args, cells, given, lead)
        except Exception:
            self.tally.unknown[name] += lead * int(np.prod([len(c) for c in cells]))
            raise
        known = known_of(made)
        self.tally.exact[name] += int(known.sum())
        self.tally.unknown[name] += int((~known).sum())
        return made


def known_of(x: Classed) -> Array:
    if isinstance(x, Whole):
        return np.asarray(x.exact)
    return np.ones(x.shape, dtype=bool) if x.kind is None else np.asarray(x.kind == EXACT)


def system_of(logical: Program, plan: Plan) -> System:
    parts = told_apart(plan, OPS)
    wanted, _ = obligations(logical, plan, parts)
    return related(logical, plan, OPS, parts, wanted)


def expanded(x: Array, cells: Sequence[Cells]) -> Array:
    """Values of cells on all of their positions."""
    return x[np.ix_(*(c.of for c in cells))] if cells else x


def agreement(
    system: System, seed: int = 0, magnitude: float = 0.5, base: Numeric | Ball = NUMERIC, ranks: int | None = None, single: int = 2
) -> Tally:
    """Both evaluations of both programs. `ranks` is the number up to which every rank is a class, `single` that of positions."""
    tally = Tally()
    classes = Classes(system, single) if ranks is None else Classes(system, single, ranks)
    inputs = inputs_of(classes, seed, magnitude)
    small = shrink_system(system, base=FULL)
    if small.reduced:
        raise AssertionError("not at full size")
    dims = system.scope.dims
    full = {n: expanded(v, classes.dims(dims[n])) for n, v in inputs.items()}
    enclosed = isinstance(base, Ball)
    run = Run(classes, inputs, CountingDomain(base, tally))
    logical, plan = run.logical(), run.plan(system.plan.lineage)
    exact = _dense(small, system, full, base)
    for name, want in exact[0].items():
        _compare(tally, f"logical {name}", _row(logical.get(name), 0), want, classes.dims(dims[name]), enclosed)
    for rank in range(system.plan.mesh.size):
        if rank not in small.places:
            continue
        c, row = small.places[rank]
        scope = system.unit_scopes[system.talk.unit_of[rank]]
        at = classes.place[int(classes.ranks.stand_in[rank])]
        for name in scope.dims:
            want = exact[1].get(c, row, name)
            try:
                got = moved(plan[at[0]].get(name, (at[1],)), lambda v: v[0])
            except KeyError:
                got = None
            _compare(tally, f"rank {rank} {name}", got, want, classes.dims(scope.dims[name]), enclosed)
    return tally


def _dense(small: Small, system: System, full: dict[str, Array], base: Numeric | Ball) -> Any:
    with np.errstate(all="ignore"):
        return run_logical(small, full, base), run_plan(small, system.plan.lineage, full, base)


def _row(x: Classed | None, row: int) -> Classed | None:
    return None if x is None else moved(x, lambda v: v[row])


def _compare(tally: Tally, where: str, got: Classed | None, want: Array | None, cells: Sequence[Cells], enclosed: bool) -> None:
    tally.tensors += 1
    if got is None or not known_of(got).any():
        tally.absent += 1
        return
    if want is None:
        tally.differences.append(Difference(where, (), "a value", "none"))
        return
    if got.shape != tuple(map(len, cells)):
        tally.differences.append(Difference(where, (), f"shape {got.shape}", f"cells {[len(c) for c in cells]}"))
        return
    known = expanded(known_of(got), cells)
    value = expanded(np.asarray(got.low if isinstance(got, Whole) else got.value), cells)
    tally.positions += int(known.sum())
    tally.cells += int(known_of(got).sum())
    gap = _apart(value, np.asarray(want), known) if enclosed and isinstance(got, Real) else _gap(value, want, known)
    if gap.any():
        at = tuple(int(i) for i in np.unravel_index(int(gap.argmax()), gap.shape))
        tally.differences.append(Difference(where, at, value[at], want[at], float(gap.max())))


def _gap(value: Array, want: Array, known: Array) -> Array:
    """Differences that are not close."""
    a, b = (np.where(known, x, 0).astype(np.longdouble) for x in (value, want))
    with np.errstate(all="ignore"):
        gap = np.abs(a - b)
        scale = np.abs(b[np.isfinite(b)]).max(initial=0)
        same = (a == b) | (np.isnan(a) & np.isnan(b)) | (gap <= CLOSE * scale)
    return np.where(same, 0, np.where(np.isnan(gap), np.inf, gap))


def _apart(value: Array, want: Array, known: Array) -> Array:
    """1 where enclosures of one number do not meet."""
    pairs = zip(value.reshape(-1), want.reshape(-1), known.reshape(-1), strict=True)
    found = (bool(k) and not (bool(a.overlaps(b)) or (a.is_nan() and b.is_nan())) for a, b, k in pairs)
    return np.fromiter(found, dtype=np.float64, count=known.size).reshape(known.shape)


# -- many of them ------------------------------------------------------------------------------------------------------


def case(seed: int) -> tuple[str, Program, Plan]:
    """The programs of a seed: half of them of any kind, the others random training steps and plans, every second with a mistake."""
    if seed % 2:
        return "anything", *anything(seed)
    made = make(seed, seed % 4 == 0)
    return "mistake" if seed % 4 == 0 else "plan", made.logical, made.plan


SETTINGS: Final = ((1, 2), (1, 1), (4, 2), (None, 2))  # up to how many ranks and positions each is one by itself


@dataclass
class Outcome:
    seed: int
    kind: str
    what: str  # "agrees", "rounding", "different", "crash", or why it was not compared
    tally: Tally
    reason: str = ""


def run(seed: int) -> Outcome:
    """One case: in float64, and in enclosures where that differs, as rounding can decide a comparison."""
    kind, tally = "?", Tally()
    try:
        kind, logical, plan = case(seed)
        if kind != "anything" and any(f.severity == "error" for f in validate(logical, plan, OPS)):
            return Outcome(seed, kind, "not well-formed", tally)
        system = system_of(logical, plan)
        ranks, single = SETTINGS[(seed // 4) % len(SETTINGS)]
        if sum(elements_of(system)) > DENSE:
            return Outcome(seed, kind, "too large", tally)
        magnitude = (0.5, 1.0, 0.1)[seed % 3]
        base = EXTENDED if seed % 11 == 5 else NUMERIC
        tally = agreement(system, seed, magnitude, base, ranks, single)
        size = sum(elements_of(system))
        if tally.differences and size > IN_BALLS:
            gaps = [
                max((d.gap for d in agreement(system, seed, magnitude, b, ranks, single).differences), default=0)
                for b in (NUMERIC, EXTENDED)
            ]
            if gaps[1] <= max(gaps[0] / 50, 1e-25):
                return Outcome(seed, kind, "rounding", tally, _taken(tally))
        elif tally.differences:
            with precision(BITS):
                enclosed = agreement(system, seed, magnitude, Ball(), ranks, single)
            if not enclosed.differences:
                return Outcome(seed, kind, "rounding", tally, _taken(tally))
        elif seed % 7 == 3 and size <= IN_BALLS // 4:
            with precision(BITS):
                tally.differences += agreement(system, seed, magnitude, Ball(), ranks, single).differences
        return Outcome(seed, kind, "different" if tally.differences else "agrees", tally, "; ".join(map(str, tally.differences[:3])))
    except NoCells as error:
        return Outcome(seed, kind, "no cells", tally, str(error))
    except Exception:
        return Outcome(seed, kind, "crash", tally, traceback.format_exc(limit=-6))


def _taken(tally: Tally) -> str:
    """The first difference; there are none any more."""
    reason = str(tally.differences[0])
    tally.differences = []
    return reason


def elements_of(system: System) -> Iterator[int]:
    scopes = [(system.scope, 1), *((s, len(u.ranks)) for s, u in zip(system.unit_scopes, system.talk.units, strict=True))]
    for scope, rows in scopes:
        yield rows * sum(int(np.prod([a.size for a in d])) for d in scope.dims.values())


def table(outcomes: Sequence[Outcome], total: Tally) -> str:
    lines = [f"{n:6} {kind}: {what}" for (kind, what), n in sorted(Counter((o.kind, o.what) for o in outcomes).items())]
    lines.append(
        f"{total.tensors:,} tensors compared, {total.absent:,} of them without any value; {total.positions:,} positions of "
        f"{total.cells:,} cells equal"
    )
    lines.append("primitive               exact   unknown   share exact")
    for name in sorted({*total.exact, *total.unknown}):
        a, b = total.exact[name], total.unknown[name]
        lines.append(f"{name:18} {a:10,} {b:9,}   {100 * a / max(a + b, 1):5.1f} %")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.campaign classes", description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    args = parser.parse_args(argv)
    outcomes, total, began = [], Tally(), time.perf_counter()
    for seed in range(args.seed, args.seed + args.count):
        o = run(seed)
        total.add(o.tally)
        outcomes.append(o)
        if o.what in ("different", "crash", "rounding"):
            print(f"seed {seed} ({o.kind}): {o.what}: {o.reason}", flush=True)
        elif len(outcomes) % 100 == 0:
            print(f"{len(outcomes)} cases, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    print(table(outcomes, total))
    print(f"{len(outcomes)} cases in {time.perf_counter() - began:.0f} s")
    return 1 if any(o.what in ("different", "crash") for o in outcomes) else 0
