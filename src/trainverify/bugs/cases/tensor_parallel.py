"""Sums over tensor-parallel ranks that are missing, or taken once too often."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import trainverify as tv
from trainverify.bugs.case import Pair, case
from trainverify.bugs.step import Builder, finish, squares, update
from trainverify.build.plan import RankBuilder
from trainverify.build.tape import Tensor
from trainverify.explain.cause import Cause
from trainverify.graph.program import Program


@case(
    "B06",
    "LoRA factor behind a sequence shard",
    reference="modelscope/mcore-bridge#173",
    mechanism="The replicated LoRA factor B sees one sequence shard per rank, and its gradient is not summed over tp.",
    cause=Cause.MISSING_REDUCTION,
    tensors=("b.grad.tp",),
)
def lora(right: bool) -> Pair:
    s, k, o, rank = 6, 10, 5, 3
    b = tv.program("lora")
    x, t, w = b.input("x", (s, k)), b.input("t", (s, o)), b.state("w", (o, k))
    down, up = b.parameter("a", (rank, k)), b.parameter("b", (o, rank))
    y = b.add(b.linear(x, w, name="base"), b.linear(b.linear(x, down, name="z"), up, name="delta"), name="y")
    logical = finish(b, b.div(squares(b, y, t), value=s * o, name="loss"))
    p = tv.plan("lora", tv.Mesh(tp=2))
    with p.ranks() as r:
        x, t, w = r.input("x", (s, k // 2), "s (tp k)"), r.input("t", (s // 2, o), "(tp s) o"), r.state("w", (o, k // 2), "o (tp k)")
        down, up = r.parameter("a", (rank, k // 2), "r (tp k)"), r.parameter("b", (o, rank), "o r")
        base = r.reduce_scatter(r.linear(x, w, name="base.part"), group="tp", backward="all_gather", name="base")
        z = r.reduce_scatter(r.linear(x, down, name="z.part"), group="tp", backward="all_gather", name="z")
        y = r.add(base, r.linear(z, up, name="delta"), name="y")
        local = r.div(squares(r, y, t), value=s * o, name="loss.local")
        r.loss(r.all_reduce(local, group="tp", name="loss"))
        r.backward(local)
        update(r, down, r.gradient(down))
        g = r.gradient(up)
        total = r.all_reduce(g, group="tp", name="b.grad.tp") if right else r.identity(g, name="b.grad.tp")  # bug
        update(r, up, total)
    return logical, p.build()


@case(
    "B07",
    "Bias of the one key-value head",
    reference="bigcode-project/Megatron-LM#12 (issue #11)",
    mechanism="Every rank's query heads contribute to the bias of the replicated key-value head, and they are not summed.",
    cause=Cause.MISSING_REDUCTION,
    tensors=("bkv.grad.tp",),
)
def one_kv_head(right: bool) -> Pair:
    n, s, h, heads, d = 2, 5, 6, 4, 3

    def attend(b: Builder, x: Tensor, wq: Tensor, wkv: Tensor, bkv: Tensor, wo: Tensor) -> Tensor:
        q = b.reshape(b.linear(x, wq, name="q.flat"), shape=(n, s, -1, d), name="q.heads")
        kv = b.reshape(b.linear(x, wkv, bkv, name="kv.flat"), shape=(n, 1, s, d), name="kv")
        mixed, _ = b.attention(b.transpose(q, dim0=1, dim1=2, name="q"), kv, kv, is_causal=True, name=["mixed", "lse"])
        joined = b.reshape(b.transpose(mixed, dim0=1, dim1=2, name="mixed.t"), shape=(n, s, wo.shape[1]), name="joined")
        made: Tensor = b.linear(joined, wo, name="out.part")
        return made

    b = tv.program("multi-query attention")
    x, t = b.input("x", (n, s, h)), b.input("t", (n, s, h))
    w = [b.parameter("wq", (heads * d, h)), b.parameter("wkv", (d, h)), b.parameter("bkv", (d,)), b.parameter("wo", (h, heads * d))]
    logical = finish(b, b.div(squares(b, attend(b, x, *w), t), value=n * s * h, name="loss"))
    p = tv.plan("multi-query attention", tv.Mesh(tp=2))
    with p.ranks() as r:
        x, t = r.input("x", (n, s, h), "b s h"), r.input("t", (n, s, h), "b s h")
        wq, wo = r.parameter("wq", (heads * d // 2, h), "(tp o) h"), r.parameter("wo", (h, heads * d // 2), "h (tp o)")
        wkv, bkv = r.parameter("wkv", (d, h), "d h"), r.parameter("bkv", (d,), "d")
        out = r.all_reduce(attend(r, x, wq, wkv, bkv, wo), group="tp", backward="identity", name="out")
        loss = r.div(squares(r, out, t), value=n * s * h, name="loss")
        r.loss(loss)
        r.backward(loss)
        update(r, wq, r.gradient(wq))
        update(r, wo, r.gradient(wo))
        update(r, wkv, r.all_reduce(r.gradient(wkv), group="tp", name="wkv.grad.tp"))
        g = r.gradient(bkv)
        update(r, bkv, r.all_reduce(g, group="tp", name="bkv.grad.tp") if right else r.identity(g, name="bkv.grad.tp"))  # bug
    return logical, p.build()


def expert_mlp(b: Builder, x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """One MLP for each expert on its own rows [e, rows, d]; a part of the sum where hidden features are cut."""
    h = b.silu(b.grouped_matmul(x, w1, name="h"), name="a")
    made: Tensor = b.grouped_matmul(h, w2, name="y.part")
    return made


def routed_model() -> Program:
    b = tv.program("experts")
    u, t = b.input("u", (2, 5, 3)), b.input("t", (2, 5, 7))
    w0, w1, w2 = b.parameter("w0", (7, 3)), b.parameter("w1", (2, 7, 6)), b.parameter("w2", (2, 6, 7))
    y = expert_mlp(b, b.linear(u, w0, name="x"), w1, w2)
    return finish(b, b.div(squares(b, y, t), value=70, name="loss"))


@case(
    "B08",
    "Input gradient of tensor-parallel experts",
    reference="pytorch/torchtitan#1878 (3ff755178)",
    mechanism="Routed rows enter column-parallel experts as local tensors, so their gradient stays one rank's share.",
    cause=Cause.MISSING_REDUCTION,
    tensors=("x.grad",),
)
def expert_input(right: bool) -> Pair:
    p = tv.plan("experts", tv.Mesh(tp=2))
    with p.ranks() as r:
        u, t = r.input("u", (2, 5, 3), "e t k"), r.input("t", (2, 5, 7), "e t d")
        w0, w1, w2 = (
            r.parameter("w0", (7, 3), "d k"),
            r.parameter("w1", (2, 7, 3), "e d (tp f)"),
            r.parameter("w2", (2, 3, 7), "e (tp f) d"),
        )
        x = r.linear(u, w0, name="x")
        routed = r.copy(x, "tp", name="routed") if right else r.identity(x, name="routed")  # bug
        y = r.all_reduce(expert_mlp(r, routed, w1, w2), group="tp", backward="identity", name="y")
        loss = r.div(squares(r, y, t), value=70, name="loss")
        r.loss(loss)
        r.backward(loss)
        for w in (w0, w1, w2):
            update(r, w, r.gradient(w))
    return routed_model(), p.build()


@case(
    "B16",
    "All-reduce of a temporary copy",
    reference="NVIDIA/Megatron-LM#5338 (60f338a9cd)",
    mechanism="The gradient is not contiguous: its contiguous copy is all-reduced and the original is returned.",
    cause=Cause.STALE_INPUT,
    tensors=("x.grad",),
)
def temporary_copy(right: bool) -> Pair:
    p = tv.plan("experts", tv.Mesh(tp=2))
    with p.ranks() as r:
        u, t = r.input("u", (2, 5, 3), "e t k"), r.input("t", (2, 5, 7), "e t d")
        w0, w1, w2 = (
            r.parameter("w0", (7, 3), "d k"),
            r.parameter("w1", (2, 7, 3), "e d (tp f)"),
            r.parameter("w2", (2, 3, 7), "e (tp f) d"),
        )
        x = r.linear(u, w0, name="x")

        def summed(g: Tensor) -> Sequence[Tensor]:
            """The gradient arrives as a transposed view."""
            view = r.transpose(g, dim0=1, dim1=2, name="routed.grad.t")
            total = r.all_reduce(r.contiguous(view, name="routed.grad.copy"), group="tp", name="routed.grad.tp")
            return [r.transpose(total if right else view, dim0=1, dim1=2, name="x.grad")]  # bug

        (routed,) = r.by_hand([x], lambda: [r.identity(x, name="routed")], summed)
        y = r.all_reduce(expert_mlp(r, routed, w1, w2), group="tp", backward="identity", name="y")
        loss = r.div(squares(r, y, t), value=70, name="loss")
        r.loss(loss)
        r.backward(loss)
        for w in (w0, w1, w2):
            update(r, w, r.gradient(w))
    return routed_model(), p.build()


@case(
    "B15",
    "Gradient of a partial sum taken for a partial sum",
    reference="pytorch/pytorch#172932, fixed by #173454",
    mechanism="The gradient behind to_local of a partial tensor is whole but labelled partial, and is all-reduced.",
    cause=Cause.EXTRA_REDUCTION,
    tensors=("y.part.grad",),
)
def partial_to_local(right: bool) -> Pair:
    p = tv.plan("experts", tv.Mesh(tp=2))
    with p.ranks() as r:
        u, t = r.input("u", (2, 5, 3), "e t k"), r.input("t", (2, 5, 7), "e t d")
        w0, w1, w2 = (
            r.parameter("w0", (7, 3), "d k"),
            r.parameter("w1", (2, 7, 3), "e d (tp f)"),
            r.parameter("w2", (2, 3, 7), "e (tp f) d"),
        )
        x = r.copy(r.linear(u, w0, name="x"), "tp", name="routed")
        part = expert_mlp(r, x, w1, w2)
        again = r.identity(part, name="y.local") if right else r.copy(part, "tp", name="y.local")  # bug
        loss = r.div(squares(r, r.all_reduce(again, group="tp", backward="identity", name="y"), t), value=70, name="loss")
        r.loss(loss)
        r.backward(loss)
        for w in (w0, w1, w2):
            update(r, w, r.gradient(w))
    return routed_model(), p.build()


def cut(r: RankBuilder, x: Tensor, rows: dict[str, int], name: str) -> list[Tensor]:
    return [r.slice(x, **rows, name=name)]


@case(
    "B09",
    "Chunked loss over a cut vocabulary",
    reference="pytorch/torchtitan#3412 (c2a3771a4)",
    mechanism="The gradient of the hidden states, gathered chunk by chunk, is one rank's share but labelled replicated.",
    cause=Cause.MISSING_REDUCTION,
    tensors=("h.grad.tp",),
)
def chunked_loss(right: bool) -> Pair:
    s, k, h, v = 6, 5, 3, 14
    b = tv.program("chunked loss")
    x, t = b.input("x", (s, k)), b.input("t", (s,), "i64", ids=v)
    w0, head = b.parameter("w0", (h, k)), b.parameter("head", (v, h))
    logits = b.linear(b.tanh(b.linear(x, w0, name="u"), name="h"), head, name="logits")
    logical = finish(b, b.cross_entropy(logits, t, name="loss"))
    p = tv.plan("chunked loss", tv.Mesh(tp=2))
    with p.ranks() as r:
        x, t = r.input("x", (s, k), "s k"), r.input("t", (s,), "s", dtype="i64", ids=v)
        w0, head = r.parameter("w0", (h, k), "h k"), r.parameter("head", (v // 2, h), "(tp v) h")
        hidden = r.tanh(r.linear(x, w0, name="u"), name="h")
        losses: list[Tensor] = []
        grads: list[Tensor] = []

        def kept(g: Tensor) -> list[None]:
            """The gradient of a chunk goes to the buffer and no further."""
            grads.append(g)
            return [None]

        for c in range(2):
            rows = {"dim": 0, "start": c * s // 2, "stop": (c + 1) * s // 2}
            (chunk,) = r.by_hand([hidden], functools.partial(cut, r, hidden, rows, f"h{c}"), kept)
            z = r.linear(chunk, head, name=f"logits{c}")
            total = r.all_reduce(r.sum(r.exp(z, name=f"exp{c}"), dim=1, name=f"part{c}"), group="tp", backward="identity", name=f"total{c}")
            ids = r.slice(t, **rows, name=f"t{c}")
            hot = r.float(r.one_hot(ids, num_classes=v // 2, start=r.each(lambda at: at["tp"] * v // 2), name=f"hot{c}"), name=f"hot{c}.f")
            own = r.sum(r.mul(hot, z, name=f"picked{c}"), dim=1, name=f"own{c}")
            picked = r.all_reduce(own, group="tp", backward="identity", name=f"score{c}")
            losses.append(
                r.div(r.sum(r.sub(r.log(total, name=f"lse{c}"), picked, name=f"nll{c}"), name=f"sum{c}"), value=s, name=f"loss{c}")
            )
            r.backward(losses[c])
        r.loss(r.add(*losses, name="loss"))
        buffer = r.concat(*grads, dim=0, name="h.grad.part")
        whole = r.all_reduce(buffer, group="tp", name="h.grad.tp") if right else r.identity(buffer, name="h.grad.tp")  # bug
        r.backward(hidden, seeds=[whole])
        update(r, w0, r.gradient(w0))
        update(r, head, r.gradient(head))
    return logical, p.build()
