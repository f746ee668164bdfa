"""A small model and its plans, right and wrong."""

from __future__ import annotations

import trainverify as tv


def model() -> tv.Program:
    b = tv.program("model")
    x, w = b.input("x", (6, 10)), b.parameter("w", (4, 10))
    b.loss(b.mean(b.square(b.linear(x, w, name="y"), name="sq"), name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.5))


def plan(op: str = "avg") -> tv.Plan:
    p = tv.plan("plan", tv.Mesh(dp=3))
    with p.ranks() as r:
        x, w = r.input("x", (2, 10), "(dp b) k"), r.parameter("w", (4, 10), "o k")
        loss = r.mean(r.square(r.linear(x, w, name="y"), name="sq"), name="loss.local")
        r.backward(loss)
        r.loss(r.all_reduce(loss, group="dp", op="avg", name="loss"))
        grad = r.all_reduce(r.gradient(w), group="dp", op=op, name="w.grad.mean")
        r.output(grad, "gradient", "w")
        r.update(w, r.sgd(w, grad, lr=0.5, name="w.new"))
    return p.build()
