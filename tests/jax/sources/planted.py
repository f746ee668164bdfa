"""Bugs as users make them, each at a line that says so. All of them run in JAX without an error: check_vma is off."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj
from jax import lax

MLP = ({"w1": tvj.Reals((64, 256)), "w2": tvj.Reals((256, 64))}, tvj.Reals((32, 64)), tvj.Reals((32, 64)))
TP = {"w1": P(None, "tp"), "w2": P("tp", None)}
MESH = {"dp": 2, "tp": 4}


def sgd(params, grads):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)


def stepped(loss):
    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return sgd(params, grads), value

    return step


def mapped(step, mesh, where=TP, out=None, batch=("dp", "dp")):
    specs = {"in_specs": (where, *(P(b) for b in batch)), "out_specs": (out or where, P())}
    return jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **specs))


@stepped
def mlp(params, x, t):
    return jnp.mean((jax.nn.relu(x @ params["w1"]) @ params["w2"] - t) ** 2)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def enter(x, axis):
    """The identity; its gradient is added up over the axis."""
    return x


enter.defvjp(lambda x, axis: (x, None), lambda axis, _, g: (lax.psum(g, axis),))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def forgotten(x, axis):
    return x


forgotten.defvjp(lambda x, axis: (x, None), lambda axis, _, g: (g,))  # BUG psum missing in a custom_vjp


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def leave(x, axis):
    """Added up over the axis; its gradient is the identity."""
    return lax.psum(x, axis)


leave.defvjp(lambda x, axis: (lax.psum(x, axis), None), lambda axis, _, g: (g,))


def two_layers(params, x, t, entered=enter, axis="tp"):
    """Both weights twice, so that the gradient of the input of the second pair matters."""
    for _ in range(2):
        h = jax.nn.relu(entered(x, "tp") @ params["w1"])
        x = leave(h @ params["w2"], axis)
    return jnp.mean((x - t) ** 2)


def two_layers_alone(params, x, t):
    for _ in range(2):
        x = jax.nn.relu(x @ params["w1"]) @ params["w2"]
    return jnp.mean((x - t) ** 2)


def averaged(loss):
    """The loss and gradients of the shares of a batch, averaged by hand."""

    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return sgd(params, lax.pmean(grads, "dp")), lax.pmean(value, "dp")

    return step


def correct(mesh):
    return mapped(averaged(two_layers), mesh)


def missing_psum_in_custom_vjp(mesh):
    return mapped(averaged(partial(two_layers, entered=forgotten)), mesh)


def wrong_axis_name(mesh):
    return mapped(averaged(partial(two_layers, axis="dp")), mesh)  # BUG psum over dp


def gradients_stay_local(mesh):
    def step(params, *batch):
        value, grads = jax.value_and_grad(two_layers)(params, *batch)
        return sgd(params, grads), lax.pmean(value, "dp")  # BUG no pmean of the gradients

    return mapped(step, mesh)


def summed_gradients(mesh):
    def step(params, *batch):
        value, grads = jax.value_and_grad(two_layers)(params, *batch)
        return sgd(params, lax.psum(grads, "dp")), lax.pmean(value, "dp")  # BUG a sum of means

    return mapped(step, mesh)


def differentiated_pmean(mesh):
    def loss(params, x, t):
        return lax.pmean(two_layers(params, x, t), "dp")

    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)  # BUG pmean's derivative is a pmean once more
        return sgd(params, lax.psum(grads, "dp")), value

    return mapped(step, mesh)


def wrong_in_specs(mesh):
    wrong = {"w1": P(None, "tp"), "w2": P("dp", None)}

    def step(params, x, t):
        params = {**params, "w2": params["w2"][: params["w1"].shape[1]]}
        value, grads = jax.value_and_grad(two_layers)(params, x, t)
        grads = {**grads, "w2": jnp.concatenate([grads["w2"], grads["w2"]])}
        whole = {**params, "w2": jnp.concatenate([params["w2"], params["w2"]])}
        return sgd(whole, lax.pmean(grads, "dp")), lax.pmean(value, "dp")

    return mapped(step, mesh, wrong)  # BUG w2 is cut over dp


SQUARE = ({"w1": tvj.Reals((64, 64)), "w2": tvj.Reals((64, 64))}, tvj.Reals((32, 64)), tvj.Reals((32, 64)))


def other_out_specs(mesh):
    out = {"w1": P(None, "dp"), "w2": P("tp", None)}
    return mapped(averaged(two_layers), mesh, out=out)  # BUG w1 comes out as if cut over dp


MASKED = (*SQUARE, tvj.Reals((32,), nonnegative=True))


def masked_alone(params, x, t, weight):
    error = jnp.sum((jax.nn.relu(x @ params["w1"]) @ params["w2"] - t) ** 2, -1)
    return jnp.sum(error * weight) / jnp.sum(weight)


def mean_of_means(mesh):
    def step(params, *batch):
        value, grads = jax.value_and_grad(masked_alone)(params, *batch)
        return sgd(params, lax.pmean(grads, "dp")), lax.pmean(value, "dp")  # BUG shares have different weights

    return mapped(step, mesh, {"w1": P(), "w2": P()}, batch=("dp", "dp", "dp"))


ROTATED = ({"w": tvj.Reals((32, 32))}, tvj.Reals((4, 16, 32)), tvj.Reals((4, 16, 32)))


def turned(x, first):
    half = x.shape[-1] // 2
    angle = (first + jnp.arange(x.shape[1], dtype=jnp.float32))[:, None] * 0.9 ** jnp.arange(half, dtype=jnp.float32)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)


def rotated_alone(params, x, t):
    return jnp.mean((turned(x @ params["w"], 0) - t) ** 2)


def positions_not_offset(mesh):
    def loss(params, x, t):
        return lax.pmean(jnp.mean((turned(x @ params["w"], 0) - t) ** 2), "cp")  # BUG every rank counts from 0

    def step(params, x, t):
        value, grads = jax.value_and_grad(loss)(params, x, t)
        return sgd(params, lax.pmean(grads, "cp")), value

    specs = {"in_specs": ({"w": P()}, P(None, "cp"), P(None, "cp")), "out_specs": ({"w": P()}, P())}
    return jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **specs))


def clipped_alone(params, x, t):
    value, grads = jax.value_and_grad(two_layers_alone)(params, x, t)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    return sgd(params, jax.tree.map(lambda g: g / (1 + norm), grads)), value


def local_norm(mesh):
    def step(params, x, t):
        value, grads = jax.value_and_grad(two_layers)(params, x, t)
        grads = lax.pmean(grads, "dp")
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))  # BUG the norm of a share
        return sgd(params, jax.tree.map(lambda g: g / (1 + norm), grads)), lax.pmean(value, "dp")

    return mapped(step, mesh)


def last_micro_batch_lost(mesh):
    def step(params, x, t):
        xs, ts = (a.reshape(4, -1, a.shape[-1]) for a in (x, t))

        def one(carry, batch):
            found = jax.value_and_grad(two_layers)(params, *batch)
            return jax.tree.map(lambda a, b: a + b / 4, carry, found), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        (value, grads), _ = lax.scan(one, zero, (xs[:3], ts[:3]))  # BUG three of four
        return sgd(params, lax.pmean(grads, "dp")), lax.pmean(value, "dp")

    return mapped(step, mesh)


BUGS = {
    "psum missing in a custom_vjp": (stepped(two_layers_alone), missing_psum_in_custom_vjp, MLP, MESH),
    "wrong axis name": (stepped(two_layers_alone), wrong_axis_name, MLP, MESH),
    "gradients stay local": (stepped(two_layers_alone), gradients_stay_local, MLP, MESH),
    "a sum of mean gradients": (stepped(two_layers_alone), summed_gradients, MLP, MESH),
    "pmean of a loss differentiated": (stepped(two_layers_alone), differentiated_pmean, MLP, MESH),
    "wrong in_specs": (stepped(two_layers_alone), wrong_in_specs, MLP, MESH),
    "out_specs that are not the in_specs": (stepped(two_layers_alone), other_out_specs, SQUARE, {"dp": 4, "tp": 4}),
    "mean of means": (stepped(masked_alone), mean_of_means, MASKED, {"dp": 4}),
    "rotary positions not offset": (stepped(rotated_alone), positions_not_offset, ROTATED, {"cp": 4}),
    "norm of a share": (clipped_alone, local_norm, MLP, MESH),
    "last micro-batch lost": (stepped(two_layers_alone), last_micro_batch_lost, MLP, MESH),
}
