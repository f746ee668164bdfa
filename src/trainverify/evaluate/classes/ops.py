"""An op on cells: every variant that ranks of a class run, evaluated at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from trainverify.axes.cells import Cells, NoCells
from trainverify.axes.inference import Dims, NodeAxes
from trainverify.axes.structure import Axes
from trainverify.evaluate.classed import Classed, ClassedDomain
from trainverify.ops.table import Lowered
from trainverify.primitives.node import Node, ordered


class ClassOp:
    """An op on cells: its nodes in order, attributes of all variants, cells of all dimensions."""

    def __init__(self, structure: Axes, cells: Callable[[Dims], list[Cells]], variants: Sequence[tuple[Lowered, NodeAxes]]):
        lowered, axes = variants[0]
        self.order = ordered(tuple(lowered.outputs))
        place = {id(n): i for i, n in enumerate(self.order)}
        self.args = [[place[id(a)] for a in n.args] for n in self.order]
        self.ends = [place[id(o)] for o in lowered.outputs]
        leaves = structure.leaves
        self.cells = [cells(axes.dims[id(n)]) for n in self.order]
        for n, made, args in zip(self.order, self.cells, self.args, strict=True):
            if not _fit(n, made, [self.cells[i] for i in args]):
                raise NoCells(f"{n.prim} of what is cut in several ways")
        attrs: list[dict[str, tuple[object, ...]]] = [{repr(n.attrs): n.attrs} for n in self.order]
        self.aligned = [
            n.prim == "reshape" and [id(a) for a in leaves(axes.dims[id(n)])] == [id(a) for a in leaves(axes.dims[id(n.args[0])])]
            for n in self.order
        ]
        form = [(n.prim, n.shape, n.kind, args) for n, args in zip(self.order, self.args, strict=True)]
        for other, own in variants[1:]:
            nodes = ordered(tuple(other.outputs))
            there = {id(n): i for i, n in enumerate(nodes)}
            if [(n.prim, n.shape, n.kind, [there[id(x)] for x in n.args]) for n in nodes] != form:
                raise NoCells("an op that has another form on other ranks of a class")
            for k, n in enumerate(nodes):
                if not all(a.same(b) for a, b in zip(self.cells[k], cells(own.dims[id(n)]), strict=True)):
                    raise NoCells("an op that cuts axes otherwise on other ranks of a class")
                if _but_its_start(n) != _but_its_start(self.order[k]):
                    raise NoCells("an op that does something else on other ranks of a class")
                attrs[k].setdefault(repr(n.attrs), n.attrs)
        self.attrs = [tuple(a.values()) for a in attrs]
        self.inputs = {n.attrs[0]: k for k, n in enumerate(self.order) if n.prim == "input"}
        self.nodes: list[Node] = list(self.order)

    def run(self, domain: ClassedDomain, inputs: Mapping[int, Classed], lead: int) -> list[Classed]:
        values: list[Classed] = []
        for k, node in enumerate(self.nodes):
            if node.prim == "input":
                values.append(inputs[node.attrs[0]])
                continue
            args = [values[i] for i in self.args[k]]
            if self.aligned[k]:
                values.append(domain.aligned(args[0], self.cells[k], self.cells[self.args[k][0]], lead))
            else:
                values.append(domain.node(node, self.attrs[k], args, self.cells[k], [self.cells[i] for i in self.args[k]], lead))
        return [domain.settled(values[k]) for k in self.ends]


def _but_its_start(node: Node) -> object:
    """What a node does, apart from the literals that may differ between the ranks of a class."""
    match node.prim:
        case "const":
            return None
        case "iota":
            return node.attrs[1]
        case "slice":
            return node.attrs[0], node.attrs[2]
        case "one_hot":
            return None
    return repr(node.attrs)


def _fit(node: Node, cells: Sequence[Cells], given: Sequence[Sequence[Cells]]) -> bool:
    """Whether the dimensions that a node takes for the same ones have the same cells."""

    def alike(a: Sequence[Cells], b: Sequence[Cells]) -> bool:
        return len(a) == len(b) and all(x.same(y) for x, y in zip(a, b, strict=True))

    def but(dims: Sequence[Cells], *gone: int) -> list[Cells]:
        return [c for d, c in enumerate(dims) if d not in gone]

    match node.prim:
        case "map" | "select":
            return all(alike(cells, g) for g in given)
        case "broadcast":
            return alike([cells[d] for d in node.attrs[0]], given[0])
        case "transpose":
            return alike(cells, [given[0][p] for p in node.attrs[0]])
        case "contract":
            label: dict[int, Cells] = {}
            for term, own in zip(node.attrs[0], given, strict=True):
                if not all(c.same(label.setdefault(i, c)) for i, c in zip(term, own, strict=True)):
                    return False
            return alike(cells, [label[i] for i in node.attrs[1]])
        case "reduce":
            return alike(cells, but(given[0], *node.attrs[1]))
        case "slice" | "concat" | "pad":
            return all(alike(but(cells, node.attrs[0]), but(g, node.attrs[0])) for g in given)
        case "one_hot":
            return alike(cells[:-1], given[0])
        case "gather":
            return alike(cells, given[1]) and alike(but(given[0], node.attrs[0]), but(given[1], node.attrs[0]))
        case "rowwise":
            fn, d, _ = node.attrs
            if fn in ("argmax", "argmin"):
                return alike(cells, but(given[0], d))
            if fn == "cumsum":
                return alike(cells, given[0])
            return alike(but(cells, d), but(given[0], d)) and given[0][d].whole == cells[d].whole
    return True
