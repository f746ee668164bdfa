"""What the arguments of a step are: shapes, and for integers the range that they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax
from trainverify.graph.program import Domain


@dataclass(frozen=True)
class Ids:
    """Integers from 0 up to `below` (without it)."""

    shape: tuple[int, ...]
    below: int
    dtype: Any = jnp.int32

    @property
    def domain(self) -> Domain:
        return Domain("ids", self.below)


@dataclass(frozen=True)
class Reals:
    """Real numbers; `nonnegative` ones for second moments and the like."""

    shape: tuple[int, ...]
    dtype: Any = jnp.float32
    nonnegative: bool = False

    @property
    def domain(self) -> Domain | None:
        return Domain("nonnegative") if self.nonnegative else None


@dataclass(frozen=True)
class Count:
    """Integers that count from 0 on: the number of steps."""

    shape: tuple[int, ...] = ()
    dtype: Any = jnp.int32

    @property
    def domain(self) -> Domain:
        return Domain("nonnegative")


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, Ids | Reals | Count):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = jnp.asarray(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def domain_of(leaf: Any) -> Domain | None:
    return leaf.domain if isinstance(leaf, Ids | Reals | Count) else None


def starts_nonnegative(leaf: Any) -> bool | None:
    """Whether all numbers of an array are 0 or greater; None of what has no content here, or no numbers."""
    if isinstance(leaf, Ids | Reals | Count | jax.ShapeDtypeStruct | jax.core.Tracer) or shape_of(leaf).dtype.kind not in "fiuV":
        return None
    try:
        return bool((np.asarray(leaf) >= 0).all())
    except (TypeError, RuntimeError):  # keys, and arrays that were donated
        return None


__all__ = ["Count", "Ids", "Reals", "domain_of", "shape_of", "starts_nonnegative"]
