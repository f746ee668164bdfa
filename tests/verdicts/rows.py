"""Experts under ep × tp at real widths: every rank takes the rows of its own experts out of a batch that all ranks hold."""

from __future__ import annotations

from collections.abc import Callable

import trainverify as tv

ROWS, HIDDEN, FFN, EXPERTS, EP, TP = 4096, 2048, 8192, 8, 4, 2
OWN = ROWS // EP
Start = Callable[[dict[str, int]], int]  # where a rank's rows begin, by its coordinates


def right(at: dict[str, int]) -> int:
    return at["ep"] * OWN


def logical() -> tv.Program:
    p = tv.program("experts")
    x, t = p.input("x", (ROWS, HIDDEN)), p.input("t", (ROWS, HIDDEN))
    up, down = p.parameter("up", (EXPERTS, HIDDEN, FFN)), p.parameter("down", (EXPERTS, FFN, HIDDEN))
    y = p.matmul(p.gelu(p.matmul(p.reshape(x, shape=(EXPERTS, ROWS // EXPERTS, HIDDEN)), up)), down)
    loss = p.sum(p.mul(p.reshape(y, shape=(ROWS, HIDDEN)), t), name="loss")
    p.loss(loss)
    p.backward(loss)
    for w in (up, down):
        p.output(p.gradient(w), "gradient", w.name)
        p.update(w, p.sgd(w, p.gradient(w), lr=0.5))
    return p.program()


def plan(*starts: Start) -> tv.Plan:
    """Rows that begin at the first start; after that, of twice as many rows, at the others one after the other."""
    p = tv.plan("experts", tv.Mesh(ep=EP, tp=TP))
    own = EXPERTS // EP
    with p.ranks() as r:
        x, t = r.input("x", (ROWS, HIDDEN), "t h"), r.input("t", (ROWS, HIDDEN), "t h")
        up = r.parameter("up", (own, HIDDEN, FFN // TP), "(ep e) h (tp f)")
        down = r.parameter("down", (own, FFN // TP, HIDDEN), "(ep e) (tp f) h")
        for n, start in enumerate(starts):
            size = OWN if n == len(starts) - 1 else 2 * OWN
            x = r.slice(x, dim=0, start=r.each(start), stop=r.each(lambda at, s=start, z=size: s(at) + z), name="rows")  # type: ignore[misc]
        t = r.slice(t, dim=0, start=r.each(right), stop=r.each(lambda at: right(at) + OWN), name="targets")
        y = r.matmul(r.gelu(r.matmul(r.reshape(x, shape=(own, OWN // own, HIDDEN)), up)), down)
        y = r.all_reduce(y, group="tp", backward="identity")
        part = r.sum(r.mul(r.reshape(y, shape=(OWN, HIDDEN)), t), name="part")
        r.loss(r.all_reduce(part, group="ep", name="loss"))
        r.backward(part)
        for w in (up, down):
            r.output(r.gradient(w), "gradient", w.name)
            r.update(w, r.sgd(w, r.gradient(w), lr=0.5))
    return p.build()
