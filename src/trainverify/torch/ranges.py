"""Integers that follow from constants alone, written as ranges side by side, and elements taken by them as slices side by side.

What counts on is then related to what it numbers: positions that a rank computes from its number, or that a load balancer deals out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.torch.constants import value_of
from trainverify.translate.emit import Emitter

MOST: Final = 1 << 20  # integers that are computed
FEW: Final = 64  # ranges of one tensor
Run = tuple[int, int, int]  # first, count, step: 0 or 1


def known(e: Emitter, name: str | None) -> Array | None:
    """The integers of a tensor that no data leads to."""
    if name is None or name not in e.tensors or e.kind(name) != "int" or math.prod(e.shape(name)) > MOST:
        return None
    return value_of(e, name)


def runs(vector: Array) -> list[Run] | None:
    """Integers as ranges and repetitions, one after the other; None if there are many."""
    found: list[Run] = []
    numbers = [int(v) for v in vector]
    i = 0
    while i < len(numbers):
        step = numbers[i + 1] - numbers[i] if i + 1 < len(numbers) else 1
        n = 1
        while step in (0, 1) and i + n < len(numbers) and numbers[i + n] == numbers[i] + n * step:
            n += 1
        found.append((numbers[i], n, step if n > 1 else 1))
        i += n
        if len(found) > FEW:
            return None
    return _equal(found)


def _equal(found: list[Run]) -> list[Run]:
    """The same with ranges cut to equal lengths, if these are few: parts that are dealt out may lie side by side by chance."""
    size = math.gcd(*(n for _, n, _ in found))
    cut = [(first + at * step, size, step) for first, n, step in found for at in range(0, n, size)]
    return cut if len(found) > 1 and len(cut) <= min(FEW, 2 * len(found)) else found


def _varying(value: Array) -> tuple[int, Array] | None:
    """The only dimension along which integers differ, and those along it."""
    if not value.size or not value.ndim:
        return None
    dims = [d for d in range(value.ndim) if (value != np.take(value, [0], axis=d)).any()]
    if len(dims) > 1:
        return None
    dim = dims[0] if dims else 0
    return dim, value[tuple(slice(None) if d == dim else 0 for d in range(value.ndim))]


def written(e: Emitter, value: Array, most: int = FEW) -> str | None:
    """A tensor of these integers, of at most so many ranges."""
    where = _varying(value)
    found = None if where is None else runs(where[1])
    if where is None or found is None or len(found) > most:
        return None
    pieces = [
        e.op("arange", (), {"start": first, "stop": first + n, "step": 1, "dtype": "i64"}) if step else e.full((n,), first, "i64")
        for first, n, step in found
    ]
    flat = pieces[0] if len(pieces) == 1 else e.op("concat", pieces, {"dim": 0})
    thin = tuple(s if d == where[0] else 1 for d, s in enumerate(value.shape))
    made = flat if value.ndim == 1 else e.reshape(flat, thin)
    return made if thin == value.shape else e.op("expand", (made,), {"shape": value.shape})


def computed(e: Emitter, name: str, inputs: Sequence[str | None], value: object = None) -> str | None:
    """A sum, difference or product of such integers, where it is one range."""
    given = [v for v in (known(e, i) for i in inputs) if v is not None and v.size > 1]
    if len(given) < len(inputs) or (len(given) == 1 and type(value) is not int):
        return None
    first, second = given[0], given[1] if len(given) > 1 else np.asarray(value)
    made = np.asarray({"add": np.add, "sub": np.subtract, "mul": np.multiply}[name](first, second))
    where = _varying(made)
    return written(e, made, 1) if where is not None and len(where[1]) > 1 and where[1][0] != where[1][-1] else None


def taken(e: Emitter, x: str, ids: str, dim: int) -> str | None:
    """Elements along a dimension by such integers, the same ones everywhere else: slices side by side."""
    at, shape = known(e, ids), e.shape(x)
    dim %= len(shape)
    if at is None or at.ndim not in (1, len(shape)):
        return None
    if at.ndim > 1 and any(a != s for d, (a, s) in enumerate(zip(at.shape, shape, strict=True)) if d != dim):
        return None
    where = _varying(at)
    found = None if where is None or (at.ndim > 1 and where[0] != dim) else runs(where[1])
    if found is None or any(n > 1 and not step for _, n, step in found) or any(f < 0 or f + n > shape[dim] for f, n, _ in found):
        return None
    pieces = [e.op("slice", (x,), {"dim": dim, "start": first, "stop": first + n}) for first, n, _ in found]
    return pieces[0] if len(pieces) == 1 else e.op("concat", pieces, {"dim": dim})
