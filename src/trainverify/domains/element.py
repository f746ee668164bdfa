"""The element domain: every element of a tensor is a scalar of `polynomials`; integers and booleans depend on finite choices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from trainverify.domains.arrays import Array, ArrayDomain, labelled
from trainverify.domains.polynomials import Infinity, Poly, Scalars, Unsupported, fraction
from trainverify.primitives.node import Literal, Node
from trainverify.primitives.scalars import Undecided, hashed_uniform, integer_power

_INTEGERS: dict[str, Callable[..., Any]] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "eq": lambda a, b: a == b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "max": max,
    "min": min,
    "abs": abs,
}


def objects(entries: list[Any], shape: tuple[int, ...]) -> Array:
    out = np.empty(len(entries), dtype=object)
    out[:] = entries
    return out.reshape(shape)


class Element(ArrayDomain):
    def __init__(self, scalars: Scalars):
        self.scalars = scalars

    # -- entries -----------------------------------------------------------------------------------------------------

    def literal(self, value: Literal, kind: str) -> Array:
        out = np.empty((), dtype=object)
        if kind == "real" and isinstance(value, float) and math.isinf(value):
            out[()] = Infinity(1 if value > 0 else -1)
        elif kind == "real" and value != value:
            raise Unsupported("not a number")
        else:
            out[()] = self.scalars.const(Fraction(value)) if kind == "real" else value
        return out

    def integers(self, values: Array) -> Array:
        return objects([int(v) for v in values.reshape(-1)], values.shape)

    def real(self, value: Any) -> Poly:
        if isinstance(value, dict):
            return value
        if isinstance(value, Infinity):
            raise Unsupported("infinity where a number was expected")
        return self.scalars.const(int(value))

    # -- functions ---------------------------------------------------------------------------------------------------

    def map(self, fn: str, args: Sequence[Array], param: Any) -> Array:
        if not args:
            out = np.empty((), dtype=object)
            out[()] = self.scalars.positive_constant(fn, () if param is None else param)
            return out
        known: dict[tuple[int, ...], Any] = {}
        entries = []
        for xs in zip(*(a.flat for a in args), strict=True):
            key = tuple(map(id, xs))
            if key not in known:
                known[key] = self._apply(fn, xs, param)
            entries.append(known[key])
        return objects(entries, args[0].shape)

    def _apply(self, fn: str, xs: tuple[Any, ...], param: Any) -> Any:
        s = self.scalars
        if any(isinstance(x, Infinity) for x in xs):
            return self._infinite(fn, xs)
        plain = not any(isinstance(x, dict) for x in xs)
        match fn:
            case "detach":
                return xs[0]
            case "add" | "sub" | "mul":
                if plain:
                    m, n = int(xs[0]), int(xs[1])
                    return m + n if fn == "add" else m - n if fn == "sub" else m * n
                a, b = self.real(xs[0]), self.real(xs[1])
                return s.add(a, b) if fn == "add" else s.sub(a, b) if fn == "sub" else s.mul(a, b)
            case "neg":
                return -int(xs[0]) if plain else s.neg(xs[0])
            case "div":
                return s.mul(self.real(xs[0]), s.inverse(self.real(xs[1])))
            case "pow":
                if plain and isinstance(param, int) and param >= 0:
                    return self._integer_power(int(xs[0]), param)
                return s.pow(self.real(xs[0]), param if isinstance(param, int) else Fraction(param))
            case "exp":
                return s.exp(self.real(xs[0]))
            case "log":
                return s.log(self.real(xs[0]))
            case "sin" | "cos" | "tanh" | "erf":
                return s.function(fn, self.real(xs[0]))
            case "floor":
                c = s.constant(self.real(xs[0]))
                return s.function(fn, self.real(xs[0])) if c is None else s.const(math.floor(fraction(c)))
            case "sign":
                p = self.real(xs[0])
                return s.sub(s.positive(p), s.positive(s.neg(p)))
            case "and":
                return bool(xs[0] and xs[1]) if plain else s.mul(self.real(xs[0]), self.real(xs[1]))
            case "or":
                a, b = self.real(xs[0]), self.real(xs[1])
                return bool(xs[0] or xs[1]) if plain else s.sub(s.add(a, b), s.mul(a, b))
            case "not":
                return not xs[0] if plain else s.sub(s.const(1), xs[0])
            case "as_real":
                return self.real(xs[0])
            case "as_int":
                return int(xs[0]) if plain else self._whole(xs[0])
            case "as_bool":
                return bool(xs[0]) if plain else s.sub(s.const(1), self._equal(xs[0], {}))
            case "uniform":
                if not plain:
                    raise Unsupported("randomness that depends on inputs")
                return s.const(hashed_uniform(*(int(x) for x in xs)))
        if fn in _INTEGERS and plain:
            return _INTEGERS[fn](*(int(x) for x in xs))
        polys = [self.real(x) for x in xs]
        if fn in ("floordiv", "mod") or (fn in _INTEGERS and all(s.finite(p) for p in polys) and any(polys)):
            return s.tabulate(_INTEGERS[fn], polys)
        return self._compared(fn, polys)

    def _compared(self, fn: str, polys: list[Poly]) -> Poly:
        """Functions that depend on which of two numbers is larger."""
        s = self.scalars
        match fn:
            case "abs":
                (p,) = polys
                c = s.constant(p)
                if c is not None:
                    return s.const(abs(c))
                return p if s.sign(p) is not None else s.neg(p) if s.sign(s.neg(p)) is not None else s.function("abs", p)
            case "max":
                return s.max(polys)
            case "min":
                return s.neg(s.max([s.neg(p) for p in polys]))
            case "lt":
                return s.positive(s.sub(polys[1], polys[0]))
            case "le":
                return s.sub(s.const(1), s.positive(s.sub(polys[0], polys[1])))
            case "eq":
                return self._equal(*polys)
        raise Unsupported(fn)

    @staticmethod
    def _integer_power(x: int, p: int) -> int:
        try:
            return integer_power(x, p)
        except Undecided as error:
            raise Unsupported(str(error)) from error

    def _equal(self, a: Poly, b: Poly) -> Poly:
        s = self.scalars
        d = s.sub(a, b)
        if s.finite(d):
            return s.tabulate(lambda x: x == 0, [d])
        return s.sub(s.sub(s.const(1), s.positive(d)), s.positive(s.neg(d)))

    def _whole(self, p: Poly) -> Any:
        s = self.scalars
        c = s.constant(p)
        if c is not None:
            return math.trunc(fraction(c))
        if not s.finite(p):
            raise Unsupported("a real number turned into an integer")
        return s.tabulate(lambda x: x, [p])

    def _infinite(self, fn: str, xs: tuple[Any, ...]) -> Any:
        s = self.scalars
        signs = [x.sign if isinstance(x, Infinity) else 0 for x in xs]
        match fn:
            case "detach":
                return xs[0]
            case "add" if signs[0] * signs[1] >= 0:
                return Infinity(signs[0] or signs[1])
            case "sub" if signs[0] * signs[1] <= 0:
                return Infinity(signs[0] or -signs[1])
            case "neg":
                return Infinity(-signs[0])
            case "exp" if signs[0] < 0:
                return s.const(0)
            case "mul":
                other = 1 if isinstance(xs[1], Infinity) else 0
                if signs[0] * signs[1]:
                    return Infinity(signs[0] * signs[1])
                plus = s.sign(self.real(xs[1 - other])) == "positive"
                if plus or s.sign(s.neg(self.real(xs[1 - other]))) == "positive":
                    return Infinity((signs[0] or signs[1]) * (1 if plus else -1))
            case "max" | "min":
                wins = 1 if fn == "max" else -1
                if wins in signs:
                    return Infinity(wins)
                return xs[1] if isinstance(xs[0], Infinity) else xs[0]
            case "lt" | "le" | "eq" if signs[0] != signs[1]:
                return fn != "eq" and signs[0] < signs[1]
        raise Unsupported(f"{fn} of infinity")

    def select(self, c: Array, a: Array, b: Array) -> Array:
        return objects([self._choose(p, x, y) for p, x, y in zip(c.flat, a.flat, b.flat, strict=True)], c.shape)

    def _choose(self, c: Any, a: Any, b: Any) -> Any:
        s = self.scalars
        if isinstance(c, dict):
            known = s.constant(c)
            if known is None:
                if a is b:
                    return a
                x, y = self.real(a), self.real(b)
                for branch in (x, y):
                    self._defined_anyway(branch)
                return s.add(y, s.mul(c, s.sub(x, y)))
            c = bool(known)
        return a if c else b

    def _defined_anyway(self, p: Poly) -> None:
        """A branch that may not be taken must not bring conditions of its own: those that it may bring are noted as doubts."""
        s = self.scalars
        for m in p:
            for x, e in s.factors[m]:
                atom = s.atoms[x]
                inside = atom.args[0] if atom.kind == "sum" else frozenset(s.one(x).items())
                if e < 0 and atom.sign != "positive":
                    s.doubts["nonzero", inside] = None
                elif not isinstance(e, int) and atom.sign is None:
                    s.doubts["nonnegative", inside] = None
                if atom.kind == "log" and s.sign(dict(atom.args[0])) != "positive":
                    s.doubts["positive", atom.args[0]] = None

    def indicator(self, hits: Array) -> Array:
        zero, one = self.scalars.const(0), self.scalars.const(1)
        return objects([one if h else zero for h in hits.flat], hits.shape)

    # -- many elements -----------------------------------------------------------------------------------------------

    def contract(self, terms: Sequence[Sequence[int]], target: Sequence[int], args: Sequence[Array], lead: int) -> Array:
        gone = sorted({i for t in terms for i in t} - set(target))
        parts = [labelled(x, term, [*target, *gone], lead) for x, term in zip(args, terms, strict=True)]
        full = np.broadcast_shapes(*(p.shape for p in parts))
        shape = full[: lead + len(target)]
        count = math.prod(full[lead + len(target) :])
        rows = [np.broadcast_to(p, full).reshape(math.prod(shape), count) for p in parts]
        s = self.scalars
        made: list[Any] = []
        symbolic = any(isinstance(v, dict | Infinity) for a in args for v in a.flat)
        for i in range(math.prod(shape)):
            if not symbolic:
                made.append(sum(math.prod(int(r[i, k]) for r in rows) for k in range(count)))
                continue
            total: Poly = {}
            for k in range(count):
                *first, last = [self.real(r[i, k]) for r in rows]
                product = s.const(1)
                for p in first:
                    product = s.mul(product, p) if p else p
                    if not p:
                        break
                if product and last:
                    s.fma(total, product, last)
            made.append(total)
        return objects(made, shape)

    def reduce(self, fn: str, x: Array, dims: tuple[int, ...]) -> Array:
        keep = [d for d in range(x.ndim) if d not in dims]
        rows = x.transpose((*keep, *dims)).reshape(math.prod(x.shape[d] for d in keep), math.prod(x.shape[d] for d in dims))
        made = [self._reduced(fn, list(row)) for row in rows]
        return objects(made, tuple(x.shape[d] for d in keep))

    def _reduced(self, fn: str, row: list[Any]) -> Any:
        s = self.scalars
        if fn == "prod":
            total = row[0]
            for v in row[1:]:
                total = self._apply("mul", (total, v), None)
            return total
        if all(isinstance(v, bool) for v in row):
            return any(row) if fn == "max" else all(row)
        if any(isinstance(v, Infinity) for v in row) or not any(isinstance(v, dict) for v in row):
            total = row[0]
            for v in row[1:]:
                total = self._apply(fn, (total, v), None)
            return total
        polys = [self.real(v) for v in row]
        if any(isinstance(v, bool) for v in row) or all(self._is_flag(p) for p in polys):  # any, all
            total = polys[0]
            for p in polys[1:]:
                product = s.mul(total, p)
                total = product if fn == "min" else s.sub(s.add(total, p), product)
            return total
        if fn == "max":
            return s.max(polys)
        return s.neg(s.max([s.neg(p) for p in polys]))

    def _is_flag(self, p: Poly) -> bool:
        """Certainly 0 or 1: its square is itself."""
        s = self.scalars
        return all(s._indicator[x] for m in p for x, _ in s.factors[m]) and not s.sub(s.mul(p, p), p)

    def rowwise(self, fn: str, x: Array, dim: int, descending: bool) -> Array:
        rows = np.moveaxis(x, dim, -1)
        flat = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
        made: list[Any] = []
        for row in flat:
            if fn == "cumsum":
                total = row[0]
                made.append(total)
                for v in row[1:]:
                    total = self._apply("add", (total, v), None)
                    made.append(total)
            else:
                places = self._sorted(list(row), descending if fn in ("sort", "argsort") else fn == "argmax")
                if fn in ("argmax", "argmin"):
                    made.append(places[0])
                else:
                    made += places if fn == "argsort" else [self._picked(list(row), p) for p in places]
        if fn in ("argmax", "argmin"):
            return objects(made, rows.shape[:-1])
        return np.moveaxis(objects(made, rows.shape), -1, dim)

    def _sorted(self, row: list[Any], descending: bool) -> list[Any]:
        """Positions in order. Of symbols, the same unknown positions wherever the row is the same."""
        s = self.scalars
        values: list[Any] = []
        for v in row:
            c = s.constant(v) if isinstance(v, dict) else None
            if isinstance(v, Infinity):
                values.append(math.inf * v.sign)
            elif isinstance(v, dict):
                values.append(None if c is None else fraction(c))
            else:
                values.append(int(v))
        if all(v is not None for v in values):
            return sorted(range(len(row)), key=lambda i: values[i], reverse=False) if not descending else _descending(values)
        key = tuple(v if isinstance(v, Infinity) else frozenset(self.real(v).items()) for v in row)
        return [s.ordered(("sorted", descending, j, key), len(row)) for j in range(len(row))]

    def _picked(self, row: list[Any], place: Any) -> Any:
        if not isinstance(place, dict):
            return row[place] if 0 <= place < len(row) else None
        s = self.scalars
        total: Poly = {}
        for v, x in enumerate(row):
            hit = s.tabulate(lambda i, v=v: i == v, [place])
            if hit:
                s.fma(total, hit, self.real(x))
        return total

    def _node(self, node: Node, args: list[Array], inputs: Sequence[Array], lead: tuple[int, ...]) -> Array:
        s = self.scalars
        if node.prim == "one_hot":
            (start,) = node.attrs
            made: list[Any] = []
            for v in args[0].flat:
                for p in range(start, start + node.shape[-1]):
                    if isinstance(v, dict):
                        made.append(s.tabulate(lambda i, p=p: i == p, [v]))
                    else:
                        made.append(s.const(1 if v == p else 0))
            return objects(made, (*lead, *node.shape))
        if node.prim == "gather":
            x, ids = args
            d = node.attrs[0] + len(lead)
            moved, places = np.moveaxis(x, d, -1), np.moveaxis(ids, d, -1)
            rows = moved.reshape(math.prod(moved.shape[:-1]), moved.shape[-1])
            wanted = places.reshape(math.prod(places.shape[:-1]), places.shape[-1])
            zero = self.literal(0, node.kind)[()]
            found = []
            for row, want in zip(rows, wanted, strict=True):
                for w in want:
                    hit = self._picked(list(row), w)
                    found.append(zero if hit is None else hit)
            return np.moveaxis(objects(found, places.shape), -1, d)
        return super()._node(node, args, inputs, lead)


def _descending(values: list[Any]) -> list[int]:
    """Stable: equal ones keep their order."""
    return sorted(range(len(values)), key=lambda i: -values[i])
