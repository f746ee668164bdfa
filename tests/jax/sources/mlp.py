"""An MLP, data and tensor parallel, as a user writes it."""

from __future__ import annotations

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj
from jax import lax


def shapes(batch=64, width=1024, hidden=4096, out=512, adam=False):
    params = {"w1": tvj.Reals((width, hidden)), "b1": tvj.Reals((hidden,)), "w2": tvj.Reals((hidden, out))}
    data = (tvj.Reals((batch, width)), tvj.Reals((batch, out)))
    if not adam:
        return (params, *data)
    second = {k: tvj.Reals(v.shape, nonnegative=True) for k, v in params.items()}
    return (params, {"m": dict(params), "v": second, "t": tvj.Count()}, *data)


args = shapes()


def loss_of(params, x, t, tp=None, dp=None):
    h = jax.nn.relu(x @ params["w1"] + params["b1"])
    y = h @ params["w2"]
    if tp:
        y = lax.psum(y, tp)
    e = y - t
    loss = jnp.mean(e * e)
    return lax.pmean(loss, dp) if dp else loss


def sgd(params, grads):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)


def adam(params, opt, grads, lr=1e-3, b1=0.9, b2=0.999, eps=1e-8):
    t = opt["t"] + 1
    m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, opt["m"], grads)
    v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, opt["v"], grads)
    scale = lr / (1 - b1**t)

    def new(w, m, v):
        return w - scale * m / (jnp.sqrt(v / (1 - b2**t)) + eps)

    return jax.tree.map(new, params, m, v), {"m": m, "v": v, "t": t}


def adam_negated(params, opt, grads, lr=1e-3, b1=0.9, b2=0.999, eps=1e-8):
    """The same, with both signs of a correction turned around."""
    t = opt["t"] + 1
    m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, opt["m"], grads)
    v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, opt["v"], grads)

    def new(w, m, v):
        return w - lr * (-m / (b1**t - 1)) / (jnp.sqrt(v / (1 - b2**t)) + eps)

    return jax.tree.map(new, params, m, v), {"m": m, "v": v, "t": t}


def adam_of_the_paper(params, opt, grads, lr=1e-3, b1=0.9, b2=0.999, eps=1e-8, power=1):
    """The same, in the order that its paper calls efficient; ε is corrected too."""
    t = opt["t"] + 1
    m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, opt["m"], grads)
    v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, opt["v"], grads)
    root = jnp.sqrt(1 - b2 ** (power * t))
    rate = lr * root / (1 - b1**t)

    def new(w, m, v):
        return w - rate * m / (jnp.sqrt(v) + eps * root)

    return jax.tree.map(new, params, m, v), {"m": m, "v": v, "t": t}


def reference(params, x, t):
    loss, grads = jax.value_and_grad(loss_of)(params, x, t)
    return sgd(params, grads), loss


def reference_adam(params, opt, x, t):
    loss, grads = jax.value_and_grad(loss_of)(params, x, t)
    params, opt = adam(params, opt, grads)
    return params, opt, loss


DP = {"w1": P(), "b1": P(), "w2": P()}
TP = {"w1": P(None, "tp"), "b1": P("tp"), "w2": P("tp", None)}


def data_parallel(mesh):
    def step(params, x, t):
        loss, grads = jax.value_and_grad(loss_of)(params, x, t, dp="dp")
        return sgd(params, grads), loss

    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(DP, P("dp"), P("dp")), out_specs=(DP, P())))


def tensor_parallel(mesh):
    def step(params, x, t):
        loss, grads = jax.value_and_grad(loss_of)(params, x, t, "tp", "dp")
        return sgd(params, grads), loss

    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(TP, P("dp"), P("dp")), out_specs=(TP, P())))


def tensor_parallel_adam(mesh):
    return tensor_parallel_with(adam, mesh)


def tensor_parallel_with(adam, mesh):
    def step(params, opt, x, t):
        loss, grads = jax.value_and_grad(loss_of)(params, x, t, "tp", "dp")
        params, opt = adam(params, opt, grads)
        return params, opt, loss

    state = {"m": TP, "v": TP, "t": P()}
    specs = {"in_specs": (TP, state, P("dp"), P("dp")), "out_specs": (TP, state, P())}
    return jax.jit(jax.shard_map(step, mesh=mesh, **specs))


def optimizer_outside(mesh):
    """The gradients within shard_map, the optimizer on whole arrays."""
    grads = jax.shard_map(
        lambda p, x, t: jax.value_and_grad(loss_of)(p, x, t, "tp", "dp"),
        mesh=mesh,
        in_specs=(TP, P("dp"), P("dp")),
        out_specs=(P(), TP),
    )

    @jax.jit
    def step(params, opt, x, t):
        loss, g = grads(params, x, t)
        params, opt = adam(params, opt, g)
        return params, opt, loss

    return step
