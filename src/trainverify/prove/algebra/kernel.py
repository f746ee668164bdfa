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
does not hold: forms are canonical only as far as the laws in `laws.py` go. Whatever cannot be handled raises
`Unsupported`; growth beyond `Limits` raises `TooLarge`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

from trainverify.prove.algebra.terms import (
    BOUND,
    EVERYTHING,
    FEW,
    NOTHING,
    ONE,
    OPAQUE,
    Assuming,
    Atom,
    Coef,
    Factor,
    Index,
    Limits,
    Mono,
    Need,
    Needs,
    Poly,
    Power,
    TooLarge,
    Trace,
    Ungranted,
    Unsupported,
    alike,
    as_constant,
    body_key,
    connected,
    constant,
    family,
    instance,
    looks_alike,
    orders,
    raised,
    roots,
    scale,
    sort_coef,
    tidy,
    variables,
    with_constant,
    within,
)

CASES: Final = 3  # masks that are told apart in the argument of a function
SHORT: Final = 4  # terms of a sum that is known also with the sums in it opened
OPENED: Final = 24  # terms of a sum with sums in it opened, up to which it is looked for
CONDITIONS: Final = frozenset({"fn", "input", "cut", "digit"})  # atoms that are 0 or 1 and decide about a case
AT_ZERO: Final[Mapping[str, int]] = {"tanh": 0, "erf": 0, "sin": 0, "cos": 1, "abs": 0, "sign": 0, "floor": 0, "as_int": 0}


