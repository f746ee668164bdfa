"""Elements named by where they lie: where values tell several apart or none, their neighbours say which one it is."""

from __future__ import annotations

import math

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.prove.propose.table import MISSING
from trainverify.prove.propose.values import Values
from trainverify.prove.staged.graphs import Place


def named(values: Values, place: Place, v: Array) -> Array | None:
    """The logical elements that have these values; None if there are no such."""
    ids = values.table.find(v)
    placed = _in_place(values, place, ids, v)
    return placed if placed is not None else None if (ids == MISSING).any() else ids


def _in_place(values: Values, place: Place, ids: Array, v: Array) -> Array | None:
    """Where several elements have one value, or it is 0 or too small to be looked up, the one that lies like its neighbours do."""
    elements = values.elements
    known = ids[ids >= 0]
    if not known.size or known[0] >= elements.count:
        return None
    owner = elements.owner[int(known[0])]
    shape, whole = values.graph.shape(place), values.small.shapes[owner]
    first, size = elements.start[owner], math.prod(whole)
    if not shape or (elements.within(known, owner) < 0).any():
        return None
    here = np.stack(np.unravel_index(np.arange(ids.size), shape))
    if len(shape) == len(whole):
        steps = [math.prod(whole[d + 1 :]) for d in range(len(whole))]
    else:
        steps = [_step(ids.reshape(shape), d) for d in range(len(shape))]
    lies = sum((h * s for h, s in zip(here, steps, strict=True)), np.zeros_like(ids))
    if (ids >= 0).all() and len(np.unique(ids - lies)) == 1:
        return None
    found = _block(values, ids, lies, v, first, size)
    if found is None and (ids < 0).any():
        found = _block(values, ids, _apart(ids.reshape(shape)).reshape(-1), v, first, size)
    return found


def _block(values: Values, ids: Array, lies: Array, v: Array, first: int, size: int) -> Array | None:
    """Elements of one logical tensor that have these values and lie like that from each other, where most ids are."""
    table = values.table
    starts, counts = np.unique((ids - lies)[ids >= 0], return_counts=True)
    for start in starts[np.argsort(-counts)][:4].tolist():
        block = lies + start
        if (block < first).any() or (block >= first + size).any():
            continue
        if (np.abs(table.values[:, block] - v) <= table.tolerance(v)).all():
            return np.asarray(table.same[block])
    return None


def _step(ids: Array, d: int) -> int:
    """By how much ids grow along a dimension, most of the time."""
    low, high = (np.moveaxis(ids, d, 0)[k] for k in (slice(None, -1), slice(1, None)))
    steps, counts = np.unique((high - low)[(low >= 0) & (high >= 0)], return_counts=True)
    return int(steps[np.argmax(counts)]) if len(steps) else 0


def _apart(ids: Array) -> Array:
    """How far elements lie from each other, if every dimension counts by itself: what no token chose lies like what some chose."""
    lies = np.zeros(ids.shape, dtype=np.int64)
    for d in range(ids.ndim):
        rows = np.moveaxis(ids, d, 0).reshape(ids.shape[d], -1)
        off = np.zeros(len(rows), dtype=np.int64)
        known = np.zeros(len(rows), dtype=bool)
        known[np.argmax((rows >= 0).sum(axis=1))] = True
        changed = True
        while changed and not known.all():
            changed = False
            for n in np.flatnonzero(~known).tolist():
                both = (rows[n] >= 0) & (rows >= 0) & known[:, None]
                if both.any():
                    steps, counts = np.unique((rows[n] - rows + off[:, None])[both], return_counts=True)
                    off[n], known[n], changed = steps[np.argmax(counts)], True, True
        lies += off.reshape([-1 if k == d else 1 for k in range(ids.ndim)])
    return lies
