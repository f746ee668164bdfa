"""Engine two: staged proofs at reduced shapes.

Alignment proposes relations, stages prove them one by one, a relation counts once everything it rests on is proved
(so there are no cycles), and what cannot be proved is dropped: stages that used it go further back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.evaluate.small import Small
from trainverify.graph.lineage import Layout, Part, region
from trainverify.graph.obligations import Obligation
from trainverify.prove.staged.claims import Claims, Proposer
from trainverify.prove.staged.elements import Elements
from trainverify.prove.staged.execute import DEFAULT, Limits, Result
from trainverify.prove.staged.graphs import LOGICAL, NOTHING, Place
from trainverify.prove.staged.records import Goal, Stage, Summand
from trainverify.prove.staged.stages import APART, FACT, IN_FULL, SHORT, VALUE, Cutter, NoStage
from trainverify.prove.staged.workers import run_all

DIFFERS: Final = "differs on random inputs at the sizes of the proof"
LEVELS: Final = 3  # how often a stage is cut further back before its claim is given up
MISLED: Final = 20  # equations between logical elements that fail for some inputs, after which values are not trusted
GENTLY: Final = 3  # before that, behind gradients only
ANEW: Final = 4  # how often what used a claim that was given up starts again as if that had never been there
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
        fewer = f"; of a large plan {self.instances} ranks, some of every sort, with fewer experts to choose from if there are many"
        return made + fewer if self.fewer else made


class Engine:
    def __init__(
        self,
        elements: Elements,
        proposer: Proposer,
        wanted: Sequence[Obligation],
        workers: int = 0,
        limits: Limits = DEFAULT,
        progress: Progress = lambda text: None,
    ):
        self.small: Small = elements.small
        self.elements = elements.watching(proposer.compared)
        self.proposer = proposer
        self.claims = Claims(elements, proposer)
        self.wanted = wanted
        self.workers = workers
        self.limits = limits
        self.progress = progress
        self.cutter = Cutter(self.elements, self.claims)
        self.goals: list[Goal] = []
        self._numbers: dict[Hashable, int] = {}  # of goals, by what they say
        self.goals_of: dict[Obligation, list[int]] = {}
        self.stages: dict[Node, Stage] = {}
        self.level: dict[Node, int] = {}
        self.used: dict[Node, set[Place]] = {}  # by any stage of it since its level was 0
        self.anew: Counter[Node] = Counter()
        self.with_facts: set[Node] = set()
        self.ways: dict[tuple[Node, int, int], int] = {}  # by node and levels: how elements are shown
        self.gently: Counter[Node] = Counter()  # how often they are cut behind gradients only
        self.spelled: set[Node] = set()  # with what is compared as it is defined
        self.retried: set[Node] = set()
        self.results: dict[Any, Result] = {}  # by key
        self.shown_by: dict[Any, tuple[Stage, int]] = {}  # the stage and element that stood for all with this key
        self.broken: dict[Node, str] = {}
        self._chances = 0  # equations between logical elements that held by chance
        self.proof = StagedProof(reduced=self.small.reduced or bool(self.small.kept), fewer=bool(self.small.kept))

    @property
    def misled(self) -> bool:
        """Whether many logical elements had the same values by chance: what saturates is a constant, as far as numbers tell."""
        return self._chances > MISLED

    def first(self) -> list[Stage]:
        """The stages as they are cut before any of them is looked at; none for obligations that differ."""
        self._open()
        self._cut({n for numbers in self.goals_of.values() for n in numbers})
        return list(self.stages.values())

    def _open(self) -> None:
        """What is to be shown of each obligation."""
        for o in self.wanted:
            try:
                goals = self._goals(o)
            except NoStage as error:
                self.proof.failed[o] = str(error)
                continue
            if all(self.proposer.agrees(g) for g in goals):
                self.goals_of[o] = [self._goal(g) for g in goals]
            else:  # nothing to prove
                self.proof.failed[o] = DIFFERS

    def run(self) -> StagedProof:
        proof = self.proof
        self._open()
        differ = [o for o, why in proof.failed.items() if why == DIFFERS]
        if differ:
            proof.violated.update(zip(differ, self.proposer.violated([o.output.tensor for o in differ]), strict=True))
        if proof.violated:  # refuted, most likely: the rest is not worth the time
            proof.failed |= {o: "not tried: another obligation differs" for o in self.wanted if o not in proof.failed}
            return proof
        try:
            self._rounds()
        except KeyboardInterrupt:
            proof.interrupted = True
        valid = self._valid()
        for o in self.wanted:
            if o in proof.failed:
                continue
            bad = next((n for n in self.goals_of[o] if n not in valid), None)
            if bad is None:
                proof.proved.append(o)
            else:
                proof.failed[o] = self._why(bad, valid)
                if bad in self.stages:
                    proof.violated[o] = self.stages[bad].described(self.elements.graph)
                    proof.models[o] = self._model(bad)
        used = {key: self.results[key] for s in self.stages.values() for key, _ in s.tasks if key in self.results}
        proof.stages = len(self.stages)
        graph = self.elements.graph
        proof.tensors = sum(graph.first(p) in self.stages for p in graph.makers)
        proof.distinct = len(used)
        proof.identical = sum(s.identical for s in self.stages.values())
        proof.how.update(r.how for r in used.values() if r.how)
        if any(r.conditions for r in used.values()) or any(s.partial for s in self.stages.values()):
            proof.preconditions.append("the logical program is defined: its divisions, roots and logarithms have values")
        proof.instances = sum(len(k.ranks) for k in self.small.classes)
        return proof

    # -- goals -------------------------------------------------------------------------------------------------------

    def _goal(self, goal: Goal) -> int:
        """The number of a goal; those of several ranks may say the same."""
        terms = [(t.number, t.place, t.elements.tobytes()) for t in goal.terms]
        number = self._numbers.setdefault((goal.name, tuple(terms), goal.ids.tobytes()), len(self.goals))
        if number == len(self.goals):
            self.goals.append(goal)
        return number

    def _goals(self, o: Obligation) -> list[Goal]:
        """What the holdings of an obligation say, rank by rank."""
        found = []
        for h in o.holdings:
            there = [r for r in h.ranks if r in self.small.places]  # of a sample
            if h.ranks and not there:
                raise NoStage("held by no rank that is looked at")
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
        shares: dict[int, tuple[int, Part]] = {}
        if part.partial is None:
            shares[0] = (rank, part)
            number = Fraction(1)
        else:
            op, own, n = part.partial
            shares[own] = (rank, part)
            for (other, at), parts in small.parts.items():
                for p in parts:
                    if other == lay and p.partial is not None and p.logical == part.logical:
                        shares.setdefault(p.partial[1], (at, p))
            if len(shares) < n:
                raise NoStage(f"a share of {lay} that no rank holds")
            number = Fraction(1, n) if op == "avg" else Fraction(1)
        terms = []
        for at, p in shares.values():
            c, row = small.places[at]
            place = self.elements.graph.first((c, row, lay.local))
            terms.append(Summand(number, place, _region(p, small.local_shapes[c][lay.local])))
        return tuple(terms)

    # -- rounds ------------------------------------------------------------------------------------------------------

    def _rounds(self) -> None:
        """Cut, check, and cut again what was not shown, until nothing changes."""
        open_: set[Node] = {n for numbers in self.goals_of.values() for n in numbers}
        while True:
            self._cut(open_)
            todo: dict[Any, tuple[Stage, int]] = {}
            for node, s in self.stages.items():
                if node not in self.broken:
                    todo |= {key: (s, n) for key, n in s.tasks if key not in self.results and key not in todo}
            if todo:
                self.progress(f"{len(self.stages)} stages, {len(todo)} different elements to show")
                self.shown_by |= todo
                keys = list(todo)

                def done(n: int, result: Result, keys: Sequence[Any] = keys) -> None:
                    self.results[keys[n]] = result

                run_all(list(todo.values()), self.elements, self.limits, self.workers, done, self.progress)
            wrong = {n: failure for n, s in self.stages.items() if n not in self.broken and (failure := self._failure(s)) is not None}
            if not wrong:
                return
            if self.misled:
                self.broken |= {n: wrong[n].reason for n in wrong}
                return
            open_ = set()
            # what rests on a claim that was not shown may only be wrong because of it
            first = [n for n in wrong if not any(p in wrong for p in self.stages[n].uses)]
            for node in first or list(wrong):
                if node in self.stages:
                    self._further(node, wrong[node], open_)

    def _further(self, node: Node, failure: Result, open_: set[Node]) -> None:
        """A stage that was not shown: cut otherwise or further back, or its claim is given up."""
        fact_ = isinstance(node, tuple) and node[0] in (FACT, VALUE)
        if self.stages[node].compares and node not in self.spelled:
            self.spelled.add(node)
            open_.add(node)
            del self.stages[node]
            return
        if self.stages[node].short and failure.reason.startswith("a condition") and node not in self.with_facts:
            self.with_facts.add(node)
            open_.add(node)
            del self.stages[node]
            return
        if self.stages[node].short:
            self.ways[node, self.level.get(node, 0), self.gently[node]] = SHORT if self.stages[node].in_parts else IN_FULL
            open_.add(node)
            del self.stages[node]
            return
        if isinstance(node, tuple) and failure.model and self._another(node, open_):
            return
        if failure.reason.startswith("a condition") and node not in self.with_facts and not fact_:
            self.with_facts.add(node)
            open_.add(node)
        elif self.stages[node].gentler and self.gently[node] < GENTLY and not self.level.get(node):
            self.gently[node] += 1
            open_.add(node)
        elif self.level.get(node, 0) < (LEVELS if isinstance(node, int) else 1) and not fact_:
            self.level[node] = self.level.get(node, 0) + 1
            self.gently[node] = 0
            open_.add(node)
        elif isinstance(node, tuple) and node not in self.claims.dropped:
            self._drop(node, open_)
        else:
            self.broken[node] = failure.reason
        if node in open_:
            self.stages.pop(node, None)

    def _another(self, place: Place, open_: set[Node]) -> bool:
        """A claim that fails for some inputs, given another meaning: values agreed by chance (a gradient that was never clipped)."""
        if place in self.retried or place[0] in (FACT, VALUE):
            return False
        claims, elements, claim = self.claims, self.elements, self.claims.tensors[place]
        if place[0] == LOGICAL and (claim.ids == NOTHING).any():  # zeros that were looked at
            return False
        self.retried.add(place)
        if place[0] == LOGICAL:
            self._chances += 1
            self._drop(place, open_)
            return True
        found = self.proposer.another(place)
        if found is None:
            if not self.proposer.by_chance(claim):
                return False
            self._drop(place, open_)
        else:
            claims.tensors[place] = found
            for node, stage in list(self.stages.items()):
                if node == place or place in stage.uses:
                    del self.stages[node]
                    open_.add(node)
        changed = {place}
        for other in elements.graph.order:  # what only moves these elements has their names
            moves = other in claims.tensors and elements.only_moves(other)
            if moves and not changed.isdisjoint(elements.graph.makers[other].inputs):
                changed.add(other)
                if other not in claims.dropped:
                    self._drop(other, open_)
        return True

    def _drop(self, place: Place, open_: set[Node]) -> None:
        """A claim that is given up: everything that used it is cut again, as if it had never been there."""
        self.claims.dropped.add(place)
        self.stages.pop(place, None)
        for node, used in self.used.items():
            if place in used and (node in self.stages or node in self.broken):
                self.anew[node] += 1
                if self.anew[node] <= ANEW:
                    self.broken.pop(node, None)
                    self.level.pop(node, None)
                    self.gently.pop(node, None)
                    self.used[node] = set()
                elif node in self.broken or place not in self.stages[node].uses:
                    continue
                self.stages.pop(node, None)
                open_.add(node)

    def _cut(self, open_: set[Node]) -> None:
        """Stages for these and for everything that they use."""
        stack: list[Node] = sorted(open_, key=repr)
        while stack:
            node = stack.pop()
            if node in self.stages or node in self.broken or node in self.claims.dropped:
                continue
            try:
                stage = self._stage(node)
            except NoStage as error:
                if isinstance(node, int):
                    self.broken[node] = str(error)
                else:
                    again: set[Node] = set()
                    self._drop(node, again)
                    stack.extend(sorted(again, key=repr))
                    stack.extend(n for n in open_ if n not in self.stages)
                continue
            self.stages[node] = stage
            self.used.setdefault(node, set()).update(stage.uses)
            stack.extend(p for p in stage.uses if p not in self.stages)

    def _stage(self, node: Node) -> Stage:
        if isinstance(node, tuple) and node[0] == FACT:
            return self.cutter.condition(node[1], self.proposer.divides_by(self.cutter.scalar(node[1])))
        if isinstance(node, tuple) and node[0] == VALUE:
            return self.cutter.defined_anyway(node[1])
        goal = self.goals[node] if isinstance(node, int) else self.cutter.goal_of(self.claims.tensors[node])
        level, gently = self.level.get(node, 0), self.gently[node]
        way = self.ways.get((node, level, gently), APART)
        first = self.cutter.stage(goal, level, node in self.with_facts, way, gently, node in self.spelled)
        if first.foreign and level < LEVELS and way != IN_FULL:  # nothing would come of it: further back, both sides may speak of the same
            try:
                way = self.ways.get((node, level + 1, 0), APART)
                second = self.cutter.stage(goal, level + 1, node in self.with_facts, way, spelled=node in self.spelled)
            except NoStage:
                return first
            if not second.foreign:
                self.level[node], self.gently[node] = level + 1, 0
                return second
        return first

    # -- conclusions -------------------------------------------------------------------------------------------------

    def _valid(self) -> set[Node]:
        """Everything that is shown and rests on shown things only; a circle never gets in."""
        valid: set[Node] = set()
        waiting = {n: s for n, s in self.stages.items() if all(key in self.results and self.results[key].proved for key, _ in s.tasks)}
        changed = True
        while changed:
            changed = False
            for node, stage in list(waiting.items()):
                if stage.uses <= valid:
                    valid.add(node)
                    del waiting[node]
                    changed = True
        return valid

    def _failure(self, stage: Stage) -> Result | None:
        """The first element of a stage that was not shown."""
        return next((self.results[key] for key, _ in stage.tasks if key in self.results and not self.results[key].proved), None)

    def _why(self, node: Node, valid: set[Node]) -> str:
        if node in self.broken:
            return self.broken[node]
        stage = self.stages.get(node)
        if stage is None or not all(key in self.results for key, _ in stage.tasks):
            return "interrupted" if self.proof.interrupted else "not reached"
        failure = self._failure(stage)
        if failure is not None:
            return failure.reason
        missing = sorted(p for p in stage.uses if p not in valid)
        return f"rests on {self.elements.graph.show(missing[0])}, which was not shown"

    def _model(self, node: Node) -> dict[str, dict[int, Fraction]]:
        """The solver's model as inputs of the logical program, where the stage starts from inputs only."""
        stage = self.stages[node]
        key, n = next(((k, n) for k, n in stage.tasks if k in self.results and self.results[k].model), (None, 0))
        if key is None:
            return {}
        a = self.elements
        shown = self.cutter.numbers(*self.shown_by[key])  # the stage that was checked may have other names
        mine = {number: i for i, number in self.cutter.numbers(stage, n).items()}
        found: dict[str, dict[int, Fraction]] = {}
        for i, value in self.results[key].model.items():
            own = mine[shown[i]] if i in shown else a.count
            if own >= a.count or a.owner[own] not in self.small.logical.sources:
                return {}
            found.setdefault(a.owner[own], {})[own - a.start[a.owner[own]]] = value
        return found


def _region(part: Part, shape: tuple[int, ...]) -> Array:
    return region(part, np.arange(int(np.prod(shape))).reshape(shape)).reshape(-1)
