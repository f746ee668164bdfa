"""Scalars of the element domain: polynomials with rational coefficients over interned atoms.

An atom is a symbol, an indicator (0 or 1), or a function of polynomials: `exp` of a monomial, a power of a sum, a
maximum, `tanh` and so on, uninterpreted but for the laws written here. Atoms and monomials are interned.
What a division, a root or a logarithm needs in order to be defined is recorded in `needs`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from flint import fmpq

from trainverify.primitives.scalars import LONGEST

Exponent = int | Fraction
Factors = tuple[tuple[int, Exponent], ...]  # (atom, exponent), sorted by atom
Mono = int  # the number of an interned monomial; 0 is the empty one
Poly = dict[Mono, Any]  # Mono → fmpq, never 0
ONE: Final = fmpq(1)
ZERO: Final[Poly] = {}
MAX_CASES: Final = 4096  # joint values of choices that a function of integers is tabulated over
CONSTANTS: Final = ("pi", "one_minus_power")
MAX_POWER: Final = 1000  # of a sum that is multiplied out
MAX_FACTOR: Final = 1000  # primes that are looked for in numbers under a root


class Unsupported(Exception):
    """A value that these scalars cannot express."""


class TooLarge(Exception):
    """More terms, or more time, than allowed."""


@dataclass(frozen=True)
class Infinity:
    """±∞, which only comparisons, maxima and exp understand."""

    sign: int


@dataclass(frozen=True)
class Choice:
    """A variable with finitely many values; the last one is written as 1 − the others."""

    key: Hashable
    values: tuple[int, ...]


@dataclass(frozen=True)
class Atom:
    kind: str  # "symbol", "flag", "choice", "positive", "exp", "sum", "number", "max" or the name of a function
    args: tuple[Any, ...]  # polynomials as frozensets of items
    sign: str | None = None  # "positive" | "nonnegative"
    group: int = -1  # of a choice: which one


Need = tuple[str, frozenset[tuple[Mono, Any]]]


def raised(base: Fraction, n: int) -> Fraction:
    """A power of a number, if it is not too long to be written."""
    if abs(n) * max(base.numerator.bit_length(), base.denominator.bit_length()) > LONGEST and abs(base) != 1 and base:
        raise TooLarge(f"a number to the power of {n}")
    return base**n


def rational(value: Any) -> Any:
    q = Fraction(value)
    return fmpq(q.numerator, q.denominator)


def fraction(value: Any) -> Fraction:
    return Fraction(int(value.p), int(value.q))


class _Power(Fraction):
    """A fraction that knows its hash; interned, so that equal ones are identical."""

    __slots__ = ("_hash",)
    _hash: int

    def __hash__(self) -> int:  # type: ignore[override]
        return self._hash


_powers: dict[tuple[int, int], _Power] = {}


def exponent(e: Exponent) -> Exponent:
    if isinstance(e, int):
        return e
    if e.denominator == 1:
        return e.numerator
    key = (e.numerator, e.denominator)
    found = _powers.get(key)
    if found is None:
        found = _powers[key] = _Power(*key)
        found._hash = hash(key)
    return found


def _first(factor: tuple[int, Exponent]) -> int:
    return factor[0]


class Scalars:
    """One family of atoms. Polynomials of different families do not mix."""

    def __init__(self, max_terms: int = 200_000, deadline: float | None = None):
        self.atoms: list[Atom] = []
        self.needs: dict[Need, None] = {}
        self.doubts: dict[Need, None] = {}  # conditions of a branch of a choice with a symbolic condition
        self.branches = 0  # such branches that are being looked at
        self.guarded: dict[Need, None] = {}  # what is needed in them
        self._infinite_atoms: dict[int, bool] = {}
        self.loose = 0  # places that are being looked at, where something may be infinite that nobody sees
        self.blind = 0  # places where nobody sees that something is no number
        self.unsure: dict[Need, None] = {}  # what is needed for it to be finite
        self.max_terms = max_terms
        self.deadline = deadline  # of processor time
        self._number: dict[Hashable, int] = {}
        self._products: dict[int, tuple[tuple[Mono, Any], ...]] = {}
        self.factors: list[Factors] = [()]  # of every monomial
        self._monos: dict[Factors, Mono] = {(): 0}
        self._indicator: list[bool] = []
        self.comparisons: set[int] = set()  # indicators of something being positive
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
        return self.mono(tuple(sorted(powers.items(), key=_first)))

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

    # -- powers ------------------------------------------------------------------------------------------------------

    def inverse(self, p: Poly) -> Poly:
        self._need("nonzero", p, divides=True)
        c = self.constant(p)
        if c is not None:
            if not c:
                raise Unsupported("division by zero")
            return {0: 1 / c}
        coefficient, content, rest = self._primitive(p, lambda x: not self._indicator[x])
        made = self.scale(self._raised(content, -1), 1 / coefficient)
        if rest is not None:
            made = self.mul(made, self.one(self._sum(rest), -1))
        return made

    def _primitive(self, p: Poly, may_leave: Callable[[int], bool]) -> tuple[Any, Factors, Poly | None]:
        """coefficient > 0, common factors that may leave, and what is left (None: 1)."""
        monos = list(p)
        low: dict[int, Exponent] = {}
        seen: dict[int, int] = {}
        for m in monos:
            for x, e in self.factors[m]:
                seen[x] = seen.get(x, 0) + 1
                low[x] = min(low.get(x, e), e)
        content: Factors = tuple(
            (x, e) for x, e in sorted((x, e if seen[x] == len(monos) else min(e, 0)) for x, e in low.items()) if e and may_leave(x)
        )
        leaving = dict(content)
        scale = abs(p[min(monos)])
        rest: Poly = {}
        for m, c in p.items():
            kept = dict(self.factors[m])
            for x, e in leaving.items():
                d = exponent(kept.pop(x, 0) - e)
                if d:
                    kept[x] = d
            rest[self.sorted(kept)] = c / scale
        if len(rest) == 1 and 0 in rest and rest[0] == 1:
            return scale, content, None
        expanded: Poly = {}
        for m, c in rest.items():  # a factor that left may have undone a division by a sum
            self.into(expanded, self._settled(m), c)
        return scale, content, expanded

    def multiplied_out(self, p: Poly) -> Poly:
        """p without positive whole powers of sums."""
        if not any(e >= 1 and self.atoms[x].kind == "sum" for m in p for x, e in self.factors[m]):
            return p
        made: Poly = {}
        for m, c in p.items():
            self.into(made, self._settled(m), c)
        return made

    def _settled(self, m: Mono) -> Poly:
        """A monomial with positive whole powers of sums multiplied out."""
        if not any(self.atoms[x].kind == "sum" and e >= 1 for x, e in self.factors[m]):
            return {m: ONE}
        made = self.const(1)
        for x, e in self.factors[m]:
            if self.atoms[x].kind == "sum" and e >= 1:
                whole = e.__floor__()
                made = self.mul(made, self.power(self.inside(x), whole))
                e = exponent(e - whole)
            if e:
                made = self.mul(made, self.one(x, e))
        return made

    def _sum(self, p: Poly) -> int:
        return self._atom("sum", (frozenset(p.items()),), "positive" if self.sign(p) == "positive" else None)

    def pow(self, p: Poly, e: Exponent) -> Poly:
        e = exponent(e)
        if isinstance(e, int):
            return self.power(p if e >= 0 else self.inverse(p), abs(e))
        self._need("nonnegative" if e > 0 else "positive", p, divides=e < 0)
        if not p:
            if e < 0:
                raise Unsupported("division by zero")
            return {}
        coefficient, content, rest = self._primitive(p, lambda x: self.atoms[x].sign == "positive")
        made = self._root(fraction(coefficient), e)
        made = self.mul(made, self._raised(content, e))
        if rest is None:
            return made
        c = self.constant(rest)
        if c is not None:
            raise Unsupported("a root of a negative number")
        ((number, k), *others) = rest.items()
        m = self.factors[number]
        if not others and len(m) == 1 and m[0][1] == 1 and k == 1 and not self._indicator[m[0][0]]:
            return self.mul(made, self.one(m[0][0], e))  # x^e, defined for x ≥ 0 only
        return self.mul(made, self.one(self._sum(rest), e))

    def _raised(self, m: Factors, e: Exponent) -> Poly:
        """m^e, factor by factor."""
        numbers = [f for f in m if self.atoms[f[0]].kind == "number"]
        made: Poly = {self.mono(tuple((x, exponent(f * e)) for x, f in m if self.atoms[x].kind != "number")): ONE}
        for x, f in numbers:
            made = self.mul(made, self._root(Fraction(self.atoms[x].args[0]), f * e))
        if e > 0:
            ((kept, c),) = made.items()
            made = self.scale(self._settled(kept), c)
        return made

    def _root(self, c: Fraction, e: Exponent) -> Poly:
        """c^e for c > 0: whole powers become coefficients."""
        coefficient, mono = Fraction(1), []
        factors: dict[int, int] = {}
        for n, direction in ((c.numerator, 1), (c.denominator, -1)):
            d = 2
            while d <= MAX_FACTOR and n > 1:
                while n % d == 0:
                    factors[d] = factors.get(d, 0) + direction
                    n //= d
                d += 1
            if n > 1:
                factors[n] = factors.get(n, 0) + direction
        for n, k in factors.items():
            power = Fraction(k) * e
            whole = power.__floor__()
            coefficient *= raised(Fraction(n), whole)
            if power != whole:
                mono.append((self._atom("number", (n,), "positive"), exponent(power - whole)))
        return {self.mono(tuple(sorted(mono, key=_first))): rational(coefficient)}

    # -- functions ---------------------------------------------------------------------------------------------------

    def exp(self, p: Poly) -> Poly:
        made = self.const(1)
        for m, c in self.multiplied_out(p).items():
            flags = tuple(f for f in self.factors[m] if self._indicator[f[0]])
            plain = self.mono(tuple(f for f in self.factors[m] if not self._indicator[f[0]]))
            grown = self._exp_of_log(plain, exponent(fraction(c)))
            if grown is None:
                grown = self.one(self._atom("exp", (plain,), "positive"), fraction(c))
            if flags:  # exp(I·x) = 1 + I·(exp x − 1) for I = 0 or 1
                grown = self.add(self.const(1), self.mul({self.mono(flags): ONE}, self.sub(grown, self.const(1))))
            made = self.mul(made, grown)
        return made

    def _exp_of_log(self, m: Mono, c: Exponent) -> Poly | None:
        """exp(c·log x) = x^c where x is positive by its form: a logarithm of anything else needs something that its power does not say.

        x itself is not multiplied out: it is often divided by elsewhere."""
        factors = self.factors[m]
        if len(factors) != 1 or factors[0][1] != 1 or self.atoms[factors[0][0]].kind != "log":
            return None
        x: Poly = dict(self.atoms[factors[0][0]].args[0])
        if self.sign(x) != "positive":
            return None
        if c != 1:
            return self.pow(x, c)
        coefficient, content, rest = self._primitive(x, lambda a: not self._indicator[a])
        made = self.scale(self._raised(content, 1), coefficient)
        return made if rest is None else self.mul(made, self.one(self._sum(rest)))

    def log(self, p: Poly) -> Poly:
        self._need("positive", p)
        if not p:
            raise Unsupported("logarithm of zero")
        coefficient, content, rest = self._primitive(p, lambda x: self.atoms[x].sign == "positive")
        made: Poly = {}
        for n, k in self._factors(fraction(coefficient)):
            self.into(made, self.one(self._atom("log", (frozenset({(0, rational(n))}),))), rational(k))
        for x, e in content:
            atom = self.atoms[x]
            if atom.kind == "exp":
                self.into(made, {atom.args[0]: rational(e)}, ONE)
            else:
                inner = atom.args[0] if atom.kind == "sum" else frozenset(self.one(x).items())
                self.into(made, self.one(self._atom("log", (inner,))), rational(e))
        if rest is not None:
            self.into(made, self.one(self._atom("log", (frozenset(rest.items()),))), ONE)
        return made

    @staticmethod
    def _factors(c: Fraction) -> list[tuple[int, int]]:
        return [(n, k) for n, k in ((c.numerator, 1), (c.denominator, -1)) if n != 1]

    def function(self, name: str, p: Poly) -> Poly:
        """tanh, erf, sin and the like: equal arguments give equal values; odd and even functions know their sign; nothing else is known."""
        p = self.multiplied_out(p)
        if name in ("tanh", "erf", "sin", "cos", "abs"):
            if not p:
                return self.const(1 if name == "cos" else 0)
            flipped = p[min(p)] < 0
            made = self.one(self._atom(name, (frozenset((self.neg(p) if flipped else p).items()),), self._range(name)))
            return self.neg(made) if flipped and name in ("tanh", "erf", "sin") else made
        return self.one(self._atom(name, (frozenset(p.items()),), self._range(name)))

    @staticmethod
    def _range(name: str) -> str | None:
        return {"abs": "nonnegative"}.get(name)

    def positive_constant(self, name: str, args: tuple[Any, ...]) -> Poly:
        """A number that is positive, and of which nothing else is known."""
        assert name in CONSTANTS
        return self.one(self._atom(name, args, "positive"))

    def max(self, values: Iterable[Poly]) -> Poly:
        found: set[frozenset[tuple[Mono, Any]]] = set()
        numbers = []
        for p in map(self.multiplied_out, values):
            c = self.constant(p)
            if c is not None:
                numbers.append(c)
                continue
            ((number, k), *others) = p.items()
            m = self.factors[number]
            if not others and k == 1 and len(m) == 1 and m[0][1] == 1 and self.atoms[m[0][0]].kind == "max":
                for inner in self.atoms[m[0][0]].args[0]:
                    c = self.constant(dict(inner))
                    if c is None:
                        found.add(inner)
                    else:
                        numbers.append(c)
            else:
                found.add(frozenset(p.items()))
        if numbers:
            found.add(frozenset(self.const(max(numbers)).items()))
        if len(found) == 1:
            return dict(next(iter(found)))
        positive = any(self.sign(dict(p)) == "positive" for p in found)
        least = any(self.sign(dict(p)) is not None for p in found)
        sign = "positive" if positive else "nonnegative" if least else None
        return self.one(self._atom("max", (frozenset(found),), sign))

    def positive(self, p: Poly) -> Poly:
        """The indicator of p > 0."""
        c = self.constant(p)
        if c is not None:
            return self.const(1 if c > 0 else 0)
        if self.sign(p) == "positive":
            return self.const(1)
        if self.sign(self.neg(p)) is not None:
            return {}
        _, _, rest = self._primitive(p, lambda x: self.atoms[x].sign == "positive")
        if rest is None:
            return self.const(1)
        rest = self._divided(rest)
        c = self.constant(rest)
        if c is not None:
            return self.const(1 if c > 0 else 0)
        if self._is_indicator(rest):
            return rest
        made = self._atom("positive", (frozenset(rest.items()),), "nonnegative", True)
        self.comparisons.add(made)
        if self.sign(rest, 0) is not None:  # then each summand is 0 where the sum is
            for m in rest:
                left = [(x, e) for x, e in self.factors[m] if self.atoms[x].sign != "positive"]
                if len(left) == 1 and left[0][1] > 0 and self.atoms[left[0][0]].sign == "nonnegative":
                    for x in (left[0][0], *self._followers.get(left[0][0], ())):
                        self.implied.setdefault(x, set()).add(made)
        return self.one(made)

    def _is_indicator(self, p: Poly) -> bool:
        ((m, c), *others) = p.items()
        return not others and c == 1 and all(self._indicator[x] for x, _ in self.factors[m])

    def _divided(self, p: Poly) -> Poly:
        """What has the sign of p: without what all of it is divided by, if that is not negative; it is not 0 either."""
        first, *others = [dict(self.factors[m]) for m in p]
        under = {x for x, e in first.items() if e < 0 and isinstance(e, int) and all(o.get(x) == e for o in others)}
        under = {x for x in under if (self.sign(self.inside(x)) if self.atoms[x].kind == "sum" else self.atoms[x].sign) is not None}
        return {self.mono(tuple(f for f in self.factors[m] if f[0] not in under)): c for m, c in p.items()} if under else p

    def ordered(self, key: Hashable, size: int) -> Poly:
        """Where something is in a sorted row: one of `size` positions, the same for equal rows."""
        return self.choice(Choice(key, tuple(range(size))))

    # -- integers ----------------------------------------------------------------------------------------------------

    def finite(self, p: Poly) -> bool:
        """Whether a polynomial depends on choices only."""
        return all(self.atoms[x].kind == "choice" for m in p for x, _ in self.factors[m])

    def tabulate(self, f: Callable[..., Any], args: Sequence[Poly]) -> Poly:
        """A function of integers that depend on choices, as a polynomial in their indicators."""
        if not all(self.finite(p) for p in args):
            raise Unsupported("an integer that is not a choice among known values")
        groups = sorted({self.atoms[x].group for p in args for m in p for x, _ in self.factors[m]})
        choices = [self._by_group[g] for g in groups]
        cases = 1
        for c in choices:
            cases *= len(c.values)
        if cases > MAX_CASES:
            raise Unsupported(f"an integer that depends on {len(choices)} others")
        values: dict[tuple[int, ...], Any] = {}
        for point in itertools.product(*(c.values for c in choices)):
            here = dict(zip(groups, point, strict=True))
            values[point] = rational(f(*(self._at(p, here) for p in args)))

        def build(at: int, prefix: tuple[int, ...]) -> Poly:
            if at == len(choices):
                return self.const(values[prefix])
            choice = choices[at]
            parts = {v: build(at + 1, (*prefix, v)) for v in choice.values}
            last = parts[choice.values[-1]]
            made = dict(last)
            for v in choice.values[:-1]:
                difference = self.sub(parts[v], last)
                if difference:
                    table = {w: ONE if w == v else fmpq(0) for w in choice.values}
                    self.fma(made, self._expand(choice, table), difference)
            return made

        return build(0, ())

    def _at(self, p: Poly, here: dict[int, int]) -> int:
        total = fmpq(0)
        for m, c in p.items():
            if all(self._choice_value[x] == here[self.atoms[x].group] for x, _ in self.factors[m]):
                total += c
        if total.q != 1:
            raise Unsupported("a fraction where an integer was expected")
        return int(total.p)

    # -- conditions --------------------------------------------------------------------------------------------------

    @contextmanager
    def loosely(self, yes: bool = True, blind: bool = False) -> Iterator[None]:
        """While something is looked at that may be infinite, and of which nobody may see that it is no number."""
        self.loose += yes
        self.blind += blind
        try:
            yield
        finally:
            self.loose -= yes
            self.blind -= blind

    def _need(self, kind: str, p: Poly, divides: bool = False) -> None:
        """Note a condition. Of what may be infinite, which is 0 as a divisor, it says that it is not."""
        have = self.sign(p)
        c = self.constant(p)
        if have == "positive" or (have is not None and kind == "nonnegative") or (kind == "nonzero" and c is not None and c):
            return
        noted = self.guarded if self.branches else self.needs
        if self.loose or divides:
            root = kind == "nonnegative" and not self.branches and not self.blind  # that of a negative number is no number, which is seen
            if self.may_be_infinite(p) or (self.loose and not root):
                noted = self.unsure
        noted[kind, frozenset(p.items())] = None

    def may_be_infinite(self, p: Poly) -> bool:
        """Whether something in it divides, or is a logarithm, unless of what is positive by its form."""
        return any((e < 0 and self.atoms[x].sign != "positive") or self._infinite_atom(x) for m in p for x, e in self.factors[m])

    def _infinite_atom(self, x: int) -> bool:
        found = self._infinite_atoms.get(x)
        if found is None:
            atom = self.atoms[x]
            args = atom.args[0] if atom.kind == "max" else atom.args
            inner: list[Poly] = [dict(a) for a in args if isinstance(a, frozenset)]
            if atom.kind == "exp":
                inner = [{args[0]: ONE}]
            found = any(self.may_be_infinite(p) for p in inner) or (atom.kind == "log" and self.sign(inner[0]) != "positive")
            self._infinite_atoms[x] = found
        return found
