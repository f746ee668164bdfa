"""Signs of tensors, read off the ops that make them: "positive", "nonnegative" or None; and which tensors may have no value where the
program has one. Trusted.

Enough for norms and counts. Masks bring −∞ into sums, and its exponential is 0, so −∞ is traced too. A quotient by an expression that may
be 0, a root or a logarithm is unsure unless it must have a value, and so is everything made of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainverify.primitives.node import Node, topological
from trainverify.primitives.scalars import conditions
from trainverify.prove.definedness import (
    FACTS,
    FINITE,
    POSITIONS,
    WILD,
    Arguments,
    Sign,
    expression_state,
    weakest,
)
from trainverify.prove.strict import Step, Strict


class Known(NamedTuple):
    """Of all elements of a tensor."""

    sign: Sign = None
    state: int = FINITE
    unsure: bool = False  # whether it may have no value, by what it divides by, where the program has one
    level: int = FINITE  # its state, where the program has a value


def of_source(kind: str, domain: str | None) -> Known:
    """Of an input of this kind, if something is declared of it."""
    if kind == "bool" or domain in ("nonnegative", "indicator"):
        return Known("nonnegative")
    return Known("positive" if domain == "positive" else None)


class Signs:
    """Of every tensor of a program."""

    def __init__(self, sources: Mapping[str, Known], ops: Sequence[Step], strict: Strict | None):
        self.tensors = dict(sources)
        self._known: dict[object, list[Known]] = {}
        assumed = {} if strict is None else _assumed(ops, strict)
        for n, op in enumerate(ops):
            given = tuple([(self.tensors[t], assumed.get(t, frozenset())) if t is not None else (Known(), frozenset()) for t in op.inputs])
            key = (op.nodes, given, None if strict is None else strict.outputs[n])
            if key not in self._known:
                self._known[key] = _within(op, given, frozenset() if strict is None else strict.nodes[n])
            for t, x in zip(op.outputs, self._known[key], strict=True):
                self.tensors[t] = x._replace(unsure=False, level=FINITE) if strict is not None and t in strict.tensors else x


def _assumed(ops: Sequence[Step], strict: Strict) -> dict[str, frozenset[str]]:
    """What the program needs of whole tensors to have a value."""
    found: dict[str, set[str]] = {}
    for op, nodes in zip(ops, strict.nodes, strict=True):
        for node in topological(op.nodes):
            if node in nodes and node.prim == "map":
                for k, what in conditions(*node.attrs):
                    at = _moved(node.args[k])
                    if at is not None:
                        found.setdefault(str(op.inputs[at]), set()).add(what)
    return {t: frozenset(whats) for t, whats in found.items()}


def _within(op: Step, given: Sequence[tuple[Known, frozenset[str]]], strict: frozenset[Node]) -> list[Known]:
    """What is known of the outputs of an op."""
    signs: dict[Node, Sign] = {}
    states: dict[Node, int] = {}
    levels: dict[Node, int] = {}
    divided: set[Node] = set()  # nodes that may have no value by what they divide by, or take roots or logarithms of
    inputs = [known for known, _ in given]
    states_given, levels_given, signs_given = [k.state for k in inputs], [k.level for k in inputs], [k.sign for k in inputs]
    for node in topological(op.nodes):
        states[node] = _state(node, states, states_given)
        levels[node] = FINITE if node in strict else _state(node, levels, levels_given)
        sign = _sign(node, signs, states, signs_given)
        fails = False
        if node.prim == "map":
            for k, what in conditions(*node.attrs):
                known, at = signs[node.args[k]], _moved(node.args[k])
                granted = known == "positive" or (what == "nonneg" and known == "nonnegative") or (at is not None and what in given[at][1])
                fails |= not granted
        doubt = inputs[node.attrs[0]].unsure if node.prim == "input" else any(a in divided for a in node.args)
        masked = any(states[a] != FINITE for a in node.args)  # 1/(1 + exp(−x)) is 0 at −∞
        infinite = (doubt or masked) and node.prim == "map" and FACTS[node.attrs[0]].fades
        signs[node] = "nonnegative" if infinite and sign == "positive" else sign
        if (doubt or fails) and node not in strict:
            divided.add(node)
    return [Known(signs[o], states[o], o in divided, levels[o]) for o in op.nodes]


def _moved(node: Node) -> int | None:
    """The input that a node has all elements of, however they are arranged."""
    while node.prim in ("reshape", "transpose", "broadcast") or (node.prim == "map" and node.attrs[0] == "as_real"):
        (node,) = node.args
    return int(node.attrs[0]) if node.prim == "input" else None


def _state(node: Node, known: Mapping[Node, int], inputs: Sequence[int]) -> int:
    """Of all elements: numbers, numbers or −∞, or anything."""
    args = [known[a] for a in node.args]
    if node.prim == "one_hot" or (node.kind != "real" and node.prim != "input"):  # positions and truth values, whatever was looked at
        return FINITE
    match node.prim:
        case "input":
            at: int = node.attrs[0]
            return inputs[at]
        case "const":
            return expression_state("real", node.attrs[0], ())
        case "map":
            return expression_state("map", node.attrs, args)
        case "contract":
            return FINITE if all(a == FINITE for a in args) else WILD
        case "pad" | "window":
            filler = node.attrs[3] if node.prim == "pad" else node.attrs[1].filler
            return max(*args, expression_state("real", filler, ()))
        case "overlap":
            return FINITE if args[0] == FINITE else WILD
        case "reduce":
            return expression_state("reduce", node.attrs[0], args)
    return max(args, default=FINITE)


def _sign(node: Node, known: Mapping[Node, Sign], states: Mapping[Node, int], inputs: Sequence[Sign]) -> Sign:
    args = [known[a] for a in node.args]
    if node.kind == "bool":
        return "nonnegative"
    match node.prim:
        case "input":
            n: int = node.attrs[0]
            return inputs[n]
        case "const":
            value = node.attrs[0]
            if value == 0:
                return "nonnegative"
            return "positive" if 0 < value < math.inf else None
        case "reshape" | "transpose" | "slice" | "concat" | "broadcast" | "reduce":
            return weakest(args)
        case "select":
            return weakest(args[1:])
        case "gather":  # 0 outside
            table, places = node.args
            return args[0] if _positions(places) <= table.shape[node.attrs[0]] else weakest([args[0], "nonnegative"])
        case "one_hot":
            return "nonnegative"
        case "contract":
            if all(s is not None for s in args) and 0 not in (d for a in node.args for d in a.shape):
                return weakest(args)
            same = len(node.args) == 2 and node.args[0] is node.args[1] and node.attrs[0][0] == node.attrs[0][1]
            return "nonnegative" if same else None
        case "map":
            twice = len(node.args) == 2 and node.args[0] is node.args[1]
            param = node.attrs[1] if len(node.attrs) > 1 else None
            return FACTS[node.attrs[0]].sign(Arguments(args, all(states[a] == FINITE for a in node.args), twice, param))
    return None


def _positions(node: Node) -> float:
    """Below what integers are, if they are positions in rows."""
    while node.prim in ("reshape", "transpose", "broadcast", "slice"):
        (node,) = node.args
    return node.args[0].shape[node.attrs[1]] if node.prim == "rowwise" and node.attrs[0] in POSITIONS else math.inf
