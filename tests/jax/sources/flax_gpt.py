"""A GPT from flax modules and optax, both unmodified: data parallel, and by the compiler."""

from __future__ import annotations

from dataclasses import dataclass

import flax.linen as nn
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj
from jax import lax


@dataclass(frozen=True)
class Config:
    layers: int = 2
    dim: int = 768
    heads: int = 12
    vocab: int = 50304
    batch: int = 8
    seq: int = 512


SMALL = Config(dim=16, heads=4, vocab=48, batch=8, seq=6)


class Block(nn.Module):
    c: Config

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2], bool))
        x = x + nn.MultiHeadDotProductAttention(self.c.heads)(h, h, mask=mask)
        h = nn.LayerNorm()(x)
        h = nn.Dense(4 * self.c.dim)(h)
        return x + nn.Dense(self.c.dim)(nn.gelu(h))


class GPT(nn.Module):
    c: Config

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(self.c.vocab, self.c.dim)(ids)
        x = x + self.param("positions", nn.initializers.normal(), (self.c.seq, self.c.dim))[None]
        for _ in range(self.c.layers):
            x = Block(self.c)(x)
        return nn.Dense(self.c.vocab, use_bias=False)(nn.LayerNorm()(x))


def optimizer():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.01))


def state(c):
    """A train state of shapes."""
    model = GPT(c)

    def made():
        params = model.init(jax.random.key(0), jnp.zeros((1, c.seq), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer())

    return jax.eval_shape(made)


def args(c):
    return state(c), tvj.Ids((c.batch, c.seq), c.vocab), tvj.Ids((c.batch, c.seq), c.vocab)


def loss_of(apply, params, ids, labels):
    logits = apply({"params": params}, ids)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def reference(state, ids, labels):
    loss, grads = jax.value_and_grad(lambda p: loss_of(state.apply_fn, p, ids, labels))(state.params)
    return state.apply_gradients(grads=grads), loss


def data_parallel(mesh):
    def step(state, ids, labels):
        loss, grads = jax.value_and_grad(lambda p: loss_of(state.apply_fn, p, ids, labels))(state.params)
        grads, loss = lax.pmean((grads, loss), "dp")
        return state.apply_gradients(grads=grads), loss

    specs = {"in_specs": (P(), P("dp"), P("dp")), "out_specs": (P(), P())}
    return jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **specs))


class NnxBlock(nnx.Module):
    def __init__(self, c, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(c.dim, rngs=rngs), nnx.LayerNorm(c.dim, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(c.heads, c.dim, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(c.dim, 4 * c.dim, rngs=rngs), nnx.Linear(4 * c.dim, c.dim, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2], bool))
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class NnxGPT(nnx.Module):
    def __init__(self, c, rngs):
        self.embed = nnx.Embed(c.vocab, c.dim, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(c, rngs) for _ in range(c.layers)])
        self.norm = nnx.LayerNorm(c.dim, rngs=rngs)
        self.head = nnx.Linear(c.dim, c.vocab, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))


def nnx_case(c):
    """(reference, distributed, args) of the same with nnx."""
    model = nnx.eval_shape(lambda: NnxGPT(c, nnx.Rngs(0)))
    graph, params = nnx.split(model)
    params = nnx.to_pure_dict(params)
    tx = optimizer()
    opt = jax.eval_shape(tx.init, params)

    def loss(params, ids, labels):
        merged = nnx.merge(graph, jax.tree.map(lambda x: x, nnx_state(graph, params)))
        return optax.softmax_cross_entropy_with_integer_labels(merged(ids), labels).mean()

    def nnx_state(graph, params):
        found = nnx.state(nnx.eval_shape(lambda: NnxGPT(c, nnx.Rngs(0))))
        nnx.replace_by_pure_dict(found, params)
        return found

    def update(params, opt, grads):
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt

    def one(params, opt, ids, labels):
        value, grads = jax.value_and_grad(loss)(params, ids, labels)
        return *update(params, opt, grads), value

    def many(mesh):
        def step(params, opt, ids, labels):
            value, grads = jax.value_and_grad(loss)(params, ids, labels)
            grads, value = lax.pmean((grads, value), "dp")
            return *update(params, opt, grads), value

        specs = {"in_specs": (P(), P(), P("dp"), P("dp")), "out_specs": (P(), P(), P())}
        return jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **specs))

    return one, many, (params, opt, tvj.Ids((c.batch, c.seq), c.vocab), tvj.Ids((c.batch, c.seq), c.vocab))


def by_compiler(mesh):
    """The step of one device, with the batch cut over dp by jit."""
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("dp"))
    return jax.jit(reference, in_shardings=(whole, rows, rows), out_shardings=(whole, whole), keep_unused=True)
