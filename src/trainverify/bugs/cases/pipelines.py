"""Accumulation over micro-batches of a pipeline, and weights that two stages share."""

from __future__ import annotations

import trainverify as tv
from trainverify.bugs.case import Pair, case
from trainverify.bugs.step import LR, Builder, finish, squares, update
from trainverify.build.plan import RankBuilder
from trainverify.build.tape import Tensor
from trainverify.explain.cause import Cause
from trainverify.graph.program import Program

K, H, OUT = 3, 5, 2


def layers_model(rows: int, count: int) -> Program:
    """Two layers; the sum of squares is divided by this count."""
    b = tv.program("layers")
    x, t = b.input("x", (rows, K)), b.input("t", (rows, OUT))
    w1, w2 = b.parameter("w1", (H, K)), b.parameter("w2", (OUT, H))
    y = b.linear(b.tanh(b.linear(x, w1, name="u"), name="a"), w2, name="y")
    return finish(b, b.div(squares(b, y, t), value=count, name="loss"))


def first_forward(r: RankBuilder, w1: Tensor, m: int, micro: int, rows: int) -> Tensor:
    """Stage 0 on micro-batch m, sent on."""
    x = r.input(f"x{m}", (rows, K), "(mb b) k", "x", fixed={"mb": (m, micro)})
    a: Tensor = r.tanh(r.linear(x, w1, name=f"u{m}"), name=f"a{m}")
    r.send(a, r.peer(pp=1))
    return a


def last_forward(r: RankBuilder, w2: Tensor, m: int, micro: int, rows: int, count: int) -> tuple[Tensor, Tensor]:
    """Stage 1 on micro-batch m: what it received, and the loss."""
    t = r.input(f"t{m}", (rows, OUT), "(mb b) k", "t", fixed={"mb": (m, micro)})
    a = r.recv((rows, H), r.peer(pp=0), name=f"a{m}")
    y = r.linear(a, w2, name=f"y{m}")
    return a, r.div(squares(r, y, t, f"squares{m}"), value=count, name=f"loss{m}")


@case(
    "B111",
    "Gradients rescaled at every accumulation step",
    reference="pytorch/torchtitan#1733, fixed by #1732",
    mechanism="After every accumulation step the pipeline divides the whole gradient, with what earlier steps had divided already.",
    cause=Cause.RESCALED_SUM,
    tensors=("w1.grad.kept1", "w2.grad.kept1"),
)
def rescaled(right: bool) -> Pair:
    rows, n, steps = 3, 2, 2
    p = tv.plan("layers", tv.Mesh(pp=2))

    def keep(r: RankBuilder, w: Tensor, kept: Tensor | None, step: int) -> Tensor:
        g = r.take_gradient(w)
        made: Tensor
        if kept is None:
            made = r.div(g, value=n, name=f"{w.name}.grad.kept{step}")
        elif right:
            made = r.add(kept, r.div(g, value=n, name=f"{w.name}.grad.scaled{step}"), name=f"{w.name}.grad.kept{step}")
        else:
            made = r.div(r.add(kept, g, name=f"{w.name}.grad.sum{step}"), value=n, name=f"{w.name}.grad.kept{step}")  # bug
        return made

    with p.ranks(pp=0) as r:
        w1, kept = r.parameter("w1", (H, K), "h k"), None
        for step in range(steps):
            sent = [first_forward(r, w1, step * n + m, n * steps, rows) for m in range(n)]
            for a in sent:
                r.backward(a, seeds=[r.recv(a.shape, r.peer(pp=1), name=f"{a.name}.grad")])
            kept = keep(r, w1, kept, step)
        assert kept is not None
        update(r, w1, kept)
    with p.ranks(pp=1) as r:
        w2, kept, losses = r.parameter("w2", (OUT, H), "o h"), None, []
        for step in range(steps):
            pairs = [last_forward(r, w2, step * n + m, n * steps, rows, rows * OUT) for m in range(n)]
            for a, loss in pairs:
                (g,) = r.backward(loss, wrt=[a])
                r.send(g, r.peer(pp=0))
            losses.append(r.div(r.add(pairs[0][1], pairs[1][1], name=f"sum{step}"), value=n, name=f"mean{step}"))
            kept = keep(r, w2, kept, step)
        r.loss(r.add(*losses, name="loss"))
        assert kept is not None
        update(r, w2, kept)
    return layers_model(rows * n * steps, rows * OUT * n), p.build()


