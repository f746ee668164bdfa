"""Random programs and plans in which anything may stand: every primitive, every collective, values that differ between ranks.

Nothing is meant by them. They are for comparing two evaluations of one thing, so a plan need not compute what its program does.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Final

import trainverify as tv
from trainverify.build.plan import PlanBuilder, RankBuilder
from trainverify.build.tape import BuildError, caller
from trainverify.graph.lineage import Part, Parts, Run, layout
from trainverify.graph.plan import Plan
from trainverify.graph.program import Op, Program, attributes
from trainverify.ops.table import OpError
from trainverify.primitives.node import ShapeError

Tensor = Any  # as the builder gives it out
SIZES: Final = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 24, 40)
MOST: Final = 6000  # elements of a tensor
IGNORE: Final = -100
_UNARY: Final = (
    *("neg", "square", "exp", "sin", "cos", "tanh", "erf", "relu", "sigmoid", "softplus", "silu", "gelu", "abs", "sign", "floor"),
    *("logical_not", "identity", "detach", "reciprocal", "sqrt", "rsqrt", "log"),
)
_BINARY: Final = ("add", "sub", "mul", "mul", "div", "maximum", "minimum", "lt", "le", "gt", "ge", "eq", "ne", "logical_and", "logical_or")
_REDUCTIONS: Final = ("sum", "mean", "var", "std", "amax", "amin", "any", "all", "prod", "norm", "logsumexp", "sum", "mean")


class Maker:
    """Grows one program. On ranks, `r` gives columns and groups."""

    def __init__(self, rng: random.Random, builder: Any, sizes: Sequence[int], mesh: tv.Mesh | None = None):
        self.rng, self.b, self.mesh = rng, builder, mesh
        self.sizes = sizes
        self.made: list[Tensor] = []
        steps: list[tuple[int, Callable[[], Any]]] = [
            (6, self.unary),
            (8, self.binary),
            (4, self.literal),
            (5, self.reduced),
            (4, self.matrix),
            (4, self.moved),
            (4, self.cut),
            (3, self.joined),
            (2, self.padded),
            (3, self.position),
            (3, self.where),
            (3, self.indexed),
            (2, self.sorted),
            (2, self.running),
            (2, self.normal),
            (2, self.masked),
            (2, self.attention),
            (1, self.chance),
            (1, self.experts),
            (1, self.convolved),
            (1, self.loss),
            (2, self.repeated),
            (1, self.integers),
            (1, self.gradient),
        ]
        if mesh is not None:
            steps += [(9, self.collective), (4, self.by_rank), (2, self.ring)]
        self.steps = steps

    def grow(self, count: int) -> None:
        for _ in range(count):
            (f,) = self.rng.choices([f for _, f in self.steps], [w for w, _ in self.steps])
            with contextlib.suppress(OpError, BuildError, ShapeError, ZeroDivisionError, LookupError, ValueError):
                found = f()
                for t in found if isinstance(found, tuple) else (found,):
                    if t is not None and math.prod(t.shape) <= MOST:
                        self.made.append(t)

    # -- what there is ------------------------------------------------------------------------------------------------

    def pick(self, kind: str | None = "real", rank: int | None = None) -> Tensor:
        fit = [t for t in self.made if (kind is None or t.type.kind == kind) and (rank is None or len(t.shape) == rank)]
        if not fit:
            raise IndexError("nothing that fits")
        return fit[-1] if self.rng.random() < 0.4 else self.rng.choice(fit)

    def like(self, x: Tensor, kind: str | None = None) -> Tensor:
        fit = [t for t in self.made if t.type.kind == (kind or x.type.kind) and t.shape == x.shape]
        return self.rng.choice(fit) if fit else x

    def broadcastable(self, x: Tensor) -> Tensor:
        n = len(x.shape)
        fit = [
            t
            for t in self.made
            if t.type.kind == x.type.kind
            and len(t.shape) <= n
            and all(a in (1, b) for a, b in zip(t.shape[::-1], x.shape[::-1], strict=False))
        ]
        return self.rng.choice(fit) if fit else x

    def dim(self, x: Tensor) -> int:
        return self.rng.randrange(len(x.shape))

    def number(self) -> Any:
        """A literal; on ranks sometimes one that depends on the rank."""
        rng = self.rng
        kind = rng.randrange(8)
        if self.mesh is not None and kind == 0:
            odd, value = rng.randrange(self.mesh.size), rng.choice([0.7, 0.0, -2.0])
            return self.b.each_rank(lambda k: value if k == odd else 0.5)
        if self.mesh is not None and kind == 1:
            return self.b.each_rank(lambda k: Fraction(k + 1, 3))
        return rng.choice([0, 1, 2, -1, 0.5, -0.25, 3.0, 1e-3, Fraction(1, 3), 7])

    def whole(self, low: int = -3, high: int = 9) -> Any:
        """An integer; on ranks sometimes an offset of the rank."""
        rng = self.rng
        kind = rng.randrange(6)
        if self.mesh is not None and kind < 2:
            width, axis = rng.choice([1, 2, 3, 5]), rng.choice(self.mesh.names)
            if kind:
                return self.b.each(lambda at: at[axis] * width)
            odd = rng.randrange(self.mesh.size)
            return self.b.each_rank(lambda k: width if k == odd else 0)
        return rng.randint(low, high)

    # -- steps --------------------------------------------------------------------------------------------------------

    def unary(self) -> Tensor:
        x, name = self.pick(), self.rng.choice(_UNARY)
        if name in ("sqrt", "rsqrt", "log", "reciprocal"):
            x = self.b.add(self.b.square(x), value=self.rng.choice([0, 0.5, 1.0, 1e-3]))
        if name == "exp" and self.rng.random() < 0.8:
            x = self.b.tanh(x)
        return getattr(self.b, name)(x)

    def binary(self) -> Tensor:
        x = self.pick(self.rng.choice(["real", "real", "real", "int"]))
        y = self.like(x) if self.rng.random() < 0.6 else self.broadcastable(x)
        x, y = (x, y) if self.rng.random() < 0.7 else (y, x)
        name = self.rng.choice(_BINARY)
        if name == "div" and self.rng.random() < 0.8:
            y = self.b.add(self.b.abs(y), value=1)
        return getattr(self.b, name)(x, y)

    def literal(self) -> Tensor:
        rng = self.rng
        x = self.pick(rng.choice(["real", "real", "int"]))
        way = rng.randrange(6)
        if way == 0:
            return self.b.clamp(x, min=rng.choice([-0.2, 0.0, -5]), max=rng.choice([0.3, 1, 50]))
        if way == 1:
            return self.b.pow(x, exponent=rng.choice([0, 2, 3, -1, 0.5, Fraction(1, 3)]))
        if way == 2:
            return self.b.to(x, dtype=rng.choice(["f32", "i64", "bool"]))
        value = self.number() if x.type.kind == "real" else self.whole()
        return getattr(self.b, rng.choice(["add", "sub", "mul", "lt", "le", "eq", "ge", "ne"]))(x, value=value)

    def reduced(self) -> Tensor:
        rng = self.rng
        x = self.pick(rng.choice(["real", "real", "real", "int", "bool"]))
        dims = tuple(sorted(rng.sample(range(len(x.shape)), rng.randint(1, len(x.shape)))))
        name = rng.choice(_REDUCTIONS)
        if x.type.kind != "real":
            name = rng.choice(["sum", "amax", "amin", "any", "all", "prod"])
        return getattr(self.b, name)(x, dim=rng.choice([None, dims, dims[0]]), keepdim=rng.random() < 0.5)

    def matrix(self) -> Tensor:
        rng = self.rng
        x, y = self.pick(), self.pick()
        way = rng.randrange(5)
        if way == 0:
            return self.b.linear(x, y)
        if way == 1:
            return self.b.matmul(x, y)
        if way == 2:
            return self.b.matmul(x, self.b.transpose(y, dim0=-1, dim1=-2))
        if way == 3:
            return self.b.matmul(x, self.b.transpose(x, dim0=-1, dim1=-2))
        names = "abcd"
        left = "".join(rng.sample(names, len(x.shape)))
        right = "".join(rng.sample(names, len(y.shape)))
        sizes = dict(zip(left, x.shape, strict=True))
        if any(sizes.get(n, s) != s for n, s in zip(right, y.shape, strict=True)):
            return self.b.einsum(x, self.like(x), spec=f"{left},{left}->{left[: rng.randint(0, len(left))]}")
        both = list(dict.fromkeys(left + right))
        out = "".join(rng.sample(both, rng.randint(0, min(3, len(both)))))
        return self.b.einsum(x, y, spec=f"{left},{right}->{out}")

    def moved(self) -> Tensor:
        rng = self.rng
        x = self.pick(None)
        way = rng.randrange(6)
        n = math.prod(x.shape)
        if way == 0:
            return self.b.permute(x, dims=tuple(rng.sample(range(len(x.shape)), len(x.shape))))
        if way == 1:
            return self.b.reshape(x, shape=(n,))
        if way == 2:
            first = rng.choice([d for d in range(1, n + 1) if n % d == 0])
            second = rng.choice([d for d in range(1, n // first + 1) if (n // first) % d == 0])
            return self.b.reshape(x, shape=rng.choice([(first, n // first), (first, second, n // first // second)]))
        if way == 3:
            d = self.dim(x)
            parts = [k for k in range(2, x.shape[d]) if x.shape[d] % k == 0]
            k = rng.choice(parts or [1])
            return self.b.reshape(x, shape=(*x.shape[:d], k, x.shape[d] // k, *x.shape[d + 1 :]))
        if way == 4 and len(x.shape) > 1:
            d = rng.randrange(len(x.shape) - 1)
            return self.b.reshape(x, shape=(*x.shape[:d], x.shape[d] * x.shape[d + 1], *x.shape[d + 2 :]))
        return self.b.unsqueeze(x, dim=rng.randint(0, len(x.shape)))

    def cut(self) -> Any:
        rng = self.rng
        x = self.pick(None)
        d = self.dim(x)
        size = x.shape[d]
        way = rng.randrange(7)
        if way == 0:
            return self.b.flip(x, dims=(d,))
        if way == 1:
            return self.b.roll(x, shifts=(rng.randint(-3, 3),), dims=(d,))
        if way == 2:
            step = rng.choice([2, 3, -1, -2])
            return self.b.slice(x, dim=d, start=rng.randrange(size) if step > 0 else size - 1, stop=size if step > 0 else -1, step=step)
        if way == 3:
            cut = rng.randint(1, size)
            return self.b.split(x, sizes=(cut, size - cut), dim=d)
        if way == 4:
            return self.b.select(x, dim=d, index=rng.randrange(size))
        if way == 5 and self.mesh is not None:
            axis = rng.choice(self.mesh.names)
            width = max(1, size // self.mesh.length(axis))
            room = size - width
            odd = rng.randrange(self.mesh.size)
            even = rng.random() < 0.7
            mesh = self.mesh

            def start(at: dict[str, int]) -> int:
                assert mesh is not None
                return min(at[axis] * width, room) if even else room if mesh.rank(at) == odd else 0

            return self.b.slice(x, dim=d, start=self.b.each(start), stop=self.b.each(lambda at: start(at) + width))
        a = rng.randrange(size)
        return self.b.slice(x, dim=d, start=a, stop=rng.randint(a + 1, size))

    def joined(self) -> Tensor:
        x = self.pick(None)
        d = self.dim(x)

        def rest(t: Tensor) -> tuple[Any, ...]:
            return (t.type.kind, len(t.shape), t.shape[:d], t.shape[d + 1 :])

        fit = [t for t in self.made if rest(t) == rest(x)]
        parts = [x, *self.rng.choices(fit, k=self.rng.randint(1, 2))]
        if self.rng.random() < 0.3:
            return self.b.stack(x, self.like(x), dim=d)
        return self.b.concat(*parts, dim=d)

    def padded(self) -> Tensor:
        rng = self.rng
        x = self.pick(rng.choice(["real", "int"]))
        value = rng.choice([0, 0, 0.5, -math.inf]) if x.type.kind == "real" else rng.randint(-2, 3)
        return self.b.pad(x, pads=(rng.randint(-1, 2), rng.randint(-1, 3)), value=value)

    def position(self) -> Tensor:
        """Positions, compared with a literal or with each other."""
        rng = self.rng
        n = rng.choice(self.sizes)
        start = self.whole(-2, 5)
        at = self.b.arange(start=start, stop=self.shifted(start, n)) if rng.random() < 0.8 else self.b.arange(stop=3 * n, step=3)
        way = rng.randrange(5)
        if way == 0:
            return getattr(self.b, rng.choice(["lt", "le", "eq", "ge"]))(at, value=self.whole(-1, n))
        if way == 1:
            m = rng.choice(self.sizes)
            other = self.b.unsqueeze(self.b.arange(stop=m), dim=1)
            return getattr(self.b, rng.choice(["lt", "le", "eq", "sub"]))(at, other)
        if way == 2:
            return self.b.create_mask(queries=n, keys=rng.choice(self.sizes), query_offset=start, window=rng.choice([None, None, 2, 5]))
        if way == 3:
            return self.b.float(at)
        return at

    def shifted(self, start: Any, n: int) -> Any:
        if isinstance(start, int):
            return start + n
        column = self.b._columns[start.name]
        place = {r: i for i, r in enumerate(self.b.ranks)}
        return self.b.each_rank(lambda k: column[place[k]] + n)

    def where(self) -> Tensor:
        rng = self.rng
        x = self.pick(rng.choice(["real", "real", "int"]))
        fit = [
            t
            for t in self.made
            if t.type.kind == "bool"
            and len(t.shape) <= len(x.shape)
            and all(a in (1, b) for a, b in zip(t.shape[::-1], x.shape[::-1], strict=False))
        ]
        c = rng.choice(fit) if fit else self.b.gt(x, value=0)
        way = rng.randrange(4)
        if way == 0 and x.type.kind == "real":
            return self.b.apply_mask(x, self.b.expand(c, shape=x.shape))
        if way == 1 and x.type.kind == "real":
            return self.b.masked_fill(x, self.b.expand(c, shape=x.shape), value=rng.choice([0, -math.inf, 1.5]))
        return self.b.where(c, x, self.like(x))

    def ids(self, shape: tuple[int, ...], count: int) -> Tensor:
        fit = [t for t in self.made if t.type.kind == "int" and t.shape == shape]
        if fit and self.rng.random() < 0.8:
            return self.rng.choice(fit)
        flat = self.b.arange(stop=math.prod(shape)) if shape else self.b.full(shape=(), value=self.whole(), dtype="i64")
        return self.b.reshape(flat, shape=shape)

    def indexed(self) -> Tensor:
        rng = self.rng
        x = self.pick()
        d = self.dim(x)
        way = rng.randrange(5)
        if way == 0:
            return self.b.one_hot(self.pick("int"), num_classes=rng.choice(self.sizes), start=self.whole(-1, 3))
        if way == 1:
            w = self.pick("real", 2)
            return self.b.embedding(self.pick("int"), w, start=self.whole(0, 2))
        if way == 2:
            return self.b.index_select(x, self.pick("int", 1), dim=d)
        if way == 3:
            ids = self.ids(x.shape, x.shape[d])
            return self.b.take_along_dim(x, ids, dim=d)
        ids = self.ids(x.shape, x.shape[d])
        return self.b.scatter_add(x, ids, self.like(x), dim=d)

    def sorted(self) -> Any:
        rng = self.rng
        x = self.pick(rng.choice(["real", "real", "int"]))
        d = self.dim(x)
        way = rng.randrange(5)
        if way == 0:
            return self.b.topk(x, k=rng.randint(1, x.shape[d]), dim=d, largest=rng.random() < 0.5)
        if way == 1:
            return self.b.sort(x, dim=d, descending=rng.random() < 0.5)
        if way == 2:
            return self.b.argsort(x, dim=d)
        return getattr(self.b, rng.choice(["argmax", "argmin"]))(x, dim=rng.choice([d, None]))

    def running(self) -> Tensor:
        x = self.pick(self.rng.choice(["real", "int", "bool"]))
        return self.b.cumsum(x, dim=self.dim(x))

    def normal(self) -> Tensor:
        x = self.pick()
        d = self.dim(x)
        ways: list[Callable[[], Tensor]] = [
            lambda: self.b.softmax(x, dim=d),
            lambda: self.b.log_softmax(x, dim=d),
            lambda: self.b.rms_norm(x),
            lambda: self.b.layer_norm(x),
            lambda: self.b.logsumexp(x, dim=d),
            lambda: self.b.group_norm(x, groups=2),
        ]
        return self.rng.choice(ways)()

    def masked(self) -> Tensor:
        """A softmax over masked scores, spelled out or not."""
        rng = self.rng
        x = self.pick("real")
        q, k = x.shape[-2:]
        mask = self.b.create_mask(queries=q, keys=k, query_offset=self.whole(0, k))
        way = rng.randrange(4)
        if way == 0:
            return self.b.tril(x, diagonal=rng.randint(-1, 2))
        if way == 1:
            e = self.b.exp(self.b.sub(x, self.b.amax(x, dim=-1, keepdim=True)))
            return self.b.where(mask, e, self.b.full(shape=(), value=0))
        if way == 2:
            return self.b.softmax(self.b.apply_mask(x, self.b.expand(mask, shape=x.shape)))
        return self.b.add(self.b.softmax(x), self.b.to(mask, dtype="f32"))

    def attention(self) -> Any:
        rng = self.rng
        fit = [t for t in self.made if t.type.kind == "real" and len(t.shape) == 4]
        if fit and rng.random() < 0.7:
            q = rng.choice(fit)
            k, v = self.like(q), self.like(q)
        else:
            x = self.pick("real", 3)
            heads = rng.choice([h for h in (1, 2, 3, 4) if x.shape[2] % h == 0])

            def split(t: Tensor) -> Tensor:
                return self.b.transpose(self.b.reshape(t, shape=(*x.shape[:2], heads, x.shape[2] // heads)), dim0=1, dim1=2)

            q, k, v = split(x), split(self.like(x)), split(self.like(x))
        extra = {"query_offset": self.whole(0, q.shape[2])} if rng.random() < 0.5 else {}
        return self.b.attention(q, k, v, is_causal=rng.random() < 0.7, **extra)

    def chance(self) -> Tensor:
        rng = self.rng
        x = self.pick()
        if rng.random() < 0.5:
            return self.b.dropout(x, p=rng.choice([0.3, 0.5]), key=rng.choice([7, 12345, (1 << 62) + 5]), offset=self.whole(0, 5))
        return self.b.uniform(shape=x.shape, key=self.whole(1, 100))

    def experts(self) -> Any:
        rng = self.rng
        x = self.pick("real", 2)
        if rng.random() < 0.5:
            return self.b.moe_gate(x, top_k=rng.randint(1, x.shape[-1]), normalize=rng.random() < 0.5)
        return self.b.moe_route(x, self.pick("real", 2), top_k=rng.randint(1, 3))

    def convolved(self) -> Tensor:
        rng = self.rng
        x = self.pick("real", rng.choice([3, 4]))
        way = rng.randrange(3)
        if way == 0:
            w = self.b.full(shape=(2, x.shape[1], *([2] * (len(x.shape) - 2))), value=0.3)
            name = "conv1d" if len(x.shape) == 3 else "conv2d"
            return getattr(self.b, name)(x, w, stride=rng.choice([1, 2]), padding=rng.choice([0, 1]))
        return getattr(self.b, rng.choice(["max_pool2d", "avg_pool2d"]))(x, kernel=2, stride=rng.choice([1, 2]))

    def loss(self) -> Tensor:
        rng = self.rng
        logits = [t for t in self.made if t.type.kind == "real" and len(t.shape) > 1]
        pairs = [(x, t) for x in logits for t in self.made if t.type.kind == "int" and t.shape == x.shape[:-1]]
        if not pairs:
            return self.b.mse_loss(x := self.pick(), self.like(x))
        x, target = rng.choice(pairs)
        return self.b.cross_entropy(x, target, reduction=rng.choice(["mean", "sum", "none"]), label_smoothing=rng.choice([0, 0.1]))

    def repeated(self) -> Tensor:
        rng = self.rng
        x = self.pick(None)
        if rng.random() < 0.5:
            return self.b.repeat_interleave(x, repeats=rng.choice([2, 3]), dim=self.dim(x))
        return self.b.repeat(x, sizes=tuple(rng.choice([1, 2, 3]) for _ in x.shape))

    def integers(self) -> Tensor:
        rng = self.rng
        if rng.random() < 0.4:
            return self.b.full(shape=(rng.choice(self.sizes),), value=self.whole(), dtype="i64")
        x = self.pick("int")
        return getattr(self.b, rng.choice(["add", "mul", "sub"]))(x, value=rng.choice([2, -3, 1 << 40, 5]))

    def gradient(self) -> Any:
        """The gradient of an op that is there."""
        ops = [o for o in self.b.ops if not o.name.endswith(".grad") and not o.get("group") and o.name not in ("send", "recv")]
        op = self.rng.choice(ops)
        types = self.b.tensors
        wrt = [i for i, n in enumerate(op.inputs) if n is not None and types[n].kind == "real"]
        by_name = {t.name: t for t in self.made}
        inputs = [None if n is None else by_name[n] for n in op.inputs]
        given = self.like(by_name[op.outputs[0]])
        attrs = {**op.attributes, "wrt": (self.rng.choice(wrt),)}
        return tuple(self.b.emit(op.name + ".grad", [*inputs, given], attrs))

    # -- on ranks -----------------------------------------------------------------------------------------------------

    def collective(self) -> Tensor:
        rng, r = self.rng, self.b
        assert self.mesh is not None
        axes = tuple(a for a in self.mesh.names if rng.random() < 0.5) or (rng.choice(self.mesh.names),)
        named = [g for g in r._plan.groups if g.startswith("all")]
        group: Any = rng.choice(named) if named and rng.random() < 0.15 else r.group_of(axes)
        n = self.mesh.size if isinstance(group, str) else math.prod(self.mesh.length(a) for a in axes)
        x = self.pick(rng.choice(["real", "real", "real", "int"]))
        way = rng.randrange(5)
        op = rng.choice(["sum", "sum", "avg", "max", "min", "prod"]) if x.type.kind == "real" else rng.choice(["sum", "max"])
        if way == 0 or not x.shape:
            return r.emit("all_reduce", (x,), {"group": group, "op": op})[0]
        d = self.dim(x)
        if way == 1:
            return r.emit("all_gather", (x,), {"group": group, "dim": d})[0] if math.prod(x.shape) * n <= MOST else None
        if way == 2 and x.shape[d] % n:
            x = r.emit("all_gather", (x,), {"group": group, "dim": d})[0]
            if math.prod(x.shape) > MOST:
                return None
        if way == 2 or len(x.shape) < 2:
            return r.emit("reduce_scatter", (x,), {"group": group, "dim": d, "op": op})[0]
        return r.emit("all_to_all", (x,), {"group": group, "split_dim": d, "concat_dim": self.dim(x)})[0]

    def by_rank(self) -> Tensor:
        """A tensor that holds something of the rank."""
        rng, r = self.rng, self.b
        assert self.mesh is not None
        x = self.pick("real")
        way = rng.randrange(4)
        if way == 0:
            return r.mul(x, value=self.number())
        if way == 1:
            me = r.full(shape=(), value=r.each_rank(lambda k: k), dtype="i64")
            hit = r.eq(me, value=rng.randrange(self.mesh.size + 2))
            return r.where(hit, x, r.mul(x, value=2))
        if way == 2:
            axis = rng.choice(self.mesh.names)
            me = r.full(shape=(), value=r.each(lambda at: at[axis]), dtype="i64")
            return r.mul(x, r.float(r.lt(me, value=rng.randrange(self.mesh.length(axis) + 1))))
        return r.full(shape=x.shape, value=self.number())

    def ring(self) -> Tensor:
        """A tensor handed on along a mesh axis."""
        rng, r = self.rng, self.b
        assert self.mesh is not None
        mesh, x = self.mesh, self.pick("real")
        axis, by = rng.choice(self.mesh.names), rng.choice([1, 1, 2, -1])
        n = mesh.length(axis)

        def other(rank: int, step: int) -> int:
            at = mesh.coordinates(rank)
            return mesh.rank({**at, axis: (at[axis] + step) % n})

        if by % n == 0:
            return None
        tag = rng.randint(1, 5)
        batch = f"ring.{len(r.ops)}"
        r.send(x, r.each_rank(lambda k: other(k, by)), tag, batch)
        return r.recv(x.shape, r.each_rank(lambda k: other(k, -by)), x.type.dtype, tag, batch, name=r.fresh("ring"))


def anything(seed: int) -> tuple[Program, Plan]:
    rng = random.Random(seed)
    sizes = rng.sample(SIZES, 4)
    logical = _logical(rng, sizes)
    return logical, _plan(rng, sizes, logical)


def _logical(rng: random.Random, sizes: Sequence[int]) -> Program:
    b = tv.program("anything")
    maker = Maker(rng, b, sizes)
    for n in range(rng.randint(2, 4)):
        shape = tuple(rng.choice(sizes) for _ in range(rng.choice([1, 2, 2, 3, 3, 4])))
        while math.prod(shape) > MOST:
            shape = shape[1:]
        maker.made.append(b.input(f"x{n}", shape) if rng.random() < 0.6 else b.parameter(f"x{n}", shape))
    for n in range(rng.randint(0, 2)):
        x = rng.choice(maker.made)
        shape = rng.choice([x.shape[:-1], x.shape, (rng.choice(sizes),)])
        maker.made.append(b.input(f"i{n}", shape, dtype="i64", ids=rng.choice(sizes) + 1, ignore=rng.choice([None, IGNORE])))
    if rng.random() < 0.5:
        maker.made.append(b.input("m", rng.choice(maker.made).shape, dtype="bool"))
    maker.grow(rng.randint(4, 14))
    b.loss(b.sum(b.mul(maker.pick(), value=2), name="loss"))
    return b.build()


def _mesh(rng: random.Random) -> tv.Mesh:
    names = rng.sample(["dp", "tp", "cp"], rng.choice([1, 1, 2, 2, 3]))
    found = {n: rng.choice([2, 3, 4, 5, 6, 8, 12]) for n in names}
    while math.prod(found.values()) > 40:
        found[max(found, key=lambda n: found[n])] = 2
    return tv.Mesh(tuple(found.items()))


def _plan(rng: random.Random, sizes: Sequence[int], logical: Program) -> Plan:
    mesh = _mesh(rng)
    p = tv.plan("anything", mesh)
    for k in range(rng.choice([0, 0, 1])):
        p.group(f"all{k}", rng.sample(range(mesh.size), mesh.size) if rng.random() < 0.5 else list(range(mesh.size)))
    if rng.random() < 0.15 and mesh.size % 2 == 0:
        _irregular(rng, p, mesh)
    apart = rng.choice(mesh.names) if rng.random() < 0.25 else None
    if apart is None:
        with p.ranks() as r:
            _program(rng, sizes, logical, mesh, r, None)
        return p.build()
    script = rng.random()
    where: dict[str, Any] = {apart: 0}
    with p.ranks(**where) as first:
        rest = [k for k in range(mesh.size) if mesh.coordinates(k)[apart] != 0]
        with p.ranks(*rest) as others:
            _two(rng, sizes, logical, mesh, apart, first, others, script)
    return p.build()


def _irregular(rng: random.Random, p: PlanBuilder, mesh: tv.Mesh) -> None:
    """Pairs of ranks that follow no mesh axis."""
    order = rng.sample(range(mesh.size), mesh.size) if rng.random() < 0.5 else list(range(mesh.size))
    if rng.random() < 0.5:
        i, j = rng.sample(range(mesh.size), 2)
        order[i], order[j] = order[j], order[i]
    for k in range(mesh.size // 2):
        p.group(f"pair{k}", (order[2 * k], order[2 * k + 1]))


def _source(rng: random.Random, logical: Program, mesh: tv.Mesh, r: RankBuilder, name: str, lineage: list[Any] | None = None) -> Tensor:
    """A source in a layout of some kind."""
    t = logical.tensors[name]
    shape = list(t.shape)
    into = r._inputs if name in logical.inputs else r._parameters
    free = list(mesh.names)
    rng.shuffle(free)
    way = rng.random()
    if way < 0.1 and shape and shape[0] > 1 and r.ranks == tuple(range(mesh.size)):
        form: Any = Parts(tuple((k, (_any_part(rng, shape, k, mesh.size),)) for k in range(mesh.size)))
        local = (1, *shape[1:])
    else:
        digits: list[list[str]] = [[] for _ in shape]
        for a in free:
            fits = [d for d, s in enumerate(shape) if s % mesh.length(a) == 0 and s >= mesh.length(a)]
            if fits and rng.random() < 0.6:
                d = rng.choice(fits)
                shape[d] //= mesh.length(a)
                digits[d].append(a)
        words = [[*own, f"d{d}"] if rng.random() < 0.7 else [f"d{d}", *own] for d, own in enumerate(digits)]
        form = " ".join(f"({' '.join(w)})" if len(w) > 1 else w[0] for w in words)
        local = tuple(shape)
    made = r._source(into, name, local, t.dtype, logical.domains.get(name))
    if isinstance(form, Parts):
        r._plan.lineage.append(layout(name, form, name))
    else:
        r.lives(made, name, form)
    return made


def _whole(r: RankBuilder, into: Any, name: str, t: Any, logical: Program) -> Tensor:
    made = r._source(into, name, t.shape, t.dtype, logical.domains.get(name))
    r.lives(made, name, " ".join(f"d{d}" for d in range(len(t.shape))))
    return made


def _any_part(rng: random.Random, shape: Sequence[int], rank: int, ranks: int) -> Part:
    """One row of a tensor, by rank."""
    row = min(rank, shape[0] - 1) if rng.random() < 0.9 else rng.randrange(shape[0])
    return Part((0,) * len(shape), (Run(row, 1), *(Run(0, s) for s in shape[1:])))


def _program(rng: random.Random, sizes: Sequence[int], logical: Program, mesh: tv.Mesh, r: RankBuilder, given: Any) -> None:
    maker = Maker(rng, r, sizes, mesh)
    for name in (*logical.inputs, *logical.parameters):
        maker.made.append(_source(rng, logical, mesh, r, name))
    pairs = {m: g for g, ms in r._plan.groups.items() if g.startswith("pair") for m in ms}
    if pairs:
        x = maker.pick()
        maker.made += r.emit("all_reduce", (x,), {"group": r.each_rank(lambda k: pairs[k]), "op": rng.choice(["sum", "max"])})
        maker.made += r.emit("all_gather", (x,), {"group": r.each_rank(lambda k: pairs[k]), "dim": 0}) if x.shape else ()
    maker.grow(rng.randint(6, 18))
    r.loss(r.sum(maker.pick(), name="loss"))


def _two(
    rng: random.Random, sizes: Sequence[int], logical: Program, mesh: tv.Mesh, apart: str, a: RankBuilder, b: RankBuilder, script: float
) -> None:
    """Two programs: one gives to the other along an axis, by the collectives that have a root, or by a message."""
    first, second = Maker(rng, a, sizes, mesh), Maker(rng, b, sizes, mesh)
    for maker in (first, second):
        for name in (*logical.inputs, *logical.parameters):
            maker.made.append(_two_source(logical, maker.b, name))
        maker.steps = [(w, f) for w, f in maker.steps if f not in (maker.collective, maker.ring)]
        maker.grow(rng.randint(3, 8))
    x = first.pick()
    group_a, group_b = a.group_of(apart), b.group_of(apart)

    def root(rank: int) -> int:
        return mesh.rank({**mesh.coordinates(rank), apart: 0})

    roots = a.each_rank(root), b.each_rank(root)
    way = rng.randrange(4)
    if way == 0:
        first.made.append(a.broadcast(x, group=apart, root=roots[0]))
        second.made.append(b.broadcast(None, group=apart, root=roots[1], shape=x.shape, dtype=x.type.dtype))
    elif way == 1:
        y = second.like(x)
        if y in second.made and y.type == x.type:
            op = rng.choice(["sum", "avg", "max"])
            made = a.emit("reduce", (x,), {"group": group_a, "root": roots[0], "op": op})
            first.made += made
            _silent(b, "reduce", y, {"group": group_b, "root": roots[1], "op": op})
    elif way == 2 and mesh.length(apart) == 2:
        a.send(x, a.peer(**{apart: 1}))
        second.made.append(b.recv(x.shape, b.peer(**{apart: 0}), x.type.dtype))
    for maker in (first, second):
        maker.grow(rng.randint(2, 6))
    both = [t for t in first.made if any(t.shape == s.shape and t.type == s.type for s in second.made) and t.type.kind == "real"]
    if both:
        x = rng.choice(both)
        y = rng.choice([s for s in second.made if s.shape == x.shape and s.type == x.type])
        op = rng.choice(["sum", "avg", "max", "prod"])
        first.made += a.emit("all_reduce", (x,), {"group": group_a, "op": op})
        second.made += b.emit("all_reduce", (y,), {"group": group_b, "op": op})
        if x.shape and math.prod(x.shape) * mesh.length(apart) <= MOST:
            first.made += a.emit("all_gather", (x,), {"group": group_a, "dim": 0})
            second.made += b.emit("all_gather", (y,), {"group": group_b, "dim": 0})
    for maker in (first, second):
        maker.grow(rng.randint(1, 5))
        maker.b.loss(maker.b.sum(maker.pick(), name="loss"))


def _two_source(logical: Program, r: RankBuilder, name: str) -> Tensor:
    t = logical.tensors[name]
    into = r._inputs if name in logical.inputs else r._parameters
    return _whole(r, into, name, t, logical)


def _silent(b: RankBuilder, name: str, x: Tensor, attrs: dict[str, Any]) -> None:
    """A collective that gives this rank nothing."""
    b.ops.append(Op(name, (x.name,), (), attributes(attrs), b.phase, None, caller()))
