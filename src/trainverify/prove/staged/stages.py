"""Stages: a claim cut out of both graphs, from its tensor back to tensors that other claims speak of.

A stage assumes the relations of its leaves, which other stages prove, and has to show its own. It is metadata only; symbols are
made by whoever checks it. Stages that differ in names only have equal keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.prove.staged.canonical import Canonical
from trainverify.prove.staged.claims import Claim, Claims
from trainverify.prove.staged.elements import Elements
from trainverify.prove.staged.expressions import Expressions
from trainverify.prove.staged.graphs import LOGICAL, NOTHING, Call, Place
from trainverify.prove.staged.isomorphic import IsomorphicElements
from trainverify.prove.staged.records import PLAIN, Factor, Goal, Part, Stage, Summand

MAX_CALLS: Final = 4000
FACT: Final = -2
VALUE: Final = -3
MAX_WRITTEN: Final = 12
IN_PARTS, SHORT, IN_FULL = range(3)  # with common parts as symbols and large elements in parts; not in parts; as they are
TOO_LONG: Final = "an element of the stage is too long an expression"
MAX_TOKENS: Final = 50_000  # of an element's expressions on both sides


class NoStage(Exception):
    """A claim that cannot be cut out: something it needs is never computed, or it is too much."""


def fact(i: int) -> Place:
    """The name of the relation "scalar i is not 0"."""
    return (FACT, i, "")


def has_value(i: int) -> Place:
    """The name of the relation "scalar i of the plan has a value"."""
    return (VALUE, i, "")


class How(NamedTuple):
    """How a stage is cut."""

    level: int = 0  # how often it goes back behind the leaves of the level before
    gradients_only: int = 0  # and then behind gradients only
    with_facts: bool = False
    way: int = IN_PARTS  # how elements are shown
    spelled: bool = False  # no leaf has elements that are compared


AS_IT_IS: Final = How()


class Cutter:
    """Cuts stages out of both graphs, by claims."""

    def __init__(self, elements: Elements, claims: Claims):
        self.elements = elements
        self.claims = claims
        self.graph = elements.graph
        self._numbered: dict[Hashable, Stage] = {}  # by form
        self._by_elements: dict[Hashable, Stage] = {}
        self._too_long: set[Hashable] = set()

    @cached_property
    def _canonical(self) -> Canonical:
        return Canonical(self.elements)

    @cached_property
    def _isomorphic(self) -> IsomorphicElements:
        return IsomorphicElements(self._canonical)

    def goal_of(self, claim: Claim) -> Goal:
        named = claim.ids[self.elements.inside(claim.ids)]
        name = self.elements.owner[named[0]] if len(named) else claim.place[2]
        return Goal(name, (Summand(Fraction(1), claim.place, np.arange(len(claim.ids))),), claim.ids, claim.factor)

    def stage(self, goal: Goal, how: How = AS_IT_IS) -> Stage:
        """The stage of a goal."""
        opened: set[Place] = set()
        made = self._cut(goal, opened, how)
        for n in range(how.level + how.gradients_only):
            known = self._symbols(made)
            while self._symbols(made) == known:  # what brings nothing but multiples of the same elements is no level
                fresh = self._fresh(made)
                if n >= how.level:
                    fresh = self._gradients(fresh)
                if not fresh:
                    break
                opened |= fresh | self._moved(fresh)
                made = self._cut(goal, opened, how)
        compared = self._compared(made)
        at_hand = self._at_hand(made, compared)
        if compared and (how.spelled or at_hand):
            opened |= compared | self._moved(compared)
            made = self._cut(goal, opened, how)
        made.compares = bool(compared) and not at_hand
        made.some_gradients = bool(self._gradients(self._fresh(made)))
        self._number(made, how.way)
        return made

    def _symbols(self, stage: Stage) -> set[int]:
        """Elements that the plan's side is made of."""
        return {i for ids, _ in stage.plan.leaves.values() for i in ids.tolist()}

    def _fresh(self, stage: Stage) -> set[Place]:
        return {p for p in stage.plan.leaves if p not in self.elements.sources and not self._is_logical_source(p)}

    def _gradients(self, leaves: set[Place]) -> set[Place]:
        """Gradients among leaves, if there are others too."""
        found = {p for p in leaves if self.graph.makers[p].backward}
        return set() if found == leaves else found

    def _compared(self, stage: Stage) -> set[Place]:
        """Leaves that the plan compares, and those that have the same elements."""
        leaves = stage.plan.leaves
        direct = {
            i for c in stage.plan.calls if self.elements.compares(c) for i in c.inputs if i in leaves and i not in self.elements.sources
        }
        ids = set().union(*(leaves[p][0].tolist() for p in direct if p is not None)) - {NOTHING}
        return {p for p in self._fresh(stage) if not ids.isdisjoint(leaves[p][0].tolist())} if ids else set()

    def _at_hand(self, stage: Stage, compared: set[Place]) -> bool:
        """Whether some of what is compared is made of other leaves: then its definition says more of it than its name."""
        others = stage.plan.leaves.keys() - compared
        made = [p for p in compared | self._moved(compared) if p in self.graph.makers and not self.elements.only_moves(p)]
        return any(all(i is None or i in others or i in self.elements.sources for i in self.graph.makers[p].inputs) for p in made)

    def _moved(self, places: set[Place]) -> set[Place]:
        """Tensors that these are only moved from."""
        found: set[Place] = set()
        stack = list(places)
        while stack:
            place = stack.pop()
            if place in self.graph.makers and self.elements.only_moves(place):
                fresh = [i for i in self.graph.makers[place].inputs if i is not None and i not in found]
                found.update(fresh)
                stack += fresh
        return found

    def _is_logical_source(self, place: Place) -> bool:
        return place[0] == LOGICAL and place not in self.graph.makers

    # -- cutting -----------------------------------------------------------------------------------------------------

    def _cut(self, goal: Goal, opened: set[Place], how: How) -> Stage:
        uses: set[Place] = set()
        plan = self._plan(goal, opened, uses)
        extra: dict[int, tuple[Place, Part]] = {}
        self._write_out(plan, goal, opened, uses, extra, how.level > 0)
        leaves = [leaf for part in (plan, *(part for _, part in extra.values())) for leaf in part.leaves.values()]
        factors = {f.element for f in (goal.factor, *(f for _, f in leaves)) if f.element is not None}
        spoken = [np.array(sorted(factors), dtype=np.int64), *(ids for ids, _ in leaves)]
        owners = set(self.elements.owners(spoken))
        in_full = {p[2] for p in opened if p[0] == LOGICAL}
        mine: set[Place] = set()
        logical = self._logical(goal, owners, mine, in_full)
        aside = set() if opened else self._aside(goal, owners, logical)
        if aside:
            mine = set()
            logical = self._logical(goal, owners | aside, mine, in_full)
        uses |= mine
        assumed: tuple[int, ...] = ()
        if how.with_facts:
            facts = {f.element for _, f in plan.leaves.values()} | {goal.factor.element}
            facts |= {int(ids[0]) for p, (ids, _) in plan.leaves.items() if self.graph.shape(p) == () and self.graph.kind(p) == "real"}
            assumed = tuple(sorted(i for i in facts if i is not None and i >= 0 and fact(i) not in self.claims.dropped))
        scalars = {i for ids in spoken for i in ids[ids >= self.elements.count].tolist()}
        uses |= {has_value(i) for i in scalars if i not in extra}
        made = Stage(goal, plan, logical, extra, frozenset(), how.with_facts, assumed)
        every = {(LOGICAL, 0, o) for s in self.elements.small.logical_steps for o in s.outputs} if assumed else set()
        for i in assumed:
            if i < self.elements.count and i not in extra:
                written = self._back([self.elements.where(i)[0]], every, set())
                if len(written.calls) <= MAX_WRITTEN:
                    made.written[i] = written
        made.defined = self._defined(made, uses)
        made.uses = frozenset(uses | {fact(i) for i in assumed})
        return made

    def _aside(self, goal: Goal, owners: set[str], logical: Part) -> set[str]:
        """What makes tensors that the plan's side speaks of and the logical side does not, such as counts up to a token beside the sum over
        all, and is on the way of the logical side: there both meet."""
        passed = {o[2] for c in logical.calls for o in c.outputs} - set(self.elements.owners([goal.ids]))
        if not passed:
            return set()
        foreign = owners - set(self.elements.owners(ids for ids, _ in logical.leaves.values()))
        calls = [self.graph.makers.get((LOGICAL, 0, name)) for name in sorted(foreign)]
        inputs = {i for c in calls if c is not None for i in c.inputs if i is not None and self.graph.kind(i) == "real"}
        return passed & set(self.elements.owners(self._equals(self.elements.ids[i[2]].reshape(-1), set()) for i in inputs))

    def _defined(self, stage: Stage, uses: set[Place]) -> dict[str, Part]:
        """Logical tensors that the plan's side speaks of and the logical side does not, if one op makes them of what that speaks of.

        Such as the sums that a softmax divides by, kept for its gradient: they are what the logical program says they are."""
        a, leaves = self.elements, stage.logical.leaves
        if not stage.logical.calls:
            return {}
        known = set(self.elements.owners(ids for ids, _ in leaves.values()))
        spoken = known | set(self.elements.owners([stage.goal.ids]))
        factors = [stage.goal.factor, *(f for part in stage.parts() for _, f in part.leaves.values())]
        spoken.update(a.owner[i] for i in (*stage.facts, *(f.element for f in factors)) if i is not None and i < a.count)
        found: dict[str, Part] = {}
        for name in self.elements.owners(ids for ids, _ in stage.plan.leaves.values()):
            place = (LOGICAL, 0, name)
            call = self.graph.makers.get(place)
            if name in spoken or call is None or self.graph.kind(place) != "real":
                continue
            part, mine = Part([call]), set[Place]()
            for i in (i for i in call.inputs if i is not None):
                if i in leaves:
                    part.leaves[i] = leaves[i]
                elif self._is_logical_source(i):
                    part.leaves[i] = (a.ids[i[2]].reshape(-1), PLAIN)
                elif self.graph.kind(i) == "real":
                    same = self._equals(a.ids[i[2]].reshape(-1), mine)
                    if not known.issuperset(self.elements.owners([same])):
                        break
                    part.leaves[i] = (same, PLAIN)
                else:
                    break
            else:
                uses |= mine
                found[name] = part
        return found

    def _plan(self, goal: Goal, opened: set[Place], uses: set[Place]) -> Part:
        """The plan's side. What has some elements of the wanted tensor, but not all that are wanted, is no leaf: the others have to be
        defined, and the definition is one of the whole tensor."""
        a = self.elements
        numbers = np.append(a.numbers, -1)  # the last one is for what is no logical element
        inside = a.inside(goal.ids)
        wanted = set(numbers[goal.ids[inside]].tolist())
        while True:
            mine: set[Place] = set()
            part = self._back([t.place for t in goal.terms], opened, mine)
            of = {p: numbers[np.where(a.inside(ids), ids, -1)] for p, (ids, _) in part.leaves.items() if p in mine}
            near = {p for p, n in of.items() if not wanted.isdisjoint(n.tolist())}
            known = np.concatenate([part.leaves[p][0] for p in near]) if near else goal.ids
            if np.isin(goal.ids[inside], known).all():
                uses |= mine
                return part
            opened |= near

    def scalar(self, i: int) -> Place:
        """The tensor that a scalar of either program is."""
        return self.claims.scalars[i] if i >= self.elements.count else self.elements.where(i)[0]

    def condition(self, i: int, divide: Sequence[Place]) -> Stage:
        """That a scalar is not 0: it has to follow from what one of these logical ops needs, over the inputs themselves."""
        a, place = self.elements, self.scalar(i)
        uses: set[Place] = set()
        plan = self._back([place], set(), uses) if i >= a.count else Part(leaves={place: (np.array([i]), PLAIN)})
        goal = Goal(f"{place[2]} ≠ 0", (Summand(Fraction(1), place, np.arange(1)),), np.array([NOTHING]))
        if uses:
            raise NoStage("a scalar that is not a function of the inputs alone")
        strict = [p for p in divide if p[2] in a.strict.tensors]  # the others need not have a value
        divisions = [self._back([p], set(), uses) for p in strict]  # that two logical elements are equal is to be shown
        made = Stage(goal, plan, Part(), {}, frozenset(uses), divisions=divisions, kind="nonzero")
        self._number(made)
        return made

    def defined_anyway(self, i: int) -> Stage:
        """That a scalar of the plan has a value for any inputs: a name says nothing of what it is divided by."""
        place = self.claims.scalars[i]
        uses: set[Place] = set()
        plan = self._back([place], set(), uses)
        known = {j for ids, f in plan.leaves.values() for j in (*ids.tolist(), f.element) if j is not None and j >= self.elements.count}
        goal = Goal(f"{place[2]} has a value", (Summand(Fraction(1), place, np.arange(1)),), np.array([NOTHING]))
        made = Stage(goal, plan, Part(), {}, frozenset(uses | {has_value(j) for j in known}), kind="value")
        self._number(made)
        return made

    def _back(self, places: Sequence[Place], opened: set[Place], uses: set[Place]) -> Part:
        part = Part()
        calls: dict[tuple[int, int], Call] = {}
        stack = list(dict.fromkeys(places))
        seen: set[Place] = set()
        first = set(stack)
        while stack:
            place = stack.pop()
            if place in seen:
                continue
            seen.add(place)
            leaf = self._leaf(place, place in first, opened, uses)
            if leaf is not None:
                part.leaves[place] = leaf
                continue
            call = self.graph.makers.get(place)
            if call is None:
                raise NoStage(f"{self.graph.show(place)} is never computed")
            if (call.at, call.row) not in calls:
                calls[call.at, call.row] = call
                stack.extend(i for i in call.inputs if i is not None)
            if len(calls) > MAX_CALLS:
                raise NoStage("the stage is too large")
        part.calls = [calls[k] for k in sorted(calls)]
        return part

    def _leaf(self, place: Place, is_goal: bool, opened: set[Place], uses: set[Place]) -> tuple[Array, Factor] | None:
        a = self.elements
        if place in a.sources:
            return a.sources[place].reshape(-1), PLAIN
        if place[0] == LOGICAL:
            if place not in self.graph.makers:
                return a.ids[place[2]].reshape(-1), PLAIN
            if is_goal or place in opened or self.graph.kind(place) != "real":
                return None
            return self._equals(a.ids[place[2]].reshape(-1), uses), PLAIN
        if is_goal or place in opened or place in self.claims.dropped:
            return None
        if place in self.claims.scalar_at:
            i = self.claims.scalar_at[place]
            return None if has_value(i) in self.claims.dropped else (np.array([i]), PLAIN)
        claim = self.claims.tensors.get(place)
        if claim is None or (claim.factor.element is not None and has_value(claim.factor.element) in self.claims.dropped):
            return None
        uses.add(place)
        return claim.ids, claim.factor

    def _equals(self, ids: Array, uses: set[Place]) -> Array:
        """Elements of the logical program by the first ones that equal them; that they do is a claim of its own, which says nothing where
        those have no value: so they must have one."""
        a = self.elements
        same = self.claims.same[ids]
        for n in np.flatnonzero(same != ids).tolist():
            owner = (LOGICAL, 0, a.owner[int(ids[n])])
            if owner in self.claims.dropped or (same[n] != NOTHING and a.owner[int(same[n])] in a.doubtful):
                same[n] = ids[n]
            else:
                uses.add(owner)
        return same

    def _write_out(
        self, plan: Part, goal: Goal, opened: set[Place], uses: set[Place], extra: dict[int, tuple[Place, Part]], all_of_them: bool
    ) -> None:
        """Definitions of the plan's own scalars: those that the goal is about; the others where names are not enough."""
        wanted: set[int | None] = {int(i) for i in goal.ids.tolist() if i >= self.elements.count}
        if all_of_them:
            wanted |= {f.element for _, f in plan.leaves.values()} | {goal.factor.element}
            for ids, _ in plan.leaves.values():
                wanted |= {int(i) for i in ids.tolist() if i >= self.elements.count}
        for i in sorted(w for w in wanted if w is not None and w >= self.elements.count):
            place = self.claims.scalars[i]
            extra[i] = (place, self._without_scalars(place, opened, uses))

    def _without_scalars(self, place: Place, opened: set[Place], uses: set[Place]) -> Part:
        """The definition of a scalar: what has another scalar as a factor is written out too."""
        opened = set(opened)
        while True:
            mine: set[Place] = set()
            part = self._back([place], opened, mine)
            scaled = {p for p, (_, f) in part.leaves.items() if f.element is not None}
            if not scaled:
                uses |= mine
                return part
            opened |= scaled

    def _logical(self, goal: Goal, owners: set[str], uses: set[Place], opened: set[str]) -> Part:
        """Definitions of the wanted elements, back to tensors whose elements the plan's side speaks of; or of which all that
        is needed is 0, such as the gradients of keys' biases in a shard that has no others."""
        whole = {t.place[2] for t in goal.terms if t.place[0] == LOGICAL} | opened
        while True:
            mine, vanishing = set[Place](), set[Place]()
            part = self._defined_back(goal, owners, mine, whole, vanishing)
            used = self._positions_used(goal, part) if vanishing else {}
            there = {p[2] for p in vanishing if not owners.issuperset(self.elements.owners([part.leaves[p][0][used.get(p, [])]]))}
            if not there:
                uses |= mine
                return part
            whole |= there

    def _positions_used(self, goal: Goal, part: Part) -> dict[Place, Array]:
        """The positions that are needed of tensors of a piece of the logical program."""
        a = self.elements
        wanted = {(LOGICAL, 0, n): [at[at >= 0]] for n in a.owners([goal.ids]) for at in (a.within(goal.ids, n),)}
        return a.closures.of(part, {p: at for p, at in wanted.items() if p in part}).numbers

    def _defined_back(self, goal: Goal, owners: set[str], uses: set[Place], whole: set[str], vanishing: set[Place]) -> Part:
        """The same; what has elements that are 0, besides others that the plan's side does not speak of, is defined if it is in `whole`."""
        a = self.elements
        wanted = a.owners([goal.ids])
        part = Part()
        calls: dict[tuple[int, int], Call] = {}
        stack = sorted(w for w in wanted if w not in owners)
        goals = set(stack)
        seen: set[str] = set()
        while stack:
            name = stack.pop()
            if name in seen:
                continue
            seen.add(name)
            place = (LOGICAL, 0, name)
            call = self.graph.makers.get(place)
            ids = a.ids[name].reshape(-1)
            if call is None:
                part.leaves[place] = (ids, PLAIN)
                continue
            if name not in whole and self.graph.kind(place) == "real":
                mine: set[Place] = set()
                same = self._equals(ids, mine)
                spoken = name not in goals and owners.issuperset(a.owners([same]))
                if spoken or (same == NOTHING).any():
                    uses |= mine
                    part.leaves[place] = (same, PLAIN)
                    if not spoken:
                        vanishing.add(place)
                    continue
            if (call.at, call.row) not in calls:
                calls[call.at, call.row] = call
                stack.extend(i[2] for i in call.inputs if i is not None)
            if len(calls) > MAX_CALLS:
                raise NoStage("the stage is too large")
        part.calls = [calls[k] for k in sorted(calls)]
        return part

    # -- keys --------------------------------------------------------------------------------------------------------

    def _number(self, stage: Stage, way: int = IN_PARTS) -> None:
        """What has to be shown, element by element, up to names; what is the same expression on both sides is nothing to show."""
        form = (self._canonical.form(stage), stage.with_facts, way)
        if form in self._too_long:
            raise NoStage(TOO_LONG)
        known = self._numbered.get(form)
        if known is None:
            made = self._canonical.by_elements(stage)
            if made is not None and (made, stage.with_facts, way) in self._too_long:
                raise NoStage(TOO_LONG)
            known = None if made is None else self._by_elements.get((made, stage.with_facts, way))
            if known is None:
                try:
                    self._look_through(stage, way)
                except (NoStage, RecursionError) as error:
                    self._too_long |= {form} if made is None else {form, (made, stage.with_facts, way)}
                    raise NoStage(TOO_LONG) from error
                known = stage
                if made is not None:
                    self._by_elements[made, stage.with_facts, way] = stage
            self._numbered[form] = known
        stage.tasks, stage.short = known.tasks, known.short
        stage.identical, stage.partial, stage.foreign, stage.in_parts = known.identical, known.partial, known.foreign, known.in_parts

    def _look_through(self, stage: Stage, way: int) -> None:
        """Elements that differ in names only are looked at once."""
        classes = self._isomorphic.classes(stage)
        every = np.arange(len(stage.goal.ids)) if classes is None else classes
        members = Counter(every.tolist())
        expressions = Expressions(stage, self.elements, len(every) // max(len(members), 1))
        left: list[int] = []
        for n in sorted(members):
            same = expressions.same(n)
            if same is None:
                left.append(n)
            else:
                stage.identical += members[n]
                stage.partial |= same
        short = {} if way == IN_FULL else expressions.short(left, way == IN_PARTS)
        stage.identical += sum(members[n] for n in expressions.equal)
        stage.partial |= any(expressions.equal.values()) or any(expressions.by_parts.values())
        stage.in_parts = bool(expressions.by_parts)
        seen: dict[Any, int] = {}
        settled = expressions.equal.keys() | expressions.by_parts.keys()
        for n in [*(n for n in left if n not in settled), *(n for n in short if n >= len(stage.goal.ids))]:
            if n in short:
                key: Any = (short[n].term, short[n].kinds, short[n].vanishing, short[n].nonzero, short[n].infinite)
                stage.partial |= short[n].partial
            else:
                walk = _Walk(self, stage)
                key = walk.key(n)
                stage.foreign |= walk.foreign
            seen.setdefault(key, n)
        stage.tasks = tuple(seen.items())
        stage.short = {n: short[n] for n in seen.values() if n in short}

    def numbers(self, stage: Stage, n: int) -> dict[int, int]:
        """The symbols of an element of a stage, by their numbers in its key."""
        walk = _Walk(self, stage)
        walk.key(n)
        return walk.numbers


class _Walk:
    """One element of a stage, followed back through both pieces."""

    def __init__(self, cutter: Cutter, stage: Stage):
        self.cutter = cutter
        self.stage = stage
        self.numbers: dict[int, int] = {}
        self.tokens: list[Any] = []
        self.seen: dict[Any, int] = {}
        self.foreign = False

    def key(self, n: int) -> Any:
        """Names go, structure stays."""
        stage, goal = self.stage, self.stage.goal
        i = int(goal.ids[n])
        for t in goal.terms:
            self.tokens.append(1 if t.number == 1 else t.number)
            self.place(stage.plan, t.place, int(t.elements[n]))
        if not stage.nonzero:
            got, self.tokens, self.seen, known = self.tokens, [], {}, len(self.numbers)
            self.tokens.append(1)
            self.wanted(i)
            self.foreign = len(self.numbers) > known
            self.tokens = [*got, "=", *self.tokens]
            self.factor(goal.factor)
        for f in stage.facts:
            self.symbol(f)
            if f in stage.written:
                self.place(stage.written[f], *self.cutter.elements.where(f))
        for part in stage.divisions:
            last = part.calls[-1].outputs[0]
            for at in range(int(np.prod(self.cutter.graph.shape(last)))):
                self.place(part, last, at)
        mine = self.numbers.keys() - stage.extra.keys()
        for call, term, symbols in self.cutter.elements.divisors.granted(stage):
            if symbols <= mine:
                made, leaves = self.cutter.graph.terms.canonical(term)
                self.tokens += ["granted", made]
                for info in leaves:
                    self.place(stage.logical, *self.cutter.graph.leaf(call, info))
        kinds = tuple((self.cutter.elements.symbol_kind(i), self.cutter.elements.state(i)) for i in self.numbers)
        kinds += self.cutter.elements.vanishing(self.numbers)
        facts = tuple(f in stage.written for f in stage.facts)
        infinite = self.cutter.elements.infinite(goal.ids)
        return (stage.nonzero, stage.value, stage.with_facts, infinite, tuple(self.tokens), len(goal.terms), facts, kinds)

    def wanted(self, i: int) -> None:
        defined = self.cutter.elements.wanted(self.stage, i)
        if defined is None:
            self.symbol(i)
        else:
            self.place(*defined)

    def symbol(self, i: int) -> None:
        if i == NOTHING:
            self.tokens.append(None)
        elif i in self.stage.extra:
            place, part = self.stage.extra[i]
            self.place(part, place, 0)
        elif (defined := self.cutter.elements.definition(self.stage, i)) is not None:
            self.place(*defined)
        else:
            self.tokens.append(self.numbers.setdefault(i, len(self.numbers)))

    def factor(self, f: Factor) -> None:
        if f.plain:
            return
        self.tokens.append((f.number, f.element is None, f.power))
        if f.element is not None:
            self.symbol(f.element)

    def place(self, part: Part, place: Place, at: int) -> None:
        where = (part, place, at)
        known = self.seen.get(where)
        if len(self.tokens) > MAX_TOKENS:
            raise NoStage(TOO_LONG)
        if known is not None:
            self.tokens.append(("again", known))
            return
        leaf = part.leaves.get(place)
        if leaf is not None:
            ids, factor = leaf
            self.symbol(int(ids[at]))
            self.factor(factor)
            return
        self.seen[where] = len(self.seen)
        term, leaves = self.cutter.graph.definition(place, at)
        self.tokens.append(term)
        for at_place, position in leaves:
            self.place(part, at_place, position)
