"""Ranks that exchange values on the way: pipelines, rings of weights, experts by all-to-all."""

from __future__ import annotations

from dataclasses import replace

from tools.jax_steps import models
from tools.jax_steps.code import Draft
from tools.jax_steps.containers import container
from tools.jax_steps.cores import Array, Core, differentiated, loss_function
from tools.jax_steps.data_parallel import loss_value
from tools.jax_steps.sharded import squares


def _ticks(draft: Draft, ring: list[tuple[int, int]], batches: int, act: str) -> str:
    """Lines that leave what the last stage makes of every micro-batch in `out`."""
    rng, size, chain = draft.rng, draft.size, ring[:-1]
    send = draft.lines(
        f"{rng.choice((ring, chain))}",
        {
            "sent-backwards": f"{[(b, a) for a, b in chain]}",
            "one-link-missing": f"{chain[:-1] if size > 2 else []}",
            "sent-to-itself": f"{[(i, i) for i in range(size)]}",
        },
    )
    ticks = batches + size - 1
    given = draft.inner(
        f"x[jnp.minimum(t, {batches - 1})]",
        {"first-micro-batch-only": "x[0]", "micro-batches-backwards": f"x[{batches - 1} - jnp.minimum(t, {batches - 1})]"},
    )
    first = draft.inner(
        f"jnp.where(rank == 0, {given}, carry)", {"input-on-the-last-stage": f"jnp.where(rank == {size - 1}, {given}, carry)"}
    )
    taken = draft.lines(f"[{size - 1}:]", {"outputs-one-early": f"[{size - 2}:-1]", "outputs-of-the-first-ticks": f"[:{batches}]"})
    body = f"z = {act}({{}} @ @layers[0] + @shifts[0])"
    if rng.random() < 0.5:
        return f"""R|outs = []
R|carry = jnp.zeros_like(x[0])
R|for t in range({ticks}):
R|    {body.format(first)}
R|    outs.append(z)
R|    carry = lax.ppermute(z, "pp", {send})
R|out = jnp.stack(outs){taken}"""
    return f"""R|def tick(carry, t):
R|    {body.format(first)}
R|    return lax.ppermute(z, "pp", {send}), z

R|_, outs = lax.scan(tick, jnp.zeros_like(x[0]), jnp.arange({ticks}))
R|out = outs{taken}"""


def pipeline(draft: Draft, accumulates: bool) -> Core:
    """Every rank has one layer; micro-batches go through them one after the other."""
    rng, size = draft.rng, draft.size
    hidden, batches, rows = rng.choice((3, 4)), rng.choice((2, 3)), 2
    params = container(rng, {"layers": (size, hidden, hidden), "shifts": (size, hidden)}, {"layers": 'P("pp")', "shifts": 'P("pp")'})
    act = rng.choice(("jnp.tanh", "jax.nn.silu", "jnp.sin"))
    ring = [(i, (i + 1) % size) for i in range(size)]
    last = draft.inner(
        f"jnp.where(rank == {size - 1}, loss, 0.0)",
        {"loss-of-the-first-stage": "jnp.where(rank == 0, loss, 0.0)", "loss-of-all-stages": "loss"},
    )
    loop = _ticks(draft, ring, batches, act)
    one = f"1|out = x\n1|for i in range({size}):\n1|    out = {act}(out @ @layers[i] + @shifts[i])"
    forward = f'{one}\nR|rank = lax.axis_index("pp")\n{loop}'
    made = models.Model("pipeline", params.shapes, forward, f"tvj.Reals(({batches}, {rows}, {hidden}), REAL)", (batches, rows), hidden)
    loss = models.Loss("mean", rng.choice(models.MEANS[:4]), f"tvj.Reals(({batches}, {rows}, {hidden}), REAL)")
    function = loss_function(params, made, loss, end=f"R|loss = {last}")
    total = draft.site(
        'lax.psum(loss, "pp")',
        {"loss-averaged-over-stages": 'lax.pmean(loss, "pp")'} | ({} if draft.vma else {"loss-of-own-stage": "loss"}),
    )
    gradients = draft.site(
        "grads",
        {"gradients-of-stages-mixed": f'lax.ppermute(grads, "pp", {ring})', "gradients-of-stages-averaged": 'lax.pmean(grads, "pp")'},
        tree=True,
    )
    lines = f"{differentiated(rng)}\nR|grads = {gradients}\nR|loss = {total}"
    batch = (Array("x", made.x, "P()"), Array("y", loss.y, "P()"))
    found = Core("pipeline", ("pipeline",), {"pp": size}, params, batch, (("loss_of", function),), lines)
    return replace(found, whole=False, squares=squares(draft, params, "pp"))


