"""Positions, ids, and sums of literals that are compared or rounded behind a literal: where there are fewer they fall otherwise.

`floor(position / 128)` numbers documents of 128 positions. At a reduced size all positions are in the first one, so that what differs there
says nothing of the full size, though 128 counts no axis. An integer position or id that is compared with a literal as it is, is no such
case: its axis is cut there, and keeps positions on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from trainverify.axes.inference import literal
from trainverify.axes.system import System
from trainverify.evaluate.flow import Task, Tensor, levels
from trainverify.evaluate.own_counts import written
from trainverify.evaluate.small import Small, Step
from trainverify.graph.program import Op
from trainverify.primitives.node import Node, ordered

_STEPS: Final = frozenset({"lt", "le", "eq", "floor", "as_int", "as_bool", "sign", "abs", "max", "min", "floordiv", "mod"})
_COMPARED: Final = frozenset({"lt", "le", "eq"})


@dataclass(frozen=True)
class Carried:
    """What a value is made of: positions on an axis of this size, ids below it, or a sum of so many literals (0: none of these), a literal
    with its op, and inputs; whether something was computed of them; and whether inputs are in it as integers and booleans only."""

    positions: int = 0
    number: tuple[Op, Any] | None = None
    inputs: bool = False
    computed: bool = False
    bounded: bool = False


@dataclass(frozen=True)
class Threshold:
    """A literal, its op, the size of the axis whose positions are compared or rounded behind it, and what is made there."""

    value: Any
    op: Op
    size: int
    makes: tuple[Tensor, ...]


_INPUT: Final = Carried(inputs=True)


def of_logical(system: System, small: Small, c: int) -> dict[Tensor, int]:
    """Ids of the logical program, as a class, of which there are fewer in an evaluation; and how many there are."""
    full = {n: d.size for n, d in system.logical.domains.items() if d.size is not None}
    return {(c, n): size for n, size in full.items() if small.domains[n].size != size}


def of_plan(system: System, small: Small) -> dict[Tensor, int]:
    """The same on ranks."""
    fewer = of_logical(system, small, 0)
    held = [(lay.local, fewer[0, lay.logical]) for lay in system.plan.lineage if (0, lay.logical) in fewer]
    return {(c, local): size for c, k in enumerate(small.classes) for local, size in held if local in k.program.sources}


def thresholds(tasks: Sequence[Task], counts: Collection[int], ids: Mapping[Tensor, int]) -> list[Threshold]:
    """Those of a program, given the sizes that are smaller in an evaluation, and its ids of which there are fewer."""
    known: dict[Tensor, Carried] = {t: Carried(size, inputs=True) for t, size in ids.items()}
    found: list[Threshold] = []
    for task in (t for level in levels(tasks) for batch in level for t in batch):
        given = [known[t] for t in task.reads if t in known]
        if not isinstance(task.what, Step):
            if given:
                known.update(dict.fromkeys(task.makes, _joined(given)))
            continue
        (lowered, _), step = task.what.full, task.what
        if not any(c.positions for c in given) and any(t not in known for t in task.reads) and not _looked_at(lowered.outputs):
            continue
        inputs = [_INPUT if i is None else known.get((task.c, i), _INPUT) for i in step.inputs]
        made, hits = _op(step.op, lowered.outputs, inputs, counts)
        known.update({t: c for t, c in zip(task.makes, made, strict=True) if c != _INPUT})
        found += [Threshold(value, op, size, task.makes) for size, (op, value) in hits]
    return found


def _looked_at(outputs: tuple[Node, ...]) -> bool:
    """Whether an op has positions of its own, literals to be added up, or real numbers that are made of others."""
    return any(n.prim in ("iota", "const") or (n.kind == "real" and any(a.kind != "real" for a in n.args)) for n in ordered(outputs))


def _op(
    op: Op, outputs: tuple[Node, ...], inputs: Sequence[Carried], counts: Collection[int]
) -> tuple[list[Carried], list[tuple[int, tuple[Op, Any]]]]:
    """What the outputs of an op carry, and where positions are compared or rounded behind a literal."""
    carried: dict[Node, Carried] = {}
    hits: list[tuple[int, tuple[Op, Any]]] = []
    for node in ordered(outputs):
        args = [carried[a] for a in node.args]
        made = _joined(args)
        fn = node.attrs[0] if node.prim == "map" else ""
        if node.prim == "input":
            made = inputs[node.attrs[0]]
        elif node.prim == "const":
            made = Carried(number=(op, node.attrs[0]) if _matters(op, node) else None)
        elif node.prim == "iota":
            made = Carried(node.shape[0] if node.shape[0] in counts else 0, (op, node.attrs[0]) if node.attrs[0] < 0 else None)
        elif node.prim == "one_hot" or fn == "uniform" or (node.prim == "rowwise" and node.attrs[0].startswith("arg")):
            made = _INPUT
        elif node.prim == "gather":
            made = args[0]
        elif fn in _STEPS and made.positions and made.number is not None and not _cut(node, args):
            hits.append((made.positions, made.number))
            made = _INPUT
        elif node.prim in ("map", "contract", "rowwise"):
            made = replace(made, positions=max(made.positions, 0 if made.inputs else _added(node, counts)), computed=True)
        carried[node] = replace(made, bounded=made.inputs) if node.kind != "real" else made
    return [carried[o] for o in outputs], hits


def _added(node: Node, counts: Collection[int]) -> int:
    """How many numbers, of which there are fewer in the evaluation, a sum or running sum adds up; else 0."""
    if node.prim == "contract":
        terms, target = node.attrs
        sizes = {label: n for term, a in zip(terms, node.args, strict=True) for label, n in zip(term, a.shape, strict=True)}
        return max((n for label, n in sizes.items() if label not in target and n in counts), default=0)
    return node.shape[node.attrs[1]] if node.prim == "rowwise" and node.shape[node.attrs[1]] in counts else 0


def _joined(args: Sequence[Carried]) -> Carried:
    """Of something made of several. Positions that real inputs are put to are positions no more: whatever they are compared with, inputs
    reach both sides of it at any size. A literal that inputs were put to is one no more, but positions keep theirs."""
    inputs, bounded = any(c.inputs for c in args), all(c.bounded for c in args if c.inputs)
    free = any(c.inputs and not c.positions and not c.bounded for c in args)
    positions = 0 if free else max((c.positions for c in args), default=0)
    numbers = [c.number for c in args if c.number is not None and (c.positions or not c.inputs)]
    number = numbers[0] if numbers and (positions or not inputs) else None
    return Carried(positions, number, inputs, any(c.computed for c in args), inputs and bounded)


def _matters(op: Op, node: Node) -> bool:
    value = node.attrs[0]
    return node.kind != "bool" and math.isfinite(value) and value not in (0, 1, -1) and written(op, value)


def _cut(node: Node, args: Sequence[Carried]) -> bool:
    """Whether integer positions are compared as they are: with each other, or with an integer at which their axis is cut."""
    if node.attrs[0] not in _COMPARED:
        return node.attrs[0] in ("as_int", "as_bool") and node.args[0].kind != "real"
    if node.args[0].kind != "int":
        return False
    return all(not c.computed if c.positions else c.number is None or literal(a) is not None for a, c in zip(node.args, args, strict=True))
