"""Whether a polynomial is 0 once the sums in it are written out. Trusted.

Products distribute over named sums, and a Σ of a Σ is one Σ, also inside other Σ. What is made of most levels of names is written out
first, everywhere at once, so that equal terms meet; what comes back under the same name stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from trainverify.prove.algebra.kernel import Kernel
from trainverify.prove.algebra.terms import Factor, Poly, TooLarge, Unsupported

WORK: Final = 10_000  # terms written out for one question
ROUNDS: Final = 200


class Opened:
    """Asks such questions of a kernel; `lost` counts the terms that were written out in vain."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.lost = 0
        self._levels: dict[int, int] = {}

    def vanishes(self, p: Poly) -> bool:
        """Certainly 0; False says nothing."""
        work = 0
        closed: set[int] = set()
        with _plain(self.kernel):
            try:
                for _ in range(ROUNDS):
                    if not p:
                        return True
                    there = self._inside(p)
                    names = there.keys() - closed
                    if names:
                        highest = max(map(self.level, names))
                        names = {u for u in names if self.level(u) == highest}
                        p, terms = self._written(p, names)
                        left = self._inside(p)
                        closed |= {u for u in names if left.get(u, 0) >= there[u]}
                        work += terms
                    else:  # sums over all positions of a digit
                        done = self.kernel.collapse(p)
                        if len(done) == len(p):
                            break
                        p = done
                    if work > WORK:
                        break
            except (TooLarge, Unsupported, RecursionError):
                pass
        self.lost += work + len(p)
        return False

    def level(self, uid: int) -> int:
        """Of how many levels of names something is made."""
        if uid not in self._levels:
            a = self.kernel.atoms[uid]
            inside: set[int] = set()
            if a.kind == "cut" and a.definition is not None:
                inside = {u for m in a.definition for u, _, _ in m}
            elif a.kind == "sum":
                inside = {u for u, _, _ in a.data[0][0]}
            self._levels[uid] = 1 + max(map(self.level, inside), default=0)
        return self._levels[uid]

    def _opens(self, uid: int, power: object) -> bool:
        a = self.kernel.atoms[uid]
        return isinstance(power, int) and power > 0 and a.kind == "cut" and not a.indicator

    def _inside(self, p: Poly) -> dict[int, int]:
        """Names that can be written out, and how often one term has them: factors, and factors within a Σ; a Σ only within another."""
        found: dict[int, int] = {}
        for m in p:
            here: dict[int, int] = {}
            for u, _, w in m:
                if self._opens(u, w):
                    here[u] = here.get(u, 0) + int(w)
                elif w == 1 and self.kernel.atoms[u].kind == "sum":
                    for v, x, _ in self.kernel.atoms[u].data[0][0]:
                        if self._opens(v, x) or (x == 1 and self.kernel.atoms[v].kind == "sum"):
                            here[v] = here.get(v, 0) + int(x)
            for u, n in here.items():
                found[u] = max(found.get(u, 0), n)
        return found

    def _written(self, p: Poly, names: set[int]) -> tuple[Poly, int]:
        """p with some names written out, one per term, and how many terms changed."""
        k = self.kernel
        parts: list[Poly] = []
        stay: Poly = {}
        for m, c in p.items():
            for n, (u, idx, w) in enumerate(m):
                rest = [f for i, f in enumerate(m) if i != n]
                if u in names and self._opens(u, w):
                    parts.append(k.times(k.monomial([*rest, *_less((u, idx, w))], c), k.open((u, idx, 1))))
                    break
                if w == 1 and k.atoms[u].kind == "sum" and any(v in names for v, _, _ in k.atoms[u].data[0][0]):
                    made = self._within((u, idx, w), names)
                    if made is not None:
                        parts.append(k.times(k.monomial(rest, c), made))
                        break
            else:
                stay[m] = c
        return k.add(stay, *parts), len(parts)

    def _within(self, factor: Factor, names: set[int]) -> Poly | None:
        """A Σ with a name in it written out."""
        k = self.kernel
        body, over = k.opened_sum(factor[0], factor[1])
        for n, (u, idx, w) in enumerate(body):
            if u not in names:
                continue
            rest = [f for i, f in enumerate(body) if i != n]
            if self._opens(u, w):
                return k.sum(k.times(k.monomial([*rest, *_less((u, idx, w))]), k.open((u, idx, 1))), over)
            if w == 1 and k.atoms[u].kind == "sum":
                inner, more = k.opened_sum(u, idx)
                return k.sum(k.monomial([*inner, *rest]), {**over, **more})
        return None


@contextmanager
def _plain(kernel: Kernel) -> Iterator[None]:
    """Sums are not put together again to what the logical program has."""
    named, only, trace = kernel.named, kernel.only_block, kernel.trace
    kernel.named, kernel.only_block, kernel.trace = 0, None, None
    try:
        yield
    finally:
        kernel.named, kernel.only_block, kernel.trace = named, only, trace


def _less(factor: Factor) -> list[Factor]:
    """A factor with one power less."""
    u, idx, w = factor
    return [(u, idx, w - 1)] if w > 1 else []
