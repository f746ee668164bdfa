"""
Fully sharded training of a residual MLP stack. Parameters of all layers are stacked on a leading axis, each device owns a
quarter of every large weight, and the weights of a layer exist as a whole only while lax.scan is at that layer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import trainverify.jax as tvj

N = 4
L, B, D, F, OUT = 3, 8, 24, 20, 7
AXIS = "fsdp"
mesh = {AXIS: N}


class Params(NamedTuple):
    scale: object  # (L, D) whole everywhere
    w_in: object  # (L, D, F) cut along F
    w_out: object  # (L, F, D) cut along F
    head: object  # (D, OUT) cut along D


class Adam(NamedTuple):
    count: object
    mu: Params
    nu: Params


shapes = Params((L, D), (L, D, F), (L, F, D), (D, OUT))
specs = Params(P(), P(None, None, AXIS), P(None, AXIS), P(AXIS))


def _tree(**options):
    return Params(*(tvj.Reals(s, **options) for s in shapes))


args = (_tree(), Adam(tvj.Count(), _tree(), _tree(nonnegative=True)), tvj.Reals((B, D)), tvj.Reals((B, OUT)))


def layer(x, scale, w_in, w_out):
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    h = x / jnp.sqrt(mean_square + 1e-5) * scale
    return x + jnp.tanh(h @ w_in) @ w_out


def huber(error):
    a = jnp.abs(error)
    return jnp.where(a < 1.0, 0.5 * error * error, a - 0.5)


def adamw(params, opt, grads, lr=2e-3, b1=0.9, b2=0.95, eps=1e-6, decay=0.1):
    count = opt.count + 1
    mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, opt.mu, grads)
    nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(g), opt.nu, grads)
    c1, c2 = 1 - b1**count, 1 - b2**count

    def new(w, m, v):
        return w - lr * ((m / c1) / (jnp.sqrt(v / c2) + eps) + decay * w)

    return jax.tree.map(new, params, mu, nu), Adam(count, mu, nu)


def clip(grads, square, limit=0.3):
    factor = limit / jnp.maximum(jnp.sqrt(square), limit)
    return jax.tree.map(lambda g: g * factor, grads)


def squares(tree):
    return sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(tree))


def reference(params, opt, x, y):
    def loss_of(p):
        def body(h, weights):
            return layer(h, *weights), None

        h, _ = lax.scan(body, x, (p.scale, p.w_in, p.w_out))
        return jnp.mean(huber(h @ p.head - y))

    loss, grads = jax.value_and_grad(loss_of)(params)
    params, opt = adamw(params, opt, clip(grads, squares(grads)))
    return params, opt, loss


def on_devices(mesh, step):
    state = Adam(P(), specs, specs)
    return jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(specs, state, P(AXIS), P(AXIS)), out_specs=(specs, state, P()), check_vma=False)
    )


def gather(w, dim):
    return lax.all_gather(w, AXIS, axis=dim, tiled=True)


def local_loss(p, x, y):
    """Mean over the rows of this device. The transpose of a gather sums gradients over devices and leaves each its share."""

    @jax.checkpoint
    def body(h, weights):
        scale, w_in, w_out = weights
        return layer(h, scale, gather(w_in, 1), gather(w_out, 0)), None

    h, _ = lax.scan(body, x, (p.scale, p.w_in, p.w_out))
    return jnp.mean(huber(h @ gather(p.head, 0) - y))


def right_1(mesh):
    def step(params, opt, x, y):
        loss, g = jax.value_and_grad(local_loss)(params, x, y)
        g = Params(lax.pmean(g.scale, AXIS), g.w_in / N, g.w_out / N, g.head / N)
        square = lax.psum(squares(g._replace(scale=0.0)), AXIS) + squares(g.scale)
        params, opt = adamw(params, opt, clip(g, square))
        return params, opt, lax.pmean(loss, AXIS)

    return on_devices(mesh, step)


def right_2(mesh):
    """Gathers with a backward pass written out: reduce the whole gradient, keep the own slice. One layer ahead is in flight."""

    def unshard(dim):
        @jax.custom_vjp
        def whole(w):
            blocks = lax.all_gather(w, AXIS)
            return jnp.concatenate([blocks[i] for i in range(N)], axis=dim)

        def backward(size, g):
            g = lax.psum(g, AXIS) / N
            return (lax.dynamic_slice_in_dim(g, lax.axis_index(AXIS) * size, size, axis=dim),)

        whole.defvjp(lambda w: (whole(w), w.shape[dim]), backward)
        return whole

    rows, columns = unshard(0), unshard(1)

    def loss_of(p, x, y):
        def fetch(i):
            return columns(p.w_in[i]), rows(p.w_out[i])

        h, ready = x, fetch(0)
        for i in range(L):
            ahead = fetch(i + 1) if i + 1 < L else None
            h = layer(h, p.scale[i], *ready)
            ready = ahead
        return huber(h @ rows(p.head) - y).sum() / (x.shape[0] * OUT)

    def step(params, opt, x, y):
        loss, g = jax.value_and_grad(loss_of)(params, x, y)
        g = g._replace(scale=lax.psum(g.scale, AXIS) / N)
        parts = jnp.stack([squares(g.scale) / N, squares(g.w_in), squares(g.w_out), squares(g.head)])
        params, opt = adamw(params, opt, clip(g, lax.psum(parts, AXIS).sum()))
        return params, opt, lax.psum(loss, AXIS) / N

    return on_devices(mesh, step)


def wrong_1(mesh):
    def step(params, opt, x, y):
        loss, g = jax.value_and_grad(local_loss)(params, x, y)
        g = Params(lax.pmean(g.scale, AXIS), g.w_in / N, g.w_out / N, g.head / N)
        params, opt = adamw(params, opt, clip(g, lax.pmean(squares(g), AXIS)))
        return params, opt, lax.pmean(loss, AXIS)

    return on_devices(mesh, step)


def wrong_2(mesh):
    def step(params, opt, x, y):
        loss, g = jax.value_and_grad(local_loss)(params, x, y)
        g = Params(g.scale / N, g.w_in / N, g.w_out / N, g.head / N)
        square = lax.psum(squares(g._replace(scale=0.0)), AXIS) + lax.pmean(squares(g.scale), AXIS)
        params, opt = adamw(params, opt, clip(g, square))
        return params, opt, lax.pmean(loss, AXIS)

    return on_devices(mesh, step)


def wrong_3(mesh):
    def loss_of(p, x, y):
        def body(h, weights):
            scale, w_in, w_out = weights
            w_in = lax.all_gather(w_in, AXIS).reshape(D, F)
            return layer(h, scale, w_in, lax.all_gather(w_out, AXIS).reshape(F, D)), None

        h, _ = lax.scan(body, x, (p.scale, p.w_in, p.w_out))
        return jnp.mean(huber(h @ gather(p.head, 0) - y))

    def step(params, opt, x, y):
        loss, g = jax.value_and_grad(loss_of)(params, x, y)
        g = Params(lax.pmean(g.scale, AXIS), g.w_in / N, g.w_out / N, g.head / N)
        square = lax.psum(squares(g._replace(scale=0.0)), AXIS) + squares(g.scale)
        params, opt = adamw(params, opt, clip(g, square))
        return params, opt, lax.pmean(loss, AXIS)

    return on_devices(mesh, step)
