"""The integers and booleans of a tensor: the smallest and the largest that it can have, as follows from how it was made, and whether its
dtype has them. 200 + 100 is 44 in 8 bits: numbers that may wrap around have no meaning here.

Integers of 8 and 16 bits have to fit by what is known. Those of 32 and 64 bits are refused where they are known not to fit; where nothing
is known (ids, numbers of steps), that they do not wrap around is an assumption that the verdict lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from trainverify.graph.program import Op
from trainverify.translate.emit import Emitter

Bounds = tuple[int, int] | None

NARROW: Final = {"u8": (0, 255), "i8": (-128, 127), "i16": (-(2**15), 2**15 - 1)}  # dtypes that ordinary numbers do not fit in
RANGES: Final = {**NARROW, "i32": (-(2**31), 2**31 - 1), "i64": (-(2**63), 2**63 - 1)}

# Operators whose results are elements of their first argument
_KEEPS: Final = frozenset(
    (
        *("reshape", "slice", "expand", "permute", "identity", "to", "flip", "roll", "repeat", "split", "select", "amax", "amin"),
        *("take_along_dim", "index_select", "unsqueeze", "squeeze"),
    )
)
# The same, where elements may be other ranks'
EXCHANGES: Final = frozenset(("all_gather", "all_to_all", "broadcast", "recv", "scatter", "gather"))
_JOINS: Final = frozenset(("concat", "stack"))


def tensor_bounds(e: Emitter, name: str | None) -> Bounds:
    """Bounds of an integer or boolean tensor; None where nothing is known. A tensor of a narrow dtype fits in it, or was refused."""
    if name is None or e.kind(name) == "real":
        return None
    if e.kind(name) == "bool":
        return 0, 1
    found = computed(e, name)
    return NARROW.get(e.tensors[name].dtype) if found is None else found


def computed(e: Emitter, name: str) -> Bounds:
    """The same from how the tensor was made, whatever its own dtype holds."""
    if e.kind(name) == "bool":
        return 0, 1
    op = e.made.get(name)
    if op is None:
        return e.bounds.get(name, NARROW.get(e.tensors[name].dtype))
    if name not in e.intervals:
        e.intervals[name] = None  # until it is known
        e.intervals[name] = _narrower(_made(e, op, name), _as_function(e, name))
    return e.intervals[name]


def _as_function(e: Emitter, name: str) -> Bounds:
    """The same of a tensor that is a function of one integer tensor, which may say more: where(0 ≤ x, x, 0) is never negative."""
    return None if e.image is None else e.image(e, name)


def _narrower(a: Bounds, b: Bounds) -> Bounds:
    return a or b if a is None or b is None else (max(a[0], b[0]), min(a[1], b[1]))


def fits(e: Emitter, name: str | None, dtype: str) -> bool:
    """Whether it follows from how a tensor was made that a dtype holds its numbers."""
    found = None if name is None else computed(e, name)
    return found is not None and holds(dtype, found)


def holds(dtype: str, found: tuple[int, int]) -> bool:
    """Whether a dtype has all integers between two."""
    return dtype == "bool" or (RANGES[dtype][0] <= found[0] and found[1] <= RANGES[dtype][1])


def wraps(e: Emitter, name: str) -> bool:
    """Whether integers of a tensor may be others than the arithmetic of integers makes them."""
    dtype = e.tensors[name].dtype
    if e.kind(name) != "int":
        return False
    found = computed(e, name)
    return dtype in NARROW if found is None else not holds(dtype, found)


def _made(e: Emitter, op: Op, name: str) -> Bounds:
    if op.name in EXCHANGES or op.name in ("all_reduce", "reduce", "reduce_scatter"):
        return _exchanged(e, op, name)
    if op.name in _KEEPS:
        return tensor_bounds(e, op.inputs[0])
    if op.name in _JOINS:
        return hull([tensor_bounds(e, i) for i in op.inputs])
    if op.name == "where":
        return hull([tensor_bounds(e, i) for i in op.inputs[1:]])
    if op.name == "put_along_dim":
        return hull([tensor_bounds(e, op.inputs[0]), tensor_bounds(e, op.inputs[2])])
    if op.name in ("masked_fill", "pad"):
        return hull([tensor_bounds(e, op.inputs[0]), _numbers(e, op.get("value", 0))])
    if op.name in ("argmax", "argmin", "argsort") or (op.name in ("topk", "sort") and name == op.outputs[1]):
        dim = op.get("dim", -1)
        return 0, e.shape(str(op.inputs[0]))[dim] - 1 if isinstance(dim, int) else max(e.shape(str(op.inputs[0])), default=1) - 1
    if op.name in ("topk", "sort"):
        return tensor_bounds(e, op.inputs[0])
    if op.name == "one_hot":
        return 0, 1
    if op.name == "full":
        return _numbers(e, op.get("value"))
    if op.name == "arange":
        first, last, step = _numbers(e, op.get("start", 0)), _numbers(e, op.get("stop")), op.get("step", 1)
        if first is None or last is None or not isinstance(step, int):
            return None
        return (first[0], max(first[1], last[1] - 1)) if step > 0 else (min(last[0] + 1, first[0]), first[1])
    if op.name in ("sum", "cumsum"):
        return _summed(e, op, name)
    if op.name == "clamp":
        return _clamped(e, op)
    if op.name in ("mod", "floordiv"):
        given, n = tensor_bounds(e, op.inputs[0]), op.get("value")
        return (0, n - 1) if op.name == "mod" else None if given is None else (given[0] // n, given[1] // n)
    return _arithmetic(op, [tensor_bounds(e, i) for i in op.inputs], _numbers(e, op.get("value")))


def _exchanged(e: Emitter, op: Op, name: str) -> Bounds:
    """What other ranks have: what this one has if all run this program, else what the dtype holds."""
    own = NARROW.get(e.tensors[name].dtype)
    if not op.inputs or (op.name not in EXCHANGES and op.get("op", "sum") not in ("max", "min")):
        return own if op.name in EXCHANGES else None
    return tensor_bounds(e, op.inputs[0]) if e.shared else own


def _numbers(e: Emitter, value: object) -> Bounds:
    """Of an attribute, on all ranks."""
    column = e.column(value)
    found = [int(v) for v in column if isinstance(v, int)]
    return (min(found), max(found)) if found and len(found) == len(column) else None


def _summed(e: Emitter, op: Op, name: str) -> Bounds:
    found = tensor_bounds(e, op.inputs[0])
    before, after = math.prod(e.shape(str(op.inputs[0]))), math.prod(e.shape(name))
    if found is None:
        return None
    n = before if op.name == "cumsum" else before // max(after, 1)
    return min(found[0] * n, 0), max(found[1] * n, 0)


def _clamped(e: Emitter, op: Op) -> Bounds:
    given = tensor_bounds(e, op.inputs[0])
    low, high = (None if op.get(n) is None else _numbers(e, op.get(n)) for n in ("min", "max"))
    if low is not None and high is not None:
        return min(low[0], high[0]), max(low[1], high[1])
    if given is None or (op.get("min") is not None) == (low is None) or (op.get("max") is not None) == (high is None):
        return None
    if low is not None:
        return max(given[0], low[0]), max(given[1], low[1])
    return (given[0], given[1]) if high is None else (min(given[0], high[0]), min(given[1], high[1]))


def _corners(a: int, b: int, c: int, d: int) -> tuple[int, int]:
    found = (a * c, a * d, b * c, b * d)
    return min(found), max(found)


_ARITHMETIC: Final[dict[str, Callable[[int, int, int, int], tuple[int, int]]]] = {
    "add": lambda a, b, c, d: (a + c, b + d),
    "sub": lambda a, b, c, d: (a - d, b - c),
    "mul": _corners,
    "maximum": lambda a, b, c, d: (max(a, c), max(b, d)),
    "minimum": lambda a, b, c, d: (min(a, c), min(b, d)),
}


def _arithmetic(op: Op, found: Sequence[Bounds], value: Bounds) -> Bounds:
    """Interval arithmetic."""
    if op.name == "neg" and found[0] is not None:
        return -found[0][1], -found[0][0]
    if op.name == "abs" and found[0] is not None:
        return 0, max(abs(found[0][0]), abs(found[0][1]))
    if op.name == "sign":
        return -1, 1
    if op.name == "square" and found[0] is not None:
        return _corners(*(max(map(abs, found[0])),) * 2, 0, max(map(abs, found[0])))
    if op.name in ("mod", "floordiv") and found[0] is not None and value is not None and value[0] == value[1]:
        low, high = found[0][0] // value[0], found[0][1] // value[0]
        return (low, high) if op.name == "floordiv" else (0, min(value[0] - 1, found[0][1])) if low >= 0 else (0, value[0] - 1)
    both = [*found, value] if len(found) == 1 else list(found)
    if op.get("alpha", 1) != 1 or len(both) != 2 or both[0] is None or both[1] is None or op.name not in _ARITHMETIC:
        return None
    return _ARITHMETIC[op.name](*both[0], *both[1])


def hull(found: Sequence[Bounds]) -> Bounds:
    """Of integers with one of these bounds."""
    known = [b for b in found if b is not None]
    return (min(a for a, _ in known), max(b for _, b in known)) if known and len(known) == len(found) else None


__all__ = ["EXCHANGES", "NARROW", "RANGES", "Bounds", "fits", "holds", "hull", "tensor_bounds", "wraps"]
