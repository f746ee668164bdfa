"""Arithmetic, comparisons, logic, casts: exact where operands are known, else one operator each."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Final

import numpy as np

from trainverify.graph.program import Ref
from trainverify.jax.choices import literal, unrepeated
from trainverify.jax.infinities import is_number, may_be_infinite, why_not_finite
from trainverify.jax.lines_of_masks import note_lines
from trainverify.jax.mappings.table import Arguments, is_real, rows
from trainverify.jax.ranges import bounds, decisive, refuse_rounded
from trainverify.jax.signs import never_negative
from trainverify.jax.values import (
    TABLE_ELEMENTS,
    Divergent,
    Grid,
    Number,
    Opaque,
    Real,
    Table,
    Value,
    computed,
    grid,
    kind_of,
    listed,
    table_of,
    undecided,
    uniform,
)
from trainverify.translate.emit import Unmapped

ROWS, row = rows()

COMPARISONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}
_SWAPPED: Final = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
_INTEGERS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "div": lambda a, b: (np.sign(a) * np.sign(b)) * (np.abs(a) // np.abs(b)),
    "rem": np.fmod,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    **COMPARISONS,
}


def folded(a: Arguments, name: str) -> Value | None:
    """Two operands that are known: exact arithmetic. None where they are not, or are too many."""
    x, y = a.operand(0), a.operand(1)
    if isinstance(x, Number) and isinstance(y, Number):
        return _numbers(a, name, x, y)
    if isinstance(x, Grid) and isinstance(y, Grid):
        found = _grids(a, name, x, y)
        if found is not None or name in COMPARISONS:  # a mask is written as it is computed
            return found
    if not (isinstance(x, Grid | Table) and isinstance(y, Grid | Table)):
        return None
    if name in ("and", "or", "xor") and a.dtype != "bool":
        return None
    if math.prod(a.shape) > TABLE_ELEMENTS // max(len(a.e.ranks), 1):
        return None
    left, right = table_of(x), table_of(y)
    if left is None or right is None or (name in ("div", "rem") and not right.all()):
        return None
    data = _INTEGERS[name](left, right)
    return listed(np.broadcast_to(data, (data.shape[0], *a.shape)), a.dtype)


def _numbers(a: Arguments, name: str, x: Number, y: Number) -> Value | None:
    p, q = x.value, y.value
    if name in (*COMPARISONS, "max", "min") and undecided(p, q) and (name in COMPARISONS or p != q):
        raise Unmapped(f"{name} of {p} and {q}, which rounding decides")
    if name in COMPARISONS:
        return uniform(bool(COMPARISONS[name](p, q)), a.shape, "bool")
    if name in ("max", "min"):
        return Number(max(p, q) if name == "max" else min(p, q), a.shape, a.dtype)
    if not (math.isfinite(p) and math.isfinite(q)):
        return None
    exact: dict[str, Callable[[], Fraction]] = {
        "add": lambda: Fraction(p) + Fraction(q),
        "sub": lambda: Fraction(p) - Fraction(q),
        "mul": lambda: Fraction(p) * Fraction(q),
        "div": lambda: Fraction(p) / Fraction(q),
    }
    if name not in exact or (name == "div" and q == 0):
        return None
    return Number(computed(exact[name](), p, q), a.shape, a.dtype)


def _grids(a: Arguments, name: str, x: Grid, y: Grid) -> Value | None:
    """Sums of grids, multiples of a grid by a number, comparisons that bounds decide."""
    if name in ("add", "sub"):
        sign = 1 if name == "add" else -1
        rank = len(a.shape)
        strides = [p + sign * q for p, q in zip(_aligned(x, rank), _aligned(y, rank), strict=True)]
        return Grid(x.start + sign * y.start, tuple(strides), a.shape, a.dtype)
    if name == "mul" and (x.literal is not None or y.literal is not None):
        g, by = (y, x.literal) if x.literal is not None else (x, y.literal)
        assert by is not None
        return Grid(g.start * by, tuple(s * by for s in _aligned(g, len(a.shape))), a.shape, a.dtype)
    if x.uniform and y.uniform and name in _INTEGERS and not (name in ("div", "rem") and not y.start.all()):
        if name in ("and", "or", "xor") and a.dtype != "bool":
            return None
        return grid(np.asarray(_INTEGERS[name](x.start, y.start)).astype(np.int64), a.shape, a.dtype)
    return decided(a, name)


def _aligned(g: Grid, rank: int) -> tuple[int, ...]:
    return g.strides if g.shape else (0,) * rank


def decided(a: Arguments, name: str) -> Value | None:
    """A comparison, or a maximum, that the bounds of its operands decide."""
    x, y = decisive(a.e, a.operand(0)), decisive(a.e, a.operand(1))
    if x is None or y is None:
        return None
    if name in ("max", "min"):
        first = x[0] >= y[1] if name == "max" else x[1] <= y[0]
        second = y[0] >= x[1] if name == "max" else y[1] <= x[0]
        chosen = a.operand(0) if first else a.operand(1) if second else None
        return chosen if chosen is not None and _shape(a, chosen) == a.shape else None
    if name in ("lt", "le", "gt", "ge"):
        _diverge(a, name)
    if name not in COMPARISONS or (name in ("eq", "ne") and not (x[1] < y[0] or y[1] < x[0])):
        return None
    answers = {COMPARISONS[name](p, q) for p in x for q in y}
    return uniform(answers.pop(), a.shape, "bool") if len(answers) == 1 else None


def _diverge(a: Arguments, name: str) -> None:
    """Ranks on which positions decide an order, and on which they do not, or otherwise, run programs of their own."""
    x, y = a.operand(0), a.operand(1)
    if not isinstance(x, Grid) or not isinstance(y, Grid) or len(x.start) == len(y.start) == 1:
        return
    spans = [[(s * (n - 1)) for s, n in zip(g.strides, g.shape, strict=True)] for g in (x, y)]
    low, high = ([sum(f(v, 0) for v in span) for span in spans] for f in (min, max))
    ends = [[g.start + at for at in (lo, hi)] for g, lo, hi in zip((x, y), low, high, strict=True)]
    answers = [np.broadcast_to(COMPARISONS[name](p, q), (len(a.e.ranks),)) for p in ends[0] for q in ends[1]]
    always, never = np.all(answers, axis=0), ~np.any(answers, axis=0)
    code = np.where(always, 1, np.where(never, 2, 0))
    if len(set(code.tolist())) > 1:
        raise Divergent(code)


def _shape(a: Arguments, value: Value) -> tuple[int, ...]:
    return a.e.shape(value) if isinstance(value, str) else () if isinstance(value, Opaque) else value.shape


def spread(a: Arguments, name: str) -> str:
    """A result as large as JAX's."""
    return name if a.e.shape(name) == a.shape else a.e.op("expand", (name,), {"shape": a.shape})


