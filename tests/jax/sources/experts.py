"""A mixture of experts, the best two for every token; experts and tokens are cut over the same ranks."""

from __future__ import annotations

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj
from jax import lax


def shapes(tokens=64, dim=512, hidden=1024, experts=8):
    params = {
        "gate": tvj.Reals((dim, experts)),
        "up": tvj.Reals((experts, dim, hidden)),
        "down": tvj.Reals((experts, hidden, dim)),
    }
    return params, tvj.Reals((tokens, dim)), tvj.Reals((tokens, dim))


SMALL = {"tokens": 16, "dim": 6, "hidden": 10, "experts": 8}


def weights_of(params, x):
    """[tokens, experts]: the shares of the two best experts, which add up to 1; 0 elsewhere."""
    experts = params["gate"].shape[1]
    best, ids = lax.top_k(x @ params["gate"], 2)
    shares = jax.nn.softmax(best, -1)
    return jnp.einsum("tk,tke->te", shares, jax.nn.one_hot(ids, experts))


def expert(up, down, x):
    return jnp.einsum("etf,efd->etd", jax.nn.silu(jnp.einsum("etd,edf->etf", x, up)), down)


def stepped(forward):
    def step(params, x, t):
        value, grads = jax.value_and_grad(forward)(params, x, t)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return step


def one_device(params, x, t):
    weights = weights_of(params, x)
    out = expert(params["up"], params["down"], jnp.broadcast_to(x, (weights.shape[1], *x.shape)))
    return jnp.mean((jnp.einsum("te,etd->td", weights, out) - t) ** 2)


reference = stepped(one_device)


def expert_parallel(mesh):
    def forward(params, x, t):
        weights = weights_of(params, x)
        sent = (weights.T > 0)[..., None] * x  # every expert's tokens, zeros for the others
        given = lax.all_to_all(sent, "ep", 0, 1, tiled=True)
        out = lax.all_to_all(expert(params["up"], params["down"], given), "ep", 1, 0, tiled=True)
        return lax.pmean(jnp.mean((jnp.einsum("te,etd->td", weights, out) - t) ** 2), "ep")

    where = {"gate": P(), "up": P("ep"), "down": P("ep")}
    return jax.jit(jax.shard_map(stepped(forward), mesh=mesh, in_specs=(where, P("ep"), P("ep")), out_specs=(where, P())))


def expert_parallel_whole(mesh):
    """Every expert sees every token; the weights leave out what it was not chosen for."""

    def forward(params, x, t):
        weights = weights_of(params, x)
        experts = weights.shape[1]
        given = lax.all_to_all(jnp.broadcast_to(x, (experts, *x.shape)), "ep", 0, 1, tiled=True)
        out = lax.all_to_all(expert(params["up"], params["down"], given), "ep", 1, 0, tiled=True)
        return lax.pmean(jnp.mean((jnp.einsum("te,etd->td", weights, out) - t) ** 2), "ep")

    where = {"gate": P(), "up": P("ep"), "down": P("ep")}
    return jax.jit(jax.shard_map(stepped(forward), mesh=mesh, in_specs=(where, P("ep"), P("ep")), out_specs=(where, P())))
