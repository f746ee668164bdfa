"""Values on cells: what all positions of a cell have, exactly, or "unknown".

A real is a number that every position of its cell has, or unknown: then its kind says what is certain of all of them (positive,
nonnegative, finite, finite or −∞, nothing). An integer or boolean is an interval that holds all of them. Sums count every cell as
often as it has positions. So what is computed is what the program computes at its own sizes, or nothing: an unknown value is
never compared. 0 times something finite is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from flint import arb

from trainverify.axes.cells import LISTED, Cells, NoCells, product
from trainverify.domains.arrays import Array
from trainverify.domains.ball import Ball, balls
from trainverify.domains.numeric import NUMERIC, Extended, Numeric
from trainverify.primitives.node import Node
from trainverify.primitives.scalars import Undecided

EXACT, POSITIVE, NONNEGATIVE, FINITE, LOWER, ANY = range(6)  # kinds of a real; each but the first includes the ones before it
NEAR: Final = 1e-9  # relative to the largest entry
SETTLED: Final = 1e-12  # relative to inputs, or to an enclosure
SHIFTS: Final = (0.375, -1.25)  # from the known entries' maximum, for one that is unknown
FAR: Final = 1 << 60  # no integer is further from 0; two of them can be added up in 64 bits


class NoValue(Exception):
    """What cannot be said on cells at all."""


@dataclass(frozen=True)
class Real:
    """Numbers. While an op runs that subtracts an unknown maximum, a number stands for it: `other` are the values with another one in
    its place, and `bound` what is certain of those that differ, whichever it is."""

    value: Array
    kind: Array | None = None  # None: all exact
    other: Array | None = None
    bound: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(np.shape(self.value))


@dataclass(frozen=True)
class Whole:
    """Integers, or booleans as 0 and 1: between `low` and `high`."""

    low: Array
    high: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(np.shape(self.low))

    @property
    def exact(self) -> Array:
        return self.low == self.high


Classed = Real | Whole


def moved(x: Classed, f: Any) -> Classed:
    """Entries put elsewhere."""
    if isinstance(x, Real):
        return Real(*(None if part is None else f(part) for part in (x.value, x.kind, x.other, x.bound)))
    return Whole(f(x.low), f(x.high))


def together(parts: Sequence[Classed], join: Any) -> Classed:
    """Several values put into one array."""
    if isinstance(parts[0], Real):
        kinds = None
        if any(p.kind is not None for p in parts):  # type: ignore[union-attr]
            kinds = join([np.broadcast_to(_kind(p), p.shape) for p in parts])  # type: ignore[arg-type]
        others = bounds = None
        if any(p.other is not None for p in parts):  # type: ignore[union-attr]
            others = join([_other(p) for p in parts])  # type: ignore[arg-type]
            bounds = join([np.full(p.shape, ANY) if p.bound is None else p.bound for p in parts])  # type: ignore[union-attr]
        return Real(join([p.value for p in parts]), kinds, others, bounds)  # type: ignore[union-attr]
    return Whole(join([p.low for p in parts]), join([p.high for p in parts]))  # type: ignore[union-attr]


def _kind(x: Real) -> Array:
    return np.zeros(x.shape, dtype=np.uint8) if x.kind is None else x.kind


def _other(x: Real) -> Array:
    return x.value if x.other is None else x.other


def _second(reals: Sequence[Real]) -> list[Real] | None:
    """The same with the other values; None if there are none."""
    if all(x.other is None for x in reals):
        return None
    return [Real(_other(x), x.kind) for x in reals]


class ClassedDomain:
    """Primitives on cells; reals are computed by `base`, float64 or enclosures."""

    def __init__(self, base: Numeric | Ball = NUMERIC):
        self.base = base
        self.enclosed = isinstance(base, Ball)
        self._one = self.base.literal(1, "real")

    # -- numbers -----------------------------------------------------------------------------------------------------

    def real(self, values: Array) -> Array:
        if self.enclosed:
            return balls(np.asarray(values, dtype=np.float64))
        return np.asarray(values, dtype=np.longdouble if isinstance(self.base, Extended) else np.float64)

    def _test(self, numeric: Any, ball: Any, x: Array) -> Array:
        if not self.enclosed:
            with np.errstate(all="ignore"):
                return np.asarray(numeric(x))
        flat = np.asarray(x, dtype=object).reshape(-1)
        return np.fromiter((bool(ball(v)) for v in flat), dtype=bool, count=len(flat)).reshape(np.shape(x))

    def zero(self, x: Array) -> Array:
        return self._test(lambda v: v == 0, lambda v: v.is_zero(), x)

    def kinds(self, x: Real) -> Array:
        """The kind of every entry, exact ones by their value."""
        finite = self._test(np.isfinite, lambda v: v.is_finite(), x.value)
        above = self._test(lambda v: v > 0, lambda v: v > 0, x.value)
        lower = self._test(lambda v: v == -np.inf, lambda v: bool(v == arb("-inf")), x.value)
        zero = self.zero(x.value)
        found = np.where(finite, np.where(above, POSITIVE, np.where(zero, NONNEGATIVE, FINITE)), np.where(lower, LOWER, ANY))
        if x.other is not None:
            found = np.where(self._loose(x), ANY if x.bound is None else x.bound, found)
        return found if x.kind is None else np.where(x.kind == EXACT, found, x.kind)

    def made(self, value: Array, kind: Array | None, other: Array | None = None, bound: Array | None = None) -> Real:
        """A real; what is unknown holds 1, which every function takes."""
        if bound is not None:
            bound = np.broadcast_to(bound, np.shape(value))
        if kind is None or not kind.any():
            return Real(value, None, other, bound)
        kind = np.broadcast_to(kind, np.shape(value))
        known = kind == EXACT
        second = None if other is None else np.where(known, other, self._one)
        return Real(np.where(known, value, self._one), kind.astype(np.uint8), second, bound)

    def _loose(self, x: Real) -> Array:
        """Which values depend on a number that stands for an unknown maximum."""
        if x.other is None:
            return np.zeros(x.shape, dtype=bool)
        return ~self._equal(x.value, x.other)

    def settled(self, x: Classed, inputs: Iterable[Classed]) -> Classed:
        """The results of an op: what comes out the same whatever stands for a maximum does not depend on it, other values are unknown.

        Float64 is generous here, as a difference of its numbers is decided by enclosures."""
        if not isinstance(x, Real) or x.other is None:
            return x
        loose = self._loose(x)
        if self.enclosed:
            pairs = zip(np.asarray(x.value, dtype=object).flat, np.asarray(x.other, dtype=object).flat, strict=True)
            near = np.fromiter((a is b or _close(a, b) for a, b in pairs), dtype=bool, count=x.value.size).reshape(x.shape)
        else:
            with np.errstate(all="ignore"):
                scale = max(
                    (float(np.abs(i.value[np.isfinite(i.value)]).max(initial=0)) for i in inputs if isinstance(i, Real)), default=0.0
                )
                near = np.abs(x.value - x.other) <= NEAR * np.abs(x.value).max(initial=0) + SETTLED * scale
        return self.made(x.value, np.where(loose & ~near & (_kind(x) == EXACT), np.where(self.kinds(x) <= FINITE, FINITE, ANY), _kind(x)))

    # -- nodes -------------------------------------------------------------------------------------------------------

    def node(
        self, node: Node, attrs: Sequence[tuple[Any, ...]], args: list[Classed], cells: Sequence[Cells], given: list[list[Cells]], lead: int
    ) -> Classed:
        """One node. `attrs` are its attributes on all ranks that its rows stand for; `lead` rows come first."""
        own = attrs[0]
        match node.prim:
            case "map":
                return self.map(own[0], args, own[1] if len(own) > 1 else None, lead, node.kind)
            case "const":
                return self._const(node.kind, [a[0] for a in attrs], lead)
            case "iota":
                starts, step = [a[0] for a in attrs], own[1]
                ends = (step * cells[0].first, step * cells[0].last)
                low, high = np.minimum(*ends) + min(starts), np.maximum(*ends) + max(starts)
                return Whole(*(np.broadcast_to(x, (lead, len(x))) for x in (low, high)))
            case "broadcast":
                (dims,) = own
                thin = (lead, *(len(c) if i in dims else 1 for i, c in enumerate(cells)))
                shape = (lead, *map(len, cells))
                return moved(args[0], lambda x: np.broadcast_to(x.reshape(thin), shape))
            case "transpose":
                return moved(args[0], lambda x: x.transpose((0, *(p + 1 for p in own[0]))))
            case "reshape":
                return self._reshape(node, args[0], cells, given[0], lead)
            case "select":
                return self.select(*args)
            case "contract":
                return self._contract(own[0], own[1], args, given, lead)
            case "reduce":
                return self._reduce(own[0], args[0], own[1], given[0])
            case "slice":
                return self._slice(attrs, args[0], cells, given[0])
            case "concat":
                d = own[0]
                parts = [g[d] for g in given]
                offsets = np.cumsum([0, *map(len, parts)])
                source = np.concatenate([p.of + s for p, s in zip(parts, offsets, strict=False)])
                return self._take(together(args, lambda xs: np.concatenate(xs, axis=d + 1)), d, cells[d].picked(source))
            case "pad":
                return self._pad(attrs, args[0], cells, given[0], node.kind)
            case "one_hot":
                return self._one_hot(args[0], [a[0] for a in attrs], cells[-1])
            case "gather":
                return self._gather(args[0], args[1], own[0], given[0][own[0]])
            case "rowwise":
                return self._rowwise(own, args[0], given[0][own[1]])
        raise NoValue(f"no meaning of {node.prim!r} on cells")

    def _const(self, kind: str, values: Sequence[Any], lead: int) -> Classed:
        if kind != "real":
            ints = [int(v) for v in values]
            if max(map(abs, ints)) >= FAR // 2:
                raise NoValue(f"the integer {max(ints, key=abs)}")
            return Whole(np.full(lead, min(ints)), np.full(lead, max(ints)))
        value = np.broadcast_to(self.base.literal(values[0], "real"), (lead,))
        if all(type(v) is type(values[0]) and v == values[0] for v in values):
            return Real(value)
        return self.made(value, np.full(lead, FINITE))

    # -- scalar functions --------------------------------------------------------------------------------------------

    def map(self, fn: str, args: Sequence[Classed], param: Any, lead: int, kind: str) -> Classed:
        if not args:
            return Real(np.broadcast_to(np.asarray(self.base.map(fn, [], param)), (lead,)))
        if fn == "detach":
            return args[0]
        if fn.startswith("as_"):
            return self._cast(fn, args[0])
        if fn == "uniform":
            return self._uniform(args)
        if all(isinstance(a, Whole) for a in args):
            return _integers(fn, [a for a in args if isinstance(a, Whole)], param)
        reals = [a for a in args if isinstance(a, Real)]
        if len(reals) != len(args):
            raise NoValue(f"{fn} of a real and an integer")
        known = [a.kind is None or not a.kind.any() for a in reals]
        if fn in ("lt", "le", "eq"):
            return self._compared(fn, reals, all(known))
        value = self._on_exact(fn, reals, param)
        second = _second(reals)
        other = None if second is None else self._on_exact(fn, second, param)
        if all(known) and other is None:
            return Real(value)
        unknown = np.logical_or.reduce(np.broadcast_arrays(*[_kind(a) != EXACT for a in reals]))
        kind_of, zero = self._unknown(fn, [self.kinds(a) for a in reals], reals, param)
        found = np.where(unknown, kind_of, EXACT)
        if zero is not None and (zero & unknown).any():
            found = np.where(zero, EXACT, found)
            value = np.where(zero & unknown, self.base.literal(0, "real"), value)
            other = None if other is None else np.where(zero & unknown, self.base.literal(0, "real"), other)
        return self.made(value, found, other, None if other is None else kind_of)

    def _on_exact(self, fn: str, reals: Sequence[Real], param: Any) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(self.base.map(fn, [np.asarray(a.value) for a in reals], param))

    def _compared(self, fn: str, reals: Sequence[Real], known: bool) -> Whole:
        if any(x.other is not None for x in reals):
            reals = [Real(x.value, np.where(self._loose(x), ANY, _kind(x)).astype(np.uint8)) for x in reals]
            known = False
        if known:
            hits = self._on_exact(fn, reals, None).astype(np.int64)
            return Whole(hits, hits)
        unknown = np.logical_or.reduce(np.broadcast_arrays(*[_kind(a) != EXACT for a in reals]))
        values = [Real(np.where(unknown, self._one, a.value)) for a in reals]
        hits = self._on_exact(fn, values, None).astype(np.int64)
        return Whole(np.where(unknown, 0, hits), np.where(unknown, 1, hits))

    def _unknown(self, fn: str, kinds: Sequence[Array], reals: Sequence[Real], param: Any) -> tuple[Array, Array | None]:
        """Kinds of results of which an argument is unknown, and where they are 0 all the same."""
        a = kinds[0]
        both = np.maximum(a, kinds[1]) if len(kinds) > 1 else a
        match fn:
            case "add":
                sums = np.where(both <= NONNEGATIVE, np.minimum(a, kinds[1]), np.where(both <= FINITE, FINITE, both))
                return np.where(both == ANY, ANY, sums), None
            case "sub":
                b = kinds[1]
                return np.where(b > FINITE, ANY, np.where(a <= FINITE, FINITE, a)), None
            case "neg":
                return np.where(a <= FINITE, FINITE, ANY), None
            case "mul":
                b = kinds[1]
                signs = np.where(both <= NONNEGATIVE, both, np.where(both <= FINITE, FINITE, ANY))
                if reals[0] is reals[1]:
                    signs = _power(a, 2)
                lower = ((a == LOWER) & (b == POSITIVE)) | ((b == LOWER) & (a == POSITIVE))
                zero = [self.zero(x.value) & (_kind(x) == EXACT) & ~self._loose(x) for x in reals]
                return np.where(lower, LOWER, signs), (zero[0] & (b <= FINITE)) | (zero[1] & (a <= FINITE))
            case "div":
                b = kinds[1]
                nonzero = (b == POSITIVE) | ((_kind(reals[1]) == EXACT) & (b <= FINITE) & ~self.zero(reals[1].value))
                fine = np.where(a <= FINITE, np.where(b == POSITIVE, a, FINITE), np.where((a == LOWER) & (b == POSITIVE), LOWER, ANY))
                zero_over = self.zero(reals[0].value) & (_kind(reals[0]) == EXACT) & nonzero
                return np.where(nonzero, fine, ANY), zero_over
            case "pow":
                return _power(a, param), None
            case "exp":
                return np.where(a <= FINITE, POSITIVE, np.where(a == LOWER, NONNEGATIVE, ANY)), None
            case "log":
                return np.where(a == POSITIVE, FINITE, np.where(a == NONNEGATIVE, LOWER, ANY)), None
            case "sin" | "cos" | "tanh" | "erf" | "sign" | "floor":
                return np.where(a <= FINITE, FINITE, ANY), None
            case "abs":
                return np.where(a == POSITIVE, POSITIVE, np.where(a <= FINITE, NONNEGATIVE, ANY)), None
            case "max":
                return np.where(both <= LOWER, np.minimum(a, kinds[1]), ANY), None
            case "min":
                return both, None
        return np.full(np.shape(a), ANY), None

    def _cast(self, fn: str, x: Classed) -> Classed:
        if fn == "as_real":
            if isinstance(x, Real):
                return x
            exact = x.exact
            value = self.real(np.where(exact, x.low, 1))
            if exact.all():
                return Real(value)
            kind = np.where(exact, EXACT, np.where(x.low > 0, POSITIVE, np.where(x.low >= 0, NONNEGATIVE, FINITE)))
            return self.made(value, np.where(np.maximum(abs(x.low), abs(x.high)) >= FAR, ANY, kind))
        if isinstance(x, Real) and x.other is not None:
            x = Real(x.value, np.where(self._loose(x), ANY, _kind(x)).astype(np.uint8))
        if isinstance(x, Whole):
            if fn == "as_int":
                return x
            hit, miss = (x.low > 0) | (x.high < 0), (x.low == 0) & (x.high == 0)
            return Whole(hit.astype(np.int64), (~miss).astype(np.int64))
        unknown = _kind(x) != EXACT
        value = np.asarray(self.base.map(fn, [np.where(unknown, self._one, x.value)], None))
        if fn == "as_bool":
            return Whole(np.where(unknown, 0, value.astype(np.int64)), np.where(unknown, 1, value.astype(np.int64)))
        near = self._test(lambda v: abs(v) < FAR / 4, lambda v: abs(v) < FAR // 4, x.value)
        plain = np.where(near & ~unknown, value, 0).astype(np.int64)
        return Whole(np.where(near & ~unknown, plain, -FAR), np.where(near & ~unknown, plain, FAR))

    def _uniform(self, args: Sequence[Classed]) -> Real:
        wholes = [a for a in args if isinstance(a, Whole)]
        exact = np.logical_and.reduce(np.broadcast_arrays(*[a.exact for a in wholes]))
        low = np.broadcast_arrays(*[np.where(exact, a.low, 0) for a in wholes])
        value = self.base.map("uniform", [balls(x) if self.enclosed else x for x in low], None)
        return self.made(np.asarray(value), np.where(exact, EXACT, POSITIVE))

    def select(self, c: Classed, a: Classed, b: Classed) -> Classed:
        assert isinstance(c, Whole)
        yes, no = c.low > 0, c.high == 0
        if isinstance(a, Whole) and isinstance(b, Whole):
            low = np.where(yes, a.low, np.where(no, b.low, np.minimum(a.low, b.low)))
            return Whole(low, np.where(yes, a.high, np.where(no, b.high, np.maximum(a.high, b.high))))
        assert isinstance(a, Real)
        assert isinstance(b, Real)
        value = np.where(yes, a.value, b.value)
        other = None if a.other is None and b.other is None else np.where(yes, _other(a), _other(b))
        bound = (
            None if other is None else np.where(yes, self.kinds(a), np.where(no, self.kinds(b), np.maximum(self.kinds(a), self.kinds(b))))
        )
        decided = yes | no
        if decided.all() and a.kind is None and b.kind is None:
            return Real(value, None, other, bound)
        kind: Array = np.where(yes, _kind(a), _kind(b))
        if not decided.all():
            equal = (_kind(a) == EXACT) & (_kind(b) == EXACT) & ~self._loose(a) & ~self._loose(b) & self._equal(a.value, b.value)
            kind = np.where(decided | equal, kind, np.maximum(self.kinds(a), self.kinds(b)))
        return self.made(value, kind, other, bound)

    def _equal(self, a: Array, b: Array) -> Array:
        """Which values are certainly equal."""
        if not self.enclosed:
            return np.asarray(a == b)
        pairs = zip(np.asarray(a, dtype=object).flat, np.asarray(b, dtype=object).flat, strict=True)
        same = (x is y or bool(x.is_exact() and y.is_exact() and x == y) for x, y in pairs)
        return np.fromiter(same, dtype=bool, count=np.size(a)).reshape(np.shape(a))

    # -- sums --------------------------------------------------------------------------------------------------------

    def _contract(
        self, terms: Sequence[Sequence[int]], target: Sequence[int], args: list[Classed], given: list[list[Cells]], lead: int
    ) -> Classed:
        counts: dict[int, Array] = {}
        for term, cells in zip(terms, given, strict=True):
            for i, c in zip(term, cells, strict=True):
                if i not in target and not c.whole:
                    counts[i] = c.count
        if all(isinstance(a, Whole) for a in args):
            return self._count(terms, target, [a for a in args if isinstance(a, Whole)], counts)
        reals = [a for a in args if isinstance(a, Real)]
        zero = self.base.literal(0, "real")
        values = [np.where(_kind(x) == EXACT, x.value, zero) if x.kind is not None else x.value for x in reals]
        value = self._weighted(terms, target, values, counts)
        other = None
        if (second := _second(reals)) is not None:
            others = [np.where(_kind(x) == EXACT, x.value, zero) if x.kind is not None else x.value for x in second]
            other = self._weighted(terms, target, others, counts)
        if all(x.kind is None for x in reals) and other is None:
            return Real(value)
        unknown, kind = self._summed_kind(terms, target, reals, values)
        return self.made(value, np.where(unknown, kind, EXACT), other, None if other is None else kind)

    def _weighted(
        self, terms: Sequence[Sequence[int]], target: Sequence[int], values: Sequence[Array], counts: Mapping[int, Array]
    ) -> Array:
        """A contraction in which every cell counts as often as it has positions."""
        weighted: list[Array] = list(values)
        for i, n in counts.items():
            at = next(k for k, term in enumerate(terms) if i in term)
            shape = [1] * weighted[at].ndim
            shape[list(terms[at]).index(i) + 1] = -1
            weighted[at] = weighted[at] * self.real(n).reshape(shape)
        with np.errstate(all="ignore"):
            return self.base.contract(terms, target, weighted, 1)

    def _summed_kind(
        self, terms: Sequence[Sequence[int]], target: Sequence[int], reals: Sequence[Real], values: Sequence[Array]
    ) -> tuple[Array, Array]:
        """Which sums of products have an unknown term, and what is certain of them."""

        def some(factors: Sequence[Array]) -> Array:
            return NUMERIC.contract(terms, target, [f.astype(np.float64) for f in factors], 1)

        kinds = [self.kinds(x) for x in reals]
        if len(reals) == 2 and reals[0] is reals[1] and list(terms[0]) == list(terms[1]):  # squares
            kinds = [_power(k, 2) for k in kinds]
        unknown = [_kind(x) != EXACT for x in reals]
        there = [u | ~self.zero(v) | self._loose(x) for u, v, x in zip(unknown, values, reals, strict=True)]  # not certainly 0
        some_unknown = some(there) - some([t & ~u for t, u in zip(there, unknown, strict=True)]) > 0.5
        everything = [np.ones_like(t) for t in there]
        wild = np.zeros(np.shape(some_unknown), dtype=bool)  # 0 · ∞ is no number
        for k, kind in enumerate(kinds):
            if (kind > FINITE).any():
                wild |= some([kind > FINITE if j == k else everything[j] for j in range(len(kinds))]) > 0.5
        infinite_only = [(k <= FINITE) | (~u) for k, u in zip(kinds, unknown, strict=True)]
        any_unknown = some_unknown
        if not all(x.all() for x in infinite_only):
            any_unknown = some_unknown | (
                some(everything) - some([np.where(i, 1, 0) for i in infinite_only]) > 0.5
            )  # an unknown that may be infinite, whatever it is multiplied by
        signed = some(there) - some([t & (k <= NONNEGATIVE) for t, k in zip(there, kinds, strict=True)]) > 0.5
        positive = some([k == POSITIVE for k in kinds]) > 0.5
        kind = np.where(wild, ANY, np.where(signed, FINITE, np.where(positive, POSITIVE, NONNEGATIVE)))
        return any_unknown, kind

    def _count(self, terms: Sequence[Sequence[int]], target: Sequence[int], args: Sequence[Whole], counts: Mapping[int, Array]) -> Whole:
        """Sums of integers."""
        if len(args) > 1 and not all(a.exact.all() or (a.low >= 0).all() for a in args):
            raise NoValue("a product of integers of any sign under a sum")
        if len(args) > 1 and not all(a.exact.all() for a in args) and any((a.low < 0).any() for a in args):
            raise NoValue("a product of integers of any sign under a sum")
        found = []
        for ends in ([a.low for a in args], [a.high for a in args]):
            operands = list(ends)
            for i, n in counts.items():
                at = next(k for k, term in enumerate(terms) if i in term)
                shape = [1] * operands[at].ndim
                shape[list(terms[at]).index(i) + 1] = -1
                operands[at] = operands[at] * n.reshape(shape)
            exact = NUMERIC.contract(terms, target, operands, 1)
            far = NUMERIC.contract(terms, target, [abs(o).astype(np.float64) for o in operands], 1)
            if np.max(far, initial=0) >= FAR / 4:
                raise NoValue("integers too large to add up")
            found.append(exact)
        return Whole(*found)

    def _reduce(self, fn: str, x: Classed, dims: tuple[int, ...], cells: Sequence[Cells]) -> Classed:
        axes = tuple(d + 1 for d in dims)
        if isinstance(x, Whole):
            if fn == "prod":
                if (
                    not all(cells[d].whole for d in dims)
                    or not x.exact.all()
                    or np.prod(abs(x.low).astype(float), axis=axes).max() >= FAR / 4
                ):
                    raise NoValue("a product of integers")
                made = np.prod(x.low, axis=axes)
                return Whole(made, made)
            f = np.max if fn == "max" else np.min
            return Whole(f(x.low, axis=axes), f(x.high, axis=axes))
        value = x.value
        if fn == "prod":
            for d in dims:
                if not cells[d].whole:
                    if self.enclosed:
                        raise NoValue("a product over a class")
                    shape = [1] * value.ndim
                    shape[d + 1] = -1
                    value = value ** cells[d].count.reshape(shape)
        with np.errstate(all="ignore"):
            made = self.base.reduce(fn, np.asarray(value), axes)
        if x.other is not None:
            raise NoValue(f"{fn} of what depends on an unknown maximum")
        if x.kind is None:
            return Real(made)
        unknown = (x.kind != EXACT).any(axis=axes)
        kinds = self.kinds(x)
        low, high = kinds.min(axis=axes), kinds.max(axis=axes)
        if fn == "max":
            return self._unknown_maximum(x, axes, made, unknown, np.where(high <= LOWER, low, ANY))
        kind = high if fn == "min" else np.where(high <= POSITIVE, POSITIVE, np.where(high <= FINITE, FINITE, ANY))
        return self.made(made, np.where(unknown, kind, EXACT))

    def _unknown_maximum(self, x: Real, axes: tuple[int, ...], made: Array, unknown: Array, kind: Array) -> Real:
        """A maximum of which an entry is unknown: two numbers stand for it while the op runs, in case it only subtracts it."""
        finite = unknown & (kind <= FINITE)
        floor: Any = -np.inf if not self.enclosed else arb("-inf")
        known = np.where(_kind(x) == EXACT, x.value, floor)
        most = self.base.reduce("max", np.asarray(known), axes)
        usable = self._test(np.isfinite, lambda v: v.is_finite(), most)
        base = np.where(usable, most, self.base.literal(0, "real"))
        first, second = (np.where(finite, base + self.base.literal(s, "real"), made) for s in SHIFTS)
        return self.made(first, np.where(unknown & ~finite, kind, EXACT), second, kind)

    # -- positions ---------------------------------------------------------------------------------------------------

    def _take(self, x: Classed, d: int, index: Array) -> Classed:
        """Entries along a dimension; where `index` is −1 they differ within a cell."""
        plain = np.where(index < 0, 0, index)
        made = moved(x, lambda v: np.take(v, plain, axis=d + 1))
        return made if (index >= 0).all() else self._blurred(made, x, d, index < 0)

    def _blurred(self, made: Classed, x: Classed, d: int, where: Array) -> Classed:
        """What is one of several entries along a dimension is in their hull."""
        shape = [1] * len(made.shape)
        shape[d + 1] = -1
        here = np.broadcast_to(where.reshape(shape), made.shape)
        if isinstance(made, Whole):
            assert isinstance(x, Whole)
            low, high = x.low.min(axis=d + 1, keepdims=True), x.high.max(axis=d + 1, keepdims=True)
            return Whole(np.where(here, low, made.low), np.where(here, high, made.high))
        assert isinstance(x, Real)
        worst = self.kinds(x).max(axis=d + 1, keepdims=True)
        return self.made(made.value, np.where(here, np.broadcast_to(worst, made.shape), _kind(made)), made.other, made.bound)

    def _slice(self, attrs: Sequence[tuple[Any, ...]], x: Classed, cells: Sequence[Cells], given: Sequence[Cells]) -> Classed:
        d, _, step = attrs[0]
        index: Array | None = None
        starts = dict.fromkeys(a[1] for a in attrs)
        if len(starts) > 1 and len(starts) * cells[d].size > LISTED * 16:
            raise NoCells(f"{len(starts)} slices of {cells[d].size} positions")
        for start in starts:
            at = start + step * np.arange(cells[d].size)
            found = cells[d].picked(given[d].of[at])
            index = found if index is None else np.where(index == found, index, -1)
        assert index is not None
        return self._take(x, d, index)

    def _pad(self, attrs: Sequence[tuple[Any, ...]], x: Classed, cells: Sequence[Cells], given: Sequence[Cells], kind: str) -> Classed:
        d, low, _, value = attrs[0]
        if any(a != attrs[0] for a in attrs):
            raise NoValue("padding that differs between ranks")
        n = len(given[d])
        source = np.full(cells[d].size, n)
        source[low : low + given[d].size] = given[d].of
        shape = list(x.shape)
        shape[d + 1] = 1
        if isinstance(x, Real):
            edge: Classed = Real(np.broadcast_to(self.base.literal(value, kind), tuple(shape)))
        else:
            edge = Whole(np.full(shape, int(value)), np.full(shape, int(value)))
        return self._take(together([x, edge], lambda xs: np.concatenate(xs, axis=d + 1)), d, cells[d].picked(source))

    def _reshape(self, node: Node, x: Classed, cells: Sequence[Cells], given: Sequence[Cells], lead: int) -> Classed:
        """A view whose axes are not aligned: position by position."""
        shape = (lead, *map(len, cells))
        if not cells or not given or (all(c.whole for c in cells) and all(c.whole for c in given)):
            return moved(x, lambda v: v.reshape(shape))
        index = product(list(cells)).picked(product(list(given)).of)
        flat = moved(x, lambda v: v.reshape(lead, -1))
        return moved(self._take(flat, 0, index), lambda v: v.reshape(shape))

    def aligned(self, x: Classed, cells: Sequence[Cells], lead: int) -> Classed:
        """A view of axes that are aligned."""
        shape = (lead, *map(len, cells))
        return moved(x, lambda v: v.reshape(shape))

    def _one_hot(self, ids: Classed, starts: Sequence[int], depth: Cells) -> Real:
        assert isinstance(ids, Whole)
        first, last = min(starts) + depth.first, max(starts) + depth.last
        low, high = ids.low[..., None], ids.high[..., None]
        outside = (high < first) | (low > last)
        hit = np.zeros(outside.shape, dtype=bool)
        if len(set(starts)) == 1:
            inside = ids.exact & (ids.low >= starts[0]) & (ids.low < starts[0] + depth.size)
            cell = np.where(inside, depth.of[np.where(inside, ids.low - starts[0], 0)] if depth.size else 0, -1)
            mine = cell[..., None] == np.arange(len(depth))
            outside |= inside[..., None] & ~mine
            hit = mine & (depth.count == 1)
        return self.made(self.real(hit.astype(np.float64)), np.where(outside | hit, EXACT, NONNEGATIVE))

    def _gather(self, x: Classed, ids: Classed, dim: int, cells: Cells) -> Classed:
        assert isinstance(ids, Whole)
        size = cells.size
        out = (ids.high < 0) | (ids.low >= size)
        low, high = np.clip(ids.low, 0, size - 1), np.clip(ids.high, 0, size - 1)
        cell, other = cells.of[low], cells.of[high]
        known = out | ((ids.low >= 0) & (ids.high < size) & (cell == other) & (ids.exact | (len(cells) == 1)))
        found = moved(x, lambda v: np.take_along_axis(v, cell, axis=dim + 1))
        if isinstance(found, Whole):
            assert isinstance(x, Whole)
            least, most = np.minimum(x.low.min(axis=dim + 1, keepdims=True), 0), np.maximum(x.high.max(axis=dim + 1, keepdims=True), 0)
            low = np.where(out, 0, np.where(known, found.low, least))
            return Whole(low, np.where(out, 0, np.where(known, found.high, most)))
        assert isinstance(x, Real)
        value: Array = np.where(out, self.base.literal(0, "real"), found.value)
        other = None if found.other is None else np.where(out, self.base.literal(0, "real"), found.other)
        if known.all() and found.kind is None:
            return Real(value, None, other, found.bound)
        worst = np.maximum(self.kinds(x).max(axis=dim + 1, keepdims=True), NONNEGATIVE)
        return self.made(
            value, np.where(out, EXACT, np.where(known, _kind(found), np.broadcast_to(worst, value.shape))), other, found.bound
        )

    def _rowwise(self, attrs: tuple[Any, ...], x: Classed, cells: Cells) -> Classed:
        fn, d, descending = attrs
        if isinstance(x, Real) and x.other is not None:
            raise NoValue(f"{fn} of what depends on an unknown maximum")
        if fn == "cumsum" and not cells.whole:
            return self._running(x, d, cells)
        exact = np.asarray(x.exact if isinstance(x, Whole) else _kind(x) == EXACT)
        known = exact.all(axis=d + 1, keepdims=True) if cells.whole else np.zeros_like(exact.any(axis=d + 1, keepdims=True))
        if fn != "cumsum" and not cells.whole:
            raise NoValue(f"{fn} of a row of {cells.size} positions in classes")
        plain = x.low if isinstance(x, Whole) else x.value
        safe = np.where(known, plain, np.zeros_like(plain) if isinstance(x, Whole) else self._one)
        try:
            made = np.asarray(self.base.rowwise(fn, balls(safe) if self.enclosed and isinstance(x, Whole) else safe, d + 1, descending))
        except Undecided as error:
            raise NoValue("a tie in a row that is sorted") from error
        if fn in ("argmax", "argmin"):
            known = known.squeeze(axis=d + 1)
        known = np.broadcast_to(known, made.shape)
        if fn in ("argsort", "argmax", "argmin"):
            ints = made.astype(np.int64)
            return Whole(np.where(known, ints, 0), np.where(known, ints, cells.size - 1))
        if isinstance(x, Whole):
            ints = made.astype(np.int64)
            return Whole(np.where(known, ints, -FAR), np.where(known, ints, FAR))
        worst = self.kinds(x).max(axis=d + 1, keepdims=True)
        worst = np.where(worst <= FINITE, FINITE, ANY)
        return self.made(made, np.where(known, EXACT, np.broadcast_to(worst, made.shape)))

    def _running(self, x: Classed, d: int, cells: Cells) -> Classed:
        """A running sum over classes: known at the end of a class, and inside of it if nothing is added there."""
        if not cells.ordered:
            raise NoValue("a running sum over classes that are no ranges")
        shape = [1] * len(x.shape)
        shape[d + 1] = -1
        count = cells.count.reshape(shape)
        if isinstance(x, Whole):
            ends = [np.cumsum(e * count, axis=d + 1) for e in (x.low, x.high)]
            one = [np.cumsum(e * count, axis=d + 1) - e * (count - 1) for e in (x.low, x.high)]
            return Whole(np.minimum(ends[0], one[0]), np.maximum(ends[1], one[1]))
        kinds = self.kinds(x)
        still = (count == 1) | (self.zero(x.value) & (_kind(x) == EXACT))
        unknown = np.maximum.accumulate((_kind(x) != EXACT), axis=d + 1) | ~still
        value = self.base.rowwise(
            "cumsum", np.where(_kind(x) == EXACT, x.value, self._one) * self.real(cells.count).reshape(shape), d + 1, False
        )
        worst = np.where(np.maximum.accumulate(kinds, axis=d + 1) <= FINITE, FINITE, ANY)
        return self.made(np.asarray(value), np.where(unknown, worst, EXACT))


def _close(a: Any, b: Any) -> bool:
    """Whether two enclosures are those of one number, as far as they tell."""
    return bool(a.overlaps(b)) and bool((a - b).abs_upper() <= arb(SETTLED) * (abs(a).abs_upper() + arb(SETTLED)))


def _power(a: Array, p: Any) -> Array:
    if p == 0:
        return np.full(np.shape(a), ANY)
    if p == int(p):
        if p < 0:
            return np.where(a == POSITIVE, POSITIVE, ANY)
        if int(p) % 2 == 0:
            return np.where(a == POSITIVE, POSITIVE, np.where(a <= FINITE, NONNEGATIVE, ANY))
        return np.where(a <= FINITE, a, ANY)
    return np.where(a == POSITIVE, POSITIVE, np.where((a == NONNEGATIVE) & (p > 0), NONNEGATIVE, ANY))


def _integers(fn: str, args: Sequence[Whole], param: Any) -> Whole:
    """Scalar functions of integers and booleans on intervals."""
    a = args[0]
    b = args[1] if len(args) > 1 else a
    match fn:
        case "add":
            return _near(a.low + b.low, a.high + b.high)
        case "sub":
            return _near(a.low - b.high, a.high - b.low)
        case "neg":
            return Whole(-a.high, -a.low)
        case "mul":
            big = np.maximum(abs(a.low), abs(a.high)).astype(float) * np.maximum(abs(b.low), abs(b.high)).astype(float) >= FAR / 4
            ends = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
            low, high = np.minimum.reduce(ends), np.maximum.reduce(ends)
            return Whole(np.where(big, -FAR, low), np.where(big, FAR, high))
        case "max" | "min":
            f = np.maximum if fn == "max" else np.minimum
            return Whole(f(a.low, b.low), f(a.high, b.high))
        case "abs":
            high = np.maximum(abs(a.low), abs(a.high))
            return Whole(np.where((a.low <= 0) & (a.high >= 0), 0, np.minimum(abs(a.low), abs(a.high))), high)
        case "lt":
            return Whole((a.high < b.low).astype(np.int64), (a.low < b.high).astype(np.int64))
        case "le":
            return Whole((a.high <= b.low).astype(np.int64), (a.low <= b.high).astype(np.int64))
        case "eq":
            apart = (a.high < b.low) | (b.high < a.low)
            same = a.exact & b.exact & (a.low == b.low)
            return Whole(same.astype(np.int64), (~apart).astype(np.int64))
        case "and":
            return Whole(a.low & b.low, a.high & b.high)
        case "or":
            return Whole(a.low | b.low, a.high | b.high)
        case "not":
            return Whole(1 - a.high, 1 - a.low)
        case "floordiv" | "mod":
            if not b.exact.all() or (b.low <= 0).any():
                raise NoValue(f"{fn} by something that may not be positive")
            low, high = a.low // b.low, a.high // b.low
            if fn == "floordiv":
                return Whole(low, high)
            same = low == high
            return Whole(np.where(same, a.low % b.low, 0), np.where(same, a.high % b.low, b.low - 1))
        case "pow":
            if not a.exact.all() or not isinstance(param, int) or param < 0 or (abs(a.low).astype(float) ** param >= FAR / 4).any():
                raise NoValue("a power of integers")
            made = a.low**param
            return Whole(made, made)
    raise NoValue(f"{fn} of integers")


def _near(low: Array, high: Array) -> Whole:
    """A sum of integers; one that is too far from 0 may be anything."""
    far = (low <= -FAR // 2) | (high >= FAR // 2)
    return Whole(np.where(far, -FAR, low), np.where(far, FAR, high))
