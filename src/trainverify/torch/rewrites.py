"""Exact rewrites of what PyTorch computes, applied as ops are written. Each holds for all values; each has a test with a wrong twin.

- scalars that are stacked: functions, slices and sums over ranks of a stack are stacks of these, and its norm is √(Σ x²);
  the norm of norms of tensors is the norm of all their elements
- a scalar with an upper bound is the smaller of both (the factor that gradients are clipped by)
- 1 / max(x, 1) is min(1 / x, 1) of a scalar x that is positive (the same factor, as DeepSpeed writes it); by 1 changes nothing
- integers that count on from 0, plus a literal, count on from there; so do sums and products of integers from constants alone
- a slice of a concatenation that begins and ends between pieces is the concatenation of these; a concatenation of others is one;
  one with literals among its pieces is cut anywhere
- a number added to a flat concatenation, or multiplied with it, goes to its pieces; likewise a scalar that it is multiplied with
- where flat memory is followed piece by piece (`Emitter.apart`): functions, element by element, of flat concatenations that are cut alike
  are concatenations of those of their pieces, and a slice of one is cut from its pieces
- blocks of what ranks gathered, side by side along another dimension, are a dimension that moves there;
  blocks along the first dimension, reshaped alike and joined again, are the tensor, reshaped
- what is looked up by a function of ids is looked up by the ids, in the rows from some start on (`translate/lookups.py`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from trainverify.torch.ranges import computed
from trainverify.translate import lookups
from trainverify.translate.emit import Emitter

_UNARY: Final = frozenset(("pow", "square", "sqrt", "abs", "neg", "reciprocal", "to", "identity"))
_BY_VALUE: Final = frozenset(("mul", "div", "add", "sub"))


def stacked(e: Emitter, name: str | None) -> tuple[str, ...] | None:
    """The scalars that a tensor is a stack of."""
    op = e.made.get(name) if name is not None else None
    if op is None or op.name != "stack" or op.get("dim", 0) != 0 or any(e.shape(str(i)) for i in op.inputs):
        return None
    return tuple(str(i) for i in op.inputs)


def rewritten(e: Emitter, name: str, inputs: Sequence[str | None], attrs: Mapping[str, Any]) -> str | None:
    """The result of an op by another way; None if there is none."""
    first = inputs[0] if inputs else None
    items = stacked(e, first)
    if items is not None:
        return _of_stack(e, name, inputs, attrs, items)
    if (
        name == "reshape"
        and (op := e.made.get(first)) is not None
        and op.name == "reshape"
        and attrs["shape"] == e.shape(str(op.inputs[0]))
    ):
        return op.inputs[0]  # there and back
    if name in ("pow", "square") and attrs.get("exponent", 2) == 2 and (x := _normed(e, first)) is not None:
        return e.op("sum", (e.op("square", (x,)),))  # ‖x‖² is Σ x²
    if name == "clamp" and set(attrs) == {"max"} and first is not None and e.shape(first) == () and e.kind(first) == "real":
        return e.op("minimum", (first, e.full((), attrs["max"], e.tensors[first].dtype)))
    if name in ("mul", "div") and len(inputs) == 1 and attrs.get("value") == 1 and first is not None and e.kind(first) == "real":
        return first
    if name == "reciprocal" and (x := _at_least_one(e, first)) is not None:
        return e.op("minimum", (e.op("reciprocal", (x,)), e.full((), 1, e.tensors[x].dtype)))
    if e.apart and (made := _piecewise(e, name, inputs, attrs)) is not None:
        return made
    if name == "slice" and attrs.get("step", 1) == 1:
        return _of_pieces(e, first, attrs)
    if name == "concat":
        return _side_by_side(e, inputs, attrs["dim"]) or _gathered(e, inputs, attrs["dim"]) or _flattened(e, inputs, attrs["dim"])
    if name in _BY_VALUE and len(inputs) == 1 and len(e.shape(str(first))) == 1 and len(pieces := _pieces(e, first, 0)) > 1:
        return e.op("concat", [e.op(name, (p,), attrs) for p in pieces], {"dim": 0})
    if name in ("add", "sub", "mul") and e.kind(str(first)) == "int" and (made := computed(e, name, inputs, attrs.get("value"))):
        return made
    if name in ("mul", "div") and len(inputs) == 2 and not attrs and (made := _scaled(e, name, *inputs)) is not None:
        return made
    if name in ("add", "sub") and len(inputs) == 1 and (made := _counted(e, name, first, attrs)) is not None:
        return made
    return lookups.rewritten(e, name, inputs, attrs)


def _at_least_one(e: Emitter, name: str | None) -> str | None:
    """The positive scalar that another one is, with 1 as its lower bound."""
    op = e.made.get(name)
    if op is None or op.name != "clamp" or dict(op.attrs) != {"min": 1} or e.shape(str(name)) != () or e.kind(str(name)) != "real":
        return None
    return op.inputs[0] if _positive(e, op.inputs[0]) else None


def _positive(e: Emitter, name: str | None, zero: bool = False) -> bool:
    """Whether a scalar is positive (or zero), for all values, by how it is written."""
    op = e.made.get(name)
    if op is None:
        return False
    value = op.get("value")
    if op.name in ("norm", "grad_norm"):
        return zero
    if op.name in ("mul", "div") and len(op.inputs) == 1:
        return value > 0 and _positive(e, op.inputs[0], zero)
    if op.name == "add" and len(op.inputs) == 1:
        return value > 0 and _positive(e, op.inputs[0], True)
    return op.name in ("to", "identity") and e.kind(str(op.inputs[0])) == "real" and _positive(e, op.inputs[0], zero)


def _scaled(e: Emitter, name: str, x: str | None, by: str | None) -> str | None:
    """A flat concatenation by a scalar is the concatenation of its pieces by it."""
    if name == "mul" and x is not None and e.shape(x) == ():
        x, by = by, x
    if x is None or by is None or e.shape(by) != () or len(e.shape(x)) != 1 or len(pieces := _pieces(e, x, 0)) < 2:
        return None
    return e.op("concat", [e.op(name, (p, by)) for p in pieces], {"dim": 0})


def _counted(e: Emitter, name: str, first: str | None, attrs: Mapping[str, Any]) -> str | None:
    """arange(a, b) + k is arange(a + k, b + k); the same of real numbers."""
    op, by = e.made.get(first), attrs.get("value")
    if op is None or set(attrs) != {"value"} or type(by) is not int:
        return None
    if op.name == "to" and e.kind(str(first)) == "real" and (counted := _counted(e, name, op.inputs[0], attrs)) is not None:
        return e.op("to", (counted,), dict(op.attrs))
    if op.name != "arange" or e.kind(str(first)) != "int":
        return None
    by = by if name == "add" else -by
    return e.op("arange", (), {**dict(op.attrs), "start": op.get("start", 0) + by, "stop": op.get("stop") + by})


def _pieces(e: Emitter, name: str | None, dim: int) -> tuple[str, ...]:
    """The tensors that a tensor is a concatenation of along a dimension; itself if it is none."""
    op = e.made.get(name)
    if op is None or op.name != "concat" or op.get("dim", 0) % len(e.shape(str(name))) != dim:
        return (str(name),)
    return tuple(str(i) for i in op.inputs)


def _of_pieces(e: Emitter, x: str | None, attrs: Mapping[str, Any]) -> str | None:
    size = len(e.shape(str(x)))
    dim = attrs.get("dim", 0) % size
    pieces, at, kept, found = _pieces(e, x, dim), 0, [], set()
    for p in pieces if len(pieces) > 1 else ():
        found.add(at)
        if attrs["start"] <= at < attrs["stop"]:
            kept.append(p)
        at += e.shape(p)[dim]
    found.add(at)
    if any((made := e.made.get(p)) is not None and made.name == "full" for p in pieces) and len(pieces) > 1:
        return _of_padded(e, pieces, dim, attrs["start"], attrs["stop"])
    if not kept or attrs["start"] not in found or attrs["stop"] not in found:
        return None
    return kept[0] if len(kept) == 1 else e.op("concat", kept, {"dim": dim})


def _piecewise(e: Emitter, name: str, inputs: Sequence[str | None], attrs: Mapping[str, Any]) -> str | None:
    """An op on flat memory as one on each of its pieces."""
    if not inputs or any(i is None or len(e.shape(i)) != 1 for i in inputs):
        return None
    given = [_pieces(e, i, 0) for i in inputs]
    if len(given[0]) == 1:
        return None
    if name == "slice" and attrs.get("step", 1) == 1:
        return _of_padded(e, given[0], 0, attrs["start"], attrs["stop"])
    if name not in (_UNARY if len(inputs) == 1 else _BY_VALUE) or len({tuple(e.shape(p) for p in ps) for ps in given}) > 1:
        return None
    return e.op("concat", [e.op(name, ps, attrs) for ps in zip(*given, strict=True)], {"dim": 0})


def _of_padded(e: Emitter, pieces: Sequence[str], dim: int, start: int, stop: int) -> str | None:
    """A slice of something between literals: its pieces are cut, not the whole."""
    kept, at = [], 0
    for p in pieces:
        shape, op = e.shape(p), e.made.get(p)
        first, last = max(start - at, 0), min(stop - at, shape[dim])
        at += shape[dim]
        if first >= last:
            continue
        if (first, last) == (0, shape[dim]):
            kept.append(p)
        elif op is not None and op.name == "full":
            kept.append(e.full((*shape[:dim], last - first, *shape[dim + 1 :]), op.get("value"), e.tensors[p].dtype))
        else:
            kept.append(e.op("slice", (p,), {"dim": dim, "start": first, "stop": last}))
    if not kept:
        return None
    return kept[0] if len(kept) == 1 else e.op("concat", kept, {"dim": dim})


def _flattened(e: Emitter, inputs: Sequence[str | None], along: int) -> str | None:
    dim = along % len(e.shape(str(inputs[0])))
    pieces = [p for i in inputs for p in _pieces(e, i, dim)]
    return e.op("concat", pieces, {"dim": along}) if len(pieces) > len(inputs) else None


def _normed(e: Emitter, name: str | None) -> str | None:
    """The tensor that a scalar is the 2-norm of."""
    op = e.made.get(name)
    whole = op is not None and op.name == "norm" and op.get("p", 2) == 2 and op.get("dim") is None and not op.get("keepdim")
    return op.inputs[0] if op is not None and whole else None


def _of_stack(e: Emitter, name: str, inputs: Sequence[str | None], attrs: Mapping[str, Any], items: tuple[str, ...]) -> str | None:
    if (name in _UNARY and len(inputs) == 1) or (name in _BY_VALUE and len(inputs) == 1):
        return e.op("stack", [e.op(name, (i,), attrs) for i in items], {"dim": 0})
    if name in ("mul", "div") and len(inputs) == 2 and inputs[1] is not None and e.shape(inputs[1]) == ():
        return e.op("stack", [e.op(name, (i, inputs[1])) for i in items], {"dim": 0})
    if name == "slice" and attrs.get("dim", 0) == 0 and attrs.get("step", 1) == 1:
        return e.op("stack", items[attrs["start"] : attrs["stop"]], {"dim": 0})
    if name == "reshape" and attrs["shape"] == () and len(items) == 1:
        return items[0]
    if name == "norm" and attrs.get("p", 2) == 2 and not attrs.get("keepdim") and attrs.get("dim") in (None, 0, (0,), (-1,)):
        return e.op("grad_norm", [_normed(e, i) or i for i in items])
    if name == "sum" and not attrs.get("keepdim") and attrs.get("dim") in (None, 0, (0,), (-1,)):
        total = items[0]
        for i in items[1:]:
            total = e.op("add", (total, i))
        return total
    return None


def uncut(e: Emitter, name: str, n: int) -> tuple[str, int] | None:
    """The tensor of which another is the n equal blocks along a dimension, one after the other along the first; and that dimension."""
    op = e.made.get(name)
    if op is None or op.name != "concat" or op.get("dim", 0) != 0 or len(op.inputs) != n:
        return None
    found = _blocks(e, op.inputs)
    return None if found is None or found[1] == 0 else found


def _side_by_side(e: Emitter, inputs: Sequence[str | None], along: int) -> str | None:
    """Blocks of an all_gather along dimension 0, joined along another: the blocks' number becomes a dimension and moves there."""
    found = _blocks(e, inputs)
    if found is None or found[1] != 0 or (op := e.made.get(found[0])) is None or op.name != "all_gather":
        return None
    shape, n = e.shape(found[0]), len(inputs)
    dim = along % len(shape)
    if dim == 0:
        return found[0]
    apart = e.reshape(found[0], (n, shape[0] // n, *shape[1:]))
    moved = e.op("permute", (apart,), {"dims": (*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1))})
    return e.reshape(moved, (shape[0] // n, *shape[1:dim], n * shape[dim], *shape[dim + 1 :]))


def _gathered(e: Emitter, inputs: Sequence[str | None], along: int) -> str | None:
    """Blocks of a tensor along dimension 0, reshaped alike and joined along dimension 0: the tensor, reshaped."""
    made = [e.made.get(i) for i in inputs]
    shapes = {e.shape(str(i)) for i in inputs}
    if len(shapes) != 1 or () in shapes or along % len(e.shape(str(inputs[0]))) or any(op is None or op.name != "reshape" for op in made):
        return None
    found = _blocks(e, [op.inputs[0] for op in made if op is not None])
    if found is None or found[1] != 0:
        return None
    (shape,) = shapes
    return e.reshape(found[0], (len(inputs) * shape[0], *shape[1:]))


def _blocks(e: Emitter, names: Sequence[str | None]) -> tuple[str, int] | None:
    """The tensor that some tensors are all the equal blocks of, in order, and the dimension."""
    n, blocks = len(names), [e.made.get(i) for i in names]
    first = blocks[0]
    if n < 2 or first is None or first.name != "slice":
        return None
    whole, dim = str(first.inputs[0]), int(first.get("dim", 0))
    size, rest = divmod(e.shape(whole)[dim], n)
    for i, b in enumerate(blocks):
        if b is None or b.name != "slice" or b.inputs != (whole,) or b.get("dim", 0) != dim or b.get("step", 1) != 1:
            return None
        if rest or (b.get("start"), b.get("stop")) != (i * size, (i + 1) * size):
            return None
    return whole, dim


def reduced_apart(e: Emitter, x: str) -> tuple[str, ...] | None:
    """A sum over ranks of a stack of scalars is the stack of their sums. One of literals stays whole: other ranks' may be one literal."""
    items = stacked(e, x)
    return None if items is None or all(_is_literal(e, i) for i in items) else items


def _is_literal(e: Emitter, name: str) -> bool:
    op = e.made.get(name)
    return op is not None and (op.name == "full" or (op.name in ("to", "identity", "reshape") and _is_literal(e, str(op.inputs[0]))))
