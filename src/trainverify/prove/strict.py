"""Which nodes of the logical program are finite wherever its outputs are, for all inputs. Trusted.

The conditions of these nodes are assumed. A quotient in a branch that may not be taken, or of which only some elements are used,
need not have a value where the outputs have one, so its condition is not assumed. Nor is that of a subexpression that may be
infinite: exp(log 0) is 0. But a root of a negative number is no number, and no function makes a number of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from trainverify.primitives.node import Node, topological
from trainverify.primitives.scalars import is_root
from trainverify.prove.definedness import kept_arguments, sees

NUMBER: Final = 1  # or infinite
FINITE: Final = 2


class Step(NamedTuple):
    """An op: what its outputs are, over its inputs."""

    inputs: Sequence[str | None]
    outputs: Sequence[str]
    nodes: tuple[Node, ...]


@dataclass
class Use:
    """How much of a tensor must be finite: all of it, or positions along a dimension, as bits of a number; whether all of it must be
    numbers, finite or not; and whether some use of it may be finite where it is infinite."""

    whole: bool = False
    along: dict[int, int] = field(default_factory=dict)
    number: bool = False
    infinite: bool = False

    def level(self, shape: Sequence[int]) -> int:
        if self.whole or any(at == (1 << shape[d]) - 1 for d, at in self.along.items()):
            return FINITE
        return NUMBER if self.number else 0

    def join(self, other: Use) -> None:
        self.whole |= other.whole
        self.number |= other.number
        self.infinite |= other.infinite
        for d, at in other.along.items():
            self.along[d] = self.along.get(d, 0) | at


Asked = tuple[tuple[int, bool], ...]  # of the outputs of an op: what they must be, and whether they may be infinite
Within = tuple[frozenset[Node], frozenset[Node], dict[int, Use]]


class Strict:
    """For every op of a program: the nodes that must be finite, the roots that must be numbers, and what its outputs must be."""

    def __init__(self, wanted: Iterable[str], ops: Sequence[Step]):
        self.nodes: list[frozenset[Node]] = [frozenset()] * len(ops)
        self.roots: list[frozenset[Node]] = [frozenset()] * len(ops)
        self.outputs: list[Asked] = [()] * len(ops)
        self.tensors: set[str] = set()  # that must be finite
        self.infinite: set[str] = set()  # that may be infinite where the outputs are not
        self._known: dict[tuple[tuple[Node, ...], Asked], Within] = {}
        uses: dict[str, Use] = {t: Use(whole=True) for t in wanted}
        for n in range(len(ops) - 1, -1, -1):
            op = ops[n]
            mine = [uses.get(t, Use()) for t in op.outputs]
            self.outputs[n] = asked = tuple([(u.level(x.shape), u.infinite) for u, x in zip(mine, op.nodes, strict=True)])
            self.tensors |= {t for t, (level, _) in zip(op.outputs, asked, strict=True) if level == FINITE}
            self.infinite |= {t for t, (level, infinite) in zip(op.outputs, asked, strict=True) if level != FINITE and infinite}
            self.nodes[n], self.roots[n], given = self._within(op.nodes, asked)
            for i, use in given.items():
                uses.setdefault(str(op.inputs[i]), Use()).join(use)

    def _within(self, outputs: tuple[Node, ...], asked: Asked) -> Within:
        """The nodes of an op that must have a value if these outputs must, and what of its inputs must."""
        key = (outputs, asked)
        if key not in self._known:
            uses: dict[Node, Use] = {}
            for o, (level, infinite) in zip(outputs, asked, strict=True):
                uses.setdefault(o, Use()).join(Use(whole=level == FINITE, number=level == NUMBER, infinite=infinite))
            found: set[Node] = set()
            roots: set[Node] = set()
            given: dict[int, Use] = {}
            for node in reversed(topological(outputs)):
                use = uses.get(node, Use())
                level = use.level(node.shape)
                if node.prim == "input":
                    given[node.attrs[0]] = use
                    continue
                if level == FINITE and 0 not in node.shape:
                    found.add(node)
                elif level == NUMBER and node.prim == "map" and is_root(*node.attrs):
                    roots.add(node)
                kept = _kept(node)
                for k, (arg, part) in enumerate(zip(node.args, _arguments(node, level, kept), strict=True)):
                    part.infinite = use.infinite or k not in kept
                    uses.setdefault(arg, Use()).join(part)
            self._known[key] = frozenset(found), frozenset(roots), given
        return self._known[key]


def _kept(node: Node) -> Sequence[int]:
    """Those of a node. Integers and truth values always are."""
    kept = kept_arguments(node.prim, node.attrs, len(node.args))
    return [k for k, a in enumerate(node.args) if k in kept or a.kind != "real"]


def _arguments(node: Node, level: int, kept: Sequence[int]) -> list[Use]:
    """What of a node's arguments must be finite or numbers if the node must."""
    nothing = [Use() for _ in node.args]
    if 0 in node.shape or not level:
        return nothing
    match node.prim:
        case "contract" if any(0 in a.shape for a in node.args):  # a sum of nothing
            return nothing
        case "select":  # the branch that is not taken does not matter
            return [Use(whole=True), *nothing[1:]]
        case "gather":  # nor do elements that are not looked up
            return [Use(), Use(whole=True)]
        case "slice":
            d, start, step = node.attrs
            n, stride = node.shape[d], abs(step)
            bits = ((1 << (n * stride)) - 1) // ((1 << stride) - 1)  # one in every `stride`, n times
            return [Use(along={d: bits << min(start, start + step * (n - 1))} if level == FINITE else {})]
        case "window" if level == FINITE:  # nor do those between windows
            d, how = node.attrs
            return [Use(along={d: how.seen()})]
        case "overlap" if level == FINITE:  # nor do elements of windows that lie outside
            d, how = node.attrs
            return [Use(along={d: sum(1 << p for p in how.inside())})]
        case "window" | "overlap":
            return nothing
    rows = [picks(a) for a in node.args] if node.prim == "contract" or node.attrs[:1] == ("mul",) else []
    if any(rows):  # elements that are not looked up are not multiplied by 0
        return [Use(whole=level == FINITE, number=level == NUMBER) if picks else Use() for picks in rows]
    found = []
    for k, a in enumerate(node.args):
        whole = k in kept and (level == FINITE or a.kind != "real")
        found.append(Use(whole=whole, number=not whole and seen(node)))
    return found


def picks(node: Node) -> bool:
    """Whether something is 0 but for elements that an op looks up by their positions."""
    if node.prim in ("contract", "reshape", "transpose", "broadcast") or node.attrs[:1] == ("mul",):
        return any(picks(a) for a in node.args)
    return node.prim == "one_hot"


def seen(node: Node) -> bool:
    """Whether a node is no number if an argument is none. Positions say nothing of what they look at."""
    return node.kind == "real" and sees(node.prim, node.attrs)
