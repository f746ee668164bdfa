"""Shapes of single stages: a stage has fewer constraints than the whole program, so it can be smaller.

Digits of a dimension that stay side by side in every tensor and every step of a stage are one axis to it, and so is a sum of which no piece
occurs alone. What an op of the stage takes apart, what a tensor lacks of the logical tensor whose elements it holds (its place on the
mesh), rows that are sorted, and what could not be aligned keep the structure that they have in the whole program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from trainverify.axes.inference import Dims, NodeAxes
from trainverify.axes.reduction import Sizes
from trainverify.axes.structure import Axis
from trainverify.axes.system import System
from trainverify.graph.lineage import Layout
from trainverify.graph.obligations import Obligation
from trainverify.ops.table import Lowered
from trainverify.primitives.node import topological
from trainverify.prove.staged.align import Alignment
from trainverify.prove.staged.described import described
from trainverify.prove.staged.engine import Engine, aligned
from trainverify.prove.staged.graphs import LOGICAL, Place
from trainverify.prove.staged.records import Part, Stage
from trainverify.prove.staged.reduce import LEAST, Shape


@dataclass(frozen=True)
class StageShapes:
    """What a stage shows, and its tensors, logical ones first: as the whole program reduces them, and the shape that the stage needs."""

    text: str
    tensors: tuple[tuple[Shape, tuple[int, ...]], ...]
    alike: int = 0  # other stages with the same ops and shapes

    @property
    def elements(self) -> tuple[int, int]:
        """Of all its tensors, at the sizes of the whole program and at its own."""
        return sum(math.prod(s.reduced) for s, _ in self.tensors), sum(math.prod(own) for _, own in self.tensors)

    def lines(self) -> Iterator[str]:
        yield self.text + (f", and {self.alike} alike" if self.alike else "")
        for shape, own in self.tensors:
            yield f"  {replace(shape, reduced=own)}" + ("" if own == shape.reduced else f" (whole program: {list(shape.reduced)})")


def stage_shapes(system: System, wanted: Sequence[Obligation], lineage: tuple[Layout, ...]) -> list[StageShapes]:
    """The stages as they are cut first, each with the shapes that it needs by itself; those that are alike once."""
    engine = Engine(*aligned(system, wanted, lineage), wanted)
    own = _Own(system, engine.alignment)
    found: dict[object, StageShapes] = {}
    texts = sorted(((described(stage, engine.alignment), n, stage) for n, stage in enumerate(engine.first())), key=lambda t: t[:2])
    for text, _, stage in texts:
        tensors = tuple(own.shapes(stage))
        ops = [tuple(c.signature for c in part.calls) for part in (stage.logical, stage.plan)]
        key = (*ops, tuple((s.full, s.reduced, mine) for s, mine in tensors))
        known = found.get(key)
        found[key] = StageShapes(text, tensors) if known is None else replace(known, alike=known.alike + 1)
    return list(found.values())


class _Own:
    """Looks stages up in the axes of the whole program."""

    def __init__(self, system: System, alignment: Alignment):
        self.system = system
        self.alignment = alignment
        self.axes = system.inference.axes
        units = [(LOGICAL, system.logical), *((c, system.unit_programs[k.unit]) for c, k in enumerate(system.schedule.classes))]
        self._makers = {(c, o): n for c, program in units for n, op in enumerate(program.ops) for o in op.outputs}
        self._meetings = {(c, o): m for m in system.meetings for c, op in m.ops for o in op.outputs}

    def shapes(self, stage: Stage) -> Iterator[tuple[Shape, tuple[int, ...]]]:
        small = self.alignment.small
        places = self._places(stage)
        size = self._sizes(stage, places)
        for c, row, name in sorted(places, key=lambda p: p[0] != LOGICAL):
            k = None if c == LOGICAL else small.classes[c]
            full = (small.logical if k is None else k.program).tensors[name].shape
            shape = Shape(name, None if k is None else k.ranks[row], full, self.alignment.graph.shape((c, row, name)))
            yield shape, tuple(size(a) for a in self._dims((c, row, name)))

    def _sizes(self, stage: Stage, places: Sequence[Place]) -> Callable[[Axis], int]:
        if self.axes.views or self.axes.counted:  # sizes that depend on one another across the program
            return Sizes(self.axes, self.system.inference.all, LEAST, alternate=False)
        rows: list[Dims] = [self._dims(p) for p in places]
        kept: list[Axis] = []
        for call in {id(c): c for part in _parts(stage) for c in part.calls}.values():
            for lowered, axes in self._lowered(call.outputs[0]):
                rows += axes.dims.values()
                for node in topological(lowered.outputs):
                    if node.prim == "rowwise":
                        kept += [axes.dims[id(n)][node.attrs[1]] for n in (node, node.args[0]) if len(n.shape) > node.attrs[1]]
        for place, name in self._relations(stage):
            here, there = (self.axes.leaves(self._dims(p)) for p in (place, (LOGICAL, 0, name)))
            kept += [a for a in here if a not in there] + [a for a in there if a not in here]
        items = joined([self.axes.leaves([a]) for dims in rows for a in dims], self.axes.leaves(kept))
        sizes = Sizes(self.axes, items.values(), LEAST, alternate=False)

        def size(axis: Axis) -> int:
            return math.prod(sizes(a) for a in {id(a): a for a in (items[id(leaf)] for leaf in self.axes.leaves([axis]))}.values())

        return size

    def _dims(self, place: Place) -> Dims:
        c, _, name = place
        scope = self.system.scope if c == LOGICAL else self.system.unit_scopes[self.system.schedule.classes[c].unit]
        return scope.dims[name]

    def _lowered(self, place: Place) -> Iterator[tuple[Lowered, NodeAxes]]:
        """The op that makes a tensor, with its axes."""
        c, row, name = place
        n = self._makers[c, name]
        if c == LOGICAL:
            yield from ((x.lowered, x.axes) for x in self.system.logical_ops[n])
        elif (c, name) in self._meetings:
            m = self._meetings[c, name]
            if m.lowered is not None and m.axes is not None:  # a message takes nothing apart
                yield m.lowered, m.axes
        else:
            k = self.system.schedule.classes[c]
            mine = self.system.talk.units[k.unit].ranks.index(k.ranks[row])
            yield from ((x.lowered, x.axes) for x in self.system.unit_ops[k.unit][n] if mine in x.rows)

    def _places(self, stage: Stage) -> list[Place]:
        """Every tensor of a stage, on every rank."""
        found: dict[Place, None] = {}
        for part in _parts(stage):
            found |= dict.fromkeys(p for call in part.calls for p in (*call.inputs, *call.outputs) if p is not None)
            found |= dict.fromkeys(part.leaves)
        return list(found | dict.fromkeys((LOGICAL, 0, name) for _, name in self._relations(stage)))

    def _relations(self, stage: Stage) -> Iterator[tuple[Place, str]]:
        """Which tensor holds elements of which logical one."""
        a = self.alignment
        said = [(p, ids) for part in _parts(stage) for p, (ids, _) in part.leaves.items() if p[0] != LOGICAL]
        for place, ids in [*said, *((t.place, stage.goal.ids) for t in stage.goal.terms)]:
            for name in a.owners([ids]):
                yield place, name


def joined(rows: Sequence[Sequence[Axis]], kept: Sequence[Axis]) -> dict[int, Axis]:
    """What each digit of these dimensions (by its id) is a part of, if some of them need not be told apart; `kept` are to be."""
    apart = {id(a) for a in kept}
    before: dict[int, set[int]] = {}
    after: dict[int, set[int]] = {}
    digits: dict[int, Axis] = {}
    for row in rows:
        ids = [id(a) for a in row]
        digits |= zip(ids, row, strict=True)
        for left, right in zip([0, *ids], [*ids, 0], strict=True):
            after.setdefault(left, set()).add(right)
            before.setdefault(right, set()).add(left)
    users: dict[int, set[int]] = {}  # what a sum is made of → the digits that it is part of
    for key, a in digits.items():
        for part in _below(a):
            users.setdefault(id(part), set()).add(key)
    for a in digits.values():
        if a.frozen or any(part.frozen or len(users[id(part)]) > 1 for part in _below(a)):
            apart.add(id(a))
    found: dict[int, Axis] = {}
    for key, a in digits.items():
        first = before[key] != {0} and len(before[key]) == 1 and after[next(iter(before[key]))] == {key}
        if key in apart or (first and not apart & before[key] and key not in before[key]):
            continue  # alone, or not the first of its run
        run = [key]
        while after[run[-1]] != {0} and len(after[run[-1]]) == 1:
            (following,) = after[run[-1]]
            if before[following] != {run[-1]} or following in apart or following in run:
                break
            run.append(following)
        if len(run) > 1 or a.pieces is not None:
            found |= dict.fromkeys(run, Axis(math.prod(digits[k].size for k in run)))
    return {key: found.get(key, a) for key, a in digits.items()}


def _below(axis: Axis) -> Iterator[Axis]:
    """An axis and everything that it is made of."""
    a = axis.root()
    yield a
    for part in a.factors or a.pieces or ():
        yield from _below(part)


def _parts(stage: Stage) -> list[Part]:
    return [stage.logical, stage.plan, *(part for _, part in stage.extra.values()), *stage.defined.values()]
