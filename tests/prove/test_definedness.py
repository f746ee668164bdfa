"""Facts about scalar functions: every row of the table is computed, at numbers, at 0, at ±∞ and at what is no number."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from trainverify.primitives.scalars import SCALARS, conditions, finite
from trainverify.prove.definedness import BELOW, FACTS, FINITE, MAY_FAIL, Arguments, Facts, Sign, State, is_real, is_zero, sees

NUMBERS = (-3.0, -1.0, -0.4, 0.0, 0.25, 1.0, 2.5)
ALL = (-math.inf, *NUMBERS, math.inf, math.nan)
POWERS = (-2, -1, Fraction(-1, 2), 0, Fraction(1, 2), Fraction(3, 2), 1, 2, 3)
REAL = [name for name, row in SCALARS.items() if row.arity and row.takes in ("real", "number", "any") and name != "as_int"]


def params(fn: str) -> tuple[Any, ...]:
    return POWERS if fn == "pow" else ((Fraction(9, 10), 3),) if fn == "one_minus_power" else (None,)


def compute(fn: str, xs: tuple[float, ...], param: Any) -> float:
    more = () if param is None else (param,)
    with np.errstate(all="ignore"):
        return float(SCALARS[fn].numeric(*[np.asarray(x) for x in xs], *more))


def points(fn: str, values: tuple[float, ...] = ALL) -> Iterator[tuple[tuple[float, ...], Any, float]]:
    """Arguments, parameter and result."""
    for param in params(fn):
        for xs in itertools.product(values, repeat=SCALARS[fn].arity):
            yield xs, param, compute(fn, xs, param)


def signs_of(x: float) -> tuple[Sign, ...]:
    """Everything that may be said of the sign of a number or ±∞."""
    return ("positive", "nonnegative", None) if x > 0 else ("nonnegative", None) if x == 0 else (None,)


def has(x: float, sign: Sign) -> bool:
    return sign is None or x > 0 or (x == 0 and sign == "nonnegative")


def wrong_signs(fn: str, row: Facts) -> list[Any]:
    """Where a number is not of the sign that its row says."""
    found = []
    for xs, param, y in points(fn, (-math.inf, *NUMBERS)):
        whole = all(map(math.isfinite, xs))
        if math.isnan(y) or (row.fades and not whole and fn != "exp"):  # which whoever asks takes into account
            continue
        for signs in itertools.product(*map(signs_of, xs)):
            for twice in {False, len(xs) == 2 and xs[0] == xs[-1]}:
                if not has(y, row.sign(Arguments(signs, whole, twice, param))):
                    found.append((xs, param, signs, twice))
    return found


def states_of(x: float) -> tuple[State, ...]:
    return (FINITE, BELOW) if math.isfinite(x) else (BELOW,)


def wrong_states(fn: str, row: Facts) -> list[Any]:
    """Where something is infinite, or no number, that is one by its row."""
    found = []
    for xs, param, y in points(fn, (-math.inf, *NUMBERS)):
        for states in [] if _undefined(fn, xs, param) else itertools.product(*map(states_of, xs)):
            said = row.below(states) if BELOW in states else FINITE
            if not math.isfinite(y) and said <= BELOW and not (said == BELOW and y == -math.inf):
                found.append((xs, param, states))
    return found


def _undefined(fn: str, xs: tuple[float, ...], param: Any) -> bool:
    """Whether a condition of a function does not hold."""
    tests: dict[str, Callable[[float], bool]] = {"nonzero": lambda x: x != 0, "positive": lambda x: x > 0, "nonneg": lambda x: x >= 0}
    return not all(tests[what](xs[k]) for k, what in conditions(fn, param))


def wrong_zeros(fn: str, row: Facts) -> list[Any]:
    """Where something is not 0 that is 0 by its row, or is 0 with none of its factors."""
    found = []
    for xs, param, y in points(fn, NUMBERS):
        if math.isfinite(y) and not _undefined(fn, xs, param):
            zeros = [x == 0 for x in xs]
            says = {"any": any(zeros), "all": all(zeros), "first": zeros[0], None: False}[row.zero]
            if (says and y != 0) or (y == 0 and row.factors and not any(zeros[k] for k in row.factors)):
                found.append((xs, param))
    return found


def test_every_function_has_a_row() -> None:
    assert FACTS.keys() == SCALARS.keys()


@pytest.mark.parametrize("fn", REAL)
def test_rows_are_true(fn: str) -> None:
    assert not wrong_signs(fn, FACTS[fn])
    assert not wrong_states(fn, FACTS[fn])
    assert not wrong_zeros(fn, FACTS[fn])


@pytest.mark.parametrize("fn", ["pi", "one_minus_power"])
def test_constants(fn: str) -> None:
    (param,) = params(fn)
    assert FACTS[fn].sign(Arguments((), param=param)) == "positive"
    assert compute(fn, (), param) > 0


WRONG: dict[str, tuple[str, Facts, Callable[[str, Facts], list[Any]]]] = {
    "a difference of positive numbers is positive": ("sub", replace(FACTS["sub"], sign=FACTS["add"].sign), wrong_signs),
    "the exponential of −∞ is positive": ("exp", replace(FACTS["exp"], sign=FACTS["pi"].sign), wrong_signs),
    "a cube is not negative": ("pow", replace(FACTS["pow"], sign=lambda given: "nonnegative"), wrong_signs),
    "a number minus −∞ is at most a number": ("sub", replace(FACTS["sub"], below=FACTS["add"].below), wrong_states),
    "0 times −∞ is a number": ("mul", replace(FACTS["mul"], below=FACTS["max"].below), wrong_states),
    "−∞ squared is at most a number": ("pow", replace(FACTS["pow"], below=FACTS["add"].below), wrong_states),
    "a sum is 0 where one of its terms is": ("add", replace(FACTS["add"], zero="any"), wrong_zeros),
    "cos 0 = 0": ("cos", replace(FACTS["cos"], zero="first"), wrong_zeros),
    "a sum is 0 only where a term is": ("add", replace(FACTS["add"], factors=(0, 1)), wrong_zeros),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rows_are_seen(name: str) -> None:
    fn, row, look = WRONG[name]
    assert look(fn, row)


@pytest.mark.parametrize("fn", REAL)
def test_finite_arguments(fn: str) -> None:
    """What `finite` lists is finite wherever the result is."""
    for xs, param, y in points(fn):
        assert not math.isfinite(y) or all(math.isfinite(xs[k]) for k in finite(fn, param)), (xs, param)


@pytest.mark.parametrize("fn", REAL)
def test_what_sees(fn: str) -> None:
    """A result is no number if an argument is none: else the function is said to hide it."""
    for xs, param, y in points(fn):
        if sees("map", (fn, param)) and any(map(math.isnan, xs)):
            assert math.isnan(y), (xs, param)


@pytest.mark.parametrize("fn", REAL)
def test_what_fades(fn: str) -> None:
    """A function that is positive for numbers, and 0 where one of them is infinite, is said to fade."""
    for xs, param, y in points(fn):
        if y == 0 and not any(map(math.isnan, xs)) and not all(map(math.isfinite, xs)):
            signs = [signs_of(x)[0] for x in xs]
            assert FACTS[fn].fades or FACTS[fn].sign(Arguments(signs, False, param=param)) != "positive", (xs, param)


def test_what_may_fail() -> None:
    """Expected: the real functions that have no value at some number."""
    failing = {fn for fn in REAL for xs, param, y in points(fn, NUMBERS) if not math.isfinite(y)}
    assert failing == MAY_FAIL


def test_kinds() -> None:
    assert is_real("exp", [True])
    assert is_real("as_real", [False])
    assert is_real("pow", [True])
    assert not is_real("pow", [False])
    assert not is_real("lt", [True, True])


def test_zeros_in_order() -> None:
    assert is_zero("mul", [False, True])
    assert is_zero("div", [True, False])
    assert not is_zero("div", [False, True])
    assert not is_zero("add", [False, True])
    assert not is_zero("exp", [True])
