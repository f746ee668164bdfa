"""Sites by statement: an op with its own backward, and all that one line of source makes, for every parameter, layer and micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from trainverify.explain.cause import COLLECTIVES, base_name
from trainverify.explain.repair import Site
from trainverify.explain.replay import Graph, Node
from trainverify.explain.siblings import numbers
from trainverify.graph.program import Op

Fits = Callable[[Op], bool]


class Statements:
    """One kind of op of one line: forward, backward, both; on one tensor, on those of one number, on all."""

    def __init__(self, graph: Graph):
        self.graph = graph

    @cached_property
    def sites(self) -> dict[Site, tuple[int, int]]:
        """With how many tensors each has, and where its line begins."""
        index = {(c, o): i for c, k in enumerate(self.graph.small.classes) for i, op in enumerate(k.program.ops) for o in op.outputs}
        found: dict[Site, tuple[int, int]] = {}
        for nodes in self._lines:
            for site in self._parts(nodes):
                found.setdefault(tuple(site), (len({t for _, t in site}), min(index[n] for n in nodes)))
        return found

    def of(self, fits: Fits, last: bool = False) -> list[Site]:
        """Those made by ops of one sort, few tensors before many; or those of the last line before those of others."""
        some = [s for s in self.sites if all(fits(self.graph.ops[n]) for n in s)]
        return sorted(some, key=lambda s: (-self.sites[s][1], self.sites[s][0]) if last else self.sites[s])

    @cached_property
    def _lines(self) -> list[list[Node]]:
        found: dict[tuple[object, ...], list[Node]] = {}
        for node in dict.fromkeys(self.graph.nodes):
            op = self.graph.ops.get(node)
            if op is not None:
                family = "collective" if op.name in COLLECTIVES else base_name(op)
                key = (op.source, family) if op.source is not None else (node[1], family)
                found.setdefault(key, []).append(node)
        return list(found.values())

    def _parts(self, nodes: list[Node]) -> list[list[Node]]:
        """All tensors of a line, and those of one op, one number, one phase, or with the same attributes."""
        groups: dict[tuple[object, ...], list[Node]] = {}
        for node in nodes:
            op = self.graph.ops[node]
            found = numbers(node[1])
            keys: list[tuple[object, ...]] = [
                ("name", node[1]),
                ("op", self._forward(op)),
                ("all",),
                ("made", op.name),
                ("said", op.name, op.attrs),
            ]
            keys += [("number", i, n) for i, n in enumerate(found)]
            for key in keys:
                groups.setdefault(key, []).append(node)
                groups.setdefault((*key, op.phase == "backward"), []).append(node)
        return list(groups.values())

    @staticmethod
    def _forward(op: Op) -> tuple[str | None, ...]:
        """What an op takes; of a gradient, what the forward op takes."""
        return op.inputs[: -len(op.get("given", (0,)))] if op.name.endswith(".grad") else op.inputs
