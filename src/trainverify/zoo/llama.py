"""Llama: RMSNorm, rotary embedding, grouped-query attention, SwiGLU, untied output layer."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import trainverify.build.program as build
from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.program import Program
from trainverify.zoo.language import Loss, Rotary, join_heads, split_heads, swiglu, token_loss, tokens


@dataclass(frozen=True)
class Config:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    sequence: int
    batch: int = 1
    context: int | None = None  # rows of the rotary tables; the sequence by default
    eps: float = 1e-5
    loss: Loss = "per_token"
    dtype: str = "f32"  # of weights
    packed: bool = False  # several documents in a sequence: `segments` and `positions` are inputs

    @property
    def head(self) -> int:
        return self.hidden // self.heads


def _llama3(layers: int, hidden: int, heads: int, ffn: int) -> Config:
    return Config(layers, hidden, heads, kv_heads=8, ffn=ffn, vocabulary=128256, sequence=8192)


PRESETS: Final[dict[str, Config]] = {
    "llama3-8b": _llama3(32, 4096, 32, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 28672),
    "llama3-405b": _llama3(126, 16384, 128, 53248),
}


def forward(config: Config) -> Program:
    b = build.program("llama")
    b.dtype = config.dtype
    ids, labels = tokens(b, config.batch, config.sequence, config.vocabulary)
    mask = positions = None
    rows = config.context or config.sequence
    if config.packed:
        segments = b.input("segments", (config.batch, config.sequence), "i64", ids=config.sequence)
        positions = b.input("positions", (config.batch, config.sequence), "i64", ids=rows)
        mask = b.unsqueeze(b.segment_mask(segments, segments, is_causal=True, name="mask.pairs"), dim=1, name="mask")
    rotary = Rotary(b, rows, config.head, config.sequence, "half", positions)
    x = b.embedding(ids, b.parameter("tok_embeddings", (config.vocabulary, config.hidden)), name="embedded")
    for i in range(config.layers):
        b.prefix = at = f"layers.{i}."
        normed = b.rms_norm(x, b.parameter(at + "attention_norm", (config.hidden,)), eps=config.eps, name="attention.normed")
        x = b.add(x, attention(b, config, at, normed, rotary, mask), name="attention.residual")
        normed = b.rms_norm(x, b.parameter(at + "ffn_norm", (config.hidden,)), eps=config.eps, name="ffn.normed")
        x = b.add(x, feed_forward(b, config, at, normed), name="residual")
    b.prefix = ""
    x = b.rms_norm(x, b.parameter("norm", (config.hidden,)), eps=config.eps, name="normed")
    logits = b.linear(x, b.parameter("lm_head", (config.vocabulary, config.hidden)), name="logits")
    b.loss(token_loss(b, logits, labels, config.loss))
    return b.build()


def attention(b: ProgramBuilder, config: Config, at: str, x: Tensor, rotary: Rotary, mask: Tensor | None) -> Tensor:
    wide, narrow = config.heads * config.head, config.kv_heads * config.head
    q = b.linear(x, b.parameter(at + "attention.wq", (wide, config.hidden)), name="attention.q")
    k = b.linear(x, b.parameter(at + "attention.wk", (narrow, config.hidden)), name="attention.k")
    v = b.linear(x, b.parameter(at + "attention.wv", (narrow, config.hidden)), name="attention.v")
    q = rotary.turn(b, split_heads(b, q, config.heads, "attention.q"), "attention.q.turned")
    k = rotary.turn(b, split_heads(b, k, config.kv_heads, "attention.k"), "attention.k.turned")
    v = split_heads(b, v, config.kv_heads, "attention.v")
    how = {"is_causal": True} if mask is None else {}
    mixed, _ = b.attention(q, k, v, *([] if mask is None else [mask]), **how, name=["attention.mixed", "attention.logsumexp"])
    return b.linear(join_heads(b, mixed, "attention"), b.parameter(at + "attention.wo", (config.hidden, wide)), name="attention.out")


def feed_forward(b: ProgramBuilder, config: Config, at: str, x: Tensor) -> Tensor:
    gate = b.parameter(at + "feed_forward.w1", (config.ffn, config.hidden))
    down = b.parameter(at + "feed_forward.w2", (config.hidden, config.ffn))
    up = b.parameter(at + "feed_forward.w3", (config.ffn, config.hidden))
    return swiglu(b, x, gate, up, down, "ffn")
