"""Axis inference: which axes the dimensions of all tensors are made of, from the nodes of every op.

One rule per primitive. Integers that are positions (token ids, iotas, causal offsets) have a *line*: the axis on
which they count. Offsets on it are cut and mapped like slices, never kept as literals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from trainverify.axes.structure import Axes, Axis
from trainverify.graph.lineage import Layout, Part, Pattern, Placements, Run, Shard, local_digits, pattern_dims
from trainverify.graph.mesh import Mesh
from trainverify.ops.table import Lowered
from trainverify.primitives.node import Node, topological

SHIFT: Final = 16  # positions that a shifted piece may leave out


class Line:
    """Where integers count: a root of a union-find forest with the stretches that iotas cover on it."""

    __slots__ = ("axis", "compared", "link", "points", "stretches")

    def __init__(self, axis: Axis | None = None):
        self.link: Line | None = None
        self.axis = axis
        self.stretches: list[tuple[int, Axis]] = []
        self.points: list[int] = []
        self.compared = False

    def root(self) -> Line:
        line = self
        while line.link is not None:
            line = line.link
        return line


Dims = list[Axis]


@dataclass
class NodeAxes:
    """The axes of every node of one lowered op."""

    dims: dict[int, Dims] = field(default_factory=dict)
    lines: dict[int, Line | None] = field(default_factory=dict)


class Inference:
    def __init__(self, flat: bool = False, axes: Axes | None = None, shifts: bool = False) -> None:
        """With `flat`, tensors written in one dimension keep axes of their own; with `shifts`, slices that leave out few positions do."""
        self.axes = axes or Axes()
        self.flat = flat
        self.shifts = shifts
        self.overlaps = False  # whether there are such slices
        self.members = 0  # of the collective at hand
        self._flattened: dict[int, tuple[Dims, Axis]] = {}
        self.all: list[Axis] = []
        self._lines: list[Line] = []
        self._later: list[tuple[Line, int, Axis, object]] = []  # one-hots of integers whose line is not known yet
        self.mesh: dict[str, Axis] = {}  # one axis per mesh axis, however often it is used
        self.choices: list[tuple[Axis, Axis | None]] = []  # rows that are sorted, with the places in the sorted row
        self.even = False  # whether ranks take all equal slices of what the op at hand slices, one each

    def mesh_axis(self, mesh: Mesh, name: str) -> Axis:
        if name not in self.mesh:
            self.mesh[name] = Axis(mesh.length(name), fixed=True)
            self.all.append(self.mesh[name])
        return self.mesh[name]

    def fresh(self, shape: Sequence[int]) -> Dims:
        made = [Axis(s) for s in shape]
        self.all += made
        return made

    def line(self, axis: Axis | None = None) -> Line:
        made = Line(axis)
        self._lines.append(made)
        return made

    def same_dims(self, a: Dims, b: Dims) -> None:
        if a is b:
            return
        for x, y in zip(a, b, strict=True):
            if x is not y and (x.link or x) is not (y.link or y):
                self.axes.same(x, y)

    def same_line(self, a: Line | None, b: Line | None) -> Line | None:
        if a is None or b is None:
            return a or b
        a, b = a.root(), b.root()
        if a is not b:
            if a.axis is not None and b.axis is not None:
                if a.axis.size == b.axis.size:
                    self.axes.same(a.axis, b.axis)
                else:
                    self.axes.clash(f"integers counting to {a.axis.size} and to {b.axis.size}", [a.axis, b.axis])
            b.axis = b.axis or a.axis
            b.stretches += a.stretches
            b.points += a.points
            b.compared |= a.compared
            a.link = b
        return b

    # -- one op ------------------------------------------------------------------------------------------------------

    def op(self, lowered: Lowered, inputs: Sequence[Dims | None], lines: Sequence[Line | None]) -> NodeAxes:
        """Axes of all nodes of an op, its inputs' axes given."""
        found = NodeAxes()
        for node in topological([*lowered.outputs, *(n for n in lowered.inputs if n is not None)]):
            if node.prim == "input":
                dims = inputs[node.attrs[0]]
                assert dims is not None
                found.dims[id(node)] = dims
                found.lines[id(node)] = lines[node.attrs[0]]
            else:
                args = [found.dims[id(a)] for a in node.args]
                counted = [found.lines[id(a)] for a in node.args]
                found.dims[id(node)] = self._dims(node, args, counted)
                found.lines[id(node)] = self._line(node, found.dims[id(node)], args, counted)
        return found

    def _dims(self, node: Node, args: list[Dims], lines: list[Line | None]) -> Dims:
        axes = self.axes
        match node.prim:
            case "const":
                return self.fresh(node.shape)
            case "iota":
                axes.numbered += (made := self.fresh(node.shape))
                return made
            case "map" | "select":
                if not args:
                    return []
                for other in args[1:]:
                    self.same_dims(args[0], other)
                return args[0]
            case "contract":
                return self._contract(node, args)
            case "reduce":
                return [a for d, a in enumerate(args[0]) if d not in node.attrs[1]]
            case "reshape":
                made = self.fresh(node.shape)
                if self.flat and self._by_members(node):
                    self._blocks(*((made[0], args[0][1]) if len(made) == 1 else (args[0][0], made[1])))
                    return made
                axes.align(args[0], made)
                return made
            case "transpose":
                return [args[0][p] for p in node.attrs[0]]
            case "slice":
                d, start, step = node.attrs
                piece = self._sliced(args[0][d], start, step, node.shape[d])
                self.all.append(piece)  # it is somebody's dimension, also if no tensor outside of the op has it
                return self._replace(args[0], d, piece)
            case "concat":
                return self._concat(node, args)
            case "pad":
                return self._pad(node, args)
            case "broadcast":
                (dims,) = node.attrs
                made = self.fresh(node.shape)
                for i, d in enumerate(dims):
                    made[d] = args[0][i]
                return made
            case "one_hot":
                return self._one_hot(node, args, lines[0])
            case "gather":
                (d,) = node.attrs
                self.same_dims([a for i, a in enumerate(args[0]) if i != d], [a for i, a in enumerate(args[1]) if i != d])
                self._counts_on(lines[1], args[0][d])
                return args[1]
            case "rowwise":
                return self._rowwise(node, args)
            case "window":  # which window an element is in has nothing to do with where it was
                d, how = node.attrs
                return [*self._replace(args[0], d, self.fresh([how.count])[0]), *self.fresh([how.kernel])]
            case "overlap":
                d, how = node.attrs
                return self._replace(args[0][:-1], d, self.fresh([how.size])[0])
        raise ValueError(f"no primitive {node.prim!r}")

    def _contract(self, node: Node, args: list[Dims]) -> Dims:
        """Dimensions with one label are the same."""
        axes = self.axes
        terms, target = node.attrs
        label: dict[int, Axis] = {}
        for term, dims in zip(terms, args, strict=True):
            for i, a in zip(term, dims, strict=True):
                if i in label:
                    axes.same(label[i], a)
                else:
                    label[i] = a
        return [label[i] for i in target]

    def _concat(self, node: Node, args: list[Dims]) -> Dims:
        """The whole is a new axis; what is joined are its pieces."""
        axes = self.axes
        (d,) = node.attrs
        for other in args[1:]:
            self.same_dims([a for i, a in enumerate(args[0]) if i != d], [a for i, a in enumerate(other) if i != d])
        (whole,) = self.fresh([node.shape[d]])
        whole.flat = self.flat and len(node.shape) == 1
        whole.apart = node.kind == "int"  # integers of different places, never one formula
        start = 0
        for dims in args:
            axes.same(axes.piece(whole, start, dims[d].size), dims[d])
            start += dims[d].size
        return self._replace(args[0], d, whole)

    def _pad(self, node: Node, args: list[Dims]) -> Dims:
        """What is padded is a piece of a longer axis."""
        axes = self.axes
        d, low, _, _ = node.attrs
        shorter = args[0][d].root().shorter
        if shorter is not None and node.shape[d] <= shorter[0].size:  # a shifted piece goes back to its place
            whole = axes.shifted(shorter[0], node.shape[d])
            self.all.append(whole)
            return self._replace(args[0], d, whole)
        (whole,) = self.fresh([node.shape[d]])
        axes.same(axes.piece(whole, low, args[0][d].size), args[0][d])
        return self._replace(args[0], d, whole)

    def _one_hot(self, node: Node, args: list[Dims], line: Line | None) -> Dims:
        """The new dimension has the digits of what the ids count on."""
        axes = self.axes
        (depth,) = self.fresh([node.shape[-1]])
        (start,) = node.attrs
        if line is None:
            axes.freeze(depth)
        elif line.root().axis is None:
            self._later.append((line, start, depth, axes.where))  # where it counts may come with a message
        else:
            self._digits_on(line, start, depth)
        return [*args[0], depth]

    def _rowwise(self, node: Node, args: list[Dims]) -> Dims:
        """Running sums, and choices among the positions of a row."""
        axes = self.axes
        fn, d, _ = node.attrs
        if fn == "cumsum":
            axes.counted.append(args[0][d])
            return args[0]
        axes.fix(args[0][d])  # a choice among n: n is not a matter of scale
        if fn in ("argmax", "argmin"):
            self.choices.append((args[0][d], None))
            return [a for i, a in enumerate(args[0]) if i != d]
        (order,) = self.fresh([node.shape[d]])  # places in the sorted row, not the row's own positions
        axes.fix(order)
        order.apart = True  # what is chosen and what is not, also if they are as many
        self.choices.append((args[0][d], order))
        return self._replace(args[0], d, order)

    def _by_members(self, node: Node) -> bool:
        """Whether a view is one of equal blocks of a flat tensor, one for each member of a collective."""
        shapes = [node.shape, node.args[0].shape]
        return self.members > 0 and sorted(map(len, shapes)) == [1, 2] and max(shapes, key=len)[0] == self.members

    def _blocks(self, whole: Axis, block: Axis) -> None:
        whole.root().flat = block.root().flat = True
        for start in range(0, whole.size, block.size):
            self.axes.same(self.axes.piece(whole, start, block.size), block)

    def view(self, given: Dims, made: Dims, back: bool) -> None:
        """A tensor written in one dimension, or back: the same positions, but axes that have nothing to do with each other."""
        flat = given if len(given) == 1 and (len(made) > 1 or back) else made
        flat[0].root().flat = True
        self.axes.views.append((given, made))

    def flattened(self, dims: Dims) -> Axis:
        """The axis of all positions of a tensor."""
        if not self.flat:
            return self.axes.product(dims)
        if id(dims) not in self._flattened:
            made = self.fresh([math.prod(a.size for a in dims)])
            made[0].flat = True
            self.axes.views.append((dims, made))
            self._flattened[id(dims)] = dims, made[0]
        return self._flattened[id(dims)][1]

    @staticmethod
    def _replace(dims: Dims, d: int, axis: Axis) -> Dims:
        return [axis if i == d else a for i, a in enumerate(dims)]

    def _sliced(self, axis: Axis, start: int, step: int, size: int) -> Axis:
        axes = self.axes
        if step == 1 and 0 < axis.size - size <= SHIFT and 2 * size > axis.size:
            self.overlaps = True
            if self.shifts:
                return axes.shifted(axis, size)
        if step == 1 and self.even and size < axis.size and all(a.pieces is None for a in axes.leaves([axis])):
            count, piece = Axis(axis.size // size, fixed=True), Axis(size)
            axes.align([axis], [count, piece])
            return piece
        if step == 1:
            return axes.window(axis, start, size)
        if step > 1 and not axes.lists and axis.size % step == 0 and start // step + size <= axis.size // step:
            outer = Axis(axis.size // step)
            axes.align([axis], [outer, Axis(step, fixed=True)])
            return axes.piece(outer, start // step, size)
        if step == -1 and size == axis.size and not axes.lists:  # flipped: the same size, but pieces would come in the other order
            a = axis.root()
            if a.pieces is None and a.factors is None:
                return a
        axes.freeze(axis)
        made = Axis(size)
        made.frozen = True
        self.all.append(made)
        return made

    def _digits_on(self, line: Line, start: int, depth: Axis) -> None:
        """The positions of a one-hot are a piece of the axis on which its integers count."""
        root = line.root()
        if root.axis is None:
            (root.axis,) = self.fresh([start + depth.size])
        if 0 <= start <= start + depth.size <= root.axis.size:
            self.axes.same(self.axes.piece(root.axis, start, depth.size), depth)
        else:
            self.axes.freeze(depth)
            self.axes.freeze(root.axis)

    def _counts_on(self, line: Line | None, axis: Axis) -> None:
        root = None if line is None else line.root()
        if root is not None and root.axis is None:
            root.axis = axis
        if root is None or root.axis is None or root.axis.size != axis.size:
            self.axes.freeze(axis)
            if root is not None and root.axis is not None:
                self.axes.freeze(root.axis)
        else:
            self.axes.same(root.axis, axis)

    def _line(self, node: Node, dims: Dims, args: list[Dims], lines: list[Line | None]) -> Line | None:
        if node.prim == "map" and node.attrs[0] in ("lt", "le", "eq") and node.args[0].kind == "int":
            joined = self.same_line(lines[0], lines[1])
            if joined is not None:
                joined.compared = True
                for a in node.args:
                    if (value := literal(a)) is not None:
                        joined.points += [value, value + 1]
            return None
        if node.kind != "int":
            return None
        if node.prim == "iota":
            start, step = node.attrs
            if step != 1:
                self.axes.freeze(dims[0])
                return None
            made = self.line()
            made.stretches.append((start, dims[0]))
            return made
        if node.prim == "rowwise" and node.attrs[0] in ("argsort", "argmax", "argmin"):
            return self.line(args[0][node.attrs[1]])
        if node.prim in ("select", "reshape", "transpose", "slice", "concat", "pad", "broadcast", "gather", "reduce"):
            joined = None
            for i, line in enumerate(lines):
                if node.args[i].kind == "int" and not (node.prim == "gather" and i == 1):
                    joined = self.same_line(joined, line)
            return joined
        return None

    # -- lineage -----------------------------------------------------------------------------------------------------

    def layout(self, lay: Layout, mesh: Mesh, ranks: Sequence[int], whole: Dims, local: Dims) -> None:
        """Relate a logical tensor's axes with those of the local tensor that holds it on these ranks."""
        self.axes.where = str(lay)
        shape = tuple(a.size for a in whole)
        if isinstance(lay.form, Pattern):
            for names, a, b in zip(pattern_dims(lay.form.text), whole, local, strict=True):
                self._patterned(lay.form, mesh, names, a, b)
            return
        if isinstance(lay.form, Placements) and self.evenly_placed(lay.form, mesh, shape):
            for d, (a, b) in enumerate(zip(whole, local, strict=True)):
                counts = [self.mesh_axis(mesh, n) for n, p in lay.form.axes if p == Shard(d)]
                self.axes.align([a], [*counts, b])
            return
        for part in {p for r in ranks for p in lay.parts(mesh, r, shape)}:
            if not part.padding:
                self._part(part, whole, local)

    @staticmethod
    def evenly_placed(form: Placements, mesh: Mesh, shape: tuple[int, ...]) -> bool:
        left = list(shape)
        for axis, p in form.axes:
            if isinstance(p, Shard):
                if left[p.dim] % mesh.length(axis):
                    return False
                left[p.dim] //= mesh.length(axis)
        return True

    def _patterned(self, form: Pattern, mesh: Mesh, names: tuple[str, ...], whole: Axis, local: Axis) -> None:
        given = {n: s for n, _, s in form.fixed}
        digits: list[Axis] = []
        own: list[Axis] = []  # the local ones
        listed = local_digits(names, {*given, *mesh.names})
        known = 1
        for n, k in listed:
            known *= given[n] if n in given else mesh.length(n) if n in mesh.names else k or 1
        for n, k in listed:
            if n in given or n in mesh.names:
                digits.append(Axis(given[n], fixed=True) if n in given else self.mesh_axis(mesh, n))
            else:
                own.append(Axis(k or whole.size // known))
                digits.append(own[-1])
        self.all += own
        self.axes.align([local], own)
        self.axes.align([whole], digits)

    def _part(self, part: Part, whole: Dims, local: Dims) -> None:
        axes = self.axes
        if part.flat:
            (run,) = part.logical
            if self.flat and len(local) == 1 and run.count == 1:
                axes.same(axes.piece(local[0], part.local[0], run.size), axes.piece(self.flattened(whole), run.start, run.size))
                return
            held = axes.piece(axes.product(local), part.local[0], run.size)
            axes.same(held, self._run(axes.product(whole), run))
            return
        for at, run, a, b in zip(part.local, part.logical, whole, local, strict=True):
            axes.same(axes.piece(b, at, run.size), self._run(a, run))

    def _run(self, axis: Axis, run: Run) -> Axis:
        axes = self.axes
        if run.count == 1:
            return axes.piece(axis, run.start, run.block)
        if axis.size % run.stride == 0 and run.start % run.stride + run.block <= run.stride:
            outer, inner = Axis(axis.size // run.stride), Axis(run.stride)
            axes.align([axis], [outer, inner])
            first, offset = divmod(run.start, run.stride)
            return axes.product([axes.piece(outer, first, run.count), axes.piece(inner, offset, run.block)])
        axes.clash(f"strided blocks {run} of {axis.size}", [axis])
        made = Axis(run.size)
        made.frozen = True
        return made

    # -- finishing ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Settle lines: every stretch of integers becomes a piece of its line's axis; equal pieces become a product."""
        self.axes.settle()
        for line, start, depth, where in sorted(self._later, key=lambda x: -(x[1] + x[2].size)):
            self.axes.where = where
            root = line.root()
            if root.axis is None and root.stretches:
                (root.axis,) = self.fresh([max(start + depth.size, *(at + a.size for at, a in root.stretches))])
            if root.axis is None:  # computed integers: how many there are is not a matter of scale
                self.axes.freeze(depth)
            else:
                self._digits_on(line, start, depth)
        self._later = []
        self._settle_lines()
        if self.shifts:
            self.axes.unwind(self.all)
        self.axes.regularise(self.all)

    def _settle_lines(self) -> None:
        for line in self._lines:
            if line.link is not None or (line.axis is None and not line.compared):
                continue
            ends = [start + a.size for start, a in line.stretches]
            if line.axis is None:
                if not ends or min(start for start, _ in line.stretches) < 0:
                    for _, a in line.stretches:
                        self.axes.freeze(a)
                    continue
                (line.axis,) = self.fresh([max(ends)])
            for start, a in sorted(line.stretches, key=lambda s: -s[1].size):
                if start >= 0 and start + a.size <= line.axis.size:
                    self.axes.same(self.axes.piece(line.axis, start, a.size), a)
                else:
                    self.axes.clash(f"integers {start}…{start + a.size} counting to {line.axis.size}", [line.axis, a])
            for point in line.points:
                if 0 < point < line.axis.size:
                    self.axes.cut(line.axis, point)


def literal(node: Node) -> int | None:
    """The value of an integer constant, also when repeated."""
    while node.prim in ("broadcast", "reshape"):
        node = node.args[0]
    return node.attrs[0] if node.prim == "const" and node.kind == "int" else None
