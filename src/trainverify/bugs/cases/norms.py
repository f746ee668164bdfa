"""Norms of gradients, and statistics over a batch, that count elements twice or average them."""

from __future__ import annotations

import trainverify as tv
from trainverify.bugs.case import Pair, case
from trainverify.bugs.step import Builder, finish, piece, squares, update
from trainverify.build.plan import RankBuilder
from trainverify.build.tape import Tensor
from trainverify.explain.cause import Cause
from trainverify.graph.lineage import Part, Parts, Run
from trainverify.graph.program import Program

ROWS, K, D, F, E = 12, 3, 5, 6, 2
CLIP = 0.5


def square_sum(r: RankBuilder, *grads: Tensor, name: str) -> Tensor:
    """Σ g² over all elements of some gradients."""
    parts = [r.sum(r.square(g, name=f"{name}.sq{i}"), name=f"{name}.{i}") for i, g in enumerate(grads)]
    total: Tensor = parts[0]
    for part in parts[1:]:
        total = r.add(total, part, name=name)
    return total


def clip_by(r: RankBuilder, norm: Tensor) -> Tensor:
    """Report a norm and the factor that follows from it."""
    factor: Tensor = r.clip_factor(norm, max_norm=CLIP, name="clip_factor")
    r.metric("grad_norm", norm)
    r.metric("clip_factor", factor)
    return factor


