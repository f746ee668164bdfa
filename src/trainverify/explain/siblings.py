"""Tensors that play the same part: in other micro-batches, layers and stages, by names that differ in numbers only."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cache, cached_property

from trainverify.explain.replay import Graph, Node
from trainverify.graph.program import Op

MANY = 64  # siblings, of which only the nearest are looked at
_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"[^\W\d]+")


def pattern(name: str) -> str:
    return _NUMBER.sub("#", name)


@cache
def numbers(name: str) -> tuple[str, ...]:
    return tuple(_NUMBER.findall(name))


def first_number(name: str) -> str:
    """A name up to the end of its first number: a micro-batch, if it begins with one."""
    return name[: found.end()] if (found := re.search(r"\d+", name)) else name


def renumbered(sibling: str, tensor: str, given: str) -> str:
    """`given` with the numbers changed that tell `tensor` from its sibling: those after the same word, else in the same place."""
    old, new, found = numbers(sibling), numbers(tensor), list(numbers(given))
    before, words = _words(sibling), _words(given)
    kept = {w for w, a, b in zip(before, old, new, strict=False) if a == b}
    for i, (a, b) in enumerate(zip(old, new, strict=False)):
        if a == b:
            continue
        at = [j for j, w in enumerate(words) if w == before[i] and found[j] == a]
        if not at and i < len(found) and found[i] == a and words[i] not in kept and before[i] not in words:
            at = [i]
        for j in at[:1]:
            found[j] = b
    rest = iter(found)
    return _NUMBER.sub(lambda _: next(rest), given)


def _words(name: str) -> list[str]:
    """The word before each number of a name."""
    return [(_WORD.findall(text) or [""])[-1] for text in _NUMBER.split(name)[:-1]]


def same_text(a: Op, b: Op) -> bool:
    """Whether two ops do the same to what they are given."""
    return (a.name, len(a.inputs)) == (b.name, len(b.inputs)) and (a.attrs == b.attrs or _told(a) == _told(b))


def _told(op: Op) -> list[tuple[str, object]]:
    """Attributes but for names that a message goes by."""
    return [(k, v) for k, v in op.attrs if k not in ("batch", "tag")]


class Siblings:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.shapes = graph.small.local_shapes
        self.kin: dict[tuple[str, tuple[int, ...]], list[Node]] = {}
        self.near: dict[tuple[str, tuple[int, ...], int, tuple[str, ...]], list[Node]] = {}  # which differ in one number only
        for c, name in dict.fromkeys(graph.nodes):
            key, found = (pattern(name), self.shapes[c][name]), numbers(name)
            self.kin.setdefault(key, []).append((c, name))
            for i in range(len(found)):
                self.near.setdefault((*key, i, found[:i] + found[i + 1 :]), []).append((c, name))

    def of(self, node: Node) -> list[Node]:
        """The same name in other classes of ranks first, then other numbers in the same class, then the rest; the nearest first."""
        c, name = node
        mine = numbers(name)
        key = (pattern(name), self.shapes[c][name])
        found = self.kin[key]
        if len(found) > MANY:
            found = [n for i in range(len(mine)) for n in self.near[*key, i, mine[:i] + mine[i + 1 :]]]

        def far(n: Node) -> tuple[bool, bool, int, list[bool]]:
            other = [a != b for a, b in zip(mine[::-1], numbers(n[1])[::-1], strict=True)]
            return n[1] != name, n[0] != c, sum(other), other

        return sorted((n for n in dict.fromkeys(found) if n != node), key=far)

    def twins(self, node: Node) -> list[Node]:
        """The same class and name but for the first number: other micro-batches."""
        c, name = node
        mine = numbers(name)
        found = self.near[pattern(name), self.shapes[c][name], 0, mine[1:]] if mine else []
        return [n for n in found if n[0] == c and n != node]

    def cousins(self, node: Node) -> list[Node]:
        """The same class and name but for one word: of another parameter, say."""
        c, name = node
        words = name.split(".")
        found = (self._families.get((c, i, *words[:i], *words[i + 1 :]), ()) for i in range(len(words)))
        return [(c, other) for names in found for other in names if other != name]

    @cached_property
    def _families(self) -> dict[tuple[int | str, ...], list[str]]:
        found: dict[tuple[int | str, ...], list[str]] = {}
        for c, name in dict.fromkeys(self.graph.nodes):
            words = name.split(".")
            for i in range(len(words)):
                found.setdefault((c, i, *words[:i], *words[i + 1 :]), []).append(name)
        return found

    def mapped(self, sibling: str, tensor: str, given: str, own: tuple[str | None, ...], c: int) -> str | None:
        """What is to `tensor` what `given` is to its sibling, among the tensors of a class; first among `own`."""
        shapes = self.shapes[c]
        for name in own:
            if name is not None and pattern(name) == pattern(given):
                return name
        found = renumbered(sibling, tensor, given)
        return found if found in shapes else None

    @cache  # noqa: B019  a search ends with its graph
    def batch(self, node: Node) -> int:
        """How many elements of the batch a tensor is made from: of inputs, or of what is cut out of them."""
        program = self.graph.small.classes[node[0]].program
        behind = {t for c, t in self.graph.marks({node: 1}) if c == node[0]}
        cut = {o: str(op.inputs[0]) for op in program.ops if op.name == "slice" and op.inputs[0] in program.inputs for o in op.outputs}
        pieces = {t for t in cut if t in behind}
        whole = {t for t in program.inputs if t in behind} - {cut[t] for t in pieces}
        return sum(math.prod(self.shapes[node[0]][t]) for t in pieces | whole)

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
