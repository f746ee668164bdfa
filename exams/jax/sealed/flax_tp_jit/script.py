"""A flax.linen decoder under jit: parameters and activations carry shardings, XLA's partitioner does the rest (read with --hlo)."""

import re
from typing import Any, Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import trainverify.jax as tvj

ROWS, SEQ, VOCAB, D, HEADS, FF, LAYERS = 8, 6, 27, 12, 4, 34, 2
PADDED = 28  # the next size that tensor parallelism divides
mesh = {"data": 2, "model": 2}


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (D,))
        return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * scale


def dense_mlp(x, w1, b1, w2, b2):
    return nn.gelu(x @ w1 + b1) @ w2 + b2


class Mlp(nn.Module):
    compute: Callable

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        w1, w2 = self.param("w1", init, (D, FF)), self.param("w2", init, (FF, D))
        b1, b2 = self.param("b1", nn.initializers.zeros, (FF,)), self.param("b2", nn.initializers.zeros, (D,))
        return self.compute(x, w1, b1, w2, b2)


class SelfAttention(nn.Module):
    place: Callable

    @nn.compact
    def __call__(self, x):
        qkv = nn.DenseGeneral((3, HEADS, D // HEADS), use_bias=False, name="qkv")(x)
        q, k, v = (self.place(qkv[:, :, i], "data", None, "model", None) for i in range(3))
        mask = nn.make_causal_mask(jnp.zeros(x.shape[:2]))
        scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / (D // HEADS) ** 0.5
        weights = nn.softmax(jnp.where(mask > 0, scores, -jnp.inf))
        y = jnp.einsum("bhqk,bkhe->bqhe", weights, v)
        return nn.DenseGeneral(D, axis=(-2, -1), name="out")(y)


def same(x, *_):
    return x


class Decoder(nn.Module):
    place: Callable = same
    mlp: Callable = dense_mlp

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCAB, D, name="embed")(ids)
        x = x + self.param("position", nn.initializers.normal(0.02), (SEQ, D))
        for i in range(LAYERS):
            x = self.place(x, "data", None, None)
            x = x + SelfAttention(self.place, name=f"attention_{i}")(Norm(name=f"norm_a{i}")(x))
            x = x + Mlp(self.mlp, name=f"mlp_{i}")(Norm(name=f"norm_m{i}")(x))
        return Norm(name="norm")(x), self.param("head", nn.initializers.lecun_normal(), (D, VOCAB))


tx = optax.adam(4e-3, b1=0.85, b2=0.97, eps=1e-6)
_ids = jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32)
_state = jax.eval_shape(
    lambda ids: TrainState.create(apply_fn=None, params=Decoder().init(jax.random.key(0), ids)["params"], tx=tx), _ids
)


def _declare(path, leaf):
    if leaf.shape == () and not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
        return tvj.Count()
    return tvj.Reals(leaf.shape, nonnegative=".nu" in jax.tree_util.keystr(path))


_tokens = tvj.Ids((ROWS, SEQ), below=VOCAB)
args = (
    jax.tree_util.tree_map_with_path(_declare, _state),
    {"ids": _tokens, "labels": _tokens, "graded": tvj.Ids((ROWS, SEQ), below=2)},
)


def whole_head(x, head):
    return nn.log_softmax(x @ head)


def nll(params, batch, model: Any, log_probs=whole_head):
    """Sum over the graded tokens."""
    logp = log_probs(*model.apply({"params": params}, batch["ids"]))
    return -jnp.sum(jnp.take_along_axis(logp, batch["labels"][..., None], axis=-1)[..., 0] * batch["graded"])


def mean_loss(params, batch, model=Decoder(), log_probs=whole_head):
    return nll(params, batch, model, log_probs) / jnp.maximum(batch["graded"].sum(), 1)


def step_with(loss_and_grads):
    def step(state, batch):
        loss, grads = loss_and_grads(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    return step


reference = step_with(jax.value_and_grad(mean_loss))

RULES = (
    (r"qkv.*kernel", P(None, None, "model", None)),
    (r"out.*kernel", P("model", None, None)),
    (r"w1", P(None, "model")),
    (r"b1", P("model")),
    (r"w2", P("model", None)),
    (r"embed|position", P(None, "model")),
    (r"head", P("model", None)),
)


def compiled(mesh, step):
    def lie(path, _):
        text = jax.tree_util.keystr(path)
        return NamedSharding(mesh, next((spec for rule, spec in RULES if re.search(rule, text)), P()))

    state = jax.tree_util.tree_map_with_path(lie, _state)
    rows = NamedSharding(mesh, P("data"))
    return jax.jit(step, in_shardings=(state, rows), out_shardings=(state, NamedSharding(mesh, P())), keep_unused=True)


def placed(mesh):
    return lambda x, *axes: lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))


def right_1(mesh):
    model = Decoder(place=placed(mesh))
    return compiled(mesh, step_with(jax.value_and_grad(lambda p, batch: mean_loss(p, batch, model))))


def padded_head(mesh, fill):
    def log_probs(x, head):
        head = jnp.pad(head, ((0, 0), (0, PADDED - VOCAB)))
        logits = placed(mesh)(x @ head, "data", None, "model")
        return nn.log_softmax(jnp.where(jnp.arange(PADDED) < VOCAB, logits, fill))

    return log_probs


def mlp_by_hand(mesh, body):
    weights = (P(None, "model"), P("model"), P("model", None), P())
    return jax.shard_map(body, mesh=mesh, in_specs=(P("data"), *weights), out_specs=P("data"), check_vma=False)


def reduced_then_biased(x, w1, b1, w2, b2):
    return lax.psum(nn.gelu(x @ w1 + b1) @ w2, "model") + b2


def biased_then_reduced(x, w1, b1, w2, b2):
    return lax.psum(nn.gelu(x @ w1 + b1) @ w2 + b2, "model")


def right_2(mesh):
    """A padded vocabulary that is cut, the MLP as an island of shard_map, and two micro-batches."""
    model = Decoder(place=placed(mesh), mlp=mlp_by_hand(mesh, reduced_then_biased))
    head = padded_head(mesh, fill=-jnp.inf)

    def loss_and_grads(params, batch):
        count = jnp.maximum(batch["graded"].sum(), 1)
        halves = jax.tree.map(lambda a: (a[::2], a[1::2]), batch)
        parts = []
        for i in range(2):
            half = {k: v[i] for k, v in halves.items()}
            parts.append(jax.value_and_grad(lambda p: nll(p, half, model, head) / count)(params))
        return jax.tree.map(jnp.add, *parts)

    return compiled(mesh, step_with(loss_and_grads))


def wrong_1(mesh):
    model, head = Decoder(place=placed(mesh)), padded_head(mesh, fill=0.0)
    return compiled(mesh, step_with(jax.value_and_grad(lambda p, batch: mean_loss(p, batch, model, head))))


def wrong_2(mesh):
    model = Decoder(place=placed(mesh))

    def loss_and_grads(params, batch):
        halves = [jax.tree.map(lambda a: a[i::2], batch) for i in range(2)]
        parts = [jax.value_and_grad(mean_loss)(params, half, model) for half in halves]
        return jax.tree.map(lambda a, b: (a + b) / 2, *parts)

    return compiled(mesh, step_with(loss_and_grads))


def wrong_3(mesh):
    model = Decoder(place=placed(mesh), mlp=mlp_by_hand(mesh, biased_then_reduced))
    return compiled(mesh, step_with(jax.value_and_grad(lambda p, batch: mean_loss(p, batch, model))))
