"""The ring of the kernel: atoms, monomials and polynomials over indices, and what they are made of. Trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

from trainverify.prove.algebra.terms import (
    BOUND,
    Atom,
    Coef,
    Factor,
    Index,
    Limits,
    Mono,
    Poly,
    Power,
    TooLarge,
    Trace,
    Unsupported,
    as_constant,
    raised,
    scale,
    sort_coef,
    tidy,
    within,
)

CONDITIONS: Final = frozenset({"fn", "input", "cut", "digit"})  # atoms that are 0 or 1 and decide about a case


@dataclass
class Ring:
    """The ring of polynomials over indexed atoms: products in canonical order, and atoms shared by what they are made of."""

    limits: Limits = field(default_factory=Limits)
    atoms: list[Atom] = field(default_factory=list)
    trace: Trace | None = None
    reasons: dict[int, Unsupported] = field(default_factory=dict)  # opaque function → why no law was used
    named: int = 0  # atoms below this are the logical program's; sums of others are opened when they are added to
    keep_constants: bool = True  # new atoms have constants built in; else every constant is a slot of its own
    _table: dict[Any, int] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=dict)  # atom of a prime under a root → the prime
    _forms: dict[Any, list[int]] = field(default_factory=dict)  # (kind, form) → atoms of different patterns, oldest first
    _labels: dict[str, str] = field(default_factory=dict)  # an integer input in a piece of its range → that input
    _fresh: int = BOUND

    def atom(self, kind: str, data: Any, sizes: tuple[int, ...], **flags: Any) -> int:
        key = (kind, data, sizes)
        found = self._table.get(key)
        if found is None:
            if len(self.atoms) >= self.limits.atoms:
                raise TooLarge("too many distinct expressions")
            found = len(self.atoms)
            self.atoms.append(Atom(found, kind, data, sizes, **flags))
            self._table[key] = found
        if self.trace is not None:
            self.trace.looked.add(found)
        return found

    def input(self, name: str, sizes: tuple[int, ...], indices: Sequence[Index], **flags: Any) -> Poly:
        return {((self.atom("input", name, sizes, **flags), tuple(indices), 1),): 1}

    def iota(self, size: int, index: Index) -> Poly:
        return {((self.atom("iota", size, (size,), nonnegative=True), (index,), 1),): 1}

    def delta(self, size: int, a: Index, b: Index) -> Poly:
        return self.monomial([(self.atom("delta", size, (size, size), indicator=True, nonnegative=True), (a, b), 1)])

    def bound(self) -> Index:
        self._fresh -= 1
        return self._fresh

    def shared(self, kind: str, form: Any, idx: Sequence[Index], sizes: Sequence[int], flags: Callable[[], dict[str, Any]]) -> Factor:
        """An atom for a form with index occurrences: equal variables share a slot.

        If an older atom of the form fits (same constants, slots filled consistently), that one is used.
        """
        for uid in self._forms.get((kind, form), ()):
            reps: dict[int, Index] = {}
            for k, i in zip(self.atoms[uid].pattern, idx, strict=True):
                if (k < 0 and i != -1 - k) or (k >= 0 and reps.setdefault(k, i) != i):
                    break
            else:
                if self.trace is not None:
                    self.trace.looked.add(uid)
                return uid, tuple(reps[k] for k in range(len(reps))), 1
        number: dict[Index, int] = {}
        pattern: list[int] = []
        slots: list[int] = []
        actual: list[Index] = []
        for i, s in zip(idx, sizes, strict=True):
            if i < 0 and i in number:
                pattern.append(number[i])
                continue
            if i < 0:
                number[i] = len(actual)
            elif self.keep_constants:
                pattern.append(-1 - i)
                continue
            pattern.append(len(actual))
            actual.append(i)
            slots.append(s)
        if len(slots) > self.limits.slots:
            raise TooLarge(f"an expression with {len(slots)} indices")
        uid = self.atom(kind, (form, tuple(pattern)), tuple(slots), **flags())
        self.atoms[uid].pattern = tuple(pattern)
        self._forms.setdefault((kind, form), []).append(uid)
        return uid, tuple(actual), 1

    def occurrences(self, uid: int, idx: Sequence[Index]) -> Iterator[Index]:
        """The index at every occurrence in an atom's form."""
        return iter([idx[k] if k >= 0 else -1 - k for k in self.atoms[uid].pattern])

    def fn(self, name: str, p: Poly, param: Any = None, **flags: Any) -> Poly:
        """An application that no law takes apart."""
        form, idx = self.encode(p)
        return {(self.shared("fn", (name, param, form), idx, self.slot_sizes(p), lambda: flags),): 1}

    def name(self, uid: int) -> str:
        """The function of an application, or the kind of another atom."""
        a = self.atoms[uid]
        return str(a.data[0][0]) if a.kind == "fn" else a.kind

    def argument(self, uid: int, idx: Sequence[Index]) -> Poly:
        """The polynomial under a function, with actual indices."""
        if self.trace is not None:
            self.trace.looked.add(uid)
        (_, _, form), _ = self.atoms[uid].data
        slots = self.occurrences(uid, idx)
        out: Poly = {}
        for c, factors in form:
            parts = [(u, tuple(next(slots) for _ in self.atoms[u].sizes), w) for u, w in factors]
            out = self.add(out, self.monomial(parts, c))
        return out

    def opened_sum(self, uid: int, idx: tuple[Index, ...]) -> tuple[list[Factor], dict[Index, int]]:
        """The factors of a Σ and its bound variables, under fresh names."""
        if self.trace is not None:
            self.trace.looked.add(uid)
        (body, sizes), _ = self.atoms[uid].data
        fresh = [self.bound() for _ in sizes]
        slots = self.occurrences(uid, idx)
        factors = [(u, tuple(fresh[e] if e >= 0 else next(slots) for e in entries), w) for u, w, entries in body]
        return factors, dict(zip(fresh, sizes, strict=True))

    def opened_max(self, f: Factor) -> tuple[Poly, dict[Index, int]]:
        if self.trace is not None:
            self.trace.looked.add(f[0])
        (form, sizes), _ = self.atoms[f[0]].data
        fresh = {self.bound(): s for s in sizes}
        names = list(fresh)
        slots = self.occurrences(f[0], f[1])
        out: Poly = {}
        for c, factors in form:
            parts = [(u, tuple(names[e] if e >= 0 else next(slots) for e in entries), w) for u, w, entries in factors]
            out = self.add(out, self.monomial(parts, c))
        return out, fresh

    def opened_row(self, f: Factor) -> tuple[Poly, list[Index]]:
        """What a row is made of, and the indices of the result of its function."""
        if self.trace is not None:
            self.trace.looked.add(f[0])
        (form, sizes, _), _ = self.atoms[f[0]].data
        names = [self.bound() for _ in sizes]
        slots = self.occurrences(f[0], f[1])
        out: Poly = {}
        for c, factors in form:
            parts = [(u, tuple(names[e] if e >= 0 else next(slots) for e in entries), w) for u, w, entries in factors]
            out = self.add(out, self.monomial(parts, c))
        return out, list(slots)

    def monomial(self, factors: Iterable[Factor], coef: Coef = 1) -> Poly:
        """A product in canonical order: equal factors joined, indicators idempotent, equalities applied."""
        powers: dict[tuple[int, tuple[Index, ...]], Power] = {}
        for uid, idx, p in factors:
            key = (uid, idx)
            powers[key] = powers[key] + p if key in powers else p
        if self._numbers:
            for (uid, idx), p in powers.items():
                if uid in self._numbers and not 0 <= p < 1:  # n^(k + f) = n^k·n^f: whole powers are rational
                    whole = math.floor(p)
                    coef = tidy(coef * raised(self._numbers[uid], whole, self.limits.bits))
                    powers[uid, idx] = p - whole
        atoms = self.atoms
        equal: tuple[int, Index, Index] | None = None
        conditions = False
        result = []
        for (uid, idx), p in powers.items():
            if p == 0:
                continue
            a = atoms[uid]
            if a.kind == "fn" and p != 1 and a.data[0][0] == "pow" and tidy(a.data[0][1] * p) == int(a.data[0][1] * p):
                # (x^e)^p = x^(e·p) for an integer e·p; x^e is there, so x ≥ 0
                rest = self.monomial(self._without(powers, uid, idx), coef)
                return self.times(rest, self.power(self.argument(uid, idx), int(a.data[0][1] * p)))
            if a.indicator:
                if p < 0 or p != int(p):
                    raise Unsupported("an indicator as a divisor")
                p = 1
                conditions |= a.kind == "fn"
                if a.kind == "delta":
                    i, j = idx
                    if i == j:
                        continue
                    if i >= 0 and j >= 0:
                        return {}  # two different constants
                    i, j = (i, j) if i < j else (j, i)  # the smaller one, a variable, is replaced by the other
                    equal = equal or (uid, i, j)
                    idx = (i, j)
            result.append((uid, idx, tidy(p) if isinstance(p, Fraction) else p))
        if equal is not None:
            return self._apply_equality(equal, result, coef)
        if len(result) > self.limits.factors:
            raise TooLarge(f"a product of {len(result)} factors")
        if self.reasons:
            self._apart(result, coef)
        result = self._digits(result)
        if conditions:
            result = self._implied(result)
        result.sort()
        return {tuple(result): coef} if coef else {}

    @staticmethod
    def _without(powers: Mapping[tuple[int, tuple[Index, ...]], Power], uid: int, idx: tuple[Index, ...]) -> list[Factor]:
        return [(u, i, p) for (u, i), p in powers.items() if (u, i) != (uid, idx)]

    def _apply_equality(self, equal: tuple[int, Index, Index], factors: list[Factor], coef: Coef) -> Poly:
        """δ(i,j)·f(i) = δ(i,j)·f(j), for each δ in turn."""
        uid, i, j = equal
        rest = [f for f in factors if not (f[0] == uid and f[1] == (i, j))]
        moved = [(u, tuple(j if x == i else x for x in idx), p) for u, idx, p in rest]
        inner = self.monomial(moved, coef)
        out: Poly = {}
        for m, c in inner.items():
            # further equalities have been applied inside; this one's variable is gone from the rest
            kept = [(uid, (i, j), 1), *m]
            kept.sort()
            out[tuple(kept)] = c
        return out

    def _digits(self, factors: list[Factor]) -> list[Factor]:
        """D(id)[i]·valid(id) = D(id)[i], also of a piece of the label's range; D(id)[c]·D(id)[c′] = 0 is left to the caller's sums."""
        atoms = self.atoms
        ids = {(atoms[u].data[0], idx[:-1]) for u, idx, _ in factors if atoms[u].kind == "digit"}
        ids |= {(self._labels[n], at) for n, at in ids if n in self._labels}
        if not ids:
            return factors
        return [f for f in factors if not (atoms[f[0]].kind == "valid" and (atoms[f[0]].data, f[1]) in ids)]

    def _implied(self, factors: list[Factor]) -> list[Factor]:
        """[x·y > 0]·x·y = x·y for x, y ≥ 0: where the condition does not hold the product is zero anyway."""
        there = {(u, idx) for u, idx, w in factors if w > 0 and self.atoms[u].nonnegative}
        return [f for f in factors if not (self.name(f[0]) == "gt0" and within(self.argument(f[0], f[1]), there))]

    def add(self, *polys: Poly) -> Poly:
        out: Poly = {}
        for p in polys:
            for m, c in p.items():
                s = tidy(out.get(m, 0) + c)
                if s:
                    out[m] = s
                else:
                    out.pop(m, None)
        if len(out) > self.limits.monomials:
            raise TooLarge(f"a sum of {len(out)} terms")
        return out

    def times(self, p: Poly, q: Poly) -> Poly:
        """Product, distributed."""
        if (c := as_constant(p)) is not None:
            return scale(q, c)
        if (c := as_constant(q)) is not None:
            return scale(p, c)
        if len(p) * len(q) > self.limits.monomials:
            raise TooLarge("a product of long sums")
        return self.add(*[self.monomial((*m, *n), tidy(c * d)) for m, c in p.items() for n, d in q.items()])

    def substitute(self, p: Poly, to: Mapping[Index, Index]) -> Poly:
        """Variables replaced, all at once."""
        if not p or not to:
            return p
        if len(p) == 1:
            ((m, c),) = p.items()
            if len(m) == 1:
                ((u, idx, w),) = m
                if self.atoms[u].kind != "delta":
                    return {((u, tuple([to.get(i, i) for i in idx]), w),): c}
        out: Poly = {}
        clean = True
        for m, c in p.items():
            n = tuple([(u, tuple([to.get(i, i) for i in idx]), w) for u, idx, w in m])
            # renaming keeps a product canonical up to order unless factors meet or equalities fire
            if len({(u, i) for u, i, _ in n}) == len(n) and not any(self.atoms[u].kind == "delta" for u, _, _ in n):
                key = tuple(sorted(n))
                if key in out:
                    clean = False
                    break
                out[key] = c
            else:
                clean = False
                break
        if clean:
            return out
        return self.add(*[self.monomial([(u, tuple(to.get(i, i) for i in idx), w) for u, idx, w in m], c) for m, c in p.items()])

    def content(self, p: Poly) -> tuple[Coef, Mono, Poly]:
        """p = coefficient · monomial · primitive part; indicators leave only if every term has them."""
        common: dict[tuple[int, tuple[Index, ...]], Power] | None = None
        for m in p:
            here = {(u, idx): w for u, idx, w in m}
            if common is None:
                common = here
                continue
            merged: dict[tuple[int, tuple[Index, ...]], Power] = {}
            for key in common.keys() | here.keys():
                a, b = common.get(key, 0), here.get(key, 0)
                low = min(a, b)
                if low and not (self.atoms[key[0]].indicator and not (a and b)):
                    merged[key] = low
            common = merged
        powers = common or {}
        factors = tuple(sorted((u, idx, w) for (u, idx), w in powers.items()))
        # an indicator is idempotent: taking it out must leave the terms without it
        inverse = [(u, idx, -w) for u, idx, w in factors if not self.atoms[u].indicator]
        gone = {(u, idx) for u, idx, _ in factors if self.atoms[u].indicator}
        rests = ([f for f in m if (f[0], f[1]) not in gone] for m in p)
        prim = self.add(*[self.monomial([*rest, *inverse], c) for rest, c in zip(rests, p.values(), strict=True)])
        if not prim:
            return 1, (), prim  # it turns out to be 0
        lead = self.ordered(prim)[-1][1]  # the last one, so that a constant term does not set the scale
        if lead != 1 and self.reasons:
            for m in prim:
                self._apart(m, lead)
        return lead, factors, {m: tidy(Fraction(c) / lead) for m, c in prim.items()}

    def ordered(self, p: Poly) -> list[tuple[Mono, Coef]]:
        """Terms in an order that does not depend on the names of variables, as far as atoms and powers tell them apart."""
        return sorted(p.items(), key=lambda item: ([(u, w) for u, _, w in item[0]], sort_coef(item[1]), item[0]))

    def encode(self, p: Poly) -> tuple[Any, tuple[Index, ...]]:
        """A polynomial as a form without indices, and its indices in the order of the form."""
        ordered = self.ordered(p)
        form = tuple((c, tuple((u, w) for u, _, w in m)) for m, c in ordered)
        return form, tuple(i for m, _ in ordered for _, idx, _ in m for i in idx)

    def slot_sizes(self, p: Poly) -> tuple[int, ...]:
        return tuple(s for m, _ in self.ordered(p) for u, _, _ in m for s in self.atoms[u].sizes)

    def forms_of(self, kind: str, form: Any) -> Sequence[int]:
        """Atoms of a form, of different patterns, oldest first."""
        return self._forms.get((kind, form), ())

    def written(self, form: Any, pattern: Sequence[int]) -> Poly:
        """The polynomial of a cut's form over its slots."""
        slots = iter([-1 - k for k in pattern])
        return self.add(*[self.monomial([(u, tuple(next(slots) for _ in self.atoms[u].sizes), w) for u, w in fs], c) for c, fs in form])

    def _placed(self, ordered: list[tuple[Mono, Coef]], pattern: Sequence[int]) -> Poly:
        """The terms with slot variables in place of their indices."""
        slots = iter([-1 - k for k in pattern])  # slot k is variable -1 - k; a constant c, stored as -1 - c, is itself
        return self.add(*[self.monomial([(u, tuple(next(slots) for _ in idx), w) for u, idx, w in m], c) for m, c in ordered])

    def _signs(self, p: Poly, indicator: bool) -> dict[str, bool]:
        """What is certain about the sign of a sum: all terms nonnegative, at least one positive."""
        kinds = [(c > 0 and self.is_nonnegative(m), c > 0 and self._positive(m)) for m, c in p.items()]
        nonneg = all(n for n, _ in kinds)
        return {"nonnegative": nonneg or indicator, "positive": nonneg and any(q for _, q in kinds)}

    def is_nonnegative(self, m: Mono) -> bool:
        return all(self.atoms[u].nonnegative or self.atoms[u].positive or (isinstance(w, int) and w % 2 == 0) for u, _, w in m)

    def _positive(self, m: Mono) -> bool:
        return all(self.atoms[u].positive for u, _, _ in m)

    def _conditions(self, p: Poly) -> set[tuple[int, tuple[Index, ...]]]:
        return {(u, idx) for m in p for u, idx, _ in m if self.atoms[u].indicator and self.atoms[u].kind in CONDITIONS}

    def power(self, p: Poly, e: Power) -> Poly:
        """pᵉ, by the functions that are built on this ring."""
        raise NotImplementedError

    def _apart(self, factors: Sequence[Factor], coef: Coef) -> None:
        """Refuse a product with what may have no value."""
        raise NotImplementedError