def column(a: Arguments, i: int) -> Any:
    """An operand as an attribute: a number, or one integer for each rank. None if it is neither."""
    value = a.operand(i)
    if isinstance(value, Number):
        return value.value if math.isfinite(value.value) else None
    return value.start if isinstance(value, Grid) and value.uniform and value.dtype != "bool" else None


def binary(a: Arguments, name: str, ours: str | None = None) -> Value:
    """One operator; a number becomes an attribute."""
    found = folded(a, name)
    if found is None and (name in COMPARISONS or name in ("max", "min")):
        found = decided(a, name)
    if found is not None:
        return found
    by = column(a, 1)
    if by is not None and ours in ("add", "sub", "mul", "div") and (ours != "div" or _divides(by)):
        return spread(a, a.e.op(ours, (a.e.slim(a.operand(0)),), {"value": by}))
    if column(a, 0) is not None and ours in ("add", "mul"):
        return spread(a, a.e.op(ours, (a.e.slim(a.operand(1)),), {"value": column(a, 0)}))
    return spread(a, a.e.op(ours or name, (a.e.slim(a.operand(0)), a.e.slim(a.operand(1)))))


def _divides(by: Any) -> bool:
    return isinstance(by, int | Fraction | float) and by != 0


@row("add", "add_any")
def add(a: Arguments) -> Value:
    for i in (0, 1):
        if a.number(i) == 0 and isinstance(a.operand(1 - i), str) and _shape(a, a.operand(1 - i)) == a.shape:
            return a.operand(1 - i)
    return binary(a, "add", "add")


