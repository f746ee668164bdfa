"""Bugs of the corpus inside plans of the zoo at real widths, and mistakes at several sites of such a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from trainverify.bugs import plant as p
from trainverify.bugs.plant import Plant, Site, planted
from trainverify.explain.cause import Cause
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.graph.rebuilt import Rebuilt
from trainverify.zoo.parallel.degrees import Degrees
from trainverify.zoo.recipes import Wish
from trainverify.zoo.tiny import rebuilt

LLAMA = Wish("llama3-8b", Degrees(dp=2, tp=2, pp=2, microbatches=2), layers=2)
SEQUENCE = Wish("llama3-8b", Degrees(dp=2, tp=2, sp=True), layers=2)
COPIES = Wish("llama3-8b", Degrees(tp=16), layers=1)  # two ranks for each key-value head
ULYSSES = Wish("llama3-8b", Degrees(dp=2, cp=2, cp_kind="ulysses"), layers=1)
GPT = Wish("gpt2", Degrees(dp=2, tp=2, zero=1), layers=1, vocabulary=50304)
TIED = Wish("gpt2", Degrees(dp=2, pp=2, microbatches=2), layers=2)
EXPERTS = Wish("deepseek-16b", Degrees(dp=4, ep=2), layers=2)
HALF, QUARTER = Fraction(1, 2), Fraction(1, 4)


@dataclass(frozen=True)
class ZooCase:
    """A plan of the zoo with a bug of the corpus (by its id) planted in it; the cause is the planted one."""

    id: str
    model: Wish
    plants: tuple[Plant, ...]
    cause: Cause
    systematic: bool = False  # the same mistake at several sites: all of them are to be named

    def build(self) -> tuple[Program, Plan, tuple[Site, ...]]:
        """The logical step, the wrong plan, and the sites of the bug."""
        logical, right = self.model.build()
        plan, sites = planted(right, self.plants)
        if not sites:
            raise ValueError(f"{self.id}: nothing of the plan is called so")
        return logical, plan, sites

    def rebuilt(self) -> tuple[Rebuilt, ...]:
        """The same at tiny widths."""
        return rebuilt(self.model, lambda right: planted(right, self.plants)[0])


def _one(id: str, model: Wish, cause: Cause, *plants: tuple[str, p.Change]) -> ZooCase:
    return ZooCase(id, model, tuple(Plant(at, change, 1) for at, change in plants), cause)


C = Cause
NORM = r"layers\.0\.ffn_norm\.grad"
PLANTED: tuple[ZooCase, ...] = (
    _one("B06", SEQUENCE, C.MISSING_REDUCTION, (NORM + r"\.tp", p.left_out)),
    _one("B07", COPIES, C.MISSING_REDUCTION, (r"layers\.0\.attention\.wk\.grad\.rep", p.left_out)),
    _one("B08", LLAMA, C.MISSING_REDUCTION, (r"mb0/layers\.0\.ffn\.normed\.grad", p.left_out)),
    _one("B09", LLAMA, C.MISSING_REDUCTION, (r"mb0/weight", p.left_out)),
    _one("B11", LLAMA, C.MISSING_REDUCTION, (r"mb1/layers\.1\.attention\.normed\.grad", p.left_out)),
    _one("B13", LLAMA, C.EXTRA_REDUCTION, (r"mb0/normed\.grad", p.twice)),
    _one("B14", LLAMA, C.EXTRA_REDUCTION, (NORM + r"\.dp", p.also_over("tp"))),
    _one("B15", LLAMA, C.EXTRA_REDUCTION, (r"mb0/layers\.0\.ffn\.out\.grad", p.also_over("tp"))),
    _one("B16", LLAMA, C.STALE_INPUT, (r"layers\.0\.feed_forward\.w2\.grad\.final", p.reading(0, ".2", r"\.dp$"))),
    _one("B22", LLAMA, C.MISSING_REDUCTION, (r"lm_head\.grad\.dp", p.left_out)),
    _one("B25", EXPERTS, C.STALE_INPUT, (r"balance", p.reading(0, "mb0/layers.1.balance"))),
    _one("B28", EXPERTS, C.WRONG_GROUP, (r"mb0/layers\.1\.moe\.received", p.over("edp"))),
    _one("B30", EXPERTS, C.WRONG_GROUP, (r"layers\.1\.mlp\.experts\.up_proj\.grad\.dp", p.over("edp", "ep"))),
    _one("B36", GPT, C.WRONG_BLOCK, (r"h\.0\.mlp\.c_fc\.weight\.shard", p.other_ranks("start", "stop"))),
    _one("B37", SEQUENCE, C.WRONG_GROUP, (r"squares\.tp", p.over("dp"))),
    _one(
        "B42",
        ULYSSES,
        C.WRONG_BLOCK,
        (r"rope\.cos\.rows", p.first_rank("start", "stop")),
        (r"rope\.sin\.rows", p.first_rank("start", "stop")),
    ),
    _one("B53", LLAMA, C.WRONG_INPUT, (r"mb1/hit", p.reading(0, "mb0/labels"))),
    _one(
        "B56",
        GPT,
        C.COUNTED_TWICE,
        (r"mb0/h\.0\.attn\.part", p.also_reading("h.0.attn.c_proj.bias")),
        (r"mb0/h\.0\.attn\.out", p.left_out),
    ),
    _one("B61", GPT, C.WRONG_ORDER, (r"h\.0\.mlp\.c_fc\.weight\.new", p.in_reverse)),
    _one("B69", LLAMA, C.WRONG_FACTOR, (r"layers\.0\.attention\.wo\.grad\.dp", p.scaled(HALF))),
    _one("B70", LLAMA, C.WRONG_FACTOR, (r"layers\.1\.attention\.wq\.grad\.final", p.left_out)),
    _one("B72", EXPERTS, C.WRONG_FACTOR, (r"mb0/layers\.1\.balance\.grad", p.with_attrs(value=Fraction(2, 1000)))),
    _one("B76", EXPERTS, C.WRONG_FACTOR, (r"mb0/layers\.1\.balance\.grad", p.scaled(4))),
    _one("B85", LLAMA, C.WRONG_REDUCTION, (r"tok_embeddings\.grad\.dp", p.with_attrs(op="avg"))),
    _one("B86", LLAMA, C.WRONG_FACTOR, (r"loss", p.scaled(HALF))),
    _one("B93", EXPERTS, C.WRONG_FACTOR, (r"layers\.1\.mlp\.experts\.up_proj\.grad\.dp", p.scaled(HALF))),
    _one("B97", EXPERTS, C.WRONG_FACTOR, (r"layers\.1\.mlp\.experts\.down_proj\.grad\.dp", p.scaled(QUARTER))),
    _one("B101", SEQUENCE, C.WRONG_REDUCTION, (r"squares\.tp", p.with_attrs(op="avg"))),
    _one("B102", LLAMA, C.WRONG_INPUT, (r"layers\.1\.attention_norm\.clipped", p.reading(0, "layers.1.ffn_norm.grad.final"))),
    _one(
        "B103",
        SEQUENCE,
        C.COUNTED_TWICE,
        (r"norm\.tp", p.also_reading("norm.grad.final")),
        (r"norm\.whole", p.not_reading("norm.grad.final")),
    ),
    _one("B110", TIED, C.STALE_INPUT, (r"wte\.grad\.final", p.reading(0, ".dp", r"\.tied$"))),
    _one("B113", LLAMA, C.COUNTED_TWICE, (r"layers\.0\.feed_forward\.w2\.grad\.2", p.once_more(1))),
    _one("B115", LLAMA, C.EARLY_REDUCTION, (r"layers\.0\.attention\.wv\.grad\.dp", p.too_early)),
    _one("B121", LLAMA, C.LOST_CONTRIBUTION, (r"lm_head\.grad\.2", p.only(1))),
    _one("B122", LLAMA, C.MISSING_UPDATE, (r"layers\.0\.attention\.wk\.new", p.stays)),
    _one("B123", LLAMA, C.OPTIMIZER_SETTING, (r"layers\.0\.attention\.wk\.new", p.with_attrs(step=1))),
    _one("B125", LLAMA, C.OPTIMIZER_SETTING, (r"layers\.1\.feed_forward\.w1\.new", p.with_attrs(weight_decay=0.0))),
)


def _several(id: str, model: Wish, cause: Cause, at: str, change: p.Change) -> tuple[ZooCase, ...]:
    """At two sites, at five, at all."""
    return tuple(ZooCase(id, model, (Plant(at, change, n),), cause, systematic=True) for n in (2, 5, None))


DEEP = Wish("llama3-8b", Degrees(dp=2, tp=2, sp=True), layers=3)
BROAD = replace(DEEP, layers=2)
NORMS = r"layers\.\d+\.(attention|ffn)_norm\.grad\.tp"
GRADS = r"layers\.\d+\.(attention|feed_forward)\.w\w\.grad\.dp"
FINAL = r"layers\.\d+\.(attention|feed_forward)\.w\w\.grad\.final"
SYSTEMATIC: tuple[ZooCase, ...] = (
    *_several("B06", DEEP, C.MISSING_REDUCTION, NORMS, p.left_out),
    *_several("B22", BROAD, C.MISSING_REDUCTION, GRADS, p.left_out),
    *_several(
        "B08", Wish("llama3-8b", Degrees(dp=2, tp=2), layers=3), C.MISSING_REDUCTION, r"mb0/layers\.\d+\.\w+\.normed\.grad", p.left_out
    ),
    *_several("B14", BROAD, C.EXTRA_REDUCTION, GRADS, p.also_over("tp")),
    *_several("B85", BROAD, C.WRONG_REDUCTION, GRADS, p.with_attrs(op="avg")),
    *_several("B69", BROAD, C.WRONG_FACTOR, FINAL, p.scaled(HALF)),
    *_several("B30", BROAD, C.WRONG_GROUP, GRADS, p.over("tp")),
    *_several("B16", BROAD, C.STALE_INPUT, FINAL, p.reading(0, "", r"\.dp$")),
    *_several("B122", BROAD, C.MISSING_UPDATE, r"layers\.\d+\.(attention|feed_forward)\.w\w\.new", p.stays),
    *_several("B125", BROAD, C.OPTIMIZER_SETTING, r"layers\.\d+\.(attention|feed_forward)\.w\w\.new", p.with_attrs(weight_decay=0.0)),
)
