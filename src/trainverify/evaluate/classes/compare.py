"""What ranks hold beside what they should hold, where both are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainverify.axes.cells import NoCells
from trainverify.domains.arrays import Array
from trainverify.evaluate.classed import EXACT, Classed, Whole, moved
from trainverify.evaluate.classes.run import Rows
from trainverify.evaluate.classes.system import Classes
from trainverify.graph.lineage import Layout
from trainverify.graph.obligations import Obligation


@dataclass(frozen=True)
class Compared:
    """What a rank holds beside what it should: numbers where both are known."""

    obligation: Obligation
    layout: Layout
    rank: int
    known: int  # elements that were compared
    gap: float  # the largest difference, relative to the largest known entry
    got: object = None
    want: object = None
    index: tuple[int, ...] = ()  # in the logical tensor: the first position of the cell
    place: int = 0  # in the flattened cells of the local tensor


def compared(
    classes: Classes, logical: Mapping[str, Classed], plan: Sequence[Rows], wanted: Sequence[Obligation], place: int | None = None
) -> Iterator[Compared]:
    """What ranks hold beside what they should, of all obligations and ranks; at one place, if that is given."""
    places = classes.place
    for o in wanted:
        for h in o.holdings:
            for r in [r for r in h.ranks if r in places]:
                want = logical.get(o.output.tensor)
                c, row = places[r]
                try:
                    got, index = plan[c].get(h.layout.local, (row,)), classes.index(h.layout, r)
                except (KeyError, NoCells):
                    want = None
                if want is None:
                    yield Compared(o, h.layout, r, 0, 0.0)
                    continue
                yield _beside(classes, o, h.layout, r, moved(got, lambda v: v[0, ...]), want, index, place)


def _beside(
    classes: Classes, o: Obligation, lay: Layout, rank: int, got: Classed, want: Classed, index: Array, place: int | None
) -> Compared:
    flat = moved(want, lambda v: v.reshape(-1)[np.maximum(index, 0).reshape(-1)].reshape(index.shape))
    padding = index < 0
    known = _known(got) & (_known(flat) | padding) & (index != -2)
    if not o.stays:
        known &= ~padding
    count = int(known.sum())
    if not count:
        return Compared(o, lay, rank, 0, 0.0)
    a, b = _numbers(got), np.where(padding, 0.0, _numbers(flat))
    scale = max(float(np.abs(b[known]).max()), 1e-300)
    with np.errstate(all="ignore"):
        gap = np.abs(a - b)
    gap = np.where(a == b, 0.0, gap)
    gap = np.where(known, np.where(np.isnan(gap), np.where(np.isnan(b), 0.0, np.inf), gap), 0.0)
    worst = int(gap.reshape(-1).argmax()) if place is None else place
    if not known.reshape(-1)[worst]:
        return Compared(o, lay, rank, 0, 0.0)
    cell = int(index.reshape(-1)[worst])
    shape = [len(c) for c in classes.dims(classes.system.scope.dims[lay.logical])]
    firsts = classes.dims(classes.system.scope.dims[lay.logical])
    at = tuple(int(c.first[i]) for c, i in zip(firsts, np.unravel_index(cell, shape), strict=True)) if cell >= 0 else ()
    return Compared(o, lay, rank, count, float(gap.reshape(-1)[worst]) / scale, _entry(got, worst), _entry(flat, worst), at, worst)


def _known(x: Classed) -> Array:
    if isinstance(x, Whole):
        return np.asarray(x.exact)
    return np.ones(x.shape, dtype=bool) if x.kind is None else x.kind == EXACT


def _numbers(x: Classed) -> Array:
    values = x.low if isinstance(x, Whole) else x.value
    return (
        np.asarray(values, dtype=np.float64)
        if values.dtype != object
        else np.asarray([float(v) for v in values.reshape(-1)]).reshape(values.shape)
    )


def _entry(x: Classed, n: int) -> object:
    return (x.low if isinstance(x, Whole) else x.value).reshape(-1)[n]
