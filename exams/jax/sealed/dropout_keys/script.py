import jax
import jax.numpy as jnp
from jax import lax, random
from jax.sharding import PartitionSpec as P

import trainverify.jax as tvj

# An MLP with dropout behind every hidden layer. Rows are cut over dp, hidden features over tp.
# Every mask is a function of (seed, step, layer, row): a run is the same on any number of devices.

SEED, KEEP, DEPTH = 17, 0.75, 2
BATCH, FEATURES, WIDTH, HIDDEN, OUT = 6, 7, 10, 16, 3
LR, B1, EPS = 0.05, 0.9, 1e-8

mesh = {"dp": 2, "tp": 2}

_mlp = [{"a": (WIDTH, HIDDEN), "a0": (HIDDEN,), "b": (HIDDEN, WIDTH), "b0": (WIDTH,)} for _ in range(DEPTH)]
_cut = [{"a": P(None, "tp"), "a0": P("tp"), "b": P("tp", None), "b0": P()} for _ in range(DEPTH)]
SHAPES = {"first": (FEATURES, WIDTH), "mlp": _mlp, "last": (WIDTH, OUT)}
CUTS = {"first": P(), "mlp": _cut, "last": P()}


def reals(**how):
    return jax.tree.map(lambda s: tvj.Reals(s, **how), SHAPES, is_leaf=lambda s: isinstance(s, tuple))


args = (reals(), {"sum_of_squares": reals(nonnegative=True)}, tvj.Count(), tvj.Reals((BATCH, FEATURES)), tvj.Reals((BATCH, OUT)))


def adagrad(params, state, grads):
    total = jax.tree.map(lambda s, g: s + g * g, state["sum_of_squares"], grads)
    params = jax.tree.map(lambda w, g, s: w - LR * g / (jnp.sqrt(s) + EPS), params, grads, total)
    return params, {"sum_of_squares": total}


def step_key(step):
    return random.fold_in(random.key(SEED), step)


def row_masks(key, layer, rows, width):
    """(rows, width): one key for every row of the global batch."""
    key = random.fold_in(key, layer)
    return jax.vmap(lambda row: random.bernoulli(random.fold_in(key, row), KEEP, (width,)))(rows)


def drop(h, mask):
    return jnp.where(mask, h / KEEP, 0.0)


def reference(params, state, step, x, y):
    key, rows = step_key(step), jnp.arange(BATCH)

    def loss_fn(p):
        z = x @ p["first"]
        for i, w in enumerate(p["mlp"]):
            h = drop(jax.nn.softplus(z @ w["a"] + w["a0"]), row_masks(key, i, rows, HIDDEN))
            z = z + h @ w["b"] + w["b0"]
        return jnp.mean((z @ p["last"] - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    params, state = adagrad(params, state, grads)
    return params, state, step + 1, loss


@jax.custom_vjp
def enter(z):
    return z


@jax.custom_vjp
def leave(z):
    return lax.psum(z, "tp")


enter.defvjp(lambda z: (z, None), lambda _, g: (lax.psum(g, "tp"),))
leave.defvjp(lambda z: (lax.psum(z, "tp"), None), lambda _, g: (g,))


def my_rows(n):
    return lax.axis_index("dp") * n + jnp.arange(n)


def my_features(mask, width):
    return lax.dynamic_slice_in_dim(mask, lax.axis_index("tp") * width, width, axis=-1)


def masks_by_row(step, layer, shape):
    n, width = shape
    return my_features(row_masks(step_key(step), layer, my_rows(n), HIDDEN), width)


def distributed(mesh, masks):
    def step_fn(params, state, step, x, y):
        def loss_fn(p):
            z = x @ p["first"]
            for i, w in enumerate(p["mlp"]):
                h = jax.nn.softplus(enter(z) @ w["a"] + w["a0"])
                h = drop(h, masks(step, i, h.shape))
                z = z + leave(h @ w["b"]) + w["b0"]
            return jnp.mean((z @ p["last"] - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        loss, grads = lax.pmean((loss, grads), "dp")
        params, state = adagrad(params, state, grads)
        return params, state, step + 1, loss

    specs = (CUTS, {"sum_of_squares": CUTS}, P())
    return jax.jit(
        jax.shard_map(step_fn, mesh=mesh, in_specs=(*specs, P("dp"), P("dp")), out_specs=(*specs, P()), check_vma=False)
    )


def right_1(mesh):
    return distributed(mesh, masks_by_row)


def right_2(mesh):
    """Draws the masks of the whole batch everywhere, with an array of keys, and keeps its own block."""

    def masks(step, layer, shape):
        key = random.fold_in(step_key(step), layer)
        keys = jax.vmap(random.fold_in, in_axes=(None, 0))(key, jnp.arange(BATCH))
        whole = jax.vmap(lambda k: random.uniform(k, (HIDDEN,)) < KEEP)(keys)
        corner = (lax.axis_index("dp") * shape[0], lax.axis_index("tp") * shape[1])
        return lax.dynamic_slice(whole, corner, shape)

    return distributed(mesh, masks)


def wrong_1(mesh):
    def masks(step, layer, shape):
        n, width = shape
        return my_features(row_masks(step_key(step), layer, jnp.arange(n), HIDDEN), width)

    return distributed(mesh, masks)


def wrong_2(mesh):
    def masks(step, layer, shape):
        n, width = shape
        return row_masks(step_key(step), layer, my_rows(n), width)

    return distributed(mesh, masks)


def wrong_3(mesh):
    def masks(step, layer, shape):
        n, width = shape
        key = random.fold_in(step_key(step), lax.axis_index("tp"))
        return my_features(row_masks(key, layer, my_rows(n), HIDDEN), width)

    return distributed(mesh, masks)
