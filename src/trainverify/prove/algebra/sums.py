"""Σ over indices: components, what is known of them in the logical program, and sums over constants. Trusted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

from trainverify.prove.algebra.opaque import Opaque
from trainverify.prove.algebra.terms import (
    FEW,
    ONE,
    Atom,
    Coef,
    Factor,
    Index,
    Mono,
    Poly,
    Power,
    TooLarge,
    Unsupported,
    alike,
    body_key,
    connected,
    constant,
    family,
    looks_alike,
    orders,
    scale,
    tidy,
    with_constant,
)

REMADE: Final = 500  # sums that are made anew in one comparison
SHORT: Final = 4  # terms of a sum that is known also with the sums in it opened


@dataclass
class Sums(Opaque):
    """Sums over indices, hash-consed by their connected products."""

    always_valid: set[str] = field(default_factory=set)
    cancels: bool = True  # whether sums are opened to see whether their terms cancel
    _last_labels: dict[str, tuple[str, tuple[str, ...]]] = field(
        default_factory=dict
    )  # the last piece of a label → the label, other pieces
    only_block: Callable[[Factor], Factor | None] | None = None  # a sum as a masked one of the logical program, if there is one
    _sums: dict[Any, list[tuple[int, int]]] | None = None  # factors but a name → sums of the logical program, which factor it is
    _distributed: dict[tuple[int, int], Poly] = field(default_factory=dict)  # those with the name opened
    _heights: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _steps: int = 0  # sums within the sum at hand, also one after the other
    _summing: bool = False
    _opening: bool = False

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
                (tower,), over = self.opened_sum(f[0], f[1])
                parts.append(self.times({tuple(g for g in m if g is not f): p[m]}, self.sum(self.open(tower), over)))
            p = self.flat(self.add(*parts))

    def made_anew(self, p: Poly, left: list[int] | None = None) -> Poly:
        """p, with sums of the plan opened and made again, and Σ of the logical program at constants: what was worked out for any constants
        may have been named before at these."""
        left = [REMADE] if left is None else left
        parts: list[Poly] = []
        for m, c in p.items():
            made: Poly = {(): c}
            for f in m:
                made = self.times(made, self._made_anew(f, left))
            parts.append(made)
        return self.add(*parts)

    def _made_anew(self, f: Factor, left: list[int]) -> Poly:
        a, own = self.atoms[f[0]], f[0] >= self.named
        if f[2] != 1 or a.indicator or not (a.kind == "sum" or (a.kind == "cut" and own)) or not (own or any(i >= 0 for i in f[1])):
            return {(f,): 1}
        left[0] -= 1
        if left[0] < 0:
            raise TooLarge("too many sums to be made anew")
        if a.kind == "cut":
            return self.single(self.made_anew(self.open(f), left))
        factors, over = self.opened_sum(f[0], f[1])
        body = self.monomial(factors)
        return self.sum(self.made_anew(body, left) if own else body, over)

    def _tower_summed(self, f: Factor) -> bool:
        """Whether a factor is the Σ of a sum under a name, and of nothing else."""
        a = self.atoms[f[0]]
        if f[2] != 1 or a.kind != "sum" or len(a.data[0][0]) != 1:
            return False
        ((u, w, _),) = a.data[0][0]
        return bool(w == 1) and self.atoms[u].kind == "cut" and not self.atoms[u].indicator

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
        body, inner = self.opened_sum(f[0], f[1])
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
                        body, inner = self.opened_sum(whole, tuple(-1 - k for k in range(len(self.atoms[whole].sizes))))
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
                body, inner = self.opened_sum(f[0], f[1])
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
        known = self._known_whole(factors, over)
        return self._regrouped(factors, over) if known is None else known

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
        """Σ_i f(i)·(Σ_j g(i,j)) as Σ_ij f·g, and Σ_i f(i)·(g(i) + h(i)) as two, if the outcome is 0, or what is opened is the plan's own
        and the outcome one that the logical program has."""
        if not self.named or self._opening or len(factors) < 2:
            return None
        for n, (uid, idx, power) in enumerate(factors):
            sums = self.atoms[uid].kind == "sum" and len(self.atoms[uid].data[0][0]) > 1
            own = uid >= self.named and power == 1 and (sums or self._own_cut(uid, power))
            if not own and not (self.cancels and self._may_cancel(uid, power)):
                continue
            rest = [f for m, f in enumerate(factors) if m != n]
            self._opening = True  # one at a time
            try:
                if sums:
                    body, inner = self.opened_sum(uid, idx)
                    made = self.sum(self.monomial([*body, *rest]), {**inner, **over})
                else:
                    made = self.sum(self.times(self.monomial(rest), self.open((uid, idx, 1))), over)
            except TooLarge:
                continue
            finally:
                self._opening = False
            if not made or (own and all(u < self.named for m in made for u, _, _ in m)):
                return made
        return None

    def _may_cancel(self, uid: int, power: Power) -> bool:
        """Whether a factor is a short sum of both signs under a name: terms may be left that cancel."""
        a = self.atoms[uid]
        if power != 1 or a.kind != "cut" or a.indicator or a.definition is None or not 1 < len(a.definition) <= SHORT:
            return False
        return min(a.definition.values()) < 0 < max(a.definition.values())

    def _regrouped(self, factors: list[Factor], over: dict[Index, int]) -> Poly:
        """Σ_i f(i)·(Σ_j g(i,j)·h(j)) as Σ_j h(j)·(Σ_i f(i)·g(i,j)), if that is what the logical program has."""
        plain = self._sum_atom("sum", factors, over)
        if self.named and not self._opening and plain[0] >= self.named and len(factors) == 2:
            for n, (uid, idx, power) in enumerate(factors):
                if uid < self.named and power == 1 and self.atoms[uid].kind == "sum" and len(self.atoms[uid].data[0][0]) > 1:
                    body, inner = self.opened_sum(uid, idx)
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
        factors, inner = self.opened_sum(uid, idx)
        return self.sum(self.monomial(factors), {**inner, **over})

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
        """Whether an atom is 1 − [Σ c·(position of a bound variable − position of a free one) > 0]: 1 where both are equal.
        Or 1 − [Σ c·(position of a bound variable) − what is not negative > 0]: 1 where bound variables are 0."""
        a = self.atoms[uid]
        if not (a.kind == "cut" and a.indicator and a.definition is not None and a.definition.get(ONE) == 1 and len(a.definition) == 2):
            return False
        ((m, c),) = [(m, c) for m, c in a.definition.items() if m != ONE]
        if c != -1 or len(m) != 1 or self.name(m[0][0]) != "gt0":
            return False
        if self._allows_first(m[0], entries):
            return True
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

    def _allows_first(self, f: Factor, entries: Sequence[int]) -> bool:
        """Whether [p > 0] is 0 where the bound variables are 0: everything else in p is a position times a number that is not positive."""
        for n, weight in self.argument(f[0], f[1]).items():
            if n != ONE and (len(n) != 1 or n[0][2] != 1 or self.atoms[n[0][0]].kind != "iota"):
                return False
            at = n[0][1][0] if n != ONE else 0
            if weight > 0 and not (at < 0 and entries[-1 - at] >= 0):
                return False
        return True

    def digit(self, name: str, sizes: tuple[int, ...], indices: Sequence[Index], which: int, count: int, size: int, at: Index) -> Poly:
        """1 where digit `which` (of `count`) of an integer input is `at`; 0 also where the integer is out of range."""
        uid = self.atom("digit", (name, which, count), (*sizes, size), indicator=True, nonnegative=True)
        return {((uid, (*indices, at), 1),): 1}

    def valid(self, name: str, sizes: tuple[int, ...], indices: Sequence[Index]) -> Poly:
        """1 where an integer input is in range. Inputs that always are get the constant (`always_valid`); for the last piece of an axis
        it is what the others leave."""
        if name in self.always_valid:
            return constant(1)
        if name in self._last_labels:
            whole, others = self._last_labels[name]
            return self.add(self.valid(whole, sizes, indices), *(scale(self.valid(n, sizes, indices), -1) for n in others))
        return {((self.atom("valid", name, sizes, indicator=True, nonnegative=True), tuple(indices), 1),): 1}

    def cut_labels(self, name: str, pieces: Sequence[str]) -> None:
        """An integer input in the pieces of its range: it is in one of them, if it is in range."""
        *others, last = pieces
        self._last_labels[last] = name, tuple(others)
        self._labels |= dict.fromkeys(pieces, name)

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
