"""DeepSpeed-Ulysses in flax.nnx: the sequence is cut over `sp`, heads are while attention runs; rows are cut over `dp`."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import trainverify.jax as tvj

B, S, VOCAB, DIM, HEADS, HEAD_DIM, FF = 4, 6, 19, 14, 8, 5, 30
SP = 2
mesh = {"dp": 2, "sp": SP}


def positions_on_one_device(length):
    return jnp.arange(length)


def attend(q, k, v):
    """(batch, whole sequence, heads, head_dim) each, causal."""
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * HEAD_DIM**-0.5
    t = jnp.arange(q.shape[1])
    logits = jnp.where(t[:, None] < t[None, :], -jnp.inf, logits)
    return jnp.einsum("bhqk,bkhd->bqhd", nnx.softmax(logits, axis=-1), v)


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.q_scale = nnx.Param(jnp.ones((HEAD_DIM,)))
        self.qkv = nnx.Linear(DIM, 3 * HEADS * HEAD_DIM, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(HEADS * HEAD_DIM, DIM, rngs=rngs)

    def __call__(self, x, core):
        q, k, v = jnp.split(self.qkv(x).reshape(*x.shape[:2], 3 * HEADS, HEAD_DIM), 3, axis=2)
        y = core(q * self.q_scale[...], k, v)
        return self.out(y.reshape(*x.shape[:2], HEADS * HEAD_DIM))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm_a = nnx.RMSNorm(DIM, rngs=rngs)
        self.attention = Attention(rngs)
        self.norm_b = nnx.RMSNorm(DIM, rngs=rngs)
        self.up = nnx.Linear(DIM, FF, rngs=rngs)
        self.down = nnx.Linear(FF, DIM, rngs=rngs)

    def __call__(self, x, core):
        x = x + self.attention(self.norm_a(x), core)
        return x + self.down(nnx.gelu(self.up(self.norm_b(x))))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (VOCAB, DIM)))
        self.places = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (S, DIM)))
        self.block = Block(rngs)
        self.head = nnx.Linear(DIM, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, ids, core=attend, positions=positions_on_one_device):
        x = self.tokens[...][ids] + self.places[...][positions(ids.shape[1])]
        return self.head(self.block(x, core))


graph, blank = nnx.split(nnx.eval_shape(lambda: Decoder(nnx.Rngs(0))), nnx.Param)
tx = optax.sgd(0.05, momentum=0.9, nesterov=True)


def model_of(params):
    state = jax.tree.map(lambda leaf: leaf, blank)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


_shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), nnx.to_pure_dict(blank))
args = (
    jax.tree.map(lambda s: tvj.Reals(s.shape), _shapes),
    jax.tree.map(lambda s: tvj.Reals(s.shape), jax.eval_shape(tx.init, _shapes)),
    {"ids": tvj.Ids((B, S), below=VOCAB), "next": tvj.Ids((B, S), below=VOCAB), "keep": tvj.Ids((B, S), below=2)},
)


def token_losses(params, batch, **how):
    logits = model_of(params)(batch["ids"], **how)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]) * batch["keep"]


def optimize(params, opt_state, grads):
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def reference(params, opt_state, batch):
    def loss_fn(params):
        return token_losses(params, batch).sum() / jnp.maximum(batch["keep"].sum(), 1)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return *optimize(params, opt_state, grads), loss


def positions_of_shard(length):
    return lax.axis_index("sp") * length + jnp.arange(length)


def ulysses(q, k, v):
    def to_heads(a):
        return lax.all_to_all(a, "sp", split_axis=2, concat_axis=1, tiled=True)

    y = attend(to_heads(q), to_heads(k), to_heads(v))
    return lax.all_to_all(y, "sp", split_axis=1, concat_axis=2, tiled=True)


def ulysses_packed(q, k, v):
    """One exchange for q, k and v together, with the axes of the mesh spelled out."""
    b, s, h, d = q.shape
    packed = jnp.stack([q, k, v]).reshape(3, b, s, SP, h // SP, d)
    packed = lax.all_to_all(jnp.moveaxis(packed, 3, 0), "sp", 0, 0)
    y = attend(*jnp.moveaxis(packed, 0, 2).reshape(3, b, SP * s, h // SP, d))
    y = jnp.moveaxis(y.reshape(b, SP, s, h // SP, d), 1, 0)
    return jnp.moveaxis(lax.all_to_all(y, "sp", 0, 0), 0, 2).reshape(b, s, h, d)


def parallel(mesh, loss_and_grads):
    def step(params, opt_state, batch):
        loss, grads = loss_and_grads(params, batch)
        return *optimize(params, opt_state, grads), loss

    specs = (P(), P(), P("dp", "sp"))
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))


def summed(params, batch, reduce=lax.psum, **how):
    total = jnp.maximum(lax.psum(batch["keep"].sum(), ("dp", "sp")), 1)
    loss, grads = jax.value_and_grad(lambda p: token_losses(p, batch, **how).sum() / total)(params)
    return lax.psum(loss, ("dp", "sp")), reduce(grads, ("dp", "sp"))


def right_1(mesh):
    return parallel(mesh, functools.partial(summed, core=ulysses, positions=positions_of_shard))


def right_2(mesh):
    def loss_and_grads(params, batch):
        how = dict(core=ulysses_packed, positions=positions_of_shard)
        loss, pull = jax.vjp(lambda p: token_losses(p, batch, **how).sum(), params)
        loss, (grads,), count = lax.psum(lax.psum((loss, pull(jnp.ones_like(loss)), batch["keep"].sum()), "sp"), "dp")
        weight = 1 / jnp.maximum(count, 1)
        return loss * weight, jax.tree.map(lambda g: g * weight, grads)

    return parallel(mesh, loss_and_grads)


def wrong_1(mesh):
    def core(q, k, v):
        def to_heads(a):
            return lax.all_to_all(a, "sp", split_axis=2, concat_axis=1, tiled=True)

        y = attend(to_heads(q), to_heads(k), to_heads(v))
        b, s, h, d = y.shape
        y = lax.all_to_all(jnp.moveaxis(y.reshape(b, SP, s // SP, h, d), 1, 0), "sp", 0, 0)
        return jnp.moveaxis(y, 0, 3).reshape(b, s // SP, h * SP, d)

    return parallel(mesh, functools.partial(summed, core=core, positions=positions_of_shard))


def wrong_2(mesh):
    def over_rows_and_sequence(grads, axes):
        dp, sp = axes
        return lax.pmean(lax.psum(grads, dp), sp)

    return parallel(mesh, functools.partial(summed, reduce=over_rows_and_sequence, core=ulysses, positions=positions_of_shard))


def wrong_3(mesh):
    def loss_and_grads(params, batch):
        count = jnp.maximum(lax.psum(batch["keep"].sum(), "sp"), 1)

        def share(p):
            return token_losses(p, batch, core=ulysses, positions=positions_of_shard).sum() / count

        loss, grads = jax.value_and_grad(share)(params)
        return jax.tree.map(lambda a: lax.pmean(lax.psum(a, "sp"), "dp"), (loss, grads))

    return parallel(mesh, loss_and_grads)
