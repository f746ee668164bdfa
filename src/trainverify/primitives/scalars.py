"""Scalar functions: one row each, with its meaning in numbers, in balls, and its partial derivatives.

A row of `SCALARS` is all there is to know about a function that `map` applies elementwise.
`partials(F, y, *xs, param)` gives ∂y/∂x_i as nodes; `F` is the node module (calls, selects, casts).
`needs` lists the conditions under which the function is defined: (argument, "nonzero" | "positive" | "nonneg").
`finite` lists the arguments that are finite wherever the result is: not that of `exp`, which is 0 at −∞.
A function without arguments is a constant; those that there are, `pi` and `one_minus_power`, are positive.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np

from trainverify.primitives.late import Late

flint: Final[Any] = Late("flint")

LONGEST: Final = 100_000  # bits of an integer, or of either half of a fraction, that is computed


class Undecided(ArithmeticError):
    """A comparison of balls that meet: more precision may decide it."""


@dataclass(frozen=True)
class Scalar:
    name: str
    arity: int
    takes: str  # "real", "number" (int or real), "int", "bool", "any"
    result: str | None  # kind of the result; None: the arguments' common kind
    numeric: Callable[..., Any]  # on NumPy arrays
    ball: Callable[..., Any]  # on single values: Any, int or bool
    partials: Callable[..., list[Any | None]] | None = None
    needs: tuple[tuple[int, str], ...] = ()
    text: str = ""  # how it prints; {0} {1} are the arguments
    finite: tuple[int, ...] = ()  # see above; if in doubt, nothing


def _decide(yes: bool, no: bool) -> bool:
    if yes == no:
        raise Undecided("two balls meet")
    return yes


def _same(a: Any, b: Any) -> bool:
    """One ball object stands for one number, so it equals itself (unless it is undefined)."""
    return a is b and not (isinstance(a, flint.arb) and a.is_nan())


def _lt(a: Any, b: Any) -> bool:
    if _same(a, b):
        return False
    if isinstance(a, flint.arb) or isinstance(b, flint.arb):
        a, b = flint.arb(a), flint.arb(b)
        return _decide(bool(a < b), bool(a >= b))
    return bool(a < b)


def _eq(a: Any, b: Any) -> bool:
    if _same(a, b):
        return True
    if isinstance(a, flint.arb) or isinstance(b, flint.arb):
        a, b = flint.arb(a), flint.arb(b)
        if a.is_exact() and b.is_exact():
            return bool(a == b)
        return _decide(False, not a.overlaps(b))
    return bool(a == b)


def _ball_max(a: Any, b: Any) -> Any:
    """The larger object itself where that is certain, so that a maximum can be compared with what it came from."""
    return a if a is b or a >= b else b if a <= b else a.max(b)


def _ball_min(a: Any, b: Any) -> Any:
    return a if a is b or a <= b else b if a >= b else a.min(b)


def _ball_floor(x: Any) -> Any:
    low, high = x.lower().floor(), x.upper().floor()
    if not bool(low == high):
        raise Undecided("floor of a ball with an integer inside")
    return low


def _ball_sign(x: Any) -> Any:
    if x.is_zero():
        return flint.arb(0)
    if x.is_finite() and x.contains(0):
        return flint.arb(0, 1)  # −1, 0 or 1: others of a tensor may be decided
    return flint.arb(1) if _lt(flint.arb(0), x) else flint.arb(-1)


def _defined(value: Any, *args: Any, never: bool = False) -> Any:
    """What a function makes of balls that lie only partly where it is defined: any number, or none. That is no certain `nan`."""
    if never or not value.is_nan() or any(isinstance(a, flint.arb) and a.is_nan() for a in args):
        return value
    return value if all(not isinstance(a, flint.arb) or a.is_exact() for a in args) else flint.arb(0, math.inf)


def rational(value: int | Fraction | float) -> Fraction:
    return Fraction(value)


def nearest_float(value: int | Fraction | float) -> float:
    """A number as float64 has it: ±∞ beyond its range."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def is_finite(value: int | Fraction | float) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def integer_power(x: int, p: int) -> int:
    """xᵖ of integers; Undecided where it is too long to be written."""
    if x in (0, 1, -1):
        return x if p % 2 else abs(x) if p else 1
    if p * x.bit_length() > LONGEST:
        raise Undecided(f"an integer of about {p * x.bit_length()} bits")
    return int(x**p)


def _ball_div(a: Any, b: Any) -> Any:
    return _defined(a / b, a, b, never=flint.arb(b).is_exact())


def _ball_log(x: Any) -> Any:
    return _defined(x.log(), x, never=bool(x < 0))


def _ball_pow(x: Any, p: int | Fraction | float) -> Any:
    if isinstance(p, int):
        return _defined(x**p, x) if isinstance(x, flint.arb) else integer_power(x, p)
    if p == Fraction(1, 2):
        power = x.sqrt()
    elif p == Fraction(-1, 2):
        power = x.rsqrt()
    else:
        q = rational(p)
        power = x ** flint.arb(flint.fmpq(q.numerator, q.denominator))
    return _defined(power, x, never=bool(x < 0))


