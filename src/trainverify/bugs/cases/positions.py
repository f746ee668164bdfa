"""Ranks that take another part of a tensor than their own: heads, positions, labels, rows."""

from __future__ import annotations

import trainverify as tv
from trainverify.bugs.case import Pair, case
from trainverify.bugs.step import Builder, finish, masked, piece, rows_of, squares, update, zigzag_row
from trainverify.build.tape import Tensor
from trainverify.explain.cause import Cause
from trainverify.graph.program import Value


@case(
    "B38",
    "Output gate of another rank's heads",
    reference="NVIDIA/Megatron-LM#3575 (16a8cdb64b)",
    mechanism="With fewer key-value groups than tp ranks, each rank cuts its query heads out of the group's, but not the gate's.",
    cause=Cause.WRONG_BLOCK,
    tensors=("gate",),
)
def gated_heads(right: bool) -> Pair:
    n, s, h, heads, d = 2, 5, 6, 4, 3
    half = heads // 2

    def attend(b: Builder, q: Tensor, gate: Tensor, x: Tensor, wkv: Tensor, wo: Tensor) -> Tensor:
        kv = b.unsqueeze(b.linear(x, wkv, name="kv.flat"), dim=1, name="kv")
        mixed, _ = b.attention(b.transpose(q, dim0=1, dim1=2, name="q.heads"), kv, kv, is_causal=True, name=["mixed", "lse"])
        gated = b.mul(b.transpose(mixed, dim0=1, dim1=2, name="mixed.t"), b.sigmoid(gate, name="open"), name="gated")
        made: Tensor = b.linear(b.reshape(gated, shape=(n, s, wo.shape[1]), name="joined"), wo, name="out.part")
        return made

    b = tv.program("gated attention")
    x, t = b.input("x", (n, s, h)), b.input("t", (n, s, h))
    wq, wg, wkv, wo = (
        b.parameter(m, shape) for m, shape in (("wq", (heads * d, h)), ("wg", (heads * d, h)), ("wkv", (d, h)), ("wo", (h, heads * d)))
    )
    q, gate = (b.reshape(b.linear(x, w, name=f"{w.name}.flat"), shape=(n, s, heads, d), name=f"{w.name}.heads") for w in (wq, wg))
    logical = finish(b, b.div(squares(b, attend(b, q, gate, x, wkv, wo), t), value=n * s * h, name="loss"))
    p = tv.plan("gated attention", tv.Mesh(tp=2))
    with p.ranks() as r:
        x, t = r.input("x", (n, s, h), "b s h"), r.input("t", (n, s, h), "b s h")
        wq, wg = (r.parameter(m, (half * d, h), "(tp o) h") for m in ("wq", "wg"))
        wkv, wo = r.parameter("wkv", (d, h), "d h"), r.parameter("wo", (h, half * d), "h (tp o)")
        group = []
        for w in (wq, wg):
            flat = r.all_gather(r.linear(x, w, name=f"{w.name}.flat"), group="tp", dim=2, backward="reduce_scatter", name=f"{w.name}.group")
            group.append(r.reshape(flat, shape=(n, s, heads, d), name=f"{w.name}.heads"))
        q = piece(r, group[0], 2, lambda at: at["tp"] * half, half, "q")
        gate = piece(r, group[1], 2, lambda at: at["tp"] * half if right else 0, half, "gate")  # bug
        out = r.all_reduce(attend(r, q, gate, x, wkv, wo), group="tp", backward="identity", name="out")
        loss = r.div(squares(r, out, t), value=n * s * h, name="loss")
        r.loss(loss)
        r.backward(loss)
        for w in (wq, wg, wo):
            update(r, w, r.gradient(w))
        update(r, wkv, r.all_reduce(r.gradient(wkv), group="tp", name="wkv.grad.tp"))
    return logical, p.build()


ZIGZAG = ((0, 3), (1, 2))  # chunks of ranks 0 and 1


