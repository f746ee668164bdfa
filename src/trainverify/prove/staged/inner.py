"""Logical ops that make several tensors, some of them on the way to others: a batch norm has its mean and variance as outputs.

What such an op makes on the way, and what later ops make once more in the same way from the same tensors (its gradient does), is the
tensor that it is. Otherwise a plan that has a mean of its own would have to be compared with one that is written out everywhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from trainverify.evaluate.small import Step
from trainverify.primitives.node import Node, topological


@dataclass(frozen=True)
class Piece:
    """Some outputs of an op, from its inputs and from tensors that were made before."""

    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]


class Inner:
    """Nodes of a program by number, one for nodes that do the same to the same tensors; steps in the order of the program."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._made: dict[str, int] = {}  # tensor → number of the node that makes it
        self._tensors: dict[int, str] = {}  # number → the tensor that is made on the way

    def pieces(self, step: Step) -> list[Piece]:
        """The op, in pieces that use what it makes on the way; as it is, if there is no such thing."""
        nodes = topological(step.nodes)
        numbers = self._number(step, nodes)
        inside = {numbers[a] for n in nodes for a in n.args if a.prim != "input"}
        for o, node in zip(step.outputs, step.nodes, strict=True):
            self._made[o] = numbers[node]
            if numbers[node] in inside and node.kind == "real" and node.prim in ("map", "contract", "reduce"):
                self._tensors.setdefault(numbers[node], o)
        if inside.isdisjoint(self._tensors):
            return [Piece(step.inputs, step.outputs, step.nodes)]
        at: dict[int, int] = {}  # number → where it is made first, as several nodes may have it
        for k, n in enumerate(nodes):
            at.setdefault(numbers[n], k)
        order = sorted(zip(step.outputs, step.nodes, strict=True), key=lambda made: at[numbers[made[1]]])
        return [self._piece(step, o, node, numbers) for o, node in order]

    def _number(self, step: Step, nodes: list[Node]) -> dict[Node, int]:
        found: dict[Node, int] = {}
        for n in nodes:
            key: Hashable
            if n.prim == "input":
                name = step.inputs[n.attrs[0]]
                known = None if name is None else self._made.get(name)
                key = (n.prim, name) if known is None else None
            else:
                known, key = None, (n.prim, repr(n.attrs), n.shape, n.kind, tuple([found[a] for a in n.args]))
            found[n] = self._numbers.setdefault(key, len(self._numbers)) if known is None else known
        return found

    def _piece(self, step: Step, output: str, top: Node, numbers: dict[Node, int]) -> Piece:
        inputs: list[str | None] = list(step.inputs)
        done: dict[Node, Node] = {}

        def rebuilt(node: Node) -> Node:
            if node not in done:
                done[node] = self._rebuilt(node, [rebuilt(a) for a in node.args])
            return done[node]

        def using(node: Node) -> Iterator[Node]:
            """Nodes that are tensors made before, as far as nothing in front of them is."""
            stack, seen = list(node.args), {node}
            while stack:
                n = stack.pop()
                if n in seen:
                    continue
                seen.add(n)
                if n.prim != "input" and numbers[n] in self._tensors:
                    yield n
                else:
                    stack += n.args

        for n in using(top):
            done[n] = Node("input", (), (len(inputs),), n.shape, n.kind)
            inputs.append(self._tensors[numbers[n]])
        made = rebuilt(top)
        used = {n.attrs[0] for n in topological((made,)) if n.prim == "input"}
        return Piece(tuple([name if k in used else None for k, name in enumerate(inputs)]), (output,), (made,))

    @staticmethod
    def _rebuilt(node: Node, args: list[Node]) -> Node:
        same = all(a is b for a, b in zip(node.args, args, strict=True))
        return node if same else Node(node.prim, tuple(args), node.attrs, node.shape, node.kind)
