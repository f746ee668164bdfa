"""Facts about scalar functions and primitives: when a result is finite, which sign it has, where it is 0. Trusted.

One row for each function of `SCALARS`, as facts about a result that follow from facts about the arguments. Both engines read them off
here: `strict.py` (what must have a value), `signs.py` (signs of tensors) and the walks of stages. A row may say less than is true, never
more; `tests/prove/test_definedness.py` computes every row. The conditions under which a function is defined are in `scalars.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from trainverify.primitives.scalars import SCALARS, conditions, finite, is_finite

Sign = Literal["positive", "nonnegative"] | None
State = int
FINITE, BELOW, WILD = range(3)  # an expression is a number, a number or −∞, or perhaps neither, wherever the logical program is defined
POSITIONS: Final = ("argsort", "argmax", "argmin")  # rows of integers, whatever is sorted


class Arguments(NamedTuple):
    """What is known of the arguments of a function."""

    signs: Sequence[Sign]
    finite: bool = True  # whether all of them are numbers
    twice: bool = False  # whether there are two, and both are the same
    param: Any = None


def _first(given: Arguments) -> Sign:
    return given.signs[0]


def _nothing(given: Arguments) -> Sign:
    return None


def weakest(signs: Sequence[Sign]) -> Sign:
    return None if None in signs else "nonnegative" if "nonnegative" in signs else "positive"


def _sum(given: Arguments) -> Sign:
    return None if None in given.signs else "positive" if "positive" in given.signs else "nonnegative"


def _product(given: Arguments) -> Sign:
    return "nonnegative" if given.twice and None in given.signs else weakest(given.signs)


def _quotient(given: Arguments) -> Sign:
    return weakest(given.signs) if given.signs[1] is not None else None


def _power(given: Arguments) -> Sign:
    """A root is not negative, nor is an even power."""
    if given.signs[0] == "positive":
        return "positive"
    return "nonnegative" if given.param % 2 != 1 else given.signs[0]


def _largest(given: Arguments) -> Sign:
    return "positive" if "positive" in given.signs else "nonnegative" if "nonnegative" in given.signs else None


def _wild(states: Sequence[State]) -> State:
    return WILD


def _below(states: Sequence[State]) -> State:
    return BELOW


@dataclass(frozen=True)
class Facts:
    """Of a scalar function."""

    sign: Callable[[Arguments], Sign] = _nothing
    below: Callable[[Sequence[State]], State] = _wild  # what it is where arguments are numbers or −∞, and one may be −∞
    zero: Literal["any", "all", "first"] | None = None  # it is 0 where any of its arguments is, where all are, or where the first is
    factors: tuple[int, ...] = ()  # arguments one of which is 0 wherever it is 0; nothing, if it is not known
    fades: bool = False  # whether it may be 0 where an argument is infinite, though it is positive for numbers
    compares: bool = False  # whether it says how numbers are ordered, and nothing else of them


FACTS: Final[dict[str, Facts]] = {
    "add": Facts(_sum, _below, zero="all"),
    "sub": Facts(below=lambda states: BELOW if states[1] == FINITE else WILD, zero="all"),
    "mul": Facts(_product, zero="any", factors=(0, 1)),
    "div": Facts(_quotient, zero="first", factors=(0,), fades=True),
    "neg": Facts(zero="first", factors=(0,)),
    "pow": Facts(_power, fades=True),
    "exp": Facts(lambda given: "positive" if given.finite else "nonnegative", lambda states: FINITE, fades=True),
    "log": Facts(),
    "sin": Facts(zero="first"),
    "cos": Facts(),
    "tanh": Facts(zero="first", factors=(0,)),
    "erf": Facts(zero="first", factors=(0,)),
    "pi": Facts(lambda given: "positive"),
    "one_minus_power": Facts(lambda given: "positive"),
    "abs": Facts(lambda given: given.signs[0] or "nonnegative", zero="first", factors=(0,)),
    "sign": Facts(compares=True),
    "floor": Facts(),
    "max": Facts(_largest, lambda states: FINITE if FINITE in states else BELOW),
    "min": Facts(lambda given: weakest(given.signs)),
    "lt": Facts(compares=True),
    "le": Facts(compares=True),
    "eq": Facts(compares=True),
    "and": Facts(),
    "or": Facts(),
    "not": Facts(),
    "floordiv": Facts(),
    "mod": Facts(),
    "as_real": Facts(_first, zero="first", factors=(0,)),
    "as_int": Facts(),
    "as_bool": Facts(),
    "detach": Facts(_first, _below, zero="first", factors=(0,)),
    "uniform": Facts(),
}
# Real functions that need not have a value: of numbers that are 0, or negative.
MAY_FAIL: Final = frozenset(name for name, row in SCALARS.items() if row.takes != "int" and conditions(name, -1))


def is_zero(fn: str, zeros: Iterable[bool]) -> bool:
    """Whether a function is 0, given which arguments are; if it has a value."""
    match FACTS[fn].zero:
        case "any":
            return any(zeros)
        case "all":
            return all(zeros)
        case "first":
            return next(iter(zeros))
    return False


def is_real(fn: str, args: Sequence[bool]) -> bool:
    """Whether values of a function are real numbers, not integers or truth values, given which arguments are."""
    row = SCALARS[fn]
    return row.result == "real" or (row.result is None and (row.takes == "real" or any(args)))


def kept_arguments(prim: str, attrs: Sequence[Any], count: int) -> Sequence[int]:
    """Arguments that are finite wherever a result is, if they matter: of a row, all of those that are multiplied or added up."""
    if prim == "map":
        return finite(*attrs[:2])
    return () if prim in ("reduce", "rowwise") and attrs[0] not in ("prod", "cumsum") else range(count)


def sees(prim: str, attrs: Sequence[Any]) -> bool:
    """Whether a result is no number if an argument is none. Comparisons hide undefined operands, and so do sorted rows; anything to the
    power of 0 is 1."""
    if prim == "map":
        fn = attrs[0]
        return SCALARS[fn].result in (None, "real") and not FACTS[fn].compares and tuple(attrs[:2]) != ("pow", 0)
    return prim != "rowwise" or attrs[0] == "cumsum"


def expression_state(op: str, info: Any, args: Sequence[State]) -> State:
    """Whether an expression is a number wherever the program is defined: a quotient after a mask is not known to be one, −∞ stays."""
    if op == "real":
        return WILD if isinstance(info, str) or info != info else FINITE if is_finite(info) else BELOW if info < 0 else WILD
    if all(a == FINITE for a in args):
        return FINITE
    if WILD in args:
        return WILD
    match op:
        case "row" if info[0] in POSITIONS:
            return FINITE
        case "choose":
            return max(args[1:])
        case "map":
            return FACTS[info[0]].below(args)
        case "reduce" if info == "max":
            return FACTS["max"].below(args)
    return WILD
