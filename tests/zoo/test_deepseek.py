"""A whole training step of small DeepSeek models, against one in plain PyTorch that sends every token to its experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from completion.running import assert_same, differing, draw, outputs
from trainverify.graph.program import Program
from trainverify.zoo import deepseek
from trainverify.zoo.deepseek import BALANCE, Config, Gate
from zoo.training import Reported, Tensors, changed, complete, torch_step

EPS = 1e-6
WEIGHT = {BALANCE: 0.3}
PLAIN = Gate(experts=6, active=2)
GROUPED = Gate(experts=6, active=3, scale=1.5, groups=3, top_groups=2)
SIGMOID = Gate(6, 2, "sigmoid", normalize=True, scale=2.5, groups=2, top_groups=1, group_score="top2", bias=True)
SMALL = Config(
    layers=3,
    dense_layers=1,
    hidden=10,
    heads=3,
    ffn=7,
    expert_ffn=5,
    shared_experts=2,
    gate=PLAIN,
    vocabulary=11,
    sequence=5,
    batch=2,
    q_rank=8,
    kv_rank=6,
    head=4,
    rotary=6,
    value=2,
    context=9,
)


def drawn(program: Program, config: Config, seed: int) -> dict[str, Any]:
    values = draw(program, seed)
    table = np.outer(np.arange(9), 10000.0 ** (-np.arange(config.rotary // 2) / (config.rotary // 2)))
    return values | {"rope.cos": np.cos(table), "rope.sin": np.sin(table)}


def rms(x: Any, weight: Any, eps: float) -> Any:
    return weight * x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps)


def turned(x: Any, p: Tensors) -> Any:
    """Pairs (2i, 2i + 1) of x [b, s, h, d] as complex numbers, times e^(i·angle)."""
    turn = torch.complex(p["rope.cos"], p["rope.sin"])[: x.shape[1], None]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)


def attention(config: Config, p: Tensors, at: str, x: Any) -> Any:
    if config.q_rank is None:
        q = x @ p[at + "q_proj"].T
    else:
        q = rms(x @ p[at + "q_a_proj"].T, p[at + "q_a_layernorm"], EPS) @ p[at + "q_b_proj"].T
    q = q.unflatten(-1, (config.heads, -1))
    joint = x @ p[at + "kv_a_proj_with_mqa"].T
    latent = rms(joint[..., : config.kv_rank], p[at + "kv_a_layernorm"], EPS)
    kv = (latent @ p[at + "kv_b_proj"].T).unflatten(-1, (config.heads, -1))
    k_turned = turned(joint[..., None, config.kv_rank :], p)[:, :, 0]
    hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    heads = []
    for h in range(config.heads):
        still = q[:, :, h, : config.head] @ kv[:, :, h, : config.head].mT
        moving = turned(q[:, :, :, config.head :], p)[:, :, h] @ k_turned.mT
        scores = (still + moving) / (config.head + config.rotary) ** 0.5
        heads.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ kv[:, :, h, config.head :])
    return torch.cat(heads, -1) @ p[at + "o_proj"].T


def feed_forward(p: Tensors, at: str, x: Any) -> Any:
    return (functional.silu(x @ p[at + "gate_proj"].T) * (x @ p[at + "up_proj"].T)) @ p[at + "down_proj"].T


def experts(config: Config, p: Tensors, at: str, x: Any) -> tuple[Any, Any]:
    """One token after the other."""
    gate = config.gate
    rows = x.flatten(0, 1)
    logits = rows @ p[at + "gate.weight"].T
    scores = logits.softmax(-1) if gate.scoring == "softmax" else logits.sigmoid()
    chosen = torch.zeros_like(scores)
    answers = []
    for t, row in enumerate(rows):
        order = scores[t].detach() + (p[at + "gate.bias"] if gate.bias else 0)
        if gate.groups > 1:
            members = order.view(gate.groups, -1)
            rank = members.amax(-1) if gate.group_score == "max" else members.topk(2, dim=-1).values.sum(-1)
            allowed = torch.zeros(gate.groups, dtype=torch.bool).index_fill(0, rank.topk(gate.top_groups).indices, True)
            order = members.masked_fill(~allowed[:, None], -torch.inf).flatten()
        picked = order.topk(gate.active).indices
        chosen[t, picked] = 1
        weights = scores[t, picked]
        weights = gate.scale * (weights / weights.sum() if gate.normalize else weights)
        answer = torch.zeros_like(row)
        for e, weight in zip(picked, weights, strict=True):
            opened, up, down = (p[f"{at}experts.{n}_proj"][e] for n in ("gate", "up", "down"))
            answer = answer + weight * ((functional.silu(row @ opened) * (row @ up)) @ down)
        answers.append(answer)
    shares = scores / scores.sum(-1, keepdim=True)
    shape = (config.batch, config.sequence, -1) if config.balance == "sequence" else (1, config.batch * config.sequence, -1)
    load = gate.experts / gate.active * (chosen.view(shape).mean(1) * shares.view(shape).mean(1)).sum(-1).mean()
    shared = feed_forward(p, at + "shared_experts.", x) if config.shared_experts else 0
    return torch.stack(answers).view_as(x) + shared, load


def model(config: Config) -> Any:
    def forward(p: Tensors) -> Reported:
        x = p["embed_tokens"][p["tokens"]]
        balance = torch.zeros((), dtype=torch.float64)
        for i in range(config.layers):
            at = f"layers.{i}."
            x = x + attention(config, p, at + "self_attn.", rms(x, p[at + "input_layernorm"], EPS))
            y = rms(x, p[at + "post_attention_layernorm"], EPS)
            if i < config.dense_layers:
                x = x + feed_forward(p, at + "mlp.", y)
            else:
                y, load = experts(config, p, at + "mlp.", y)
                x, balance = x + y, balance + load
        logits = rms(x, p["norm"], EPS) @ p["lm_head"].T
        loss = functional.cross_entropy(logits.flatten(0, 1), p["labels"].flatten(), ignore_index=-100)
        return Reported(loss, {BALANCE: balance}, {})

    return forward


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(replace(SMALL, q_rank=None), id="top-2"),
        pytest.param(replace(SMALL, gate=GROUPED, balance="batch", shared_experts=0), id="groups"),
        pytest.param(replace(SMALL, gate=SIGMOID), id="sigmoid"),
    ],
)
def test_step(config: Config) -> None:
    program = complete(deepseek.forward(config), WEIGHT)
    values = drawn(program, config, 1)
    assert_same(outputs(program, values), torch_step(program, values, model(config), WEIGHT))


GATE = "gradient of layers.1.mlp.gate.weight"


@pytest.mark.parametrize(
    ("gate", "op", "attrs"),
    [
        (PLAIN, "moe_gate", {"top_k": 3}),
        (PLAIN, "moe_gate", {"normalize": True}),
        (GROUPED, "moe_gate", {"top_groups": 3}),
        (SIGMOID, "moe_gate", {"group_score": "max"}),
        (SIGMOID, "apply_rotary_emb", {"style": "half"}),
        (SIGMOID, "attention", {"scale": 0.5}),  # of the part without rotary embedding
    ],
)
def test_a_wrong_forward_is_noticed(gate: Gate, op: str, attrs: dict[str, Any]) -> None:
    config = replace(SMALL, gate=gate)
    wrong = complete(changed(deepseek.forward(config), op, **attrs), WEIGHT)
    values = drawn(wrong, config, 1)
    found = differing(outputs(wrong, values), torch_step(wrong, values, model(config), WEIGHT))
    assert {"loss", "metric grad_norm", GATE, "updated parameter layers.1.mlp.gate.weight"} <= found


def test_a_wrong_auxiliary_weight_is_noticed() -> None:
    """Only gradients see it: neither loss nor metric is weighted."""
    wrong = complete(deepseek.forward(SMALL), {BALANCE: 0.6})
    values = drawn(wrong, SMALL, 1)
    found = differing(outputs(wrong, values), torch_step(wrong, values, model(SMALL), WEIGHT))
    assert GATE in found
    assert not {"loss", "metric " + BALANCE} & found


def test_balance_over_the_batch_is_another_loss() -> None:
    wrong = complete(deepseek.forward(replace(SMALL, balance="batch")), WEIGHT)
    values = drawn(wrong, SMALL, 1)
    assert {"metric " + BALANCE, GATE} <= differing(outputs(wrong, values), torch_step(wrong, values, model(SMALL), WEIGHT))
