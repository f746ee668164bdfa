"""Tensors joined along the wrong dimension, read in the wrong order, or cut into pieces that do not fit."""

from __future__ import annotations

import trainverify as tv
from trainverify.bugs.case import Pair, case
from trainverify.bugs.step import Builder, finish, piece, squares, update
from trainverify.build.tape import Tensor
from trainverify.explain.cause import Cause
from trainverify.graph.lineage import Part, Parts, Run
from trainverify.graph.program import Value


@case(
    "B45",
    "Gather along the last dimension",
    reference="NVIDIA/TransformerEngine#530, #531 (d76118d90)",
    mechanism="The all-gather joins memory along dimension 0, and the result is read as if joined along the last one.",
    cause=Cause.WRONG_DIMENSION,
    tensors=("xt.all", "xt.rows"),
)
def last_dimension(right: bool) -> Pair:
    s, k, o = 6, 5, 4
    b = tv.program("transposed")
    x, t, w = b.input("x", (s, k)), b.input("t", (s, o)), b.parameter("w", (o, k))
    logical = finish(b, b.div(squares(b, b.tanh(b.linear(x, w, name="u"), name="y"), t), value=s * o, name="loss"))
    p = tv.plan("transposed", tv.Mesh(tp=2))
    with p.ranks() as r:
        x, t, w = r.input("x", (s // 2, k), "(tp s) k"), r.input("t", (s, o // 2), "s (tp o)"), r.parameter("w", (o // 2, k), "(tp o) k")
        rows = r.all_gather(x, group="tp", backward="reduce_scatter", name="x.all")

        def weight_gradient(dy: Tensor) -> list[Tensor]:
            """From the transposed shard that was kept."""
            shard = r.transpose(x, name="xt")
            if right:
                whole = r.all_gather(shard, group="tp", dim=1, name="xt.all")
            else:
                whole = r.reshape(r.all_gather(shard, group="tp", dim=0, name="xt.rows"), shape=(k, s), name="xt.all")  # bug
            return [r.transpose(r.matmul(whole, dy, name="wt.grad"), name="w.grad")]

        (u,) = r.by_hand([w], lambda: [r.linear(rows, w, name="u")], weight_gradient)
        local = r.div(squares(r, r.tanh(u, name="y"), t), value=s * o, name="local")
        r.loss(r.all_reduce(local, group="tp", name="loss"))
        r.backward(local)
        update(r, w, r.gradient(w))
    return logical, p.build()


@case(
    "B48",
    "Rows of a batch under sequence parallelism",
    reference="pytorch/torchtitan#3604 (5ba439938)",
    mechanism="Expert results go to row local + rank·(B·L/n); with more than one sequence it must be b·L + rank·L/n + position.",
    cause=Cause.WRONG_BLOCK,
    tensors=("slot0", "slot1", "slot2", "slot3"),
)
def combine_indices(right: bool) -> Pair:
    n, length, d, f = 2, 4, 5, 3
    own = length // 2
    b = tv.program("combine")
    x, t, w = b.input("x", (n, length, d)), b.input("t", (n * length, f)), b.parameter("w", (f, d))
    y = b.reshape(b.tanh(b.linear(x, w, name="u"), name="a"), shape=(n * length, f), name="y")
    logical = finish(b, b.div(squares(b, y, t), value=n * length * f, name="loss"))
    p = tv.plan("combine", tv.Mesh(sp=2))
    with p.ranks() as r:
        x, t, w = r.input("x", (n, own, d), "b (sp l) d"), r.input("t", (n * length, f), "l f"), r.parameter("w", (f, d), "f d")
        results = r.reshape(r.tanh(r.linear(x, w, name="u"), name="a"), shape=(n * own, f), name="results")
        slots, placed = r.arange(stop=n * length, name="slots"), r.full(shape=(n * length, f), value=0.0, name="empty")

        def row(i: int) -> Value:
            return r.each(lambda at: i // own * length + at["sp"] * own + i % own if right else i + at["sp"] * n * own)

        for i in range(n * own):
            hit = r.unsqueeze(r.eq(slots, value=row(i), name=f"slot{i}"), dim=1, name=f"hit{i}")  # bug
            result = r.slice(results, dim=0, start=i, stop=i + 1, name=f"result{i}")
            placed = r.where(hit, r.add(placed, result, name=f"added{i}"), placed, name=f"placed{i}")
        y = r.all_reduce(placed, group="sp", backward="identity", name="y")
        loss = r.div(squares(r, y, t), value=n * length * f, name="loss")
        r.loss(loss)
        r.backward(loss)
        update(r, w, r.all_reduce(r.gradient(w), group="sp", name="w.grad.sp"))
    return logical, p.build()


@case(
    "B53",
    "One mask for two embeddings",
    reference="pytorch/pytorch#131264",
    mechanism="Two embeddings cut over the vocabulary share a cached placement, so one is masked with the other's mask.",
    cause=Cause.WRONG_INPUT,
    tensors=("e1.masked",),
)
def shared_mask(right: bool) -> Pair:
    s, v, d = 6, 10, 3
    half = v // 2
    b = tv.program("two embeddings")
    i1, i2, t = b.input("i1", (s,), "i64", ids=v), b.input("i2", (s,), "i64", ids=v), b.input("t", (s, d))
    e1, e2 = b.parameter("e1", (v, d)), b.parameter("e2", (v, d))
    y = b.mul(b.embedding(i1, e1, name="x1"), b.embedding(i2, e2, name="x2"), name="y")
    logical = finish(b, b.div(squares(b, y, t), value=s * d, name="loss"))
    p = tv.plan("two embeddings", tv.Mesh(tp=2))
    with p.ranks() as r:
        i1, i2 = (r.input(n, (s,), "s", dtype="i64", ids=v) for n in ("i1", "i2"))
        t = r.input("t", (s, d), "s d")
        e1, e2 = (r.parameter(n, (half, d), "(tp v) d") for n in ("e1", "e2"))
        start = r.each(lambda at: at["tp"] * half)
        inside, found = [], []
        for ids, e in ((i1, e1), (i2, e2)):
            hot = r.float(r.one_hot(ids, num_classes=half, start=start, name=f"{e.name}.hot"), name=f"{e.name}.hot.f")
            inside.append(r.sum(hot, dim=1, keepdim=True, name=f"{e.name}.mask"))
            found.append(r.embedding(ids, e, start=start, name=f"{e.name}.rows"))
        x1 = r.mul(found[0], inside[0] if right else inside[1], name="e1.masked")  # bug
        x2 = r.mul(found[1], inside[1], name="e2.masked")
        y = r.mul(*(r.all_reduce(x, group="tp", backward="identity", name=n) for x, n in ((x1, "x1"), (x2, "x2"))), name="y")
        loss = r.div(squares(r, y, t), value=s * d, name="loss")
        r.loss(loss)
        r.backward(loss)
        update(r, e1, r.gradient(e1))
        update(r, e2, r.gradient(e2))
    return logical, p.build()


@case(
    "B54",
    "Norm over a cut hidden dimension",
    reference="NVIDIA/TransformerEngine#1743 (e17fab14d)",
    mechanism="The partition rule lets the hidden dimension be cut, and each rank normalises over its own part of it.",
    cause=Cause.MISSING_REDUCTION,
    tensors=("power",),
)
def cut_norm(right: bool) -> Pair:
    s, k, h, o = 5, 3, 6, 7
    b = tv.program("norm")
    x, t = b.input("x", (s, k)), b.input("t", (s, o))
    w0, g, w1 = b.parameter("w0", (h, k)), b.parameter("g", (h,)), b.parameter("w1", (o, h))
    y = b.linear(b.rms_norm(b.linear(x, w0, name="u"), g, eps=1e-5, name="n"), w1, name="y")
    logical = finish(b, b.div(squares(b, y, t), value=s * o, name="loss"))
    p = tv.plan("norm", tv.Mesh(tp=2))
    with p.ranks() as r:
        x, t = r.input("x", (s, k), "s k"), r.input("t", (s, o), "s o")
        w0, g, w1 = (
            r.parameter("w0", (h // 2, k), "(tp h) k"),
            r.parameter("g", (h // 2,), "(tp h)"),
            r.parameter("w1", (o, h // 2), "o (tp h)"),
        )
        u = r.linear(x, w0, name="u")
        own = r.mean(r.square(u, name="u.squared"), dim=1, keepdim=True, name="power.own")

        def whole(x: Tensor, name: str) -> Tensor:
            made: Tensor = r.all_reduce(x, group="tp", op="avg", name=name) if right else r.identity(x, name=name)  # bug
            return made

        (power,) = r.by_hand([own], lambda: [whole(own, "power")], lambda dy: [whole(dy, "power.own.grad")])
        n = r.mul(r.mul(u, r.rsqrt(r.add(power, value=1e-5, name="safe"), name="scale"), name="normed"), g, name="n")
        y = r.all_reduce(r.linear(n, w1, name="y.part"), group="tp", backward="identity", name="y")
        loss = r.div(squares(r, y, t), value=s * o, name="loss")
        r.loss(loss)
        r.backward(loss)
        for w in (w0, g, w1):
            update(r, w, r.gradient(w))
    return logical, p.build()


@case(
    "B61",
    "View of a sharded tensor",
    reference="pytorch/pytorch#179502 (open)",
    mechanism="A tensor cut along dimension 1 is viewed locally and labelled as cut along dimension 0: values are permuted.",
    cause=Cause.WRONG_ORDER,
    tensors=("v",),
)
def local_view(right: bool) -> Pair:
    rows, k, wide, narrow, o = 6, 5, 4, 3, 2  # [6, 4] viewed as [8, 3]
    b = tv.program("view")
    x, t = b.input("x", (rows, k)), b.input("t", (8, o))
    w1, w2 = b.parameter("w1", (wide, k)), b.parameter("w2", (o, narrow))
    v = b.reshape(b.linear(x, w1, name="h"), shape=(8, narrow), name="v")
    logical = finish(b, b.div(squares(b, b.linear(v, w2, name="y"), t), value=8 * o, name="loss"))
    p = tv.plan("view", tv.Mesh(tp=2))
    with p.ranks() as r:
        x, t = r.input("x", (rows, k), "b k"), r.input("t", (4, o), "(tp b) o")
        w1, w2 = r.parameter("w1", (wide // 2, k), "(tp w) k"), r.parameter("w2", (o, narrow), "o n")
        h = r.linear(x, w1, name="h")
        if right:
            whole = r.reshape(r.all_gather(h, group="tp", dim=1, backward="reduce_scatter", name="h.all"), shape=(8, narrow), name="v.all")
            v = piece(r, whole, 0, lambda at: at["tp"] * 4, 4, "v")
        else:
            v = r.reshape(h, shape=(4, narrow), name="v")  # bug
        local = r.div(squares(r, r.linear(v, w2, name="y"), t), value=8 * o, name="local")
        r.loss(r.all_reduce(local, group="tp", name="loss"))
        r.backward(local)
        update(r, w1, r.gradient(w1))
        update(r, w2, r.all_reduce(r.gradient(w2), group="tp", name="w2.grad.tp"))
    return logical, p.build()


@case(
    "B62",
    "One flat gather of nested shards",
    reference="pytorch/pytorch#194457 (open)",
    mechanism="Five rows are cut 2/1/1/1 by two nested shards, and a flat all-gather takes them for 2/2/1/0.",
    cause=Cause.WRONG_BLOCK,
    tensors=("w.1", "w.whole"),
)
def nested_shards(right: bool) -> Pair:
    s, k, rows = 8, 3, (2, 1, 1, 1)
    b = tv.program("nested")
    x, t, w = b.input("x", (s, k)), b.input("t", (s, 5)), b.parameter("w", (5, k))
    logical = finish(b, b.div(squares(b, b.tanh(b.linear(x, w, name="u"), name="y"), t), value=s * 5, name="loss"))

    def parts(rank: int) -> tuple[Part, ...]:
        held = Part((0,), (Run(sum(rows[:rank]) * k, rows[rank] * k),), flat=True)
        return (held,) if rows[rank] == 2 else (held, Part((k,), (Run(0, k),), flat=True, padding=True))

    p = tv.plan("nested", tv.Mesh(fsdp=2, tp=2))
    with p.ranks() as r:
        x, t = r.input("x", (s // 4, k), "(fsdp tp s) k"), r.input("t", (s // 4, 5), "(fsdp tp s) k")
        w = r.parameter("w", (2, k), Parts(tuple((rank, parts(rank)) for rank in range(4))))
        flat = r.all_gather(w, group=("fsdp", "tp"), backward="reduce_scatter", name="w.padded")
        sizes = rows if right else (2, 2, 1)
        pieces = [r.slice(flat, dim=0, start=2 * i, stop=2 * i + size, name=f"w.{i}") for i, size in enumerate(sizes)]  # bug
        whole = r.concat(*pieces, dim=0, name="w.whole")  # bug
        local = r.div(squares(r, r.tanh(r.linear(x, whole, name="u"), name="y"), t), value=s * 5, name="local")
        r.loss(r.all_reduce(local, group=("fsdp", "tp"), name="loss"))
        r.backward(local)
        update(r, w, r.gradient(w))
    return logical, p.build()


@case(
    "B66",
    "Placeholder rows in later micro-batches",
    reference="AI-Hypercomputer/maxtext#3381 (open)",
    mechanism="The batch is split into micro-batches first and each is truncated to real rows, so later ones hold placeholders.",
    cause=Cause.WRONG_BLOCK,
    tensors=("x1", "t1"),
)
def truncated_late(right: bool) -> Pair:
    k, o, held, real, micro = 5, 3, 8, 4, 2  # rows of a rank: 4 real ones, then 4 placeholders
    b = tv.program("placeholders")
    x, t, w = b.input("x", (2, held, k)), b.input("t", (2, held, o)), b.parameter("w", (o, k))
    x, t = (b.slice(v, dim=1, start=0, stop=real, name=f"{v.name}.real") for v in (x, t))
    logical = finish(b, b.div(squares(b, b.tanh(b.linear(x, w, name="u"), name="y"), t), value=2 * real * o, name="loss"))
    p = tv.plan("placeholders", tv.Mesh(dp=2))
    with p.ranks() as r:
        x, t, w = r.input("x", (1, held, k), "(dp d) b k"), r.input("t", (1, held, o), "(dp d) b k"), r.parameter("w", (o, k), "o k")
        losses = []
        for m in range(micro):
            first, size = (m * real // micro if right else m * held // micro), real // micro
            rows, goal = (r.slice(v, dim=1, start=first, stop=first + size, name=f"{v.name}{m}") for v in (x, t))  # bug
            y = r.tanh(r.linear(rows, w, name=f"u{m}"), name=f"y{m}")
            losses.append(r.div(squares(r, y, goal, f"squares{m}"), value=2 * real * o, name=f"loss{m}"))
            r.backward(losses[m])
        r.loss(r.all_reduce(r.add(*losses, name="loss.sum"), group="dp", name="loss"))
        update(r, w, r.all_reduce(r.gradient(w), group="dp", name="w.grad.dp"))
    return logical, p.build()


@case(
    "B67",
    "Gather buffer walked without its padding",
    reference="deepspeedai/DeepSpeed#8158 (4e3acb1e3)",
    mechanism="Parameters in the flat gather buffer start at unpadded offsets, so one overlaps the padding of the one before.",
    cause=Cause.WRONG_BLOCK,
    tensors=("buffer.b", "b.whole"),
)
def buffer_offsets(right: bool) -> Pair:
    rows, na, nb = 4, 3, 2  # parameters of 3 and 2 elements; partitions of 2 and 1
    offset = 4 if right else 3
    size = 6

    def scores(b: Builder, x: Tensor, a: Tensor, w: Tensor) -> Tensor:
        made: Tensor = b.tanh(b.outer(b.matmul(x, a, name="s"), w, name="u"), name="y")
        return made

    b = tv.program("buffer")
    x, t, a, w = b.input("x", (rows, na)), b.input("t", (rows, nb)), b.parameter("a", (na,)), b.parameter("b", (nb,))
    logical = finish(b, b.div(squares(b, scores(b, x, a, w), t), value=rows * nb, name="loss"))
    p = tv.plan("buffer", tv.Mesh(dp=2))
    for rank in range(2):
        with p.ranks(rank) as r:
            x, t = r.input("x", (rows // 2, na), "(dp r) k"), r.input("t", (rows // 2, nb), "(dp r) k")
            held = 2 - rank
            a = r.parameter("a", (held,), Parts(((rank, (Part((0,), (Run(2 * rank, held),)),)),)))
            w = r.parameter("b", (1,), "(dp k)")
            padded = a if rank == 0 else r.concat(a, r.full(shape=(1,), value=9.0, name="junk"), dim=0, name="a.padded")
            one = r.pad(padded, pads=(2 * rank, size - 2 - 2 * rank), name="buffer.a")
            two = r.pad(w, pads=(offset + rank, size - 1 - offset - rank), name="buffer.b")  # bug
            buffer = r.all_reduce(r.add(one, two, name="buffer.own"), group="dp", backward="none", name="buffer")
            whole = [r.slice(buffer, dim=0, start=0, stop=na, name="a.whole")]
            whole.append(r.slice(buffer, dim=0, start=offset, stop=offset + nb, name="b.whole"))  # bug
            local = r.div(squares(r, scores(r, x, *whole), t), value=rows * nb, name="local")
            r.loss(r.all_reduce(local, group="dp", name="loss"))
            grads = [r.all_reduce(g, group="dp", name=f"{g.name}.dp") for g in r.backward(local, wrt=whole)]
            for v, g, part in ((a, grads[0], 2), (w, grads[1], 1)):
                update(r, v, r.slice(g, dim=0, start=rank * part, stop=rank * part + v.shape[0], name=f"{v.name}.grad"))
    return logical, p.build()


@case(
    "B129",
    "Log-sum-exp of the other half",
    reference="NVIDIA/TransformerEngine#498 (74eb7c33c)",
    mechanism="The second half of the log-sum-exp is passed as if it were contiguous, and the kernel reads the first half.",
    cause=Cause.WRONG_BLOCK,
    tensors=("lse.1",),
)
def contiguous_lse(right: bool) -> Pair:
    n, s, k, d = 2, 8, 5, 3
    own = s // 2

    def heads(b: Builder, x: Tensor, ws: list[Tensor]) -> list[Tensor]:
        return [b.unsqueeze(b.linear(x, w, name=f"{w.name}.x"), dim=1, name=w.name[1:]) for w in ws]

    b = tv.program("context")
    x, t = b.input("x", (n, s, k)), b.input("t", (n, 1, s, d))
    ws = [b.parameter(f"w{c}", (d, k)) for c in "qkv"]
    mixed, _ = b.attention(*heads(b, x, ws), name=["mixed", "lse"])
    logical = finish(b, b.div(squares(b, mixed, t), value=n * s * d, name="loss"))
    p = tv.plan("context", tv.Mesh(cp=2))
    with p.ranks() as r:
        x, t = r.input("x", (n, own, k), "b (cp s) k"), r.input("t", (n, 1, own, d), "b x (cp s) d")
        ws = [r.parameter(f"w{c}", (d, k), "d k") for c in "qkv"]
        q, key, v = heads(r, x, ws)
        key, v = (r.all_gather(y, group="cp", dim=2, backward="reduce_scatter", name=f"{y.name}.all") for y in (key, v))
        saved: list[Tensor] = []

        def forward() -> list[Tensor]:
            mixed, lse = r.attention(q, key, v, name=["mixed", "lse"])
            saved.extend((mixed, lse))
            return [mixed]

        def half(y: Tensor, i: int, name: str) -> Tensor:
            made: Tensor = r.slice(y, dim=2, start=i * own // 2, stop=(i + 1) * own // 2, name=f"{name}.{i}")
            return made

        def backward(g: Tensor) -> list[Tensor]:
            """The kernel runs on each half of the queries."""
            delta = r.sum(r.mul(g, saved[0], name="g.mixed"), dim=3, name="delta")
            found = []
            for i in range(2):
                first = (i if right else 0) * own // 2
                lse = r.slice(saved[1], dim=2, start=first, stop=first + own // 2, name=f"lse.{i}")  # bug
                given = half(g, i, "g"), half(q, i, "q"), key, v, lse, half(delta, i, "delta")
                found.append(r.attention_backward(*given, name=[f"dq.{i}", f"dk.{i}", f"dv.{i}"]))
            (q0, k0, v0), (q1, k1, v1) = found
            return [r.concat(q0, q1, dim=2, name="dq"), r.add(k0, k1, name="dk"), r.add(v0, v1, name="dv")]

        (mixed,) = r.by_hand([q, key, v], forward, backward)
        local = r.div(squares(r, mixed, t), value=n * s * d, name="local")
        r.loss(r.all_reduce(local, group="cp", name="loss"))
        r.backward(local)
        for w in ws:
            update(r, w, r.all_reduce(r.gradient(w), group="cp", name=f"{w.name}.grad.cp"))
    return logical, p.build()
