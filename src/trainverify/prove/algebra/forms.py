"""The domain `axes`: what every primitive means on canonical forms over axes.

A tensor is a set of blocks (one, unless an axis is cut into unequal pieces); a block is a polynomial over position
variables: -1, -2, … are the leaf axes of its dimensions in order. A reshape changes nothing but the grouping, a transpose
renames, a slice fixes digits, a contraction is a Σ.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from trainverify.axes.inference import NodeAxes
from trainverify.axes.structure import Axis, is_shifted
from trainverify.ops.table import Lowered
from trainverify.primitives.node import Node, topological
from trainverify.prove.algebra.elements import called
from trainverify.prove.algebra.grids import Grid, Offset
from trainverify.prove.algebra.places import Dims, Value
from trainverify.prove.algebra.terms import (
    EVERYTHING,
    NOTHING,
    OF_ROOTS,
    OPAQUE,
    Index,
    Poly,
    Unsupported,
    alike,
    constant,
    family,
    scale,
    with_constant,
)
from trainverify.prove.algebra.windowed import Windowed
from trainverify.prove.strict import picks

_ROWS: Final = frozenset({"contract", "reduce", "rowwise", "gather", "one_hot", "window", "overlap"})  # take several elements to one


@dataclass
class Forms(Windowed):
    """Interprets nodes over one kernel and one set of axes."""

    strict: Collection[Node] = ()  # nodes of the op at hand that have a value wherever the logical program has one
    roots: Collection[Node] = ()  # others that are numbers there, or infinite

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
        must = node in self.strict
        k.assuming = EVERYTHING if must else OF_ROOTS if node in self.roots else NOTHING
        try:
            made = self._row_by_row(node, args, axes, offsets) if node.prim in _ROWS else self._node(node, args, axes, offsets)
            if must and k.reasons:
                for p in made.values():
                    self._has_value(p)
        finally:
            k.assuming = before
        return made

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
                return self._iota_blocks(node, dims, axes.lines[id(node)], offsets.get(id(node), Offset(node.attrs[0])))
            case "map":
                return {key: self.flat.through(lambda ps: self._map(node, ps, axes), [a[key] for a in args]) for key in grid.blocks()}
            case "select":
                return {key: self.flat.through(self._select, [a[key] for a in args]) for key in grid.blocks()}
            case "contract":
                return self._contract(node, args, given, dims)
            case "reduce":
                return self._reduce(node, args[0], given[0], dims)
            case "reshape":
                return self._reshape(args[0], given[0], dims)
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
                return self._hot_blocks(args[0], given[0], dims, axes.lines[id(node.args[0])], start)
            case "gather":
                return self._gather(node, args, given, axes)
            case "rowwise":
                return self._rowwise(node, args[0], given[0], dims)
            case "window":
                return self.window(node, args[0], given[0], dims)
            case "overlap":
                return self.overlap(node, args[0], given[0], dims)
        raise Unsupported(f"primitive {node.prim}")

    def _reshape(self, value: Value, old: Dims, new: Dims) -> Value:
        before, after = ([(id(x.axis), x.owner) for x in self.grid(dims).leaves] for dims in (old, new))
        if before == after:
            return value
        self._sure(value)
        return self.flat.recast(value, old, new)

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

    def _contract(self, node: Node, args: list[Value], given: list[list[Axis]], dims: Dims, why: Unsupported | None = None) -> Value:
        """A Σ of products; by names alone, if it is said why."""
        k = self.kernel
        terms, target = node.attrs
        new = self.grid(dims)
        if any(0 in a.shape for a in node.args):  # a Σ of nothing needs nothing
            return {key: {} for key in new.blocks()}
        chosen = [picks(a) for a in node.args]  # of what is looked up by position, only that must have a value
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
                    total = self._row_named("sum", moved[0] if len(moved) == 1 else self._named(called(node), moved, None, why), over, why)
                    continue
                product = constant(1)
                for p, to, picked in zip(blocks, names, chosen, strict=True):
                    factor = k.substitute(k.finite(p) if picked or not any(chosen) else k.known_finite(p), to)
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

    def _gather(self, node: Node, args: list[Value], given: list[list[Axis]], axes: NodeAxes, why: Unsupported | None = None) -> Value:
        """Σ_n D(ids)[n]·x[n], x finite; by its name alone, if it is said why."""
        k = self.kernel
        (d,) = node.attrs
        x_dims, id_dims = given
        old, new = self.grid(x_dims), self.grid(id_dims)
        if new.tags or len(old.tags) > 1 or any(o not in old.spans[d] for o in old.tags):
            raise Unsupported("a look-up along unequal pieces")
        for e in range(len(x_dims)):
            if e != d:
                self.aligned([x_dims[e]], [id_dims[e]])
        names = {-1 - o: -1 - n for e in range(len(x_dims)) if e != d for o, n in zip(old.spans[e], new.spans[e], strict=True)}
        row = {-1 - o: k.bound() for o in old.spans[d]}
        fresh = {-1 - len(new.leaves) - i: v for i, v in enumerate(row.values())}
        if why is not None:
            if old.tags:
                raise why
            moved = [args[1][()], k.substitute(args[0][()], {**names, **row})]
            over = {row[-1 - o]: old.leaves[o].axis.size for o in old.spans[d]}
            return {(): self._row_named("look up", self._named("look up", moved, None, why), over, why)}
        hot = self._hot_blocks(args[1], id_dims, [*id_dims, x_dims[d]], axes.lines[id(node.args[1])], Offset(0))
        found: Poly = {}
        for key in old.blocks():
            over = {row[-1 - o]: old.leaves[o].axis.size for o in old.active(key) if o in old.spans[d]}
            x = k.substitute(k.number(args[0][key]), {**names, **row})
            found = k.add(found, k.sum(k.times(k.substitute(hot[key], fresh), k.single(x)), over))
        return {(): found}


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
