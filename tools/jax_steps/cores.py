"""The core of a program: parameters, batch, loss and gradients of both sides. Around it comes what all families have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Final

from tools.jax_steps.code import Draft, indented
from tools.jax_steps.containers import Container
from tools.jax_steps.models import OWN, Loss, Model

ROWS: Final = {2: (4, 6), 4: (8, 8)}


@dataclass(frozen=True)
class Array:
    """An argument that belongs to a batch."""

    name: str
    declared: str
    spec: str


@dataclass(frozen=True)
class Core:
    family: str
    names: tuple[str, ...]
    mesh: Mapping[str, int]
    params: Container
    batch: tuple[Array, ...]
    functions: tuple[tuple[str, str], ...]  # of the file, by name; what differs on ranks gets a name of its own
    grads: str  # lines that leave `loss` and `grads`
    split: str = ""  # lines that only ranks run before the optimizer, once `grads` are there; empty where `grads` are complete
    squares: str = "sum(jnp.sum(g**2) for g in jax.tree.leaves({}))"  # of the elements of a tree like the parameters, on ranks
    updated: str = ""  # lines after the update
    partitioned: bool = False  # XLA cuts the step
    whole: bool = True  # every rank holds whole parameters
    stateless: bool = False  # only an optimizer without state is right here
    flat: bool = False  # the optimizer is part of the core
    extra: Mapping[str, str] = field(default_factory=dict)


def loss_function(
    params: Container, made: Model, loss: Loss, begin: str = "", end: str = "", masked: str = "", name: str = "loss_of"
) -> str:
    """`begin` comes before the forward pass, `end` before the result, `masked` where total and count are there."""
    text = "\n".join(part for part in (begin, made.forward, loss.text) if part)
    if loss.kind == "masked":
        text += f"\n{masked}\nloss = total / jnp.maximum(count, 1)" if masked else "\nloss = total / jnp.maximum(count, 1)"
    text += f"\n{end}\nreturn loss" if end else "\nreturn loss"
    return f"def {name}(params, x, y):\n{indented(params.written(text))}"


def own_functions(text: str) -> list[tuple[str, str]]:
    """Activations of their own that a text calls."""
    return [(name, made) for name, made in OWN.items() if f"{name}(" in text]


def differentiated(rng: Random, call: str = "loss_of") -> str:
    """Lines that leave `loss` and `grads` of one call, in one of the ways in which JAX is used."""
    return rng.choice(
        (
            f"loss, grads = jax.value_and_grad({call})(params, x, y)",
            f"loss, grads = jax.value_and_grad({call})(params, x, y)",
            f"loss, grads = jax.value_and_grad(lambda p: {call}(p, x, y))(params)",
            f"loss, back = jax.vjp(lambda p: {call}(p, x, y), params)\n(grads,) = back(jnp.ones_like(loss))",
            f"loss, grads = {call}(params, x, y), jax.grad({call})(params, x, y)",
            f"loss, grads = jax.value_and_grad(jax.checkpoint({call}))(params, x, y)",
            f"loss, grads = jax.jit(jax.value_and_grad({call}))(params, x, y)",
        )
    )


CUT: Final = "x.reshape(2, -1, *x.shape[1:]), y.reshape(2, -1, *y.shape[1:])"
LOOPS: Final = {
    "scan": """def body(total, micro):
    return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_of)(params, *micro)), None

zeros = (jnp.zeros((), REAL), jax.tree.map(jnp.zeros_like, params))
total, _ = lax.scan(body, zeros, (CUT)SOME)""",
    "stacked scan": """_, parts = lax.scan(lambda c, micro: (c, jax.value_and_grad(loss_of)(params, *micro)), None, (CUT)SOME)
total = jax.tree.map(lambda g: g.sum(0), parts)""",
    "fori_loop": """def body(i, total):
    size = x.shape[0] // 2
    micro = (lax.dynamic_slice_in_dim(x, AT * size, size), lax.dynamic_slice_in_dim(y, AT * size, size))
    return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_of)(params, *micro))

total = lax.fori_loop(FROM, 2, body, (jnp.zeros((), REAL), jax.tree.map(jnp.zeros_like, params)))""",
    "loop": """size = x.shape[0] // 2
total = None
for i in range(FROM, 2):
    part = jax.value_and_grad(loss_of)(params, x[AT * size : (AT + 1) * size], y[AT * size : (AT + 1) * size])
    total = part if total is None else jax.tree.map(jnp.add, total, part)""",
    "vmap": """xs, ys = CUT
parts = jax.vmap(jax.value_and_grad(loss_of), in_axes=(None, 0, 0))(params, xsSOME, ysSOME)
total = jax.tree.map(lambda g: g.sum(0), parts)""",
    "map": """parts = lax.map(lambda micro: jax.value_and_grad(loss_of)(params, *micro), (CUT)SOME)
total = jax.tree.map(lambda g: jnp.sum(g, axis=0), parts)""",
}


def accumulated(draft: Draft, loss: Loss) -> tuple[str, str]:
    """A function that goes through two halves of the rows, and its name for the list."""
    kind = draft.rng.choice([name for name in LOOPS if not (draft.vma and name in ("scan", "fori_loop"))])
    text = LOOPS[kind].replace("CUT", CUT)
    if kind in ("fori_loop", "loop"):
        text = text.replace("FROM", draft.lines("0", {"first-micro-batch-skipped": "1"}))
        text = text.replace("AT", draft.lines("i", {"first-micro-batch-twice": "(i - i)" if kind == "fori_loop" else "0"}))
    elif kind == "scan":
        text = text.replace(
            f"({CUT})SOME",
            draft.lines(
                f"({CUT})", {"last-micro-batch-dropped": "(x.reshape(2, -1, *x.shape[1:])[:1], y.reshape(2, -1, *y.shape[1:])[:1])"}
            ),
        )
    else:
        text = text.replace(f"({CUT})SOME", f"({CUT})").replace("SOME", draft.lines("", {"last-micro-batch-dropped": "[:1]"}))
    half, whole = "jax.tree.map(lambda g: g / 2, total)", "total"
    if loss.kind == "mean":
        bad = {"micro-batches-not-divided": whole, "micro-batches-divided-twice": "jax.tree.map(lambda g: g / 4, total)"}
        end = draft.inner(half, {**bad, "loss-divided-only": "(total[0] / 2, total[1])"}, tree=True, lone=True)
    else:
        end = draft.inner(whole, {"micro-batches-divided": half}, tree=True, lone=True)
    return f"def accumulated(params, x, y):\n{indented(text)}\n    return {end}", kind
