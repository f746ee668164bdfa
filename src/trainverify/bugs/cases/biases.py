"""Biases of row-parallel layers that every rank adds."""

from __future__ import annotations

import trainverify as tv
from trainverify.bugs.case import Pair, case
from trainverify.bugs.step import finish, squares, update
from trainverify.explain.cause import Cause

T, D, F, E = 5, 7, 6, 2


@case(
    "B55",
    "Bias of row-parallel experts",
    reference="pytorch/torchtitan#4245 (ec30db9d0)",
    mechanism="Every tp rank adds the replicated expert bias to its partial result, so the sum has it tp times.",
    cause=Cause.COUNTED_TWICE,
    tensors=("y", "y.sum"),
)
def expert_bias(right: bool) -> Pair:
    b = tv.program("experts")
    x, t = b.input("x", (E, T, D)), b.input("t", (E, T, D))
    w1, w2, bias = b.parameter("w1", (E, D, F)), b.parameter("w2", (E, F, D)), b.parameter("b", (E, 1, D))
    y = b.add(b.grouped_matmul(b.silu(b.grouped_matmul(x, w1, name="h"), name="a"), w2, name="y.sum"), bias, name="y")
    logical = finish(b, b.div(squares(b, b.tanh(y, name="out"), t), value=E * T * D, name="loss"))
    p = tv.plan("experts", tv.Mesh(tp=2))
    with p.ranks() as r:
        x, t = r.input("x", (E, T, D), "e t d"), r.input("t", (E, T, D), "e t d")
        w1, w2 = r.parameter("w1", (E, D, F // 2), "e d (tp f)"), r.parameter("w2", (E, F // 2, D), "e (tp f) d")
        bias = r.parameter("b", (E, 1, D), "e x d")
        part = r.grouped_matmul(r.silu(r.grouped_matmul(x, w1, name="h"), name="a"), w2, name="y.part")
        if right:
            y = r.add(r.all_reduce(part, group="tp", backward="identity", name="y.sum"), bias, name="y")
        else:
            y = r.all_reduce(r.add(part, bias, name="y.sum"), group="tp", backward="identity", name="y")  # bug
        loss = r.div(squares(r, r.tanh(y, name="out"), t), value=E * T * D, name="loss")
        r.loss(loss)
        r.backward(loss)
        for w in (w1, w2, bias):
            update(r, w, r.gradient(w))
    return logical, p.build()


@case(
    "B56",
    "Bias fused into the matrix product",
    reference="NVIDIA/TransformerEngine#2230, first part (0db0f4d2d)",
    mechanism="The bias is fused into the row-parallel matrix product, and the sum over tp follows: it counts tp times.",
    cause=Cause.COUNTED_TWICE,
    tensors=("y.part", "y"),
)
def fused_bias(right: bool) -> Pair:
    b = tv.program("row-parallel")
    x, t = b.input("x", (T, D)), b.input("t", (T, D))
    w1, w2, bias = b.parameter("w1", (F, D)), b.parameter("w2", (D, F)), b.parameter("b", (D,))
    y = b.linear(b.gelu(b.linear(x, w1, name="h"), name="a"), w2, bias, name="y")
    logical = finish(b, b.div(squares(b, b.tanh(y, name="out"), t), value=T * D, name="loss"))
    p = tv.plan("row-parallel", tv.Mesh(tp=2))
    with p.ranks() as r:
        x, t = r.input("x", (T, D), "t d"), r.input("t", (T, D), "t d")
        w1, w2, bias = r.parameter("w1", (F // 2, D), "(tp f) d"), r.parameter("w2", (D, F // 2), "d (tp f)"), r.parameter("b", (D,), "d")
        a = r.gelu(r.linear(x, w1, name="h"), name="a")
        part = r.linear(a, w2, name="y.part") if right else r.linear(a, w2, bias, name="y.part")  # bug
        total = r.all_reduce(part, group="tp", backward="identity", name="y.sum")
        y = r.add(total, bias, name="y") if right else r.identity(total, name="y")  # bug
        loss = r.div(squares(r, r.tanh(y, name="out"), t), value=T * D, name="loss")
        r.loss(loss)
        r.backward(loss)
        for w in (w1, w2, bias):
            update(r, w, r.gradient(w))
    return logical, p.build()


@case(
    "B57",
    "Biases stored whole on every rank",
    reference="EleutherAI/gpt-neox#1220 (90a6cdb3)",
    mechanism="The model adds both biases on every rank before the sum, so a rank's share must be b/mp; it holds all of b.",
    cause=Cause.COUNTED_TWICE,
    tensors=("b1.stored", "b2.stored"),
)
def stored_bias(right: bool) -> Pair:
    b = tv.program("parallel residual")
    x, t = b.input("x", (T, D)), b.input("t", (T, D))
    w = {n: b.parameter(n, (F, D)) for n in ("u1", "u2")} | {n: b.parameter(n, (D, F)) for n in ("v1", "v2")}
    b1, b2 = b.parameter("b1", (D,)), b.parameter("b2", (D,))
    first = b.linear(b.tanh(b.linear(x, w["u1"], name="h1"), name="a1"), w["v1"], b1, name="y1")
    second = b.linear(b.gelu(b.linear(x, w["u2"], name="h2"), name="a2"), w["v2"], b2, name="y2")
    y = b.add(x, b.add(first, second, name="both"), name="y")
    logical = finish(b, b.div(squares(b, b.tanh(y, name="out"), t), value=T * D, name="loss"))
    p = tv.plan("parallel residual", tv.Mesh(mp=2))
    with p.ranks() as r:
        x, t = r.input("x", (T, D), "t d"), r.input("t", (T, D), "t d")
        w = {n: r.parameter(n, (F // 2, D), "(mp f) d") for n in ("u1", "u2")}
        w |= {n: r.parameter(n, (D, F // 2), "d (mp f)") for n in ("v1", "v2")}
        biases = [r.parameter(n, (D,), "d") for n in ("b1", "b2")]
        stored = [r.div(v, value=2 if right else 1, name=f"{v.name}.stored") for v in biases]  # bug
        first = r.linear(r.tanh(r.linear(x, w["u1"], name="h1"), name="a1"), w["v1"], stored[0], name="y1")
        second = r.linear(r.gelu(r.linear(x, w["u2"], name="h2"), name="a2"), w["v2"], stored[1], name="y2")
        both = r.all_reduce(r.add(first, second, name="both.part"), group="mp", backward="identity", name="both")
        loss = r.div(squares(r, r.tanh(r.add(x, both, name="y"), name="out"), t), value=T * D, name="loss")
        r.loss(loss)
        r.backward(loss)
        for v in w.values():
            update(r, v, r.gradient(v))
        for v in biases:
            update(r, v, r.all_reduce(r.gradient(v), group="mp", name=f"{v.name}.grad.mp"))
    return logical, p.build()
