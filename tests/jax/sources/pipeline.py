"""GPipe by ppermute: every rank has one stage; micro-batches go from stage to stage."""

from __future__ import annotations

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj
from jax import lax


def shapes(stages=4, batch=32, dim=1024, hidden=4096):
    params = {"up": tvj.Reals((stages, dim, hidden)), "down": tvj.Reals((stages, hidden, dim))}
    return params, tvj.Reals((batch, dim)), tvj.Reals((batch, dim))


SMALL = {"batch": 16, "dim": 6, "hidden": 10}


def layer(p, x):
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def sgd(params, grads):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)


def reference(params, x, t):
    def loss(params):
        y = x
        for i in range(params["up"].shape[0]):
            y = layer({n: w[i] for n, w in params.items()}, y)
        return jnp.mean((y - t) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return sgd(params, grads), value


def gpipe(mesh):
    return pipelined(mesh)


def pipelined(mesh, micro=4, skip_last=False):
    def loss(params, x, t):
        stage, stages = lax.axis_index("pp"), lax.axis_size("pp")
        own = jax.tree.map(lambda w: w[0], params)
        xs, ts = (a.reshape(micro, a.shape[0] // micro, -1) for a in (x, t))
        carry, total = jnp.zeros_like(xs[0]), jnp.zeros(())
        for step in range(micro + stages - 1 - int(skip_last)):
            given = jnp.where(stage == 0, xs[min(step, micro - 1)], carry)
            y = layer(own, given)
            if step >= stages - 1:
                error = jnp.mean((y - ts[step - stages + 1]) ** 2)
                total = total + jnp.where(stage == stages - 1, error, 0.0)
            carry = lax.ppermute(y, "pp", [(i, i + 1) for i in range(stages - 1)])
        return lax.pmean(lax.psum(total / micro, "pp"), "dp")

    def step(params, x, t):
        value, grads = jax.value_and_grad(loss)(params, x, t)
        return sgd(params, grads), value

    where = {"up": P("pp"), "down": P("pp")}
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(where, P("dp"), P("dp")), out_specs=(where, P())))