@case(
    "B39",
    "Multimodal rotary embedding cut along the batch",
    reference="NVIDIA/Megatron-LM@28778d1283, PR #1612",
    mechanism="The embedding has a batch dimension of its own, and context parallelism cuts that one in place of the sequence.",
    cause=Cause.WRONG_DIMENSION,
    tensors=("cos.own.0", "cos.own.1", "cos.own", "sin.own.0", "sin.own.1", "sin.own"),
)
def rotary_batch(right: bool) -> Pair:
    s, n, k, h, d = 4, 4, 5, 3, 2  # sequence and batch of one size: nothing shows in shapes

    def turned(b: Builder, x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Tokens as the kernel reads them: one after the other."""
        tokens = x.shape[0] * x.shape[1]
        q = b.reshape(b.linear(x, w, name="q.flat"), shape=(tokens, h, d), name="q")
        angles = [b.reshape(v, shape=(tokens, 1, d), name=f"{v.name}.tokens") for v in (cos, sin)]
        made: Tensor = b.apply_rotary_emb(q, *angles, name="y")
        return made

    b = tv.program("rotary")
    x, t = b.input("x", (s, n, k)), b.input("t", (s, n, h, d))
    cos, sin, w = b.input("cos", (s, n, 1, d)), b.input("sin", (s, n, 1, d)), b.parameter("w", (h * d, k))
    goal = b.reshape(t, shape=(s * n, h, d), name="goal")
    logical = finish(b, b.div(squares(b, turned(b, x, w, cos, sin), goal), value=s * n * h * d, name="loss"))
    p = tv.plan("rotary", tv.Mesh(cp=2))
    with p.ranks() as r:
        x, t = r.input("x", (s // 2, n, k), rows_of(ZIGZAG, (s, n, k))), r.input("t", (s // 2, n, h, d), rows_of(ZIGZAG, (s, n, h, d)))
        cos, sin, w = r.input("cos", (s, n, 1, d), "s b x d"), r.input("sin", (s, n, 1, d), "s b x d"), r.parameter("w", (h * d, k), "o k")
        dim, own = 0 if right else 1, []
        for v in (cos, sin):
            low = piece(r, v, dim, lambda at: at["cp"], 1, f"{v.name}.own.0")  # bug
            high = piece(r, v, dim, lambda at: 3 - at["cp"], 1, f"{v.name}.own.1")  # bug
            own.append(r.concat(low, high, dim=dim, name=f"{v.name}.own"))  # bug
        goal = r.reshape(t, shape=(s * n // 2, h, d), name="goal")
        local = r.div(squares(r, turned(r, x, w, *own), goal), value=s * n * h * d, name="local")
        r.loss(r.all_reduce(local, group="cp", name="loss"))
        r.backward(local)
        update(r, w, r.all_reduce(r.gradient(w), group="cp", name="w.grad.cp"))
    return logical, p.build()


def rotated(b: Builder, x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    made: Tensor = b.apply_rotary_emb(b.linear(x, w, name="q"), cos, sin, name="y")
    return made


@case(
    "B40",
    "Rotary positions of packed sequences",
    reference="NVIDIA/Megatron-LM#5243 (d30e165203)",
    mechanism="Angles of packed sequences are cut without the sequence's offset, so all sequences get those of the first.",
    cause=Cause.WRONG_BLOCK,
    tensors=("cos.1.0", "cos.1.1", "sin.1.0", "sin.1.1"),
)
def packed_rotary(right: bool) -> Pair:
    s, k, d = 8, 5, 6
    ranks = ((0, 3, 4, 7), (1, 2, 5, 6))
    b = tv.program("packed")
    x, t, cos, sin, w = b.input("x", (s, k)), b.input("t", (s, d)), b.input("cos", (s, d)), b.input("sin", (s, d)), b.parameter("w", (d, k))
    logical = finish(b, b.div(squares(b, rotated(b, x, w, cos, sin), t), value=s * d, name="loss"))
    p = tv.plan("packed", tv.Mesh(cp=2))
    with p.ranks() as r:
        x, t = r.input("x", (s // 2, k), rows_of(ranks, (s, k))), r.input("t", (s // 2, d), rows_of(ranks, (s, d)))
        cos, sin, w = r.input("cos", (s, d), "s d"), r.input("sin", (s, d), "s d"), r.parameter("w", (d, k), "d k")
        angles = []
        for table in (cos, sin):
            pieces = []
            for n, offset in enumerate((0, 4) if right else (0, 0)):
                for i in range(2):
                    pieces.append(zigzag_row(r, table, i, offset, f"{table.name}.{n}.{i}"))  # bug
            angles.append(r.concat(*pieces, dim=0, name=f"{table.name}.own"))
        local = r.div(squares(r, rotated(r, x, w, *angles), t), value=s * d, name="local")
        r.loss(r.all_reduce(local, group="cp", name="loss"))
        r.backward(local)
        update(r, w, r.all_reduce(r.gradient(w), group="cp", name="w.grad.cp"))
    return logical, p.build()


@case(
    "B41",
    "Rotary positions of padded sequences",
    reference="NVIDIA/TransformerEngine#2077 (6ba98d439)",
    mechanism="Sequences are padded for cp, and positions are counted from unpadded starts: later sequences are shifted.",
    cause=Cause.WRONG_BLOCK,
    tensors=("cos.1.0", "cos.1.1", "sin.1.0", "sin.1.1"),
)
def padded_rotary(right: bool) -> Pair:
    s, k, d, length, room, table = 8, 5, 6, 3, 4, 7  # two sequences of 3 tokens, padded to 4
    ranks = ((0, 3, 4, 7), (1, 2, 5, 6))
    b = tv.program("padded")
    x, t, mask = b.input("x", (s, k)), b.input("t", (s, d)), b.input("mask", (s,), domain="indicator")
    cos, sin, w = b.input("cos", (table, d)), b.input("sin", (table, d)), b.parameter("w", (d, k))
    heads = [b.slice(v, dim=0, start=0, stop=room, name=f"{v.name}.head") for v in (cos, sin)]
    twice = [b.concat(v, v, dim=0, name=f"{v.name}.twice") for v in heads]
    logical = finish(b, b.div(masked(b, rotated(b, x, w, *twice), t, mask), b.sum(mask, name="count"), name="loss"))
    p = tv.plan("padded", tv.Mesh(cp=2))
    with p.ranks() as r:
        x, t = r.input("x", (s // 2, k), rows_of(ranks, (s, k))), r.input("t", (s // 2, d), rows_of(ranks, (s, d)))
        mask = r.input("mask", (s // 2,), rows_of(ranks, (s,)), domain="indicator")
        cos, sin, w = r.input("cos", (table, d), "s d"), r.input("sin", (table, d), "s d"), r.parameter("w", (d, k), "d k")
        angles = []
        for full in (cos, sin):
            pieces = []
            for n in range(2):
                begin = n * room - (n * room if right else n * length)  # of the sequence's tokens in the table
                for i in range(2):
                    pieces.append(zigzag_row(r, full, i, begin, f"{full.name}.{n}.{i}"))  # bug
            angles.append(r.concat(*pieces, dim=0, name=f"{full.name}.own"))
        count = r.all_reduce(r.sum(mask, name="count.own"), group="cp", backward="none", name="count")
        local = r.div(masked(r, rotated(r, x, w, *angles), t, mask), count, name="local")
        r.loss(r.all_reduce(local, group="cp", name="loss"))
        r.backward(local)
        update(r, w, r.all_reduce(r.gradient(w), group="cp", name="w.grad.cp"))
    return logical, p.build()


def attended(b: Builder, q: Tensor, k: Tensor, v: Tensor, *, offset: Value = 0, causal: bool = True) -> Tensor:
    """Attention of tokens [b, s, heads, d], back in that order."""
    q, k, v = (b.transpose(x, dim0=1, dim1=2, name=f"{n}.t") for x, n in ((q, "q"), (k, "k"), (v, "v")))
    mixed, _ = b.attention(q, k, v, **({"is_causal": True, "query_offset": offset} if causal else {}), name=["mixed", "lse"])
    made: Tensor = b.transpose(mixed, dim0=1, dim1=2, name="y")
    return made


@case(
    "B42",
    "Rotary angles of the first shard everywhere",
    reference="microsoft/nnscaler, case C1 of the TrainVerify paper (§8.3)",
    mechanism="The sequence of the activations is cut and the tables of angles are not: every shard starts at position 0.",
    cause=Cause.WRONG_BLOCK,
    tensors=("cos.own", "sin.own"),
)
def shard_positions(right: bool) -> Pair:
    n, s, k, d = 2, 6, 5, 4

    def heads(b: Builder, x: Tensor, ws: list[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
        q, key, v = (b.unsqueeze(b.linear(x, w, name=f"{w.name}.x"), dim=2, name=f"{w.name}.heads") for w in ws)
        return [b.apply_rotary_emb(y, cos, sin, name=f"{y.name}.turned") for y in (q, key)] + [v]

    b = tv.program("sequence")
    x, t = b.input("x", (n, s, k)), b.input("t", (n, s, 1, d))
    cos, sin = b.input("cos", (s, 1, d)), b.input("sin", (s, 1, d))
    ws = [b.parameter(f"w{c}", (d, k)) for c in "qkv"]
    logical = finish(b, b.div(squares(b, attended(b, *heads(b, x, ws, cos, sin)), t), value=n * s * d, name="loss"))
    p = tv.plan("sequence", tv.Mesh(sp=2))
    with p.ranks() as r:
        x, t = r.input("x", (n, s // 2, k), "b (sp s) k"), r.input("t", (n, s // 2, 1, d), "b (sp s) x d")
        tables = [r.input(c, (s, 1, d), "s x d") for c in ("cos", "sin")]
        ws = [r.parameter(f"w{c}", (d, k), "d k") for c in "qkv"]
        own = [piece(r, c, 0, lambda at: at["sp"] * s // 2 if right else 0, s // 2, f"{c.name}.own") for c in tables]  # bug
        q, key, v = heads(r, x, ws, *own)
        key, v = (r.all_gather(y, group="sp", dim=1, backward="reduce_scatter", name=f"{y.name}.all") for y in (key, v))
        y = attended(r, q, key, v, offset=r.each(lambda at: at["sp"] * s // 2))
        local = r.div(squares(r, y, t), value=n * s * d, name="local")
        r.loss(r.all_reduce(local, group="sp", name="loss"))
        r.backward(local)
        for w in ws:
            update(r, w, r.all_reduce(r.gradient(w), group="sp", name=f"{w.name}.grad.sp"))
    return logical, p.build()


@case(
    "B43",
    "Labels shifted after the cut",
    reference="verl-project/verl#4250 (10175743f)",
    mechanism="Labels are the tokens rolled by one, rolled after the zig-zag cut: chunk ends take the other chunk's first token.",
    cause=Cause.WRONG_BLOCK,
    tensors=("labels",),
)
def rolled_labels(right: bool) -> Pair:
    n, s, v, h = 3, 8, 7, 5
    ranks = ((0, 1, 6, 7), (2, 3, 4, 5))
    b = tv.program("labels")
    tokens, mask = b.input("tokens", (n, s), "i64", ids=v), b.input("mask", (n, s), domain="indicator")
    e, head = b.parameter("e", (v, h)), b.parameter("head", (v, h))
    logits = b.linear(b.tanh(b.embedding(tokens, e, name="x"), name="h"), head, name="logits")
    nll = b.cross_entropy(logits, b.roll(tokens, shifts=(-1,), dims=(1,), name="labels"), reduction="none", name="nll")
    logical = finish(b, b.div(b.sum(b.mul(nll, mask, name="kept"), name="total"), b.sum(mask, name="count"), name="loss"))
    p = tv.plan("labels", tv.Mesh(cp=2))
    with p.ranks() as r:
        tokens = r.input("tokens", (n, s), "b s", dtype="i64", ids=v)
        mask = r.input("mask", (n, s // 2), rows_of(ranks, (n, s), dim=1), domain="indicator")
        e, head = r.parameter("e", (v, h), "v h"), r.parameter("head", (v, h), "v h")

        def cut(x: Tensor, name: str) -> Tensor:
            low, high = (
                piece(r, x, 1, lambda at: at["cp"] * 2, 2, f"{name}.low"),
                piece(r, x, 1, lambda at: 6 - at["cp"] * 2, 2, f"{name}.high"),
            )
            made: Tensor = r.concat(low, high, dim=1, name=name)
            return made

        own = cut(tokens, "tokens.own")
        if right:
            labels = cut(r.roll(tokens, shifts=(-1,), dims=(1,), name="rolled"), "labels")
        else:
            labels = r.roll(own, shifts=(-1,), dims=(1,), name="labels")  # bug
        logits = r.linear(r.tanh(r.embedding(own, e, name="x"), name="h"), head, name="logits")
        nll = r.cross_entropy(logits, labels, reduction="none", name="nll")
        count = r.all_reduce(r.sum(mask, name="count.own"), group="cp", backward="none", name="count")
        local = r.div(r.sum(r.mul(nll, mask, name="kept"), name="total"), count, name="local")
        r.loss(r.all_reduce(local, group="cp", name="loss"))
        r.backward(local)
        for w in (e, head):
            update(r, w, r.all_reduce(r.gradient(w), group="cp", name=f"{w.name}.grad.cp"))
    return logical, p.build()


@case(
    "B44",
    "Keys gathered along the heads",
    reference="pytorch/torchtitan#3206 (179d9e100)",
    mechanism="Keys and values [b, s/n, h, d] are gathered along dimension 2: more heads, and the sequence stays local.",
    cause=Cause.WRONG_DIMENSION,
    tensors=("k.all", "v.all"),
)
def gathered_heads(right: bool) -> Pair:
    n, s, k, heads, groups, d = 1, 6, 5, 4, 2, 3

    def project(b: Builder, x: Tensor, w: Tensor, count: int, name: str) -> Tensor:
        shape = (n, x.shape[1], count, d)
        made: Tensor = b.reshape(b.linear(x, w, name=f"{name}.flat"), shape=shape, name=name)
        return made

    b = tv.program("gathered")
    x, t = b.input("x", (n, s, k)), b.input("t", (n, s, heads, d))
    wq, wk, wv = b.parameter("wq", (heads * d, k)), b.parameter("wk", (groups * d, k)), b.parameter("wv", (groups * d, k))
    q, key, v = project(b, x, wq, heads, "q"), project(b, x, wk, groups, "k"), project(b, x, wv, groups, "v")
    logical = finish(b, b.div(squares(b, attended(b, q, key, v, causal=False), t), value=n * s * heads * d, name="loss"))
    p = tv.plan("gathered", tv.Mesh(cp=2))
    with p.ranks() as r:
        x, t = r.input("x", (n, s // 2, k), "b (cp s) k"), r.input("t", (n, s // 2, heads, d), "b (cp s) h d")
        wq, wk, wv = (r.parameter(m, (c * d, k), "o k") for m, c in (("wq", heads), ("wk", groups), ("wv", groups)))
        q, key, v = project(r, x, wq, heads, "q"), project(r, x, wk, groups, "k"), project(r, x, wv, groups, "v")
        dim = 1 if right else 2
        key, v = (r.all_gather(y, group="cp", dim=dim, backward="reduce_scatter", name=f"{y.name}.all") for y in (key, v))  # bug
        local = r.div(squares(r, attended(r, q, key, v, causal=False), t), value=n * s * heads * d, name="local")
        r.loss(r.all_reduce(local, group="cp", name="loss"))
        r.backward(local)
        for w in (wq, wk, wv):
            update(r, w, r.all_reduce(r.gradient(w), group="cp", name=f"{w.name}.grad.cp"))
    return logical, p.build()
