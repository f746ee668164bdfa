"""Which blocks of the plan's tensors seem to be blocks of logical ones, up to a factor: both programs run once on random inputs.

Nothing rests on a guess: it says which equation is worth a try.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Final

import numpy as np

from trainverify.axes.system import System
from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.run import NotComputed, PlanValues, random_inputs, run_logical, run_plan
from trainverify.evaluate.small import Small, TooMuch, shrink_system
from trainverify.graph.program import Op
from trainverify.primitives.node import Node
from trainverify.prove.algebra.grids import Grid, Key
from trainverify.prove.algebra.places import Dims, Value
from trainverify.prove.algebra.terms import Index, Poly, scale
from trainverify.prove.listed.forms import ListedForms

ELEMENTS: Final = 5_000_000  # of all tensors of all ranks
FULL: Final = 1 << 60  # nothing shrinks
POINTS: Final = 3
MOST: Final = 6  # guesses for one block
LARGER: Final = (4.0, 2.0, 1.0)
CLOSE: Final = 1e-9
DENOMINATOR: Final = 10_000

Print = tuple[tuple[int, ...], float, float]


class Guesses:
    def __init__(self, system: System, forms: ListedForms):
        """`system` is any that has the two programs; blocks are those of `forms`."""
        self.forms = forms
        self._known: dict[Print, list[tuple[int, Key]]] = {}
        self._logical: list[tuple[str, Value, Grid, list[Array]]] = []  # with one array per point
        self._runs: list[tuple[dict[str, Array], PlanValues]] = []
        self.small: Small | None = None
        try:
            self.small = small = shrink_system(system, FULL, most=ELEMENTS)
            for point in range(POINTS):
                inputs, logical = _point(small, point)
                with np.errstate(all="ignore"):
                    self._runs.append((logical, run_plan(small, system.plan.lineage, inputs, NUMERIC)))
        except (TooMuch, NotComputed):
            self.small = None

    def add(self, name: str, value: Value, dims: Dims, arrays: Sequence[Array] | None = None) -> None:
        """A logical tensor, or with arrays (one per point) a step within a logical op."""
        if self.small is None:
            return
        arrays = [logical[name] for logical, _ in self._runs] if arrays is None else arrays
        if arrays[0].dtype.kind != "f":
            return
        grid = self.forms.grid(dims)
        blocks = [_blocks(a, grid) for a in arrays]
        self._logical.append((name, value, grid, blocks))
        for key, found in _prints(blocks[0], grid):
            self._known.setdefault(found, []).append((len(self._logical) - 1, key))

    def steps(self, op: Op, nodes: Sequence[Node]) -> list[list[Array]]:
        """What steps within a logical op compute, for every step one array per point."""
        runs = []
        for logical, _ in self._runs if self.small is not None else ():
            with np.errstate(all="ignore"):
                runs.append(NUMERIC.run(nodes, [None if i is None else logical[i] for i in op.inputs]))
        return [list(found) for found in zip(*runs, strict=True)]

    def of(self, rank: int, tensor: str, dims: Dims, keys: Sequence[Key]) -> Iterator[tuple[Key, str, Poly]]:
        """(block, logical tensor, form that it seems to have) for some blocks of a tensor on a rank."""
        if self.small is None:
            return
        c, row = self.small.places[rank]
        values = [v for _, plan in self._runs if (v := plan.get(c, row, tensor)) is not None]
        if len(values) < POINTS or values[0].dtype.kind != "f":
            return
        grid = self.forms.grid(dims)
        blocks = [_blocks(v, grid) for v in values]
        wanted = set(keys)
        for key, found in _prints(blocks[0], grid):
            if key in wanted:
                same = sorted(self._known.get(found, []), key=lambda n: not tensor.rpartition("/")[2].startswith(self._logical[n[0]][0]))
                for n, its in same[:MOST]:
                    name, forms, other, theirs = self._logical[n]
                    fit = _fit(np.stack([b[key] for b in blocks]), np.stack([b[its] for b in theirs]))
                    if fit is not None:
                        factor, order = fit
                        here, there = grid.active(key), other.active(its)
                        names: dict[Index, Index] = {-1 - there[o]: -1 - here[i] for i, o in enumerate(order)}
                        yield key, name, scale(self.forms.kernel.substitute(forms[its], names), factor)


def _point(small: Small, point: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """Random inputs and what the logical program makes of them; larger ones after the first, so that not all are clipped alike."""
    given = random_inputs(small, point)
    free = {n for n, v in given.items() if v.dtype.kind == "f" and n not in small.domains}
    for factor in LARGER if point else (1.0,):
        inputs = {n: v * factor if n in free else v for n, v in given.items()}
        with np.errstate(all="ignore"):
            logical = run_logical(small, inputs, NUMERIC)
        if all(logical[o.tensor].dtype.kind != "f" or np.isfinite(logical[o.tensor]).all() for o in small.logical.outputs):
            break
    return inputs, logical


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
                near = np.abs(mine - ratio * turned).max() <= CLOSE * abs(mine[peak])
            if near and math.isfinite(ratio):
                factor = Fraction(ratio).limit_denominator(DENOMINATOR)
                if factor and abs(float(factor) - ratio) <= CLOSE * abs(ratio):
                    return factor, order
    return None
