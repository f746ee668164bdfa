"""Recognising logical tensors by their values: on random inputs every element is a fingerprint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trainverify.domains.arrays import Array

TOLERANCE = 1e-9
TINY = 1e-200
_PIECES = 16  # of one bucket


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


class Fingerprints:
    """The logical tensors at some random points."""

    def __init__(self, points: Sequence[Mapping[str, Array]]):
        names = [n for n, v in points[0].items() if np.asarray(v).dtype.kind == "f" and telling(v)]
        self.points = [{n: np.sort(plain(p[n])) for n in names} for p in points]
        first = [(v, i) for i, n in enumerate(names) for v in self.points[0][n]]
        self.names = names
        values = np.asarray([v for v, _ in first], dtype=np.float64)
        owners = np.asarray([i for _, i in first], dtype=np.int64)
        order = np.argsort(values, kind="stable")
        self.values, self.owners = values[order], owners[order]

    def owners_of(self, value: float) -> set[str]:
        """Logical tensors with this element."""
        width = TOLERANCE * abs(value)
        low, high = np.searchsorted(self.values, [value - width, value + width])
        return {self.names[i] for i in set(self.owners[low : high + 1].tolist())}

    def known(self, values: Sequence[Array | None]) -> bool:
        """Whether a plan tensor (one row per rank, one array per point) has nothing but elements of one logical tensor on each rank."""
        arrays = [np.asarray(v) for v in values if v is not None]
        if len(arrays) < len(values) or arrays[0].dtype.kind != "f" or not len(arrays[0]):
            return False
        for row in range(len(arrays[0])):
            rows = [plain(a[row]) for a in arrays]
            if any(not r.size or not np.isfinite(a[row]).all() for r, a in zip(rows, arrays, strict=True)):
                return False
            if not telling(arrays[0][row]):
                return False
            fits = (
                n
                for n in self.owners_of(float(rows[0][0]))
                if all(contained(p[n], r).all() for p, r in zip(self.points, rows, strict=True))
            )
            if next(fits, None) is None and not (arrays[0].ndim == 2 and self._bucket(rows)):
                return False
        return True

    def _bucket(self, rows: Sequence[Array]) -> bool:
        """Whether a row is pieces of a few logical tensors, one after the other."""
        at, size = 0, len(rows[0])
        if any(len(r) != size for r in rows):
            return False
        for _ in range(_PIECES):
            longest = 0
            for n in self.owners_of(float(rows[0][at])):
                inside = np.logical_and.reduce([contained(p[n], r[at:]) for p, r in zip(self.points, rows, strict=True)])
                longest = max(longest, int(np.argmin(inside)) if not inside.all() else len(inside))
            at += longest
            if at == size:
                return True
            if longest == 0:
                return False
        return False


def telling(array: Array) -> bool:
    """Whether a tensor's values are its own: a constant could be anybody's."""
    values = plain(array)
    if not values.size:
        return False
    if values.size > 1:
        return bool((values != values[0]).any())
    return float(values[0]) != round(float(values[0]))
