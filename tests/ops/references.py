"""What PyTorch says each operator is, and the samples at which to compare. One row for each operator of the library."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as nn
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd

from ops.samples import Sample, bools, call, distinct, given, group, ids, mask, positive, real, unit
from trainverify.primitives.scalars import hashed_uniform

Reference = Callable[..., Any]
DTYPES = {"f64": torch.float64, "f32": torch.float64, "i64": torch.int64, "i32": torch.int64, "bool": torch.bool}

_VECTORS = (call(real(2, 3)), call(real(5)), call(real(1, 7, 3)))
_POSITIVE = (call(positive(2, 3)), call(positive(5)), call(positive(1, 7, 3)))
_PAIRS = (
    call(real(2, 3), real(2, 3)),
    call(real(2, 1, 5), real(3, 1)),
    call(real(7), real(2, 7)),
    call(real(3, 2), value=2),
    call(real(3, 2), value=0.3),
)
_DIVIDED = (call(ids(2, 3, low=-7, high=8), value=3), call(ids(5, low=-7, high=8), value=1), call(ids(7, high=40), value=5))
_COMPARED = (
    call(given([[1, 2, 3], [3, 2, 1]]), given([2, 2, 3])),
    call(real(2, 1, 5), real(3, 1)),
    call(real(3, 2), value=0),
    call(given([1.5, 2.0, -1.0, 2.5]), value=2),
    call(bools(3), bools(2, 3)),
)
_LOGIC = (call(bools(2, 3), bools(3)), call(ids(2, 5, high=2), real(5)), call(bools(1, 7), bools(2, 1)))
_REDUCED = (
    call(real(2, 3, 5)),
    call(real(2, 3, 5), dim=1),
    call(real(2, 3, 5), dim=(0, -1), keepdim=True),
    call(real(7, 1), dim=1),
    call(real(1), dim=0, keepdim=True),
)
_POSITION = (
    call(real(2, 3, 5)),
    call(real(2, 3, 5), dim=1),
    call(real(2, 3, 5), dim=-1, keepdim=True),
    call(given([3, 1, 3, 1]), dim=0),
    call(real(2, 3), keepdim=True),
)
_ORDERED = (
    call(real(2, 5)),
    call(real(3, 2, 7), dim=0),
    call(real(2, 3, 5), dim=1, descending=True),
    call(given([[3, 1, 3, 1], [2, 2, 2, 1]]), descending=True),
    call(given([[3, 1, 3, 1], [2, 2, 2, 1]])),
)


def binary(f: Reference) -> Reference:
    """A function of two tensors, or of a tensor and the literal `value`."""
    return lambda x, y=None, *, value=None, **rest: f(x, value if y is None else y, **rest)


def all_dims(f: Reference) -> Reference:
    """A PyTorch reduction that wants its dimensions spelled out."""
    return lambda x, dim=None, **rest: f(x, dim=tuple(range(x.ndim)) if dim is None else dim, **rest)


def prod(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    for d in sorted((d % x.ndim for d in (range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim)), reverse=True):
        x = x.prod(d, keepdim=keepdim)
    return x


def embedding(i: Tensor, weight: Tensor, start: int = 0) -> Tensor:
    rows = [weight[int(v) - start] if 0 <= int(v) - start < len(weight) else weight[0] * 0 for v in i.reshape(-1)]
    return torch.stack(rows).reshape(*i.shape, weight.shape[1])


def channels(value: Tensor, x: Tensor) -> Tensor:
    return value.reshape(1, -1, *[1] * (x.ndim - 2))


def normalised(x: Tensor, mean: Tensor, variance: Tensor, w: Any, b: Any, eps: float) -> Tensor:
    y = (x - channels(mean, x)) / (channels(variance, x) + eps).sqrt()
    y = y if w is None else y * channels(w, x)
    return y if b is None else y + channels(b, x)


def batch_norm(
    x: Tensor, w: Any = None, b: Any = None, rm: Any = None, rv: Any = None, training: bool = True, momentum: float = 0.1, eps: float = 1e-5
) -> tuple[Tensor, ...]:
    if not training:  # PyTorch has no derivative for the running statistics
        return normalised(x, rm, rv, w, b, eps), rm, rv
    new = (None, None) if rm is None else (rm.detach().clone(), rv.detach().clone())
    y = nn.batch_norm(x, *new, w, b, training=True, momentum=momentum, eps=eps)
    others = [d for d in range(x.ndim) if d != 1]
    found = (y, x.mean(others), x.var(others, correction=0))
    if rm is None:
        return found
    return *found, *(n + (1 - momentum) * (r - r.detach()) for n, r in zip(new, (rm, rv), strict=True))


def batch_norm_apply(x: Tensor, s: Tensor, q: Tensor, w: Any = None, b: Any = None, *, count: int, eps: float = 1e-5) -> tuple[Tensor, ...]:
    mean = s / count
    variance = q / count - mean**2
    return normalised(x, mean, variance, w, b, eps), mean, variance


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    m: Any = None,
    sinks: Any = None,
    is_causal: bool = False,
    query_offset: int = 0,
    key_offset: int = 0,
    scale: Any = None,
) -> tuple[Tensor, Tensor]:
    s, t = q.shape[2], k.shape[2]
    extra = torch.zeros(s, t, dtype=torch.float64)
    if is_causal:
        row, column = torch.arange(s)[:, None] + query_offset, torch.arange(t) + key_offset
        extra = extra.masked_fill(column > row, -math.inf)
    if m is not None:
        extra = extra + (m if m.dtype == torch.float64 else torch.zeros(m.shape, dtype=torch.float64).masked_fill(~m, -math.inf))
    y = nn.scaled_dot_product_attention(q, k, v, attn_mask=extra.expand(q.shape[0], q.shape[1], s, t), scale=scale, enable_gqa=True)
    wide = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ wide.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale) + extra
    if sinks is not None:  # as in gpt-oss: a column of scores that is dropped after the softmax
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        y = scores.softmax(-1)[..., :-1] @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return y, scores.logsumexp(-1)


def attention_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, m: Any = None, sinks: Any = None, **how: Any
) -> tuple[Tensor, ...]:
    """From p = exp(s − lse), head by head, rows and columns with their masks."""
    offsets, scale = (how.get("query_offset", 0), how.get("key_offset", 0)), how.get("scale")
    share = q.shape[1] // k.shape[1]
    wide_k, wide_v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q @ wide_k.transpose(-1, -2) * factor
    p = torch.exp((scores if m is None or m.dtype == torch.bool else scores + m) - lse[..., None])
    p = p * m if m is not None and m.dtype == torch.bool else p
    if how.get("is_causal"):
        row, column = torch.arange(q.shape[2])[:, None] + offsets[0], torch.arange(k.shape[2]) + offsets[1]
        p = p * (column <= row)
    ds = p * (g @ wide_v.transpose(-1, -2) - delta[..., None]) * factor
    groups = (q.shape[0], k.shape[1], share)
    dk, dv = (x.reshape(*groups, *x.shape[2:]).sum(2) for x in (ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ g))
    if sinks is None:
        return ds @ wide_k, dk, dv
    return ds @ wide_k, dk, dv, -(torch.exp(sinks.reshape(1, -1, 1) - lse) * delta).sum((0, 2))


def rotary(x: Tensor, cos: Tensor, sin: Tensor, style: str = "half") -> Tensor:
    """Pairs as complex numbers, turned by cos + i·sin."""
    d = x.shape[-1]
    if style == "half":
        pairs = torch.stack([x[..., : d // 2], x[..., d // 2 :]], -1)
        low = [a if a.shape[-1] == d // 2 else a[..., : d // 2] for a in (cos, sin)]
        high = [a if a.shape[-1] == d // 2 else a[..., d // 2 :] for a in (cos, sin)]
    else:
        pairs = x.reshape(*x.shape[:-1], d // 2, 2)
        low = [a if a.shape[-1] == d // 2 else a[..., 0::2] for a in (cos, sin)]
        high = [a if a.shape[-1] == d // 2 else a[..., 1::2] for a in (cos, sin)]
    real_part = pairs[..., 0] * low[0] - pairs[..., 1] * low[1]
    imaginary = pairs[..., 1] * high[0] + pairs[..., 0] * high[1]
    return torch.cat([real_part, imaginary], -1) if style == "half" else torch.stack([real_part, imaginary], -1).flatten(-2)


def rotary_pair(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
    """As in Meta's Llama code: complex numbers times complex numbers."""
    turn = torch.view_as_complex(angles)[None, :, None, :]
    pairs = [torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) for x in (q, k)]
    return tuple(torch.view_as_real(x * turn).flatten(3) for x in pairs)


