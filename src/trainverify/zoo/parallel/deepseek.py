"""DeepSeek's training step, and plans that run it: experts divided among data-parallel ranks, all else as in Megatron.

Latent vectors are computed where activations are replicated (or cut along the sequence) and enter the tensor-parallel region
from there; heads, widths of experts and of dense layers, and the vocabulary are divided.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain

from trainverify.build.plan import plan
from trainverify.build.tape import BuildError, Tensor
from trainverify.completion.optimizers import Optimizer
from trainverify.completion.step import complete
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.zoo.deepseek import BALANCE, EPS, Config, forward
from trainverify.zoo.language import join_heads, split_heads, swiglu
from trainverify.zoo.parallel.degrees import Axes, Degrees, axes_for, divided
from trainverify.zoo.parallel.deviations import NONE, Deviations
from trainverify.zoo.parallel.experts import Experts
from trainverify.zoo.parallel.llama import ADAMW
from trainverify.zoo.parallel.model import Model, gradients, run
from trainverify.zoo.parallel.stage import Stage

AUXILIARY = Fraction(1, 1000)  # weight of the balance in what is differentiated


def deepseek_step(config: Config, optimizer: Optimizer | None = ADAMW, clip: float | None = 1.0, master: bool = False) -> Program:
    """The step on one device: the whole batch in one forward pass."""
    auxiliary = {BALANCE: AUXILIARY} if config.dense_layers < config.layers else {}
    return complete(forward(config), optimizer, auxiliary=auxiliary, clip=clip, master=master)  # type: ignore[arg-type]


def deepseek_plan(
    config: Config,
    how: Degrees,
    optimizer: Optimizer | None = ADAMW,
    clip: float | None = 1.0,
    master: bool = False,
    deviations: Deviations = NONE,
) -> Plan:
    """The same step on dp·tp·pp ranks; `how.ep` of the data-parallel ones divide the experts among them."""
    how.only("DeepSeek", *(("cp", "cp_kind") if how.cp > 1 else ()), "ep", "chunks", "zero", "shards")
    how.only_ulysses("DeepSeek", config.loss)
    if how.cp > 1 and config.capacity is not None:
        raise BuildError("plans of DeepSeek with context parallelism drop no tokens: a rank cannot count those before its stretch")
    if config.loss != "per_token" or config.balance != "sequence":
        raise BuildError("plans of DeepSeek have a loss per token, and balance the experts of every sequence")
    if how.normalise != "loss":
        raise BuildError('plans of DeepSeek divide the loss before its backward pass: normalise="loss"')
    config = deviating(config, how, deviations)
    axes = expert_axes(how, config.heads)
    p = plan("deepseek", axes.mesh)
    named = gradients(forward(config)) if how.zero in (1, 2) else {}
    for index, layers in enumerate(how.layers(config.layers)):
        with p.ranks(pp=index) as r:
            run(DeepSeekModel(Stage(r, how, axes, index, named), config, layers, deviations), optimizer, clip, master)
    return p.build()


def deviating(config: Config, how: Degrees, deviations: Deviations) -> Config:
    """The model as a plan computes it that deviates from it."""
    deviations.only("DeepSeek", "node_limited", "rank_capacity", "no_auxiliary")
    if deviations != NONE and config.dense_layers >= config.layers:
        raise BuildError("a model without experts has no routing to deviate from: --layers with more of them")
    if deviations.rank_capacity is not None and (config.capacity is not None or how.cp > 1):
        raise BuildError("--rank-capacity counts the tokens of whole sequences of a rank, without --capacity and --cp")
    if deviations.node_limited is None:
        return config
    gate, most = config.gate, deviations.node_limited
    if how.ep < 2 or most >= how.ep:
        raise BuildError(f"--node-limited {most}: the experts of a token lie on fewer ranks than --ep {how.ep}")
    if gate.active > most * divided(gate.experts, how.ep, "experts", "expert-parallel ranks"):
        raise BuildError(f"--node-limited {most}: {gate.active} experts of a token do not fit on {most} of {how.ep} ranks")
    return replace(config, gate=replace(gate, groups=how.ep, top_groups=most))


def expert_axes(how: Degrees, heads: int) -> Axes:
    """The mesh; dp is edp·ep if experts are divided."""
    axes = axes_for(replace(how, ep=1), heads)
    if axes.copies:
        raise BuildError(f"{heads} heads do not divide among {how.tp} tensor-parallel ranks")
    if how.ep == 1:
        return axes
    data = {"edp": divided(how.dp, how.ep, "data-parallel ranks", "expert-parallel ones", "dp"), "ep": how.ep} | (
        {"cp": how.cp} if how.cp > 1 else {}
    )
    return replace(axes, mesh=Mesh({"pp": how.pp, **data, "tp": how.tp}), data=tuple(data))


class DeepSeekModel(Model):
    def __init__(self, stage: Stage, config: Config, layers: list[range], deviations: Deviations = NONE):
        super().__init__(stage, layers, config.batch, config.sequence, config.hidden, config.vocabulary)
        self.config = config
        self.differentiated = not deviations.no_auxiliary  # the balance
        places = deviations.rank_capacity
        self.experts = {i: Experts(stage, config, f"layers.{i}.mlp.", places) for i in chain(*layers) if i >= config.dense_layers}
        self.balance: list[Tensor] = []

    def declare(self) -> None:
        s, c = self.stage, self.config
        tables = [s.r.state(f"rope.{n}", (c.context or c.sequence, c.rotary // 2), "s d") for n in ("cos", "sin")]
        self.rotary = [s.rows(t, self.sequence) for t in tables]
        if s.first:
            s.column("embed_tokens", c.vocabulary, c.hidden)
        for i in chain(*self.layers):
            at = f"layers.{i}."
            s.vector(at + "input_layernorm", c.hidden)
            self.declare_attention(at + "self_attn.")
            s.vector(at + "post_attention_layernorm", c.hidden)
            if i in self.experts:
                self.experts[i].declare()
                self.experts[i].state()
                if c.shared_experts:
                    self.declare_dense(at + "mlp.shared_experts.", c.shared_experts * c.expert_ffn)
            else:
                self.declare_dense(at + "mlp.", c.ffn)
        if s.last:
            s.vector("norm", c.hidden)
            s.column("lm_head", c.vocabulary, c.hidden)

    def whole(self, name: str, rows: int, width: int) -> None:
        """A weight that every rank has, applied between the regions."""
        s = self.stage
        s.weight(name, (rows, width), "o k", summed=s.axes.tensor if s.how.sp else (), blocks=(1,))

    def declare_attention(self, at: str) -> None:
        s, c = self.stage, self.config
        size, heads = c.head + c.rotary, (s.how.share(c.heads, "heads"),)
        if c.q_rank is None:
            s.column(at + "q_proj", c.heads * size, c.hidden, blocks=heads)
        else:
            self.whole(at + "q_a_proj", c.q_rank, c.hidden)
            s.vector(at + "q_a_layernorm", c.q_rank)
            s.column(at + "q_b_proj", c.heads * size, c.q_rank, blocks=heads)
        self.whole(at + "kv_a_proj_with_mqa", c.kv_rank + c.rotary, c.hidden)
        s.vector(at + "kv_a_layernorm", c.kv_rank)
        s.column(at + "kv_b_proj", c.heads * (c.head + c.value), c.kv_rank, blocks=heads)
        s.row(at + "o_proj", c.hidden, c.heads * c.value)

    def declare_dense(self, at: str, width: int) -> None:
        for n in ("gate", "up"):
            self.stage.column(f"{at}{n}_proj", width, self.config.hidden)
        self.stage.row(at + "down_proj", self.config.hidden, width)

    # -- a micro-batch ------------------------------------------------------------------------------------------------

    def begin(self, m: int) -> Tensor:
        return self.stage.embedded(self.tokens(m), self.stage["embed_tokens"])

    def norm(self, parameter: str, x: Tensor, name: str) -> Tensor:
        return self.stage.r.rms_norm(x, self.stage[parameter], eps=EPS, name=name)

    def middle(self, m: int, layers: range, x: Tensor) -> Tensor:
        r = self.stage.r
        for i in layers:
            at = f"layers.{i}."
            r.prefix = f"mb{m}/{at}"
            x = r.add(
                x, self.attention(at + "self_attn.", self.norm(at + "input_layernorm", x, "attention.normed")), name="attention.residual"
            )
            normed = self.norm(at + "post_attention_layernorm", x, "mlp.normed")
            y = self.mixture(i, normed) if i in self.experts else self.dense(at + "mlp.", normed)
            x = r.add(x, y, name="residual")
        return x

    def attention(self, at: str, x: Tensor) -> Tensor:
        s, r, c = self.stage, self.stage.r, self.config
        heads = s.how.share(c.heads, "heads")
        if c.q_rank is None:
            q = r.linear(s.enter(x, "attention.input"), s[at + "q_proj"], name="attention.q")
        else:
            narrow = r.linear(x, s[at + "q_a_proj"], name="attention.q.latent")
            narrow = s.enter(self.norm(at + "q_a_layernorm", narrow, "attention.q.normed"), "attention.q.input")
            q = r.linear(narrow, s[at + "q_b_proj"], name="attention.q")
        sizes = (c.head, c.rotary)
        q, q_turning = r.split(
            split_heads(r, q, heads, "attention.q"), sizes=sizes, dim=-1, name=["attention.q.still", "attention.q.turning"]
        )
        joint = r.linear(x, s[at + "kv_a_proj_with_mqa"], name="attention.kv.joint")
        latent, k_turning = r.split(joint, sizes=(c.kv_rank, c.rotary), dim=-1, name=["attention.kv.latent", "attention.k.turning"])
        latent = s.enter(self.norm(at + "kv_a_layernorm", latent, "attention.kv.normed"), "attention.kv.input")
        k_turning = s.enter(k_turning, "attention.k.turning.input")
        kv = split_heads(r, r.linear(latent, s[at + "kv_b_proj"], name="attention.kv"), heads, "attention.kv")
        k, v = r.split(kv, sizes=(c.head, c.value), dim=-1, name=["attention.k.still", "attention.v"])
        q_turned = self.turned(q_turning, "attention.q.turned")
        k_turned = self.turned(split_heads(r, k_turning, 1, "attention.k.turning"), "attention.k.turned")
        k_turned = r.expand(k_turned, shape=(*k.shape[:3], c.rotary), name="attention.k.shared")
        q = r.concat(q, q_turned, dim=-1, name="attention.q.whole")
        k = r.concat(k, k_turned, dim=-1, name="attention.k.whole")
        mixed = s.attention(q, k, v, "attention")
        return s.leave(r.linear(join_heads(r, mixed, "attention"), s[at + "o_proj"], name="attention.part"), "attention.out")

    def turned(self, x: Tensor, name: str) -> Tensor:
        return self.stage.r.apply_rotary_emb(x, *self.rotary, style="interleaved", name=name)

    def dense(self, at: str, x: Tensor) -> Tensor:
        s = self.stage
        gate, up, down = (s[f"{at}{n}_proj"] for n in ("gate", "up", "down"))
        return s.leave(swiglu(s.r, s.enter(x, "mlp.input"), gate, up, down, "mlp"), "mlp.out")

    def mixture(self, i: int, x: Tensor) -> Tensor:
        """Routed and shared experts; what they have in common with the loss of a step is attached to the result."""
        s, r, at = self.stage, self.stage.r, f"layers.{i}.mlp."
        weights, chosen, balance = self.experts[i].chosen(x)
        self.balance.append(balance)
        inside = s.enter(x, "moe.input")
        y = self.experts[i].answers(inside, s.enter(weights, "moe.weights.input"), self.gathered(chosen))
        if self.config.shared_experts:
            gate, up, down = (s[f"{at}shared_experts.{n}_proj"] for n in ("gate", "up", "down"))
            y = r.add(y, swiglu(r, inside, gate, up, down, "moe.shared"), name="moe.part")
        out = s.leave(y, "moe.out")
        return self.with_balance(out, balance) if self.differentiated else out

    def gathered(self, chosen: Tensor) -> Tensor:
        """The choices for all tokens of the region; they have no gradient."""
        s = self.stage
        return s.r.all_gather(chosen, group=s.axes.tensor, dim=1, backward="none", name="moe.chosen.input") if s.how.sp else chosen

    def with_balance(self, x: Tensor, balance: Tensor) -> Tensor:
        """x itself; its backward pass also starts one from the balance, with its weight and this micro-batch's share of the mean."""
        r, how = self.stage.r, self.stage.how

        def backward(grad: Tensor | None) -> Sequence[Tensor | None]:
            share = r.full(shape=(), value=AUXILIARY / (how.dp * how.microbatches), name=balance.name + ".grad")
            return grad, share

        return r.by_hand((x, balance), lambda: [r.identity(x, name="moe.balanced")], backward)[0]

    def end(self, m: int, x: Tensor) -> Tensor:
        s = self.stage
        return s.r.linear(s.enter(self.norm("norm", x, "normed"), "head.input"), s["lm_head"], name="logits")

    def report(self) -> None:
        """The balance of all layers, on all ranks of all stages."""
        s, r, c = self.stage, self.stage.r, self.config
        if c.dense_layers >= c.layers:
            return
        total = self.added(self.balance, "balance.stage") if self.balance else r.full(shape=(), value=0.0, name="balance.stage")
        total = s.over_dp(total, "balance.dp", tuple(a for a in s.axes.data if a != "cp"))  # ranks along cp all have it
        if s.how.pp > 1:
            total = r.all_reduce(total, group="pp", name="balance.pp")
        r.metric(BALANCE, r.mul(total, value=Fraction(1, s.how.dp * s.how.microbatches), name="balance"))
