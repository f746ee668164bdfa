import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

import trainverify.jax as tvj

BATCH, PATCHES, PIXELS = 12, 6, 10
WIDTH, TOKEN_MLP, CHANNEL_MLP, CLASSES = 14, 9, 22, 5


class MlpBlock(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        x = nn.Dense(self.hidden)(x)
        return nn.Dense(width)(nn.gelu(x))


class MixerBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x).swapaxes(1, 2)
        x = x + MlpBlock(TOKEN_MLP, name="token_mixing")(y).swapaxes(1, 2)
        return x + MlpBlock(CHANNEL_MLP, name="channel_mixing")(nn.LayerNorm()(x))


class Mixer(nn.Module):
    depth: int = 2

    @nn.compact
    def __call__(self, patches):
        x = nn.Dense(WIDTH, name="stem")(patches)
        for _ in range(self.depth):
            x = MixerBlock()(x)
        x = nn.LayerNorm(name="pre_head")(x).mean(axis=1)
        return nn.Dense(CLASSES, name="head")(x)


model = Mixer()
tx = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.adamw(optax.constant_schedule(3e-3), b1=0.9, b2=0.99, weight_decay=0.02),
)

mesh = {"data": 4}


def declared():
    """Shapes of what a step takes; the images of the last, short batch of an epoch are marked as not valid."""
    image = jax.ShapeDtypeStruct((1, PATCHES, PIXELS), jnp.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), image)["params"]

    def state_leaf(path, s):
        if jnp.issubdtype(s.dtype, jnp.integer):
            return tvj.Count()
        return tvj.Reals(s.shape, nonnegative=any(getattr(k, "name", "") == "nu" for k in path))

    params = jax.tree.map(lambda s: tvj.Reals(s.shape), shapes)
    opt_state = jax.tree_util.tree_map_with_path(state_leaf, jax.eval_shape(tx.init, shapes))
    batch = {
        "image": tvj.Reals((BATCH, PATCHES, PIXELS)),
        "label": tvj.Ids((BATCH,), below=CLASSES),
        "valid": tvj.Ids((BATCH,), below=2),
    }
    return params, opt_state, batch


args = declared()


def sums(params, batch):
    """Sum of losses and number of valid images."""
    logits = model.apply({"params": params}, batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    valid = batch["valid"].astype(losses.dtype)
    return jnp.sum(losses * valid), jnp.sum(valid)


def apply_gradients(params, opt_state, grads):
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def reference(params, opt_state, batch):
    def loss_fn(p):
        total, count = sums(p, batch)
        return total / jnp.maximum(count, 1.0)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    params, opt_state = apply_gradients(params, opt_state, grads)
    return params, opt_state, {"loss": loss, "grad_norm": optax.global_norm(grads)}


def jitted(mesh, step):
    replicated, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    return jax.jit(
        step,
        in_shardings=(replicated, replicated, rows),
        out_shardings=(replicated, replicated, replicated),
        keep_unused=True,
    )


def right_1(mesh):
    """The code of one device: where the rows lie is all that XLA is told."""
    return jitted(mesh, reference)


def per_device(mesh):
    return functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=False)


def right_2(mesh):
    """Explicit: sums and gradients of sums are reduced, then divided by the number of valid images everywhere."""

    @per_device(mesh)
    def step(params, opt_state, batch):
        (total, count), grads = jax.value_and_grad(sums, has_aux=True)(params, batch)
        total, count, grads = jax.lax.psum((total, count, grads), "data")
        count = jnp.maximum(count, 1.0)
        grads = jax.tree.map(lambda g: g / count, grads)
        params, opt_state = apply_gradients(params, opt_state, grads)
        return params, opt_state, {"loss": total / count, "grad_norm": optax.global_norm(grads)}

    return jitted(mesh, step)


def wrong_1(mesh):
    @per_device(mesh)
    def step(params, opt_state, batch):
        def loss_fn(p):
            total, count = sums(p, batch)
            return total / jnp.maximum(count, 1.0)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        loss, grads = jax.lax.pmean((loss, grads), "data")
        params, opt_state = apply_gradients(params, opt_state, grads)
        return params, opt_state, {"loss": loss, "grad_norm": optax.global_norm(grads)}

    return jitted(mesh, step)


def wrong_2(mesh):
    @per_device(mesh)
    def step(params, opt_state, batch):
        count = jnp.maximum(jax.lax.psum(jnp.sum(batch["valid"]), "data"), 1)
        loss, grads = jax.value_and_grad(lambda p: sums(p, batch)[0] / count)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        updates = jax.lax.pmean(updates, "data")
        params = optax.apply_updates(params, updates)
        grads = jax.lax.psum(grads, "data")
        return params, opt_state, {"loss": jax.lax.psum(loss, "data"), "grad_norm": optax.global_norm(grads)}

    return jitted(mesh, step)


def wrong_3(mesh):
    @per_device(mesh)
    def step(params, opt_state, batch):
        count = jnp.maximum(jax.lax.psum(jnp.sum(batch["valid"]), "data"), 1)
        loss, grads = jax.value_and_grad(lambda p: sums(p, batch)[0] / count)(params)
        norm = optax.global_norm(grads)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.5 / (norm + 1e-6)), grads)
        loss, grads = jax.lax.psum((loss, grads), "data")
        params, opt_state = apply_gradients(params, opt_state, grads)
        return params, opt_state, {"loss": loss, "grad_norm": optax.global_norm(grads)}

    return jitted(mesh, step)
