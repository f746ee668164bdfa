"""The ring of polynomials over interned atoms: sums, products, whole powers, and the signs that forms show."""

from __future__ import annotations

import time
from collections.abc import Hashable
from fractions import Fraction
from typing import Any, Final

from flint import fmpq

from trainverify.domains.atoms import (
    ONE,
    Atom,
    Choice,
    Exponent,
    Factors,
    Mono,
    Poly,
    TooLarge,
    atom_of,
    exponent,
    fraction,
    raised,
    rational,
)

MAX_POWER: Final = 1000  # of a sum that is multiplied out


class Ring:
    """One family of atoms. Polynomials of different families do not mix."""

    def __init__(self, max_terms: int = 200_000, deadline: float | None = None):
        self.atoms: list[Atom] = []
        self.max_terms = max_terms
        self.deadline = deadline  # of processor time
        self._number: dict[Hashable, int] = {}
        self._products: dict[int, tuple[tuple[Mono, Any], ...]] = {}
        self.factors: list[Factors] = [()]  # of every monomial
        self._monos: dict[Factors, Mono] = {(): 0}
        self._indicator: list[bool] = []
        self._followers: dict[int, set[int]] = {}  # a symbol → those that vanish with it
        self.implied: dict[int, set[int]] = {}  # an atom → indicators that are 1 wherever it is not 0
        self._choices: dict[Choice, int] = {}
        self._by_group: list[Choice] = []
        self._choice_value: dict[int, int] = {}

    # -- atoms -------------------------------------------------------------------------------------------------------

    def _atom(self, kind: str, args: tuple[Any, ...], sign: str | None = None, indicator: bool = False, group: int = -1) -> int:
        key = (kind, args)
        found = self._number.get(key)
        if found is None:
            found = self._number[key] = len(self.atoms)
            self.atoms.append(Atom(kind, args, sign, group))
            self._indicator.append(indicator)
        return found

    def mono(self, factors: Factors) -> Mono:
        """The number of a monomial; its factors must be sorted."""
        found = self._monos.get(factors)
        if found is None:
            found = self._monos[factors] = len(self.factors)
            self.factors.append(factors)
        return found

    def one(self, atom: int, e: Exponent = 1) -> Poly:
        """atom^e."""
        return {self.mono(((atom, exponent(e)),)): ONE}

    def symbol(self, key: Hashable, sign: str | None = None) -> Poly:
        return self.one(self._atom("symbol", (key,), sign))

    def vanishes(self, p: Poly, q: Poly) -> None:
        """What is known of two symbols: the first is 0 wherever the second is."""
        (((m, _),), ((n, _),)) = p.items(), q.items()
        (((x, _),), ((y, _),)) = self.factors[m], self.factors[n]
        self._followers.setdefault(y, set()).add(x)
        for indicator in self.implied.get(y, ()):
            self.implied.setdefault(x, set()).add(indicator)

    def flag(self, key: Hashable) -> Poly:
        """A symbol that is 0 or 1."""
        return self.one(self._atom("flag", (key,), "nonnegative", True))

    def choice(self, choice: Choice) -> Poly:
        """An integer variable, as Σ value·[variable = value]."""
        return self._expand(choice, {v: rational(v) for v in choice.values})

    def _expand(self, choice: Choice, table: dict[int, Any]) -> Poly:
        group = self._choices.get(choice)
        if group is None:
            group = self._choices[choice] = len(self._by_group)
            self._by_group.append(choice)
        *others, last = choice.values
        made = self.const(table[last])
        for v in others:
            c = table[v] - table[last]
            if c:
                atom = self._atom("choice", (choice, v), "nonnegative", True, group)
                self._choice_value[atom] = v
                made[self.mono(((atom, 1),))] = c
        return made

    # -- ring --------------------------------------------------------------------------------------------------------

    def const(self, value: Any) -> Poly:
        c = value if isinstance(value, fmpq) else rational(value)
        return {0: c} if c else {}

    def constant(self, p: Poly) -> Any | None:
        """The number that a polynomial is, if it is one."""
        if not p:
            return fmpq(0)
        return p[0] if len(p) == 1 and 0 in p else None

    def add(self, a: Poly, b: Poly) -> Poly:
        if len(a) < len(b):
            a, b = b, a
        if not b:
            return a
        out = dict(a)
        self.into(out, b, ONE)
        return out

    def sub(self, a: Poly, b: Poly) -> Poly:
        if not b:
            return a
        out = dict(a)
        self.into(out, b, -ONE)
        return out

    @staticmethod
    def into(out: Poly, b: Poly, factor: Any) -> None:
        """out += factor·b."""
        for m, c in b.items():
            s = out.get(m)
            s = c * factor if s is None else s + c * factor
            if s:
                out[m] = s
            else:
                out.pop(m, None)

    def scale(self, a: Poly, c: Any) -> Poly:
        return {m: x * c for m, x in a.items()} if c else {}

    def neg(self, a: Poly) -> Poly:
        return {m: -x for m, x in a.items()}

    def mul(self, a: Poly, b: Poly) -> Poly:
        out: Poly = {}
        self.fma(out, a, b)
        return out

    def fma(self, out: Poly, a: Poly, b: Poly) -> None:
        """out += a·b."""
        products = self._products
        for ma, ca in a.items():
            for mb, cb in b.items():
                if not ma or not mb:
                    terms: tuple[tuple[Mono, Any], ...] = ((ma or mb, None),)
                else:
                    key = ma << 32 | mb if ma < mb else mb << 32 | ma
                    known = products.get(key)
                    if known is None:
                        known = products[key] = self._product(self.factors[ma], self.factors[mb])
                    terms = known
                c = ca * cb
                for m, k in terms:
                    term = c if k is None else c * k
                    s = out.get(m)
                    s = term if s is None else s + term
                    if s:
                        out[m] = s
                    else:
                        del out[m]
        if len(out) > self.max_terms:
            raise TooLarge(f"more than {self.max_terms} terms")
        if self.deadline is not None and time.process_time() > self.deadline:
            raise TooLarge("time limit of the obligation")

    def _product(self, a: Factors, b: Factors) -> tuple[tuple[Mono, Any], ...]:
        """The product of two monomials: usually one, none where indicators exclude each other, several where a root is undone."""
        coefficient = ONE
        more: list[tuple[int, int]] = []
        out: list[tuple[int, Exponent]] = []
        groups: dict[int, int] = {}
        i = j = 0
        while i < len(a) or j < len(b):
            if j == len(b) or (i < len(a) and a[i][0] < b[j][0]):
                factor = a[i]
                i += 1
            elif i == len(a) or b[j][0] < a[i][0]:
                factor = b[j]
                j += 1
            else:
                factor, e = self._joined(a[i], b[j][1], more)
                coefficient = coefficient if e is None else coefficient * e
                i, j = i + 1, j + 1
            x = factor[0]
            if factor[1]:
                group = self.atoms[x].group
                if group >= 0 and groups.setdefault(group, x) != x:
                    return ()
                out.append(factor)
        if self.implied:  # x·[x > 0] = x for x ≥ 0
            needless = {i for x, e in out if e > 0 and x in self.implied for i in self.implied[x] if i != x}
            if needless:
                out = [f for f in out if f[0] not in needless]
        mono = self.mono(tuple(out))
        if not more:
            return ((mono, None if coefficient == 1 else coefficient),)
        made: Poly = {mono: coefficient}
        for x, n in more:
            for _ in range(n):
                made = self.mul(made, self.inside(x))
        return tuple(made.items())

    def _joined(self, factor: tuple[int, Exponent], e: Exponent, more: list[tuple[int, int]]) -> tuple[tuple[int, Exponent], Any]:
        """x^f·x^e; whole powers of numbers become coefficients, those of sums go to `more`."""
        x, f = factor
        if self._indicator[x]:
            return factor, None
        s = exponent(f + e)
        kind = self.atoms[x].kind
        if kind == "number" and (s >= 1 or s < 0):
            whole = s.__floor__()
            return (x, exponent(s - whole)), rational(raised(Fraction(self.atoms[x].args[0]), whole))
        if kind == "sum" and s >= 1:
            whole = s.__floor__()
            more.append((x, whole))
            s = exponent(s - whole)
        return (x, s), None

    def sorted(self, powers: dict[int, Exponent]) -> Mono:
        return self.mono(tuple(sorted(powers.items(), key=atom_of)))

    def inside(self, atom: int) -> Poly:
        """The polynomial that a sum atom stands for."""
        return dict(self.atoms[atom].args[0])

    def power(self, p: Poly, n: int) -> Poly:
        """pⁿ for n ≥ 0, multiplied out."""
        if len(p) == 1 and n > 1:
            ((m, c),) = p.items()
            if not any(self._indicator[x] or self.atoms[x].kind in ("sum", "number") for x, _ in self.factors[m]):
                return {self.mono(tuple((x, exponent(e * n)) for x, e in self.factors[m])): rational(raised(fraction(c), n))}
        if n > MAX_POWER and p:
            raise TooLarge(f"a sum to the power of {n}")
        out = self.const(1)
        for _ in range(n):
            out = self.mul(out, p)
        return out

    # -- signs -------------------------------------------------------------------------------------------------------

    def sign(self, p: Poly, cases: int = 3) -> str | None:
        """What the form shows: "positive", "nonnegative" or nothing. So many indicators may be looked at as 0 and as 1."""
        if not p:
            return "nonnegative"
        strict = False
        for m, c in p.items():
            if c < 0:
                flag = next((x for x, _ in self.factors[m] if self._indicator[x]), None)
                return None if flag is None or not cases else self._either(p, flag, cases - 1)
            all_positive = True
            for x, e in self.factors[m]:
                s = self.atoms[x].sign
                if s == "positive" or (e < 0 and not isinstance(e, int)):  # a root that is divided by is positive
                    continue
                all_positive = False
                if s != "nonnegative" and isinstance(e, int) and e % 2:
                    return None
            strict |= all_positive
        return "positive" if strict else "nonnegative"

    def _either(self, p: Poly, flag: int, cases: int) -> str | None:
        """The sign of a polynomial, whether an indicator is 0 or 1."""
        zero: Poly = {}
        one: Poly = {}
        for m, c in p.items():
            rest = tuple(f for f in self.factors[m] if f[0] != flag)
            if len(rest) == len(self.factors[m]):
                zero[m] = c
            self.into(one, {self.mono(rest): ONE}, c)
        signs = self.sign(zero, cases), self.sign(one, cases)
        return None if None in signs else "nonnegative" if "nonnegative" in signs else "positive"
