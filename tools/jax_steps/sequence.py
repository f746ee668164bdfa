"""The positions of a sequence are cut over ranks: attention over gathered keys, by rings and by all-to-alls; sums that go on."""

from __future__ import annotations

from typing import Final

from tools.jax_steps import models
from tools.jax_steps.code import Draft
from tools.jax_steps.containers import Shape, container
from tools.jax_steps.cores import Array, Core, differentiated, loss_function, own_functions
from tools.jax_steps.data_parallel import loss_value

GATHER: Final = 'lax.all_gather({}, "sp", axis=1, tiled=True)'


def core(draft: Draft, accumulates: bool) -> Core:
    rng, size = draft.rng, draft.size
    length = size * rng.choice((2, 3))
    kind = rng.choice((_attention, _attention, _heads, _linear, _prefix, _neighbours))
    name, shapes, lines = kind(draft, length)
    shapes = {"table": (8, 4), "place": (length, 4), **shapes, "end": (4, 8)}
    params = container(rng, shapes)
    part = length // size
    start = draft.inner(
        f'lax.axis_index("sp") * {part}',
        {
            "places-without-offset": "0",
            "places-of-another-rank": f'({size - 1} - lax.axis_index("sp")) * {part}',
            "places-one-off": f'lax.axis_index("sp") * {part} + 1',
        },
        lone=True,
    )
    if rng.random() < 0.5:
        places = f"R|place = lax.dynamic_slice_in_dim(@place, {start}, {part})"
    else:
        places = f"R|place = @place[jnp.arange({part}) + {start}]"
    before = ["1|place = @place", places, "e = @table[x] + place"]
    loss, more = _labels(draft, length)
    forward = "\n".join([*before, *lines, "h = e + h", "out = h @ @end"])
    made = models.Model(name, shapes, forward, f"tvj.Ids((2, {length}), below=8)", (2, length), 8)
    function = loss_function(params, made, loss, masked=more)
    grads = differentiated(rng)
    op, other = ("pmean", "psum") if loss.kind == "mean" else ("psum", "pmean")
    if draft.vma:
        divided = f"jax.tree.map(lambda g: g / {size}, grads)"
        good, bad = (
            (divided, {"automatic-sum-not-divided": "grads", "mean-of-an-automatic-sum": 'lax.pmean(grads, "sp")'})
            if loss.kind == "mean"
            else ("grads", {"automatic-sum-divided": divided})
        )
    else:
        good, bad = (
            f'lax.{op}(grads, "sp")',
            {"gradients-not-reduced": "grads", "sum-for-mean" if op == "pmean" else "mean-for-sum": f'lax.{other}(grads, "sp")'},
        )
    reduced = f"R|grads = {draft.site(good, bad, tree=True)}\nR|loss = {loss_value(draft, loss.kind)}"
    spec = 'P(None, "sp")'
    batch = (Array("x", made.x, spec), *([Array("y", loss.y, spec)] if loss.y else [Array("y", f"tvj.Ids((2, {length}), below=8)", spec)]))
    functions = (*own_functions(function), ("loss_of", function))
    return Core("sequence parallel", (name, loss.kind), {"sp": size}, params, batch, functions, f"{grads}\n{reduced}")


def _labels(draft: Draft, length: int) -> tuple[models.Loss, str]:
    """Labels of their own, or the next tokens, of which a rank's last comes from its neighbour."""
    rng, size = draft.rng, draft.size
    labels = f"tvj.Ids((2, {length}), below=8)"
    each = rng.choice(models.LABELLED).replace("OUT", "8")
    kind = rng.random()
    if kind < 0.5:
        return models.Loss("mean", f"loss = jnp.mean({each})", labels), ""
    count = draft.inner('lax.psum(count, "sp")', {} if draft.vma else {"count-of-one-rank": "count"})
    if kind < 0.75:
        return models.Loss("masked", f"losses = {each}\n{rng.choice(models.COUNTS)}", labels), f"R|count = {count}"
    pairs = [((i + 1) % size, i) for i in range(size)]
    bad = {"label-from-own-rank": "x[:, :1]"}
    if size > 2:
        bad["label-from-the-rank-before"] = f'lax.ppermute(x[:, :1], "sp", {[(b, a) for a, b in pairs]})'
    first = draft.inner(f'lax.ppermute(x[:, :1], "sp", {pairs})', bad)
    at = f'lax.axis_index("sp") * {length // size}'
    last = draft.inner(
        f"jnp.arange(x.shape[1]) + {at} < {length - 1}",
        {"last-position-of-every-rank-left-out": "jnp.arange(x.shape[1]) < x.shape[1] - 1"},
        lone=True,
    )
    if draft.vma:
        last = f"jnp.arange(x.shape[1]) + {at} < {length - 1}"
    text = f"""1|y = jnp.roll(x, -1, axis=1)
1|mask = jnp.arange(x.shape[1]) < {length - 1}
R|y = jnp.concatenate([x[:, 1:], {first}], axis=1)
R|mask = {last}
losses = {each}
total = jnp.sum(losses * mask)
count = jnp.sum(jnp.broadcast_to(mask, losses.shape))"""
    return models.Loss("masked", text, ""), f"R|count = {count}"


