"""Literals are float32 numbers: a difference that moving them by a unit in the last place explains is no difference.

1/√6 that JAX computes in Python and √6 that is divided by are 2·10⁻⁹ apart once both are rounded. What units make is linear in them: such a
difference changes by as much as it is when some of them move, each its own way in each program. Others hardly change.
"""

from __future__ import annotations

import zlib
from fractions import Fraction
from typing import Any, Final

import numpy as np

from trainverify.domains.numeric import NUMERIC, Numeric
from trainverify.evaluate.compare import suspects
from trainverify.evaluate.run import NotComputed, random_inputs, run_logical, run_plan
from trainverify.evaluate.small import Small, TooMuch, shrink_system
from trainverify.graph.obligations import Obligation, obligations
from trainverify.graph.plan import Plan, units
from trainverify.graph.program import Program
from trainverify.ops.table import OpTable
from trainverify.primitives.node import Literal
from trainverify.verdicts import FULL, MAX_ELEMENTS, related

MOVES: Final = (("up", "down"), ("up", "up"), ("a coin", "another coin"))
POINTS: Final = 2
REDUCED: Final = 2  # as evaluation reduces what is too large
PART: Final = 0.5  # of a difference; one that changes by less is not made of units
LARGE: Final = 0.01  # of the larger value, or absolute: no units make such a difference
EXACT: Final = 1 << 10  # denominators of literals that no rounding made: 0.5, 0.125

Array = np.ndarray[Any, Any]
Gaps = dict[tuple[str, int], float]


class Moved(Numeric):
    """Every literal that may be rounded is one float32 unit off: "up", "down", or as a coin of that name falls."""

    def __init__(self, move: str):
        self.move = move

    def literal(self, value: Literal, kind: str) -> Array:
        if kind != "real" or not np.isfinite(float(value)) or EXACT % Fraction(value).denominator == 0:
            unmoved: Array = super().literal(value, kind)
            return unmoved
        up = self.move == "up" or (self.move != "down" and zlib.crc32(f"{self.move} {float(value)!r}".encode()) & 1)
        unit = float(np.spacing(np.float32(abs(float(value)))))
        return np.array(float(value) + (unit if up else -unit), np.float64)


def only_rounded(logical: Program, plan: Plan, ops: OpTable) -> bool:
    """Whether programs differ at points, and nowhere by more than float32 literals explain."""
    parts = units(plan)
    wanted, _ = obligations(logical, plan, parts)
    system = related(logical, plan, ops, parts, wanted)
    for base in (FULL, REDUCED):
        try:
            small = shrink_system(system, base=base, most=MAX_ELEMENTS)
            found = [_stays(small, plan, wanted, seed) for seed in range(POINTS)]
        except (TooMuch, NotComputed, ArithmeticError, ValueError):
            continue
        return any(f is not None for f in found) and not any(found)
    return False


def _stays(small: Small, plan: Plan, wanted: list[Obligation], seed: int) -> bool | None:
    """Whether some difference hardly changes; None if there is none."""
    inputs = random_inputs(small, seed)

    def gaps(one: Numeric, other: Numeric) -> Gaps:
        with np.errstate(all="ignore"):
            values = run_logical(small, inputs, one), run_plan(small, plan.lineage, inputs, other)
        return {(str(s.obligation), s.rank): s.distance for s in suspects(small, wanted, *values)[0]}

    before = gaps(NUMERIC, NUMERIC)
    moved = [gaps(Moved(a), Moved(b)) for a, b in MOVES] if before else []
    return any(all(abs(m.get(k, 0.0) - d) <= PART * d or d == m.get(k) for m in moved) for k, d in before.items()) if before else None


def is_large(got: str, want: str, gap: float | None) -> bool:
    """Whether no rounding of literals makes a difference."""
    try:
        size = max(abs(float(got)), abs(float(want)), 1.0)
    except ValueError:
        return True
    return gap is None or abs(gap) > LARGE * size


__all__ = ["is_large", "only_rounded"]
