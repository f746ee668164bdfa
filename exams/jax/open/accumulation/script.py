"""Gradient accumulation with a scan, on three data-parallel devices. Sequences are padded: every micro-batch of every device
has a different number of tokens, and the loss is the mean over all tokens of the global batch."""
import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec as P

import trainverify.jax as tvj

DEVICES, MICRO = 3, 4
ROWS, SEQ, VOCAB, EMB, HID = 24, 5, 21, 7, 13
PAD = 0
mesh = {"batch": DEVICES}


@struct.dataclass
class TrainState:
    params: dict
    opt: tuple

    def updated(self, grads):
        updates, opt = OPTIMIZER.update(grads, self.opt, self.params)
        return self.replace(params=optax.apply_updates(self.params, updates), opt=opt)


OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.25), optax.adamw(1e-2, b2=0.98, eps=1e-7, weight_decay=0.05))

SHAPES = {"emb": (VOCAB, EMB), "cell": {"x": (EMB, HID), "mix": (HID, HID), "b": (HID,)}, "out": (HID, VOCAB), "out_b": (VOCAB,)}


def declared_state():
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), SHAPES, is_leaf=lambda s: isinstance(s, tuple))

    def leaf(path, s):
        if s.dtype == jnp.int32:
            return tvj.Count()
        return tvj.Reals(s.shape, nonnegative=".nu" in jax.tree_util.keystr(path))

    state = TrainState(params=shapes, opt=jax.eval_shape(OPTIMIZER.init, shapes))
    return jax.tree_util.tree_map_with_path(leaf, state)


args = (declared_state(), tvj.Ids((ROWS, SEQ + 1), below=VOCAB))


def features(params, tokens):
    """A running mean of what was read, and one hidden layer."""
    cell = params["cell"]
    x = jnp.cumsum(params["emb"][tokens] @ cell["x"], axis=1) / jnp.arange(1.0, SEQ + 1)[:, None]
    h = jnp.tanh(x + cell["b"])
    return h + jax.nn.sigmoid(h @ cell["mix"])


def token_sums(params, tokens):
    targets = tokens[:, 1:]
    logits = features(params, tokens[:, :-1]) @ params["out"] + params["out_b"]
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, targets)
    mask = jnp.where(targets == PAD, 0.0, 1.0)
    return jnp.vdot(losses, mask), mask.sum()


def reference(state, tokens):
    def mean_loss(params):
        total, count = token_sums(params, tokens)
        return total / jnp.maximum(count, 1.0)

    loss, grads = jax.value_and_grad(mean_loss)(state.params)
    return state.updated(grads), loss


def data_parallel(mesh, step):
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("batch")), out_specs=(P(), P()), check_vma=False))


def split(tokens):
    return jnp.reshape(tokens, (MICRO, -1, SEQ + 1))


def right_1(mesh):
    """Sums of losses, tokens and gradients; one all-reduce and one division at the end."""

    def step(state, tokens):
        def body(sums, micro):
            (total, count), grads = jax.value_and_grad(token_sums, has_aux=True)(state.params, micro)
            return jax.tree.map(jnp.add, sums, (total, count, grads)), None

        zeros = (0.0, 0.0, jax.tree.map(jnp.zeros_like, state.params))
        sums, _ = lax.scan(body, zeros, split(tokens))
        total, count, grads = lax.psum(sums, "batch")
        count = jnp.maximum(count, 1.0)
        return state.updated(jax.tree.map(lambda g: g / count, grads)), total / count

    return data_parallel(mesh, step)


def right_2(mesh):
    """Tokens are counted first; then the scan itself is differentiated, recomputing micro-batches."""

    def step(state, tokens):
        count = lax.pmean(jnp.sum(tokens[:, 1:] != PAD), "batch")
        weight = 1.0 / jnp.maximum(count, 1.0 / DEVICES)

        def accumulated(params):
            @jax.checkpoint
            def body(loss, micro):
                return loss + token_sums(params, micro)[0] * weight, ()

            return lax.scan(body, 0.0, split(tokens))[0]

        loss, grads = jax.value_and_grad(accumulated)(state.params)
        return state.updated(lax.pmean(grads, "batch")), lax.pmean(loss, "batch")

    return data_parallel(mesh, step)


def wrong_1(mesh):
    def step(state, tokens):
        def micro_loss(params, micro):
            total, count = token_sums(params, micro)
            return total / jnp.maximum(lax.psum(count, "batch"), 1.0)

        def body(sums, micro):
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(micro_loss)(state.params, micro)), None

        zeros = (0.0, jax.tree.map(jnp.zeros_like, state.params))
        sums, _ = lax.scan(body, zeros, split(tokens))
        loss, grads = jax.tree.map(lambda s: lax.psum(s, "batch") / MICRO, sums)
        return state.updated(grads), loss

    return data_parallel(mesh, step)


def wrong_2(mesh):
    def step(state, tokens):
        def body(sums, micro):
            (total, count), grads = jax.value_and_grad(token_sums, has_aux=True)(state.params, micro)
            total, count = sums[0] + total, sums[1] + count
            return (total, count, lax.psum(jax.tree.map(jnp.add, sums[2], grads), "batch")), None

        zeros = (0.0, 0.0, jax.tree.map(jnp.zeros_like, state.params))
        (total, count, grads), _ = lax.scan(body, zeros, split(tokens))
        total, count = lax.psum((total, count), "batch")
        count = jnp.maximum(count, 1.0)
        return state.updated(jax.tree.map(lambda g: g / count, grads)), total / count

    return data_parallel(mesh, step)


def wrong_3(mesh):
    def step(state, tokens):
        def body(sums, micro):
            (total, count), grads = jax.value_and_grad(token_sums, has_aux=True)(state.params, micro)
            return jax.tree.map(jnp.add, sums, (total, count, grads)), None

        zeros = (0.0, 0.0, jax.tree.map(jnp.zeros_like, state.params))
        (total, count, grads), _ = lax.scan(body, zeros, split(tokens))
        count = jnp.maximum(count, 1.0)
        loss, grads = lax.pmean(jax.tree.map(lambda a: a / count, (total, grads)), "batch")
        return state.updated(grads), loss

    return data_parallel(mesh, step)