def _attention(draft: Draft, length: int) -> tuple[str, dict[str, Shape], list[str]]:
    """Causal attention of own positions to the keys of all."""
    rng, part = draft.rng, length // draft.size
    own = f'lax.axis_index("sp") * {part}'
    at = draft.inner(
        own,
        {
            "mask-without-offset": "0",
            "mask-one-off": f"{own} + 1",
            "mask-of-another-rank": f'({draft.size - 1} - lax.axis_index("sp")) * {part}',
        },
        lone=True,
    )
    both = [rng.choice(("lax.all_gather", "gathered")) for _ in range(1)]
    del both
    backwards = f'lax.all_gather({{}}, "sp", axis=1)[:, ::-1].reshape({{}}.shape[0], {length}, -1)'
    k = draft.inner(
        GATHER.format("k"),
        {"keys-gathered-backwards": backwards.format("k", "k"), "keys-of-own-rank-repeated": f"jnp.tile(k, (1, {draft.size}, 1))"},
    )
    v = draft.inner(
        GATHER.format("v"),
        {"values-gathered-backwards": backwards.format("v", "v"), "values-without-gradient": f"lax.stop_gradient({GATHER.format('v')})"},
    )
    masked = rng.choice(("jnp.where(ok, s, -jnp.inf)", "jnp.where(ok, s, -1e30)", "s + jnp.where(ok, 0.0, -jnp.inf)"))
    lines = [
        "q, k, v = e @ @wq, e @ @wk, e @ @wv",
        f"1|at = jnp.arange({length})",
        f"R|at = jnp.arange({part}) + {at}",
        f"R|k = {k}",
        f"R|v = {v}",
        's = jnp.einsum("nqd,nkd->nqk", q, k) / 2.0',
        f"ok = at[:, None] >= jnp.arange({length})[None, :]",
        f"h = jax.nn.softmax({masked}, axis=-1) @ v",
    ]
    return "attention", dict.fromkeys(("wq", "wk", "wv"), (4, 4)), lines


def _heads(draft: Draft, length: int) -> tuple[str, dict[str, Shape], list[str]]:
    """Positions are exchanged for heads and back."""
    heads = draft.size
    good = 'lax.all_to_all({}, "sp", split_axis=2, concat_axis=1, tiled=True)'
    there = {
        name: draft.inner(
            good.format(name), {f"{name}-not-in-order": f'lax.all_to_all({name}[:, ::-1], "sp", split_axis=2, concat_axis=1, tiled=True)'}
        )
        for name in "qkv"
    }
    there["v"] = draft.inner(
        good.format("v"), {"heads-of-another-rank": f"({good.format('v[:, :, ::-1]')})", "values-turned": good.format("v[:, ::-1]")}
    )
    back = draft.inner(
        'lax.all_to_all(o, "sp", split_axis=1, concat_axis=2, tiled=True)',
        {"heads-turned-on-the-way-back": 'lax.all_to_all(o[:, ::-1], "sp", split_axis=1, concat_axis=2, tiled=True)'},
    )
    lines = [
        f"q, k, v = ((e @ w).reshape(e.shape[0], -1, {heads}, 2) for w in (@wq, @wk, @wv))",
        *(f"R|{name} = {there[name]}" for name in "qkv"),
        's = jnp.einsum("nqhd,nkhd->nhqk", q, k) / 2**0.5',
        f"s = jnp.where(jnp.tril(jnp.ones(({length}, {length}), bool)), s, -jnp.inf)",
        'o = jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(s), v)',
        f"R|o = {back}",
        "h = o.reshape(o.shape[0], -1, W) @ @wo".replace("W", str(2 * heads)),
    ]
    return "heads exchanged", {**dict.fromkeys(("wq", "wk", "wv"), (4, 2 * heads)), "wo": (2 * heads, 4)}, lines


