"""Terms of all elements of an op at once: for each a number for how it is made, and where the positions in each input begin.

Whole tensors often have a few numbers only: a bucket of parameters that is updated, a product of matrices. The numbers are those that terms
have, looked up by what they are made of, and a term is made when somebody asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import numpy as np

from trainverify.domains.arrays import Array, ArrayDomain, labelled
from trainverify.primitives.node import Literal, Node

ABSENT: Final = 1 << 60  # where positions begin in an input that an element is not made of
CELLS: Final = 4_000_000  # that are looked at at once
SEVERAL: Final = 12  # different rows that are looked for one by one
Intern = Callable[[Hashable], int]  # what says how terms are made → a number


class NotPlaced(Exception):
    """An op with elements that are known integers, or that is not read this way."""


class Placed(ArrayDomain):
    """The domain: entries are numbers and beginnings."""

    def __init__(self, intern: Intern, real: Callable[[Any], Any], inputs: int):
        self._intern = intern
        self._real = real  # a number as terms have it
        self._inputs = max(inputs, 1)
        self.entry = np.dtype([("number", np.int64), ("begin", np.int64, (self._inputs,))])

    def elements(self, outputs: Sequence[Node], shapes: Sequence[tuple[int, ...] | None]) -> list[Array]:
        """All elements of all outputs, over positions in inputs."""
        made = self.run(outputs, [None if s is None else self._leaves(n, s) for n, s in enumerate(shapes)])
        return [np.ascontiguousarray(x).reshape(-1) for x in made]

    def _leaves(self, n: int, shape: tuple[int, ...]) -> Array:
        out = self._empty(shape)
        out["number"] = self._intern(("leaf", n))
        out["begin"][..., n] = np.arange(math.prod(shape)).reshape(shape)
        return out

    def _empty(self, shape: tuple[int, ...]) -> Array:
        out = np.empty(shape, dtype=self.entry)
        out["begin"] = ABSENT
        return out

    def _alone(self, op: str, info: Any) -> Array:
        out = self._empty(())
        out["number"] = self._intern((op, info, ()))
        return out

    def literal(self, value: Literal, kind: str) -> Array:
        if kind != "real":
            raise NotPlaced
        return self._alone("real", self._real(value))

    def integers(self, values: Array) -> Array:
        raise NotPlaced

    def rowwise(self, fn: str, x: Array, dim: int, descending: bool) -> Array:
        raise NotPlaced

    def map(self, fn: str, args: Sequence[Array], param: Any) -> Array:
        if not args:
            return self._alone("constant", (fn, param))
        if fn == "detach":
            return args[0]
        made = self._apply("map", (fn, param, type(param).__name__), np.stack([a.reshape(-1) for a in args], axis=1))
        return made.reshape(args[0].shape)

    def select(self, c: Array, a: Array, b: Array) -> Array:
        made = self._apply("choose", None, np.stack([x.reshape(-1) for x in (c, a, b)], axis=1)).reshape(c.shape)
        same = (a["number"] == b["number"]) & (a["begin"] == b["begin"]).all(axis=-1)
        return np.where(same, a, made)

    def contract(self, terms: Sequence[Sequence[int]], target: Sequence[int], args: Sequence[Array], lead: int) -> Array:
        gone = sorted({i for t in terms for i in t} - set(target))
        parts = [labelled(x, term, [*target, *gone], lead) for x, term in zip(args, terms, strict=True)]
        full = np.broadcast_shapes(*(p.shape for p in parts))
        shape = full[: lead + len(target)]
        size, count = math.prod(shape), math.prod(full[lead + len(target) :])
        one = self._intern(("real", self._real(1), ()))
        kept = [p for p in parts if not (p["number"] == one).all()]  # factors 1 are left out
        if not kept or any((p["number"] == one).any() for p in kept):
            raise NotPlaced
        rows = [np.broadcast_to(p, full).reshape(size, count) for p in kept]
        if count == 1 and len(kept) == 1:
            return rows[0].reshape(shape)
        return self._apply("dot", (len(kept),) * count, np.stack(rows, axis=2).reshape(size, count * len(kept))).reshape(shape)

    def reduce(self, fn: str, x: Array, dims: tuple[int, ...]) -> Array:
        keep = [d for d in range(x.ndim) if d not in dims]
        if not x.size:
            raise NotPlaced
        rows = x.transpose((*keep, *dims)).reshape(math.prod(x.shape[d] for d in keep), -1)
        return self._apply("reduce", fn, rows).reshape([x.shape[d] for d in keep])

    def _node(self, node: Node, args: list[Array], inputs: Sequence[Array], lead: tuple[int, ...]) -> Array:
        if node.prim == "one_hot":
            (start,) = node.attrs
            flat = args[0].reshape(-1, 1)
            made = [self._apply("hit", p, flat) for p in range(start, start + node.shape[-1])]
            return np.stack(made, axis=1).reshape(*lead, *node.shape) if made else self._empty((*lead, *node.shape))
        if node.prim == "gather":
            raise NotPlaced
        return super()._node(node, args, inputs, lead)

    def _apply(self, op: str, info: Any, rows: Array) -> Array:
        """An op on each of these rows of arguments."""
        if not rows.shape[1]:
            raise NotPlaced
        out = self._empty((len(rows),))
        step = max(1, CELLS // max(1, rows.shape[1] * (self._inputs + 1)))
        for start in range(0, len(rows), step):
            self._some(op, info, rows[start : start + step], out[start : start + step])
        return out

    def _some(self, op: str, info: Any, rows: Array, out: Array) -> None:
        begin = rows["begin"]
        out["begin"] = begin.min(axis=1, initial=ABSENT)
        there = begin != ABSENT
        made = np.concatenate([rows["number"][:, :, None], np.where(there, begin - out["begin"][:, None, :], -1)], axis=2)
        first, which = distinct(made.reshape(len(made), -1))
        numbers = [self._intern((op, info, tuple([_argument(a) for a in made[n].tolist()]))) for n in first]
        out["number"] = np.array(numbers, dtype=np.int64)[which]


def _argument(row: list[int]) -> tuple[int, tuple[int, ...]]:
    """How an argument is made, and where it begins in its inputs, from where the whole begins."""
    number, *begin = row
    return number, tuple([p for p in begin if p >= 0])


def distinct(rows: Array) -> tuple[list[int], Array]:
    """The first of each of the different rows, and for each row which of them it is."""
    which = np.full(len(rows), -1)
    first: list[int] = []
    left = np.arange(len(rows))
    while len(left) and len(first) < SEVERAL:
        same = (rows[left] == rows[left[0]]).all(axis=1)
        which[left[same]] = len(first)
        first.append(int(left[0]))
        left = left[~same]
    if len(left):
        _, at, rest = np.unique(rows[left], axis=0, return_index=True, return_inverse=True)
        which[left] = len(first) + rest.reshape(-1)
        first += left[at].tolist()
    return first, which