@dataclass
class Kernel:
    limits: Limits = field(default_factory=Limits)
    atoms: list[Atom] = field(default_factory=list)
    needs: Needs = field(default_factory=Needs)  # conditions used so far
    _table: dict[Any, int] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=dict)  # atom of a prime under a root → the prime
    named: int = 0  # atoms below this are the logical program's; sums of others are opened when they are added to
    keep_constants: bool = True  # new atoms have constants built in; else every constant is a slot of its own
    _forms: dict[Any, list[int]] = field(default_factory=dict)  # (kind, form) → atoms of different patterns, oldest first
    _infinite: dict[int, bool] = field(default_factory=dict)
    _masked: dict[int, bool] = field(default_factory=dict)
    _sums: dict[Any, list[tuple[int, int]]] | None = None  # factors but a name → sums of the logical program, which factor it is
    _distributed: dict[tuple[int, int], Poly] = field(default_factory=dict)  # those with the name opened
    _aliases: dict[Any, list[tuple[int, tuple[Index, ...], Coef, Mono]]] | None = None
    _lengths: set[int] = field(default_factory=set)  # how many terms cuts have
    _fresh: int = BOUND
    _heights: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _steps: int = 0  # sums within the sum at hand, also one after the other
    _summing: bool = False
    trace: Trace | None = None
    assuming: Assuming = EVERYTHING  # conditions that hold if they are needed, and are noted; others must be known
    reasons: dict[int, Unsupported] = field(default_factory=dict)  # opaque function → why no law was used
    _opaque: dict[int, bool] = field(default_factory=dict)
    _opening: bool = False

    # -- atoms -------------------------------------------------------------------------------------------------------

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

    # -- monomials and polynomials -----------------------------------------------------------------------------------

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
        if self.reasons and len(result) + (coef != 1) > 1:
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
        """D(id)[i]·valid(id) = D(id)[i]; D(id)[c]·D(id)[c′] = 0 is left to the caller's sums."""
        atoms = self.atoms
        ids = {(atoms[u].data[0], idx[:-1]) for u, idx, _ in factors if atoms[u].kind == "digit"}
        if not ids:
            return factors
        return [f for f in factors if not (atoms[f[0]].kind == "valid" and (atoms[f[0]].data, f[1]) in ids)]

    def _implied(self, factors: list[Factor]) -> list[Factor]:
        """[x·y > 0]·x·y = x·y for x, y ≥ 0: where the condition does not hold the product is zero anyway."""
        there = {(u, idx) for u, idx, w in factors if w > 0 and self.atoms[u].nonnegative}
        return [f for f in factors if not (self.name(f[0]) == "gt0" and within(self.argument(f[0], f[1]), there))]

    def _condition(self, p: Poly) -> tuple[int, tuple[Index, ...]] | None:
        """A 0/1 condition that some term has as a factor; of many masks none."""
        found = self._conditions(p)
        if len(found) > CASES:
            found = {c for c in found if self.atoms[c[0]].kind == "fn"}
        return min(found, default=None)

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

    def plus(self, *polys: Poly) -> Poly:
        """A sum in which sums that the logical program does not have are opened: the order of additions does not matter."""
        if not self.named:
            return self.add(*polys)
        return self.add(*(self.flat(p, lambda u: u < self.named) for p in polys))

    def times(self, p: Poly, q: Poly) -> Poly:
        """Product, distributed."""
        if (c := as_constant(p)) is not None:
            return scale(q, c)
        if (c := as_constant(q)) is not None:
            return scale(p, c)
        if len(p) * len(q) > self.limits.monomials:
            raise TooLarge("a product of long sums")
        return self.add(*[self.monomial((*m, *n), tidy(c * d)) for m, c in p.items() for n, d in q.items()])

    def multiply(self, p: Poly, q: Poly) -> Poly:
        """Product without distributing: a sum of several terms becomes a cut first.

        Masks of labels, and conditions that the other side decides, are the exception: valid·(valid·a + b) = valid·(a + b), so sums are
        opened, multiplied and factored.
        """
        if as_constant(p) is not None or as_constant(q) is not None:
            return self.times(p, q)
        if self._masks(p) or self._masks(q) or self._decided(p, q) or self._decided(q, p):
            return self.single(self.times(self.flat(p), self.flat(q)))
        return self.joint(self.single(p), q)

    def joint(self, p: Poly, q: Poly) -> Poly:
        """A product in which sums with a condition that the other side has too are opened: I·(I·a + b) = I·(a + b)."""
        left, right = self._uncovered(p, self._conditions(q)), self._uncovered(q, self._conditions(p))
        if left is p and right is q and not self._conditions(p) & self._conditions(q):
            return self.times(p, self.single(q))
        made = self.times(left, right)
        return self.single(made) if len(made) < 2 or not self.named else self._reunited(made)

    def _reunited(self, p: Poly) -> Poly:
        """A sum as content times a sum of the logical program, if it is one in which sums under a name are opened."""
        lead, factors, prim = self.content(p)
        form, idx = self.encode(prim)
        for uid, pattern, coef, common in self._opened_names().get(form, ()):
            slots: dict[Index, Index] = {}
            fits = all(i == k if k >= 0 else slots.setdefault(k, i) == i for k, i in zip(pattern, idx, strict=True))
            if fits and len(slots) == len(self.atoms[uid].sizes):
                inverse = [(u, tuple(slots.get(i, i) for i in at), -w) for u, at, w in common]
                name: Factor = (uid, tuple(slots[-1 - k] for k in range(len(slots))), 1)
                if self.trace is not None:
                    self.trace.spoiled = True
                return self.monomial([*factors, *inverse, name], tidy(Fraction(lead) / coef))
        return self.single(p)

    def _opened_names(self) -> dict[Any, list[tuple[int, tuple[Index, ...], Coef, Mono]]]:
        """Short sums of the logical program with the sums in them opened: form → (name, its slots there, what the name is times that)."""
        if self._aliases is None:
            self._aliases = {}
            for a in self.atoms[: self.named]:
                if a.kind != "cut" or a.indicator or a.definition is None or len(a.definition) > SHORT:
                    continue
                if not any(self.atoms[u].kind == "cut" and w == 1 for m in a.definition for u, _, w in m):
                    continue
                trace, self.trace = self.trace, None
                lead, common, prim = self.content(self._flat_if_short(a.definition))
                self.trace = trace
                if 1 < len(prim) <= OPENED and all(self.atoms[u].positive for u, _, _ in common):
                    form, idx = self.encode(prim)
                    self._aliases.setdefault(form, []).append((a.uid, idx, lead, common))
        return self._aliases

    def _flat_if_short(self, p: Poly) -> Poly:
        """Flat, unless that has many terms: the sum of all layers before would be opened in every layer."""
        while len(p) <= OPENED:
            alone = ((m, [f for f in m if self.atoms[f[0]].kind == "cut" and f[2] == 1]) for m in p)
            one = next(((m, cuts[0]) for m, cuts in alone if len(cuts) == 1 and not self.atoms[cuts[0][0]].indicator), None)
            if one is None:
                break
            m, cut = one
            rest = {n: c for n, c in p.items() if n != m}
            p = self.add(rest, self.times({tuple(f for f in m if f is not cut): p[m]}, self.open(cut)))
        return p

    def _uncovered(self, p: Poly, conditions: set[tuple[int, tuple[Index, ...]]], depth: int = 3) -> Poly:
        """p, with the sums opened in which these conditions occur."""
        if not conditions or not depth:
            return p
        for m in p:
            for f in m:
                a = self.atoms[f[0]]
                if a.kind == "cut" and f[2] == 1 and not a.indicator and a.covers:
                    inside = self.open(f)
                    opened = self._uncovered(inside, conditions, depth - 1)
                    if opened is not inside or conditions & self._conditions(inside):
                        rest = {n: c for n, c in p.items() if n != m}
                        made = self.times(self.monomial([g for g in m if g is not f], p[m]), opened)
                        return self._uncovered(self.add(rest, made), conditions, depth)
        return p

    def _masks(self, p: Poly) -> bool:
        return any(self.atoms[u].kind in ("valid", "digit") for m in p for u, _, _ in m)

    def _conditions(self, p: Poly) -> set[tuple[int, tuple[Index, ...]]]:
        return {(u, idx) for m in p for u, idx, _ in m if self.atoms[u].indicator and self.atoms[u].kind in CONDITIONS}

    def _decided(self, p: Poly, q: Poly) -> bool:
        """Whether some condition in q holds wherever a term of p is not zero."""
        conditions = self._conditions(q)
        if not conditions:
            return False
        arguments = [self.argument(*c) for c in conditions if self.name(c[0]) == "gt0"]
        return any(within(a, {(u, idx) for u, idx, w in m if w > 0 and self.atoms[u].nonnegative}) for a in arguments for m in p)

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

    # -- content, cuts -----------------------------------------------------------------------------------------------

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
        lead = self.ordered(prim)[-1][1]  # the last one, so that a constant term does not set the scale
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

    def cut(self, p: Poly, indicator: bool = False, content: tuple[Coef, Mono] = (1, ())) -> Factor:
        """A polynomial (times some of its content, see `_whole`) as one factor."""
        form, idx = self.encode(p)
        factor = self.shared(
            "cut", (form, indicator), idx, self.slot_sizes(p), lambda: {"indicator": indicator, **self._signs(p, indicator)}
        )
        atom = self.atoms[factor[0]]
        if atom.definition is None:
            self._lengths.add(len(p))
            slot = {i: -1 - k for i, k in zip(idx, atom.pattern, strict=True) if i < 0}
            inside = tuple((u, tuple(slot[i] for i in at), w) for u, at, w in content[1] if all(i in slot for i in at))
            atom.content = content[0], inside
            self.define(atom, self.times(self.monomial(inside, content[0]), self._placed(self.ordered(p), atom.pattern)))
        return factor

    def define(self, atom: Atom, definition: Poly) -> None:
        """What a cut stands for."""
        atom.definition = definition
        atom.covers = bool(self._conditions(definition)) or any(self.atoms[u].covers for m in definition for u, _, _ in m)

    def _whole(self, lead: Coef, factors: Mono, prim: Poly) -> Poly:
        """lead · factors · prim, prim under a short name.

        The name is that of prim and of the positive content that it first comes with, in the logical program: what is
        handed from layer to layer stays one factor, however many norms it has passed. Some divisors are positive too."""
        content: tuple[Coef, Mono] = (1, ())
        if not self.named:
            content = (lead if lead > 0 else -lead, tuple(f for f in factors if self.atoms[f[0]].positive or self._divisor(f)))
        uid, idx, _ = factor = self.cut(prim, content=content)
        c, inside = self.atoms[uid].content
        inverse = [(u, tuple(idx[-1 - k] for k in at), -w) for u, at, w in inside]
        if not all(self._settled((u, at, -w)) for u, at, w in inverse):
            raise Unsupported("a name over a divisor that may be zero")
        return self.monomial([*factors, *inverse, factor], tidy(Fraction(lead) / c))

    def _divisor(self, f: Factor) -> bool:
        """Whether a factor divides by something that cannot be negative, and that it is not zero is a condition already."""
        a = self.atoms[f[0]]
        if f[2] >= 0 or not a.nonnegative or (a.kind == "sum" and all(self.atoms[u].indicator for u, _, _ in a.data[0][0])):
            return False  # a count divides all of a loss alike: it stays outside
        if self.trace is not None and self.trace.generic and not self.certain(named_need("nonzero", f[0], f[1]), self.needs):
            return False  # what a block needs it needs of its own constants, and the name would be for all
        return self._noted("nonzero", f[0], f[1])

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
        kinds = [(c > 0 and self._nonnegative(m), c > 0 and self._positive(m)) for m, c in p.items()]
        nonneg = all(n for n, _ in kinds)
        return {"nonnegative": nonneg or indicator, "positive": nonneg and any(q for _, q in kinds)}

    def _nonnegative(self, m: Mono) -> bool:
        return all(self.atoms[u].nonnegative or self.atoms[u].positive or (isinstance(w, int) and w % 2 == 0) for u, _, w in m)

    def _positive(self, m: Mono) -> bool:
        return all(self.atoms[u].positive for u, _, _ in m)

    def single(self, p: Poly, indicator: bool = False) -> Poly:
        """At most one monomial: several terms become content · cut."""
        if len(p) > 1 and not indicator:
            p = self.plus(p)
        if len(p) <= 1:
            return p
        lead, factors, prim = self.content(p)
        if len(prim) == 1:
            (m,) = prim
            return self.monomial([*factors, *m], lead)
        if indicator:  # keep 0/1 values recognisable
            return self.monomial([self.cut(p, indicator=True)])
        return self._whole(lead, factors, prim)

    def recognised(self, p: Poly) -> Poly:
        """p, or content · cut if its primitive part is a sum that the logical program has a name for."""
        if len(p) < 2 or not self.named or len(p) not in self._lengths:
            return p
        lead, factors, prim = self.content(p)
        form, _ = self.encode(prim)
        known = [u for u in self._forms.get(("cut", (form, False)), ()) if u < self.named]
        if not known:
            return p
        return self._whole(lead, factors, prim) if self.cut(prim)[0] < self.named else p

    def open(self, factor: Factor) -> Poly:
        uid, idx, _ = factor
        if self.trace is not None:
            self.trace.looked.add(uid)
        definition = self.atoms[uid].definition
        assert definition is not None
        return self.substitute(definition, {-1 - k: i for k, i in enumerate(idx)})

    def flat(self, p: Poly, keep: Callable[[int], bool] | None = None) -> Poly:
        """Cuts that stand alone in a term (up to other factors without cuts) opened, so that sums of sums are one sum."""
        parts: list[Poly] = []
        while p:  # level by level, so that equal terms join on the way
            stay: Poly = {}
            opened: list[Poly] = []
            for m, c in p.items():
                cuts = [f for f in m if self.atoms[f[0]].kind == "cut" and f[2] == 1]
                if len(cuts) == 1 and not (keep and keep(cuts[0][0])) and not self.atoms[cuts[0][0]].indicator:
                    rest = tuple(f for f in m if f is not cuts[0])
                    opened.append(self.times({rest: c}, self.open(cuts[0])))
                else:
                    stay[m] = c
            parts.append(stay)
            p = self.add(*opened)
        return self.add(*parts)

    def written_out(self, p: Poly) -> Poly:
        """Flat, and the Σ of every tower of sums term by term too: as many terms as it has floors."""
        p = self.flat(p)
        while True:
            towers = [m for m in p if any(self._tower_summed(f) for f in m)]
            if not towers:
                return p
            parts = [{m: c for m, c in p.items() if m not in towers}]
            for m in towers:
                f = next(f for f in m if self._tower_summed(f))
                (tower,), over = self._opened(f[0], f[1])
                parts.append(self.times({tuple(g for g in m if g is not f): p[m]}, self.sum(self.open(tower), over)))
            p = self.flat(self.add(*parts))

    def _tower_summed(self, f: Factor) -> bool:
        """Whether a factor is the Σ of a sum under a name, and of nothing else."""
        a = self.atoms[f[0]]
        if f[2] != 1 or a.kind != "sum" or len(a.data[0][0]) != 1:
            return False
        ((u, w, _),) = a.data[0][0]
        return bool(w == 1) and self.atoms[u].kind == "cut" and not self.atoms[u].indicator

    def resolved(self, p: Poly) -> Poly:
        """p, with sums of the plan opened in which an equality has become one of constants: a piece of what was put together."""
        for m in p:
            for u, idx, w in m:
                a = self.atoms[u]
                if u >= self.named and w == 1 and a.kind == "cut" and a.definition is not None and any(i >= 0 for i in idx):
                    met = (i for n in a.definition for v, at, _ in n if self.atoms[v].kind == "delta" for i in at if i < 0)
                    if any(idx[-1 - i] >= 0 for i in met):
                        return self.flat(p, lambda uid: uid < self.named)
        return p

    def settle(self, p: Poly) -> Poly:
        """The form in which a tensor is kept: complete sums over constants collapsed, several terms factored."""
        if any(max(c.numerator.bit_length(), c.denominator.bit_length()) > self.limits.bits for c in p.values()):
            raise TooLarge("a number with too many digits")
        p = self.collapse(self.plus(p) if len(p) > 1 else p)
        if len(p) > 1 and self.named:
            p = self._gathered(self._apportioned(p))
        if len(p) > 1:
            lead, factors, prim = self.content(p)
            if factors and len(prim) > 1:
                return self._whole(lead, factors, prim)
        return p

    def _apportioned(self, p: Poly) -> Poly:
        """Several Σ_i f(i)·(g(i,0) + g(i,3)), each of some of the constants 0 … n−1, as one Σ, if the logical program has that."""
        shares: dict[Mono, Factor] = {}
        for m in p:
            own = [f for f in m if f[0] >= self.named and f[2] == 1 and self.atoms[f[0]].kind == "sum"]
            if len(own) == 1:
                shares[m] = own[0]
        if len(shares) < 2 or not any(self._own_cut(u, w) for f in shares.values() for u, w, _ in self.atoms[f[0]].data[0][0]):
            return p
        self._opening = True
        try:
            made = self.collapse(self.add(*[self._share(m, f, p[m]) for m, f in shares.items()]))
        except TooLarge:
            return p
        finally:
            self._opening = False
        if any(u >= self.named for m in made for u, _, _ in m):
            return p
        return self.add({m: c for m, c in p.items() if m not in shares}, made)

    def _share(self, m: Mono, f: Factor, coef: Coef) -> Poly:
        """A term with a Σ in it, in which a sum under a name of the plan's own is opened."""
        body, inner = self._opened(f[0], f[1])
        name = next((g for g in body if self._own_cut(g[0], g[2])), None)
        if name is None:
            return {m: coef}
        whole = self.sum(self.times(self.monomial([g for g in body if g is not name]), self.open(name)), inner)
        return self.times({tuple(g for g in m if g is not f): coef}, whole)

    def _gathered(self, p: Poly) -> Poly:
        """a·Σ_i f(i)·g(i) + b·Σ_i f(i)·h(i) as Σ_i f(i)·c(i), if the logical program has that Σ for its sum c = a·g + b·h."""
        own = {m: [f for f in m if f[0] >= self.named and f[2] == 1 and self.atoms[f[0]].kind == "sum"] for m in p}
        if sum(len(fs) == 1 for fs in own.values()) < 2:
            return p
        for m, fs in own.items():
            if len(fs) != 1:
                continue
            (f,) = fs
            rest = [g for g in m if g is not f]
            for uid, opened in self._sums_like(f[0]):
                for term, coef in opened.items():
                    if len(term) != 1 or term[0][0] != f[0] or term[0][2] != 1:
                        continue
                    slots: dict[Index, Index] = {}
                    if not all(i == k if k >= 0 else slots.setdefault(k, i) == i for k, i in zip(term[0][1], f[1], strict=True)):
                        continue
                    if len(slots) != len(self.atoms[uid].sizes):
                        continue
                    factor = self.monomial(rest, tidy(Fraction(p[m]) / coef))
                    parts = self.times(factor, self.substitute(opened, slots))
                    if len(parts) == len(opened) and all(p.get(n) == c for n, c in parts.items()):
                        if self.trace is not None:
                            self.trace.spoiled = True
                        whole = self.monomial([(uid, tuple(slots[-1 - k] for k in range(len(slots))), 1)])
                        return self._gathered(self.add({n: c for n, c in p.items() if n not in parts}, self.times(factor, whole)))
        return p

    def _sums_like(self, uid: int) -> Iterator[tuple[int, Poly]]:
        """Sums of the logical program that may have a Σ among their terms, once a name in them is opened; and what they are then."""
        if self._sums is None:
            self._sums = {}
            for a in self.atoms[: self.named]:
                for n, (u, w, _) in enumerate(a.data[0][0] if a.kind == "sum" else ()):
                    cut = self.atoms[u]
                    if cut.kind == "cut" and w == 1 and not cut.indicator and cut.definition is not None and len(cut.definition) <= SHORT:
                        self._sums.setdefault(_others(a, n), []).append((a.uid, n))
        mine = self.atoms[uid]
        for key in dict.fromkeys(_others(mine, n) for n in range(len(mine.data[0][0]))):
            for whole, n in self._sums.get(key, ()):
                if (whole, n) not in self._distributed:
                    trace, self.trace, self._opening = self.trace, None, True
                    try:
                        body, inner = self._opened(whole, tuple(-1 - k for k in range(len(self.atoms[whole].sizes))))
                        rest = self.monomial([g for i, g in enumerate(body) if i != n])
                        self._distributed[whole, n] = self.sum(self.times(rest, self.open(body[n])), inner)
                    except TooLarge:
                        self._distributed[whole, n] = {}
                    finally:
                        self.trace, self._opening = trace, False
                if len(self._distributed[whole, n]) > 1:
                    yield whole, self._distributed[whole, n]

    def _own_cut(self, uid: int, power: Power) -> bool:
        """Whether a factor is a sum under a name that the logical program does not have."""
        a = self.atoms[uid]
        return uid >= self.named and power == 1 and a.kind == "cut" and not a.indicator

    # -- sums --------------------------------------------------------------------------------------------------------

    def sum(self, p: Poly, over: Mapping[Index, int]) -> Poly:
        """Σ over variables (with their sizes); of nothing it is 0."""
        if 0 in over.values():
            return {}
        if self._summing:
            return self._sum(p, over)
        self._summing, self._steps = True, 0
        try:
            return self._sum(p, over)
        finally:
            self._summing = False

    def _sum(self, p: Poly, over: Mapping[Index, int]) -> Poly:
        self._steps += 1
        if self._steps > self.limits.steps:
            raise TooLarge("a sum that does not come to rest")
        return self.add(*[scale(self._sum_monomial(m, over), c) for m, c in p.items()])

    def _sum_monomial(self, m: Mono, over: Mapping[Index, int]) -> Poly:
        inside = [f for f in m if any(i in over for i in f[1])]
        outside = tuple(f for f in m if not any(i in over for i in f[1]))
        present = {i for f in inside for i in f[1] if i in over}
        factor: Coef = math.prod(s for v, s in over.items() if v not in present)  # Σ_v 1 = size of v
        result = self.monomial(outside, factor)
        for part, bound in connected(inside, present):
            result = self.times(result, self._component(part, {v: over[v] for v in bound}))
        return result

    def _component(self, factors: list[Factor], over: dict[Index, int]) -> Poly:
        """Σ of a connected product."""
        atoms = self.atoms
        for f in factors:  # Σ_i δ(i,j)·f(i) = f(j)
            if atoms[f[0]].kind == "delta":
                i, j = f[1]
                v, w = (i, j) if i in over else (j, i)
                rest = [(u, tuple(w if x == v else x for x in idx), p) for u, idx, p in factors if (u, idx) != (f[0], f[1])]
                left = {k: s for k, s in over.items() if k != v}
                return self.sum(self.monomial(rest), left)
        for f in factors:  # Σ_d D(id)[d] = valid(id)
            v = f[1][-1] if f[1] else 0
            # v must be the digit only: D(id[d])[d] is a diagonal, whose sum counts matches
            if atoms[f[0]].kind == "digit" and v in over and v not in f[1][:-1] and sum(v in g[1] for g in factors) == 1:
                valid = self.valid(atoms[f[0]].data[0], atoms[f[0]].sizes[:-1], f[1][:-1])
                others = self.monomial([g for g in factors if g is not f])
                return self.sum(self.times(valid, others), {k: s for k, s in over.items() if k != v})
        picks = {f[1][-1] for f in factors if atoms[f[0]].kind == "digit"}
        for n, f in enumerate(factors):  # Σ_d D(id)[d]·(a[d] + b[d]): what is picked from a sum is picked from its terms
            if self._opens(f, picks.intersection(over)):
                others = self.monomial([g for m, g in enumerate(factors) if m != n])
                return self.sum(self.times(others, self.open(f)), over)
        for n, f in enumerate(factors):  # … and what is picked from a Σ is picked inside it
            if f[2] == 1 and atoms[f[0]].kind == "sum" and any(i in picks and i in over for i in f[1]):
                body, inner = self._opened(f[0], f[1])
                if len(body) == 1:  # would be summed by itself again
                    continue
                return self.sum(self.monomial([*body, *(g for m, g in enumerate(factors) if m != n)]), {**inner, **over})
        where = {v: [k for k, f in enumerate(factors) if v in f[1]] for v in over}
        lonely = {v for v, ks in where.items() if len(ks) == 1}
        if lonely and len(factors) > 1:  # a variable of one factor only: sum that factor first
            k = where[min(lonely)][0]
            mine = {v: over[v] for v in lonely if where[v] == [k]}
            first = self.single(self.sum(self.monomial([factors[k]]), mine))
            others = self.monomial([f for n, f in enumerate(factors) if n != k])
            return self.sum(self.times(first, others), {v: s for v, s in over.items() if v not in mine})
        if len(factors) == 1:
            uid, idx, power = factors[0]
            a = atoms[uid]
            if power == 1 and a.kind == "sum":  # Σ Σ = Σ
                return self._open_sum(uid, idx, over)
            if self._opens(factors[0], over):
                return self.sum(self.open(factors[0]), over)
        return self._known_whole(factors, over) or self._regrouped(factors, over)

    def _opens(self, factor: Factor, over: Collection[Index]) -> bool:
        """Whether a Σ of a sum under a name is taken term by term. That of a high tower of sums, as residual streams are, stays as it is:
        it would have as many terms as there are layers."""
        uid, idx, power = factor
        a = self.atoms[uid]
        if power != 1 or a.kind != "cut" or a.indicator or not any(i in over for i in idx):
            return False
        if self.trace is not None:
            self.trace.measured.add(uid)
        low = min(h for h, i in zip(self.heights(uid), idx, strict=True) if i in over)
        return low < self.limits.height or self.infinite(uid)

    def heights(self, uid: int) -> tuple[int, ...]:
        """For every slot how many cuts within cuts a Σ over it would open, up to `Limits.height`; in the plan down to the logical
        program's, which stop there if theirs are high."""
        waiting = [uid]
        while waiting:  # not recursive: towers are as high as models are deep
            u = waiting.pop()
            if u not in self._heights:
                alone = self._alone(u)
                missing = [f[0] for _, f in alone if f[0] not in self._heights]
                if missing:
                    waiting += [u, *missing]
                else:
                    self._heights[u] = self._counted(u, alone)
        return self._heights[uid]

    def _counted(self, uid: int, alone: Iterable[tuple[Index, Factor]]) -> tuple[int, ...]:
        a = self.atoms[uid]
        under = dict.fromkeys(range(len(a.sizes)), 0)
        for slot, (u, idx, _) in alone:
            if u >= self.named or uid < self.named:
                under[slot] = max(under[slot], *(h for h, i in zip(self._heights[u], idx, strict=True) if i == -1 - slot))
        return tuple([min(h + (a.kind == "cut"), self.limits.height) for h in under.values()])

    def _alone(self, uid: int) -> list[tuple[Index, Factor]]:
        """Slots of a cut or Σ with the sums in it that are the only ones in their term to depend on them: a Σ over the slot is theirs."""
        a = self.atoms[uid]
        terms: list[Mono] = []
        if a.kind == "cut":
            terms = list(a.definition or ())
        elif a.kind == "sum":
            free = iter([-1 - k for k in a.pattern])  # bound variables are not asked for: 0
            terms = [tuple([(u, tuple([next(free) if e < 0 else 0 for e in entries]), w) for u, w, entries in a.data[0][0]])]
        found = []
        for m in terms:
            for f in m:
                if f[2] == 1 and self.atoms[f[0]].kind in ("cut", "sum"):
                    found += [(-1 - i, f) for i in set(f[1]) if i < 0 and sum(i in g[1] for g in m) == 1]
        return found

    def _known_whole(self, factors: list[Factor], over: dict[Index, int]) -> Poly | None:
        """Σ_i f(i)·(Σ_j g(i,j)) as Σ_ij f·g, and Σ_i f(i)·(g(i) + h(i)) as two, if what is opened is the plan's own and the outcome
        one that the logical program has."""
        if not self.named or self._opening or len(factors) < 2:
            return None
        for n, (uid, idx, power) in enumerate(factors):
            a = self.atoms[uid]
            sums = a.kind == "sum" and len(a.data[0][0]) > 1
            if (uid >= self.named and power == 1 and sums) or self._own_cut(uid, power):
                rest = [f for m, f in enumerate(factors) if m != n]
                self._opening = True  # one at a time
                try:
                    if sums:
                        body, inner = self._opened(uid, idx)
                        made = self.sum(self.monomial([*body, *rest]), {**inner, **over})
                    else:
                        made = self.sum(self.times(self.monomial(rest), self.open((uid, idx, 1))), over)
                except TooLarge:
                    continue
                finally:
                    self._opening = False
                if all(u < self.named for m in made for u, _, _ in m):
                    return made
        return None

    def _regrouped(self, factors: list[Factor], over: dict[Index, int]) -> Poly:
        """Σ_i f(i)·(Σ_j g(i,j)·h(j)) as Σ_j h(j)·(Σ_i f(i)·g(i,j)), if that is what the logical program has."""
        plain = self._sum_atom("sum", factors, over)
        if self.named and not self._opening and plain[0] >= self.named and len(factors) == 2:
            for n, (uid, idx, power) in enumerate(factors):
                if uid < self.named and power == 1 and self.atoms[uid].kind == "sum" and len(self.atoms[uid].data[0][0]) > 1:
                    body, inner = self._opened(uid, idx)
                    every = [*body, factors[1 - n]]
                    near = [f for f in every if any(i in over for i in f[1])]
                    self._opening = True
                    try:
                        first = self.sum(self.monomial(near), over)
                        made = self.sum(self.times(self.monomial([f for f in every if f not in near]), first), inner)
                    except TooLarge:
                        continue
                    finally:
                        self._opening = False
                    if all(u < self.named for m in made for u, _, _ in m):
                        return made
        if self.named and not self._opening and plain[0] >= self.named and len(over) > 1 and len(factors) > 2:
            nested = self._nested(factors, over)
            if nested is not None:
                return nested
        alias = self.only_block(plain) if self.only_block is not None and plain[0] >= self.named else None
        if alias is not None and self.trace is not None:
            self.trace.spoiled = True
        return self.monomial([alias or plain])

    def _nested(self, factors: list[Factor], over: dict[Index, int]) -> Poly | None:
        """Σ_ij f(i)·g(i,j)·h(i,j) as Σ_i f(i)·(Σ_j g(i,j)·h(i,j)), if both are sums that the logical program has."""
        for v, size in over.items():
            near = [f for f in factors if v in f[1]]
            if not 1 < len(near) < len(factors):
                continue
            self._opening = True
            try:
                inner = self.sum(self.monomial(near), {v: size})
                if any(u >= self.named for m in inner for u, _, _ in m):
                    continue
                far = self.monomial([f for f in factors if v not in f[1]])
                made = self.sum(self.times(far, inner), {w: s for w, s in over.items() if w != v})
            except TooLarge:
                continue
            finally:
                self._opening = False
            if all(u < self.named for m in made for u, _, _ in m):
                return made
        return None

    def _open_sum(self, uid: int, idx: tuple[Index, ...], over: Mapping[Index, int]) -> Poly:
        factors, inner = self._opened(uid, idx)
        return self.sum(self.monomial(factors), {**inner, **over})

    def _opened(self, uid: int, idx: tuple[Index, ...]) -> tuple[list[Factor], dict[Index, int]]:
        """The factors of a Σ and its bound variables, under fresh names."""
        if self.trace is not None:
            self.trace.looked.add(uid)
        (body, sizes), _ = self.atoms[uid].data
        fresh = [self.bound() for _ in sizes]
        slots = self.occurrences(uid, idx)
        factors = [(u, tuple(fresh[e] if e >= 0 else next(slots) for e in entries), w) for u, w, entries in body]
        return factors, dict(zip(fresh, sizes, strict=True))

    def _sum_atom(self, kind: str, factors: list[Factor], over: Mapping[Index, int]) -> Factor:
        """A hash-consed component: the smallest form over all orders of factors that look alike."""
        if self.reasons and any(self._wild(u, idx) for u, idx, _ in factors):
            raise Unsupported("a sum of what may have no value")
        groups: dict[Any, list[Factor]] = {}
        for f in sorted(factors, key=lambda f: (f[0], f[2])):
            groups.setdefault((f[0], f[2]), []).append(f)
        if orders(groups.values()) > FEW:
            groups = looks_alike(factors, over)
        if orders(groups.values()) > self.limits.ties:
            raise TooLarge(f"{orders(groups.values())} orders of a product")
        best: tuple[Any, tuple[Index, ...], tuple[int, ...]] | None = None
        for order in itertools.product(*(itertools.permutations(g) for g in groups.values())):
            number: dict[Index, int] = {}
            body, slots, sizes = [], [], []
            for u, idx, w in itertools.chain.from_iterable(order):
                entries = []
                for i in idx:
                    if i in over:
                        if i not in number:
                            number[i] = len(number)
                            sizes.append(over[i])
                        entries.append(number[i])
                    else:
                        entries.append(-1)
                        slots.append(i)
                body.append((u, w, tuple(entries)))
            key = (tuple(body), tuple(slots), tuple(sizes))
            if best is None or body_key(key) < body_key(best):
                best = key
        assert best is not None
        body_, slots_, sizes_ = best
        slot_sizes = tuple(s for u, _, entries in body_ for s, e in zip(self.atoms[u].sizes, entries, strict=True) if e < 0)
        nonneg = all(self.atoms[u].nonnegative or self.atoms[u].positive or (isinstance(w, int) and w % 2 == 0) for u, w, _ in body_)
        # an empty sum is zero; a mask that is 1 somewhere leaves a positive term
        others = [(u, entries) for u, _, entries in body_ if not self.atoms[u].positive]
        pos = all(sizes_) and ((len(others) <= 1 and all(self._reached(*o) for o in others)) or self._chosen(factors, over))
        return self.shared(kind, (body_, sizes_), slots_, slot_sizes, lambda: {"nonnegative": nonneg, "positive": pos})

    def _chosen(self, factors: Sequence[Factor], over: Mapping[Index, int]) -> bool:
        """Whether factors are positive but for all digits of one integer that is always in range, which are 1 at one place."""
        digits = [(u, idx) for u, idx, w in factors if not self.atoms[u].positive]
        if any(self.atoms[u].kind != "digit" for u, _ in digits) or len({(self.atoms[u].data[0], idx[:-1]) for u, idx in digits}) != 1:
            return False
        (name, _, count), at = self.atoms[digits[0][0]].data, [idx[-1] for _, idx in digits]
        every = sorted(self.atoms[u].data[1] for u, _ in digits) == [*range(count)]
        free = len({*at}) == count and all(i in over and i not in digits[0][1][:-1] for i in at)
        return name in self.always_valid and every and free

    def _reached(self, uid: int, entries: Sequence[int]) -> bool:
        """Whether an atom is 1 − [Σ c·(position of a bound variable − position of a free one) > 0]: 1 where both are equal."""
        a = self.atoms[uid]
        if not (a.kind == "cut" and a.indicator and a.definition is not None and a.definition.get(ONE) == 1 and len(a.definition) == 2):
            return False
        ((m, c),) = [(m, c) for m, c in a.definition.items() if m != ONE]
        if c != -1 or len(m) != 1 or self.name(m[0][0]) != "gt0":
            return False
        free: dict[tuple[int, Coef], list[Index]] = {}
        bound: dict[tuple[int, Coef], list[Index]] = {}
        for n, weight in self.argument(m[0][0], m[0][1]).items():
            if len(n) != 1 or n[0][2] != 1 or self.atoms[n[0][0]].kind != "iota" or n[0][1][0] >= 0:
                return False
            slot = n[0][1][0]
            if entries[-1 - slot] >= 0:
                bound.setdefault((n[0][0], weight), []).append(slot)
            else:
                free.setdefault((n[0][0], -weight), []).append(slot)
        if self.trace is not None:
            self.trace.looked.add(uid)
        variables_ = [entries[-1 - s] for slots in bound.values() for s in slots]
        return len(set(variables_)) == len(variables_) and {k: len(v) for k, v in bound.items()} == {k: len(v) for k, v in free.items()}

    # -- integers ----------------------------------------------------------------------------------------------------

    def digit(self, name: str, sizes: tuple[int, ...], indices: Sequence[Index], which: int, count: int, size: int, at: Index) -> Poly:
        """1 where digit `which` (of `count`) of an integer input is `at`; 0 also where the integer is out of range."""
        uid = self.atom("digit", (name, which, count), (*sizes, size), indicator=True, nonnegative=True)
        return {((uid, (*indices, at), 1),): 1}

    def valid(self, name: str, sizes: tuple[int, ...], indices: Sequence[Index]) -> Poly:
        """1 where an integer input is in range. Inputs that always are get the constant (`always_valid`)."""
        if name in self.always_valid:
            return constant(1)
        return {((self.atom("valid", name, sizes, indicator=True, nonnegative=True), tuple(indices), 1),): 1}

    always_valid: set[str] = field(default_factory=set)
    only_block: Callable[[Factor], Factor | None] | None = None  # a sum as a masked one of the logical program, if there is one
    closed: Callable[[int], bool] | None = None  # sums that exp and maxima do not open; none if they open all

    # -- functions ---------------------------------------------------------------------------------------------------

    def fn(self, name: str, p: Poly, param: Any = None, **flags: Any) -> Poly:
        """An application that no law takes apart."""
        form, idx = self.encode(p)
        return {(self.shared("fn", (name, param, form), idx, self.slot_sizes(p), lambda: flags),): 1}

    def opaque(self, name: str, args: Sequence[Poly], param: Any, why: Unsupported, **flags: Any) -> Poly:
        """A function of several arguments by its name alone: whatever these are, equal ones have equal results, or none."""
        joined: Poly = {}
        for i, a in enumerate(args):
            marker: Poly = {((self.atom("marker", i, ()), (), 1),): 1}
            joined = self.add(joined, self.times(marker, self.single(a)) if a else {})
        made = self.fn(OPAQUE + name, joined, (len(args), param), **flags)
        ((factor,),) = made
        self.reasons.setdefault(factor[0], why)
        return made

    def arguments(self, uid: int, idx: Sequence[Index]) -> list[Poly]:
        """Those of such a function."""
        count, _ = self.atoms[uid].data[0][1]
        parts: list[Poly] = [{} for _ in range(count)]
        for m, c in self.argument(uid, idx).items():
            (marker,) = [f for f in m if self.atoms[f[0]].kind == "marker"]
            parts[self.atoms[marker[0]].data][tuple(f for f in m if f is not marker)] = c
        return parts

    def is_opaque(self, uid: int) -> bool:
        """Whether an atom is such a function, or has one in it that is not an argument."""
        known = self._opaque.get(uid)
        if known is None:
            a = self.atoms[uid]
            if a.kind == "fn":
                known = self.name(uid).startswith(OPAQUE)
            elif a.kind == "cut":
                known = any(self.is_opaque(u) for _, factors in a.data[0][0] for u, _ in factors)
            elif a.kind == "sum":
                known = any(self.is_opaque(u) for u, _, _ in a.data[0][0])
            elif a.kind == "at":
                known = self.is_opaque(a.data[0])
            elif a.kind == "max" or (a.kind.startswith("row") and not a.kind.startswith("row arg")):
                known = a.kind.startswith("row " + OPAQUE) or any(self.is_opaque(u) for _, fs in a.data[0][0] for u, _, _ in fs)
            else:
                known = False
            self._opaque[uid] = known
        return known

    def wild(self, p: Poly) -> bool:
        """Whether something in p may have no value: an opaque function that is not known to have one."""
        return bool(self.reasons) and any(self._wild(u, idx) for m in p for u, idx, _ in m)

    def _wild(self, uid: int, idx: tuple[Index, ...]) -> bool:
        if not self.is_opaque(uid):
            return False
        kind = self.atoms[uid].kind
        if kind == "cut":
            return self.wild(self.open((uid, idx, 1)))
        if kind == "sum":
            return any(self._wild(u, at) for u, at, _ in self._opened(uid, idx)[0])
        return kind == "at" or not self._noted("finite", uid, idx)

    def _apart(self, factors: Sequence[Factor], coef: Coef) -> None:
        """What may have no value is not multiplied: it is only put at a place, by equalities."""
        for u, idx, w in factors:
            if self._wild(u, idx):
                beside = (self.atoms[v].kind in ("delta", "marker") for v, at, _ in factors if (v, at) != (u, idx))
                if w != 1 or coef != 1 or not all(beside):
                    raise Unsupported("a product with what may have no value")

    def applied(self, name: str, p: Poly, param: Any = None) -> Poly:
        """A function that is defined everywhere; of masked values it is one of the values, where the mask is 1."""
        p = self.flat(p, self.closed)
        if not p and name in AT_ZERO:
            return constant(AT_ZERO[name])
        conditions = self._conditions(p)
        if not conditions or len(conditions) > CASES:
            return self.fn(name, p, param)
        return self._by_cases(min(conditions), p, lambda q: self.applied(name, q, param))

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
            peak = alone and c > 0 and self.atoms[m[0][0]].kind == "max" and self.infinite(m[0][0])
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

    def masked(self, uid: int) -> bool:
        """Whether an atom may be infinite, or is a Σ of such."""
        known = self._masked.get(uid)
        if known is None:
            a = self.atoms[uid]
            known = self.infinite(uid) or (a.kind == "sum" and any(self.masked(u) for u, _, _ in a.data[0][0]))
            self._masked[uid] = known
        return known

    def from_below(self, uid: int) -> bool:
        """Whether an atom is a maximum, or something masked, that may be −∞ but never ∞."""
        a = self.atoms[uid]
        if a.kind != "max":
            return self.name(uid) == "log_indicator"
        terms = [(c, factors) for c, factors in a.data[0][0] if any(self.infinite(u) for u, _, _ in factors)]
        return all(c > 0 and len(f) == 1 and f[0][1] == 1 and self.from_below(f[0][0]) for c, f in terms)

    def finite(self, p: Poly) -> Poly:
        """p, after making sure that it is finite: no mask under a log in it; a maximum of masked values is a need."""
        for m in p:
            for u, idx, _ in m:
                if self.infinite(u):
                    self._finite_atom(u, idx)
        return p

    def number(self, p: Poly) -> Poly:
        """p, finite as something else needs that; an op that has a value also if it is not does not say so."""
        for m in p:
            for u, idx, _ in m:
                if not self.infinite(u):
                    continue
                if self.atoms[u].kind == "cut":
                    self.number(self.open((u, idx, 1)))
                elif not self._noted("finite", u, idx):
                    raise Unsupported("what may be infinite")
        return p

    def infinite(self, uid: int) -> bool:
        """Whether an atom may be infinite: log of a mask, or what is made of it."""
        known = self._infinite.get(uid)
        if known is None:
            a = self.atoms[uid]
            if a.kind == "fn":
                known = self.name(uid) in ("log_indicator", "infinity")
            elif a.kind == "cut":
                known = any(self.infinite(u) for _, factors in a.data[0][0] for u, _ in factors)
            elif a.kind == "sum":  # of maxima that are finite, which is a need then
                known = any(self.infinite(u) and self.atoms[u].kind != "max" for u, _, _ in a.data[0][0])
            elif a.kind == "at":
                known = self.infinite(a.data[0])
            elif a.kind.startswith("row arg"):
                known = False  # positions
            elif a.kind == "max" or a.kind.startswith("row"):
                known = any(self.infinite(u) for _, factors in a.data[0][0] for u, _, _ in factors)
            else:
                known = False
            self._infinite[uid] = known
        return known

    def _finite_atom(self, uid: int, idx: tuple[Index, ...]) -> None:
        a = self.atoms[uid]
        if a.kind in ("fn", "sum", "at"):
            raise Unsupported("a product with log of a mask, which may be infinite")
        if a.kind == "cut":
            self.finite(self.open((uid, idx, 1)))
        else:
            self.need("finite", uid, idx)

    def need(self, what: str, uid: int, idx: Sequence[Index]) -> None:
        """A condition of a law: it is known, or holds as what is at hand has a value, and is noted."""
        condition = named_need(what, uid, idx)
        if self.certain(condition):
            return
        if what not in self.assuming:
            if not self._noted(what, uid, idx):
                raise Ungranted(condition)
        elif self.trace is not None:
            self.trace.needs.append((what, uid, tuple(idx)))
        else:
            self.needs.add(condition)

    def _noted(self, what: str, uid: int, idx: Sequence[Index]) -> bool:
        """Whether a condition is among those that were noted."""
        need = named_need(what, uid, idx)
        if self.trace is None:
            return self.certain(need, self.needs)
        if self.certain(need, [named_need(*n) for n in self.trace.needs]):
            return True
        if not self.certain(need, self.needs):
            return False
        self.trace.given.append((what, uid, tuple(idx)))  # a block like this one may rest on it only if it is noted there too
        return True

    def certain(self, need: Need, known: Collection[Need] = ()) -> bool:
        """Whether a condition holds by itself, or is an instance of one that is known; what is positive is not zero, nor negative."""
        what, uid, idx = need
        a = self.atoms[uid]
        if (what in ("nonzero", "positive", "nonnegative") and a.positive) or (what == "nonnegative" and a.nonnegative):
            return True
        enough = [what]
        if what in ("nonzero", "nonnegative"):
            enough.append("positive")
        elif what == "positive" and a.nonnegative:
            enough.append("nonzero")
        about = known.about(uid) if isinstance(known, Needs) else known
        if any(w in enough and u == uid and instance(idx, general) for w, u, general in about):
            return True
        if what in ("nonzero", "positive") and self.name(uid) == "exp":  # of a maximum, if that is a number
            ((m,),) = [self.argument(uid, idx)]
            return all(self.certain(named_need("finite", u, at), known) for u, at, _ in m)
        return what == "finite" and a.kind == "max" and self._unmasked(uid, idx, known)

    def _unmasked(self, uid: int, idx: tuple[Index, ...], known: Collection[Need]) -> bool:
        """Whether a maximum of masked values is one of values: the Σ of their exponentials, 0 at −∞, is known not to be 0."""
        if not self.from_below(uid):
            return False
        assuming, self.assuming = self.assuming, NOTHING
        try:
            inside, over = self._open_max((uid, idx, 1))
            total = self.sum(self.exp(inside), over)
        except (Unsupported, TooLarge):
            return False
        finally:
            self.assuming = assuming
        if len(total) != 1:
            return False
        ((m, _),) = total.items()
        return all(self.certain(named_need("nonzero", u, at), known) for u, at, w in m if w > 0)

    def log(self, p: Poly) -> Poly:
        """log(exp(m)^p·X) = p·m + log X; log of a product of positive factors is the sum of logs."""
        self.finite(p)
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
        if sign > 0 and (self._nonnegative(tuple(inside)) or len(inside) == 1):
            for u, idx, w in inside:
                if e < 0 or not (self.atoms[u].nonnegative or _even(w)):
                    self.need("nonzero" if _even(w) else "positive" if e < 0 or w < 0 else "nonnegative", u, idx)
        else:  # the product must be positive, not each factor
            ((made,),) = wrapped
            self.need("defined", made[0], made[1])
        return self.times(root, self.times(self.monomial(outside), wrapped))

    def _settled(self, f: Factor) -> bool:
        """Whether a factor that divides is known not to be zero."""
        return f[2] >= 0 or self.atoms[f[0]].positive or self._noted("nonzero", f[0], f[1])

    def _nonzero(self, m: Mono) -> None:
        for u, idx, w in m:
            a = self.atoms[u]
            if a.indicator:
                raise Unsupported("an indicator as a divisor")
            if w > 0 and not a.positive:
                self.need("nonzero", u, idx)

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
                inner, fresh = self._open_max(m[0])
                return self.row("max", inner, {**fresh, **present})
        return self.row("max", p, present)

    def _open_max(self, f: Factor) -> tuple[Poly, dict[Index, int]]:
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

    # -- sums over constants -----------------------------------------------------------------------------------------

    def collapse(self, p: Poly) -> Poly:
        """n terms that differ only by the constants 0 … n−1, in the same places of size n, are a Σ (or lose their δ)."""
        if len(p) < 2:
            return p
        for same in alike(p):
            found = family(self.atoms, p, same)
            if found is not None:
                members, base, differ, n, coef = found
                made = self._collapsed(base, differ, n, coef)
                if made is not None:
                    rest = {m: c for m, c in p.items() if m not in members}
                    return self.collapse(self.add(rest, made))
        return p

    def _collapsed(self, base: Mono, differ: list[tuple[int, int]], n: int, coef: Coef) -> Poly | None:
        for k, j in differ:  # Σ_c δ(v,c)·f(c) = f(v)
            u, idx, _ = base[k]
            if self.atoms[u].kind == "delta" and idx[1 - j] < 0:
                v = idx[1 - j]
                rest = [f for i, f in enumerate(with_constant(base, differ, v)) if i != k]
                return self.monomial(rest, coef)
        if any(self.infinite(u) for u, _, _ in base):
            return None  # a Σ is of numbers
        v = self.bound()
        return scale(self.sum(self.monomial(with_constant(base, differ, v)), {v: n}), coef)


def _others(a: Atom, n: int) -> tuple[tuple[int, Power], ...]:
    """The factors of a Σ but one, without their indices."""
    return tuple((u, w) for i, (u, w, _) in enumerate(a.data[0][0]) if i != n)


def named_need(what: str, uid: int, idx: Sequence[Index]) -> Need:
    """A condition with its variables numbered as they appear."""
    names: dict[Index, Index] = {}
    return what, uid, tuple(i if i >= 0 else names.setdefault(i, -1 - len(names)) for i in idx)


def _even(power: Power) -> bool:
    return isinstance(power, int) and power % 2 == 0
