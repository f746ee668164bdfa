"""The hybrid check: normal forms first, then equations solved, then the solver."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final, Literal

from trainverify.domains.polynomials import CONSTANTS, ONE, Exponent, Factors, Need, Poly, Scalars, TooLarge, exponent
from trainverify.prove.staged.solver import Solver

TOTAL: Final = ("tanh", "erf", "sin", "cos")  # functions that are defined everywhere
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
    """p with denominators cleared and functions of equal arguments identified: 0 only if p is. Fractions that have no denominator in common
    are first looked at apart, as all of their denominators together are many."""
    left: Poly = {}
    p = Assuming(scalars).all(p)
    parts = _by_denominator(scalars, p)
    for part in parts:
        if len(parts) == 1 or _solved(scalars, part):
            left |= part
    return _solved(scalars, left)


class Assuming:
    """Products with an indicator, or with what is 0 where that is: everything else in them may be taken as it is where that is 1.

    Only what has a value in either case: sums that are positive are divided by, and functions that are defined everywhere.
    """

    def __init__(self, scalars: Scalars):
        self.scalars = scalars
        self._inside: dict[int, frozenset[int]] = {}

    def all(self, p: Poly) -> Poly:
        s = self.scalars
        if not s.comparisons:
            return p
        made: Poly = {}
        for m, c in p.items():
            ones = frozenset(x for x, _ in s.factors[m] if x in s.comparisons)
            ones |= {i for x, e in s.factors[m] if e > 0 for i in s.implied.get(x, ())}
            if any(not ones.isdisjoint(self.inside(x)) for x, _ in s.factors[m]):
                s.into(made, self.monomial(s.factors[m], ones), c)
            else:
                s.into(made, {m: ONE}, c)
        return made

    def inside(self, x: int) -> frozenset[int]:
        """The comparisons that an atom's arguments contain."""
        found = self._inside.get(x)
        if found is None:
            atom = self.scalars.atoms[x]
            found = frozenset()
            if atom.kind in ("sum", *TOTAL):
                for m, _ in atom.args[0]:
                    for y, _ in self.scalars.factors[m]:
                        found |= self.inside(y) | ({y} & self.scalars.comparisons)
            self._inside[x] = found
        return found

    def monomial(self, factors: Factors, ones: frozenset[int]) -> Poly:
        s = self.scalars
        made = s.const(1)
        for x, e in factors:
            made = s.mul(made, s.one(x, e) if ones.isdisjoint(self.inside(x)) else self.atom(x, e, ones))
        return made

    def atom(self, x: int, e: Exponent, ones: frozenset[int]) -> Poly:
        s = self.scalars
        kind, args = s.atoms[x].kind, s.atoms[x].args[0]
        there: Poly = {}
        for m, c in args:
            s.into(there, self.monomial(tuple(f for f in s.factors[m] if f[0] not in ones), ones), c)
        if kind != "sum":
            return s.power(s.function(kind, there), e) if isinstance(e, int) and e > 0 else s.one(x, e)
        return s.pow(there, e) if s.sign(there) == "positive" else s.one(x, e)


def _by_denominator(scalars: Scalars, p: Poly) -> list[Poly]:
    """p as a sum of polynomials none of which divides by a sum that another one divides by."""
    first: dict[int, int] = {}  # denominator → another one of the same part
    divided: dict[int, int] = {}  # monomial → one of its denominators

    def find(x: int) -> int:
        while first[x] != x:
            first[x] = x = first[first[x]]
        return x

    for m in p:
        under = [x for x, e in scalars.factors[m] if e < 0 and scalars.atoms[x].kind == "sum"]
        for x in under:
            first.setdefault(x, x)
            first[find(x)] = find(under[0])
        divided[m] = under[0] if under else -1
    parts: dict[int, Poly] = {}
    for m, c in p.items():
        parts.setdefault(-1 if divided[m] < 0 else find(divided[m]), {})[m] = c
    return list(parts.values())


def _solved(scalars: Scalars, p: Poly) -> Poly:
    left = cleared(scalars, p)
    while left:
        joined = _joined(scalars, left)
        if joined is None:
            return left
        left = cleared(scalars, joined)
    return left


def cleared(scalars: Scalars, p: Poly) -> Poly:
    """p times whole powers of the sums that it divides by, all multiplied out. Those sums are not 0: what divides is defined."""
    while True:
        low: dict[int, int] = {}
        for m in p:
            for x, e in scalars.factors[m]:
                if scalars.atoms[x].kind == "sum":
                    low[x] = min(low.get(x, 0), Fraction(e).__floor__())
        down = [x for x, n in low.items() if n < 0]
        if not down:
            out = scalars.multiplied_out(p)
            if out is p:
                return p
            p = out
            continue
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
        if atom.kind not in ("symbol", "flag", "choice", "number", *CONSTANTS):
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
