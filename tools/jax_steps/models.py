"""Models that take rows, and losses over these. Text in which `@name` is a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

from tools.jax_steps.containers import Shape

Kind = Literal["mean", "sum", "masked"]
ACTIVATIONS: Final = (
    "jnp.tanh({})",
    "jax.nn.relu({})",
    "jax.nn.gelu({})",
    "jax.nn.gelu({}, approximate=False)",
    "jax.nn.silu({})",
    "jax.nn.sigmoid({})",
    "jnp.square({})",
    "jnp.maximum({}, 0)",
    "jnp.sin({})",
    "jax.nn.softplus({})",
    "jax.nn.leaky_relu({})",
    "jax.nn.elu({})",
    "halved({})",
    "own_relu({})",
    "jax.checkpoint(jnp.tanh)({})",
    "jax.nn.soft_sign({})",
)
OWN: Final = {  # activations with their own derivatives
    "halved": """@jax.custom_jvp
def halved(h):
    return 0.5 * h * jnp.tanh(h)


@halved.defjvp
def halved_jvp(primals, tangents):
    (h,), (dh,) = primals, tangents
    t = jnp.tanh(h)
    return 0.5 * h * t, 0.5 * (t + h * (1 - t**2)) * dh""",
    "own_relu": """@jax.custom_vjp
def own_relu(h):
    return jnp.where(h > 0, h, 0.0)


