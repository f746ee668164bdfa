"""Collectives over the wrong ranks, and expert gradients with the wrong factor."""

from __future__ import annotations

import trainverify as tv
from trainverify.bugs.case import Pair, case
from trainverify.bugs.step import LR, Builder, finish, piece, squares, update
from trainverify.build.plan import RankBuilder
from trainverify.build.tape import Tensor
from trainverify.explain.cause import Cause
from trainverify.graph.program import Program

TOKENS, K, D, F, E = 12, 3, 5, 6, 2


def weighted_experts(b: Builder, x: Tensor, scores: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Σ over these experts of score · expert(x)."""
    a = b.silu(b.einsum(x, w1, spec="td,efd->tef", name="h"), name="a")
    made: Tensor = b.einsum(scores, b.einsum(a, w2, spec="tef,edf->ted", name="y.experts"), spec="te,ted->td", name="y.part")
    return made


def experts_model() -> Program:
    """A dense layer, then experts whose scores come with the batch."""
    b = tv.program("experts")
    u, s, t = b.input("u", (TOKENS, K)), b.input("s", (TOKENS, E)), b.input("t", (TOKENS, D))
    w0, w1, w2 = b.parameter("w0", (D, K)), b.parameter("w1", (E, F, D)), b.parameter("w2", (E, D, F))
    y = weighted_experts(b, b.tanh(b.linear(u, w0, name="v"), name="x"), s, w1, w2)
    return finish(b, b.div(squares(b, y, t), value=TOKENS * D, name="loss"))


def batch(r: RankBuilder, ways: int, form: str) -> list[Tensor]:
    return [r.input(n, (TOKENS // ways, k), form) for n, k in (("u", K), ("s", E), ("t", D))]


def own_scores(r: RankBuilder, scores: Tensor, axis: str) -> Tensor:
    """The column of the one expert that lives here."""
    return piece(r, scores, 1, lambda at: at[axis], 1, "s.own")


@case(
    "B28",
    "Expert-parallel groups with the stride of cp",
    reference="NVIDIA/Megatron-LM@e43abe7dfa (2024-04-04)",
    mechanism="Expert-parallel groups are built with stride tp·cp instead of tp, so with cp=2 every rank is alone in its group.",
    cause=Cause.WRONG_GROUP,
    tensors=("x.all", "s.all", "y"),
)
def group_stride(right: bool) -> Pair:
    tp, cp, ep = 1, 2, 2
    p = tv.plan("experts", tv.Mesh(dp=2, cp=2))
    stride = tp if right else tp * cp
    for start in range(0, 4, tp * ep):
        for k in range(stride):
            p.group(f"ep.{start + k}", range(start + k, start + tp * ep, stride))
    with p.ranks() as r:
        u, s, t = batch(r, 4, "(dp cp t) k")
        w0, w1, w2 = (
            r.parameter("w0", (D, K), "d k"),
            r.parameter("w1", (1, F, D), "(cp e) f d"),
            r.parameter("w2", (1, D, F), "(cp e) d f"),
        )
        ep_group = r.each_rank(lambda rank: next(n for n, ranks in p.groups.items() if n.startswith("ep.") and rank in ranks))
        x = r.tanh(r.linear(u, w0, name="v"), name="x")
        rows, scores = (r.all_gather(v, group=ep_group, backward="reduce_scatter", name=f"{v.name}.all") for v in (x, s))  # bug
        part = weighted_experts(r, rows, own_scores(r, scores, "cp"), w1, w2)
        y = r.reduce_scatter(part, group=ep_group, backward="all_gather", name="y")  # bug
        local = r.div(squares(r, y, t), value=TOKENS * D, name="local")
        r.loss(r.all_reduce(local, group=("dp", "cp"), name="loss"))
        r.backward(local)
        update(r, w0, r.all_reduce(r.gradient(w0), group=("dp", "cp"), name="w0.grad.all"))
        for w in (w1, w2):
            update(r, w, r.all_reduce(r.gradient(w), group="dp", name=f"{w.name}.grad.dp"))
    return experts_model(), p.build()


@case(
    "B29",
    "Expert gradients over the dense group, etp larger than tp",
    reference="NVIDIA/Megatron-LM#5916 case 2 (cd4afffa64)",
    mechanism="With ep=1 expert gradients are all-reduced over the dense dp group, which mixes columns of different etp ranks.",
    cause=Cause.WRONG_GROUP,
    tensors=("w1.grad.sum", "w2.grad.sum"),
)
def dense_group(right: bool) -> Pair:
    p = tv.plan("experts", tv.Mesh(edp=2, etp=2))
    with p.ranks() as r:
        u, s, t = batch(r, 4, "(edp etp t) k")
        w0 = r.parameter("w0", (D, K), "d k")
        w1, w2 = r.parameter("w1", (E, F // 2, D), "e (etp f) d"), r.parameter("w2", (E, D, F // 2), "e d (etp f)")
        x = r.tanh(r.linear(u, w0, name="v"), name="x")
        rows, scores = (r.all_gather(v, group="etp", backward="reduce_scatter", name=f"{v.name}.all") for v in (x, s))
        part = weighted_experts(r, rows, scores, w1, w2)
        y = r.reduce_scatter(part, group="etp", backward="all_gather", name="y")
        local = r.div(squares(r, y, t), value=TOKENS * D, name="local")
        r.loss(r.all_reduce(local, group=("edp", "etp"), name="loss"))
        r.backward(local)
        update(r, w0, r.all_reduce(r.gradient(w0), group=("edp", "etp"), name="w0.grad.sum"))
        for w in (w1, w2):
            update(r, w, r.all_reduce(r.gradient(w), group="edp" if right else ("edp", "etp"), name=f"{w.name}.grad.sum"))  # bug
    return experts_model(), p.build()


@case(
    "B30",
    "Expert gradients over the dense group, weights gathered on use",
    reference="NVIDIA/Megatron-LM#6080 (abf04f46e3)",
    mechanism="Expert weights are cut over a gather group that dense weights do not have, yet use the dense dp group.",
    cause=Cause.WRONG_GROUP,
    tensors=("w1.grad.sum", "w2.grad.sum"),
)
def gathered_weights(right: bool) -> Pair:
    p = tv.plan("experts", tv.Mesh(edp=2, egtp=2))
    with p.ranks() as r:
        u, s, t = batch(r, 4, "(edp egtp t) k")
        w0 = r.parameter("w0", (D, K), "d k")
        w1, w2 = r.parameter("w1", (E, F // 2, D), "e (egtp f) d"), r.parameter("w2", (E, D, F // 2), "e d (egtp f)")
        whole1 = r.all_gather(w1, group="egtp", dim=1, backward="reduce_scatter", name="w1.whole")
        whole2 = r.all_gather(w2, group="egtp", dim=2, backward="reduce_scatter", name="w2.whole")
        y = weighted_experts(r, r.tanh(r.linear(u, w0, name="v"), name="x"), s, whole1, whole2)
        local = r.div(squares(r, y, t), value=TOKENS * D, name="local")
        r.loss(r.all_reduce(local, group=("edp", "egtp"), name="loss"))
        r.backward(local)
        update(r, w0, r.all_reduce(r.gradient(w0), group=("edp", "egtp"), name="w0.grad.sum"))
        for w in (w1, w2):
            update(r, w, r.all_reduce(r.gradient(w), group="edp" if right else ("edp", "egtp"), name=f"{w.name}.grad.sum"))  # bug
    return experts_model(), p.build()


@case(
    "B33",
    "Rings of the first sequence-parallel group",
    reference="hpcaitech/ColossalAI@cfd9eda62",
    mechanism="Inner and outer rings are built from ranks 0 to sp−1 only, so the second group's ranks use rings of the first.",
    cause=Cause.WRONG_GROUP,
    tensors=("k.inner", "v.inner", "k", "v"),
)
def double_ring(right: bool) -> Pair:
    n, s, h, d, sp, inner = 2, 12, 5, 3, 4, 2

    def heads(b: Builder, x: Tensor, w: Tensor, name: str) -> Tensor:
        made: Tensor = b.unsqueeze(b.linear(x, w, name=f"{name}.flat"), dim=1, name=name)
        return made

    b = tv.program("ring attention")
    x, t = b.input("x", (n, s, h)), b.input("t", (n, s, d))
    w = [b.parameter(f"w{c}", (d, h)) for c in "qkv"]
    mixed, _ = b.attention(*(heads(b, x, v, c) for v, c in zip(w, "qkv", strict=True)), name=["mixed", "lse"])
    logical = finish(b, b.div(squares(b, b.squeeze(mixed, dim=1, name="y"), t), value=n * s * d, name="loss"))
    p = tv.plan("ring attention", tv.Mesh(dp=2, sp=sp))
    for g in range(2):
        base = g * sp if right else 0
        for i in range(sp // inner):
            p.group(f"inner.{g}.{i}", [base + i * inner + j for j in range(inner)])
        for j in range(inner):
            p.group(f"outer.{g}.{j}", [base + i * inner + j for i in range(sp // inner)])
    with p.ranks() as r:
        x, t = r.input("x", (1, s // sp, h), "(dp b) (sp s) h"), r.input("t", (1, s // sp, d), "(dp b) (sp s) d")
        w = [r.parameter(f"w{c}", (d, h), "d h") for c in "qkv"]
        q, k, v = (heads(r, x, m, f"{c}.own") for m, c in zip(w, "qkv", strict=True))
        small = r.each_rank(lambda rank: f"inner.{rank // sp}.{rank % sp // inner}", "ring.inner")
        large = r.each_rank(lambda rank: f"outer.{rank // sp}.{rank % inner}", "ring.outer")
        k, v = (r.all_gather(x, group=small, dim=2, backward="reduce_scatter", name=f"{c}.inner") for x, c in ((k, "k"), (v, "v")))  # bug
        k, v = (r.all_gather(x, group=large, dim=2, backward="reduce_scatter", name=c) for x, c in ((k, "k"), (v, "v")))  # bug
        mixed, _ = r.attention(q, k, v, name=["mixed", "lse"])
        local = r.div(squares(r, r.squeeze(mixed, dim=1, name="y"), t), value=n * s * d, name="local")
        r.loss(r.all_reduce(local, group=("dp", "sp"), name="loss"))
        r.backward(local)
        for m in w:
            update(r, m, r.all_reduce(r.gradient(m), group=("dp", "sp"), name=f"{m.name}.grad.all"))
    return logical, p.build()


@case(
    "B36",
    "Partition number of another parameter group",
    reference="deepspeedai/DeepSpeed#2058 (38a00bee9)",
    mechanism="The shard of the dense parameters is written to the slot of the rank's expert-dp position, a leaked loop variable.",
    cause=Cause.WRONG_BLOCK,
    tensors=("w.slot",),
)
def leaked_partition(right: bool) -> Pair:
    rows, k, o = 12, 5, 8
    b = tv.program("partitions")
    x, t, w = b.input("x", (rows, k)), b.input("t", (rows, o)), b.parameter("w", (o, k))
    logical = finish(b, b.div(squares(b, b.tanh(b.linear(x, w, name="u"), name="y"), t), value=rows * o, name="loss"))
    p = tv.plan("partitions", tv.Mesh(edp=2, ep=2))
    with p.ranks() as r:
        x, t, w = (
            r.input("x", (rows // 4, k), "(edp ep b) k"),
            r.input("t", (rows // 4, o), "(edp ep b) k"),
            r.parameter("w", (o, k), "o k"),
        )
        local = r.div(squares(r, r.tanh(r.linear(x, w, name="u"), name="y"), t), value=rows * o, name="local")
        r.loss(r.all_reduce(local, group=("edp", "ep"), name="loss"))
        r.backward(local)
        r.phase = "optimizer"
        shard = r.reduce_scatter(r.gradient(w), group=("edp", "ep"), name="w.grad.shard")
        r.lives(shard, "w.grad", "(edp ep o) k")
        r.output(shard, "gradient", "w")
        begin, end = r.each(lambda at: (2 * at["edp"] + at["ep"]) * 2), r.each(lambda at: (2 * at["edp"] + at["ep"]) * 2 + 2)
        new = r.sgd(r.slice(w, dim=0, start=begin, stop=end, name="w.shard"), shard, lr=LR, name="w.shard.new")
        number = r.each(lambda at: 2 * at["edp"] + at["ep"] if right else at["edp"])
        slots = r.arange(stop=4, name="slots")
        hit = r.reshape(r.eq(slots, value=number, name="w.slot"), shape=(4, 1, 1), name="w.hit")  # bug
        buffer = r.where(hit, r.unsqueeze(new, dim=0, name="new"), r.reshape(w, shape=(4, 2, k), name="w.old"), name="w.buffer")
        sent = r.slice(r.reshape(buffer, shape=(o, k), name="w.written"), dim=0, start=begin, stop=end, name="w.sent")
        r.update(w, r.all_gather(sent, group=("edp", "ep"), name="w.new"))
    return logical, p.build()


@case(
    "B93",
    "Expert gradients divided by the expert-dp size",
    reference="deepspeedai/DeepSpeed#6545, fixed by #6546 (b647fb247)",
    mechanism="Expert gradients, summed over expert-dp, are divided by its size and not by dp: they are ep times too large.",
    cause=Cause.WRONG_FACTOR,
    tensors=("w1.grad.mean", "w2.grad.mean"),
)
def expert_divisor(right: bool) -> Pair:
    p = tv.plan("experts", tv.Mesh(edp=2, ep=2))
    with p.ranks() as r:
        u, s, t = batch(r, 4, "(edp ep t) k")
        w0, w1, w2 = (
            r.parameter("w0", (D, K), "d k"),
            r.parameter("w1", (1, F, D), "(ep e) f d"),
            r.parameter("w2", (1, D, F), "(ep e) d f"),
        )
        x = r.tanh(r.linear(u, w0, name="v"), name="x")
        rows, scores = (r.all_gather(v, group="ep", backward="reduce_scatter", name=f"{v.name}.all") for v in (x, s))
        part = weighted_experts(r, rows, own_scores(r, scores, "ep"), w1, w2)
        y = r.reduce_scatter(part, group="ep", backward="all_gather", name="y")
        local = r.div(squares(r, y, t), value=TOKENS * D // 4, name="local")
        r.loss(r.all_reduce(local, group=("edp", "ep"), op="avg", name="loss"))
        r.backward(local)
        update(r, w0, r.all_reduce(r.gradient(w0), group=("edp", "ep"), op="avg", name="w0.grad.mean"))
        for w in (w1, w2):
            total = r.all_reduce(r.gradient(w), group="edp", name=f"{w.name}.grad.sum")
            update(r, w, r.div(total, value=4 if right else 2, name=f"{w.name}.grad.mean"))  # bug
    return experts_model(), p.build()


@case(
    "B94",
    "FSDP divides expert gradients by its own group",
    reference="pytorch/torchtitan#1551 (59e57a4bb), pytorch/pytorch#160285",
    mechanism="FSDP of the experts divides by the size of its mesh without ep, so expert gradients are ep times too large.",
    cause=Cause.WRONG_FACTOR,
    tensors=("w1.grad.mean", "w2.grad.mean"),
)
def fsdp_divisor(right: bool) -> Pair:
    p = tv.plan("experts", tv.Mesh(shard=2, ep=2))
    with p.ranks() as r:
        u, s, t = batch(r, 4, "(shard ep t) k")
        w0 = r.parameter("w0", (D, K), "d k")
        w1, w2 = r.parameter("w1", (1, F // 2, D), "(ep e) (shard f) d"), r.parameter("w2", (1, D, F // 2), "(ep e) d (shard f)")
        whole = [r.all_gather(w, group="shard", dim=dim, backward="none", name=f"{w.name}.whole") for w, dim in ((w1, 1), (w2, 2))]
        x = r.tanh(r.linear(u, w0, name="v"), name="x")
        rows, scores = (r.all_gather(v, group="ep", backward="reduce_scatter", name=f"{v.name}.all") for v in (x, s))
        part = weighted_experts(r, rows, own_scores(r, scores, "ep"), *whole)
        y = r.reduce_scatter(part, group="ep", backward="all_gather", name="y")
        local = r.div(squares(r, y, t), value=TOKENS * D // 4, name="local")
        r.loss(r.all_reduce(local, group=("shard", "ep"), op="avg", name="loss"))
        grads = r.backward(local, wrt=whole)
        update(r, w0, r.all_reduce(r.gradient(w0), group=("shard", "ep"), op="avg", name="w0.grad.mean"))
        for w, g, dim in zip((w1, w2), grads, (1, 2), strict=True):
            total = r.reduce_scatter(g, group="shard", dim=dim, name=f"{w.name}.grad.sum")
            update(r, w, r.div(total, value=4 if right else 2, name=f"{w.name}.grad.mean"))  # bug
    return experts_model(), p.build()


@case(
    "B95",
    "Expert gradients scaled by 1/ep before an average",
    reference="NVIDIA/Megatron-LM@4f8974a400 (!2564)",
    mechanism="Before the average over expert-dp, gradients are scaled by 1/ep; with tp ≠ etp it must be edp/dp.",
    cause=Cause.WRONG_FACTOR,
    tensors=("w1.grad.scaled", "w2.grad.scaled"),
)
def scaled_before_average(right: bool) -> Pair:
    dp, edp, ep = 2, 2, 2  # tp=2, etp=1: the tp ranks of a replica are its expert-parallel group
    p = tv.plan("experts", tv.Mesh(dp=dp, tp=2))
    with p.ranks() as r:
        u, s, t = batch(r, 4, "(dp tp t) k")
        w0, w1, w2 = (
            r.parameter("w0", (D, K), "d k"),
            r.parameter("w1", (1, F, D), "(tp e) f d"),
            r.parameter("w2", (1, D, F), "(tp e) d f"),
        )
        x = r.tanh(r.linear(u, w0, name="v"), name="x")
        rows, scores = (r.all_gather(v, group="tp", backward="reduce_scatter", name=f"{v.name}.all") for v in (x, s))
        part = weighted_experts(r, rows, own_scores(r, scores, "tp"), w1, w2)
        y = r.reduce_scatter(part, group="tp", backward="all_gather", name="y")
        local = r.div(squares(r, y, t), value=TOKENS * D // dp, name="local")
        r.loss(r.all_reduce(r.all_reduce(local, group="tp", name="loss.tp"), group="dp", op="avg", name="loss"))
        r.backward(local)
        g = r.all_reduce(r.gradient(w0), group="tp", name="w0.grad.tp")
        update(r, w0, r.all_reduce(g, group="dp", op="avg", name="w0.grad.mean"))
        for w in (w1, w2):
            scaled = r.mul(r.gradient(w), value=edp / dp if right else 1 / ep, name=f"{w.name}.grad.scaled")  # bug
            update(r, w, r.all_reduce(scaled, group="dp", op="avg", name=f"{w.name}.grad.mean"))
    return experts_model(), p.build()


@case(
    "B96",
    "Expert gradients that are not scaled",
    reference="NVIDIA/Megatron-LM@3373641ff1",
    mechanism="Experts see the tokens of all dp ranks through the all-to-all, and their gradients are not divided by dp.",
    cause=Cause.WRONG_FACTOR,
    tensors=("w1.grad.mean", "w2.grad.mean"),
)
def unscaled_experts(right: bool) -> Pair:
    rows, d, f = 6, 5, 7

    def experts(b: Builder, x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        made: Tensor = b.grouped_matmul(b.silu(b.grouped_matmul(x, w1, name="h"), name="a"), w2, name="y.expert")
        return made

    b = tv.program("dispatch")
    u, t = b.input("u", (2, rows, 3)), b.input("t", (2, rows, d))
    w0, w1, w2 = b.parameter("w0", (d, 3)), b.parameter("w1", (2, d, f)), b.parameter("w2", (2, f, d))
    y = experts(b, b.tanh(b.linear(u, w0, name="v"), name="x"), w1, w2)
    logical = finish(b, b.div(squares(b, y, t), value=2 * rows * d, name="loss"))
    p = tv.plan("dispatch", tv.Mesh(ep=2))
    with p.ranks() as r:
        u, t = r.input("u", (2, rows // 2, 3), "e (ep c) k"), r.input("t", (2, rows // 2, d), "e (ep c) k")
        w0, w1, w2 = (
            r.parameter("w0", (d, 3), "d k"),
            r.parameter("w1", (1, d, f), "(ep e) d f"),
            r.parameter("w2", (1, f, d), "(ep e) f d"),
        )
        x = r.tanh(r.linear(u, w0, name="v"), name="x")
        sent = r.all_to_all(x, group="ep", split_dim=0, concat_dim=1, backward="all_to_all", name="x.expert")
        y = r.all_to_all(experts(r, sent, w1, w2), group="ep", split_dim=1, concat_dim=0, backward="all_to_all", name="y")
        local = r.div(squares(r, y, t), value=rows * d, name="local")
        r.loss(r.all_reduce(local, group="ep", op="avg", name="loss"))
        r.backward(local)
        update(r, w0, r.all_reduce(r.gradient(w0), group="ep", op="avg", name="w0.grad.mean"))
        for w in (w1, w2):
            g = r.gradient(w)
            update(r, w, r.div(g, value=2, name=f"{w.name}.grad.mean") if right else r.identity(g, name=f"{w.name}.grad.mean"))  # bug
    return logical, p.build()


@case(
    "B97",
    "Expert gradients divided twice",
    reference="deepspeedai/DeepSpeed#4957 (9d2660d2a)",
    mechanism="Expert gradients are divided one by one, and the all-reduce of their bucket divides them again.",
    cause=Cause.WRONG_FACTOR,
    tensors=("bucket.mean",),
)
def divided_twice(right: bool) -> Pair:
    p = tv.plan("experts", tv.Mesh(edp=2, ep=2))
    with p.ranks() as r:
        u, s, t = batch(r, 2, "(edp t) k")
        w0, w1, w2 = (
            r.parameter("w0", (D, K), "d k"),
            r.parameter("w1", (1, F, D), "(ep e) f d"),
            r.parameter("w2", (1, D, F), "(ep e) d f"),
        )
        x = r.copy(r.tanh(r.linear(u, w0, name="v"), name="x"), "ep", name="x.ep")
        y = r.all_reduce(weighted_experts(r, x, own_scores(r, s, "ep"), w1, w2), group="ep", backward="identity", name="y")
        local = r.div(squares(r, y, t), value=TOKENS * D // 2, name="local")
        r.loss(r.all_reduce(local, group="edp", op="avg", name="loss"))
        r.backward(local)
        update(r, w0, r.all_reduce(r.gradient(w0), group="edp", op="avg", name="w0.grad.mean"))
        flat = [
            r.reshape(r.div(r.gradient(w), value=2, name=f"{w.name}.grad.half"), shape=(F * D,), name=f"{w.name}.flat") for w in (w1, w2)
        ]
        bucket = r.all_reduce(r.concat(*flat, dim=0, name="bucket"), group="edp", name="bucket.sum")
        mean = r.identity(bucket, name="bucket.mean") if right else r.div(bucket, value=2, name="bucket.mean")  # bug
        for i, w in enumerate((w1, w2)):
            part = r.slice(mean, dim=0, start=i * F * D, stop=(i + 1) * F * D, name=f"{w.name}.part")
            update(r, w, r.reshape(part, shape=w.shape, name=f"{w.name}.grad.mean"))
    return experts_model(), p.build()
