"""Derivatives: one vector-Jacobian rule per primitive, from which every operator's gradient follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Final

import trainverify.primitives.node as F
from trainverify.primitives.node import Node
from trainverify.primitives.scalars import SCALARS
from trainverify.primitives.windows import overlap, window

Cotangents = Sequence[Node | None]


class NotDifferentiable(Exception):
    """A primitive with no derivative stands between an output and an input."""


def _map(node: Node, g: Node) -> Cotangents:
    row = SCALARS[node.attrs[0]]
    if row.partials is None:
        return [None] * len(node.args)
    extra = {"param": node.attrs[1]} if len(node.attrs) > 1 else {}
    partials = row.partials(F, node, *node.args, **extra)
    return [None if p is None else g if _is(p, 1) else -g if _is(p, -1) else g * p for p in partials]


def _is(value: object, number: int) -> bool:
    return isinstance(value, int) and value == number


def _contract(node: Node, g: Node) -> Cotangents:
    terms, target = node.attrs
    result: list[Node | None] = []
    for i, term in enumerate(terms):
        others = [(t, a) for j, (t, a) in enumerate(zip(terms, node.args, strict=True)) if j != i]
        labels = [target, *(t for t, _ in others)]
        known = {n for t in labels for n in t}
        present = [n for n in term if n in known]
        part = F.contract_labels(
            [g, *(a for _, a in others)],
            [[str(n) for n in t] for t in labels],
            [str(n) for n in present],
        )
        dims = tuple(k for k, n in enumerate(term) if n in known)
        result.append(F.broadcast(part, node.args[i].shape, dims))
    return result


def _reduce(node: Node, g: Node) -> Cotangents:
    fn, gone = node.attrs
    (x,) = node.args
    kept = tuple(d for d in range(x.ndim) if d not in gone)
    wide_g, wide_y = F.broadcast(g, x.shape, kept), F.broadcast(node, x.shape, kept)
    if fn == "prod":
        return [wide_g * _product_of_others(x, gone)]
    hit = F.select(F.call("eq", x, wide_y), 1, 0)  # equal shares at ties, as PyTorch's amax
    count = F.broadcast(F.total(hit, gone), x.shape, kept)
    return [wide_g * F.cast(hit, "real") / F.cast(count, "real")]


def _product_of_others(x: Node, dims: tuple[int, ...]) -> Node:
    """∏ of x over `dims` without the element itself; defined at zeros, where y / x is not."""
    order = [*(d for d in range(x.ndim) if d not in dims), *dims]
    moved = F.transpose(x, order)
    kept = moved.shape[: x.ndim - len(dims)]
    rows = F.reshape(moved, (*kept, -1))
    n, k = rows.shape[-1], len(kept)
    table = F.broadcast(rows, (*kept, n, n), (*range(k), k + 1))  # row i, then element j
    itself = F.call("eq", F.reshape(F.iota(n), (n, 1)), F.iota(n))
    others = F.reduce("prod", F.select(itself, 1, table), [k + 1])
    return F.transpose(F.reshape(others, moved.shape), [order.index(d) for d in range(x.ndim)])


def _slice(node: Node, g: Node) -> Cotangents:
    (x,) = node.args
    d, start, step = node.attrs
    if step < 0:
        g, start, step = F.flip(g, d), start + (node.shape[d] - 1) * step, -step
    n = g.shape[d]
    if step > 1 and x.shape[d] % step == 0:  # one element of every block of `step`
        before = start % step
        g = F.pad(F.reshape(g, (*g.shape[: d + 1], 1, *g.shape[d + 1 :])), d + 1, before, step - 1 - before)
        g = F.reshape(g, (*g.shape[:d], n * step, *g.shape[d + 2 :]))
        start -= before
    elif step > 1:  # spread: each element followed by step-1 zeros
        g = F.reshape(g, (*g.shape[: d + 1], 1, *g.shape[d + 1 :]))
        g = F.pad(g, d + 1, 0, step - 1)
        g = F.reshape(g, (*g.shape[:d], n * step, *g.shape[d + 2 :]))
        g = F.take(g, d, 0, min(n * step, x.shape[d] - start))
    return [F.pad(g, d, start, x.shape[d] - start - g.shape[d])]


def _concat(node: Node, g: Node) -> Cotangents:
    (d,) = node.attrs
    result: list[Node | None] = []
    start = 0
    for a in node.args:
        result.append(F.take(g, d, start, start + a.shape[d]))
        start += a.shape[d]
    return result


def _pad(node: Node, g: Node) -> Cotangents:
    d, low, _, _ = node.attrs
    return [F.take(g, d, low, low + node.args[0].shape[d])]


def _broadcast(node: Node, g: Node) -> Cotangents:
    (dims,) = node.attrs
    return [F.total(g, [d for d in range(node.ndim) if d not in dims])]


def _select(node: Node, g: Node) -> Cotangents:
    c = node.args[0]
    return [None, F.select(c, g, 0), F.select(c, 0, g)]


def spread(ids: Node, g: Node, size: int, d: int) -> Node:
    """Adjoint of gather: adds g[…, j, …] into position ids[…, j, …] of a dimension of `size`."""
    hot = F.one_hot(ids, size)
    labels = [str(i) for i in range(ids.ndim)]
    out = [*labels[:d], "new", *labels[d + 1 :]]
    return F.contract_labels([g, hot], [labels, [*labels, "new"]], out)


def _gather(node: Node, g: Node) -> Cotangents:
    x, ids = node.args
    (d,) = node.attrs
    return [spread(ids, g, x.shape[d], d), None]


def _rowwise(node: Node, g: Node) -> Cotangents:
    fn, d, descending = node.attrs
    (x,) = node.args
    if fn == "cumsum":
        return [F.flip(F.rowwise("cumsum", F.flip(g, d), d), d)]
    if fn == "sort":
        return [spread(F.rowwise("argsort", x, d, descending), g, x.shape[d], d)]
    return [None]


RULES: Final[dict[str, Callable[[Node, Node], Cotangents]]] = {
    "map": _map,
    "contract": _contract,
    "reduce": _reduce,
    "reshape": lambda node, g: [F.reshape(g, node.args[0].shape)],
    "transpose": lambda node, g: [F.transpose(g, [node.attrs[0].index(i) for i in range(node.ndim)])],
    "slice": _slice,
    "concat": _concat,
    "pad": _pad,
    "broadcast": _broadcast,
    "select": _select,
    "gather": _gather,
    "rowwise": _rowwise,
    "window": lambda node, g: [overlap(g, *node.attrs)],
    "overlap": lambda node, g: [window(g, node.attrs[0], replace(node.attrs[1], filler=0))],
    "one_hot": lambda node, g: [None],
    "const": lambda node, g: [],
    "iota": lambda node, g: [],
    "input": lambda node, g: [],
}


def vjp(outputs: Sequence[Node], cotangents: Cotangents, wrt: Sequence[Node]) -> list[Node]:
    """Σ over outputs of cotangent · ∂output/∂x, for every x in `wrt` (zeros where nothing depends on it)."""
    total: dict[int, Node] = {}

    def add(node: Node, g: Node) -> None:
        total[id(node)] = total[id(node)] + g if id(node) in total else g

    for node, g in zip(outputs, cotangents, strict=True):
        if g is not None:
            if g.shape != node.shape:
                raise F.ShapeError(f"gradient of shape {list(g.shape)} for a value of shape {list(node.shape)}")
            add(node, g)
    for node in reversed(F.topological(outputs)):
        if id(node) in total and node.kind == "real" and node.prim != "input":
            for arg, g in zip(node.args, RULES[node.prim](node, total[id(node)]), strict=True):
                if g is not None and arg.kind == "real":
                    add(arg, g)
    for x in wrt:
        if x.kind != "real":
            raise NotDifferentiable("only real tensors have gradients")
    return [total.get(id(x), F.full(Fraction(0), x.shape)) for x in wrt]
