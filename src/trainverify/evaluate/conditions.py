"""Conditions of an op: its comparisons, and which of two numbers it takes. Which way they fall, and how far it is to the other.

Only what depends on the op's inputs is a condition: a causal mask is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import Numeric
from trainverify.primitives.node import Node, ordered

_COMPARED: Final = frozenset({"lt", "le", "eq", "as_bool"})
_JOINED: Final = frozenset({"and", "or"})
_TAKES: Final = frozenset({"max", "min", "abs", "sign"})
_ORDERS: Final = frozenset({"sort", "argsort", "argmax", "argmin"})
_MOVES: Final = frozenset({"broadcast", "reshape", "transpose", "slice"})
Side = bool  # True: it holds, or the first of two numbers is taken


@dataclass(frozen=True)
class Sides:
    """Which sides of a condition are there, row by row (of ranks and points)."""

    yes: Array
    no: Array
    to_yes: Array  # how far the nearest element is from that side
    to_no: Array
    tied: Array  # whether two real numbers that are ordered are equal


@lru_cache(maxsize=1 << 13)
def conditions(outputs: tuple[Node, ...]) -> tuple[int, ...]:
    """Conditions among the nodes of an op, as places in their order."""
    order = ordered(outputs)
    given = _depending(order)
    ties = {frozenset(map(id, n.args)) for n in order if _scalar(n) == "lt"}  # a derivative asks for equality beside order
    found = []
    for k, node in enumerate(order):
        if node not in given:
            continue
        fn = _scalar(node)
        if fn == "eq" and node.args[0].kind == "real" and frozenset(map(id, node.args)) in ties:
            continue
        if fn == "as_bool" and node.args[0].kind == "bool":
            continue
        if fn in _COMPARED | _JOINED | _TAKES or (node.prim == "select" and _taken_in(node.args[0])):
            found.append(k)
    return tuple(found)


@lru_cache(maxsize=1 << 13)
def orders(outputs: tuple[Node, ...]) -> tuple[int, ...]:
    """Nodes that sort real numbers."""
    order = ordered(outputs)
    given = _depending(order)
    sorts = [(k, n) for k, n in enumerate(order) if n in given and n.prim == "rowwise" and n.attrs[0] in _ORDERS]
    return tuple(k for k, n in sorts if n.args[0].kind == "real")


def _depending(order: Sequence[Node]) -> set[Node]:
    found: set[Node] = set()
    for node in order:
        if node.prim == "input" or any(a in found for a in node.args):
            found.add(node)
    return found


def _scalar(node: Node) -> str:
    return str(node.attrs[0]) if node.prim == "map" else ""


def _taken_in(node: Node) -> bool:
    """Whether a condition was made by another op."""
    while node.prim in _MOVES:
        node = node.args[0]
    return node.prim == "input"


class Watching(Numeric):
    """Runs an op and keeps which way its conditions fall."""

    def __init__(self, outputs: tuple[Node, ...]):
        order = ordered(outputs)
        self._watched = {order[k]: k for k in (*conditions(outputs), *orders(outputs))}
        self._margins: dict[Node, Array] = {}  # positive where a condition holds
        self.sides: dict[int, Sides] = {}  # by place of the node

    def _node(self, node: Node, args: list[Array], inputs: Sequence[Array], lead: tuple[int, ...]) -> Array:
        value = super()._node(node, args, inputs, lead)
        margin = self._margin(node, args)
        if margin is not None:
            self._margins[node] = margin
        if node in self._watched:
            self.sides[self._watched[node]] = self._fall(node, args, value, margin, lead[0])
        return value

    def _margin(self, node: Node, args: list[Array]) -> Array | None:
        fn = _scalar(node)
        match fn:
            case "lt" | "le" | "min":
                return _minus(args[1], args[0])
            case "max":
                return _minus(args[0], args[1])
            case "abs" | "sign":
                return _real(args[0])
            case "eq":
                return -np.abs(_minus(args[0], args[1]))
            case "as_bool":
                return np.abs(_real(args[0])) if args[0].dtype.kind != "b" else self._margins.get(node.args[0])
            case "and" | "or" | "not":
                known = [self._margins[a] for a in node.args if a in self._margins]
                if len(known) < len(node.args):
                    return None
                return -known[0] if fn == "not" else (np.minimum if fn == "and" else np.maximum)(known[0], known[1])
        if node.prim in _MOVES and node.args[0] in self._margins:
            return super()._node(node, [self._margins[node.args[0]]], (), (len(args[0]),))
        return None

    @staticmethod
    def _fall(node: Node, args: list[Array], value: Array, margin: Array | None, rows: int) -> Sides:
        def each(x: Array) -> Array:
            return np.broadcast_to(x, np.shape(x)).reshape(rows, -1)

        fn = _scalar(node)
        none = np.zeros(rows, dtype=bool)
        if node.prim == "rowwise":
            along = np.sort(np.moveaxis(args[0], node.attrs[1] + 1, -1), axis=-1)
            return Sides(none, none, none, none, each(along[..., 1:] == along[..., :-1]).any(1))
        if fn in _TAKES:
            assert margin is not None
            yes, no = margin > 0, margin < 0
        else:
            yes = (args[0] if node.prim == "select" else value).astype(bool)
            no = ~yes
        far = np.where(yes, 1.0, -1.0) if margin is None else np.where(np.isnan(margin), np.inf, margin)
        to_yes, to_no = (each(np.where(np.isfinite(far), np.maximum(s * far, 0), np.inf)).min(1, initial=np.inf) for s in (-1, 1))
        ordered_reals = fn in ("lt", "le", "max", "min", "abs", "sign") and args[0].dtype.kind == "f"
        tied = each(margin == 0).any(1) if ordered_reals and margin is not None else none
        return Sides(each(yes).any(1), each(no).any(1), to_yes, to_no, tied)


def _real(x: Array) -> Array:
    return x if x.dtype.kind == "f" else x.astype(np.float64)


def _minus(a: Array, b: Array) -> Array:
    with np.errstate(all="ignore"):
        gap: Any = _real(a) - _real(b)
    return np.where(a == b, 0.0, gap)
