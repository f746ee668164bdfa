"""Primitive nodes: the small tensor language in which every operator is defined.

A `Node` is one application of a primitive. Its constructor functions are the *shape domain*: they
check sizes and kinds and compute the result's. Everything else (numbers, balls, derivatives, axes)
interprets the finished nodes, so nothing about a primitive's shape is written twice.

Sizes live in node attributes and in `shape`; literals live in `const` nodes only. Shrinking a
program therefore never touches a literal (a mean over 4096 still divides by 4096).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

from trainverify.primitives.scalars import SCALARS, is_finite

Kind = str  # "real" | "int" | "bool"
Literal = int | Fraction | float | bool
Shape = tuple[int, ...]
WORD: Final = 1 << 63
_RANK: Final = {"bool": 0, "int": 1, "real": 2}


class ShapeError(Exception):
    """Sizes or kinds of a primitive's arguments do not fit."""


class Node:
    """One application of a primitive; compared by identity."""

    __slots__ = ("args", "attrs", "kind", "prim", "shape")

    def __init__(self, prim: str, args: tuple[Node, ...], attrs: tuple[Any, ...], shape: Shape, kind: Kind):
        self.prim = prim
        self.args = args
        self.attrs = attrs
        self.shape = shape
        self.kind = kind

    def __repr__(self) -> str:
        return f"{self.prim}{self.attrs}{list(self.shape)}"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    # Arithmetic reads as it does on paper; broadcasting is NumPy's.
    def __add__(self, other: Operand) -> Node:
        return call("add", self, other)

    def __radd__(self, other: Operand) -> Node:
        return call("add", other, self)

    def __sub__(self, other: Operand) -> Node:
        return call("sub", self, other)

    def __rsub__(self, other: Operand) -> Node:
        return call("sub", other, self)

    def __mul__(self, other: Operand) -> Node:
        return call("mul", self, other)

    def __rmul__(self, other: Operand) -> Node:
        return call("mul", other, self)

    def __truediv__(self, other: Operand) -> Node:
        return call("div", self, other)

    def __rtruediv__(self, other: Operand) -> Node:
        return call("div", other, self)

    def __neg__(self) -> Node:
        return call("neg", self)

    def __lt__(self, other: Operand) -> Node:
        return call("lt", self, other)

    def __le__(self, other: Operand) -> Node:
        return call("le", self, other)

    def __gt__(self, other: Operand) -> Node:
        return call("lt", other, self)

    def __ge__(self, other: Operand) -> Node:
        return call("le", other, self)

    def __and__(self, other: Operand) -> Node:
        return call("and", self, other)

    def __or__(self, other: Operand) -> Node:
        return call("or", self, other)

    def __invert__(self) -> Node:
        return call("not", self)


Operand = Node | int | float | Fraction | bool


def axis(dim: int, ndim: int) -> int:
    """A dimension counted from either end, as a plain index."""
    if not -ndim <= dim < ndim:
        raise ShapeError(f"dimension {dim} of a tensor with {ndim} dimensions")
    return dim % ndim


def input_(index: int, shape: Shape, kind: Kind) -> Node:
    return Node("input", (), (index,), shape, kind)


def const(value: Literal) -> Node:
    kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "real"
    return Node("const", (), (value,), (), kind)


def as_node(value: Operand) -> Node:
    return value if isinstance(value, Node) else const(value)


def full(value: Literal, shape: Shape, kind: Kind | None = None) -> Node:
    return expand(cast(const(value), kind or const(value).kind), shape)


def iota(size: int, start: int = 0, step: int = 1) -> Node:
    """start, start+step, … (`size` of them), as integers."""
    return Node("iota", (), (start, step), (size,), "int")


