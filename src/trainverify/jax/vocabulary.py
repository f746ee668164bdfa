"""Ids of a vocabulary that ranks cut: a masked lookup of clipped ids is a lookup of the rows from `start` on, where other ids give zeros.

With local = ids − start and here = 0 ≤ local < rows, each for all values:
- where(here, table[clip(local, 0, rows − 1)], 0) = embedding(ids, table, start)
- where(here, scores[clip(local)], 0) = Σ scores·one_hot(ids, start)
- Σ one_hot(clip(local))·where(here, g, 0) = Σ one_hot(ids, start)·g
- local = 0, 1, … compared one by one = one_hot(ids, start)
Instead of clip(local, 0, rows − 1) it may be where(here, local, c), for any row c: what is not here is masked.
Bounds that are off by one do not match: they stay as they are written.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainverify.graph.program import Op
from trainverify.jax.emit import RankEmitter
from trainverify.translate.integers import Bounds, tensor_bounds

Column = tuple[int, ...]  # one integer for all ranks, or one for each


@dataclass(frozen=True)
class Cut:
    """ids − start where that is one of the rows, and elsewhere any row."""

    ids: str
    start: Column


def plus(a: Column, b: Column, sign: int = 1) -> Column:
    width = max(len(a), len(b))
    x, y = (c * width if len(c) == 1 else c for c in (a, b))
    found = tuple(p + sign * q for p, q in zip(x, y, strict=True))
    return found[:1] if len(set(found)) == 1 else found


def integers(e: RankEmitter, value: Any) -> Column | None:
    found = e.column(value)
    return found if all(type(v) is int for v in found) else None


def behind(e: RankEmitter, name: str | None) -> tuple[str | None, Op | None]:
    """A tensor without casts between integers and without reshapes that only add or drop dimensions of size 1."""
    op = e.made.get(name)
    while op is not None and (_is_slim(e, op) or (op.name == "to" and e.kind(str(op.inputs[0])) == e.kind(str(name)))):
        name = op.inputs[0]
        op = e.made.get(name)
    return name, op


def _is_slim(e: RankEmitter, op: Op) -> bool:
    if op.name != "reshape":
        return False
    before, after = e.shape(str(op.inputs[0])), e.shape(op.outputs[0])
    return [n for n in before if n != 1] == [n for n in after if n != 1]


def constant(e: RankEmitter, name: str | None) -> Column | None:
    _, op = behind(e, name)
    while op is not None and op.name == "expand":
        _, op = behind(e, op.inputs[0])
    return integers(e, op.get("value")) if op is not None and op.name == "full" else None


def shifted(e: RankEmitter, name: str | None) -> tuple[str, Column]:
    """(ids, start) of a tensor ids − start."""
    base, op = behind(e, name)
    if op is not None and op.name in ("sub", "add") and len(op.inputs) == 1 and op.get("alpha", 1) == 1:
        by = integers(e, op.get("value"))
        inner, _ = behind(e, op.inputs[0])
        if by is not None and inner is not None:
            return inner, by if op.name == "sub" else plus((0,), by, -1)
    return str(base), (0,)


def clipped(e: RankEmitter, name: str | None, rows: int) -> Cut | None:
    """What clip(ids − start, 0, rows − 1), or where(here, ids − start, a row), was made from."""
    low: Column | None = None
    high: Column | None = None
    _, op = behind(e, name)
    if op is not None and op.name == "where":
        found = _chosen(e, op)
        if found is None or found.low != found.start or found.high != plus(found.start, (rows - 1,)):
            return None
        spare = constant(e, found.other)
        return Cut(found.ids, found.start) if spare is not None and all(0 <= v < rows for v in spare) else None
    while op is not None and (low is None or high is None) and op.name in ("minimum", "maximum", "clamp"):
        if op.name == "clamp":
            low, high = integers(e, op.get("min")), integers(e, op.get("max"))
            name = op.inputs[0]
        else:
            first, second = op.inputs
            bound, name = (constant(e, second), first) if constant(e, second) is not None else (constant(e, first), second)
            if bound is None:
                return None
            low, high = (bound, high) if op.name == "maximum" else (low, bound)
        _, op = behind(e, name)
    if low != (0,) or high != (rows - 1,):
        return None
    ids, start = shifted(e, name)
    return Cut(ids, start)


_NOT = {"ge": "lt", "gt": "le", "le": "gt", "lt": "ge"}


def limits(e: RankEmitter, name: str | None, inside: bool = True) -> tuple[str, Column | None, Column | None] | None:
    """(ids, smallest, largest) of a mask that says that ids are within these; or, if not `inside`, that they are not."""
    _, op = behind(e, name)
    if op is None:
        return None
    if op.name == "logical_not":
        return limits(e, op.inputs[0], not inside)
    if op.name == ("logical_and" if inside else "logical_or"):
        sides = [limits(e, i, inside) for i in op.inputs]
        if any(s is None for s in sides):
            return None
        (a, low, high), (b, low2, high2) = (s for s in sides if s is not None)
        if a != b or (low is not None) == (low2 is not None) or (high is not None) == (high2 is not None):
            return None
        return a, low if low is not None else low2, high if high is not None else high2
    if op.name not in _NOT or len(op.inputs) != 1:
        return None
    test = op.name if inside else _NOT[op.name]
    value = integers(e, op.get("value"))
    ids, start = shifted(e, op.inputs[0])
    if value is None:
        return None
    at = plus(value, start)
    if test in ("ge", "gt"):
        return ids, plus(at, (int(test == "gt"),)), None
    return ids, None, plus(at, (int(test == "lt"),), -1)


@dataclass(frozen=True)
class Chosen:
    """where(low ≤ ids ≤ high, ids − start, other), element by element."""

    ids: str
    start: Column
    low: Column | None
    high: Column | None
    local: str
    other: str


def _chosen(e: RankEmitter, op: Op) -> Chosen | None:
    mask, first, second = map(str, op.inputs)
    for local, other, inside in ((first, second, True), (second, first, False)):
        ids, start = shifted(e, local)
        found = limits(e, mask, inside)
        sizes = {math.prod(e.shape(n)) for n in (mask, local, ids, op.outputs[0])}  # if none of them is repeated, they stand side by side
        if found is not None and found[0] == ids and len(sizes) == 1:
            return Chosen(ids, start, found[1], found[2], local, other)
    return None


def chosen_bounds(e: RankEmitter, name: str) -> Bounds:
    """Bounds of ids that a mask of the same ids chooses: where(0 ≤ local < rows, local, 0) is from 0 to rows − 1."""
    op = e.made.get(name)
    found = _chosen(e, op) if op is not None and op.name == "where" and e.kind(name) == "int" else None
    if found is None or (other := tensor_bounds(e, found.other)) is None:
        return None
    known = tensor_bounds(e, found.local)
    low = plus(found.low, found.start, -1) if found.low is not None else None if known is None else known[:1]
    high = plus(found.high, found.start, -1) if found.high is not None else None if known is None else known[1:]
    return None if low is None or high is None else (min(*low, other[0]), max(*high, other[1]))


def masks(e: RankEmitter, mask: str | None, shape: Sequence[int], cut: Cut, rows: int, inside: bool = True) -> bool:
    """Whether a mask of a tensor of this shape says of every leading element that its id is (not) one of the rows."""
    found_at = places(e, mask, shape)
    if found_at is None:
        return False
    here, positions = found_at
    found = limits(e, here, inside)
    last = plus(cut.start, (rows - 1,))
    if found is None or found != (cut.ids, cut.start, last):
        return False
    ids = [n for n in e.shape(cut.ids) if n != 1]
    return positions[: len(ids)] == list(range(len(ids))) and set(positions[len(ids) :]) <= {None}


def places(e: RankEmitter, mask: str | None, shape: Sequence[int]) -> tuple[str, list[int | None]] | None:
    """The mask before it was repeated; for every dimension of `shape` that is not 1 the one of the mask's that it is (None: repeated)."""
    chain: list[Op] = []
    op = e.made.get(mask)
    name = mask
    while op is not None and (_is_slim(e, op) or op.name == "expand"):
        chain.append(op)
        name = op.inputs[0]
        op = e.made.get(name)
    if name is None:
        return None
    sizes = list(e.shape(name))
    entries: list[int | None] = []
    for d in range(len(sizes)):
        entries.append(sum(n != 1 for n in sizes[:d]) if sizes[d] != 1 else None)
    for step in reversed(chain):
        after = list(e.shape(step.outputs[0]))
        if step.name == "expand":
            entries = [*[None] * (len(after) - len(sizes)), *entries]
        else:
            wide = iter([x for x, n in zip(entries, sizes, strict=True) if n != 1])
            entries = [next(wide) if n != 1 else None for n in after]
        sizes = after
    lead = len(shape) - len(sizes)
    entries = [*[None] * lead, *entries]
    return name, [x for x, n in zip(entries, shape, strict=True) if n != 1]


