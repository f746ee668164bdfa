"""Literals that may count what is smaller at reduced sizes, in every way that they can be read.

`1/4096` is a weight that stays, or one over the positions of a sequence and then another number where there are fewer of them. Which
of both is meant nobody says: so a difference counts only if it is there in every reading.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Final, TypeVar

from trainverify.axes.system import System
from trainverify.evaluate.counting import forms, literals, reduced, simplest
from trainverify.evaluate.flow import Task, Tensor, logical_tasks, reached, tasks_of
from trainverify.evaluate.own_counts import written
from trainverify.evaluate.small import Meeting, Small, Step
from trainverify.evaluate.thresholds import of_logical, of_plan, thresholds
from trainverify.graph.obligations import Obligation
from trainverify.graph.program import Op
from trainverify.primitives.node import Node, ordered, rebuild

LOGICAL: Final = -1
LISTED: Final = 50_000  # readings of some literals together

Place = tuple[str, ...]  # a literal, the op it is in, and where that is written: read alike wherever it stands
Reading = Mapping[Place, Fraction]  # factors
_Run = TypeVar("_Run", Step, Meeting)
_T = TypeVar("_T")


def written_at(op: Op) -> tuple[str, str]:
    """Which literals of one value are read alike: those of one line; of a setting of an operator (`scale=`), those of all its uses."""
    name = op.name.removesuffix(".grad")
    if all(attr != "value" for attr, _ in op.attrs):
        return name, ""
    return name, str(op.source or re.sub(r"\d+", "#", op.outputs[0] if op.outputs else ""))


class Readings:
    """Readings of an evaluation at reduced sizes."""

    def __init__(self, system: System, small: Small):
        self.small = small
        counts = reduced(system, small)
        known: dict[str, set[Fraction]] = {}
        self.ways: dict[Place, set[Fraction]] = {}
        self._numbers: dict[Place, Any] = {}
        self._counts = frozenset(counts)
        self._ids = of_logical(system, small, LOGICAL), of_plan(system, small)
        for op, value in literals(system):
            key = repr(value)
            if key not in known:
                known[key] = _factors(value, counts)
            if known[key]:
                place = (key, *written_at(op))
                self.ways[place], self._numbers[place] = known[key], value

    def of(self, o: Obligation) -> frozenset[Place]:
        """Literals that what an obligation compares is made of."""
        held = {(c, h.layout.local) for c in range(len(self.small.classes)) for h in o.holdings}
        reached = (*self._reached.items(), *self._stepped.items())
        return frozenset(p for p, (logical, local) in reached if (LOGICAL, o.output.tensor) in logical or not held.isdisjoint(local))

    def every(self, places: Collection[Place]) -> list[Reading] | None:
        """All readings of some literals, the first of which leaves them as they are; None where they are too many, or where positions are
        compared or rounded behind one, which no reading of it gives back."""
        if any(p in self._stepped for p in places):
            return None
        if any(isinstance(n := self._numbers[p], int) and any((n * f).denominator != 1 for f in self.ways[p]) for p in places):
            return None  # a position that has no counterpart
        if math.prod(len(self.ways[p]) + 1 for p in places) > LISTED:
            return None
        each = [[(p, f) for f in (Fraction(1), *sorted(self.ways[p]))] for p in sorted(places)]
        return [dict(some) for some in itertools.product(*each)]

    @cached_property
    def _reached(self) -> dict[Place, tuple[set[Tensor], set[Tensor]]]:
        """Tensors of the logical program and of the plan that literals go into."""
        one, many = self._tasks
        return {p: (reached(one, _in_which(one, p)), reached(many, _in_which(many, p))) for p in self.ways}

    @cached_property
    def _stepped(self) -> dict[Place, tuple[set[Tensor], set[Tensor]]]:
        """The same for literals that are put to positions before these are compared or rounded."""
        found: dict[Place, tuple[set[Tensor], set[Tensor]]] = {}
        for side, (tasks, ids) in enumerate(zip(self._tasks, self._ids, strict=True)):
            for t in thresholds(tasks, self._counts, ids):
                place = (repr(t.value), *written_at(t.op), "positions")
                found.setdefault(place, (set(), set()))[side].update(reached(tasks, t.makes))
        return found

    @cached_property
    def _tasks(self) -> tuple[list[Task], list[Task]]:
        """Of the logical program and of the plan."""
        logical = [replace(t, c=LOGICAL, reads=_of(LOGICAL, t.reads), makes=_of(LOGICAL, t.makes)) for t in logical_tasks(self.small)]
        return logical, list(tasks_of(self.small))

    @staticmethod
    def read(small: Small, reading: Reading) -> Small:
        """The same evaluation, or a part of it, with other literals."""
        if all(f == 1 for f in reading.values()):
            return small
        known: dict[object, tuple[Node, ...]] = {}

        def changed(run: _Run) -> _Run:
            factors = {literal: f for (literal, *_), f in _here(run, reading).items() if f != 1}
            if not factors or run.nodes is None:
                return run
            key = (id(run.nodes), tuple(factors.items()), run.op.attrs)
            if key not in known:
                known[key] = tuple(_scaled(run.nodes, run.op, factors))
            return replace(run, nodes=known[key])

        classes = [replace(k, order=[changed(s) for s in k.order]) for k in small.classes]
        steps, meetings = [changed(s) for s in small.logical_steps], [changed(m) for m in small.meetings]
        return replace(small, logical_steps=steps, classes=classes, meetings=meetings)

    def given(self, small: Small, places: Collection[Place]) -> Small | None:
        """The same evaluation with these literals as scalars that a point gives; None for those of collectives, and for integers."""
        names = {p: name for p, name in self.names.items() if p in places}
        if any(isinstance(self._numbers[p], int) for p in places) or any(_here(m, names) for m in small.meetings):
            return None
        known: dict[object, tuple[Node, ...]] = {}

        def changed(step: Step) -> Step:
            here = {literal: name for (literal, *_), name in _here(step, names).items()}
            if not here:
                return step
            key = (id(step.nodes), tuple(here), len(step.inputs), step.op.attrs)
            if key not in known:
                known[key] = tuple(_replaced(step.nodes, step.op, {x: len(step.inputs) + n for n, x in enumerate(here)}))
            return replace(step, nodes=known[key], inputs=(*step.inputs, *here.values()))

        classes = [replace(k, order=[changed(s) for s in k.order]) for k in small.classes]
        return replace(small, logical_steps=[changed(s) for s in small.logical_steps], classes=classes)

    @cached_property
    def names(self) -> dict[Place, str]:
        """Of literals that a point gives: no tensor is called so."""
        mark = "literal"
        while any(n.startswith(mark) for tensors in (self.small.shapes, *self.small.local_shapes) for n in tensors):
            mark += "'"
        return {p: f"{mark} {n}" for n, p in enumerate(sorted(self.ways))}

    def scalars(self, reading: Reading) -> dict[str, float]:
        """What a point gives for these literals."""
        return {self.names[p]: float(simplest(self._numbers[p]) * f) for p, f in reading.items()}


def _here(run: Step | Meeting, by_place: Mapping[Place, _T]) -> dict[Place, _T]:
    """Of some literals those that an op has."""
    where = written_at(run.op)
    return {p: x for p, x in by_place.items() if p[1:] == where and _has(run, p[0])}


def _of(c: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple((c, n) for _, n in tensors)


def _in_which(tasks: Sequence[Task], place: Place) -> list[Tensor]:
    """What tasks make in which a literal is."""
    literal, *where = place
    return [x for t in tasks if list(written_at(t.what.op)) == where and _has(t.what, literal) for x in t.makes]


def _has(what: Step | Meeting, literal: str) -> bool:
    return what.nodes is not None and any(n.prim == "const" and repr(n.attrs[0]) == literal for n in ordered(what.nodes))


def _scaled(nodes: Sequence[Node], op: Op, factors: Mapping[str, Fraction]) -> list[Node]:
    return _with(nodes, op, factors, lambda node, f: Node("const", (), (_times(node.attrs[0], f),), node.shape, node.kind))


def _replaced(nodes: Sequence[Node], op: Op, inputs: Mapping[str, int]) -> list[Node]:
    """Literals become inputs."""
    return _with(nodes, op, inputs, lambda node, n: Node("input", (), (n,), (), node.kind))


def _with(nodes: Sequence[Node], op: Op, by_literal: Mapping[str, _T], made: Callable[[Node, _T], Node]) -> list[Node]:
    def change(node: Node, args: tuple[Node, ...]) -> Node:
        if node.prim == "const" and node.kind != "bool" and repr(node.attrs[0]) in by_literal and written(op, node.attrs[0]):
            return made(node, by_literal[repr(node.attrs[0])])
        return Node(node.prim, args, node.attrs, node.shape, node.kind)

    return rebuild(nodes, change)


def _times(value: Any, factor: Fraction) -> Any:
    exact = simplest(value) * factor
    if isinstance(value, float):
        return float(exact)
    return int(exact) if isinstance(value, int) and exact.denominator == 1 else exact


def _factors(value: Any, counts: Mapping[int, set[int]]) -> set[Fraction]:
    """What a literal is multiplied by if it counts one of these, or exactly two of them together."""
    found: set[Fraction] = set()
    for n, ms in counts.items():
        for less, over in forms(value, n):
            for m in ms:
                one = Fraction(max(m - less, 1), n - less)
                found.add(1 / one if over else one)
    exact = abs(simplest(value)) if found else Fraction(0)
    both = exact.numerator if exact.denominator == 1 else exact.denominator if exact.numerator == 1 else 0
    for a, b in itertools.combinations_with_replacement(sorted(counts), 2):
        if a * b == both:
            fewer = {Fraction(m * k, both) for m in counts[a] for k in counts[b]}
            found |= fewer if exact > 1 else {1 / f for f in fewer}
    return found - {Fraction(1)}
