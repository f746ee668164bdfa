"""A two-layer MLP on 8 devices: data parallel 2 × pipeline 2 × tensor parallel 2, two micro-batches, SGD with momentum.

python examples/mlp.py OUT      writes OUT/mlp.logical.json and OUT/mlp.plan.json
"""

import trainverify as tv

BATCH, WIDTH, HIDDEN, OUT = 48, 1024, 4096, 512
MICRO = 2


def logical() -> tv.Program:
    """One device, the whole batch."""
    b = tv.program("mlp")
    x = b.input("x", (BATCH, WIDTH))
    t = b.input("t", (BATCH, OUT))
    w1 = b.parameter("w1", (HIDDEN, WIDTH))
    w2 = b.parameter("w2", (OUT, HIDDEN))
    h = b.relu(b.linear(x, w1, name="h"), name="a")
    e = b.sub(b.linear(h, w2, name="y"), t, name="e")
    b.loss(b.mean(b.mul(e, e, name="sq"), name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.1, momentum=0.9))


def plan() -> tv.Plan:
    """w1 on stage 0 and w2 on stage 1, each split over tp; activations travel split over tp."""
    p = tv.plan("mlp", tv.Mesh(dp=2, pp=2, tp=2))
    rows = BATCH // 2 // MICRO
    with p.ranks(pp=0) as r:
        w1 = r.parameter("w1", (HIDDEN // 2, WIDTH), "(tp o) k")
        sent = []
        for m in range(MICRO):
            x = r.input(f"x{m}", (rows, WIDTH), "(dp mb b) k", "x", fixed={"mb": (m, MICRO)})
            h = r.relu(r.linear(x, w1, name=f"h{m}"), name=f"a{m}")
            r.send(h, r.peer(pp=1))
            sent.append(h)
        for m in range(MICRO):
            r.backward(sent[m], seeds=[r.recv(sent[m].shape, r.peer(pp=1), name=f"a{m}.grad")])
        step(r, w1, "(tp o) k")
    with p.ranks(pp=1) as r:
        w2 = r.parameter("w2", (OUT, HIDDEN // 2), "o (tp k)")
        losses = []
        for m in range(MICRO):
            t = r.input(f"t{m}", (rows, OUT), "(dp mb b) k", "t", fixed={"mb": (m, MICRO)})
            h = r.recv((rows, HIDDEN // 2), r.peer(pp=0), name=f"a{m}")
            y = r.all_reduce(r.linear(h, w2, name=f"y{m}.part"), group="tp", backward="identity", name=f"y{m}")
            e = r.sub(y, t, name=f"e{m}")
            losses.append((h, r.mul(r.mean(r.mul(e, e), name=f"mean{m}"), value=1 / MICRO, name=f"loss{m}")))
        for h, loss in losses:
            (g,) = r.backward(loss, wrt=[h])
            r.send(g, r.peer(pp=0))
        r.loss(r.all_reduce(r.add(losses[0][1], losses[1][1]), group="dp", op="avg", name="loss"))
        step(r, w2, "o (tp k)")
    return p.build()


def step(r, w, form) -> None:
    """Average the gradient over dp, then SGD on the shard."""
    r.phase = "optimizer"
    grad = r.all_reduce(r.gradient(w), group="dp", op="avg", name=f"{w.name}.grad.synced")
    r.output(grad, "gradient", w.name)
    buffer = r.state(f"{w.name}.momentum", w.shape, form)
    new, fresh = r.sgd(w, grad, buffer, lr=0.1, momentum=0.9, name=[f"{w.name}.new", f"{w.name}.momentum.new"])
    r.update(w, new)
    r.update(buffer, fresh)


if __name__ == "__main__":
    print(logical())
    p = plan()
    for t in p.templates:
        print(t.program)
        print(t.bindings)
    print(p.groups)
    for l in p.lineage:
        print(l)
