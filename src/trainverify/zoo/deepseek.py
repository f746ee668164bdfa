"""DeepSeek V2 and V3: multi-head latent attention with decoupled rotary embedding, mixture of experts with shared experts.

Without a capacity every token goes through all experts and is weighted by the gate, 0 for those it was not sent to: what dispatch,
expert and combine compute together when no expert overflows. With one, every expert has that many places for each sequence; tokens are
counted in order, and those beyond the last place are dropped (GShard, with sequences as groups).
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Literal

import trainverify.build.program as build
from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import BuildError, Tape, Tensor
from trainverify.graph.program import Program
from trainverify.zoo.language import Loss, Rotary, join_heads, split_heads, swiglu, token_loss, tokens

BALANCE: Final = "load_balance"  # the metric to give a weight: complete(…, auxiliary={BALANCE: 0.001})


@dataclass(frozen=True)
class Gate:
    """How a token chooses experts."""

    experts: int
    active: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = False  # weights of the chosen ones add up to `scale`
    scale: float = 1
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    bias: bool = False  # a buffer that is added for the choice only


@dataclass(frozen=True)
class Config:
    layers: int
    dense_layers: int  # the first ones have no experts
    hidden: int
    heads: int
    ffn: int  # of dense layers
    expert_ffn: int
    shared_experts: int
    gate: Gate
    vocabulary: int
    sequence: int = 4096
    batch: int = 1
    q_rank: int | None = 1536  # none: queries are not compressed
    kv_rank: int = 512
    head: int = 128  # of keys, without the rotary part
    rotary: int = 64
    value: int = 128
    loss: Loss = "per_token"
    balance: Literal["sequence", "batch"] = "sequence"  # over what the load of experts is measured
    context: int | None = None  # rows of the rotary tables; the sequence by default
    capacity: int | None = None  # places of an expert for each sequence; without it no token is dropped


EPS: Final = 1e-6  # of all norms
_V2: Final = Gate(160, 6, scale=16.0, groups=8, top_groups=3)
_V3: Final = Gate(256, 8, "sigmoid", normalize=True, scale=2.5, groups=8, top_groups=4, group_score="top2", bias=True)
PRESETS: Final[dict[str, Config]] = {
    "deepseek-16b": Config(27, 1, 2048, 16, 10944, 1408, 2, Gate(64, 6), 102400, q_rank=None),
    "deepseek-236b": Config(60, 1, 5120, 128, 12288, 1536, 2, _V2, 102400),
    "deepseek-671b": Config(61, 3, 7168, 128, 18432, 2048, 1, _V3, 129280),
}


def forward(config: Config) -> Program:
    b = build.program("deepseek")
    ids, labels = tokens(b, config.batch, config.sequence, config.vocabulary)
    rotary = Rotary(b, config.context or config.sequence, config.rotary, config.sequence, "interleaved")
    x = b.embedding(ids, b.parameter("embed_tokens", (config.vocabulary, config.hidden)), name="embedded")
    balance: Tensor | None = None
    for i in range(config.layers):
        b.prefix = at = f"layers.{i}."
        normed = norm(b, config, at + "input_layernorm", x, "attention.normed")
        x = b.add(x, attention(b, config, at + "self_attn.", normed, rotary), name="attention.residual")
        normed = norm(b, config, at + "post_attention_layernorm", x, "mlp.normed")
        if i < config.dense_layers:
            y = feed_forward(b, at + "mlp.", normed, config.ffn, "mlp")
        else:
            y, load = experts(b, config, at + "mlp.", normed)
            balance = load if balance is None else b.add(balance, load, name="balance.total")
        x = b.add(x, y, name="residual")
    b.prefix = ""
    logits = b.linear(norm(b, config, "norm", x, "normed"), b.parameter("lm_head", (config.vocabulary, config.hidden)), name="logits")
    b.loss(token_loss(b, logits, labels, config.loss))
    if balance is not None:
        b.metric(BALANCE, balance)
    return b.build()


def norm(b: ProgramBuilder, config: Config, parameter: str, x: Tensor, name: str) -> Tensor:
    return b.rms_norm(x, b.parameter(parameter, (x.shape[-1],)), eps=EPS, name=name)


def attention(b: ProgramBuilder, config: Config, at: str, x: Tensor, rotary: Rotary) -> Tensor:
    """Keys and values come from one narrow latent vector per token; the rotary part of the key is shared by all heads."""
    heads, hidden = config.heads, config.hidden
    batch, sequence, _ = x.shape
    size = config.head + config.rotary
    if config.q_rank is None:
        q = b.linear(x, b.parameter(at + "q_proj", (heads * size, hidden)), name="attention.q")
    else:
        narrow = b.linear(x, b.parameter(at + "q_a_proj", (config.q_rank, hidden)), name="attention.q.latent")
        narrow = norm(b, config, at + "q_a_layernorm", narrow, "attention.q.normed")
        q = b.linear(narrow, b.parameter(at + "q_b_proj", (heads * size, config.q_rank)), name="attention.q")
    q, q_turning = b.split(
        split_heads(b, q, heads, "attention.q"),
        sizes=(config.head, config.rotary),
        dim=-1,
        name=["attention.q.still", "attention.q.turning"],
    )
    joint = b.linear(x, b.parameter(at + "kv_a_proj_with_mqa", (config.kv_rank + config.rotary, hidden)), name="attention.kv.joint")
    latent, k_turning = b.split(joint, sizes=(config.kv_rank, config.rotary), dim=-1, name=["attention.kv.latent", "attention.k.turning"])
    latent = norm(b, config, at + "kv_a_layernorm", latent, "attention.kv.normed")
    kv = b.linear(latent, b.parameter(at + "kv_b_proj", (heads * (config.head + config.value), config.kv_rank)), name="attention.kv")
    kv = split_heads(b, kv, heads, "attention.kv")
    k, v = b.split(kv, sizes=(config.head, config.value), dim=-1, name=["attention.k.still", "attention.v"])
    q_turned = rotary.turn(b, q_turning, "attention.q.turned")
    k_turned = rotary.turn(b, split_heads(b, k_turning, 1, "attention.k.turning"), "attention.k.turned")
    k_turned = b.expand(k_turned, shape=(batch, heads, sequence, config.rotary), name="attention.k.shared")
    q = b.concat(q, q_turned, dim=-1, name="attention.q.whole")
    k = b.concat(k, k_turned, dim=-1, name="attention.k.whole")
    mixed, _ = b.attention(q, k, v, is_causal=True, name=["attention.mixed", "attention.logsumexp"])
    return b.linear(join_heads(b, mixed, "attention"), b.parameter(at + "o_proj", (hidden, heads * config.value)), name="attention.out")


def feed_forward(b: ProgramBuilder, at: str, x: Tensor, width: int, name: str) -> Tensor:
    hidden = x.shape[-1]
    gate, up = (b.parameter(f"{at}{n}_proj", (width, hidden)) for n in ("gate", "up"))
    return swiglu(b, x, gate, up, b.parameter(at + "down_proj", (hidden, width)), name)


def experts(b: ProgramBuilder, config: Config, at: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """The mixture of experts, and how unevenly it loads them."""
    gate, width = config.gate, config.expert_ffn
    batch, sequence, hidden = x.shape
    rows = b.reshape(x, shape=(batch * sequence, hidden), name="moe.rows")
    logits = b.linear(rows, b.parameter(at + "gate.weight", (gate.experts, hidden)), name="moe.logits")
    weights = choose(b, gate, at, logits)
    load = unevenness(b, config, logits, weights)
    opened, up, down = (
        b.parameter(f"{at}experts.{n}_proj", (gate.experts, *shape))
        for n, shape in (("gate", (hidden, width)), ("up", (hidden, width)), ("down", (width, hidden)))
    )
    if config.capacity is not None and config.capacity < 1:
        raise BuildError("an expert has 1 place or more")
    if config.capacity is None:
        every = b.expand(rows, shape=(gate.experts, *rows.shape), name="moe.every")
        answers = answered(b, every, opened, up, down)
        routed = b.einsum(weights, answers, spec="te,eth->th", name="moe.combined")
        routed = b.reshape(routed, shape=x.shape, name="moe.routed")
    else:
        weights = b.reshape(weights, shape=(batch, sequence, gate.experts), name="moe.weights.rows")
        hot = places(b, weights, config.capacity)
        answers = answered(b, sent_to(b, hot, x), opened, up, down)
        routed = combined(b, weights, hot, answers, "moe.routed")
    if not config.shared_experts:
        return routed, load
    shared = feed_forward(b, at + "shared_experts.", x, config.shared_experts * width, "moe.shared")
    return b.add(routed, shared, name="moe.out"), load


def answered(b: Tape, x: Tensor, opened: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """What every expert makes of its tokens, [experts, tokens, hidden]."""
    inner = b.silu(b.grouped_matmul(x, opened, name="moe.gate"), name="moe.silu")
    inner = b.mul(inner, b.grouped_matmul(x, up, name="moe.up"), name="moe.hidden")
    return b.grouped_matmul(inner, down, name="moe.down")


def places(b: Tape, weights: Tensor, capacity: int) -> Tensor:
    """[rows, positions, experts, places]: 1 at the place that a token has in the buffer of an expert for its sequence.

    The place is how many tokens before this one go there; beyond the last one there is none. No derivative."""
    rows, sequence, experts = weights.shape
    chosen = b.float(b.gt(weights, value=0, name="moe.wanted"), name="moe.wanted.float")
    before = b.sub(b.cumsum(chosen, dim=1, name="moe.count"), chosen, name="moe.before")
    before = b.reshape(before, shape=(rows, sequence, experts, 1), name="moe.before.each")
    chosen = b.reshape(chosen, shape=(rows, sequence, experts, 1), name="moe.wanted.each")
    place = b.float(b.arange(start=0, stop=capacity, name="moe.place"), name="moe.place.float")
    return b.mul(chosen, b.float(b.eq(before, place, name="moe.here"), name="moe.here.float"), name="moe.places")


def sent_to(b: Tape, hot: Tensor, x: Tensor) -> Tensor:
    """The buffers of all experts, [experts, rows·places, hidden]."""
    rows, _, experts, capacity = hot.shape
    sent = b.einsum(hot, x, spec="bsec,bsh->ebch", name="moe.sent.rows")
    return b.reshape(sent, shape=(experts, rows * capacity, x.shape[-1]), name="moe.sent")


def combined(b: Tape, weights: Tensor, hot: Tensor, answers: Tensor, name: str) -> Tensor:
    """Σ over experts of weight · answer, for every token that has a place."""
    rows, _, experts, capacity = hot.shape
    answers = b.reshape(answers, shape=(experts, rows, capacity, answers.shape[-1]), name="moe.down.rows")
    return b.einsum(weights, hot, answers, spec="bse,bsec,ebch->bsh", name=name)


def choose(b: ProgramBuilder, gate: Gate, at: str, logits: Tensor) -> Tensor:
    """Weight of every expert for every token."""
    attrs: dict[str, Any] = {"top_k": gate.active, "scoring": gate.scoring, "normalize": gate.normalize, "scale": gate.scale}
    if gate.groups > 1:
        attrs |= {"groups": gate.groups, "top_groups": gate.top_groups, "group_score": gate.group_score}
    bias = [b.state(at + "gate.bias", (gate.experts,))] if gate.bias else []
    return b.moe_gate(logits, *bias, **attrs, name="moe.weights")


def unevenness(b: ProgramBuilder, config: Config, logits: Tensor, weights: Tensor) -> Tensor:
    """Σ over experts of its share of choices · its mean probability, times the number of experts: 1 when even.

    Measured over each sequence and averaged, or over the whole batch."""
    gate = config.gate
    scores = b.softmax(logits, name="moe.scores") if gate.scoring == "softmax" else b.sigmoid(logits, name="moe.scores")
    if gate.scoring == "sigmoid":
        scores = b.div(scores, b.sum(scores, dim=-1, keepdim=True, name="moe.scores.sum"), name="moe.shares")
    rows = config.sequence if config.balance == "sequence" else logits.shape[0]
    shape = (logits.shape[0] // rows, rows, gate.experts)
    chosen = b.float(b.gt(weights, value=0, name="moe.chosen"), name="moe.chosen.float")
    load = b.mean(b.reshape(chosen, shape=shape, name="moe.chosen.rows"), dim=1, name="moe.load")
    probability = b.mean(b.reshape(scores, shape=shape, name="moe.scores.rows"), dim=1, name="moe.probability")
    uneven = b.sum(b.mul(load, probability, name="moe.uneven"), dim=1, name="moe.uneven.sum")
    return b.mul(b.mean(uneven, name="moe.uneven.mean"), value=Fraction(gate.experts, gate.active), name="balance")
