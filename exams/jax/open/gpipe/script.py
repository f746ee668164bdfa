# A recurrence-free sequence tagger in six layers, trained on three devices as a GPipe pipeline:
# two layers a stage, four micro-batches, activations handed on by ppermute.

import jax
import jax.numpy as jnp
from jax.lax import axis_index, dynamic_index_in_dim, pmean, ppermute, psum, scan
from jax.sharding import PartitionSpec as P

from trainverify.jax import Ids, Reals

STAGES, PER_STAGE, MICRO = 3, 2, 4
ROWS, SEQ, DIM, MLP, WORDS, TAGS = 8, 5, 10, 18, 23, 7
mesh = {"pp": STAGES}

weights = {
    "embed": Reals((WORDS, DIM)),
    "blocks": {
        "mix": Reals((STAGES * PER_STAGE, SEQ, SEQ)),
        "w1": Reals((STAGES * PER_STAGE, DIM, MLP)),
        "b1": Reals((STAGES * PER_STAGE, MLP)),
        "w2": Reals((STAGES * PER_STAGE, MLP, DIM)),
    },
    "tagger": {"w": Reals((DIM, TAGS)), "b": Reals((TAGS,))},
}
layout = {"embed": P(), "blocks": P("pp"), "tagger": P()}

words = Ids((ROWS, SEQ), below=WORDS)
tags = Ids((ROWS, SEQ), below=TAGS)  # tag 0 is padding and does not count
args = (weights, weights, words, tags)


def block(x, w):
    x = x + jnp.einsum("st,btd->bsd", w["mix"], x)
    return x + jax.nn.relu(x @ w["w1"] + w["b1"]) @ w["w2"]


def run_blocks(x, blocks):
    return scan(lambda h, w: (block(h, w), None), x, blocks)[0]


def tag_loss(x, tagger, tags):
    """Sum over what is not padding."""
    scores = x @ tagger["w"] + tagger["b"]
    right = jnp.sum(jax.nn.one_hot(tags, TAGS) * scores, axis=-1)
    return jnp.sum((jax.nn.logsumexp(scores, axis=-1) - right) * (tags != 0))


def nesterov(weights, velocity, grads, lr=0.002, mu=0.9):
    velocity = jax.tree.map(lambda v, g: mu * v + g, velocity, grads)
    weights = jax.tree.map(lambda w, v, g: w - lr * (g + mu * v), weights, velocity, grads)
    return weights, velocity


def reference(weights, velocity, words, tags):
    def loss(w):
        x = run_blocks(w["embed"][words], w["blocks"])
        return tag_loss(x, w["tagger"], tags) / jnp.maximum(jnp.sum(tags != 0), 1)

    value, grads = jax.value_and_grad(loss)(weights)
    weights, velocity = nesterov(weights, velocity, grads)
    return weights, velocity, value


def micro(a):
    return a.reshape(MICRO, ROWS // MICRO, *a.shape[1:])


FORWARD = [(s, s + 1) for s in range(STAGES - 1)]


def pipeline(w, words, tags, bubble_counts=False, share=None):
    """What this stage adds to the loss: nothing, except on the last one."""
    stage = axis_index("pp")
    words, tags = micro(words), micro(tags)
    share = share or (lambda total, tags, all_tags: total / jnp.maximum(jnp.sum(all_tags != 0), 1))

    def tick(carry, t):
        arrived, total = carry
        first = w["embed"][words[jnp.clip(t, 0, MICRO - 1)]]
        x = run_blocks(jnp.where(stage == 0, first, arrived), w["blocks"])
        leaving = t - (STAGES - 1)
        labels = dynamic_index_in_dim(tags, jnp.clip(leaving, 0, MICRO - 1), keepdims=False)
        counted = (stage == STAGES - 1) & (bubble_counts | (leaving >= 0))
        total = total + jnp.where(counted, share(tag_loss(x, w["tagger"], labels), labels, tags), 0.0)
        return (ppermute(x, "pp", FORWARD), total), None

    zero = jnp.zeros((ROWS // MICRO, SEQ, DIM), w["embed"].dtype)
    (_, total), _ = scan(tick, (zero, jnp.zeros((), zero.dtype)), jnp.arange(MICRO + STAGES - 1))
    return total


def staged(mesh, step):
    every = (layout, layout, P(), P())
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=every, out_specs=(layout, layout, P()), check_vma=False))


def trained(w, velocity, words, tags, **options):
    value, grads = jax.value_and_grad(pipeline)(w, words, tags, **options)
    grads = grads | psum({k: grads[k] for k in ("embed", "tagger")}, "pp")
    w, velocity = nesterov(w, velocity, grads)
    return w, velocity, psum(value, "pp")


def right_1(mesh):
    return staged(mesh, trained)


def right_2(mesh):
    """Unrolled, a full ring, outputs collected first; the gradient is taken of the whole from outside of shard_map."""

    def outputs(w, words):
        stage = axis_index("pp")
        ring = [(s, (s + 1) % STAGES) for s in range(STAGES)]
        queue = micro(w["embed"][words])
        x, done = jnp.zeros_like(queue[0]), []
        for t in range(MICRO + STAGES - 1):
            x = jnp.where(stage == 0, queue[min(t, MICRO - 1)], x)
            for i in range(PER_STAGE):
                x = block(x, jax.tree.map(lambda a: a[i], w["blocks"]))
            if t >= STAGES - 1:
                done.append(x)
            x = ppermute(x, "pp", ring)
        last = jnp.where(stage == STAGES - 1, jnp.stack(done), 0.0)
        return psum(last, "pp").reshape(ROWS, SEQ, DIM)

    through = jax.shard_map(outputs, mesh=mesh, in_specs=(layout, P()), out_specs=P())

    @jax.jit
    def step(w, velocity, words, tags):
        def loss(w):
            return tag_loss(through(w, words), w["tagger"], tags) / jnp.maximum(jnp.sum(tags != 0), 1)

        value, grads = jax.value_and_grad(loss)(w)
        w, velocity = nesterov(w, velocity, grads)
        return w, velocity, value

    return step


def wrong_1(mesh):
    def step(w, velocity, words, tags):
        value, grads = jax.value_and_grad(lambda w: psum(pipeline(w, words, tags), "pp"))(w)
        grads = grads | psum({k: grads[k] for k in ("embed", "tagger")}, "pp")
        w, velocity = nesterov(w, velocity, grads)
        return w, velocity, value

    return staged(mesh, step)


def wrong_2(mesh):
    def step(*given):
        return trained(*given, bubble_counts=True)

    return staged(mesh, step)


def wrong_3(mesh):
    def mean_of_means(total, tags, all_tags):
        return total / jnp.maximum(jnp.sum(tags != 0), 1) / MICRO

    def step(*given):
        return trained(*given, share=mean_of_means)

    return staged(mesh, step)
