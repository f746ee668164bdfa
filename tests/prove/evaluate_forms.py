"""An evaluator of canonical forms that shares nothing with the kernel's normalisation: it can contradict it.

A form is evaluated by the *meaning* of its atoms only: their stored data is read, no law is applied. The claims that
atoms carry (0/1 values, signs, the definition of a cut) are checked on the way; a false one raises `Contradiction`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from flint import arb, fmpq

from trainverify.axes.structure import Axes, Axis
from trainverify.primitives.scalars import SCALARS, Undecided, hashed_uniform, nearest_float
from trainverify.primitives.windows import Windows
from trainverify.prove.algebra.terms import BORDERED, OPAQUE, SAME, Atom, Coef, Index, Poly, Power, bordered_windows

Number = Any  # float or arb
Place = tuple[tuple[int, ...], dict[Index, int]]  # the tags of a block, and the values of its position variables


class Contradiction(Exception):
    """A claim that an atom carries is false at this point."""


# -- arithmetic ------------------------------------------------------------------------------------------------------


class Floats:
    """float64; what is not a number is nan."""

    exact = False

    def of(self, value: Coef | float | bool) -> Number:
        return nearest_float(value)

    def times(self, a: Number, b: Number) -> Number:
        return a * b

    def power(self, a: Number, w: Power) -> Number:
        try:
            value = a ** (w if isinstance(w, int) else float(w))
        except (ZeroDivisionError, OverflowError):
            return math.nan
        return math.nan if isinstance(value, complex) else value

    def apply(self, name: str, args: Sequence[Number], param: Any) -> Number:
        f = SCALARS[name].numeric
        if SCALARS[name].takes == "int":
            if any(not math.isfinite(a) for a in args):
                return math.nan
            if name == "uniform":
                return float(hashed_uniform(*(self.whole(a) for a in args)))
            return float(f(*(np.asarray(self.whole(a), dtype=np.int64) for a in args)))
        with np.errstate(all="ignore"):
            arrays = [np.asarray(a, dtype=np.float64) for a in args]
            return float(f(*arrays) if param is None else f(*arrays, param))

    def whole(self, a: Number) -> int:
        if abs(a - round(a)) > 1e-6:
            raise Contradiction(f"{a} should be an integer")
        nearest: int = round(a)
        return nearest

    def less(self, a: Number, b: Number) -> bool:
        return bool(a < b)

    def largest(self, values: Sequence[Number]) -> Number:
        return math.nan if any(math.isnan(v) for v in values) else max(values)

    def same(self, a: Number, b: Number) -> bool:
        return (math.isnan(a) or math.isnan(b) or a == b) or abs(a - b) <= 1e-8 * max(1.0, abs(a), abs(b))

    def undefined(self, a: Number) -> bool:
        return math.isnan(a)


class Balls:
    """Rigorous enclosures; two of them that do not meet are different numbers."""

    exact = True

    def of(self, value: Coef | float | bool) -> Number:
        if isinstance(value, float) and not math.isfinite(value):
            return arb(str(value))
        q = Fraction(value)
        return arb(fmpq(q.numerator, q.denominator))

    def times(self, a: Number, b: Number) -> Number:
        return a * b

    def power(self, a: Number, w: Power) -> Number:
        return SCALARS["pow"].ball(a, w)

    def apply(self, name: str, args: Sequence[Number], param: Any) -> Number:
        if name == "uniform":
            q = hashed_uniform(*(self.whole(a) for a in args))
            return arb(fmpq(q.numerator, q.denominator))
        if SCALARS[name].takes == "int":
            return arb(SCALARS[name].ball(*(self.whole(a) for a in args)))
        f = SCALARS[name].ball
        value = f(*args) if param is None else f(*args, param)
        return value if isinstance(value, arb) else arb(int(value))

    def whole(self, a: Number) -> int:
        found = a.unique_fmpz()
        if found is None:
            raise Contradiction(f"{a} should be an integer")
        return int(found)

    def less(self, a: Number, b: Number) -> bool:
        return bool(SCALARS["lt"].ball(a, b))

    def largest(self, values: Sequence[Number]) -> Number:
        return functools.reduce(SCALARS["max"].ball, values)

    def same(self, a: Number, b: Number) -> bool:
        return bool(a.is_nan() or b.is_nan() or a.overlaps(b))

    def undefined(self, a: Number) -> bool:
        return bool(a.is_nan())


Arithmetic = Floats | Balls


# -- forms -----------------------------------------------------------------------------------------------------------


class Evaluator:
    """Values of forms at one point: `elements[tensor or block, index]` are the inputs, `radix[input]` the digits of integers."""

    def __init__(
        self,
        atoms: Sequence[Atom],
        elements: Mapping[tuple[str, tuple[int, ...]], Number],
        radix: Mapping[str, Sequence[int]],
        arithmetic: Arithmetic,
        check: bool = True,
    ):
        self.atoms = atoms
        self.elements = elements
        self.radix = radix
        self.numbers = arithmetic
        self.check = check
        self._known: dict[tuple[int, tuple[int, ...]], Number] = {}

    def value(self, p: Poly, at: Mapping[Index, int]) -> Number:
        """The polynomial where its variables have these values."""
        terms = []
        for m, c in p.items():
            terms.append((c, [(u, tuple(at[i] if i < 0 else i for i in idx), w) for u, idx, w in m]))
        return self._total(terms)

    def _total(self, terms: Sequence[tuple[Coef, Sequence[tuple[int, tuple[int, ...], Power]]]]) -> Number:
        total = self.numbers.of(0)
        for c, factors in terms:
            total = total + self.numbers.times(self.numbers.of(c), self._product(factors))
        return total

    def _product(self, factors: Sequence[tuple[int, tuple[int, ...], Power]]) -> Number:
        product = self.numbers.of(1)
        for u, idx, w in factors:
            value = self.atom(u, idx)
            product = self.numbers.times(product, value if w == 1 else self.numbers.power(value, w))
        return product

    def atom(self, uid: int, idx: tuple[int, ...]) -> Number:
        key = (uid, idx)
        if key not in self._known:
            a = self.atoms[uid]
            for i, s in zip(idx, a.sizes, strict=True):
                if not 0 <= i < s:
                    raise Contradiction(f"index {i} of a slot of size {s} ({a.kind})")
            value = self._meaning(a, idx)
            if self.check:
                self._claims(a, idx, value)
            self._known[key] = value
        return self._known[key]

    def _claims(self, a: Atom, idx: tuple[int, ...], value: Number) -> None:
        numbers = self.numbers
        if numbers.undefined(value):
            return
        zero, one = numbers.of(0), numbers.of(1)
        if a.indicator and not (numbers.same(value, zero) or numbers.same(value, one)):
            raise Contradiction(f"an indicator of kind {a.kind} is {value}")
        try:
            if a.positive and not numbers.less(zero, value) and not (not numbers.exact and value == 0):  # floats underflow
                raise Contradiction(f"{a.kind} is called positive and is {value}")
            if a.nonnegative and numbers.less(value, zero):
                raise Contradiction(f"{a.kind} is called nonnegative and is {value}")
        except Undecided:
            pass
        if a.definition is not None:
            opened = self.value(a.definition, {-1 - k: i for k, i in enumerate(idx)})
            if not numbers.same(opened, value):
                raise Contradiction(f"a cut is {value}, its definition {opened}")

    def _meaning(self, a: Atom, idx: tuple[int, ...]) -> Number:
        numbers = self.numbers
        match a.kind:
            case "input":
                return self.elements[a.data, idx]
            case "iota":
                return numbers.of(idx[0])
            case "delta":
                return numbers.of(int(idx[0] == idx[1]))
            case "digit":
                name, which, count = a.data
                sizes = self._radix(name)
                label = self._label(name, idx[:-1])
                if len(sizes) != count or sizes[which] != a.sizes[-1]:
                    raise Contradiction(f"digit {which} of {count}, size {a.sizes[-1]}, of integers with digits {sizes}")
                if not 0 <= label < math.prod(sizes):
                    return numbers.of(0)
                return numbers.of(int(label // math.prod(sizes[which + 1 :]) % sizes[which] == idx[-1]))
            case "valid":
                return numbers.of(int(0 <= self._label(a.data, idx) < math.prod(self._radix(a.data))))
            case "sum":
                ((body, sizes), _), slots = a.data, self._slots(a, idx)
                total = numbers.of(0)
                for at in itertools.product(*map(range, sizes)):
                    total = total + self._product([(u, e, w) for u, w, e in self._filled(body, slots, at)])
                return total
            case "cut":
                ((form, _), _), slots = a.data, self._slots(a, idx)
                coef, inside = a.content
                scale = self._product([(u, tuple(idx[-1 - k] for k in at), w) for u, at, w in inside])
                return numbers.of(coef) * scale * self._form(form, slots)
            case "fn":
                ((name, param, form), _), slots = a.data, self._slots(a, idx)
                return self._function(str(name), param, form, slots)
            case "at":
                inner, pattern, frame = a.data
                digits, others = _digits(frame.start + idx[0], frame.sizes), iter(idx[1:])
                return self._product([(inner, tuple(next(others) if j is None else digits[j] for j in pattern), 1)])
            case "shift":
                return numbers.of(int(list(idx[:-1]) == _digits(a.data.start + idx[-1], a.data.sizes)))
            case "region":
                sizes, low, high = a.data
                position = sum(i * math.prod(sizes[n + 1 :]) for n, i in enumerate(idx))
                return numbers.of(int(low <= position < high))
        return self._row(a, idx)

    def _slots(self, a: Atom, idx: tuple[int, ...]) -> list[int]:
        """The index at every occurrence: a slot's, or a constant."""
        return [idx[k] if k >= 0 else -1 - k for k in a.pattern]

    @staticmethod
    def _filled(
        body: Sequence[tuple[int, Power, tuple[int, ...]]], slots: Sequence[int], at: Sequence[int]
    ) -> Iterator[tuple[int, Power, tuple[int, ...]]]:
        free = iter(slots)
        for u, w, entries in body:
            yield u, w, tuple(at[e] if e >= 0 else next(free) for e in entries)

    def _terms(self, form: Any, slots: Sequence[int]) -> list[tuple[Coef, list[tuple[int, tuple[int, ...], Power]]]]:
        free = iter(slots)
        return [(c, [(u, tuple(next(free) for _ in self.atoms[u].sizes), w) for u, w in factors]) for c, factors in form]

    def _form(self, form: Any, slots: Sequence[int]) -> Number:
        return self._total(self._terms(form, slots))

    def _function(self, name: str, param: Any, form: Any, slots: Sequence[int]) -> Number:
        numbers = self.numbers
        terms = self._terms(form, slots)
        markers = {u for _, fs in terms for u, _, _ in fs if self._is_marker(u)}
        if name == SAME:
            a, b = self._values(name, param[0], terms)
            return numbers.of(int(bool(a == b)))
        if name.startswith(OPAQUE):
            return self._by_name(name.removeprefix(OPAQUE), param, terms)
        if markers or (name == "max2" or (name in SCALARS and SCALARS[name].arity > 1)):
            values = self._values(name, param, terms)
            return numbers.largest(values) if name == "max2" else numbers.apply(name, values, None)
        value = self._total(terms)
        zero = numbers.of(0)
        match name:
            case "number":
                return value
            case "pi" | "one_minus_power":
                return numbers.apply(name, [], param)
            case "infinity":
                return numbers.of(math.inf)
            case "log_indicator":
                return numbers.of(-math.inf if numbers.same(value, zero) else 0)
            case "gt0":
                return numbers.of(int(not numbers.undefined(value) and numbers.less(zero, value)))
            case "ge0":
                return numbers.of(int(not numbers.undefined(value) and not numbers.less(value, zero)))
            case "eq0":
                return numbers.of(int(bool(SCALARS["eq"].ball(value, zero)) if numbers.exact else abs(value) < 1e-12))
            case "pow":
                return numbers.power(value, param)
        return numbers.apply(name, [value], param)

    def _values(self, name: str, count: int, terms: Sequence[tuple[Coef, list[tuple[int, tuple[int, ...], Power]]]]) -> list[Number]:
        """Of several arguments, told apart by markers."""
        parts: list[list[Any]] = [[] for _ in range(count)]
        for c, fs in terms:
            mine = [f for f in fs if self._is_marker(f[0])]
            if len(mine) != 1 or mine[0][2] != 1:
                raise Contradiction(f"{name} with arguments that cannot be told apart")
            parts[self._marker(mine[0][0])].append((c, [f for f in fs if f is not mine[0]]))
        return [self._total(p) for p in parts]

    def _by_name(self, name: str, param: Any, terms: Sequence[tuple[Coef, list[tuple[int, tuple[int, ...], Power]]]]) -> Number:
        """A function of which the kernel uses no law; sums and products have any number of arguments."""
        count, own = param
        values = self._values(name, count, terms)
        if name == "select":
            return values[1] if self.numbers.same(values[0], self.numbers.of(1)) else values[2]
        if name == "pick":  # 0 times what is not looked up is 0
            if any(self.numbers.same(v, self.numbers.of(0)) for v in values):
                return self.numbers.of(0)
            name = "mul"
        while len(values) > 2 and name in ("add", "mul"):
            values = [self.numbers.apply(name, values[:2], None), *values[2:]]
        return self.numbers.apply(name, values, own)

    def _is_marker(self, uid: int) -> bool:
        a = self.atoms[uid]
        return a.kind == "marker" or (a.kind == "input" and str(a.data).startswith("argument ") and not a.sizes)

    def _marker(self, uid: int) -> int:
        return int(str(self.atoms[uid].data).removeprefix("argument "))

    def _in_window(self, how: Windows, values: Sequence[Number], at: Sequence[int], sizes: Sequence[int]) -> Number:
        """Element k of window p, which are written in one row of digits."""
        position = 0
        for i, s in zip(at, sizes, strict=True):
            position = position * s + i
        t = how.place(*divmod(position, how.kernel))
        return values[t] if 0 <= t < how.size else self.numbers.of(-math.inf)

    def _row(self, a: Atom, idx: tuple[int, ...]) -> Number:
        """max, or `row FUNCTION DESCENDING [tags]`: a function of all values along an axis, slow digit first."""
        (form, sizes, *result), _ = a.data
        rank = sum(1 for _, fs in form for u, _, es in fs for e in es if e < 0)
        slots = self._slots(a, idx)
        if a.kind == f"row {OPAQUE}look up":
            return self._looked_up(form, sizes, slots)
        values = []
        for at in itertools.product(*map(range, sizes)):
            free = iter(slots)
            terms = []
            for c, factors in form:
                terms.append((c, [(u, tuple(at[e] if e >= 0 else next(free) for e in es), w) for u, w, es in factors]))
            values.append(self._total(terms))
        if a.kind == "max":
            return self.numbers.largest(values)
        _, fn, *more = a.kind.split(" ")
        fn = fn.removeprefix(OPAQUE)
        if fn in ("max", "min", "sum", "prod"):
            return self._folded(fn, values)
        if a.kind.startswith(BORDERED):
            return self._in_window(bordered_windows(a.kind), values, slots[rank:], result[0])
        descending, *tags = more
        if tags:
            raise NotImplementedError("results of a row function on unequal pieces")
        position = 0
        for i, s in zip(slots[rank:], result[0], strict=True):
            position = position * s + i
        order = sorted(range(len(values)), key=functools.cmp_to_key(self._compare(values, descending == "1")))
        match fn:
            case "argmax":
                return self.numbers.of(min(sorted(range(len(values))), key=functools.cmp_to_key(self._compare(values, True))))
            case "argmin":
                return self.numbers.of(order[0])
            case "argsort":
                return self.numbers.of(order[position])
            case "sort":
                return values[order[position]]
        raise NotImplementedError(f"row function {fn}")

    def _looked_up(self, form: Any, sizes: Sequence[int], slots: Sequence[int]) -> Number:
        """The element at a position; 0 outside."""
        ((_, ((uid, _, entries),)),) = form
        ((name, _, inner), _) = self.atoms[uid].data
        elements = []
        for at in itertools.product(*map(range, sizes)):
            free = iter(slots)
            idx = tuple(at[e] if e >= 0 else next(free) for e in entries)
            where, x = self._values(str(name), 2, self._terms(inner, self._slots(self.atoms[uid], idx)))
            elements.append(x)
        place = self.numbers.whole(where)
        return elements[place] if 0 <= place < len(elements) else self.numbers.of(0)

    def _folded(self, fn: str, values: Sequence[Number]) -> Number:
        f = {"sum": "add", "prod": "mul"}.get(fn, fn)
        found = values[0]
        for v in values[1:]:
            found = self.numbers.apply(f, [found, v], None)
        return found

    def _compare(self, values: Sequence[Number], descending: bool) -> Callable[[int, int], int]:
        def compare(i: int, j: int) -> int:
            a, b = (values[j], values[i]) if descending else (values[i], values[j])
            return -1 if self.numbers.less(a, b) else 1 if self.numbers.less(b, a) else i - j

        return compare

    def _radix(self, name: str) -> Sequence[int]:
        if name.startswith("@at "):
            return self.radix[self.atoms[self.atoms[int(name[4:])].data[0]].data]
        if name.startswith("@from "):  # an integer in a piece of its range
            return [int(n) for n in name.split(" ", 3)[2].split(",") if n]
        if name.startswith("@"):  # positions that a row function chose
            (_, sizes, *_), _ = self.atoms[int(name[1:])].data
            found: Sequence[int] = sizes
            return found
        return self.radix[name]

    def _label(self, name: str, idx: tuple[int, ...]) -> int:
        if name.startswith("@from "):
            _, start, _, inner = name.split(" ", 3)
            return self._label(inner, idx) - int(start)
        if name.startswith("@"):
            return self.numbers.whole(self.atom(int(name.removeprefix("@at ").removeprefix("@")), idx))
        return self.numbers.whole(self.elements[name, idx])


