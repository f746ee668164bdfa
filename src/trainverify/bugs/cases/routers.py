"""Gradients and counts of routers, and gathers whose backward is wrong."""

from __future__ import annotations

import trainverify as tv
from trainverify.bugs.case import Pair, case
from trainverify.bugs.step import LR, Builder, finish, piece, squares, update
from trainverify.build.tape import Tensor
from trainverify.explain.cause import Cause
from trainverify.graph.program import Program

T, K, D, F, E = 5, 3, 7, 6, 3  # tokens, input features, width, hidden features, experts


def mixture(b: Builder, x: Tensor, scores: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Σ over experts of score · expert(x), scores after the second matrix; a part of the sum where hidden features are cut."""
    a = b.silu(b.einsum(x, w1, spec="td,efd->tef", name="h"), name="a")
    made: Tensor = b.einsum(scores, b.einsum(a, w2, spec="tef,edf->ted", name="y"), spec="te,ted->td", name="out.part")
    return made


def mixture_model() -> Program:
    b = tv.program("mixture")
    u, t = b.input("u", (T, K)), b.input("t", (T, D))
    w0, gate = b.parameter("w0", (D, K)), b.parameter("gate", (E, D))
    w1, w2 = b.parameter("w1", (E, F, D)), b.parameter("w2", (E, D, F))
    x = b.tanh(b.linear(u, w0, name="v"), name="x")
    scores = b.moe_gate(b.linear(x, gate, name="logits"), top_k=2, name="scores")
    return finish(b, b.div(squares(b, mixture(b, x, scores, w1, w2), t), value=T * D, name="loss"))


@case(
    "B10",
    "Router scores behind row-parallel experts",
    reference="pytorch/torchtitan#2416 (de329200b), issue #2387",
    mechanism="The gradient of the scores is one tp rank's share but marked replicated, so gates differ from rank to rank.",
    cause=Cause.MISSING_REDUCTION,
    tensors=("scores.grad",),
)
def router_scores(right: bool) -> Pair:
    p = tv.plan("mixture", tv.Mesh(tp=2))
    with p.ranks() as r:
        u, t = r.input("u", (T, K), "t k"), r.input("t", (T, D), "t d")
        w0, gate = r.parameter("w0", (D, K), "d k"), r.parameter("gate", (E, D), "e d")
        w1, w2 = r.parameter("w1", (E, F // 2, D), "e (tp f) d"), r.parameter("w2", (E, D, F // 2), "e d (tp f)")
        x = r.tanh(r.linear(u, w0, name="v"), name="x")
        scores = r.moe_gate(r.linear(x, gate, name="logits"), top_k=2, name="scores")
        given = r.copy(scores, "tp", name="scores.tp") if right else r.identity(scores, name="scores.tp")  # bug
        part = mixture(r, r.copy(x, "tp", name="x.tp"), given, w1, w2)
        loss = r.div(squares(r, r.all_reduce(part, group="tp", backward="identity", name="out"), t), value=T * D, name="loss")
        r.loss(loss)
        r.backward(loss)
        for w in (w0, gate, w1, w2):
            update(r, w, r.gradient(w))
    return mixture_model(), p.build()


@case(
    "B11",
    "Everything below tensor-parallel experts",
    reference="pytorch/torchtitan#4054 (ecae62f15)",
    mechanism="Without expert parallelism the placements of input gradients default to replicated: rows and scores keep one share.",
    cause=Cause.MISSING_REDUCTION,
    tensors=("scores.grad", "x.grad"),
)
def local_map_inputs(right: bool) -> Pair:
    p = tv.plan("mixture", tv.Mesh(tp=3))
    with p.ranks() as r:
        u, t = r.input("u", (T, K), "t k"), r.input("t", (T, D), "t d")
        w0, gate = r.parameter("w0", (D, K), "d k"), r.parameter("gate", (E, D), "e d")
        w1, w2 = r.parameter("w1", (E, F // 3, D), "e (tp f) d"), r.parameter("w2", (E, D, F // 3), "e d (tp f)")
        x = r.tanh(r.linear(u, w0, name="v"), name="x")
        scores = r.moe_gate(r.linear(x, gate, name="logits"), top_k=2, name="scores")
        s, y = ((r.copy(v, "tp", name=f"{v.name}.in") if right else r.identity(v, name=f"{v.name}.in")) for v in (scores, x))  # bug
        part = mixture(r, y, s, w1, w2)
        loss = r.div(squares(r, r.all_reduce(part, group="tp", backward="identity", name="out"), t), value=T * D, name="loss")
        r.loss(loss)
        r.backward(loss)
        for w in (w0, gate, w1, w2):
            update(r, w, r.gradient(w))
    return mixture_model(), p.build()


@case(
    "B12",
    "Probabilities gathered without a gradient",
    reference="NVIDIA/Megatron-LM@b6ce193888 (2024-02-06)",
    mechanism="Probabilities are gathered over ep by a raw all-gather, so the dispatched ones give the router no gradient.",
    cause=Cause.LOST_CONTRIBUTION,
    tensors=("gate.grad",),
)
def gathered_probabilities(right: bool) -> Pair:
    tokens, d, f = 6, 5, 3
    b = tv.program("experts")
    x, t = b.input("x", (tokens, d)), b.input("t", (tokens, d))
    gate, w1, w2 = b.parameter("gate", (2, d)), b.parameter("w1", (2, f, d)), b.parameter("w2", (2, d, f))
    logits = b.linear(x, gate, name="logits")
    y = mixture(b, x, b.moe_gate(logits, top_k=2, name="p"), w1, w2)
    z = b.square(b.logsumexp(logits, dim=1, name="lse"), name="z")
    loss = b.add(b.div(squares(b, y, t), value=tokens * d, name="main"), b.mul(b.mean(z, name="z.mean"), value=0.25, name="z.loss"))
    logical = finish(b, loss)
    p = tv.plan("experts", tv.Mesh(ep=2))
    with p.ranks() as r:
        x, t = r.input("x", (tokens // 2, d), "(ep t) d"), r.input("t", (tokens // 2, d), "(ep t) d")
        gate, w1, w2 = (
            r.parameter("gate", (2, d), "e d"),
            r.parameter("w1", (1, f, d), "(ep e) f d"),
            r.parameter("w2", (1, d, f), "(ep e) d f"),
        )
        logits = r.linear(x, gate, name="logits")
        own = r.moe_gate(logits, top_k=2, name="p")
        every = r.all_gather(own, group="ep", backward="reduce_scatter" if right else "none", name="p.all")  # bug
        mine = piece(r, every, 1, lambda at: at["ep"], 1, "p.mine")
        rows = r.all_gather(x, group="ep", backward="reduce_scatter", name="x.all")
        y = r.reduce_scatter(mixture(r, rows, mine, w1, w2), group="ep", backward="all_gather", name="y")
        z = r.square(r.logsumexp(logits, dim=1, name="lse"), name="z")
        main = r.div(squares(r, y, t), value=tokens * d, name="main")
        local = r.add(main, r.mul(r.div(r.sum(z, name="z.sum"), value=tokens, name="z.mean"), value=0.25, name="z.loss"), name="local")
        r.loss(r.all_reduce(local, group="ep", name="loss"))
        r.backward(local)
        update(r, gate, r.all_reduce(r.gradient(gate), group="ep", name="gate.grad.ep"))
        update(r, w1, r.gradient(w1))
        update(r, w2, r.gradient(w2))
    return logical, p.build()


@case(
    "B13",
    "Backward of gathered logits",
    reference="pytorch/torchtitan#3827 (02f00eec3)",
    mechanism="All ranks use the gathered logits alike, yet the backward sums their gradients over tp before it cuts them.",
    cause=Cause.EXTRA_REDUCTION,
    tensors=("logits.part.grad",),
)
def gathered_logits(right: bool) -> Pair:
    s, k, h, v = 5, 3, 7, 6
    b = tv.program("log-probabilities")
    x, ids, gain = b.input("x", (s, k)), b.input("ids", (s,), "i64", ids=v), b.input("gain", (s,))
    w0, head = b.parameter("w0", (h, k)), b.parameter("head", (v, h))
    logits = b.linear(b.tanh(b.linear(x, w0, name="u"), name="h"), head, name="logits")
    nll = b.cross_entropy(logits, ids, reduction="none", name="nll")
    logical = finish(b, b.mean(b.mul(nll, gain, name="weighted"), name="loss"))
    p = tv.plan("log-probabilities", tv.Mesh(tp=2))
    with p.ranks() as r:
        x, ids, gain = r.input("x", (s, k), "s k"), r.input("ids", (s,), "s", dtype="i64", ids=v), r.input("gain", (s,), "s")
        w0, head = r.parameter("w0", (h, k), "h k"), r.parameter("head", (v // 2, h), "(tp v) h")
        hidden = r.copy(r.tanh(r.linear(x, w0, name="u"), name="h"), "tp", name="h.tp")
        part = r.linear(hidden, head, name="logits.part")
        logits = r.all_gather(part, group="tp", dim=1, backward="slice" if right else "reduce_scatter", name="logits")  # bug
        nll = r.cross_entropy(logits, ids, reduction="none", name="nll")
        loss = r.mean(r.mul(nll, gain, name="weighted"), name="loss")
        r.loss(loss)
        r.backward(loss)
        update(r, w0, r.gradient(w0))
        update(r, head, r.gradient(head))
    return logical, p.build()


@case(
    "B14",
    "Gradient of a norm under tp and cp",
    reference="NVIDIA/Megatron-LM#1528 (open; place inferred)",
    mechanism="The gradient of the norm's weight is the same on all tp ranks, and is summed over tp all the same.",
    cause=Cause.EXTRA_REDUCTION,
    tensors=("norm.grad.all",),
)
def norm_weight(right: bool) -> Pair:
    s, h, f = 6, 5, 6
    b = tv.program("norm")
    x, t = b.input("x", (s, h)), b.input("t", (s, h))
    g, w1, w2 = b.parameter("norm", (h,)), b.parameter("w1", (f, h)), b.parameter("w2", (h, f))
    n = b.layer_norm(x, g, name="n")
    y = b.linear(b.gelu(b.linear(n, w1, name="u"), name="a"), w2, name="y")
    logical = finish(b, b.div(squares(b, y, t), value=s * h, name="loss"))
    p = tv.plan("norm", tv.Mesh(cp=2, tp=2))
    with p.ranks() as r:
        x, t = r.input("x", (s // 2, h), "(cp s) h"), r.input("t", (s // 2, h), "(cp s) h")
        g, w1, w2 = r.parameter("norm", (h,), "h"), r.parameter("w1", (f // 2, h), "(tp f) h"), r.parameter("w2", (h, f // 2), "h (tp f)")
        n = r.copy(r.layer_norm(x, g, name="n"), "tp", name="n.tp")
        part = r.linear(r.gelu(r.linear(n, w1, name="u"), name="a"), w2, name="y.part")
        y = r.all_reduce(part, group="tp", backward="identity", name="y")
        local = r.div(squares(r, y, t), value=s * h, name="local")
        r.loss(r.all_reduce(local, group="cp", name="loss"))
        r.backward(local)
        for w in (w1, w2):
            update(r, w, r.all_reduce(r.gradient(w), group="cp", name=f"{w.name}.grad.cp"))
        whole = r.all_reduce(r.gradient(g), group="cp", name="norm.grad.cp")
        update(r, g, r.identity(whole, name="norm.grad.all") if right else r.all_reduce(whole, group="tp", name="norm.grad.all"))  # bug
    return logical, p.build()


@case(
    "B25",
    "Load-balancing loss of the global batch",
    reference="microsoft/ltp-megatron-lm#68",
    mechanism="The functional all-reduce of the expert counts returns a new tensor that is dropped: fractions stay local.",
    cause=Cause.STALE_INPUT,
    tensors=("fraction",),
)
def balance_counts(right: bool) -> Pair:
    tokens, d = 6, 5
    b = tv.program("balance")
    x, t = b.input("x", (tokens, d)), b.input("t", (tokens, E))
    gate = b.parameter("gate", (E, d))
    logits = b.linear(x, gate, name="logits")
    chosen = b.moe_gate(logits, top_k=1, name="chosen")
    fraction = b.div(b.sum(b.float(b.gt(chosen, value=0.0, name="hit"), name="hits"), dim=0, name="count"), value=tokens, name="fraction")
    share = b.div(b.sum(b.softmax(logits, name="prob"), dim=0, name="prob.sum"), value=tokens, name="share")
    aux = b.mul(b.sum(b.mul(fraction, share, name="product"), name="balance"), value=E * 0.5, name="aux")
    logical = finish(b, b.add(b.div(squares(b, chosen, t), value=tokens * E, name="main"), aux, name="loss"))
    p = tv.plan("balance", tv.Mesh(dp=2))
    with p.ranks() as r:
        x, t = r.input("x", (tokens // 2, d), "(dp t) d"), r.input("t", (tokens // 2, E), "(dp t) e")
        gate = r.parameter("gate", (E, d), "e d")
        logits = r.linear(x, gate, name="logits")
        chosen = r.moe_gate(logits, top_k=1, name="chosen")
        count = r.sum(r.float(r.gt(chosen, value=0.0, name="hit"), name="hits"), dim=0, name="count")
        total = r.all_reduce(count, group="dp", backward="none", name="count.dp")
        fraction = r.div(total if right else count, value=tokens, name="fraction")  # bug
        share = r.div(r.sum(r.softmax(logits, name="prob"), dim=0, name="prob.sum"), value=tokens, name="share")
        aux = r.mul(r.sum(r.mul(fraction, share, name="product"), name="balance"), value=E * 0.5, name="aux")
        local = r.add(r.div(squares(r, chosen, t), value=tokens * E, name="main"), aux, name="local")
        r.loss(r.all_reduce(local, group="dp", name="loss"))
        r.backward(local)
        update(r, gate, r.all_reduce(r.gradient(gate), group="dp", name="gate.grad.dp"))
    return logical, p.build()


@case(
    "B26",
    "Expert bias from one slice of the tokens",
    reference="pytorch/torchtitan#4154 (f3660a493)",
    mechanism="Tokens per expert are summed over dp but not over tp, so the bias moves by the counts of one tp slice.",
    cause=Cause.MISSING_REDUCTION,
    tensors=("count.tp",),
)
def expert_bias(right: bool) -> Pair:
    tokens, d, experts, speed = 28, 5, 7, 0.125
    b = tv.program("bias")
    x, t = b.input("x", (tokens, d)), b.input("t", (tokens, experts))
    gate, bias = b.parameter("gate", (experts, d)), b.state("bias", (experts,))
    chosen = b.moe_gate(b.linear(b.rms_norm(x, name="n"), gate, name="logits"), bias, top_k=2, scoring="sigmoid", name="chosen")
    count = b.sum(b.float(b.gt(chosen, value=0.0, name="hit"), name="hits"), dim=0, name="count")
    step = b.sign(b.sub(b.mean(count, name="mean"), count, name="lack"), name="step")
    b.update(bias, b.add(bias, b.mul(step, value=speed, name="move"), name="bias.new"))
    logical = finish(b, b.div(squares(b, chosen, t), value=tokens * experts, name="loss"))
    p = tv.plan("bias", tv.Mesh(dp=2, tp=2))
    with p.ranks() as r:
        x, t = r.input("x", (tokens // 4, d), "(dp tp t) d"), r.input("t", (tokens // 4, experts), "(dp tp t) e")
        gate, bias = r.parameter("gate", (experts, d), "e d"), r.state("bias", (experts,), "e")
        chosen = r.moe_gate(r.linear(r.rms_norm(x, name="n"), gate, name="logits"), bias, top_k=2, scoring="sigmoid", name="chosen")
        count = r.sum(r.float(r.gt(chosen, value=0.0, name="hit"), name="hits"), dim=0, name="count")
        local = r.div(squares(r, chosen, t), value=tokens * experts, name="local")
        r.loss(r.all_reduce(local, group=("dp", "tp"), name="loss"))
        r.backward(local)
        g = r.all_reduce(r.gradient(gate), group=("dp", "tp"), name="gate.grad.all")
        r.output(g, "gradient", "gate")
        r.update(gate, r.sgd(gate, g, lr=LR, name="gate.new"))
        slice_sum = r.all_reduce(count, group="tp", name="count.tp") if right else r.identity(count, name="count.tp")  # bug
        total = r.all_reduce(slice_sum, group="dp", name="count.dp")
        step = r.sign(r.sub(r.mean(total, name="mean"), total, name="lack"), name="step")
        r.update(bias, r.add(bias, r.mul(step, value=speed, name="move"), name="bias.new"))
    return logical, p.build()
