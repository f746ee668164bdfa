"""The vocabulary of the kernel: polynomials, atoms, limits, and pure functions of them. Trusted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

from trainverify.primitives.windows import Windows

Index = int  # constant if ≥ 0, variable if < 0
Power = int | Fraction
Factor = tuple[int, tuple[Index, ...], Power]
Mono = tuple[Factor, ...]
Coef = int | Fraction
Poly = dict[Mono, Coef]

# ("nonzero" | "positive" | "nonnegative" | "finite" | "defined", atom, indices): for all values of the variables, numbered from -1 down
Need = tuple[str, int, tuple[Index, ...]]
Assuming = frozenset[str]  # which of them hold, as what is at hand has a value
EVERYTHING: Final[Assuming] = frozenset(("nonzero", "positive", "nonnegative", "finite", "defined"))
OF_ROOTS: Final[Assuming] = frozenset(("nonnegative", "defined"))  # of what may be infinite, but must be a number
NOTHING: Final[Assuming] = frozenset()
OPAQUE: Final = "?"  # names of functions of which no law is used begin with it
BORDERED: Final = "row window "  # windows with −∞ outside of their row
SAME: Final = "same"  # [a = b] of numbers or −∞


class Needs(set[Need]):
    """Conditions, also by the atom that they are about."""

    def __init__(self) -> None:
        super().__init__()
        self._about: dict[int, list[Need]] = {}

    def add(self, need: Need) -> None:
        if need not in self:
            super().add(need)
            self._about.setdefault(need[1], []).append(need)

    def clear(self) -> None:
        super().clear()
        self._about.clear()

    def about(self, uid: int) -> Sequence[Need]:
        return self._about.get(uid, ())


ONE: Final[Mono] = ()
PARAMETER: Final = -(2 * 10**6)  # constant indices of a block, made variables while it is worked out for all, count down from here
LAST: Final = -(3 * 10**6)  # and stay above this
BOUND: Final = -(10**9)  # bound variables inside stored definitions count down from here


class Unsupported(Exception):
    """No law covers this; the prover gives up on the value, it never guesses."""


class Ungranted(Unsupported):
    """A law needs something that is not known."""

    def __init__(self, need: Need):
        super().__init__(f"something must be {need[0]}")
        self.need = need


class TooLarge(Exception):
    """A resource limit; the prover gives up on the value."""


@dataclass(frozen=True)
class Limits:
    monomials: int = 20_000  # of one polynomial
    factors: int = 400  # of one monomial
    ties: int = 5_040  # orders tried to make a form canonical
    slots: int = 1024  # of one atom; forms that match nothing grow, those that do stay small
    atoms: int = 5_000_000
    bits: int = 100_000  # of a coefficient
    steps: int = 100_000  # sums that are made while one is normalised
    height: int = 8  # of cuts within cuts that a Σ opens


FEW: Final = 24  # orders of factors that are all tried


@dataclass(slots=True)
class Atom:
    uid: int
    kind: str
    data: Any
    sizes: tuple[int, ...]  # of its slots
    indicator: bool = False  # 0 or 1 everywhere
    positive: bool = False
    nonnegative: bool = False
    pattern: tuple[int, ...] = ()  # of sum, max, fn, cut: the slot of each index occurrence, or -1 - c for a constant c
    definition: Poly | None = None  # of a cut, over the variables -1, -2, … of its slots
    covers: bool = False  # whether there are 0/1 conditions in that, however deep
    content: tuple[Coef, Mono] = (1, ())  # of a cut: it is this times its form; over slots too


@dataclass(slots=True)
class Trace:
    """What is used while a block is worked out: see `memo`."""

    looked: set[int] = field(default_factory=set)  # atoms that were opened, or found by what they are made of
    needs: list[Need] = field(default_factory=list)
    given: list[Need] = field(default_factory=list)  # conditions that had been noted before, and were used
    exps: list[tuple[object, str, bool]] = field(default_factory=list)
    measured: set[int] = field(default_factory=set)  # atoms whose heights decided what was opened
    generic: bool = False  # some constants are variables
    spoiled: bool = False  # something was used that holds for these constants and atoms only


def tidy(c: Coef) -> Coef:
    return c.numerator if isinstance(c, Fraction) and c.denominator == 1 else c


def scale(p: Poly, c: Coef) -> Poly:
    return {} if c == 0 else p if c == 1 else {m: tidy(k * c) for m, k in p.items()}


def constant(c: Coef) -> Poly:
    return {ONE: tidy(c)} if c else {}


def as_constant(p: Poly) -> Coef | None:
    if not p:
        return 0
    return p[ONE] if len(p) == 1 and ONE in p else None


def variables(p: Poly) -> set[Index]:
    return {i for m in p for _, idx, _ in m for i in idx if i < 0}


def connected(factors: list[Factor], bound: set[Index]) -> list[tuple[list[Factor], set[Index]]]:
    """Factors grouped by the bound variables that they share."""
    parts: list[tuple[list[Factor], set[Index]]] = []
    for f in factors:
        mine = {i for i in f[1] if i in bound}
        joined, rest = [f], []
        for fs, vs in parts:
            if vs & mine:
                joined += fs
                mine |= vs
            else:
                rest.append((fs, vs))
        parts = [*rest, (joined, mine)]
    return parts


def orders(groups: Iterable[Sequence[Factor]]) -> int:
    """In how many orders factors can be put, if only those of a group are exchanged."""
    return math.prod(math.factorial(len(g)) for g in groups)


def looks_alike(factors: Sequence[Factor], over: Mapping[Index, int]) -> dict[Any, list[Factor]]:
    """Factors of a Σ in groups that look alike, whatever indices are called: by their bound variables, and these by factors they are in."""
    looks = _places([(u, w) for u, _, w in factors])
    while True:
        within: dict[Index, list[tuple[int, int]]] = {i: [] for i in over}
        for mine, (_, idx, _) in zip(looks, factors, strict=True):
            for k, i in enumerate(idx):
                if i in over:
                    within[i].append((mine, k))
        bound = dict(zip(over, _places([(size, tuple(sorted(within[i]))) for i, size in over.items()]), strict=True))
        finer = _places([(mine, tuple([bound.get(i, -1) for i in idx])) for mine, (_, idx, _) in zip(looks, factors, strict=True)])
        if max(finer) == max(looks):
            break
        looks = finer
    groups: dict[Any, list[Factor]] = {n: [] for n in range(max(looks) + 1)}
    for n, f in zip(looks, factors, strict=True):
        groups[n].append(f)
    return groups


def _places(keys: Sequence[Any]) -> list[int]:
    """Of each, its place among the different ones in order."""
    at = {k: n for n, k in enumerate(sorted(set(keys)))}
    return [at[k] for k in keys]


def body_key(best: tuple[Any, tuple[Index, ...], tuple[int, ...]]) -> Any:
    body, slots, sizes = best
    return tuple(entries for _, _, entries in body), sizes, slots


def sort_coef(c: Coef) -> tuple[float, Coef]:
    try:
        return float(c), c
    except OverflowError:
        return math.inf if c > 0 else -math.inf, c


def instance(idx: tuple[Index, ...], general: tuple[Index, ...]) -> bool:
    """Whether indices come from more general ones by giving their variables values."""
    names: dict[Index, Index] = {}
    return all(i == g if g >= 0 or is_parameter(g) else names.setdefault(g, i) == i for i, g in zip(idx, general, strict=True))


def is_parameter(i: Index) -> bool:
    """Whether an index is one constant, though it is not said which: what is known of it is not known of all."""
    return LAST < i <= PARAMETER


def differences(a: Mono, b: Mono) -> list[tuple[int, int]] | None:
    """Places where two products with the same atoms and powers have different indices."""
    if len(a) != len(b):
        return None
    found = []
    for k, ((u, i, w), (v, j, x)) in enumerate(zip(a, b, strict=True)):
        if u != v or w != x:
            return None
        found += [(k, n) for n, (p, q) in enumerate(zip(i, j, strict=True)) if p != q]
    return found


Family = tuple[set[Mono], Mono, list[tuple[int, int]], int, Coef]  # its terms, the first, the places that differ, how many, coefficient


def alike(p: Poly) -> Iterable[list[tuple[Mono, Coef]]]:
    """Terms that have constants, grouped by what they are without any index."""
    groups: dict[Any, list[tuple[Mono, Coef]]] = {}
    for m, c in p.items():
        for _, idx, _ in m:
            if idx and max(idx) >= 0:
                groups.setdefault((c, tuple([(u, w) for u, _, w in m])), []).append((m, c))
                break
    return groups.values()


def family(atoms: Sequence[Atom], p: Poly, same: list[tuple[Mono, Coef]]) -> Family | None:
    """n terms among some of p, alike but for the constants 0 … n−1 in the same places of size n."""
    least = min(s for u, idx, _ in same[0][0] for i, s in zip(idx, atoms[u].sizes, strict=True) if i >= 0)
    if len(same) < max(least, 2):
        return None
    present = {m for m, _ in same}
    for base, coef in same:
        places = [(k, j) for k, (_, idx, _) in enumerate(base) for j, i in enumerate(idx) if i == 0]
        for other, _ in same:
            differ = differences(base, other)
            if differ is None or not differ or any((k, j) not in places for k, j in differ):
                continue
            if any(other[k][1][j] != 1 for k, j in differ):
                continue
            n = atoms[base[differ[0][0]][0]].sizes[differ[0][1]]
            if len(same) < n or any(atoms[base[k][0]].sizes[j] != n for k, j in differ):
                continue
            members = [tuple(sorted(with_constant(base, differ, c))) for c in range(n)]
            if all(m in present and p.get(m) == coef for m in members) and len(set(members)) == n:
                return set(members), base, differ, n, coef
    return None


def with_constant(base: Mono, places: list[tuple[int, int]], c: Index) -> list[Factor]:
    spots = set(places)
    return [(u, tuple(c if (k, j) in spots else i for j, i in enumerate(idx)), w) for k, (u, idx, w) in enumerate(base)]


def primes(n: int) -> dict[int, int]:
    found: dict[int, int] = {}
    d = 2
    while d * d <= n and d < 100_000:
        while n % d == 0:
            found[d] = found.get(d, 0) + 1
            n //= d
        d += 1
    if n > 1:
        found[n] = found.get(n, 0) + 1
    return found


def raised(c: Coef, n: int, bits: int) -> Fraction:
    """A power of a coefficient, if that has at most so many bits."""
    base = Fraction(c)
    if abs(n) * max(base.numerator.bit_length(), base.denominator.bit_length()) > bits and c not in (0, 1, -1):
        raise TooLarge(f"a number to the power of {n}")
    return base**n


def roots(c: Fraction, e: Power, bits: int) -> tuple[Fraction, list[tuple[int, Fraction]]]:
    """c^e = rational · Π primes^(fractional part), so that √8 = 2·√2."""
    rational = Fraction(1)
    parts: list[tuple[int, Fraction]] = []
    for prime, k in sorted({**primes(c.numerator), **{b: -n for b, n in primes(c.denominator).items()}}.items()):
        whole, part = divmod(Fraction(k) * e, 1)
        rational *= raised(prime, int(whole), bits)
        if part:
            parts.append((prime, part))
    return rational, parts


def within(argument: Poly, there: set[tuple[int, tuple[Index, ...]]]) -> bool:
    """Whether a polynomial is a positive multiple of a product of these."""
    if len(argument) != 1:
        return False
    ((m, c),) = argument.items()
    return c > 0 and all(w > 0 and (u, idx) in there for u, idx, w in m)


def named_need(what: str, uid: int, idx: Sequence[Index]) -> Need:
    """A condition with its variables numbered as they appear."""
    names: dict[Index, Index] = {}
    return what, uid, tuple(i if i >= 0 or is_parameter(i) else names.setdefault(i, -1 - len(names)) for i in idx)


def bordered_windows(kind: str) -> Windows:
    """The windows that a kind of row is named after."""
    return Windows(*map(int, kind.removeprefix(BORDERED).split()))
