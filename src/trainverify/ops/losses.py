"""Losses. Classes are the last dimension; `reduction` combines the elements' losses."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from trainverify.ops.neural import log_softmax_of
from trainverify.ops.reductions import mean_over
from trainverify.ops.table import op
from trainverify.primitives import node as F
from trainverify.primitives.node import Node

_LOSS = "loss"
Reduction = Literal["mean", "sum", "none"]


def reduced(loss: Node, reduction: str) -> Node:
    """Losses combined; a mean counts every element."""
    if reduction == "none":
        return loss
    dims = range(loss.ndim)
    return F.total(loss, dims) if reduction == "sum" else mean_over(loss, dims)


def over_valid(loss: Node, target: Node, ignore_index: int, reduction: str, weights: Node | None = None) -> Node:
    """Losses combined; an ignored target counts neither in the sum nor in the mean, another one as much as its weight."""
    valid = ~F.call("eq", target, ignore_index)
    loss = F.select(valid, loss, 0)
    if reduction == "none":
        return loss
    whole = F.total(loss, range(loss.ndim))
    counts = F.cast(valid, "real") if weights is None else F.select(valid, weights, 0)
    return whole if reduction == "sum" else whole / F.total(counts, range(valid.ndim))


def picked(scores: Node, target: Node) -> Node:
    """scores[…, target]."""
    if target.shape != scores.shape[:-1]:
        raise F.ShapeError(f"targets {list(target.shape)} for classes {list(scores.shape)}")
    return F.contract("... v, ... v -> ...", scores, F.one_hot(target, scores.shape[-1]))


def weight_of(target: Node, weight: Node, classes: int) -> Node:
    """weight[target]."""
    if weight.shape != (classes,):
        raise F.ShapeError(f"weights {list(weight.shape)} for {classes} classes")
    return F.contract("... v, v -> ...", F.one_hot(target, classes), weight)


@op("cross_entropy", _LOSS, example="logits[n,v] target:i64[n]")
def cross_entropy(
    logits: Node,
    target: Node,
    weight: Node | None = None,
    *,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0,
) -> Node:
    """−log softmax(logits)[target] over the last dimension; ignored targets count neither in the sum nor in the mean.

    Label smoothing ε spreads the share ε of the target evenly over all classes. A class counts as much as its `weight`."""
    scores = log_softmax_of(logits, -1)
    loss = -picked(scores, target)
    weights = None if weight is None else weight_of(target, weight, scores.shape[-1])
    loss = loss if weights is None else loss * weights
    if label_smoothing != 0:
        smoothing = F.as_node(label_smoothing)
        even = F.total(scores if weight is None else scores * weight, [-1]) * Fraction(-1, scores.shape[-1])
        loss = loss * (1 - smoothing) + even * smoothing
    return over_valid(loss, target, ignore_index, reduction, weights)


@op("nll_loss", _LOSS, example="scores[n,v] target:i64[n]")
def nll_loss(scores: Node, target: Node, weight: Node | None = None, *, reduction: Reduction = "mean", ignore_index: int = -100) -> Node:
    """−scores[target] over the last dimension; ignored targets do not count, a class counts as much as its `weight`."""
    loss = -picked(scores, target)
    weights = None if weight is None else weight_of(target, weight, scores.shape[-1])
    return over_valid(loss if weights is None else loss * weights, target, ignore_index, reduction, weights)


@op("mse_loss", _LOSS, example="x[a,b] target[a,b]; reduction='sum'")
def mse_loss(x: Node, target: Node, *, reduction: Reduction = "mean") -> Node:
    """(x − target)²."""
    return reduced((x - target) * (x - target), reduction)


@op("binary_cross_entropy", _LOSS, example="p[a,b] target[a,b]; reduction='sum'")
def binary_cross_entropy(p: Node, target: Node, *, reduction: Reduction = "mean") -> Node:
    """−target·log p − (1 − target)·log(1 − p), 0 < p < 1 (PyTorch cuts the logarithms off at −100)."""
    return reduced(-(target * F.call("log", p) + (1 - target) * F.call("log", 1 - p)), reduction)


@op("binary_cross_entropy_with_logits", _LOSS, example="x[a,b] target[a,b]; reduction='sum'")
def binary_cross_entropy_with_logits(x: Node, target: Node, *, reduction: Reduction = "mean") -> Node:
    """Binary cross entropy of p = sigmoid(x): log(1 + eˣ) − target·x."""
    return reduced(F.call("log", 1 + F.call("exp", x)) - target * x, reduction)
