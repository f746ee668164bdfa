"""A small GPT, and the same step with Megatron-style tensor parallelism inside shard_map (dp x tp)."""
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import trainverify.jax as tvj

B, T, D, H, F, V, LAYERS = 6, 7, 20, 4, 44, 26, 2
LR, MOMENTUM = 0.05, 0.9

mesh = {"dp": 2, "tp": 2}


def _layer():
    return {
        "ln1": {"g": (D,), "b": (D,)},
        "wqkv": (3, D, H, D // H),
        "wo": (H, D // H, D),
        "ln2": {"g": (D,), "b": (D,)},
        "up": (D, F),
        "up_b": (F,),
        "down": (F, D),
        "down_b": (D,),
    }


_shapes = {"wte": (V, D), "wpe": (T, D), "layers": [_layer() for _ in range(LAYERS)], "lnf": {"g": (D,), "b": (D,)}, "head": (D, V)}
_params = jax.tree.map(tvj.Reals, _shapes, is_leaf=lambda s: isinstance(s, tuple))
args = (_params, _params, tvj.Ids((B, T + 1), below=V))

_layer_spec = {
    "ln1": {"g": P(), "b": P()},
    "wqkv": P(None, None, "tp"),
    "wo": P("tp"),
    "ln2": {"g": P(), "b": P()},
    "up": P(None, "tp"),
    "up_b": P("tp"),
    "down": P("tp"),
    "down_b": P(),
}
SPECS = {"wte": P("tp"), "wpe": P(), "layers": [_layer_spec] * LAYERS, "lnf": {"g": P(), "b": P()}, "head": P(None, "tp")}


def layer_norm(x, p):
    mean = x.mean(-1, keepdims=True)
    var = jnp.mean((x - mean) ** 2, -1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5) * p["g"] + p["b"]


def attention(x, wqkv, wo):
    q, k, v = jnp.einsum("btd,cdhe->cbhte", x, wqkv)
    scores = jnp.einsum("bhqe,bhke->bhqk", q, k) / jnp.sqrt(D // H)
    causal = jnp.tril(jnp.ones((T, T), dtype=bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bhke,hed->bqd", weights, v, wo)


def sgd(params, mom, grads):
    mom = jax.tree.map(lambda m, g: MOMENTUM * m + g, mom, grads)
    return jax.tree.map(lambda w, m: w - LR * m, params, mom), mom


def reference(params, mom, tokens):
    def loss_fn(p):
        x = p["wte"][tokens[:, :-1]] + p["wpe"]
        for lp in p["layers"]:
            x = x + attention(layer_norm(x, lp["ln1"]), lp["wqkv"], lp["wo"])
            h = jax.nn.gelu(layer_norm(x, lp["ln2"]) @ lp["up"] + lp["up_b"])
            x = x + h @ lp["down"] + lp["down_b"]
        logp = jax.nn.log_softmax(layer_norm(x, p["lnf"]) @ p["head"])
        return -jnp.mean(jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1))

    loss, grads = jax.value_and_grad(loss_fn)(params)
    params, mom = sgd(params, mom, grads)
    return params, mom, loss


# f and g of the Megatron paper: identity one way, all-reduce the other way


@jax.custom_vjp
def copy_to_tp(x):
    return x


copy_to_tp.defvjp(lambda x: (x, None), lambda _, ct: (lax.psum(ct, "tp"),))


@jax.custom_vjp
def reduce_from_tp(x):
    return lax.psum(x, "tp")


reduce_from_tp.defvjp(lambda x: (lax.psum(x, "tp"), None), lambda _, ct: (ct,))


def vocab_range(rows):
    lo = lax.axis_index("tp") * rows
    return lo, lo + rows


def parallel_embedding(table, ids):
    lo, hi = vocab_range(table.shape[0])
    mine = (ids >= lo) & (ids < hi)
    rows = table[jnp.where(mine, ids - lo, 0)]
    return reduce_from_tp(jnp.where(mine[..., None], rows, 0.0))


def parallel_cross_entropy(logits, targets, axis="tp"):
    top = lax.pmax(lax.stop_gradient(logits.max(-1)), "tp")
    logits = logits - top[..., None]
    lo = lax.axis_index(axis) * logits.shape[-1]
    mine = (targets >= lo) & (targets < lo + logits.shape[-1])
    picked = jnp.take_along_axis(logits, jnp.where(mine, targets - lo, 0)[..., None], axis=-1)[..., 0]
    picked = reduce_from_tp(jnp.where(mine, picked, 0.0))
    return jnp.log(reduce_from_tp(jnp.exp(logits).sum(-1))) - picked


def mlp(x, lp):
    h = jax.nn.gelu(copy_to_tp(x) @ lp["up"] + lp["up_b"])
    return reduce_from_tp(h @ lp["down"]) + lp["down_b"]


def mlp_without_f(x, lp):
    h = jax.nn.gelu(x @ lp["up"] + lp["up_b"])
    return reduce_from_tp(h @ lp["down"]) + lp["down_b"]


def mlp_row_linear_bias(x, lp):
    h = jax.nn.gelu(copy_to_tp(x) @ lp["up"] + lp["up_b"])
    return reduce_from_tp(h @ lp["down"] + lp["down_b"])


def megatron_loss(p, tokens, feed_forward, cross_entropy):
    x = parallel_embedding(p["wte"], tokens[:, :-1]) + p["wpe"]
    for lp in p["layers"]:
        x = x + reduce_from_tp(attention(copy_to_tp(layer_norm(x, lp["ln1"])), lp["wqkv"], lp["wo"]))
        x = x + feed_forward(layer_norm(x, lp["ln2"]), lp)
    logits = copy_to_tp(layer_norm(x, p["lnf"])) @ p["head"]
    return cross_entropy(logits, tokens[:, 1:]).mean()


def megatron(mesh, feed_forward=mlp, cross_entropy=parallel_cross_entropy):
    def step(params, mom, tokens):
        loss, grads = jax.value_and_grad(megatron_loss)(params, tokens, feed_forward, cross_entropy)
        grads = lax.pmean(grads, "dp")
        params, mom = sgd(params, mom, grads)
        return params, mom, lax.pmean(loss, "dp")

    sharded = jax.shard_map(step, mesh=mesh, in_specs=(SPECS, SPECS, P("dp")), out_specs=(SPECS, SPECS, P()), check_vma=False)
    return jax.jit(sharded)


def right_1(mesh):
    return megatron(mesh)


def right_2(mesh):
    """Plain psums and checked replication: JAX itself inserts the transposed collectives. Lookups are one-hot products."""

    def one_hot(ids, rows):
        return jax.nn.one_hot(ids - vocab_range(rows)[0], rows)

    def loss_fn(p, tokens):
        x = lax.psum(one_hot(tokens[:, :-1], V // 2) @ p["wte"], "tp") + p["wpe"]
        for lp in p["layers"]:
            x = x + lax.psum(attention(layer_norm(x, lp["ln1"]), lp["wqkv"], lp["wo"]), "tp")
            h = jax.nn.gelu(layer_norm(x, lp["ln2"]) @ lp["up"] + lp["up_b"])
            x = x + lax.psum(h @ lp["down"], "tp") + lp["down_b"]
        logits = layer_norm(x, p["lnf"]) @ p["head"]
        top = lax.pmax(lax.stop_gradient(logits).max(-1, keepdims=True), "tp")
        total = lax.psum(jnp.exp(logits - top).sum(-1), "tp")
        right = lax.psum((logits * one_hot(tokens[:, 1:], V // 2)).sum(-1), "tp")
        return lax.pmean(jnp.mean(jnp.log(total) + top[..., 0] - right), "dp")

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(SPECS, SPECS, P("dp")), out_specs=(SPECS, SPECS, P()))
    def step(params, mom, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        return *sgd(params, mom, grads), loss

    return step


def wrong_1(mesh):
    return megatron(mesh, cross_entropy=partial(parallel_cross_entropy, axis="dp"))


def wrong_2(mesh):
    return megatron(mesh, feed_forward=mlp_without_f)


def wrong_3(mesh):
    return megatron(mesh, feed_forward=mlp_row_linear_bias)
