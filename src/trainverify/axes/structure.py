"""Axes: what the dimensions of all tensors of a logical program and a plan are made of.

An `Axis` is a dimension's worth of positions. It is an atom, a product of axes (slow digit first: `[4096]` viewed as
`[8, 512]`), or a sum of axes (pieces one after the other: a slice or an uneven concat). Operators identify axes with
one another; identifying two splits them until they have the same structure. Where two structures cannot be
aligned (`[6]` as `[2, 3]` and as `[3, 2]`) the axis is *frozen*: it keeps its size, and the clash is recorded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

MAX_PIECES = 256


class Axis:
    """A node of a union-find forest. Only the root's fields count."""

    __slots__ = ("apart", "factors", "fixed", "flat", "frozen", "link", "pieces", "shorter", "size")

    def __init__(self, size: int, fixed: bool = False):
        self.size = size
        self.link: Axis | None = None
        self.factors: list[Axis] | None = None
        self.pieces: list[Axis] | None = None
        self.fixed = fixed  # keeps its size because it counts devices or copies
        self.frozen = False  # keeps its size because its structure could not be aligned
        self.flat = False  # positions of tensors written in one dimension: cut anywhere, never a product
        self.shorter: tuple[Axis, int] | None = None  # of an atom: the axis that it is a shifted piece of, how many positions it lacks
        self.apart = False  # a sum of pieces that have nothing to do with each other: no product even if equally long

    def root(self) -> Axis:
        a = self
        while a.link is not None:
            a = a.link
        b, up = self, self.link
        while up is not None and up is not a:  # the whole way becomes short
            b.link = a
            b, up = up, up.link
        return a

    def __repr__(self) -> str:
        a = self.root()
        if a.factors is not None:
            return "(" + " ".join(map(repr, a.factors)) + ")"
        if a.pieces is not None:
            return "[" + " + ".join(map(repr, a.pieces)) + "]"
        return f"{a.size}{'!' if a.frozen else '' if not a.fixed else '='}"


@dataclass(frozen=True)
class Clash:
    """Two ways to cut one axis that cannot be aligned."""

    text: str
    where: str