def is_zero(e: RankEmitter, name: str | None) -> bool:
    op = e.made.get(name)
    while op is not None and op.name in ("expand", "reshape"):
        op = e.made.get(op.inputs[0])
    return op is not None and op.name == "full" and op.get("value") == 0


def masked_lookup(e: RankEmitter, inputs: Sequence[str | None]) -> str | None:
    """where(here, lookup(clip(local)), 0), or where(elsewhere, 0, lookup(clip(local)))."""
    mask, found, zero = inputs
    inside = not is_zero(e, found)
    if not inside:
        found, zero = zero, found
    if not is_zero(e, zero) or found is None or mask is None:
        return None
    _, op = behind(e, found)
    if op is None or op.name not in ("embedding", "take_along_dim"):
        return None
    if op.name == "embedding":
        ids, weight = op.inputs
        rows = e.shape(str(weight))[0]
        cut = clipped(e, ids, rows)
        if cut is None or op.get("start", 0) != 0 or not masks(e, mask, e.shape(found), cut, rows, inside):
            return None
        made = e.op("embedding", (cut.ids, weight), {"start": list(_wide(e, cut.start))})
        return e.reshape(made, e.shape(found))
    scores, column = op.inputs
    shape = e.shape(str(scores))
    cut = clipped(e, column, shape[-1])
    if op.get("dim") != len(shape) - 1 or e.shape(str(column)) != (*shape[:-1], 1) or cut is None:
        return None
    if not masks(e, mask, e.shape(found), cut, shape[-1], inside):
        return None
    hot = e.reshape(hot_rows(e, cut, shape[-1], e.tensors[str(scores)].dtype), shape)
    letters = string.ascii_lowercase[: len(shape) - 1]
    made = e.op("einsum", (scores, hot), {"spec": f"{letters}v,{letters}v->{letters}"})
    return e.reshape(made, e.shape(found))