@case(
    "B37",
    "Norm of hybrid shards",
    reference="ByteDance-Seed/VeOmni#184, fixed by #862",
    mechanism="Squares are summed over shards and replicas although replicas hold the same gradients: the norm is √R too large.",
    cause=Cause.WRONG_GROUP,
    tensors=("squares.all",),
)
def hybrid_norm(right: bool) -> Pair:
    b = tv.program("hybrid")
    x, t = b.input("x", (ROWS, K)), b.input("t", (ROWS, D))
    w1, w2 = b.parameter("w1", (F, K)), b.parameter("w2", (D, F))
    y = b.linear(b.relu(b.linear(x, w1, name="h"), name="a"), w2, name="y")
    logical = finish(b, b.div(squares(b, y, t), value=ROWS * D, name="loss"), clip=CLIP)
    p = tv.plan("hybrid", tv.Mesh(replica=2, shard=2))
    with p.ranks() as r:
        x, t = r.input("x", (ROWS // 4, K), "(replica shard b) k"), r.input("t", (ROWS // 4, D), "(replica shard b) k")
        w1, w2 = r.parameter("w1", (F // 2, K), "(shard f) k"), r.parameter("w2", (D, F // 2), "d (shard f)")
        whole = [r.all_gather(w, group="shard", dim=i, backward="reduce_scatter", name=f"{w.name}.whole") for i, w in enumerate((w1, w2))]
        y = r.linear(r.relu(r.linear(x, whole[0], name="h"), name="a"), whole[1], name="y")
        local = r.div(squares(r, y, t), value=ROWS * D, name="local")
        r.loss(r.all_reduce(local, group=("replica", "shard"), name="loss"))
        r.backward(local)
        r.phase = "optimizer"
        grads = [r.all_reduce(r.gradient(w), group="replica", name=f"{w.name}.grad.sum") for w in (w1, w2)]
        own = square_sum(r, *grads, name="norm.own")
        total = r.all_reduce(own, group="shard" if right else ("replica", "shard"), name="squares.all")  # bug
        factor = clip_by(r, r.sqrt(total, name="grad_norm"))
        for w, g in zip((w1, w2), grads, strict=True):
            update(r, w, g, r.mul(g, factor, name=f"{w.name}.clipped"))
    return logical, p.build()


def experts(b: Builder, x: Tensor, scores: Tensor, w: Tensor) -> Tensor:
    """Σ over these experts of score · expert(x)."""
    made: Tensor = b.einsum(scores, b.tanh(b.einsum(x, w, spec="td,efd->tef", name="h"), name="a"), spec="te,tef->tf", name="y.part")
    return made


def experts_model() -> Program:
    b = tv.program("experts")
    u, s, t = b.input("u", (ROWS, K)), b.input("s", (ROWS, E)), b.input("t", (ROWS, F))
    dense, w = b.parameter("dense", (D, K)), b.parameter("w", (E, F, D))
    y = experts(b, b.linear(u, dense, name="x"), s, w)
    return finish(b, b.div(squares(b, y, t), value=ROWS * F, name="loss"), clip=CLIP)


def expert_gradients(r: RankBuilder) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Parameters and gradients of a replicated dense layer and of one expert per rank; every rank has the whole batch."""
    u, s, t = (r.input(n, (ROWS, k), "t k") for n, k in (("u", K), ("s", E), ("t", F)))
    dense, w = r.parameter("dense", (D, K), "d k"), r.parameter("w", (1, F, D), "(ep e) f d")
    own = piece(r, s, 1, lambda at: at["ep"], 1, "s.own")
    part = experts(r, r.copy(r.linear(u, dense, name="x"), "ep", name="x.ep"), own, w)
    loss = r.div(squares(r, r.all_reduce(part, group="ep", backward="identity", name="y"), t), value=ROWS * F, name="loss")
    r.loss(loss)
    r.backward(loss)
    r.phase = "optimizer"
    return (dense, w), (r.gradient(dense), r.gradient(w))


@case(
    "B101",
    "Norms of ranks averaged",
    reference="deepspeedai/DeepSpeed#8475, PR #8476",
    mechanism="Each rank takes the norm of dense and own expert gradients, and norms are averaged in place of summing squares.",
    cause=Cause.WRONG_REDUCTION,
    tensors=("grad_norm",),
)
def averaged_norms(right: bool) -> Pair:
    p = tv.plan("experts", tv.Mesh(ep=2))
    with p.ranks() as r:
        weights, grads = expert_gradients(r)
        dense, expert = (square_sum(r, g, name=f"norm.{w.name}") for w, g in zip(weights, grads, strict=True))
        if right:
            norm = r.sqrt(r.add(dense, r.all_reduce(expert, group="ep", name="expert.all"), name="squares.all"), name="grad_norm")
        else:
            norm = r.all_reduce(r.sqrt(r.add(dense, expert, name="squares.all"), name="own"), group="ep", op="avg", name="grad_norm")  # bug
        factor = clip_by(r, norm)
        for w, g in zip(weights, grads, strict=True):
            update(r, w, g, r.mul(g, factor, name=f"{w.name}.clipped"))
    return experts_model(), p.build()


@case(
    "B102",
    "Two optimizers clip by two norms",
    reference="NVIDIA/Megatron-LM@abf10f8590, #785",
    mechanism="Dense and expert parameters have an optimizer each, and each clips by the norm of its own gradients.",
    cause=Cause.WRONG_INPUT,
    tensors=("factor.dense", "factor.w"),
)
def two_norms(right: bool) -> Pair:
    p = tv.plan("experts", tv.Mesh(ep=2))
    with p.ranks() as r:
        weights, grads = expert_gradients(r)
        dense, expert = (square_sum(r, g, name=f"norm.{w.name}") for w, g in zip(weights, grads, strict=True))
        expert = r.all_reduce(expert, group="ep", name="expert.all")
        norm = r.sqrt(r.add(dense, expert, name="squares.all"), name="grad_norm")
        clip_by(r, norm)
        for w, g, own in zip(weights, grads, (dense, expert), strict=True):
            alone = r.sqrt(own, name=f"{w.name}.norm")
            factor = r.clip_factor(norm if right else alone, max_norm=CLIP, name=f"factor.{w.name}")  # bug
            update(r, w, g, r.mul(g, factor, name=f"{w.name}.clipped"))
    return experts_model(), p.build()


@case(
    "B103",
    "Replicated weights counted on every tp rank",
    reference="NVIDIA-NeMo/RL#3788, ROCm/TransformerEngine#715",
    mechanism="Squares of all gradients are summed over tp, so those of replicated weights count tp times.",
    cause=Cause.COUNTED_TWICE,
    tensors=("squares.all", "squares.tp"),
)
def replicated_norm(right: bool) -> Pair:
    b = tv.program("replicated")
    x, t = b.input("x", (ROWS, D)), b.input("t", (ROWS, D))
    g, w1, w2 = b.parameter("g", (D,)), b.parameter("w1", (F, D)), b.parameter("w2", (D, F))
    y = b.linear(b.relu(b.linear(b.rms_norm(x, g, name="n"), w1, name="h"), name="a"), w2, name="y")
    logical = finish(b, b.div(squares(b, y, t), value=ROWS * D, name="loss"), clip=CLIP)
    p = tv.plan("replicated", tv.Mesh(tp=2))
    with p.ranks() as r:
        x, t = r.input("x", (ROWS, D), "b d"), r.input("t", (ROWS, D), "b d")
        g, w1, w2 = r.parameter("g", (D,), "d"), r.parameter("w1", (F // 2, D), "(tp f) d"), r.parameter("w2", (D, F // 2), "d (tp f)")
        n = r.copy(r.rms_norm(x, g, name="n"), "tp", name="n.tp")
        part = r.linear(r.relu(r.linear(n, w1, name="h"), name="a"), w2, name="y.part")
        loss = r.div(squares(r, r.all_reduce(part, group="tp", backward="identity", name="y"), t), value=ROWS * D, name="loss")
        r.loss(loss)
        r.backward(loss)
        r.phase = "optimizer"
        cut = square_sum(r, r.gradient(w1), r.gradient(w2), name="norm.cut")
        same = square_sum(r, r.gradient(g), name="norm.same")
        if right:
            total = r.add(r.all_reduce(cut, group="tp", name="squares.tp"), same, name="squares.all")
        else:
            total = r.all_reduce(r.add(cut, same, name="squares.tp"), group="tp", name="squares.all")  # bug
        factor = clip_by(r, r.sqrt(total, name="grad_norm"))
        for w in (g, w1, w2):
            update(r, w, r.gradient(w), r.mul(r.gradient(w), factor, name=f"{w.name}.clipped"))
    return logical, p.build()


@case(
    "B104",
    "Tied embedding counted on both stages",
    reference="NVIDIA/Megatron-LM@5c8238c343 (2021)",
    mechanism="The last stage's copy of the tied embedding is not marked as shared, so the norm counts it twice.",
    cause=Cause.COUNTED_TWICE,
    tensors=("norm.own",),
)
def tied_norm(right: bool) -> Pair:
    s, v, h = 5, 7, 3
    b = tv.program("tied")
    ids, t = b.input("ids", (s,), "i64", ids=v), b.input("t", (s,), "i64", ids=v)
    e, w = b.parameter("e", (v, h)), b.parameter("w", (h, h))
    logits = b.linear(b.tanh(b.linear(b.embedding(ids, e, name="x"), w, name="u"), name="h"), e, name="logits")
    logical = finish(b, b.cross_entropy(logits, t, name="loss"), clip=CLIP)
    p = tv.plan("tied", tv.Mesh(pp=2))

    def clipped(r: RankBuilder, own: Tensor, *pairs: tuple[Tensor, Tensor]) -> None:
        factor = clip_by(r, r.sqrt(r.all_reduce(own, group="pp", name="squares.all"), name="grad_norm"))
        for w, g in pairs:
            update(r, w, g, r.mul(g, factor, name=f"{w.name}.clipped"))

    with p.ranks(pp=0) as r:
        ids, e = r.input("ids", (s,), "s", dtype="i64", ids=v), r.parameter("e", (v, h), "v h")
        x = r.embedding(ids, e, name="x")
        r.send(x, r.peer(pp=1))
        r.backward(x, seeds=[r.recv((s, h), r.peer(pp=1), name="x.grad")])
        r.phase = "optimizer"
        g = r.all_reduce(r.gradient(e), group="pp", name="e.grad.tied")
        clipped(r, square_sum(r, g, name="norm.e"), (e, g))
    with p.ranks(pp=1) as r:
        t = r.input("t", (s,), "s", dtype="i64", ids=v)
        e, w = r.parameter("e", (v, h), "v h"), r.parameter("w", (h, h), "o h")
        x = r.recv((s, h), r.peer(pp=0), name="x")
        logits = r.linear(r.tanh(r.linear(x, w, name="u"), name="h"), e, name="logits")
        loss = r.cross_entropy(logits, t, name="loss")
        r.loss(loss)
        (dx,) = r.backward(loss, wrt=[x])
        r.send(dx, r.peer(pp=0))
        r.phase = "optimizer"
        g = r.all_reduce(r.gradient(e), group="pp", name="e.grad.tied")
        of_w, of_e = (square_sum(r, y, name=f"norm.{n}") for n, y in (("w", r.gradient(w)), ("e", g)))
        own = r.identity(of_w, name="norm.own") if right else r.add(of_w, of_e, name="norm.own")  # bug
        clipped(r, own, (e, g), (w, r.gradient(w)))
    return logical, p.build()


@case(
    "B105",
    "Batch statistics of uneven batches",
    reference="pytorch/pytorch#22192, #36382",
    mechanism="Synchronised batch norm divides by the rank's own count times the number of ranks, but batches differ in size.",
    cause=Cause.UNEQUAL_WEIGHTS,
    tensors=("n",),
)
def uneven_batch_norm(right: bool) -> Pair:
    counts, c, length = (1, 3), 2, 5
    rows = sum(counts)
    b = tv.program("batch norm")
    x, t = b.input("x", (rows, 3, length)), b.input("t", (rows, c, length))
    w, g, bias = b.parameter("w", (c, 3, 1)), b.parameter("g", (c,)), b.parameter("bias", (c,))
    u = b.conv1d(x, w, name="u")
    total, power = b.batch_norm_sums(u, name=["total", "power"])
    n, _, _ = b.batch_norm_apply(u, total, power, g, bias, count=rows * length, name=["n", "mean", "var"])
    logical = finish(b, b.div(squares(b, b.tanh(n, name="y"), t), value=rows * c * length, name="loss"))
    p = tv.plan("batch norm", tv.Mesh(dp=2))
    for rank, start in enumerate((0, counts[0])):

        def held(*shape: int, rank: int = rank, start: int = start) -> Parts:
            return Parts(((rank, (Part((0, 0, 0), (Run(start, counts[rank]), *(Run(0, size) for size in shape[1:]))),)),))

        with p.ranks(rank) as r:
            x = r.input("x", (counts[rank], 3, length), held(rows, 3, length))
            t = r.input("t", (counts[rank], c, length), held(rows, c, length))
            w, g, bias = r.parameter("w", (c, 3, 1), "c k l"), r.parameter("g", (c,), "c"), r.parameter("bias", (c,), "c")
            u = r.conv1d(x, w, name="u")
            sums = r.batch_norm_sums(u, name=["total", "power"])
            total, power = (r.all_reduce(v, group="dp", backward="all_reduce", name=f"{v.name}.dp") for v in sums)
            count = (rows if right else counts[rank] * 2) * length
            n, _, _ = r.batch_norm_apply(u, total, power, g, bias, count=count, name=["n", "mean", "var"])  # bug
            local = r.div(squares(r, r.tanh(n, name="y"), t), value=rows * c * length, name="local")
            r.loss(r.all_reduce(local, group="dp", name="loss"))
            r.backward(local)
            for v in (w, g, bias):
                update(r, v, r.all_reduce(r.gradient(v), group="dp", name=f"{v.name}.grad.dp"))
    return logical, p.build()
