"""Float literals as the numbers that were meant: `1 − 0.9` is 1/10, an eps that went through float32 is 1e-05 again.

What a literal becomes depends on the float alone, differs from it by at most one part in 2²³, and integers are never touched. A scalar that
float32 arithmetic made from literals counts as what exact arithmetic makes of them: 0.01/0.19, with a rate that is a tensor, is 1/19.
Two different floats that become one number are remembered: the report lists them.
"""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Final

ULPS: Final = 4  # of float64: what a few roundings of decimal literals may lose
CANCELLED: Final = 2.0**-14  # numbers from here to 1/2 may be 1 − x, with the roundings of x
DIGITS: Final = 9  # significant digits of a literal that someone wrote
DIGITS32: Final = 6
DENOMINATOR: Final = 1 << 20
NEAR: Final = 2.0**-23  # relative error of a few roundings to float32


def recovered(value: float) -> int | float | Fraction:
    """The number that a float stands for: a short decimal, a simple fraction, else itself."""
    if not math.isfinite(value) or value == 0:
        return value
    if value == int(value) and abs(value) < 2**53:
        return int(value)
    near = ULPS * math.ulp(0.5 if CANCELLED <= abs(value) < 0.5 else value)
    short = Fraction(f"{value:.{DIGITS}g}")
    if abs(short - Fraction(value)) <= near:
        return short
    if value == _float32(value):
        short = Fraction(f"{value:.{DIGITS32}g}")
        if _float32(float(short)) == value:
            return short
    simple = Fraction(value).limit_denominator(DENOMINATOR)
    if simple and simple.denominator <= DENOMINATOR and abs(simple - Fraction(value)) <= near:
        return simple
    return value


def _float32(value: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.inf


def root(value: float) -> Fraction | None:
    """The simple number whose square root a float is, if it is one and no simple number itself: 1.4142135623730951 is √2."""
    if not math.isfinite(value) or value <= 0 or not isinstance(recovered(value), float):
        return None
    square = Fraction(value) ** 2
    for limit in (1, 4096):
        simple = square.limit_denominator(limit)
        if simple > 0 and simple.numerator <= DENOMINATOR and abs(float(simple) ** 0.5 - value) <= math.ulp(value):
            return simple
    short = Fraction(f"{float(square):.{DIGITS}g}")
    if recovered(float(square)) == short and abs(math.sqrt(short) - value) <= value * 2.0**-24:
        return short  # √(1 − 0.999³)
    inverse = (1 / square).limit_denominator(1)
    if inverse > 0 and abs(1 / math.sqrt(inverse) - value) <= 2 * math.ulp(value):
        return 1 / inverse
    return None


class Literals:
    """Recovery with a memory of what was recovered."""

    def __init__(self) -> None:
        self.known: dict[Fraction | int, set[float]] = {}
        self._exact: dict[float, float] = {}  # results of float32 arithmetic, as float64 has them

    def rounds(self, value: float, exact: float) -> None:
        """A scalar is this value because float32 arithmetic rounds: it stands for the exact one."""
        if value != exact and abs(value - exact) <= NEAR * abs(exact):
            self._exact.setdefault(value, exact)

    def __call__(self, value: bool | int | float) -> bool | int | float | Fraction:
        if not isinstance(value, float):
            return value
        found = recovered(self._exact.get(value, value))
        if isinstance(found, Fraction):
            self.known.setdefault(found, set()).add(value)
        return found

    def merged(self) -> list[str]:
        """Different floats that count as one number."""
        return [f"{', '.join(map(repr, sorted(v)))} count as {k}" for k, v in sorted(self.known.items()) if len(v) > 1]
