"""Factors that mistakes come with: products of sizes that the plan has, and numbers in either program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from functools import cached_property

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.evaluate.compare import Suspect, held
from trainverify.evaluate.run import PlanValues
from trainverify.explain.missing import product_of_sizes
from trainverify.explain.replay import Graph
from trainverify.graph.mesh import Mesh

MOST_LITERALS = 16  # numbers of the programs that are tried as factors
MOST_SIZES = 6  # of parts of the batch
SCALING = frozenset({"mul", "div"})


class Factors:
    def __init__(self, graph: Graph, mesh: Mesh, first: Suspect, logical: Mapping[str, Array], plan: PlanValues):
        self.graph = graph
        self.small = graph.small
        self.mesh = mesh
        self.first = first
        self.logical = logical
        self.plan = plan

    @cached_property
    def common(self) -> list[Fraction]:
        """Sizes of mesh axes, their products, and what the first wrong output shows if sizes explain it."""
        sizes = {2, *(s for _, s in self.mesh.axes if s > 1)}
        sizes |= {a * b for a in sizes for b in sizes if a * b <= 64}
        found = [Fraction(n) for n in sorted(sizes)] + [Fraction(1, n) for n in sorted(sizes)]
        first = self._ratio(self.first)
        return found if first is None or first in found else [first, *found]

    @cached_property
    def sizes(self) -> list[Fraction]:
        """Ratios of sizes of parts of the batch too."""
        programs = [k.program for k in self.small.classes]
        inputs = {n for c, p in enumerate(programs) for t in p.inputs for n in self.small.local_shapes[c][t][:2]}
        cut = {n for (c, t), op in self.graph.ops.items() if op.name == "slice" for n in self.small.local_shapes[c][t][:2]}
        sizes = sorted(n for n in inputs | cut if 1 < n <= 16)[:MOST_SIZES]
        ratios = [Fraction(a, b) for a in [1, *sizes] for b in [1, *sizes] if a != b]
        return list(dict.fromkeys([*self.common, *ratios]))

    @cached_property
    def literals(self) -> list[Fraction]:
        """Factors that numbers in either program suggest: one that is left out, or is there twice."""
        ops = [s.op for s in self.small.logical_steps] + [op for k in self.small.classes for op in k.program.ops]
        values = {v for op in ops if op.name in SCALING for v in (op.get("value"),) if isinstance(v, int | Fraction) and v}
        whole = {Fraction(v) for v in values if Fraction(v).denominator <= 4096 and Fraction(v).numerator <= 4096 and abs(v) != 1}
        sizes = [f for f in self.common if f.denominator == 1 and f <= 16]
        found = dict.fromkeys([*self.common, *sorted(whole), *(v / s for v in sorted(whole) for s in sizes)])
        return [g for f in list(found)[:MOST_LITERALS] for g in (f, 1 / f)]

    def _ratio(self, s: Suspect) -> Fraction | None:
        """The one factor by which all elements of an output differ, if it is a product of sizes."""
        ratios = []
        for got, want, _ in held(self.small, s.obligation, s.layout, s.rank, self.logical[s.obligation.output.tensor], self.plan):
            ok = np.abs(want) > 1e-200
            ratios.append((got[ok] / want[ok]).reshape(-1))
        ratio = np.concatenate(ratios) if ratios else np.zeros(0)
        if ratio.size < 2 or not np.allclose(ratio, ratio[0], rtol=1e-9) or not math.isfinite(ratio[0]):
            return None
        exact = Fraction(float(ratio[0])).limit_denominator(4096)
        sized = product_of_sizes(exact, self._all_sizes)
        return exact if sized and math.isclose(float(exact), ratio[0], rel_tol=1e-9) else None

    @cached_property
    def _all_sizes(self) -> set[int]:
        shapes = [*self.small.shapes.values(), *(s for local in self.small.local_shapes for s in local.values())]
        return {n for shape in shapes for n in shape} | {n for _, n in self.mesh.axes} | {2}