own_relu.defvjp(lambda h: (jnp.where(h > 0, h, 0.0), h > 0), lambda positive, g: (jnp.where(positive, g, 0.0),))""",
}


@dataclass(frozen=True)
class Model:
    name: str
    shapes: Mapping[str, Shape]
    forward: str  # lines that leave `h` and `out`, from `params` and `x`
    x: str  # its declaration
    rows: Shape  # of `out`, without the features
    out: int


@dataclass(frozen=True)
class Loss:
    kind: Kind
    text: str  # lines that leave `loss`, or `total` and `count`
    y: str  # the declaration of `y`


def activation(rng: Random, inner: str) -> str:
    return rng.choice(ACTIVATIONS).format(inner)


def model(rng: Random, rows: int, even: bool = False) -> Model:
    """`even`: the first dimension of weights can be cut into 2 or 4."""
    hidden, width, out = rng.choice((4, 8)), rng.choice((4, 8) if even else (3, 5)), rng.choice((3, 5))
    made = rng.choice((_mlp, _mlp, _scanned, _normed, _embedding, _attention, _vmapped, _tied, _sliced, _experts, _bags, _convolved))
    return made(rng, rows, width, hidden, out)


def _reals(*shape: int) -> str:
    return f"tvj.Reals({shape}, REAL)"


def _mlp(rng: Random, rows: int, width: int, hidden: int, out: int) -> Model:
    biased = rng.random() < 0.7
    shapes = {"w1": (width, hidden), **({"b1": (hidden,)} if biased else {}), "w2": (hidden, out)}
    dot = rng.choice(("x @ @w1", "jnp.dot(x, @w1)", 'jnp.einsum("nk,kh->nh", x, @w1)'))
    inner = f"{dot} + @b1" if biased else dot
    return Model("mlp", shapes, f"h = {activation(rng, inner)}\nout = h @ @w2", _reals(rows, width), (rows,), out)


def _scanned(rng: Random, rows: int, width: int, hidden: int, out: int) -> Model:
    layer = rng.choice(("h + jnp.tanh(h @ w)", "jax.nn.silu(h @ w)", "h - 0.1 * jnp.tanh(h @ w)"))
    body = rng.choice(
        (
            f"h, _ = lax.scan(lambda h, w: ({layer}, None), x @ @start, @layers)",
            f"h, _ = lax.scan(jax.checkpoint(lambda h, w: ({layer}, None)), x @ @start, @layers)",
            f"h = x @ @start\nfor w in @layers:\n    h = {layer}",
            f"h = lax.fori_loop(0, 2, lambda i, h: (lambda w: {layer})(@layers[i]), x @ @start)",
            f"def block(h, w):\n    return {layer}\n\nh = x @ @start\nfor i in range(2):\n    h = jax.jit(jax.remat(block))(h, @layers[i])",
        )
    )
    shapes = {"start": (width, hidden), "layers": (2, hidden, hidden), "end": (hidden, out)}
    return Model("layers", shapes, f"{body}\nout = h @ @end", _reals(rows, width), (rows,), out)


def _normed(rng: Random, rows: int, width: int, hidden: int, out: int) -> Model:
    norm = rng.choice(
        (
            "h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-3) * @gain",
            "h = h * lax.rsqrt(jnp.mean(jnp.square(h), axis=-1, keepdims=True) + 1e-3) * @gain",
            "h = jax.nn.standardize(h, axis=-1, epsilon=1e-3) * @gain",
        )
    )
    shapes = {"w1": (width, hidden), "gain": (hidden,), "w2": (hidden, out)}
    return Model("normed", shapes, f"h = jnp.tanh(x @ @w1)\n{norm}\nout = h @ @w2", _reals(rows, width), (rows,), out)


def _embedding(rng: Random, rows: int, width: int, hidden: int, out: int) -> Model:
    look = rng.choice(("@table[x]", "jnp.take(@table, x, axis=0)", "jax.nn.one_hot(x, 8, dtype=REAL) @ @table", "@table.at[x].get()"))
    pool = rng.choice((".mean(1)", ".sum(axis=1)", "[:, -1]", "[:, 0] + e[:, -2]", ".max(1)"))
    forward = f"e = {look}\nh = {activation(rng, 'e' + pool)}\nout = h @ @w1"
    return Model("embedding", {"table": (8, hidden), "w1": (hidden, out)}, forward, f"tvj.Ids(({rows}, {width}), below=8)", (rows,), out)


MASKS: Final = (
    "scores = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores, -jnp.inf)",
    "scores = jnp.where(jnp.arange(S)[:, None] >= jnp.arange(S)[None, :], scores, -1e30)",
    "scores = jnp.where(jnp.tril(jnp.ones((S, S))) == 0, -jnp.inf, scores)",
    "scores = scores + jnp.where(jnp.triu(jnp.ones((S, S)), 1) > 0, -jnp.inf, 0.0)",
    "scores = jnp.where(lax.broadcasted_iota(int, (S, S), 0) < lax.broadcasted_iota(int, (S, S), 1), -jnp.inf, scores)",
    "",
)


def _attention(rng: Random, rows: int, width: int, hidden: int, out: int) -> Model:
    mask = rng.choice(MASKS).replace("S", str(width))
    lines = ["e = @table[x]", "q, k, v = e @ @wq, e @ @wk, e @ @wv"]
    if rng.random() < 0.4:
        shape = f"({rows}, {width}, 2, {hidden // 2})"
        lines[1] = "q, k, v = (" + ", ".join(f"(e @ @{w}).reshape(-1, {width}, 2, {hidden // 2})" for w in ("wq", "wk", "wv")) + ")"
        lines += [f'scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / {hidden // 2} ** 0.5', mask]
        lines += [f'h = jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores), v).reshape(-1, {width}, {hidden})']
        del shape
    else:
        lines += [f"scores = q @ k.swapaxes(1, 2) / jnp.sqrt({hidden})", mask, "h = jax.nn.softmax(scores, axis=-1) @ v"]
    each = rng.random() < 0.5
    lines.append("out = h @ @wo" if each else "out = h[:, -1] @ @wo")
    shapes = {"table": (8, hidden), **dict.fromkeys(("wq", "wk", "wv"), (hidden, hidden)), "wo": (hidden, out)}
    x = f"tvj.Ids(({rows}, {width}), below=8)"
    return Model("attention", shapes, "\n".join(line for line in lines if line), x, (rows, width) if each else (rows,), out)


def _vmapped(rng: Random, rows: int, width: int, hidden: int, out: int) -> Model:
    forward = f"def one(row):\n    h = {activation(rng, 'row @ @w1')}\n    return h, h @ @w2\n\nh, out = jax.vmap(one)(x)"
    return Model("vmapped", {"w1": (width, hidden), "w2": (hidden, out)}, forward, _reals(rows, width), (rows,), out)


def _tied(rng: Random, rows: int, width: int, hidden: int, out: int) -> Model:
    forward = f"h = {activation(rng, '@table[x].mean(1) * @gain')}\nout = h @ @table.T"
    return Model("tied", {"table": (8, hidden), "gain": (hidden,)}, forward, f"tvj.Ids(({rows}, {width}), below=8)", (rows,), 8)


def _sliced(rng: Random, rows: int, width: int, hidden: int, out: int) -> Model:
    """Slices, turns and picked columns of what comes in."""
    given = rng.choice(
        (
            "x[:, ::-1]",
            "jnp.roll(x, 1, axis=1)",
            "jnp.concatenate([x[:, -2:], x[:, :-2]], axis=1)",
            "x[:, jnp.array([-1, *range(" + str(width - 1) + ")])]",
            "jnp.flip(x, -1)",
            "jnp.pad(x[:, 1:], ((0, 0), (0, 1)))",
            "x.at[:, 0].set(0.5)",
            "x.at[:, -1].add(x[:, 0])",
            "jnp.cumsum(x, axis=1)",
            "x - jnp.max(x, axis=1, keepdims=True)",
            "jnp.clip(x, -1.0, 0.8)",
            "lax.dynamic_slice_in_dim(jnp.concatenate([x, x], 1), 1, " + str(width) + ", axis=1)",
        )
    )
    forward = f"z = {given}\nh = {activation(rng, 'z @ @w1')}\nout = h @ @w2"
    return Model("sliced", {"w1": (width, hidden), "w2": (hidden, out)}, forward, _reals(rows, width), (rows,), out)


def _experts(rng: Random, rows: int, width: int, hidden: int, out: int) -> Model:
    """Every expert sees every row; their outputs are weighted."""
    forward = (
        'gate = jax.nn.softmax(x @ @gate)\nh = jnp.tanh(jnp.einsum("nk,ekh->neh", x, @w1))\nout = jnp.einsum("neh,ne->nh", h, gate) @ @w2'
    )
    return Model("experts", {"gate": (width, 2), "w1": (2, width, hidden), "w2": (hidden, out)}, forward, _reals(rows, width), (rows,), out)


def _bags(rng: Random, rows: int, width: int, hidden: int, out: int) -> Model:
    """Integers made floats: counts of ids, or parities."""
    made = rng.choice(
        (
            "jax.nn.one_hot(x, 8, dtype=REAL).sum(1)",
            "(x % 2).astype(REAL) @ jnp.ones((WIDTH, 8), REAL)",
            "(x[:, :, None] == jnp.arange(8)).sum(1).astype(REAL)",
            "(x[:, :, None] < jnp.arange(8)).mean(1).astype(REAL)",
        )
    ).replace("WIDTH", str(width))
    forward = f"h = {activation(rng, f'{made} @ @w1')}\nout = h @ @w2"
    return Model("bags", {"w1": (8, hidden), "w2": (hidden, out)}, forward, f"tvj.Ids(({rows}, {width}), below=8)", (rows,), out)


def _convolved(rng: Random, rows: int, width: int, hidden: int, out: int) -> Model:
    """A convolution over neighbours, by shifts or by XLA's."""
    by_hand = "z = jnp.pad(x, ((0, 0), (1, 1)))\nc = sum(z[:, i : i + WIDTH] * @taps[i] for i in range(3))"
    by_xla = 'c = lax.conv_general_dilated(x[:, None, :], @taps[None, None, :], (1,), "SAME")[:, 0]'
    made = rng.choice((by_hand, by_hand, by_xla)).replace("WIDTH", str(width))
    forward = f"{made}\nh = {activation(rng, 'c @ @w1')}\nout = h @ @w2"
    shapes = {"taps": (3,), "w1": (width, hidden), "w2": (hidden, out)}
    return Model("convolved", shapes, forward, _reals(rows, width), (rows,), out)


