"""A lowered op at reduced sizes: sizes and offsets go through the axes, literals stay."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainverify.axes.inference import Line, NodeAxes, literal
from trainverify.axes.reduction import NotABoundary, Sizes
from trainverify.axes.structure import Axis, is_shifted
from trainverify.ops.table import Lowered
from trainverify.primitives import node as F
from trainverify.primitives.node import Node, rebuild


def alike(lowered: Lowered, axes: NodeAxes) -> object:
    """Lowered ops with equal keys shrink alike."""
    dims = tuple([id(a.root()) for dims in axes.dims.values() for a in dims])
    return id(lowered), dims, tuple([id(_counted(line)) for line in axes.lines.values()])


def _counted(line: Line | None) -> Axis | None:
    axis = None if line is None else line.root().axis
    return None if axis is None else axis.root()


def shrink(outputs: Sequence[Node], axes: NodeAxes, sizes: Sizes, sorts: bool = True) -> list[Node]:
    """The same nodes with reduced shapes and attributes; without `sorts`, a row may be shorter than the places in its sorted one."""

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        dims = axes.dims[id(node)]
        shape = tuple(sizes(a) for a in dims)
        attrs = node.attrs
        match node.prim:
            case "iota":
                attrs = (_start(node, axes.lines[id(node)], sizes, dims[0]), node.attrs[1])
            case "slice":
                d, start, step = node.attrs
                given = axes.dims[id(node.args[0])][d]
                if step == 1 and (at := sizes.within(given, start, node.shape[d], shape[d])) is not None:
                    return Node(node.prim, args, (d, at, step), shape, node.kind)
                shifted = is_shifted(dims[d], axes.dims[id(node.args[0])][d])
                attrs = (d, start if shifted else _slice_start(node, axes, sizes, d, start, step), step)
                if (
                    step == 1
                    and not shifted
                    and sizes.position(axes.dims[id(node.args[0])][d], start + node.shape[d]) - attrs[1] != shape[d]
                ):
                    raise NotABoundary(f"{start}:{start + node.shape[d]} of {node.args[0].shape[d]} where structures do not align")
                if shape[d] and not 0 <= attrs[1] + step * (shape[d] - 1) < args[0].shape[d]:
                    raise NotABoundary(f"{start} and every {step}th of {node.args[0].shape[d]} where structures do not align")
            case "rowwise" if sorts and node.attrs[0] not in ("argmax", "argmin") and shape[node.attrs[1]] != args[0].shape[node.attrs[1]]:
                raise NotABoundary(f"a choice among {node.shape[node.attrs[1]]} that became smaller")
            case "concat" if shape[node.attrs[0]] != sum(a.shape[node.attrs[0]] for a in args):
                raise NotABoundary(f"{[a.shape[node.attrs[0]] for a in node.args]} in a row where structures do not align")
            case "reshape" if math.prod(shape) != math.prod(args[0].shape):
                raise NotABoundary(f"{list(node.args[0].shape)} as {list(node.shape)} where structures do not align")
            case "pad":
                d, low, _, value = node.attrs
                first = low if is_shifted(axes.dims[id(node.args[0])][d], dims[d]) else sizes.position(dims[d], low)
                attrs = (d, first, shape[d] - first - args[0].shape[d], value)
            case "one_hot":
                line = axes.lines[id(node.args[0])]
                root = None if line is None else line.root()
                start = node.attrs[0]
                attrs = (start if root is None or root.axis is None else sizes.position(root.axis, start),)
            case "map" if node.attrs[0] in ("lt", "le", "eq") and node.args[0].kind == "int":
                args = tuple(
                    _point(old, new, axes.lines[id(other)], sizes)
                    for old, new, other in zip(node.args, args, reversed(node.args), strict=True)
                )
        return Node(node.prim, args, attrs, shape, node.kind)

    return rebuild(outputs, change)


def _start(node: Node, line: Line | None, sizes: Sizes, axis: Axis) -> int:
    start, step = node.attrs
    root = None if line is None else line.root()
    if root is not None and root.axis is not None:
        return sizes.position(root.axis, start)
    return sizes.first(axis, start) if step == 1 else start  # what is counted in steps keeps its size


def _slice_start(node: Node, axes: NodeAxes, sizes: Sizes, d: int, start: int, step: int) -> int:
    axis = axes.dims[id(node.args[0])][d].root()
    if step == 1 or axis.frozen:
        return sizes.position(axis, start)
    if step == -1:
        return sizes(axis) - 1
    return sizes.position(axis, start - start % step) + start % step


def _point(old: Node, new: Node, line: Line | None, sizes: Sizes) -> Node:
    """A literal compared with positions is a position, if it is on the line at all."""
    value = literal(old)
    root = None if line is None else line.root()
    if value is None or root is None or root.axis is None or not 0 <= value <= root.axis.size:
        return new
    return F.expand(F.const(sizes.position(root.axis, value)), new.shape)
