"""Points made from random ones: sources scaled, made positive or negative, drawn again, or in part set to a number.

A moved point is a recipe, not values: it means the same at other sizes, and a report can say what it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.graph.program import Domain


@dataclass(frozen=True)
class Change:
    """What becomes of a source; what its domain does not allow is left out."""

    factor: float = 1.0
    magnitude: bool = False  # of |x| instead of x
    seed: int | None = None  # drawn again
    value: float | None = None  # that half of its elements are
    ends: bool = False  # ids are the first or the last of their range


@dataclass(frozen=True)
class Moved:
    """The random point of a seed with some sources changed."""

    seed: int
    text: str  # what is changed
    changes: tuple[tuple[str, Change], ...]  # by source

    def __str__(self) -> str:
        return f"random inputs of seed {self.seed}, {self.text}"


PointName = int | Moved  # a random point is named by its seed


def following(point: PointName) -> PointName:
    """Another point like this one."""
    return point + 1 if isinstance(point, int) else replace(point, seed=point.seed + 1)


def seed_of(point: PointName) -> int:
    return point if isinstance(point, int) else point.seed


def described(point: PointName) -> str:
    if isinstance(point, Moved):
        return str(point)
    return "the solver's model" if point < 0 else f"random inputs of seed {point}"


def changed(value: Array, change: Change, kind: str, domain: Domain | None, rng: np.random.Generator) -> Array:
    """A source's values after a change (other than drawing them again)."""
    if change.ends and domain is not None and domain.kind == "ids" and domain.size is not None:
        ends = np.where(rng.random(value.shape) < 0.5, 0, domain.size - 1)
        return np.where(value == domain.ignore, value, ends) if domain.ignore is not None else ends
    if kind == "bool" or (domain is not None and domain.kind in ("ids", "indicator")):
        return value
    factor = abs(change.factor) if domain is not None else change.factor
    if kind == "int":
        return np.rint(factor * (np.abs(value) if change.magnitude else value)).astype(value.dtype)
    made = factor * (np.abs(value) if change.magnitude else value)
    if change.value is not None and (domain is None or change.value > 0 or (change.value == 0 and domain.kind == "nonnegative")):
        made = np.where(rng.random(made.shape) < 0.5, change.value, made)
    return np.asarray(made if domain is None else np.minimum(made, domain.most))
