"""Ranks have parts of a batch and whole parameters: gradients reduced by hand, by JAX's own transposes, or cut for the update."""

from __future__ import annotations

from typing import Final

from tools.jax_steps import models
from tools.jax_steps.code import Draft, indented
from tools.jax_steps.containers import container
from tools.jax_steps.cores import ROWS, Array, Core, accumulated, differentiated, loss_function, own_functions
from tools.jax_steps.models import Loss

MEAN: Final = {
    "pmean": 'lax.pmean(grads, "dp")',
    "map": 'jax.tree.map(lambda g: lax.pmean(g, "dp"), grads)',
    "psum": 'jax.tree.map(lambda g: lax.psum(g, "dp") / SIZE, grads)',
    "psum of all": 'jax.tree.map(lambda g: g / lax.axis_size("dp"), lax.psum(grads, "dp"))',
    "gathered": 'jax.tree.map(lambda g: lax.all_gather(g, "dp").mean(0), grads)',
    "scaled": 'jax.tree.map(lambda g: lax.psum(g / lax.psum(1, "dp"), "dp"), grads)',
    "flat": 'through_flat(lambda flat: lax.pmean(flat, "dp"), grads)',
    "scattered": 'through_flat(lambda flat: scattered_sum(flat, "dp", SIZE) / SIZE, grads)',
    "ring": 'jax.tree.map(lambda g: ring_sum(g, "dp", SIZE) / SIZE, grads)',
}
SUM: Final = {
    "psum": 'lax.psum(grads, "dp")',
    "map": 'jax.tree.map(lambda g: lax.psum(g, "dp"), grads)',
    "gathered": 'jax.tree.map(lambda g: lax.all_gather(g, "dp").sum(0), grads)',
    "flat": 'through_flat(lambda flat: lax.psum(flat, "dp"), grads)',
    "scattered": 'through_flat(lambda flat: scattered_sum(flat, "dp", SIZE), grads)',
    "ring": 'jax.tree.map(lambda g: ring_sum(g, "dp", SIZE), grads)',
    "mean times size": 'jax.tree.map(lambda g: SIZE * lax.pmean(g, "dp"), grads)',
}
GROUPED: Final = (
    'jax.tree.map(lambda g: lax.psum(lax.psum(g, "dp", axis_index_groups=[[0, 1], [2, 3]]), "dp", axis_index_groups=GROUPS), grads)'
)


def reduced(draft: Draft, kind: str) -> tuple[str, str]:
    """The expression that reduces gradients where no transpose does, and the name of its way."""
    rng, size = draft.rng, str(draft.size)
    table = MEAN if kind == "mean" else SUM
    way = rng.choice(sorted(table))
    good = table[way].replace("SIZE", size)
    op = "pmean" if kind == "mean" else "psum"
    each = f'lambda g: lax.{op}(g, "dp")'
    bad = {
        "gradients-not-reduced": "grads",
        "maximum-of-gradients": 'jax.tree.map(lambda g: lax.pmax(g, "dp"), grads)',
        "gradients-of-rank-0": 'jax.tree.map(lambda g: lax.all_gather(g, "dp")[0], grads)',
        "last-gradient-missed": f"but_last({each}, grads)",
        "vectors-missed": f"matrices_only({each}, grads)",
        "first-row-only": f"first_row_only({each}, grads)",
        "reduced-and-divided-again": f"jax.tree.map(lambda g: g / {size}, {good})",
        "reduced-twice": f'jax.tree.map(lambda g: lax.psum(g, "dp"), {good})',
    }
    if draft.clips:
        bad["clipped-before-reduction"] = f'lax.{op}(clipped(grads), "dp")'
    if draft.nonlinear:
        bad["parameters-averaged-instead"] = "grads"
    if kind == "mean":
        bad["sum-for-mean"] = 'lax.psum(grads, "dp")'
    else:
        bad["mean-for-sum"] = 'lax.pmean(grads, "dp")'
    if way == "ring":
        bad["ring-one-short"] = good.replace(f'"dp", {size})', f'"dp", {draft.size - 1})') if draft.size > 2 else "grads"
        bad["ring-incomplete"] = good.replace("ring_sum", "broken_ring_sum")
    if way == "scattered":
        bad["parts-in-another-order"] = good.replace("scattered_sum", "turned_scattered_sum")
        bad["part-of-own-gradient"] = good.replace("scattered_sum", "own_part_gathered")
    if draft.size == 4 and rng.random() < 0.5:
        way, scale = "groups", " / 4" if kind == "mean" else ""
        text = GROUPED.replace("), grads)", f"){scale}, grads)")
        good = text.replace("GROUPS", "[[0, 2], [1, 3]]")
        bad = {key: value for key, value in bad.items() if key not in ("ring-one-short", "ring-incomplete")}
        bad["groups-twice-the-same"] = text.replace("GROUPS", "[[0, 1], [2, 3]]")
        bad["other-groups-twice-the-same"] = bad["groups-twice-the-same"].replace("[[0, 1], [2, 3]]", "[[0, 2], [1, 3]]")
    return draft.site(good, bad, tree=True), way


