"""Terms: one element of an op's output as an expression over elements of its inputs, up to their names.

Elements that are made alike (another row, head, rank, micro-batch, layer) have the same term, over other elements. Terms are interned, so
equal means identical. They are values of a domain of their own: every primitive is read element by element, nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any, Final

import numpy as np

from trainverify.domains.arrays import Array, ArrayDomain, labelled
from trainverify.domains.element import Element, objects
from trainverify.domains.polynomials import RESULT, Choice, Context, Infinity, Poly, Scalars, Unsupported, fraction
from trainverify.primitives.node import Literal, Node
from trainverify.primitives.scalars import is_finite
from trainverify.prove.definedness import kept_arguments, sees
from trainverify.prove.staged.placed import NotPlaced, Placed

NEAREST: Final = 3  # leaves of a summand that say where it belongs


def finite_arguments(op: str, info: Any, picks: Sequence[bool]) -> Sequence[int]:
    """Arguments of a term that have finite values where the term has one: of what may be chosen or looked up, nothing is said."""
    match op:
        case "choose" | "pick":
            return (0,)
        case "dot" if any(picks):
            return [k for p in products(info) for k in kept_factors(p, picks)]
        case "row":
            return kept_arguments("rowwise", info, len(picks))
        case "reduce":
            return kept_arguments(op, (info,), len(picks))
    return kept_arguments(op, info, len(picks))


def products(info: Sequence[int]) -> list[range]:
    """Which arguments of a sum of products are factors of which."""
    ends = list(accumulate(info))
    return [range(end - n, end) for n, end in zip(info, ends, strict=True)]


def kept_factors(product: Sequence[int], picks: Sequence[bool]) -> Sequence[int]:
    """Factors that must have values: those that say which elements are looked up, if any does."""
    return [k for k in product if picks[k]] or product


def looks_up(op: str, info: Any, picks: Sequence[bool]) -> bool:
    """Whether something is 0 but for elements that are looked up by their positions, given which arguments are."""
    if op == "dot":
        return any(picks) and all(any(picks[k] for k in p) for p in products(info))
    return op == "hit" or (op == "map" and info[0] == "mul" and any(picks))


class Term:
    """An application of `op` to terms; compared by identity, as equal ones are the same object."""

    __slots__ = ("args", "info", "op", "picks")

    def __init__(self, op: str, info: Any, args: tuple[Term, ...]):
        self.op = op
        self.info = info
        self.args = args
        self.picks: bool = looks_up(op, info, [a.picks for a in args])

    def finite_arguments(self) -> Sequence[int]:
        return finite_arguments(self.op, self.info, [a.picks for a in self.args])


Leaf = tuple[int, int]  # number of an input, flat position in it
CanonicalTerm = tuple[Term, tuple[Leaf, ...]]  # a term over leaves numbered as they appear, and what they are


class Terms(ArrayDomain):
    """The domain: entries are terms, or integers and booleans that are known."""

    def __init__(self) -> None:
        self._known: dict[Any, Term] = {}
        self._plain = Element(Scalars())
        self._at: dict[Term, tuple[int, tuple[Leaf, ...]]] = {}
        self._made: dict[Any, int] = {}
        self._keys: list[Any] = []  # the same, by number
        self._there: dict[tuple[int, tuple[Leaf, ...]], Term] = {}
        self._inputs: dict[int, tuple[int, ...]] = {}
        self._inner: dict[int, tuple[Array, Array]] = {}  # how a term is made → which inputs, and leaves as if positions began at 0

    def make(self, op: str, info: Any, args: Sequence[Term] = ()) -> Term:
        key = (op, info, tuple(args))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Term(*key)
        return found

    def term(self, x: Any) -> Term:
        if isinstance(x, Term):
            return x
        return self.make("bool" if isinstance(x, bool | np.bool_) else "int", int(x))

    def elements(self, outputs: Sequence[Node], shapes: Sequence[tuple[int, ...] | None]) -> list[list[Term]]:
        """Terms of all elements of all outputs, over leaves (input, position)."""
        inputs: list[Any] = []
        for n, shape in enumerate(shapes):
            size = 0 if shape is None else math.prod(shape)
            inputs.append(None if shape is None else objects([self.make("leaf", (n, p)) for p in range(size)], shape))
        return [[self.term(x) for x in np.asarray(o, dtype=object).reshape(-1)] for o in self.run(outputs, inputs)]

    def placed(self, outputs: Sequence[Node], shapes: Sequence[tuple[int, ...] | None]) -> list[Array] | None:
        """The same for all elements at once, as numbers for how they are made and where the positions in each input begin; None for ops
        whose elements have to be looked at one by one."""
        try:
            return Placed(self._intern, _number, len(shapes)).elements(outputs, shapes)
        except NotPlaced:
            return None

    def there(self, number: int, begin: tuple[Leaf, ...]) -> Term:
        """The term that is made like this, where the positions in each input begin there."""
        found = self._there.get((number, begin))
        if found is None:
            op, info, *rest = self._keys[number]
            if op == "leaf":
                found = self.make("leaf", begin[0])
            else:
                found = self.make(op, info, [self.there(n, self._begin(n, at, dict(begin))) for n, at in rest[0]])
            self._there[number, begin] = found
            self._at[found] = (number, begin)
        return found

    def _begin(self, number: int, at: tuple[int, ...], begin: dict[int, int]) -> tuple[Leaf, ...]:
        """Where an argument begins in its inputs, given where the whole begins."""
        return tuple([(n, begin[n] + p) for n, p in zip(self.inputs(number), at, strict=True)])

    def inputs(self, number: int) -> tuple[int, ...]:
        """The inputs that terms that are made like this speak of."""
        found = self._inputs.get(number)
        if found is None:
            op, info, *rest = self._keys[number]
            found = (info,) if op == "leaf" else tuple(sorted({i for n in dict.fromkeys(n for n, _ in rest[0]) for i in self.inputs(n)}))
            self._inputs[number] = found
        return found

    def _intern(self, key: Any) -> int:
        found = self._made.setdefault(key, len(self._keys))
        if found == len(self._keys):
            self._keys.append(key)
        return found

    def canonical(self, term: Term) -> CanonicalTerm:
        """Leaves numbered in the order in which they appear."""
        leaves: dict[Leaf, int] = {}
        done: dict[Term, Term] = {}

        def walk(t: Term) -> Term:
            found = done.get(t)
            if found is None:
                if t.op == "leaf":
                    found = self.make("leaf", leaves.setdefault(t.info, len(leaves)))
                elif t.args:
                    found = self.make(t.op, t.info, [walk(a) for a in t.args])
                else:
                    found = t
                done[t] = found
            return found

        return walk(term), tuple(leaves)

    def relative(self, term: Term) -> tuple[int, Array]:
        """A number for how a term is made, the same for terms that differ only in where the positions in each input begin; and the leaves,
        as rows of input and position, in an order that goes with the number."""
        number, begin = self._placed(term)
        inner = self._inner.get(number)
        if inner is None:
            leaves = np.array(sorted(self._leaves(term)), dtype=np.int64).reshape(-1, 2)
            which = np.searchsorted([n for n, _ in begin], leaves[:, 0])
            inner = self._inner[number] = (which, leaves - _rows(begin, which))
        which, leaves = inner
        return number, leaves + _rows(begin, which)

    def width(self, number: int) -> int:
        """How many leaves terms have that are made like this."""
        return len(self._inner[number][0])

    def leaves(self, entries: Array) -> Array:
        """The leaves of elements that are given as numbers and beginnings, as rows of input and position, those of the first one first."""
        numbers = entries["number"]
        known: dict[int, tuple[Array, Array, Array]] = {}
        for n in np.unique(numbers).tolist():
            at = np.flatnonzero(numbers == n)
            begin = entries["begin"][at[0]]
            inputs = self.inputs(n)
            self.relative(self.there(n, tuple([(i, int(begin[i])) for i in inputs])))
            known[n] = (at, *self._inner[n])
        widths = np.empty(len(numbers), dtype=np.int64)
        for at, which, _ in known.values():
            widths[at] = len(which)
        ends = np.cumsum(widths)
        made = np.empty((int(widths.sum()), 2), dtype=np.int64)
        for n, (at, which, rows) in known.items():
            begin = entries["begin"][at][:, self.inputs(n)]
            where = (ends[at] - len(which))[:, None] + np.arange(len(which))
            made[where, 0] = rows[:, 0]
            made[where, 1] = rows[:, 1] + begin[:, which]
        return made

    def _placed(self, term: Term) -> tuple[int, tuple[Leaf, ...]]:
        """How a term is made but for where the positions in each input begin, as a number, and the first position in each."""
        stack = [term]
        while stack:
            t = stack[-1]
            missing = [a for a in t.args if a not in self._at]
            stack += missing
            if not missing:
                stack.pop()
                if t not in self._at:
                    self._at[t] = self._place(t)
        return self._at[term]

    def _place(self, t: Term) -> tuple[int, tuple[Leaf, ...]]:
        if t.op == "leaf":
            return self._intern(("leaf", t.info[0])), (t.info,)
        args = [self._at[a] for a in t.args]
        begin: dict[int, int] = {}
        for _, first in args:
            for n, p in first:
                begin[n] = min(p, begin.get(n, p))
        key = (t.op, t.info, tuple([(number, tuple([p - begin[n] for n, p in first])) for number, first in args]))
        return self._intern(key), tuple(sorted(begin.items()))

    def _leaves(self, term: Term) -> set[Leaf]:
        seen, stack = {term}, [term]
        while stack:
            fresh = [a for a in stack.pop().args if a not in seen]
            seen.update(fresh)
            stack += fresh
        return {t.info for t in seen if t.op == "leaf"}

    def arranged(self, term: Term) -> CanonicalTerm:
        """The same up to the order in which sums are added up, so that an element that is one of many summands may be any of them: leaves
        are numbered from the outside, and products are sorted by the leaves that are nearest."""
        numbers: dict[Leaf, int] = {}
        level, seen = [term], {term}
        while level:
            below: list[Term] = []
            for t in level:
                if t.op == "leaf":
                    numbers.setdefault(t.info, len(numbers))
                fresh = [a for a in dict.fromkeys(t.args) if a not in seen]
                seen.update(fresh)
                below += fresh
            level = below
        nearest: dict[Term, tuple[tuple[int, int], ...]] = {}  # leaves by their depth and number
        done: dict[Term, Term] = {}

        def near(ts: Sequence[Term]) -> tuple[tuple[int, int], ...]:
            return tuple(sorted({(d + 1, n) for t in ts for d, n in nearest[t]})[:NEAREST])

        def walk(t: Term) -> Term:
            found = done.get(t)
            if found is None:
                args = [walk(a) for a in t.args]
                nearest[t] = ((0, numbers[t.info]),) if t.op == "leaf" else near(t.args)
                if t.op == "leaf":
                    found = self.make("leaf", numbers[t.info])
                elif t.op == "dot":
                    ends = list(accumulate(t.info))
                    order = sorted(range(len(ends)), key=lambda k: near(t.args[ends[k] - t.info[k] : ends[k]]))
                    found = self.make(
                        "dot", tuple([t.info[k] for k in order]), [a for k in order for a in args[ends[k] - t.info[k] : ends[k]]]
                    )
                else:
                    found = self.make(t.op, t.info, args) if args else t
                done[t] = found
            return found

        return walk(term), tuple(numbers)

    # -- entries -----------------------------------------------------------------------------------------------------

    def literal(self, value: Literal, kind: str) -> Array:
        out = np.empty((), dtype=object)
        out[()] = self._real(value) if kind == "real" else value
        return out

    def _real(self, value: Any) -> Term:
        return self.make("real", _number(value))

    def integers(self, values: Array) -> Array:
        return objects([int(v) for v in values.reshape(-1)], values.shape)

    def _settled(self, value: Any) -> Any:
        """What the element domain made of known integers."""
        if isinstance(value, Infinity):
            return self._real(math.inf * value.sign)
        if isinstance(value, dict):
            c = self._plain.scalars.constant(value)
            assert c is not None
            return self._real(fraction(c))
        return value

    # -- primitives --------------------------------------------------------------------------------------------------

    def map(self, fn: str, args: Sequence[Array], param: Any) -> Array:
        if not args:
            out = np.empty((), dtype=object)
            out[()] = self.make("constant", (fn, param))
            return out
        return objects([self._map(fn, xs, param) for xs in zip(*(a.flat for a in args), strict=True)], args[0].shape)

    def _map(self, fn: str, xs: tuple[Any, ...], param: Any) -> Any:
        if fn == "detach":
            return xs[0]
        if not any(isinstance(x, Term) for x in xs):
            try:
                return self._settled(self._plain._apply(fn, xs, param))
            except Unsupported:
                pass
        return self.make("map", (fn, param, type(param).__name__), [self.term(x) for x in xs])

    def select(self, c: Array, a: Array, b: Array) -> Array:
        made = []
        for p, x, y in zip(c.flat, a.flat, b.flat, strict=True):
            if not isinstance(p, Term):
                made.append(x if p else y)
            else:
                made.append(x if x is y else self.make("choose", None, [self.term(v) for v in (p, x, y)]))
        return objects(made, c.shape)

    def indicator(self, hits: Array) -> Array:
        return objects([self._real(1 if h else 0) for h in hits.flat], hits.shape)

    def contract(self, terms: Sequence[Sequence[int]], target: Sequence[int], args: Sequence[Array], lead: int) -> Array:
        gone = sorted({i for t in terms for i in t} - set(target))
        parts = [labelled(x, term, [*target, *gone], lead) for x, term in zip(args, terms, strict=True)]
        full = np.broadcast_shapes(*(p.shape for p in parts))
        shape = full[: lead + len(target)]
        count = math.prod(full[lead + len(target) :])
        rows = [np.broadcast_to(p, full).reshape(math.prod(shape), count) for p in parts]
        symbolic = any(isinstance(v, Term) for a in args for v in a.flat)
        made: list[Any] = []
        for i in range(math.prod(shape)):
            products = [tuple(r[i, k] for r in rows) for k in range(count)]
            if not symbolic:
                made.append(sum(math.prod(map(int, p)) for p in products))
            else:
                made.append(self._dot([[self.term(x) for x in p] for p in products]))
        return objects(made, shape)

    def _dot(self, products: list[list[Term]]) -> Term:
        """A sum of products; factors 1 are left out. Those with a factor 0 stay: the others must be finite."""
        kept = [[x for x in p if not (x.op == "real" and x.info == 1)] for p in products]
        if len(kept) == 1 and len(kept[0]) == 1:
            return kept[0][0]
        return self.make("dot", tuple(map(len, kept)), [x for p in kept for x in p])

    def reduce(self, fn: str, x: Array, dims: tuple[int, ...]) -> Array:
        keep = [d for d in range(x.ndim) if d not in dims]
        rows = x.transpose((*keep, *dims)).reshape(math.prod(x.shape[d] for d in keep), math.prod(x.shape[d] for d in dims))
        made: list[Any] = []
        for row in rows:
            if any(isinstance(v, Term) for v in row):
                made.append(self.make("reduce", fn, [self.term(v) for v in row]))
            else:
                made.append(self._settled(self._plain._reduced(fn, list(row))))
        return objects(made, tuple(x.shape[d] for d in keep))

    def rowwise(self, fn: str, x: Array, dim: int, descending: bool) -> Array:
        rows = np.moveaxis(x, dim, -1)
        flat = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
        made: list[Any] = []
        for row in flat:
            if not any(isinstance(v, Term) for v in row):
                plain = self._plain.rowwise(fn, objects(list(row), (len(row),)), 0, descending)
                made += [self._settled(v) for v in np.asarray(plain, dtype=object).reshape(-1)]
            elif fn == "cumsum":
                total = row[0]
                made.append(total)
                for v in row[1:]:
                    total = self._map("add", (total, v), None)
                    made.append(total)
            else:
                args = [self.term(v) for v in row]
                count = 1 if fn in ("argmax", "argmin") else len(row)
                made += [self.make("row", (fn, descending, j), args) for j in range(count)]
        if fn in ("argmax", "argmin"):
            return objects(made, rows.shape[:-1])
        return np.moveaxis(objects(made, rows.shape), -1, dim)

    def _node(self, node: Node, args: list[Array], inputs: Sequence[Array], lead: tuple[int, ...]) -> Array:
        if node.prim == "one_hot":
            (start,) = node.attrs
            places = range(start, start + node.shape[-1])
            made = [
                self.make("hit", p, [v]) if isinstance(v, Term) else self._real(1 if v == p else 0) for v in args[0].flat for p in places
            ]
            return objects(made, (*lead, *node.shape))
        if node.prim == "gather":
            x, ids = args
            d = node.attrs[0] + len(lead)
            moved, places = np.moveaxis(x, d, -1), np.moveaxis(ids, d, -1)
            rows = moved.reshape(math.prod(moved.shape[:-1]), moved.shape[-1])
            wanted = places.reshape(math.prod(places.shape[:-1]), places.shape[-1])
            zero = self.literal(0, node.kind)[()]
            found: list[Any] = []
            for row, want in zip(rows, wanted, strict=True):
                for w in want:
                    if isinstance(w, Term):
                        found.append(self.make("pick", node.kind, [w, *(self.term(v) for v in row)]))
                    else:
                        found.append(row[w] if 0 <= w < len(row) else zero)
            return np.moveaxis(objects(found, places.shape), -1, d)
        return super()._node(node, args, inputs, lead)


def _number(value: Any) -> Any:
    """A literal as terms have it."""
    number = Fraction(value) if is_finite(value) else float(value)
    return repr(number) if number != number else number


def _rows(begin: tuple[Leaf, ...], which: Array) -> Array:
    """Where positions begin, for each of these inputs."""
    first = np.array([(0, p) for _, p in begin], dtype=np.int64).reshape(-1, 2)
    return first[which]


def symbol(scalars: Scalars, number: int, kind: str, domain: Any) -> Any:
    """A symbol in the element domain, of what is known of it."""
    if kind == "bool" or (domain is not None and domain[0] == "indicator"):
        return scalars.flag(number)
    if kind == "int":
        if domain is None or domain[0] != "ids" or domain[1] is None:
            raise Unsupported("an integer input without a range")
        _, size, ignore = domain
        values = tuple(range(size)) + (() if ignore is None or 0 <= ignore < size else (ignore,))
        return scalars.choice(Choice(number, values))
    return scalars.symbol(number, domain[0] if domain is not None and domain[0] in ("positive", "nonnegative") else None)


def value(term: Term, leaf: Callable[[int], Any], domain: Element) -> Any:
    """What a term is in the element domain, given its leaves."""
    return _Valuation(leaf, domain).walk(term)


class _Valuation:
    """Values of terms that share leaves, each made once."""

    def __init__(self, leaf: Callable[[int], Any], domain: Element):
        self.leaf = leaf
        self.domain = domain
        self.scalars = domain.scalars
        self.known: dict[tuple[Term, Context], Any] = {}

    def walk(self, t: Term) -> Any:
        if (t, RESULT) in self.known:
            return self.known[t, RESULT]
        key = (t, self.scalars.context)  # its conditions are noted once for each place that it stands in
        if key not in self.known:
            self.known[key] = self._make(t)
        return self.known[key]

    def _make(self, t: Term) -> Any:
        match t.op:
            case "leaf":
                return self.leaf(t.info)
            case "int":
                return t.info
            case "bool":
                return bool(t.info)
            case "real":
                return self.domain.literal(float("nan") if isinstance(t.info, str) else t.info, "real")[()]
            case "constant":
                return self.domain.map(t.info[0], [], t.info[1])[()]
            case "dot":
                return self._dot(t)
            case "choose":
                return self._choose(t)
            case "pick":
                return self._pick(t)
        args = self._arguments(t)
        match t.op:
            case "map":
                return self.domain._apply(t.info[0], tuple(args), t.info[1])
            case "reduce":
                return self.domain._reduced(t.info, args)
            case "row":
                fn, descending, j = t.info
                row = objects(args, (len(args),))
                return np.asarray(self.domain.rowwise(fn, row, 0, descending), dtype=object).reshape(-1)[j]
            case "hit":
                (v,) = args
                s = self.scalars
                return s.tabulate(lambda i: i == t.info, [v]) if isinstance(v, dict) else s.const(1 if v == t.info else 0)
        raise AssertionError(t.op)

    def _arguments(self, t: Term) -> list[Any]:
        """An argument may be infinite where the term is a number, unless it is listed, and no number where the term hides that."""
        kept = t.finite_arguments()
        hidden = not sees("rowwise" if t.op == "row" else t.op, t.info if isinstance(t.info, tuple) else (t.info,))
        found = []
        for n, a in enumerate(t.args):
            with self.scalars.within(infinite=n not in kept, hidden=hidden):
                found.append(self.walk(a))
        return found

    def _choose(self, t: Term) -> Any:
        c = self.walk(t.args[0])
        known = self.scalars.constant(c) if isinstance(c, dict) else c
        if known is not None:
            return self.walk(t.args[1] if known else t.args[2])
        with self.scalars.within(branch=True):
            a, b = self.walk(t.args[1]), self.walk(t.args[2])
        return self.domain._choose(c, a, b)

    def _pick(self, t: Term) -> Any:
        """What is not looked up need not have a value, like a branch that is not taken."""
        place, row = self.walk(t.args[0]), t.args[1:]
        if not isinstance(place, dict):
            return self.walk(row[place]) if 0 <= place < len(row) else self.domain.literal(0, t.info)[()]
        with self.scalars.within(branch=True):
            found = [self.walk(a) for a in row]
        for x in found:
            if isinstance(x, dict):
                self.domain._defined_anyway(x)
        return self.domain._picked(found, place)

    def _looked_up(self, factors: Sequence[Term]) -> list[Any]:
        """Factors of a product; as for `pick`, if some of them say which elements are looked up."""
        kept = kept_factors(range(len(factors)), [f.picks for f in factors])
        found = {k: self.walk(factors[k]) for k in kept}
        if len(kept) < len(factors):
            known = [self.scalars.constant(x) if isinstance(x, dict) else x for x in found.values()]
            if any(c is not None and not c for c in known):
                return [0]
            sure = all(c is not None for c in known)
            with self.scalars.within(branch=not sure):
                found |= {k: self.walk(f) for k, f in enumerate(factors) if k not in kept}
            for x in found.values():
                if isinstance(x, dict) and not sure:
                    self.domain._defined_anyway(x)
        return [found[k] for k in range(len(factors))]

    def _dot(self, t: Term) -> Any:
        s, at = self.scalars, 0
        total: Poly = {}
        whole: int | None = 0  # as long as everything is a known integer
        for n in t.info:
            factors = self._looked_up(t.args[at : at + n])
            at += n
            if whole is not None and not any(isinstance(f, dict | Infinity) for f in factors):
                whole += math.prod(map(int, factors))
                continue
            if whole is not None:
                total, whole = s.const(whole), None
            *first, last = [self.domain.real(f) for f in factors] or [s.const(1)]
            product = s.const(1)
            for p in first:
                product = s.mul(product, p)
            if product and last:
                s.fma(total, product, last)
        return total if whole is None else whole
