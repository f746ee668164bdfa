"""What primitives mean where every cut is listed: a tensor has one form per combination of listed digits.

Slices, concats, shards and views only choose blocks; sums and maxima over listed digits are sums and maxima of several forms. Trusted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np

from trainverify.axes.inference import Line, NodeAxes
from trainverify.axes.listed import ListedAxes
from trainverify.axes.structure import Axis
from trainverify.ops.table import Lowered
from trainverify.primitives.node import Node, topological
from trainverify.prove.algebra.forms import Forms
from trainverify.prove.algebra.grids import Grid, Grids, Key, Leaf, Offset, mixed_radix
from trainverify.prove.algebra.places import Dims, Value
from trainverify.prove.algebra.terms import Index, Poly, Unsupported, as_constant, constant, scale

BLOCKS: Final = 20_000  # of one tensor
ELEMENTS: Final = 1_000_000  # of a dimension whose positions are looked at

Positions = np.ndarray[Any, Any]


class ListedGrids(Grids):
    """Grids in which a listed digit is a tag by itself."""

    def _expand(self, axis: Axis, owner: tuple[int, int] | None, into: list[Leaf]) -> None:
        into += [Leaf(a, ListedAxes.listed(a)) for a in self.axes.leaves([axis])]


@dataclass(frozen=True)
class Stretch:
    """Some digits of a value and where they come from in another one.

    `table` has, by the listed digits of the new value, those of the old one; `kept` pairs digits that stay variables.
    """

    old: tuple[int, ...]  # tags
    new: tuple[int, ...]
    table: Mapping[Key, Key]
    kept: tuple[tuple[int, int], ...]


class ListedForms(Forms):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.grids = ListedGrids(self.axes)
        self._related: dict[object, tuple[dict[Key, Key], tuple[tuple[int, int], ...], object]] = {}
        self._views: dict[tuple[Grid, Grid], list[Stretch]] = {}
        self.steps: list[tuple[Node, Value, Dims]] = []  # within the last op
        self.tensors: set[int] = set()  # sums that are a logical tensor: exp and maxima see their names only
        self.kernel.closed = lambda uid: uid in self.tensors and not self.kernel.infinite(uid)

    def grid(self, dims: Dims) -> Grid:
        made = super().grid(dims)
        if (count := math.prod(made.leaves[t].axis.size for t in made.tags)) > BLOCKS:
            raise Unsupported(f"a tensor of {count} blocks")
        return made

    # -- digits ------------------------------------------------------------------------------------------------------

    def _relate(
        self, whole: Sequence[Axis], piece: Sequence[Axis], positions: Positions
    ) -> tuple[dict[Key, Key], tuple[tuple[int, int], ...]]:
        """How the digits of a piece, whose elements are these positions of the whole, say those of the whole.

        Listed digits of the whole must follow from those of the piece; the others must be one and the same digit on both sides.
        """
        if len(positions) > ELEMENTS:
            raise Unsupported(f"{len(positions)} positions")
        if positions.size and not 0 <= positions.min() <= positions.max() < math.prod(a.size for a in whole):
            raise Unsupported("positions beyond the end of an axis")
        key = (tuple(map(id, whole)), tuple(map(id, piece)), positions.tobytes())
        if key not in self._related:
            there = _digits(positions, [a.size for a in whole])
            here = _digits(np.arange(len(positions)), [a.size for a in piece])
            kept: list[tuple[int, int]] = []
            for i, a in enumerate(whole):
                if not ListedAxes.listed(a):
                    same = [j for j, b in enumerate(piece) if b is a and np.array_equal(there[i], here[j])]
                    if not same:
                        raise Unsupported(f"a piece {list(piece)} of {list(whole)}")
                    kept.append((i, same[0]))
            if {j for _, j in kept} != {j for j, b in enumerate(piece) if not ListedAxes.listed(b)}:
                raise Unsupported(f"a piece {list(piece)} of {list(whole)}")
            old = [there[i] for i, a in enumerate(whole) if ListedAxes.listed(a)]
            new = [here[j] for j, b in enumerate(piece) if ListedAxes.listed(b)]
            table: dict[Key, Key] = {}
            rows = np.unique(np.stack([*new, *old]), axis=1) if new or old else np.zeros((0, 1), dtype=int)
            for column in rows.T.tolist():
                mine, its = tuple(column[: len(new)]), tuple(column[len(new) :])
                if table.setdefault(mine, its) != its:
                    raise Unsupported(f"a piece {list(piece)} of {list(whole)}")
            self._related[key] = table, tuple(kept), (whole, piece)  # which keeps the axes: an id is one of a living object
        return self._related[key][:2]

    def _stretch(self, old: Grid, olds: Sequence[int], new: Grid, news: Sequence[int], positions: Positions) -> Stretch:
        table, kept = self._relate([old.leaves[i].axis for i in olds], [new.leaves[j].axis for j in news], positions)
        return Stretch(
            tuple(i for i in olds if old.leaves[i].tag),
            tuple(j for j in news if new.leaves[j].tag),
            table,
            tuple((olds[i], news[j]) for i, j in kept),
        )

    def _looked(self, value: Value, old: Grid, new: Grid, stretches: Sequence[Stretch]) -> Value:
        """Every block of the new value is one of the old value, under new names."""
        names: dict[Index, Index] = {-1 - o: -1 - n for s in stretches for o, n in s.kept}
        place = {n: i for i, n in enumerate(new.tags)}
        out: Value = {}
        for key in new.blocks():
            at: dict[int, int] = {}
            for s in stretches:
                its = s.table.get(tuple(key[place[n]] for n in s.new))
                if its is None:
                    raise Unsupported("a piece of an axis that has no position")
                at.update(zip(s.old, its, strict=True))
            out[key] = self.kernel.substitute(value[tuple(at[o] for o in old.tags)], names)
        return out

    def _placed_in(self, value: Value, old: Grid, new: Grid, stretches: Sequence[Stretch]) -> Value:
        """The other way: every block of the old value is one of the new value, the others are 0."""
        names: dict[Index, Index] = {-1 - n: -1 - o for s in stretches for o, n in s.kept}
        inverse = [{its: mine for mine, its in s.table.items()} for s in stretches]
        if any(len(i) != len(s.table) for i, s in zip(inverse, stretches, strict=True)):
            raise Unsupported("a position that is written twice")
        place = {o: i for i, o in enumerate(new.tags)}
        out: Value = {}
        for key in new.blocks():
            at: dict[int, int] = {}
            inside = True
            for s, back in zip(stretches, inverse, strict=True):
                mine = back.get(tuple(key[place[o]] for o in s.old))
                inside &= mine is not None
                at.update(zip(s.new, mine or (), strict=mine is not None))
            out[key] = self.kernel.substitute(value[tuple(at[n] for n in old.tags)], names) if inside else {}
        return out

    def viewed(self, value: Value, given: Dims, dims: Dims) -> Value:
        """The same elements in the same order, over other digits."""
        old, new = self.grid(given), self.grid(dims)
        if old is new or [x.axis for x in old.leaves] == [x.axis for x in new.leaves]:
            return value
        key = (old, new)
        if key not in self._views:
            found = []
            i, j = len(old.leaves), len(new.leaves)
            while i or j:
                a, b = i, j
                left = right = 1
                while left != right or (a, b) == (i, j):
                    if (left <= right and a) or not b:
                        a -= 1
                        left *= old.leaves[a].axis.size
                    else:
                        b -= 1
                        right *= new.leaves[b].axis.size
                    if not a and not b and left != right:
                        raise Unsupported(f"axes that could not be aligned: {list(given)} and {list(dims)}")
                found.append(self._stretch(old, range(a, i), new, range(b, j), np.arange(left)))
                i, j = a, b
            self._views[key] = found
        return self._looked(value, old, new, self._views[key])

    def _along(self, big: Dims, small: Dims, d: int, positions: Positions) -> tuple[Grid, Grid, list[Stretch]]:
        """A tensor and the part of it that has these positions of dimension d."""
        old, new = self.grid(big), self.grid(small)
        found = []
        for e, (span, target) in enumerate(zip(old.spans, new.spans, strict=True)):
            found.append(self._stretch(old, span, new, target, positions if e == d else np.arange(big[e].size)))
        return old, new, found

    def chosen(self, value: Value, given: Dims, dims: Dims, d: int, positions: Positions) -> Value:
        """Some positions of dimension d, in this order."""
        return self._looked(value, *self._along(given, dims, d, positions))

    def written(self, value: Value, given: Dims, dims: Dims, d: int, positions: Positions) -> Value:
        """A value at some positions of dimension d of a larger one that is 0 elsewhere."""
        big, small, stretches = self._along(dims, given, d, positions)
        return self._placed_in(value, small, big, stretches)

    # -- primitives --------------------------------------------------------------------------------------------------

    def op(self, lowered: Lowered, axes: NodeAxes, inputs: Sequence[Value | None], offsets: Mapping[int, Offset]) -> list[Value]:
        """Steps within an op are kept like tensors between ops: a plan may have written the op out."""
        nodes = topological(lowered.outputs)
        users: dict[Node, list[Node]] = {}
        for node in nodes:
            for a in node.args:
                users.setdefault(a, []).append(node)
        self.steps = []
        found: dict[Node, Value] = {}
        for node in nodes:
            if node.prim == "input":
                value = inputs[node.attrs[0]]
                assert value is not None
            else:
                value = self._evaluated(node, [found[a] for a in node.args], axes, offsets)
                if node.kind == "real" and node not in lowered.outputs and not _open_ended(users[node]):
                    value = {key: self._settled(p) for key, p in value.items()}
                if node.kind == "real" and node not in lowered.outputs and node.prim in ("map", "contract", "reduce"):
                    self.steps.append((node, value, axes.dims[id(node)]))
            found[node] = value
        return [found[o] for o in lowered.outputs]

    def _settled(self, p: Poly) -> Poly:
        k = self.kernel
        if len(p) < 2 or any(k.infinite(u) for m in p for u, _, _ in m):
            return p
        p = k.settle(p)
        return k.single(p) if len(p) > 1 else p

    def _node(self, node: Node, args: list[Value], axes: NodeAxes, offsets: Mapping[int, Offset]) -> Value:
        assert not offsets  # ranks are taken one by one
        dims = axes.dims[id(node)]
        given = [axes.dims[id(a)] for a in node.args]
        if 0 in node.shape:  # nothing, whatever it is
            return {key: {} for key in self.grid(dims).blocks()}
        match node.prim:
            case "map" | "select":
                args = [self.viewed(a, g, dims) for a, g in zip(args, given, strict=True)]
                if node.prim == "select":
                    return {key: self._select([a[key] for a in args]) for key in self.grid(dims).blocks()}
                return {key: self._map(node, [a[key] for a in args], axes) for key in self.grid(dims).blocks()}
            case "const":
                return {(): self._literal(node)}
            case "iota":
                return self._counted(node, dims)
            case "reshape":
                return self.viewed(args[0], given[0], dims)
            case "contract":
                terms, target = node.attrs
                axis = dict(zip(target, dims, strict=True))
                for term, g in zip(terms, given, strict=True):
                    for label, a in zip(term, g, strict=True):
                        axis.setdefault(label, a)
                same = [[axis[label] for label in term] for term in terms]
                args = [self.viewed(a, g, s) for a, g, s in zip(args, given, same, strict=True)]
                return self._contract(node, args, same, dims)
            case "slice":
                d, start, step = node.attrs
                return self.chosen(args[0], given[0], dims, d, start + step * np.arange(node.shape[d]))
            case "concat":
                (d,) = node.attrs
                total: Value = {key: {} for key in self.grid(dims).blocks()}
                start = 0
                for value, g in zip(args, given, strict=True):
                    part = self.written(value, g, dims, d, start + np.arange(g[d].size))
                    total = {key: self.kernel.add(p, part[key]) for key, p in total.items()}
                    start += g[d].size
                return total
            case "pad":
                d, low, _, value = node.attrs
                if value != 0:
                    raise Unsupported("padding with something else than zero")
                return self.written(args[0], given[0], dims, d, low + np.arange(given[0][d].size))
            case "one_hot":
                return self._hot(args[0], given[0], dims, axes.lines[id(node.args[0])], node.attrs[0])
            case "gather":
                return self._picked(node, args, given, axes)
        return super()._node(node, args, axes, offsets)

    def _infinity(self, fn: str, args: list[Poly], signs: list[int]) -> Poly:
        if fn == "max":
            for a, s in zip(args, signs, strict=True):
                if not s:
                    self.kernel.number(a)
            return self._largest(args)
        return super()._infinity(fn, args, signs)

    def _extremum(self, a: Poly, b: Poly, sign: int) -> Poly:
        self.kernel.number(a)
        self.kernel.number(b)
        return scale(self._largest([a, b]), sign)

    def _largest(self, values: Sequence[Poly]) -> Poly:
        """The maximum of several values, however they were put together."""
        k = self.kernel
        found: dict[Any, Poly] = {}
        numbers: list[int | Fraction] = []
        lowest: Poly | None = None
        for p in (q for v in values for q in self._maximum_of(v)):
            c = as_constant(p)
            if self._infinite(p) > 0:
                raise Unsupported("a maximum with infinity")
            if self._infinite(p) < 0:
                lowest = p
            elif c is not None:
                numbers.append(c)
            else:
                found[tuple(sorted(p.items()))] = p
        if numbers:
            found[()] = constant(max(numbers))
        if not found:
            assert lowest is not None
            return lowest
        if len(found) == 1:
            return next(iter(found.values()))
        parts = sorted(found.values(), key=lambda p: repr(k.encode(p)))
        if all(any(k.infinite(u) for m in p for u, _, _ in m) for p in parts):
            raise Unsupported("a maximum of masked pieces")
        joined: Poly = {}
        for i, p in enumerate(parts):
            joined = k.add(joined, k.times({((k.atom("marker", i, ()), (), 1),): 1}, k.single(p)))
        return k.fn("max2", joined, len(parts))

    def _maximum_of(self, p: Poly) -> list[Poly]:
        """The values that p is the maximum of."""
        k = self.kernel
        if len(p) == 1:
            ((m, c),) = p.items()
            if c == 1 and len(m) == 1 and m[0][2] == 1 and k.name(m[0][0]) == "max2":
                found = []
                for n, d in k.argument(m[0][0], m[0][1]).items():
                    found.append({tuple(f for f in n if k.atoms[f[0]].kind != "marker"): d})
                return found + [{}] * (k.atoms[m[0][0]].data[0][1] - len(found))
        return [p]

    def _by_name(self, node: Node, args: list[Value], axes: NodeAxes, why: Unsupported) -> Value:
        raise why

    def _reduce(self, node: Node, value: Value, given: Dims, dims: Dims, _why: Unsupported | None = None) -> Value:
        fn, gone = node.attrs
        if fn == "prod":
            raise Unsupported("a product over an axis")
        k = self.kernel
        sign = 1 if fn == "max" else -1
        old, new = self.grid(given), self.grid(dims)
        kept = iter(range(len(new.leaves)))
        names: dict[Index, Index] = {}
        over: dict[Index, int] = {}
        stays: list[bool] = []  # of the old tags
        for d, span in enumerate(old.spans):
            for o in span:
                if old.leaves[o].tag:
                    stays.append(d not in gone)
                if d not in gone:
                    names[-1 - o] = -1 - next(kept)
                elif not old.leaves[o].tag:
                    names[-1 - o] = k.bound()
                    over[names[-1 - o]] = old.leaves[o].axis.size
        found: dict[Key, list[Poly]] = {}
        for key, p in value.items():
            if sign < 0 and (self._infinite(p) or any(k.infinite(u) for m in p for u, _, _ in m)):
                raise Unsupported("a minimum of masked values")
            moved = k.substitute(scale(p, sign), names)
            mine = tuple(t for t, stay in zip(key, stays, strict=True) if stay)
            found.setdefault(mine, []).append(moved if self._infinite(moved) else k.maximum(moved, over))
        return {key: scale(self._largest(parts), sign) for key, parts in found.items()}

    # -- integers ----------------------------------------------------------------------------------------------------

    def _plain(self, axis: Axis) -> list[Axis]:
        return [leaf.axis for leaf in self.grid([axis]).leaves]

    def _counted(self, node: Node, dims: Dims) -> Value:
        start, step = node.attrs
        grid = self.grid(dims)
        sizes = [leaf.axis.size for leaf in grid.leaves]
        weights = [math.prod(sizes[i + 1 :]) * step for i in range(len(sizes))]
        symbolic: Poly = {}
        for i, leaf in enumerate(grid.leaves):
            if not leaf.tag:
                symbolic = self.kernel.add(symbolic, scale(self.kernel.iota(leaf.axis.size, -1 - i), weights[i]))
        return {
            key: self.kernel.add(symbolic, constant(start + sum(weights[i] * t for i, t in zip(grid.tags, key, strict=True))))
            for key in grid.blocks()
        }

    def _hot(self, value: Value, given: Dims, dims: Dims, line: Line | None, start: int) -> Value:
        """1 where an integer is the position, `start` and on."""
        k = self.kernel
        root = None if line is None else line.root()
        if root is None or root.axis is None:
            raise Unsupported("one-hot of integers of unknown range")
        whole = self._plain(root.axis)
        grid = self.grid(dims)
        last = list(grid.spans[-1])
        table, kept = self._relate(whole, [grid.leaves[n].axis for n in last], start + np.arange(dims[-1].size))
        variable = {i: -1 - last[j] for i, j in kept}
        count = len(self.grid(given).tags)
        out: Value = {}
        for key in grid.blocks():
            digits = iter(table[key[count:]])
            at = [variable[i] if i in variable else next(digits) for i in range(len(whole))]
            p = value[key[:count]]
            name = self._label(p)
            if name is not None:
                self._range(name[0], root.axis)
                out[key] = self._digits_of(name, whole, at)
                continue
            masked = self._masked_label(k.flat(p))
            if masked is not None:
                mask, name = masked
                self._range(name[0], root.axis)
                out[key] = self._masked_hot(mask, self._digits_of(name, whole, at), whole, at)
                continue
            have = self._position(k.flat(p), whole)
            if have is None:
                raise Unsupported("one-hot of computed integers")
            result = constant(1)
            for a, x, y in zip(whole, have, at, strict=True):
                result = k.times(result, k.delta(a.size, x, y))
            out[key] = result
        return out

    def _position(self, p: Poly, whole: Sequence[Axis]) -> list[Index] | None:
        """The digits of a number and of positions of whole digits; None for other integers."""
        rest = dict(p)
        number = rest.pop((), 0)
        if number != int(number) or not 0 <= number < math.prod(a.size for a in whole):
            return None
        found: list[Index] = list(mixed_radix(int(number), [a.size for a in whole]))
        for m, c in rest.items():
            if len(m) != 1 or m[0][2] != 1 or self.kernel.atoms[m[0][0]].kind != "iota":
                return None
            size, index = self.kernel.atoms[m[0][0]].data, m[0][1][0]
            fits = [i for i, a in enumerate(whole) if a.size == size and math.prod(b.size for b in whole[i + 1 :]) == c and found[i] == 0]
            if len(fits) != 1:
                return None
            found[fits[0]] = index
        return found

    def _picked(self, node: Node, args: list[Value], given: list[list[Axis]], axes: NodeAxes) -> Value:
        """Σ_n D(ids)[n]·x[n], x finite."""
        k = self.kernel
        (d,) = node.attrs
        x_dims, id_dims = given
        gathered = [x_dims[d] if e == d else a for e, a in enumerate(id_dims)]
        x = self.viewed(args[0], x_dims, gathered)
        hot_dims = [*id_dims, x_dims[d]]
        hot = self._hot(args[1], id_dims, hot_dims, axes.lines[id(node.args[1])], 0)
        old, new, wide = self.grid(gathered), self.grid(id_dims), self.grid(hot_dims)
        names: dict[Index, Index] = {}
        fresh: dict[Index, Index] = {}
        over: dict[Index, int] = {}
        for e, span in enumerate(old.spans):
            if e != d:
                names.update({-1 - o: -1 - n for o, n in zip(span, new.spans[e], strict=True)})
                continue
            for o, n in zip(span, wide.spans[-1], strict=True):
                if not old.leaves[o].tag:
                    names[-1 - o] = fresh[-1 - n] = k.bound()
                    over[names[-1 - o]] = old.leaves[o].axis.size
        picks = [range(old.leaves[o].axis.size) for o in old.spans[d] if old.leaves[o].tag]
        at = {n: i for i, n in enumerate(new.tags)}
        out: Value = {}
        for key in new.blocks():
            total: Poly = {}
            for pick in itertools.product(*picks):
                source: list[int] = []
                for e in range(len(id_dims)):
                    tags = [n for n in new.spans[e] if new.leaves[n].tag]
                    source += pick if e == d else [key[at[n]] for n in tags]
                moved = k.substitute(k.number(x[tuple(source)]), names)
                here = k.substitute(hot[(*key, *pick)], fresh)
                total = k.add(total, k.sum(k.times(here, k.single(moved)), over))
            out[key] = total
        return out


def _open_ended(users: Sequence[Node]) -> bool:
    """Whether one addition or move alone takes a value in."""
    if len(users) != 1:
        return False
    (user,) = users
    if user.prim == "map":
        return user.attrs[0] in ("add", "sub", "neg")
    return user.prim in ("reshape", "transpose", "broadcast", "slice", "concat", "pad") or (user.prim == "contract" and len(user.args) == 1)


def _digits(positions: Positions, sizes: Sequence[int]) -> list[Positions]:
    """Digits of numbers, slow first."""
    found = []
    left = positions
    for s in reversed(sizes):
        found.append(left % s)
        left = left // s
    return found[::-1]
