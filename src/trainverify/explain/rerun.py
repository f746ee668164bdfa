"""An op run again on other inputs: what a repair of what it takes leaves in its results."""

from __future__ import annotations

from collections.abc import Mapping

from trainverify.domains.arrays import Array
from trainverify.evaluate.small import Step
from trainverify.explain.likes import Likes
from trainverify.explain.repair import Read, arriving, running
from trainverify.explain.replay import Edit, Graph, Node


class Rerun:
    def __init__(self, graph: Graph, likes: Likes):
        self.graph = graph
        self.likes = likes

    def edit(self, node: Node, swaps: Mapping[Node, Edit]) -> Edit | None:
        """The op of a tensor with some of its inputs replaced; None if it takes none of them, or is not one op on all ranks."""
        tasks = [self.graph.tasks[i] for i in self.graph.makers.get(node, ())]
        given = dict.fromkeys(n for t in tasks for n in t.reads)
        if not any(n in swaps for n in given):
            return None
        steps = [t.what for t in tasks if isinstance(t.what, Step)]
        if steps and len(steps) == len(tasks):
            c, op = node[0], steps[0]
            nodes = next(self.likes.nodes_for(c, c, steps), None)
            make = None if nodes is None else running(nodes, op.outputs.index(node[1]), c, op.inputs)
        else:
            rows = self.likes.arrivals(node)
            make = None if rows is None else arriving(rows)
        if make is None:
            return None
        made = make
        reads = tuple(dict.fromkeys(m for n in given for m in (swaps[n].reads if n in swaps else (n,))))

        def changed(read: Read) -> Array:
            return made(lambda n: swaps[n].make(read) if n in swaps else read(n))

        return Edit(reads, changed)

    def inputs(self, node: Node) -> list[Node]:
        """What the op of a tensor takes, on all ranks that take part."""
        return list(dict.fromkeys(n for i in self.graph.makers.get(node, ()) for n in self.graph.tasks[i].reads))
