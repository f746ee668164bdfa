"""Elements of the logical program by number, the plan's sources by lineage, and what is known of elements by definition. Trusted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import copy
from functools import cached_property
from typing import Any

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.small import Small
from trainverify.graph.lineage import Layout, region
from trainverify.primitives.node import topological
from trainverify.prove.definedness import FINITE, WILD
from trainverify.prove.staged.closures import Closures
from trainverify.prove.staged.divisors import Divisors
from trainverify.prove.staged.graphs import LOGICAL, NOTHING, Call, Graph, Place, moves_only
from trainverify.prove.staged.records import Part, Stage
from trainverify.prove.staged.signs import leaves_of, tensors, term_state
from trainverify.prove.staged.supports import supports
from trainverify.prove.staged.terms import Term
from trainverify.prove.strict import Step, Strict


class Contradiction(Exception):
    """Lineage that says two things about one element: anything would follow from it."""


class Elements:
    """Of one pair of programs."""

    def __init__(self, graph: Graph, lineage: tuple[Layout, ...]):
        self.graph = graph
        self.small: Small = graph.small
        self.ids: dict[str, Array] = {}  # logical tensor → ids of its elements; a moved element keeps its id
        self.owner: list[str] = []  # id → the logical tensor that it is an element of
        self.start: dict[str, int] = {}  # first id of a tensor that owns its ids
        steps = [Step(s.inputs, s.outputs, s.nodes) for s in self.small.logical_steps]
        self.strict = Strict([o.tensor for o in self.small.logical.outputs], steps)
        self.signs = tensors(self.small, self.strict).tensors
        self.doubtful = {name for name, known in self.signs.items() if known.unsure}
        self._terms: dict[int, dict[Term, int]] = {}  # states of what logical ops make on the way
        self._states: dict[int, int] = {}  # of elements of tensors that are not all numbers
        self._kinds: dict[str, Any] = {}
        self._moves: dict[int, bool] = {}  # by signature
        self._compares: dict[int, bool] = {}
        self.supports: dict[int, frozenset[int]] = {}  # element → those that it vanishes with
        self._number()
        self.count = len(self.owner)
        self.sources = dict(self._lineage(lineage))  # of the plan → ids of their elements
        graph.merge(self.sources)

    def _number(self) -> None:
        position = {place: n for n, place in enumerate(self.graph.order)}
        for n in self.small.logical.sources:
            self._fresh(n)
        for step in self.small.logical_steps:
            if moves_only(step.nodes):
                args = [None if i is None else self.ids[i] for i in step.inputs]
                self.ids.update(zip(step.outputs, NUMERIC.run(step.nodes, args), strict=True))
            else:
                for o in sorted(step.outputs, key=lambda o: position[LOGICAL, 0, o]):
                    self._fresh(o)

    def _fresh(self, name: str) -> None:
        shape = self.small.shapes[name]
        self.start[name] = len(self.owner)
        self.ids[name] = np.arange(math.prod(shape)).reshape(shape) + len(self.owner)
        self.owner += [name] * math.prod(shape)

    def _lineage(self, lineage: tuple[Layout, ...]) -> Iterable[tuple[Place, Array]]:
        small, known = self.small, set(lineage)
        holders: dict[tuple[int, str], list[Layout]] = {}
        for lay, rank in small.parts:
            if lay in known:
                holders.setdefault((rank, lay.local), []).append(lay)
        for c, k in enumerate(small.classes):
            for n in k.program.sources:
                for row, rank in enumerate(k.ranks):
                    local = np.full(small.local_shapes[c][n], NOTHING)
                    for lay in holders.get((rank, n), []):
                        self._hold(local, lay, rank)
                    yield (c, row, n), local

    def _hold(self, local: Array, lay: Layout, rank: int) -> None:
        """What a layout says of a local tensor."""
        whole = self.ids[lay.logical].reshape(-1)
        for part in self.small.parts[lay, rank]:
            if not part.padding:
                target = region(part, local)
                new = whole[self.small.positions(part, lay.logical)].reshape(target.shape)
                if ((target != NOTHING) & (target != new)).any():
                    raise Contradiction(f"{lay} on rank {rank} contradicts another layout of {lay.local}")
                target[...] = new

    # -- where elements are ------------------------------------------------------------------------------------------

    @cached_property
    def numbers(self) -> Array:
        """id → the number of its tensor."""
        numbers = {name: n for n, name in enumerate(self.start)}
        return np.array([numbers[name] for name in self.owner], dtype=np.int64)

    @cached_property
    def names(self) -> list[str]:
        """Logical tensors by number."""
        return list(self.start)

    def inside(self, ids: Array) -> Array:
        """Which of these are logical elements: not scalars of the plan, nor marks such as NOTHING."""
        return (ids >= 0) & (ids < self.count)

    def where(self, i: int) -> tuple[Place, int]:
        """The logical tensor that an element belongs to, and its position there."""
        return (LOGICAL, 0, self.owner[i]), i - self.start[self.owner[i]]

    def owners(self, arrays: Iterable[Array]) -> list[str]:
        """The logical tensors that elements belong to, in the order of the program; what is no logical element belongs to none."""
        found: set[int] = set()
        for ids in arrays:
            found.update(np.unique(self.numbers[ids[self.inside(ids)]]).tolist())
        return [self.names[n] for n in sorted(found)]

    def within(self, ids: Array, name: str) -> Array:
        """Positions of elements in a logical tensor; −1 for those of others."""
        at = ids - self.start[name]
        return np.where((at >= 0) & (at < math.prod(self.small.shapes[name])), at, -1)

    def wanted(self, stage: Stage, i: int) -> tuple[Part, Place, int] | None:
        """Where the logical side of a stage defines an element."""
        if not 0 <= i < self.count:
            return None
        place, at = self.where(i)
        return (stage.logical, place, at) if place in stage.logical else None

    def definition(self, stage: Stage, i: int) -> tuple[Part, Place, int] | None:
        """Where an element is written out that only the plan's side speaks of, if it is one of those."""
        if not stage.defined or not 0 <= i < self.count:
            return None
        place, at = self.where(i)
        return (stage.defined[place[2]], place, at) if place[2] in stage.defined else None

    # -- what is known of them ---------------------------------------------------------------------------------------

    def numbers_only(self, name: str) -> bool:
        """Whether all elements of a logical tensor are numbers wherever the program is defined."""
        return self.signs[name].state == FINITE and name not in self.doubtful

    def infinite(self, ids: Array) -> bool:
        """Whether some of these elements may be infinite where the outputs of the logical program are not."""
        return bool(self._unsure) and not self._unsure.isdisjoint(self.owners([ids]))

    @cached_property
    def _unsure(self) -> set[str]:
        """Logical tensors that may be infinite where the outputs are not."""
        return self.strict.infinite & self.doubtful

    def state(self, i: int) -> int:
        """Whether an element is a number wherever the logical program is defined; the −∞ of a mask is not, and no symbol stands for it."""
        if i >= self.count or self.numbers_only(self.owner[i]):
            return FINITE
        if self.owner[i] in self.doubtful:
            return WILD
        found = self._states.get(i)
        if found is None:
            found = self._states[i] = self._state(*self.where(i))
        return found

    def _state(self, place: Place, at: int) -> int:
        """Of an element that an op of the logical program makes; terms of an op share much."""
        call = self.graph.makers[place]
        inside, term = self._terms.setdefault(call.at, {}), self.graph.term(place, at)
        for leaf in leaves_of(term, inside):
            of, position = self.graph.leaf(call, leaf.info)
            inside[leaf] = self.state(int(self.ids[of[2]].reshape(-1)[position]))
        return term_state(term, inside)

    def symbol_kind(self, i: int) -> Any:
        """What a symbol stands for: (kind, domain)."""
        if i >= self.count:
            return ("real", None)
        name = self.owner[i]
        if name not in self._kinds:
            self._kinds[name] = self._kind(name)
        return self._kinds[name]

    def _kind(self, name: str) -> Any:
        small = self.small
        kind = small.logical.tensors[name].kind
        d = small.domains.get(name) if name in small.logical.sources else None
        if d is not None and d.kind in ("ids", "indicator"):
            return (kind, (d.kind, d.size, d.ignore))
        return (kind, None if self.signs[name].sign is None else (self.signs[name].sign, None, None))

    def watching(self, compared: Iterable[int]) -> Elements:
        """The same, with all elements that vanish with one of these by definition."""
        made = copy(self)
        made.__dict__.pop("supported", None)
        made.supports = supports(self.graph, self.ids, compared)
        return made

    @cached_property
    def supported(self) -> frozenset[int]:
        """Elements with which others vanish."""
        return frozenset().union(*self.supports.values())

    def vanishing(self, numbers: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
        """Which of these elements are 0 wherever which others are, by their numbers."""
        pairs = [(n, numbers.get(other)) for i, n in numbers.items() for other in self.supports.get(i, ())] if self.supports else []
        return tuple(sorted((n, other) for n, other in pairs if other is not None))

    # -- what ops do with them ---------------------------------------------------------------------------------------

    @cached_property
    def closures(self) -> Closures:
        return Closures(self.graph)

    @cached_property
    def divisors(self) -> Divisors:
        return Divisors(self.graph, self.closures, self.strict.tensors)

    def compares(self, call: Call) -> bool:
        """Whether an op says which elements of an input are positive."""
        if call.nodes is None or call.collective:
            return False
        if call.signature not in self._compares:
            less = [n.args for n in topological(call.nodes) if n.prim == "map" and n.attrs[0] == "lt"]
            known = [all(n.prim != "input" for n in topological((a,))) for a, _ in less]
            self._compares[call.signature] = any(k and moves_only((b,)) for k, (_, b) in zip(known, less, strict=True))
        return self._compares[call.signature]

    def only_moves(self, place: Place) -> bool:
        """Whether a tensor has the elements of others, in some order."""
        call = self.graph.makers[place]
        if call.nodes is None:
            return True
        if call.signature not in self._moves:
            self._moves[call.signature] = moves_only(call.nodes)
        return self._moves[call.signature]