@row("sub")
def sub(a: Arguments) -> Value:
    if a.number(1) == 0 and isinstance(a.operand(0), str) and _shape(a, a.operand(0)) == a.shape:
        return a.operand(0)
    if isinstance(x := a.operand(0), str) and x == a.operand(1) and is_real(a) and is_number(a.e, x):
        return Number(0, a.shape, a.dtype)
    if a.number(0) == -math.inf and isinstance(x := a.operand(1), str) and is_number(a.e, x):
        return Number(-math.inf, a.shape, a.dtype)
    return binary(a, "sub", "sub")


@row("mul", ignores=("out_dtype",))
def mul(a: Arguments) -> Value:
    for i in (0, 1):
        if a.number(i) == 1 and isinstance(a.operand(1 - i), str) and _shape(a, a.operand(1 - i)) == a.shape:
            return a.operand(1 - i)
    for i in (0, 1):
        if a.number(i) == 0 and is_real(a) and isinstance(x := a.operand(1 - i), str) and is_number(a.e, x):
            return Number(0, a.shape, a.dtype)  # 0·x of a real number
    return binary(a, "mul", "mul")


@row("div")
def div(a: Arguments) -> Value:
    """Of integers it truncates: known ones, or those that are divided by a number."""
    if not is_real(a):
        return _divided(a, "floordiv")
    by = a.number(1)
    if by == 1 and isinstance(a.operand(0), str) and _shape(a, a.operand(0)) == a.shape:
        return a.operand(0)
    if isinstance(by, Fraction) and by != 0 and isinstance(a.operand(0), str):
        return spread(a, a.e.op("mul", (a.tensor(0),), {"value": 1 / by}))
    return binary(a, "div", "div")


@row("rem")
def rem(a: Arguments) -> Value:
    """What is left has the sign of what is divided."""
    return _divided(a, "mod") if not is_real(a) else _rest(a)


def _divided(a: Arguments, ours: str) -> Value:
    """Integers by a number, towards 0."""
    if (found := folded(a, a.name)) is not None:
        return found
    x, by = bounds(a.e, a.operand(0)), a.number(1)
    if not isinstance(by, int) or by == 0:
        raise Unmapped("a division of integers by what is not known")
    if ours == "mod" and x is not None and x[0] >= 0 and x[1] < abs(by):
        return a.operand(0)
    given = a.e.slim(a.operand(0))
    turned = ours == "floordiv" and by < 0

    def apart(name: str, negative: bool) -> str:
        made = a.e.op(ours, (name,), {"value": abs(by)})
        return a.e.op("neg", (made,)) if negative else made

    above = apart(given, turned)
    if x is not None and x[0] >= 0:
        return spread(a, above)
    below = apart(a.e.op("neg", (given,)), not turned)
    return spread(a, a.e.op("where", (a.e.op("lt", (given,), {"value": 0}), below, above)))


def _rest(a: Arguments) -> Value:
    """x − y·(x / y without the digits behind the point)."""
    x, y = (a.e.slim(a.operand(i)) for i in (0, 1))
    ratio = a.e.op("div", (x, y))
    whole = a.e.op("mul", (a.e.op("sign", (ratio,)), a.e.op("floor", (a.e.op("abs", (ratio,)),))))
    return spread(a, a.e.op("sub", (x, a.e.op("mul", (y, whole)))))


@row("max")
def max_(a: Arguments) -> Value:
    for i in (0, 1):
        if a.number(i) == -math.inf and (isinstance(x := a.operand(1 - i), str) and a.e.shape(x) == a.shape):
            return x
    return binary(a, "max", "maximum")


@row("min")
def min_(a: Arguments) -> Value:
    for i in (0, 1):
        if a.number(i) == math.inf and (isinstance(x := a.operand(1 - i), str) and a.e.shape(x) == a.shape):
            return x
    return binary(a, "min", "minimum")


def _signed(a: Arguments, name: str) -> Value | None:
    """x ≥ 0 and x < 0 of what is never negative."""
    x = a.operand(0)
    if a.number(1) == 0 and name in ("ge", "lt") and isinstance(x, str) and never_negative(a.e, x):
        return uniform(name == "ge", a.shape, "bool")
    return None


