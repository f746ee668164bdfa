"""What is to be shown of a pair of programs, stages, and what counts as shown. Trusted; which stages are cut when is up to a search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.evaluate.small import shares
from trainverify.graph.lineage import Layout, Part, region
from trainverify.graph.obligations import Obligation
from trainverify.prove.staged.claims import Claim, Claims
from trainverify.prove.staged.elements import Elements
from trainverify.prove.staged.execute import Limits, Result
from trainverify.prove.staged.graphs import NOTHING, Place
from trainverify.prove.staged.records import Goal, Stage, Summand
from trainverify.prove.staged.stages import FACT, VALUE, Cutter, How, NoStage
from trainverify.prove.staged.workers import run_all

Progress = Callable[[str], None]
Node = Place | int  # a claim by its place, a goal of an obligation by its number


@dataclass
class StagedProof:
    """What was shown at reduced sizes; the same questions as for a proof at full size can be asked of it."""

    proved: list[Obligation] = field(default_factory=list)
    failed: dict[Obligation, str] = field(default_factory=dict)
    preconditions: list[str] = field(default_factory=list)
    lint: list[str] = field(default_factory=list)
    instances: int = 0
    atoms: int = 0
    prover: None = None
    reduced: bool = True
    fewer: bool = False  # with some ranks of every sort only, and less to choose from
    stages: int = 0  # relations that were to be shown
    tensors: int = 0  # of all ranks, that they speak of
    identical: int = 0  # elements of them that are the same expression on both sides
    distinct: int = 0  # of the others, those that differ in more than names
    how: Counter[str] = field(default_factory=Counter)  # these by way of proof
    interrupted: bool = False
    violated: dict[Obligation, str] = field(default_factory=dict)  # the stage in which an obligation fails
    models: dict[Obligation, dict[str, dict[int, Fraction]]] = field(default_factory=dict)  # inputs where the solver says it fails

    def summary(self) -> str:
        ways = ", ".join(f"{n} by {how}" for how, n in self.how.items())
        same = f"{self.identical} elements are the same expression"
        made = f"{self.stages} stages for {self.tensors} tensors: {same}, {self.distinct} distinct others ({ways or 'none'} shown)"
        fewer = f"; reduced to {self.instances} ranks, some of every sort, and to fewer experts where there are many"
        return made + fewer if self.fewer else made


class Ledger:
    """Goals, stages and results. Whatever is claimed, cut or dropped, `valid` holds what was shown from nothing but what was shown."""

    def __init__(self, elements: Elements, claims: Claims):
        self.elements = elements
        self.small = elements.small
        self.claims = claims
        self.cutter = Cutter(elements, claims)
        self.goals: list[Goal] = []
        self._numbers: dict[Hashable, int] = {}  # of goals, by what they say
        self.goals_of: dict[Obligation, list[int]] = {}
        self.stages: dict[Node, Stage] = {}
        self.results: dict[Any, Result] = {}  # by key
        self._shown_by: dict[Any, tuple[Stage, int]] = {}  # the stage and element that stood for all with this key

    # -- goals -------------------------------------------------------------------------------------------------------

    def open(self, o: Obligation) -> list[Goal]:
        """What is to be shown of an obligation; those of several ranks may say the same."""
        goals = self._goals(o)
        self.goals_of[o] = [self._number(g) for g in goals]
        return goals

    def _number(self, goal: Goal) -> int:
        number = self._numbers.setdefault(goal.key, len(self.goals))
        if number == len(self.goals):
            self.goals.append(goal)
        return number

    def _goals(self, o: Obligation) -> list[Goal]:
        """What the holdings of an obligation say, rank by rank."""
        found = []
        for h in o.holdings:
            there = [r for r in h.ranks if r in self.small.places]  # of a sample
            if h.ranks and not there:
                raise NoStage("none of the ranks that the proof keeps holds it")
            for rank in there:
                c, row = self.small.places[rank]
                place = (c, row, h.layout.local)
                if place not in self.elements.graph.makers and place not in self.elements.sources:
                    raise NoStage(f"{h.layout.local} is never computed on rank {rank}")
                for part in self.small.parts[h.layout, rank]:
                    if part.padding and o.stays:  # must be zero after the step
                        terms = self._terms(h.layout, rank, part)
                        found.append(Goal(h.layout.logical, terms, np.full(len(terms[0].elements), NOTHING)))
                    if not part.padding:
                        where = self.small.positions(part, h.layout.logical).reshape(-1)
                        ids = self.elements.ids[h.layout.logical].reshape(-1)[where]
                        found.append(Goal(h.layout.logical, self._terms(h.layout, rank, part), ids, ids_in_tensor=where))
        return found

    def _terms(self, lay: Layout, rank: int, part: Part) -> tuple[Summand, ...]:
        small = self.small
        found, number = [(rank, part)], Fraction(1)
        if part.partial is not None:
            op, _, n = part.partial
            added = shares(small, lay, rank, part)
            if added is None:
                raise NoStage(f"a share of {lay} that no rank holds")
            found, number = added, Fraction(1, n) if op == "avg" else Fraction(1)
        terms = []
        for at, p in found:
            c, row = small.places[at]
            place = self.elements.graph.first((c, row, lay.local))
            terms.append(Summand(number, place, _region(p, small.local_shapes[c][lay.local])))
        return tuple(terms)

    # -- stages ------------------------------------------------------------------------------------------------------

    def cut(self, node: Node, how: How, divide: Sequence[Place] = ()) -> Stage:
        """A stage for a claim or goal, not yet one of those that count; for "not 0", of these logical ops."""
        if isinstance(node, tuple) and node[0] == FACT:
            return self.cutter.condition(node[1], divide)
        if isinstance(node, tuple) and node[0] == VALUE:
            return self.cutter.defined_anyway(node[1])
        return self.cutter.stage(self._goal(node), how)

    def _goal(self, node: Node) -> Goal:
        return self.goals[node] if isinstance(node, int) else self.cutter.goal_of(self.claims.tensors[node])

    def _is_of(self, stage: Stage, node: Node) -> bool:
        """Whether a stage is one of that claim or goal."""
        if isinstance(node, tuple) and node[0] in (FACT, VALUE):
            (term,) = stage.goal.terms
            return stage.nonzero and stage.value == (node[0] == VALUE) and term.place == self.cutter.scalar(node[1])
        return not stage.nonzero and stage.goal.key == self._goal(node).key

    def rename(self, claim: Claim) -> set[Node]:
        """Another claim about a tensor: its stage goes, and all that rest on it; they are to be cut again."""
        self.claims.check(self.elements, claim)
        self.claims.tensors[claim.place] = claim
        gone = {node for node, stage in self.stages.items() if node == claim.place or claim.place in stage.uses}
        for node in gone:
            del self.stages[node]
        return gone

    def check(self, nodes: Collection[Node], limits: Limits, workers: int, progress: Progress) -> None:
        """All elements of these stages that differ in more than names from those that were checked."""
        todo: dict[Any, tuple[Stage, int]] = {}
        for node in nodes:
            stage = self.stages[node]
            todo |= {key: (stage, n) for key, n in stage.tasks if key not in self.results and key not in todo}
        if not todo:
            return
        progress(f"{len(self.stages)} stages, {len(todo)} different elements to show")
        self._shown_by |= todo
        keys = list(todo)

        def done(n: int, result: Result) -> None:
            self.results[keys[n]] = result

        run_all(list(todo.values()), self.elements, limits, workers, done, progress)

    def valid(self) -> set[Node]:
        """Everything that is shown and rests on shown things only."""
        shown = {n: s for n, s in self.stages.items() if all(key in self.results and self.results[key].proved for key, _ in s.tasks)}
        return without_circles({n: s for n, s in shown.items() if self._is_of(s, n)})

    def proved(self, wanted: Sequence[Obligation]) -> list[Obligation]:
        """Those all goals of which are shown."""
        valid = self.valid()
        return [o for o in wanted if self.goals_of.get(o) and valid.issuperset(self.goals_of[o])]

    def failure(self, stage: Stage) -> Result | None:
        """The first element of a stage that was not shown."""
        return next((self.results[key] for key, _ in stage.tasks if key in self.results and not self.results[key].proved), None)

    def model(self, node: Node) -> dict[str, dict[int, Fraction]]:
        """The solver's model as inputs of the logical program, where the stage starts from inputs only."""
        stage = self.stages[node]
        key, n = next(((k, n) for k, n in stage.tasks if k in self.results and self.results[k].model), (None, 0))
        if key is None:
            return {}
        a = self.elements
        shown = self.cutter.numbers(*self._shown_by[key])  # the stage that was checked may have other names
        mine = {number: i for i, number in self.cutter.numbers(stage, n).items()}
        found: dict[str, dict[int, Fraction]] = {}
        for i, value in self.results[key].model.items():
            source = mine[shown[i]] if i in shown else a.count
            if source >= a.count or a.owner[source] not in self.small.logical.sources:
                return {}
            (_, _, name), at = a.where(source)
            found.setdefault(name, {})[at] = value
        return found


def _region(part: Part, shape: tuple[int, ...]) -> Array:
    return region(part, np.arange(int(np.prod(shape))).reshape(shape)).reshape(-1)


def without_circles(shown: Mapping[Node, Stage]) -> set[Node]:
    """Of what is shown from other things, what rests in the end on nothing else; a circle never gets in."""
    valid: set[Node] = set()
    waiting, changed = dict(shown), True
    while changed:
        changed = False
        for node, stage in list(waiting.items()):
            if stage.uses <= valid:
                valid.add(node)
                del waiting[node]
                changed = True
    return valid
