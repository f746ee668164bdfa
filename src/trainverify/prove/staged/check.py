"""The hybrid check: normal forms first, then equations solved, then the solver."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final, Literal

from trainverify.domains.polynomials import ONE, Need, Poly, Scalars, TooLarge, exponent
from trainverify.prove.staged.solver import Solver

How = Literal["normal form", "equations", "solver"]
MAX_SOLVER_TERMS: Final = 400


@dataclass(frozen=True)
class Checked:
    """`how` is None where it was not shown; then `reason` says why, and `model` may say where it fails."""

    how: How | None = None
    reason: str = "not checked"
    model: dict[Any, Fraction] = field(default_factory=dict)


def equal(scalars: Scalars, got: Poly, want: Poly, given: Iterable[Need], solver: Solver | None) -> Checked:
    """Is got = want wherever both are defined and `given` holds?"""
    difference = scalars.sub(got, want)
    if not difference:
        return Checked("normal form", "")
    try:
        left = solved(scalars, difference)
    except TooLarge as error:
        return Checked(None, str(error))
    if not left:
        return Checked("equations", "")
    if solver is None or len(left) > MAX_SOLVER_TERMS:
        return Checked(None, f"different normal forms ({len(left)} terms)")
    answer = solver.zero(scalars, left, given)
    if answer.status == "holds":
        return Checked("solver", "")
    return Checked(None, answer.reason if answer.status != "fails" else "a value of the inputs where it fails", answer.model)


def solved(scalars: Scalars, p: Poly) -> Poly:
    """p with denominators cleared and functions of equal arguments identified: 0 only if p is."""
    left = cleared(scalars, p)
    while left:
        joined = _joined(scalars, left)
        if joined is None:
            return left
        left = cleared(scalars, joined)
    return left


def cleared(scalars: Scalars, p: Poly) -> Poly:
    """p times whole powers of the sums that it divides by, multiplied out. Those sums are not 0: what divides is defined."""
    while True:
        low: dict[int, int] = {}
        for m in p:
            for x, e in scalars.factors[m]:
                if scalars.atoms[x].kind == "sum":
                    low[x] = min(low.get(x, 0), Fraction(e).__floor__())
        down = [x for x, n in low.items() if n < 0]
        if not down:
            return p
        x = max(down)  # the youngest: its inside has older ones only
        inside, n = scalars.inside(x), -low[x]
        powers: dict[int, Poly] = {0: scalars.const(1)}
        made: Poly = {}
        for m, c in p.items():
            here = dict(scalars.factors[m])
            e = Fraction(here.pop(x, 0)) + n
            whole = e.__floor__()
            if e != whole:
                here[x] = exponent(e - whole)
            for k in range(1, whole + 1):
                if k not in powers:
                    powers[k] = scalars.mul(powers[k - 1], inside)
            scalars.fma(made, {scalars.sorted(here): c}, powers[whole])
        p = made


def _joined(scalars: Scalars, p: Poly) -> Poly | None:
    """p with one function atom replaced by another of the same function whose argument is equal; None if there is none."""
    by_kind: dict[str, list[int]] = {}
    for x in sorted({x for m in p for x, _ in scalars.factors[m]}):
        atom = scalars.atoms[x]
        if atom.kind not in ("symbol", "flag", "choice", "number", "pi"):
            by_kind.setdefault(atom.kind, []).append(x)
    for kind, found in by_kind.items():
        for i, x in enumerate(found):
            for y in found[:i]:
                if _same(scalars, kind, x, y):
                    made: Poly = {}
                    for m, c in p.items():
                        here = dict(scalars.factors[m])
                        e = here.pop(x, 0)
                        scalars.fma(made, {scalars.sorted(here): c}, scalars.one(y, e) if e else scalars.const(1))
                    return made
    return None


def _same(scalars: Scalars, kind: str, x: int, y: int) -> bool:
    a, b = scalars.atoms[x].args[0], scalars.atoms[y].args[0]
    match kind:
        case "exp":
            return not solved(scalars, scalars.sub({a: ONE}, {b: ONE}))
        case "max":
            return all(any(not solved(scalars, scalars.sub(dict(p), dict(q))) for q in b) for p in a) and all(
                any(not solved(scalars, scalars.sub(dict(p), dict(q))) for q in a) for p in b
            )
        case _:
            return not solved(scalars, scalars.sub(dict(a), dict(b)))
