"""Weights are cut over ranks that all have the whole batch: columns and rows, heads, vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tools.jax_steps import models
from tools.jax_steps.code import Draft
from tools.jax_steps.containers import Container, Shape, container
from tools.jax_steps.cores import Array, Core, differentiated, loss_function, own_functions
from tools.jax_steps.sharded import squares

IDENTITY: Final = """@partial(jax.custom_vjp, nondiff_argnums=(1,))
def enter(x, axis):
    return x


enter.defvjp(lambda x, axis: (x, None), lambda axis, _, g: (RULE,))"""
TOTAL: Final = """@partial(jax.custom_vjp, nondiff_argnums=(1,))
def leave(x, axis):
    return lax.psum(x, axis)


leave.defvjp(lambda x, axis: (lax.psum(x, axis), None), lambda axis, _, g: (RULE,))"""


def core(draft: Draft, accumulates: bool) -> Core:
    both = draft.size == 2 and draft.rng.random() < 0.5  # rows are cut too
    kind = draft.rng.choice((_layers, _layers, _heads, _vocabulary))
    return kind(draft, both)


def _functions(draft: Draft) -> list[tuple[str, str]]:
    """The pair of functions around a region that is cut; with check_vma JAX knows their derivatives."""
    if draft.vma:
        return []
    enter = draft.lines("lax.psum(g, axis)", {"gradient-of-input-not-summed": "g", "mean-gradient-of-input": "lax.pmean(g, axis)"})
    leave = draft.lines("g", {"gradient-of-output-summed": "lax.psum(g, axis)", "gradient-of-output-averaged": "g / lax.psum(1, axis)"})
    return [("enter", IDENTITY.replace("RULE", enter)), ("leave", TOTAL.replace("RULE", leave))]


def _entered(draft: Draft, x: str) -> str:
    return x if draft.vma else draft.inner(f'enter({x}, "tp")', {"region-not-entered": x})


def _left(draft: Draft, x: str) -> str:
    if draft.vma:
        return draft.inner(
            f'lax.psum({x}, "tp")',
            {
                "mean-of-parts": f'lax.pmean({x}, "tp")',
                "parts-summed-twice": f'lax.psum(lax.pcast(lax.psum({x}, "tp"), "tp", to="varying"), "tp")',
            },
        )
    bad = {
        "parts-not-summed": x,
        "mean-of-parts": f'lax.pmean({x}, "tp")',
        "parts-summed-twice": f'leave(leave({x}, "tp"), "tp")',
        "sum-without-its-rule": f'lax.psum({x}, "tp")',
        "parts-of-one-rank": f'lax.all_gather({x}, "tp")[0]',
        "sum-without-gradient": f'lax.stop_gradient(leave({x}, "tp"))',
    }
    return draft.inner(f'leave({x}, "tp")', bad)


def _layers(draft: Draft, both: bool) -> Core:
    rng = draft.rng
    hidden, middle, out = rng.choice((4, 8)), rng.choice((4, 8)), 3
    width = 4
    biased, twice = rng.random() < 0.5, rng.random() < 0.6
    shapes: dict[str, Shape] = {"start": (width, hidden), "up1": (hidden, middle), "down1": (middle, hidden), "end": (hidden, out)}
    specs = {"up1": 'P(None, "tp")', "down1": 'P("tp", None)'}
    if twice:
        shapes |= {"up2": (hidden, middle), "down2": (middle, hidden)}
        specs |= {"up2": 'P(None, "tp")', "down2": 'P("tp", None)'}
    if biased:
        shapes |= {"inner1": (middle,), "outer1": (hidden,)}
        specs["inner1"] = 'P("tp")'
    params = container(rng, shapes, specs)
    act = rng.choice(("jnp.tanh({})", "jax.nn.gelu({})", "jax.nn.silu({})", "jax.nn.relu({})"))
    lines = ["h = x @ @start"]
    for n in (1, 2) if twice else (1,):
        inner = f"z @ @up{n}" + (" + @inner1" if biased and n == 1 else "")
        down = f"{act.format(inner)} @ @down{n}"
        lines += ["1|z = h", f"R|z = {_entered(draft, 'h')}"]
        if biased and n == 1:
            outer = params.access("outer1")
            part = draft.lines("", {"bias-on-every-rank": f" + {outer}"})
            after = draft.lines(outer, {"bias-on-every-rank": "0.0"})
            lines += [f"1|z = {down}", f"R|part = {down}{part}", f"R|z = {_left(draft, 'part')} + {after}", "1|z = z + @outer1"]
        else:
            lines += [f"1|z = {down}", f"R|part = {down}", f"R|z = {_left(draft, 'part')}"]
        lines.append(rng.choice(("h = h + z", "h = jnp.tanh(z)", "h = h + jnp.tanh(z)")))
    lines.append("out = h @ @end")
    made = models.Model("mlp", shapes, "\n".join(lines), f"tvj.Reals((4, {width}), REAL)", (4,), out)
    return _finished(draft, both, made, params, ("two blocks" if twice else "one block",))


def _heads(draft: Draft, both: bool) -> Core:
    rng, size = draft.rng, draft.size
    heads, per, length, out = size, 2, rng.choice((3, 5)), 3
    hidden = heads * per
    shapes = {"table": (7, 6), "wq": (6, hidden), "wk": (6, hidden), "wv": (6, hidden), "wo": (hidden, 6), "end": (6, out)}
    specs = {**dict.fromkeys(("wq", "wk", "wv"), 'P(None, "tp")'), "wo": 'P("tp", None)'}
    params = container(rng, shapes, specs)
    causal = rng.choice(
        (
            f"s = jnp.where(jnp.tril(jnp.ones(({length}, {length}), bool)), s, -jnp.inf)",
            f"s = jnp.where(jnp.arange({length})[:, None] >= jnp.arange({length}), s, -1e9)",
        )
    )
    lines = [
        "e = @table[x]",
        "1|z = e",
        f"R|z = {_entered(draft, 'e')}",
        f"q, k, v = ((z @ w).reshape(-1, {length}, w.shape[1] // {per}, {per}) for w in (@wq, @wk, @wv))",
        f's = jnp.einsum("nqhd,nkhd->nhqk", q, k) / {per} ** 0.5',
        causal,
        f'o = jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(s, axis=-1), v).reshape(z.shape[0], {length}, -1)',
        "part = o @ @wo",
        "1|z = part",
        f"R|z = {_left(draft, 'part')}",
        "h = e + z",
        rng.choice(("out = h[:, -1] @ @end", "out = h.mean(1) @ @end", "out = h @ @end")),
    ]
    rows = (4, length) if lines[-1] == "out = h @ @end" else (4,)
    made = models.Model("heads", shapes, "\n".join(lines), f"tvj.Ids((4, {length}), below=7)", rows, out)
    return _finished(draft, both, made, params, ())


def _vocabulary(draft: Draft, both: bool) -> Core:
    """The embedding and the last layer are cut over the vocabulary; no rank has all logits."""
    rng, size = draft.rng, draft.size
    vocabulary, hidden = 8, rng.choice((3, 5))
    part = vocabulary // size
    shapes = {"table": (vocabulary, hidden), "w1": (hidden, hidden), "head": (hidden, vocabulary)}
    params = container(rng, shapes, {"table": 'P("tp", None)', "head": 'P(None, "tp")'})
    start = draft.inner(
        f'lax.axis_index("tp") * {part}', {"another-offset": f'(lax.axis_index("tp") + 1) * {part}', "no-offset": "0"}, lone=True
    )
    here = draft.inner(
        f"(local >= 0) & (local < {part})",
        {
            "mask-one-too-far": f"(local >= 0) & (local <= {part})",
            "mask-missing": "jnp.ones(local.shape, bool)",
            "mask-at-one-side": f"local < {part}",
        },
        lone=True,
    )
    look = rng.choice(
        (
            f"jnp.where(here[..., None], @table[jnp.clip(local, 0, {part - 1})], 0.0)",
            "jnp.take(@table, jnp.where(here, local, 0), axis=0) * here[..., None]",
        )
    )
    low = f'low = lax.axis_index("tp") * {part}'
    top = draft.inner('lax.pmax(m, "tp")', {} if draft.vma else {"largest-of-own-part": "m"})
    total = _left(draft, "jnp.exp(logits - m[:, None]).sum(-1)")
    picked_low = draft.inner("y - low", {"labels-without-offset": "y"})
    picked = _left(
        draft,
        f"jnp.where((mine >= 0) & (mine < {part}), jnp.take_along_axis(logits, jnp.clip(mine, 0, {part - 1})[:, None], 1)[:, 0], 0.0)",
    )
    lines = [
        "1|e = @table[x].mean(1)",
        f"R|local = x - {start}",
        f"R|here = {here}",
        f"R|part = {look}",
        f"R|e = {_left(draft, 'part')}.mean(1)",
        f"h = {models.activation(rng, 'e @ @w1')}",
        "1|z = h",
        f"R|z = {_entered(draft, 'h')}",
        "logits = z @ @head",
        "1|losses = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, y[:, None], 1)[:, 0]",
        f"R|{low}",
        "R|m = lax.stop_gradient(logits.max(-1))",
        f"R|m = {top}",
        f"R|mine = {picked_low}",
        f"R|losses = m + jnp.log({total}) - {picked}",
    ]
    made = models.Model("vocabulary", shapes, "\n".join(lines), "tvj.Ids((4, 3), below=8)", (4,), vocabulary)
    loss = models.Loss("mean", "loss = losses.mean()", "tvj.Ids((4,), below=8)")
    return _finished(draft, both, made, params, (), loss)


def _finished(
    draft: Draft, both: bool, made: models.Model, params: Container, names: tuple[str, ...], given: models.Loss | None = None
) -> Core:
    rng = draft.rng
    loss = given or models.loss(rng, made, ("mean", "sum") if both else ("mean", "sum", "masked"))
    function = loss_function(params, made, loss)
    lines = differentiated(rng)
    mesh = {"dp": 2, "tp": draft.size} if both else {"tp": draft.size}
    mean = loss.kind == "mean"
    if both:
        op, other = ("pmean", "psum") if mean else ("psum", "pmean")
        bad = {"sum-for-mean" if mean else "mean-for-sum": f'lax.{other}(grads, "dp")'}
        good = f'lax.{op}(grads, "dp")'
        if draft.vma:
            good, bad = (
                ("jax.tree.map(lambda g: g / 2, grads)", {"automatic-sum-not-divided": "grads"})
                if mean
                else ("grads", {"automatic-sum-divided": "jax.tree.map(lambda g: g / 2, grads)"})
            )
        else:
            bad |= {
                "gradients-not-reduced": "grads",
                "reduced-over-another-axis": f'lax.{op}(grads, "tp")',
                "reduced-over-both-axes": f'lax.{op}(grads, ("dp", "tp"))',
            }
            bad = {name: text for name, text in bad.items() if mean or name != "reduced-over-both-axes"}
        lines += f"\nR|grads = {draft.site(good, bad, tree=True)}"
        bad = {"loss-reduced-otherwise": f'lax.{other}(loss, "dp")'} | ({} if draft.vma else {"loss-not-reduced": "loss"})
        total = draft.site(f'lax.{op}(loss, "dp")', bad)
        lines += f"\nR|loss = {total}"
    elif not draft.vma:
        bad = {"gradients-summed-over-replicas": 'lax.psum(grads, "tp")', "different-shards-averaged": 'lax.pmean(grads, "tp")'}
        lines += f"\nR|grads = {draft.site('grads', bad, tree=True)}"
    functions = (*_functions(draft), *own_functions(function), ("loss_of", function))
    spec = 'P("dp")' if both else "P()"
    batch = (Array("x", made.x, spec), Array("y", loss.y, spec))
    family = "tensor and data parallel" if both else "tensor parallel"
    found = Core(family, (made.name, loss.kind, *names), mesh, params, batch, functions, lines)
    return replace(found, whole=False, squares=squares(draft, params, "tp"))
