"""Ids of a vocabulary that ranks cut, as DTensor looks them up: exact rewrites into lookups of the rows from `start` on.

A rank masks ids outside of its rows (`outside` = ids < start or ids ≥ start + rows), shifts the others, and masks the result again;
or it clamps shifted ids to its rows and multiplies by `inside` = ids ≥ start and ids < start + rows, as torchtitan does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from trainverify.graph.program import Op
from trainverify.translate.emit import Emitter

_COPIES: Final = frozenset(("to", "identity", "reshape", "permute", "slice", "concat", "split", "stack", "expand", "all_gather", "full"))


def masked_lookup(e: Emitter, inputs: Sequence[str | None]) -> str | None:
    """where(outside, 0, lookup(where(outside, 0, ids − start))): an embedding, or a choice of one class."""
    mask, zero, found = inputs
    op = e.made.get(found)
    if op is None or not is_zero(e, zero):
        return None
    if op.name == "embedding" and op.get("start", 0) == 0:
        ids, weight = op.inputs
        cut = shifted(e, ids, e.shape(str(weight))[0])
        if cut is None or not cut.masks(e, mask):
            return None
        return e.op("embedding", (cut.ids, weight), {"start": cut.start})
    op = e.made.get(in_order(e, found))
    if op is None or op.name != "take_along_dim":
        return None
    scores, column = op.inputs
    shape = e.shape(str(scores))
    if op.get("dim") not in (-1, len(shape) - 1) or e.shape(str(column)) != (*shape[:-1], 1):
        return None
    cut = shifted(e, in_order(e, column), shape[-1])
    if cut is None or e.shape(str(mask)) != e.shape(str(found)) or in_order(e, cut.outside) != in_order(e, mask):
        return None
    hot = e.reshape(one_hot(e, cut.ids, cut.start, shape[-1], e.tensors[str(scores)].dtype), shape)
    letters = "abcdefgh"[: len(shape) - 1]
    return e.reshape(e.op("einsum", (scores, hot), {"spec": f"{letters}v,{letters}v->{letters}"}), e.shape(str(found)))


def clamped_lookup(e: Emitter, inputs: Sequence[str | None]) -> str | None:
    """embedding(clamp(ids − start, 0, rows − 1))·inside: the rows of a rank, and 0 for other ids. Rows must be finite: 0·∞ is no 0."""
    found, mask = inputs
    op = e.made.get(found)
    if op is None or op.name != "embedding" or op.get("start", 0) != 0 or not is_copied(e, op.inputs[1]):
        return None
    ids, weight = op.inputs
    cut = clamped(e, ids, e.shape(str(weight))[0], mask)
    return None if cut is None else e.op("embedding", (cut[0], weight), {"start": cut[1]})


def clamped(e: Emitter, name: str | None, rows: int, mask: str | None) -> tuple[str, int] | None:
    """The ids and the start of clamp(ids − start, 0, rows − 1), if a column of factors is 1 where start ≤ ids < start + rows, else 0."""
    op = e.made.get(name)
    if op is None or op.name != "clamp" or (op.get("min"), op.get("max")) != (0, rows - 1):
        return None
    moved = e.made.get(op.inputs[0])
    ids, start = op.inputs[0], 0
    if moved is not None and moved.name == "sub" and len(moved.inputs) == 1:
        ids, start = moved.inputs[0], moved.get("value")
    if ids is None or isinstance(start, bool) or not isinstance(start, int):
        return None
    factor = e.made.get(mask)
    if factor is not None and factor.name == "to":
        factor = e.made.get(factor.inputs[0])
    if factor is None or factor.name != "reshape" or e.shape(str(mask)) != (*e.shape(ids), 1):
        return None
    both = e.made.get(factor.inputs[0])
    if both is None or both.name != "logical_and" or e.shape(str(factor.inputs[0])) != e.shape(ids):
        return None
    sides = {(s.name, s.get("value")) for i in both.inputs if (s := e.made.get(i)) is not None and s.inputs == (ids,)}
    return (ids, start) if sides == {("ge", start), ("lt", start + rows)} else None


def is_copied(e: Emitter, name: str | None) -> bool:
    """Whether all elements of a tensor are elements of sources: then they are finite."""
    op = e.made.get(name)
    if op is not None and op.name == "full" and not math.isfinite(op.get("value")):
        return False
    return op is None or (op.name in _COPIES and all(is_copied(e, i) for i in op.inputs if i is not None))


def written(e: Emitter, inputs: Sequence[str | None], dim: object) -> str | None:
    """One element of every row along the last dimension, written into zeros or made smaller: (0 or x −) one_hot(ids)·value."""
    x, column, values = inputs
    shape = e.shape(str(x))
    if dim not in (-1, len(shape) - 1) or any(e.shape(str(t)) != (*shape[:-1], 1) for t in (column, values)):
        return None
    op, value = e.made.get(x), unfolded(e, values)
    if op is not None and op.name == "full" and op.get("value") == 0:
        return hot_times(e, column, value, shape)
    less = e.made.get(value)
    if less is None or less.name != "sub" or len(less.inputs) != 2 or e.shape(str(less.inputs[1])) != e.shape(str(value)):
        return None
    before = e.made.get(less.inputs[0])
    if before is not None and before.name == "reshape":
        before = e.made.get(before.inputs[0])
    if before is None or before.name != "take_along_dim" or before.inputs[0] != x or before.get("dim") not in (-1, len(shape) - 1):
        return None
    if unfolded(e, before.inputs[1]) != unfolded(e, column):
        return None
    return e.op("sub", (x, hot_times(e, column, less.inputs[1], shape)))


def hot_times(e: Emitter, column: str | None, value: str | None, shape: tuple[int, ...]) -> str:
    """one_hot(ids)·value; with value 1 − outside or outside − 1 at masked ids it is ±one_hot(ids, start)."""
    assert value is not None
    ids, dtype = unfolded(e, column), e.tensors[value].dtype
    cut, less = shifted(e, in_order(e, ids), shape[-1]), e.made.get(value)
    sign = 0
    if cut is not None and less is not None and less.name == "sub":
        if len(less.inputs) == 1 and less.get("value") == 1 and _casts(e, less.inputs[0], cut.outside):
            sign = -1
        elif len(less.inputs) == 2 and _is_one(e, less.inputs[0]) and _casts(e, less.inputs[1], cut.outside):
            sign = 1
    if cut is not None and sign:
        hot = e.reshape(one_hot(e, cut.ids, cut.start, shape[-1], dtype), shape)
        return hot if sign > 0 else e.op("neg", (hot,))
    hot = e.reshape(one_hot(e, str(ids), 0, shape[-1], dtype), shape)
    return e.op("mul", (hot, e.reshape(value, (*shape[:-1], 1))))


def looked_up_backward(e: Emitter, inputs: Sequence[str | None], spec: object) -> str | None:
    """Σ one_hot(where(outside, 0, ids − start))·where(outside, 0, grad) = Σ one_hot(ids, start)·grad."""
    hot, masked = (e.made.get(i) for i in inputs)
    if hot is not None and hot.name == "to":
        hot = e.made.get(hot.inputs[0])
    if hot is None or hot.name != "one_hot" or hot.get("start", 0) != 0 or masked is None:
        return None
    count = e.shape(hot.outputs[0])[-1]
    letters = "abcdefgh"[: len(e.shape(str(hot.inputs[0])))]
    if masked.name == "mul" and len(masked.inputs) == 2 and spec == f"{letters}v,{letters}x->vx":
        return _clamped_backward(e, str(hot.inputs[0]), masked, count, str(spec))
    if masked.name != "where":
        return None
    cut = shifted(e, hot.inputs[0], count)
    if cut is None or spec != f"{letters}v,{letters}x->vx" or not is_zero(e, masked.inputs[1]) or not cut.masks(e, masked.inputs[0]):
        return None
    grad = str(masked.inputs[2])
    if e.shape(grad) != e.shape(str(inputs[1])):
        return None
    return e.op("einsum", (one_hot(e, cut.ids, cut.start, count, e.tensors[grad].dtype), grad), {"spec": spec})


def _clamped_backward(e: Emitter, ids: str, masked: Op, count: int, spec: str) -> str | None:
    """Σ one_hot(clamp(ids − start))·(grad·inside) = Σ one_hot(ids, start)·grad."""
    for grad, mask in (masked.inputs, masked.inputs[::-1]):
        cut = clamped(e, ids, count, mask)
        if cut is not None and e.shape(str(grad)) == e.shape(masked.outputs[0]):
            return e.op("einsum", (one_hot(e, cut[0], cut[1], count, e.tensors[str(grad)].dtype), grad), {"spec": spec})
    return None


def _casts(e: Emitter, name: str | None, mask: str) -> bool:
    op = e.made.get(name)
    return op is not None and op.name == "to" and in_order(e, op.inputs[0]) == in_order(e, mask)


def _is_one(e: Emitter, name: str | None) -> bool:
    op = e.made.get(name)
    return op is not None and op.name == "full" and op.get("value") == 1


class Cut:
    """ids − start where the rank has a row for an id, else 0."""

    def __init__(self, ids: str, start: int, outside: str):
        self.ids, self.start, self.outside = ids, start, outside

    def masks(self, e: Emitter, name: str | None) -> bool:
        """Whether a mask is `outside`, for tensors with one more dimension."""
        op = e.made.get(name)
        same = op is not None and op.name == "reshape" and op.inputs[0] == self.outside
        return same and e.shape(str(name)) == (*e.shape(self.ids), 1)


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


def in_order(e: Emitter, name: str | None) -> str | None:
    """The tensor that another has the elements of, in the same order."""
    while (op := e.made.get(name)) is not None and op.name == "reshape":
        name = op.inputs[0]
    return name


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


__all__ = ["clamped_lookup", "looked_up_backward", "masked_lookup", "written"]
