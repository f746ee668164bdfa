"""Sums under short names, and names opened again. Trusted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

from trainverify.prove.algebra.facts import Facts
from trainverify.prove.algebra.terms import (
    Atom,
    Coef,
    Factor,
    Index,
    Mono,
    Poly,
    Unsupported,
    as_constant,
    named_need,
    tidy,
    within,
)

SHORT: Final = 4  # terms of a sum that is known also with the sums in it opened
OPENED: Final = 24  # terms of a sum with sums in it opened, up to which it is looked for


@dataclass
class Names(Facts):
    """Sums under short names: one factor wherever they are used, opened where they are added to."""

    _aliases: dict[Any, list[tuple[int, tuple[Index, ...], Coef, Mono]]] | None = None
    _alias_lengths: set[int] = field(default_factory=set)  # how many terms these have with the sums in them opened
    _lengths: set[int] = field(default_factory=set)  # how many terms cuts have

    def plus(self, *polys: Poly) -> Poly:
        """A sum in which sums that the logical program does not have are opened: the order of additions does not matter."""
        if not self.named:
            return self.add(*polys)
        return self.add(*(self.flat(p, lambda u: u < self.named) for p in polys))

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
        return self.single(made)

    def _alias(self, lead: Coef, factors: Mono, prim: Poly) -> Poly | None:
        """lead · factors · prim by the name of a sum of the logical program, if it is one with the sums in it opened."""
        if len(prim) > OPENED or not self._opened_names() or len(prim) not in self._alias_lengths:
            return None
        form, idx = self.encode(prim)
        if any(u < self.named for u in self.forms_of("cut", (form, False))):
            return None  # the logical program has it as it is
        for uid, pattern, coef, common in self._opened_names().get(form, ()):
            slots: dict[Index, Index] = {}
            fits = all(i == k if k >= 0 else slots.setdefault(k, i) == i for k, i in zip(pattern, idx, strict=True))
            if fits and len(slots) == len(self.atoms[uid].sizes):
                inverse = [(u, tuple(slots.get(i, i) for i in at), -w) for u, at, w in common]
                name: Factor = (uid, tuple(slots[-1 - k] for k in range(len(slots))), 1)
                if self.trace is not None:
                    self.trace.spoiled = True
                return self.monomial([*factors, *inverse, name], tidy(Fraction(lead) / coef))
        return None

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
                    self._alias_lengths.add(len(prim))
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

    def _decided(self, p: Poly, q: Poly) -> bool:
        """Whether some condition in q holds wherever a term of p is not zero."""
        conditions = self._conditions(q)
        if not conditions:
            return False
        arguments = [self.argument(*c) for c in conditions if self.name(c[0]) == "gt0"]
        return any(within(a, {(u, idx) for u, idx, w in m if w > 0 and self.atoms[u].nonnegative}) for a in arguments for m in p)

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
        found = self._alias(lead, factors, prim) if self.named else None
        return self._whole(lead, factors, prim) if found is None else found

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

    def _digits(self, factors: list[Factor]) -> list[Factor]:
        """valid(id)·Σ_v D(id in a piece)[v]·f(v) is that Σ; so it is with a sum of such under a name."""
        left = super()._digits(factors)
        if not self._labels:
            return left
        known = [f for f in left if self.atoms[f[0]].kind == "valid" and f[2] > 0]
        idle = [f for f in known if any(g[2] > 0 and self._only_where(g, self.atoms[f[0]].data, f[1]) for g in left if g is not f)]
        return [f for f in left if f not in idle]

    def _only_where(self, factor: Factor, label: str, at: tuple[Index, ...], depth: int = 3) -> bool:
        """Whether a factor is 0 unless an integer input is in range, as its digits in pieces of the range show."""
        uid, idx, power = factor
        a = self.atoms[uid]
        if a.kind == "digit" and a.data[0] in self._labels:
            return self._labels[a.data[0]] == label and idx[:-1] == at
        if power != 1 or not depth or a.kind not in ("sum", "cut"):
            return False
        terms = [self.opened_sum(uid, idx)[0]] if a.kind == "sum" else [list(m) for m in self.open(factor)]
        return all(any(self._only_where(f, label, at, depth - 1) for f in m if f[2] > 0) for m in terms)

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
