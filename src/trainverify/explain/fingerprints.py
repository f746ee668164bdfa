"""Recognising logical tensors by their values: on random inputs every element is a fingerprint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trainverify.domains.arrays import Array

TOLERANCE = 1e-9
TINY = 1e-200
_PIECES = 16  # of one bucket
_NOWHERE, _SILENT = -1, -2


def plain(array: Array) -> Array:
    """The elements that tell something: finite, not zero."""
    flat = np.asarray(array, dtype=np.float64).reshape(-1)
    return flat[np.isfinite(flat) & (np.abs(flat) > TINY)]


def contained(ordered: Array, values: Array) -> Array:
    """Which values occur in a sorted array."""
    if not ordered.size:
        return np.zeros(values.shape, dtype=bool)
    i = np.searchsorted(ordered, values)
    near = np.zeros(values.shape, dtype=bool)
    for j in (np.clip(i - 1, 0, ordered.size - 1), np.clip(i, 0, ordered.size - 1)):
        near |= np.abs(ordered[j] - values) <= TOLERANCE * np.abs(values)
    return near


class Index:
    """Who has which element: all elements of some tensors in one order, and for each the set of tensors that have it."""

    def __init__(self, tensors: Mapping[str, Array]):
        names = list(tensors)
        parts = [plain(v) for v in tensors.values()]
        values = np.concatenate(parts) if parts else np.empty(0)
        owners = np.repeat(np.arange(len(parts)), [p.size for p in parts])
        order = np.argsort(values, kind="stable")
        self.values, owners = values[order], owners[order]
        step = np.diff(self.values, prepend=-np.inf)
        cluster = np.cumsum(step > TOLERANCE * np.abs(self.values)) - 1
        which, owner = np.divmod(np.unique(cluster * max(1, len(names)) + owners), max(1, len(names)))
        starts = np.flatnonzero(np.diff(which, prepend=-1))
        if starts.size:
            marks = np.random.default_rng(0).integers(1 << 62, size=len(names))
            _, first, kinds = np.unique(np.bitwise_xor.reduceat(marks[owner], starts), return_index=True, return_inverse=True)
            ends = np.append(starts[1:], owner.size)
            self.sets = [frozenset(names[k] for k in owner[starts[j] : ends[j]].tolist()) for j in first.tolist()]
            self.kinds = kinds[cluster]
        else:
            self.sets, self.kinds = [], np.empty(0, dtype=np.int64)

    def look(self, values: Array) -> Array:
        """For each value the number of the set of tensors that have it; less than 0 if none has, or if it tells nothing."""
        found = np.full(values.shape, _NOWHERE, dtype=np.int64)
        if self.values.size:
            i: Array = np.searchsorted(self.values, values)
            for j in (np.clip(i - 1, 0, self.values.size - 1), np.clip(i, 0, self.values.size - 1)):
                near = np.abs(self.values[j] - values) <= TOLERANCE * np.abs(values)
                found[near] = self.kinds[np.asarray(j)[near]]
        found[~(np.isfinite(values) & (np.abs(values) > TINY))] = _SILENT
        return found

    def common(self, arrays: Sequence[Array]) -> list[frozenset[str]]:
        """For each array the tensors that have all of its elements; zeros and what is no number are anybody's, but not all of them."""
        if not arrays:
            return []
        seen = self.look(np.concatenate([np.asarray(a, dtype=np.float64).reshape(-1) for a in arrays]))
        sizes: Array = np.asarray([a.size for a in arrays])
        ends: Array = np.cumsum(sizes)
        starts, full = ends - sizes, np.flatnonzero(sizes > 0)
        found: list[frozenset[str]] = [frozenset()] * len(arrays)
        most = np.maximum.reduceat(seen, starts[full]) if full.size else seen
        least = np.minimum.reduceat(np.where(seen == _SILENT, np.iinfo(np.int64).max, seen), starts[full]) if full.size else seen
        for n, high, low in zip(full.tolist(), most.tolist(), least.tolist(), strict=True):
            if high >= 0 and low >= 0:
                kinds = [high] if high == low else np.unique(seen[starts[n] : ends[n]]).tolist()
                found[n] = frozenset.intersection(*(self.sets[k] for k in kinds if k >= 0))
        return found


class Fingerprints:
    """The logical tensors at some random points."""

    def __init__(self, points: Sequence[Mapping[str, Array]]):
        names = [n for n, v in points[0].items() if np.asarray(v).dtype.kind == "f" and telling(v)]
        self.points = [Index({n: p[n] for n in names}) for p in points]

    def known(self, tensors: Sequence[Sequence[Array | None]]) -> list[bool]:
        """Which plan tensors (one row per rank, one array per point) have nothing but elements of one logical tensor on each rank."""
        rows: list[list[Array]] = [[] for _ in self.points]
        owners: list[int] = []
        good = [True] * len(tensors)
        for n, values in enumerate(tensors):
            arrays = [np.asarray(v) for v in values if v is not None]
            good[n] = len(arrays) == len(self.points) and arrays[0].dtype.kind == "f" and len(arrays[0]) > 0 and _all_tell(arrays)
            if good[n]:
                for mine, a in zip(rows, arrays, strict=True):
                    mine += list(a)
                owners += [n] * len(arrays[0])
        common = [index.common(mine) for index, mine in zip(self.points, rows, strict=True)]
        for k, n in enumerate(owners):
            if good[n] and not frozenset.intersection(*(c[k] for c in common)):
                good[n] = rows[0][k].ndim == 1 and self._bucket([mine[k] for mine in rows])
        return good

    def _bucket(self, rows: Sequence[Array]) -> bool:
        """Whether a row is pieces of a few logical tensors, one after the other."""
        parts = [plain(r) for r in rows]
        size = parts[0].size
        if any(p.size != size for p in parts):
            return False
        seen = [index.look(p) for index, p in zip(self.points, parts, strict=True)]
        if any((s < 0).any() for s in seen):
            return False
        pieces, left = 1, None
        for kinds in zip(*(s.tolist() for s in seen), strict=True):
            here = frozenset.intersection(*(index.sets[k] for index, k in zip(self.points, kinds, strict=True)))
            left = here if left is None else left & here
            if not left:
                pieces, left = pieces + 1, here
            if not left or pieces > _PIECES:
                return False
        return True


def _all_tell(arrays: Sequence[Array]) -> bool:
    """Whether every row has finite numbers, not only zeros, and at the first point numbers of its own."""
    for k, array in enumerate(arrays):
        flat = array.reshape(len(array), -1)
        heard = np.abs(flat) > TINY
        if not np.isfinite(flat).all() or not heard.any(axis=1).all():
            return False
        if k == 0:
            high = np.max(flat, axis=1, where=heard, initial=-np.inf)
            low = np.min(flat, axis=1, where=heard, initial=np.inf)
            if not ((high != low) | ((heard.sum(axis=1) == 1) & (high != np.round(high)))).all():
                return False
    return True


def telling(array: Array) -> bool:
    """Whether a tensor's values are its own: a constant could be anybody's."""
    values = plain(array)
    if not values.size:
        return False
    if values.size > 1:
        return bool((values != values[0]).any())
    return float(values[0]) != round(float(values[0]))
