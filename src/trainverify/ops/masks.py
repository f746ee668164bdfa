"""Masks: booleans that say who may see whom. True keeps an element."""

from __future__ import annotations

import math

from trainverify.ops.shaping import unsqueezed
from trainverify.ops.table import op
from trainverify.primitives import node as F
from trainverify.primitives.node import Node

_MASK = "mask"


def causal(queries: int, keys: int, query_offset: int = 0, key_offset: int = 0, window: int | None = None) -> Node:
    """bool[queries, keys]: key position ≤ query position, and less than `window` behind it."""
    row = F.reshape(F.iota(queries, query_offset), (queries, 1))
    column = F.iota(keys, key_offset)
    seen = column <= row
    return seen if window is None else seen & (F.reshape(F.iota(queries, query_offset - window), (queries, 1)) < column)


@op("create_mask", _MASK, example="; queries=3, keys=5, query_offset=2")
def create_mask(*, queries: int, keys: int, query_offset: int = 0, key_offset: int = 0, window: int | None = None) -> Node:
    """Causal mask bool[queries, keys] of positions starting at the offsets: a query sees keys up to itself, or the last `window`."""
    return causal(queries, keys, query_offset, key_offset, window)


@op("causal_bias", _MASK, example="; queries=3, keys=5")
def causal_bias(*, queries: int, keys: int) -> Node:
    """What is added to scores [batch, heads, queries, keys]: 0 for keys up to the query's own position, −∞ for later ones."""
    return F.reshape(F.select(causal(queries, keys), 0, -math.inf), (1, 1, queries, keys))


@op("segment_mask", _MASK, example="query_segments:i64[b,s] key_segments:i64[b,t]")
def segment_mask(query_segments: Node, key_segments: Node, *, is_causal: bool = False, query_offset: int = 0, key_offset: int = 0) -> Node:
    """Mask of packed sequences from segment ids [b, s] and [b, t]: bool[b, s, t], true within a segment (and causal if asked)."""
    same = F.call("eq", unsqueezed(query_segments, -1), unsqueezed(key_segments, -2))
    return same & causal(same.shape[-2], same.shape[-1], query_offset, key_offset) if is_causal else same


@op("apply_mask", _MASK, example="x[a,b] mask:bool[a,b]")
def apply_mask(x: Node, mask: Node, *, value: float = -math.inf) -> Node:
    """x where the mask is true, else the literal `value`."""
    return F.select(mask, x, value)


@op("masked_fill", _MASK, example="x[a,b] mask:bool[a,b]; value=0")
def masked_fill(x: Node, mask: Node, *, value: float) -> Node:
    """The literal `value` where the mask is true, else x."""
    return F.select(mask, value, x)


def triangle(x: Node, diagonal: int) -> Node:
    """bool[rows, columns]: on or below a diagonal."""
    rows, columns = x.shape[-2:]
    last = F.reshape(F.iota(rows), (rows, 1))  # an addition: rows do not begin elsewhere among the columns
    return F.iota(columns) <= (last + diagonal if diagonal else last)


@op("tril", _MASK)
def tril(x: Node, *, diagonal: int = 0) -> Node:
    """The part on and below a diagonal of the last two dimensions; zeros elsewhere."""
    return F.select(triangle(x, diagonal), x, 0)


@op("triu", _MASK)
def triu(x: Node, *, diagonal: int = 0) -> Node:
    """The part on and above a diagonal of the last two dimensions; zeros elsewhere."""
    return F.select(triangle(x, diagonal - 1), 0, x)