def ring(draft: Draft, accumulates: bool) -> Core:
    """Rows stay, columns of a weight go round."""
    rng, size = draft.rng, draft.size
    width, part, out = rng.choice((3, 5)), 2, 3
    hidden = size * part
    params = container(rng, {"w1": (width, hidden), "w2": (hidden, out)}, {"w1": 'P(None, "dp")'})
    pairs = [(i, (i + 1) % size) for i in range(size)]
    turned = {"ring-turned": f"{[(b, a) for a, b in pairs]}"} if size > 2 else {}  # two ranks have one ring
    send = draft.lines(f"{pairs}", {"ring-incomplete": f"{pairs[:-1]}", **turned})
    rank = 'lax.axis_index("dp")'
    at = draft.inner(
        f"({rank} - i) % {size} * {part}",
        {"place-one-off": f"({rank} - i + 1) % {size} * {part}", "place-without-rank": f"(-i) % {size} * {part}"},
        lone=True,
    )
    steps = draft.lines(f"{size}", {"ring-one-short": f"{size - 1}"})
    body = f'z = lax.dynamic_update_slice_in_dim(z, x @ w, {at}, axis=1)\n    w = lax.ppermute(w, "dp", {send})'
    zeros = f"jnp.zeros((x.shape[0], {hidden}), x.dtype)"
    if draft.vma:
        zeros = f'lax.pcast({zeros}, "dp", to="varying")'
    lines = ["1|z = x @ @w1", f"R|w, z = @w1, {zeros}"]
    if rng.random() < 0.5:
        lines += [f"R|for i in range({steps}):", *(f"R|    {line.strip()}" for line in body.split("\n"))]
    else:
        lines += [
            "R|def turn(i, both):",
            "R|    w, z = both",
            *(f"R|    {line.strip()}" for line in body.split("\n")),
            "R|    return w, z",
            f"R|_, z = lax.fori_loop(0, {steps}, turn, (w, z))",
        ]
    lines += ["h = jnp.tanh(z)", "out = h @ @w2"]
    rows = 2 * size
    made = models.Model("ring", params.shapes, "\n".join(lines), f"tvj.Reals(({rows}, {width}), REAL)", (rows,), out)
    loss = models.loss(rng, made, ("mean", "sum"))
    function = loss_function(params, made, loss)
    scale = f" / {size}" if loss.kind == "mean" else ""
    own, whole = (params.access(name).replace("params", "grads", 1) for name in ("w1", "w2"))
    wrong = "" if scale else f" / {size}"
    name = "sum-for-mean" if scale else "sum-divided"
    w1 = draft.site(f"{own}{scale}", {name: f"{own}{wrong}", "different-shards-averaged": f'lax.pmean({own}, "dp"){scale}'})
    whole_sum = whole if draft.vma else f'lax.psum({whole}, "dp")'
    w2 = draft.site(f"{whole_sum}{scale}", {name: f"{whole_sum}{wrong}"} | ({} if draft.vma else {"whole-parameters-not-reduced": whole}))
    text = f"{differentiated(rng)}\nR|grads = {params.build({'w1': w1, 'w2': w2})}\nR|loss = {loss_value(draft, loss.kind)}"
    batch = (Array("x", made.x, 'P("dp")'), Array("y", loss.y, 'P("dp")'))
    found = Core("ring", ("ring", loss.kind), {"dp": size}, params, batch, (("loss_of", function),), text)
    return replace(found, whole=False, squares=squares(draft, params, "dp"))


def experts(draft: Draft, accumulates: bool) -> Core:
    """Rows of every rank go to the experts of all ranks, by their place, and come back."""
    rng, size = draft.rng, draft.size
    hidden, each, out = rng.choice((3, 4)), rng.choice((1, 2)), 3
    params = container(rng, {"first": (hidden, hidden), "experts": (size, hidden, hidden), "last": (hidden, out)}, {"experts": 'P("ep")'})
    rows = size * size * each
    whole = f"z.reshape({size}, {size}, {each}, {hidden})"
    there = draft.inner(
        'lax.all_to_all(z, "ep", 0, 0, tiled=False)',
        {"rows-of-own-rank": "z", "rows-turned": 'lax.all_to_all(z[::-1], "ep", 0, 0, tiled=False)'}
        if not draft.vma
        else {"rows-turned": 'lax.all_to_all(z[::-1], "ep", 0, 0, tiled=False)'},
    )
    back = draft.inner(
        'lax.all_to_all(z, "ep", 0, 0, tiled=False)',
        {"rows-not-sent-back": "z", "rows-turned-on-the-way-back": 'lax.all_to_all(z[::-1], "ep", 0, 0, tiled=False)'},
    )
    lines = [
        "z = jnp.tanh(x @ @first)",
        f'1|z = jnp.einsum("reth,ehk->retk", {whole}, @experts).reshape({rows}, {hidden})',
        f"R|z = z.reshape({size}, {each}, {hidden})",
        f"R|z = {there}",
        "R|z = z @ @experts[0]",
        f"R|z = {back}",
        f"R|z = z.reshape({size * each}, {hidden})",
        f"h = {rng.choice(('x + z', 'jnp.tanh(z)', 'x * z'))}",
        "out = h @ @last",
    ]
    made = models.Model("experts", params.shapes, "\n".join(lines), f"tvj.Reals(({rows}, {hidden}), REAL)", (rows,), out)
    loss = models.loss(rng, made, ("mean", "sum"))
    function = loss_function(params, made, loss)
    scale, wrong = (f" / {size}", "") if loss.kind == "mean" else ("", f" / {size}")
    name = "sum-for-mean" if scale else "sum-divided"
    values: dict[str, str] = {}
    for key in params.shapes:
        g = params.access(key).replace("params", "grads", 1)
        if key == "experts":
            values[key] = draft.site(
                f"{g}{scale}", {"experts-otherwise": f"{g}{wrong}", "different-experts-averaged": f'lax.pmean({g}, "ep")'}
            )
        else:
            total = g if draft.vma else f'lax.psum({g}, "ep")'
            values[key] = draft.site(
                f"{total}{scale}", {name: f"{total}{wrong}"} | ({} if draft.vma else {"whole-parameters-not-reduced": g})
            )
    lines_after = f"R|grads = {params.build(values)}\nR|loss = {loss_value(draft, loss.kind)}"
    batch = (Array("x", made.x, 'P("ep")'), Array("y", loss.y, 'P("ep")'))
    found = Core(
        "experts", ("experts", loss.kind), {"ep": size}, params, batch, (("loss_of", function),), f"{differentiated(rng)}\n{lines_after}"
    )
    return replace(found, whole=False, squares=squares(draft, params, "ep"))