@case(
    "B112",
    "Weight gradients of a split backward",
    reference="pytorch/pytorch#164777 (form inferred)",
    mechanism="Weight gradients are computed after the input gradients of all micro-batches, and are not divided by their number.",
    cause=Cause.WRONG_FACTOR,
    tensors=("w2.grad.mean",),
)
def split_backward(right: bool) -> Pair:
    rows, n = 3, 2
    p = tv.plan("layers", tv.Mesh(pp=2))
    with p.ranks(pp=0) as r:
        w1 = r.parameter("w1", (H, K), "h k")
        sent = [first_forward(r, w1, m, n, rows) for m in range(n)]
        for a in sent:
            r.backward(a, seeds=[r.recv(a.shape, r.peer(pp=1), name=f"{a.name}.grad")])
        update(r, w1, r.div(r.gradient(w1), value=n, name="w1.grad.mean"))
    with p.ranks(pp=1) as r:
        w2 = r.parameter("w2", (OUT, H), "o h")
        pairs: list[tuple[Tensor, Tensor]] = []  # what a micro-batch receives, and its loss
        later: list[tuple[Tensor, Tensor]] = []  # what entered the layer, and the gradient of what left it

        def layer(a: Tensor, m: int) -> Tensor:
            def input_gradient(dy: Tensor) -> list[Tensor | None]:
                later.append((a, dy))
                return [*r.emit("linear.grad", (a, w2, dy), {"wrt": (0,)}, [f"a{m}.grad"], forward=f"y{m}"), None]

            (y,) = r.by_hand([a, w2], lambda: [r.linear(a, w2, name=f"y{m}")], input_gradient)
            return y

        for m in range(n):
            t = r.input(f"t{m}", (rows, OUT), "(mb b) k", "t", fixed={"mb": (m, n)})
            a = r.recv((rows, H), r.peer(pp=0), name=f"a{m}")
            pairs.append((a, r.div(squares(r, layer(a, m), t, f"squares{m}"), value=rows * OUT, name=f"loss{m}")))
        for a, loss in pairs:
            (da,) = r.backward(loss, wrt=[a])
            r.send(da, r.peer(pp=0))
        r.loss(r.div(r.add(pairs[0][1], pairs[1][1], name="loss.sum"), value=n, name="loss"))
        r.phase = "backward"
        parts = [r.emit("linear.grad", (a, w2, dy), {"wrt": (1,)}, [f"w2.grad{m}"], forward=f"y{m}")[0] for m, (a, dy) in enumerate(later)]
        total = r.add(*parts, name="w2.grad.sum")
        update(r, w2, r.div(total, value=n, name="w2.grad.mean") if right else r.identity(total, name="w2.grad.mean"))  # bug
    return layers_model(rows * n, rows * OUT * n), p.build()


@case(
    "B113",
    "Gradients accumulated by a hook and by the schedule",
    reference="deepspeedai/DeepSpeed#5605 (91a9986dc)",
    mechanism="On all stages but the last, a backward hook and the schedule both add the gradient of a micro-batch to the buffer.",
    cause=Cause.COUNTED_TWICE,
    tensors=("w1.grad.buffer0", "w1.grad.buffer1"),
)
def added_twice(right: bool) -> Pair:
    rows, n = 3, 2
    p = tv.plan("layers", tv.Mesh(pp=2))
    with p.ranks(pp=0) as r:
        w1 = r.parameter("w1", (H, K), "h k")
        sent = [first_forward(r, w1, m, n, rows) for m in range(n)]
        buffer: Tensor = r.full(shape=(H, K), value=0.0, name="w1.grad.zero")
        for m, a in enumerate(sent):
            r.backward(a, seeds=[r.recv(a.shape, r.peer(pp=1), name=f"{a.name}.grad")])
            g = r.take_gradient(w1)
            hooked = r.add(buffer, g, name=f"w1.grad.hooked{m}")
            buffer = r.identity(hooked, name=f"w1.grad.buffer{m}") if right else r.add(hooked, g, name=f"w1.grad.buffer{m}")  # bug
        update(r, w1, buffer)
    with p.ranks(pp=1) as r:
        w2 = r.parameter("w2", (OUT, H), "o h")
        pairs = [last_forward(r, w2, m, n, rows, rows * n * OUT) for m in range(n)]
        for a, loss in pairs:
            (g,) = r.backward(loss, wrt=[a])
            r.send(g, r.peer(pp=0))
        r.loss(r.add(pairs[0][1], pairs[1][1], name="loss"))
        update(r, w2, r.gradient(w2))
    return layers_model(rows * n, rows * OUT * n), p.build()


