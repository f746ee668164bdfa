"""The domain `axes`: what every primitive means on canonical forms over axes.

A tensor is a set of blocks (one, unless an axis is cut into unequal pieces); a block is a polynomial over position
variables: -1, -2, … are the leaf axes of its dimensions in order. A reshape changes nothing but the grouping, a transpose
renames, a slice fixes digits, a contraction is a Σ.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

from trainverify.axes.inference import Line, NodeAxes
from trainverify.axes.structure import Axes, Axis, is_shifted
from trainverify.graph.program import Domain
from trainverify.ops.table import Lowered
from trainverify.primitives.node import Node, topological
from trainverify.prove.algebra.flat import Flat, Frame
from trainverify.prove.algebra.grids import Grid, Grids, Key, Offset, Spot, mixed_radix
from trainverify.prove.algebra.kernel import Kernel
from trainverify.prove.algebra.terms import (
    EVERYTHING,
    NOTHING,
    OF_ROOTS,
    OPAQUE,
    Index,
    Poly,
    Unsupported,
    alike,
    as_constant,
    constant,
    family,
    scale,
    with_constant,
)
from trainverify.prove.strict import picks

Value = dict[Key, Poly]  # blocks by their tags
Dims = Sequence[Axis]
_TRUTH: Final = frozenset({"lt", "le", "eq", "and", "or", "not", "as_bool"})  # functions that are 0 or 1
_ANY_ORDER: Final = frozenset({"add", "mul", "max", "min", "eq", "and", "or"})  # of their arguments
_NESTED: Final = frozenset({"add", "mul"})  # f(a, f(b, c)) = f(f(a, b), c), also of infinities and what has no value
_ROWS: Final = frozenset({"contract", "reduce", "rowwise", "gather", "one_hot"})  # primitives that take several elements to one


@dataclass
class Forms:
    """Interprets nodes over one kernel and one set of axes."""

    kernel: Kernel
    axes: Axes
    domains: dict[str, Domain] = field(default_factory=dict)
    mesh_sizes: dict[Index, int] = field(default_factory=dict)  # of mesh leaf variables
    where: str = ""  # the op at hand
    strict: Collection[int] = ()  # nodes of the op at hand that have a value wherever the logical program has one
    roots: Collection[int] = ()  # others that are numbers there, or infinite
    exps: dict[object, list[tuple[str, bool]]] = field(default_factory=dict)  # argument without maxima → (op, maximum subtracted)

    def __post_init__(self) -> None:
        self.grids = Grids(self.axes)
        self.flat = Flat(self.kernel, self.grids)
        self._slices: set[str] = set()  # names of slices of integer inputs

    def grid(self, dims: Dims) -> Grid:
        return self.grids.of(dims)

    # -- one op ------------------------------------------------------------------------------------------------------

    def op(self, lowered: Lowered, axes: NodeAxes, inputs: Sequence[Value | None], offsets: Mapping[int, Offset]) -> list[Value]:
        """Forms of an op's outputs; `offsets` says which node offsets depend on the mesh."""
        found: dict[int, Value] = {}
        for node in topological(lowered.outputs):
            if node.prim == "input":
                value = inputs[node.attrs[0]]
                assert value is not None
                found[id(node)] = value
            else:
                found[id(node)] = self._evaluated(node, [found[id(a)] for a in node.args], axes, offsets)
        return [found[id(o)] for o in lowered.outputs]

    def _evaluated(self, node: Node, args: list[Value], axes: NodeAxes, offsets: Mapping[int, Offset]) -> Value:
        """What a node makes. What its laws need holds if it must have a value; else it must be known, or no law is used."""
        k = self.kernel
        before = k.assuming
        must = id(node) in self.strict
        k.assuming = EVERYTHING if must else OF_ROOTS if id(node) in self.roots else NOTHING
        try:
            made = self._row_by_row(node, args, axes, offsets) if node.prim in _ROWS else self._node(node, args, axes, offsets)
            if must and k.reasons:
                for p in made.values():
                    self._has_value(p)
        finally:
            k.assuming = before
        return made

    def _has_value(self, p: Poly) -> None:
        """Note of an opaque function that it has a value."""
        if len(p) == 1:
            ((m, c),) = p.items()
            if c == 1 and len(m) == 1 and m[0][2] == 1 and self.kernel.is_opaque(m[0][0]) and self.kernel.wild(p):
                self.kernel.need("finite", m[0][0], m[0][1])

    def _node(self, node: Node, args: list[Value], axes: NodeAxes, offsets: Mapping[int, Offset]) -> Value:
        dims = axes.dims[id(node)]
        given = [axes.dims[id(a)] for a in node.args]
        grid = self.grid(dims)
        if 0 in node.shape:  # nothing, whatever it is
            return {key: {} for key in grid.blocks()}
        if node.prim in ("map", "select"):
            for other in given:
                self.aligned(other, dims)
        match node.prim:
            case "const":
                return {(): self._literal(node) if id(node) not in offsets else self._on_ranks(offsets[id(node)])}
            case "iota":
                return {(): self._iota(node, dims, axes.lines[id(node)], offsets.get(id(node), Offset(node.attrs[0])))}
            case "map":
                return {key: self.flat.through(lambda ps: self._map(node, ps, axes), [a[key] for a in args]) for key in grid.blocks()}
            case "select":
                return {key: self.flat.through(self._select, [a[key] for a in args]) for key in grid.blocks()}
            case "contract":
                return self._contract(node, args, given, dims)
            case "reduce":
                return self._reduce(node, args[0], given[0], dims)
            case "reshape":
                old, new = self.grid(given[0]).leaves, grid.leaves
                if [(id(x.axis), x.owner) for x in old] != [(id(x.axis), x.owner) for x in new]:
                    self._sure(args[0])
                    return self.flat.recast(args[0], given[0], dims)
                return args[0]
            case "transpose":
                return self._moved(args[0], given[0], dims, {p: i for i, p in enumerate(node.attrs[0])})
            case "broadcast":
                return self._moved(args[0], given[0], dims, dict(enumerate(node.attrs[0])))
            case "slice":
                d, start, step = node.attrs
                if step < 0:
                    raise Unsupported("a reversed axis")
                if is_shifted(dims[d], given[0][d]):
                    self._sure(args[0])
                    return self._shifted(args[0], given[0], dims, d, start)
                return self.piece(args[0], given[0], dims, d, offsets.get(id(node), Offset(start)), step)
            case "concat":
                return self._concat(args, given, dims, node.attrs[0])
            case "pad":
                d, low, _, value = node.attrs
                if value != 0:
                    raise Unsupported("padding with something else than zero")
                if is_shifted(given[0][d], dims[d]):
                    self._sure(args[0])
                    return self._put_back(args[0], given[0], dims, d, low)
                return self.padded(args[0], given[0], dims, d, offsets.get(id(node), Offset(low)))
            case "one_hot":
                start = offsets.get(id(node), Offset(node.attrs[0]))
                line = axes.lines[id(node.args[0])]
                return {key: self._one_hot(p, given[0], dims[-1], line, start) for key, p in args[0].items()}
            case "gather":
                return self._gather(node, args, given, axes)
            case "rowwise":
                return self._rowwise(node, args[0], given[0], dims)
        raise Unsupported(f"primitive {node.prim}")

    def _sure(self, value: Value) -> None:
        if any(self.kernel.wild(p) for p in value.values()):
            raise Unsupported("positions of what may have no value")

    def _row_by_row(self, node: Node, args: list[Value], axes: NodeAxes, offsets: Mapping[int, Offset]) -> Value:
        """A function of rows: by laws, or, if those need what is not known, by its name."""
        try:
            for value in args:
                self._sure(value)
            return self._node(node, args, axes, offsets)
        except Unsupported as why:
            return self._by_name(node, args, axes, why)

    def _by_name(self, node: Node, args: list[Value], axes: NodeAxes, why: Unsupported) -> Value:
        dims, given = axes.dims[id(node)], [axes.dims[id(a)] for a in node.args]
        match node.prim:
            case "contract":
                return self._contract(node, args, given, dims, why)
            case "reduce":
                return self._reduce(node, args[0], given[0], dims, why)
            case "rowwise":
                return self._rowwise(node, args[0], given[0], dims, why)
            case "gather":
                return self._gather(node, args, given, axes, why)
        raise why

    def _row_named(self, fn: str, p: Poly, over: Mapping[Index, int], why: Unsupported, at: Mapping[Index, int] | None = None) -> Poly:
        """A function of a row by its name."""
        if not over:
            return p
        at = at or {}
        made = self.kernel.row(f"row {OPAQUE}{fn}", p, over, list(at), list(at.values()))
        ((factor,),) = made
        self.kernel.reasons.setdefault(factor[0], why)
        return made

    def aligned(self, given: Dims, dims: Dims) -> None:
        """Dimensions that are to be the same are made of the same leaves; after a clash of axes they may not be."""
        if given is dims:
            return
        old, new = self.grid(given), self.grid(dims)
        if old is not new and (
            old.spans != new.spans or [(x.axis, x.owner) for x in old.leaves] != [(x.axis, x.owner) for x in new.leaves]
        ):
            raise Unsupported(f"axes that could not be aligned: {list(given)} and {list(dims)}")

    # -- scalars -----------------------------------------------------------------------------------------------------

    def _literal(self, node: Node) -> Poly:
        value = node.attrs[0]
        if isinstance(value, float):
            if math.isinf(value):
                return scale(self.kernel.fn("infinity", {}), 1 if value > 0 else -1)
            if math.isnan(value):
                raise Unsupported("a literal that is not a number")
        return constant(Fraction(value) if isinstance(value, float) else int(value) if isinstance(value, bool) else value)

    def _on_ranks(self, offset: Offset) -> Poly:
        """A literal that is another one on every rank."""
        k = self.kernel
        found = k.add(constant(offset.base), *(scale(k.iota(self.mesh_sizes[v], v), step) for v, step in offset.strides))
        return found if offset.over == 1 else scale(found, Fraction(1, offset.over))

    def _infinite(self, p: Poly) -> int:
        """+1 or −1 for the literal infinities, else 0."""
        if len(p) == 1:
            ((m, c),) = p.items()
            if len(m) == 1 and self.kernel.name(m[0][0]) == "infinity":
                return 1 if c > 0 else -1
        return 0

    def _map(self, node: Node, args: list[Poly], axes: NodeAxes) -> Poly:
        """A function of elements: by laws, or, if those need what is not known, by its name."""
        fn, param = _name(node), node.attrs[1] if len(node.attrs) > 1 else None
        if any(self.kernel.wild(a) for a in args):
            return self._named(fn, args, param, Unsupported("an argument that may have no value"))
        try:
            return self._by_laws(node, args, axes)
        except Unsupported as why:
            return self._named(fn, args, param, why)

    def _named(self, fn: str, args: Sequence[Poly], param: Any, why: Unsupported) -> Poly:
        """A function by its name. Sums and products have no order."""
        k = self.kernel
        given: list[Poly] = []
        for a in args:
            inner = next(iter(a))[0] if fn in _NESTED and len(a) == 1 and [*a.values()] == [1] and len(next(iter(a))) == 1 else None
            nested = inner is not None and inner[2] == 1 and k.name(inner[0]) == OPAQUE + fn
            given += k.arguments(inner[0], inner[1]) if inner is not None and nested else [a]
        if fn in _ANY_ORDER:
            given.sort(key=lambda p: repr(k.encode(p)))
        truth = fn in _TRUTH
        return k.opaque(fn, given, param, why, indicator=truth, nonnegative=truth)

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
                return k.multiply(k.finite(args[0]), k.finite(args[1]))
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
        if any(self._infinite(a) for a in args):
            raise Unsupported("add of infinity")
        return self.kernel.plus(*args)

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

    # -- structure ---------------------------------------------------------------------------------------------------

    def _moved(self, value: Value, given: Dims, dims: Dims, into: Mapping[int, int]) -> Value:
        """Dimension d of the argument becomes dimension into[d]; the value does not depend on the others."""
        old, new = self.grid(given), self.grid(dims)
        to = {o: n for d, e in into.items() for o, n in zip(old.spans[d], new.spans[e], strict=True)}
        spots = [Spot("kept", to[o]) for o in range(len(old.leaves))]
        return self._seen(value, old, new, spots)

    def _seen(self, value: Value, old: Grid, new: Grid, spots: Sequence[Spot]) -> Value:
        """A value looked at through spots: for every leaf of the old grid, where it comes from in the new one."""
        out: Value = {}
        names = {-1 - o: -1 - s.value if s.kind == "kept" else s.value for o, s in enumerate(spots) if s.kind in ("kept", "fixed")}
        for key in new.blocks():
            tags = dict(zip(new.tags, key, strict=True))
            source = []
            for o in old.tags:
                s = spots[o]
                if s.kind == "fixed":
                    if s.value < 0:
                        raise Unsupported("a piece that differs between ranks of one program")
                    source.append(s.value)
                elif s.kind == "none":
                    source.append(0)
                else:
                    source.append(tags[s.value] + s.shift)
            out[key] = self.kernel.substitute(value[tuple(source)], names)
        return out

    def _spots(self, d: int, grid: Grid, other: Grid, inner: Sequence[Spot]) -> list[Spot]:
        """Spots of a whole tensor from those of its dimension d; the other dimensions stay as they are."""
        result: list[Spot] = []
        for e, span in enumerate(grid.spans):
            if e == d:
                if len(inner) != len(span):
                    raise Unsupported("axes that could not be aligned")
                base = other.spans[e].start
                result += [Spot(s.kind, s.value + base if s.kind in ("kept", "shifted") else s.value, s.shift, s.count) for s in inner]
            else:
                result += [Spot("kept", n) for n in other.spans[e]]
                if [grid.leaves[i].axis for i in span] != [other.leaves[i].axis for i in other.spans[e]]:
                    raise Unsupported("axes that could not be aligned")
        return result

    def piece(self, value: Value, given: Dims, dims: Dims, d: int, offset: Offset, step: int = 1) -> Value:
        """A slice along dimension d."""
        old, new = self.grid(given), self.grid(dims)
        inner = self.grids.place(given[d], dims[d], offset, self.mesh_sizes, step)
        return self._seen(value, old, new, self._spots(d, old, new, inner))

    def _shifted(self, value: Value, given: Dims, dims: Dims, d: int, start: int) -> Value:
        """A slice along dimension d that has an axis of its own: its position p is position start + p."""
        k, old, new = self.kernel, self.grid(given), self.grid(dims)
        frame, (at,) = self._frame(given[d], start, dims[d].size), new.spans[d]
        digits = self.flat.coordinates(frame, -1 - at)
        names = self._beside(given, dims, d) | {-1 - o: v for o, v in zip(old.spans[d], digits, strict=True)}
        return {key: self.flat.said(k.substitute(k.finite(p), names), digits, frame, -1 - at) for key, p in value.items()}

    def _put_back(self, value: Value, given: Dims, dims: Dims, d: int, start: int) -> Value:
        """Such a slice at its place, and zeros: Σ over its positions p of [position = start + p] · value."""
        k, old, new = self.kernel, self.grid(given), self.grid(dims)
        frame, (at,), p = self._frame(dims[d], start, given[d].size), old.spans[d], k.bound()
        digits = [-1 - n for n in new.spans[d]]
        names = self._beside(given, dims, d) | {-1 - at: p}
        return {key: self.flat.put_back(k.substitute(k.finite(x), names), frame, digits, p) for key, x in value.items()}

    def _frame(self, whole: Axis, start: int, length: int) -> Frame:
        grid = self.grid([whole])
        if grid.tags:
            raise Unsupported(f"a shifted piece of unequal pieces {whole!r}")
        return Frame(tuple(leaf.axis.size for leaf in grid.leaves), start, length)

    def _beside(self, given: Dims, dims: Dims, d: int) -> dict[Index, Index]:
        """The positions of all dimensions but d."""
        old, new = self.grid(given), self.grid(dims)
        names: dict[Index, Index] = {}
        for e, (a, b) in enumerate(zip(given, dims, strict=True)):
            if e != d:
                self.aligned([a], [b])
                names.update({-1 - o: -1 - n for o, n in zip(old.spans[e], new.spans[e], strict=True)})
        return names

    def padded(self, value: Value, given: Dims, dims: Dims, d: int, offset: Offset) -> Value:
        """Zero outside: δ of the digits, and the tags, that say where the tensor lies."""
        k = self.kernel
        old, new = self.grid(given), self.grid(dims)
        inner = self.grids.place(dims[d], given[d], offset, self.mesh_sizes)
        spots = self._spots(d, new, old, inner)  # for every leaf of the result, where it comes from in the argument
        names = {-1 - s.value: -1 - n for n, s in enumerate(spots) if s.kind == "kept" and not new.leaves[n].tag}
        out: Value = {}
        for key in new.blocks():
            source: dict[int, int] = {}
            inside = True
            for n, t in zip(new.tags, key, strict=True):
                s = spots[n]
                if s.kind == "fixed":
                    inside &= s.value == t
                elif s.kind == "shifted":
                    inside &= s.shift <= t < s.shift + s.count
                    source[s.value] = t - s.shift
                elif s.kind == "kept":
                    source[s.value] = t
            if not inside:
                out[key] = {}
                continue
            if any(o not in source for o in old.tags):
                raise Unsupported("axes that could not be aligned")
            result = k.substitute(value[tuple(source[o] for o in old.tags)], names)
            for n, s in enumerate(spots):
                if s.kind == "fixed" and not new.leaves[n].tag:
                    result = k.times(k.delta(new.leaves[n].axis.size, -1 - n, s.value), result)
            out[key] = result
        return out

    def _concat(self, args: list[Value], given: list[list[Axis]], dims: Dims, d: int) -> Value:
        parts = []
        start = 0
        for value, axes in zip(args, given, strict=True):
            if axes[d].size:
                parts.append(self.padded(value, axes, dims, d, Offset(start)))
            start += axes[d].size
        return {key: self.kernel.collapse(self.kernel.add(*(p[key] for p in parts))) for key in parts[0]}

    def _contract(self, node: Node, args: list[Value], given: list[list[Axis]], dims: Dims, why: Unsupported | None = None) -> Value:
        """A Σ of products; by names alone, if it is said why."""
        k = self.kernel
        terms, target = node.attrs
        new = self.grid(dims)
        grids = [self.grid(g) for g in given]
        place = {label: [-1 - n for n in new.spans[i]] for i, label in enumerate(target)}
        summed: dict[int, tuple[Grid, range]] = {}  # label → a grid that has it, and its span there
        axes_of = dict(zip(target, dims, strict=True))
        for term, g, axes in zip(terms, grids, given, strict=True):
            for label, span, axis in zip(term, g.spans, axes, strict=True):
                self.aligned([axes_of.setdefault(label, axis)], [axis])
                if label not in place:
                    place[label] = [k.bound() for _ in span]
                    summed[label] = (g, span)
        names = []
        for term, g in zip(terms, grids, strict=True):
            names.append({-1 - o: v for label, span in zip(term, g.spans, strict=True) for o, v in zip(span, place[label], strict=True)})
        tagged = [(label, g.leaves[i], i - span.start) for label, (g, span) in summed.items() for i in span if g.leaves[i].tag]
        flat = any(axes_of[label].root().flat for label in summed)
        hidden = [(place[label][i], leaf.axis.size) for label, leaf, i in tagged]
        out: Value = {}
        for key in new.blocks():
            total: Poly = {}
            outer = {-1 - n: t for n, t in zip(new.tags, key, strict=True)}
            for choice in itertools.product(*(range(size) for _, size in hidden)):
                tags = {**outer, **dict(zip((v for v, _ in hidden), choice, strict=True))}
                over: dict[Index, int] = {}
                skip = False
                for label, (g, span) in summed.items():
                    live, dead = _live(g, span, place[label], tags)
                    over.update(live)
                    skip |= any(tags[v] != 0 for v in dead)  # a tag inside a piece that is not chosen counts once
                if skip:
                    continue
                blocks = [value[tuple(tags[to[-1 - o]] for o in g.tags)] for value, g, to in zip(args, grids, names, strict=True)]
                if why is not None:
                    if hidden or flat:
                        raise why
                    moved = [k.substitute(p, to) for p, to in zip(blocks, names, strict=True)]
                    total = self._row_named("sum", moved[0] if len(moved) == 1 else self._named(_name(node), moved, None, why), over, why)
                    continue
                product = constant(1)
                for p, to in zip(blocks, names, strict=True):
                    factor = k.substitute(k.finite(p), to)
                    product = factor if len(args) == 1 else k.joint(product, factor)
                total = k.add(total, self.flat.sum(product, over, flat))
            out[key] = k.collapse(total) if hidden else total  # all blocks of one form are a Σ over them
        return out

    def _reduce(self, node: Node, value: Value, given: Dims, dims: Dims, why: Unsupported | None = None) -> Value:
        """A maximum or minimum; by its name alone, if it is said why."""
        fn, gone = node.attrs
        if why is None and (fn == "prod" or any(given[d].size == 0 for d in gone)):
            raise Unsupported("a product over an axis" if fn == "prod" else f"the {fn} of nothing")
        k = self.kernel
        old, new = self.grid(given), self.grid(dims)
        names: dict[Index, Index] = {}
        kept = iter(range(len(new.leaves)))
        for d, span in enumerate(old.spans):
            names.update({-1 - o: k.bound() if d in gone else -1 - next(kept) for o in span})
        sign = 1 if fn == "max" else -1
        hidden = [o for d in gone for o in old.spans[d] if old.leaves[o].tag]
        out: Value = {}
        for key in new.blocks():
            outer = {-1 - n: t for n, t in zip(new.tags, key, strict=True)}
            found: list[Poly] = []
            for choice in itertools.product(*(range(old.leaves[o].axis.size) for o in hidden)):
                tags = {**outer, **dict(zip((names[-1 - o] for o in hidden), choice, strict=True))}
                over: dict[Index, int] = {}
                skip = False
                for d in gone:
                    live, dead = _live(old, old.spans[d], [names[-1 - o] for o in old.spans[d]], tags)
                    over.update(live)
                    skip |= any(tags[v] != 0 for v in dead)
                if not skip:
                    p = k.substitute(value[tuple(tags[names[-1 - o]] for o in old.tags)], names)
                    found.append(k.maximum(scale(p, sign), over) if why is None else self._row_named(fn, p, over, why))
            if why is not None and len(found) != 1:
                raise why
            out[key] = scale(self._largest(found), sign) if why is None else found[0]
        return out

    def _largest(self, several: Sequence[Poly]) -> Poly:
        """The maximum of the maxima over pieces; over all of them, if they are one form."""
        k = self.kernel
        if all(len(p) == 1 and set(p.values()) == {1} for p in several):
            together = k.add(*several)
            found = next((f for same in alike(together) if (f := family(k.atoms, together, same)) is not None), None)
            if found is not None and len(found[0]) == len(together) == len(several):
                _, base, differ, n, _ = found
                v = k.bound()
                return k.maximum(k.monomial(with_constant(base, differ, v)), {v: n})
        largest, *others = sorted(several, key=lambda p: repr(self.kernel.encode(p)))
        for p in others:
            largest = self._extremum(largest, p, 1)
        return largest

    def _rowwise(self, node: Node, value: Value, given: Dims, dims: Dims, why: Unsupported | None = None) -> Value:
        """Sorting and choosing along a dimension: a function of the whole row; a cumulative sum is a Σ with a mask, if it is not said why
        not."""
        fn, d, descending = node.attrs
        k = self.kernel
        old, new = self.grid(given), self.grid(dims)
        if any(old.leaves[o].tag for o in old.spans[d]):
            raise Unsupported(f"{fn} along unequal pieces")
        gone = fn in ("argmax", "argmin")
        result = [] if gone else list(new.spans[d])
        rows = [-1 - o for o in old.spans[d]]
        kept = [n for n in range(len(new.leaves)) if n not in result]
        stay = [-1 - o for o in range(len(old.leaves)) if -1 - o not in rows]
        names: dict[Index, Index] = dict(zip(stay, [-1 - n for n in kept], strict=True))
        over: dict[Index, int] = {}
        for o in old.spans[d]:
            names[-1 - o] = k.bound()
            over[names[-1 - o]] = old.leaves[o].axis.size
        out: Value = {}
        for key in new.blocks():
            tags = dict(zip(new.tags, key, strict=True))
            source = value[tuple(tags[-1 - names[-1 - o]] for o in old.tags)]
            # positions of the largest are defined among −∞ too
            p = k.substitute(source if fn.startswith("arg") or why is not None else k.number(source), names)
            if fn == "cumsum" and why is None:
                below = k.add(
                    self._number([(names[-1 - o], old.leaves[o].axis.size) for o in old.spans[d]]),
                    scale(self._number([(-1 - n, new.leaves[n].axis.size) for n in result]), -1),
                )
                mask = k.add(constant(1), scale(k.indicator_of("gt0", below), -1))
                out[key] = k.sum(k.times(k.single(mask, indicator=True), k.single(p)), over)
                continue
            active = [n for n in new.active(key) if n in result]
            chosen = [tags[n] for n in result if n in new.tags]
            at = {-1 - n: new.leaves[n].axis.size for n in active}
            name = " ".join(map(str, [fn, int(descending), *chosen]))
            if why is None or fn.startswith("arg"):
                out[key] = k.row(f"row {name}", p, over, list(at), list(at.values()))
            else:
                out[key] = self._row_named(name, p, over, why, at)
        return out

    def _number(self, digits: Sequence[tuple[Index, int]]) -> Poly:
        """The integer with these digits (index, size), slow first."""
        result: Poly = {}
        for i, (v, size) in enumerate(digits):
            result = self.kernel.add(result, scale(self.kernel.iota(size, v), math.prod(s for _, s in digits[i + 1 :])))
        return result

    # -- integers ----------------------------------------------------------------------------------------------------

    def _plain(self, axis: Axis) -> list[Axis]:
        """Leaves of an axis on which integers count; it must not be cut into unequal pieces."""
        grid = self.grid([axis])
        if grid.tags:
            raise Unsupported(f"integers on an axis of unequal pieces {axis!r}")
        return [leaf.axis for leaf in grid.leaves]

    def _fixed_digits(self, whole: Axis, piece: Axis, offset: Offset) -> list[Index | None]:
        """For every leaf of an axis the digit that an offset fixes, or None for those that are kept."""
        self._plain(whole)
        spots = self.grids.place(whole, piece, offset, self.mesh_sizes)
        return [None if s.kind == "kept" else s.value for s in spots]

    def _iota(self, node: Node, dims: Sequence[Axis], line: Line | None, offset: Offset) -> Poly:
        """Digits times weights; digits that the offset fixes are constants of the line's axis. Without such an axis, start and count."""
        k = self.kernel
        step = node.attrs[1]
        root = None if line is None else line.root()
        kept = self._plain(dims[0])
        whole = kept
        marks: list[Index | None] = [None] * len(kept)
        plain = root is None or root.axis is None
        if root is not None and root.axis is not None:
            if step != 1:
                raise Unsupported("integers with a step")
            try:
                whole, marks = self._plain(root.axis), self._fixed_digits(root.axis, dims[0], offset)
            except Unsupported:  # no digits of that axis, but still numbers
                plain = True
        result = self._on_ranks(offset) if plain else {}
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
            if c == 1 and len(m) == 1 and m[0][2] == 1 and self.kernel.atoms[m[0][0]].kind == "at":
                return self._shifted_label(*m[0][:2])
            if c == 1 and len(m) == 1 and m[0][2] == 1 and self.kernel.atoms[m[0][0]].kind == "input":
                a = self.kernel.atoms[m[0][0]]
                domain = self.domains.get(a.data)
                if domain is not None and domain.kind == "ids" and domain.size is not None:
                    return a.data, a.sizes, m[0][1]
            if c == 1 and len(m) == 1 and m[0][2] == 1 and self.kernel.atoms[m[0][0]].kind.startswith("row arg"):
                a = self.kernel.atoms[m[0][0]]  # positions chosen by sorting: always in range
                name = f"@{a.uid}"
                while name in self.domains:  # an input of the program may be called so
                    name += "'"
                self.kernel.always_valid.add(name)
                return name, a.sizes, m[0][1]
        return None

    def _masked_label(self, p: Poly) -> tuple[Poly, tuple[str, tuple[int, ...], tuple[Index, ...]]] | None:
        """An integer input times indicators, as `where(mask, ids, 0)` is: the indicators and the input."""
        if len(p) != 1:
            return None
        ((m, c),) = p.items()
        rest = [f for f in m if not self.kernel.atoms[f[0]].indicator]
        if c != 1 or len(rest) != 1 or len(m) == 1:
            return None
        name = self._label({(rest[0],): 1})
        return None if name is None else (self.kernel.monomial([f for f in m if f is not rest[0]]), name)

    def _masked_hot(self, mask: Poly, hot: Poly, whole: Sequence[Axis], at: Sequence[Index]) -> Poly:
        """The one-hot of an integer where the mask is 1, and that of 0 elsewhere."""
        k = self.kernel
        zero = constant(1)
        for a, index in zip(whole, at, strict=True):
            zero = k.times(zero, k.delta(a.size, 0, index))
        return k.add(k.times(mask, hot), k.times(k.add(constant(1), scale(mask, -1)), zero))

    def _shifted_label(self, uid: int, idx: tuple[Index, ...]) -> tuple[str, tuple[int, ...], tuple[Index, ...]] | None:
        """A slice of an integer input: integers of the same range, under a name of their own."""
        a = self.kernel.atoms[uid]
        inner = self.kernel.atoms[a.data[0]]
        domain = self.domains.get(inner.data) if inner.kind == "input" else None
        if domain is None or domain.kind != "ids" or domain.size is None:
            return None
        name = f"@at {uid}"
        if name not in self._slices:
            if name in self.domains:
                raise Unsupported(f"an input called {name}")
            self._slices.add(name)
            self.domains[name] = domain
            if inner.data in self.kernel.always_valid:
                self.kernel.always_valid.add(name)
        return name, a.sizes, idx

    def _range(self, name: str, axis: Axis) -> None:
        """Digits of an integer input count its whole range: outside of it there would be values that are no digits."""
        if name in self.domains and self.domains[name].size != axis.size:
            raise Unsupported(f"integers below {self.domains[name].size} counting to {axis.size}")

    def _digits_of(self, name: tuple[str, tuple[int, ...], tuple[Index, ...]], leaves: Sequence[Axis], at: Sequence[Index]) -> Poly:
        k = self.kernel
        result = constant(1)
        for i, (a, index) in enumerate(zip(leaves, at, strict=True)):
            result = k.times(result, k.digit(*name, i, len(leaves), a.size, index))
        return result if leaves else k.valid(*name)

    def _one_hot(self, p: Poly, given: Dims, depth: Axis, line: Line | None, offset: Offset) -> Poly:
        k = self.kernel
        root = None if line is None else line.root()
        if root is None or root.axis is None:
            raise Unsupported("one-hot of integers of unknown range")
        whole = self._plain(root.axis)
        marks = self._fixed_digits(root.axis, depth, offset)
        used = len(self.grid(given).leaves)
        fresh = iter(-1 - (used + i) for i in range(len(self._plain(depth))))
        at = [next(fresh) if mark is None else mark for mark in marks]
        name = self._label(p)
        if name is not None:
            self._range(name[0], root.axis)
            return self._digits_of(name, whole, at)
        masked = self._masked_label(k.flat(p))
        if masked is not None:
            mask, name = masked
            self._range(name[0], root.axis)
            return self._masked_hot(mask, self._digits_of(name, whole, at), whole, at)
        digits = self._iota_digits(k.flat(p), whole)
        if digits is None:
            raise Unsupported("one-hot of computed integers")
        result = constant(1)
        for a, have, want in zip(whole, digits, at, strict=True):
            result = k.times(result, k.delta(a.size, have, want))
        return result

    def _iota_digits(self, p: Poly, whole: Sequence[Axis]) -> list[Index] | None:
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

    def _gather(self, node: Node, args: list[Value], given: list[list[Axis]], axes: NodeAxes, why: Unsupported | None = None) -> Value:
        """Σ_n D(ids)[n]·x[n], x finite; by its name alone, if it is said why."""
        k = self.kernel
        (d,) = node.attrs
        x_dims, id_dims = given
        old, new = self.grid(x_dims), self.grid(id_dims)
        if old.tags or new.tags:
            raise Unsupported("a look-up along unequal pieces")
        for e in range(len(x_dims)):
            if e != d:
                self.aligned([x_dims[e]], [id_dims[e]])
        names: dict[Index, Index] = {}
        over: dict[Index, int] = {}
        fresh: dict[Index, Index] = {}
        for e, span in enumerate(old.spans):
            if e == d:
                for i, o in enumerate(span):
                    b = k.bound()
                    names[-1 - o] = b
                    over[b] = old.leaves[o].axis.size
                    fresh[-1 - (len(new.leaves) + i)] = b
            else:
                names.update({-1 - o: -1 - n for o, n in zip(span, new.spans[e], strict=True)})
        if why is not None:
            moved = [args[1][()], k.substitute(args[0][()], names)]
            return {(): self._row_named("look up", self._named("look up", moved, None, why), over, why)}
        hot = self._one_hot(args[1][()], id_dims, x_dims[d], axes.lines[id(node.args[1])], Offset(0))
        x = k.substitute(k.number(args[0][()]), names)
        return {(): k.sum(k.times(k.substitute(hot, fresh), k.single(x)), over)}


def _name(node: Node) -> str:
    """What a node is called where no law is used: within an op, a product with what is looked up is no product, 0·∞ does not occur."""
    fn = str(node.attrs[0]) if node.prim == "map" else "mul"
    return "pick" if fn == "mul" and any(picks(a) for a in node.args) else fn


def _in_range(domain: Domain) -> bool:
    """Whether the value to ignore is one of the ids."""
    return domain.size is not None and domain.ignore is not None and 0 <= domain.ignore < domain.size


def _live(grid: Grid, span: range, place: list[Index], tags: Mapping[Index, int]) -> tuple[dict[Index, int], list[Index]]:
    """Summation variables of one dimension under a choice of tags, and tags that do not count under it."""
    live: dict[Index, int] = {}
    dead: list[Index] = []
    alive: set[int] = set()
    for i in span:
        leaf = grid.leaves[i]
        v = place[i - span.start]
        if leaf.owner is None or (leaf.owner[0] in alive and tags[place[leaf.owner[0] - span.start]] == leaf.owner[1]):
            if leaf.tag:
                alive.add(i)
            else:
                live[v] = leaf.axis.size
        elif leaf.tag:
            dead.append(v)
    return live, dead
