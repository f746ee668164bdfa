"""Switch-style mixture of experts. Dispatch is dense: an expert sees every token, gates of other tokens are zero.

mesh: `dp` cuts rows, `ep` cuts experts.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import trainverify.jax as tvj

N, D, E, F, C = 16, 9, 6, 14, 4  # tokens, width, experts, hidden, targets
DP, EP = 2, 2
AUX = 0.05

mesh = {"dp": DP, "ep": EP}


def param_shapes():
    experts = {"w1": (E, D, F), "b1": (E, F), "w2": (E, F, D)}
    return {"in": (5, D), "router": (D, E), "experts": experts, "out": (D, C)}


_p = jax.tree.map(tvj.Reals, param_shapes(), is_leaf=lambda s: type(s) is tuple)
args = (_p, _p, tvj.Reals((N, 5)), tvj.Reals((N, C)))

SPEC = {"in": P(), "router": P(), "experts": {"w1": P("ep"), "b1": P("ep"), "w2": P("ep")}, "out": P()}


def route(x, router):
    """Gates (tokens, experts): the router's probability at the best expert, zero elsewhere; and what balancing needs."""
    probs = jax.nn.softmax(x @ router)
    chosen = jax.nn.one_hot(jnp.argmax(probs, axis=-1), E, dtype=probs.dtype)
    return probs * chosen, chosen, probs


def balance(fraction, probability):
    return E * jnp.sum(fraction * probability)


def experts_apply(w, x, gates):
    """Sum over the experts in `w` of gate × MLP."""
    h = jax.nn.relu(jnp.einsum("nd,edf->enf", x, w["w1"]) + w["b1"][:, None])
    return jnp.einsum("enf,efd,ne->nd", h, w["w2"], gates)


def momentum(p, m, g):
    m = jax.tree.map(lambda a, b: 0.9 * a + b, m, g)
    return jax.tree.map(lambda a, b: a - 0.02 * b, p, m), m


def reference(p, m, inputs, targets):
    def losses(p):
        x = jnp.tanh(inputs @ p["in"])
        gates, chosen, probs = route(x, p["router"])
        y = x + experts_apply(p["experts"], x, gates)
        main = jnp.mean((y @ p["out"] - targets) ** 2)
        aux = balance(chosen.mean(0), probs.mean(0))
        return main + AUX * aux, aux

    (loss, aux), g = jax.value_and_grad(losses, has_aux=True)(p)
    p, m = momentum(p, m, g)
    return p, m, loss, aux


def compiled(mesh, step, rows, checked):
    specs = (SPEC, SPEC, P(rows), P(rows))
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(SPEC, SPEC, P(), P()), check_vma=checked))


def my_gates(gates):
    own = E // EP
    return lax.dynamic_slice_in_dim(gates, lax.axis_index("ep") * own, own, axis=1)


def tokens_everywhere(mesh, pick=my_gates, mean_balance=False):
    """Rows are cut over dp only. Each ep rank applies its experts to all rows of its dp rank, then the results are summed."""

    def losses(p, inputs, targets):
        x = jnp.tanh(inputs @ p["in"])
        gates, chosen, probs = route(x, p["router"])
        y = x + lax.psum(experts_apply(p["experts"], x, pick(gates)), "ep")
        main = lax.pmean(jnp.mean((y @ p["out"] - targets) ** 2), "dp")
        if mean_balance:
            aux = lax.pmean(balance(chosen.mean(0), probs.mean(0)), "dp")
        else:
            aux = balance(lax.pmean(chosen.mean(0), "dp"), lax.pmean(probs.mean(0), "dp"))
        return main + AUX * aux, aux

    def step(p, m, inputs, targets):
        (loss, aux), g = jax.value_and_grad(losses, has_aux=True)(p, inputs, targets)
        p, m = momentum(p, m, g)
        return p, m, loss, aux

    return compiled(mesh, step, "dp", True)


def tokens_cut(mesh, expert_axes):
    """Rows are cut over both axes. They meet before the experts (all-gather) and part behind them (reduce-scatter)."""
    ranks = DP * EP

    def objective(p, inputs, targets):
        x = jnp.tanh(inputs @ p["in"])
        gates, chosen, probs = route(x, p["router"])
        xs, gs = (lax.all_gather(a, "ep", tiled=True) for a in (x, gates))
        ys = experts_apply(p["experts"], xs, my_gates(gs))
        y = x + lax.psum_scatter(ys, "ep", scatter_dimension=0, tiled=True)
        main = jnp.sum((y @ p["out"] - targets) ** 2) / (N * C)
        fraction = lax.psum(chosen.sum(0), ("dp", "ep")) / N
        aux = balance(fraction, probs.sum(0) / N)
        return main + AUX * aux, aux

    def step(p, m, inputs, targets):
        (loss, aux), g = jax.value_and_grad(objective, has_aux=True)(p, inputs, targets)
        experts = lax.psum(g.pop("experts"), expert_axes)
        g = lax.psum(g, ("dp", "ep")) | {"experts": experts}
        p, m = momentum(p, m, g)
        loss, aux = lax.psum((loss, aux), ("dp", "ep"))
        return p, m, loss, aux

    assert N % ranks == 0
    return compiled(mesh, step, ("dp", "ep"), False)


def right_1(mesh):
    return tokens_everywhere(mesh)


def right_2(mesh):
    return tokens_cut(mesh, expert_axes="dp")


def wrong_1(mesh):
    return tokens_everywhere(mesh, mean_balance=True)


def wrong_2(mesh):
    return tokens_cut(mesh, expert_axes=("dp", "ep"))


def wrong_3(mesh):
    def pick(gates):
        return lax.dynamic_slice_in_dim(gates, lax.axis_index("ep"), E // EP, axis=1)

    return tokens_everywhere(mesh, pick)
