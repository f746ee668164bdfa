"""Operators that move elements without computing: views, slices, joins, copies."""

from __future__ import annotations

from trainverify.ops.table import dtype_kind, op
from trainverify.primitives import node as F
from trainverify.primitives.node import Node

_SHAPING = "shape"


@op("identity", _SHAPING)
def identity(x: Node) -> Node:
    """The tensor itself."""
    return x


@op("contiguous", _SHAPING)
def contiguous(x: Node) -> Node:
    """The tensor itself; memory layout has no meaning here."""
    return x


@op("detach", _SHAPING)
def detach(x: Node) -> Node:
    """The tensor itself; no gradient flows back."""
    return F.detach(x)


@op("multiref", _SHAPING, example="x[a,b]; times=2")
def multiref(x: Node, *, times: int) -> tuple[Node, ...]:
    """`times` copies of a tensor; its gradient is the sum of theirs."""
    return (x,) * times


@op("to", _SHAPING, example="x[a,b]; dtype='i64'")
def to(x: Node, *, dtype: str) -> Node:
    """Another dtype. Between floats this is the identity; a float becomes an integer by truncation."""
    return F.cast(x, dtype_kind(dtype))


@op("float", _SHAPING, example="x:i64[a,b]")
def float_(x: Node, *, dtype: str = "f32") -> Node:
    """As real numbers; the identity on floats."""
    if dtype_kind(dtype) != "real":
        raise F.ShapeError(f"{dtype} is not a float type")
    return F.cast(x, "real")


@op("reshape", _SHAPING, example="x[a=2,b=3,c]; shape=(6, 5)")
def reshape(x: Node, *, shape: tuple[int, ...]) -> Node:
    """The same elements in row-major order under another shape; one size may be −1."""
    return F.reshape(x, shape)


@op("view", _SHAPING, example="x[d=6,c=5]; shape=(2, 3, 5)")
def view(x: Node, *, shape: tuple[int, ...]) -> Node:
    """The same elements in row-major order under another shape; one size may be −1."""
    return F.reshape(x, shape)


@op("transpose", _SHAPING)
def transpose(x: Node, *, dim0: int = 0, dim1: int = 1) -> Node:
    """Two dimensions exchanged."""
    order = list(range(x.ndim))
    a, b = F.axis(dim0, x.ndim), F.axis(dim1, x.ndim)
    order[a], order[b] = b, a
    return F.transpose(x, order)


@op("permute", _SHAPING, example="x[a,b,c]; dims=(2, 0, 1)")
def permute(x: Node, *, dims: tuple[int, ...]) -> Node:
    """Dimensions in another order."""
    return F.transpose(x, dims)


@op("slice", _SHAPING, example="x[a,d=8]; dim=1, start=1, stop=6, step=2")
def slice_(x: Node, *, dim: int = 0, start: int = 0, stop: int, step: int = 1) -> Node:
    """x[start:stop:step] along one dimension."""
    return F.take(x, dim, start, stop, step)


@op("concat", _SHAPING, example="x[a,b] y[c,b]")
def concat(*xs: Node, dim: int = 0) -> Node:
    """Tensors one after the other along a dimension."""
    return F.concat(xs, dim)


@op("stack", _SHAPING, example="x[a,b] y[a,b]")
def stack(*xs: Node, dim: int = 0) -> Node:
    """Tensors of one shape side by side along a new dimension."""
    if not xs:
        raise F.ShapeError("stack of nothing")
    d = F.axis(dim, xs[0].ndim + 1)
    return F.concat([unsqueezed(x, d) for x in xs], d)


@op("split", _SHAPING, example="x[c=5,b]; sizes=(2, 3)")
def split(x: Node, *, sizes: tuple[int, ...], dim: int = 0) -> tuple[Node, ...]:
    """Consecutive pieces of the given sizes along a dimension."""
    d = F.axis(dim, x.ndim)
    if sum(sizes) != x.shape[d] or any(s < 0 for s in sizes):
        raise F.ShapeError(f"sizes {list(sizes)} do not add up to {x.shape[d]}")
    pieces = []
    start = 0
    for size in sizes:
        pieces.append(F.take(x, d, start, start + size))
        start += size
    return tuple(pieces)


