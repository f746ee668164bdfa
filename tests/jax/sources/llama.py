"""Llama as a user writes it in plain JAX: grouped queries, rotary positions, SwiGLU; on one device, and distributed in many ways."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj
from jax import lax


@dataclass(frozen=True)
class Config:
    layers: int = 2
    dim: int = 1024
    heads: int = 16
    kv: int = 8
    ffn: int = 4096
    vocab: int = 32000
    batch: int = 8
    seq: int = 512
    micro: int = 1  # micro-batches that gradients are accumulated over
    remat: bool = False

    @property
    def head(self) -> int:
        return self.dim // self.heads


SMALL = Config(dim=32, heads=8, kv=4, ffn=48, vocab=64, batch=4, seq=8)


def shapes(c: Config):
    q, kv = c.heads * c.head, c.kv * c.head
    layer = {
        "norm1": (c.dim,),
        "wq": (c.dim, q),
        "wk": (c.dim, kv),
        "wv": (c.dim, kv),
        "wo": (q, c.dim),
        "norm2": (c.dim,),
        "gate": (c.dim, c.ffn),
        "up": (c.dim, c.ffn),
        "down": (c.ffn, c.dim),
    }
    layers = [{k: tvj.Reals(s) for k, s in layer.items()} for _ in range(c.layers)]
    params = {
        "embed": tvj.Reals((c.vocab, c.dim)),
        "layers": layers,
        "norm": tvj.Reals((c.dim,)),
        "head": tvj.Reals((c.dim, c.vocab)),
    }
    return params, tvj.Ids((c.batch, c.seq), c.vocab), tvj.Ids((c.batch, c.seq), c.vocab)


def rms(x, w, eps=1e-5):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * w


def rope(x, positions):
    """x [b, s, h, d] turned by its positions."""
    half = x.shape[-1] // 2
    freq = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, None] * freq
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def attention(q, k, v, mask=None):
    """q [b, s, h, d], k and v [b, t, g, d]: groups of heads share keys and values."""
    b, s, h, d = q.shape
    g = k.shape[2]
    q = q.reshape(b, s, g, h // g, d)
    scores = jnp.einsum("bsgrd,btgd->bgrst", q, k) * d**-0.5
    if mask is None:
        mask = jnp.tril(jnp.ones((s, k.shape[1]), bool))
    scores = jnp.where(mask, scores, -1e30)
    out = jnp.einsum("bgrst,btgd->bsgrd", jax.nn.softmax(scores, -1), v)
    return out.reshape(b, s, h * d)


def block(c, p, x, tp=None, sp=False):
    """One layer; over `tp` every rank has some heads and hidden features. With `sp`, x is cut along the sequence in between."""
    size = lax.axis_size(tp) if tp else 1

    def enter(x):
        return lax.all_gather(x, tp, axis=1, tiled=True) if sp else x

    def leave(x):
        if sp:
            return lax.psum_scatter(x, tp, scatter_dimension=1, tiled=True)
        return lax.psum(x, tp) if tp else x

    h = enter(rms(x, p["norm1"]))
    b, s, _ = h.shape
    positions = jnp.arange(s, dtype=jnp.float32)
    q = rope((h @ p["wq"]).reshape(b, s, c.heads // size, c.head), positions)
    k = rope((h @ p["wk"]).reshape(b, s, c.kv // size, c.head), positions)
    v = (h @ p["wv"]).reshape(b, s, c.kv // size, c.head)
    x = x + leave(attention(q, k, v) @ p["wo"])
    h = enter(rms(x, p["norm2"]))
    return x + leave((jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"])


def run_blocks(c, params, x, tp=None, sp=False):
    one = jax.checkpoint(lambda p, x: block(c, p, x, tp, sp)) if c.remat else lambda p, x: block(c, p, x, tp, sp)
    for p in params["layers"]:
        x = one(p, x)
    return x


def cross_entropy(logits, labels):
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - picked


def loss_of(c, params, ids, labels):
    x = run_blocks(c, params, params["embed"][ids])
    return jnp.mean(cross_entropy(rms(x, params["norm"]) @ params["head"], labels))


def sgd(params, grads):
    return jax.tree.map(lambda w, g: w - 0.01 * g, params, grads)


def accumulated(fn, micro, params, ids, labels):
    """Loss and gradients, added up over micro-batches by a scan."""
    if micro == 1:
        return jax.value_and_grad(fn)(params, ids, labels)
    cut = [a.reshape(micro, a.shape[0] // micro, *a.shape[1:]) for a in (ids, labels)]

    def one(carry, batch):
        loss, grads = jax.value_and_grad(fn)(params, *batch)
        return jax.tree.map(lambda a, b: a + b / micro, carry, (loss, grads)), None

    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    return lax.scan(one, zero, tuple(cut))[0]


def reference(c):
    def step(params, ids, labels):
        loss, grads = jax.value_and_grad(lambda p, i, t: loss_of(c, p, i, t))(params, ids, labels)
        return sgd(params, grads), loss

    return step


def specs(c, **cut):
    """Where parameters lie: `cut` says it for those of a layer."""
    names = ("norm1", "wq", "wk", "wv", "wo", "norm2", "gate", "up", "down")
    layer = {n: cut.get(n, P()) for n in names}
    return {"embed": cut.get("embed", P()), "layers": [layer] * c.layers, "norm": P(), "head": cut.get("head", P())}


COLUMNS, ROWS = P(None, "tp"), P("tp", None)
HEADS = {"wq": COLUMNS, "wk": COLUMNS, "wv": COLUMNS, "wo": ROWS, "gate": COLUMNS, "up": COLUMNS, "down": ROWS}


BATCH = P("dp")


def mapped(step, mesh, where, batch=BATCH, check_vma=True):
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(where, batch, batch), out_specs=(where, P()), check_vma=check_vma))


def tensor_parallel(c, mesh):
    """Heads and hidden features over tp, the batch over dp."""

    def loss(params, ids, labels):
        x = run_blocks(c, params, params["embed"][ids], "tp")
        return lax.pmean(jnp.mean(cross_entropy(rms(x, params["norm"]) @ params["head"], labels)), "dp")

    def step(params, ids, labels):
        value, grads = accumulated(loss, c.micro, params, ids, labels)
        return sgd(params, grads), value

    return mapped(step, mesh, specs(c, **HEADS))


def sequence_parallel(c, mesh):
    """Between the blocks every rank has a part of the sequence."""

    def loss(params, ids, labels):
        x = params["embed"][ids]
        part = c.seq // lax.axis_size("tp")
        x = lax.dynamic_slice_in_dim(x, lax.axis_index("tp") * part, part, 1)
        x = rms(run_blocks(c, params, x, "tp", sp=True), params["norm"])
        labels = lax.dynamic_slice_in_dim(labels, lax.axis_index("tp") * part, part, 1)
        return lax.pmean(jnp.mean(cross_entropy(x @ params["head"], labels)), ("dp", "tp"))

    def step(params, ids, labels):
        value, grads = jax.value_and_grad(loss)(params, ids, labels)
        return sgd(params, grads), value

    return mapped(step, mesh, specs(c, **HEADS))


def vocabulary_parallel(c, mesh):
    """Also the embedding and the head are cut, over the vocabulary; the loss is put together from shares."""

    def embed(table, ids):
        rows = table.shape[0]
        local = ids - lax.axis_index("tp") * rows
        here = (local >= 0) & (local < rows)
        found = table[jnp.clip(local, 0, rows - 1)]
        return lax.psum(jnp.where(here[..., None], found, 0.0), "tp")

    def entropy(logits, labels):
        top = lax.pmax(lax.stop_gradient(jnp.max(logits, -1)), "tp")
        total = lax.psum(jnp.sum(jnp.exp(logits - top[..., None]), -1), "tp")
        width = logits.shape[-1]
        local = labels - lax.axis_index("tp") * width
        here = (local >= 0) & (local < width)
        picked = jnp.take_along_axis(logits, jnp.clip(local, 0, width - 1)[..., None], -1)[..., 0]
        picked = lax.psum(jnp.where(here, picked, 0.0), "tp")
        return jnp.log(total) + top - picked

    def loss(params, ids, labels):
        x = run_blocks(c, params, embed(params["embed"], ids), "tp")
        return lax.pmean(jnp.mean(entropy(rms(x, params["norm"]) @ params["head"], labels)), "dp")

    def step(params, ids, labels):
        value, grads = jax.value_and_grad(loss)(params, ids, labels)
        return sgd(params, grads), value

    return mapped(step, mesh, specs(c, **HEADS, embed=ROWS, head=COLUMNS))


def fully_sharded(c, mesh):
    """Every matrix is cut over dp and gathered where it is used; its gradient comes back cut."""

    def whole(p):
        return jax.tree.map(lambda w: lax.all_gather(w, "dp", axis=0, tiled=True) if w.ndim == 2 else w, p)

    def loss(params, ids, labels):
        x = whole(params["embed"])[ids]
        for p in params["layers"]:
            x = jax.checkpoint(lambda p, x: block(c, whole(p), x))(p, x)
        x = rms(x, params["norm"])
        return lax.pmean(jnp.mean(cross_entropy(x @ whole(params["head"]), labels)), "dp")

    def step(params, ids, labels):
        value, grads = jax.value_and_grad(loss)(params, ids, labels)
        return sgd(params, grads), value

    rows = {n: P("dp", None) for n in (*HEADS, "embed", "head")}
    return mapped(step, mesh, specs(c, **rows))