def _compare(name: str) -> Callable[[Arguments], Value]:
    def compare(a: Arguments) -> Value:
        for x in a.operands:
            refuse_rounded(a.e, x)
        found = folded(a, name)
        if found is None:
            found = decided(a, name) or (_signed(a, name) if is_real(a) else None)
        if found is not None:
            return found
        for i, ours in ((1, name), (0, _SWAPPED[name])):
            by = column(a, i)
            if by is not None and isinstance(x := a.operand(1 - i), str):
                if (answer := _answered(a, x, ours, by)) is not None:
                    return answer
                return spread(a, a.e.op(ours, (a.tensor(1 - i),), {"value": by}))
        made = a.e.op(name, (a.e.slim(a.operand(0)), a.e.slim(a.operand(1))))
        x, y = a.operand(0), a.operand(1)
        if isinstance(x, Grid) and isinstance(y, Grid) and a.e.shape(made) == a.shape:
            note_lines(a.e, made, name, x, y)
        made = spread(a, made)
        if isinstance(x, Grid) and isinstance(y, Grid) and math.prod(a.shape) * len(a.e.ranks) <= TABLE_ELEMENTS:
            a.e.kept["answers", made] = name, x, y
        return made

    return compare


def _answered(a: Arguments, x: str, ours: str, by: Any) -> Value | None:
    """where(m, c, d) ⋛ b for literals: m, not m, or the same everywhere."""
    _, op = unrepeated(a.e, x)
    if op is None or op.name != "where" or isinstance(by, np.ndarray):
        return None
    values = [literal(a.e, i) for i in op.inputs[1:]]
    if any(v is None or isinstance(v, bool | Ref) for v in values):
        return None
    answers = [bool(COMPARISONS[ours](v, by)) for v in values]
    if answers[0] == answers[1]:
        return uniform(answers[0], a.shape, "bool")
    if a.e.shape(mask := str(op.inputs[0])) != a.shape:
        return None
    return mask if answers[0] else a.e.op("logical_not", (mask,))


for _name in COMPARISONS:
    row(_name)(_compare(_name))


def _logic(name: str) -> Callable[[Arguments], Value]:
    def logic(a: Arguments) -> Value:
        if a.dtype != "bool":
            found = folded(a, name)
            for i in (0, 1) if found is None and name == "and" else ():
                if type(bits := a.number(i)) is int and bits > 0 and not bits & (bits + 1):  # the lowest bits, also of negative integers
                    return spread(a, a.e.op("mod", (a.e.slim(a.operand(1 - i)),), {"value": bits + 1}))
            if found is None:
                raise Unmapped("bits of integers")
            return found
        for i in (0, 1):
            known = a.number(i)
            if known is not None and name != "xor":
                absorbs = bool(known) == (name == "or")
                return uniform(bool(known), a.shape, "bool") if absorbs else a.operand(1 - i)
        found = folded(a, name)
        if found is not None:
            return found
        if name == "xor":
            return spread(a, a.e.op("ne", (a.e.slim(a.operand(0)), a.e.slim(a.operand(1)))))
        return spread(a, a.e.op(f"logical_{name}", (a.e.slim(a.operand(0)), a.e.slim(a.operand(1)))))

    return logic


for _name in ("and", "or", "xor"):
    row(_name)(_logic(_name))


@row("shift_left", "shift_right_arithmetic", "shift_right_logical")
def shift(a: Arguments) -> Value:
    """x · 2ⁿ, or ⌊x / 2ⁿ⌋."""
    n, found = a.number(1), bounds(a.e, a.operand(0))
    if type(n) is not int or not 0 <= n < 31 or (a.name == "shift_right_logical" and (found is None or found[0] < 0)):
        raise Unmapped("bits of integers")
    return spread(a, a.e.op("mul" if a.name == "shift_left" else "floordiv", (a.e.slim(a.operand(0)),), {"value": 1 << n}))


@row("not")
def not_(a: Arguments) -> Value:
    if a.dtype != "bool":
        raise Unmapped("bits of integers")
    x = a.operand(0)
    if isinstance(x, Grid):
        return Grid(1 - x.start, x.strides, x.shape, "bool")
    if isinstance(x, Table):
        return Table(~x.data.astype(bool), "bool")
    return a.e.op("logical_not", (a.tensor(0),))