def loss_value(draft: Draft, kind: str) -> str:
    mean, total = f'lax.pmean(loss, "{draft.axis}")', f'lax.psum(loss, "{draft.axis}")'
    good, other = (mean, total) if kind == "mean" else (total, mean)
    bad = {"loss-reduced-otherwise": other}
    if not draft.vma:
        bad |= {"loss-not-reduced": "loss", "loss-of-one": f'lax.all_gather(loss, "{draft.axis}")[0]'}
    return draft.site(good, bad)


def core(draft: Draft, accumulates: bool) -> Core:
    rng = draft.rng
    rows = 8 if accumulates else rng.choice(ROWS[draft.size])
    made = models.model(rng, rows)
    loss = models.loss(rng, made, ("mean", "sum") if accumulates else ("mean", "sum", "masked"))
    params = container(rng, made.shapes)
    masked = ""
    if loss.kind == "masked":
        count = draft.inner('lax.psum(count, "dp")', {} if draft.vma else COUNTS_WRONG)
        masked = f"R|count = {count}"
    names = [made.name, loss.kind]
    begin, end = "", ""
    if draft.vma:
        how, end, lines = _automatic(draft, loss)
    elif rng.random() < 0.15 and not accumulates:
        how, begin, lines = _by_vjp(draft, loss)
    else:
        how, lines = _by_hand(draft, loss)
    names.append(how)
    function = loss_function(params, made, loss, begin, end, masked)
    functions = [*own_functions(function), ("loss_of", function)]
    grads = differentiated(rng)
    if accumulates:
        text, kind = accumulated(draft, loss)
        functions.append(("accumulated", text))
        names.append(f"accumulated by {kind}")
        both = rng.random() < 0.5
        grads = "loss, grads = accumulated(params, x, y)" if both else f"R|loss, grads = accumulated(params, x, y)\n{_one(grads)}"
    uncut = {"batch-not-cut": "P()"} if loss.kind == "sum" and not draft.vma else {}
    batch = (Array("x", made.x, draft.lines('P("dp")', uncut)), Array("y", loss.y, draft.lines('P("dp")', uncut)))
    if how == "cast":
        grads = f'R|whole, params = params, jax.tree.map(lambda w: lax.pcast(w, "dp", to="varying"), params)\n{grads}'
    return Core("data parallel", tuple(names), {"dp": draft.size}, params, batch, tuple(functions), f"{grads}\n{lines}")


COUNTS_WRONG: Final = {"count-of-one-rank": "count", "mean-count": 'lax.pmean(count, "dp")', "largest-count": 'lax.pmax(count, "dp")'}


def _one(text: str) -> str:
    return "\n".join(f"1|{line}" for line in text.split("\n"))


def _by_hand(draft: Draft, loss: Loss) -> tuple[str, str]:
    expression, way = reduced(draft, loss.kind)
    return way, f"R|grads = {expression}\nR|loss = {loss_value(draft, loss.kind)}"


