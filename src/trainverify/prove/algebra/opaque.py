"""Functions by their names alone, of which no law is used, and what may be infinite. Trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainverify.prove.algebra.names import Names
from trainverify.prove.algebra.terms import (
    NOTHING,
    OPAQUE,
    SAME,
    Coef,
    Factor,
    Index,
    Poly,
    Unsupported,
)


@dataclass
class Opaque(Names):
    """Functions by their names: what may have no value is put at places, and never multiplied or added up."""

    _opaque: dict[int, bool] = field(default_factory=dict)

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

    def same(self, a: Poly, b: Poly) -> Poly:
        """1 where two values are equal, numbers or −∞."""
        joined: Poly = {}
        for i, p in enumerate((a, b)):
            marker: Poly = {((self.atom("marker", i, ()), (), 1),): 1}
            joined = self.add(joined, self.times(marker, self.single(p)) if p else {})
        return self.fn(SAME, joined, (2, None), indicator=True, nonnegative=True)

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
            return any(self._wild(u, at) for u, at, _ in self.opened_sum(uid, idx)[0])
        return kind == "at" or not self._noted("finite", uid, idx)

    def _apart(self, factors: Sequence[Factor], coef: Coef) -> None:
        """What may have no value is not multiplied: it is only put at a place, by equalities."""
        for u, idx, w in factors:
            if self._wild(u, idx):
                beside = (self.atoms[v].kind in ("delta", "marker") for v, at, _ in factors if (v, at) != (u, idx))
                if w != 1 or coef != 1 or not all(beside):
                    raise Unsupported("a product with what may have no value")

    def finite(self, p: Poly) -> Poly:
        """p, after making sure that it is finite: no mask under a log in it; a maximum of masked values is a need."""
        for m in p:
            for u, idx, _ in m:
                if self.infinite(u):
                    self._finite_atom(u, idx)
        return p

    def known_finite(self, p: Poly) -> Poly:
        """p, if it is known to be finite: nothing is assumed."""
        assuming, self.assuming = self.assuming, NOTHING
        try:
            return self.finite(p)
        finally:
            self.assuming = assuming

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

    def unbounded(self, p: Poly) -> bool:
        """Whether something in p may be infinite, and is not known to be finite."""
        for m in p:
            for u, idx, _ in m:
                if self.infinite(u) and (
                    self.unbounded(self.open((u, idx, 1))) if self.atoms[u].kind == "cut" else not self._noted("finite", u, idx)
                ):
                    return True
        return False

    def _finite_atom(self, uid: int, idx: tuple[Index, ...]) -> None:
        a = self.atoms[uid]
        if a.kind in ("fn", "sum", "at"):
            raise Unsupported("a product with log of a mask, which may be infinite")
        if a.kind == "cut":
            self.finite(self.open((uid, idx, 1)))
        else:
            self.need("finite", uid, idx)