def _wide(e: RankEmitter, column: Column) -> Column:
    return column * len(e.ranks) if len(column) == 1 else column


def hot_rows(e: RankEmitter, cut: Cut, rows: int, dtype: str) -> str:
    return e.cast(e.op("one_hot", (cut.ids,), {"num_classes": rows, "start": list(_wide(e, cut.start))}), dtype)


def counted_hot(e: RankEmitter, inputs: Sequence[str | None]) -> str | None:
    """local = 0, 1, …, one after the other along a new last dimension."""
    for ids, counted in (inputs, inputs[::-1]):
        _, op = behind(e, counted)
        if op is None or op.name != "arange" or e.kind(str(ids)) != "int":
            continue
        ids, rows = _unexpanded(e, str(ids)), op.get("stop")
        shape = e.shape(ids)
        if (op.get("start", 0), op.get("step", 1)) != (0, 1) or e.shape(str(counted)) != (*(1,) * (len(shape) - 1), rows):
            continue
        name, start = shifted(e, ids)
        if shape and shape[-1] == 1:
            hot = e.op("one_hot", (name,), {"num_classes": rows, "start": list(_wide(e, start))})
            return e.reshape(e.cast(hot, "bool"), (*shape[:-1], rows)) if e.shape(hot) != (*shape[:-1], rows) else e.cast(hot, "bool")
    return None


def _unexpanded(e: RankEmitter, name: str) -> str:
    """Before it was repeated along its last dimension."""
    op = e.made.get(name)
    if op is None or op.name != "expand":
        return name
    given, shape = str(op.inputs[0]), e.shape(name)
    return given if e.shape(given) == (*shape[:-1], 1) else name


def shifted_hot(e: RankEmitter, ids: str | None, attrs: dict[str, Any]) -> str | None:
    """one_hot(ids − c, start) = one_hot(ids, start + c)."""
    _, op = behind(e, ids)
    start = integers(e, e.bound(attrs.get("start", 0)))
    if op is None or op.name not in ("sub", "add") or start is None or ids is None:
        return None
    name, by = shifted(e, ids)
    if by == (0,):
        return None
    return e.op("one_hot", (e.reshape(name, e.shape(ids)),), {**attrs, "start": list(_wide(e, plus(start, by)))})


def looked_up_backward(e: RankEmitter, inputs: Sequence[str | None], spec: str) -> str | None:
    """Σ one_hot(clip(local))·where(here, g, 0)."""
    hot, updates = inputs
    op = e.made.get(hot)
    if op is not None and op.name == "to":
        op = e.made.get(op.inputs[0])
    _, where = behind(e, updates)
    if op is None or op.name != "one_hot" or op.get("start", 0) != 0 or where is None or where.name != "where":
        return None
    rows = e.shape(op.outputs[0])[-1]
    cut = clipped(e, op.inputs[0], rows)
    mask, grad, zero = where.inputs
    inside = not is_zero(e, grad)
    if not inside:
        grad, zero = zero, grad
    if cut is None or grad is None or not is_zero(e, zero) or not masks(e, mask, e.shape(where.outputs[0]), cut, rows, inside):
        return None
    grad = grad if e.shape(grad) == e.shape(where.outputs[0]) else e.op("expand", (grad,), {"shape": e.shape(where.outputs[0])})
    made = e.reshape(hot_rows(e, cut, rows, e.tensors[grad].dtype), e.shape(str(hot)))
    return e.op("einsum", (made, e.reshape(grad, e.shape(str(updates)))), {"spec": spec})


__all__ = ["behind", "chosen_bounds", "counted_hot", "looked_up_backward", "masked_lookup", "places", "shifted", "shifted_hot"]
