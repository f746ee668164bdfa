"""Random numbers: uniform ones are an opaque function of a key and a shape, the same wherever both are the same.

A key is followed by how it was derived. Uniform numbers become inputs named by key, type and number: a rank that draws its own rows
with the same key does not draw rows of what one device draws, and a key folded with the rank is another key. Both are differences.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from trainverify.graph.types import TensorType
from trainverify.jax.emit import RankEmitter
from trainverify.jax.mappings.elementwise import Divergent
from trainverify.jax.values import Grid, Key, Number, Opaque, Value
from trainverify.translate.emit import Unmapped

UNIFORM: Final = "_uniform"  # JAX's name of the function that makes uniform numbers from bits


def drawn(e: RankEmitter, given: Sequence[Any], kind: TensorType) -> Value:
    """Uniform numbers between two bounds."""
    key, low, high = given
    if not isinstance(low, Number) or not isinstance(high, Number) or (low.value, high.value) != (0, 1):
        raise Unmapped("uniform numbers that are not between 0 and 1")
    flat = TensorType((math.prod(kind.shape),), kind.dtype)  # JAX draws by position in the flattened array
    name = f"uniform.{key.derived}.{flat}"
    if name not in e.tensors:
        e.draws[name] = flat
        e.declare(name, flat)
        e.nonnegative.add(name)
    return e.reshape(name, kind.shape)


def makes_uniform(eqn: Any) -> bool:
    """Whether a call is of JAX's own function that makes uniform numbers from bits."""
    body = eqn.params.get("jaxpr")
    source = str(getattr(getattr(getattr(body, "jaxpr", None), "debug_info", None), "func_src_info", ""))
    return eqn.params.get("name") == UNIFORM and "/jax/_src/random" in source.replace(os.sep, "/")


def _integer(e: RankEmitter, value: Any) -> str:
    """An integer that goes into a key: a number, or an input by name."""
    if isinstance(value, Grid) and value.uniform:
        if value.literal is None:
            raise Divergent(np.broadcast_to(value.start, (len(e.ranks),)))
        return str(value.literal)
    if isinstance(value, str) and value not in e.made:
        return value
    raise Unmapped("a key from a computed number")


def seeded(e: RankEmitter, given: Sequence[Any], params: Mapping[str, Any]) -> Key:
    return Key(derived=f"key({_integer(e, given[0])}, {params['impl'].name})")


def folded_in(e: RankEmitter, given: Sequence[Any], params: Mapping[str, Any]) -> Key:
    return Key(derived=f"fold_in({_key(given[0])}, {_integer(e, given[1])})")


def split(e: RankEmitter, given: Sequence[Any], params: Mapping[str, Any]) -> Key:
    return Key(derived=f"split({_key(given[0])}, {list(params['shape'])})")


def same(e: RankEmitter, given: Sequence[Any], params: Mapping[str, Any]) -> Key:
    return Key(derived=_key(given[0]))


def part(e: RankEmitter, given: Sequence[Any], params: Mapping[str, Any]) -> Key:
    """One of several keys, by number."""
    start, stop, steps = params["start_indices"], params["limit_indices"], params["strides"]
    if steps is not None or stop[0] != start[0] + 1 or any(start[1:]):
        raise Unmapped("a slice of several keys")
    return Key(derived=f"{_key(given[0])}[{start[0]}]")


def _key(value: Any) -> str:
    if not isinstance(value, Key):
        raise Unmapped(value.reason if isinstance(value, Opaque) else "a key that is not followed")
    return value.derived


OF_KEYS: Final = {
    **dict.fromkeys(("pvary", "pcast", "copy", "copy_p", "mesh_cast", "sharding_constraint"), same),
    "random_seed": seeded,
    "random_fold_in": folded_in,
    "random_split": split,
    "random_wrap": same,
    "random_unwrap": same,
    "squeeze": same,
    "slice": part,
}


def key_result(e: RankEmitter, name: str, given: Sequence[Any], params: Mapping[str, Any]) -> Key | None:
    """The key that a primitive makes; None if it has nothing to do with keys."""
    row = OF_KEYS.get(name)
    if row is None or not (name == "random_seed" or any(isinstance(v, Key) for v in given)):
        return None
    return row(e, given, params)


def is_key(dtype: Any) -> bool:
    return str(dtype).startswith("key<")


__all__ = ["drawn", "is_key", "key_result", "makes_uniform"]
