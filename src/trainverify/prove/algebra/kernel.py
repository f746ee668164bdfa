"""The kernel of the tensor-algebra prover: canonical forms of indexed expressions. Trusted, and free of the rest.

A *polynomial* maps monomials to rational coefficients. A *monomial* is a sorted tuple of factors
`(atom, indices, power)`; an index is a constant (≥ 0) or a variable (< 0). *Atoms* are hash-consed:
- `input`    an element of an unknown tensor;
- `sum`      Σ over bound variables of a connected product;
- `max`      the same for the maximum (min is −max(−·));
- `fn`       a function of a polynomial;
- `cut`      a polynomial under a short name; it can be opened again;
- `delta`    1 if two indices are equal, else 0;  `iota` the value of an index;
- `digit`    1 if a digit of an integer input equals an index, else 0;  `valid` 1 if the integer is in range.

Two expressions with identical forms are equal for all inputs that satisfy the recorded conditions. The converse
does not hold: forms are canonical only as far as its laws go, which `tests/prove/laws.py` lists. Whatever cannot be handled raises
`Unsupported`; growth beyond `Limits` raises `TooLarge`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from trainverify.prove.algebra.cancelled import Cancelled
from trainverify.prove.algebra.terms import (
    NOTHING,
    SAME,
    Coef,
    Factor,
    Index,
    Need,
    Poly,
    Power,
    TooLarge,
    Ungranted,
    Unsupported,
    as_constant,
    constant,
    named_need,
    raised,
    roots,
    scale,
    tidy,
    variables,
)

PEAK_DIGITS: Final = 4  # of a row whose maxima are counted
CASES: Final = 3  # masks that are told apart in the argument of a function
AT_ZERO: Final[Mapping[str, int]] = {"tanh": 0, "erf": 0, "sin": 0, "cos": 1, "abs": 0, "sign": 0, "floor": 0, "as_int": 0}


@dataclass
class Kernel(Cancelled):
    """Functions of polynomials, over sums, names and facts."""

    closed: Callable[[int], bool] | None = None  # sums that exp and maxima do not open; none if they open all

    def applied(self, name: str, p: Poly, param: Any = None) -> Poly:
        """A function that is defined everywhere; of masked values it is one of the values, where the mask is 1."""
        p = self.flat(p, self.closed)
        if not p and name in AT_ZERO:
            return constant(AT_ZERO[name])
        conditions = self._conditions(p)
        if not conditions or len(conditions) > CASES:
            return self.fn(name, p, param)
        return self._by_cases(min(conditions), p, lambda q: self.applied(name, q, param))

    def exp(self, p: Poly) -> Poly:
        """exp(Σ cᵢmᵢ) = Π exp(mᵢ)^cᵢ; exp(log x) = x; exp(log 0-or-1) = the indicator. It is 0 at −∞."""
        result = constant(1)
        opened = self.flat(p, self.closed)
        few = len(self._conditions(opened)) <= CASES
        for m, c in opened.items():
            if len(m) == 1 and m[0][2] == 1 and self.atoms[m[0][0]].kind == "fn":
                name = self.name(m[0][0])
                inner = self.argument(m[0][0], m[0][1])
                if name == "log_indicator":
                    if c <= 0:
                        raise Unsupported("infinity as an argument of exp")
                    result = self.times(result, self.single(inner, indicator=True))
                    continue
                if name == "log":
                    result = self.times(result, self.power(inner, c))
                    continue
            alone = len(m) == 1 and m[0][2] == 1
            peak = alone and c > 0 and self.atoms[m[0][0]].kind == "max" and self.infinite(m[0][0]) and self.from_below(m[0][0])
            if alone and c < 0 and (not self.infinite(m[0][0]) or self.from_below(m[0][0])):
                self.finite({m: 1})  # that of ∞ is not finite
            elif not peak:  # the exponential of −∞ is 0
                self.number({m: 1})
            condition = self._condition({m: 1})
            if condition is not None and (few or self.atoms[condition[0]].kind == "fn"):  # of few masks, or of a comparison
                try:
                    result = self.times(result, self._by_cases(condition, {m: c}, self.exp))
                    continue
                except Ungranted:
                    pass
            unit = self.fn("exp", {m: 1}, positive=not any(self.masked(u) for u, _, _ in m), nonnegative=True)
            ((factor,),) = unit
            result = self.times(result, self.monomial([(factor[0], factor[1], tidy(c))]))
        return result

    def log(self, p: Poly) -> Poly:
        """log(exp(m)^p·X) = p·m + log X; log of a product of positive factors is the sum of logs."""
        self.finite(p)
        p = self.collapse(self.plus(p)) if len(p) > 1 else p
        if not p:
            raise Unsupported("log of zero")
        lead, factors, prim = self.content(p)
        if lead <= 0:
            raise Unsupported("log of a number that is not positive")
        inside = list(next(iter(prim)))
        if len(prim) > 1:
            ((whole, c),) = self._whole(1, (), prim).items()
            inside, lead = list(whole), tidy(lead * c)
        result: Poly = {} if lead == 1 else self.fn("log", constant(lead))
        rest: list[Factor] = []
        for u, idx, w in (*factors, *inside):
            a = self.atoms[u]
            if self.name(u) == "exp":
                if not a.positive:
                    self.need("positive", u, idx)
                result = self.add(result, scale(self.argument(u, idx), w))
            elif a.positive:
                result = self.add(result, scale(self.fn("log", {((u, idx, 1),): 1}), w))
            else:
                rest.append((u, idx, w))
        if rest:
            unit = self.fn("log", self.monomial(rest))
            ((wrapped,),) = unit
            if len(rest) == 1:
                self.need("nonzero" if _even(rest[0][2]) else "positive", rest[0][0], rest[0][1])
            else:  # the product must be positive, not each factor
                self.need("defined", wrapped[0], wrapped[1])
            result = self.add(result, unit)
        return result

    def power(self, p: Poly, e: Power) -> Poly:
        """pᵉ for a rational e. Integers distribute over products; fractions only over factors known to be positive."""
        e = tidy(e)
        if e == 1:
            return p
        if e == 0:
            return constant(1)
        p = self.finite(p) if e > 0 else self.number(p)  # 1/∞ is 0
        p = self.collapse(self.plus(p)) if len(p) > 1 else p
        c = as_constant(p)
        if c is not None:
            return self._number_power(c, e)
        condition = self._condition(p) if len(p) > 1 else None
        if condition is None or all(any(f[:2] == condition for f in m) for m in p):
            return self._power_of_one(self.single(p), e)
        try:
            return self._by_cases(condition, p, lambda q: self.power(q, e))
        except Ungranted:
            return self._power_of_one(self.single(p), e)

    def _power_of_one(self, one: Poly, e: Power) -> Poly:
        """The power of a single term, and what that needs."""
        ((m, coef),) = one.items()
        if isinstance(e, int):
            if e < 0:
                self._nonzero(m)
            return self.monomial([(u, idx, tidy(w * e)) for u, idx, w in m], tidy(raised(coef, e, self.limits.bits)))
        outside: list[Factor] = []
        inside: list[Factor] = []
        for u, idx, w in m:
            if self.atoms[u].positive:
                outside.append((u, idx, tidy(w * e)))
            else:
                inside.append((u, idx, w))
        sign = 1 if coef > 0 else -1
        root = self._number_power(coef * sign, e)
        if not inside:
            if sign < 0:
                raise Unsupported("a fractional power of a negative number")
            return self.times(root, self.monomial(outside))
        product = self.monomial(inside, sign)
        wrapped = self.fn("pow", product, e, nonnegative=True)
        if sign > 0 and (self.is_nonnegative(tuple(inside)) or len(inside) == 1):
            for u, idx, w in inside:
                if e < 0 or not (self.atoms[u].nonnegative or _even(w)):
                    self.need("nonzero" if _even(w) else "positive" if e < 0 or w < 0 else "nonnegative", u, idx)
        else:  # the product must be positive, not each factor
            ((made,),) = wrapped
            self.need("defined", made[0], made[1])
        return self.times(root, self.times(self.monomial(outside), wrapped))

    def _number_power(self, c: Coef, e: Power) -> Poly:
        if isinstance(e, int):
            if c == 0 and e < 0:
                raise Unsupported("division by zero")
            return constant(raised(c, e, self.limits.bits))
        if c < 0:
            raise Unsupported("a fractional power of a negative number")
        if c == 0 and e < 0:
            raise Unsupported("division by zero")
        if c in (0, 1):
            return constant(c)
        rational, parts = roots(Fraction(c), e, self.limits.bits)
        factors: list[Factor] = []
        for prime, part in parts:
            ((root,),) = self.fn("number", constant(prime), positive=True, nonnegative=True)
            self._numbers[root[0]] = prime
            factors.append((root[0], (), part))
        return self.monomial(factors, tidy(rational))

    def indicator_of(self, name: str, p: Poly) -> Poly:
        """1 where a condition on p holds (p > 0, p ≥ 0, p = 0); positive factors of p do not matter."""
        c = as_constant(self.number(p))
        if c is not None:
            return constant(int({"gt0": c > 0, "ge0": c >= 0, "eq0": c == 0}[name]))
        lead, factors, prim = self.content(p)
        keep = [f for f in factors if not (self.atoms[f[0]].positive or (self.atoms[f[0]].nonnegative and self._noted("nonzero", *f[:2])))]
        sign = 1 if lead > 0 else -1
        argument = self.times(self.monomial(keep, sign if name != "eq0" else 1), prim)
        if as_constant(argument) is not None:
            return self.indicator_of(name, argument)
        mask = next((f for f in keep if self.atoms[f[0]].indicator), None)
        if mask is not None:  # I·p > 0 where I is 1 and p > 0; I·p = 0 also where I is 0
            inner = self.indicator_of(name, self.times(self.monomial([f for f in keep if f is not mask], sign), prim))
            one = self.monomial([mask])
            return self.times(one, inner) if name == "gt0" else self.add(constant(1), scale(one, -1), self.times(one, inner))
        return self.fn(name, argument, indicator=True, nonnegative=True)

    def integral(self, p: Poly) -> bool:
        """Whether p certainly has integer values."""
        whole = {"iota", "delta", "digit", "valid"}
        for m, c in p.items():
            if not isinstance(c, int):
                return False
            for u, _, w in m:
                if not (isinstance(w, int) and w > 0 and (self.atoms[u].indicator or self.atoms[u].kind in whole)):
                    return False
        return True

    def maximum(self, p: Poly, over: Mapping[Index, int]) -> Poly:
        """max over variables; variables that do not occur do not matter; max of max is one max."""
        present = {v: s for v, s in over.items() if v in variables(p)}
        if not present:
            return p
        if len(p) == 1:
            ((m, c),) = p.items()
            if c == 1 and len(m) == 1 and m[0][2] == 1 and self.atoms[m[0][0]].kind == "max":
                inner, fresh = self.opened_max(m[0])
                return self.row("max", inner, {**fresh, **present})
        return self.row("max", p, present)

    def row(self, kind: str, p: Poly, over: Mapping[Index, int], at: Sequence[Index] = (), at_sizes: Sequence[int] = ()) -> Poly:
        """A function of all values of p along variables, and of the indices `at` in its result. Nothing is known about it."""
        number: dict[Index, int] = {}
        form, slots, slot_sizes, sizes = [], [], [], []
        if kind != "max":  # the order of a row matters: its digits keep theirs
            number = {v: i for i, v in enumerate(over)}
            sizes = list(over.values())
        for m, c in self.ordered(self.flat(p, self.closed)):
            factors = []
            for u, idx, w in m:
                entries = []
                for i, s in zip(idx, self.atoms[u].sizes, strict=True):
                    if i in over:
                        if i not in number:
                            number[i] = len(number)
                            sizes.append(over[i])
                        entries.append(number[i])
                    else:
                        entries.append(-1)
                        slots.append(i)
                        slot_sizes.append(s)
                factors.append((u, w, tuple(entries)))
            form.append((c, tuple(factors)))
        for v, s in over.items():  # variables that do not occur still say how long a row is
            if v not in number:
                number[v] = len(number)
                sizes.append(s)
        # the sizes of the result's digits say what position they mean
        key = (tuple(form), tuple(sizes)) if kind == "max" else (tuple(form), tuple(sizes), tuple(at_sizes))
        return {(self.shared(kind, key, [*slots, *at], [*slot_sizes, *at_sizes], dict),): 1}

    def _by_cases(self, condition: tuple[int, tuple[Index, ...]], p: Poly, function: Callable[[Poly], Poly]) -> Poly:
        """f(p) = I·f(p where I = 1) + (1 − I)·f(p where I = 0). What a case needs must be known: it would hold in that case only."""
        holds = self.add(*[self.monomial([f for f in m if f[:2] != condition], c) for m, c in p.items()])
        fails = {m: c for m, c in p.items() if not any(f[:2] == condition for f in m)}
        mask = self.monomial([(*condition, 1)])
        assuming, self.assuming = self.assuming, NOTHING
        try:
            yes, no = function(holds), function(fails)
        finally:
            self.assuming = assuming
        return self.add(self.times(mask, yes), no, scale(self.times(mask, no), -1))

    def _condition(self, p: Poly) -> tuple[int, tuple[Index, ...]] | None:
        """A 0/1 condition that some term has as a factor; of many masks none."""
        found = self._conditions(p)
        if len(found) > CASES:
            found = {c for c in found if self.atoms[c[0]].kind == "fn"}
        return min(found, default=None)

    def _counts_peaks(self, uid: int, idx: tuple[Index, ...]) -> bool:
        """Whether a Σ counts where the values of a row, or the largest of its parts, equal their maximum: one of them does."""
        (body, sizes), _ = self.atoms[uid].data
        if len(body) != 1 or self.name(body[0][0]) not in (SAME, "eq0") or len(sizes) > PEAK_DIGITS:
            return False
        ((counted, at, _),), over = self.opened_sum(uid, idx)
        pairs = [tuple(self.arguments(counted, at))] if self.name(counted) == SAME else self._sides(self.argument(counted, at))
        for value, peak in (side for pair in pairs for side in (pair, pair[::-1])):
            single = next(iter(peak)) if len(peak) == 1 and set(peak.values()) == {1} else ()
            if len(single) != 1 or single[0][2] != 1 or self.atoms[single[0][0]].kind != "max" or over.keys() & set(single[0][1]):
                continue
            inside, fresh = self.opened_max(single[0])
            part = next(iter(value)) if len(value) == 1 and set(value.values()) == {1} else ()
            element, every = value, over
            if len(part) == 1 and part[0][2] == 1 and self.atoms[part[0][0]].kind == "max":
                element, rest = self.opened_max(part[0])
                every = {**over, **rest}
            element = self.flat(element)
            for order in itertools.permutations(every) if len(every) <= PEAK_DIGITS else ():
                if [every[v] for v in order] != [*fresh.values()]:
                    continue
                if self.flat(self.substitute(inside, dict(zip(fresh, order, strict=True)))) == element:
                    return True
        return False

    def _sides(self, p: Poly) -> list[tuple[Poly, Poly]]:
        """Ways to write p = 0 as value = maximum: one for each maximum that stands alone in p."""
        alone = [m for m in p if len(m) == 1 and m[0][2] == 1 and self.atoms[m[0][0]].kind == "max"]
        return [({n: tidy(Fraction(-c) / p[m]) for n, c in p.items() if n != m}, {m: 1}) for m in alone]

    def _unmasked(self, uid: int, idx: tuple[Index, ...], known: Collection[Need]) -> bool:
        """Whether a maximum of masked values is one of values: the Σ of their exponentials, 0 at −∞, is known not to be 0."""
        if not self.from_below(uid):
            return False
        assuming, self.assuming = self.assuming, NOTHING
        try:
            inside, over = self.opened_max((uid, idx, 1))
            total = self.sum(self.exp(inside), over)
        except (Unsupported, TooLarge):
            return False
        finally:
            self.assuming = assuming
        if len(total) != 1:
            return False
        ((m, _),) = total.items()
        return all(self.certain(named_need("nonzero", u, at), known) for u, at, w in m if w > 0)


def _even(power: Power) -> bool:
    return isinstance(power, int) and power % 2 == 0
