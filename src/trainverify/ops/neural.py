"""Softmax, normalisation layers, embedding."""

from __future__ import annotations

import math
from fractions import Fraction

from trainverify.ops.arithmetic import divided
from trainverify.ops.reductions import mean_over, shift_of
from trainverify.ops.table import op
from trainverify.primitives import node as F
from trainverify.primitives.node import Node

_NEURAL = "neural network"


@op("softmax", _NEURAL)
def softmax(x: Node, *, dim: int = -1) -> Node:
    """exp(x) / Σ exp(x) along a dimension, with the maximum subtracted first."""
    return softmax_of(x, dim)


def softmax_of(x: Node, dim: int) -> Node:
    e = F.call("exp", x - shift_of(x, [dim]))
    return e / F.total(e, [dim], keepdim=True)


@op("log_softmax", _NEURAL)
def log_softmax(x: Node, *, dim: int = -1) -> Node:
    """x − log Σ exp(x) along a dimension, with the maximum subtracted first."""
    return log_softmax_of(x, dim)


def log_softmax_of(x: Node, dim: int) -> Node:
    shifted = x - shift_of(x, [dim])
    return shifted - F.call("log", F.total(F.call("exp", shifted), [dim], keepdim=True))


def affine(x: Node, weight: Node | None, bias: Node | None) -> Node:
    y = x if weight is None else x * weight
    return y if bias is None else y + bias


@op("rms_norm", _NEURAL, example="x[b,k] weight[k]")
def rms_norm(x: Node, weight: Node | None = None, *, eps: float = 1e-6) -> Node:
    """x / √(mean(x²) + eps) · weight over the last dimension."""
    return affine(x * F.power(mean_over(x * x, [-1], keepdim=True) + eps, Fraction(-1, 2)), weight, None)


@op("layer_norm", _NEURAL, example="x[b,k] weight[k] bias[k]")
def layer_norm(x: Node, weight: Node | None = None, bias: Node | None = None, *, dims: int = 1, eps: float = 1e-5) -> Node:
    """(x − mean) / √(variance + eps) · weight + bias over the last `dims` dimensions."""
    last = range(x.ndim - dims, x.ndim)
    centred = x - mean_over(x, last, keepdim=True)
    variance = mean_over(centred * centred, last, keepdim=True)
    return affine(centred * F.power(variance + eps, Fraction(-1, 2)), weight, bias)


@op("group_norm", _NEURAL, example="x[n,c=6] weight[c] bias[c]; groups=2")
def group_norm(x: Node, weight: Node | None = None, bias: Node | None = None, *, groups: int, eps: float = 1e-5) -> Node:
    """(x − mean) / √(variance + eps) · weight + bias for each sample and group of channels of x [n, c, …]."""
    rows = F.reshape(x, (x.shape[0], groups, -1))
    centred = rows - mean_over(rows, [-1], keepdim=True)
    y = F.reshape(centred * F.power(mean_over(centred * centred, [-1], keepdim=True) + eps, Fraction(-1, 2)), x.shape)
    return affine(y, None if weight is None else by_channel(weight, x), None if bias is None else by_channel(bias, x))


def by_channel(value: Node, x: Node) -> Node:
    """A value for each channel, shaped to go with x [n, c, …]."""
    return F.reshape(value, (-1, *(1,) * (x.ndim - 2)))


def normalised(x: Node, mean: Node, variance: Node, weight: Node | None, bias: Node | None, eps: float) -> Node:
    y = (x - by_channel(mean, x)) * by_channel(F.power(variance + eps, Fraction(-1, 2)), x)
    return affine(y, None if weight is None else by_channel(weight, x), None if bias is None else by_channel(bias, x))


@op("batch_norm", _NEURAL, example="x[n,c] weight[c] bias[c]")
def batch_norm(
    x: Node,
    weight: Node | None = None,
    bias: Node | None = None,
    running_mean: Node | None = None,
    running_var: Node | None = None,
    *,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Node, ...]:
    """(x − mean) / √(variance + eps) · weight + bias for each channel of x [n, c, …].

    Returns the result, mean and variance; when training with running statistics, also their new values
    (of the unbiased variance). Otherwise the running statistics are what it normalises with."""
    if not training:
        if running_mean is None or running_var is None:
            raise F.ShapeError("without training, batch_norm needs running statistics")
        return normalised(x, running_mean, running_var, weight, bias, eps), running_mean, running_var
    others = [d for d in range(x.ndim) if d != 1]
    mean = mean_over(x, others)
    centred = x - by_channel(mean, x)
    variance = mean_over(centred * centred, others)
    results = (normalised(x, mean, variance, weight, bias, eps), mean, variance)
    if running_mean is None or running_var is None:
        return results
    count = math.prod(x.shape[d] for d in others)
    unbiased = divided(F.total(centred * centred, others), count - 1)
    return *results, updated(running_mean, mean, momentum), updated(running_var, unbiased, momentum)


def updated(running: Node, new: Node, momentum: float) -> Node:
    m = F.as_node(momentum)
    return running * (1 - m) + F.detach(new) * m


@op("batch_norm_sums", _NEURAL, example="x[n,c,s]")
def batch_norm_sums(x: Node) -> tuple[Node, Node]:
    """Σ x and Σ x² for each channel of x [n, c, …]: what a synchronised batch norm adds up over its group."""
    others = [d for d in range(x.ndim) if d != 1]
    return F.total(x, others), F.total(x * x, others)


@op("batch_norm_apply", _NEURAL, example="x[n,c] total[c] squares[c] weight[c] bias[c]; count=4096")
def batch_norm_apply(
    x: Node, total: Node, squares: Node, weight: Node | None = None, bias: Node | None = None, *, count: int, eps: float = 1e-5
) -> tuple[Node, Node, Node]:
    """Normalises x [n, c, …] with the mean and variance that follow from Σ x and Σ x² over `count` elements; returns those too."""
    mean = divided(total, count)
    variance = divided(squares, count) - mean * mean
    return normalised(x, mean, variance, weight, bias, eps), mean, variance


@op("embedding", _NEURAL, example="ids:i64[b] weight[v,h]")
def embedding(ids: Node, weight: Node, *, start: int = 0) -> Node:
    """Rows of `weight` by id. `weight` holds the rows from `start` on; an id outside gives zeros (vocabulary parallel)."""
    return F.contract("... v, v h -> ... h", F.one_hot(ids, weight.shape[0], start), weight)
