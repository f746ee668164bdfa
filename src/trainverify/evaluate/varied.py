"""Both programs on one point with several values of some scalars: what no scalar goes into is computed once."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.compare import held_locally, suspects
from trainverify.evaluate.flow import Flow, Task, Tensor, logical_tasks, reached, tasks_of
from trainverify.evaluate.run import NotComputed, PlanValues, local_sources
from trainverify.evaluate.small import NotJoined, Small
from trainverify.graph.lineage import Layout
from trainverify.graph.obligations import Obligation

AT_ONCE: Final = 20_000_000  # elements that are evaluated together

Shape = tuple[int, ...]
Gaps = dict[Obligation, float]  # what is not clearly equal, and how far off the worst rank is; inf where the plan has no number


class Varied:
    """Obligations of an evaluation whose steps read scalars of these names, which no tensor has."""

    def __init__(self, small: Small, lineage: tuple[Layout, ...], wanted: Sequence[Obligation], scalars: Collection[str]):
        self.small, self.lineage, self.wanted = small, lineage, wanted
        self.ranks = [len(k.ranks) for k in small.classes]
        outputs = {(0, o.output.tensor) for o in wanted}
        shapes = [{**small.shapes, **dict.fromkeys(scalars, ())}]
        self._logical = _Halves(list(logical_tasks(small)), scalars, [1], shapes, outputs)
        local = [{**s, **dict.fromkeys(scalars, ())} for s in small.local_shapes]
        self._plan = _Halves(list(tasks_of(small)), scalars, self.ranks, local, held_locally(small, wanted))

    @property
    def size(self) -> int:
        """Elements that each value costs."""
        return self._logical.size + self._plan.size

    def at(self, inputs: Mapping[str, Array], values: Sequence[Mapping[str, float]]) -> Iterator[Gaps | None]:
        """What differs for each; None where the logical program has no value."""
        with np.errstate(all="ignore"):
            logical = self._logical.start([{n: v[None] for n, v in inputs.items()}])
            plan = self._plan.start(local_sources(self.small, self.lineage, [inputs], NUMERIC, self._plan.reads))
        if self.small.joined and not self._plan.complete:
            raise NotJoined("ranks of one program wait for each other")
        count = max(1, AT_ONCE // max(self.size, 1))
        for n in range(0, len(values), count):
            some = values[n : n + count]
            with np.errstate(all="ignore"):
                ones = self._logical.finish(logical, some)
                many = self._plan.finish(plan, some)
            for one, ranks in zip(ones, many, strict=True):
                yield self._gaps({n: v[0] for n, v in one.values[0].items()}, ranks)

    def _gaps(self, logical: Mapping[str, Array], plan: PlanValues) -> Gaps | None:
        found: Gaps = {}
        try:
            for s in suspects(self.small, self.wanted, logical, plan)[0]:
                found[s.obligation] = max(s.distance, found.get(s.obligation, 0.0))
        except NotComputed:
            return None
        return found


class _Halves:
    """A program, cut into what no scalar goes into and the rest; rows of a class are ranks."""

    def __init__(
        self,
        tasks: Sequence[Task],
        scalars: Collection[str],
        ranks: Sequence[int],
        shapes: Sequence[Mapping[str, Shape]],
        keep: Collection[Tensor],
    ):
        together = [replace(t, reads=(*t.reads, *t.makes)) for t in tasks]  # all that makes a part of a tensor is computed at once
        varying = reached(together, [(c, n) for c in range(len(ranks)) for n in scalars])
        self.ranks, self.scalars, self.keep = ranks, scalars, keep
        self.later = [t for t in tasks if not varying.isdisjoint(t.makes)]
        self.between = frozenset(x for t in self.later for x in t.reads if x not in varying)
        kept = {*self.between, *(x for x in keep if x not in varying)}
        self._once = Flow([t for t in tasks if varying.isdisjoint(t.makes)], ranks, 1, kept)
        self._flows: dict[int, Flow] = {}
        self.reads = self._once.reads | kept
        copied = [*self.between, *(x for t in self.later for x in t.makes)]
        self.size = sum(math.prod(shapes[c][n]) * ranks[c] for c, n in copied)
        self.complete = self._once.complete and self._flow(1).complete

    def _flow(self, points: int) -> Flow:
        if points not in self._flows:
            self._flows[points] = Flow(self.later, self.ranks, points, self.keep)
        return self._flows[points]

    def start(self, sources: list[dict[str, Array]]) -> PlanValues:
        """What no scalar goes into, on one point."""
        return PlanValues(sources, self._done(self._once.run(sources, NUMERIC), sources))

    def finish(self, start: PlanValues, values: Sequence[Mapping[str, float]]) -> list[PlanValues]:
        """All that is kept, for each of some values of the scalars."""
        made: list[dict[str, Array]] = [{} for _ in self.ranks]
        for c, name in self.between:
            if name in start.values[c]:
                made[c][name] = np.concatenate([start.values[c][name]] * len(values))
        for c, count in enumerate(self.ranks):
            made[c].update({n: np.repeat(np.array([v[n] for v in values]), count) for n in self.scalars})
        partly = self._flow(len(values)).run(made, NUMERIC)
        made = [{n: v for n, v in tensors.items() if (c, n) not in self.between} for c, tensors in enumerate(made)]
        done = [a | b for a, b in zip(start.done, self._done(partly, made), strict=True)]
        found = []
        for i in range(len(values)):
            own = [{n: v[i * count : (i + 1) * count] for n, v in made[c].items()} for c, count in enumerate(self.ranks)]
            found.append(PlanValues([a | b for a, b in zip(start.values, own, strict=True)], done))
        return found

    def _done(self, partly: Sequence[Mapping[str, set[int]]], made: Sequence[Mapping[str, Array]]) -> list[dict[str, Collection[int]]]:
        return [{n: partly[c].get(n, range(self.ranks[c])) for n in tensors} for c, tensors in enumerate(made)]
