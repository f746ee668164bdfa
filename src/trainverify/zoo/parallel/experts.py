"""Expert parallelism: the mixture of experts of one layer, on the ranks of a stage.

The experts are divided among the ranks along `ep`, some of the data-parallel ones; the width of each among the tensor-parallel
ones. Every rank chooses experts for its own tokens and puts each into the buffers of those it goes to: at the token's own
place, or with a capacity at the next free one, by counting tokens in the order of their sequence, and nowhere if there is none; places
that nobody takes are zero. An all-to-all brings the buffers to the experts and another one the answers
back. So the gradients of an expert's weights already have the tokens of all ranks along `ep`: they add up over the other
data-parallel ranks (`edp`) only.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from fractions import Fraction
from typing import Any

from trainverify.build.tape import Tensor
from trainverify.zoo.deepseek import Config, answered, combined, places, sent_to
from trainverify.zoo.parallel.degrees import divided
from trainverify.zoo.parallel.stage import Stage


class Experts:
    """One layer's mixture."""

    def __init__(self, stage: Stage, config: Config, at: str, places: int | None = None):
        self.stage = stage
        self.places = places  # of an expert for the tokens of a rank's micro-batch; others are dropped
        self.config = config
        self.at = at

    def declare(self) -> None:
        s, c = self.stage, self.config
        e, h, w = c.gate.experts, c.hidden, c.expert_ffn
        local, width = divided(e, s.how.ep, "experts", "expert-parallel ranks"), s.how.share(w, "columns of experts")
        s.weight(self.at + "gate.weight", (e, h), "e h", summed=s.axes.tensor if s.how.sp else (), blocks=(1,))
        place, tp = "(ep e)" if s.how.ep > 1 else "e", s.axes.text
        rows = tuple(a for a in s.axes.data if a != "ep")
        split = (*(("ep",) if s.how.ep > 1 else ()), *s.axes.tensor)
        for n in ("gate", "up"):
            s.weight(f"{self.at}experts.{n}_proj", (local, h, width), f"{place} h ({tp} w)", split=split, data=rows, blocks=(1,))
        s.weight(f"{self.at}experts.down_proj", (local, width, h), f"{place} ({tp} w) h", split=split, data=rows, blocks=(1,))

    def state(self) -> None:
        if self.config.gate.bias:
            self.bias = self.stage.r.state(self.at + "gate.bias", (self.config.gate.experts,), "e")

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weight of every expert for every token, 1 for those it goes to, and how unevenly they are loaded."""
        r, gate = self.stage.r, self.config.gate
        attrs: dict[str, Any] = {"top_k": gate.active, "scoring": gate.scoring, "normalize": gate.normalize, "scale": gate.scale}
        if gate.groups > 1:
            attrs |= {"groups": gate.groups, "top_groups": gate.top_groups, "group_score": gate.group_score}
        logits = r.linear(x, self.stage[self.at + "gate.weight"], name="moe.logits")
        weights = r.moe_gate(logits, *([self.bias] if gate.bias else []), **attrs, name="moe.weights")
        chosen = r.float(r.gt(weights, value=0, name="moe.chosen"), name="moe.chosen.float")
        return weights, chosen, self.unevenness(logits, chosen)

    def unevenness(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """Of every sequence: Σ over experts of its share of choices · its mean probability; the mean over sequences."""
        s, r, c = self.stage, self.stage.r, self.config
        scores = r.softmax(logits, name="moe.scores") if c.gate.scoring == "softmax" else r.sigmoid(logits, name="moe.scores")
        if c.gate.scoring == "sigmoid":
            scores = r.div(scores, r.sum(scores, dim=-1, keepdim=True, name="moe.scores.sum"), name="moe.shares")
        means = []
        for x, name in ((chosen, "load"), (scores, "probability")):
            total = r.sum(x, dim=1, name=f"moe.{name}.part")
            along = ("cp",) * (s.how.cp > 1) + s.axes.tensor * s.how.sp  # a rank has a part of every sequence
            total = r.all_reduce(total, group=along, backward="identity", name=f"moe.{name}.sum") if along else total
            means.append(r.mul(total, value=Fraction(1, c.sequence), name=f"moe.{name}"))
        uneven = r.sum(r.mul(*means, name="moe.uneven"), dim=1, name="moe.uneven.sum")
        return r.mul(r.mean(uneven, name="moe.uneven.mean"), value=Fraction(c.gate.experts, c.gate.active), name="balance")

    def answers(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Σ over experts of weight · answer: this rank's share of the width of every expert."""
        r, capacity = self.stage.r, self.config.capacity
        batch, sequence, hidden = x.shape
        if capacity is not None:
            hot = places(r, weights, capacity)
            back = self.returned(self.computed(self.received(sent_to(r, hot, x))))
            return combined(r, weights, hot, back, "moe.routed.part")
        tokens = batch * sequence
        rows, weights, chosen = (
            r.reshape(t, shape=(tokens, t.shape[-1]), name=f"moe.{n}.rows")
            for t, n in ((x, "input"), (weights, "weights"), (chosen, "chosen"))
        )
        if self.places is not None:
            taken = self.taken(chosen, self.places)
            weights, chosen = (r.mul(t, taken, name=f"moe.{n}.kept") for t, n in ((weights, "weights"), (chosen, "chosen")))
        place = r.arange(start=0, stop=tokens, name="moe.place")
        hot = r.float(r.one_hot(place, num_classes=self.capacity(tokens), name="moe.place.hot"), name="moe.place.float")
        sent = r.einsum(chosen, hot, rows, spec="te,tc,th->ech", name="moe.sent")
        back = self.returned(self.computed(self.received(sent)))
        routed = r.einsum(weights, hot, back, spec="te,tc,ech->th", name="moe.combined")
        return r.reshape(routed, shape=(batch, sequence, hidden), name="moe.routed.part")

    def taken(self, chosen: Tensor, places: int) -> Tensor:
        """[tokens, experts]: 1 while fewer than so many tokens before this one go to the expert. No derivative."""
        r = self.stage.r
        before = r.sub(r.cumsum(chosen, dim=0, name="moe.count"), chosen, name="moe.before")
        return r.float(r.lt(before, value=places, name="moe.taken"), name="moe.taken.float")

    def capacity(self, tokens: int) -> int:
        """Places per expert: as many as tokens, so that none is ever dropped."""
        return tokens

    def received(self, sent: Tensor) -> Tensor:
        if self.stage.how.ep == 1:
            return sent
        return self.stage.r.all_to_all(sent, group="ep", split_dim=0, concat_dim=1, backward="all_to_all", name="moe.received")

    def computed(self, x: Tensor) -> Tensor:
        return answered(self.stage.r, x, *(self.stage[f"{self.at}experts.{n}_proj"] for n in ("gate", "up", "down")))

    def returned(self, answers: Tensor) -> Tensor:
        if self.stage.how.ep == 1:
            return answers
        return self.stage.r.all_to_all(answers, group="ep", split_dim=1, concat_dim=0, backward="all_to_all", name="moe.returned")
