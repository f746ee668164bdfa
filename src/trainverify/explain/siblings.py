"""Tensors that play the same part: in other micro-batches, layers and stages, by names that differ in numbers only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property

from trainverify.explain.replay import Graph, Node
from trainverify.graph.program import Op

_NUMBER = re.compile(r"\d+")


def pattern(name: str) -> str:
    return _NUMBER.sub("#", name)


def numbers(name: str) -> tuple[str, ...]:
    return tuple(_NUMBER.findall(name))


def same_text(a: Op, b: Op) -> bool:
    """Whether two ops do the same to what they are given."""
    return (a.name, a.attrs, len(a.inputs)) == (b.name, b.attrs, len(b.inputs))


class Siblings:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.shapes = graph.small.local_shapes
        self.kin: dict[tuple[str, tuple[int, ...]], list[Node]] = {}
        for c, name in graph.nodes:
            self.kin.setdefault((pattern(name), self.shapes[c][name]), []).append((c, name))

    def of(self, node: Node) -> list[Node]:
        """The same name in other classes of ranks first, then other numbers in the same class, then the rest."""
        c, name = node
        found = [n for n in self.kin[pattern(name), self.shapes[c][name]] if n != node]
        return sorted(found, key=lambda n: (n[1] != name, n[0] != c))

    def twins(self, node: Node) -> list[Node]:
        """The same class and name but for the first number: other micro-batches."""
        c, name = node
        rest = numbers(name)[1:]
        return [n for n in self.of(node) if n[0] == c and numbers(n[1])[1:] == rest]

    def mapped(self, sibling: str, tensor: str, given: str, own: tuple[str | None, ...], c: int) -> str | None:
        """What is to `tensor` what `given` is to its sibling, among the tensors of a class."""
        shapes = self.shapes[c]
        for name in own:
            if name is not None and pattern(name) == pattern(given):
                return name
        return self.renumbered(sibling, tensor, given) if self.renumbered(sibling, tensor, given) in shapes else None

    @staticmethod
    def renumbered(sibling: str, tensor: str, given: str) -> str:
        """`given` with the numbers changed that tell `tensor` from its sibling."""
        old, new, found = numbers(sibling), numbers(tensor), list(numbers(given))
        for i, (a, b) in enumerate(zip(old, new, strict=False)):
            if a != b and i < len(found) and found[i] == a:
                found[i] = b
        rest = iter(found)
        return _NUMBER.sub(lambda _: next(rest), given)

    @cached_property
    def levels(self) -> list[list[tuple[Node, ...]]]:
        """Sites of one mistake: one tensor, also on several classes of ranks; then one number running; everything of a pattern."""
        nodes = list(dict.fromkeys(self.graph.nodes))
        names: dict[str, list[Node]] = {}
        running: dict[tuple[str, int, tuple[str, ...]], list[Node]] = {}
        patterns: dict[str, list[Node]] = {}
        for c, name in nodes:
            names.setdefault(name, []).append((c, name))
            patterns.setdefault(pattern(name), []).append((c, name))
            found = numbers(name)
            for i in range(len(found)):
                running.setdefault((pattern(name), i, found[:i] + found[i + 1 :]), []).append((c, name))
        singles: list[tuple[Node, ...]] = [(n,) for n in nodes]
        singles += [t.makes for t in self.graph.tasks if t.class_index >= 0 and len(t.makes) > 1]
        result = [list(dict.fromkeys(singles))]
        seen = set(singles)
        for groups in (names.values(), running.values(), patterns.values()):
            level = []
            for g in groups:
                site = tuple(g)
                if len(site) > 1 and site not in seen:
                    seen.add(site)
                    level.append(site)
            result.append(level)
        alone, named, *rest = result
        joined = sorted([*alone, *named], key=lambda site: max(self.graph.position[n] for n in site))
        return [joined, *rest]

    def pairs(self, c: int, name: str) -> Iterator[str]:
        """Later siblings in the same class."""
        at = self.graph.position
        for d, other in self.kin[pattern(name), self.shapes[c][name]]:
            if d == c and at[d, other] > at[c, name]:
                yield other
