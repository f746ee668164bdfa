"""Numbers of ranks that grow evenly along mesh axes, as offsets do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction

from trainverify.graph.mesh import Mesh
from trainverify.graph.program import Value

Rational = int | Fraction


def exact(value: object) -> Rational | None:
    """A finite number as it is, without rounding; None for anything else."""
    if isinstance(value, float):
        return Fraction(value) if math.isfinite(value) else None
    return value if isinstance(value, int | Fraction) and not isinstance(value, bool) else None


def strides(values: Mapping[int, Value], axes: Iterable[str], mesh: Mesh) -> dict[str, Rational] | None:
    """How numbers of one type grow per coordinate, if they do so evenly and exactly; None otherwise (also where they are no numbers).

    Ranks are complete along the axes."""
    numbers = {r: exact(v) for r, v in values.items()}
    if None in numbers.values() or len({type(v) for v in values.values()}) > 1:
        return {} if len({repr(v) for v in values.values()}) == 1 else None
    real = any(isinstance(v, float) for v in values.values())
    found: dict[str, Rational] = {}
    for axis in axes:
        apart, size = mesh.step(axis)
        steps = {v - numbers[r - apart] for r, v in numbers.items() if r // apart % size}  # type: ignore[operator]
        if len(steps) > 1 or (real and size == 2 and any(steps)):
            return None  # two ranks' shares (1.0 here, 0.0 there) lie on a line as any two numbers do
        found[axis] = steps.pop() if steps else 0
    return found


def uneven(values: Mapping[int, Value], axes: set[str], mesh: Mesh) -> set[str]:
    """Axes along which numbers, or tuples of numbers, do not grow evenly; all of them if it takes several together."""
    if len({repr(v) for v in values.values()}) == 1:
        return set()
    bad: set[str] = set()
    lengths = {len(v) if isinstance(v, tuple) else -1 for v in values.values()}
    if len(lengths) == 1 and lengths != {-1}:  # where a block begins, dimension by dimension
        for n in range(lengths.pop()):
            bad |= uneven({r: v[n] for r, v in values.items() if isinstance(v, tuple)}, axes - bad, mesh)
        return bad
    for axis in sorted(axes):
        if strides(values, axes - bad, mesh) is None and strides(values, {axis}, mesh) is None:
            bad.add(axis)
    return bad if strides(values, axes - bad, mesh) is not None else set(axes)