# -- where an element of a tensor is in its form -----------------------------------------------------------------------


def place(axes: Axes, dims: Sequence[Axis], position: Sequence[int]) -> Place:
    """The block and the position variables of one element; leaf n of the dimensions is variable -1 - n."""
    leaves = [x for d, p in zip(dims, position, strict=True) for x in _spread(axes, d, p)]
    tags = tuple(0 if v is None else v for v, tag in leaves if tag)  # a tag inside a piece not chosen does not matter
    return tags, {-1 - n: v for n, (v, tag) in enumerate(leaves) if not tag and v is not None}


def _spread(axes: Axes, axis: Axis, position: int | None) -> list[tuple[int | None, bool]]:
    """(digit, is it a tag) for every leaf of an axis; None for leaves of pieces that do not hold the position."""
    found: list[tuple[int | None, bool]] = []
    units = axes.leaves([axis])
    rest = position
    digits: list[int | None] = []
    for u in reversed(units):
        if rest is None:
            digits.append(None)
        else:
            rest, digit = divmod(rest, u.size)
            digits.append(digit)
    for u, v in zip(units, reversed(digits), strict=True):
        if u.pieces is None:
            found.append((v, False))
            continue
        starts = list(itertools.accumulate((p.size for p in u.pieces), initial=0))
        chosen = None if v is None else next(t for t in range(len(u.pieces)) if starts[t] <= v < starts[t + 1])
        found.append((chosen, True))
        for t, p in enumerate(u.pieces):
            found += _spread(axes, p, v - starts[t] if v is not None and t == chosen else None)
    return found


def _digits(position: int, sizes: Sequence[int]) -> list[int]:
    """The digits of a position, slow first."""
    found = []
    for s in reversed(sizes):
        position, d = divmod(position, s)
        found.append(d)
    return found[::-1]
