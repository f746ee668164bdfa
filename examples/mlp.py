"""A three-layer MLP on 8 devices: data parallel 2 × pipeline 2 × tensor parallel 2, two micro-batches, SGD with momentum.

python examples/mlp.py OUT      writes OUT/mlp.logical.json, OUT/mlp.plan.json and OUT/mlp.buggy.json
"""

import sys
from pathlib import Path

import trainverify as tv
from trainverify import files

BATCH, WIDTH, HIDDEN, OUT = 48, 1024, 4096, 512
MICRO = 2


def logical() -> tv.Program:
    """One device, the whole batch."""
    b = tv.program("mlp")
    x, t = b.input("x", (BATCH, WIDTH)), b.input("t", (BATCH, OUT))
    w0, w1, w2 = b.parameter("w0", (WIDTH, WIDTH)), b.parameter("w1", (HIDDEN, WIDTH)), b.parameter("w2", (OUT, HIDDEN))
    z = b.silu(b.linear(x, w0, name="u"), name="z")
    a = b.relu(b.linear(z, w1, name="h"), name="a")
    e = b.sub(b.linear(a, w2, name="y"), t, name="e")
    b.loss(b.mean(b.mul(e, e, name="sq"), name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.1, momentum=0.9))


def plan(forgotten: bool = False) -> tv.Plan:
    """w0 whole and w1 split by rows on stage 0, w2 split by columns on stage 1; activations travel split over tp."""
    p = tv.plan("mlp", tv.Mesh(dp=2, pp=2, tp=2))
    rows = BATCH // 2 // MICRO
    with p.ranks(pp=0) as r:
        w0 = r.parameter("w0", (WIDTH, WIDTH), "o k")
        w1 = r.parameter("w1", (HIDDEN // 2, WIDTH), "(tp o) k")
        sent = []
        for m in range(MICRO):
            x = r.input(f"x{m}", (rows, WIDTH), "(dp mb b) k", "x", fixed={"mb": (m, MICRO)})
            z = r.silu(r.linear(x, w0, name=f"u{m}"), name=f"z{m}")
            z = z if forgotten else r.copy(z, "tp", name=f"z{m}.tp")  # backward: all-reduce over tp
            sent.append(r.relu(r.linear(z, w1, name=f"h{m}"), name=f"a{m}"))
            r.send(sent[m], r.peer(pp=1))
        for m in range(MICRO):
            r.backward(sent[m], seeds=[r.recv(sent[m].shape, r.peer(pp=1), name=f"a{m}.grad")])
        update(r, w0, "o k")
        update(r, w1, "(tp o) k")
    with p.ranks(pp=1) as r:
        w2 = r.parameter("w2", (OUT, HIDDEN // 2), "o (tp k)")
        received, losses = [], []
        for m in range(MICRO):
            t = r.input(f"t{m}", (rows, OUT), "(dp mb b) k", "t", fixed={"mb": (m, MICRO)})
            received.append(r.recv((rows, HIDDEN // 2), r.peer(pp=0), name=f"a{m}"))
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
    """Average the gradient over dp, then SGD on what this rank holds."""
    r.phase = "optimizer"
    grad = r.all_reduce(r.gradient(w), group="dp", op="avg", name=f"{w.name}.grad.mean")
    r.output(grad, "gradient", w.name)
    momentum = r.state(f"{w.name}.momentum", w.shape, form)
    new = r.sgd(w, grad, momentum, lr=0.1, momentum=0.9, name=[f"{w.name}.new", f"{w.name}.momentum.new"])
    r.update(w, new[0])
    r.update(momentum, new[1])


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / "mlp.logical.json", logical())
    files.write(folder / "mlp.plan.json", plan())
    files.write(folder / "mlp.buggy.json", plan(forgotten=True))
