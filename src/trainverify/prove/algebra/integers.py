"""Integers as digits of positions: labels, one-hots, counting. Trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from trainverify.axes.inference import Line
from trainverify.axes.structure import Axis
from trainverify.primitives.node import Node
from trainverify.prove.algebra.grids import Offset, mixed_radix
from trainverify.prove.algebra.kernel import Kernel
from trainverify.prove.algebra.places import Dims, Places, Value
from trainverify.prove.algebra.terms import (
    Index,
    Poly,
    Unsupported,
    as_constant,
    constant,
    scale,
)


@dataclass(frozen=True)
class Part:
    """A piece of an axis that is cut no further: where it starts, its digits, their indices, and the tags that choose it."""

    start: int
    sizes: tuple[int, ...]
    at: tuple[Index, ...]
    tags: tuple[tuple[int, int], ...]

    def hot(self, k: Kernel, position: int) -> Poly:
        """1 where the digits are those of a position."""
        if not 0 <= position - self.start < math.prod(self.sizes):
            return {}
        result = constant(1)
        for size, digit, index in zip(self.sizes, mixed_radix(position - self.start, self.sizes), self.at, strict=True):
            result = k.times(result, k.delta(size, digit, index))
        return result


@dataclass
class Integers(Places):
    """Integer inputs by their digits, and positions by theirs."""

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

    def _number(self, digits: Sequence[tuple[Index, int]]) -> Poly:
        """The integer with these digits (index, size), slow first."""
        result: Poly = {}
        for i, (v, size) in enumerate(digits):
            result = self.kernel.add(result, scale(self.kernel.iota(size, v), math.prod(s for _, s in digits[i + 1 :])))
        return result

    def _on_ranks(self, offset: Offset) -> Poly:
        """A literal that is another one on every rank."""
        k = self.kernel
        found = k.add(constant(offset.base), *(scale(k.iota(self.mesh_sizes[v], v), step) for v, step in offset.strides))
        return found if offset.over == 1 else scale(found, Fraction(1, offset.over))

    def _iota_blocks(self, node: Node, dims: Dims, line: Line | None, offset: Offset) -> Value:
        """Positions along an axis; in unequal pieces they are numbers, what lies before a piece and the position in it."""
        grid = self.grid(dims)
        if not grid.tags:
            return {(): self._iota(node, dims, line, offset)}
        if any(leaf.axis.root().flat for leaf in grid.leaves) or dims[0].root().flat:
            raise Unsupported(f"integers on a flat axis {dims[0]!r}")
        k, step = self.kernel, node.attrs[1]
        found: Value = {}
        for key in grid.blocks():
            at, _ = self._along_pieces(dims[0], dict(zip(grid.tags, key, strict=True)), 0)
            found[key] = k.add(self._on_ranks(offset), scale(at, step))
        return found

    def _along_pieces(self, axis: Axis, chosen: Mapping[int, int], leaf: int) -> tuple[Poly, int]:
        """The position on an axis by the leaves of the chosen pieces, and the number of the leaf after the axis. `leaf` is its first."""
        k, units = self.kernel, self.axes.leaves([axis])
        total: Poly = {}
        for i, unit in enumerate(units):
            here: Poly
            if unit.pieces is None:
                here = {} if unit.size == 1 else k.iota(unit.size, -1 - leaf)
                leaf += 1
            else:
                here, tag, before = {}, leaf, 0
                leaf += 1
                for t, piece in enumerate(unit.pieces):
                    within, leaf = self._along_pieces(piece, chosen, leaf)
                    if t == chosen[tag]:
                        here = k.add(constant(before), within)
                    before += piece.size
            total = k.add(total, scale(here, math.prod(u.size for u in units[i + 1 :])))
        return total, leaf

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

    def _hot_blocks(self, value: Value, given: Dims, dims: Dims, line: Line | None, offset: Offset) -> Value:
        """One-hots. On an axis of unequal pieces, block by block: an integer less the start of a piece, if it is in that piece."""
        root = None if line is None else line.root()
        if root is None or root.axis is None or not self.grid([root.axis]).tags:
            return {key: self._one_hot(p, given, dims[-1], line, offset) for key, p in value.items()}
        whole, before = self.grid([*given, root.axis]), self.grid(given)
        parts, _ = self._parts(root.axis, len(before.leaves))
        found: Value = {}
        for key in whole.blocks():
            chosen = dict(zip(whole.tags, key, strict=True))
            (part,) = (p for p in parts if all(chosen[tag] == n for tag, n in p.tags))
            found[key] = self._hot_in(part, parts, value[key[: len(before.tags)]], root.axis)
        return self.piece(found, [*given, root.axis], dims, len(given), offset)

    def _parts(self, axis: Axis, leaf: int) -> tuple[list[Part], int]:
        """The pieces of an axis that are cut no further, and the number of the leaf after the axis. `leaf` is its first."""
        units = self.axes.leaves([axis])
        if all(u.pieces is None for u in units):
            return [Part(0, tuple(u.size for u in units), tuple(-1 - leaf - i for i in range(len(units))), ())], leaf + len(units)
        (unit, *more) = units
        if more:
            raise Unsupported(f"integers on digits of unequal pieces {axis!r}")
        tag, leaf, start, found = leaf, leaf + 1, 0, []
        for n, piece in enumerate(unit.pieces or ()):
            inner, leaf = self._parts(piece, leaf)
            found += [Part(start + p.start, p.sizes, p.at, ((tag, n), *p.tags)) for p in inner]
            start += piece.size
        return found, leaf

    def _hot_in(self, part: Part, parts: Sequence[Part], p: Poly, axis: Axis) -> Poly:
        """The one-hot of an integer in one of the pieces of an axis."""
        k = self.kernel
        if (c := as_constant(p)) is not None:
            return part.hot(k, int(c)) if c == int(c) else {}
        name, mask = self._label(p), constant(1)
        if name is None:
            masked = self._masked_label(k.flat(p))
            if masked is None:
                raise Unsupported("one-hot of computed integers")
            mask, name = masked
        self._range(name[0], axis)
        names = [f"@from {x.start} {','.join(map(str, x.sizes))} {name[0]}" for x in parts]
        if any(n in self.domains for n in names):
            raise Unsupported(f"an input called {names[0]}")
        k.cut_labels(name[0], names)
        inside = names[parts.index(part)], *name[1:]
        hot = constant(1)
        for i, (size, index) in enumerate(zip(part.sizes, part.at, strict=True)):
            hot = k.times(hot, k.digit(*inside, i, len(part.sizes), size, index))
        hot = hot if part.sizes else k.valid(*inside)
        return k.add(k.times(mask, hot), k.times(k.add(constant(1), scale(mask, -1)), part.hot(k, 0)))

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
        if (c := as_constant(p)) is not None:  # a literal, such as the label that counts as none: outside of the range there is no 1
            return (
                self._hot_digits(whole, mixed_radix(int(c), [a.size for a in whole]), at) if 0 <= c < root.axis.size and c == int(c) else {}
            )
        masked = self._masked_label(k.flat(p))
        if masked is not None:
            mask, name = masked
            self._range(name[0], root.axis)
            return self._masked_hot(mask, self._digits_of(name, whole, at), whole, at)
        digits = self._iota_digits(k.flat(p), whole)
        if digits is None:
            raise Unsupported("one-hot of computed integers")
        return self._hot_digits(whole, digits, at)

    def _hot_digits(self, whole: Sequence[Axis], have: Sequence[Index], want: Sequence[Index]) -> Poly:
        """1 where the digits of two positions are the same."""
        result = constant(1)
        for a, x, y in zip(whole, have, want, strict=True):
            result = self.kernel.times(result, self.kernel.delta(a.size, x, y))
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