@row("neg")
def neg(a: Arguments) -> Value:
    x = a.operand(0)
    if isinstance(x, Number):
        return Number(-x.value, x.shape, x.dtype)
    if isinstance(x, Grid):
        return Grid(-x.start, tuple(-s for s in x.strides), x.shape, x.dtype)
    return a.e.op("neg", (a.tensor(0),))


_UNARY: Final = {
    "exp": "exp",
    "log": "log",
    "sin": "sin",
    "cos": "cos",
    "tanh": "tanh",
    "erf": "erf",
    "logistic": "sigmoid",
    "sqrt": "sqrt",
    "rsqrt": "rsqrt",
    "abs": "abs",
    "sign": "sign",
    "floor": "floor",
}


def _unary(ours: str) -> Callable[[Arguments], Value]:
    def unary(a: Arguments) -> Value:
        x = a.operand(0)
        if isinstance(x, Number) and (found := _exact(ours, x)) is not None:
            return found
        if ours == "abs" and isinstance(x, str) and a.out[0].kind == "real" and never_negative(a.e, x):
            return x
        if isinstance(x, Grid) and x.uniform and ours in ("abs", "sign"):
            return Grid(np.abs(x.start) if ours == "abs" else np.sign(x.start), x.strides, x.shape, x.dtype)
        if ours == "sign" and a.out[0].kind == "int":
            above, below = (a.e.cast(a.e.op(c, (a.tensor(0),), {"value": 0}), a.dtype) for c in ("gt", "lt"))
            return a.e.op("sub", (above, below))
        return spread(a, a.e.op(ours, (a.e.slim(x),)))

    return unary


def _whole(value: Real) -> Real:
    """A number that is made a whole one."""
    if undecided(value, round(value)):
        raise Unmapped(f"{value} without the digits behind the point, which rounding decides")
    return value


def _exact(ours: str, x: Number) -> Number | None:
    """Functions whose value at some numbers is a number that can be written."""
    if not math.isfinite(x.value):
        return Number(0, x.shape, x.dtype) if ours == "exp" and x.value == -math.inf else None
    if ours == "abs":
        return Number(-x.value if x.value < 0 else x.value, x.shape, x.dtype)
    if ours == "sign":
        if undecided(x.value, 0):
            raise Unmapped(f"the sign of {x.value}, which rounding decides")
        return Number(int(x.value > 0) - int(x.value < 0), x.shape, x.dtype)
    if ours == "floor":
        return Number(math.floor(_whole(x.value)), x.shape, x.dtype)
    simple: dict[str, tuple[int, int]] = {"exp": (0, 1), "log": (1, 0), "sqrt": (1, 1), "sin": (0, 0), "cos": (0, 1)}
    if ours in simple and x.value == simple[ours][0]:
        return Number(int(simple[ours][1]), x.shape, x.dtype)
    return None


for _name, _ours in _UNARY.items():
    row(_name, ignores=("accuracy",))(_unary(_ours))


@row("square")
def square(a: Arguments) -> Value:
    x = a.operand(0)
    if isinstance(x, Number):
        value = computed(Fraction(x.value) ** 2, x.value) if math.isfinite(x.value) else math.inf
        return Number(value, x.shape, x.dtype)
    return a.e.op("square", (a.tensor(0),))


@row("integer_pow")
def integer_pow(a: Arguments) -> Value:
    x, y = a.operand(0), a.param("y")
    if isinstance(x, Number) and math.isfinite(x.value) and (x.value != 0 or y >= 0):
        return Number(computed(Fraction(x.value) ** y, x.value), x.shape, x.dtype)
    if y == 2:
        return spread(a, a.e.op("square", (a.e.slim(x),)))
    return spread(a, a.e.op("pow", (a.e.slim(x),), {"exponent": int(y)}))


