"""Literals that may count something that is smaller in an evaluation at reduced sizes: a difference there may be theirs.

A literal that no attribute of its op has is the operator's own (the 1/n of a mean), and shrinks with the op (`own_counts`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from trainverify.axes.system import System
from trainverify.evaluate.flow import logical_tasks, tasks_of
from trainverify.evaluate.own_counts import written
from trainverify.evaluate.small import Small
from trainverify.evaluate.thresholds import of_logical, of_plan, thresholds
from trainverify.graph.program import Op
from trainverify.primitives.node import ordered

SIMPLE: Final = 10  # numerator and denominator of a weight, up to which it is one
SMALL: Final = 64  # of a count up to this only the number itself is taken for it: others are multiples of it by chance
ONE_LESS: Final = 8  # from which on one less than a count may be meant: an unbiased variance
WHOLE: Final = 5  # axes up to this keep their size in one of the evaluations behind a refutation at reduced sizes
ULPS: Final = 4


@dataclass(frozen=True)
class Counting:
    """A literal and the count that it may be, or the number of positions that are compared or rounded behind it."""

    value: object
    op: Op
    count: int
    positions: bool = False

    def __str__(self) -> str:
        where = f" ({self.op.source})" if self.op.source is not None else ""
        how = f"is put to {self.count} positions, which are fewer" if self.positions else f"may count {self.count} of what was reduced"
        return f"{self.value} in {self.op.name}{where} {how}"


def counting(system: System, small: Small) -> Counting | None:
    """The first literal of either program that may count an axis, a product of axes or ranks of which only a part is evaluated; or one
    that is put to positions of such an axis before these are compared or rounded."""
    counts = sorted(reduced(system, small))
    if not counts:
        return None
    known: dict[str, int | None] = {}
    for op, value in literals(system):
        key = repr(value)
        if key not in known:
            known[key] = next((n for n in counts if counts_as(value, n)), None)
        if (n := known[key]) is not None:
            return Counting(value, op, n)
    both = (list(logical_tasks(small)), of_logical(system, small, 0)), (list(tasks_of(small)), of_plan(system, small))
    behind = (t for tasks, ids in both for t in thresholds(tasks, counts, ids))
    return next((Counting(t.value, t.op, t.size, positions=True) for t in behind), None)


def counts_as(value: Any, n: int) -> bool:
    """Whether a literal is n, n − 1, or a simple multiple or fraction of one of them or of one over them."""
    return bool(forms(value, n))


def forms(value: Any, n: int) -> list[tuple[int, bool]]:
    """The ways in which a literal counts n: how many less than n is meant, and whether it is over the count."""
    if isinstance(value, float) and not math.isfinite(value):
        return []
    exact = simplest(value)
    if exact == 0 or abs(exact) == 1:
        return []
    plain = max(abs(exact.numerator), exact.denominator) <= SIMPLE
    found = []
    for less, m in ((0, n), (1, n - 1)) if n >= ONE_LESS else ((0, n),):
        for over, weight in ((False, exact / m), (True, exact * m)):
            multiple = m > SMALL and not over and weight.denominator == 1
            weighted = m > SMALL and not plain and max(abs(weight.numerator), weight.denominator) <= SIMPLE
            if abs(weight) == 1 or multiple or weighted:
                found.append((less, over))
    return found


def simplest(value: Any) -> Fraction:
    """A literal as a number; of a float the simplest fraction that it may have been written as."""
    if not isinstance(value, float):
        return Fraction(value)
    near = Fraction(value).limit_denominator(1 << 40)
    return near if abs(float(near) - value) <= ULPS * abs(value) * 2**-53 else Fraction(value)


def reduced(system: System, small: Small) -> dict[int, set[int]]:
    """Sizes that are smaller in the evaluation, and what they are there: of dimensions, several dimensions of a tensor together, which need
    not be next to each other (a batch norm counts images and places, not channels), mesh axes, all ranks."""
    found: dict[int, set[int]] = {}
    shapes = [(system.logical.tensors[n].shape, s) for n, s in small.shapes.items() if n in system.logical.tensors]
    for k, local in zip(small.classes, small.local_shapes, strict=True):
        shapes += [(k.program.tensors[n].shape, s) for n, s in local.items() if n in k.program.tensors]
    for full, less in dict.fromkeys(shapes):
        for n, m in _products(zip(full, less, strict=True)):
            if n != m:
                found.setdefault(n, set()).add(m)
    if len(small.places) < system.plan.size:
        at = [system.plan.mesh.coordinates(r) for r in small.places]
        for n, m in _products([(n, len({c[a] for c in at})) for a, n in system.plan.mesh.axes]):
            found.setdefault(n, set()).add(m)
        found.setdefault(system.plan.size, set()).add(len(small.places))
    return {n: ms for n, ms in found.items() if n > WHOLE}


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
