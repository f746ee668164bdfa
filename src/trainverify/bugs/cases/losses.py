"""Factors of losses: context parallelism, auxiliary losses, token counts, micro-batches."""

from __future__ import annotations

import trainverify as tv
from trainverify.bugs.case import Pair, case
from trainverify.bugs.step import Builder, finish, masked, rows_of, squares, update
from trainverify.build.plan import RankBuilder
from trainverify.build.tape import Tensor
from trainverify.explain.cause import Cause
from trainverify.graph.program import Program

K, H, OUT = 5, 3, 2


def net(b: Builder, x: Tensor, w1: Tensor, w2: Tensor, tag: str = "") -> Tensor:
    made: Tensor = b.linear(b.tanh(b.linear(x, w1, name=f"u{tag}"), name=f"h{tag}"), w2, name=f"y{tag}")
    return made


def per_token_model(rows: int) -> Program:
    """The mean over the tokens that count."""
    b = tv.program("tokens")
    x, t, mask = b.input("x", (rows, K)), b.input("t", (rows, OUT)), b.input("mask", (rows,), domain="indicator")
    w1, w2 = b.parameter("w1", (H, K)), b.parameter("w2", (OUT, H))
    return finish(b, b.div(masked(b, net(b, x, w1, w2), t, mask), b.sum(mask, name="count"), name="loss"))