def call(fn: str, *operands: Operand, param: Any = None) -> Node:
    """`map`: a scalar function applied elementwise, after broadcasting."""
    row = SCALARS[fn]
    nodes = [as_node(o) for o in operands]
    if len(nodes) != row.arity:
        raise ShapeError(f"{fn} takes {row.arity} arguments, got {len(nodes)}")
    kind = max((n.kind for n in nodes), key=_RANK.__getitem__, default="real")
    if row.takes == "real":
        kind = "real"
    elif row.takes == "number" and kind == "bool":
        kind = "int"
    elif row.takes == "bool" and any(n.kind != "bool" for n in nodes):
        raise ShapeError(f"{fn} takes booleans")
    elif row.takes == "int" and kind == "real":
        raise ShapeError(f"{fn} takes integers")
    if row.takes != "any":
        nodes = [cast(n, kind) for n in nodes]
    shape = broadcast_shapes(*(n.shape for n in nodes))
    nodes = [expand(n, shape) for n in nodes]
    attrs = (fn,) if param is None else (fn, param)
    return Node("map", tuple(nodes), attrs, shape, row.result or kind)


def cast(x: Node, kind: Kind) -> Node:
    if x.kind == kind:
        return x
    if x.prim == "const" and kind == "real" and x.kind == "int":
        return Node("const", (), x.attrs, (), "real")
    return Node("map", (x,), ("as_" + kind,), x.shape, kind)


def power(x: Operand, exponent: Literal) -> Node:
    """x ** exponent for a literal exponent."""
    if not is_finite(exponent):
        raise ShapeError(f"an exponent that is {exponent}")
    if isinstance(exponent, float | Fraction) and exponent == int(exponent):
        exponent = int(exponent)
    if isinstance(exponent, float) and Fraction(exponent).denominator <= 64:
        exponent = Fraction(exponent)
    if exponent == 1:
        return as_node(x)
    base = as_node(x)
    if not isinstance(exponent, int) or exponent < 0:
        base = cast(base, "real")
    return call("pow", base, param=exponent)


def detach(x: Node) -> Node:
    """x with derivative zero; only derivatives can tell, so finished operators no longer contain it."""
    return call("detach", x)


def select(condition: Node, a: Operand, b: Operand) -> Node:
    """condition ? a : b, elementwise; the branch not taken does not matter, infinite or not."""
    a, b = as_node(a), as_node(b)
    if condition.kind != "bool":
        raise ShapeError("select needs a boolean condition")
    kind = max(a.kind, b.kind, key=_RANK.__getitem__)
    a, b = cast(a, kind), cast(b, kind)
    shape = broadcast_shapes(condition.shape, a.shape, b.shape)
    return Node("select", (expand(condition, shape), expand(a, shape), expand(b, shape)), (), shape, kind)


def broadcast_shapes(*shapes: Shape) -> Shape:
    ndim = max((len(s) for s in shapes), default=0)
    padded = [(1,) * (ndim - len(s)) + s for s in shapes]
    result = []
    for sizes in zip(*padded, strict=True):
        wide = {s for s in sizes if s != 1}
        if len(wide) > 1:
            raise ShapeError(f"shapes {' and '.join(str(list(s)) for s in shapes)} do not broadcast")
        result.append(wide.pop() if wide else 1)
    return tuple(result)


def expand(x: Node, shape: Shape) -> Node:
    """NumPy broadcasting to `shape`: new leading dimensions, dimensions of size 1 repeated."""
    if x.shape == shape:
        return x
    if broadcast_shapes(x.shape, shape) != shape:
        raise ShapeError(f"shape {list(x.shape)} does not broadcast to {list(shape)}")
    lead = len(shape) - x.ndim
    keep = [d for d in range(x.ndim) if x.shape[d] == shape[lead + d]]
    slim = reshape(x, tuple(x.shape[d] for d in keep))
    return broadcast(slim, shape, tuple(lead + d for d in keep))


def broadcast(x: Node, shape: Shape, dims: tuple[int, ...]) -> Node:
    """Dimension i of x becomes dimension dims[i]; x does not depend on the others."""
    if tuple(shape[d] for d in dims) != x.shape or list(dims) != sorted(set(dims)):
        raise ShapeError(f"broadcast of {list(x.shape)} to {list(shape)} along {dims}")
    return x if shape == x.shape else Node("broadcast", (x,), (dims,), shape, x.kind)


