"""Llama on the ranks of a stage: what they hold, and their forward pass."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from itertools import chain

from trainverify.build.tape import Tensor
from trainverify.zoo.language import join_heads, split_heads, swiglu
from trainverify.zoo.llama import Config
from trainverify.zoo.parallel.degrees import divided
from trainverify.zoo.parallel.model import Model
from trainverify.zoo.parallel.stage import Stage


class LlamaModel(Model):
    def __init__(self, stage: Stage, config: Config, layers: list[range]):
        super().__init__(stage, layers, config.batch, config.sequence, config.hidden, config.vocabulary, config.loss)
        self.config = config
        self.rotary: list[Tensor] = []
        self.mask: Tensor | None = None  # of packed rows
        self.packed: dict[int, tuple[list[Tensor], Tensor]] = {}  # both, by micro-batch

    def declare(self) -> None:
        s, c = self.stage, self.config
        self.tables = [s.r.state(f"rope.{n}", (c.context or c.sequence, c.head // 2), "s d") for n in ("cos", "sin")]
        if not c.packed:
            self.rotary = [self.positions(t) for t in self.tables]
        if s.first:
            s.column("tok_embeddings", c.vocabulary, c.hidden)
        for i in chain(*self.layers):
            at = f"layers.{i}."
            s.vector(at + "attention_norm", c.hidden)
            s.column(at + "attention.wq", c.heads * c.head, c.hidden, blocks=self._heads())
            for n in ("wk", "wv"):
                self._kv(at + "attention." + n)
            s.row(at + "attention.wo", c.hidden, c.heads * c.head)
            s.vector(at + "ffn_norm", c.hidden)
            s.column(at + "feed_forward.w1", c.ffn, c.hidden)
            s.row(at + "feed_forward.w2", c.hidden, c.ffn)
            s.column(at + "feed_forward.w3", c.ffn, c.hidden)
        if s.last:
            s.vector("norm", c.hidden)
            s.column("lm_head", c.vocabulary, c.hidden)

    def _heads(self) -> tuple[int, int]:
        """Key-value heads on a rank, and the query heads of each."""
        axes = self.stage.axes
        groups = divided(self.config.kv_heads, axes.size(axes.heads), "key-value heads")
        return groups, divided(self.stage.how.share(self.config.heads, "heads"), groups, "heads")

    def positions(self, table: Tensor) -> Tensor:
        """The rows of a rotary table for the positions at hand."""
        return self.stage.rows(table, self.sequence)

    def _kv(self, name: str) -> None:
        """Rows of whole key-value heads; ranks that share a head each compute what their query heads contribute to its gradient."""
        c, axes = self.config, self.stage.axes
        heads, _ = self._heads()
        form = f"({' '.join(axes.heads)} o) k"
        self.stage.weight(name, (heads * c.head, c.hidden), form, split=axes.heads, summed=axes.copies, blocks=(heads,))

    def begin(self, m: int) -> Tensor:
        return self.stage.embedded(self.tokens(m), self.stage["tok_embeddings"])

    def place(self, m: int) -> None:
        """Packed rows: documents and positions are inputs, the rows of the rotary tables and the mask follow from them."""
        s, r, c = self.stage, self.stage.r, self.config
        if m not in self.packed:
            segments = s.batch("segments", m, self.rows, c.sequence, c.sequence)
            positions = s.batch("positions", m, self.rows, c.sequence, c.context or c.sequence)
            mask = r.unsqueeze(r.segment_mask(segments, segments, is_causal=True, name="mask.pairs"), dim=1, name="mask")
            rows = [r.unsqueeze(r.embedding(positions, t, name=t.name + ".rows"), dim=1, name=t.name + ".heads") for t in self.tables]
            self.packed[m] = rows, mask
        self.rotary, self.mask = self.packed[m]

    def middle(self, m: int, layers: range, x: Tensor) -> Tensor:
        s, r, eps = self.stage, self.stage.r, self.config.eps
        if self.config.packed:
            self.place(m)
        for i in layers:
            at = f"layers.{i}."
            r.prefix = f"mb{m}/{at}"
            normed = r.rms_norm(x, s[at + "attention_norm"], eps=eps, name="attention.normed")
            x = r.add(x, self.attention(at, s.enter(normed, "attention.input")), name="attention.residual")
            normed = s.enter(r.rms_norm(x, s[at + "ffn_norm"], eps=eps, name="ffn.normed"), "ffn.input")
            w1, w2, w3 = (s[f"{at}feed_forward.w{n}"] for n in (1, 2, 3))
            x = r.add(x, s.leave(swiglu(r, normed, w1, w3, w2, "ffn"), "ffn.out"), name="residual")
        return x

    def attention(self, at: str, x: Tensor) -> Tensor:
        s, r, c = self.stage, self.stage.r, self.config
        heads = s.how.share(c.heads, "heads")
        q, k, v = (r.linear(x, s[f"{at}attention.w{n}"], name=f"attention.{n}") for n in "qkv")
        q = self.turned(split_heads(r, q, heads, "attention.q"), "attention.q.turned")
        k = self.turned(split_heads(r, k, k.shape[-1] // c.head, "attention.k"), "attention.k.turned")
        v = split_heads(r, v, v.shape[-1] // c.head, "attention.v")
        mixed = self.mixed(q, k, v)
        return s.leave(r.linear(join_heads(r, mixed, "attention"), s[at + "attention.wo"], name="attention.part"), "attention.out")

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the positions at hand to all positions."""
        if self.mask is None:
            return self.stage.attention(q, k, v, "attention")
        return self.stage.r.attention(q, k, v, self.mask, name=["attention.mixed", "attention.logsumexp"])[0]

    def turned(self, x: Tensor, name: str) -> Tensor:
        return self.stage.r.apply_rotary_emb(x, *self.rotary, style="half", name=name)

    def end(self, m: int, x: Tensor) -> Tensor:
        s, r = self.stage, self.stage.r
        x = s.enter(r.rms_norm(x, s["norm"], eps=self.config.eps, name="normed"), "head.input")
        return r.linear(x, s["lm_head"], name="logits")
