"""Functions of one integer v, as few pieces: on each it is slope·v + offset + rest·(v mod period), or unknown.

Integers are unbounded here; what a function is outside of the integers that occur does not matter, and `on` leaves that out. Division is
`floored`: ⌊x / n⌋, as PyTorch's `//`; what truncates (C, XLA) is made of it by the sign of x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Final, NamedTuple

MOST: Final = 64  # pieces of a function
End = int | float  # an integer, or an infinity
Range = tuple[tuple[End, End], ...]  # stretches of integers, in order: the first and the last of each
INTEGERS: Final[Range] = ((-math.inf, math.inf),)


class Refused(Exception):
    """Not a function of few pieces."""


class Value(NamedTuple):
    """slope·v + offset + rest·(v mod period)."""

    slope: Fraction | int = 0
    offset: Fraction | int = 0
    rest: Fraction | int = 0
    period: int = 1

    def at(self, v: int) -> Fraction | int:
        return self.slope * v + self.offset + self.rest * (v % self.period)

    def bounds(self, first: End, last: End) -> tuple[Fraction | End, Fraction | End]:
        """The smallest and the largest on a stretch, or beyond them."""
        whole = self.slope + self.rest == 0  # a multiple of ⌊v / period⌋
        ends = [v if not whole or math.isinf(v) else v - v % self.period for v in (first, last)]
        found = [self.slope * v + self.offset if self.slope else self.offset for v in ends]
        more = 0 if whole else self.rest * (self.period - 1)
        return min(found) + min(more, 0), max(found) + max(more, 0)


Pieces = tuple[tuple[End, Value | None], ...]  # where a piece begins (the first at −∞), and what it is there; None is unknown
Stretch = tuple[End, End, list[Value | None]]


def constant(c: Fraction | int) -> Pieces:
    return ((-math.inf, Value(0, c)),)


IDENTITY: Final[Pieces] = ((-math.inf, Value(1, 0)),)


def stretches(functions: Sequence[Pieces], within: Range = INTEGERS) -> Iterator[Stretch]:
    """Stretches on which each of some functions is one piece, and those pieces."""
    starts = sorted({first for p in functions for first, _ in p})
    for low, high in within:
        cuts = [low, *(s for s in starts if low < s <= high)]
        for first, after in zip(cuts, [*cuts[1:], high + 1], strict=True):
            yield first, after - 1, [_piece(p, first) for p in functions]


def _piece(p: Pieces, v: End) -> Value | None:
    return next(value for first, value in reversed(p) if first <= v)


def _settled(first: End, last: End, value: Value | None) -> Value | None:
    return Value(0, value.at(int(first))) if value is not None and first == last else value


def joined(found: Iterator[tuple[End, Value | None]]) -> Pieces:
    """Pieces from where they begin and what they are; neighbours that are the same are one."""
    made: list[tuple[End, Value | None]] = []
    for first, value in found:
        if not made or made[-1][1] != value:
            made.append((first, value))
        if len(made) > MOST:
            raise Refused
    return tuple(made)


def _mapped(f: Callable[..., Value | None], *given: Pieces) -> Pieces:
    """A function of values, piece by piece; of an unknown one it is unknown."""
    return joined((first, None if None in values else f(*values)) for first, _, values in stretches(given))


def _linear(a: Fraction | int, x: Value, b: Fraction | int, y: Value) -> Value | None:
    if x.rest and y.rest and x.period != y.period:
        return None
    rest = a * x.rest + b * y.rest
    return Value(a * x.slope + b * y.slope, a * x.offset + b * y.offset, rest, (x.period if x.rest else y.period) if rest else 1)


def linear(a: Fraction | int, x: Pieces, b: Fraction | int, y: Pieces) -> Pieces:
    """a·x + b·y."""
    return _mapped(lambda p, q: _linear(a, p, b, q), x, y)


def product(x: Pieces, y: Pieces) -> Pieces:
    """x·y, where one of them is constant; 0 times what is unknown is 0."""

    def times(p: Value | None, q: Value | None) -> Value | None:
        for a, b in ((p, q), (q, p)):
            if a is not None and not a.slope and not a.rest:
                return Value() if a.offset == 0 else None if b is None else _linear(a.offset, b, 0, b)
        return None

    return joined((first, times(*values)) for first, _, values in stretches((x, y)))


def _signs(first: End, last: End, value: Value | None) -> Iterator[tuple[End, End, int | None]]:
    """Stretches on which a value is negative, 0 or positive: −1, 0, 1; None where that is not known."""
    if value is None:
        yield first, last, None
    elif value.rest and first != last:
        low, high = value.bounds(first, last)
        yield first, last, 1 if low > 0 else -1 if high < 0 else None
    elif not value.slope or first == last:
        yield first, last, _sign(value.at(int(first)) if first == last else value.offset)
    else:
        root, rises = Fraction(-value.offset) / Fraction(value.slope), _sign(value.slope)
        for low, high, sign in (
            (first, min(last, math.ceil(root) - 1), -rises),
            (max(first, math.ceil(root)), min(last, math.floor(root)), 0),
            (max(first, math.floor(root) + 1), last, rises),
        ):
            if low <= high:
                yield low, high, sign


def _sign(x: Fraction | int) -> int:
    return (x > 0) - (x < 0)


def compared(x: Pieces, y: Pieces, true: Sequence[int]) -> Pieces:
    """1 where the sign of x − y is one of some, else 0: `lt` is (−1,), `ge` is (0, 1)."""
    return joined(
        (at, None if sign is None else Value(0, int(sign in true)))
        for first, last, (value,) in stretches([linear(1, x, -1, y)])
        for at, _, sign in _signs(first, last, value)
    )


def chosen(condition: Pieces, x: Pieces, y: Pieces) -> Pieces:
    """x where the condition is not 0, else y; where both are the same it does not matter."""

    def pick(sign: int | None, p: Value | None, q: Value | None) -> Value | None:
        return (p if p == q else None) if sign is None else p if sign else q

    return joined(
        (at, pick(sign, p, q)) for first, last, (c, p, q) in stretches((condition, x, y)) for at, _, sign in _signs(first, last, c)
    )


def inverted(x: Pieces) -> Pieces:
    return linear(1, constant(1), -1, x)


def floored(x: Pieces, n: int, within: Range) -> Pieces:
    """⌊x / n⌋ on a range, for n > 0."""
    return joined(_floored(x, n, within))


def _floored(x: Pieces, n: int, within: Range) -> Iterator[tuple[End, Value | None]]:
    start: End = -math.inf
    for first, last, (value,) in stretches([x], within):
        for at, made in _divided(value, n, first, last):
            yield (start if start == -math.inf else at), made
            start = at


def _divided(value: Value | None, n: int, first: End, last: End) -> Iterator[tuple[End, Value | None]]:
    if value is None or value.rest or value.slope != int(value.slope) or value.offset != int(value.offset):
        yield first, None
        return
    a, b = int(value.slope), int(value.offset)
    if not a or first == last:
        yield first, Value(0, int(value.at(0 if not a else int(first))) // n)
    elif (last - first) * abs(a) < MOST * n:
        v = int(first)
        while v <= last:
            q = (a * v + b) // n
            yield v, Value(0, q)
            v = (n * (q + 1) - b - 1) // a + 1 if a > 0 else (b - n * q) // -a + 1
    elif a == 1 and b % n == 0:  # (v + b) // n = (v − v mod n + b) / n
        yield first, Value(Fraction(1, n), b // n, Fraction(-1, n), n)
    else:
        yield first, None


def image(x: Pieces, within: Range) -> Range | None:
    """Stretches that the values on a range are in; None where one is unknown."""
    found: list[tuple[End, End]] = []
    for first, last, (value,) in stretches([x], within):
        if value is None:
            return None
        low, high = value.bounds(first, last)
        found.append((_whole(low, math.floor), _whole(high, math.ceil)))
    return united(found)


def _whole(x: Fraction | End, rounded: Callable[[Fraction | End], int]) -> End:
    return float(x) if math.isinf(x) else rounded(x)


def united(found: Sequence[tuple[End, End]]) -> Range:
    made: list[tuple[End, End]] = []
    for low, high in sorted(found):
        if made and low <= made[-1][1] + 1:
            made[-1] = made[-1][0], max(made[-1][1], high)
        else:
            made.append((low, high))
    return tuple(made)


def moved(x: Pieces, by: int) -> Pieces:
    """x at v + by."""
    if any(value is not None and value.rest and by % value.period for _, value in x):
        raise Refused
    return tuple((first - by, None if value is None else value._replace(offset=value.offset + value.slope * by)) for first, value in x)


def same(x: Pieces, y: Pieces, within: Range) -> bool:
    """Whether two functions are known to be equal on a range."""
    values = [[_settled(first, last, v) for v in pair] for first, last, pair in stretches((x, y), within)]
    return all(p is not None and p == q for p, q in values)


def whole(x: Pieces, within: Range) -> bool:
    """Whether all values on a range are integers."""
    return all(v is not None and _is_whole(v) for first, last, (value,) in stretches([x], within) for v in (_settled(first, last, value),))


def _is_whole(v: Value) -> bool:
    """With v = period·q + r it is slope·period·q + (slope + rest)·r + offset."""
    return all(c == int(c) for c in (v.slope * v.period, v.slope + v.rest, v.offset))


def picked(row: Pieces, weight: Pieces, rows: int, within: Range) -> tuple[Fraction | int, int] | None:
    """(c, s) if weight·[row = j] is c·[v = s + j] for all v of a range and 0 ≤ j < rows, and some v has a row."""
    hits, factor, start = 0, None, None
    for first, last, (r, w) in stretches((chosen(weight, row, constant(-1)), weight), within):
        if r is None or w is None or w.slope or w.rest:
            return None
        for low, high in _within(first, last, r, rows):
            if math.isinf(low) or math.isinf(high) or (low < high and (r.slope != 1 or r.rest)):
                return None
            s = int(low) - r.at(int(low))
            if factor not in (None, w.offset) or start not in (None, s):
                return None
            factor, start, hits = w.offset, s, hits + int(high - low) + 1
    if factor is None or start is None or start != int(start):
        return None
    meant = sum(max(0, min(high, start + rows - 1) - max(low, start) + 1) for low, high in within)
    return (factor, int(start)) if hits == meant else None


def inside(x: Pieces, rows: int, within: Range) -> bool:
    """Whether all values on a range are from 0 to rows − 1."""
    found = image(x, within)
    return found is not None and all(low >= 0 and high < rows for low, high in found)


def _within(first: End, last: End, value: Value, rows: int) -> Iterator[tuple[End, End]]:
    """Stretches on which a value is from 0 to rows − 1; all of it where that is not known."""
    for low, high, above in _signs(first, last, value._replace(offset=value.offset + 1)):
        for at, to, below in _signs(low, high, value._replace(offset=value.offset - rows)) if above in (1, None) else ():
            if below in (-1, None):
                yield at, to


__all__ = ["IDENTITY", "INTEGERS", "End", "Pieces", "Range", "Refused", "Value"]
