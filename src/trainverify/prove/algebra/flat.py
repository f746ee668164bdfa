"""Tensors written in one dimension and cut anywhere: flat buckets of parameters, shards that end inside a row.

The elements of a piece of a flattened tensor are those of the tensor at running positions: `at(f; δ)[p]` is the factor f at the digits of
δ + p over the sizes of its dimensions. Elementwise functions of such pieces are *lifted*: worked out over the dimensions,
as the logical program has them, and said again of the positions. A Σ over a piece is a Σ over the dimensions times
the indicator of a *region* of positions; regions next to each other join, and the region of all positions is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from trainverify.axes.structure import Axis
from trainverify.prove.algebra.grids import Grid, Grids, Key, mixed_radix
from trainverify.prove.algebra.kernel import Kernel
from trainverify.prove.algebra.terms import NOTHING, Coef, Factor, Index, Mono, Poly, TooLarge, Unsupported, constant

_COORDINATE = -(3 * 10**6)  # digits of positions count down from here
_DIGITS = 64  # at most, of one position
_ONLY = -(9 * 10**8)  # the position in a piece of one element; they stay above this

Value = dict[Key, Poly]


@dataclass(frozen=True)
class Frame:
    """Where a piece lies in a flattened tensor: its sizes, and the positions from `start` on."""

    sizes: tuple[int, ...]
    start: int
    length: int

    @property
    def whole(self) -> bool:
        return self.start == 0 and self.length == math.prod(self.sizes)


class Flat:
    def __init__(self, kernel: Kernel, grids: Grids):
        self.kernel = kernel
        self.grids = grids
        self.used = False  # nothing is lifted or joined before something was flattened
        self._numbers: dict[tuple[tuple[int, ...], Index], int] = {}

    # -- positions and digits ----------------------------------------------------------------------------------------

    def coordinates(self, frame: Frame, p: Index) -> list[Index]:
        """Variables for the digits of a position."""
        if len(frame.sizes) > _DIGITS:
            raise Unsupported(f"a position of {len(frame.sizes)} digits")
        n = self._numbers.setdefault((frame.sizes, p), len(self._numbers))
        if _COORDINATE - (n + 1) * _DIGITS <= _ONLY:
            raise TooLarge("too many positions")
        return [_COORDINATE - n * _DIGITS - j for j in range(len(frame.sizes))]

    def said(self, p: Poly, digits: Sequence[Index], frame: Frame, at: Index) -> Poly:
        """A form over digits as one over the position `at` in a frame."""
        k = self.kernel
        if k.trace is not None:
            k.trace.spoiled = True
        self.used = True
        number = {v: j for j, v in enumerate(digits)}
        return k.add(*[k.monomial([self._factor(f, number, frame, at) for f in m], c) for m, c in p.items()])

    def _factor(self, f: Factor, number: Mapping[Index, int], frame: Frame, at: Index) -> Factor:
        uid, idx, power = f
        if not any(i in number for i in idx):
            return f
        a = self.kernel.atoms[uid]
        pattern = tuple(number.get(i) for i in idx)
        others = [(i, s) for i, s in zip(idx, a.sizes, strict=True) if i not in number]
        made = self.kernel.atom(
            "at",
            (uid, pattern, frame),
            (frame.length, *(s for _, s in others)),
            indicator=a.indicator,
            positive=a.positive,
            nonnegative=a.nonnegative,
        )
        return made, (at, *(i for i, _ in others)), power

    def lift(self, polys: Sequence[Poly]) -> tuple[list[Poly], dict[Index, Frame]]:
        """Forms over the digits of positions, for all positions that everything agrees about."""
        frames: dict[Index, Frame] = {}
        bad: set[Index] = set()
        atoms = self.kernel.atoms
        for p in polys:
            for m in p:
                for u, idx, _ in m:
                    if atoms[u].kind == "at":
                        frame: Frame = atoms[u].data[2]
                        bad.update(i for i in idx[1:] if i < 0)
                        if idx[0] >= 0 or frames.setdefault(idx[0], frame) != frame:
                            bad.add(idx[0])
                    else:
                        bad.update(i for i in idx if i < 0)
        frames = {p: f for p, f in frames.items() if p not in bad}
        if not frames:
            return list(polys), {}
        digits = {p: self.coordinates(f, p) for p, f in frames.items()}
        return [self._over(p, digits) for p in polys], frames

    def _over(self, p: Poly, digits: Mapping[Index, Sequence[Index]]) -> Poly:
        k = self.kernel

        def factor(f: Factor) -> Factor:
            uid, idx, power = f
            if k.atoms[uid].kind != "at" or idx[0] not in digits:
                return f
            inner, pattern, _ = k.atoms[uid].data
            others = iter(idx[1:])
            if k.trace is not None:
                k.trace.spoiled = True
            return inner, tuple([next(others) if j is None else digits[idx[0]][j] for j in pattern]), power

        return k.add(*[k.monomial([factor(f) for f in m], c) for m, c in p.items()])

    def lower(self, p: Poly, frames: Mapping[Index, Frame]) -> Poly:
        every = {at: self.coordinates(frame, at) for at, frame in frames.items()}
        mixed = [{at for at, digits in every.items() if set(digits) & set(idx)} for m in p for _, idx, _ in m]
        if any(len(found) > 1 for found in mixed):
            raise Unsupported("a value of two positions")
        for at, frame in frames.items():
            p = self.said(p, every[at], frame, at)
        return p

    def through(self, function: Callable[[list[Poly]], Poly], polys: Sequence[Poly]) -> Poly:
        """An elementwise function of forms."""
        if not self.used:
            return function(list(polys))
        lifted, frames = self.lift(polys)
        if not frames:
            return function(list(polys))
        k = self.kernel
        assuming = k.assuming
        if not k.named and not all(f.whole for f in frames.values()):
            k.assuming = NOTHING  # the logical program needs something of a piece: that is not of the whole
        try:
            return self.lower(function(lifted), frames)
        finally:
            k.assuming = assuming

    # -- sums --------------------------------------------------------------------------------------------------------

    def sum(self, p: Poly, over: Mapping[Index, int], pieces: bool) -> Poly:
        """Σ over variables; over a piece of a flattened tensor it is a Σ over its dimensions, in a region.

        `pieces` says that positions are summed over, if only one.
        """
        k = self.kernel
        if not self.used:
            return k.sum(p, over)
        total: list[Poly] = []
        for m, c in p.items():
            (lifted,), frames = self.lift([{m: c}])
            left = dict(over)
            for at, frame in frames.items():
                if at in left or (at == _ONLY and pieces):
                    left.pop(at, None)
                    digits = self.coordinates(frame, at)
                    left.update(zip(digits, frame.sizes, strict=True))
                    lifted = k.times(lifted, self._region(frame.sizes, frame.start, frame.start + frame.length, digits))
            total.append(
                self.lower(k.sum(lifted, left), {at: f for at, f in frames.items() if at not in over and not (at == _ONLY and pieces)})
            )
        return k.add(*total)

    def _region(self, sizes: tuple[int, ...], low: int | None, high: int | None, digits: Sequence[Index]) -> Poly:
        """1 at the positions low … high − 1; None and None stand for any region, while sums are compared."""
        if low == 0 and high == math.prod(sizes):
            return constant(1)
        uid = self.kernel.atom("region", (sizes, low, high), sizes, indicator=True, nonnegative=True)
        return {((uid, tuple(digits), 1),): 1}

    def put_back(self, p: Poly, frame: Frame, digits: Sequence[Index], at: Index) -> Poly:
        """A form of the position `at` in a frame as one of the digits of positions, zero outside of the frame.

        It is Σ over `at` of [digits are those of `at`] · p. What p has of the tensor that the frame lies in leaves the Σ: f(start + p) is f
        at the digits. So does an inverse only of what is positive everywhere: outside of the frame it has to be a number too.
        """
        k = self.kernel
        if k.trace is not None:
            k.trace.spoiled = True
        self.used = True
        uid = k.atom("shift", frame, (*frame.sizes, frame.length), indicator=True, nonnegative=True)
        shift: Factor = (uid, (*digits, at), 1)

        def here(f: Factor) -> Factor:
            a = k.atoms[f[0]]
            if a.kind != "at" or a.data[2] != frame or f[1][0] != at or at in f[1][1:] or (f[2] < 0 and not a.positive):
                return f
            inner, pattern, _ = a.data
            others = iter(f[1][1:])
            return inner, tuple([next(others) if j is None else digits[j] for j in pattern]), f[2]

        return k.sum(k.add(*[k.monomial([shift, *map(here, m)], c) for m, c in p.items()]), {at: frame.length})

    def joined(self, p: Poly) -> Poly:
        """Σ in regions next to each other, of the same, are one Σ."""
        k = self.kernel
        if not self.used or k.trace is not None:
            return p
        flat = k.flat(p)
        found: dict[tuple[Mono, Coef, Mono, tuple[int, ...]], list[tuple[int, int, Mono, Coef]]] = {}
        bodies: dict[Mono, tuple[list[Factor], dict[Index, int], tuple[Index, ...]]] = {}
        for m, c in flat.items():
            regional = [(f, x) for f in m if f[2] == 1 and k.atoms[f[0]].kind == "sum" for x in [self._regional(f)] if x is not None]
            if len(regional) != 1:
                continue
            f, (body, over, n) = regional[0]
            sizes, low, high = k.atoms[body[n][0]].data
            rest = tuple(g for g in m if g is not f)
            others = [g for i, g in enumerate(body) if i != n]
            any_region = self._region(sizes, None, None, body[n][1])
            like = k.sum(k.times(k.monomial(others), any_region), over)
            if len(like) != 1:
                continue
            ((mono, factor),) = like.items()
            key = (rest, c * factor, mono, sizes)
            found.setdefault(key, []).append((low, high, m, c))
            bodies[m] = others, over, body[n][1]
        changed = False
        for (rest, _, _, sizes), pieces in found.items():
            pieces.sort(key=lambda x: x[0])
            start = 0
            while start < len(pieces):
                end = start + 1
                while end < len(pieces) and pieces[end][0] == pieces[end - 1][1]:
                    end += 1
                if end - start > 1:
                    changed = True
                    low, high = pieces[start][0], pieces[end - 1][1]
                    _, _, m, c = pieces[start]
                    others, over, digits = bodies[m]
                    body_form = k.times(k.monomial(others), self._region(sizes, low, high, digits))
                    gone = {x: -y for _, _, x, y in pieces[start:end]}  # what was joined before may have added to them
                    flat = k.add(flat, gone, k.times({rest: c}, k.sum(body_form, over)))
                start = end
        return flat if changed else p

    def _regional(self, f: Factor) -> tuple[list[Factor], dict[Index, int], int] | None:
        """The factors of a Σ, its variables, and which factor is its region, if it has one."""
        k = self.kernel
        (body, _), _ = k.atoms[f[0]].data
        places = [n for n, (u, _, _) in enumerate(body) if k.atoms[u].kind == "region"]
        if len(places) != 1:
            return None
        factors, over = k.opened_sum(f[0], f[1])
        return factors, over, places[0]

    # -- tensors -----------------------------------------------------------------------------------------------------

    def recast(self, value: Value, given: Sequence[Axis], dims: Sequence[Axis]) -> Value:
        """The same elements in the same order, in other dimensions."""
        old, new = self.grids.of(given), self.grids.of(dims)
        if [(id(x.axis), x.owner) for x in old.leaves] == [(id(x.axis), x.owner) for x in new.leaves]:
            return value
        if math.prod(a.size for a in given) != math.prod(a.size for a in dims):
            raise Unsupported("a view of another size")
        if len(given) == 1 and len(dims) == 2 and given[0].root().flat and self._cut_alike(given[0], dims):
            return self._divided(value, old, new, dims)
        if len(given) == 2 and len(dims) == 1 and dims[0].root().flat and self._cut_alike(dims[0], given):
            return self._joined_up(value, old, new, given)
        if len(dims) == 1 and dims[0].root().flat and not (len(given) == 1 and given[0].root().flat):
            return self._flattened(value, old, dims[0], new)
        if len(given) == 1 and given[0].root().flat and not new.tags:
            return self._unflattened(value, old, given[0], new)
        raise Unsupported(f"a view whose factors do not align: {list(given)} as {list(dims)}")

    @staticmethod
    def _cut_alike(whole: Axis, dims: Sequence[Axis]) -> bool:
        """Whether a flat axis is cut as often as all blocks of the second dimension together, which is flat too."""
        count, block = dims[0].size, dims[1].root()
        return block.flat and len(whole.root().pieces or [whole]) == count * len(block.pieces or [block])

    def pieces(self, axis: Axis, grid: Grid, span: range) -> list[tuple[int, int, Index | None]]:
        """(start, length, variable) of the pieces of an axis of atoms; no variable for a piece of one element."""
        a = axis.root()
        if a.pieces is None:
            found = [-1 - n for n in span]
            if len(found) > 1:
                raise Unsupported(f"a flat axis of several digits {axis!r}")
            return [(0, a.size, found[0] if found else None)]
        variables: dict[int, Index] = {}
        for n in span:
            leaf = grid.leaves[n]
            if leaf.tag:
                if n != span.start:
                    raise Unsupported(f"pieces of pieces {axis!r}")
            elif leaf.owner is None or leaf.owner[1] in variables:
                raise Unsupported(f"a flat axis of several digits {axis!r}")
            else:
                variables[leaf.owner[1]] = -1 - n
        out, start = [], 0
        for t, p in enumerate(a.pieces):
            if p.size > 1 and t not in variables:
                raise Unsupported(f"a flat axis {axis!r}")
            out.append((start, p.size, variables.get(t)))
            start += p.size
        return out

    @staticmethod
    def _key(grid: Grid, t: int) -> Key:
        return (t,) if grid.tags else ()

    def region_of(self, value: Value, grid: Grid, start: int, length: int, at: Index | None, ranks: Container[int] = ()) -> Poly:
        """Positions start … start + length − 1 of a tensor, by the position in that piece.

        First digits that are coordinates of `ranks` (axes by id) are those of one rank, if the positions all have the same: then they
        are positions in that rank's part."""
        if grid.tags:
            raise Unsupported("a flattened tensor of unequal pieces")
        sizes = tuple(leaf.axis.size for leaf in grid.leaves)
        fixed: list[Index] = []
        while len(fixed) < len(sizes) - 1 and id(grid.leaves[len(fixed)].axis.root()) in ranks:
            inner = math.prod(sizes[len(fixed) + 1 :])
            if start // inner != (start + length - 1) // inner:
                break
            fixed.append(start // inner)
            start %= inner
        frame = Frame(sizes[len(fixed) :], start, length)
        at = _ONLY if at is None else at
        fresh = self.coordinates(frame, at)
        p = self.kernel.substitute(self.kernel.finite(value[()]), {-1 - n: v for n, v in enumerate([*fixed, *fresh])})
        return self.said(p, fresh, frame, at)

    def _flattened(self, value: Value, old: Grid, axis: Axis, new: Grid) -> Value:
        found = self.pieces(axis, new, new.spans[0])
        return {self._key(new, t): self.region_of(value, old, start, length, v) for t, (start, length, v) in enumerate(found)}

    def _unflattened(self, value: Value, old: Grid, axis: Axis, new: Grid) -> Value:
        """All pieces are the same form of the digits of their positions."""
        k = self.kernel
        sizes = tuple(leaf.axis.size for leaf in new.leaves)
        result: Poly | None = None
        for t, (start, length, v) in enumerate(self.pieces(axis, old, old.spans[0])):
            v = _ONLY if v is None else v
            (p,), frames = self.lift([value[self._key(old, t)]])
            if any(v in idx for m in p for _, idx, _ in m):
                raise Unsupported("elements of a bucket that do not come from one tensor")
            if v in frames:
                if frames[v] != Frame(sizes, start, length):
                    raise Unsupported("a piece of a bucket at another place")
                digits = self.coordinates(frames.pop(v), v)
                p = k.substitute(p, {d: -1 - n for n, d in enumerate(digits)})
            p = self.lower(p, frames)
            if result is not None and p != result:
                raise Unsupported("pieces of a bucket that differ")
            result = p
        return {(): result or {}}

    def _divided(self, value: Value, old: Grid, new: Grid, dims: Sequence[Axis]) -> Value:
        """Blocks of pieces, one after the other, along an axis of their own."""
        k = self.kernel
        whole, block, lead = self._all_pieces(old), self.pieces(dims[1], new, new.spans[1]), [new.leaves[n].axis.size for n in new.spans[0]]
        count = math.prod(lead)
        if len(whole) != count * len(block):
            raise Unsupported("blocks that are not cut alike")
        out: Value = {}
        for t, (_, length, v) in enumerate(block):
            total: Poly = {}
            for j in range(count):
                tau = j * len(block) + t
                if whole[tau][1] != length:
                    raise Unsupported("blocks that are not cut alike")
                p = value[self._key(old, tau)]
                old_v = whole[tau][2]
                if old_v is not None and v is not None:
                    p = k.substitute(p, {old_v: v})
                for n, digit in zip(new.spans[0], mixed_radix(j, lead), strict=True):
                    p = k.times(k.delta(new.leaves[n].axis.size, -1 - n, digit), p)
                total = k.add(total, p)
            out[self._key(new, t)] = k.collapse(total)
        return out

    def _joined_up(self, value: Value, old: Grid, new: Grid, given: Sequence[Axis]) -> Value:
        k = self.kernel
        whole, block, lead = (
            self._all_pieces(new),
            self.pieces(given[1], old, old.spans[1]),
            [old.leaves[n].axis.size for n in old.spans[0]],
        )
        count = math.prod(lead)
        if len(whole) != count * len(block):
            raise Unsupported("blocks that are not cut alike")
        out: Value = {}
        for j in range(count):
            at = {-1 - n: digit for n, digit in zip(old.spans[0], mixed_radix(j, lead), strict=True)}
            for t, (_, length, v) in enumerate(block):
                tau = j * len(block) + t
                if whole[tau][1] != length:
                    raise Unsupported("blocks that are not cut alike")
                to: dict[Index, Index] = dict(at)
                new_v = whole[tau][2]
                if v is not None and new_v is not None:
                    to[v] = new_v
                out[self._key(new, tau)] = k.substitute(value[self._key(old, t)], to)
        return out

    def _all_pieces(self, grid: Grid) -> list[tuple[int, int, Index | None]]:
        """(start, length, variable) of the leaves of a grid of one dimension, piece by piece."""
        if not grid.tags:
            if len(grid.leaves) != 1:
                raise Unsupported("a flat axis of several digits")
            return [(0, grid.leaves[0].axis.size, -1)]
        found: dict[int, tuple[int, Index]] = {}
        for n, leaf in enumerate(grid.leaves):
            if not leaf.tag:
                if leaf.owner is None or leaf.owner[1] in found:
                    raise Unsupported("a flat axis of several digits")
                found[leaf.owner[1]] = (leaf.axis.size, -1 - n)
        tag = grid.leaves[grid.tags[0]]
        out: list[tuple[int, int, Index | None]] = []
        start = 0
        for t in range(tag.axis.size):
            length, v = found.get(t, (1, 0))
            out.append((start, length, v if t in found else None))
            start += length
        return out
