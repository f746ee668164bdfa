"""Mixture of experts: which experts a token goes to, and with what weight."""

from __future__ import annotations

import math
from typing import Literal

from trainverify.ops.arithmetic import logistic
from trainverify.ops.neural import softmax_of
from trainverify.ops.table import op
from trainverify.primitives import node as F
from trainverify.primitives.node import Node

_MOE = "mixture of experts"


def best(x: Node, k: int) -> Node:
    """Positions of the k largest elements along the last dimension."""
    return F.take(F.rowwise("argsort", x, -1, descending=True), -1, 0, k)


def chosen(x: Node, k: int) -> Node:
    """1 for the k largest elements along the last dimension, else 0."""
    return F.total(F.one_hot(best(x, k), x.shape[-1]), [-2])


@op("moe_gate", _MOE, example="logits[t,e]; top_k=2, normalize=True")
def moe_gate(
    logits: Node,
    bias: Node | None = None,
    *,
    top_k: int,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = False,
    scale: float = 1,
    groups: int = 1,
    top_groups: int = 1,
    group_score: Literal["max", "top2"] = "max",
) -> Node:
    """Weight of every expert for every token: its score if it is among the top_k, else 0; divided by their sum if `normalize`.

    A bias is added for the choice only. With groups, only experts of the best `top_groups` groups can be
    chosen; a group counts as its best expert, or as the sum of its best two."""
    scores = softmax_of(logits, -1) if scoring == "softmax" else logistic(logits)
    choice = scores if bias is None else scores + bias  # only its order matters, which has no derivative
    if groups > 1:
        experts = logits.shape[-1]
        parts = F.reshape(choice, (*logits.shape[:-1], groups, experts // groups))
        rank = F.reduce("max", parts, [-1]) if group_score == "max" else F.total(F.gather(parts, best(parts, 2), -1), [-1])
        allowed = F.reshape(chosen(rank, top_groups), (*rank.shape, 1)) > 0
        choice = F.reshape(F.select(allowed, parts, -math.inf), logits.shape)
    weights = scores * chosen(choice, top_k)
    if normalize:
        weights = weights / F.total(weights, [-1], keepdim=True)
    return weights if scale == 1 else weights * scale