def _numeric_pow(x: Any, p: int | Fraction | float) -> Any:
    if p == Fraction(-1, 2):
        return 1.0 / np.sqrt(x)
    if x.dtype.kind == "f":
        odd = isinstance(p, int) and p % 2 == 1 and abs(p) > 1 << 53  # which float64 does not tell
        return np.copysign(np.power(np.abs(x), nearest_float(p)), x) if odd else np.power(x, nearest_float(p))
    return np.power(x, min(int(p), (1 << 62) + int(p) % 2))  # integers wrap; −1, 0 and 1 only see whether p is odd


def _ball_int(x: Any) -> int:
    if isinstance(x, flint.arb):
        towards_zero = _ball_floor(x) if x.is_zero() or _lt(flint.arb(0), x) else -_ball_floor(-x)
        whole: Any = towards_zero.unique_fmpz()
        return int(whole)
    return int(x)


_KEY, _OFFSET, _INDEX, _START = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xA0761D6478BD642F, 0x632BE59BD9B4E019
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def hashed_uniform(key: int, offset: int, index: int) -> Fraction:
    """A number in (0, 1), a fixed function of its arguments (splitmix64); all there is to randomness here."""
    mask = (1 << 64) - 1
    z = (key * _KEY + offset * _OFFSET + index * _INDEX + _START) & mask
    for _ in range(2):
        z = ((z ^ (z >> 30)) * _MIX[0]) & mask
        z = ((z ^ (z >> 27)) * _MIX[1]) & mask
        z ^= z >> 31
    return Fraction(2 * (z >> 11) + 1, 1 << 54)


def _numeric_uniform(key: Any, offset: Any, index: Any) -> Any:
    """`hashed_uniform` on arrays: unsigned 64-bit arithmetic wraps by itself."""
    u = np.uint64
    z = key.astype(u) * u(_KEY) + offset.astype(u) * u(_OFFSET) + index.astype(u) * u(_INDEX) + u(_START)
    for _ in range(2):
        z = (z ^ (z >> u(30))) * u(_MIX[0])
        z = (z ^ (z >> u(27))) * u(_MIX[1])
        z = z ^ (z >> u(31))
    return (u(2) * (z >> u(11)) + u(1)).astype(np.float64) / 2.0**54


def _ball_uniform(key: int, offset: int, index: int) -> Any:
    return flint.arb(flint.fmpq(*hashed_uniform(key, offset, index).as_integer_ratio()))


def _erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[np.float64])(x) if x.size else x


def _half_at_ties(F: Any, a: Any, b: Any) -> list[Any]:
    """1 where a > b, 1/2 where equal, 0 below: PyTorch's choice for maximum."""
    half = F.select(F.call("eq", a, b), Fraction(1, 2), 0)
    return [F.select(b < a, 1, half), F.select(a < b, 1, half)]


def _pow_partial(F: Any, y: Any, a: Any, param: int | Fraction | float) -> list[Any | None]:
    return [None if param == 0 else param * F.power(a, param - 1)]


def log_below_one(b: Fraction) -> float:
    """log b for 0 < b < 1, also where float64 does not tell b from 0 or from 1."""
    return math.log1p(float(b - 1)) if 2 * b > 1 else math.log(b.numerator) - math.log(b.denominator)


def _numeric_one_minus_power(of: tuple[Fraction, int]) -> Any:
    base, n = of
    return np.float64(-math.expm1(nearest_float(n) * log_below_one(base)))


def _ball_one_minus_power(of: tuple[Fraction, int]) -> Any:
    base, n = of
    return 1 - flint.arb(flint.fmpq(base.numerator, base.denominator)) ** flint.arb(n)


