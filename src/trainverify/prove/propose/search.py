"""The search for a proof: which stages are cut, how far back, and which claims are given up. Not trusted: the ledger says what is shown.

What cannot be proved is dropped, and stages that used it go further back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from trainverify.graph.obligations import Obligation
from trainverify.prove.propose.proposal import Proposal
from trainverify.prove.staged.claims import Claims
from trainverify.prove.staged.execute import DEFAULT, Limits, Result
from trainverify.prove.staged.graphs import LOGICAL, NOTHING, Place
from trainverify.prove.staged.ledger import Ledger, Node, Progress, StagedProof
from trainverify.prove.staged.records import Stage
from trainverify.prove.staged.stages import FACT, IN_FULL, IN_PARTS, SHORT, VALUE, How, NoStage

DIFFERS: Final = "differs on random inputs at the sizes of the proof"
LEVELS: Final = 3  # how often a stage is cut further back before its claim is given up
MISLED: Final = 20  # equations between logical elements that fail for some inputs, after which values are not trusted
GRADIENT_LEVELS: Final = 3  # before that, behind gradients only
RESTARTS: Final = 4  # how often what used a claim that was given up starts again as if that had never been there


class Depth(NamedTuple):
    """How far back a stage is cut: behind all leaves, and then behind gradients only."""

    level: int = 0
    gradients_only: int = 0


@dataclass
class Tries:
    """What was tried for one claim or goal."""

    depth: Depth = field(default_factory=Depth)
    used: set[Place] = field(default_factory=set)  # by any stage of it since its level was 0
    restarts: int = 0
    with_facts: bool = False
    spelled: bool = False  # with what is compared as it is defined
    retried: bool = False  # with another meaning
    ways: dict[Depth, int] = field(default_factory=dict)  # how elements are shown


class Search:
    def __init__(
        self,
        proposal: Proposal,
        wanted: Sequence[Obligation],
        workers: int = 0,
        limits: Limits = DEFAULT,
        progress: Progress = lambda text: None,
    ):
        elements, small = proposal.elements, proposal.elements.small
        self.ledger = Ledger(elements.watching(proposal.compared), Claims(elements, proposal.claims, proposal.scalars))
        self.proposal = proposal
        self.wanted = wanted
        self.workers = workers
        self.limits = limits
        self.progress = progress
        self.tries: dict[Node, Tries] = {}
        self.broken: dict[Node, str] = {}
        self._chances = 0  # equations between logical elements that held by chance
        self.proof = StagedProof(reduced=small.reduced or bool(small.kept), fewer=bool(small.kept))

    @property
    def stages(self) -> dict[Node, Stage]:
        return self.ledger.stages

    def _tries(self, node: Node) -> Tries:
        return self.tries.setdefault(node, Tries())

    @property
    def misled(self) -> bool:
        """Whether many logical elements had the same values by chance: what saturates is a constant, as far as numbers tell."""
        return self._chances > MISLED

    def first(self) -> list[Stage]:
        """The stages as they are cut before any of them is looked at; none for obligations that differ."""
        self._cut(self._open())
        return list(self.stages.values())

    def _open(self) -> set[Node]:
        """What is to be shown, of obligations that do not differ."""
        found: set[Node] = set()
        for o in self.wanted:
            try:
                if all(self.proposal.values.agrees(g) for g in self.ledger.open(o)):
                    found.update(self.ledger.goals_of[o])
                else:  # nothing to prove
                    self.proof.failed[o] = DIFFERS
            except NoStage as error:
                self.proof.failed[o] = str(error)
        return found

    def run(self) -> StagedProof:
        proof = self.proof
        goals = self._open()
        differ = [o for o, why in proof.failed.items() if why == DIFFERS]
        if differ:
            proof.violated.update(zip(differ, self.proposal.violated([o.output.tensor for o in differ]), strict=True))
        if proof.violated:  # refuted, most likely: the rest is not worth the time
            proof.failed |= {o: "not tried: another obligation differs" for o in self.wanted if o not in proof.failed}
            return proof
        try:
            self._rounds(goals)
        except KeyboardInterrupt:
            proof.interrupted = True
        self._conclude()
        return proof

    def _conclude(self) -> None:
        proof, ledger = self.proof, self.ledger
        valid = ledger.valid()
        for o in self.wanted:
            if o in proof.failed:
                continue
            bad = next((n for n in ledger.goals_of[o] if n not in valid), None)
            if bad is None:
                proof.proved.append(o)
            else:
                proof.failed[o] = self._why(bad, valid)
                if bad in self.stages:
                    proof.violated[o] = self.stages[bad].described(ledger.elements.graph)
                    proof.models[o] = ledger.model(bad)
        used = {key: ledger.results[key] for s in self.stages.values() for key, _ in s.tasks if key in ledger.results}
        graph = ledger.elements.graph
        proof.stages = len(self.stages)
        proof.tensors = sum(graph.first(p) in self.stages for p in graph.makers)
        proof.distinct = len(used)
        proof.identical = sum(s.identical for s in self.stages.values())
        proof.how.update(r.how for r in used.values() if r.how)
        if any(r.conditions for r in used.values()) or any(s.partial for s in self.stages.values()):
            proof.preconditions.append("the logical program is defined: its divisions, roots and logarithms have values")
        proof.instances = sum(len(k.ranks) for k in ledger.small.classes)

    # -- rounds ------------------------------------------------------------------------------------------------------

    def _rounds(self, open_: set[Node]) -> None:
        """Cut, check, and cut again what was not shown, until nothing changes."""
        while True:
            self._cut(open_)
            self.ledger.check([n for n in self.stages if n not in self.broken], self.limits, self.workers, self.progress)
            failures = {n: self.ledger.failure(s) for n, s in self.stages.items() if n not in self.broken}
            wrong = {n: failure for n, failure in failures.items() if failure is not None}
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
        stage, tries = self.stages[node], self._tries(node)
        fact_ = isinstance(node, tuple) and node[0] in (FACT, VALUE)
        conditional = failure.reason.startswith("a condition") and not tries.with_facts
        level, gradients_only = tries.depth
        again = True
        if stage.compares and not tries.spelled:
            tries.spelled = True
        elif conditional and stage.short:
            tries.with_facts = True
        elif stage.short:
            tries.ways[tries.depth] = SHORT if stage.in_parts else IN_FULL
        elif isinstance(node, tuple) and failure.model and self._another(node, open_):
            return
        elif conditional and not fact_:
            tries.with_facts = True
        elif stage.some_gradients and gradients_only < GRADIENT_LEVELS and not level:
            tries.depth = Depth(level, gradients_only + 1)
        elif level < (LEVELS if isinstance(node, int) else 1) and not fact_:
            tries.depth = Depth(level + 1)
        else:
            again = False
            if isinstance(node, tuple) and node not in self.ledger.claims.dropped:
                self._drop(node, open_)
            else:
                self.broken[node] = failure.reason
        if again:
            open_.add(node)
        if node in open_:
            self.stages.pop(node, None)

    def _another(self, place: Place, open_: set[Node]) -> bool:
        """A claim that fails for some inputs, given another meaning: values agreed by chance (a gradient that was never clipped)."""
        if self._tries(place).retried or place[0] in (FACT, VALUE):
            return False
        claims, elements = self.ledger.claims, self.ledger.elements
        claim = claims.tensors[place]
        if place[0] == LOGICAL and (claim.ids == NOTHING).any():  # zeros that were looked at
            return False
        self._tries(place).retried = True
        if place[0] == LOGICAL:
            self._chances += 1
            self._drop(place, open_)
            return True
        found = self.proposal.another(place)
        if found is not None:
            open_ |= self.ledger.rename(found)
        elif self.proposal.by_chance(claim):
            self._drop(place, open_)
        else:
            return False
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
        self.ledger.claims.dropped.add(place)
        self.stages.pop(place, None)
        for node, tries in self.tries.items():
            if place in tries.used and (node in self.stages or node in self.broken):
                tries.restarts += 1
                if tries.restarts <= RESTARTS:
                    self.broken.pop(node, None)
                    tries.depth = Depth()
                    tries.used = set()
                elif node in self.broken or place not in self.stages[node].uses:
                    continue
                self.stages.pop(node, None)
                open_.add(node)

    def _cut(self, open_: set[Node]) -> None:
        """Stages for these and for everything that they use."""
        stack: list[Node] = sorted(open_, key=repr)
        while stack:
            node = stack.pop()
            if node in self.stages or node in self.broken or node in self.ledger.claims.dropped:
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
            self._tries(node).used |= stage.uses
            stack.extend(p for p in stage.uses if p not in self.stages)

    def _stage(self, node: Node) -> Stage:
        tries = self._tries(node)
        divide = self.proposal.values.divides_by(self.ledger.cutter.scalar(node[1])) if isinstance(node, tuple) and node[0] == FACT else ()
        first = self._at(node, tries.depth, divide)
        level, way = tries.depth.level, tries.ways.get(tries.depth, IN_PARTS)
        if first.foreign and level < LEVELS and way != IN_FULL:  # nothing would come of it: further back, both sides may speak of the same
            try:
                second = self._at(node, Depth(level + 1))
            except NoStage:
                return first
            if not second.foreign:
                tries.depth = Depth(level + 1)
                return second
        return first

    def _at(self, node: Node, depth: Depth, divide: Sequence[Place] = ()) -> Stage:
        tries = self._tries(node)
        return self.ledger.cut(node, How(*depth, tries.with_facts, tries.ways.get(depth, IN_PARTS), tries.spelled), divide)

    def _why(self, node: Node, valid: set[Node]) -> str:
        if node in self.broken:
            return self.broken[node]
        stage = self.stages.get(node)
        if stage is None or not all(key in self.ledger.results for key, _ in stage.tasks):
            return "interrupted" if self.proof.interrupted else "not reached"
        failure = self.ledger.failure(stage)
        if failure is not None:
            return failure.reason
        missing = sorted(p for p in stage.uses if p not in valid)
        return f"rests on {self.ledger.elements.graph.show(missing[0])}, which was not shown"
