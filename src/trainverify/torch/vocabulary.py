"""Ids of a vocabulary that ranks cut, as DTensor looks them up: exact rewrites into lookups of the rows from `start` on.

A rank masks ids outside of its rows (`outside` = ids < start or ids ≥ start + rows), shifts the others, and masks the result again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainverify.torch.emit import Emitter


def masked_lookup(e: Emitter, inputs: Sequence[str | None]) -> str | None:
    """where(outside, 0, lookup(where(outside, 0, ids − start))): an embedding, or a choice of one class."""
    mask, zero, found = inputs
    looked_up = e.made.get(found)
    if looked_up is None or not is_zero(e, zero):
        return None
    if looked_up.name == "embedding" and looked_up.get("start", 0) == 0:
        ids, weight = looked_up.inputs
        cut = shifted(e, ids, e.shape(str(weight))[0])
        again = e.made.get(mask)
        if cut is None or again is None or again.name != "reshape" or again.inputs[0] != cut.outside:
            return None
        if e.shape(str(mask)) != (*e.shape(cut.ids), 1):
            return None
        return e.op("embedding", (cut.ids, weight), {"start": cut.start})
    if looked_up.name == "take_along_dim":
        scores, ids = looked_up.inputs
        shape, last = e.shape(str(scores)), e.shape(str(ids))
        if looked_up.get("dim") not in (-1, len(shape) - 1) or last != (*shape[:-1], 1):
            return None
        cut = shifted(e, ids, shape[-1])
        if cut is None or mask != cut.outside:
            return None
        hot = one_hot(e, cut.ids, cut.start, shape[-1], e.tensors[str(scores)].dtype)  # [..., 1, classes]
        letters = "abcdefgh"[: len(shape) - 1]
        return e.op("einsum", (scores, hot), {"spec": f"{letters}v,{letters}jv->{letters}j"})
    return None


def written(e: Emitter, inputs: Sequence[str | None], dim: object) -> str | None:
    """One element written along the last dimension of zeros: one_hot(ids)·value; outside − 1 at masked ids is −one_hot(ids, start)."""
    zero, column, values = inputs
    shape = e.shape(str(zero))
    op = e.made.get(zero)
    if op is None or op.name != "full" or op.get("value") != 0 or dim not in (-1, len(shape) - 1):
        return None
    if e.shape(str(column)) != (*shape[:-1], 1) or e.shape(str(values)) != (*shape[:-1], 1):
        return None
    ids, value = unfolded(e, column), unfolded(e, values)
    cut = shifted(e, ids, shape[-1])
    less = e.made.get(value)
    dtype = e.tensors[str(zero)].dtype
    if cut is not None and less is not None and less.name == "sub" and len(less.inputs) == 1 and less.get("value") == 1:
        real = e.made.get(less.inputs[0])
        if real is not None and real.name == "to" and real.inputs[0] == cut.outside:
            hot = one_hot(e, cut.ids, cut.start, shape[-1], dtype)
            return e.op("neg", (e.reshape(hot, shape),))
    hot = one_hot(e, str(ids), 0, shape[-1], dtype)
    return e.op("mul", (e.reshape(hot, shape), values))


class Cut:
    """ids − start where the rank has a row for an id, else 0."""

    def __init__(self, ids: str, start: int, outside: str):
        self.ids, self.start, self.outside = ids, start, outside


def shifted(e: Emitter, name: str | None, rows: int) -> Cut | None:
    """What a tensor where(outside, 0, ids − start) was made from, for so many rows."""
    op = e.made.get(name)
    if op is None or op.name != "where" or not is_zero(e, op.inputs[1]):
        return None
    outside, moved = op.inputs[0], e.made.get(op.inputs[2])
    if moved is None or moved.name != "sub" or len(moved.inputs) != 1:
        return None
    ids, start = moved.inputs[0], moved.get("value")
    if ids is None or outside is None or isinstance(start, bool) or not isinstance(start, int):
        return None
    return Cut(ids, start, outside) if is_outside(e, outside, ids, start, start + rows) else None


def one_hot(e: Emitter, ids: str, start: int, count: int, dtype: str) -> str:
    """One-hots [..., count] of ids, taken before the ids are given another shape."""
    op = e.made.get(ids)
    if op is not None and op.name == "reshape":
        return e.reshape(one_hot(e, str(op.inputs[0]), start, count, dtype), (*e.shape(ids), count))
    return e.cast(e.op("one_hot", (ids,), {"num_classes": count, "start": start}), dtype)


def unfolded(e: Emitter, column: str | None) -> str | None:
    """A tensor without the last dimension of size 1 that a reshape gave it."""
    op = e.made.get(column)
    if op is not None and op.name == "reshape" and e.shape(str(column)) == (*e.shape(str(op.inputs[0])), 1):
        return op.inputs[0]
    return column


def is_zero(e: Emitter, name: str | None) -> bool:
    op = e.made.get(name)
    return op is not None and op.name == "full" and op.get("value") == 0 and op.get("shape") == ()


def is_outside(e: Emitter, name: str | None, ids: str | None, start: int, stop: int) -> bool:
    """Whether a mask is ids < start or ids ≥ stop."""
    op = e.made.get(name)
    if op is None or op.name != "logical_or":
        return False
    sides = {(s.name, s.get("value")) for i in op.inputs if (s := e.made.get(i)) is not None and s.inputs == (ids,)}
    return sides == {("lt", start), ("ge", stop)}


__all__ = ["is_outside", "is_zero", "masked_lookup", "written"]