S, V = 5, 7


def tied_model(optimizer: tv.SGD | tv.AdamW | None = None) -> Program:
    """One matrix as embedding and as head."""
    b = tv.program("tied")
    ids, t = b.input("ids", (S,), "i64", ids=V), b.input("t", (S,), "i64", ids=V)
    e, w = b.parameter("e", (V, H)), b.parameter("w", (H, H))
    logits = b.linear(b.tanh(b.linear(b.embedding(ids, e, name="x"), w, name="u"), name="h"), e, name="logits")
    b.loss(b.cross_entropy(logits, t, name="loss"))
    return tv.complete(b.build(), optimizer or tv.SGD(lr=LR))


def tied_first(r: RankBuilder) -> Tensor:
    """The embedding on stage 0, forward and backward."""
    ids, e = r.input("ids", (S,), "s", dtype="i64", ids=V), r.parameter("e", (V, H), "v h")
    x = r.embedding(ids, e, name="x")
    r.send(x, r.peer(pp=1))
    r.backward(x, seeds=[r.recv((S, H), r.peer(pp=1), name="x.grad")])
    return e


def tied_last(r: RankBuilder) -> tuple[Tensor, Tensor]:
    """A layer and the head on stage 1, forward and backward."""
    t = r.input("t", (S,), "s", dtype="i64", ids=V)
    e, w = r.parameter("e", (V, H), "v h"), r.parameter("w", (H, H), "o h")
    x = r.recv((S, H), r.peer(pp=0), name="x")
    logits = r.linear(r.tanh(r.linear(x, w, name="u"), name="h"), e, name="logits")
    loss = r.cross_entropy(logits, t, name="loss")
    r.loss(loss)
    (dx,) = r.backward(loss, wrt=[x])
    r.send(dx, r.peer(pp=0))
    return e, w


@case(
    "B110",
    "Master gradients copied before the tied all-reduce",
    reference="NVIDIA/Megatron-LM@9b55856615 (2020)",
    mechanism="Gradients are copied to the master gradients before the first and the last stage sum those of the tied embedding.",
    cause=Cause.STALE_INPUT,
    tensors=("e.main_grad",),
)
def copied_early(right: bool) -> Pair:
    p = tv.plan("tied", tv.Mesh(pp=2))

    def synchronise(r: RankBuilder, e: Tensor) -> None:
        r.phase = "optimizer"
        g = r.gradient(e)
        tied = r.all_reduce(g, group="pp", name="e.grad.tied")
        update(r, e, r.to(tied if right else g, dtype="f32", name="e.main_grad"))  # bug

    with p.ranks(pp=0) as r:
        synchronise(r, tied_first(r))
    with p.ranks(pp=1) as r:
        e, w = tied_last(r)
        synchronise(r, e)
        update(r, w, r.gradient(w))
    return tied_model(), p.build()


ADAM = tv.AdamW(lr=0.1, weight_decay=0.01, step=3)


def adamw(r: RankBuilder, w: Tensor, g: Tensor, form: str) -> Tensor:
    """A step of AdamW but for the new value of the parameter, which is returned."""
    r.phase = "optimizer"
    m, v = r.state(f"{w.name}.m", w.shape, form), r.state(f"{w.name}.v", w.shape, form, domain="nonnegative")
    new, m_new, v_new = r.adamw(w, g, m, v, **ADAM.attrs(w.name), name=[f"{w.name}.adamw", f"{m.name}.new", f"{v.name}.new"])
    r.update(m, m_new)
    r.update(v, v_new)
    made: Tensor = new
    return made