def sources(r: RankBuilder, rows: int, form: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Batch, target, mask and weights of a rank; rows are cut as `form` says."""
    x, t = r.input("x", (rows, K), f"{form} k"), r.input("t", (rows, OUT), f"{form} k")
    mask = r.input("mask", (rows,), form, domain="indicator")
    return x, t, mask, r.parameter("w1", (H, K), "h k"), r.parameter("w2", (OUT, H), "o h")


@case(
    "B68",
    "Loss times cp, divided by the tokens",
    reference="NVIDIA/Megatron-LM#673, fixed by 5946e24b37",
    mechanism="The loss is still multiplied by cp although gradients are divided by the number of tokens and not by dp·cp.",
    cause=Cause.WRONG_FACTOR,
    tensors=("objective",),
)
def times_cp(right: bool) -> Pair:
    rows = 12
    p = tv.plan("tokens", tv.Mesh(dp=2, cp=2))
    with p.ranks() as r:
        x, t, mask, w1, w2 = sources(r, rows // 4, "(dp cp b)")
        total = masked(r, net(r, x, w1, w2), t, mask)
        count = r.all_reduce(r.sum(mask, name="count.own"), group=("dp", "cp"), name="count")
        objective = r.identity(total, name="objective") if right else r.mul(total, value=2, name="objective")  # bug
        r.backward(objective)
        r.loss(r.div(r.all_reduce(total, group=("dp", "cp"), name="total"), count, name="loss"))
        for w in (w1, w2):
            g = r.all_reduce(r.gradient(w), group=("dp", "cp"), name=f"{w.name}.grad.sum")
            update(r, w, r.div(g, count, name=f"{w.name}.grad.mean"))
    return per_token_model(rows), p.build()


@case(
    "B69",
    "Bucket scaled without cp",
    reference="NVIDIA/Megatron-LM#906, fixed by 3bdcbbbe5d",
    mechanism="The loss is multiplied by cp and gradients are summed over dp·cp, but the bucket is divided by dp only.",
    cause=Cause.WRONG_FACTOR,
    tensors=("w1.grad.scaled", "w2.grad.scaled"),
)
def bucket_scale(right: bool) -> Pair:
    n, s = 2, 6  # one sequence for each dp rank, cut over cp; the mean of the sequences' means
    b = tv.program("sequences")
    x, t, mask = b.input("x", (n, s, K)), b.input("t", (n, s, OUT)), b.input("mask", (n, s), domain="indicator")
    w1, w2 = b.parameter("w1", (H, K)), b.parameter("w2", (OUT, H))
    e = b.sub(net(b, x, w1, w2), t, name="e")
    rows = b.mul(b.sum(b.square(e, name="sq"), dim=2, name="rows"), mask, name="kept")
    logical = finish(b, b.mean(b.div(b.sum(rows, dim=1, name="totals"), b.sum(mask, dim=1, name="counts"), name="means"), name="loss"))
    p = tv.plan("sequences", tv.Mesh(dp=2, cp=2))
    with p.ranks() as r:
        x, t = r.input("x", (1, s // 2, K), "(dp b) (cp s) k"), r.input("t", (1, s // 2, OUT), "(dp b) (cp s) k")
        mask = r.input("mask", (1, s // 2), "(dp b) (cp s)", domain="indicator")
        w1, w2 = r.parameter("w1", (H, K), "h k"), r.parameter("w2", (OUT, H), "o h")
        count = r.all_reduce(r.sum(mask, name="count.own"), group="cp", name="count")
        mean = r.div(masked(r, net(r, x, w1, w2), t, mask), count, name="mean")
        r.backward(r.mul(mean, value=2, name="objective"))
        r.loss(r.all_reduce(r.all_reduce(mean, group="cp", name="mean.cp"), group="dp", op="avg", name="loss"))
        for w in (w1, w2):
            scaled = r.div(r.gradient(w), value=4 if right else 2, name=f"{w.name}.grad.scaled")  # bug
            update(r, w, r.all_reduce(scaled, group=("dp", "cp"), name=f"{w.name}.grad.sum"))
    return logical, p.build()


@case(
    "B70",
    "Division by the tokens skipped",
    reference="verl-project/verl#6609, fixed by #6836",
    mechanism="The loss function returns no token count, the total is 0, and the final division of the gradients is skipped.",
    cause=Cause.WRONG_FACTOR,
    tensors=("w1.grad.mean", "w2.grad.mean"),
)
def skipped_division(right: bool) -> Pair:
    rows = 6
    p = tv.plan("tokens", tv.Mesh(cp=2))
    with p.ranks() as r:
        x, t, mask, w1, w2 = sources(r, rows // 2, "(cp b)")
        total = masked(r, net(r, x, w1, w2), t, mask)
        count = r.all_reduce(r.sum(mask, name="count.own"), group="cp", name="count")
        r.backward(total)
        r.loss(r.div(r.all_reduce(total, group="cp", name="total"), count, name="loss"))
        for w in (w1, w2):
            g = r.all_reduce(r.gradient(w), group="cp", name=f"{w.name}.grad.sum")
            update(r, w, r.div(g, count, name=f"{w.name}.grad.mean") if right else r.identity(g, name=f"{w.name}.grad.mean"))  # bug
    return per_token_model(rows), p.build()


C, E = 0.25, 4  # weight of auxiliary losses, experts


def routed(b: Builder, x: Tensor, gate: Tensor, w: Tensor, tag: str = "") -> tuple[Tensor, Tensor]:
    """Logits of a router, and experts mixed by their softmax."""
    logits = b.linear(x, gate, name=f"logits{tag}")
    y = b.einsum(b.softmax(logits, name=f"p{tag}"), x, w, spec="te,tk,eok->to", name=f"y{tag}")
    return logits, y


def z_sum(b: Builder, logits: Tensor, tag: str = "") -> Tensor:
    """Σ over tokens of logsumexp(logits)²."""
    made: Tensor = b.sum(b.square(b.logsumexp(logits, dim=1, name=f"lse{tag}"), name=f"z{tag}"), name=f"z.sum{tag}")
    return made


def z_model(rows: int) -> Program:
    """A mean over tokens, and C times the router's z-loss, also a mean over tokens."""
    b = tv.program("router")
    x, t, gate, w = b.input("x", (rows, K)), b.input("t", (rows, OUT)), b.parameter("gate", (E, K)), b.parameter("w", (E, OUT, K))
    logits, y = routed(b, x, gate, w)
    main = b.div(squares(b, y, t), value=rows, name="main")
    aux = b.mul(b.div(z_sum(b, logits), value=rows, name="z.mean"), value=C, name="aux")
    return finish(b, b.add(main, aux, name="loss"))


def z_micro_batch(r: RankBuilder, gate: Tensor, w: Tensor, m: int, form: str, rows: int) -> tuple[Tensor, Tensor]:
    """Sums of the loss and of the z-loss over a rank's rows of micro-batch m of two."""
    x, t = (r.input(f"{n}{m}", (rows, k), form, n, fixed={"mb": (m, 2)}) for n, k in (("x", K), ("t", OUT)))
    logits, y = routed(r, x, gate, w, str(m))
    return squares(r, y, t, f"squares{m}"), r.mul(z_sum(r, logits, str(m)), value=C, name=f"z.loss{m}")


@case(
    "B71",
    "Auxiliary loss without the factor cp",
    reference="NVIDIA/Megatron-LM#2237 (f6e0d425a5)",
    mechanism="The main loss is multiplied by cp, which the average over dp·cp undoes; the auxiliary loss is not.",
    cause=Cause.WRONG_FACTOR,
    tensors=("aux0.grad", "aux1.grad"),
)
def aux_without_cp(right: bool) -> Pair:
    rows, cp, micro = 12, 2, 2
    p = tv.plan("router", tv.Mesh(cp=cp))
    with p.ranks() as r:
        gate, w = r.parameter("gate", (E, K), "e k"), r.parameter("w", (E, OUT, K), "e o k")
        shares = []
        for m in range(micro):
            total, z = z_micro_batch(r, gate, w, m, "(mb cp b) k", rows // 4)
            main, aux = r.div(total, value=rows // micro, name=f"main{m}"), r.div(z, value=rows // micro, name=f"aux{m}")
            shares.append(r.div(r.add(main, aux, name=f"both{m}"), value=micro, name=f"share{m}"))
            one = r.full(shape=(), value=cp / micro, name=f"main{m}.grad")
            two = r.full(shape=(), value=cp / micro if right else 1 / micro, name=f"aux{m}.grad")  # bug
            r.backward(main, aux, seeds=[one, two])
        r.loss(r.all_reduce(r.add(*shares, name="loss.own"), group="cp", name="loss"))
        for v in (gate, w):
            update(r, v, r.all_reduce(r.gradient(v), group="cp", op="avg", name=f"{v.name}.grad.mean"))
    return z_model(rows), p.build()


def balance(b: Builder, logits: Tensor, tokens: int, name: str = "balance") -> Tensor:
    """E·Σ over experts of (share of tokens that choose it)·(mean probability)."""
    hit = b.float(b.gt(b.moe_gate(logits, top_k=1, name=f"{name}.choice"), value=0.0, name=f"{name}.hit"), name=f"{name}.hits")
    fraction = b.div(b.sum(hit, dim=0, name=f"{name}.count"), value=tokens, name=f"{name}.fraction")
    share = b.div(b.sum(b.softmax(logits, name=f"{name}.p"), dim=0, name=f"{name}.p.sum"), value=tokens, name=f"{name}.share")
    made: Tensor = b.mul(b.sum(b.mul(fraction, share, name=f"{name}.products"), name=f"{name}.sum"), value=E, name=name)
    return made


@case(
    "B72",
    "Auxiliary loss on every tp rank",
    reference="NVIDIA/Megatron-LM@cac8d1a3f0 (2024-05-03)",
    mechanism="Every tp rank computes the auxiliary loss of all tokens and router gradients are summed, but it is not divided by tp.",
    cause=Cause.WRONG_FACTOR,
    tensors=("aux",),
)
def aux_times_tp(right: bool) -> Pair:
    rows = 6
    b = tv.program("balanced")
    x, t, gate, w = b.input("x", (rows, K)), b.input("t", (rows, OUT)), b.parameter("gate", (E, K)), b.parameter("w", (E, OUT, K))
    logits, y = routed(b, x, gate, w)
    aux = b.mul(balance(b, logits, rows), value=C, name="aux")
    logical = finish(b, b.add(b.div(squares(b, y, t), value=rows, name="main"), aux, name="loss"))
    p = tv.plan("balanced", tv.Mesh(tp=2))
    with p.ranks() as r:
        x, t = r.input("x", (rows // 2, K), "(tp b) k"), r.input("t", (rows // 2, OUT), "(tp b) k")
        gate, w = r.parameter("gate", (E, K), "e k"), r.parameter("w", (E, OUT, K), "e o k")
        logits, y = routed(r, x, gate, w)
        whole = r.all_gather(logits, group="tp", backward="reduce_scatter", name="logits.all")
        value = balance(r, whole, rows)
        aux = r.mul(value, value=C / 2 if right else C, name="aux")  # bug
        main = r.div(squares(r, y, t), value=rows, name="main")
        r.backward(main, aux)
        r.loss(r.add(r.all_reduce(main, group="tp", name="main.tp"), r.mul(value, value=C, name="aux.shown"), name="loss"))
        for v in (gate, w):
            update(r, v, r.all_reduce(r.gradient(v), group="tp", name=f"{v.name}.grad.tp"))
    return logical, p.build()


@case(
    "B73",
    "Auxiliary loss times the tokens of one rank",
    reference="NVIDIA/Megatron-LM#5047 (9ef8a2a420)",
    mechanism="To cancel the division by all tokens the auxiliary loss is multiplied by one rank's tokens, without tp·cp.",
    cause=Cause.WRONG_FACTOR,
    tensors=("aux0.grad", "aux1.grad"),
)
def aux_local_tokens(right: bool) -> Pair:
    rows, own = 24, 3  # two micro-batches over tp·cp = 4 ranks
    p = tv.plan("router", tv.Mesh(cp=2, tp=2))
    with p.ranks() as r:
        gate, w = r.parameter("gate", (E, K), "e k"), r.parameter("w", (E, OUT, K), "e o k")
        shares = []
        for m in range(2):
            total, z = z_micro_batch(r, gate, w, m, "(mb cp tp b) k", own)
            aux = r.div(z, value=rows // 2, name=f"aux{m}")
            shares.append(r.add(r.div(total, value=rows, name=f"main{m}"), r.div(aux, value=2, name=f"half{m}"), name=f"share{m}"))
            one = r.full(shape=(), value=1.0, name=f"total{m}.grad")
            two = r.full(shape=(), value=float(own * 4 if right else own), name=f"aux{m}.grad")  # bug
            r.backward(total, aux, seeds=[one, two])
        r.loss(r.all_reduce(r.add(*shares, name="loss.own"), group=("cp", "tp"), name="loss"))
        for v in (gate, w):
            g = r.all_reduce(r.gradient(v), group=("cp", "tp"), name=f"{v.name}.grad.sum")
            update(r, v, r.div(g, value=rows, name=f"{v.name}.grad.mean"))
    return z_model(rows), p.build()


@case(
    "B74",
    "Auxiliary loss divided by the micro-batches too",
    reference="NVIDIA/Megatron-LM@87d9d2506a (!2851)",
    mechanism="Gradients are divided by all tokens at the end, and the auxiliary loss is also divided by the micro-batches.",
    cause=Cause.WRONG_FACTOR,
    tensors=("aux0.grad", "aux1.grad"),
)
def aux_micro_batches(right: bool) -> Pair:
    rows = 12
    p = tv.plan("router", tv.Mesh(dp=2))
    with p.ranks() as r:
        gate, w = r.parameter("gate", (E, K), "e k"), r.parameter("w", (E, OUT, K), "e o k")
        shares = []
        for m in range(2):
            total, z = z_micro_batch(r, gate, w, m, "(dp mb b) k", rows // 4)
            mean = r.div(z, value=rows // 4, name=f"z.mean{m}")
            aux = r.mul(mean, value=rows // 4, name=f"aux{m}")  # times the tokens of the micro-batch
            shares.append(r.div(r.add(total, aux, name=f"both{m}"), value=rows, name=f"share{m}"))
            one = r.full(shape=(), value=1.0, name=f"total{m}.grad")
            two = r.full(shape=(), value=1.0 if right else 0.5, name=f"aux{m}.grad")  # bug
            r.backward(total, aux, seeds=[one, two])
        r.loss(r.all_reduce(r.add(*shares, name="loss.own"), group="dp", name="loss"))
        for v in (gate, w):
            g = r.all_reduce(r.gradient(v), group="dp", name=f"{v.name}.grad.sum")
            update(r, v, r.div(g, value=rows, name=f"{v.name}.grad.mean"))
    return z_model(rows), p.build()


@case(
    "B75",
    "Sequence-level auxiliary loss of one sequence",
    reference="NVIDIA/Megatron-LM#5798 (e3fe5508c9)",
    mechanism="The token count of the sequence-level auxiliary loss lacks the micro-batch size, so its gradient is that much too small.",
    cause=Cause.WRONG_FACTOR,
    tensors=("aux.grad",),
)
def aux_sequences(right: bool) -> Pair:
    n, s = 4, 3

    def forward(b: Builder, x: Tensor, t: Tensor, gate: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of squares, and the mean over sequences of each one's auxiliary loss."""
        size = x.shape[0]
        logits, y = routed(b, b.reshape(x, shape=(size * s, K), name="x.flat"), gate, w)
        p, choice = b.softmax(logits, name="aux.p"), b.moe_gate(logits, top_k=1, name="choice")
        hit = b.float(b.gt(choice, value=0.0, name="hit"), name="hits")
        fraction, share = (
            b.mean(b.reshape(v, shape=(size, s, E), name=f"{c}.s"), dim=1, name=c) for v, c in ((hit, "fraction"), (p, "share"))
        )
        each = b.mul(b.sum(b.mul(fraction, share, name="products"), dim=1, name="each.sum"), value=E * C, name="each")
        total = squares(b, y, b.reshape(t, shape=(size * s, OUT), name="t.flat"))
        return total, b.mean(each, name="aux")

    b = tv.program("sequence-level")
    x, t, gate, w = b.input("x", (n, s, K)), b.input("t", (n, s, OUT)), b.parameter("gate", (E, K)), b.parameter("w", (E, OUT, K))
    total, aux = forward(b, x, t, gate, w)
    logical = finish(b, b.add(b.div(total, value=n * s, name="main"), aux, name="loss"))
    p = tv.plan("sequence-level", tv.Mesh(dp=2))
    with p.ranks() as r:
        x, t = r.input("x", (n // 2, s, K), "(dp b) s k"), r.input("t", (n // 2, s, OUT), "(dp b) s k")
        gate, w = r.parameter("gate", (E, K), "e k"), r.parameter("w", (E, OUT, K), "e o k")
        total, aux = forward(r, x, t, gate, w)
        one = r.full(shape=(), value=1.0, name="total.grad")
        two = r.full(shape=(), value=float(s * n // 2 if right else s), name="aux.grad")  # bug
        r.backward(total, aux, seeds=[one, two])
        main = r.div(r.all_reduce(total, group="dp", name="total"), value=n * s, name="main")
        r.loss(r.add(main, r.all_reduce(aux, group="dp", op="avg", name="aux.mean"), name="loss"))
        for v in (gate, w):
            g = r.all_reduce(r.gradient(v), group="dp", name=f"{v.name}.grad.sum")
            update(r, v, r.div(g, value=n * s, name=f"{v.name}.grad.mean"))
    return logical, p.build()


@case(
    "B76",
    "Auxiliary loss times the number of processes",
    reference="huggingface/transformers#48690, PR #48706",
    mechanism="To undo the average of DDP the loss is multiplied by the number of processes, together with the auxiliary loss.",
    cause=Cause.WRONG_FACTOR,
    tensors=("objective", "scaled"),
)
def aux_times_processes(right: bool) -> Pair:
    rows = 6

    def terms(b: Builder, x: Tensor, t: Tensor, mask: Tensor, gate: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        logits, y = routed(b, x, gate, w)
        return masked(b, y, t, mask), b.mul(b.div(z_sum(b, logits), value=x.shape[0], name="z.mean"), value=C, name="aux")

    b = tv.program("processes")
    x, t, mask = b.input("x", (rows, K)), b.input("t", (rows, OUT)), b.input("mask", (rows,), domain="indicator")
    gate, w = b.parameter("gate", (E, K)), b.parameter("w", (E, OUT, K))
    total, aux = terms(b, x, t, mask, gate, w)
    logical = finish(b, b.add(b.div(total, b.sum(mask, name="count"), name="main"), aux, name="loss"))
    p = tv.plan("processes", tv.Mesh(dp=2))
    with p.ranks() as r:
        x, t = r.input("x", (rows // 2, K), "(dp b) k"), r.input("t", (rows // 2, OUT), "(dp b) k")
        mask = r.input("mask", (rows // 2,), "(dp b)", domain="indicator")
        gate, w = r.parameter("gate", (E, K), "e k"), r.parameter("w", (E, OUT, K), "e o k")
        total, aux = terms(r, x, t, mask, gate, w)
        main = r.div(total, r.all_reduce(r.sum(mask, name="count.own"), group="dp", backward="none", name="count"), name="main")
        if right:
            objective = r.add(r.mul(main, value=2, name="scaled"), aux, name="objective")
        else:
            objective = r.mul(r.add(main, aux, name="scaled"), value=2, name="objective")  # bug
        r.backward(objective)
        shown = r.all_reduce(aux, group="dp", op="avg", name="aux.mean")
        r.loss(r.add(r.all_reduce(main, group="dp", name="main.sum"), shown, name="loss"))
        for v in (gate, w):
            update(r, v, r.all_reduce(r.gradient(v), group="dp", op="avg", name=f"{v.name}.grad.mean"))
    return logical, p.build()


@case(
    "B85",
    "Mean over replicas of losses per token",
    reference="huggingface/transformers#37474 (open)",
    mechanism="Each replica's loss is divided by all tokens already, and the replicas' losses are averaged and not summed.",
    cause=Cause.WRONG_REDUCTION,
    tensors=("loss",),
)
def mean_of_replicas(right: bool) -> Pair:
    rows = 6
    p = tv.plan("tokens", tv.Mesh(dp=2))
    with p.ranks() as r:
        x, t, mask, w1, w2 = sources(r, rows // 2, "(dp b)")
        count = r.all_reduce(r.sum(mask, name="count.own"), group="dp", backward="none", name="count")
        own = r.div(masked(r, net(r, x, w1, w2), t, mask), count, name="own")
        every = r.all_gather(r.unsqueeze(own, dim=0, name="own.row"), group="dp", backward="slice", name="losses")
        loss = r.sum(every, name="loss") if right else r.mean(every, name="loss")  # bug
        r.loss(loss)
        r.backward(loss)
        for w in (w1, w2):
            update(r, w, r.all_reduce(r.gradient(w), group="dp", name=f"{w.name}.grad.sum"))
    return per_token_model(rows), p.build()


@case(
    "B87",
    "A fixed divisor for micro-batches of any size",
    reference="verl-project/verl#141 (695bdbb03)",
    mechanism="Micro-batches have dynamic sizes, and their mean losses are divided by a fixed number of accumulation steps.",
    cause=Cause.UNEQUAL_WEIGHTS,
    tensors=("objective1",),  # the first micro-batch has a quarter of the rows, and gets a quarter
)
def dynamic_sizes(right: bool) -> Pair:
    sizes = (1, 3)
    own = sum(sizes)
    b = tv.program("dynamic")
    x, t, w1, w2 = b.input("x", (2 * own, K)), b.input("t", (2 * own, OUT)), b.parameter("w1", (H, K)), b.parameter("w2", (OUT, H))
    logical = finish(b, b.div(squares(b, net(b, x, w1, w2), t), value=2 * own, name="loss"))
    p = tv.plan("dynamic", tv.Mesh(dp=2))
    with p.ranks() as r:
        w1, w2 = r.parameter("w1", (H, K), "h k"), r.parameter("w2", (OUT, H), "o h")
        shown = []
        for m, size in enumerate(sizes):
            first = sum(sizes[:m])
            ranks = [range(d * own + first, d * own + first + size) for d in range(2)]
            x, t = (r.input(f"{n}{m}", (size, k), rows_of(ranks, (2 * own, k)), n) for n, k in (("x", K), ("t", OUT)))
            mean = r.div(squares(r, net(r, x, w1, w2, str(m)), t, f"squares{m}"), value=size, name=f"mean{m}")
            r.backward(r.mul(mean, value=size / own if right else 1 / 4, name=f"objective{m}"))  # bug
            shown.append(r.mul(mean, value=size / own, name=f"shown{m}"))
        r.loss(r.all_reduce(r.add(*shown, name="shown"), group="dp", op="avg", name="loss"))
        for w in (w1, w2):
            update(r, w, r.all_reduce(r.gradient(w), group="dp", op="avg", name=f"{w.name}.grad.mean"))
    return logical, p.build()


@case(
    "B88",
    "A mean added to a sum",
    reference="AI-Hypercomputer/maxtext#3311",
    mechanism="The mean loss of the multi-token head is added to the main sum, and the total is divided by the tokens at the end.",
    cause=Cause.WRONG_FACTOR,
    tensors=("extra0", "extra1"),
)
def mean_and_sum(right: bool) -> Pair:
    rows, ways, micro = 3, 2, 2  # rows of a micro-batch
    chunks = ways * micro
    b = tv.program("multi-token")
    x, t, mask = b.input("x", (chunks, rows, K)), b.input("t", (chunks, rows, OUT)), b.input("mask", (chunks, rows), domain="indicator")
    w1, w2, w3 = b.parameter("w1", (H, K)), b.parameter("w2", (OUT, H)), b.parameter("w3", (OUT, H))
    h = b.tanh(b.linear(x, w1, name="u"), name="h")
    first, second = (b.sum(b.square(b.sub(b.linear(h, w), t)), dim=2) for w in (w2, w3))
    main = b.sum(b.mul(first, mask, name="kept"), dim=1, name="main")
    extra = b.mul(b.mean(second, dim=1, name="extra.mean"), b.sum(mask, dim=1, name="counts"), name="extra")
    logical = finish(b, b.div(b.sum(b.add(main, extra, name="both"), name="total"), b.sum(mask, name="count"), name="loss"))
    p = tv.plan("multi-token", tv.Mesh(dp=ways))
    with p.ranks() as r:
        w1, w2, w3 = (r.parameter(n, shape, "a b") for n, shape in (("w1", (H, K)), ("w2", (OUT, H)), ("w3", (OUT, H))))
        sums, counts, shown = [], [], []
        for m in range(micro):
            part, form = {"mb": (m, micro)}, "(dp mb c) b"
            x, t = (r.input(f"{n}{m}", (1, rows, k), f"{form} k", n, fixed=part) for n, k in (("x", K), ("t", OUT)))
            mask = r.input(f"mask{m}", (1, rows), form, "mask", domain="indicator", fixed=part)
            h = r.tanh(r.linear(x, w1, name=f"u{m}"), name=f"h{m}")
            first, second = (r.sum(r.square(r.sub(r.linear(h, w), t)), dim=2) for w in (w2, w3))
            main, mean = r.sum(r.mul(first, mask, name=f"kept{m}"), name=f"main{m}"), r.mean(second, name=f"extra.mean{m}")
            counts.append(r.sum(mask, name=f"count{m}"))
            extra = r.mul(mean, counts[m], name=f"extra{m}") if right else r.identity(mean, name=f"extra{m}")  # bug
            sums.append(r.add(main, extra, name=f"objective{m}"))
            shown.append(r.add(main, r.mul(mean, counts[m], name=f"weighted{m}"), name=f"shown{m}"))
            r.backward(sums[m])
        count, total = (r.all_reduce(r.add(*v, name=f"{n}.own"), group="dp", name=n) for v, n in ((counts, "count"), (shown, "total")))
        r.loss(r.div(total, count, name="loss"))
        for w in (w1, w2, w3):
            g = r.all_reduce(r.gradient(w), group="dp", name=f"{w.name}.grad.sum")
            update(r, w, r.div(g, count, name=f"{w.name}.grad.mean"))
    return logical, p.build()