def _linear(draft: Draft, length: int) -> tuple[str, dict[str, Shape], list[str]]:
    """Attention without a softmax: keys times values go round a ring, or are summed."""
    rng, size = draft.rng, draft.size
    pairs = [(i, (i + 1) % size) for i in range(size)]
    if rng.random() < 0.5:
        total = draft.inner(
            'lax.psum(kv, "sp")',
            {"mean-of-keys-and-values": 'lax.pmean(kv, "sp")'} | ({} if draft.vma else {"keys-and-values-of-own-rank": "kv"}),
        )
        lines = ["kv = k.swapaxes(1, 2) @ v", f"R|kv = {total}", "h = q @ kv"]
    else:
        send = draft.lines(f"{pairs}", {"ring-incomplete": f"{pairs[:-1]}", "ring-to-itself": f"{[(i, i) for i in range(size)]}"})
        steps = draft.lines(f"{size}", {"ring-one-short": f"{size - 1}", "ring-one-long": f"{size + 1}"})
        lines = [
            "1|h = q @ (k.swapaxes(1, 2) @ v)",
            "R|h = q @ (k.swapaxes(1, 2) @ v)",
            f"R|for _ in range(1, {steps}):",
            f'R|    k, v = lax.ppermute((k, v), "sp", {send})',
            "R|    h = h + q @ (k.swapaxes(1, 2) @ v)",
        ]
    return "linear attention", dict.fromkeys(("wq", "wk", "wv"), (4, 4)), ["q, k, v = e @ @wq, e @ @wk, e @ @wv", *lines]


def _prefix(draft: Draft, length: int) -> tuple[str, dict[str, Shape], list[str]]:
    """A running sum over positions: ranks add what those before them have."""
    size, rng = draft.size, draft.rng
    rank = 'lax.axis_index("sp")'
    if rng.random() < 0.5:
        good = f'jnp.tensordot((jnp.arange({size}) < {rank}).astype(REAL), lax.all_gather(c[:, -1], "sp"), 1)'
        bad = {
            "own-part-added-again": good.replace("<", "<="),
            "parts-behind-added": good.replace("<", ">"),
            "nothing-added": "jnp.zeros_like(c[:, -1])",
        }
        lines = [f"R|c = c + {draft.inner(good, {} if draft.vma else bad)}[:, None]"]
    else:
        pairs = draft.lines(
            f"{[(i, i + 1) for i in range(size - 1)]}",
            {
                "sums-sent-backwards": f"{[(i + 1, i) for i in range(size - 1)]}",
                "sums-sent-around": f"{[(i, (i + 1) % size) for i in range(size)]}",
            },
        )
        lines = [
            "R|last = c[:, -1]",
            f"R|for _ in range({size - 1}):",
            f'R|    last = lax.ppermute(last, "sp", {pairs})',
            "R|    c = c + last[:, None]",
        ]
    return "running sum", {"w1": (4, 4), "w2": (4, 4)}, ["c = jnp.cumsum(e @ @w1, axis=1)", *lines, f"h = jnp.tanh(c / {length}) @ @w2"]


def _neighbours(draft: Draft, length: int) -> tuple[str, dict[str, Shape], list[str]]:
    """Each position looks at the one before it; the first of a rank is the last of its neighbour."""
    size = draft.size
    pairs = [(i, i + 1) for i in range(size - 1)]
    bad = {
        "neighbour-on-the-other-side": f'lax.ppermute(e[:, -1:], "sp", {[(b, a) for a, b in pairs]})',
        "neighbours-in-a-ring": f'lax.ppermute(e[:, -1:], "sp", {[(i, (i + 1) % size) for i in range(size)]})',
        "first-instead-of-last": f'lax.ppermute(e[:, :1], "sp", {pairs})',
    }
    if not draft.vma:
        bad["no-neighbour"] = "jnp.zeros_like(e[:, -1:])"
    got = draft.inner(f'lax.ppermute(e[:, -1:], "sp", {pairs})', bad)
    lines = [
        "1|first = jnp.zeros_like(e[:, -1:])",
        f"R|first = {got}",
        "before = jnp.concatenate([first, e[:, :-1]], axis=1)",
        "h = jnp.tanh(e @ @w1 + before @ @w2)",
    ]
    return "neighbours", {"w1": (4, 4), "w2": (4, 4)}, lines
