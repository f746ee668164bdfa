"""Sequence-parallel language model: causal attention around a ring of devices.

Every device keeps its queries; keys and values travel. What is known of a query after some blocks is an output `o` and the
logarithm `lse` of its normaliser; two of these are joined with logaddexp.
"""
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import trainverify.jax as tvj

RING = 4
B, S, D, H, V, HIDDEN = 7, 12, 10, 2, 17, 26
LR, MU = 0.1, 0.85
mesh = {"sp": RING}

_shape = dict(
    tok=(V, D), pos=(S, D), norm1=(D,), wq=(D, H, D // H), wk=(D, H, D // H), wv=(D, H, D // H), wo=(H, D // H, D),
    norm2=(D,), gate=(D, HIDDEN), up=(D, HIDDEN), down=(HIDDEN, D), out=(D, V),
)
_reals = {name: tvj.Reals(shape) for name, shape in _shape.items()}
# inputs, labels and which labels count (prompts do not)
args = (_reals, _reals, tvj.Ids((B, S), below=V), tvj.Ids((B, S), below=V), tvj.Ids((B, S), below=2))


def rms(x, scale):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale


def forward(p, ids, pos, attend):
    x = p["tok"][ids] + pos
    h = rms(x, p["norm1"])
    q, k, v = (jnp.einsum("bsd,dhe->bhse", h, p[w]) for w in ("wq", "wk", "wv"))
    x = x + jnp.einsum("bhse,hed->bsd", attend(q / (D // H) ** 0.5, k, v), p["wo"])
    h = rms(x, p["norm2"])
    x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    return x @ p["out"]


def nll_sum(logits, labels, counts):
    logp = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.sum(jnp.take_along_axis(logp, labels[..., None], -1)[..., 0] * counts)


def momentum_step(p, buf, g):
    buf = jax.tree.map(lambda b, d: MU * b + d, buf, g)
    return jax.tree.map(lambda w, b: w - LR * b, p, buf), buf


def full_attention(q, k, v):
    s = jnp.einsum("bhqe,bhke->bhqk", q, k)
    i = jnp.arange(S)
    s = jnp.where(i[:, None] >= i[None, :], s, -jnp.inf)
    return jax.nn.softmax(s, -1) @ v


def reference(params, buf, ids, labels, counts):
    def objective(p):
        return nll_sum(forward(p, ids, p["pos"], full_attention), labels, counts) / jnp.maximum(counts.sum(), 1)

    loss, g = jax.value_and_grad(objective)(params)
    params, buf = momentum_step(params, buf, g)
    return params, buf, loss


# --- one device of the ring ---


def block(q, k, v, allowed):
    """Attention to one block: its output and the log-sum-exp of its scores; -inf where a query may see nothing of it."""
    s = jnp.where(allowed, jnp.einsum("bhqe,bhke->bhqk", q, k), -jnp.inf)
    top = lax.stop_gradient(s.max(-1, keepdims=True))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    e = jnp.exp(s - top)
    z = e.sum(-1, keepdims=True)
    some = z > 0
    z = jnp.where(some, z, 1.0)
    return (e / z) @ v, jnp.where(some, jnp.log(z) + top, -jnp.inf)


def join(o1, l1, o2, l2):
    l = jnp.logaddexp(l1, l2)
    return o1 * jnp.exp(l1 - l) + o2 * jnp.exp(l2 - l), l


def ring_attention(q, k, v, source=lambda me, hop: (me - hop) % RING, hops=RING):
    me = lax.axis_index("sp")
    c = q.shape[2]
    rows = me * c + jnp.arange(c)
    o, lse = block(q, k, v, jnp.tril(jnp.ones((c, c), bool)))
    for hop in range(1, hops):
        k, v = (lax.ppermute(a, "sp", [(r, (r + 1) % RING) for r in range(RING)]) for a in (k, v))
        cols = source(me, hop) * c + jnp.arange(c)
        o, lse = join(o, lse, *block(q, k, v, rows[:, None] >= cols))
    return o


def ring_attention_scan(q, k, v):
    """The other way around, as a scan: running maximum, numerator and denominator in place of (o, lse)."""
    n, me, c = lax.axis_size("sp"), lax.axis_index("sp"), q.shape[2]
    back = [((r + 1) % n, r) for r in range(n)]

    def hop(carry, t):
        kv, top, num, den = carry
        k, v = kv
        behind = rows_of((me + t) % n, c)
        s = jnp.einsum("bhqe,bhke->bhqk", q, k)
        s = jnp.where(rows_of(me, c)[:, None] >= behind[None], s, -jnp.inf)
        new = jnp.maximum(top, lax.stop_gradient(s).max(-1, keepdims=True))
        old, e = jnp.exp(top - new), jnp.exp(s - new)
        num, den = num * old + e @ v, den * old + e.sum(-1, keepdims=True)
        return (lax.ppermute(kv, "sp", back), new, num, den), None

    b, h, _, e = q.shape
    start = ((k, v), jnp.full((b, h, c, 1), -jnp.inf, q.dtype), jnp.zeros((b, h, c, e), q.dtype), jnp.zeros((b, h, c, 1), q.dtype))
    (_, _, num, den), _ = lax.scan(hop, start, jnp.arange(n))
    return num / den


def rows_of(rank, c):
    return rank * c + jnp.arange(c)


def own_positions(table):
    c = S // RING
    return lax.dynamic_slice_in_dim(table, lax.axis_index("sp") * c, c)


def sequence_parallel(mesh, attend, positions=own_positions):
    def step(params, buf, ids, labels, counts):
        everywhere = jnp.maximum(lax.psum(counts.sum(), "sp"), 1)

        def share(p):
            return nll_sum(forward(p, ids, positions(p["pos"]), attend), labels, counts) / everywhere

        loss, g = jax.value_and_grad(share)(params)
        loss, g = lax.psum((loss, g), "sp")
        params, buf = momentum_step(params, buf, g)
        return params, buf, loss

    cut = P(None, "sp")
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), cut, cut, cut), out_specs=P(), check_vma=False))


def right_1(mesh):
    return sequence_parallel(mesh, ring_attention)


def right_2(mesh):
    return sequence_parallel(mesh, ring_attention_scan)


def wrong_1(mesh):
    return sequence_parallel(mesh, lambda q, k, v: ring_attention(q, k, v, source=lambda me, hop: (me + hop) % RING))


def wrong_2(mesh):
    return sequence_parallel(mesh, ring_attention, positions=lambda table: table[: S // RING])


def wrong_3(mesh):
    return sequence_parallel(mesh, lambda q, k, v: ring_attention(q, k, v, hops=RING - 1))
