"""Linear algebra and the layers of neural networks."""

from __future__ import annotations

import re
from typing import Literal

from trainverify.ops.arithmetic import divided
from trainverify.ops.table import op
from trainverify.primitives import node as F
from trainverify.primitives.node import Node

_LINEAR = "linear algebra"
_NEURAL = "neural network"


@op("linear", _LINEAR)
def linear(x: Node, w: Node, bias: Node | None = None) -> Node:
    """x·wᵀ + bias, w stored as [out, in]."""
    y = F.contract("... k, o k -> ... o", x, w)
    return y if bias is None else y + bias


@op("matmul", _LINEAR)
def matmul(x: Node, y: Node) -> Node:
    """Matrix product over the last two dimensions; leading ones broadcast; vectors as in PyTorch."""
    if x.ndim == 1 and y.ndim == 1:
        return F.contract("k, k ->", x, y)
    if x.ndim == 1:
        return F.contract("k, ... k n -> ... n", x, y)
    if y.ndim == 1:
        return F.contract("... m k, k -> ... m", x, y)
    lead = F.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return F.contract("... m k, ... k n -> ... m n", F.expand(x, lead + x.shape[-2:]), F.expand(y, lead + y.shape[-2:]))


@op("einsum", _LINEAR)
def einsum(*xs: Node, spec: str) -> Node:
    """Einstein summation in PyTorch's notation, `"bik,bjk->bij"`; the result must be spelled out."""
    if not re.fullmatch(r"[A-Za-z,]*->[A-Za-z]*", spec.replace(" ", "")):
        raise F.ShapeError(f"einsum {spec!r}: letters, commas and an arrow only")
    return F.contract(re.sub(r"([A-Za-z])", r" \1 ", spec.replace(" ", "")), *xs)


def stable_exp(x: Node, dim: int) -> Node:
    return F.call("exp", x - F.reduce("max", x, [dim], keepdim=True))


@op("softmax", _NEURAL)
def softmax(x: Node, *, dim: int = -1) -> Node:
    """exp(x) / Σ exp(x) along a dimension, with the maximum subtracted first."""
    e = stable_exp(x, dim)
    return e / F.total(e, [dim], keepdim=True)


@op("rms_norm", _NEURAL)
def rms_norm(x: Node, weight: Node | None = None, *, eps: float = 1e-6) -> Node:
    """x / √(mean(x²) + eps) · weight over the last dimension."""
    square = divided(F.total(x * x, [-1], keepdim=True), x.shape[-1])
    y = x * F.power(square + eps, -0.5)
    return y if weight is None else y * weight


@op("embedding", _NEURAL)
def embedding(ids: Node, weight: Node, *, start: int = 0) -> Node:
    """Rows of `weight` by id. `weight` holds the rows from `start` on; an id outside gives zeros (vocabulary parallel)."""
    return F.contract("... v, v h -> ... h", F.one_hot(ids, weight.shape[0], start), weight)


def log_softmax_of(x: Node, dim: int) -> Node:
    shifted = x - F.reduce("max", x, [dim], keepdim=True)
    return shifted - F.call("log", F.total(F.call("exp", shifted), [dim], keepdim=True))


@op("cross_entropy", _NEURAL)
def cross_entropy(logits: Node, target: Node, *, reduction: Literal["mean", "sum", "none"] = "mean", ignore_index: int = -100) -> Node:
    """−log softmax(logits)[target] over the last dimension; ignored targets count neither in the sum nor in the mean."""
    if target.shape != logits.shape[:-1]:
        raise F.ShapeError(f"targets {list(target.shape)} for logits {list(logits.shape)}")
    valid = ~F.call("eq", target, ignore_index)
    picked = F.contract("... v, ... v -> ...", log_softmax_of(logits, -1), F.one_hot(target, logits.shape[-1]))
    loss = F.select(valid, -picked, 0)
    if reduction == "none":
        return loss
    whole = F.total(loss, range(loss.ndim))
    return whole if reduction == "sum" else whole / F.total(F.cast(valid, "real"), range(valid.ndim))
