"""The domain `axes`: what every primitive means on canonical forms over axes.

A tensor is a polynomial over position variables: -1, -2, … are the leaf axes of its dimensions in order. A reshape
changes nothing but the grouping, a transpose renames, a slice fixes digits, a contraction is a Σ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from trainverify.axes.inference import Line, NodeAxes
from trainverify.axes.structure import Axes, Axis
from trainverify.graph.program import Domain
from trainverify.ops.table import Lowered
from trainverify.primitives.node import Node, topological
from trainverify.prove.algebra.kernel import (
    Index,
    Kernel,
    Poly,
    Unsupported,
    as_constant,
    constant,
    scale,
)

Leaves = list[Axis]


@dataclass(frozen=True)
class Offset:
    """An integer that may depend on the mesh: base + Σ stride · mesh variable."""

    base: int
    strides: tuple[tuple[Index, int], ...] = ()  # (mesh leaf variable, stride)

    @property
    def plain(self) -> bool:
        return not self.strides


@dataclass
class Forms:
    """Interprets nodes over one kernel and one set of axes."""

    kernel: Kernel
    axes: Axes
    domains: Mapping[str, Domain] = field(default_factory=dict)
    mesh_sizes: dict[Index, int] = field(default_factory=dict)  # of mesh leaf variables

    def leaves(self, dims: Sequence[Axis]) -> Leaves:
        found = self.axes.leaves(dims)
        for a in found:
            if a.pieces is not None:
                raise Unsupported(f"an axis of unequal pieces {a!r}")
        return found

    def per_dim(self, dims: Sequence[Axis]) -> list[Leaves]:
        return [self.leaves([d]) for d in dims]

    # -- one op ------------------------------------------------------------------------------------------------------

    def op(self, lowered: Lowered, axes: NodeAxes, inputs: Sequence[Poly | None], offsets: Mapping[int, Offset]) -> list[Poly]:
        """Forms of an op's outputs; `offsets` says which node offsets depend on the mesh."""
        found: dict[int, Poly] = {}
        for node in topological(lowered.outputs):
            if node.prim == "input":
                value = inputs[node.attrs[0]]
                assert value is not None
                found[id(node)] = value
            else:
                found[id(node)] = self._node(node, [found[id(a)] for a in node.args], axes, offsets)
        return [found[id(o)] for o in lowered.outputs]

    def _node(self, node: Node, args: list[Poly], axes: NodeAxes, offsets: Mapping[int, Offset]) -> Poly:
        dims = axes.dims[id(node)]
        given = [axes.dims[id(a)] for a in node.args]
        match node.prim:
            case "const":
                return self._literal(node)
            case "iota":
                return self._iota(node, dims, axes.lines[id(node)], offsets.get(id(node), Offset(node.attrs[0])))
            case "map":
                return self._map(node, args, axes)
            case "select":
                return self._select(*args)
            case "contract":
                return self._contract(node, args, given, dims)
            case "reduce":
                return self._reduce(node, args[0], given[0])
            case "reshape":
                if [id(a) for a in self.leaves(given[0])] != [id(a) for a in self.leaves(dims)]:
                    raise Unsupported(f"view of {self.leaves(given[0])} as {self.leaves(dims)}: the factors do not align")
                return args[0]
            case "transpose":
                return self._moved(args[0], given[0], list(node.attrs[0]))
            case "broadcast":
                return self._placed(args[0], given[0], dims, list(node.attrs[0]))
            case "slice":
                d, start, step = node.attrs
                return self._sliced(args[0], given[0], dims, d, offsets.get(id(node), Offset(start)), step)
            case "concat":
                return self._concat(args, given, dims, node.attrs[0])
            case "pad":
                d, low, _, value = node.attrs
                if value != 0:
                    raise Unsupported("padding with something else than zero")
                return self._padded(args[0], given[0], dims, d, offsets.get(id(node), Offset(low)))
            case "one_hot":
                start = offsets.get(id(node), Offset(node.attrs[0]))
                return self._one_hot(args[0], given[0], dims[-1], axes.lines[id(node.args[0])], start)
            case "gather":
                return self._gather(node, args, given, axes)
            case "rowwise":
                return self._rowwise(node, args[0], given[0])
        raise Unsupported(f"primitive {node.prim}")

    # -- scalars -----------------------------------------------------------------------------------------------------

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

    def _map(self, node: Node, args: list[Poly], axes: NodeAxes) -> Poly:
        k = self.kernel
        fn = node.attrs[0]
        if any(self._infinite(a) for a in args):
            raise Unsupported(f"{fn} of infinity")
        match fn:
            case "add":
                return k.add(*args)
            case "sub":
                return k.add(args[0], scale(args[1], -1))
            case "neg":
                return scale(args[0], -1)
            case "mul" | "and":
                return (
                    k.multiply(k.finite(args[0]), k.finite(args[1]))
                    if as_constant(args[0]) is None and as_constant(args[1]) is None
                    else k.times(*args)
                )
            case "div":
                return k.multiply(k.finite(args[0]), k.power(args[1], -1))
            case "pow":
                return k.power(args[0], Fraction(node.attrs[1]))
            case "exp":
                return k.exp(args[0])
            case "log":
                return k.log(args[0])
            case "as_real":
                return args[0]
            case "or":
                return k.add(args[0], args[1], scale(k.multiply(args[0], args[1]), -1))
            case "not":
                return k.add(constant(1), scale(args[0], -1))
            case "lt":
                return self._positive(node, k.add(args[1], scale(args[0], -1)))
            case "le":
                return k.add(constant(1), scale(self._positive(node, k.add(args[0], scale(args[1], -1))), -1))
            case "eq":
                return self._equal(args, axes, node)
            case "max" | "min":
                sign = 1 if fn == "max" else -1
                return self._extremum(scale(args[0], sign), scale(args[1], sign), sign)
            case "as_bool":
                return args[0] if node.args[0].kind == "bool" else k.add(constant(1), scale(k.indicator_of("eq0", args[0]), -1))
        if len(args) == 1:
            return k.fn(fn, k.finite(args[0]), node.attrs[1] if len(node.attrs) > 1 else None)
        if fn == "pi":
            return k.fn("pi", {}, positive=True, nonnegative=True)
        return self._opaque(fn, args)

    def _opaque(self, fn: str, args: Sequence[Poly]) -> Poly:
        """A function of several arguments: a function of their formal combination, told apart by markers."""
        k = self.kernel
        joined: Poly = {}
        for i, a in enumerate(args):
            marker = k.input(f"argument {i}", (), ())
            joined = k.add(joined, k.times(marker, k.single(k.finite(a))) if a else {})
        return k.fn(fn, joined, len(args))

    def _positive(self, node: Node, difference: Poly) -> Poly:
        return self.kernel.indicator_of("gt0", difference)

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
                if domain is not None and c == domain.ignore:
                    return k.add(constant(1), scale(k.valid(*name), -1))
                line = axes.lines[id(node.args[side])]
                root = None if line is None else line.root()
                if domain is not None and domain.size is not None and not 0 <= c < domain.size:
                    return {}
                if root is not None and root.axis is not None:
                    leaves = self.leaves([root.axis])
                    return self._digits_of(name, leaves, _digits(int(c), [a.size for a in leaves]))
        return k.indicator_of("eq0", k.add(args[0], scale(args[1], -1)))

    def _select(self, c: Poly, a: Poly, b: Poly) -> Poly:
        """c·a + (1−c)·b; against −∞ it is a + log(c), which exp turns back into a mask."""
        k = self.kernel
        if as_constant(c) is not None:
            return a if as_constant(c) == 1 else b
        rest = k.add(constant(1), scale(c, -1))
        if self._infinite(b) < 0:
            return k.add(k.finite(a), self._log_indicator(c))
        if self._infinite(a) < 0:
            return k.add(k.finite(b), self._log_indicator(rest))
        if self._infinite(a) or self._infinite(b):
            raise Unsupported("selecting +infinity")
        first, second = k.finite(a), k.finite(b)
        return k.add(
            k.multiply(k.single(c, indicator=True), first) if first else {},
            k.multiply(k.single(rest, indicator=True), second) if second else {},
        )

    def _log_indicator(self, c: Poly) -> Poly:
        return self.kernel.fn("log_indicator", self.kernel.single(c, indicator=True))

    # -- structure ---------------------------------------------------------------------------------------------------

    def _spans(self, dims: Sequence[Axis]) -> list[list[Index]]:
        """Position variables of every dimension."""
        result, at = [], 0
        for d in self.per_dim(dims):
            result.append([-1 - (at + i) for i in range(len(d))])
            at += len(d)
        return result

    def _moved(self, p: Poly, given: Sequence[Axis], order: list[int]) -> Poly:
        old = self._spans(given)
        new = self._spans([given[o] for o in order])
        return self.kernel.substitute(p, {v: w for o, span in zip(order, new, strict=True) for v, w in zip(old[o], span, strict=True)})

    def _placed(self, p: Poly, given: Sequence[Axis], dims: Sequence[Axis], into: list[int]) -> Poly:
        old, new = self._spans(given), self._spans(dims)
        return self.kernel.substitute(p, {v: w for i, d in enumerate(into) for v, w in zip(old[i], new[d], strict=True)})

    def _contract(self, node: Node, args: list[Poly], given: list[list[Axis]], dims: Sequence[Axis]) -> Poly:
        k = self.kernel
        terms, target = node.attrs
        out = dict(zip(target, self._spans(dims), strict=True))
        over: dict[Index, int] = {}
        product = constant(1)
        for term, p, axes in zip(terms, args, given, strict=True):
            names: dict[Index, Index] = {}
            for label, span, leaves in zip(term, self._spans(axes), self.per_dim(axes), strict=True):
                if label not in out:
                    fresh = [k.bound() for _ in span]
                    over.update({v: a.size for v, a in zip(fresh, leaves, strict=True)})
                    out[label] = fresh
                names.update(zip(span, out[label], strict=True))
            moved = k.substitute(k.finite(p), names)
            product = moved if len(args) == 1 else k.times(product, k.single(moved))
        return k.sum(product, over)

    def _reduce(self, node: Node, p: Poly, given: Sequence[Axis]) -> Poly:
        fn, gone = node.attrs
        if fn == "prod":
            raise Unsupported("a product over an axis")
        k = self.kernel
        spans, leaves = self._spans(given), self.per_dim(given)
        over: dict[Index, int] = {}
        names: dict[Index, Index] = {}
        at = 0
        for d, span in enumerate(spans):
            for v, a in zip(span, leaves[d], strict=True):
                if d in gone:
                    names[v] = k.bound()
                    over[names[v]] = a.size
                else:
                    at += 1
                    names[v] = -at
        moved = k.substitute(p, names)
        return k.maximum(moved, over) if fn == "max" else scale(k.maximum(scale(moved, -1), over), -1)

    # -- digits ------------------------------------------------------------------------------------------------------

    def _fixed_digits(self, whole: Leaves, kept: Leaves, offset: Offset, step: int = 1) -> list[Index | None]:
        """For every leaf of an axis the digit that an offset fixes, or None for those that are kept."""
        sizes = [a.size for a in whole]
        weights = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        digits: list[Index] = list(_digits(offset.base, sizes))
        for variable, stride in offset.strides:
            size = self.mesh_sizes[variable]
            if size == 1:
                continue
            hit = [i for i, w in enumerate(weights) if w == stride and sizes[i] == size and digits[i] == 0]
            if not hit:
                raise Unsupported(f"an offset of {stride} per mesh coordinate on an axis of {sizes}")
            digits[hit[0]] = variable
        # kept leaves are a subsequence; match from the fast end
        marks: list[Index | None] = list(digits)
        i = len(whole) - 1
        expected = step
        for a in reversed(kept):
            while i >= 0 and not (whole[i] is a and weights[i] == expected):
                i -= 1
            if i < 0 or digits[i] != 0:
                raise Unsupported(f"a piece {kept} of {whole}")
            marks[i] = None
            expected *= a.size
            i -= 1
        return marks

    def _sliced(self, p: Poly, given: Sequence[Axis], dims: Sequence[Axis], d: int, offset: Offset, step: int) -> Poly:
        if step < 0:
            raise Unsupported("a reversed axis")
        whole, kept = self.leaves([given[d]]), self.leaves([dims[d]])
        marks = self._fixed_digits(whole, kept, offset, step)
        old, new = self._spans(given), self._spans(dims)
        names: dict[Index, Index] = {}
        for e in range(len(dims)):
            if e != d:
                names.update(zip(old[e], new[e], strict=True))
        target = iter(new[d])
        for v, mark in zip(old[d], marks, strict=True):
            names[v] = next(target) if mark is None else mark
        return self.kernel.substitute(p, names)

    def _padded(self, p: Poly, given: Sequence[Axis], dims: Sequence[Axis], d: int, offset: Offset) -> Poly:
        """Zero outside: δ of the digits that say where the tensor lies."""
        whole, kept = self.leaves([dims[d]]), self.leaves([given[d]])
        marks = self._fixed_digits(whole, kept, offset)
        old, new = self._spans(given), self._spans(dims)
        names: dict[Index, Index] = {}
        for e in range(len(dims)):
            if e != d:
                names.update(zip(old[e], new[e], strict=True))
        names.update(zip(old[d], [w for w, mark in zip(new[d], marks, strict=True) if mark is None], strict=True))
        result = self.kernel.substitute(p, names)
        for w, mark, a in zip(new[d], marks, whole, strict=True):
            if mark is not None:
                result = self.kernel.times(self.kernel.delta(a.size, w, mark), result)
        return result

    def _concat(self, args: list[Poly], given: list[list[Axis]], dims: Sequence[Axis], d: int) -> Poly:
        result: Poly = {}
        start = 0
        for p, axes in zip(args, given, strict=True):
            result = self.kernel.add(result, self._padded(p, axes, dims, d, Offset(start)))
            start += axes[d].size
        return self.kernel.collapse(result)

    def _iota(self, node: Node, dims: Sequence[Axis], line: Line | None, offset: Offset) -> Poly:
        """Digits times weights; digits that the offset fixes are constants of the line's axis."""
        k = self.kernel
        step = node.attrs[1]
        kept = self.leaves(dims)
        root = None if line is None else line.root()
        whole = kept if root is None or root.axis is None else self.leaves([root.axis])
        plain = root is None or root.axis is None
        if plain and offset.strides:
            raise Unsupported("integers that start elsewhere on every rank")
        marks = [None] * len(kept) if plain else self._fixed_digits(whole, kept, offset, step)
        result = constant(offset.base) if plain else {}
        at = 0
        for i, (a, mark) in enumerate(zip(whole, marks, strict=True)):
            weight = math.prod(b.size for b in whole[i + 1 :]) * (step if plain else 1)
            index: Index
            if mark is None:
                at += 1
                index = -at
            else:
                index = mark
            result = k.add(result, scale(k.iota(a.size, index), weight))
        return result

    def _label(self, p: Poly) -> tuple[str, tuple[int, ...], tuple[Index, ...]] | None:
        """An integer input by itself: its name, sizes and indices."""
        if len(p) == 1:
            ((m, c),) = p.items()
            if c == 1 and len(m) == 1 and m[0][2] == 1 and self.kernel.atoms[m[0][0]].kind == "input":
                a = self.kernel.atoms[m[0][0]]
                if a.data in self.domains and self.domains[a.data].kind == "ids":
                    return a.data, a.sizes, m[0][1]
        return None

    def _digits_of(self, name: tuple[str, tuple[int, ...], tuple[Index, ...]], leaves: Leaves, at: Sequence[Index]) -> Poly:
        k = self.kernel
        result = constant(1)
        for i, (a, index) in enumerate(zip(leaves, at, strict=True)):
            result = k.times(result, k.digit(*name, i, len(leaves), a.size, index))
        return result if leaves else k.valid(*name)

    def _one_hot(self, p: Poly, given: Sequence[Axis], depth: Axis, line: Line | None, offset: Offset) -> Poly:
        k = self.kernel
        root = None if line is None else line.root()
        if root is None or root.axis is None:
            raise Unsupported("one-hot of integers of unknown range")
        whole, kept = self.leaves([root.axis]), self.leaves([depth])
        marks = self._fixed_digits(whole, kept, offset)
        used = len(self.leaves(given))
        fresh = iter(-1 - (used + i) for i in range(len(kept)))
        at = [next(fresh) if mark is None else mark for mark in marks]
        name = self._label(p)
        if name is not None:
            return self._digits_of(name, whole, at)
        digits = self._iota_digits(p, whole)
        if digits is None:
            raise Unsupported("one-hot of computed integers")
        result = constant(1)
        for a, have, want in zip(whole, digits, at, strict=True):
            result = k.times(result, k.delta(a.size, have, want))
        return result

    def _iota_digits(self, p: Poly, whole: Leaves) -> list[Index] | None:
        """Digits of an integer that is Σ weight · iota."""
        found: list[Index] = []
        rest = dict(p)
        for i, a in enumerate(whole):
            weight = math.prod(b.size for b in whole[i + 1 :])
            hit = [
                m
                for m, c in rest.items()
                if c == weight
                and len(m) == 1
                and self.kernel.atoms[m[0][0]].data == a.size
                and m[0][2] == 1
                and self.kernel.atoms[m[0][0]].kind == "iota"
            ]
            if len(hit) != 1:
                return None
            found.append(hit[0][0][1][0])
            del rest[hit[0]]
        return None if rest else found

    def _gather(self, node: Node, args: list[Poly], given: list[list[Axis]], axes: NodeAxes) -> Poly:
        """Σ_n D(ids)[n]·x[n], x finite."""
        k = self.kernel
        (d,) = node.attrs
        x_dims, id_dims = given
        hot = self._one_hot(args[1], id_dims, x_dims[d], axes.lines[id(node.args[1])], Offset(0))
        out = self._spans(id_dims)
        used = len(self.leaves(id_dims))
        names: dict[Index, Index] = {}
        over: dict[Index, int] = {}
        fresh_hot: dict[Index, Index] = {}
        for e, (span, leaves) in enumerate(zip(self._spans(x_dims), self.per_dim(x_dims), strict=True)):
            if e == d:
                for i, (v, a) in enumerate(zip(span, leaves, strict=True)):
                    b = k.bound()
                    names[v] = b
                    over[b] = a.size
                    fresh_hot[-1 - (used + i)] = b
            else:
                names.update(zip(span, out[e], strict=True))
        x = k.substitute(k.finite(args[0]), names)
        return k.sum(k.times(k.substitute(hot, fresh_hot), k.single(x)), over)

    def _rowwise(self, node: Node, p: Poly, given: Sequence[Axis]) -> Poly:
        raise Unsupported(f"{node.attrs[0]} along an axis")


def _digits(value: int, sizes: Sequence[int]) -> list[int]:
    """Mixed-radix digits, slow first."""
    found = []
    for s in reversed(sizes):
        value, d = divmod(value, s)
        found.append(d)
    if value:
        raise Unsupported("an offset beyond the end of its axis")
    return found[::-1]
