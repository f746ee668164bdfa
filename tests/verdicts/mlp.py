"""A small MLP, and its plan."""

from __future__ import annotations

from dataclasses import replace

import trainverify as tv
from trainverify.graph.plan import Plan
from trainverify.graph.program import Op, Program

ROWS, WIDTH, HIDDEN, OUT, MICRO = 5, 6, 14, 3, 2


def logical() -> Program:
    b = tv.program("mlp")
    x, t = b.input("x", (4 * ROWS, WIDTH)), b.input("t", (4 * ROWS, OUT))
    w0, w1, w2 = b.parameter("w0", (WIDTH, WIDTH)), b.parameter("w1", (HIDDEN, WIDTH)), b.parameter("w2", (OUT, HIDDEN))
    z = b.silu(b.linear(x, w0, name="u"), name="z")
    a = b.relu(b.linear(z, w1, name="h"), name="a")
    e = b.sub(b.linear(a, w2, name="y"), t, name="e")
    b.loss(b.mean(b.mul(e, e, name="sq"), name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.1, momentum=0.9))


def plan() -> Plan:
    p = tv.plan("mlp", tv.Mesh(dp=2, pp=2, tp=2))
    with p.ranks(pp=0) as r:
        w0 = r.parameter("w0", (WIDTH, WIDTH), "o k")
        w1 = r.parameter("w1", (HIDDEN // 2, WIDTH), "(tp o) k")
        sent = []
        for m in range(MICRO):
            x = r.input(f"x{m}", (ROWS, WIDTH), "(dp mb b) k", "x", fixed={"mb": (m, MICRO)})
            z = r.copy(r.silu(r.linear(x, w0, name=f"u{m}"), name=f"z{m}"), "tp", name=f"z{m}.tp")
            sent.append(r.relu(r.linear(z, w1, name=f"h{m}"), name=f"a{m}"))
            # gathered over tp, travels whole, is cut again by the receiver
            r.send(r.all_gather(sent[m], group="tp", dim=1, name=f"a{m}.whole"), r.peer(pp=1))
        for m in range(MICRO):
            r.backward(sent[m], seeds=[r.recv(sent[m].shape, r.peer(pp=1), name=f"a{m}.grad")])
        update(r, w0, "o k")
        update(r, w1, "(tp o) k")
    with p.ranks(pp=1) as r:
        w2 = r.parameter("w2", (OUT, HIDDEN // 2), "o (tp k)")
        received, losses = [], []
        half = HIDDEN // 2
        start, stop = r.each(lambda at: at["tp"] * half), r.each(lambda at: (at["tp"] + 1) * half)
        for m in range(MICRO):
            t = r.input(f"t{m}", (ROWS, OUT), "(dp mb b) k", "t", fixed={"mb": (m, MICRO)})
            whole = r.recv((ROWS, HIDDEN), r.peer(pp=0), name=f"a{m}.whole")
            received.append(r.slice(whole, dim=1, start=start, stop=stop, name=f"a{m}"))
            part = r.linear(received[m], w2, name=f"y{m}.part")
            e = r.sub(r.all_reduce(part, group="tp", backward="identity", name=f"y{m}"), t, name=f"e{m}")
            losses.append(r.mul(r.mean(r.mul(e, e, name=f"sq{m}"), name=f"mean{m}"), value=1 / MICRO, name=f"loss{m}"))
        for m in range(MICRO):
            (g,) = r.backward(losses[m], wrt=[received[m]])
            r.send(g, r.peer(pp=0))
        r.loss(r.all_reduce(r.add(*losses, name="loss.sum"), group="dp", op="avg", name="loss"))
        update(r, w2, "o (tp k)")
    return p.build()


def update(r, w, form: str) -> None:
    r.phase = "optimizer"
    grad = r.all_reduce(r.gradient(w), group="dp", op="avg", name=f"{w.name}.grad.mean")
    r.output(grad, "gradient", w.name)
    momentum = r.state(f"{w.name}.momentum", w.shape, form)
    new = r.sgd(w, grad, momentum, lr=0.1, momentum=0.9, name=[f"{w.name}.new", f"{w.name}.momentum.new"])
    r.update(w, new[0])
    r.update(momentum, new[1])


def identity(op: Op) -> Op:
    return replace(op, name="identity", attrs=())
