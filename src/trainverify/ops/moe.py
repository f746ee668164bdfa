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


@op("moe_route", _MOE, example="x[t,h] weight[e=4,h]; top_k=2")
def moe_route(
    x: Node,
    weight: Node,
    *,
    top_k: int,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    scale: float = 1,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[Node, Node]:
    """The top_k experts of every token, by the scores of x·weightᵀ: their weights [t, k] and their numbers [t, k].

    With groups, only experts of the best `top_groups` groups can be chosen; a group counts as its best expert. Weights of
    sigmoid scores are divided by their sum."""
    logits = F.contract("t h, e h -> t e", x, weight)
    scores = softmax_of(logits, -1) if scoring == "softmax" else logistic(logits)
    choice = scores
    if groups > 1:
        tokens, experts = logits.shape
        parts = F.reshape(choice, (tokens, groups, experts // groups))
        if top_k * groups > top_groups * experts:
            raise F.ShapeError(f"{top_k} experts from {top_groups} of {groups} groups with {experts // groups} each")
        allowed = F.reshape(chosen(F.reduce("max", parts, [-1]), top_groups), (tokens, groups, 1))
        choice = F.reshape(parts * allowed, logits.shape)  # scores are positive: 0 is as good as −∞
    ids = best(choice, top_k)
    weights = F.gather(scores, ids, -1)
    if scoring == "sigmoid":
        weights = weights / F.total(weights, [-1], keepdim=True)
    return weights if scale == 1 else weights * scale, ids


@op("moe_experts", _MOE, example="x[t,h] ids:i64[t,k] weights[t,k] gate[e,d,h] up[e,d,h] down[e,h,d]; start=0")
def moe_experts(x: Node, ids: Node, weights: Node, gate: Node, up: Node, down: Node, *, start: int = 0) -> Node:
    """Σ over chosen experts of weight · down·(silu(gate·x) · up·x). Here are the experts from `start` on; others give nothing."""
    share = F.contract("t k e, t k -> t e", F.one_hot(ids, gate.shape[0], start), weights)
    inner = F.contract("t h, e d h -> t e d", x, gate)
    inner = inner * logistic(inner) * F.contract("t h, e d h -> t e d", x, up)
    return F.contract("t e, t e d, e h d -> t h", share, inner, down)