def moe_route(
    x: Tensor, weight: Tensor, *, top_k: int, scoring: str = "softmax", scale: float = 1, groups: int = 1, top_groups: int = 1
) -> tuple[Tensor, Tensor]:
    """As in the DeepSeek reference code without a bias: groups out of reach get −∞."""
    scores = (x @ weight.T).softmax(-1) if scoring == "softmax" else (x @ weight.T).sigmoid()
    choice = scores
    if groups > 1:
        parts = choice.unflatten(-1, (groups, -1))
        out = torch.ones(parts.shape[:2], dtype=torch.bool).scatter(-1, parts.amax(-1).topk(top_groups, -1).indices, False)
        choice = parts.masked_fill(out[..., None], -math.inf).flatten(-2)
    chosen = choice.topk(top_k, -1).indices
    weights = scores.gather(-1, chosen)
    if scoring == "sigmoid":
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale, chosen


def moe_experts(x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, start: int = 0) -> Tensor:
    """Token by token, as a loop over the chosen experts that are here."""
    rows = []
    for t in range(x.shape[0]):
        y = torch.zeros_like(x[t])
        for i, e in enumerate(ids[t].tolist()):
            if 0 <= e - start < gate.shape[0]:
                y = y + weights[t, i] * (down[e - start] @ (nn.silu(gate[e - start] @ x[t]) * (up[e - start] @ x[t])))
        rows.append(y)
    return torch.stack(rows)


def moe_gate(
    logits: Tensor,
    bias: Any = None,
    *,
    top_k: int,
    scoring: str = "softmax",
    normalize: bool = False,
    scale: float = 1,
    groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",
) -> Tensor:
    """As in the DeepSeek reference code: choose with the bias, weigh without it, write into zeros."""
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if groups > 1:
        parts = choice.unflatten(-1, (groups, -1))
        rank = parts.amax(-1) if group_score == "max" else parts.topk(2, -1).values.sum(-1)
        out = torch.ones_like(rank, dtype=torch.bool).scatter(-1, rank.topk(top_groups, -1).indices, False)
        choice = parts.masked_fill(out[..., None], -math.inf).flatten(-2)
    chosen = choice.topk(top_k, -1).indices
    weights = scores.gather(-1, chosen)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return torch.zeros_like(scores).scatter(-1, chosen, weights * scale)


def uniform(shape: Any, key: int, offset: int = 0, origin: Any = None, logical_shape: Any = None) -> Tensor:
    whole = tuple(logical_shape or shape)
    numbers = [float(hashed_uniform(key, offset, i)) for i in range(math.prod(whole))]
    y = torch.tensor(numbers, dtype=torch.float64).reshape(whole)
    for d, start in enumerate(origin or [0] * len(shape)):
        y = y.narrow(d, start, shape[d])
    return y


def dropout(x: Tensor, p: float, training: bool = True, **rest: Any) -> Tensor:
    if p in (0, 1) or not training:
        return nn.dropout(x, p, training)
    return x * (uniform(x.shape, **rest) >= p) / (1 - p)


def create_mask(queries: int, keys: int, query_offset: int = 0, key_offset: int = 0, window: Any = None) -> Tensor:
    row, column = query_offset + torch.arange(queries)[:, None], key_offset + torch.arange(keys)
    return (column <= row) & ((row - column < window) if window is not None else True)


def segment_mask(a: Tensor, b: Tensor, is_causal: bool = False, query_offset: int = 0, key_offset: int = 0) -> Tensor:
    same = a[:, :, None] == b[:, None, :]
    return same & create_mask(a.shape[1], b.shape[1], query_offset, key_offset) if is_causal else same


