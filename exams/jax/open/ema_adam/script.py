"""
Elman network for masked sequence regression, with a hand-written Adam and an exponential moving average of the weights.

The distributed forms are data parallel over three devices. One keeps the whole optimizer state on each, the other one a
third of it (ZeRO stage 1: reduce-scatter gradients, update a slice, gather the slices).
"""
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import trainverify.jax as tvj

DP = 3
B, T, IN, HID, OUT = 12, 4, 6, 15, 9
LR, BETA1, BETA2, EPS, EMA = 5e-3, 0.9, 0.99, 1e-5, 0.98

mesh = {"dp": DP}


def weights(**kw):
    return {
        "x": tvj.Reals((IN, HID), **kw),
        "h": tvj.Reals((HID, HID), **kw),
        "bias": tvj.Reals((HID,), **kw),
        "y": tvj.Reals((HID, OUT), **kw),
    }


args = (
    weights(),
    {"m": weights(), "v": weights(nonnegative=True), "ema": weights(), "t": tvj.Count()},
    tvj.Reals((B, T, IN)),
    tvj.Reals((B, T, OUT)),
    tvj.Ids((B, T), below=2),
)


def predict(p, xs):
    def cell(h, x):
        h = jnp.tanh(x @ p["x"] + h @ p["h"] + p["bias"])
        return h, h @ p["y"]

    start = jnp.zeros((xs.shape[0], HID), xs.dtype)
    return jnp.swapaxes(lax.scan(cell, start, jnp.swapaxes(xs, 0, 1))[1], 0, 1)


def error_sum(p, xs, ys, mask):
    return jnp.sum(jnp.sum((predict(p, xs) - ys) ** 2, axis=-1) * mask)


def ema_decay(t):
    """Short memory in the first steps."""
    return jnp.minimum(EMA, (1.0 + t) / (10.0 + t))


def each(f, *trees):
    return jax.tree.map(f, *trees)


def norm_of(tree):
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def reference(params, state, xs, ys, mask):
    def loss_fn(p):
        return error_sum(p, xs, ys, mask) / jnp.maximum(mask.sum(), 1)

    loss, g = jax.value_and_grad(loss_fn)(params)
    t = state["t"] + 1
    m = each(lambda m, g: BETA1 * m + (1 - BETA1) * g, state["m"], g)
    v = each(lambda v, g: BETA2 * v + (1 - BETA2) * g**2, state["v"], g)
    m_hat = each(lambda m: m / (1 - BETA1**t), m)
    v_hat = each(lambda v: v / (1 - BETA2**t), v)
    change = each(lambda m, v: -LR * m / (jnp.sqrt(v) + EPS), m_hat, v_hat)
    params = each(jnp.add, params, change)
    d = ema_decay(t)
    ema = each(lambda e, w: d * e + (1 - d) * w, state["ema"], params)
    return {"loss": loss, "params": params, "state": {"m": m, "v": v, "ema": ema, "t": t}, "update_norm": norm_of(change)}


# ---- distributed ----

WHOLE = {"m": P(), "v": P(), "ema": P(), "t": P()}
CUT = {"m": P("dp"), "v": P("dp"), "ema": P("dp"), "t": P()}


def launch(step, mesh, state):
    rows = P("dp")
    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), state, rows, rows, rows),
            out_specs={"loss": P(), "params": P(), "state": state, "update_norm": P()},
            check_vma=False,
        )
    )


def loss_and_own_gradient(params, xs, ys, mask):
    """The share of this device in the global mean, and the gradient of the share."""
    count = jnp.maximum(lax.psum(mask.sum(), "dp"), 1)
    return jax.value_and_grad(lambda p: error_sum(p, xs, ys, mask) / count)(params)


def adam_folded(w, m, v, t):
    """Both corrections folded into the step size, as in the last line of section 2 of the paper."""
    c1, root2 = 1 - jnp.power(BETA1, t), jnp.sqrt(1 - jnp.power(BETA2, t))
    return w - (LR * root2 / c1) * m / (jnp.sqrt(v) + EPS * root2)