def contract(spec: str, *operands: Node) -> Node:
    """Einstein summation: `"... k, o k -> ... o"`; names are words, `...` is the same in all operands."""
    left, arrow, right = spec.partition("->")
    terms = [t.split() for t in left.split(",")]
    if not arrow or len(terms) != len(operands):
        raise ShapeError(f"contract {spec!r} with {len(operands)} operands")
    rest = max((x.ndim - (len(t) - 1) for t, x in zip(terms, operands, strict=True) if "..." in t), default=0)
    if rest < 0:
        raise ShapeError(f"contract {spec!r}: too few dimensions")
    dots = [f".{i}" for i in range(rest)]

    def names(term: list[str]) -> list[str]:
        return [n for w in term for n in (dots if w == "..." else [w])]

    nodes = []
    expanded = []
    for term, x in zip(terms, operands, strict=True):
        labels = names(term)
        if len(labels) != x.ndim:
            raise ShapeError(f"contract {spec!r}: operand {list(x.shape)} has {x.ndim} dimensions, not {len(labels)}")
        nodes.append(x)
        expanded.append(labels)
    return contract_labels(nodes, expanded, names(right.split()))


def contract_labels(operands: Sequence[Node], labels: Sequence[Sequence[str]], out: Sequence[str]) -> Node:
    """`contract` with its labels already written out."""
    number: dict[str, int] = {}
    sizes: dict[int, int] = {}
    terms = []
    for x, term in zip(operands, labels, strict=True):
        ids = tuple(number.setdefault(n, len(number)) for n in term)
        if len(set(ids)) != len(ids):
            raise ShapeError("a label may appear once in each operand of contract")
        for i, size in zip(ids, x.shape, strict=True):
            if sizes.setdefault(i, size) != size:
                raise ShapeError(f"contract: sizes {sizes[i]} and {size} of one label differ")
        terms.append(ids)
    if any(n not in number for n in out) or len(set(out)) != len(out):
        raise ShapeError("contract: every result label must come from an operand, once")
    target = tuple(number[n] for n in out)
    kind = max((x.kind for x in operands), key=_RANK.__getitem__)
    kind = "int" if kind == "bool" else kind
    args = tuple(cast(x, kind) for x in operands)
    if len(args) == 1 and set(terms[0]) == set(target):
        return transpose(args[0], tuple(terms[0].index(i) for i in target))
    return Node("contract", args, (tuple(terms), target), tuple(sizes[i] for i in target), kind)


def total(x: Node, dims: Iterable[int], keepdim: bool = False) -> Node:
    """Sum over dimensions."""
    gone = {axis(d, x.ndim) for d in dims}
    labels = [str(i) for i in range(x.ndim)]
    result = contract_labels([x], [labels], [n for i, n in enumerate(labels) if i not in gone])
    return reshape(result, tuple(1 if i in gone else s for i, s in enumerate(x.shape))) if keepdim else result


def reduce(fn: str, x: Node, dims: Iterable[int], keepdim: bool = False) -> Node:
    """max, min or prod over dimensions (a sum is `total`, a contraction)."""
    if fn not in ("max", "min", "prod"):
        raise ShapeError(f"no reduction {fn!r}")
    gone = tuple(sorted({axis(d, x.ndim) for d in dims}))
    if any(x.shape[d] == 0 for d in gone):
        raise ShapeError(f"{fn} over an empty dimension")
    shape = tuple(s for i, s in enumerate(x.shape) if i not in gone)
    result = Node("reduce", (x,), (fn, gone), shape, x.kind) if gone else x
    return reshape(result, tuple(1 if i in gone else s for i, s in enumerate(x.shape))) if keepdim else result