def by_class(f: Reference) -> Reference:
    """PyTorch has the classes in dimension 1, and no derivative for their weights: those come from a formula with its value."""

    def loss(x: Tensor, t: Tensor, w: Any = None, **rest: Any) -> Tensor:
        moved = x.movedim(-1, 1) if x.ndim > 1 else x
        if w is None:
            return f(moved, t, **rest)
        value, mine = f(moved, t, w.detach(), **rest), weighted(x.log_softmax(-1) if f is nn.cross_entropy else x, t, w, **rest)
        assert torch.allclose(value, mine)
        return mine

    return loss


def weighted(scores: Tensor, t: Tensor, w: Tensor, reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0) -> Tensor:
    valid = t != ignore_index
    rows, counts = scores[valid], w[t[valid]]
    picked = -rows.gather(-1, t[valid][..., None])[..., 0] * counts
    losses = (1 - label_smoothing) * picked - label_smoothing * (rows * w).mean(-1)
    if reduction == "none":
        return torch.zeros(t.shape, dtype=scores.dtype).masked_scatter(valid, losses)
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


def sgd(w: Tensor, g: Tensor, buffer: Any = None, *, lr: float, first: bool = False, **rest: Any) -> Any:
    new, buffers = [w.clone()], [None if buffer is None else buffer.clone()]
    options = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, **rest}
    if first:  # PyTorch starts with no buffer and detaches it; from zero and undampened it is the same number
        buffers, options["dampening"] = [torch.zeros_like(w)], 0.0
    torch_sgd(new, [g], buffers, lr=lr, maximize=False, foreach=False, **options)
    return new[0] if buffer is None else (new[0], buffers[0])


def adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, *, step: int, **rest: Any) -> tuple[Tensor, ...]:
    state = [w.clone(), m.clone(), v.clone()]
    options = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, **rest}
    steps = [torch.tensor(float(step - 1), dtype=torch.float64)]
    new = [[s] for s in state]
    torch_adamw(new[0], [g], new[1], new[2], [], steps, foreach=False, differentiable=True, amsgrad=False, maximize=False, **options)
    return tuple(s[0] for s in new)


# Collectives, rank by rank: a list of every member's tensor in, a list of every receiver's tensor out.


def _combined(xs: list[Tensor], op: str) -> Tensor:
    result = xs[0]
    combine = {"max": torch.maximum, "min": torch.minimum, "prod": torch.mul}.get(op, torch.add)
    for x in xs[1:]:
        result = combine(result, x)
    return result / len(xs) if op == "avg" else result


def per_rank(f: Callable[..., list[Tensor]]) -> Reference:
    return lambda x, group, members, root=None, **rest: torch.stack(f(list(x), n=members, **rest))


def all_to_all(xs: list[Tensor], n: int, split_dim: int, concat_dim: int) -> list[Tensor]:
    blocks = [x.chunk(n, split_dim) for x in xs]
    return [torch.cat([blocks[sender][receiver] for sender in range(n)], concat_dim) for receiver in range(n)]


_COLLECTIVES: dict[str, tuple[Reference, tuple[Sample, ...]]] = {
    "all_reduce": (
        per_rank(lambda xs, n, op="sum": [_combined(xs, op)] * n),
        (
            group(2, real(3, 5)),
            group(3, real(2), op="avg"),
            group(5, real(2, 1), op="max"),
            group(1, real(7)),
            group(3, real(2), op="min"),
            group(3, real(2), op="prod"),
        ),
    ),
    "all_gather": (
        per_rank(lambda xs, n, dim=0: [torch.cat(xs, dim)] * n),
        (group(2, real(3, 5)), group(3, real(2, 1, 5), dim=1), group(2, real(3, 7), dim=-1)),
    ),
    "reduce_scatter": (
        per_rank(lambda xs, n, dim=0, op="sum": list(_combined(xs, op).chunk(n, dim))),
        (group(2, real(6, 5)), group(3, real(2, 6), dim=1, op="avg"), group(2, real(3, 4), dim=-1, op="max")),
    ),
    "all_to_all": (
        per_rank(all_to_all),
        (
            group(2, real(4, 3), split_dim=0, concat_dim=1),
            group(3, real(2, 6, 5), split_dim=1, concat_dim=0),
            group(2, real(4, 3), split_dim=0, concat_dim=0),
            group(3, real(1, 2, 3), split_dim=-1, concat_dim=1),
        ),
    ),
    "broadcast": (
        per_rank(lambda xs, n: xs * n),
        (group(2, real(3, 5), root=0), group(3, real(1), root=4), group(5, real(2, 7), root=1)),
    ),
    "reduce": (
        per_rank(lambda xs, n, op="sum": [_combined(xs, op)]),
        (group(2, real(3, 5), root=0), group(3, real(1), root=4, op="avg"), group(5, real(2, 7), root=1, op="max")),
    ),
    "scatter": (
        per_rank(lambda xs, n, dim=0: list(xs[0].chunk(n, dim))),
        (group(2, real(6, 5), root=0), group(3, real(2, 6), root=4, dim=1), group(2, real(3, 4), root=1, dim=-1)),
    ),
    "gather": (
        per_rank(lambda xs, n, dim=0: [torch.cat(xs, dim)]),
        (group(2, real(3, 5), root=0), group(3, real(2, 1, 5), root=4, dim=1), group(2, real(3, 7), root=1, dim=-1)),
    ),
}

