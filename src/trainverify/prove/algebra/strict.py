"""What of the logical program must have a value for its outputs to have one, whatever the inputs are. Trusted.

A quotient in a branch that may not be taken, or of which only some elements are used, need not have a value where the
outputs have one: the conditions of such ops are not assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainverify.graph.program import Program
from trainverify.ops.table import Lowered
from trainverify.primitives.node import Node, topological


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
    """Of every op, the nodes that must have a value, and which of its outputs must."""

    def __init__(self, program: Program, lowered: Sequence[Lowered]):
        self.nodes: list[frozenset[int]] = [frozenset()] * len(lowered)
        self.outputs: list[tuple[bool, ...]] = [()] * len(lowered)
        self._known: dict[tuple[int, tuple[bool, ...]], tuple[frozenset[int], dict[int, Use]]] = {}
        uses: dict[str, Use] = {o.tensor: Use(whole=True) for o in program.outputs}
        for n in range(len(lowered) - 1, -1, -1):
            op = program.ops[n]
            asked = tuple(t in uses and uses[t].everything(program.tensors[t].shape) for t in op.outputs)
            self.outputs[n] = asked
            self.nodes[n], given = self._within(lowered[n], asked)
            for i, use in given.items():
                uses.setdefault(str(op.inputs[i]), Use()).join(use)

    def _within(self, lowered: Lowered, asked: tuple[bool, ...]) -> tuple[frozenset[int], dict[int, Use]]:
        """The nodes of an op that must have a value if these outputs must, and what of its inputs must."""
        key = (id(lowered), asked)  # the system keeps it
        if key not in self._known:
            uses: dict[int, Use] = {id(o): Use(whole=True) for o, a in zip(lowered.outputs, asked, strict=True) if a}
            found: set[int] = set()
            given: dict[int, Use] = {}
            for node in reversed(topological(lowered.outputs)):
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
    match node.prim:
        case "select":  # the branch that is not taken does not matter
            return [(node.args[0], Use(whole=True))]
        case "gather":  # nor do elements that are not looked up
            return [(node.args[1], Use(whole=True))]
        case "slice":
            d, start, step = node.attrs
            return [(node.args[0], Use(along={d: sum(1 << (start + step * i) for i in range(node.shape[d]))}))]
    return [(a, Use(whole=True)) for a in node.args]