def right_1(mesh):
    def step(params, state, xs, ys, mask):
        loss, g = lax.psum(loss_and_own_gradient(params, xs, ys, mask), "dp")
        t = state["t"] + 1
        m = each(lambda m, g: m + (1 - BETA1) * (g - m), state["m"], g)
        v = each(lambda v, g: v + (1 - BETA2) * (g * g - v), state["v"], g)
        new = each(lambda w, m, v: adam_folded(w, m, v, t), params, m, v)
        ema = each(lambda e, w: e - (1 - ema_decay(t)) * (e - w), state["ema"], new)
        moved = norm_of(each(jnp.subtract, new, params))
        return {"loss": loss, "params": new, "state": {"m": m, "v": v, "ema": ema, "t": t}, "update_norm": moved}

    return launch(step, mesh, WHOLE)


def zero_step(params, state, xs, ys, mask, scale=1.0):
    loss, g = loss_and_own_gradient(params, xs, ys, mask)
    rank = lax.axis_index("dp")
    g = each(lambda g: scale * lax.psum_scatter(g, "dp", scatter_dimension=0, tiled=True), g)
    own = each(lambda w: lax.dynamic_slice_in_dim(w, rank * (w.shape[0] // DP), w.shape[0] // DP), params)
    t = state["t"] + 1
    c1, c2 = 1 - BETA1**t, 1 - BETA2**t
    m = each(lambda m, g: BETA1 * m + (1 - BETA1) * g, state["m"], g)
    v = each(lambda v, g: BETA2 * v + (1 - BETA2) * jnp.square(g), state["v"], g)
    change = each(lambda m, v: LR * (m / c1) / (jnp.sqrt(v / c2) + EPS), m, v)
    own = each(jnp.subtract, own, change)
    d = ema_decay(t)
    ema = each(lambda e, w: d * e + (1 - d) * w, state["ema"], own)
    params = each(lambda w: lax.all_gather(w, "dp", tiled=True), own)
    moved = jnp.sqrt(lax.psum(sum(jnp.vdot(c, c) for c in jax.tree.leaves(change)), "dp"))
    return {"loss": lax.psum(loss, "dp"), "params": params, "state": {"m": m, "v": v, "ema": ema, "t": t}, "update_norm": moved}


def right_2(mesh):
    return launch(zero_step, mesh, CUT)


def wrong_1(mesh):
    def step(params, state, xs, ys, mask):
        loss, g = lax.psum(loss_and_own_gradient(params, xs, ys, mask), "dp")
        t = state["t"] + 1
        m = each(lambda m, g: m + (1 - BETA1) * (g - m), state["m"], g)
        v = each(lambda v, g: v + (1 - BETA2) * (g * g - v), state["v"], g)
        ema = each(lambda e, w: e - (1 - ema_decay(t)) * (e - w), state["ema"], params)
        new = each(lambda w, m, v: adam_folded(w, m, v, t), params, m, v)
        moved = norm_of(each(jnp.subtract, new, params))
        return {"loss": loss, "params": new, "state": {"m": m, "v": v, "ema": ema, "t": t}, "update_norm": moved}

    return launch(step, mesh, WHOLE)


def wrong_2(mesh):
    def step(params, state, xs, ys, mask):
        loss, g = loss_and_own_gradient(params, xs, ys, mask)
        t = state["t"] + 1
        squares = each(lambda g: lax.psum(g * g, "dp"), g)
        loss, g = lax.psum((loss, g), "dp")
        m = each(lambda m, g: BETA1 * m + (1 - BETA1) * g, state["m"], g)
        v = each(lambda v, s: BETA2 * v + (1 - BETA2) * s, state["v"], squares)
        new = each(lambda w, m, v: adam_folded(w, m, v, t), params, m, v)
        ema = each(lambda e, w: e - (1 - ema_decay(t)) * (e - w), state["ema"], new)
        moved = norm_of(each(jnp.subtract, new, params))
        return {"loss": loss, "params": new, "state": {"m": m, "v": v, "ema": ema, "t": t}, "update_norm": moved}

    return launch(step, mesh, WHOLE)


def wrong_3(mesh):
    def step(*given):
        return zero_step(*given, scale=1 / lax.axis_size("dp"))

    return launch(step, mesh, CUT)
