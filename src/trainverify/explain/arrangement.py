"""What is wrong where no small repair is found: elements in another arrangement, gradients that end nowhere, groups of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.evaluate.small import Meeting, Step
from trainverify.explain.cause import COLLECTIVES, JOINS, Cause
from trainverify.explain.missing import Locator
from trainverify.explain.place import Place
from trainverify.explain.replay import Graph, Node
from trainverify.graph.program import Op

MOVING = frozenset({"identity", "to", "reshape", "transpose", "permute", "slice", "split", "concat", "stack"})


def arranged(locator: Locator, graph: Graph, reached: Mapping[Node, int]) -> Place | None:
    """The first of these that the wrong outputs depend on."""
    for kind in (_alone, _whole, _lost):
        found = next(kind(locator, graph, reached), None)
        if found is not None:
            return found
    return None


def _place(locator: Locator, node: Node, row: int, op: Op | None, cause: str, category: Cause, logical: str = "") -> Place:
    rank = locator.small.classes[node[0]].ranks[row]
    return Place(logical or node[1], locator.made_by.get(logical), rank, node[1], op, cause, category)


def _alone(locator: Locator, graph: Graph, reached: Mapping[Node, int]) -> Iterator[Place]:
    """Collectives in which every rank is alone, on a plan of several ranks."""
    for i in graph.order:
        task = graph.tasks[i]
        if isinstance(task.what, Meeting) and task.what.op.name in COLLECTIVES and all(len(g) == 1 for g in task.what.receivers):
            for n in task.makes:
                if n in reached:
                    cause = f"every rank is alone in the group of this {task.what.op.name}"
                    yield _place(locator, n, 0, graph.ops.get(n), cause, Cause.WRONG_GROUP)


def _whole(locator: Locator, graph: Graph, reached: Mapping[Node, int]) -> Iterator[Place]:
    """Inputs of ops like those of the logical program that are as large as the whole tensor, with its elements in other places."""
    logical = [s.op for s in locator.small.logical_steps]
    for i in graph.order:
        task = graph.tasks[i]
        if not isinstance(task.what, Step) or not any(n in reached for n in task.makes):
            continue
        step, c, row = task.what, task.class_index, task.what.rows[0]
        for op in logical:
            if op.name != step.op.name or len(op.inputs) != len(step.inputs):
                continue
            for name, local in zip(op.inputs, step.inputs, strict=True):
                if name is None or local is None or name not in locator.known or name not in locator.matches(c, row, local):
                    continue
                where = locator.positions(c, row, local, name)
                found = None if where is None else _off(where, locator.logical[name], graph.ops.get((c, local)))
                if found is not None and not _elsewhere(locator, c, row, local) and not _moved(locator, graph, (c, local), row, name):
                    cause = f"{found[0]} of {name}"
                    yield _place(locator, (c, local), row, graph.ops.get((c, local)), cause, found[1], name)


def _elsewhere(locator: Locator, c: int, row: int, local: str) -> bool:
    """Whether a tensor is, as it is, some other logical tensor: the same weight transposed, say."""
    for name in locator.matches(c, row, local):
        if name not in locator.known:  # a proof says so: its values do not tell it apart
            return True
        where, whole = locator.positions(c, row, local, name), np.asarray(locator.logical[name])
        if where is not None and where.shape == whole.shape and _aligned(where.reshape(-1), whole.reshape(-1)):
            return True
    return False


def _moved(locator: Locator, graph: Graph, node: Node, row: int, name: str) -> bool:
    """Whether ops that only move elements put all of them into their places: those of DTensor after it gathered."""
    seen, todo = {node}, [node]
    whole = np.asarray(locator.logical[name])
    while todo:
        for i in graph.users.get(todo.pop(), ()):
            task = graph.tasks[i]
            new = [n for n in task.makes if n not in seen and n[0] == node[0]] if task.what.op.name in MOVING else []
            seen.update(new)
            todo += new
            for c, t in new:
                where = locator.positions(c, row, t, name) if name in locator.matches(c, row, t) else None
                if where is not None and where.shape == whole.shape and _aligned(where.reshape(-1), whole.reshape(-1)):
                    return True
    return False


def _aligned(where: Array, whole: Array) -> bool:
    """Whether elements are where they are in the logical tensor. Equal ones count as one: a token that comes twice."""
    known = where >= 0
    return bool(np.isclose(whole[where], whole, rtol=1e-7, atol=0)[known].all())


def _off(where: Array, logical: Array, maker: Op | None) -> tuple[str, Cause] | None:
    """How elements are arranged that are not where they are in the logical tensor."""
    whole, shape = np.asarray(logical).reshape(-1), logical.shape
    if where.size != np.prod(shape, dtype=int):
        return None
    flat = where.reshape(-1)
    if where.shape != shape:
        if where.ndim != len(shape) or maker is None or maker.name not in JOINS:
            return None
        return f"shape {where.shape} where {shape} is needed: joined along another dimension, with all elements", Cause.WRONG_DIMENSION
    known = flat >= 0
    if not known.any() or _aligned(flat, whole):
        return None
    if known.all() and len(set(flat.tolist())) == flat.size:
        return "holds the elements in another order", Cause.WRONG_ORDER
    return "holds a part twice or not at all", Cause.WRONG_BLOCK


def _lost(locator: Locator, graph: Graph, reached: Mapping[Node, int]) -> Iterator[Place]:
    """Gradients that nothing uses, of tensors that are made from parameters whose gradients are wrong."""
    for c, k in enumerate(locator.small.classes):
        outputs = {o.tensor for o in k.program.outputs}
        for op in k.program.ops:
            for tensor in op.outputs:
                if op.phase != "backward" or (c, tensor) in graph.users or tensor in outputs or not op.name.endswith(".grad"):
                    continue
                of = op.inputs[op.get("wrt", (0,))[op.outputs.index(tensor)]]
                maker = None if of is None else graph.ops.get((c, of))
                if of is None or maker is None or not any(t in k.program.parameters for d, t in graph.marks({(c, of): 1}) if d == c):
                    continue
                cause = f"{tensor}, its gradient, is used by nothing: it does not reach what {of} is made from"
                yield _place(locator, (c, of), 0, maker, cause, Cause.LOST_CONTRIBUTION)
