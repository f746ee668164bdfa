"""Sums whose terms cancel once the names and Σ in them are opened: what a shift under exponentials leaves in gradients. Trusted.

The value of a softmax, and of a log of a sum of exponentials, does not depend on the shift that is subtracted first. Its derivative by the
shift is a sum of several Σ that are 0 together, or are the logical program's together, if not one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

from trainverify.prove.algebra.sums import SHORT, Sums
from trainverify.prove.algebra.terms import NOTHING, Coef, Factor, Mono, Poly, TooLarge, Unsupported, tidy

MANY: Final = 64  # terms of a sum beyond which nothing is opened


@dataclass
class Cancelled(Sums):
    """Sums that are opened to see whether terms cancel."""

    joined: Callable[[Poly], Poly] | None = None  # blocks of masked sums of the logical program as those sums
    _cancelling: bool = False
    _left: dict[Any, bool] = field(default_factory=dict)  # forms of which opening has led to nothing

    def forget_cancelled(self) -> None:
        """What opening led to before the logical program's sums were all known."""
        self._left = {}

    def settle(self, p: Poly) -> Poly:
        """The form in which a tensor is kept; 0, or a sum of the logical program, if it is that with everything in it opened."""
        if not self.cancels or self._cancelling or not 1 < len(p) <= MANY or not min(p.values()) < 0 < max(p.values()):
            return super().settle(p)
        key, _ = self.encode(p)
        if key not in self._left:
            made = self._tried(p)
            if made is not None:
                if self.trace is not None:
                    self.trace.spoiled = True
                return made
            self._left[key] = True
        return super().settle(p)

    def _tried(self, p: Poly) -> Poly | None:
        """What p is with everything in it opened, if that is 0 or a sum of the logical program. Nothing is assumed on the way."""
        before, given = len(self.atoms), len(self.trace.given) if self.trace is not None else 0
        assuming, self.assuming, self._cancelling = self.assuming, NOTHING, True
        try:
            if self.named:
                made = self._opened(p, whole=False)
                made = made if made is None else super().settle(made)
                if made is not None and all(u < self.named for m in made for u, _, _ in m):
                    return made
            return {} if self._opened(p, whole=True) == {} else None
        except (TooLarge, Unsupported):
            return None
        finally:
            self.assuming, self._cancelling = assuming, False
            if not self.named:  # what was tried is none of the logical program's
                self._drop(before, given)

    def _opened(self, p: Poly, whole: bool) -> Poly | None:
        """p with the sums under names in its Σ opened, and what is divided by itself gone; nothing, if that has too many terms."""
        while True:
            made = self.add(*[self._term_opened(m, c, whole) for m, c in p.items()])
            made = self._divided(self.collapse(self.flat(made, None if whole else lambda u: u < self.named)))
            made = made if self.joined is None else self.joined(made)
            if made == p or not made:
                return made
            p = made
            if len(p) > MANY:
                return None

    def _term_opened(self, m: Mono, c: Coef, whole: bool) -> Poly:
        made: Poly = {(): c}
        for f in m:
            made = self.times(made, self._sum_opened(f, whole))
        return made

    def _sum_opened(self, f: Factor, whole: bool) -> Poly:
        """A Σ with sums under a name in it opened: the plan's own; if it is written out whole, all short ones and Σ in it too."""
        a = self.atoms[f[0]]
        if f[2] != 1 or a.kind != "sum":
            return {(f,): 1}
        body, over = self.opened_sum(f[0], f[1])
        product: Poly = {(): 1}
        changed = False
        for g in body:
            inner = self.atoms[g[0]]
            if self._own_cut(g[0], g[2]) or (whole and self._short(g)):
                product, changed = self.times(product, self.open(g)), True
            elif whole and g[2] == 1 and inner.kind == "sum":
                factors, bound = self.opened_sum(g[0], g[1])
                product, over, changed = self.times(product, self.monomial(factors)), {**over, **bound}, True
            else:
                product = self.times(product, {(g,): 1})
        if not changed:
            return {(f,): 1}
        opening, self._opening = self._opening, True
        try:
            return self.sum(product, over)
        finally:
            self._opening = opening

    def _short(self, f: Factor) -> bool:
        a = self.atoms[f[0]]
        return f[2] == 1 and a.kind == "cut" and not a.indicator and a.definition is not None and len(a.definition) <= SHORT

    def _divided(self, p: Poly) -> Poly:
        """N⁻¹·a·x + N⁻¹·b·x = x for a sum N = a + b under a name."""
        for m, c in p.items():
            for f in m:
                if f[2] < 0 and self.atoms[f[0]].kind == "cut" and not self.atoms[f[0]].indicator:
                    made = self._quotient(p, m, c, f)
                    if made is not None:
                        return self._divided(made)
        return p

    def _quotient(self, p: Poly, m: Mono, c: Coef, f: Factor) -> Poly | None:
        """p with all terms of a name over that name joined, if this is one of them and the others are there."""
        parts = self.open((f[0], f[1], 1))
        for first, coef in parts.items():
            if any(not any(g[:2] == h[:2] and h[2] >= g[2] for h in m) for g in first):
                continue
            rest = self.times(self.monomial([*m, *[(u, idx, -w) for u, idx, w in first]]), {(): tidy(Fraction(c) / coef)})
            whole = self.times(rest, parts)
            if len(whole) == len(parts) > 1 and all(p.get(n) == d for n, d in whole.items()):
                left = {n: d for n, d in p.items() if n not in whole}
                return self.add(left, self.times(rest, self.monomial([(f[0], f[1], 1)])))
        return None

    def _drop(self, count: int, given: int) -> None:
        """Forget the atoms from a number on: they were made to try something, without noting a condition."""
        for a in self.atoms[count:]:
            del self._table[a.kind, a.data, a.sizes]
            if a.pattern or a.kind in ("sum", "max", "fn", "cut") or a.kind.startswith("row"):
                self._forms[a.kind, a.data[0]].remove(a.uid)
            caches: tuple[dict[int, Any], ...] = (
                *(self._infinite, self._masked, self._opaque, self._numbers, self._heights, self.reasons),
            )
            for known in caches:
                known.pop(a.uid, None)
        del self.atoms[count:]
        if self.trace is not None:
            del self.trace.given[given:]
            self.trace.looked = {u for u in self.trace.looked if u < count}
            self.trace.measured = {u for u in self.trace.measured if u < count}
