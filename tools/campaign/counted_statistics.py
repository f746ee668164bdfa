"""Statistics with counts as literals: means, variances, norms, pooling, balance; the counted axis is cut over ranks."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial

import trainverify as tv
from tools.campaign.counted import FEW, LENGTHS, MANY, Builder, Counted, Cut, Draw, Number, Tensor, around, mesh, over
from trainverify.graph.plan import Plan


def variance(d: Draw) -> Counted:
    """var or std against Σ (x − Σx/N)² / (N − 1), or against (Σx² − N·mean²) / (N − 1)."""
    c, k, spelled = d.cut(), d.small(), d.spelling()
    correction = d.rng.choice((1, 1, 0))
    root, two_passes = d.rng.random() < 0.25, d.rng.random() < 0.5

    b = tv.program("variance")
    x, v = b.input("x", (c.total, k)), b.input("v", (k,))
    b.loss(b.sum(b.mul((b.std if root else b.var)(x, dim=0, correction=correction), v), name="loss"))
    logical = b.build()

    def plan(count: int, less: int) -> Plan:
        p = tv.plan("variance", mesh(dp=c.ranks))
        with p.ranks() as r:
            x, v = r.input("x", (c.chunk, k), "(dp b) k"), r.input("v", (k,), "k")
            mean = over(r, r.all_reduce(r.sum(x, dim=0), group="dp"), count, spelled)
            if two_passes:
                squares = r.all_reduce(r.sum(r.square(r.sub(x, mean)), dim=0), group="dp")
            else:
                total = r.all_reduce(r.sum(r.square(x), dim=0), group="dp")
                squares = r.sub(total, r.mul(r.square(mean), value=count))
            spread = over(r, squares, less, spelled)
            r.loss(r.sum(r.mul(r.sqrt(spread) if root else spread, v), name="loss"))
        return p.build()

    n, less = c.total, c.total - correction
    wrong: dict[str, Callable[[], Plan]] = {f"N − {correction}: {t}": partial(plan, n, m) for t, m in around(less, dp=c.ranks).items()}
    if n < 100 or not two_passes:  # else a mean that is so little off hardly changes the squares
        wrong["mean over N − 1"] = lambda: plan(n - 1, less)
    wrong["mean over a rank's rows"] = lambda: plan(max(c.chunk, 1), less)
    wrong = {t: make for t, make in wrong.items() if not (root and t.startswith("mean over"))}  # roots of what may be negative
    return Counted("variance", logical, plan(n, less), wrong)


def weighted(d: Draw) -> Counted:
    """A weight over a count in one literal: the same float in both programs, a fraction, or (left open) a rounded float."""
    c, k, act = d.cut(), d.small(), d.activation()
    kind = d.rng.choice(("fraction", "same float", "same float", "rounded"))
    weight = d.rng.choice((0.3, 0.1, 0.7, 2.5))
    if kind == "rounded":
        d.open = d.open or "a float literal that is rounded"
    count = c.total * k

    def literal(n: Number) -> Number:
        return Fraction(weight) / Fraction(n) if kind == "fraction" else weight / float(n)

    b = tv.program("weighted")
    x = act(b, b.input("x", (c.total, k)), False)
    b.loss(b.mul(b.sum(x), value=literal(count)) if kind == "same float" else b.mul(b.mean(x), value=weight))
    logical = b.build()

    def plan(n: Number) -> Plan:
        p = tv.plan("weighted", mesh(dp=c.ranks))
        with p.ranks() as r:
            x = act(r, r.input("x", (c.chunk, k), "(dp b) k"), True)
            r.loss(r.all_reduce(r.mul(r.sum(x), value=literal(n)), group="dp", name="loss"))
        return p.build()

    wrong = {t: partial(plan, m) for t, m in around(count, dp=c.ranks).items()}
    return Counted("weight over count", logical, plan(count), wrong, d.open)


def norm(d: Draw) -> Counted:
    """RMS or layer norm over a hidden size that is cut over ranks: sums divided by the whole size."""
    c, rows, spelled = d.cut(huge=False), d.small(), d.spelling()
    centred = d.rng.random() < 0.5

    b = tv.program("norm")
    x, v = b.input("x", (rows, c.total)), b.input("v", (c.total,))
    b.loss(b.sum(b.mul(b.layer_norm(x) if centred else b.rms_norm(x), v), name="loss"))
    logical = b.build()

    def plan(count: int, mean_count: int) -> Plan:
        p = tv.plan("norm", mesh(tp=c.ranks))
        with p.ranks() as r:
            x, v = r.input("x", (rows, c.chunk), "b (tp h)"), r.input("v", (c.chunk,), "(tp h)")
            if centred:
                mean = over(r, r.all_reduce(r.sum(x, dim=1, keepdim=True), group="tp"), mean_count, spelled)
                x = r.sub(x, mean)
            squares = over(r, r.all_reduce(r.sum(r.square(x), dim=1, keepdim=True), group="tp"), count, spelled)
            y = r.mul(x, r.rsqrt(r.add(squares, value=1e-5 if centred else 1e-6)))
            r.loss(r.all_reduce(r.sum(r.mul(y, v)), group="tp", name="loss"))
        return p.build()

    n = c.total
    wrong = {f"squares: {t}": partial(plan, m, n) for t, m in around(n, tp=c.ranks).items()}
    if centred:
        wrong |= {f"mean: {t}": partial(plan, n, m) for t, m in around(n, tp=c.ranks).items()}
    return Counted("norm", logical, plan(n, n), wrong)


def synchronised_batch_norm(d: Draw) -> Counted:
    """Sums of all ranks with `count`, against batch norm."""
    c, channels = d.cut(), d.small()

    b = tv.program("batch norm")
    x, v = b.input("x", (c.total, channels)), b.input("v", (c.total, channels))
    y, _, spread = b.batch_norm(x)
    b.metric("spread", b.sum(spread))
    b.loss(b.sum(b.mul(y, v), name="loss"))
    logical = b.build()

    def plan(count: int) -> Plan:
        p = tv.plan("batch norm", mesh(dp=c.ranks))
        with p.ranks() as r:
            x, v = (r.input(n, (c.chunk, channels), "(dp b) c") for n in ("x", "v"))
            total, squares = (r.all_reduce(s, group="dp") for s in r.batch_norm_sums(x))
            y, _, spread = r.batch_norm_apply(x, total, squares, count=count)
            r.metric("spread", r.sum(spread))
            r.loss(r.all_reduce(r.sum(r.mul(y, v)), group="dp", name="loss"))
        return p.build()

    off = {t: n for t, n in around(c.total, dp=c.ranks).items() if n > c.total}  # else the variance may be negative
    left = "Σx² − N·mean² against Σ(x − mean)² in a norm"
    return Counted("batch norm", logical, plan(c.total), {t: partial(plan, n) for t, n in off.items()}, left)


def pooling(d: Draw) -> Counted:
    """Mean pooling over a sequence that is cut over ranks, then something that is not linear."""
    c, rows, k, act, spelled = d.cut(), d.small(), d.small(), d.activation(), d.spelling()

    b = tv.program("pooling")
    x = b.input("x", (rows, c.total, k))
    b.loss(b.sum(b.square(b.mean(act(b, x, False), dim=1)), name="loss"))
    logical = b.build()

    def plan(count: int) -> Plan:
        p = tv.plan("pooling", mesh(cp=c.ranks))
        with p.ranks() as r:
            x = r.input("x", (rows, c.chunk, k), "b (cp s) k")
            pooled = over(r, r.all_reduce(r.sum(act(r, x, True), dim=1), group="cp"), count, spelled)
            r.loss(r.sum(r.square(pooled), name="loss"))
        return p.build()

    return Counted("pooling", logical, plan(c.total), {t: partial(plan, n) for t, n in around(c.total, cp=c.ranks).items()}, d.open)


def balance(d: Draw) -> Counted:
    """The auxiliary loss of experts: weight · E · Σ load², loads averaged over tokens of all ranks; many tokens or many experts."""
    spelled = d.spelling()
    c, experts = (d.cut(most=9000), d.small(2)) if d.rng.random() < 0.6 else (Cut(d.rng.choice(FEW), d.small()), d.rng.choice(LENGTHS))
    weight = d.rng.choice((1, Fraction(1, 100), 0.5))

    def loss(b: Builder, load: Tensor, count: Number) -> Tensor:
        return b.mul(b.sum(b.square(load)), value=count)

    b = tv.program("balance")
    load = b.mean(b.softmax(b.input("x", (c.total, experts))), dim=0)
    b.loss(b.mul(b.div(b.mean(b.square(load)), value=Fraction(1, experts * experts)), value=weight))
    logical = b.build()

    def plan(rows: int, factor: Number) -> Plan:
        p = tv.plan("balance", mesh(dp=c.ranks))
        with p.ranks() as r:
            x = r.softmax(r.input("x", (c.chunk, experts), "(dp b) e"))
            load = over(r, r.all_reduce(r.sum(x, dim=0), group="dp"), rows, spelled)
            r.loss(loss(r, load, factor))
        return p.build()

    right = experts * Fraction(weight)
    wrong = {f"tokens: {t}": partial(plan, n, right) for t, n in around(c.total, dp=c.ranks).items()}
    wrong |= {f"experts: {t}": partial(plan, c.total, n * Fraction(weight)) for t, n in around(experts).items()}
    return Counted("balance", logical, plan(c.total, right), wrong)


def two_axes(d: Draw) -> Counted:
    """The mean over two long axes, one or both of them cut: sums divided by the product of their sizes."""
    act, spelled = d.activation(), d.spelling()
    if d.rng.random() < 0.5:
        rows, columns = Cut(d.rng.choice(MANY), 1), Cut(1, d.rng.choice((1023, 1365, 4096)))
    else:
        rows, columns = Cut(d.rng.choice((2, 3, 4)), 50), Cut(d.rng.choice((2, 3, 5)), 200)

    b = tv.program("two axes")
    b.loss(b.mean(act(b, b.input("x", (rows.total, columns.total)), False), name="loss"))
    logical = b.build()

    def plan(count: int) -> Plan:
        p = tv.plan("two axes", mesh(dp=rows.ranks, tp=columns.ranks))
        with p.ranks() as r:
            x = act(r, r.input("x", (rows.chunk, columns.chunk), "(dp b) (tp k)"), True)
            r.loss(over(r, r.all_reduce(r.sum(x), group=("dp", "tp")), count, spelled, "loss"))
        return p.build()

    right = rows.total * columns.total
    off = around(right, dp=rows.ranks, tp=max(columns.ranks, 2), rows=rows.total, columns=columns.total)
    off |= {"one row less": right - columns.total, "one column less": right - rows.total}
    return Counted("two axes", logical, plan(right), {t: partial(plan, n) for t, n in off.items()}, d.open)


FAMILIES = (variance, weighted, norm, synchronised_batch_norm, pooling, balance, two_axes)
