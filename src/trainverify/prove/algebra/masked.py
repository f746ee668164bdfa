"""Sums under a causal mask, block by block: what a plan computes without the masked blocks is the logical sum. Trusted.

A causal mask compares positions digit by digit. Where the slow digit is a constant on both sides, the mask is 0, 1, or the mask
of the fast digits: `Σ_{n,t} [n·T + t ≤ c·T + q]·f(n,t) = Σ_{n<c} Σ_t f(n,t) + Σ_t [t ≤ q]·f(c,t)`. A sum of a plan that has all
terms of the right side is written as the left one, which the logical program has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainverify.prove.algebra.kernel import Kernel
from trainverify.prove.algebra.terms import ONE, Coef, Factor, Index, Mono, Poly, constant, scale

Entry = tuple[str, int]  # ("bound", number) or ("index", a constant, a variable or a slot)


class MaskedSums:
    """The sums of the logical program that have a causal mask in them."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self._orders: dict[int, bool] = {}
        self._known: dict[Any, list[int]] = {}  # what is summed, without the mask → sums
        self._expanded: dict[tuple[int, tuple[Index, ...], int], Poly] = {}
        self._busy = False
        for uid in range(len(kernel.atoms)):
            if kernel.atoms[uid].kind == "sum":
                body = kernel.atoms[uid].data[0][0]
                if sum(self.order(u) for u, _, _ in body) == 1:
                    self._known.setdefault(self._key(body), []).append(uid)

    def order(self, uid: int) -> bool:
        """Whether an atom is 1 − [Σ weight · position > 0]."""
        if uid not in self._orders:
            a, k = self.kernel.atoms[uid], self.kernel
            found = False
            if a.kind == "cut" and a.indicator and a.definition is not None and a.definition.get(ONE) == 1 and len(a.definition) == 2:
                ((m, c),) = [(m, c) for m, c in a.definition.items() if m != ONE]
                if c == -1 and len(m) == 1 and m[0][2] == 1 and k.name(m[0][0]) == "gt0":
                    terms = k.argument(m[0][0], m[0][1])
                    found = all(n == ONE or (len(n) == 1 and n[0][2] == 1 and k.atoms[n[0][0]].kind == "iota") for n in terms)
            self._orders[uid] = found
        return self._orders[uid]

    def _key(self, body: Sequence[tuple[int, Any, Any]]) -> Any:
        return tuple((u, w) for u, w, _ in body if not self.order(u))

    # -- the mask where digits are known -------------------------------------------------------------------------------

    def mask(self, uid: int, idx: tuple[Index, ...]) -> Poly:
        """The mask with constant digits worked out."""
        k = self.kernel
        ((m, _),) = [(m, c) for m, c in k.open((uid, idx, 1)).items() if m != ONE]
        difference: Poly = {}
        low: Coef = 0
        high: Coef = 0
        for n, c in k.argument(m[0][0], m[0][1]).items():
            if n == ONE or n[0][1][0] >= 0:
                value = c * (1 if n == ONE else n[0][1][0])
                difference = k.add(difference, constant(value))
                low, high = low + value, high + value
            else:
                reach = c * (k.atoms[n[0][0]].data - 1)
                difference = k.add(difference, {n: c})
                low, high = low + min(reach, 0), high + max(reach, 0)
        if high <= 0:
            return constant(1)
        if low > 0:
            return {}
        return k.single(k.add(constant(1), scale(k.indicator_of("gt0", difference), -1)), indicator=True)

    def expanded(self, uid: int, idx: tuple[Index, ...], block: int) -> Poly:
        """A masked sum with one of its digits (a bound variable, by number) written out."""
        key = (uid, idx, block)
        if key not in self._expanded:
            k = self.kernel
            factors, inner = k.opened_sum(uid, idx)
            digit = list(inner)[block]
            others = {v: s for v, s in inner.items() if v != digit}
            total: Poly = {}
            self._busy = True
            for c in range(inner[digit]):
                placed = [(u, tuple(c if i == digit else i for i in at), w) for u, at, w in factors]
                masks = [self.mask(u, at) for u, at, _ in placed if self.order(u)]
                rest = k.monomial([f for f in placed if not self.order(f[0])])
                total = k.add(total, k.sum(k.times(masks[0], rest), others))
            self._busy = False
            self._expanded[key] = total
        return self._expanded[key]

    # -- recognising -----------------------------------------------------------------------------------------------------

    def whole(self, p: Poly) -> Poly:
        """p, with the blocks of masked sums joined."""
        if not self._known:
            return p
        changed = True
        while changed:
            changed = False
            for m, c in p.items():
                for f in m:
                    if f[0] < self.kernel.named:
                        continue
                    made = self._joined(p, m, c, f)
                    if made is not None:
                        p, changed = made, True
                        break
                if changed:
                    break
        return p

    def _joined(self, p: Poly, m: Mono, c: Any, f: Factor) -> Poly | None:
        """p with the sum that this factor is the last block of."""
        k, a = self.kernel, self.kernel.atoms[f[0]]
        if a.kind != "sum" or f[0] < k.named or f[2] != 1 or not any(self.order(u) for u, _, _ in a.data[0][0]):
            return None
        rest = [g for g in m if g is not f]
        for uid in self._known.get(self._key(a.data[0][0]), ()):
            found = self._matched(uid, f)
            if found is None:
                continue
            idx, block = found
            terms = self.expanded(uid, idx, block)
            parts = k.times({tuple(rest): c}, terms)
            if all(p.get(n) == d for n, d in parts.items()):
                if k.trace is not None:
                    k.trace.spoiled = True
                return k.add({n: d for n, d in p.items() if n not in parts}, k.monomial([*rest, (uid, idx, 1)], c))
        return None

    def only(self, f: Factor) -> Factor | None:
        """The masked sum of the logical program of which this is the only block that the mask leaves."""
        a = self.kernel.atoms[f[0]]
        if self._busy or not any(self.order(u) for u, _, _ in a.data[0][0]):
            return None
        for uid in self._known.get(self._key(a.data[0][0]), ()):
            found = self._matched(uid, f)
            if found is not None and self.expanded(uid, *found) == {((f[0], f[1], 1),): 1}:
                return uid, found[0], 1
        return None

    def _entries(self, uid: int, idx: Sequence[Index]) -> list[list[Entry]]:
        """Where the factors of a sum stand, without those of the mask."""
        k = self.kernel
        body = k.atoms[uid].data[0][0]
        slots = k.occurrences(uid, idx)
        found = [(u, [("bound", e) if e >= 0 else ("index", next(slots)) for e in entries]) for u, _, entries in body]
        return [entries for u, entries in found if not self.order(u)]

    def _matched(self, uid: int, f: Factor) -> tuple[tuple[Index, ...], int] | None:
        """The indices at which a masked sum of the logical program has this block, and which of its digits is the block."""
        a = self.kernel.atoms[uid]
        symbols = [-1 - n for n in range(len(a.sizes))]
        bound: dict[int, Entry] = {}
        slots: dict[int, Index] = {}
        for mine, theirs in zip(self._entries(uid, symbols), self._entries(f[0], f[1]), strict=True):
            for (kind, x), there in zip(mine, theirs, strict=True):
                if kind == "bound":
                    if bound.setdefault(x, there) != there:
                        return None
                elif there[0] == "bound" or (x >= 0 and there[1] != x) or (x < 0 and slots.setdefault(-1 - x, there[1]) != there[1]):
                    return None
        blocks = [n for n, there in bound.items() if there[0] == "index" and there[1] >= 0]
        if len(blocks) != 1 or len(slots) != len(symbols) or len(set(bound.values())) != len(bound):
            return None
        return tuple(slots[n] for n in range(len(symbols))), blocks[0]
