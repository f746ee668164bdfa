"""The same steps, distributed by the compiler: jit with shardings, and constraints within."""

from __future__ import annotations

import llama
import mlp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax


def sharded(mesh, tree):
    return jax.tree.map(lambda p: NamedSharding(mesh, p), tree, is_leaf=lambda x: isinstance(x, P))


def jitted(step, mesh, given, made):
    return jax.jit(step, in_shardings=sharded(mesh, given), out_shardings=sharded(mesh, made), keep_unused=True)


def mlp_step(mesh):
    return jitted(mlp.reference, mesh, (mlp.TP, P("dp"), P("dp")), (mlp.TP, P()))


def mlp_adam(mesh):
    state = {"m": mlp.TP, "v": mlp.TP, "t": P()}
    return jitted(mlp.reference_adam, mesh, (mlp.TP, state, P("dp"), P("dp")), (mlp.TP, state, P()))


def llama_step(c, mesh, cut):
    where = llama.specs(c, **cut)
    return jitted(llama.reference(c), mesh, (where, P("dp"), P("dp")), (where, P()))


TENSOR = llama.HEADS
VOCABULARY = {**llama.HEADS, "embed": llama.ROWS, "head": llama.COLUMNS}
FULLY = {n: P("dp", None) for n in (*llama.HEADS, "embed", "head")}