_HALF = Fraction(1, 2)
_ROWS = (
    # arithmetic
    Scalar("add", 2, "number", None, np.add, lambda a, b: a + b, lambda F, y, a, b: [1, 1], text="{0} + {1}", finite=(0, 1)),
    Scalar("sub", 2, "number", None, np.subtract, lambda a, b: a - b, lambda F, y, a, b: [1, -1], text="{0} - {1}", finite=(0, 1)),
    Scalar("mul", 2, "number", None, np.multiply, lambda a, b: a * b, lambda F, y, a, b: [b, a], text="{0}·{1}", finite=(0, 1)),
    Scalar(
        "div",
        2,
        "real",
        None,
        np.divide,
        _ball_div,
        lambda F, y, a, b: [1 / b, -(y / b)],
        ((1, "nonzero"),),
        "{0} / {1}",
        finite=(0,),
    ),
    Scalar("neg", 1, "number", None, np.negative, lambda a: -a, lambda F, y, a: [-1], text="-{0}", finite=(0,)),
    Scalar("pow", 1, "number", None, _numeric_pow, _ball_pow, _pow_partial, text="{0}^{p}", finite=(0,)),
    # smooth functions
    Scalar("exp", 1, "real", None, np.exp, lambda a: a.exp(), lambda F, y, a: [y]),
    Scalar("log", 1, "real", None, np.log, _ball_log, lambda F, y, a: [1 / a], ((0, "positive"),), finite=(0,)),
    Scalar("sin", 1, "real", None, np.sin, lambda a: a.sin(), lambda F, y, a: [F.call("cos", a)], finite=(0,)),
    Scalar("cos", 1, "real", None, np.cos, lambda a: a.cos(), lambda F, y, a: [-F.call("sin", a)], finite=(0,)),
    Scalar("tanh", 1, "real", None, np.tanh, lambda a: _defined(a.tanh(), a), lambda F, y, a: [1 - y * y]),
    Scalar(
        "erf",
        1,
        "real",
        None,
        _erf,
        lambda a: _defined(a.erf(), a),
        lambda F, y, a: [F.call("exp", -(a * a)) * 2 * F.power(F.call("pi"), -_HALF)],
    ),
    Scalar("pi", 0, "any", "real", lambda: np.float64(math.pi), lambda: flint.arb.pi()),
    Scalar(
        "one_minus_power",  # 1 − bⁿ for the parameter (b, n) with 0 < b < 1 and n ≥ 1: a number too long to be written as a fraction
        0,
        "any",
        "real",
        _numeric_one_minus_power,
        _ball_one_minus_power,
    ),
    # functions with kinks; derivatives as PyTorch chooses them
    Scalar("abs", 1, "number", None, np.abs, abs, lambda F, y, a: [F.call("sign", a)], text="|{0}|", finite=(0,)),
    Scalar("sign", 1, "real", None, np.sign, _ball_sign, lambda F, y, a: [None]),
    Scalar("floor", 1, "real", None, np.floor, _ball_floor, lambda F, y, a: [None], finite=(0,)),
    Scalar("max", 2, "number", None, np.maximum, _ball_max, lambda F, y, a, b: _half_at_ties(F, a, b)),
    Scalar("min", 2, "number", None, np.minimum, _ball_min, lambda F, y, a, b: _half_at_ties(F, b, a)),
    # comparisons and logic
    Scalar("lt", 2, "number", "bool", np.less, _lt, text="[{0} < {1}]"),
    Scalar("le", 2, "number", "bool", np.less_equal, lambda a, b: not _lt(b, a), text="[{0} ≤ {1}]"),
    Scalar("eq", 2, "number", "bool", np.equal, _eq, text="[{0} = {1}]"),
    Scalar("and", 2, "bool", "bool", np.logical_and, lambda a, b: a and b, text="{0} ∧ {1}"),
    Scalar("or", 2, "bool", "bool", np.logical_or, lambda a, b: a or b, text="{0} ∨ {1}"),
    Scalar("not", 1, "bool", "bool", np.logical_not, lambda a: not a, text="¬{0}"),
    # integers
    Scalar("floordiv", 2, "int", "int", np.floor_divide, lambda a, b: a // b, needs=((1, "nonzero"),)),
    Scalar("mod", 2, "int", "int", np.mod, lambda a, b: a % b, needs=((1, "nonzero"),)),
    # casts; real → int truncates, so it is not the identity
    Scalar("as_real", 1, "any", "real", lambda a: a.astype(np.float64), lambda a: flint.arb(a), lambda F, y, a: [None], finite=(0,)),
    Scalar("as_int", 1, "any", "int", lambda a: np.trunc(a).astype(np.int64), _ball_int, lambda F, y, a: [None]),
    Scalar("as_bool", 1, "any", "bool", lambda a: a != 0, lambda a: not _eq(a, 0), lambda F, y, a: [None]),
    Scalar("detach", 1, "any", None, lambda a: a, lambda a: a, lambda F, y, a: [None], text="{0}", finite=(0,)),
    # randomness is a function of (key, offset, index)
    Scalar("uniform", 3, "int", "real", _numeric_uniform, _ball_uniform),
)
SCALARS: Final[dict[str, Scalar]] = {row.name: row for row in _ROWS}


def conditions(fn: str, param: int | Fraction | float | None = None) -> tuple[tuple[int, str], ...]:
    """When a function is defined: `needs` of its row, and for a power what its exponent asks."""
    if fn != "pow" or param is None:
        return SCALARS[fn].needs
    if param == int(param):
        return () if param >= 0 else ((0, "nonzero"),)
    return ((0, "nonneg" if param > 0 else "positive"),)


def finite(fn: str, param: int | Fraction | float | None = None) -> tuple[int, ...]:
    """Arguments that are finite wherever the result is: `finite` of its row, but 1/∞ is 0."""
    return () if fn == "pow" and param is not None and param <= 0 else SCALARS[fn].finite


def is_root(fn: str, param: int | Fraction | float | None = None) -> bool:
    """Whether a function needs its argument to be positive or 0, and is finite where that is."""
    return conditions(fn, param) == ((0, "nonneg"),)
