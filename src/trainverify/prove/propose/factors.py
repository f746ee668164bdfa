"""Factors that a tensor may have been multiplied by: scalars of both programs, those of equal value once."""

from __future__ import annotations

import math

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.prove.propose.table import MISSING
from trainverify.prove.propose.values import Values, constant
from trainverify.prove.staged.graphs import LOGICAL, Place
from trainverify.prove.staged.records import Factor


class Factors:
    def __init__(self, values: Values):
        self.values = values
        self.scalars: dict[int, Place] = {}  # id → a scalar of the plan that no logical scalar equals
        self.named: dict[Place, int] = {}  # scalar of the plan → the scalar of the same value
        found = self._logical()
        self._plan(found)
        self.at = {p: i for i, p in self.scalars.items()}
        self.every: list[tuple[Array, Factor]] = [(np.ones(values.points), Factor())]
        shapes: list[Array] = [np.ones(values.points)]
        for v, i in found:
            if i >= 0 and (v != 0).all() and not any(values.close(v / v[0], s) or values.close(v[0] / v, s) for s in shapes):
                shapes.append(v / v[0])
                self.every += [(v, Factor(element=i)), (1 / v, Factor(element=i, power=-1))]
        self.weights = np.stack([w for w, _ in self.every], axis=1)

    def _logical(self) -> list[tuple[Array, int]]:
        values, found = self.values, []
        for name, ids in values.elements.ids.items():
            if math.prod(values.small.shapes[name]) == 1 and values.graph.kind((LOGICAL, 0, name)) == "real":
                v = values.of((LOGICAL, 0, name))
                if v is not None:
                    found.append((v[:, 0], int(values.table.same[ids.reshape(-1)[0]])))
        return found

    def _plan(self, found: list[tuple[Array, int]]) -> None:
        values = self.values
        for place in values.graph.order:
            if place[0] != LOGICAL and values.graph.shape(place) == () and values.graph.kind(place) == "real":
                v = values.of(place)
                if v is None or constant(v) or values.table.find(v)[0] != MISSING:
                    continue
                near = [i for w, i in found if values.close(w, v[:, 0])]
                if near:
                    self.named[place] = near[0]
                else:
                    number = values.elements.count + len(self.scalars)
                    self.scalars[number] = place
                    found.append((v[:, 0], number))

    def value(self, factor: Factor) -> Array:
        """On all points."""
        made = np.full(self.values.points, float(factor.number))
        return made if factor.element is None else made * self._scalar(factor.element) ** factor.power

    def _scalar(self, i: int) -> Array:
        """A scalar by its id, on all points."""
        if i < self.values.elements.count:
            return np.asarray(self.values.table.values[:, i])
        made = self.values.of(self.scalars[i])
        assert made is not None
        return np.asarray(made[:, 0])
