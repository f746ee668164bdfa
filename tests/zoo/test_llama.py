"""A whole training step of a small Llama, against one in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from completion.running import assert_same, differing, draw, outputs
from trainverify.graph.program import Program
from trainverify.zoo import llama
from zoo.training import Reported, Tensors, changed, complete, rewired, torch_step

SMALL = llama.Config(layers=2, hidden=24, heads=6, kv_heads=2, ffn=10, vocabulary=11, sequence=5, batch=3, context=7)


def angles(rows: int, size: int) -> Any:
    return np.outer(np.arange(rows), 10000.0 ** (-np.arange(size // 2) / (size // 2)))


def drawn(program: Program, config: llama.Config, seed: int) -> dict[str, Any]:
    values = draw(program, seed)
    table = angles(config.context or config.sequence, config.head)
    values |= {"rope.cos": np.cos(table), "rope.sin": np.sin(table)}
    if config.packed:  # three documents, two of them in one row
        values["segments"] = np.array([[0, 0, 0, 1, 1], [2, 2, 2, 2, 2], [1, 1, 0, 0, 0]])
        values["positions"] = np.array([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4], [0, 1, 0, 1, 2]])
    return values


def rms(x: Any, weight: Any, eps: float) -> Any:
    return weight * x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps)


def turned(x: Any, positions: Any) -> Any:
    """Pairs (i, i + d/2) of x [b, s, h, d] as complex numbers, times e^(i·angle)."""
    half = x.shape[-1] // 2
    angle = torch.from_numpy(angles(7, x.shape[-1]))[positions][:, :, None]
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def model(config: llama.Config) -> Any:
    def forward(p: Tensors) -> Reported:
        x = p["tok_embeddings"][p["tokens"]]
        batch, sequence, _ = x.shape
        positions = p["positions"] if config.packed else torch.arange(sequence).expand(batch, -1)
        seen = torch.ones(sequence, sequence).tril().bool().expand(batch, -1, -1)
        if config.packed:
            seen = seen & (p["segments"][:, :, None] == p["segments"][:, None, :])
        for i in range(config.layers):
            at = f"layers.{i}."
            y = rms(x, p[at + "attention_norm"], config.eps)
            q, k, v = ((y @ p[f"{at}attention.w{n}"].T).unflatten(-1, (-1, config.head)) for n in "qkv")
            q, k = turned(q, positions), turned(k, positions)
            heads = []
            for h in range(config.heads):
                g = h // (config.heads // config.kv_heads)
                scores = q[:, :, h] @ k[:, :, g].mT / config.head**0.5
                heads.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[:, :, g])
            x = x + torch.cat(heads, -1) @ p[at + "attention.wo"].T
            y = rms(x, p[at + "ffn_norm"], config.eps)
            w1, w2, w3 = (p[f"{at}feed_forward.w{n}"] for n in (1, 2, 3))
            x = x + (functional.silu(y @ w1.T) * (y @ w3.T)) @ w2.T
        logits = rms(x, p["norm"], config.eps) @ p["lm_head"].T
        return Reported(functional.cross_entropy(logits.flatten(0, 1), p["labels"].flatten(), ignore_index=-100), {}, {})

    return forward


@pytest.mark.parametrize("packed", [False, True])
def test_step(packed: bool) -> None:
    config = replace(SMALL, packed=packed)
    program = complete(llama.forward(config))
    values = drawn(program, config, 1)
    assert (values["labels"] == -100).any()
    results, wanted = outputs(program, values), torch_step(program, values, model(config))
    assert_same(results, wanted)
    assert results["metric clip_factor"] < 1


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("apply_rotary_emb", {"style": "interleaved"}),
        ("attention", {"is_causal": False}),
        ("slice", {"start": 1, "stop": 6}),  # positions off by one, for cos only
        ("rms_norm", {"eps": 1e-3}),
    ],
)
def test_a_wrong_forward_is_noticed(op: str, attrs: dict[str, Any]) -> None:
    forward = llama.forward(SMALL)
    wrong = complete(changed(forward, op, **attrs))
    values = drawn(wrong, SMALL, 1)
    found = differing(outputs(wrong, values), torch_step(wrong, values, model(SMALL)))
    assert {"loss", "metric grad_norm", "gradient of layers.0.attention.wq", "updated parameter layers.0.attention.wq"} <= found


@pytest.mark.parametrize(
    ("op", "attrs"),
    [("attention.grad", {"is_causal": False}), ("apply_rotary_emb.grad", {"style": "interleaved"}), ("rms_norm.grad", {"eps": 1e-3})],
)
def test_a_wrong_backward_is_noticed(op: str, attrs: dict[str, Any]) -> None:
    wrong = changed(complete(llama.forward(SMALL)), op, **attrs)
    values = drawn(wrong, SMALL, 1)
    found = differing(outputs(wrong, values), torch_step(wrong, values, model(SMALL)))
    assert "loss" not in found
    assert {"metric grad_norm", "gradient of layers.0.attention.wq", "updated state layers.0.attention.wq.m"} <= found


def test_a_wrong_count_of_tokens_is_noticed_where_clipping_does_not_hide_it() -> None:
    wrong = complete(changed(llama.forward(SMALL), "ne", value=3))  # counts the ignored tokens
    values = drawn(wrong, SMALL, 1)
    found = differing(outputs(wrong, values), torch_step(wrong, values, model(SMALL)), 1e-6)
    assert {"loss", "metric grad_norm", "metric clip_factor", "gradient of layers.0.attention.wq"} <= found
    assert not any(n.startswith("updated") for n in found)


def test_a_skipped_residual_is_noticed() -> None:
    wrong = complete(rewired(llama.forward(SMALL), "layers.1.residual", "layers.1.attention.residual", "layers.0.residual"))
    values = drawn(wrong, SMALL, 1)
    assert "loss" in differing(outputs(wrong, values), torch_step(wrong, values, model(SMALL)))
