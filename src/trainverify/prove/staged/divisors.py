"""Expressions that the logical program divides by, or takes roots or logarithms of, for any element: none is 0 where it is defined.

A stage may assume that, also for elements that it does not show. Only divisors made of symbols of the plan's side are collected: other
tokens' sums are left out, so that the stages of all tokens are isomorphic.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import cached_property
from typing import Any, Final

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.primitives.node import topological
from trainverify.prove.definedness import MAY_FAIL
from trainverify.prove.staged.closures import Closures, Divisor
from trainverify.prove.staged.graphs import LARGE, LOGICAL, Call, Graph, Place
from trainverify.prove.staged.records import Granted, Part, Stage
from trainverify.prove.staged.terms import Term

MANY: Final = 10_000  # elements that an op makes, of which all are looked at
Leaves = tuple[Array, Array]  # rows of input and position, and the number of the term that each is in


class Divisors:
    """Of the logical sides of stages."""

    def __init__(self, graph: Graph, closures: Closures, strict: Collection[str]):
        self.graph = graph
        self.closures = closures
        self.strict = strict  # logical tensors that have values wherever the logical program has
        self._terms: dict[tuple[int, tuple[bool, ...]], tuple[list[tuple[Any, Term]], Leaves]] = {}  # by signature and what has values
        self._leaves: dict[tuple[int, int], Leaves] = {}  # of the elements of an output, by signature and output

    def of(self, stage: Stage) -> list[Divisor]:
        """Everything that the logical side divides by, and ops beside it do, that is made of what the plan's side is made of."""
        if not self.asked(stage):
            return []
        symbols = self.closures.of(stage.plan, stage.goal.wanted()).symbols(stage.plan)
        symbols += [ids for part in stage.defined.values() for ids, _ in part.leaves.values()]
        spoken = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *symbols]))
        known: dict[Place, Array] = {}
        found: list[Divisor] = []
        for call in (*stage.logical.calls, *self.beside(stage)):
            if may_fail(call) and sum(math.prod(self.graph.shape(o)) for o in call.outputs) <= MANY:
                terms, leaves = self._divisors(call)
                fine = self._all(stage.logical, call, leaves, len(terms), spoken, known)
                found += [(call, *term) for term, f in zip(terms, fine.tolist(), strict=True) if f]
        return found

    def granted(self, stage: Stage) -> list[Granted]:
        """What a stage that may use facts can take for not 0, and the symbols that it is made of."""
        if stage.granted is None:
            found = [d for d in self.of(stage) if d[1][0] == "div"] if stage.with_facts else []
            closures = [self.closures.of(stage.logical, {}, [d]).symbols(stage.logical) for d in found]
            symbols = [frozenset(int(i) for ids in c for i in ids.tolist()) for c in closures]
            stage.granted = [(call, term, ids) for (call, _, term), ids in zip(found, symbols, strict=True)]
        return stage.granted

    def asked(self, stage: Stage) -> bool:
        """Whether it matters: where something is compared, or chosen in a stage that may use facts."""
        calls = [c for part in stage.parts() for c in part.calls]
        return any(self.graph.compares(c) or (stage.with_facts and self.graph.chooses(c)) for c in calls)

    def beside(self, stage: Stage) -> list[Call]:
        """For a stage that may use facts, logical ops outside of it that divide, of the same inputs: a forward op beside its gradient."""
        part = stage.logical
        if not stage.with_facts:
            return []
        there = {*part.leaves, *(o for c in part.calls for o in c.outputs)}
        mine = {(c.at, c.row) for c in part.calls}
        users = {(c.at, c.row): c for p in there for c in self._users.get(p, ())}
        return [c for key, c in sorted(users.items()) if key not in mine and all(i is None or i in there for i in c.inputs)]

    @cached_property
    def _users(self) -> dict[Place, list[Call]]:
        """Logical ops that divide, by what they are given."""
        found: dict[Place, list[Call]] = {}
        calls = {(c.at, c.row): c for p, c in self.graph.makers.items() if p[0] == LOGICAL}
        for call in calls.values():
            if may_fail(call):
                for place in {i for i in call.inputs if i is not None}:
                    found.setdefault(place, []).append(call)
        return found

    def _known(self, part: Part, place: Place, spoken: Array, known: dict[Place, Array]) -> Array:
        """Which elements of a tensor of a piece are made of these alone."""
        found = known.get(place)
        if found is None:
            leaf, size = part.leaves.get(place), math.prod(self.graph.shape(place))
            if leaf is not None:
                found = (leaf[0] < 0) | np.isin(leaf[0], spoken)
            elif self.graph.work(place) > LARGE:
                found = np.zeros(size, dtype=bool)
            else:
                call = self.graph.makers[place]
                found = self._all(part, call, self._made(call, call.outputs.index(place)), size, spoken, known)
            known[place] = found
        return found

    def _all(self, part: Part, call: Call, leaves: Leaves, count: int, spoken: Array, known: dict[Place, Array]) -> Array:
        """For each of these terms of a call whether all of its leaves are known."""
        rows, terms = leaves
        bad = np.zeros(len(rows), dtype=bool)
        for n in np.unique(rows[:, 0]).tolist():
            place = call.inputs[n]
            assert place is not None
            here = rows[:, 0] == n
            bad[here] = ~self._known(part, place, spoken, known)[rows[here, 1]]
        return np.asarray(np.bincount(terms[bad], minlength=count) == 0)

    def _divisors(self, call: Call) -> tuple[list[tuple[Any, Term]], Leaves]:
        asked = tuple([o[2] in self.strict for o in call.outputs])
        found = self._terms.get((call.signature, asked))
        if found is None:
            outputs = [o for o, a in zip(call.outputs, asked, strict=True) if a]
            terms = divisors([self.graph.term(o, at) for o in outputs for at in range(math.prod(self.graph.shape(o)))])
            found = self._terms[call.signature, asked] = (terms, self._of_all([t for _, t in terms]))
        return found

    def _made(self, call: Call, output: int) -> Leaves:
        found = self._leaves.get((call.signature, output))
        if found is None:
            place = call.outputs[output]
            every = [self.graph.term(place, at) for at in range(math.prod(self.graph.shape(place)))]
            found = self._leaves[call.signature, output] = self._of_all(every)
        return found

    def _of_all(self, terms: list[Term]) -> Leaves:
        rows = [self.graph.terms.relative(t)[1] for t in terms]
        made = np.concatenate([np.empty((0, 2), dtype=np.int64), *rows])
        return made, np.repeat(np.arange(len(rows)), [len(r) for r in rows])


def divisors(terms: list[Term]) -> list[tuple[Any, Term]]:
    """What terms that have values divide by, or take roots or logarithms of: not in branches, which need not be taken, nor in
    rows that are looked up."""
    found: dict[tuple[Any, Term], None] = {}
    seen = set(terms)
    stack = list(reversed(terms))
    while stack:
        t = stack.pop()
        if t.op == "map" and t.info[0] in MAY_FAIL:
            found[t.info, t.args[-1]] = None
        for a in [t.args[n] for n in t.finite_arguments()]:
            if a not in seen:
                seen.add(a)
                stack.append(a)
    return list(found)


def may_fail(call: Call) -> bool:
    """Whether an op divides, or takes roots or logarithms."""
    return any(n.prim == "map" and n.attrs[0] in MAY_FAIL for n in topological(call.nodes or ()))
