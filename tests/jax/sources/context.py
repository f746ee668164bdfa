"""Attention over a sequence that ranks share: a ring of keys and values, or heads exchanged for positions (Ulysses)."""

from __future__ import annotations

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj
from jax import lax


def shapes(batch=4, seq=512, dim=1024, heads=16):
    params = {n: tvj.Reals((dim, dim)) for n in ("wq", "wk", "wv", "wo")}
    return params, tvj.Reals((batch, seq, dim)), tvj.Reals((batch, seq, dim))


SMALL = {"batch": 2, "seq": 16, "dim": 12, "heads": 4}


def heads_of(x, heads):
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def project(params, x, heads):
    return [heads_of(x @ params[n], heads) for n in ("wq", "wk", "wv")]


def joined(params, out):
    b, h, s, d = out.shape
    return out.transpose(0, 2, 1, 3).reshape(b, s, h * d) @ params["wo"]


def masked(scores, first_query, first_key, fill):
    queries = first_query + jnp.arange(scores.shape[-2])
    keys = first_key + jnp.arange(scores.shape[-1])
    return jnp.where(queries[:, None] >= keys[None, :], scores, fill)


def stepped(forward):
    def step(params, x, t):
        def loss(params):
            return forward(params, x, t)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return step


def reference(heads=16, causal=True, fill=-1e30):
    def forward(params, x, t):
        q, k, v = project(params, x, heads)
        scores = jnp.einsum("bhsd,bhtd->bhst", q, k) * q.shape[-1] ** -0.5
        if causal:
            scores = masked(scores, 0, 0, fill)
        out = jnp.einsum("bhst,bhtd->bhsd", jax.nn.softmax(scores, -1), v)
        e = joined(params, out) - t
        return jnp.mean(e * e)

    return stepped(forward)


def mapped(step, mesh):
    specs = {"in_specs": (P(), P("dp", "cp"), P("dp", "cp")), "out_specs": (P(), P())}
    return jax.jit(jax.shard_map(step, mesh=mesh, **specs))


def ring(mesh, heads=16, causal=True, fill=-1e30, scan=False):
    """Every rank has its queries; keys and values go around, and a running maximum and sum are kept."""

    def forward(params, x, t):
        q, k, v = project(params, x, heads)
        n, me = lax.axis_size("cp"), lax.axis_index("cp")
        length = q.shape[2]
        around = [(i, (i + 1) % n) for i in range(n)]

        def one(carry, step):
            k, v, top, total, out = carry
            scores = jnp.einsum("bhsd,bhtd->bhst", q, k) * q.shape[-1] ** -0.5
            if causal:
                scores = masked(scores, me * length, (me - step) % n * length, fill)
            new = jnp.maximum(top, lax.stop_gradient(scores.max(-1)))
            weight = jnp.exp(scores - new[..., None])
            old = jnp.exp(top - new)
            total = total * old + weight.sum(-1)
            out = out * old[..., None] + jnp.einsum("bhst,bhtd->bhsd", weight, v)
            return (lax.ppermute(k, "cp", around), lax.ppermute(v, "cp", around), new, total, out), None

        first = jnp.full(q.shape[:3], -jnp.inf), jnp.zeros(q.shape[:3]), jnp.zeros(q.shape)
        first = jax.tree.map(lambda z: lax.pcast(z, ("dp", "cp"), to="varying"), first)
        carry = (k, v, *first)
        if scan:
            carry, _ = lax.scan(one, carry, jnp.arange(n))
        else:
            for i in range(n):
                carry, _ = one(carry, i)
        *_, total, out = carry
        e = joined(params, out / total[..., None]) - t
        return lax.pmean(jnp.mean(e * e), ("dp", "cp"))

    return mapped(stepped(forward), mesh)


def ulysses(mesh, heads=16, causal=True, fill=-1e30):
    """Heads are cut instead of positions while attention runs."""

    def forward(params, x, t):
        q, k, v = (lax.all_to_all(y, "cp", 1, 2, tiled=True) for y in project(params, x, heads))
        scores = jnp.einsum("bhsd,bhtd->bhst", q, k) * q.shape[-1] ** -0.5
        if causal:
            scores = masked(scores, 0, 0, fill)
        out = jnp.einsum("bhst,bhtd->bhsd", jax.nn.softmax(scores, -1), v)
        out = lax.all_to_all(out, "cp", 2, 1, tiled=True)
        e = joined(params, out) - t
        return lax.pmean(jnp.mean(e * e), ("dp", "cp"))

    return mapped(stepped(forward), mesh)
