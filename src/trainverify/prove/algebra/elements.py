"""Functions of elements: by laws, or by their names if those need what is not known. Trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

from trainverify.axes.inference import NodeAxes
from trainverify.graph.program import Domain
from trainverify.primitives.node import Node
from trainverify.prove.algebra.grids import mixed_radix
from trainverify.prove.algebra.integers import Integers
from trainverify.prove.algebra.terms import (
    OPAQUE,
    Poly,
    Unsupported,
    as_constant,
    constant,
    scale,
)
from trainverify.prove.strict import picks

_TRUTH: Final = frozenset({"lt", "le", "eq", "and", "or", "not", "as_bool"})  # functions that are 0 or 1
_ANY_ORDER: Final = frozenset({"add", "mul", "max", "min", "eq", "and", "or"})  # of their arguments
_NESTED: Final = frozenset({"add", "mul"})  # f(a, f(b, c)) = f(f(a, b), c), also of infinities and what has no value


@dataclass
class Elements(Integers):
    """Functions of one element of each argument."""

    doubtful: bool = False  # whether something was left open for want of what may be known later
    exps: dict[object, list[tuple[str, bool]]] = field(default_factory=dict)  # argument without maxima → (op, maximum subtracted)

    def _literal(self, node: Node) -> Poly:
        value = node.attrs[0]
        if isinstance(value, float):
            if math.isinf(value):
                return scale(self.kernel.fn("infinity", {}), 1 if value > 0 else -1)
            if math.isnan(value):
                raise Unsupported("a literal that is not a number")
        return constant(Fraction(value) if isinstance(value, float) else int(value) if isinstance(value, bool) else value)

    def _infinite(self, p: Poly) -> int:
        """+1 or −1 for the literal infinities, else 0."""
        if len(p) == 1:
            ((m, c),) = p.items()
            if len(m) == 1 and self.kernel.name(m[0][0]) == "infinity":
                return 1 if c > 0 else -1
        return 0

    def _has_value(self, p: Poly) -> None:
        """Note of an opaque function that it has a value."""
        if len(p) == 1:
            ((m, c),) = p.items()
            if c == 1 and len(m) == 1 and m[0][2] == 1 and self.kernel.is_opaque(m[0][0]) and self.kernel.wild(p):
                self.kernel.need("finite", m[0][0], m[0][1])

    def _map(self, node: Node, args: list[Poly], axes: NodeAxes) -> Poly:
        """A function of elements: by laws, or, if those need what is not known, by its name."""
        fn, param = called(node), node.attrs[1] if len(node.attrs) > 1 else None
        if any(self.kernel.wild(a) for a in args):
            return self._named(fn, args, param, Unsupported("an argument that may have no value"))
        try:
            return self._by_laws(node, args, axes)
        except Unsupported as why:
            return self._named(fn, args, param, why)

    def _named(self, fn: str, args: Sequence[Poly], param: Any, why: Unsupported) -> Poly:
        """A function by its name. Sums and products have no order."""
        k = self.kernel
        odd = fn == "pow" and param < 0 and param % 2 == 1  # the inverse of a square or root is ∞ at 0
        if (fn == "div" or odd) and not self._one_zero(args[-1]):
            self.doubtful = True
            raise Unsupported("a divisor that may be 0, of either sign")
        given: list[Poly] = []
        for a in args:
            inner = next(iter(a))[0] if fn in _NESTED and len(a) == 1 and [*a.values()] == [1] and len(next(iter(a))) == 1 else None
            nested = inner is not None and inner[2] == 1 and k.name(inner[0]) == OPAQUE + fn
            given += k.arguments(inner[0], inner[1]) if inner is not None and nested else [a]
        if fn in _ANY_ORDER:
            given.sort(key=lambda p: repr(k.encode(p)))
        truth = fn in _TRUTH
        return k.opaque(fn, given, param, why, indicator=truth, nonnegative=truth)

    def _one_zero(self, p: Poly) -> bool:
        """Whether p, where it is 0, is that with one sign however it is computed: it is an input, not negative, or not 0 at all.
        1/(x − y) is ∞ where 1/−(y − x) is −∞, and so is 1/(x·y) where 1/(x·y + 0) is."""
        k = self.kernel
        if k.wild(p):
            return True  # a function by its name, and what that is
        opened = k.flat(p)
        terms = [(c, [k.atoms[u] for u, _, _ in m], [w for _, _, w in m]) for m, c in opened.items()]
        if terms and all(c > 0 and k.is_nonnegative(m) for m, c in opened.items()):
            return True
        if [(c, [a.kind for a in atoms], powers) for c, atoms, powers in terms] == [(1, ["input"], [1])]:
            return True
        try:
            for m in k.single(p):
                for u, idx, _ in m:
                    k.need("nonzero", u, idx)
        except Unsupported:
            return False
        return bool(p)

    def _by_laws(self, node: Node, args: list[Poly], axes: NodeAxes) -> Poly:
        k = self.kernel
        fn = node.attrs[0]
        signs = [self._infinite(a) for a in args]
        if any(signs):
            return self._infinity(fn, args, signs)
        if fn == "add":
            return self._added(args)
        match fn:
            case "sub":
                return k.plus(args[0], scale(k.finite(args[1]), -1))  # −∞ − (−∞) is no number
            case "neg":
                return scale(k.finite(args[0]), -1)
            case "and":  # both are 0 or 1, and stay recognisable as such
                return k.multiply(*(k.single(k.flat(a), indicator=True) for a in args))
            case "mul":
                if any((c := as_constant(a)) is not None and c > 0 for a in args):
                    return k.times(*args)
                chosen = [picks(a) for a in node.args]
                given = [k.finite(p) if c or not any(chosen) else k.known_finite(p) for p, c in zip(args, chosen, strict=True)]
                return k.multiply(*given)
            case "div":
                return k.multiply(k.finite(args[0]), k.power(args[1], -1))
            case "pow":
                return k.power(args[0], Fraction(node.attrs[1]))
            case "exp":
                self._note_exp(args[0])
                return k.exp(args[0])
            case "log":
                return k.log(args[0])
            case "as_real":
                return k.single(k.flat(args[0]), indicator=True) if node.args[0].kind == "bool" else args[0]
            case "as_int" if node.args[0].kind != "real" or k.integral(args[0]):
                return args[0]
            case "or":
                return k.add(args[0], args[1], scale(k.multiply(args[0], args[1]), -1))
            case "not":
                return k.add(constant(1), scale(args[0], -1))
            case "lt":
                return self._positive(node, k.add(k.number(args[1]), scale(k.number(args[0]), -1)))
            case "le":
                return k.add(constant(1), scale(self._positive(node, k.add(k.number(args[0]), scale(k.number(args[1]), -1))), -1))
            case "eq":
                return self._equal(args, axes, node)
            case "max" | "min":
                sign = 1 if fn == "max" else -1
                return self._extremum(scale(args[0], sign), scale(args[1], sign), sign)
            case "as_bool":
                return args[0] if node.args[0].kind == "bool" else k.add(constant(1), scale(k.indicator_of("eq0", args[0]), -1))
        if len(args) == 1:
            return k.applied(fn, k.number(args[0]), node.attrs[1] if len(node.attrs) > 1 else None)
        if fn in ("floordiv", "mod"):
            k.power(args[1], -1)  # what that needs
        if fn in ("pi", "one_minus_power"):
            return k.fn(fn, {}, node.attrs[1] if len(node.attrs) > 1 else None, positive=True, nonnegative=True)
        return self._opaque(fn, args)

    def _infinity(self, fn: str, args: list[Poly], signs: list[int]) -> Poly:
        """A mask that is decided leaves a plain −∞."""
        k = self.kernel
        finite = [k.number(a) for a, s in zip(args, signs, strict=True) if not s]
        match fn:
            case "detach":
                return args[0]
            case "add" if signs[0] * signs[1] >= 0:
                return args[0] if signs[0] else args[1]
            case "sub" if signs[0] * signs[1] <= 0:
                return args[0] if signs[0] else scale(args[1], -1)
            case "neg":
                return scale(args[0], -1)
            case "exp" if signs[0] < 0:
                return {}
            case "mul" if len(finite) == 1 and (c := as_constant(finite[0])) is not None and c != 0:
                return scale(args[0] if signs[0] else args[1], 1 if c > 0 else -1)
            case "max" if max(signs) <= 0:
                return finite[0] if finite else args[0]
            case "eq" | "lt" | "le":  # a number stands between −∞ and ∞
                first, second = signs
                return constant(int(first == second if fn == "eq" else first < second if fn == "lt" else first <= second))
        raise Unsupported(f"{fn} of infinity")

    def added(self, args: Sequence[Poly]) -> Poly:
        """A sum of several, as `_map` makes it."""
        try:
            if any(self.kernel.wild(a) for a in args):
                raise Unsupported("an argument that may have no value")
            return self._added(args)
        except Unsupported as why:
            return self._named("add", args, None, why)

    def _added(self, args: Sequence[Poly]) -> Poly:
        k = self.kernel
        if any(self._infinite(a) for a in args):
            raise Unsupported("add of infinity")
        unbounded = [a for a in args if k.unbounded(a)]
        if len(unbounded) > 1 and not all(k.below(a) for a in unbounded):
            raise Unsupported("a sum of infinities of both signs")
        return k.plus(*args)

    def _note_exp(self, p: Poly) -> None:
        """Remember whether a maximum was subtracted under an exp: equal in the reals, not in floats."""
        flat = self.kernel.flat(p)
        peaks = {m for m, c in flat.items() if len(m) == 1 and c == -1 and self.kernel.atoms[m[0][0]].kind == "max"}
        rest = frozenset(tuple((u, w) for u, _, w in m) for m in flat if m not in peaks)
        if self.kernel.trace is not None:
            self.kernel.trace.exps.append((rest, self.where, bool(peaks)))
        else:
            self.exps.setdefault(rest, []).append((self.where, bool(peaks)))

    def _opaque(self, fn: str, args: Sequence[Poly]) -> Poly:
        """A function of several arguments: a function of their formal combination, told apart by markers."""
        k = self.kernel
        joined: Poly = {}
        for i, a in enumerate(args):
            marker: Poly = {((k.atom("marker", i, ()), (), 1),): 1}
            joined = k.add(joined, k.times(marker, k.single(k.number(a))) if a else {})
        return k.fn(fn, joined, len(args))

    def _positive(self, node: Node, difference: Poly) -> Poly:
        """Of positions as numbers, not as the tensors that they were put into: how they were added does not matter. Positions of
        different blocks are ordered."""
        if node.args[0].kind == "int" and self.kernel.integral(flat := self.kernel.flat(difference)):
            low, high = self._reach(flat)
            return constant(1) if low > 0 else {} if high <= 0 else self.kernel.indicator_of("gt0", flat)
        return self.kernel.indicator_of("gt0", difference)

    def _reach(self, p: Poly) -> tuple[Fraction | float, Fraction | float]:
        """The least and the largest that a sum of positions can be."""
        low: float | Fraction = 0
        high: float | Fraction = 0
        for m, c in p.items():
            if not m:
                low, high = low + c, high + c
            elif len(m) == 1 and m[0][2] == 1 and self.kernel.atoms[m[0][0]].kind == "iota":
                at = m[0][1][0]
                ends = (c * at, c * at) if at >= 0 else (0, c * (self.kernel.atoms[m[0][0]].data - 1))
                low, high = low + min(ends), high + max(ends)
            else:
                return -math.inf, math.inf
        return low, high

    def _extremum(self, a: Poly, b: Poly, sign: int) -> Poly:
        """max(a, b) as an unordered pair: b + max(a − b, 0) would lose symmetry."""
        if a == b:
            return scale(a, sign)
        ca, cb = as_constant(a), as_constant(b)
        if ca is not None and cb is not None:
            return constant(max(ca, cb) * sign)
        k = self.kernel
        first, second = sorted((a, b), key=lambda p: repr(k.encode(p)))
        return scale(self._opaque("max2", [first, second]), sign)

    def _equal(self, args: list[Poly], axes: NodeAxes, node: Node) -> Poly:
        k = self.kernel
        for p, q, side in ((args[0], args[1], 0), (args[1], args[0], 1)):
            name = self._label(p)
            c = as_constant(q)
            if name is not None and c is not None:
                domain = self.domains.get(name[0])
                if c != int(c):
                    return {}  # no integer
                if domain is not None and c == domain.ignore and not _in_range(domain):
                    return k.add(constant(1), scale(k.valid(*name), -1))
                line = axes.lines[id(node.args[side])]
                root = None if line is None else line.root()
                if domain is not None and domain.size is not None and not 0 <= c < domain.size:
                    return {}
                if root is not None and root.axis is not None and not self.grid([root.axis]).tags:
                    self._range(name[0], root.axis)
                    leaves = self._plain(root.axis)
                    return self._digits_of(name, leaves, mixed_radix(int(c), [a.size for a in leaves]))
        if any(k.infinite(u) for a in args for m in a for u, _, _ in m) and all(k.below(a) for a in args):
            try:
                return k.indicator_of("eq0", k.add(k.number(args[0]), scale(k.number(args[1]), -1)))
            except Unsupported:  # −∞ equals itself and no number: 0 or 1, whatever they are
                return k.same(*sorted(args, key=lambda p: repr(k.encode(p))))
        return k.indicator_of("eq0", k.add(k.number(args[0]), scale(k.number(args[1]), -1)))

    def _select(self, args: Sequence[Poly]) -> Poly:
        try:
            if any(self.kernel.wild(a) for a in args):
                raise Unsupported("an argument that may have no value")
            return self._selected(*args)
        except Unsupported as why:
            return self._named("select", args, None, why)

    def _selected(self, c: Poly, a: Poly, b: Poly) -> Poly:
        """c·a + (1−c)·b; against −∞ it is a + log(c), which exp turns back into a mask."""
        k = self.kernel
        c = k.flat(c)  # a mask that is a tensor of its own has a name
        if as_constant(c) is not None:
            return a if as_constant(c) == 1 else b
        rest = k.add(constant(1), scale(c, -1))
        if self._infinite(b) < 0:
            return k.add(k.number(a), self._log_indicator(c))
        if self._infinite(a) < 0:
            return k.add(k.number(b), self._log_indicator(rest))
        if self._infinite(a) or self._infinite(b):
            raise Unsupported("selecting +infinity")
        first, second = k.number(a), k.number(b)
        return k.add(
            k.multiply(k.single(c, indicator=True), first) if first else {},
            k.multiply(k.single(rest, indicator=True), second) if second else {},
        )

    def _log_indicator(self, c: Poly) -> Poly:
        return self.kernel.fn("log_indicator", self.kernel.single(c, indicator=True))


def called(node: Node) -> str:
    """What a node is called where no law is used: within an op, a product with what is looked up is no product, 0·∞ does not occur."""
    fn = str(node.attrs[0]) if node.prim == "map" else "mul"
    return "pick" if fn == "mul" and any(picks(a) for a in node.args) else fn


def _in_range(domain: Domain) -> bool:
    """Whether the value to ignore is one of the ids."""
    return domain.size is not None and domain.ignore is not None and 0 <= domain.ignore < domain.size
