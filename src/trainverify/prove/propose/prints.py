"""Fingerprints: ops on numbers that stand for expressions, a whole array at a time. Equal expressions have equal ones.

A sum has the sum of its summands' fingerprints, so that order and grouping do not matter: parts of a batch, shares of ranks. Different
expressions share one by accident, or never in practice; nothing that is said with them is believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

import numpy as np

from trainverify.domains.arrays import Array, ArrayDomain, labelled
from trainverify.domains.numeric import NUMERIC
from trainverify.primitives.node import Literal, Node
from trainverify.primitives.scalars import SCALARS, nearest_float

WHOLE: Final = np.dtype([("print", np.uint64), ("value", np.int64), ("known", np.bool_)])  # an integer or boolean, known or not


class Prints(ArrayDomain):
    """The domain: entries are fingerprints, those of integers and booleans with their values where these are known."""

    def run(self, outputs: Sequence[Node], inputs: Sequence[Array], lead: tuple[int, ...] = ()) -> list[Array]:
        with np.errstate(all="ignore"):
            return super().run(outputs, inputs, lead)

    def literal(self, value: Literal, kind: str) -> Array:
        return np.asarray(_real(nearest_float(value))) if kind == "real" else known(np.asarray(value))

    def integers(self, values: Array) -> Array:
        return known(values)

    def map(self, fn: str, args: Sequence[Array], param: Any) -> Array:
        if fn == "detach":
            return args[0]
        prints = [print_of(a) for a in args]
        made = prints[0] + prints[1] if fn == "add" else _ordered((fn, param), prints)
        whole = bool(args) and all(a.dtype == WHOLE for a in args)
        if whole:
            there = np.logical_and.reduce([a["known"] for a in args])
            if there.any():
                values = np.asarray(NUMERIC.map(fn, [a["value"] for a in args], param))
                if values.dtype.kind == "f":
                    return np.where(there, _reals(values), made)
                return np.where(there, known(values), unknown(made))
        result = (SCALARS[fn].result or ("int" if whole else "real")) if args else "real"
        return made if result == "real" else unknown(made)

    def select(self, c: Array, a: Array, b: Array) -> Array:
        same = print_of(a) == print_of(b)
        made = _ordered("choose", [print_of(x) for x in (c, a, b)])
        chosen = np.where(same | (c["known"] & (c["value"] != 0)), a, b)
        return np.where(same | c["known"], chosen, unknown(made) if a.dtype == WHOLE else made)

    def contract(self, terms: Sequence[Sequence[int]], target: Sequence[int], args: Sequence[Array], lead: int) -> Array:
        if all(a.dtype == WHOLE and a["known"].all() for a in args):
            return known(NUMERIC.contract(terms, target, [a["value"] for a in args], lead))
        gone = sorted({i for t in terms for i in t} - set(target))
        parts = [labelled(print_of(x), term, [*target, *gone], lead) for x, term in zip(args, terms, strict=True)]
        product = parts[0] if len(parts) == 1 else _product(parts)
        made = product.sum(axis=tuple(range(lead + len(target), product.ndim)), dtype=np.uint64)
        return unknown(made) if all(a.dtype == WHOLE for a in args) else made

    def reduce(self, fn: str, x: Array, dims: tuple[int, ...]) -> Array:
        made = _mixed(_mixed(print_of(x)).sum(axis=dims, dtype=np.uint64) + _seed(fn))
        if x.dtype != WHOLE:
            return made
        there = x["known"].all(axis=dims)
        return np.where(there, known(NUMERIC.reduce(fn, x["value"], dims)), unknown(made)) if there.any() else unknown(made)

    def rowwise(self, fn: str, x: Array, dim: int, descending: bool) -> Array:
        if fn == "cumsum":
            made = np.cumsum(print_of(x), axis=dim, dtype=np.uint64)
            there: Array = np.logical_and.accumulate(x["known"], axis=dim) if x.dtype == WHOLE else None
        else:
            row = _row(fn, print_of(x), dim)
            places = np.arange(x.shape[dim], dtype=np.uint64).reshape([-1 if d == dim else 1 for d in range(x.ndim)])
            made = row.squeeze(dim) if fn in ("argmax", "argmin") else _mixed(row + places + _seed(descending))
            there = np.broadcast_to(x["known"].all(axis=dim, keepdims=True), x.shape) if x.dtype == WHOLE else None
            if there is not None and made.ndim < x.ndim:
                there = there.all(axis=dim)
        if there is None:
            return unknown(made) if fn.startswith("arg") else made
        return np.where(there, known(NUMERIC.rowwise(fn, x["value"], dim, descending)), unknown(made))

    def _node(self, node: Node, args: list[Array], inputs: Sequence[Array], lead: tuple[int, ...]) -> Array:
        if node.prim == "one_hot":
            places = node.attrs[0] + np.arange(node.shape[-1])
            ids = args[0][..., None]
            hits = np.where(ids["value"] == places, _real(1.0), _real(0.0))
            return np.where(ids["known"], hits, _mixed(ids["print"] + print_of(known(places)) * _seed("hit")))
        if node.prim == "gather":
            x, ids = args
            d = node.attrs[0] + len(lead)
            inside = ids["known"] & (ids["value"] >= 0) & (ids["value"] < x.shape[d])
            zero = self.literal(0, node.kind)
            if x.shape[d] == 0:
                return np.broadcast_to(zero, ids.shape)
            found = np.where(inside, np.take_along_axis(x, np.where(inside, ids["value"], 0), axis=d), zero)
            made = _mixed(_row(("pick", node.kind), print_of(x), d) + _mixed(ids["print"]))
            return np.where(ids["known"], found, unknown(made) if x.dtype == WHOLE else made)
        return super()._node(node, args, inputs, lead)


def known(values: Array) -> Array:
    """Integers or booleans with these values."""
    out = np.empty(values.shape, dtype=WHOLE)
    out["value"] = values
    out["print"] = _mixed(out["value"].astype(np.uint64) + _seed("int"))
    out["known"] = True
    return out


def unknown(prints: Array) -> Array:
    """Integers or booleans with these fingerprints."""
    out = np.zeros(np.shape(prints), dtype=WHOLE)
    out["print"] = prints
    return out


def print_of(x: Array) -> Array:
    return x["print"] if x.dtype == WHOLE else x


def unknown_print(ids: Array) -> Array:
    """Fingerprints of what nothing is known of."""
    return _mixed(ids.astype(np.uint64) + _seed("own"))


@lru_cache(maxsize=100_000)
def _seed(what: Any) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(repr(what).encode(), digest_size=8).digest()) | 1)


@lru_cache(maxsize=10_000)
def _real(value: float) -> np.uint64:
    return _seed(("real", value + 0.0))


def _reals(values: Array) -> Array:
    different, which = np.unique(values, return_inverse=True)
    return np.array([_real(float(v)) for v in different], dtype=np.uint64)[which].reshape(values.shape)


def _mixed(x: Array) -> Array:
    """Every bit of the result depends on every bit of x."""
    x = np.asarray(x, dtype=np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _ordered(what: Any, prints: Sequence[Array]) -> Array:
    """An application of a function."""
    total: Array = _seed(what)
    for n, p in enumerate(prints):
        total = total + _mixed(p * np.uint64(2 * n + 3))
    return _mixed(total)


def _row(what: Any, prints: Array, dim: int) -> Array:
    """A function of all elements along a dimension, which stays with size 1."""
    by = (2 * np.arange(prints.shape[dim], dtype=np.uint64) + np.uint64(3)).reshape([-1 if d == dim else 1 for d in range(prints.ndim)])
    return _mixed(_mixed(prints * by).sum(axis=dim, keepdims=True, dtype=np.uint64) + _seed(what))


def _product(factors: Sequence[Array]) -> Array:
    """Products in any order; factors 1 are left out, and what is left alone is itself."""
    one = _real(1.0)
    count: Array = 0
    alone: Array = np.uint64(0)
    mixed: Array = _seed("product")
    for f in factors:
        there = f != one
        count = count + there
        alone = alone + np.where(there, f, np.uint64(0))
        mixed = mixed + np.where(there, _mixed(f), np.uint64(0))
    return np.where(count == 0, one, np.where(count == 1, alone, _mixed(mixed)))
