"""Which blocks of the plan's tensors seem to be blocks of logical ones, up to a factor: for proofs over lists.

Nothing rests on it: it says which equation is worth a try.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Final

import numpy as np

from trainverify.axes.system import System
from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.run import NotComputed
from trainverify.evaluate.small import Small, TooMuch, shrink_system
from trainverify.graph.program import Op
from trainverify.primitives.node import Node
from trainverify.prove.algebra.grids import Grid, Key
from trainverify.prove.algebra.places import Dims
from trainverify.prove.listed.claims import BlockClaim
from trainverify.prove.propose.points import PointRun, runs
from trainverify.prove.propose.table import NOISE

ELEMENTS: Final = 5_000_000  # of all tensors of all ranks
FULL: Final = 1 << 60  # nothing shrinks
POINTS: Final = 3
MOST: Final = 6  # guesses for one block
ORDINARY: Final = ((1.0,), (1.0,))
LARGER: Final = ((4.0, 2.0, 1.0),) * 2  # after the first, so that not all are clipped alike
DENOMINATOR: Final = 10_000

Print = tuple[tuple[int, ...], float, float]


Grids = Callable[[Dims], Grid]


def pieces(system: System, grid: Grids) -> Pieces | None:
    """Both programs at full size, on a few points; None if they are too large. `system` is any that has them."""
    try:
        small = shrink_system(system, FULL, most=ELEMENTS)
        lineage = system.plan.lineage
        return Pieces(small, grid, runs(small, lineage, [0], ORDINARY) + runs(small, lineage, range(1, POINTS), LARGER))
    except (TooMuch, NotComputed):
        return None


class Pieces:
    """Which blocks of the plan's tensors have values proportional to those of blocks of logical ones."""

    def __init__(self, small: Small, grid: Grids, points: Sequence[PointRun]):
        self.small = small
        self.grid = grid
        self._runs = points
        self._known: dict[Print, list[tuple[int, Key]]] = {}
        self._logical: list[tuple[str, list[Array]]] = []  # with one array per point

    def add(self, name: str, dims: Dims, values: Sequence[Array] | None = None) -> int | None:
        arrays = [run.logical[name] for run in self._runs] if values is None else values
        if arrays[0].dtype.kind != "f":
            return None
        grid = self.grid(dims)
        blocks = [_blocks(a, grid) for a in arrays]
        self._logical.append((name, blocks))
        for key, found in _prints(blocks[0], grid):
            self._known.setdefault(found, []).append((len(self._logical) - 1, key))
        return len(self._logical) - 1

    def steps(self, op: Op, nodes: Sequence[Node]) -> list[list[Array]]:
        """For every step one array per point."""
        made = []
        for run in self._runs:
            with np.errstate(all="ignore"):
                made.append(NUMERIC.run(nodes, [None if i is None else run.logical[i] for i in op.inputs]))
        return [list(found) for found in zip(*made, strict=True)]

    def of(self, rank: int, tensor: str, dims: Dims, blocks: Sequence[Key]) -> Iterator[BlockClaim]:
        c, row = self.small.places[rank]
        values = [v for run in self._runs if (v := run.plan.get(c, row, tensor)) is not None]
        if len(values) < POINTS or values[0].dtype.kind != "f":
            return
        grid = self.grid(dims)
        mine = [_blocks(v, grid) for v in values]
        wanted = set(blocks)
        for key, found in _prints(mine[0], grid):
            if key in wanted:
                same = sorted(self._known.get(found, []), key=lambda n: not tensor.rpartition("/")[2].startswith(self._logical[n[0]][0]))
                for n, its in same[:MOST]:
                    _, theirs = self._logical[n]
                    fit = _fit(np.stack([b[key] for b in mine]), np.stack([b[its] for b in theirs]))
                    if fit is not None:
                        yield BlockClaim(key, n, its, *fit)


def _blocks(value: Array, grid: Grid) -> Array:
    """The listed digits first."""
    sizes = [leaf.axis.size for leaf in grid.leaves]
    rest = [n for n in range(len(sizes)) if n not in grid.tags]
    return value.reshape(sizes).transpose((*grid.tags, *rest))


def _prints(blocks: Array, grid: Grid) -> Iterator[tuple[Key, Print]]:
    """What does not depend on the order of elements and on a factor; of single numbers, how large they are."""
    shape = blocks.shape[: len(grid.tags)]
    inner = tuple(sorted(blocks.shape[len(grid.tags) :]))
    flat = blocks.reshape(math.prod(shape), math.prod(inner))
    with np.errstate(all="ignore"):
        norm = np.sqrt((flat * flat).sum(axis=1))
        first = np.abs(flat.sum(axis=1)) / norm
        third = np.abs((flat**3).sum(axis=1)) / norm**3
    for n, key in enumerate(itertools.product(*(range(s) for s in shape))):
        if not np.isfinite(norm[n]) or norm[n] == 0:
            continue
        if flat.shape[1] == 1:
            yield key, (inner, float(f"{norm[n]:.8g}"), 0.0)
        else:
            yield key, (inner, round(float(first[n]), 6), round(float(third[n]), 6))


def _fit(mine: Array, other: Array) -> tuple[Fraction, tuple[int, ...]] | None:
    """mine = factor · other on all points, with its dimensions in this order."""
    peak = np.unravel_index(int(np.abs(mine).argmax()), mine.shape)
    for order in itertools.permutations(range(other.ndim - 1)):
        turned = other.transpose((0, *(d + 1 for d in order)))
        if turned.shape == mine.shape and turned[peak]:
            with np.errstate(all="ignore"):
                ratio = float(mine[peak] / turned[peak])
                near = np.abs(mine - ratio * turned).max() <= NOISE * abs(mine[peak])
            if near and math.isfinite(ratio):
                factor = Fraction(ratio).limit_denominator(DENOMINATOR)
                if factor and abs(float(factor) - ratio) <= NOISE * abs(ratio):
                    return factor, order
    return None
