"""What is known of atoms: signs, infinities, conditions that were noted, and whether one follows. Trusted."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from trainverify.prove.algebra.ring import Ring
from trainverify.prove.algebra.terms import (
    BORDERED,
    EVERYTHING,
    Assuming,
    Coef,
    Factor,
    Index,
    Mono,
    Need,
    Needs,
    Poly,
    Ungranted,
    Unsupported,
    bordered_windows,
    instance,
    named_need,
)


@dataclass
class Facts(Ring):
    """Conditions of laws: known by a form, noted before, or assumed and noted now."""

    needs: Needs = field(default_factory=Needs)  # conditions used so far
    assuming: Assuming = EVERYTHING  # conditions that hold if they are needed, and are noted; others must be known
    _infinite: dict[int, bool] = field(default_factory=dict)
    _masked: dict[int, bool] = field(default_factory=dict)

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
        if what in ("nonzero", "positive") and a.kind == "sum" and self._counts_peaks(uid, idx):
            return True
        return what == "finite" and a.kind == "max" and self._unmasked(uid, idx, known)

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
                known = a.kind.startswith(BORDERED) or any(self.infinite(u) for _, factors in a.data[0][0] for u, _, _ in factors)
                known = known and not (a.kind == "max" and self._reaches_inside(uid))
            else:
                known = False
            self._infinite[uid] = known
        return known

    def _reaches_inside(self, uid: int) -> bool:
        """Whether a maximum takes in all elements of windows of numbers with −∞ outside: of every window some element lies inside."""
        inside, over = self.opened_max((uid, tuple(self.bound() for _ in self.atoms[uid].sizes), 1))
        free = set(over)
        while len(inside) == 1:
            ((m, c),) = inside.items()
            if c != 1 or len(m) != 1 or m[0][2] != 1 or not self.atoms[m[0][0]].kind.startswith(BORDERED):
                break
            how = bordered_windows(self.atoms[m[0][0]].kind)
            (_, _, at_sizes), _ = self.atoms[m[0][0]].data
            inside, at = self.opened_row(m[0])
            digits = next(n for n in range(len(at) + 1) if math.prod(at_sizes[len(at) - n :]) == how.kernel)
            element = at[len(at) - digits :]
            if not free.issuperset(element) or len(set(element)) < digits or not how.all_reached():
                return False
            free -= set(element)
        return not any(self.infinite(u) for m in inside for u, _, _ in m)

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
        if a.kind == "cut":
            return all(self._below(c, [u for u, w in fs for _ in range(1 if w == 1 else 2)]) for c, fs in a.data[0][0])
        if a.kind != "max" and not a.kind.startswith(BORDERED):
            return self.name(uid) == "log_indicator"
        return all(self._below(c, [u for u, w, _ in fs for _ in range(1 if w == 1 else 2)]) for c, fs in a.data[0][0])

    def below(self, p: Poly) -> bool:
        """Whether p may be −∞ but never ∞, nor a difference of both."""
        return all(self._below(c, [u for u, _, w in m for _ in range(1 if w == 1 else 2)]) for m, c in p.items())

    def _below(self, c: Coef, factors: Sequence[int]) -> bool:
        """The same of a term: a mask or −∞ by itself, at a place."""
        unbounded = [u for u in factors if self.infinite(u)]
        if not unbounded:
            return True
        alone = len(unbounded) == 1 and all(self.atoms[u].kind == "delta" for u in factors if u not in unbounded)
        return alone and (c < 0 if self.name(unbounded[0]) == "infinity" else c > 0 and self.from_below(unbounded[0]))

    def _counts_peaks(self, uid: int, idx: tuple[Index, ...]) -> bool:
        """Whether a Σ counts where the values of a row equal their maximum, by the functions that are built on this."""
        raise NotImplementedError

    def _unmasked(self, uid: int, idx: tuple[Index, ...], known: Collection[Need]) -> bool:
        """Whether a maximum of masked values is one of values, by the functions that are built on this."""
        raise NotImplementedError
