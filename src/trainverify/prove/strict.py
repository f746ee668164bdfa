"""What of the logical program must have a value for its outputs to have one, whatever the inputs are. Trusted.

A quotient in a branch that may not be taken, or of which only some elements are used, need not have a value where the
outputs have one: the conditions of such ops are not assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainverify.primitives.node import Node, topological


class Step(NamedTuple):
    """An op: what its outputs are, over its inputs."""

    inputs: Sequence[str | None]
    outputs: Sequence[str]
    nodes: tuple[Node, ...]


@dataclass
class Use:
    """How much of a tensor must have a value: all of it, or positions along a dimension, as bits of a number."""

    whole: bool = False
    along: dict[int, int] = field(default_factory=dict)

    def everything(self, shape: Sequence[int]) -> bool:
        return self.whole or any(at == (1 << shape[d]) - 1 for d, at in self.along.items())

    def join(self, other: Use) -> None:
        self.whole |= other.whole
        for d, at in other.along.items():
            self.along[d] = self.along.get(d, 0) | at


class Strict:
    """Of every op of a program, the nodes that must have a value, and which of its outputs must."""

    def __init__(self, wanted: Iterable[str], ops: Sequence[Step]):
        self.nodes: list[frozenset[int]] = [frozenset()] * len(ops)
        self.outputs: list[tuple[bool, ...]] = [()] * len(ops)
        self.tensors: set[str] = set()
        self._known: dict[tuple[int, tuple[bool, ...]], tuple[frozenset[int], dict[int, Use]]] = {}
        uses: dict[str, Use] = {t: Use(whole=True) for t in wanted}
        for n in range(len(ops) - 1, -1, -1):
            op = ops[n]
            asked = tuple(t in uses and uses[t].everything(x.shape) for t, x in zip(op.outputs, op.nodes, strict=True))
            self.outputs[n] = asked
            self.tensors |= {t for t, a in zip(op.outputs, asked, strict=True) if a}
            self.nodes[n], given = self._within(op.nodes, asked)
            for i, use in given.items():
                uses.setdefault(str(op.inputs[i]), Use()).join(use)

    def _within(self, outputs: tuple[Node, ...], asked: tuple[bool, ...]) -> tuple[frozenset[int], dict[int, Use]]:
        """The nodes of an op that must have a value if these outputs must, and what of its inputs must."""
        key = (id(outputs), asked)  # whoever asks keeps them
        if key not in self._known:
            uses: dict[int, Use] = {}
            for o, a in zip(outputs, asked, strict=True):
                if a:
                    uses[id(o)] = Use(whole=True)
            found: set[int] = set()
            given: dict[int, Use] = {}
            for node in reversed(topological(outputs)):
                if id(node) not in uses:
                    continue
                if node.prim == "input":
                    given[node.attrs[0]] = uses[id(node)]
                elif uses[id(node)].everything(node.shape):
                    found.add(id(node))
                    for arg, use in _arguments(node):
                        uses.setdefault(id(arg), Use()).join(use)
            self._known[key] = frozenset(found), given
        return self._known[key]


def _arguments(node: Node) -> list[tuple[Node, Use]]:
    """What of a node's arguments must have a value if the node must."""
    if 0 in node.shape:
        return []
    match node.prim:
        case "contract" if any(0 in a.shape for a in node.args):  # a sum of nothing
            return []
        case "select":  # the branch that is not taken does not matter
            return [(node.args[0], Use(whole=True))]
        case "gather":  # nor do elements that are not looked up
            return [(node.args[1], Use(whole=True))]
        case "slice":
            d, start, step = node.attrs
            n, apart = node.shape[d], abs(step)
            bits = ((1 << (n * apart)) - 1) // ((1 << apart) - 1)  # one in every `apart`, n times
            return [(node.args[0], Use(along={d: bits << min(start, start + step * (n - 1)) if n else 0}))]
    return [(a, Use(whole=True)) for a in node.args]