@row("pow")
def pow_(a: Arguments) -> Value:
    """x to a literal power; a positive literal to a power: exp(y·log c)."""
    base, exponent = a.number(0), a.number(1)
    if exponent is not None and math.isfinite(exponent):
        if base is not None and exponent == int(exponent) and abs(exponent) < 64 and base != 0 and math.isfinite(base):
            return Number(computed(Fraction(base) ** int(exponent), base, exponent), a.shape, a.dtype)
        return spread(a, a.e.op("pow", (a.e.slim(a.operand(0)),), {"exponent": exponent}))
    if base is None or not 0 < base < math.inf:
        raise Unmapped("a power of two tensors")
    power = a.e.slim(a.operand(1))
    power = power if a.e.kind(power) == "real" else a.e.cast(power, a.dtype)
    log = a.e.op("log", (a.e.full((), base, a.dtype),))
    return spread(a, a.e.op("exp", (a.e.op("mul", (power, log)),)))


@row("exp2", ignores=("accuracy",))
def exp2(a: Arguments) -> Value:
    log = a.e.op("log", (a.e.full((), 2, a.dtype),))
    return spread(a, a.e.op("exp", (a.e.op("mul", (a.e.slim(a.operand(0)), log)),)))


@row("erf_inv", "asin", "acos", "atan", "cbrt", "atan2", "nextafter", "lgamma")
def unknown_function(a: Arguments) -> Value:
    raise Unmapped(f"no operator for {a.name}")


@row("is_finite")
def is_finite(a: Arguments) -> Value:
    """Computed values are real numbers; only a literal can be infinite."""
    x = a.operand(0)
    if isinstance(x, Number):
        return uniform(math.isfinite(x.value), x.shape, "bool")
    found = may_be_infinite(a.e, a.tensor(0))
    if (why := why_not_finite(a.e, a.tensor(0))) is not None:
        raise Unmapped(why)
    if not found:
        a.e.kept["finite"] = True
        return uniform(True, a.shape, "bool")
    if math.inf in found:
        raise Unmapped("a value that may be infinite")
    return a.e.op("gt", (a.tensor(0),), {"value": -math.inf})


@row("select_n")
def select_n(a: Arguments) -> Value:
    """Cases by number; two by a condition."""
    which = a.operand(0)
    first = a.operand(1)
    if isinstance(first, Number) and all(
        isinstance(x := a.operand(i), Number) and x.value == first.value for i in range(2, len(a.operands))
    ):
        return Number(first.value, a.shape, a.dtype)  # the same in all cases
    if isinstance(which, Grid) and which.uniform:
        if which.literal is None and (found := _by_rank(a, which)) is not None:
            return found
        if which.literal is None:
            raise Divergent(which.start)
        return _as_wide(a, a.operand(1 + min(max(which.literal, 0), len(a.operands) - 2)))
    if a.types[0].dtype != "bool":
        return _numbered(a, which)
    other, then = a.operand(1), a.operand(2)
    if a.dtype == "bool" and isinstance(which, str) and {a.number(1), a.number(2)} == {0, 1}:
        return _as_wide(a, which if a.number(2) else a.e.op("logical_not", (which,)))
    if isinstance(which, str) and ("answers", which) in a.e.kept and isinstance(other, Grid | Table) and isinstance(then, Grid | Table):
        name, x, y = a.e.kept["answers", which]  # a mask of known integers that chooses among known integers
        left, right = table_of(x), table_of(y)
        if left is not None and right is not None:
            data = COMPARISONS[name](left, right)
            which = Table(np.broadcast_to(data, (len(data), *a.shape)), "bool")
    if isinstance(which, Table) and isinstance(other, Grid | Table) and isinstance(then, Grid | Table):
        left, right = table_of(other), table_of(then)
        if left is not None and right is not None:
            return listed(np.where(which.data, right, left), a.dtype)
    return spread(a, a.e.op("where", (a.e.slim(which), a.e.slim(then), a.e.slim(other))))


def _numbered(a: Arguments, which: Value) -> Value:
    """A case by its number, the first or the last for numbers outside."""
    number = a.e.slim(which)
    made = a.e.slim(a.operand(len(a.operands) - 1))
    for n in reversed(range(1, len(a.operands) - 1)):
        made = a.e.op("where", (a.e.op("lt", (number,), {"value": n}), a.e.slim(a.operand(n)), made))
    return spread(a, made)


