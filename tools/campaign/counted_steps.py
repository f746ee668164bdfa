"""Training steps with counts as literals: ranks, rows, tokens, micro-batches, loss scales."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial

import trainverify as tv
from tools.campaign.counted import (
    FEW,
    LENGTHS,
    MANY,
    MESHES,
    Builder,
    Counted,
    Cut,
    Draw,
    Number,
    Tensor,
    around,
    completed,
    finish,
    mesh,
    over,
    weight,
)
from trainverify.graph.plan import Plan


def step(d: Draw) -> Counted:
    """Local means or sums of squares, all-reduced, divided by the ranks or by the rows; a whole training step."""
    c, k, act, optimizer = d.cut(), d.small(), d.activation(), d.optimizer()
    how, spelled, average = d.rng.choice(("mean", "sum")), d.spelling(), d.rng.random() < 0.3
    count = c.ranks if how == "mean" else c.total

    def body(b: Builder, x: Tensor, t: Tensor, w: Tensor, plan: bool) -> Tensor:
        return b.square(b.sub(act(b, b.sum(b.mul(x, w), dim=1), plan), t))

    b = tv.program("step")
    x, t, w = b.input("x", (c.total, k)), b.input("t", (c.total,)), weight(b, "w", (k,), None, optimizer)
    b.loss(b.mean(body(b, x, t, w, False), name="loss"))
    logical = completed(b, optimizer)

    def plan(loss_count: int, grad_count: int) -> Plan:
        p = tv.plan("step", mesh(dp=c.ranks))
        with p.ranks() as r:
            x, t, w = r.input("x", (c.chunk, k), "(dp b) k"), r.input("t", (c.chunk,), "(dp b)"), weight(r, "w", (k,), "k", optimizer)
            local = getattr(r, how)(body(r, x, t, w, True))

            def whole(value: Tensor, n: int) -> Tensor:
                if average:  # the collective divides by the ranks
                    left = Fraction(n, c.ranks)
                    value = r.all_reduce(value, group="dp", op="avg")
                    return value if left == 1 else over(r, value, left, "share")
                return over(r, r.all_reduce(value, group="dp"), n, spelled)

            if optimizer is not None:
                r.backward(local)
                r.phase = "optimizer"
            r.loss(whole(local, loss_count))
            if optimizer is not None:
                finish(r, {"w": (w, "k")}, {"w": whole(r.gradient(w), grad_count)}, optimizer)
        return p.build()

    off = around(count, dp=c.ranks)
    wrong = {f"loss: {text}": partial(plan, n, count) for text, n in off.items()}
    if optimizer is not None:
        wrong |= {f"gradient: {text}": partial(plan, count, n) for text, n in off.items()}
        wrong |= {f"both: {text}": partial(plan, n, n) for text, n in off.items()}
    return Counted("step", logical, plan(count, count), wrong, d.open)


def mean_of_means(d: Draw) -> Counted:
    """Means of micro-batches, averaged over them and over two mesh axes, one after the other or together."""
    act, micro = d.activation(), d.rng.choice((1, 2, 3, 5))
    dp, cp = d.rng.choice(MESHES)
    rows, spelled, together = d.small(), d.spelling(), d.rng.random() < 0.5
    length = d.rng.choice((d.small(), d.small(), d.rng.choice(LENGTHS) // cp // 40 + 1))

    b = tv.program("means")
    x, w = b.input("x", (dp * micro * rows, cp * length)), b.parameter("w", (1,))
    b.loss(b.mean(act(b, b.mul(x, w), False), name="loss"))
    logical = completed(b, tv.SGD(lr=0.5))

    def plan(by_micro: int, by_dp: int, by_cp: int) -> Plan:
        p = tv.plan("means", mesh(dp=dp, cp=cp))
        with p.ranks() as r:
            w = r.parameter("w", (1,), "k")
            losses = []
            for m in range(micro):
                x = r.input(f"x{m}", (rows, length), "(dp mb b) (cp s)", "x", fixed={"mb": (m, micro)})
                losses.append(r.mean(act(r, r.mul(x, w), True)))

            def whole(value: Tensor) -> Tensor:
                if together:
                    return over(r, r.all_reduce(value, group=("dp", "cp")), by_micro * by_dp * by_cp, spelled)
                value = over(r, r.all_reduce(over(r, value, by_micro, spelled), group="cp"), by_cp, spelled)
                return over(r, r.all_reduce(value, group="dp"), by_dp, spelled)

            for loss in losses:
                r.backward(loss)
            r.phase = "optimizer"
            total = losses[0]
            for loss in losses[1:]:
                total = r.add(total, loss)
            r.loss(whole(total))
            finish(r, {"w": (w, "k")}, {"w": whole(r.gradient(w))}, tv.SGD(lr=0.5))
        return p.build()

    wrong: dict[str, Callable[[], Plan]] = {}
    for text, n in around(dp, cp=cp, mb=micro).items():
        wrong[f"dp: {text}"] = partial(plan, micro, n, cp)
    for text, n in around(cp, dp=dp).items():
        wrong[f"cp: {text}"] = partial(plan, micro, dp, n)
    for text, n in around(micro).items() if micro > 1 else ():
        wrong[f"micro-batches: {text}"] = partial(plan, n, dp, cp)
    return Counted("mean of means", logical, plan(micro, dp, cp), wrong, d.open)


def tokens(d: Draw) -> Counted:
    """Cross entropy: a sum over all tokens divided by their number, against the mean; many classes, or many tokens."""
    hidden, optimizer, spelled = d.small(), d.optimizer(), d.spelling()
    micro = d.rng.choice((1, 1, 2, 3))
    if d.rng.random() < 0.5:
        c, classes = Cut(d.rng.choice(FEW), d.small()), d.rng.choice(LENGTHS)
        hidden = 1
    else:
        c, classes = d.cut(most=9000), d.small(2)
    smoothing = d.rng.choice((0, 0, 0.125)) if micro == 1 else 0
    rows = c.ranks * micro * c.chunk
    by_hand = smoothing != 0 and d.rng.random() < 0.7

    b = tv.program("tokens")
    x, t, w = b.input("x", (rows, hidden)), b.input("t", (rows,), "i64", ids=classes), weight(b, "w", (classes, hidden), None, optimizer)
    b.loss(b.cross_entropy(b.linear(x, w), t, label_smoothing=smoothing, name="loss"))
    logical = completed(b, optimizer)

    def plan(loss_count: int, grad_count: int, spread: int) -> Plan:
        p = tv.plan("tokens", mesh(dp=c.ranks))
        with p.ranks() as r:
            w = weight(r, "w", (classes, hidden), "v h", optimizer)
            losses = []
            for m in range(micro):
                fixed = {"mb": (m, micro)}
                x = r.input(f"x{m}", (c.chunk, hidden), "(dp mb b) h", "x", fixed=fixed)
                t = r.input(f"t{m}", (c.chunk,), "(dp mb b)", "t", dtype="i64", ids=classes, fixed=fixed)
                logits = r.linear(x, w)
                if by_hand:
                    scores = r.log_softmax(logits)
                    even = r.mul(r.sum(scores), value=Fraction(-1, 8 * spread))
                    losses.append(r.add(r.mul(r.nll_loss(scores, t, reduction="sum"), value=0.875), even))
                else:
                    losses.append(r.cross_entropy(logits, t, reduction="sum", label_smoothing=smoothing))
            total = losses[0]
            for loss in losses[1:]:
                total = r.add(total, loss)

            def whole(value: Tensor, n: int) -> Tensor:
                return over(r, r.all_reduce(value, group="dp"), n, spelled)

            if optimizer is not None:
                for loss in losses:
                    r.backward(loss)
                r.phase = "optimizer"
            r.loss(whole(total, loss_count))
            if optimizer is not None:
                finish(r, {"w": (w, "v h")}, {"w": whole(r.gradient(w), grad_count)}, optimizer)
        return p.build()

    off = around(rows, dp=c.ranks, mb=micro)
    wrong = {f"loss: {text}": partial(plan, n, rows, classes) for text, n in off.items()}
    if optimizer is not None:
        wrong |= {f"gradient: {text}": partial(plan, rows, n, classes) for text, n in off.items()}
    if by_hand:
        wrong |= {f"classes: {text}": partial(plan, rows, rows, n) for text, n in around(classes).items() if text != "divided twice"}
    return Counted("tokens", logical, plan(rows, rows, classes), wrong)


def regulariser(d: Draw) -> Counted:
    """A penalty that every rank computes whole, all-reduced with the local losses and divided with them, or added afterwards."""
    c, k, act, spelled = d.cut(), d.small(), d.activation(), d.spelling()
    rate = d.rng.choice((Fraction(3, 10), 0.5, 0.01, 2))
    inside = d.rng.random() < 0.6

    b = tv.program("penalty")
    x, w = b.input("x", (c.total, k)), b.parameter("w", (k,))
    fit, penalty = b.mean(act(b, b.mul(x, w), False)), b.mul(b.sum(b.square(w)), value=rate)
    b.loss(b.add(fit, penalty, name="loss"))
    logical = completed(b, tv.SGD(lr=0.5))

    def plan(ranks: int, weight: Number) -> Plan:
        p = tv.plan("penalty", mesh(dp=c.ranks))
        with p.ranks() as r:
            x, w = r.input("x", (c.chunk, k), "(dp b) k"), r.parameter("w", (k,), "k")
            fit, penalty = r.mean(act(r, r.mul(x, w), True)), r.mul(r.sum(r.square(w)), value=weight)
            local = r.add(fit, penalty) if inside else fit
            r.backward(local)
            mine = r.take_gradient(w)
            if not inside:
                r.backward(penalty)
                own = r.take_gradient(w)
            r.phase = "optimizer"
            loss, grad = (over(r, r.all_reduce(v, group="dp"), ranks, spelled) for v in (local, mine))
            if not inside:
                loss, grad = r.add(loss, penalty), r.add(grad, own)
            r.loss(loss)
            finish(r, {"w": (w, "k")}, {"w": grad}, tv.SGD(lr=0.5))
        return p.build()

    wrong: dict[str, Callable[[], Plan]] = {}
    for text, n in around(c.ranks).items():
        wrong[f"ranks: {text}"] = partial(plan, n, rate)
    wrong["the penalty of every rank"] = lambda: plan(c.ranks, Fraction(rate) * c.ranks)
    wrong["the penalty divided by the ranks"] = lambda: plan(c.ranks, Fraction(rate) / c.ranks)
    wrong["the penalty doubled"] = lambda: plan(c.ranks, 2 * Fraction(rate))
    return Counted("regulariser", logical, plan(c.ranks, rate), wrong, d.open)


def scaled_loss(d: Draw) -> Counted:
    """Gradients of a scaled loss, divided by scale and ranks (or rows) in one literal."""
    c, k, spelled = d.cut(), d.small(), d.spelling()
    scale = d.rng.choice((65536, 1024, 3000, 4096.0))
    act = d.activation()

    b = tv.program("scaled")
    x, w = b.input("x", (c.total, k)), b.parameter("w", (k,))
    b.loss(b.mean(b.sum(act(b, b.mul(x, w), False), dim=1), name="loss"))
    optimizer = d.optimizer() or tv.SGD(lr=0.5)
    logical = completed(b, optimizer)

    def plan(count: int) -> Plan:
        p = tv.plan("scaled", mesh(dp=c.ranks))
        with p.ranks() as r:
            x, w = r.input("x", (c.chunk, k), "(dp b) k"), r.parameter("w", (k,), "k")
            local = r.sum(act(r, r.mul(x, w), True))
            r.backward(r.mul(local, value=scale))
            r.phase = "optimizer"
            r.loss(over(r, r.all_reduce(local, group="dp"), c.total, spelled))
            finish(r, {"w": (w, "k")}, {"w": over(r, r.all_reduce(r.gradient(w), group="dp"), count, spelled)}, optimizer)
        return p.build()

    right = int(scale) * c.total
    off = around(right, dp=c.ranks, scale=int(scale), rows=c.total)
    off["one row more"], off["one row less"] = right + int(scale), right - int(scale)
    off = {text: n for text, n in off.items() if text not in ("one more", "one less", "divided twice") and n > 0}
    return Counted("scaled loss", logical, plan(right), {text: partial(plan, n) for text, n in off.items()}, d.open)


def uneven(d: Draw) -> Counted:
    """Rows that ranks do not share evenly: every rank weighs its mean by its share of the rows."""
    ranks, k, act = d.rng.choice((2, 3, 4, 5)), d.small(), d.activation()
    chunk = d.rng.choice(LENGTHS) // ranks
    rows = ranks * chunk - d.rng.randint(1, min(ranks, chunk) - 1) if ranks > 2 else 2 * chunk - 1
    chunk = -(-rows // ranks)
    sizes = [min(rows, (i + 1) * chunk) - i * chunk for i in range(ranks)]
    spelled = d.spelling()

    b = tv.program("uneven")
    x, w = b.input("x", (rows, k)), b.parameter("w", (k,))
    b.loss(b.mean(act(b, b.mul(x, w), False), name="loss"))
    logical = completed(b, tv.SGD(lr=0.5))

    def plan(weigh: Callable[[int], Fraction]) -> Plan:
        p = tv.plan("uneven", mesh(dp=ranks))
        for i, own in enumerate(sizes):
            with p.ranks(dp=i) as r:
                x, w = r.input("x", (own, k), {"dp": tv.Shard(0)}), r.parameter("w", (k,), "k")
                part = over(r, r.mean(act(r, r.mul(x, w), True)), 1 / weigh(own), "share" if spelled == "float" else spelled)
                r.backward(part)
                r.phase = "optimizer"
                r.loss(r.all_reduce(part, group="dp"))
                finish(r, {"w": (w, "k")}, {"w": r.all_reduce(r.gradient(w), group="dp")}, tv.SGD(lr=0.5))
        return p.build()

    wrong = {
        "shares of even rows": lambda: plan(lambda own: Fraction(1, ranks)),
        "not weighed": lambda: plan(lambda own: Fraction(1)),
        "one row more": lambda: plan(lambda own: Fraction(own + 1, rows)),
        "one row less in total": lambda: plan(lambda own: Fraction(own, rows - 1)),
        "divided by the ranks too": lambda: plan(lambda own: Fraction(own, rows * ranks)),
    }
    return Counted("uneven rows", logical, plan(lambda own: Fraction(own, rows)), wrong, d.open)


def uneven_micro(d: Draw) -> Counted:
    """Micro-batches of unequal token counts: their means weighed by these counts."""
    ranks, k, act, spelled = d.rng.choice((*FEW, *MANY)), d.small(), d.activation(), d.spelling()
    first = d.rng.choice((1, 2)) if ranks in MANY else d.rng.choice(LENGTHS) // ranks
    second = first + d.rng.choice((1, 2))
    own = first + second
    sizes = (first, second)

    b = tv.program("micro")
    x, w = b.input("x", (ranks * own, k)), b.parameter("w", (k,))
    b.loss(b.mean(act(b, b.mul(x, w), False), name="loss"))
    logical = completed(b, tv.SGD(lr=0.5))

    def plan(shares: tuple[Fraction, Fraction]) -> Plan:
        p = tv.plan("micro", mesh(dp=ranks))
        with p.ranks() as r:
            x, w = r.input("x", (own, k), "(dp b) k"), r.parameter("w", (k,), "k")
            begin, parts = 0, []
            for size, share in zip(sizes, shares, strict=True):
                piece = r.slice(x, dim=0, start=begin, stop=begin + size)
                parts.append(r.mul(r.mean(act(r, r.mul(piece, w), True)), value=share))
                begin += size
            for part in parts:
                r.backward(part)
            r.phase = "optimizer"
            loss, grad = (over(r, r.all_reduce(v, group="dp"), ranks, spelled) for v in (r.add(*parts), r.gradient(w)))
            r.loss(loss)
            finish(r, {"w": (w, "k")}, {"w": grad}, tv.SGD(lr=0.5))
        return p.build()

    a, z = Fraction(first, own), Fraction(second, own)
    wrong = {
        "shares of even micro-batches": lambda: plan((Fraction(1, 2), Fraction(1, 2))),
        "shares exchanged": lambda: plan((z, a)),
        "not weighed": lambda: plan((Fraction(1), Fraction(1))),
        "one token more": lambda: plan((Fraction(first + 1, own), z)),
        "divided by micro-batches too": lambda: plan((a / 2, z / 2)),
    }
    return Counted("uneven micro-batches", logical, plan((a, z)), wrong, d.open)


FAMILIES = (step, step, mean_of_means, tokens, tokens, regulariser, scaled_loss, uneven, uneven_micro)
