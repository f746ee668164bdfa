"""Literals that may count something that is smaller in an evaluation at reduced sizes: where to look if there is a difference. A hint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from trainverify.axes.system import System
from trainverify.evaluate.own_counts import written
from trainverify.evaluate.small import Small
from trainverify.graph.program import Op
from trainverify.primitives.node import ordered

SIMPLE: Final = 10  # numerator and denominator of a weight, up to which it is one
SMALL: Final = 64  # of a count up to this only the number itself is taken for it: others are multiples of it by chance
ONE_LESS: Final = 8  # from which on one less than a count may be meant: an unbiased variance
WHOLE: Final = 5  # axes up to this keep their size in one of the evaluations behind a refutation at reduced sizes
ULPS: Final = 4


@dataclass(frozen=True)
class Counting:
    """A literal and the count that it may be."""

    value: object
    op: Op
    count: int

    def __str__(self) -> str:
        where = f" ({self.op.source})" if self.op.source is not None else ""
        return f"{self.value} in {self.op.name}{where} may count {self.count} of what was reduced"


def counting(system: System, small: Small) -> Counting | None:
    """The first literal of either program that may count an axis, a product of axes or ranks of which only a part is evaluated."""
    counts = sorted(reduced(system, small))
    found = ((op, value, n) for op, value in literals(system) for n in counts if counts_as(value, n))
    return next((Counting(value, op, n) for op, value, n in found), None)


def counts_as(value: Any, n: int) -> bool:
    """Whether a literal is n, n − 1, or a simple multiple or fraction of one of them or of one over them."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    exact = simplest(value)
    if exact == 0 or abs(exact) == 1:
        return False
    plain = max(abs(exact.numerator), exact.denominator) <= SIMPLE
    for m in (n, n - 1) if n >= ONE_LESS else (n,):
        multiple = m > SMALL and (exact / m).denominator == 1
        simple = (max(abs(w.numerator), w.denominator) <= SIMPLE for w in (exact / m, exact * m))
        if multiple or abs(exact) in (m, Fraction(1, m)) or (m > SMALL and not plain and any(simple)):
            return True
    return False


def simplest(value: Any) -> Fraction:
    """A literal as a number; of a float the simplest fraction that it may have been written as."""
    if not isinstance(value, float):
        return Fraction(value)
    near = Fraction(value).limit_denominator(1 << 40)
    return near if abs(float(near) - value) <= ULPS * abs(value) * 2**-53 else Fraction(value)


def reduced(system: System, small: Small) -> set[int]:
    """Sizes that are smaller in the evaluation: of dimensions, several dimensions of a tensor together, which need not be next to each
    other (a batch norm counts images and places, not channels), mesh axes, all ranks."""
    shapes = [(system.logical.tensors[n].shape, s) for n, s in small.shapes.items() if n in system.logical.tensors]
    for k, local in zip(small.classes, small.local_shapes, strict=True):
        shapes += [(k.program.tensors[n].shape, s) for n, s in local.items() if n in k.program.tensors]
    found = {n for full, less in dict.fromkeys(shapes) for n, m in _products(zip(full, less, strict=True)) if n != m}
    if len(small.places) < system.plan.size:
        at = [system.plan.mesh.coordinates(r) for r in small.places]
        found |= {n for n, m in _products([(n, len({c[a] for c in at})) for a, n in system.plan.mesh.axes]) if n != m}
        found.add(system.plan.size)
    return {n for n in found if n > WHOLE}


def _products(sizes: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    found = {(1, 1)}
    for n, m in sizes:
        found |= {(a * n, b * m) for a, b in found}
    return found


def literals(system: System) -> Iterator[tuple[Op, Any]]:
    """Numbers that are written in ops of either program; a mark of ignored labels is none."""
    marks = {d.ignore for d in system.logical.domains.values()}
    programs = [(system.logical, system.logical_ops), *zip(system.unit_programs, system.unit_ops, strict=True)]
    seen: set[int] = set()
    for program, ops in programs:
        for n, variants in ops.items():
            for x in variants:
                if id(x.lowered) in seen:
                    continue
                seen.add(id(x.lowered))
                op = program.ops[n]
                for node in ordered(tuple(x.lowered.outputs)):
                    if node.prim == "const" and node.kind != "bool" and node.attrs[0] not in marks and written(op, node.attrs[0]):
                        yield op, node.attrs[0]