def reshape(x: Node, shape: Shape) -> Node:
    if -1 in shape:
        known = math.prod(s for s in shape if s != -1)
        if shape.count(-1) > 1 or known == 0 or math.prod(x.shape) % known:
            raise ShapeError(f"cannot view {list(x.shape)} as {list(shape)}")
        shape = tuple(math.prod(x.shape) // known if s == -1 else s for s in shape)
    if math.prod(shape) != math.prod(x.shape) or any(s < 0 for s in shape):
        raise ShapeError(f"cannot view {list(x.shape)} as {list(shape)}")
    return x if shape == x.shape else Node("reshape", (x,), (), shape, x.kind)


def transpose(x: Node, perm: Sequence[int]) -> Node:
    order = tuple(axis(p, x.ndim) for p in perm)
    if sorted(order) != list(range(x.ndim)):
        raise ShapeError(f"{tuple(perm)} is not a permutation of {x.ndim} dimensions")
    if order == tuple(range(x.ndim)):
        return x
    return Node("transpose", (x,), (order,), tuple(x.shape[p] for p in order), x.kind)


def move(x: Node, source: int, target: int) -> Node:
    """Move one dimension to another place."""
    order = [d for d in range(x.ndim) if d != axis(source, x.ndim)]
    order.insert(axis(target, x.ndim), axis(source, x.ndim))
    return transpose(x, order)


def take(x: Node, dim: int, start: int, stop: int, step: int = 1) -> Node:
    """`slice` of one dimension: start, start+step, … below stop (step may be negative: then down to above stop)."""
    d = axis(dim, x.ndim)
    size = len(range(start, stop, step))
    last = start + (size - 1) * step
    if size and not (0 <= start < x.shape[d] and 0 <= last < x.shape[d]):
        raise ShapeError(f"slice {start}:{stop}:{step} of a dimension of size {x.shape[d]}")
    if (start, size, step) == (0, x.shape[d], 1):
        return x
    return Node("slice", (x,), (d, start, step), (*x.shape[:d], size, *x.shape[d + 1 :]), x.kind)


def flip(x: Node, dim: int) -> Node:
    return take(x, dim, x.shape[axis(dim, x.ndim)] - 1, -1, -1)


def concat(parts: Sequence[Node], dim: int) -> Node:
    if not parts:
        raise ShapeError("concat of nothing")
    d = axis(dim, parts[0].ndim)
    kind = max((p.kind for p in parts), key=_RANK.__getitem__)
    nodes = tuple(cast(p, kind) for p in parts)
    first = nodes[0].shape
    for p in nodes:
        if p.ndim != len(first) or any(a != b for i, (a, b) in enumerate(zip(p.shape, first, strict=True)) if i != d):
            raise ShapeError(f"concat of {list(first)} and {list(p.shape)} along {d}")
    if len(nodes) == 1:
        return nodes[0]
    return Node("concat", nodes, (d,), (*first[:d], sum(p.shape[d] for p in nodes), *first[d + 1 :]), kind)


def pad(x: Node, dim: int, low: int, high: int, value: Literal = 0) -> Node:
    """`low` copies of a literal before and `high` after, along one dimension."""
    d = axis(dim, x.ndim)
    if low < 0 or high < 0:
        raise ShapeError("negative padding")
    if low == high == 0:
        return x
    return Node("pad", (x,), (d, low, high, value), (*x.shape[:d], x.shape[d] + low + high, *x.shape[d + 1 :]), x.kind)


def one_hot(ids: Node, depth: int, start: int = 0) -> Node:
    """A new last dimension: 1 where ids = start + position, else 0. An id out of range gives zeros."""
    if ids.kind != "int":
        raise ShapeError("one_hot needs integers")
    return Node("one_hot", (ids,), (start,), (*ids.shape, depth), "real")


def gather(x: Node, ids: Node, dim: int) -> Node:
    """y[…, j, …] = x[…, ids[…, j, …], …]: like one_hot and contract, but 0·∞ never arises. Out of range gives 0."""
    d = axis(dim, x.ndim)
    if ids.kind != "int" or ids.ndim != x.ndim:
        raise ShapeError("gather needs integer ids with as many dimensions as the tensor")
    if any(a != b for i, (a, b) in enumerate(zip(x.shape, ids.shape, strict=True)) if i != d):
        raise ShapeError(f"gather: {list(x.shape)} and ids {list(ids.shape)} differ outside dimension {d}")
    return Node("gather", (x, ids), (d,), ids.shape, x.kind)


def check_integers(nodes: Iterable[Node]) -> None:
    """Refuse integers that no tensor can hold: all have 64 bits."""
    for node in nodes:
        found: tuple[int, ...] = ()
        if node.prim == "const" and node.kind == "int":
            found = node.attrs
        elif node.prim == "iota":
            start, step = node.attrs
            found = (start, start + step * max(node.shape[0] - 1, 0))
        elif node.prim == "pad" and node.kind == "int":
            found = (node.attrs[3],)
        for value in found:
            if not -WORD <= value < WORD:
                shown = value if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"
                raise ShapeError(f"{shown} does not fit into 64 bits")


ROWWISE: Final[dict[str, Kind | None]] = {"cumsum": None, "sort": None, "argsort": "int", "argmax": "int", "argmin": "int"}


def rowwise(fn: str, x: Node, dim: int, descending: bool = False) -> Node:
    """A function of whole rows along one dimension: cumsum, sort, argsort (stable), argmax, argmin (first)."""
    d = axis(dim, x.ndim)
    x = cast(x, "int") if x.kind == "bool" else x
    kind = ROWWISE[fn] or x.kind
    shape = x.shape
    if fn in ("argmax", "argmin"):
        if x.shape[d] == 0:
            raise ShapeError(f"{fn} over an empty dimension")
        shape = (*x.shape[:d], *x.shape[d + 1 :])
    return Node("rowwise", (x,), (fn, d, descending), shape, kind)


def topological(outputs: Iterable[Node]) -> list[Node]:
    """All nodes that the outputs need, arguments first."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[Node | None] = list(outputs)
    stack.reverse()
    while stack:
        node = stack.pop()
        if node is None:  # all arguments of the one below are there
            node = stack.pop()
            assert node is not None
            order.append(node)
        elif node not in seen:
            seen.add(node)
            if node.args:
                stack += (node, None)
                stack += reversed(node.args)
            else:
                order.append(node)
    return order


@lru_cache(maxsize=1 << 13)
def ordered(outputs: tuple[Node, ...]) -> tuple[Node, ...]:
    """The same of nodes that are run again and again."""
    return tuple(topological(outputs))


@lru_cache(maxsize=1 << 13)
def wired(outputs: tuple[Node, ...]) -> tuple[tuple[Node, ...], tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """All nodes that the outputs need, where their arguments are among those, and where the outputs are."""
    order = ordered(outputs)
    at = {id(node): k for k, node in enumerate(order)}
    return order, tuple([tuple([at[id(a)] for a in node.args]) for node in order]), tuple([at[id(o)] for o in outputs])


def rebuild(outputs: Sequence[Node], change: Callable[[Node, tuple[Node, ...]], Node] | None = None) -> list[Node]:
    """The same nodes with equal ones shared; `change` may replace a node given its new arguments."""
    known: dict[tuple[Any, ...], Node] = {}
    new: dict[int, Node] = {}
    for node in topological(outputs):
        args = tuple(new[id(a)] for a in node.args)
        made = change(node, args) if change else Node(node.prim, args, node.attrs, node.shape, node.kind)
        # repr tells 1, 1.0, True and Fraction(1) apart, which compare equal
        key = (made.prim, tuple(id(a) for a in made.args), repr(made.attrs), made.shape, made.kind)
        new[id(node)] = known.setdefault(key, made)
    return [new[id(o)] for o in outputs]
