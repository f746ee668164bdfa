"""Attention and rotary position embedding."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from trainverify.ops.masks import causal
from trainverify.ops.reductions import shift_of
from trainverify.ops.shaping import unsqueezed
from trainverify.ops.table import op
from trainverify.primitives import node as F
from trainverify.primitives.node import Node

_ATTENTION = "attention"


@op("attention", _ATTENTION, example="q[b,h,s,d] k[b,h,t,d] v[b,h,t,e]; is_causal=True")
def attention(
    q: Node,
    k: Node,
    v: Node,
    mask: Node | None = None,
    sinks: Node | None = None,
    *,
    is_causal: bool = False,
    query_offset: int = 0,
    key_offset: int = 0,
    scale: float | None = None,
) -> tuple[Node, Node]:
    """softmax(scale·q·kᵀ)·v for q [b, h, s, d], k [b, g, t, d], v [b, g, t, e]; h/g query heads share one of keys and values.

    A boolean mask keeps where true, a real one is added; `is_causal` compares positions from the offsets on;
    scale is d^(−1/2) by default. Every head's sink [h] is the score of one more key whose value is 0.
    Returns the result [b, h, s, e] and logsumexp [b, h, s]; a query that sees no key and no sink has neither."""
    if any(x.ndim != 4 for x in (q, k, v)) or q.shape[1] % k.shape[1]:
        raise F.ShapeError("attention needs q, k, v [batch, heads, sequence, size], heads of q a multiple of those of k")
    b, h, s, _ = q.shape
    g, t = k.shape[1:3]
    scores = F.reshape(scores_of(q, k, scale), (b, h, s, t))
    scores, kept = _masked(scores, causal(s, t, query_offset, key_offset) if is_causal else None, mask)
    shift = shift_of(scores, [-1])  # of the masked ones too: any shift will do
    e = F.call("exp", scores - shift)
    e = e if kept is None else F.select(kept, e, 0)
    weight = F.total(e, [-1], keepdim=True)
    if sinks is not None:
        weight = weight + F.call("exp", _of_heads(sinks, h) - shift)
    mixed = F.contract("b g r s t, b g t e -> b g r s e", F.reshape(e / weight, (b, g, h // g, s, t)), v)
    return F.reshape(mixed, (b, h, s, v.shape[-1])), F.reshape(shift + F.call("log", weight), (b, h, s))


def _masked(scores: Node, kept: Node | None, mask: Node | None) -> tuple[Node, Node | None]:
    """Scores with a real mask added, and which of them count."""
    if mask is None:
        return scores, kept
    if mask.kind == "bool":
        return scores, mask if kept is None else kept & mask
    return scores + mask, kept


def _of_heads(sinks: Node, heads: int) -> Node:
    if sinks.shape != (heads,):
        raise F.ShapeError(f"sinks {list(sinks.shape)} for {heads} heads")
    return F.reshape(sinks, (1, heads, 1, 1))


def scores_of(q: Node, k: Node, scale: float | None) -> Node:
    """scale·q·kᵀ [b, g, h/g, s, t]."""
    (b, h, s, d), g = q.shape, k.shape[1]
    factor = F.power(F.const(d), Fraction(-1, 2)) if scale is None else F.as_node(scale)
    return F.contract("b g r s d, b g t d -> b g r s t", F.reshape(q, (b, g, h // g, s, d)), k) * factor


@op(
    "attention_backward", _ATTENTION, example="grad[b,h,s,e] q[b,h,s,d] k[b,h,t,d] v[b,h,t,e] logsumexp[b,h,s] delta[b,h,s]; is_causal=True"
)
def attention_backward(
    grad: Node,
    q: Node,
    k: Node,
    v: Node,
    logsumexp: Node,
    delta: Node,
    mask: Node | None = None,
    sinks: Node | None = None,
    *,
    is_causal: bool = False,
    query_offset: int = 0,
    key_offset: int = 0,
    scale: float | None = None,
) -> tuple[Node, ...]:
    """Gradients of q, k and v as flash attention computes them, block by block, from the `logsumexp` [b, h, s] of each query over
    all keys and `delta` = Σ_e grad·result [b, h, s]: p = exp(scale·q·kᵀ − logsumexp), ds = p·(grad·vᵀ − delta).

    With `sinks` also their gradient, −Σ exp(sink − logsumexp)·delta."""
    if any(x.ndim != 4 for x in (grad, q, k, v)) or q.shape[1] % k.shape[1]:
        raise F.ShapeError("attention_backward needs grad, q, k, v [batch, heads, sequence, size], heads of q a multiple of those of k")
    b, h, s, d = q.shape
    g, t = k.shape[1:3]
    r = h // g
    rows = (b, g, r, s, 1)
    scores = F.reshape(scores_of(q, k, scale), (b, h, s, t))
    scores, kept = _masked(scores, causal(s, t, query_offset, key_offset) if is_causal else None, mask)
    every = F.call("exp", scores - F.reshape(logsumexp, (b, h, s, 1)))
    weights = F.reshape(every if kept is None else F.select(kept, every, 0), (b, g, r, s, t))
    grad = F.reshape(grad, (b, g, r, s, v.shape[-1]))
    of_scores = weights * (F.contract("b g r s e, b g t e -> b g r s t", grad, v) - F.reshape(delta, rows))
    of_scores = of_scores * (F.power(F.const(d), Fraction(-1, 2)) if scale is None else F.as_node(scale))
    found = (
        F.reshape(F.contract("b g r s t, b g t d -> b g r s d", of_scores, k), q.shape),
        F.contract("b g r s t, b g r s d -> b g t d", of_scores, F.reshape(q, (b, g, r, s, d))),
        F.contract("b g r s t, b g r s e -> b g t e", weights, grad),
    )
    if sinks is None:
        return found
    share = F.call("exp", F.reshape(_of_heads(sinks, h), (1, h, 1)) - logsumexp)
    return (*found, -F.total(share * delta, [0, 2]))


@op("apply_rotary_emb", _ATTENTION, example="x[s,d=6] cos[s,d] sin[s,d]")
def apply_rotary_emb(x: Node, cos: Node, sin: Node, *, style: Literal["half", "interleaved"] = "half") -> Node:
    """x·cos + rotate(x)·sin over the last dimension: pairs (x[i], x[i + d/2]) or, interleaved, (x[2i], x[2i + 1]) turn by an angle.

    cos and sin hold d values, or d/2 of them, one for each pair; they broadcast over the other dimensions."""
    d = x.shape[-1]
    if d % 2 or any(a.shape[-1] not in (d, d // 2) for a in (cos, sin)):
        raise F.ShapeError(f"rotary embedding of size {d} with cos {list(cos.shape)} and sin {list(sin.shape)}")
    if style == "half":
        turned = F.concat([-F.take(x, -1, d // 2, d), F.take(x, -1, 0, d // 2)], -1)
    else:
        odd, even = F.take(x, -1, 1, d, 2), F.take(x, -1, 0, d, 2)
        turned = F.reshape(F.concat([unsqueezed(-odd, -1), unsqueezed(even, -1)], -1), x.shape)

    def full(angle: Node) -> Node:
        if angle.shape[-1] == d:
            return angle
        if style == "half":
            return F.concat([angle, angle], -1)
        return F.reshape(F.concat([unsqueezed(angle, -1)] * 2, -1), (*angle.shape[:-1], d))

    return x * full(cos) + turned * full(sin)


@op("rotary_pair", _ATTENTION, example="q[b,s,h,d=6] k[b,s,g,d=6] angles[s,3,2]")
def rotary_pair(q: Node, k: Node, angles: Node) -> tuple[Node, Node]:
    """Queries and keys [b, s, heads, d] turned as complex numbers: pairs (x[2i], x[2i + 1]) times angles[s, i] = (real, imaginary)."""
    for x in (q, k):
        if x.ndim != 4 or angles.shape != (x.shape[1], x.shape[3] // 2, 2) or x.shape[3] % 2:
            raise F.ShapeError(f"rotary pair of {list(x.shape)} with angles {list(angles.shape)}")
    return turned(q, angles), turned(k, angles)


def turned(x: Node, angles: Node) -> Node:
    b, s, h, d = x.shape
    pairs = F.reshape(x, (b, s, h, d // 2, 2))
    even, odd = F.take(pairs, -1, 0, 1), F.take(pairs, -1, 1, 2)
    spread = F.reshape(angles, (s, 1, d // 2, 2))
    real, imaginary = F.take(spread, -1, 0, 1), F.take(spread, -1, 1, 2)
    return F.reshape(F.concat([even * real - odd * imaginary, even * imaginary + odd * real], -1), x.shape)
