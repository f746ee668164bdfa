"""Literals that may count something that is smaller in an evaluation at reduced sizes: a difference there may be theirs.

A literal that no attribute of its op has is the operator's own (the 1/n of a mean), and shrinks with the op (`own_counts`).
"""

from __future__ import annotations

import itertools
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
    counts = sorted(_reduced(system, small))
    if not counts:
        return None
    known: dict[str, int | None] = {}
    marks = {d.ignore for d in system.logical.domains.values()}  # of labels that are ignored: no count
    for op, value in _literals(system):
        if value in marks:
            continue
        key = repr(value)
        if key not in known:
            known[key] = next((n for n in counts if counts_as(value, n)), None)
        if (n := known[key]) is not None:
            return Counting(value, op, n)
    return None


def counts_as(value: Any, n: int) -> bool:
    """Whether a literal is n, n − 1, or a simple multiple or fraction of one of them or of one over them."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    exact = Fraction(value) if not isinstance(value, float) else _simplest(value)
    if exact == 0 or abs(exact) == 1:
        return False
    plain = max(abs(exact.numerator), exact.denominator) <= SIMPLE
    for m in (n, n - 1) if n >= ONE_LESS else (n,):
        if exact in (m, -m, Fraction(1, m), Fraction(-1, m)):
            return True
        if m <= SMALL:
            continue
        if exact.denominator == 1 and exact % m == 0:
            return True
        if not plain and any(max(abs(x.numerator), x.denominator) <= SIMPLE for x in (exact / m, exact * m)):
            return True
    return False


def _simplest(value: float) -> Fraction:
    """The simplest fraction that a float may have been written as."""
    near = Fraction(value).limit_denominator(1 << 40)
    return near if abs(float(near) - value) <= ULPS * abs(value) * 2**-53 else Fraction(value)


def _reduced(system: System, small: Small) -> set[int]:
    """Sizes that are smaller in the evaluation: of dimensions, their digits, several dimensions together, mesh axes, all ranks."""
    found: set[int] = set()
    shapes = [(system.logical.tensors[n].shape, s) for n, s in small.shapes.items() if n in system.logical.tensors]
    for k, local in zip(small.classes, small.local_shapes, strict=True):
        shapes += [(k.program.tensors[n].shape, s) for n, s in local.items() if n in k.program.tensors]
    for full, less in dict.fromkeys(shapes):
        for a, b in itertools.combinations(range(len(full) + 1), 2):
            n = m = 1
            for x, y in zip(full[a:b], less[a:b], strict=True):
                n, m = n * x, m * y
            if n != m:
                found.add(n)
    if len(small.places) < system.plan.size:
        found.update([system.plan.size, *(n for _, n in system.plan.mesh.axes)])
        found.update(_products([n for _, n in system.plan.mesh.axes]))
    return {n for n in found if n > WHOLE}


def _products(sizes: Iterable[int]) -> set[int]:
    found = {1}
    for n in sizes:
        found |= {m * n for m in found}
    return found


def _literals(system: System) -> Iterator[tuple[Op, Any]]:
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
                    if node.prim == "const" and node.kind != "bool" and written(op, node.attrs[0]):
                        yield op, node.attrs[0]
