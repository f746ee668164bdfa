"""What primitives mean on arrays, whatever the entries are: the part that numeric, ball and element share.

Values are NumPy arrays. `lead` leading dimensions (mesh axes, samples) ride along in front of a
node's own shape, so one evaluation serves many ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainverify.primitives.node import Literal, Node, wired

Array = Any  # np.ndarray of float64, int64, bool or object


class ArrayDomain:
    """Interprets nodes over arrays; subclasses say what entries and arithmetic are."""

    def literal(self, value: Literal, kind: str) -> Array:
        raise TypeError("abstract")

    def map(self, fn: str, args: Sequence[Array], param: Any) -> Array:
        raise TypeError("abstract")

    def contract(self, terms: Sequence[Sequence[int]], target: Sequence[int], args: Sequence[Array], lead: int) -> Array:
        raise TypeError("abstract")

    def reduce(self, fn: str, x: Array, dims: tuple[int, ...]) -> Array:
        raise TypeError("abstract")

    def rowwise(self, fn: str, x: Array, dim: int, descending: bool) -> Array:
        raise TypeError("abstract")

    def select(self, c: Array, a: Array, b: Array) -> Array:
        return np.where(c, a, b)

    def integers(self, values: Array) -> Array:
        return values.astype(np.int64)

    def indicator(self, hits: Array) -> Array:
        raise TypeError("abstract")

    def run(self, outputs: Sequence[Node], inputs: Sequence[Array], lead: tuple[int, ...] = ()) -> list[Array]:
        """Values of `outputs`; `inputs[i]` has shape lead + the shape of input node i."""
        order, args, ends = wired(tuple(outputs))
        values: list[Array] = []
        for node, own in zip(order, args, strict=True):
            values.append(self._node(node, [values[k] for k in own], inputs, lead))
        return [values[k] for k in ends]

    def _node(self, node: Node, args: list[Array], inputs: Sequence[Array], lead: tuple[int, ...]) -> Array:
        n = len(lead)
        match node.prim:
            case "map":
                if not args:  # a constant such as pi
                    return self._repeat(np.asarray(self.map(node.attrs[0], [], node.attrs[1] if len(node.attrs) > 1 else None)), lead)
                return self.map(node.attrs[0], args, node.attrs[1] if len(node.attrs) > 1 else None)
            case "input":
                return inputs[node.attrs[0]]
            case "broadcast":
                (dims,) = node.attrs
                thin = (*lead, *(s if i in dims else 1 for i, s in enumerate(node.shape)))
                return np.broadcast_to(args[0].reshape(thin), lead + node.shape)
            case "contract":
                return self.contract(node.attrs[0], node.attrs[1], args, n)
            case "const":
                return self._repeat(self.literal(node.attrs[0], node.kind), lead)
            case "reshape":
                return args[0].reshape(lead + node.shape)
            case "transpose":
                return args[0].transpose((*range(n), *(p + n for p in node.attrs[0])))
            case "iota":
                start, step = node.attrs
                return self._repeat(self.integers(start + step * np.arange(node.shape[0])), lead)
            case "select":
                return self.select(*args)
            case "reduce":
                return self.reduce(node.attrs[0], args[0], tuple(d + n for d in node.attrs[1]))
            case "rowwise":
                fn, d, descending = node.attrs
                return self.rowwise(fn, args[0], d + n, descending)
            case "slice":
                d, start, step = node.attrs
                index = start + step * np.arange(node.shape[d])
                return np.take(args[0], index, axis=d + n)
            case "concat":
                return np.concatenate(args, axis=node.attrs[0] + n)
            case "pad":
                d, low, high, value = node.attrs
                blocks = []
                for size in (low, high):
                    shape = (*lead, *node.shape[:d], size, *node.shape[d + 1 :])
                    blocks.append(np.broadcast_to(self.literal(value, node.kind), shape))
                return np.concatenate([blocks[0], args[0], blocks[1]], axis=d + n)
            case "one_hot":
                positions = self.integers(node.attrs[0] + np.arange(node.shape[-1]))
                return self.indicator(args[0][..., None] == positions)
            case "gather":
                x, ids = args
                d = node.attrs[0] + n
                size = x.shape[d]
                plain = ids.astype(np.int64)
                inside = (plain >= 0) & (plain < size)
                if size == 0:
                    return np.broadcast_to(self.literal(0, node.kind), ids.shape)
                found = np.take_along_axis(x, np.where(inside, plain, 0), axis=d)
                return np.where(inside, found, self.literal(0, node.kind))
        raise ValueError(f"no primitive {node.prim!r}")

    @staticmethod
    def _repeat(value: Array, lead: tuple[int, ...]) -> Array:
        return np.broadcast_to(value, lead + np.shape(value)) if lead else value


def labelled(x: Array, term: Sequence[int], order: Sequence[int], lead: int) -> Array:
    """x with one dimension per label of `order` (size 1 where it has none), behind the leading ones."""
    present = [i for i in order if i in term]
    moved = x.transpose((*range(lead), *(lead + list(term).index(i) for i in present)))
    sizes = dict(zip(present, moved.shape[lead:], strict=True))
    return moved.reshape((*x.shape[:lead], *(sizes.get(i, 1) for i in order)))
