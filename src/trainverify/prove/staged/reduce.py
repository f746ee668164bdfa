"""Shape reduction: the smallest sizes that keep the partition structure (the paper's Algorithm 1).

The unknowns are the axes that no op splits or cuts: the shape rules of all operators, the lineage and the communication have
already been turned into products, sums and identities of axes. What is left per axis is:
1 ≤ reduced ≤ original; at least 2 where the original is (contractions and masks keep their meaning); devices, choices among n and
axes that could not be aligned keep their size; pieces of one sum stay equal where they are equal, and in order where they are not.
The objective is the sum of all sizes (L1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainverify.axes.reduction import Sizes
from trainverify.axes.system import System
from trainverify.evaluate.rank_values import alike
from trainverify.evaluate.sample import out_of_line, sampled, singled_out
from trainverify.evaluate.small import Small, mesh_axes, shrink_system

LEAST = 2


def direct(system: System) -> Sizes:
    """The minimum, read off: families of pieces count up from the least size, everything else has it."""
    return Sizes(system.inference.axes, system.inference.all, LEAST, alternate=False)


@dataclass(frozen=True)
class Shape:
    """One tensor before and after. `rank` is the first one of its class; None for the logical program."""

    tensor: str
    rank: int | None
    full: tuple[int, ...]
    reduced: tuple[int, ...]

    def __str__(self) -> str:
        where = "" if self.rank is None else f" (rank {self.rank})"
        return f"{self.tensor}{where}: {list(self.full)} → {list(self.reduced)}"


def reduced(system: System) -> Small:
    return shrink_system(system, LEAST, alternate=False)


def with_fewer(system: System, of_a_sort: int) -> Small | None:
    """With so many ranks of every sort only, and less to choose from, as evaluation has it of large plans.

    All others follow from their coordinates: what they hold, and their integers, of which two of a sort say all as they are linear.
    None if that is not so. Groups that are no product of mesh axes, and rings, keep all of their members."""
    mesh, held = system.plan.mesh, system.holdings()
    if any(mesh_axes(layout, mesh) is None for layout, _ in held):
        return None
    if not all(alike(system.plan, unit, system.table) for unit in system.talk.units):
        return None
    alone = {r for ranks in (*out_of_line(system), *singled_out(system)) for r in ranks}
    return shrink_system(system, LEAST, alternate=False, kept=sampled(system, also=alone, above=0, of_a_sort=of_a_sort))


def unreduced(system: System, most: int) -> Small:
    """At full size, if there are at most so many elements."""
    largest = max((n for number, n, *_ in direct(system).atoms()), default=LEAST)
    return shrink_system(system, max(largest, LEAST), alternate=False, most=most)


def shapes(small: Small) -> Iterator[Shape]:
    """All tensors, the logical program's first."""
    for name, shape in small.shapes.items():
        yield Shape(name, None, small.logical.tensors[name].shape, shape)
    for k, local in zip(small.classes, small.local_shapes, strict=True):
        for name, shape in local.items():
            yield Shape(name, k.ranks[0], k.program.tensors[name].shape, shape)
