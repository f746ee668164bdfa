"""Attention under context parallelism by an exchange of heads and positions (Ulysses), by hand; right, or with one wrong transpose."""

from __future__ import annotations

from typing import Literal

import trainverify as tv

Mistake = Literal["none", "there", "back"]  # positions of the ranks mixed on the way there, or on the way back
BATCH, HEADS, HEAD, WIDTH = 2, 4, 3, 5


def logical(positions: int) -> tv.Program:
    p = tv.program("attention")
    x, t = p.input("x", (BATCH, positions, WIDTH)), p.input("t", (BATCH, positions, WIDTH))
    wi, wo = p.parameter("wi", (HEADS * HEAD, WIDTH)), p.parameter("wo", (WIDTH, HEADS * HEAD))
    q = p.permute(p.reshape(p.linear(x, wi), shape=(BATCH, positions, HEADS, HEAD)), dims=(0, 2, 1, 3))
    o = p.matmul(p.softmax(p.matmul(q, p.transpose(q, dim0=2, dim1=3)), dim=3), q)
    joined = p.reshape(p.permute(o, dims=(0, 2, 1, 3)), shape=(BATCH, positions, HEADS * HEAD))
    loss = p.sum(p.mul(p.linear(joined, wo), t), name="loss")
    p.loss(loss)
    p.backward(loss)
    for w in (wi, wo):
        p.output(p.gradient(w), "gradient", w.name)
        p.update(w, p.sgd(w, p.gradient(w), lr=0.5))
    return p.program()


def plan(positions: int, mistake: Mistake = "none", cp: int = 2) -> tv.Plan:
    p = tv.plan("ulysses", tv.Mesh(cp=cp))
    own, heads = positions // cp, HEADS // cp
    with p.ranks() as r:
        x, t = (r.input(n, (BATCH, own, WIDTH), "b (cp s) k") for n in ("x", "t"))
        wi, wo = r.parameter("wi", (HEADS * HEAD, WIDTH), "h k"), r.parameter("wo", (WIDTH, HEADS * HEAD), "k h")
        q = r.permute(r.reshape(r.linear(x, wi), shape=(BATCH, own, cp, heads, HEAD)), dims=(2, 1, 0, 3, 4))
        q = r.all_to_all(q, group="cp", split_dim=0, concat_dim=0, backward="all_to_all", name="exchanged")  # sender, position, …
        if mistake == "there":
            q = r.transpose(q, dim0=0, dim1=1, name="mixed")
        q = r.permute(r.reshape(q, shape=(positions, BATCH, heads, HEAD)), dims=(1, 2, 0, 3))
        o = r.matmul(r.softmax(r.matmul(q, r.transpose(q, dim0=2, dim1=3)), dim=3), q)
        o = r.permute(o, dims=(2, 0, 1, 3))
        if mistake == "back":
            o = r.transpose(r.reshape(o, shape=(own, cp, BATCH, heads, HEAD)), dim0=0, dim1=1, name="mixed")
        else:
            o = r.reshape(o, shape=(cp, own, BATCH, heads, HEAD))
        o = r.all_to_all(o, group="cp", split_dim=0, concat_dim=0, backward="all_to_all", name="returned")
        joined = r.reshape(r.permute(o, dims=(2, 1, 0, 3, 4)), shape=(BATCH, own, HEADS * HEAD))
        part = r.sum(r.mul(r.linear(joined, wo), t), name="part")
        r.loss(r.all_reduce(part, group="cp", name="loss"))
        r.backward(part)
        for w in (wi, wo):
            grad = r.all_reduce(r.gradient(w), group="cp")
            r.output(grad, "gradient", w.name)
            r.update(w, r.sgd(w, grad, lr=0.5))
    return p.build()
