"""Sites by the user's line: a mistake in one line of source code is in every op that the line makes, in all layers and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from trainverify.explain.cause import COLLECTIVES
from trainverify.explain.likes import Likes
from trainverify.explain.repair import Repair, Site
from trainverify.explain.replay import Graph, Node
from trainverify.graph.program import Source


class ByLine:
    """Tensors that ops of one line make."""

    def __init__(self, graph: Graph, likes: Likes):
        self.graph = graph
        self.likes = likes

    @cached_property
    def _together(self) -> dict[tuple[object, ...], list[Node]]:
        """One kind of op of one line, with any results, then with results of one shape; on all ranks, or on those of one program."""
        found: dict[tuple[object, ...], list[Node]] = {}
        for node in self._nodes:
            op = self.graph.ops[node]
            what = (op.source, op.name)
            callers = () if op.source is None else op.source.callers
            shape = self.graph.small.local_shapes[node[0]][node[1]]
            for more in ((), (op.phase,), (op.phase, op.attrs, shape), (op.phase, op.attrs, shape, callers)):
                found.setdefault((*what, *more), []).append(node)
                found.setdefault((*what, *more, node[0]), []).append(node)
        return found

    @cached_property
    def sites(self) -> list[Site]:
        return self._several(self._together)

    @cached_property
    def rows(self) -> list[Site]:
        """The others, whole: what a line does to a tensor again and again."""
        rows = dict.fromkeys(tuple(nodes) for nodes in self._together.values())
        return [s for s in rows if any((c, str(i)) in set(s) for c, t in s for i in self.graph.ops[c, t].inputs)]

    @cached_property
    def collectives(self) -> list[Site]:
        """Collectives of one kind and line, then those that say the same anywhere."""
        found: dict[tuple[object, ...], list[Node]] = {}
        for node in self._nodes:
            op = self.graph.ops[node]
            if op.name in COLLECTIVES:
                found.setdefault((0, op.source, op.name), []).append(node)
                found.setdefault((0, op.source, op.name, op.source.callers if op.source else ()), []).append(node)
        for node in self._nodes:
            op = self.graph.ops[node]
            if op.name in COLLECTIVES:
                found.setdefault((1, op.name, op.attrs), []).append(node)
        return self._several(found)

    def only_here(self, site: Site) -> bool:
        """Whether the logical program runs the line of a site, and does no such thing there."""
        op = self.graph.ops[site[0]]
        there = self._logical.get(op.source, set())
        return bool(there) and (op.name, op.attrs) not in there

    @cached_property
    def _logical(self) -> dict[Source | None, set[tuple[object, ...]]]:
        """What the logical program does in each line."""
        found: dict[Source | None, set[tuple[object, ...]]] = {}
        for op in self.graph.small.logical.ops:
            found.setdefault(op.source, set()).add((op.name, op.attrs))
        return found

    @cached_property
    def cuts(self) -> list[Site]:
        """Different parts of one tensor that one line takes."""
        found: dict[tuple[object, ...], list[Node]] = {}
        for node in self._nodes:
            op = self.graph.ops[node]
            if op.name == "slice":
                found.setdefault((op.source, node[0], op.inputs), []).append(node)
        return [tuple(nodes) for nodes in found.values() if len({self.graph.ops[n].attrs for n in nodes}) > 1]

    @cached_property
    def known(self) -> bool:
        """Whether lines are known with those that led there, as of captured code."""
        return any(op.source is not None and op.source.callers for op in self.graph.ops.values())

    @cached_property
    def _nodes(self) -> list[Node]:
        nodes = dict.fromkeys(self.graph.nodes)
        return [n for n in nodes if (op := self.graph.ops.get(n)) is not None and op.source is not None]

    def _several(self, found: Mapping[tuple[object, ...], list[Node]]) -> list[Site]:
        """Sites of which no tensor is made from another one: of ops in a row, only one is the mistake. Of rows, the last ones come last."""
        rows: dict[Site, None] = {}
        sites: dict[Site, None] = {}
        for nodes in found.values():
            read = {(c, str(i)) for c, t in nodes for i in self.graph.ops[c, t].inputs}
            last = tuple(n for n in nodes if n not in read)
            (rows if len(last) < len(nodes) else sites)[last] = None
        return list(sites | rows)

    def unlike_other_ranks(self) -> Iterator[dict[Site, Repair]]:
        """All that a line does otherwise than on ranks of another program."""
        classes = range(len(self.graph.small.classes))
        for c in classes:
            for d in classes:
                if c == d:
                    continue
                lines: dict[Source | None, dict[Site, Repair]] = {}
                for node in self._nodes:
                    if node[0] == c and (d, node[1]) in self.graph.ops:
                        for _, repair in self.likes.unlike((node,), [(d, node[1])]):
                            lines.setdefault(self.graph.ops[node].source, {}).setdefault((node,), repair)
                yield from lines.values()
