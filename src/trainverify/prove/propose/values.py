"""Values of both programs on random points, and what they say: which logical elements look alike, and which goals agree."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC
from trainverify.graph.lineage import Layout
from trainverify.graph.obligations import Obligation
from trainverify.primitives.node import topological
from trainverify.prove.definedness import MAY_FAIL
from trainverify.prove.propose.points import LENIENT, Digits, PointRun, drawn
from trainverify.prove.propose.table import CLOSE, NOISE, ROUGH, Table
from trainverify.prove.staged.elements import Elements
from trainverify.prove.staged.graphs import LOGICAL, Place
from trainverify.prove.staged.records import Goal


class Values:
    """Of all tensors of one pair of programs."""

    def __init__(self, elements: Elements, lineage: tuple[Layout, ...], wanted: Sequence[Obligation], seed: int):
        self.elements = elements
        self.graph = elements.graph
        self.small = elements.small
        self.digits = Digits(self.small, lineage)
        found = drawn(self.small, lineage, wanted, elements.start, self.digits, seed)
        self.runs, self.ordinary, self.quiet, self.wrong = found.runs, found.ordinary, found.quiet, found.wrong
        self.points = len(self.runs)
        self._largest: dict[tuple[int, str], float] = {}  # number of a tensor of a class, on all ranks
        self.usable, self.table = self._logical()

    def _logical(self) -> tuple[Array, Table]:
        """Which logical elements have values that tell something, and these values."""
        a = self.elements
        values, scale = np.zeros((2, self.points, a.count))
        usable = np.zeros(a.count, dtype=bool)
        for name, first in a.start.items():
            if self.graph.kind((LOGICAL, 0, name)) != "real":
                continue
            size = math.prod(self.small.shapes[name])
            mine = slice(first, first + size)
            for p, run in enumerate(self.runs):
                values[p, mine] = run.logical[name].reshape(-1)
            usable[mine] = size == 1 or (values[:, mine] != np.round(values[:, mine])).any()
            scale[:, mine] = np.abs(values[:, mine]).max(axis=1, keepdims=True, initial=0.0)
        usable &= np.isfinite(values).all(axis=0)
        values[:, ~usable] = 0.0
        return usable, Table(values, usable, scale, a.numbers, self.quiet)

    def of(self, place: Place) -> Array | None:
        """(points, elements), None where it was not computed or is not finite."""
        rows = []
        for run in self.runs:
            v = run.of(place)
            if v is None:
                return None
            rows.append(np.asarray(v, dtype=np.float64).reshape(-1))
        made = np.stack(rows)
        return made if np.isfinite(made).all() else None

    def close(self, a: Array, b: Array) -> bool:
        """Whether two scalars have the same values on all points."""
        q = self.quiet
        loud = np.abs(a[q:] - b[q:]) <= ROUGH * np.maximum(np.abs(a[q:]), np.abs(b[q:]))
        return _near(a[:q], b[:q]) and bool(loud.all())

    def rounding_only(self, place: Place, v: Array) -> bool:
        """Whether a tensor is rounding beside what other ranks have there: a shard with nothing but gradients that are 0."""
        c, _, name = place
        if (c, name) not in self._largest:
            rows = [run.plan.get(c, row, name) for run in self.runs[: self.quiet] for row in range(len(self.small.classes[c].ranks))]
            self._largest[c, name] = max((float(np.abs(w).max(initial=0.0)) for w in rows if w is not None), default=0.0)
        return bool(np.abs(v[: self.quiet]).max(initial=0.0) <= NOISE * self._largest[c, name])

    def divides_by(self, place: Place) -> list[Place]:
        """Outputs of logical ops that seem to divide by a scalar of this value, or take its logarithm or root."""
        v = self.of(place)
        found: list[Place] = []
        if v is None:
            return found
        logical, strict = self.runs[0].logical, self.elements.strict
        for step, must in zip(self.small.logical_steps, strict.nodes, strict=True):
            nodes = [n for n in topological(step.nodes) if n in must]
            divisors = [n.args[-1] for n in nodes if n.prim == "map" and n.attrs[0] in MAY_FAIL]
            if divisors and step.outputs[0] in strict.tensors:
                values = NUMERIC.run(divisors, [None if i is None else logical[i] for i in step.inputs])
                wanted = np.unique(v[0].reshape(-1))
                unique = [np.unique(x.reshape(-1)) for x in values]
                if any(wanted.size in (1, x.size) and _near(x, wanted) for x in unique):
                    found.append((LOGICAL, 0, step.outputs[0]))
        return found

    def agrees(self, goal: Goal) -> bool:
        """Whether a goal holds on all points that say something."""
        for at in self.ordinary:
            both = _sides(goal, at)
            if both is None:
                return False
            got, want = both
            if not np.isfinite(want).all():
                continue
            near = np.abs(got - want) <= LENIENT * np.abs(want).max(initial=1e-300) + 1e-12
            if not near.all() and not self.digits.fade(at, lambda run: _gap(goal, run)):
                return False
        return True


def constant(v: Array) -> bool:
    """The same on all points: needs no name."""
    return bool((v == v[:1]).all())


def _near(a: Array, b: Array) -> bool:
    return bool((np.abs(a - b) <= CLOSE * max(np.abs(a).max(initial=0.0), np.abs(b).max(initial=0.0))).all())


def _sides(goal: Goal, at: PointRun) -> tuple[Array, Array] | None:
    """What both programs have on a point; None if the plan has nothing."""
    want = np.zeros(len(goal.ids)) if goal.ids_in_tensor is None else at.logical[goal.name].reshape(-1)[goal.ids_in_tensor]
    got: Array = 0.0
    for t in goal.terms:
        value = at.of(t.place)
        if value is None:
            return None
        value = value if value.dtype.kind == "f" else value.astype(np.float64)
        got = got + float(t.number) * value.reshape(-1)[t.elements]
    return got, want


def _gap(goal: Goal, at: PointRun) -> float:
    both = _sides(goal, at)
    return np.inf if both is None else float(np.abs(both[0] - both[1]).max(initial=0.0))
