"""A small model with batch norm, and data-parallel plans of it: synchronised, or each rank by its own rows."""

from __future__ import annotations

from fractions import Fraction

import trainverify as tv
from trainverify.build.plan import RankBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program

ROWS, WIDTH, CHANNELS = 24, 5, 3
MOMENTUM = Fraction(0.1)
NAMES = ["n", "mean", "var", "m.new", "v.new"]


def forward(running: bool = True) -> Program:
    b = tv.program("net")
    x, y = b.input("x", (ROWS, WIDTH)), b.input("y", (ROWS, CHANNELS))
    w, g, s = b.parameter("w", (CHANNELS, WIDTH)), b.parameter("g", (CHANNELS,)), b.parameter("s", (CHANNELS,))
    h = b.linear(x, w, name="h")
    if running:
        m, v = b.state("m", (CHANNELS,)), b.state("v", (CHANNELS,), domain="nonnegative")
        n, _, _, new_m, new_v = b.batch_norm(h, g, s, m, v, name=NAMES)
        b.update(m, new_m)
        b.update(v, new_v)
    else:
        n, _, _ = b.batch_norm(h, g, s, name=NAMES[:3])
    b.loss(b.mean(b.square(b.sub(n, y, name="e"), name="squares"), name="loss"))
    b.metric("size", b.sum(b.square(h, name="h2"), name="size"))
    return b.build()


def step(running: bool = True, weight: float | None = None) -> Program:
    """With a weight, the metric is differentiated too."""
    return tv.complete(forward(running), tv.SGD(lr=0.5), auxiliary={} if weight is None else {"size": weight})


def plan(dp: int = 4, local: bool = True, layout: str = "c", allow: str | None = None, weight: float | None = None) -> Plan:
    p = tv.plan("net", tv.Mesh(dp=dp))
    if allow is not None:
        p.allow(allow)
    with p.ranks() as r:
        x, y = r.input("x", (ROWS // dp, WIDTH), "(dp b) k"), r.input("y", (ROWS // dp, CHANNELS), "(dp b) c")
        w, g, s = r.parameter("w", (CHANNELS, WIDTH), "c k"), r.parameter("g", (CHANNELS,), "c"), r.parameter("s", (CHANNELS,), "c")
        m, v = r.state("m", (CHANNELS,), layout), r.state("v", (CHANNELS,), layout, domain="nonnegative")
        h = r.linear(x, w, name="h")
        n = normed(r, h, g, s, m, v) if local else synchronised(r, dp, h, g, s, m, v)
        own = r.mean(r.square(r.sub(n, y, name="e"), name="squares"), name="loss.own")
        size = r.sum(r.square(h, name="h2"), name="size.part")
        r.metric("size", r.all_reduce(size, group="dp", name="size"))
        objective = r.mul(own, value=1 / dp, name="loss.share")
        if weight is not None:
            objective = r.add(objective, r.mul(size, value=weight, name="size.weighted"), name="objective")
        r.backward(objective)
        r.loss(r.all_reduce(own, group="dp", op="avg", name="loss"))
        for t in (w, g, s):
            grad = r.all_reduce(r.gradient(t), group="dp", name=f"{t.name}.grad.dp")
            r.output(grad, "gradient", t.name)
            r.update(t, r.sgd(t, grad, lr=0.5, name=f"{t.name}.new"))
    return p.build()


def normed(r: RankBuilder, h: Tensor, g: Tensor, s: Tensor, m: Tensor, v: Tensor) -> Tensor:
    n, _, _, new_m, new_v = r.batch_norm(h, g, s, m, v, name=NAMES)
    r.update(m, new_m)
    r.update(v, new_v)
    return n  # type: ignore[no-any-return]


def synchronised(r: RankBuilder, dp: int, h: Tensor, g: Tensor, s: Tensor, m: Tensor, v: Tensor) -> Tensor:
    """Sums over all ranks' rows, forward and backward."""
    total = r.all_reduce(r.sum(h, dim=0, name="sum.part"), group="dp", backward="all_reduce", name="sum")
    mean = r.div(total, value=ROWS, name="mean")
    centred = r.sub(h, mean, name="centred")
    squares = r.all_reduce(
        r.sum(r.square(centred, name="centred2"), dim=0, name="squares.part"), group="dp", backward="all_reduce", name="sq"
    )
    root = r.rsqrt(r.add(r.div(squares, value=ROWS, name="var"), value=1e-5, name="var.eps"), name="root")
    for old, new in ((m, mean), (v, r.div(squares, value=ROWS - 1, name="unbiased"))):
        share = r.mul(r.detach(new, name=f"{old.name}.now"), value=MOMENTUM, name=f"{old.name}.share")
        r.update(old, r.add(r.mul(old, value=1 - MOMENTUM, name=f"{old.name}.kept"), share, name=f"{old.name}.new"))
    scaled = r.mul(r.mul(centred, root, name="normed"), g, name="scaled")
    return r.add(scaled, s, name="n")  # type: ignore[no-any-return]