class Axes:
    """Axes under construction; `where` names the op at hand, for messages."""

    lists = False  # whether what cannot be aligned is listed position by position: see `listed`

    def __init__(self) -> None:
        self.clashes: list[Clash] = []
        self.where: object = ""  # said as text if axes clash
        self.views: list[tuple[Sequence[Axis], Sequence[Axis]]] = []  # dimensions with the same positions that are not aligned
        self.counted: list[Axis] = []  # along which something is added up step by step
        self.numbered: list[Axis] = []  # whose positions are values: a count may be compared with them
        self._stretches: list[tuple[Axis, int, Axis]] = []  # (sum, start, the axis of several of its pieces)

    # -- looking -----------------------------------------------------------------------------------------------------

    def leaves(self, axes: Sequence[Axis]) -> list[Axis]:
        """Digits of a list of axes, slow first: atoms and sums."""
        found: list[Axis] = []
        stack = list(reversed(axes))
        while stack:
            a = stack.pop().root()
            if a.factors is not None:
                stack.extend(reversed(a.factors))
            elif a.size != 1:
                found.append(a)
        return found

    # -- identifying -------------------------------------------------------------------------------------------------

    def same(self, a: Axis, b: Axis) -> None:
        a, b = a.root(), b.root()
        if a is b or a.size == b.size == 1:
            return
        if a.size != b.size:
            raise ValueError(f"axes of sizes {a.size} and {b.size}")
        if self._atom(a):
            self._join(a, b)
        elif self._atom(b):
            self._join(b, a)
        elif a.factors is None and b.factors is None:
            self._same_sums(a, b)
        else:
            self.align([a], [b])
            if a.root() is not b.root() and a.root().factors is not None and b.root().factors is not None:
                self._join(a.root(), b.root())

    @staticmethod
    def _atom(a: Axis) -> bool:
        return a.factors is None and a.pieces is None

    def _join(self, a: Axis, b: Axis) -> None:
        """a becomes b."""
        if a.fixed:
            self.fix(b)
        if a.frozen and not b.frozen:
            self.freeze(b)
        b.apart |= a.apart
        b.flat |= a.flat
        a.link = b
        a.factors = a.pieces = None
        mine, a.shorter = a.shorter, None
        if mine is None:
            return
        if b.shorter is None and self._atom(b):
            b.shorter = mine
        elif b.shorter is not None and b.shorter[1] == mine[1]:
            self.same(b.shorter[0], mine[0])
        else:
            self.clash(f"a shifted piece of {mine[0].size} as {b!r}", [b, mine[0]])

    def align(self, left: Sequence[Axis], right: Sequence[Axis]) -> None:
        """Identify two lists of axes as one sequence of positions (a reshape)."""
        lefts, rights = self.leaves(left), self.leaves(right)
        while lefts and rights:
            a, b = lefts[0].root(), rights[0].root()
            if a.factors is not None or b.factors is not None:  # split meanwhile
                lefts[:1], rights[:1] = self.leaves([a]), self.leaves([b])
                continue
            if a is b:
                del lefts[0], rights[0]
            elif a.size == b.size:
                if self._atom(a):
                    self._join(a, b)
                elif self._atom(b):
                    self._join(b, a)
                else:
                    self._same_sums(a, b)
                del lefts[0], rights[0]
            elif not a.size or not b.size:
                self._align_nothing(lefts, rights)
                return
            elif a.size > b.size and a.size % b.size == 0 and self.split(a, b.size):
                lefts[:1] = self.leaves([a])
            elif b.size > a.size and b.size % a.size == 0 and self.split(b, a.size):
                rights[:1] = self.leaves([b])
            else:
                self.clash(f"{[x.size for x in self.leaves(left)]} and {[x.size for x in self.leaves(right)]}", [*left, *right])
                return

    def _align_nothing(self, lefts: Sequence[Axis], rights: Sequence[Axis]) -> None:
        """Identify two lists of axes without any position: an atom that is one of the lists becomes the product of the other."""
        for one, other in ((lefts, rights), (rights, lefts)):
            a = one[0].root()
            if len(one) == 1 and a.size == 0 and self._atom(a) and all(x.root() is not a for x in other):
                a.factors = list(other)
                if a.fixed:
                    self.fix(a)
                if a.frozen:
                    a.frozen = False
                    self.freeze(a)
                return

    def clash(self, text: str, axes: Sequence[Axis]) -> None:
        self.clashes.append(Clash(text, str(self.where)))
        for a in axes:
            self.freeze(a)

    def freeze(self, axis: Axis) -> None:
        a = axis.root()
        if not a.frozen:
            a.frozen = True
            for part in a.factors or a.pieces or ():
                self.freeze(part)
            if a.shorter is not None:
                self.freeze(a.shorter[0])

    def fix(self, axis: Axis) -> None:
        """Keep the size of an axis whatever it is made of."""
        a = axis.root()
        a.fixed = True
        for part in a.factors or a.pieces or ():
            self.fix(part)

    def count(self, axis: Axis) -> None:
        """An axis of the members of a group: they are counted, not shrunk."""
        self.fix(axis)

    def split(self, axis: Axis, slow: int) -> bool:
        """Make an atom or a sum a product of `slow` and the rest; False where its pieces do not allow it."""
        a = axis.root()
        fast = a.size // slow
        if a.shorter is not None:
            return False
        if self._atom(a):
            parts = [Axis(slow, a.fixed), Axis(fast, a.fixed)]
            for p in parts:
                p.frozen = a.frozen
            a.factors = parts
            return True
        if a.factors is not None:
            return False
        pieces = [p.root() for p in a.pieces or ()]
        if any(p.size % fast for p in pieces):
            return self._blocks(a, pieces, slow, fast)
        shared = Axis(fast)
        counts = []
        for p in pieces:  # every piece is a number of blocks of the fast digit
            count = Axis(p.size // fast)
            self.align([p], [count, shared])
            counts.append(count)
        a = axis.root()
        if a.pieces is None:
            return a.factors is not None
        a.pieces = None
        outer = Axis(slow)
        if all(c.size == 1 for c in counts):
            outer.fixed = True
        else:
            outer.pieces = counts
        outer.frozen = a.frozen
        a.factors = [outer, shared]
        return True

    def _blocks(self, a: Axis, pieces: list[Axis], slow: int, fast: int) -> bool:
        """A sum as `slow` blocks of several pieces each, if all blocks are cut alike."""
        blocks: list[list[Axis]] = [[]]
        for p in pieces:
            if sum(x.size for x in blocks[-1]) == fast:
                blocks.append([])
            blocks[-1].append(p)
        sizes = [x.size for x in blocks[0]]
        if len(blocks) != slow or sum(sizes) != fast or any([x.size for x in other] != sizes for other in blocks[1:]):
            return False
        for other in blocks[1:]:
            for x, y in zip(blocks[0], other, strict=True):
                self.same(x, y)
        a = a.root()
        if a.pieces is None:  # became something else meanwhile
            return a.factors is not None
        block = Axis(fast)
        block.pieces = blocks[0]
        block.frozen = a.frozen
        a.factors, a.pieces = [Axis(slow, fixed=True), block], None
        return True

    def _same_sums(self, a: Axis, b: Axis) -> None:
        if a.pieces is None or b.pieces is None:
            self.align([a], [b])
            return
        if a.flat or b.flat:
            self._same_flat(a, b)
            return
        cuts = sorted(set(self.cuts(a)) | set(self.cuts(b)))
        if len(cuts) > MAX_PIECES:
            self.clash(f"{len(cuts)} pieces", [a, b])
            return
        for axis in (a, b):
            for c in cuts:
                self.cut(axis, c)
        a, b = a.root(), b.root()
        if a is b:
            return
        if a.pieces is None or b.pieces is None:
            self.same(a, b)
            return
        left, right = list(a.pieces), list(b.pieces)
        if [p.size for p in left] != [p.size for p in right]:
            self.clash(f"pieces {[p.size for p in left]} and {[p.size for p in right]}", [a, b])
            return
        self._join(a, b)
        for p, q in zip(left, right, strict=True):
            self.same(p, q)

    def _same_flat(self, a: Axis, b: Axis) -> None:
        """Sums that share pieces: cutting one may cut the other."""
        while True:
            a.pieces, b.pieces = self._written(a), self._written(b)
            here, there = self.cuts(a), self.cuts(b)
            if here == there:
                break
            if max(len(here), len(there)) > MAX_PIECES:
                self.clash(f"more than {MAX_PIECES} pieces", [a, b])
                return
            for axis, cuts in ((a, there), (b, here)):
                for c in cuts:
                    self.cut(axis, c)
            a, b = a.root(), b.root()
            if a.frozen or b.frozen or a.pieces is None or b.pieces is None:
                return
        left, right = a.pieces, b.pieces
        self._join(a, b)
        for p, q in zip(left, right, strict=True):
            self.same(p, q)

    def cuts(self, axis: Axis) -> list[int]:
        """Positions where a sum's pieces begin (none for others)."""
        a = axis.root()
        if a.pieces is None:
            return []
        found, at = [], 0
        for p in a.pieces[:-1]:
            at += p.size
            found.append(at)
        return found

    def regularise(self, axes: Sequence[Axis]) -> None:
        """A sum of equally long pieces is a product: how many, times the piece."""
        changed = True
        self._spread_flat(axes)
        while changed:  # identifying pieces can cut and split others
            seen = self._below(axes)
            direct = {id(x.root()) for x in axes} | {id(f.root()) for a in seen.values() for f in a.factors or ()}
            changed = self._flatten(seen, direct)
            changed |= self._nest(seen, direct)
            changed |= self._uncut(axes, direct)
            for a in sorted(self._below(axes).values(), key=lambda x: x.size):
                a = a.root()
                if a.pieces is not None and not a.apart and not a.flat and len({p.size for p in a.pieces}) == 1:
                    for p in a.pieces[1:]:
                        self.same(a.pieces[0], p)
                    a = a.root()
                    if a.pieces is not None and a.size == len(a.pieces):  # pieces of one element
                        if not self._waiting(a, direct):
                            a.pieces, a.fixed, changed = None, True, True
                    elif a.pieces is not None and len({id(p.root()) for p in a.pieces}) == 1:
                        count = Axis(len(a.pieces), fixed=True)
                        count.frozen = a.frozen
                        a.factors = [count, a.pieces[0].root()]
                        a.pieces = None
                        changed = True

    @staticmethod
    def _below(axes: Sequence[Axis]) -> dict[int, Axis]:
        """Axes and all that they are made of."""
        seen: dict[int, Axis] = {}
        stack = list(axes)
        while stack:
            a = stack.pop().root()
            if id(a) not in seen:
                seen[id(a)] = a
                stack.extend(a.factors or a.pieces or (() if a.shorter is None else a.shorter[:1]))
        return seen

    def _spread_flat(self, axes: Sequence[Axis]) -> None:
        """Pieces of what is flat are flat, and written out."""
        for a in self._below(axes).values():
            stack = list(a.pieces or ()) if a.flat else []
            while stack:
                q = stack.pop().root()
                q.flat = True
                stack += q.pieces or ()
        for a in self._below(axes).values():
            if a.flat and a.pieces is not None:
                a.pieces = self._written(a)

    @staticmethod
    def _written(a: Axis) -> list[Axis]:
        """The pieces of a sum that are no sums themselves."""
        found: list[Axis] = []
        stack = list(reversed(a.pieces or ()))
        while stack:
            q = stack.pop().root()
            if q.pieces is None:
                found.append(q)
            else:
                stack += reversed(q.pieces)
        return found

    @staticmethod
    def _flatten(seen: Mapping[int, Axis], direct: Set[int]) -> bool:
        """Sums of sums that nothing else is made of are one sum."""
        changed = False
        for a in seen.values():
            if a.pieces is not None and a.link is None and not a.flat:
                flat: list[Axis] = []
                stack = list(reversed(a.pieces))
                while stack:
                    q = stack.pop().root()
                    if q.pieces is not None and id(q) not in direct and not q.apart:
                        stack += reversed(q.pieces)
                    else:
                        flat.append(q)
                if len(a.pieces) < len(flat) <= MAX_PIECES:
                    a.pieces, changed = flat, True
        return changed

    def _stretched(self, direct: Set[int]) -> dict[int, list[tuple[Axis, int, Axis]]]:
        """By sum: (sum, start, the axis of several of its pieces) for those that a tensor has."""
        by_sum: dict[int, list[tuple[Axis, int, Axis]]] = {}
        for total, start, part in self._stretches:
            if id(part.root()) in direct and total.root().pieces is not None:
                by_sum.setdefault(id(total.root()), []).append((total.root(), start, part.root()))
        return by_sum

    def _waiting(self, a: Axis, direct: Set[int]) -> bool:
        """Whether several pieces of a sum may still become one, once they are a product or an atom by themselves."""
        known = self._stretched(direct).get(id(a), [])
        return not a.frozen and any(self._rows(a, start, part, known) is not None for _, start, part in known)

    def _rows(self, a: Axis, start: int, part: Axis, known: list[tuple[Axis, int, Axis]]) -> tuple[int, int] | None:
        """Which pieces of a sum an axis of several of them covers; None if others overlap with it."""
        end = start + part.size
        if a.pieces is None or part.frozen or part.size >= a.size:
            return None
        if any(s < end and start < s + x.size and (s, x.size) != (start, part.size) for _, s, x in known):
            return None
        at = [0, *self.cuts(a), a.size]
        if start not in at or end not in at:
            return None
        first, last = at.index(start), at.index(end)
        return (first, last) if last - first > 1 else None

    def _nest(self, seen: Mapping[int, Axis], direct: Set[int]) -> bool:
        """Several pieces in a row that are a product by themselves, such as the shards of a slice, become one piece."""
        changed = False
        for key, known in self._stretched(direct).items():
            if key not in seen:
                continue
            a = known[0][0]
            for _, start, part in () if a.flat else known:
                rows = None if a.frozen or a.link is not None else self._rows(a, start, part.root(), known)
                if rows is None or a.pieces is None:
                    continue
                for _, s, x in known:
                    if (s, x.size) == (start, part.size):
                        self.same(x, part)
                if (
                    part.root().pieces is None
                    and a.link is None
                    and a.pieces is not None
                    and self._rows(a, start, part.root(), known) == rows
                ):
                    a.pieces[rows[0] : rows[1]] = [part.root()]
                    changed = True
        return changed

    def _uncut(self, axes: Sequence[Axis], direct: Set[int]) -> bool:
        """Sums of counts (of blocks, of copies) of which no tensor has a piece of several are counts themselves."""
        used = {id(leaf) for leaf in self.leaves(axes)}
        changed = False
        seen: set[int] = set()
        stack = list(axes)
        while stack:
            a = stack.pop().root()
            if id(a) in seen:
                continue
            seen.add(id(a))
            parts = [p.root() for p in a.pieces or ()]
            if (
                parts
                and not a.apart
                and not a.flat
                and not self._waiting(a, direct)
                and all(p.size == 1 or (p.fixed and self._atom(p) and id(p) not in used) for p in parts)
            ):
                a.pieces, a.fixed, changed = None, True, True
            stack.extend(a.factors or a.pieces or ())
        return changed

    # -- cutting -----------------------------------------------------------------------------------------------------

    def cut(self, axis: Axis, at: int) -> None:
        """Make `at` a boundary."""
        a = axis.root()
        if at in (0, a.size) or a.frozen:
            return
        if a.shorter is not None:
            self.clash(f"a cut of a shifted piece of {a.shorter[0].size}", [a])
        elif self._atom(a):
            a.pieces = [Axis(at, a.fixed), Axis(a.size - at, a.fixed)]
        elif a.pieces is not None:
            start = 0
            for i, p in enumerate(a.pieces):
                if at == start:
                    return
                if start < at < start + p.size:
                    p = p.root()
                    self.cut(p, at - start)
                    p = p.root()
                    if p.pieces is not None:
                        a.pieces[i : i + 1] = p.pieces  # keep sums flat
                        self._stretches.append((a, start, p))
                    if len(a.pieces) > MAX_PIECES:
                        self.clash(f"more than {MAX_PIECES} pieces", [a])
                    return
                start += p.size
        else:
            digits = self.leaves([a])
            fast = math.prod(d.size for d in digits[1:])
            slow, rest = divmod(at, fast)
            self.cut(digits[0], slow)
            if rest:  # inside one block: isolate the block, then cut the fast digits
                self.cut(digits[0], slow + 1)
                self.cut(self.product(digits[1:]), rest)

    def shifted(self, axis: Axis, size: int) -> Axis:
        """A piece that may overlap with others like it: an axis of its own, that is only as long as a piece of this one."""
        whole = axis.root()
        while whole.shorter is not None:  # of a piece like that: one of the same axis
            whole = whole.shorter[0].root()
        made = Axis(size)
        made.shorter, made.frozen = (whole, whole.size - size), whole.frozen
        return made if size < whole.size else whole

    def unwind(self, axes: Sequence[Axis]) -> None:
        """A shifted piece of what it is a part of itself (padded, and sliced again) has no size of its own."""
        for a in self._below(axes).values():
            if a.shorter is not None and id(a) in self._below([a.shorter[0]]):
                whole, a.shorter = a.shorter[0], None
                self.clash(f"a shifted piece {a!r} of {whole.size} that is made of it", [a, whole])

    def window(self, axis: Axis, start: int, size: int) -> Axis:
        """The axis of a slice."""
        return self.piece(axis, start, size)

    def begin_plan(self) -> None:
        """The logical program is in."""

    def settle(self) -> None:
        """All programs are in."""

    def within(self, axis: Axis, start: int, size: int) -> bool:
        """Whether a slice begins within a shard, wherever that is: see `loose`."""
        return False

    def product(self, axes: Sequence[Axis]) -> Axis:
        axes = [a for a in axes if a.size != 1] or list(axes[:1])  # an axis times 1 is the axis itself, not a new one
        if len(axes) == 1:
            return axes[0]
        made = Axis(math.prod(a.size for a in axes))
        made.factors = list(axes)
        made.frozen = any(a.root().frozen for a in axes)
        return made

    def piece(self, axis: Axis, start: int, size: int) -> Axis:
        """The axis of positions start … start+size−1."""
        a = axis.root()
        if (start, size) == (0, a.size):
            return a
        if size == 0:
            return Axis(0, fixed=True)
        self.cut(a, start)
        self.cut(a, start + size)
        a = a.root()
        if a.frozen:
            made = Axis(size)
            made.frozen = True
            return made
        if a.pieces is not None:
            at, inside = 0, []
            for p in a.pieces:
                if start <= at and at + p.size <= start + size:
                    inside.append(p)
                at += p.size
            if sum(p.size for p in inside) != size:
                self.clash(f"piece {start}:{start + size} of {a!r}", [a])
                return Axis(size, fixed=True)
            if len(inside) == 1:
                return inside[0]
            made = Axis(size)
            made.pieces = inside
            self._stretches.append((a, start, made))
            return made
        digits = self.leaves([a])
        fast = math.prod(d.size for d in digits[1:])
        slow, rest = divmod(start, fast)
        if rest == 0 and size % fast == 0:
            return self.product([self.piece(digits[0], slow, size // fast), *digits[1:]])
        if rest + size <= fast:
            return self.piece(self.product(digits[1:]), rest, size)
        self.clash(f"piece {start}:{start + size} of {a!r}", [a])
        made = Axis(size)
        made.frozen = True
        return made


def is_shifted(piece: Axis, whole: Axis) -> bool:
    """Whether an axis is made as a shifted piece of another, or both of a third."""
    a, b = piece.root(), whole.root()
    if a.shorter is None or a is b:
        return False
    return a.shorter[0].root() is (b if b.shorter is None else b.shorter[0].root())