def _by_vjp(draft: Draft, loss: Loss) -> tuple[str, str, str]:
    """Parameters go through a function whose derivative reduces."""
    op, other = ("pmean", "psum") if loss.kind == "mean" else ("psum", "pmean")
    rule = draft.lines(
        f'(lax.{op}(g, "dp"),)',
        {
            "rule-without-communication": "(g,)",
            "rule-reduces-otherwise": f'(lax.{other}(g, "dp"),)',
            "rule-reduces-twice": f'(lax.psum(lax.{op}(g, "dp"), "dp"),)',
        },
    )
    begin = f"""R|@jax.custom_vjp
R|def shared(tree):
R|    return tree

R|shared.defvjp(lambda tree: (tree, None), lambda _, g: {rule})
R|params = shared(params)"""
    return "custom_vjp", begin, f"R|loss = {loss_value(draft, loss.kind)}"


def _automatic(draft: Draft, loss: Loss) -> tuple[str, str, str]:
    """With check_vma, gradients of what is the same on all ranks are added up by JAX: how, the end of the loss, and lines."""
    size, kind = draft.size, draft.rng.choice(("divided", "inside", "cast"))
    mean = loss.kind == "mean"
    if kind == "inside":
        good, other = ('lax.pmean(loss, "dp")', 'lax.psum(loss, "dp")')[:: 1 if mean else -1]
        return "reduced loss", f"R|loss = {draft.inner(good, {'loss-and-gradients-otherwise': other})}", ""
    if kind == "cast":
        op, other = ("pmean", "psum") if mean else ("psum", "pmean")
        site = draft.site(f'lax.{op}(grads, "dp")', {"sum-for-mean" if mean else "mean-for-sum": f'lax.{other}(grads, "dp")'}, tree=True)
        return "cast", "", f"R|params = whole\nR|grads = {site}\nR|loss = {loss_value(draft, loss.kind)}"
    divided = f"jax.tree.map(lambda g: g / {size}, grads)"
    if mean:
        bad = {
            "automatic-sum-not-divided": "grads",
            "mean-of-an-automatic-sum": 'lax.pmean(grads, "dp")',
            "sum-of-an-automatic-sum": 'lax.psum(grads, "dp")',
            "automatic-sum-divided-twice": f"jax.tree.map(lambda g: g / {size**2}, grads)",
            "last-gradient-not-divided": f"but_last(lambda g: g / {size}, grads)",
        }
        return "automatic", "", f"R|grads = {draft.site(divided, bad, tree=True)}\nR|loss = {loss_value(draft, loss.kind)}"
    bad = {"automatic-sum-divided": divided, "sum-of-an-automatic-sum": 'lax.psum(grads, "dp")'}
    return "automatic", "", f"R|grads = {draft.site('grads', bad, tree=True)}\nR|loss = {loss_value(draft, loss.kind)}"


