"""A whole training step of a small GPT, against one in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from completion.running import assert_same, differing, draw, outputs
from trainverify.zoo import gpt
from zoo.training import Reported, Tensors, changed, complete, torch_step

SMALL = gpt.Config(layers=2, hidden=15, heads=3, vocabulary=13, sequence=4, batch=2, context=6, ffn=14)


def model(config: gpt.Config) -> Any:
    def forward(p: Tensors) -> Reported:
        def norm(x: Any, name: str) -> Any:
            return functional.layer_norm(x, (config.hidden,), p[name + ".weight"], p[name + ".bias"], config.eps)

        def linear(x: Any, name: str) -> Any:
            return functional.linear(x, p[name + ".weight"], p[name + ".bias"])

        x = p["wte"][p["tokens"]] + p["wpe"][torch.arange(config.sequence)]
        for i in range(config.layers):
            y = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
            q, k, v = (part.unflatten(-1, (config.heads, -1)).transpose(1, 2) for part in y.chunk(3, -1))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + linear(y.transpose(1, 2).flatten(2), f"h.{i}.attn.c_proj")
            y = functional.gelu(linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate=config.gelu)
            x = x + linear(y, f"h.{i}.mlp.c_proj")
        logits = norm(x, "ln_f") @ p["wte"].T
        return Reported(functional.cross_entropy(logits.flatten(0, 1), p["labels"].flatten(), ignore_index=-100), {}, {})

    return forward


@pytest.mark.parametrize("gelu", ["tanh", "none"])
def test_step(gelu: Any) -> None:
    config = replace(SMALL, gelu=gelu)
    program = complete(gpt.forward(config))
    values = draw(program, 1)
    results = outputs(program, values)
    assert_same(results, torch_step(program, values, model(config)))
    assert (results["gradient of wpe"][SMALL.sequence :] == 0).all()  # positions that no token has


@pytest.mark.parametrize(("op", "attrs"), [("gelu", {"approximate": "none"}), ("layer_norm", {"eps": 1e-3}), ("attention", {"scale": 0.5})])
def test_a_wrong_forward_is_noticed(op: str, attrs: dict[str, Any]) -> None:
    wrong = complete(changed(gpt.forward(SMALL), op, **attrs))
    values = draw(wrong, 1)
    found = differing(outputs(wrong, values), torch_step(wrong, values, model(SMALL)))
    assert {"loss", "gradient of wte", "updated parameter wte", "updated state wte.m"} <= found


def test_half_of_the_tied_gradient_is_noticed() -> None:
    """The table's gradient from the output layer alone."""
    program = complete(gpt.forward(SMALL))
    tied = program.output("gradient", "wte")
    (both,) = (op for op in program.ops if tied in op.outputs)
    assert both.name == "add"
    lost = replace(both, name="identity", inputs=both.inputs[:1])
    wrong = replace(program, ops=tuple(lost if op is both else op for op in program.ops))
    values = draw(wrong, 1)
    found = differing(outputs(wrong, values), torch_step(wrong, values, model(SMALL)))
    assert {"gradient of wte", "metric grad_norm", "updated parameter wte"} <= found
    assert "loss" not in found
    assert not any(n.startswith("gradient") and n != "gradient of wte" for n in found)
