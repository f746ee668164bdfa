"""Scalars of the element domain: polynomials with rational coefficients over interned atoms.

An atom is a symbol, an indicator (0 or 1), or a function of polynomials: `exp` of a monomial, a power of a sum, a
maximum, `tanh` and so on, uninterpreted but for the laws written here. Atoms and monomials are interned.
What a division, a root or a logarithm needs in order to be defined is recorded in `needs`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, Final, NamedTuple

from flint import fmpq

from trainverify.domains.atoms import (
    ONE,
    Choice,
    Exponent,
    Factors,
    Infinity,
    Mono,
    Need,
    Poly,
    TooLarge,
    Unsupported,
    atom_of,
    exponent,
    fraction,
    raised,
    rational,
)
from trainverify.domains.ring import Ring

__all__ = [
    "CONSTANTS",
    "ONE",
    "RESULT",
    "Choice",
    "Context",
    "Exponent",
    "Factors",
    "Infinity",
    "Mono",
    "Need",
    "Poly",
    "Scalars",
    "TooLarge",
    "Unsupported",
    "exponent",
    "fraction",
    "rational",
]

MAX_CASES: Final = 4096  # joint values of choices that a function of integers is tabulated over
CONSTANTS: Final = ("pi", "one_minus_power")
MAX_FACTOR: Final = 1000  # primes that are looked for in numbers under a root


class Context(NamedTuple):
    """Where a subexpression stands in a result that has a value."""

    branch: bool = False  # in a branch that may not be taken
    infinite: bool = False  # where it may be infinite
    hidden: bool = False  # where it may be no number


RESULT: Final = Context()


class Scalars(Ring):
    """A ring with roots, functions, indicators and integers, and the conditions under which they are defined."""

    def __init__(self, max_terms: int = 200_000, deadline: float | None = None):
        super().__init__(max_terms, deadline)
        self.needs: dict[Need, None] = {}
        self.doubts: dict[Need, None] = {}  # conditions of a branch of a choice with a symbolic condition
        self.context = RESULT  # where the subexpression stands that is being made
        self.guarded: dict[Need, None] = {}  # conditions of subexpressions in a branch
        self.unsure: dict[Need, None] = {}  # conditions of subexpressions that may be infinite
        self._infinite_atoms: dict[int, bool] = {}
        self.comparisons: set[int] = set()  # indicators of something being positive

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
        return {self.mono(tuple(sorted(mono, key=atom_of))): rational(coefficient)}

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
    def within(self, branch: bool = False, infinite: bool = False, hidden: bool = False) -> Iterator[None]:
        """While active, what is made stands there too."""
        before = self.context
        self.context = Context(before.branch or branch, before.infinite or infinite, before.hidden or hidden)
        try:
            yield
        finally:
            self.context = before

    def _need(self, kind: str, p: Poly, divides: bool = False) -> None:
        """Note a condition, by where the subexpression stands. Of one that may be infinite, which is 0 as a divisor, it says that it is
        not."""
        have = self.sign(p)
        c = self.constant(p)
        if have == "positive" or (have is not None and kind == "nonnegative") or (kind == "nonzero" and c is not None and c):
            return
        branch, infinite, hidden = self.context
        noted = self.guarded if branch else self.needs
        if infinite or divides:
            root = kind == "nonnegative" and not branch and not hidden  # that of a negative number is no number, nor is the result
            if self.may_be_infinite(p) or (infinite and not root):
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
