"""Steps that XLA cuts: jit with shardings and constraints, and regions of shard_map in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tools.jax_steps import models
from tools.jax_steps.code import Draft
from tools.jax_steps.containers import container
from tools.jax_steps.cores import Array, Core, accumulated, differentiated, loss_function, own_functions

CONSTRAINED: Final = (
    "R|x = lax.with_sharding_constraint(x, NamedSharding(mesh, P('dp')))",
    "R|params = jax.tree.map(lambda w: lax.with_sharding_constraint(w, NamedSharding(mesh, P())), params)",
    "",
)


def core(draft: Draft, accumulates: bool) -> Core:
    if draft.rng.random() < 0.5:
        return _layers(draft)
    rng = draft.rng
    rows = 8 if accumulates else 4
    made = models.model(rng, rows, even=True)
    loss = models.loss(rng, made)
    cut = {
        name: "P(" + "None, " * (len(shape) - 1) + '"tp")'
        for name, shape in made.shapes.items()
        if shape[-1] % 2 == 0 and rng.random() < 0.5
    }
    params = container(rng, made.shapes, cut)
    end = f"R|loss = {draft.inner('loss', {'loss-in-half': '0.5 * loss', 'loss-times-devices': '2 * loss'})}"
    function = loss_function(params, made, loss, rng.choice(CONSTRAINED), end)
    functions = [*own_functions(function), ("loss_of", function)]
    grads = differentiated(rng)
    if accumulates and loss.kind != "masked":
        text, _ = accumulated(draft, loss)
        functions.append(("accumulated", text))
        grads = "loss, grads = accumulated(params, x, y)"
    batch = (Array("x", made.x, 'P("dp")'), Array("y", loss.y, 'P("dp")'))
    return Core("partitioned by XLA", (made.name, loss.kind), {"dp": 2, "tp": 2}, params, batch, tuple(functions), grads, partitioned=True)


def _layers(draft: Draft) -> Core:
    """Two cut layers; perhaps the second is a region of shard_map."""
    rng = draft.rng
    hidden = rng.choice((4, 6))
    shapes = {"w1": (3, hidden), "w2": (hidden, 4), "w3": (4, 3)}
    params = container(rng, shapes, {"w1": 'P(None, "tp")', "w2": 'P("tp", None)'})
    act = rng.choice(("jnp.tanh", "jax.nn.gelu", "jax.nn.relu"))
    lines = [f"h = {act}(x @ @w1)"]
    if rng.random() < 0.4:
        lines.append('R|h = lax.with_sharding_constraint(h, NamedSharding(mesh, P("dp", "tp")))')
    if rng.random() < 0.5:
        total = draft.lines(
            'lax.psum(a @ w, "tp")', {"mean-of-parts": 'lax.pmean(a @ w, "tp")', "parts-squared": 'lax.psum((a @ w) ** 2, "tp")'}
        )
        call = f'jax.shard_map(lambda a, w: {total}, mesh=mesh, in_specs=(P("dp", "tp"), P("tp", None)), out_specs=P("dp"))(h, @w2)'
        lines += ["1|z = h @ @w2", f"R|z = {call}"]
    else:
        lines.append("z = h @ @w2")
    lines.append(f"out = {act}(z) @ @w3")
    made = models.Model("mlp", shapes, "\n".join(lines), "tvj.Reals((4, 3), REAL)", (4,), 3)
    loss = models.loss(rng, made)
    end = f"R|loss = {draft.inner('loss', {'loss-in-half': '0.5 * loss', 'loss-times-devices': '2 * loss'})}"
    function = loss_function(params, made, loss, end=end)
    batch = (Array("x", made.x, 'P("dp")'), Array("y", loss.y, 'P("dp")'))
    found = Core(
        "partitioned by XLA",
        ("two layers", loss.kind),
        {"dp": 2, "tp": 2},
        params,
        batch,
        (*own_functions(function), ("loss_of", function)),
        differentiated(rng),
    )
    return replace(found, partitioned=True)
