"""GPT-2 and GPT-3: learned positions, LayerNorm, GELU, biases, one matrix for embedding and output."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import trainverify.build.program as build
from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.program import Program
from trainverify.zoo.language import Loss, join_heads, split_heads, token_loss, tokens


@dataclass(frozen=True)
class Config:
    layers: int
    hidden: int
    heads: int
    vocabulary: int = 50257
    sequence: int = 1024
    batch: int = 1
    context: int | None = None  # rows of the position table; the sequence by default
    ffn: int | None = None  # four times the hidden size by default
    eps: float = 1e-5
    gelu: Literal["none", "tanh"] = "tanh"
    loss: Loss = "per_token"
    dtype: str = "f32"  # of weights


PRESETS: Final[dict[str, Config]] = {
    "gpt2": Config(12, 768, 12),
    "gpt2-medium": Config(24, 1024, 16),
    "gpt2-large": Config(36, 1280, 20),
    "gpt2-xl": Config(48, 1600, 25),
    "gpt3-175b": Config(96, 12288, 96, sequence=2048),
}


def forward(config: Config) -> Program:
    b = build.program("gpt")
    b.dtype = config.dtype
    ids, labels = tokens(b, config.batch, config.sequence, config.vocabulary)
    wte = b.parameter("wte", (config.vocabulary, config.hidden))
    wpe = b.parameter("wpe", (config.context or config.sequence, config.hidden))
    positions = b.slice(wpe, dim=0, start=0, stop=config.sequence, name="positions")
    x = b.add(b.embedding(ids, wte, name="embedded"), positions, name="placed")
    for i in range(config.layers):
        b.prefix = at = f"h.{i}."
        x = b.add(x, attention(b, config, at, norm(b, config, at + "ln_1", x, "ln_1.out")), name="attn.residual")
        x = b.add(x, feed_forward(b, config, at, norm(b, config, at + "ln_2", x, "ln_2.out")), name="residual")
    b.prefix = ""
    logits = b.linear(norm(b, config, "ln_f", x, "ln_f.out"), wte, name="logits")
    b.loss(token_loss(b, logits, labels, config.loss))
    return b.build()


def norm(b: ProgramBuilder, config: Config, parameter: str, x: Tensor, name: str) -> Tensor:
    weight, bias = (b.parameter(f"{parameter}.{n}", (config.hidden,)) for n in ("weight", "bias"))
    return b.layer_norm(x, weight, bias, eps=config.eps, name=name)


def linear(b: ProgramBuilder, parameter: str, x: Tensor, size: int, name: str) -> Tensor:
    weight = b.parameter(parameter + ".weight", (size, x.shape[-1]))
    return b.linear(x, weight, b.parameter(parameter + ".bias", (size,)), name=name)


def attention(b: ProgramBuilder, config: Config, at: str, x: Tensor) -> Tensor:
    joint = linear(b, at + "attn.c_attn", x, 3 * config.hidden, "attn.qkv")
    parts = b.split(joint, sizes=(config.hidden,) * 3, dim=-1, name=["attn.q", "attn.k", "attn.v"])
    q, k, v = (split_heads(b, part, config.heads, f"attn.{n}") for part, n in zip(parts, "qkv", strict=True))
    mixed, _ = b.attention(q, k, v, is_causal=True, name=["attn.mixed", "attn.logsumexp"])
    return linear(b, at + "attn.c_proj", join_heads(b, mixed, "attn"), config.hidden, "attn.out")


def feed_forward(b: ProgramBuilder, config: Config, at: str, x: Tensor) -> Tensor:
    wide = linear(b, at + "mlp.c_fc", x, config.ffn or 4 * config.hidden, "mlp.wide")
    return linear(b, at + "mlp.c_proj", b.gelu(wide, approximate=config.gelu, name="mlp.gelu"), config.hidden, "mlp.out")