def flat(draft: Draft) -> Core:
    """Every rank updates a part of the flat parameters with momentum, and all parts are gathered."""
    rng, size = draft.rng, draft.size
    made = models.model(rng, rng.choice(ROWS[size]))
    loss = models.loss(rng, made, ("mean",))
    params = container(rng, made.shapes)
    count = sum(_size(shape) for shape in made.shapes.values())
    padded = -(-count // size) * size
    part = padded // size
    rank = 'lax.axis_index("dp")'
    mine = draft.site(
        f'lax.psum_scatter(flat_g, "dp", tiled=True) / {size}',
        {
            "scattered-sum-not-divided": 'lax.psum_scatter(flat_g, "dp", tiled=True)',
            "part-of-own-gradient": f"lax.dynamic_slice_in_dim(flat_g, {rank} * {part}, {part})",
            "part-of-the-next": f'lax.dynamic_slice_in_dim(lax.pmean(flat_g, "dp"), (({rank} + 1) % {size}) * {part}, {part})',
        },
    )
    own = draft.site(
        f"lax.dynamic_slice_in_dim(flat_w, {rank} * {part}, {part})",
        {
            "first-part-on-all": f"flat_w[:{part}]",
            "parts-of-another-rank": f"lax.dynamic_slice_in_dim(flat_w, ({size - 1} - {rank}) * {part}, {part})",
        },
    )
    whole = draft.site(
        'lax.all_gather(mine_w, "dp", tiled=True)',
        {
            "parts-not-gathered": f"lax.dynamic_update_slice_in_dim(flat_w, mine_w, {rank} * {part}, 0)",
            "parts-gathered-backwards": 'lax.all_gather(mine_w, "dp")[::-1].reshape(-1)',
        },
    )
    pad = f"jnp.pad({{}}, (0, {padded - count}))"
    update = f"""flat_w, back = ravel_pytree(params)
flat_g = {pad.format("ravel_pytree(grads)[0]")}
flat_w = {pad.format("flat_w")}
1|velocity = 0.9 * velocity + flat_g
1|flat_w = flat_w - rate * velocity
R|mine_g = {mine}
R|velocity = 0.9 * velocity + mine_g
R|mine_w = {own} - rate * velocity
R|flat_w = {whole}
params = back(flat_w[:{count}])"""
    function = loss_function(params, made, loss)
    functions = (*own_functions(function), ("loss_of", function))
    batch = (Array("x", made.x, 'P("dp")'), Array("y", loss.y, 'P("dp")'))
    extra = {"velocity": f"tvj.Reals(({padded},), REAL)", "spec": 'P("dp")', "update": update}
    grads = f"{differentiated(rng)}\nR|loss = {loss_value(draft, 'mean')}"
    return Core("zero", (made.name, "flat momentum"), {"dp": size}, params, batch, functions, grads, whole=False, flat=True, extra=extra)


def _size(shape: tuple[int, ...]) -> int:
    found = 1
    for length in shape:
        found *= length
    return found


def two_axes(draft: Draft) -> Core:
    """Rows are cut over two axes of the mesh."""
    rng = draft.rng
    made = models.model(rng, 8)
    loss = models.loss(rng, made, ("mean", "sum"))
    params = container(rng, made.shapes)
    op, other = ("pmean", "psum") if loss.kind == "mean" else ("psum", "pmean")
    both = rng.choice(
        (
            f'lax.{op}(grads, ("dp", "ep"))',
            f'lax.{op}(lax.{op}(grads, "ep"), "dp")',
            f'jax.tree.map(lambda g: lax.{op}(g, ("ep", "dp")), grads)',
        )
    )
    bad = {
        "one-axis-missed": f'lax.{op}(grads, "dp")',
        "the-same-axis-twice": f'lax.{op}(lax.{op}(grads, "ep"), "ep")',
        "one-axis-otherwise": f'lax.{other}(lax.{op}(grads, "dp"), "ep")',
        "gradients-not-reduced": "grads",
    }
    spec = rng.choice(('P(("dp", "ep"))', 'P(("ep", "dp"))'))
    loss_bad = {"loss-over-one-axis": f'lax.{op}(loss, "ep")', "loss-reduced-otherwise": f'lax.{other}(loss, ("dp", "ep"))'}
    total = draft.site(f'lax.{op}(loss, ("dp", "ep"))', loss_bad)
    lines = f"R|grads = {draft.site(both, bad, tree=True)}\nR|loss = {total}"
    function = loss_function(params, made, loss)
    specs = (spec, draft.lines(spec, {"labels-cut-otherwise": {'P(("dp", "ep"))': 'P(("ep", "dp"))'}.get(spec, 'P(("dp", "ep"))')}))
    batch = (Array("x", made.x, specs[0]), Array("y", loss.y, specs[1]))
    names = (made.name, loss.kind, "two axes")
    functions = (*own_functions(function), ("loss_of", function))
    return Core("data parallel", names, {"dp": 2, "ep": 2}, params, batch, functions, f"{differentiated(rng)}\n{lines}")


def normalized(draft: Draft) -> Core:
    """Statistics over the rows of all ranks, differentiated."""
    rng = draft.rng
    hidden, width, out = rng.choice((4, 6)), rng.choice((3, 5)), 3
    params = container(rng, {"w1": (width, hidden), "gain": (hidden,), "shift": (hidden,), "w2": (hidden, out)})
    rows = rng.choice(ROWS[draft.size])
    made = models.Model("", params.shapes, "", f"tvj.Reals(({rows}, {width}), REAL)", (rows,), out)
    loss = models.loss(rng, made, ("mean",))
    if rng.random() < 0.5:
        m = draft.inner('lax.pmean(h.mean(0), "dp")', {} if draft.vma else {"mean-of-own-rows": "h.mean(0)"})
        v = draft.inner('lax.pmean(((h - m) ** 2).mean(0), "dp")', {"variance-of-own-rows": 'lax.pmean(h.var(0), "dp")'})
        statistics = f"1|m, v = h.mean(0), h.var(0)\nR|m = {m}\nR|v = {v}"
    else:
        s = draft.inner('lax.psum(h.sum(0), "dp")', {"sums-averaged": 'lax.pmean(h.sum(0), "dp")'})
        q = draft.inner('lax.psum((h**2).sum(0), "dp")', {} if draft.vma else {"squares-of-own-rows": f"{draft.size} * (h**2).sum(0)"})
        statistics = f"1|m, v = h.mean(0), h.var(0)\nR|s = {s}\nR|q = {q}\nR|m, v = s / {rows}, q / {rows} - (s / {rows}) ** 2"
    forward = f"h = jnp.tanh(x @ @w1)\n{statistics}\nh = (h - m) / jnp.sqrt(v + 1e-2) * @gain + @shift\nout = h @ @w2"
    full = models.Model("batch norm", params.shapes, forward, made.x, made.rows, out)
    function = loss_function(params, full, loss)
    if draft.vma:
        divided = draft.site(
            f"jax.tree.map(lambda g: g / {draft.size}, grads)",
            {"automatic-sum-not-divided": "grads", "mean-of-an-automatic-sum": 'lax.pmean(grads, "dp")'},
            tree=True,
        )
    else:
        divided = draft.site(
            'lax.pmean(grads, "dp")', {"sum-for-mean": 'lax.psum(grads, "dp")', "gradients-not-reduced": "grads"}, tree=True
        )
    lines = f"R|grads = {divided}\nR|loss = {loss_value(draft, 'mean')}"
    batch = (Array("x", made.x, 'P("dp")'), Array("y", loss.y, 'P("dp")'))
    return Core(
        "data parallel", ("batch norm",), {"dp": draft.size}, params, batch, (("loss_of", function),), f"{differentiated(rng)}\n{lines}"
    )


HELPERS: Final = {
    "through_flat": """def through_flat(f, tree):
    flat, back = ravel_pytree(tree)
    return back(f(flat))""",
    "scattered_sum": """def scattered_sum(flat, axis, size):
    padded = jnp.pad(flat, (0, -flat.size % size))
    part = lax.psum_scatter(padded, axis, tiled=True)
    return lax.all_gather(part, axis, tiled=True)[: flat.size]""",
    "turned_scattered_sum": """def turned_scattered_sum(flat, axis, size):
    padded = jnp.pad(flat, (0, -flat.size % size))
    part = lax.psum_scatter(padded, axis, tiled=True)
    return lax.all_gather(part, axis)[::-1].reshape(-1)[: flat.size]""",
    "own_part_gathered": """def own_part_gathered(flat, axis, size):
    padded = jnp.pad(flat, (0, -flat.size % size)).reshape(size, -1)
    return size * lax.all_gather(padded[lax.axis_index(axis)], axis, tiled=True)[: flat.size]""",
    "ring_sum": """def ring_sum(g, axis, size):
    total = g
    for _ in range(size - 1):
        g = lax.ppermute(g, axis, [(i, (i + 1) % lax.axis_size(axis)) for i in range(lax.axis_size(axis))])
        total = total + g
    return total""",
    "broken_ring_sum": """def broken_ring_sum(g, axis, size):
    total = g
    for _ in range(size - 1):
        g = lax.ppermute(g, axis, [(i, i + 1) for i in range(lax.axis_size(axis) - 1)])
        total = total + g
    return total""",
    "but_last": """def but_last(f, tree):
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [*map(f, leaves[:-1]), leaves[-1]])""",
    "matrices_only": """def matrices_only(f, tree):
    return jax.tree.map(lambda g: f(g) if g.ndim > 1 else g, tree)""",
    "first_row_only": """def first_row_only(f, tree):
    return jax.tree.map(lambda g: g.at[0].set(f(g[0])), tree)""",
}


def helpers(text: str) -> list[tuple[str, str]]:
    """Small functions that a text calls."""
    return [(name, made) for name, made in HELPERS.items() if f" {name}(" in text or f"({name}(" in text or f"={name}(" in text]


__all__ = ["core", "flat", "helpers", "indented", "normalized", "two_axes"]
