"""GPT's training step with one matrix for embedding and output, and plans that run it."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from itertools import chain

from trainverify.build.plan import PlanBuilder, RankBuilder, plan
from trainverify.build.tape import Tensor
from trainverify.completion.optimizers import Optimizer
from trainverify.completion.step import complete
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program, Value
from trainverify.zoo.gpt import Config, forward
from trainverify.zoo.language import join_heads, split_heads
from trainverify.zoo.parallel.degrees import Axes, Degrees, axes_for
from trainverify.zoo.parallel.llama import ADAMW
from trainverify.zoo.parallel.model import Model, gradients, run
from trainverify.zoo.parallel.stage import Stage


def gpt_step(config: Config, optimizer: Optimizer | None = ADAMW, clip: float | None = 1.0, master: bool = False) -> Program:
    """The step on one device: the whole batch in one forward pass. `master` keeps weights in f32 beside their working copies."""
    return complete(forward(config), optimizer, clip=clip, master=master)


def gpt_plan(config: Config, how: Degrees, optimizer: Optimizer | None = ADAMW, clip: float | None = 1.0, master: bool = False) -> Plan:
    """The same step on dp·tp·pp ranks; first and last stage each have the embedding matrix, and add up its gradients."""
    how.only("GPT", *(("cp", "cp_kind") if how.cp > 1 else ()), "zero", "shards", "chunks")
    how.only_ulysses("GPT", config.loss)
    axes = axes_for(how, config.heads)
    names = gradients(forward(config)) if how.zero else {}
    p = plan("gpt", axes.mesh)
    for index, layers in enumerate(how.layers(config.layers)):
        with p.ranks(pp=index) as r:
            r.dtype = config.dtype
            tied = _ends(p, r, axes, how) if how.pp > 1 and index in (0, how.pp - 1) else None
            run(_GPT(Stage(r, how, axes, index, names), config, layers, tied), optimizer, clip, master)
    return p.build()


def _ends(p: PlanBuilder, r: RankBuilder, axes: Axes, how: Degrees) -> Value:
    """Each rank's group of two: its place on the first stage and on the last."""
    mesh = axes.mesh

    def group(rank: int) -> str:
        first, last = (mesh.rank({**mesh.coordinates(rank), "pp": i}) for i in (0, how.pp - 1))
        return p.group(f"ends.{first}", (first, last))

    return r.each_rank(group, "group.ends")


class _GPT(Model):
    def __init__(self, stage: Stage, config: Config, layers: list[range], tied: Value):
        super().__init__(stage, layers, config.batch, config.sequence, config.hidden, config.vocabulary, config.loss)
        self.config = config
        self.tied = tied
        self.dtype = config.dtype

    def declare(self) -> None:
        s, c = self.stage, self.config
        h, f = c.hidden, c.ffn or 4 * c.hidden
        if s.first or s.last:
            rows, form = s.how.share(c.vocabulary, "ids"), f"({s.axes.text} v) h"
            s.weight("wte", (rows, h), form, split=s.axes.tensor, tied=self.tied, counted=s.first)
        if s.first:
            blocks = (s.how.cp,) if s.how.cp > 1 else ()  # ranks use stretches of it
            s.weight("wpe", (c.context or c.sequence, h), "s h", summed=s.axes.tensor if s.how.sp else (), blocks=blocks)
        for i in chain(*self.layers):
            at = f"h.{i}."
            self._norm(at + "ln_1")
            self._joint(at + "attn.c_attn.weight", (h,))
            self._joint(at + "attn.c_attn.bias", ())
            s.row(at + "attn.c_proj.weight", h, h)
            s.vector(at + "attn.c_proj.bias", h)
            self._norm(at + "ln_2")
            s.column(at + "mlp.c_fc.weight", f, h)
            s.weight(at + "mlp.c_fc.bias", (s.how.share(f, "rows"),), f"({s.axes.text} o)", split=s.axes.tensor)
            s.row(at + "mlp.c_proj.weight", h, f)
            s.vector(at + "mlp.c_proj.bias", h)
        if s.last:
            self._norm("ln_f")

    def _norm(self, name: str) -> None:
        for n in ("weight", "bias"):
            self.stage.vector(f"{name}.{n}", self.config.hidden)

    def _joint(self, name: str, more: tuple[int, ...]) -> None:
        """Queries, keys and values in one weight: a rank has its heads' rows of each of the three."""
        s, h = self.stage, self.config.hidden
        own = s.how.share(h, "rows")
        s.weight(name, (3 * own, *more), f"(3 {s.axes.text} o)" + " k" * len(more), split=s.axes.tensor)

    def begin(self, m: int) -> Tensor:
        s, r = self.stage, self.stage.r
        x = s.embedded(self.tokens(m), s["wte"])
        size, along = x.shape[1], (("cp",) if s.how.cp > 1 else ()) + (s.axes.tensor if s.how.sp else ())
        start, stop = (s.offset(size, e, along) for e in (0, 1)) if along else (0, size)
        return r.add(x, r.slice(s["wpe"], dim=0, start=start, stop=stop, name="positions"), name="placed")

    def middle(self, m: int, layers: range, x: Tensor) -> Tensor:
        s, r = self.stage, self.stage.r
        for i in layers:
            at = f"h.{i}."
            r.prefix = f"mb{m}/{at}"
            x = r.add(x, self.attention(at, s.enter(self.normed(at + "ln_1", x, "ln_1.out"), "attn.input")), name="attn.residual")
            x = r.add(x, self.feed_forward(at, s.enter(self.normed(at + "ln_2", x, "ln_2.out"), "mlp.input")), name="residual")
        return x

    def normed(self, parameter: str, x: Tensor, name: str) -> Tensor:
        s = self.stage
        return s.r.layer_norm(x, s[parameter + ".weight"], s[parameter + ".bias"], eps=self.config.eps, name=name)

    def attention(self, at: str, x: Tensor) -> Tensor:
        s, r = self.stage, self.stage.r
        heads = s.how.share(self.config.heads, "heads")
        joint = r.linear(x, s[at + "attn.c_attn.weight"], s[at + "attn.c_attn.bias"], name="attn.qkv")
        parts = r.split(joint, sizes=(joint.shape[-1] // 3,) * 3, dim=-1, name=["attn.q", "attn.k", "attn.v"])
        q, k, v = (split_heads(r, part, heads, f"attn.{n}") for part, n in zip(parts, "qkv", strict=True))
        return self.projected(at + "attn.c_proj", join_heads(r, s.attention(q, k, v, "attn"), "attn"), "attn")

    def feed_forward(self, at: str, x: Tensor) -> Tensor:
        s, r = self.stage, self.stage.r
        wide = r.linear(x, s[at + "mlp.c_fc.weight"], s[at + "mlp.c_fc.bias"], name="mlp.wide")
        return self.projected(at + "mlp.c_proj", r.gelu(wide, approximate=self.config.gelu, name="mlp.gelu"), "mlp")

    def projected(self, parameter: str, x: Tensor, name: str) -> Tensor:
        """The bias is added once, after the sum over ranks."""
        s, r = self.stage, self.stage.r
        summed = s.leave(r.linear(x, s[parameter + ".weight"], name=name + ".part"), name + ".sum")
        return r.add(summed, s[parameter + ".bias"], name=name + ".out")

    def end(self, m: int, x: Tensor) -> Tensor:
        s, r = self.stage, self.stage.r
        x = s.enter(self.normed("ln_f", x, "ln_f.out"), "head.input")
        return r.linear(x, s["wte"], name="logits")
