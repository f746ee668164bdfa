"""A call of a primitive at smaller sizes: equal sizes stay equal, and larger ones larger. Sizes up to `KEPT` stay what they are.

Which integers of the parameters shrink with the sizes is said here by primitive; a call of another one, or with sizes that no rule
explains, is not run beside its mapping when it is large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from trainverify.graph.types import TensorType
from trainverify.jax.beside import ELEMENTS, Call, Leaf, Operand
from trainverify.jax.mappings.elementwise import ROWS as ELEMENTWISE
from trainverify.jax.values import Grid, Number, Table

KEPT: Final = 6
Sizes = Mapping[int, int]


def _sizes(numbers: Sequence[int]) -> dict[int, int]:
    large = sorted({n for n in numbers if n > KEPT})
    return {n: n if n <= KEPT else KEPT + 1 + large.index(n) for n in numbers}


def _resized(x: Operand, shape: tuple[int, ...], bounds: tuple[int, int] | None = None) -> Operand | None:
    """An operand with another shape; its numbers are the same."""
    match x:
        case Leaf():
            if x.parts:
                return None
            return replace(x, kind=TensorType(shape, x.kind.dtype), bounds=bounds or x.bounds)
        case Number() | Grid():
            return replace(x, shape=shape)
        case Table():
            return x if shape == x.shape else None


def _with(
    call: Call, shapes: Sequence[tuple[int, ...]], out: Sequence[tuple[int, ...]], params: Mapping[str, Any], **bounds: Any
) -> Call | None:
    operands = [_resized(x, s, bounds.get(f"x{n}")) for n, (x, s) in enumerate(zip(call.operands, shapes, strict=True))]
    if any(x is None for x in operands):
        return None
    kinds = tuple(TensorType(s, t.dtype) for s, t in zip(out, call.out, strict=True))
    return replace(call, operands=tuple(x for x in operands if x is not None), params={**call.params, **params}, out=kinds)


def _shapes(call: Call) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    return [t.shape for t in call.types], [t.shape for t in call.out]


def _renamed(call: Call, *integers: str) -> Call | None:
    """Every size by another one, everywhere; `integers` are parameters that are sizes."""
    given, out = _shapes(call)
    more = [call.params[n] for n in integers if call.params.get(n) is not None]
    flat = [n for v in more for n in (v if isinstance(v, tuple | list) else (v,))]
    sizes = _sizes([n for s in (*given, *out) for n in s] + flat)

    def small(value: Any) -> Any:
        return tuple(sizes[n] for n in value) if isinstance(value, tuple | list) else None if value is None else sizes[value]

    return _with(call, [small(s) for s in given], [small(s) for s in out], {n: small(call.params.get(n)) for n in integers})


def _reshape(call: Call) -> Call | None:
    """Both shapes as products of the same factors."""
    before, after = call.types[0].shape, call.out[0].shape
    factors: list[tuple[list[int], list[int]]] = []  # dimensions before and after that hold the same elements
    i, j = 0, 0
    while i < len(before) or j < len(after):
        left, right = [i] if i < len(before) else [], [j] if j < len(after) else []
        i, j = i + len(left), j + len(right)
        while math.prod(before[d] for d in left) != math.prod(after[d] for d in right):
            if math.prod(before[d] for d in left) < math.prod(after[d] for d in right) and i < len(before):
                left.append(i)
                i += 1
            elif j < len(after):
                right.append(j)
                j += 1
            else:
                return None
        factors.append((left, right))
    small_before, small_after = list(before), list(after)
    for left, right in factors:
        if len(left) == len(right) == 1:
            small_before[left[0]] = small_after[right[0]] = min(before[left[0]], KEPT + 1 + len(left))
            continue
        one, many, sizes, target = (left, right, small_after, small_before) if len(left) == 1 else (right, left, small_before, small_after)
        if len(one) != 1:
            continue  # cut anew: stays
        for k, d in enumerate(many):
            sizes[d] = min(sizes[d], 2 + k)
        target[one[0]] = math.prod(sizes[d] for d in many)
    return _with(call, [tuple(small_before)], [tuple(small_after)], {"new_sizes": tuple(small_after)})


def _concatenate(call: Call) -> Call | None:
    dim = call.params["dimension"]
    given, out = _shapes(call)
    sizes = _sizes([n for s in (*given, *out) for n in s])
    shapes = [tuple(sizes[n] for n in s) for s in given]
    total = sum(s[dim] for s in shapes)
    return _with(call, shapes, [tuple(total if d == dim else n for d, n in enumerate(shapes[0]))], {})


def _split(call: Call) -> Call | None:
    dim = call.params["axis"]
    given, out = _shapes(call)
    sizes = _sizes([n for s in (*given, *out) for n in s])
    shapes = [tuple(sizes[n] for n in s) for s in out]
    total = sum(s[dim] for s in shapes)
    whole = tuple(total if d == dim else sizes[n] for d, n in enumerate(given[0]))
    return _with(call, [whole], shapes, {"sizes": tuple(s[dim] for s in shapes)})


def _slice(call: Call) -> Call | None:
    """Dimensions that are taken whole shrink; of others start, stop and size do in their order, without a stride."""
    p, shape = call.params, call.types[0].shape
    steps = p["strides"] or (1,) * len(shape)
    sizes, starts, stops = [], [], []
    for n, a, b, s in zip(shape, p["start_indices"], p["limit_indices"], steps, strict=True):
        if s != 1:
            order = {k: k for k in (0, a, b, n)}
        else:
            order = {k: 2 * i for i, k in enumerate(sorted({0, a, b, n}))} if n > 2 * KEPT else {k: k for k in (0, a, b, n)}
        sizes.append(order[n])
        starts.append(order[a])
        stops.append(order[b])
    out = tuple(-(-(b - a) // s) for a, b, s in zip(starts, stops, steps, strict=True))
    return _with(call, [tuple(sizes)], [out], {"start_indices": tuple(starts), "limit_indices": tuple(stops)})


def _pad(call: Call) -> Call | None:
    """Paddings that are large shrink as their order is; inner ones stay."""
    shape, config = call.types[0].shape, call.params["padding_config"]
    amounts = sorted({abs(int(n)) for low, high, _ in config for n in (low, high)})
    less = {n: min(n, 2 + 2 * k) for k, n in enumerate(amounts)}
    new, small, out = [], [], []
    for n, (low, high, inner) in zip(shape, config, strict=True):
        if min(low, high) < 0 or inner:
            new.append((low, high, inner))
            small.append(n)
            out.append(low + high + n + max(n - 1, 0) * inner)
            continue
        m = min(n, KEPT + 1)
        new.append((less[low], less[high], 0))
        small.append(m)
        out.append(less[low] + less[high] + m)
    return _with(call, [tuple(small), ()], [tuple(out)], {"padding_config": tuple(new)})


def _rows(call: Call) -> Call | None:
    """A gather or scatter by one number for each window, or by known numbers: then dimensions with an index stay what they are."""
    n = call.params["dimension_numbers"]
    gather = call.name == "gather"
    indexed = tuple(n.start_index_map if gather else n.scatter_dims_to_operand_dims)
    ids, shape = call.operands[1], call.types[0].shape
    given, out = _shapes(call)
    sizes = _sizes([k for s in (*given, *out) for k in s])
    bounds = {}
    if not isinstance(ids, Leaf):
        sizes |= {k: k for k in (*(shape[d] for d in indexed), *given[1])}
    elif len(indexed) != 1 or ids.bounds is None:
        return None
    else:
        low, high = ids.bounds
        most = sizes[shape[indexed[0]]]
        bounds["x1"] = (0, most - 1) if low >= 0 and high < shape[indexed[0]] else (min(low, 0) and -3, most + 2)
    params = {"slice_sizes": tuple(sizes.get(k, k) for k in call.params["slice_sizes"])} if gather else {}
    small = [tuple(sizes[k] for k in s) for s in given]
    return _with(call, small, [tuple(sizes[k] for k in s) for s in out], params, **bounds)


def _block(call: Call) -> Call | None:
    """Dimensions that a block takes whole shrink."""
    shape = call.types[0].shape
    block = call.types[1].shape if call.name == "dynamic_update_slice" else tuple(call.params["slice_sizes"])
    small = tuple(min(n, KEPT + 1 + d) if n == m else n for d, (n, m) in enumerate(zip(shape, block, strict=True)))
    cut = tuple(s if n == m else m for s, n, m in zip(small, shape, block, strict=True))
    if call.name == "dynamic_update_slice":
        return _with(call, [small, cut, *(() for _ in call.operands[2:])], [small], {})
    return _with(call, [small, *(() for _ in call.operands[1:])], [cut], {"slice_sizes": cut})


RULES: Final[dict[str, Callable[[Call], Call | None]]] = {
    **dict.fromkeys(ELEMENTWISE, _renamed),
    **dict.fromkeys(("stack", "transpose", "squeeze", "expand_dims", "rev", "cumsum", "sort", "argmax", "argmin"), _renamed),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "dot_general"), _renamed),
    "broadcast_in_dim": lambda c: _renamed(c, "shape"),
    "iota": lambda c: _renamed(c, "shape"),
    "top_k": lambda c: _renamed(c, "k"),
    **dict.fromkeys(("dynamic_slice", "dynamic_update_slice"), _block),
    "reshape": _reshape,
    "concatenate": _concatenate,
    "split": _split,
    "slice": _slice,
    "pad": _pad,
    **dict.fromkeys(("gather", "scatter", "scatter-add", "scatter_add", "scatter-sub"), _rows),
}


def smaller(call: Call) -> Call | None:
    """The same call at small sizes; None where no rule shrinks it enough."""
    rule = RULES.get(call.name)
    found = None if rule is None else rule(call)
    return found if found is not None and found.elements <= ELEMENTS else None


__all__ = ["smaller"]