@case(
    "B124",
    "Tied copies under two optimizers",
    reference="NVIDIA/Megatron-LM#4641",
    mechanism="The last stage's copy of the embedding is updated by Muon and the first stage's by Adam, so that copies drift apart.",
    cause=Cause.OPTIMIZER_SETTING,
    tensors=("e.new",),
)
def two_rules(right: bool) -> Pair:
    p = tv.plan("tied", tv.Mesh(pp=2))
    with p.ranks(pp=0) as r:
        e = tied_first(r)
        g = r.all_reduce(r.gradient(e), group="pp", name="e.grad.tied")
        r.output(g, "gradient", "e")
        r.update(e, r.identity(adamw(r, e, g, "v h"), name="e.new"))
    with p.ranks(pp=1) as r:
        e, w = tied_last(r)
        g = r.all_reduce(r.gradient(e), group="pp", name="e.grad.tied")
        r.output(g, "gradient", "e")
        new = adamw(r, e, g, "v h")
        if right:
            r.update(e, r.identity(new, name="e.new"))
        else:
            scaled = r.div(g, r.norm(g, name="e.grad.norm"), name="muon.x")
            cubed = r.matmul(r.matmul(scaled, r.transpose(scaled, name="muon.xt"), name="muon.xxt"), scaled, name="muon.xxx")
            step = r.sub(r.mul(scaled, value=1.5, name="muon.linear"), r.mul(cubed, value=0.5, name="muon.cubic"), name="muon.step")
            r.update(e, r.sub(e, r.mul(step, value=ADAM.lr, name="muon.move"), name="e.new"))  # bug
        r.output(r.gradient(w), "gradient", "w")
        r.update(w, adamw(r, w, r.gradient(w), "o h"))
    return tied_model(ADAM), p.build()


@case(
    "B121",
    "Head gradient of a decoder on one stage",
    reference="NVIDIA/Megatron-LM#1548 (open)",
    mechanism="With one decoder stage the flag that keeps the head's gradient is not set, and the embedding's overwrites it.",
    cause=Cause.LOST_CONTRIBUTION,
    tensors=("e.grad",),
)
def overwritten_head(right: bool) -> Pair:
    def encode(b: Builder, x: Tensor, w: Tensor) -> Tensor:
        made: Tensor = b.tanh(b.linear(x, w, name="z"), name="memory")
        return made

    def decode(b: Builder, ids: Tensor, memory: Tensor, embedding: Tensor, head: Tensor) -> Tensor:
        made: Tensor = b.linear(b.mul(b.embedding(ids, embedding, name="x"), memory, name="h"), head, name="logits")
        return made

    b = tv.program("encoder and decoder")
    source, ids, t = b.input("source", (S, K)), b.input("ids", (S,), "i64", ids=V), b.input("t", (S,), "i64", ids=V)
    w, e = b.parameter("w", (H, K)), b.parameter("e", (V, H))
    logical = finish(b, b.cross_entropy(decode(b, ids, encode(b, source, w), e, e), t, name="loss"))
    p = tv.plan("encoder and decoder", tv.Mesh(pp=2))
    with p.ranks(pp=0) as r:
        source, w = r.input("source", (S, K), "s k"), r.parameter("w", (H, K), "h k")
        memory = encode(r, source, w)
        r.send(memory, r.peer(pp=1))
        r.backward(memory, seeds=[r.recv((S, H), r.peer(pp=1), name="memory.grad")])
        update(r, w, r.gradient(w))
    with p.ranks(pp=1) as r:
        ids, t = (r.input(n, (S,), "s", dtype="i64", ids=V) for n in ("ids", "t"))
        e = r.parameter("e", (V, H), "v h")
        memory = r.recv((S, H), r.peer(pp=0), name="memory")

        def joined(embed: Tensor, head: Tensor) -> list[Tensor]:
            return [r.add(head, embed, name="e.grad") if right else r.identity(embed, name="e.grad")]  # bug

        embedding, head = r.by_hand([e], lambda: r.multiref(e, times=2, name=["e.embedding", "e.head"]), joined)
        loss = r.cross_entropy(decode(r, ids, memory, embedding, head), t, name="loss")
        r.loss(loss)
        (g,) = r.backward(loss, wrt=[memory])
        r.send(g, r.peer(pp=0))
        update(r, e, r.gradient(e))
    return logical, p.build()
