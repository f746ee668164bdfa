"""Random small programs over the operator table: shapes that factor in several ways, masks, labels, views, losses, gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np

import trainverify as tv
from trainverify.build.tape import Tensor
from trainverify.completion.optimizers import SGD, AdamW
from trainverify.graph.program import Program
from trainverify.ops.table import OpError
from trainverify.primitives.node import ShapeError

SIZES = (1, 2, 2, 3, 4, 6)


class Maker:
    """Grows one program; every method picks what it applies to from the tensors made so far."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.b = tv.program(f"random {seed}")
        self.reals: list[Tensor] = []
        self.count = 0

    def pick(self, items: Any) -> Any:
        return items[int(self.rng.integers(len(items)))]

    def size(self) -> int:
        return int(self.pick(SIZES))

    def name(self, base: str) -> str:
        self.count += 1
        return f"{base}{self.count}"

    def real(self, rank: int | None = None) -> Tensor:
        fitting = [t for t in self.reals if rank is None or len(t.shape) == rank]
        if fitting and self.rng.random() < 0.85:
            return fitting[-1] if self.rng.random() < 0.4 else self.pick(fitting)
        return self.source(tuple(self.size() for _ in range(int(self.rng.integers(1, 4)) if rank is None else rank)))

    def source(self, shape: tuple[int, ...]) -> Tensor:
        if math.prod(shape) > 48:
            shape = tuple(min(s, 2) for s in shape)
        kind = self.pick(["input", "parameter", "parameter"])
        made = getattr(self.b, kind)(self.name(kind[0]), shape)
        self.reals.append(made)
        return made

    def like(self, x: Tensor) -> Tensor:
        same = [t for t in self.reals if t.shape == x.shape]
        return self.pick(same) if same and self.rng.random() < 0.6 else self.source(x.shape) if math.prod(x.shape) <= 48 else x

    def keep(self, *made: Tensor) -> None:
        for t in made:
            if t.type.kind == "real" and math.prod(t.shape) <= 96:
                self.reals.append(t)

    def mask(self, shape: tuple[int, ...]) -> Tensor:
        if self.rng.random() < 0.5:
            x = self.real()
            if x.shape == shape:
                return self.b.gt(x, value=0.1)
        return self.b.input(self.name("m"), shape, dtype="bool")

    def ids(self, shape: tuple[int, ...], count: int, ignore: int | None = None) -> Tensor:
        return self.b.input(self.name("i"), shape, dtype="i64", ids=count, ignore=ignore)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def unary(self) -> None:
        x = self.real()
        fn = self.pick(
            ["silu", "gelu", "relu", "tanh", "sigmoid", "exp", "neg", "square", "abs", "sqrt", "log", "rsqrt", "clamp", "softplus"]
        )
        if fn in ("sqrt", "log", "rsqrt"):
            x = self.b.add(self.b.mul(x, x), value=float(self.pick([0.5, 1.0, 1e-3])))
        if fn == "exp":
            x = self.b.mul(x, value=0.5)
        if fn == "clamp":
            self.keep(self.b.clamp(x, min=-0.3, max=0.4))
        elif fn in self.b.table:
            self.keep(getattr(self.b, fn)(x))

    def scaled(self) -> None:
        x = self.real()
        self.keep(getattr(self.b, self.pick(["add", "mul", "sub"]))(x, value=float(self.pick([0.5, 2.0, -1.0, 0.3, 3.0]))))

    def binary(self) -> None:
        x = self.real()
        y = self.like(x)
        fn = self.pick(["add", "sub", "mul", "mul", "maximum", "minimum", "div", "where"])
        if fn == "div":
            self.keep(self.b.div(x, self.b.add(self.b.mul(y, y), value=1.0)))
        elif fn == "where":
            self.keep(self.b.where(self.mask(x.shape), x, y))
        else:
            self.keep(getattr(self.b, fn)(x, y))

    def broadcast(self) -> None:
        x = self.real()
        d = int(self.rng.integers(len(x.shape))) if x.shape else 0
        y = self.real()
        if x.shape and y.shape == x.shape[d:]:
            self.keep(getattr(self.b, self.pick(["add", "mul", "sub"]))(x, y))

    def linear(self) -> None:
        x = self.real()
        if x.shape:
            w = self.source((self.size(), x.shape[-1]))
            self.keep(self.b.linear(x, w))

    def matmul(self) -> None:
        x = self.real(2)
        y = self.real(2)
        if x.shape[1] == y.shape[0]:
            self.keep(self.b.matmul(x, y))
        if x.shape[1] == y.shape[1]:
            self.keep(self.b.matmul(x, self.b.transpose(y)))

    def gram(self) -> None:
        """Symmetric factors: X·Xᵀ·X and its like."""
        x = self.real(2)
        g = self.b.matmul(x, self.b.transpose(x))
        self.keep(self.b.matmul(g, x))

    def einsum(self) -> None:
        x, y = self.real(2), self.real(2)
        names = [self.pick(["a b", "b a"]), self.pick(["b c", "c b", "a c"])]
        left = dict(zip(names[0].split(), x.shape, strict=True))
        if all(left.get(n, s) == s for n, s in zip(names[1].split(), y.shape, strict=True)):
            out = self.pick(["a c", "c a", "a", "", "b", "a b c"])
            spec = ",".join(n.replace(" ", "") for n in names) + "->" + out.replace(" ", "")
            if set(out.replace(" ", "")) <= set("".join(names)):
                self.keep(self.b.einsum(x, y, equation=spec))

    def reduced(self) -> None:
        x = self.real()
        if x.shape:
            d = int(self.rng.integers(len(x.shape)))
            fn = self.pick(["sum", "mean", "sum", "amax", "amin", "logsumexp", "var"])
            if fn == "var" and x.shape[d] < 2:
                return
            self.keep(getattr(self.b, fn)(x, dim=d, keepdim=bool(self.rng.integers(2))))

    def normal(self) -> None:
        x = self.real()
        if x.shape:
            fn = self.pick(["softmax", "log_softmax", "rms_norm", "layer_norm"])
            if fn in ("softmax", "log_softmax"):
                self.keep(getattr(self.b, fn)(x, dim=int(self.rng.integers(len(x.shape)))))
            else:
                self.keep(getattr(self.b, fn)(x, self.source(x.shape[-1:]), eps=float(self.pick([1e-5, 0.1]))))

    def masked_softmax(self) -> None:
        x = self.real(2)
        m = self.b.create_mask(queries=x.shape[0], keys=x.shape[1]) if self.rng.random() < 0.5 else self.mask(x.shape)
        s = self.b.apply_mask(x, m)
        self.keep(self.b.exp(s))
        self.keep(self.b.softmax(s))

    def attention(self) -> None:
        n, h, s, d = 2, int(self.pick([2, 4])), int(self.pick([2, 3, 4])), 2
        q = self.real(4) if any(t.shape == (n, h, s, d) for t in self.reals) and self.rng.random() < 0.5 else self.source((n, h, s, d))
        if len(q.shape) == 4 and math.prod(q.shape) <= 48:
            k = self.source((q.shape[0], self.pick([1, q.shape[1]]), s, q.shape[3]))
            if q.shape[1] % k.shape[1] == 0:
                out, _ = self.b.attention(q, k, self.source(k.shape), is_causal=bool(self.rng.integers(2)))
                self.keep(out)

    def rotary(self) -> None:
        x = self.real(2)
        if x.shape[1] % 2 == 0:
            c, s = self.source(x.shape), self.source(x.shape)
            self.keep(self.b.apply_rotary_emb(x, c, s, style=self.pick(["half", "interleaved"])))

    def embedding(self) -> None:
        w = self.real(2)
        shape = tuple(int(self.pick([2, 3])) for _ in range(int(self.rng.integers(1, 3))))
        self.keep(self.b.embedding(self.ids(shape, w.shape[0]), w))

    def hot(self) -> None:
        n = int(self.pick([2, 3, 4]))
        i = self.ids((n,), n, self.pick([None, -100, 1]))
        one = self.b.to(self.b.one_hot(i, num_classes=n), dtype="f32")
        eye = self.b.to(self.b.one_hot(self.b.arange(stop=n), num_classes=n), dtype="f32")
        self.keep(one, self.b.mul(one, self.pick([eye, self.like(one)])))

    def loss(self) -> None:
        x = self.real(2)
        i = self.ids(x.shape[:1], x.shape[1], -100)
        smoothing = {"label_smoothing": 0.1} if self.rng.random() < 0.4 else {}
        self.keep(self.b.cross_entropy(x, i, reduction=self.pick(["mean", "sum", "none"]), **smoothing))

    def view(self) -> None:
        x = self.real()
        n = math.prod(x.shape)
        shapes = [
            (n,),
            *((a, n // a) for a in (2, 3, 4) if n % a == 0),
            *((a, b, n // a // b) for a in (2, 3) for b in (2, 3) if n % (a * b) == 0),
        ]
        self.keep(self.b.reshape(x, shape=self.pick(shapes)))

    def moved(self) -> None:
        x = self.real()
        if len(x.shape) > 1:
            a, c = (int(v) for v in self.rng.permutation(len(x.shape))[:2])
            self.keep(self.b.transpose(x, dim0=a, dim1=c))

    def cut(self) -> None:
        x = self.real()
        if x.shape:
            d = int(self.rng.integers(len(x.shape)))
            if x.shape[d] > 1:
                start = int(self.rng.integers(x.shape[d] - 1))
                stop = int(self.rng.integers(start + 1, x.shape[d] + 1))
                self.keep(self.b.slice(x, dim=d, start=start, stop=stop))

    def joined(self) -> None:
        x = self.real()
        if x.shape:
            d = int(self.rng.integers(len(x.shape)))
            fitting = [
                t for t in self.reals if len(t.shape) == len(x.shape) and t.shape[:d] + t.shape[d + 1 :] == x.shape[:d] + x.shape[d + 1 :]
            ]
            parts = [x, *(self.pick(fitting) for _ in range(int(self.rng.integers(1, 3))))]
            self.keep(self.b.concat(*parts, dim=d))

    def halves(self) -> None:
        x = self.real()
        if x.shape and x.shape[-1] % 2 == 0:
            half = x.shape[-1] // 2
            a = self.b.slice(x, dim=-1, start=0, stop=half)
            c = self.b.slice(x, dim=-1, start=half, stop=2 * half)
            self.keep(a, c, self.b.concat(c, a, dim=-1), self.b.add(a, c))

    def running(self) -> None:
        x = self.real()
        if x.shape:
            d = int(self.rng.integers(len(x.shape)))
            self.keep(self.b.cumsum(x, dim=d))
            if self.rng.random() < 0.5:
                self.keep(self.b.to(self.b.argsort(x, dim=d), dtype="f32"), self.b.sort(x, dim=d)[0])

    def step(self) -> None:
        steps: list[Callable[[], None]] = [
            self.unary, self.unary, self.scaled, self.binary, self.binary, self.broadcast, self.linear, self.matmul, self.gram, self.einsum,
            self.reduced, self.reduced, self.normal, self.masked_softmax, self.attention, self.rotary, self.embedding, self.hot, self.loss,
            self.view, self.view, self.moved, self.cut, self.joined, self.halves, self.running,
        ]  # fmt: skip
        with contextlib.suppress(OpError, ShapeError):  # arguments that do not fit: nothing was added
            self.pick(steps)()


def random_program(seed: int) -> Program:
    """A program with a loss; every second one with its backward pass, some with an optimizer."""
    m = Maker(seed)
    for _ in range(int(m.rng.integers(3, 10))):
        m.step()
    ends = m.reals[-2:] or [m.source((2, 2))]
    total = m.b.sum(ends[0])
    for t in ends[1:]:
        total = m.b.add(total, m.b.mean(t))
    m.b.loss(total)
    program = m.b.build()
    if seed % 2 and program.parameters:
        try:
            program = tv.complete(program, m.pick([SGD(lr=0.1, momentum=0.9), AdamW(lr=0.1), SGD(lr=0.5)]))
        except Exception as error:  # no gradient reaches a parameter
            if "gradient" not in str(error):
                raise
    return program
