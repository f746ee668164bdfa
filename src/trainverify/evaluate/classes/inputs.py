"""Random inputs with one value on each cell."""

from __future__ import annotations

import math

import numpy as np

from trainverify.axes.cells import NoCells, product
from trainverify.axes.inference import Dims
from trainverify.domains.arrays import Array
from trainverify.evaluate.classes.system import Classes
from trainverify.evaluate.moved import Moved, changed
from trainverify.graph.program import Domain, Program


def inputs_of(classes: Classes, seed: int, magnitude: float, digits: int = 0, moved_by: Moved | None = None) -> dict[str, Array]:
    """Random values on cells. With `digits`, labels are ignored but where the last so many digits of their position come before all
    classes of several positions: what a causal model computes there does not depend on what comes later."""
    rng = np.random.default_rng(seed)
    program: Program = classes.system.logical
    values = {n: _sample(classes, rng, n, program, program.domains.get(n), magnitude, digits) for n in program.sources}
    for n, change in moved_by.changes if moved_by is not None else ():
        if not change.ends:
            values[n] = changed(values[n], change, program.tensors[n].kind, program.domains.get(n), rng)
    return values


def _sample(
    classes: Classes, rng: np.random.Generator, name: str, program: Program, domain: Domain | None, magnitude: float, digits: int
) -> Array:
    dims = classes.system.scope.dims[name]
    shape = tuple(len(c) for c in classes.dims(dims))
    kind = program.tensors[name].kind
    if kind == "bool":
        return rng.random(shape) < 0.6
    if kind == "int":
        line = classes.system.scope.lines.get(name)
        root = None if line is None else line.root()
        choices = np.arange(min(4, domain.size or 4) if domain is not None else 4)
        if root is not None and root.axis is not None:
            cells = classes.cells(root.axis)
            choices = cells.first[cells.count == 1]
        if not len(choices):
            raise NoCells(f"no id of {name} is a class of its own")
        ids = rng.choice(choices, shape)
        if domain is not None and domain.ignore is not None and ids.size:
            drop = (rng.random(shape) < 0.2) | ~_first_ones(classes, dims, digits).reshape(shape)
            drop.reshape(-1)[0] = False  # never all ignored
            ids = np.where(drop, domain.ignore, ids)
        return ids
    values = rng.uniform(-0.9, 0.9, shape) * magnitude
    match domain.kind if domain is not None else None:
        case "nonnegative" | "positive":
            return np.minimum(np.abs(values) + 0.05 * magnitude, domain.most if domain is not None else np.inf)
        case "indicator":
            return (values > -0.3 * magnitude).astype(np.float64)
    return values


def _first_ones(classes: Classes, dims: Dims, digits: int) -> Array:
    """Which cells of a tensor come before all cells of several positions, by the last digits of their position."""
    leaves = classes.system.inference.axes.leaves(dims)
    if not digits or not leaves:
        return np.ones(math.prod(len(c) for c in classes.dims(dims)), dtype=bool)
    last = product([classes.cells(a) for a in leaves[-digits:]])
    later = last.first[last.count > 1].min(initial=last.size)
    rest = math.prod(len(classes.cells(a)) for a in leaves[:-digits])
    return np.tile((last.count == 1) & (last.first < later), rest)


def digits_of(classes: Classes) -> int:
    """The most digits that the position of a label has."""
    program = classes.system.logical
    labels = [n for n, d in program.domains.items() if d.ignore is not None]
    return max((len(classes.system.inference.axes.leaves(classes.system.scope.dims[n])) for n in labels), default=0)
