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


def over_valid(loss: Node, target: Node, ignore_index: int, reduction: str) -> Node:
    """Losses combined; an ignored target counts neither in the sum nor in the mean."""
    valid = ~F.call("eq", target, ignore_index)
    loss = F.select(valid, loss, 0)
    if reduction == "none":
        return loss
    whole = F.total(loss, range(loss.ndim))
    return whole if reduction == "sum" else whole / F.total(F.cast(valid, "real"), range(valid.ndim))


def picked(scores: Node, target: Node) -> Node:
    """scores[…, target]."""
    if target.shape != scores.shape[:-1]:
        raise F.ShapeError(f"targets {list(target.shape)} for classes {list(scores.shape)}")
    return F.contract("... v, ... v -> ...", scores, F.one_hot(target, scores.shape[-1]))


@op("cross_entropy", _LOSS, example="logits[n,v] target:i64[n]")
def cross_entropy(
    logits: Node, target: Node, *, reduction: Reduction = "mean", ignore_index: int = -100, label_smoothing: float = 0
) -> Node:
    """−log softmax(logits)[target] over the last dimension; ignored targets count neither in the sum nor in the mean.

    Label smoothing ε spreads the share ε of the target evenly over all classes."""
    scores = log_softmax_of(logits, -1)
    loss = -picked(scores, target)
    if label_smoothing != 0:
        smoothing = F.as_node(label_smoothing)
        even = F.total(scores, [-1]) * Fraction(-1, scores.shape[-1])
        loss = loss * (1 - smoothing) + even * smoothing
    return over_valid(loss, target, ignore_index, reduction)


@op("nll_loss", _LOSS, example="scores[n,v] target:i64[n]")
def nll_loss(scores: Node, target: Node, *, reduction: Reduction = "mean", ignore_index: int = -100) -> Node:
    """−scores[target] over the last dimension; ignored targets count neither in the sum nor in the mean."""
    return over_valid(-picked(scores, target), target, ignore_index, reduction)


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
