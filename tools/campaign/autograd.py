"""A second way to random plans: layers written by hand as trainers do, backward by per-rank reverse mode.

Data × tensor parallel with micro-batches; tensor-parallel layers keep activations whole (all_reduce) or cut by rows
(sequence parallel: all_gather and reduce_scatter). Every collective names its backward.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Final, Literal

import trainverify as tv
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program

Tensor = Any
Kind = Literal["tensor", "norm", "dense", "residual"]
ACTIVATIONS: Final = ("silu", "relu", "gelu", "tanh")


@dataclass(frozen=True)
class Layer:
    kind: Kind
    act: str
    hidden: int
    rows: bool  # whether activations are cut by rows before it, in the plan


@dataclass(frozen=True)
class Model:
    layers: tuple[Layer, ...]
    rows: int  # of one micro-batch on one data-parallel rank
    width: int
    dp: int
    tp: int
    micro: int
    mean: bool
    adam: bool

    @property
    def mesh(self) -> Mesh:
        return Mesh(dp=self.dp, tp=self.tp)


def model(rng: random.Random) -> Model:
    tp = rng.choice([2, 2, 3, 4])
    kinds: list[Kind] = ["tensor", "tensor", "norm", "dense", "residual"]
    layers = [
        Layer(rng.choice(kinds), rng.choice(ACTIVATIONS), tp * rng.choice([3, 5, 6]), rng.random() < 0.5) for _ in range(rng.randint(1, 4))
    ]
    if all(x.kind == "residual" for x in layers):
        layers.append(Layer("tensor", "silu", tp * 4, False))
    dp, micro = rng.choice([1, 2, 2, 3]), rng.choice([1, 1, 2, 3])
    return Model(tuple(layers), tp * rng.choice([2, 3, 5]), rng.choice([7, 10, 12]), dp, tp, micro, rng.random() < 0.6, rng.random() < 0.5)


def case(rng: random.Random) -> tuple[Program, Plan]:
    if rng.random() < 0.25:
        return uneven(rng)
    m = model(rng)
    return logical(m), plan(m)


def uneven(rng: random.Random) -> tuple[Program, Plan]:
    """Rows that do not divide: every data-parallel rank has a program of its own, and its share of the mean."""
    dp, width, out = rng.choice([2, 3, 4]), rng.choice([5, 6, 9]), rng.choice([4, 7])
    rows = dp * rng.choice([3, 4]) + rng.randint(1, dp - 1) if dp > 2 else 2 * rng.choice([3, 4]) + 1
    act, mean, token = rng.choice(ACTIVATIONS), rng.random() < 0.6, rng.random() < 0.5

    def loss(b: Any, y: Tensor, t: Tensor) -> Tensor:
        if token:
            return b.cross_entropy(y, t, reduction="sum")
        e = b.sub(y, t)
        return b.sum(b.mul(e, e))

    target: dict[str, Any] = {"dtype": "i64", "ids": out} if token else {}
    shape = () if token else (out,)
    b = tv.program("uneven")
    x, t = b.input("x", (rows, width)), b.input("t", (rows, *shape), **target)
    w, v = b.parameter("w", (out, width)), b.parameter("v", (width,))
    total = loss(b, b.linear(getattr(b, act)(b.mul(x, v)), w), t)
    b.loss(b.div(total, value=rows) if mean else total)
    step = tv.complete(b.build(), tv.SGD(lr=0.1))

    p = tv.plan("uneven", Mesh(dp=dp))
    chunk = -(-rows // dp)
    for i in range(dp):
        own = max(0, min(rows, (i + 1) * chunk) - i * chunk)
        with p.ranks(dp=i) as r:
            x = r.input("x", (own, width), {"dp": tv.Shard(0)})
            t = r.input("t", (own, *shape), {"dp": tv.Shard(0)}, **target)
            w, v = r.parameter("w", (out, width), "o k"), r.parameter("v", (width,), "k")
            part = loss(r, r.linear(getattr(r, act)(r.mul(x, v)), w), t)
            part = r.div(part, value=rows) if mean else part
            r.backward(part)
            r.phase = "optimizer"
            r.loss(r.all_reduce(part, group="dp"))
            for weight in (w, v):
                grad = r.all_reduce(r.gradient(weight), group="dp")
                r.output(grad, "gradient", weight.name)
                r.update(weight, r.sgd(weight, grad, lr=0.1))
    return step, p.build()


def logical(m: Model) -> Program:
    b = tv.program("layers")
    rows = m.rows * m.dp * m.micro
    x, t = b.input("x", (rows, m.width)), b.input("t", (rows, m.width))
    y, first = x, x
    for i, layer in enumerate(m.layers):
        if layer.kind == "tensor":
            wa, wb = b.parameter(f"a{i}", (layer.hidden, m.width)), b.parameter(f"b{i}", (m.width, layer.hidden))
            y = b.linear(getattr(b, layer.act)(b.linear(y, wa)), wb)
        elif layer.kind == "norm":
            y = b.rms_norm(y, b.parameter(f"n{i}", (m.width,)))
        elif layer.kind == "dense":
            y = getattr(b, layer.act)(b.linear(y, b.parameter(f"d{i}", (m.width, m.width))))
        else:
            y = b.add(y, first)
    e = b.sub(y, t)
    b.loss((b.mean if m.mean else b.sum)(b.mul(e, e)))
    optimizer = tv.AdamW(lr=0.01) if m.adam else tv.SGD(lr=0.1, momentum=0.9)
    return tv.complete(b.build(), optimizer)


def plan(m: Model) -> Plan:
    p = tv.plan("layers", m.mesh)
    with p.ranks() as r:
        weights: dict[str, tuple[Tensor, str]] = {}
        over_rows: set[str] = set()  # used on rows of one's own: their gradients are shares over tp

        def weight(name: str, shape: tuple[int, ...], form: str) -> Tensor:
            if name not in weights:
                weights[name] = (r.parameter(name, shape, form), form)
            return weights[name][0]

        def part(x: Tensor) -> Tensor:
            """Own rows of what every tp rank has."""
            own = m.rows // m.tp
            low, high = r.each(lambda at: at["tp"] * own), r.each(lambda at: (at["tp"] + 1) * own)
            return r.slice(r.copy(x, "tp"), dim=0, start=low, stop=high)

        def whole(x: Tensor) -> Tensor:
            return r.all_gather(x, group="tp", dim=0, backward="slice")

        losses = []
        for k in range(m.micro):
            fixed = {"mb": (k, m.micro)}
            x = r.input(f"x{k}", (m.rows, m.width), "(dp mb b) k", "x", fixed=fixed)
            t = r.input(f"t{k}", (m.rows, m.width), "(dp mb b) k", "t", fixed=fixed)
            y, cut = x, False
            for i, layer in enumerate(m.layers):
                if layer.rows != cut:
                    y, cut = (part(y) if layer.rows else whole(y)), layer.rows
                if layer.kind == "tensor":
                    wa = weight(f"a{i}", (layer.hidden // m.tp, m.width), "(tp o) k")
                    wb = weight(f"b{i}", (m.width, layer.hidden // m.tp), "o (tp k)")
                    given = r.all_gather(y, group="tp", dim=0, backward="reduce_scatter") if cut else r.copy(y, "tp")
                    share = r.linear(getattr(r, layer.act)(r.linear(given, wa)), wb)
                    if cut:
                        y = r.reduce_scatter(share, group="tp", dim=0, backward="all_gather")
                    else:
                        y = r.all_reduce(share, group="tp", backward="identity")
                elif layer.kind == "norm":
                    y = r.rms_norm(y, weight(f"n{i}", (m.width,), "k"))
                    over_rows |= {f"n{i}"} if cut else set()
                elif layer.kind == "dense":
                    y = getattr(r, layer.act)(r.linear(y, weight(f"d{i}", (m.width, m.width), "o k")))
                    over_rows |= {f"d{i}"} if cut else set()
                else:
                    y = r.add(y, part(x) if cut else x)
            e = r.sub(whole(y) if cut else y, t)
            loss = (r.mean if m.mean else r.sum)(r.mul(e, e))
            losses.append(r.div(loss, value=m.micro) if m.mean and m.micro > 1 else loss)
        for loss in losses:
            r.backward(loss)
        r.phase = "optimizer"
        how = "avg" if m.mean else "sum"
        total = losses[0]
        for loss in losses[1:]:
            total = r.add(total, loss)
        r.loss(r.all_reduce(total, group="dp", op=how))
        for name, (w, form) in weights.items():
            grad = r.gradient(w)
            if name in over_rows:
                grad = r.all_reduce(grad, group="tp")
            grad = r.all_reduce(grad, group="dp", op=how)
            r.output(grad, "gradient", name)
            if m.adam:
                slots = [r.state(f"{name}.m", w.shape, form), r.state(f"{name}.v", w.shape, form, domain="nonnegative")]
                new = r.adamw(w, grad, *slots, lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
            else:
                slots = [r.state(f"{name}.momentum", w.shape, form)]
                new = r.sgd(w, grad, *slots, lr=0.1, momentum=0.9)
            for old, fresh in zip([w, *slots], new, strict=True):
                r.update(old, fresh)
    return p.build()
