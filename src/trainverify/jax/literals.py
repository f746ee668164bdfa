"""Float literals as short decimals, else as the simplest rational numbers that round to them: XLA folds 1/48 to 0.020833334.

Both programs are read in the same way. Different float32 numbers never become one: every rational rounds to one of them.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Final

import numpy as np

from trainverify.translate.literals import Literals

DENOMINATOR: Final = 1 << 24


def simplest(low: Fraction, high: Fraction) -> Fraction:
    """The fraction with the smallest denominator strictly between two positive ones (Stern and Brocot)."""
    whole = math.floor(low)
    if whole + 1 < high:
        return Fraction(whole + 1)
    if low == whole:
        below = math.floor(1 / (high - whole)) + 1
        return whole + Fraction(1, below)
    return whole + 1 / simplest(1 / (high - whole), 1 / (low - whole))


def rounded(value: float) -> Fraction | None:
    """The simplest rational that rounds to a float32 number; None for other numbers, and where it is not simple."""
    single = np.float32(value)
    if value == 0 or not math.isfinite(value) or float(single) != value:
        return None
    size = abs(value)
    near = [np.nextafter(np.float32(size), np.float32(to)) for to in (0, np.inf)]
    low, high = ((Fraction(float(n)) + Fraction(size)) / 2 for n in near)
    found = simplest(low, high)
    if found.denominator > DENOMINATOR:
        return None
    return found if value > 0 else -found


class Float32Literals(Literals):
    """Recovery with a memory: of float32 numbers the simplest rational, of others as for every front end."""

    def __call__(self, value: bool | int | float) -> bool | int | float | Fraction:
        if not isinstance(value, float) or not math.isfinite(value):
            return value
        if value == int(value) and abs(value) < 2**24:
            return int(value)
        short = super().__call__(value)
        found = rounded(value) if isinstance(short, float) else None
        if found is None:
            return short
        self.known.setdefault(found, set()).add(value)
        return found

    def taken(self) -> list[str]:
        """Numbers that are not the short decimals that they are written as."""
        return [f"{next(iter(v))!r} as {k}" for k, v in sorted(self.known.items()) if Fraction(f"{next(iter(v)):.6g}") != k]


__all__ = ["Float32Literals", "rounded", "simplest"]
