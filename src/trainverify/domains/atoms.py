"""What polynomials are made of: atoms, monomials, exponents, rational numbers."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from flint import fmpq

from trainverify.primitives.scalars import LONGEST

Exponent = int | Fraction
Factors = tuple[tuple[int, Exponent], ...]  # (atom, exponent), sorted by atom
Mono = int  # the number of an interned monomial; 0 is the empty one
Poly = dict[Mono, Any]  # Mono → fmpq, never 0
ONE: Final = fmpq(1)


class Unsupported(Exception):
    """A value that these scalars cannot express."""


class TooLarge(Exception):
    """More terms, or more time, than allowed."""


@dataclass(frozen=True)
class Infinity:
    """±∞, which only comparisons, maxima and exp understand."""

    sign: int


@dataclass(frozen=True)
class Choice:
    """A variable with finitely many values; the last one is written as 1 − the others."""

    key: Hashable
    values: tuple[int, ...]


@dataclass(frozen=True)
class Atom:
    kind: str  # "symbol", "flag", "choice", "positive", "exp", "sum", "number", "max" or the name of a function
    args: tuple[Any, ...]  # polynomials as frozensets of items
    sign: str | None = None  # "positive" | "nonnegative"
    group: int = -1  # of a choice: which one


Need = tuple[str, frozenset[tuple[Mono, Any]]]


def raised(base: Fraction, n: int) -> Fraction:
    """A power of a number, if it is not too long to be written."""
    if abs(n) * max(base.numerator.bit_length(), base.denominator.bit_length()) > LONGEST and abs(base) != 1 and base:
        raise TooLarge(f"a number to the power of {n}")
    return base**n


def rational(value: Any) -> Any:
    q = Fraction(value)
    return fmpq(q.numerator, q.denominator)


def fraction(value: Any) -> Fraction:
    return Fraction(int(value.p), int(value.q))


class _Power(Fraction):
    """A fraction that knows its hash; interned, so that equal ones are identical."""

    __slots__ = ("_hash",)
    _hash: int

    def __hash__(self) -> int:  # type: ignore[override]
        return self._hash


_powers: dict[tuple[int, int], _Power] = {}


def exponent(e: Exponent) -> Exponent:
    if isinstance(e, int):
        return e
    if e.denominator == 1:
        return e.numerator
    key = (e.numerator, e.denominator)
    found = _powers.get(key)
    if found is None:
        found = _powers[key] = _Power(*key)
        found._hash = hash(key)
    return found


def atom_of(factor: tuple[int, Exponent]) -> int:
    """By which factors are sorted."""
    return factor[0]
