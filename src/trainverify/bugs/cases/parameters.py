"""Sharded parameters and their optimizers: tied weights, step numbers, weight decay."""

from __future__ import annotations

import trainverify as tv
from trainverify.bugs.case import Pair, case
from trainverify.bugs.step import LR, finish, squares, update
from trainverify.build.tape import Tensor
from trainverify.explain.cause import Cause
from trainverify.graph.lineage import Part, Parts, Run

S, V, H, K, OUT = 6, 8, 5, 3, 4


@case(
    "B120",
    "Full gradient written for both uses of a tied weight",
    reference="pytorch/torchtitan#3174 (2b935fa3c)",
    mechanism="The traced graph returns the tied weight's full gradient once for each use, and both are added.",
    cause=Cause.COUNTED_TWICE,
    tensors=("e.grad.total",),
)
def tied_trace(right: bool) -> Pair:
    b = tv.program("tied")
    ids, t, e = b.input("ids", (S,), "i64", ids=V), b.input("t", (S,), "i64", ids=V), b.parameter("e", (V, H))
    logical = finish(b, b.cross_entropy(b.linear(b.tanh(b.embedding(ids, e, name="x"), name="h"), e, name="logits"), t, name="loss"))
    p = tv.plan("tied", tv.Mesh(dp=2))
    with p.ranks() as r:
        ids, t = (r.input(n, (S // 2,), "(dp s)", dtype="i64", ids=V) for n in ("ids", "t"))
        e = r.parameter("e", (V // 2, H), "(dp v) h")
        whole = r.all_gather(e, group="dp", backward="none", name="e.whole")
        logits = r.linear(r.tanh(r.embedding(ids, whole, name="x"), name="h"), whole, name="logits")
        local = r.cross_entropy(logits, t, name="local")
        r.loss(r.all_reduce(local, group="dp", op="avg", name="loss"))
        (full,) = r.backward(local, wrt=[whole])
        total = r.identity(full, name="e.grad.total") if right else r.add(full, full, name="e.grad.total")  # bug
        update(r, e, r.reduce_scatter(total, group="dp", op="avg", name="e.grad.shard"))
    return logical, p.build()


@case(
    "B122",
    "Last shard of a padded tied weight",
    reference="pytorch/pytorch#176076, fixed by #176225",
    mechanism="The tied weight is in two sharding groups with padding, and the last rank's shard is never updated.",
    cause=Cause.MISSING_UPDATE,
    tensors=("e.new",),
)
def padded_tied(right: bool) -> Pair:
    v, rows = 3, (2, 1)  # rows of the ranks; the second one has a row of padding
    b = tv.program("tied")
    ids, t, e = b.input("ids", (S,), "i64", ids=v), b.input("t", (S,), "i64", ids=v), b.parameter("e", (v, H))
    logical = finish(b, b.cross_entropy(b.linear(b.tanh(b.embedding(ids, e, name="x"), name="h"), e, name="logits"), t, name="loss"))
    p = tv.plan("tied", tv.Mesh(dp=2))
    for rank in range(2):
        held = Part((0,), (Run(2 * rank * H, rows[rank] * H),), flat=True)
        parts = (held,) if rank == 0 else (held, Part((H,), (Run(0, H),), flat=True, padding=True))
        with p.ranks(rank) as r:
            ids, t = (r.input(n, (S // 2,), "(dp s)", dtype="i64", ids=v) for n in ("ids", "t"))
            e = r.parameter("e", (2, H), Parts(((rank, parts),)))
            padded = r.all_gather(e, group="dp", backward="reduce_scatter", name="e.padded")
            whole = r.slice(padded, dim=0, start=0, stop=v, name="e.whole")
            logits = r.linear(r.tanh(r.embedding(ids, whole, name="x"), name="h"), whole, name="logits")
            local = r.div(r.cross_entropy(logits, t, reduction="sum", name="sum"), value=S, name="local")
            r.loss(r.all_reduce(local, group="dp", name="loss"))
            r.backward(local)
            r.phase = "optimizer"
            g = r.gradient(e)
            r.output(g, "gradient", "e")
            updated = right or rank == 0
            r.update(e, r.sgd(e, g, lr=LR, name="e.new") if updated else r.identity(e, name="e.new"))  # bug
    return logical, p.build()


WD = 0.125


@case(
    "B123",
    "A synthetic first step",
    reference="NVIDIA/Megatron-LM#5976 (ce8a8a736f)",
    mechanism="A step with zero gradients that allocates the state decays the weight and counts: the first real step has number 2.",
    cause=Cause.OPTIMIZER_SETTING,
    tensors=("w.start", "w.new"),
)
def synthetic_step(right: bool) -> Pair:
    b = tv.program("first step")
    x, t, w = b.input("x", (S, K)), b.input("t", (S, OUT)), b.parameter("w", (OUT, K))
    b.loss(b.div(squares(b, b.tanh(b.linear(x, w, name="u"), name="y"), t), value=S * OUT, name="loss"))
    logical = tv.complete(b.build(), tv.AdamW(lr=0.5, weight_decay=WD, step=1))
    p = tv.plan("first step", tv.Mesh(dp=2))
    with p.ranks() as r:
        x, t, w = (
            r.input("x", (S // 2, K), "(dp s) k"),
            r.input("t", (S // 2, OUT), "(dp s) k"),
            r.parameter("w", (OUT // 2, K), "(dp o) k"),
        )
        m, v = r.state("w.m", (OUT // 2, K), "(dp o) k"), r.state("w.v", (OUT // 2, K), "(dp o) k", domain="nonnegative")
        whole = r.all_gather(w, group="dp", backward="reduce_scatter", name="w.whole")
        local = r.div(squares(r, r.tanh(r.linear(x, whole, name="u"), name="y"), t), value=S * OUT, name="local")
        r.loss(r.all_reduce(local, group="dp", name="loss"))
        r.backward(local)
        r.phase = "optimizer"
        r.output(r.gradient(w), "gradient", "w")
        start = r.identity(w, name="w.start") if right else r.mul(w, value=1 - 0.5 * WD, name="w.start")  # bug
        names, settings = ["w.new", "w.m.new", "w.v.new"], {"lr": 0.5, "weight_decay": WD}
        new = r.adamw(start, r.gradient(w), m, v, **settings, step=1 if right else 2, name=names)  # bug
        for old, fresh in zip((w, m, v), new, strict=True):
            r.update(old, fresh)
    return logical, p.build()


@case(
    "B125",
    "Weight decay by the dimensions of a flat parameter",
    reference="mlfoundations/open_clip#358, verl-project/verl#5070, #7215",
    mechanism="Parameters with two dimensions or more decay, but shards of flat parameters have one: nothing decays.",
    cause=Cause.OPTIMIZER_SETTING,
    tensors=("w.new",),
)
def flat_decay(right: bool) -> Pair:
    b = tv.program("flat")
    x, t, w, bias = b.input("x", (S, K)), b.input("t", (S, OUT)), b.parameter("w", (OUT, K)), b.parameter("b", (OUT,))
    b.loss(b.div(squares(b, b.tanh(b.linear(x, w, bias, name="u"), name="y"), t), value=S * OUT, name="loss"))
    logical = tv.complete(b.build(), tv.AdamW(lr=0.5, weight_decay=WD, step=3, decays=lambda name: name == "w"))
    p = tv.plan("flat", tv.Mesh(dp=2))
    half = OUT * K // 2

    def flat(size: int) -> Parts:
        return Parts(tuple((rank, (Part((0,), (Run(rank * size, size),), flat=True),)) for rank in range(2)))

    with p.ranks() as r:
        x, t = r.input("x", (S // 2, K), "(dp s) k"), r.input("t", (S // 2, OUT), "(dp s) k")
        weights = {"w": r.parameter("w", (half,), flat(half)), "b": r.parameter("b", (OUT // 2,), flat(OUT // 2))}
        shapes = {"w": (OUT, K), "b": (OUT,)}
        whole = []
        for n, shard in weights.items():
            every = r.all_gather(shard, group="dp", backward="reduce_scatter", name=f"{n}.flat")
            whole.append(r.reshape(every, shape=shapes[n], name=f"{n}.whole"))
        local = r.div(squares(r, r.tanh(r.linear(x, *whole, name="u"), name="y"), t), value=S * OUT, name="local")
        r.loss(r.all_reduce(local, group="dp", name="loss"))
        r.backward(local)
        r.phase = "optimizer"
        for n, shard in weights.items():
            size = shard.shape[0]
            m, v = r.state(f"{n}.m", (size,), flat(size)), r.state(f"{n}.v", (size,), flat(size), domain="nonnegative")
            r.output(r.gradient(shard), "gradient", n)
            decay = WD if len(shapes[n] if right else shard.shape) >= 2 else 0.0
            names = [f"{n}.new", f"{n}.m.new", f"{n}.v.new"]
            new: tuple[Tensor, ...] = r.adamw(shard, r.gradient(shard), m, v, lr=0.5, weight_decay=decay, step=3, name=names)  # bug
            for old, fresh in zip((shard, m, v), new, strict=True):
                r.update(old, fresh)
    return logical, p.build()
