"""Which leaves of one tree are those of another: containers of another type may hold the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax


def matched(tree: Any, other: Any) -> list[int] | None:
    """For every leaf of a tree its number among the leaves of another one; None where they are not the same.

    Mappings match by key. A tuple and a named tuple match by position, named tuples of two types if their fields are the same.
    """
    if jax.tree_util.tree_structure(tree) == jax.tree_util.tree_structure(other):
        leaves = zip(jax.tree_util.tree_leaves(tree), jax.tree_util.tree_leaves(other), strict=True)
        same = all(p.shape == q.shape and p.dtype == q.dtype for p, q in leaves)
        return list(range(jax.tree_util.tree_structure(tree).num_leaves)) if same else None
    mine, theirs = _children(tree), _children(other)
    if mine is None or theirs is None or not _alike(tree, other) or mine.keys() != theirs.keys():
        return None
    starts, count = {}, 0
    for key, child in theirs.items():
        starts[key] = count
        count += jax.tree_util.tree_structure(child).num_leaves
    found: list[int] = []
    for key, child in mine.items():
        inner = matched(child, theirs[key])
        if inner is None:
            return None
        found += [starts[key] + i for i in inner]
    return found


def _alike(tree: Any, other: Any) -> bool:
    """Whether children with the same keys are meant to be the same."""
    if isinstance(tree, Mapping) and isinstance(other, Mapping):
        return True
    if isinstance(tree, tuple) and isinstance(other, tuple):
        fields = [f for t in (tree, other) if (f := getattr(t, "_fields", None)) is not None]
        return len(fields) < 2 or fields[0] == fields[1]
    return bool(jax.tree_util.tree_structure(tree, _below(tree)) == jax.tree_util.tree_structure(other, _below(other)))


def _below(tree: Any) -> Any:
    return lambda x: x is not tree


def _children(tree: Any) -> dict[Any, Any] | None:
    """What a container holds, in JAX's order: by key of mappings, else by position. None of a leaf."""
    parts = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_below(tree))[0]
    if any(len(path) != 1 for path, _ in parts):
        return None
    if isinstance(tree, Mapping):
        return {getattr(path[0], "key", None): part for path, part in parts}
    return {n: part for n, (_, part) in enumerate(parts)}


__all__ = ["matched"]
