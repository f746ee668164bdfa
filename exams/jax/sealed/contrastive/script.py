"""Two-tower contrastive training (image–text). Negatives come from all devices: embeddings are gathered before the similarity."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import trainverify.jax as tvj

DEVICES, BATCH = 4, 12
IMAGE, VOCAB, LENGTH, TOWER, EMBED = 10, 15, 5, 13, 8
mesh = {"devices": DEVICES}


def unit(x):
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-8)


class ImageTower(nn.Module):
    @nn.compact
    def __call__(self, pixels):
        h = nn.swish(nn.Dense(TOWER)(pixels))
        return unit(nn.Dense(EMBED, use_bias=False)(h))


class TextTower(nn.Module):
    @nn.compact
    def __call__(self, words):
        h = nn.Embed(VOCAB, TOWER)(words)
        h = h * nn.sigmoid(nn.Dense(TOWER, name="gate")(h))
        return unit(nn.Dense(EMBED, use_bias=False)(h.mean(axis=1)))


class TwoTowers(nn.Module):
    def setup(self):
        self.image, self.text = ImageTower(), TextTower()
        self.log_scale = self.param("log_scale", nn.initializers.constant(1.0), ())

    def __call__(self, pixels, words):
        return self.image(pixels), self.text(words), jnp.exp(self.log_scale)


towers = TwoTowers()
optimizer = optax.chain(optax.add_decayed_weights(1e-3), optax.trace(decay=0.9), optax.scale(-0.1))

_pixels, _words = jax.ShapeDtypeStruct((BATCH, IMAGE), jnp.float32), jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
_shapes = jax.eval_shape(towers.init, jax.random.key(1), _pixels, _words)
_reals = lambda tree: jax.tree.map(lambda s: tvj.Reals(s.shape), tree)
args = (_reals(_shapes), _reals(jax.eval_shape(optimizer.init, _shapes)), tvj.Reals((BATCH, IMAGE)), tvj.Ids((BATCH, LENGTH), below=VOCAB))


def nll(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def update(variables, opt_state, grads):
    changes, opt_state = optimizer.update(grads, opt_state, variables)
    return optax.apply_updates(variables, changes), opt_state


def reference(variables, opt_state, pixels, words):
    def loss_fn(variables):
        image, text, scale = towers.apply(variables, pixels, words)
        logits = scale * image @ text.T
        labels = jnp.arange(BATCH)
        return (nll(logits, labels).mean() + nll(logits.T, labels).mean()) / 2

    loss, grads = jax.value_and_grad(loss_fn)(variables)
    variables, opt_state = update(variables, opt_state, grads)
    return variables, opt_state, loss


def everyone(x):
    return jax.lax.all_gather(x, "devices", axis=0, tiled=True)


def everyone_detached(x):
    whole = jax.lax.stop_gradient(everyone(x))
    return jax.lax.dynamic_update_slice_in_dim(whole, x, jax.lax.axis_index("devices") * x.shape[0], axis=0)


def labels_here(rows):
    return jax.lax.axis_index("devices") * rows + jnp.arange(rows)


def own_rows(variables, pixels, words, gather=everyone, labels=labels_here):
    """Own images against all texts, own texts against all images."""
    image, text, scale = towers.apply(variables, pixels, words)
    right = labels(image.shape[0])
    by_image = nll(scale * image @ gather(text).T, right)
    by_text = nll(scale * text @ gather(image).T, right)
    return 0.5 * jnp.mean(by_image + by_text)


def all_rows(variables, pixels, words):
    """The whole similarity matrix, the same on every device."""
    image, text, scale = towers.apply(variables, pixels, words)
    logits = scale * jnp.einsum("ie,te->it", everyone(image), everyone(text))
    per_row = jax.nn.logsumexp(logits, axis=1) + jax.nn.logsumexp(logits, axis=0)
    return jnp.mean(0.5 * per_row - jnp.diagonal(logits))


def training(mesh, loss_fn, reduce=jax.lax.pmean):
    def step(variables, opt_state, pixels, words):
        loss, grads = jax.value_and_grad(loss_fn)(variables, pixels, words)
        variables, opt_state = update(variables, opt_state, reduce(grads, "devices"))
        return variables, opt_state, jax.lax.pmean(loss, "devices")

    rows = P("devices")
    return jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), rows, rows), out_specs=(P(), P(), P()), check_vma=False)


def right_1(mesh):
    return training(mesh, own_rows)


def right_2(mesh):
    return training(mesh, all_rows)


def wrong_1(mesh):
    return training(mesh, lambda *a: own_rows(*a, labels=jnp.arange))


def wrong_2(mesh):
    return training(mesh, lambda *a: own_rows(*a, gather=everyone_detached))


def wrong_3(mesh):
    def towers_only(grads, axis):
        mean = jax.lax.pmean(grads, axis)
        mean["params"]["log_scale"] = jax.lax.psum(grads["params"]["log_scale"], axis)
        return mean

    return training(mesh, all_rows, reduce=towers_only)