@op("chunk", _SHAPING, example="x[d=6,b]; chunks=2, index=1")
def chunk(x: Node, *, chunks: int, index: int, dim: int = 0) -> Node:
    """Piece `index` of `chunks` along a dimension; the pieces have ⌈size/chunks⌉ elements, the last one the rest."""
    d = F.axis(dim, x.ndim)
    size = -(-x.shape[d] // chunks)
    if not 0 <= index * size < max(x.shape[d], 1):
        raise F.ShapeError(f"no piece {index} of {chunks} of a dimension of size {x.shape[d]}")
    return F.take(x, d, index * size, min((index + 1) * size, x.shape[d]))


@op("select", _SHAPING, example="x[a,b]; dim=1, index=2")
def select(x: Node, *, dim: int, index: int) -> Node:
    """One position of a dimension, which is gone afterwards; a negative index counts from the end."""
    d = F.axis(dim, x.ndim)
    i = F.axis(index, x.shape[d])
    return F.reshape(F.take(x, d, i, i + 1), (*x.shape[:d], *x.shape[d + 1 :]))


@op("unbind", _SHAPING, example="x[a,2]; dim=1")
def unbind(x: Node, *, dim: int = 0) -> tuple[Node, ...]:
    """All positions of a dimension, each without that dimension."""
    d = F.axis(dim, x.ndim)
    return tuple(F.reshape(F.take(x, d, i, i + 1), (*x.shape[:d], *x.shape[d + 1 :])) for i in range(x.shape[d]))


def unsqueezed(x: Node, dim: int) -> Node:
    d = F.axis(dim, x.ndim + 1)
    return F.reshape(x, (*x.shape[:d], 1, *x.shape[d:]))


@op("unsqueeze", _SHAPING, example="x[a,b]; dim=1")
def unsqueeze(x: Node, *, dim: int) -> Node:
    """A new dimension of size 1."""
    return unsqueezed(x, dim)


@op("squeeze", _SHAPING, example="x[a,1,b]; dim=1")
def squeeze(x: Node, *, dim: int | tuple[int, ...] | None = None) -> Node:
    """Without the named dimensions of size 1 (all of them by default)."""
    named = range(x.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    gone = {F.axis(d, x.ndim) for d in named}
    return F.reshape(x, tuple(s for d, s in enumerate(x.shape) if d not in gone or s != 1))


@op("expand", _SHAPING, example="x[a,1]; shape=(5, 4)")
def expand(x: Node, *, shape: tuple[int, ...]) -> Node:
    """Dimensions of size 1 repeated to the given sizes; −1 keeps a size, new dimensions come first."""
    lead = len(shape) - x.ndim
    if lead < 0 or -1 in shape[:lead]:
        raise F.ShapeError(f"cannot expand {list(x.shape)} to {list(shape)}")
    return F.expand(x, tuple(x.shape[d - lead] if s == -1 else s for d, s in enumerate(shape)))


@op("repeat", _SHAPING, example="x[a,b]; sizes=(2, 1)")
def repeat(x: Node, *, sizes: tuple[int, ...]) -> Node:
    """The whole tensor `sizes[d]` times along dimension d; new dimensions come first."""
    if len(sizes) < x.ndim:
        raise F.ShapeError(f"repeat {list(sizes)} of {x.ndim} dimensions")
    shape = (1,) * (len(sizes) - x.ndim) + x.shape
    pairs = [n for size in shape for n in (1, size)]
    wide = [n for times, size in zip(sizes, shape, strict=True) for n in (times, size)]
    return F.reshape(F.expand(F.reshape(x, tuple(pairs)), tuple(wide)), tuple(t * s for t, s in zip(sizes, shape, strict=True)))


@op("repeat_interleave", _SHAPING, example="x[a,b]; repeats=2, dim=0")
def repeat_interleave(x: Node, *, repeats: int, dim: int) -> Node:
    """Every position of a dimension `repeats` times in a row."""
    d = F.axis(dim, x.ndim)
    spread = unsqueezed(x, d + 1)
    wide = F.expand(spread, (*x.shape[: d + 1], repeats, *x.shape[d + 1 :]))
    return F.reshape(wide, (*x.shape[:d], x.shape[d] * repeats, *x.shape[d + 1 :]))


@op("flip", _SHAPING, example="x[a,b]; dims=(1,)")
def flip(x: Node, *, dims: tuple[int, ...]) -> Node:
    """The order reversed along the given dimensions."""
    for d in dims:
        x = F.flip(x, d)
    return x


@op("roll", _SHAPING, example="x[a,b]; shifts=(1,), dims=(1,)")
def roll(x: Node, *, shifts: tuple[int, ...], dims: tuple[int, ...]) -> Node:
    """Elements moved up by `shifts` along `dims`; what leaves at the end comes back at the start."""
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[F.axis(dim, x.ndim)]
        cut = -shift % size
        x = F.concat([F.take(x, dim, cut, size), F.take(x, dim, 0, cut)], dim) if cut else x
    return x


@op("pad", _SHAPING, example="x[a,b]; pads=(1, 2)")
def pad(x: Node, *, pads: tuple[int, ...], value: float = 0) -> Node:
    """Copies of a literal before and after; `pads` lists (before, after) from the last dimension on, negative ones cut off."""
    if len(pads) % 2 or len(pads) > 2 * x.ndim:
        raise F.ShapeError(f"padding {list(pads)} for {x.ndim} dimensions")
    for i in range(0, len(pads), 2):
        d = x.ndim - 1 - i // 2
        low, high = pads[i : i + 2]
        x = F.take(x, d, max(-low, 0), x.shape[d] - max(-high, 0))
        x = F.pad(x, d, max(low, 0), max(high, 0), value)
    return x


@op("arange", _SHAPING, example="; start=2, stop=8")
def arange(*, start: int = 0, stop: int, step: int = 1, dtype: str = "i64") -> Node:
    """start, start + step, … below stop."""
    return F.cast(F.iota(len(range(start, stop, step)), start, step), dtype_kind(dtype))


@op("full", _SHAPING, example="; shape=(2, 3), value=0")
def full(*, shape: tuple[int, ...], value: bool | float, dtype: str = "f32") -> Node:
    """One literal everywhere."""
    return F.full(value, shape, dtype_kind(dtype))