def _by_rank(a: Arguments, which: Grid) -> Value | None:
    """Known integers that differ in where they start: each rank has those of its own case."""
    cases = [a.operand(i) for i in range(1, len(a.operands))]
    known = [c for c in cases if isinstance(c, Grid)]
    if len(known) != len(cases) or len({_aligned(c, len(a.shape)) for c in known}) > 1:
        return None
    width = max(len(which.start), *(len(c.start) for c in known))
    start = np.choose(np.broadcast_to(which.start, (width,)), [np.broadcast_to(c.start, (width,)) for c in known])
    return Grid(start, _aligned(known[0], len(a.shape)), a.shape, a.dtype)


def _as_wide(a: Arguments, value: Value) -> Value:
    if _shape(a, value) == a.shape:
        return value
    return a.e.op("expand", (a.e.tensor(value),), {"shape": a.shape})


@row("clamp")
def clamp(a: Arguments) -> Value:
    """clamp(low, x, high)."""
    x = a.operand(1)
    low, high = column(a, 0), column(a, 2)
    if low is None or high is None or isinstance(low, np.ndarray) != isinstance(high, np.ndarray):
        raised = a.e.op("maximum", (a.e.slim(x), a.e.slim(a.operand(0))))
        return spread(a, a.e.op("minimum", (raised, a.e.slim(a.operand(2)))))
    if isinstance(low, np.ndarray):
        least, most = int(low.max()), int(high.min())
        if (found := bounds(a.e, x)) is not None and least <= found[0] and found[1] <= most:
            return x
        if isinstance(x, Grid | Table) and (data := table_of(x)) is not None:
            ends = [v.reshape(-1, *(1,) * (data.ndim - 1)) for v in (low, high)]
            return listed(np.clip(data, *ends), a.dtype)
    return a.e.op("clamp", (a.tensor(1),), {"min": low, "max": high})


@row("convert_element_type", ignores=("weak_type", "sharding"))
def convert(a: Arguments) -> Value:
    return converted(a, a.operand(0))


def converted(a: Arguments, x: Value) -> Value:
    a.param("new_dtype")
    dtype, kind = a.dtype, kind_of(a.dtype)
    if isinstance(x, Number):
        if kind == "real":
            return Number(x.value, x.shape, dtype)
        if kind == "bool":
            if undecided(x.value, 0):
                raise Unmapped(f"whether {x.value} is 0, which rounding decides")
            return uniform(x.value != 0, x.shape, "bool")
        if not -(1 << 63) <= x.value < 1 << 63:
            raise Unmapped(f"{x.value} as an integer")
        return uniform(int(_whole(x.value)), x.shape, dtype)
    if isinstance(x, Grid) and kind == "real" and (literal := x.literal) is not None:
        return Number(literal, x.shape, dtype)
    if isinstance(x, Grid) and kind == "int":
        return Grid(x.start, x.strides, x.shape, dtype)
    if isinstance(x, Grid) and kind == "bool" and x.uniform:
        return Grid((x.start != 0).astype(np.int64), x.strides, x.shape, "bool")
    if isinstance(x, Table) and kind != "real":
        return listed(x.data.astype(bool) if kind == "bool" else x.data.astype(np.int64), dtype)
    if kind == "int":
        refuse_rounded(a.e, x)
    return spread(a, a.e.cast(a.e.slim(x), dtype))


@row("stop_gradient", "copy", "copy_p", "pvary", "pcast", "sharding_constraint", "mesh_cast", "reshard")
def same(a: Arguments) -> Value:
    """Copies, casts of how values vary, constraints on where they lie: the value itself."""
    a.ignore("axes", "to", "sharding", "dst_sharding", "concrete_mesh", "context_mesh", "layout", "unconstrained_dims")
    return a.operand(0)


_BITS: Final = {"f64": (11, 52), "f32": (8, 23), "bf16": (8, 7), "f16": (5, 10), "f8e4m3": (4, 3), "f8e5m2": (5, 2)}


@row("reduce_precision")
def reduce_precision(a: Arguments) -> Value:
    """To all bits that the dtype has: `jax.checkpoint` writes it so."""
    exponent, mantissa = _BITS[a.dtype]
    if a.param("exponent_bits") < exponent or a.param("mantissa_bits") < mantissa:
        raise Unmapped("rounding to fewer bits")
    return a.operand(0)


@row("optimization_barrier")
def barrier(a: Arguments) -> tuple[Value, ...]:
    return tuple(a.operands)
