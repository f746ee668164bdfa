"""Gradients that data-parallel ranks reduce too early, not at all, or in the wrong buffer."""

from __future__ import annotations

import trainverify as tv
from trainverify.bugs.case import Pair, case
from trainverify.bugs.step import LR, Builder, finish, piece, squares, update
from trainverify.build.plan import RankBuilder
from trainverify.build.tape import Tensor
from trainverify.explain.cause import Cause
from trainverify.graph.program import Program

ROWS, K, H, OUT = 12, 5, 6, 3


def mlp(b: Builder, x: Tensor, w1: Tensor, w2: Tensor, tag: str = "") -> Tensor:
    made: Tensor = b.linear(b.relu(b.linear(x, w1, name=f"h{tag}"), name=f"a{tag}"), w2, name=f"y{tag}")
    return made


def mlp_model() -> Program:
    b = tv.program("mlp")
    x, t = b.input("x", (ROWS, K)), b.input("t", (ROWS, OUT))
    y = mlp(b, x, b.parameter("w1", (H, K)), b.parameter("w2", (OUT, H)))
    return finish(b, b.div(squares(b, y, t), value=ROWS * OUT, name="loss"))


def micro_batches(r: RankBuilder, ways: int, micro: int) -> list[tuple[Tensor, Tensor]]:
    """Rows of a rank's micro-batches: the batch is cut over dp, then into micro-batches."""
    rows = ROWS // ways // micro

    def cut(name: str, width: int, m: int) -> Tensor:
        return r.input(f"{name}{m}", (rows, width), "(dp mb b) k", name, fixed={"mb": (m, micro)})

    return [(cut("x", K, m), cut("t", OUT, m)) for m in range(micro)]


