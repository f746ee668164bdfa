"""Values on cells: what all positions of a cell have, exactly, or "unknown".

A real is a number that every position of its cell has, or unknown: then its kind says what is certain of all of them (positive,
nonnegative, finite, finite or −∞, nothing). An integer or boolean is an interval that holds all of them (`domains.intervals`). Sums
count every cell as often as it has positions. So what is computed is what the program computes at its own sizes, or nothing: an
unknown value is never compared. 0 times something finite is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
from flint import arb

from trainverify.axes.cells import LISTED, Cells, NoCells, product
from trainverify.domains.arrays import Array
from trainverify.domains.ball import Ball, balls
from trainverify.domains.intervals import FAR, NoValue, Whole, integers, reduced, running, total, within
from trainverify.domains.numeric import NUMERIC, Extended, Numeric
from trainverify.domains.shifts import TIMES, Tie, Tied, applied, one_tie, spread, summed
from trainverify.primitives.node import Node
from trainverify.primitives.scalars import Undecided

__all__ = ["EXACT", "Classed", "ClassedDomain", "NoValue", "Real", "Whole", "moved", "together"]

EXACT, POSITIVE, NONNEGATIVE, FINITE, LOWER, ANY = range(6)  # kinds of a real; each but the first includes the ones before it


@dataclass(frozen=True)
class Real:
    """Numbers. `tie` is there only while an op runs: how those that are exact depend on an unknown maximum."""

    value: Array
    kind: Array | None = None  # None: all exact
    tie: Tie | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(np.shape(self.value))


Classed = Real | Whole


def moved(x: Classed, f: Any) -> Classed:
    """Entries put elsewhere."""
    if isinstance(x, Real):
        assert x.tie is None
        return Real(f(x.value), None if x.kind is None else f(x.kind))
    return Whole(f(x.low), f(x.high))


def together(parts: Sequence[Classed], join: Any) -> Classed:
    """Several values put into one array."""
    if isinstance(parts[0], Real):
        reals = [p for p in parts if isinstance(p, Real)]
        assert all(p.tie is None for p in reals)
        kinds = join([_kind(p) for p in reals]) if any(p.kind is not None for p in reals) else None
        return Real(join([p.value for p in reals]), kinds)
    wholes = [p for p in parts if isinstance(p, Whole)]
    return Whole(join([p.low for p in wholes]), join([p.high for p in wholes]))


def _kind(x: Real) -> Array:
    return np.zeros(x.shape, dtype=np.uint8) if x.kind is None else x.kind


class ClassedDomain:
    """Primitives on cells; reals are computed by `base`, float64 or enclosures."""

    def __init__(self, base: Numeric | Ball = NUMERIC):
        self.base = base
        self.enclosed = isinstance(base, Ball)
        self._one = self.base.literal(1, "real")
        self._zero = self.base.literal(0, "real")
        self._lower = self.base.literal(-math.inf, "real")
        self._maxima = count()

    # -- numbers -----------------------------------------------------------------------------------------------------

    def real(self, values: Array) -> Array:
        if self.enclosed:
            flat = [arb(v) for v in np.asarray(values).reshape(-1).tolist()]
            made = np.empty(len(flat), dtype=object)
            made[:] = flat
            return made.reshape(np.shape(values))
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
        lower = self._infinite(x.value)
        zero = self.zero(x.value)
        found = np.where(finite, np.where(above, POSITIVE, np.where(zero, NONNEGATIVE, FINITE)), np.where(lower, LOWER, ANY))
        if x.tie is not None:  # v·exp(m) has the sign of v
            found = np.where(x.tie.add != 0, np.maximum(found, FINITE), found)
        return found if x.kind is None else np.where(x.kind == EXACT, found, x.kind)

    def _infinite(self, x: Array) -> Array:
        """Which values are −∞."""
        return self._test(lambda v: v == -np.inf, lambda v: bool(v == arb("-inf")), x)

    def _certainly_zero(self, x: Real) -> Array:
        found = self.zero(x.value) & (_kind(x) == EXACT)
        return found if x.tie is None else found & (x.tie.add == 0)

    def made(self, value: Array, kind: Array | None, tie: Tie | None = None) -> Real:
        """A real; what is unknown holds 1, which every function takes."""
        if kind is None or not kind.any():
            return Real(value, None, tie)
        kind = np.broadcast_to(kind, np.shape(value))
        return Real(np.where(kind == EXACT, value, self._one), kind.astype(np.uint8), tie)

    def settled(self, x: Classed) -> Classed:
        """What depends on an unknown maximum is unknown."""
        if not isinstance(x, Real) or x.tie is None:
            return x
        depends = ((x.tie.add != 0) | (x.tie.power != 0)) & ~self._certainly_zero(x) & (_kind(x) == EXACT)
        return self.made(x.value, np.where(depends, self.kinds(x), _kind(x)))

    def _free(self, x: Real) -> Real:
        made = self.settled(x)
        assert isinstance(made, Real)
        return made

    # -- nodes -------------------------------------------------------------------------------------------------------

    def node(
        self, node: Node, attrs: Sequence[tuple[Any, ...]], args: list[Classed], cells: Sequence[Cells], given: list[list[Cells]], lead: int
    ) -> Classed:
        """One node. `attrs` are its attributes on all ranks that its rows stand for; `lead` rows come first."""
        own = attrs[0]
        if node.prim not in _KEEPS:
            args = [self.settled(a) for a in args]
        match node.prim:
            case "map":
                return self.map(own[0], args, own[1] if len(own) > 1 else None, lead)
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
                return _put(args[0], dims, len(cells), lambda x: np.broadcast_to(x.reshape(thin), shape))
            case "transpose":
                return moved(args[0], lambda x: x.transpose((0, *(p + 1 for p in own[0]))))
            case "reshape":
                return self._reshape(args[0], cells, given[0], lead)
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
        finite = all(math.isfinite(v) for v in values)
        certain = ANY if not finite else POSITIVE if min(values) > 0 else NONNEGATIVE if min(values) >= 0 else FINITE
        return self.made(value, np.full(lead, certain))

    # -- scalar functions --------------------------------------------------------------------------------------------

    def map(self, fn: str, args: Sequence[Classed], param: Any, lead: int) -> Classed:
        if not args:
            return Real(np.broadcast_to(np.asarray(self.base.map(fn, [], param)), (lead,)))
        if fn == "detach":
            return args[0]
        if fn.startswith("as_"):
            return self._cast(fn, args[0])
        if fn == "uniform":
            return self._uniform(args)
        if all(isinstance(a, Whole) for a in args):
            return integers(fn, [a for a in args if isinstance(a, Whole)], param)
        reals = [a for a in args if isinstance(a, Real)]
        if len(reals) != len(args):
            raise NoValue(f"{fn} of a real and an integer")
        if fn in ("lt", "le", "eq"):
            return self._compared(fn, [self._free(x) for x in reals])
        same = len(reals) == 2 and reals[0] is reals[1]
        if one_tie([x.tie for x in reals]) is None:
            reals = [self._free(x) for x in reals]
        value = self._on_exact(fn, reals, param)
        unknown = np.logical_or.reduce(np.broadcast_arrays(*[_kind(a) != EXACT for a in reals]))
        tie, lost = self._ties(fn, reals, param)
        if lost is not None:
            unknown = unknown | lost
        if not unknown.any():
            return Real(value, None, tie)
        kind_of, certain, number = self._unknown(fn, [self.kinds(a) for a in reals], reals, param, same)
        found = np.where(unknown, kind_of, EXACT)
        if certain is not None and (here := certain & unknown).any():
            found = np.where(here, EXACT, found)
            value = np.where(here, number, value)
            if tie is not None:
                tie = tie.like(np.where(here, 0, tie.add), np.where(here, 0, tie.power))
        return self.made(value, found, tie)

    def _ties(self, fn: str, reals: Sequence[Real], param: Any) -> tuple[Tie | None, Array | None]:
        """How results depend on an unknown maximum, and where that is not known."""
        tie = one_tie([x.tie for x in reals])
        if tie is None:
            return None, None
        add, power, lost = applied(fn, [self._tied(x) for x in reals], param)
        return tie.like(np.where(lost, 0, add), np.where(lost, 0, power)), lost

    def _tied(self, x: Real) -> Tied:
        none: Array = np.zeros(x.shape, dtype=np.int64)
        add, power = (none, none) if x.tie is None else (x.tie.add, x.tie.power)
        small = self._test(
            lambda v: (v == np.rint(v)) & (abs(v) <= TIMES), lambda v: v.is_exact() and v.is_integer() and abs(v) <= TIMES, x.value
        ) & (_kind(x) == EXACT)
        times: Array = np.where(small, x.value, self._zero) if small.any() else none
        return Tied(add, power, self._certainly_zero(x), times.astype(np.float64).astype(np.int64))

    def _on_exact(self, fn: str, reals: Sequence[Real], param: Any) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(self.base.map(fn, [np.asarray(a.value) for a in reals], param))

    def _compared(self, fn: str, reals: Sequence[Real]) -> Whole:
        unknown = np.logical_or.reduce(np.broadcast_arrays(*[_kind(a) != EXACT for a in reals]))
        values = [Real(np.where(unknown, self._one, a.value)) for a in reals] if unknown.any() else reals
        hits = self._on_exact(fn, values, None).astype(np.int64)
        return Whole(np.where(unknown, 0, hits), np.where(unknown, 1, hits))

    def _unknown(
        self, fn: str, kinds: Sequence[Array], reals: Sequence[Real], param: Any, same: bool
    ) -> tuple[Array, Array | None, Array | None]:
        """Kinds of results of which an argument is unknown, and where they are a certain number all the same. `same`: x and x."""
        a = kinds[0]
        both = np.maximum(a, kinds[1]) if len(kinds) > 1 else a
        match fn:
            case "add":
                sums = np.where(both <= NONNEGATIVE, np.minimum(a, kinds[1]), np.where(both <= FINITE, FINITE, both))
                minus = [self._infinite(x.value) & (_kind(x) == EXACT) for x in reals]  # −∞ and something finite
                return np.where(both == ANY, ANY, sums), (minus[0] | minus[1]) & (both <= LOWER), self._lower
            case "sub":
                b = kinds[1]
                minus = [self._infinite(reals[0].value) & (_kind(reals[0]) == EXACT)]
                return np.where(b > FINITE, ANY, np.where(a <= FINITE, FINITE, a)), minus[0] & (b <= FINITE), self._lower
            case "neg":
                return np.where(a <= FINITE, FINITE, ANY), None, None
            case "mul":
                b = kinds[1]
                signs = np.where(both <= NONNEGATIVE, both, np.where(both <= FINITE, FINITE, ANY))
                if same:
                    signs = _power(a, 2)
                lower = ((a == LOWER) & (b == POSITIVE)) | ((b == LOWER) & (a == POSITIVE))
                zero = [self._certainly_zero(x) for x in reals]
                return np.where(lower, LOWER, signs), (zero[0] & (b <= FINITE)) | (zero[1] & (a <= FINITE)), self._zero
            case "div":
                b = kinds[1]
                nonzero = (b == POSITIVE) | ((b <= FINITE) & self._nonzero(reals[1]))
                fine = np.where(a <= FINITE, np.where(b == POSITIVE, a, FINITE), np.where((a == LOWER) & (b == POSITIVE), LOWER, ANY))
                return np.where(nonzero, fine, ANY), self._certainly_zero(reals[0]) & nonzero, self._zero
            case "pow":
                return _power(a, param), None, None
            case "exp":
                return np.where(a <= FINITE, POSITIVE, np.where(a == LOWER, NONNEGATIVE, ANY)), None, None
            case "log":
                return np.where(a == POSITIVE, FINITE, np.where(a == NONNEGATIVE, LOWER, ANY)), None, None
            case "sin" | "cos" | "tanh" | "erf" | "sign" | "floor":
                return np.where(a <= FINITE, FINITE, ANY), None, None
            case "abs":
                return np.where(a == POSITIVE, POSITIVE, np.where(a <= FINITE, NONNEGATIVE, ANY)), None, None
            case "max":
                return np.where(both <= LOWER, np.minimum(a, kinds[1]), ANY), None, None
            case "min":
                return both, None, None
        return np.full(np.shape(a), ANY), None, None

    def _nonzero(self, x: Real) -> Array:
        found = self._test(lambda v: v != 0, lambda v: not v.contains(0), x.value) & (_kind(x) == EXACT)
        return found if x.tie is None else found & (x.tie.add == 0)

    def _cast(self, fn: str, x: Classed) -> Classed:
        if fn == "as_real":
            if isinstance(x, Real):
                return x
            exact = x.exact
            value = self.real(np.where(exact, x.low, 1))
            if exact.all():
                return Real(value)
            kind = np.where(exact, EXACT, np.where(x.low > 0, POSITIVE, np.where(x.low >= 0, NONNEGATIVE, FINITE)))
            return self.made(value, np.where(exact | x.bounded, kind, ANY))
        x = self.settled(x)
        if isinstance(x, Whole):
            if fn == "as_int":
                return x
            hit, miss = (x.low > 0) | (x.high < 0), (x.low == 0) & (x.high == 0)
            return Whole(hit.astype(np.int64), (~miss).astype(np.int64))
        unknown = _kind(x) != EXACT
        value = np.asarray(self.base.map(fn, [np.where(unknown, self._one, x.value)], None))
        if fn == "as_bool":
            return Whole(np.where(unknown, 0, value.astype(np.int64)), np.where(unknown, 1, value.astype(np.int64)))
        near = self._test(lambda v: abs(v) < FAR / 8, lambda v: abs(v) < FAR // 8, x.value) & ~unknown
        plain = np.where(near, value, 0).astype(np.int64)
        return within(plain, plain, near)

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
        tie = one_tie([a.tie, b.tie])
        if tie is None:
            a, b = self._free(a), self._free(b)
        value = np.where(yes, a.value, b.value)
        decided = yes | no
        kind: Array = np.where(yes, _kind(a), _kind(b))
        if not decided.all():
            plain = [np.ones(x.shape, dtype=bool) if x.tie is None else (x.tie.add == 0) & (x.tie.power == 0) for x in (a, b)]
            equal = (_kind(a) == EXACT) & (_kind(b) == EXACT) & plain[0] & plain[1] & self._equal(a.value, b.value)
            kind = np.where(decided | equal, kind, np.maximum(self.kinds(a), self.kinds(b)))
        if tie is not None:
            left, right = self._tied(a), self._tied(b)
            add, power = (np.where(yes, x, np.where(no, y, 0)) for x, y in ((left.add, right.add), (left.power, right.power)))
            tie = tie.like(add, power)
        return self.made(value, kind, tie)

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
            return total(terms, target, [a for a in args if isinstance(a, Whole)], counts)
        reals = [a for a in args if isinstance(a, Real)]
        same = len(reals) == 2 and reals[0] is reals[1] and list(terms[0]) == list(terms[1])
        reals = self._one_tied(terms, target, reals)
        values = [np.where(_kind(x) == EXACT, x.value, self._zero) if x.kind is not None else x.value for x in reals]
        value = self._weighted(terms, target, values, counts)
        tie: Tie | None = None
        lost: Array | None = None
        for x, term in zip(reals, terms, strict=True):
            if x.tie is not None:
                tie, lost = summed(x.tie, term, target, self._certainly_zero(x) | (_kind(x) != EXACT), tuple(np.shape(value)))
        odd = ~self._test(np.isfinite, lambda v: v.is_finite(), value) if len(reals) > 1 else None  # ∞·0 + ∞·1, or ∞·(0 + 1)?
        if all(x.kind is None for x in reals) and (lost is None or not lost.any()) and (odd is None or not odd.any()):
            return Real(value, None, tie)
        unknown, kind = self._summed_kind(terms, target, reals, values, same)
        if odd is not None:
            unknown, kind = unknown | odd, np.where(odd & ~unknown, ANY, kind)
        return self.made(value, np.where(unknown if lost is None else unknown | lost, kind, EXACT), tie)

    def _one_tied(self, terms: Sequence[Sequence[int]], target: Sequence[int], reals: Sequence[Real]) -> list[Real]:
        """The factors of a contraction, of which at most one depends on an unknown maximum, by a power, and none of its rows are added."""
        several = sum(x.tie is not None for x in reals) > 1
        found = []
        for x, term in zip(reals, terms, strict=True):
            tie = x.tie
            if tie is None:
                found.append(x)
            elif several or any(d is not None and t not in target for t, d in zip(term, tie.dims, strict=True)):
                found.append(self._free(x))
            else:
                part = (tie.add != 0) & (_kind(x) == EXACT)
                rest = tie.like(np.zeros_like(tie.add), np.where(part, 0, tie.power))
                found.append(self.made(x.value, np.where(part, self.kinds(x), _kind(x)), rest))
        return found

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
        self, terms: Sequence[Sequence[int]], target: Sequence[int], reals: Sequence[Real], values: Sequence[Array], same: bool
    ) -> tuple[Array, Array]:
        """Which sums of products have an unknown term, and what is certain of them."""

        def some(factors: Sequence[Array]) -> Array:
            return NUMERIC.contract(terms, target, [f.astype(np.float64) for f in factors], 1)

        kinds = [self.kinds(x) for x in reals]
        if same:  # squares
            kinds = [_power(k, 2) for k in kinds]
        unknown = [_kind(x) != EXACT for x in reals]
        there = [u | ~self.zero(v) for u, v in zip(unknown, values, strict=True)]  # not certainly 0
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

    def _reduce(self, fn: str, x: Classed, dims: tuple[int, ...], cells: Sequence[Cells]) -> Classed:
        axes = tuple(d + 1 for d in dims)
        if isinstance(x, Whole):
            return reduced(fn, x, axes, all(cells[d].whole for d in dims))
        value = x.value
        if fn == "prod":
            for d in dims:
                if not cells[d].whole:
                    value = self._powers(value, d, cells[d])
        with np.errstate(all="ignore"):
            made = self.base.reduce(fn, np.asarray(value), axes)
        if x.kind is None:
            return Real(made)
        unknown = (x.kind != EXACT).any(axis=axes)
        kinds = self.kinds(x)
        low, high = kinds.min(axis=axes), kinds.max(axis=axes)
        if fn == "max":
            rest = [c for d, c in enumerate(cells) if d not in dims]
            return self._unknown_maximum(x, axes, made, unknown, np.where(high <= LOWER, low, ANY), rest)
        kind = high if fn == "min" else np.where(high <= POSITIVE, POSITIVE, np.where(high <= FINITE, FINITE, ANY))
        return self.made(made, np.where(unknown, kind, EXACT))

    def _powers(self, value: Array, d: int, cells: Cells) -> Array:
        """Every cell's number as often a factor as it has positions."""
        shape = [1] * value.ndim
        shape[d + 1] = -1
        counts = cells.count.reshape(shape)
        if not self.enclosed:
            with np.errstate(all="ignore"):
                return np.asarray(value**counts)
        return np.asarray(np.frompyfunc(lambda v, n: v ** int(n), 2, 1)(value, counts))

    def _unknown_maximum(self, x: Real, axes: tuple[int, ...], made: Array, unknown: Array, kind: Array, rest: Sequence[Cells]) -> Real:
        """A maximum of which an entry is unknown: a number stands for it while the op runs, in case that results do not depend on it."""
        finite = unknown & (kind <= FINITE)
        most = self.base.reduce("max", np.where(_kind(x) == EXACT, x.value, self._lower), axes)
        usable = self._test(np.isfinite, lambda v: v.is_finite(), most)
        value = np.where(finite, np.where(usable, most, self._zero), made)
        dims = tuple(i if c.size > 1 else None for i, c in enumerate(rest))
        tie = Tie(next(self._maxima), dims, finite.astype(np.int64), np.zeros(finite.shape, dtype=np.int64))
        return self.made(value, np.where(unknown & ~finite, kind, EXACT), tie if finite.any() else None)

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
        return self.made(made.value, np.where(here, np.broadcast_to(worst, made.shape), _kind(made)))

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

    def _reshape(self, x: Classed, cells: Sequence[Cells], given: Sequence[Cells], lead: int) -> Classed:
        """A view whose axes are not aligned: position by position."""
        shape = (lead, *map(len, cells))
        if not cells or not given or (all(c.whole for c in cells) and all(c.whole for c in given)):
            return moved(x, lambda v: v.reshape(shape))
        index = product(list(cells)).picked(product(list(given)).of)
        flat = moved(x, lambda v: v.reshape(lead, -1))
        return moved(self._take(flat, 0, index), lambda v: v.reshape(shape))

    def aligned(self, x: Classed, cells: Sequence[Cells], given: Sequence[Cells], lead: int) -> Classed:
        """A view of axes that are aligned."""
        shape = (lead, *map(len, cells))
        wide = [d for d, c in enumerate(cells) if c.size != 1]
        before = [d for d, c in enumerate(given) if c.size != 1]
        if isinstance(x, Real) and x.tie is not None:
            if [cells[d].size for d in wide] != [given[d].size for d in before]:
                return moved(self.settled(x), lambda v: v.reshape(shape))
            place = dict(zip(wide, before, strict=True))
            dims = tuple(x.tie.dims[place[d]] if d in place else None for d in range(len(cells)))
            tie = Tie(x.tie.source, dims, x.tie.add.reshape(shape), x.tie.power.reshape(shape))
            return Real(x.value.reshape(shape), None if x.kind is None else x.kind.reshape(shape), tie)
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
        if size == 0:
            raise NoValue("ids in a dimension without positions")
        out = (ids.high < 0) | (ids.low >= size)
        inside = (ids.low >= 0) & (ids.high < size)
        cell = cells.of[np.where(inside, ids.low, 0)]
        known = out | (inside & (ids.exact | (len(cells) == 1)))
        found = moved(x, lambda v: np.take_along_axis(v, cell, axis=dim + 1))
        if isinstance(found, Whole):
            assert isinstance(x, Whole)
            least, most = np.minimum(x.low.min(axis=dim + 1, keepdims=True), 0), np.maximum(x.high.max(axis=dim + 1, keepdims=True), 0)
            low = np.where(out, 0, np.where(known, found.low, least))
            return Whole(low, np.where(out, 0, np.where(known, found.high, most)))
        assert isinstance(x, Real)
        worst = np.maximum(self.kinds(x).max(axis=dim + 1, keepdims=True), NONNEGATIVE)
        kind = np.where(out, EXACT, np.where(known, _kind(found), np.broadcast_to(worst, found.shape)))
        return self.made(np.where(out, self._zero, found.value), kind)

    def _rowwise(self, attrs: tuple[Any, ...], x: Classed, cells: Cells) -> Classed:
        fn, d, descending = attrs
        if fn == "cumsum":
            return self._running(x, d, cells)
        exact = np.asarray(x.exact if isinstance(x, Whole) else _kind(x) == EXACT)
        known = exact.all(axis=d + 1, keepdims=True)
        if not cells.whole:
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
            return Whole(np.where(known, ints, 0), np.where(known, ints, max(cells.size - 1, 0)))
        if isinstance(x, Whole):
            ints = made.astype(np.int64)
            return within(ints, ints, known)
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
            return running(x, d + 1, count)
        kinds = self.kinds(x)
        still = (count == 1) | (self.zero(x.value) & (_kind(x) == EXACT))
        unknown = np.maximum.accumulate((_kind(x) != EXACT), axis=d + 1) | ~still
        value = self.base.rowwise(
            "cumsum", np.where(_kind(x) == EXACT, x.value, self._one) * self.real(cells.count).reshape(shape), d + 1, False
        )
        worst = np.where(np.maximum.accumulate(kinds, axis=d + 1) <= FINITE, FINITE, ANY)
        return self.made(np.asarray(value), np.where(unknown, worst, EXACT))


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


def _put(x: Classed, dims: Sequence[int], count: int, f: Any) -> Classed:
    """The same, of a tensor whose dimension i becomes dimension dims[i] of `count`."""
    if not isinstance(x, Real) or x.tie is None:
        return moved(x, f)
    made = moved(replace(x, tie=None), f)
    assert isinstance(made, Real)
    return replace(made, tie=spread(x.tie, dims, count, f))


_KEEPS = ("map", "select", "broadcast", "contract")  # primitives that keep track of how values depend on an unknown maximum