LABELLED: Final = (
    "-jnp.take_along_axis(jax.nn.log_softmax(out), y[..., None], axis=-1)[..., 0]",
    "optax.softmax_cross_entropy_with_integer_labels(out, y)",
    "-jnp.sum(jax.nn.one_hot(y, OUT) * jax.nn.log_softmax(out, axis=-1), axis=-1)",
    "jax.nn.logsumexp(out, -1) - jnp.take_along_axis(out, y[..., None], -1).squeeze(-1)",
    "jax.nn.logsumexp(out, axis=-1) - jnp.sum(jnp.where(y[..., None] == jnp.arange(OUT), out, 0.0), -1)",
)
MEANS: Final = (
    "loss = jnp.mean((out - y) ** 2)",
    "loss = ((out - y) ** 2).sum(-1).mean()",
    "loss = jnp.mean(jnp.square(out - y).mean(-1))",
    "loss = optax.l2_loss(out, y).mean()",
    "loss = jnp.mean(jnp.abs(out - y))",
    "loss = jnp.mean(optax.huber_loss(out, y, delta=0.5))",
    "loss = jnp.mean(jax.vmap(lambda a, b: jnp.sum((a - b) ** 2))(out, y))",
    "loss = jnp.mean(jnp.log(jnp.cosh(out - y)))",
)
SUMS: Final = ("loss = jnp.sum((out - y) ** 2)", "loss = 0.5 * jnp.vdot(out - y, out - y)", "loss = ((out - y) ** 2).mean(-1).sum()")
COUNTS: Final = (
    "mask = y != 0\ntotal = jnp.sum(jnp.where(mask, losses, 0.0))\ncount = jnp.sum(mask)",
    "mask = (y > 0).astype(REAL)\ntotal = jnp.sum(losses * mask)\ncount = mask.sum()",
    "weight = jnp.where(y == 0, 0.0, 1.0)\ntotal = jnp.vdot(losses, weight)\ncount = jnp.sum(weight)",
)


def loss(rng: Random, made: Model, kinds: tuple[Kind, ...] = ("mean", "sum", "masked")) -> Loss:
    kind = rng.choices(kinds, [{"mean": 5, "sum": 2, "masked": 3}[kind] for kind in kinds])[0]
    labels, values = f"tvj.Ids({made.rows}, below={made.out})", f"tvj.Reals({(*made.rows, made.out)}, REAL)"
    each = rng.choice(LABELLED).replace("OUT", str(made.out))
    if kind == "masked":
        return Loss(kind, f"losses = {each}\n{rng.choice(COUNTS)}", labels)
    if kind == "sum":
        return Loss(kind, rng.choice(SUMS), values) if rng.random() < 0.6 else Loss(kind, f"loss = jnp.sum({each})", labels)
    return Loss(kind, rng.choice(MEANS), values) if rng.random() < 0.6 else Loss(kind, f"loss = jnp.mean({each})", labels)