@case(
    "B21",
    "All-reduce of the low-precision gradient",
    reference="deepspeedai/DeepSpeed#5170 (dd3690c53)",
    mechanism="The bf16 gradient is all-reduced while the optimizer takes the accumulated buffer, which is not.",
    cause=Cause.STALE_INPUT,
    tensors=("w1.grad.mean", "w2.grad.mean"),
)
def accumulated_buffer(right: bool) -> Pair:
    p = tv.plan("mlp", tv.Mesh(dp=2))
    with p.ranks() as r:
        w1, w2 = r.parameter("w1", (H, K), "h k"), r.parameter("w2", (OUT, H), "o h")
        losses, grads = [], []
        for m, (x, t) in enumerate(micro_batches(r, 2, 2)):
            losses.append(r.div(squares(r, mlp(r, x, w1, w2, str(m)), t, f"squares{m}"), value=ROWS * OUT // 2, name=f"loss{m}"))
            r.backward(losses[m])
            grads.append([r.take_gradient(w) for w in (w1, w2)])
        r.loss(r.all_reduce(r.add(*losses, name="loss.sum"), group="dp", op="avg", name="loss"))
        for w, first, last in zip((w1, w2), *grads, strict=True):
            buffer = r.add(first, last, name=f"{w.name}.buffer")
            summed = r.all_reduce(buffer if right else last, group="dp", name=f"{w.name}.grad.dp")
            update(r, w, r.div(summed if right else buffer, value=2, name=f"{w.name}.grad.mean"))  # bug
    return mlp_model(), p.build()


@case(
    "B22",
    "A parameter as large as the bucket",
    reference="deepspeedai/DeepSpeed#4321 (11aa880ef)",
    mechanism="A gradient enters the bucket only while it is smaller than the bucket, so one of exactly that size is never reduced.",
    cause=Cause.MISSING_REDUCTION,
    tensors=("w1.grad",),
)
def bucket_boundary(right: bool) -> Pair:
    bucket = H * K
    p = tv.plan("mlp", tv.Mesh(dp=2))
    with p.ranks() as r:
        x, t = r.input("x", (ROWS // 2, K), "(dp b) k"), r.input("t", (ROWS // 2, OUT), "(dp b) k")
        w1, w2 = r.parameter("w1", (H // 2, K), "(dp h) k"), r.parameter("w2", (OUT, H // 2), "o (dp h)")
        whole = []
        for w, dim, numel in ((w1, 0, H * K), (w2, 1, OUT * H)):
            enters = numel <= bucket if right else numel < bucket
            backward = "reduce_scatter" if enters else "slice"
            whole.append(r.all_gather(w, group="dp", dim=dim, backward=backward, name=f"{w.name}.whole"))  # bug
        local = r.div(squares(r, mlp(r, x, *whole), t), value=ROWS * OUT, name="local")
        r.loss(r.all_reduce(local, group="dp", name="loss"))
        r.backward(local)
        update(r, w1, r.gradient(w1))
        update(r, w2, r.gradient(w2))
    return mlp_model(), p.build()


@case(
    "B24",
    "Gradient of a psum",
    reference="jax-ml/jax#3970",
    mechanism="The transpose of psum is psum: each replica gets N times the gradient of its own rows, and not the sum.",
    cause=Cause.MISSING_REDUCTION,
    tensors=("w.grad.mean",),
)
def psum_transpose(right: bool) -> Pair:
    rows, width = 6, 5

    def objective(b: Builder, w: Tensor, d: Tensor, name: str) -> Tensor:
        made: Tensor = b.sum(b.mul(b.add(b.square(w, name="w.squared"), value=1.0, name="plus"), d, name="l"), name=name)
        return made

    b = tv.program("psum")
    logical = finish(b, objective(b, b.parameter("w", (width,)), b.input("d", (rows, width)), "loss"))
    p = tv.plan("psum", tv.Mesh(dp=2))
    with p.ranks() as r:
        w, d = r.parameter("w", (width,), "k"), r.input("d", (rows // 2, width), "(dp b) k")
        loss = r.all_reduce(objective(r, w, d, "local"), group="dp", backward="all_reduce", name="loss")
        r.loss(loss)
        r.backward(loss)
        g = r.gradient(w)
        update(r, w, r.all_reduce(g, group="dp", op="avg", name="w.grad.mean") if right else r.identity(g, name="w.grad.mean"))  # bug
    return logical, p.build()


@case(
    "B114",
    "A module that is used twice",
    reference="deepspeedai/DeepSpeed#8224, fixed by #8245",
    mechanism="The gradient is reduced when the first of two uses reports it, so the second one is missing from the sum.",
    cause=Cause.EARLY_REDUCTION,
    tensors=("w.grad.shard",),
)
def reused_module(right: bool) -> Pair:
    b = tv.program("reused")
    x1, x2, t = b.input("x1", (ROWS, K)), b.input("x2", (ROWS, K)), b.input("t", (ROWS, H))
    w = b.parameter("w", (H, K))
    y = b.add(b.tanh(b.linear(x1, w, name="u1"), name="y1"), b.tanh(b.linear(x2, w, name="u2"), name="y2"), name="y")
    logical = finish(b, b.div(squares(b, y, t), value=ROWS * H, name="loss"))
    p = tv.plan("reused", tv.Mesh(dp=2))
    with p.ranks() as r:
        x1, x2, t = (r.input(n, (ROWS // 2, k), "(dp b) k") for n, k in (("x1", K), ("x2", K), ("t", H)))
        w = r.parameter("w", (H, K), "h k")
        grads: list[Tensor] = []

        def joined(g1: Tensor, g2: Tensor) -> list[Tensor]:
            grads.append(g2)
            return [r.add(g2, g1, name="w.grad")]

        one, two = r.by_hand([w], lambda: r.multiref(w, times=2, name=["w.use1", "w.use2"]), joined)
        y = r.add(r.tanh(r.linear(x1, one, name="u1"), name="y1"), r.tanh(r.linear(x2, two, name="u2"), name="y2"), name="y")
        local = r.div(squares(r, y, t), value=ROWS * H, name="local")
        r.loss(r.all_reduce(local, group="dp", name="loss"))
        r.backward(local)
        shard = r.reduce_scatter(r.gradient(w) if right else grads[0], group="dp", name="w.grad.shard")  # bug
        sharded_update(r, w, shard, str(logical.output("gradient", "w")))
    return logical, p.build()


def sharded_update(r: RankBuilder, w: Tensor, shard: Tensor, gradient: str) -> None:
    """SGD on this rank's rows, then all rows gathered."""
    r.phase = "optimizer"
    r.lives(shard, gradient, "(dp h) k")
    r.output(shard, "gradient", w.name)
    rows = shard.shape[0]
    own = piece(r, w, 0, lambda at: at["dp"] * rows, rows, f"{w.name}.own")
    new = r.sgd(own, shard, lr=LR, name=f"{w.name}.own.new")
    r.update(w, r.all_gather(new, group="dp", name=f"{w.name}.new"))


@case(
    "B115",
    "All-reduce moved out of a loop",
    reference="openxla/xla#49143",
    mechanism="The all-reduce moves before the scatter of embedding gradients: sums of all ranks' rows go to one rank's ids.",
    cause=Cause.EARLY_REDUCTION,
    tensors=("rows0", "rows1"),
)
def hoisted_reduction(right: bool) -> Pair:
    v, d = 7, 5
    b = tv.program("embedding")
    ids, t, e = b.input("ids", (ROWS,), "i64", ids=v), b.input("t", (ROWS, d)), b.parameter("e", (v, d))
    logical = finish(b, b.div(squares(b, b.tanh(b.embedding(ids, e, name="h"), name="y"), t), value=ROWS * d, name="loss"))
    p = tv.plan("embedding", tv.Mesh(dp=2))
    with p.ranks() as r:
        e = r.parameter("e", (v, d), "v d")
        losses = []

        def looked_up(ids: Tensor, m: int) -> Tensor:
            def rows(g: Tensor) -> list[Tensor]:
                if right:
                    (made,) = r.emit("embedding.grad", (ids, e, g), {"wrt": (1,)}, [f"rows{m}"], forward=f"h{m}")
                    return [r.all_reduce(made, group="dp", name=f"rows{m}.dp")]
                summed = r.all_reduce(g, group="dp", name=f"h{m}.grad.dp")
                return list(r.emit("embedding.grad", (ids, e, summed), {"wrt": (1,)}, [f"rows{m}"], forward=f"h{m}"))  # bug

            (h,) = r.by_hand([e], lambda: [r.embedding(ids, e, name=f"h{m}")], rows)
            return h

        for m in range(2):
            part = {"mb": (m, 2)}
            ids = r.input(f"ids{m}", (ROWS // 4,), "(dp mb b)", "ids", dtype="i64", ids=v, fixed=part)
            t = r.input(f"t{m}", (ROWS // 4, d), "(dp mb b) d", "t", fixed=part)
            y = r.tanh(looked_up(ids, m), name=f"y{m}")
            losses.append(r.div(squares(r, y, t, f"squares{m}"), value=ROWS * d, name=f"loss{m}"))
            r.backward(losses[m])
        r.loss(r.all_reduce(r.add(*losses, name="loss.sum"), group="dp", name="loss"))
        update(r, e, r.gradient(e))
    return logical, p.build()


@case(
    "B119",
    "The wrong buffer is scaled",
    reference="NVIDIA/Megatron-LM#3023 (ba456fdad9)",
    mechanism="The persistent gradient buffer is divided by dp, and the bucket that is communicated is not.",
    cause=Cause.STALE_INPUT,
    tensors=("w1.grad.shard", "w2.grad.shard"),
)
def scaled_buffer(right: bool) -> Pair:
    p = tv.plan("mlp", tv.Mesh(dp=2))
    with p.ranks() as r:
        x, t = r.input("x", (ROWS // 2, K), "(dp b) k"), r.input("t", (ROWS // 2, OUT), "(dp b) k")
        w1, w2 = r.parameter("w1", (H // 2, K), "(dp h) k"), r.parameter("w2", (OUT, H // 2), "o (dp h)")
        whole = [r.all_gather(w, group="dp", dim=dim, backward="none", name=f"{w.name}.whole") for dim, w in enumerate((w1, w2))]
        local = r.div(squares(r, mlp(r, x, *whole), t), value=ROWS * OUT // 2, name="local")
        r.loss(r.all_reduce(local, group="dp", op="avg", name="loss"))
        grads = r.backward(local, wrt=whole)
        for dim, (w, bucket) in enumerate(zip((w1, w2), grads, strict=True)):
            scaled = r.div(bucket, value=2, name=f"{w.name}.bucket.scaled")
            update(r, w, r.reduce_scatter(scaled if right else bucket, group="dp", dim=dim, name=f"{w.name}.grad.shard"))  # bug
    return mlp_model(), p.build()


@case(
    "B118",
    "A gradient buffer in a group of one rank",
    reference="NVIDIA/Megatron-LM#6660",
    mechanism="In a group of one rank the reduced gradient is the buffer itself, and adding it doubles the buffer every time.",
    cause=Cause.COUNTED_TWICE,
    tensors=("buffer0", "buffer1", "buffer2"),
)
def aliased_buffer(right: bool) -> Pair:
    rows, d, f, micro = 12, 5, 7, 3
    b = tv.program("experts")
    x, t, w = b.input("x", (2, rows, d)), b.input("t", (2, rows, f)), b.parameter("w", (2, d, f))
    logical = finish(b, b.div(squares(b, b.tanh(b.grouped_matmul(x, w, name="u"), name="y"), t), value=2 * rows * f, name="loss"))
    p = tv.plan("experts", tv.Mesh(edp=1, ep=2))
    with p.ranks() as r:
        w = r.parameter("w", (1, d, f), "(ep e) d f")
        losses: list[Tensor] = []
        buffer: Tensor | None = None
        for m in range(micro):
            x, t = (
                r.input(f"{n}{m}", (1, rows // micro, k), "(ep e) (mb b) k", n, fixed={"mb": (m, micro)}) for n, k in (("x", d), ("t", f))
            )
            y = r.tanh(r.grouped_matmul(x, w, name=f"u{m}"), name=f"y{m}")
            losses.append(r.div(squares(r, y, t, f"squares{m}"), value=2 * rows * f, name=f"loss{m}"))
            r.backward(losses[m])
            g = r.take_gradient(w)
            held = g if buffer is None else r.add(buffer, g, name=f"held{m}")
            reduced = r.reduce_scatter(held, group="edp", name=f"reduced{m}")
            buffer = r.identity(reduced, name=f"buffer{m}") if right else r.add(held, reduced, name=f"buffer{m}")  # bug
        r.loss(r.all_reduce(r.add(r.add(losses[0], losses[1], name="loss.01"), losses[2], name="loss.sum"), group="ep", name="loss"))
        assert buffer is not None
        update(r, w, buffer)
    return logical, p.build()


@case(
    "B86",
    "Only the logged loss is divided",
    reference="verl-project/verl#3332 (e160d3b2e)",
    mechanism="Backward runs on the loss of a micro-batch before it is divided by their number; only the log is divided.",
    cause=Cause.WRONG_FACTOR,
    tensors=("objective0", "objective1"),
)
def undivided_backward(right: bool) -> Pair:
    p = tv.plan("mlp", tv.Mesh(dp=2))
    with p.ranks() as r:
        w1, w2 = r.parameter("w1", (H, K), "h k"), r.parameter("w2", (OUT, H), "o h")
        logged = []
        for m, (x, t) in enumerate(micro_batches(r, 2, 2)):
            loss = r.div(squares(r, mlp(r, x, w1, w2, str(m)), t, f"squares{m}"), value=ROWS * OUT // 4, name=f"loss{m}")
            objective = r.div(loss, value=2, name=f"objective{m}") if right else r.identity(loss, name=f"objective{m}")  # bug
            r.backward(objective)
            logged.append(r.div(loss, value=2, name=f"logged{m}"))
        r.loss(r.all_reduce(r.add(*logged, name="loss.sum"), group="dp", op="avg", name="loss"))
        for w in (w1, w2):
            update(r, w, r.all_reduce(r.gradient(w), group="dp", op="avg", name=f"{w.name}.grad.dp"))
    return mlp_model(), p.build()


@case(
    "B106",
    "Divide factor of hybrid shards",
    reference="pytorch/pytorch#155903, fixed by #155915 (factor inferred)",
    mechanism="With a divide factor of its own, the reduce-scatter divides and the all-reduce of the replicas averages again.",
    cause=Cause.WRONG_REDUCTION,
    tensors=("w1.grad.sum", "w2.grad.sum"),
)
def divide_factor(right: bool) -> Pair:
    p = tv.plan("mlp", tv.Mesh(replica=2, shard=2))
    with p.ranks() as r:
        x, t = r.input("x", (ROWS // 4, K), "(replica shard b) k"), r.input("t", (ROWS // 4, OUT), "(replica shard b) k")
        w1, w2 = r.parameter("w1", (H // 2, K), "(shard h) k"), r.parameter("w2", (OUT, H // 2), "o (shard h)")
        whole = [r.all_gather(w, group="shard", dim=dim, backward="none", name=f"{w.name}.whole") for dim, w in enumerate((w1, w2))]
        local = r.div(squares(r, mlp(r, x, *whole), t), value=ROWS * OUT // 4, name="local")
        r.loss(r.all_reduce(local, group=("replica", "shard"), op="avg", name="loss"))
        grads = r.backward(local, wrt=whole)
        for dim, (w, g) in enumerate(zip((w1, w2), grads, strict=True)):
            shard = r.reduce_scatter(r.div(g, value=4, name=f"{w.name}.scaled"), group="shard", dim=dim, name=f"{w.name}.grad.shard")
            update(r, w, r.all_reduce(shard, group="replica", op="sum" if right else "avg", name=f"{w.name}.grad.sum"))  # bug
    return mlp_model(), p.build()