REFERENCES: dict[str, tuple[Reference, tuple[Sample, ...]]] = {
    # elementwise
    "add": (binary(torch.add), (*_PAIRS, call(real(2, 3), real(3), alpha=0.5))),
    "sub": (binary(torch.sub), _PAIRS),
    "mul": (binary(torch.mul), _PAIRS),
    "div": (binary(torch.div), _PAIRS),
    "neg": (torch.neg, _VECTORS),
    "pow": (
        torch.pow,
        (
            call(real(2, 3), exponent=2),
            call(real(5), exponent=3.0),
            call(positive(1, 7), exponent=-0.5),
            call(positive(3), exponent=0.3),
            call(real(3), exponent=-1),
            call(given([0.0, 2.0]), exponent=0),
            call(given([3, -2]), exponent=2),
        ),
    ),
    "square": (torch.square, _VECTORS),
    "reciprocal": (torch.reciprocal, _VECTORS),
    "softplus": (nn.softplus, _VECTORS),
    "sqrt": (torch.sqrt, _POSITIVE),
    "rsqrt": (torch.rsqrt, _POSITIVE),
    "exp": (torch.exp, _VECTORS),
    "log": (torch.log, _POSITIVE),
    "sin": (torch.sin, _VECTORS),
    "cos": (torch.cos, _VECTORS),
    "tanh": (torch.tanh, _VECTORS),
    "erf": (torch.erf, _VECTORS),
    "relu": (torch.relu, (*_VECTORS, call(given([-1.0, 0.0, 2.0])))),
    "sigmoid": (torch.sigmoid, _VECTORS),
    "silu": (nn.silu, _VECTORS),
    "gelu": (nn.gelu, (*_VECTORS, call(real(3, 5), approximate="tanh"))),
    "abs": (torch.abs, (*_VECTORS, call(given([-1.0, 0.0, 2.0])), call(given([-1, 0, 2])))),
    "sign": (torch.sign, (*_VECTORS, call(given([-1.5, 0.0, 2.0])))),
    "floor": (torch.floor, (*_VECTORS, call(given([-1.5, 0.0, 2.0])))),
    "floordiv": (lambda x, value: torch.floor_divide(x, value), _DIVIDED),
    "mod": (lambda x, value: torch.remainder(x, value), _DIVIDED),
    "clamp": (
        torch.clamp,
        (
            call(real(2, 3), min=-0.3, max=0.5),
            call(real(5), min=0),
            call(real(1, 7), max=0.1),
            call(given([-1.0, -0.5, 0.0, 0.25, 1.0]), min=-0.5, max=0.25),
        ),
    ),
    "minimum": (torch.minimum, (*_PAIRS[:3], call(given([1.0, 2.0, 3.0]), given([2.0, 2.0, 2.0])))),
    "logaddexp": (torch.logaddexp, (*_PAIRS[:3], call(given([1.0, -2.0, 3.0]), given([2.0, -2.0, 2.0])))),
    "maximum": (torch.maximum, (*_PAIRS[:3], call(given([1.0, 2.0, 3.0]), given([2.0, 2.0, 2.0])))),
    "lt": (binary(torch.lt), _COMPARED),
    "le": (binary(torch.le), _COMPARED),
    "gt": (binary(torch.gt), _COMPARED),
    "ge": (binary(torch.ge), _COMPARED),
    "eq": (binary(torch.eq), _COMPARED),
    "ne": (binary(torch.ne), _COMPARED),
    "logical_and": (torch.logical_and, _LOGIC),
    "logical_or": (torch.logical_or, _LOGIC),
    "logical_not": (torch.logical_not, (call(bools(2, 3)), call(real(5)), call(ids(1, 7, high=2)))),
    "where": (
        torch.where,
        (call(bools(2, 3), real(2, 3), real(2, 3)), call(bools(3, 1), real(5), real(2, 1, 1)), call(bools(7), real(7), real(1, 7))),
    ),
    # reductions
    "sum": (torch.sum, (*_REDUCED, call(ids(2, 3, high=5), dim=0), call(bools(3, 5), dim=1))),
    "mean": (all_dims(torch.mean), _REDUCED),
    "var": (
        torch.var,
        (
            call(real(2, 3, 5)),
            call(real(2, 3, 5), dim=1),
            call(real(2, 3, 5), dim=(0, -1), keepdim=True),
            call(real(7, 1), dim=1, correction=0),
        ),
    ),
    "std": (torch.std, (call(real(2, 3, 5)), call(real(2, 3, 5), dim=(0, -1), keepdim=True), call(real(3, 7), dim=1, correction=0))),
    "any": (torch.any, (call(bools(2, 3, 5), dim=1), call(ids(2, 7, high=2), dim=(0, 1)), call(bools(3, 1), dim=1, keepdim=True))),
    "all": (torch.all, (call(bools(2, 3, 5), dim=1), call(ids(2, 7, high=2), dim=(0, 1)), call(bools(3, 1), dim=1, keepdim=True))),
    "amax": (all_dims(torch.amax), (*_REDUCED, call(given([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), dim=1))),
    "amin": (all_dims(torch.amin), (*_REDUCED, call(given([[1.0, 3.0, 1.0], [2.0, 2.0, 2.0]]), dim=1))),
    "prod": (
        prod,
        (*_REDUCED, call(given([[0.0, 2.0, 3.0], [0.0, 5.0, 0.0], [7.0, 2.0, 3.0]]), dim=1), call(given([0.0, 2.0, 3.0]))),
    ),
    "argmax": (torch.argmax, _POSITION),
    "argmin": (torch.argmin, _POSITION),
    "norm": (
        lambda x, p=2, **rest: torch.linalg.vector_norm(x, p, **rest),
        (
            *_REDUCED,
            call(real(2, 3), p=1, dim=1),
            call(real(5, 2), p=3, dim=0, keepdim=True),
            call(real(3, 7), p=math.inf),
            call(real(3), p=1.5),
        ),
    ),
    "grad_norm": (
        lambda *xs: torch.stack([x.norm() for x in xs]).norm(),
        (call(real(2, 3)), call(real(2, 3), real(5), real(1, 7)), call(real(), real(3))),
    ),
    "logsumexp": (all_dims(torch.logsumexp), _REDUCED),
    "cumsum": (torch.cumsum, (call(real(5), dim=0), call(real(2, 3, 5), dim=1), call(real(2, 7), dim=-1), call(bools(2, 3), dim=1))),
    # shape
    "identity": (lambda x: x, (*_VECTORS, call(ids(3, high=5)))),
    "contiguous": (torch.Tensor.contiguous, _VECTORS),
    "detach": (torch.Tensor.detach, _VECTORS),
    "multiref": (lambda x, times: (x,) * times, (call(real(2, 3), times=2), call(real(5), times=1), call(real(1, 7), times=3))),
    "to": (
        lambda x, dtype: x.to(DTYPES[dtype]),
        (
            call(real(2, 3), dtype="f32"),
            call(given([-1.5, 0.0, 2.7]), dtype="i64"),
            call(given([-1.5, 0.0, 2.7]), dtype="bool"),
            call(bools(5), dtype="i32"),
            call(ids(1, 7, high=5), dtype="f32"),
        ),
    ),
    "float": (torch.Tensor.double, (call(real(2, 3)), call(ids(5, high=3)), call(bools(1, 7)))),
    "reshape": (
        torch.reshape,
        (call(real(2, 3, 5), shape=(6, 5)), call(real(2, 3, 5), shape=(-1, 3)), call(real(1), shape=()), call(real(7), shape=(1, 7, 1))),
    ),
    "view": (
        lambda x, shape: x.view(shape),
        (call(real(2, 3, 5), shape=(2, 15)), call(real(6, 5), shape=(2, -1, 5)), call(real(7), shape=(7, 1))),
    ),
    "transpose": (
        lambda x, dim0=0, dim1=1: x.transpose(dim0, dim1),
        (call(real(2, 3)), call(real(2, 3, 5), dim0=-1, dim1=0), call(real(1, 7, 2, 3), dim0=1, dim1=2)),
    ),
    "permute": (
        torch.permute,
        (call(real(2, 3), dims=(1, 0)), call(real(2, 3, 5), dims=(2, 0, 1)), call(real(1, 7, 2, 3), dims=(-1, 0, 2, 1))),
    ),
    "slice": (
        lambda x, dim=0, start=0, *, stop, step=1: (
            x.index_select(dim, torch.arange(start, stop, step))
            if step > 0
            else x.index_select(dim, torch.tensor(list(range(start, stop, step))))
        ),
        (
            call(real(5, 3), start=1, stop=4),
            call(real(2, 7), dim=1, start=1, stop=7, step=2),
            call(real(2, 7), dim=-1, stop=6, step=3),
            call(real(7, 2), start=5, stop=0, step=-2),
            call(real(3), stop=0),
        ),
    ),
    "concat": (
        lambda *xs, dim=0: torch.cat(xs, dim),
        (
            call(real(2, 3), real(5, 3)),
            call(real(2, 3), real(2, 1), real(2, 7), dim=1),
            call(real(2, 1, 5), dim=-1),
            call(ids(2, high=3), real(3)),
        ),
    ),
    "stack": (
        lambda *xs, dim=0: torch.stack(xs, dim),
        (call(real(2, 3), real(2, 3)), call(real(5), real(5), real(5), dim=1), call(real(2, 1, 7), dim=-1)),
    ),
    "split": (
        lambda x, sizes, dim=0: x.split(sizes, dim),
        (call(real(5, 3), sizes=(2, 3)), call(real(2, 7), sizes=(1, 5, 1), dim=1), call(real(2, 3), sizes=(3,), dim=-1)),
    ),
    "chunk": (
        lambda x, chunks, index, dim=0: x.chunk(chunks, dim)[index],
        (
            call(real(6, 5), chunks=3, index=1),
            call(real(2, 7), chunks=3, index=2, dim=1),
            call(real(2, 6), chunks=2, index=0, dim=-1),
            call(real(3), chunks=1, index=0),
        ),
    ),
    "select": (torch.select, (call(real(2, 3), dim=0, index=1), call(real(2, 3, 5), dim=1, index=-1), call(real(1, 7), dim=-1, index=2))),
    "unbind": (lambda x, dim=0: x.unbind(dim), (call(real(2, 3)), call(real(2, 3, 5), dim=1), call(real(7, 1), dim=-1))),
    "repeat": (
        lambda x, sizes: x.repeat(sizes),
        (call(real(2, 3), sizes=(2, 1)), call(real(5), sizes=(2, 1, 3)), call(real(1, 7), sizes=(3, 2))),
    ),
    "repeat_interleave": (
        torch.repeat_interleave,
        (call(real(2, 3), repeats=2, dim=0), call(real(2, 3, 5), repeats=3, dim=1), call(real(1, 7), repeats=1, dim=-1)),
    ),
    "unsqueeze": (torch.unsqueeze, (call(real(2, 3), dim=0), call(real(5), dim=-1), call(real(1, 7), dim=1))),
    "squeeze": (
        lambda x, dim=None: x.squeeze() if dim is None else x.squeeze(dim),
        (call(real(1, 3, 1)), call(real(2, 1, 5), dim=1), call(real(2, 3), dim=0), call(real(1, 1, 7), dim=(0, -2))),
    ),
    "expand": (
        lambda x, shape: x.expand(shape),
        (call(real(3, 1), shape=(3, 5)), call(real(1, 5), shape=(2, 3, -1)), call(real(1), shape=(1,)), call(real(), shape=(2, 7))),
    ),
    "flip": (torch.flip, (call(real(5), dims=(0,)), call(real(2, 3, 5), dims=(0, -1)), call(real(1, 7), dims=(1,)))),
    "roll": (
        torch.roll,
        (
            call(real(5), shifts=(2,), dims=(0,)),
            call(real(2, 3, 5), shifts=(1, -2), dims=(1, 2)),
            call(real(7, 1), shifts=(9,), dims=(0,)),
            call(real(3), shifts=(0,), dims=(0,)),
        ),
    ),
    "pad": (
        lambda x, pads, value=0: nn.pad(x, pads, value=value),
        (
            call(real(2, 3), pads=(1, 2)),
            call(real(2, 3, 5), pads=(0, 1, 2, 0), value=0.5),
            call(real(7), pads=(-2, 3)),
            call(ids(2, 5, high=3), pads=(1, -1), value=-100),
        ),
    ),
    "arange": (
        lambda start=0, *, stop, step=1, dtype="i64": torch.arange(start, stop, step, dtype=DTYPES[dtype]),
        (call(stop=5), call(start=2, stop=9, step=3), call(start=7, stop=1, step=-2, dtype="f32"), call(stop=1)),
    ),
    "full": (
        lambda shape, value, dtype="f32": torch.full(shape, value, dtype=DTYPES[dtype]),
        (call(shape=(2, 3), value=0.5), call(shape=(), value=3, dtype="i64"), call(shape=(1, 7), value=True, dtype="bool")),
    ),
    # linear algebra
    "linear": (
        nn.linear,
        (
            call(real(2, 3), real(5, 3)),
            call(real(2, 3, 5), real(7, 5), real(7)),
            call(real(1, 1), real(2, 1), real(2)),
            call(real(3), real(5, 3), real(5)),
        ),
    ),
    "matmul": (
        torch.matmul,
        (
            call(real(2, 3), real(3, 5)),
            call(real(3), real(3)),
            call(real(3), real(2, 3, 5)),
            call(real(2, 3, 5), real(5)),
            call(real(2, 1, 3, 5), real(7, 5, 2)),
        ),
    ),
    "einsum": (
        lambda *xs, spec: torch.einsum(spec, *xs),
        (
            call(real(2, 3, 5), real(2, 7, 5), spec="bik,bjk->bij"),
            call(real(2, 3), real(3, 5), real(5), spec="ij, jk, k -> i"),
            call(real(2, 3, 5), spec="abc->ca"),
            call(real(2, 3, 5), real(5, 7), spec="...k,kn->...n"),
        ),
    ),
    "grouped_matmul": (
        torch.bmm,
        (call(real(2, 3, 5), real(2, 5, 7)), call(real(3, 1, 2), real(3, 2, 5)), call(real(1, 7, 3), real(1, 3, 1))),
    ),
    "outer": (torch.outer, (call(real(2), real(3)), call(real(1), real(5)), call(real(7), real(1)))),
    # neural network
    "softmax": (
        lambda x, dim=-1: x.softmax(dim),
        (call(real(2, 3)), call(real(2, 3, 5), dim=1), call(real(7), dim=0), call(given([[1.0, -math.inf, 2.0], [0.0, 1.0, 1.0]]))),
    ),
    "log_softmax": (lambda x, dim=-1: x.log_softmax(dim), (call(real(2, 3)), call(real(2, 3, 5), dim=1), call(real(1, 7), dim=0))),
    "rms_norm": (
        lambda x, w=None, eps=1e-6: nn.rms_norm(x, x.shape[-1:], w, eps),
        (call(real(2, 3), real(3)), call(real(2, 5)), call(real(1, 3, 7), real(7), eps=0.1), call(real(2, 1), real(1))),
    ),
    "layer_norm": (
        lambda x, w=None, b=None, dims=1, eps=1e-5: nn.layer_norm(x, x.shape[x.ndim - dims :], w, b, eps),
        (
            call(real(2, 3), real(3), real(3)),
            call(real(2, 5)),
            call(real(7, 3, 5), real(3, 5), None, dims=2, eps=0.1),
            call(real(2, 3), None, real(3)),
        ),
    ),
    "group_norm": (
        lambda x, w=None, b=None, *, groups, eps=1e-5: nn.group_norm(x, groups, w, b, eps),
        (
            call(real(2, 6), real(6), real(6), groups=3),
            call(real(2, 6, 5), groups=2),
            call(real(3, 4, 1, 7), real(4), real(4), groups=1, eps=0.1),
        ),
    ),
    "batch_norm": (
        batch_norm,
        (
            call(real(5, 3), real(3), real(3)),
            call(real(2, 3, 5)),
            call(real(2, 3, 2, 5), real(3), real(3), real(3), positive(3), eps=0.1),
            call(real(7, 2), None, None, real(2), positive(2), momentum=0.3),
            call(real(2, 3, 5), real(3), real(3), real(3), positive(3), training=False),
        ),
    ),
    "batch_norm_sums": (
        lambda x: (x.transpose(0, 1).flatten(1).sum(1), (x**2).transpose(0, 1).flatten(1).sum(1)),
        (call(real(5, 3)), call(real(2, 3, 5)), call(real(1, 2, 3, 7))),
    ),
    "batch_norm_apply": (
        batch_norm_apply,
        (
            call(real(5, 3), unit(3), given([12.0, 13.0, 17.0]), real(3), real(3), count=7),
            call(real(2, 3, 5), unit(3), given([12.0, 13.0, 17.0]), count=20),
            call(real(1, 2, 3, 5), unit(2), given([12.0, 13.0]), real(2), real(2), count=15, eps=0.1),
        ),
    ),
    "embedding": (
        embedding,
        (
            call(ids(5, high=3), real(3, 2)),
            call(ids(2, 3, high=7), real(2, 5), start=3),
            call(given([[1, 1, 0], [1, 2, 2]]), real(7, 1)),
        ),
    ),
    # attention
    "attention": (
        attention,
        (
            call(real(2, 3, 5, 4), real(2, 3, 7, 4), real(2, 3, 7, 2)),
            call(real(1, 6, 3, 2), real(1, 2, 5, 2), real(1, 2, 5, 3), is_causal=True, query_offset=2),
            call(real(1, 2, 3, 2), real(1, 1, 5, 2), real(1, 1, 5, 2), mask(3, 5), scale=0.3),
            call(real(2, 2, 3, 1), real(2, 2, 3, 1), real(2, 2, 3, 1), real(2, 1, 3, 3), is_causal=True),
            call(real(1, 1, 2, 3), real(1, 1, 3, 3), real(1, 1, 3, 3), mask(1, 1, 2, 3), is_causal=True, query_offset=7, key_offset=6),
            call(real(2, 6, 3, 2), real(2, 2, 5, 2), real(2, 2, 5, 3), None, real(6), is_causal=True, query_offset=2),
            call(real(1, 2, 3, 2), real(1, 1, 5, 2), real(1, 1, 5, 2), mask(3, 5), real(2)),
        ),
    ),
    "attention_backward": (
        attention_backward,
        (
            call(real(2, 3, 5, 2), real(2, 3, 5, 4), real(2, 3, 7, 4), real(2, 3, 7, 2), real(2, 3, 5), real(2, 3, 5)),
            call(real(1, 6, 3, 2), real(1, 6, 3, 2), real(1, 2, 5, 2), real(1, 2, 5, 2), real(1, 6, 3), real(1, 6, 3), is_causal=True),
            call(
                *(real(2, 2, 3, 1) for _ in range(4)),
                real(2, 2, 3),
                real(2, 2, 3),
                is_causal=True,
                query_offset=2,
                key_offset=1,
                scale=0.3,
            ),
            call(*(real(1, 2, 3, 4) for _ in range(4)), real(1, 2, 3), real(1, 2, 3), mask(1, 1, 3, 3), is_causal=True),
            call(*(real(1, 2, 3, 4) for _ in range(4)), real(1, 2, 3), real(1, 2, 3), real(1, 2, 3, 3), real(2)),
        ),
    ),
    "apply_rotary_emb": (
        rotary,
        (
            call(real(2, 3, 5, 4), real(5, 4), real(5, 4)),
            call(real(2, 3, 6), real(2, 1, 3), real(2, 1, 3)),
            call(real(7, 2), real(7, 2), real(7, 2), style="interleaved"),
            call(real(2, 3, 6), real(3, 3), real(3, 3), style="interleaved"),
        ),
    ),
    "rotary_pair": (
        rotary_pair,
        (
            call(real(2, 3, 5, 4), real(2, 3, 5, 4), real(3, 2, 2)),
            call(real(1, 5, 3, 6), real(1, 5, 1, 6), real(5, 3, 2)),
            call(real(3, 2, 1, 2), real(2, 2, 4, 2), real(2, 1, 2)),
        ),
    ),
    # mixture of experts
    "moe_route": (
        moe_route,
        (
            call(real(3, 5), real(4, 5), top_k=2),
            call(real(5, 2), real(6, 2), top_k=2, scoring="sigmoid", groups=3, top_groups=2, scale=2.5),
            call(real(2, 3), real(6, 3), top_k=1, groups=2, top_groups=1),
            call(real(7, 3), real(4, 3), top_k=3, scoring="sigmoid"),
        ),
    ),
    "moe_experts": (
        moe_experts,
        (
            call(real(5, 3), ids(5, 2, high=4), real(5, 2), real(4, 2, 3), real(4, 2, 3), real(4, 3, 2)),
            call(real(7, 2), ids(7, 2, high=6), real(7, 2), real(3, 5, 2), real(3, 5, 2), real(3, 2, 5), start=2),
            call(real(3, 2), ids(3, 1, high=2), real(3, 1), real(1, 2, 2), real(1, 2, 2), real(1, 2, 2), start=1),
        ),
    ),
    "moe_gate": (
        moe_gate,
        (
            call(real(3, 5), top_k=2),
            call(real(2, 3, 7), top_k=1, normalize=True, scale=2.5),
            call(real(5, 4), unit(4), top_k=2, scoring="sigmoid", normalize=True),
            call(real(5, 6), unit(6), top_k=2, scoring="sigmoid", groups=3, top_groups=2, group_score="top2", normalize=True),
            call(real(7, 6), top_k=2, groups=2, top_groups=1),
        ),
    ),
    # convolution
    "conv1d": (
        nn.conv1d,
        (
            call(real(2, 3, 7), real(5, 3, 2)),
            call(real(1, 4, 5), real(6, 2, 3), real(6), stride=2, padding=1, groups=2),
            call(real(2, 3, 7), real(3, 1, 3), padding=2, dilation=2, groups=3),
        ),
    ),
    "conv2d": (
        nn.conv2d,
        (
            call(real(2, 3, 4, 5), real(2, 3, 3, 2)),
            call(real(1, 2, 7, 5), real(3, 2, 3, 3), real(3), stride=2, padding=1),
            call(real(1, 4, 5, 3), real(2, 2, 2, 1), real(2), stride=(1, 2), padding=(2, 0), dilation=(3, 1), groups=2),
            call(real(1, 1, 3, 3), real(1, 1, 1, 1)),
        ),
    ),
    "conv3d": (
        nn.conv3d,
        (
            call(real(2, 3, 4, 5, 3), real(2, 3, 3, 2, 1)),
            call(real(1, 4, 3, 5, 4), real(6, 2, 2, 3, 2), real(6), stride=2, padding=1, groups=2),
            call(real(1, 1, 5, 3, 2), real(2, 1, 2, 1, 2), stride=(1, 2, 1), padding=(2, 0, 1), dilation=(3, 1, 2)),
        ),
    ),
    "max_pool2d": (
        lambda x, kernel, stride=None, padding=0: nn.max_pool2d(x, kernel, stride, padding),
        (
            call(real(2, 3, 4, 6), kernel=2),
            call(real(1, 2, 5, 7), kernel=3, stride=2, padding=1),
            call(real(1, 5, 3), kernel=(2, 1), stride=(1, 2), padding=(1, 0)),
        ),
    ),
    "avg_pool2d": (
        lambda x, kernel, stride=None, padding=0: nn.avg_pool2d(x, kernel, stride, padding),
        (
            call(real(2, 3, 4, 6), kernel=2),
            call(real(1, 2, 5, 7), kernel=3, stride=2, padding=1),
            call(real(1, 5, 3), kernel=(2, 1), stride=(1, 2), padding=(1, 0)),
        ),
    ),
    # indexing
    "take_along_dim": (
        lambda x, i, dim: torch.gather(x, dim, i),
        (
            call(real(2, 5), ids(2, 3, high=5), dim=1),
            call(real(3, 2, 7), ids(5, 2, 1, high=3), dim=0),
            call(real(2, 3, 5), ids(1, 7, 2, high=3), dim=-2),
            call(ids(5, high=9), ids(2, high=5), dim=0),
        ),
    ),
    "put_along_dim": (
        lambda x, i, s, dim: torch.scatter(x, dim, i, s),
        (
            call(real(2, 5), distinct(2, 3, high=5, dim=1), real(2, 3), dim=1),
            call(real(3, 2, 7), distinct(2, 2, 1, high=3, dim=0), real(2, 2, 1), dim=0),
            call(real(2, 3, 5), distinct(1, 3, 2, high=3, dim=1), real(1, 3, 2), dim=-2),
        ),
    ),
    "scatter_add": (
        lambda x, i, s, dim: torch.scatter_add(x, dim, i, s),
        (
            call(real(2, 5), ids(2, 3, high=5), real(2, 3), dim=1),
            call(real(3, 2, 7), ids(5, 2, 1, high=3), real(5, 2, 1), dim=0),
            call(real(2, 3, 5), ids(1, 7, 2, high=3), real(1, 7, 2), dim=-2),
        ),
    ),
    "index_select": (
        lambda x, i, dim: torch.index_select(x, dim, i),
        (
            call(real(2, 5), ids(3, high=5), dim=1),
            call(real(3, 2), ids(7, high=3), dim=0),
            call(ids(2, 3, 5, high=9), ids(1, high=5), dim=-1),
        ),
    ),
    "one_hot": (
        lambda i, num_classes, start=0: nn.one_hot(i, 9)[..., start : start + num_classes],
        (
            call(ids(2, 3, high=5), num_classes=5),
            call(ids(7, high=2), num_classes=3),
            call(ids(high=1), num_classes=1),
            call(ids(3, 5, high=7), num_classes=2, start=3),
        ),
    ),
    "topk": (
        lambda x, k, dim=-1, largest=True: tuple(torch.topk(x, k, dim, largest)),
        (call(real(2, 5), k=2), call(real(7, 3), k=3, dim=0, largest=False), call(real(2, 3, 5), k=1, dim=1), call(real(3), k=3)),
    ),
    "sort": (lambda x, dim=-1, descending=False: tuple(torch.sort(x, dim=dim, descending=descending, stable=True)), _ORDERED),
    "argsort": (lambda x, dim=-1, descending=False: torch.argsort(x, dim=dim, descending=descending, stable=True), _ORDERED),
    # masks
    "create_mask": (
        create_mask,
        (
            call(queries=3, keys=5),
            call(queries=5, keys=3, query_offset=2, key_offset=4),
            call(queries=7, keys=7, window=2),
            call(queries=1, keys=1, query_offset=1),
        ),
    ),
    "causal_bias": (
        lambda queries, keys: torch.full((1, 1, queries, keys), -math.inf, dtype=torch.float64).triu(1),
        (call(queries=3, keys=5), call(queries=5, keys=3), call(queries=1, keys=1)),
    ),
    "segment_mask": (
        segment_mask,
        (
            call(ids(2, 5, high=3), ids(2, 7, high=3)),
            call(ids(1, 5, high=2), ids(1, 5, high=2), is_causal=True),
            call(ids(3, 2, high=2), ids(3, 5, high=2), is_causal=True, query_offset=3, key_offset=1),
        ),
    ),
    "apply_mask": (
        lambda x, m, value=-math.inf: x.masked_fill(~m, value),
        (call(real(2, 3), bools(2, 3)), call(real(2, 3, 5), bools(3, 1), value=-1e4), call(real(7), bools(7), value=0)),
    ),
    "masked_fill": (
        torch.masked_fill,
        (
            call(real(2, 3), bools(2, 3), value=0.5),
            call(real(2, 3, 5), bools(3, 1), value=-math.inf),
            call(ids(7, high=9), bools(7), value=-100),
        ),
    ),
    "tril": (torch.tril, (call(real(3, 5)), call(real(2, 5, 3), diagonal=-1), call(real(7, 7), diagonal=2), call(ids(2, 3, high=9)))),
    "triu": (torch.triu, (call(real(3, 5)), call(real(2, 5, 3), diagonal=-1), call(real(7, 7), diagonal=2), call(ids(2, 3, high=9)))),
    # random
    "uniform": (
        uniform,
        (
            call(shape=(2, 3), key=5),
            call(shape=(2, 1, 3), key=7, offset=2, origin=(1, 0, 2), logical_shape=(3, 2, 5)),
            call(shape=(), key=1),
        ),
    ),
    "dropout": (
        dropout,
        (
            call(real(5, 7), p=0.3, key=11),
            call(real(2, 3), p=0.5, key=3, offset=7, origin=(1, 2), logical_shape=(5, 7)),
            call(real(3), p=0.9, key=2, training=False),
            call(real(3), p=1, key=2),
            call(real(1, 7), p=0, key=2),
        ),
    ),
    # losses
    "cross_entropy": (
        by_class(nn.cross_entropy),
        (
            call(real(5, 3), ids(5, high=3)),
            call(real(2, 3, 7), ids(2, 3, high=7), reduction="sum", label_smoothing=0.1),
            call(real(3, 5), given([1, -100, 4]), label_smoothing=0.2),
            call(real(3, 2), given([1, 0, 1]), ignore_index=0, reduction="none"),
            call(real(5), ids(high=5)),
            call(real(5, 3), ids(5, high=3), positive(3)),
            call(real(3, 5), given([1, -100, 4]), positive(5), label_smoothing=0.2),
            call(real(2, 3, 7), ids(2, 3, high=7), positive(7), reduction="none"),
        ),
    ),
    "nll_loss": (
        by_class(nn.nll_loss),
        (
            call(real(5, 3), ids(5, high=3)),
            call(real(2, 3, 7), ids(2, 3, high=7), reduction="sum"),
            call(real(3, 5), given([1, -100, 4])),
            call(real(3, 5), given([1, -100, 4]), positive(5)),
            call(real(2, 3, 7), ids(2, 3, high=7), positive(7), reduction="sum"),
        ),
    ),
    "mse_loss": (
        nn.mse_loss,
        (call(real(2, 3), real(2, 3)), call(real(5), real(5), reduction="sum"), call(real(1, 7), real(1, 7), reduction="none")),
    ),
    "binary_cross_entropy": (
        nn.binary_cross_entropy,
        (call(unit(2, 3), unit(2, 3)), call(unit(5), unit(5), reduction="sum"), call(unit(1, 7), unit(1, 7), reduction="none")),
    ),
    "binary_cross_entropy_with_logits": (
        nn.binary_cross_entropy_with_logits,
        (call(real(2, 3), unit(2, 3)), call(real(5), unit(5), reduction="sum"), call(real(1, 7), unit(1, 7), reduction="none")),
    ),
    # optimizers
    "sgd": (
        sgd,
        (
            call(real(2, 3), real(2, 3), lr=0.1),
            call(real(5), real(5), real(5), lr=0.3, momentum=0.9, dampening=0.2, weight_decay=0.01),
            call(real(1, 7), real(1, 7), real(1, 7), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
            call(real(3), real(3), real(3), lr=0.1, momentum=0.9, first=True),
        ),
    ),
    "adamw": (
        adamw,
        (
            call(real(2, 3), real(2, 3), real(2, 3), positive(2, 3), lr=0.1, step=1),
            call(real(5), real(5), real(5), positive(5), lr=0.01, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.1, step=3),
            call(real(1, 7), real(1, 7), real(1, 7), positive(1, 7), lr=0.1, weight_decay=0, step=17),
        ),
    ),
    "clip_factor": (
        lambda norm, max_norm, eps=1e-6: torch.clamp(max_norm / (norm + eps), max=1.0),
        (call(given(2.0), max_norm=1), call(given(0.5), max_norm=1.5), call(given(3.0), max_norm=1, eps=0.1)),
    ),
    **_COLLECTIVES,
}
