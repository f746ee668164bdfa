"""Random logical training steps, from a seed.

`forward` makes the forward program, `Step` remembers how it was completed, so that the same step can be written
in another way: with operators spelled out (`spelled`), the meaning being the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import trainverify as tv
from trainverify.build.program import ProgramBuilder
from trainverify.completion.optimizers import Optimizer
from trainverify.graph.program import Op, Program

Tensor = Any  # as the builder gives it out

WIDTHS: Final = (12, 16, 18, 20, 24, 30, 36, 40, 48)
IGNORE: Final = -100


@dataclass(frozen=True)
class Step:
    """A forward program and how it becomes a training step."""

    forward: Program
    optimizer: Optimizer | None
    clip: float | None

    def logical(self) -> Program:
        return tv.complete(self.forward, self.optimizer, clip=self.clip)

    def spelled(self, rng: random.Random) -> Program:
        """The same step with some operators of the forward pass written out."""
        return tv.complete(spell(self.forward, rng), self.optimizer, clip=self.clip)


def step(rng: random.Random, length: int | None = None) -> Step:
    """A random step; `length` is the number of building blocks."""
    forward = _Model(rng, rng.randint(1, 5) if length is None else length).build()
    optimizer: Optimizer | None = None
    match rng.randrange(5):
        case 0:
            optimizer = tv.SGD(lr=0.1)
        case 1:
            optimizer = tv.SGD(lr=0.05, momentum=0.9, nesterov=rng.random() < 0.5, weight_decay=rng.choice([0.0, 0.01]))
        case 2 | 3:
            optimizer = tv.AdamW(lr=0.001, step=rng.choice([1, 7]), weight_decay=rng.choice([0.0, 0.1]))
    return Step(forward, optimizer, rng.choice([0.5, 1.0]) if rng.random() < 0.3 else None)


class _Model:
    """One program under construction: a current activation, and older ones to come back to."""

    def __init__(self, rng: random.Random, length: int):
        self.rng = rng
        self.b = ProgramBuilder("random")
        self.rows = rng.choice([8, 12, 16, 24])
        self.time = rng.choice([6, 8, 10, 12, 24])
        self.seen: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.length = length

    def build(self) -> Program:
        rng, b = self.rng, self.b
        x = self.start()
        blocks: list[tuple[int, Callable[[Tensor], Tensor]]] = [
            (5, self.dense),
            (4, self.activation),
            (3, self.norm),
            (3, self.residual),
            (2, self.gate),
            (2, self.scale),
            (2, self.softmax),
            (2, self.shaped),
            (2, self.pieces),
            (1, self.centred),
            (1, self.gram),
            (2, self.attend),
        ]
        for _ in range(self.length):
            self.seen.append(x)
            (block,) = rng.choices([f for _, f in blocks], [w for w, _ in blocks])
            x = block(x)
        if not self.weights:
            x = self.dense(x)
        b.loss(self.loss(x))
        return b.build()

    def start(self) -> Tensor:
        rng, b = self.rng, self.b
        shape: tuple[int, ...] = (self.rows, self.time) if rng.random() < 0.6 else (self.rows,)
        if rng.random() < 0.4:
            size = rng.choice([24, 48, 60])
            ids = b.input("ids", shape, dtype="i64", ids=size)
            return b.embedding(ids, self.weight((size, rng.choice(WIDTHS))))
        return b.input("x", (*shape, rng.choice(WIDTHS)))

    def weight(self, shape: tuple[int, ...]) -> Tensor:
        """A parameter, sometimes one that is in use already."""
        old = [w for w in self.weights if w.shape == shape]
        if old and self.rng.random() < 0.5:
            return self.rng.choice(old)
        self.weights.append(self.b.parameter(f"w{len(self.weights)}", shape))
        return self.weights[-1]

    # -- building blocks ----------------------------------------------------------------------------------------------

    def dense(self, x: Tensor, width: int | None = None) -> Tensor:
        rng, b = self.rng, self.b
        out = width if width is not None else x.shape[-1] if rng.random() < 0.4 else rng.choice(WIDTHS)
        kind = rng.random()
        if kind < 0.3:
            return b.linear(x, self.weight((out, x.shape[-1])), self.weight((out,)))
        if kind < 0.8:
            return b.linear(x, self.weight((out, x.shape[-1])))
        return b.matmul(x, self.weight((x.shape[-1], out)))

    def activation(self, x: Tensor) -> Tensor:
        name = self.rng.choice(["silu", "relu", "gelu", "tanh", "sigmoid", "square"])
        attrs = {"approximate": "tanh"} if name == "gelu" and self.rng.random() < 0.5 else {}
        return getattr(self.b, name)(x, **attrs)

    def norm(self, x: Tensor) -> Tensor:
        last = x.shape[-1:]
        kind = self.rng.random()
        if kind < 0.5:
            return self.b.rms_norm(x, self.weight(last), eps=1e-5)
        if kind < 0.6:
            return self.b.rms_norm(x)
        return self.b.layer_norm(x, self.weight(last), self.weight(last))

    def residual(self, x: Tensor) -> Tensor:
        same = [t for t in self.seen if t.shape == x.shape]
        if same and self.rng.random() < 0.7:
            return self.b.add(x, self.rng.choice(same))
        old = self.rng.choice([t for t in self.seen if len(t.shape) == len(x.shape) and t.shape[:-1] == x.shape[:-1]] or [x])
        branch = self.dense(self.activation(x) if self.rng.random() < 0.5 else x, old.shape[-1])
        return self.b.add(old, branch) if self.rng.random() < 0.7 else self.b.sub(branch, old)

    def gate(self, x: Tensor) -> Tensor:
        if self.rng.random() < 0.3:
            return self.b.mul(x, self.weight(x.shape[-1:]))
        return self.b.mul(self.activation(self.dense(x, x.shape[-1])), x)

    def scale(self, x: Tensor) -> Tensor:
        kind = self.rng.randrange(3)
        if kind == 0:
            return self.b.mul(x, value=self.rng.choice([0.5, 2.0, -0.125, 3.0]))
        return self.b.div(x, value=self.rng.choice([3, 7])) if kind == 1 else self.b.add(x, value=0.25)

    def softmax(self, x: Tensor) -> Tensor:
        return self.b.softmax(x, dim=self.rng.choice([-1, len(x.shape) - 1, len(x.shape) - 2]))

    def shaped(self, x: Tensor) -> Tensor:
        b = self.b
        if len(x.shape) == 3:
            if self.rng.random() < 0.5:
                flat = b.reshape(x, shape=(x.shape[0] * x.shape[1], x.shape[2]))
                return b.reshape(self.dense(flat), shape=(*x.shape[:2], -1)) if self.rng.random() < 0.5 else flat
            return b.transpose(x, dim0=0, dim1=1)
        if x.shape[0] % 4 == 0 and self.rng.random() < 0.6:
            return b.reshape(x, shape=(4, x.shape[0] // 4, x.shape[1]))
        return b.permute(x, dims=tuple(reversed(range(len(x.shape)))))

    def pieces(self, x: Tensor) -> Tensor:
        rng, b = self.rng, self.b
        width = x.shape[-1]
        if rng.random() < 0.3:
            return b.slice(x, dim=-1, start=0, stop=width // 2) if rng.random() < 0.5 else b.slice(x, dim=-1, start=2, stop=width)
        cut = rng.choice([width // 2, width // 3 or 1, 4])
        dim = rng.choice([-1, len(x.shape) - 1])
        left, right = b.split(x, sizes=(cut, width - cut), dim=dim)
        if rng.random() < 0.5:
            left = self.activation(left)
        return b.concat(right, left, dim=dim)

    def centred(self, x: Tensor) -> Tensor:
        dim = self.rng.randrange(len(x.shape))
        return self.b.sub(x, self.b.mean(x, dim=dim, keepdim=True))

    def gram(self, x: Tensor) -> Tensor:
        other = self.dense(x, x.shape[-1])
        return self.b.matmul(x, self.b.transpose(other, dim0=-2, dim1=-1))

    def attend(self, x: Tensor) -> Tensor:
        rng, b = self.rng, self.b
        if len(x.shape) != 3:
            return self.dense(x)
        rows, time, _ = x.shape
        heads, size = rng.choice([2, 4, 6]), rng.choice([2, 3, 4])
        groups = rng.choice([heads, heads // 2])

        def split(count: int) -> Tensor:
            made = b.linear(x, self.weight((count * size, x.shape[-1])))
            return b.transpose(b.reshape(made, shape=(rows, time, count, size)), dim0=1, dim1=2)

        mixed = b.attention(split(heads), split(groups), split(groups), is_causal=rng.random() < 0.5)[0]
        return self.dense(b.reshape(b.transpose(mixed, dim0=1, dim1=2), shape=(rows, time, heads * size)))

    def loss(self, x: Tensor) -> Tensor:
        rng, b = self.rng, self.b
        kind = rng.random()
        if kind < 0.35:
            classes = rng.choice([12, 24, 48])
            logits = self.dense(x, classes)
            ignore = rng.random() < 0.7
            target = b.input("target", logits.shape[:-1], dtype="i64", ids=classes, ignore=IGNORE if ignore else None)
            attrs: dict[str, Any] = {"reduction": rng.choice(["mean", "mean", "sum"])}
            return b.cross_entropy(logits, target, **attrs)
        if kind < 0.55:
            return b.mse_loss(x, b.input("target", x.shape), reduction=rng.choice(["mean", "sum"]))
        if kind < 0.8:
            e = b.sub(x, b.input("target", x.shape))
            return b.mean(b.mul(e, e)) if rng.random() < 0.6 else b.sum(b.square(e))
        return b.mean(b.tanh(x)) if rng.random() < 0.5 else b.sum(b.mean(b.square(x), dim=-1))


# -- the same forward program in other words --------------------------------------------------------------------------


def spell(forward: Program, rng: random.Random, share: float = 0.6) -> Program:
    """Some operators written out in simpler ones, as parallel implementations of them are."""
    b = ProgramBuilder(forward.name)
    env: dict[str, Tensor] = {}
    for names, into in ((forward.inputs, b._inputs), (forward.parameters, b._parameters), (forward.state, b._state)):
        for n in names:
            t = forward.tensors[n]
            env[n] = b._source(into, n, t.shape, t.dtype, forward.domains.get(n))
    b._trainable.update(forward.parameters)

    for op in forward.ops:
        given = [None if i is None else env[i] for i in op.inputs]
        rule = SPELLINGS.get(op.name)
        made = None
        if rule is not None and rng.random() < share:
            b.prefix = op.outputs[0] + "/"
            made = rule(b, op, given)
            b.prefix = ""
        results = b.emit(op.name, given, op.attributes, list(op.outputs)) if made is None else (made,)
        env.update(zip(op.outputs, results, strict=True))
    loss = forward.output("loss")
    assert loss is not None
    b.loss(env[loss])
    return b.build()


def _softmax(b: ProgramBuilder, op: Op, given: list[Any]) -> Tensor | None:
    (x,) = given
    dim = op.get("dim", -1)
    e = b.exp(b.sub(x, b.detach(b.amax(x, dim=dim, keepdim=True))))
    return b.div(e, b.sum(e, dim=dim, keepdim=True))


def _rms_norm(b: ProgramBuilder, op: Op, given: list[Any]) -> Tensor | None:
    x, weight = given[0], given[1] if len(given) > 1 else None
    y = b.mul(x, b.rsqrt(b.add(b.mean(b.square(x), dim=-1, keepdim=True), value=op.get("eps", 1e-6))))
    return y if weight is None else b.mul(y, weight)


def _layer_norm(b: ProgramBuilder, op: Op, given: list[Any]) -> Tensor | None:
    x, weight, bias = given
    c = b.sub(x, b.mean(x, dim=-1, keepdim=True))
    y = b.mul(c, b.rsqrt(b.add(b.mean(b.square(c), dim=-1, keepdim=True), value=op.get("eps", 1e-5))))
    return b.add(b.mul(y, weight), bias)


def _cross_entropy(b: ProgramBuilder, op: Op, given: list[Any]) -> Tensor | None:
    """Rows added up and counted; the class dimension stays within one rank."""
    logits, target = given
    if op.get("reduction", "mean") == "sum" or len(logits.shape) % 2:
        return _cross_entropy_classes(b, op, given)
    total = b.cross_entropy(logits, target, reduction="sum", ignore_index=op.get("ignore_index", IGNORE))
    count = b.sum(b.float(b.ne(target, value=op.get("ignore_index", IGNORE))))
    return b.div(total, count)


def _cross_entropy_classes(b: ProgramBuilder, op: Op, given: list[Any]) -> Tensor:
    """As with the vocabulary cut over ranks: maximum, sum of exponentials, picked logit."""
    logits, target = given
    m = b.detach(b.amax(logits, dim=-1, keepdim=True))
    shifted = b.sub(logits, m)
    lse = b.log(b.sum(b.exp(shifted), dim=-1))
    hot = b.float(b.one_hot(target, num_classes=logits.shape[-1]))
    picked = b.sum(b.mul(shifted, hot), dim=-1)
    valid = b.float(b.ne(target, value=op.get("ignore_index", IGNORE)))
    total = b.sum(b.mul(b.sub(lse, picked), valid))
    return total if op.get("reduction", "mean") == "sum" else b.div(total, b.sum(valid))


def _linear(b: ProgramBuilder, op: Op, given: list[Any]) -> Tensor | None:
    x, w, *rest = given
    y = b.matmul(x, b.transpose(w, dim0=0, dim1=1))
    return b.add(y, rest[0]) if rest and rest[0] is not None else y


def _mse(b: ProgramBuilder, op: Op, given: list[Any]) -> Tensor | None:
    e = b.sub(*given)
    return b.mean(b.mul(e, e)) if op.get("reduction", "mean") == "mean" else b.sum(b.mul(e, e))


def _silu(b: ProgramBuilder, op: Op, given: list[Any]) -> Tensor | None:
    return b.mul(given[0], b.sigmoid(given[0]))


SPELLINGS: Final[dict[str, Callable[[ProgramBuilder, Op, list[Any]], Tensor | None]]] = {
    "softmax": _softmax,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "cross_entropy": _cross_entropy,
    "linear": _linear,
    "mse_loss": _mse,
    "silu": _silu,
}
