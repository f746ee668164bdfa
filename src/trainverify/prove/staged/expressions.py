"""The expressions that elements of a stage are, on both sides, and the parts that these have in common.

An element is the same expression on both sides if it has one number there, whatever ops it is cut into. Of the others, the largest parts
that both sides have in common need not be looked into: what holds for any value of them holds for theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, Final

from trainverify.prove.definedness import FACTS, FINITE, POSITIONS, WILD
from trainverify.prove.staged.elements import Elements
from trainverify.prove.staged.graphs import NOTHING, Call, Place
from trainverify.prove.staged.masks import Masks
from trainverify.prove.staged.numbered import Numbered
from trainverify.prove.staged.records import Factor, Part, Short, Stage
from trainverify.prove.staged.terms import CanonicalTerm, Term, finite_arguments

SMALL_STAGE: Final = 300  # expressions of a stage that are looked through as they are
ROUNDS: Final = 12
DIFFERENT: Final = 16  # elements of a stage that differ in more than names, before the order of sums is looked at
LARGE: Final = 3_000  # expressions of a stage whose elements are taken apart
BITS: Final = 1_000_000_000  # expressions times symbols of a stage whose elements are taken apart
VISITS: Final = 2_000_000  # of expressions of a stage, in search for common parts
_NOTHING: Final = {"real": Fraction(0), "int": 0, "bool": 0}


class Expressions(Numbered):
    """Of both sides of one stage."""

    def __init__(self, stage: Stage, elements: Elements, times: int = 1):
        super().__init__(elements, any(elements.compares(c) for part in (stage.plan, stage.logical) for c in part.calls))
        self.stage = stage
        self._times = times  # how many elements each one that is looked at stands for
        self.graph = elements.graph
        self._elements: dict[tuple[Part, Place, int], int] = {}
        self._inside: dict[tuple[Part, int, int], dict[Term, int]] = {}  # piece and call → its terms
        self._nonzero: set[int] = set()  # what the logical program divides by
        self._infinite = elements.infinite(stage.goal.ids)
        self._infinite_parts: set[int] = set()  # of parts of elements, by number
        self._each = False  # whether some of what is to be shown may have no value, and says nothing of the rest
        self.by_parts: dict[int, bool] = {}  # elements that are equal if parts of them are, which are numbered behind all elements
        self.equal: dict[int, bool] = {}  # elements that are one expression once masks are outside, and whether that may be without a value

    # -- the same ----------------------------------------------------------------------------------------------------

    def same(self, n: int) -> bool | None:
        """Whether element n of the goal is one expression on both sides: None if not, else whether that may be without a value."""
        if self.stage.nonzero or not self.stage.goal.factor.plain:
            return None
        got = self._got(n)
        if got != self._wanted(n):
            return None
        self.describe()
        return self.partial[got]

    def _got(self, n: int) -> int:
        terms = [(t.number, self._element(self.stage.plan, t.place, int(t.elements[n]))) for t in self.stage.goal.terms]
        if len(terms) == 1 and terms[0][0] == 1:
            return terms[0][1]
        return self.number(("dot", (2,) * len(terms), tuple([x for c, e in terms for x in (self.literal(c), e)])))

    def _wanted(self, n: int) -> int:
        i = int(self.stage.goal.ids[n])
        defined = self.elements.wanted(self.stage, i)
        return self._symbol(i, "real") if defined is None else self._element(*defined)

    def _symbol(self, i: int, kind: str) -> int:
        if i == NOTHING:
            return self.number((kind, _NOTHING[kind], ()))
        if i in self.stage.extra:
            place, part = self.stage.extra[i]
            return self._element(part, place, 0)
        defined = self.elements.definition(self.stage, i)
        return self.number(("symbol", i, ())) if defined is None else self._element(*defined)

    def _scaled(self, number: int, factor: Factor) -> int:
        if factor.plain:
            return number
        made = self.number(("map", ("mul", None, "NoneType"), (self.literal(factor.number), number)))
        if factor.element is None:
            return made
        by = self._symbol(factor.element, "real")
        return self.number(("map", ("mul" if factor.power > 0 else "div", None, "NoneType"), (made, by)))

    def _element(self, part: Part, place: Place, at: int) -> int:
        where = (part, place, at)
        found = self._elements.get(where)
        if found is None:
            found = self._elements[where] = self._made(part, place, at)
        return found

    def _made(self, part: Part, place: Place, at: int) -> int:
        leaf = part.leaves.get(place)
        if leaf is not None:
            ids, factor = leaf
            return self._scaled(self._symbol(int(ids[at]), self.graph.kind(place)), factor)
        sender = self.graph.sent(place)
        if sender is not None:
            return self._element(part, sender, at)
        call = self.graph.makers[place]
        inside = self._inside.setdefault((part, call.at, call.row), {})
        return self._term(part, call, inside, self.graph.term(place, at))

    def _term(self, part: Part, call: Call, inside: dict[Term, int], term: Term) -> int:
        found = inside.get(term)
        if found is None:
            if term.op == "leaf":
                found = self._element(part, *self.graph.leaf(call, term.info))
            else:
                found = self.simple((term.op, term.info, tuple([self._term(part, call, inside, a) for a in term.args])))
            inside[term] = found
        return found

    # -- common parts ------------------------------------------------------------------------------------------------

    def short(self, elements: Sequence[int], in_parts: bool = True) -> dict[int, Short]:
        """These elements with common parts as symbols; none of those whose two sides do not speak of the same."""
        stage = self.stage
        if stage.nonzero or stage.extra:
            return {}
        pairs = {n: (self._got(n), self._wanted(n)) for n in elements}
        if not pairs or (len(self.keys) * self._times < SMALL_STAGE and not stage.with_facts):
            return {}
        self._each = any(i != NOTHING and self.elements.state(i) == WILD for i in (int(stage.goal.ids[n]) for n in elements))
        divided = self._divided()
        self._nonzero = {number for info, number in divided if info[0] == "div"}
        if len(self.keys) * self._times < SMALL_STAGE and not self._nonzero:
            return {}
        assumed = False
        if any(self.is_mask(key) for key in self.keys):
            masks = Masks(self, self._always([want for _, want in pairs.values()], self._infinite), divided)
            pairs = {n: (masks.outside(got), masks.outside(want)) for n, (got, want) in pairs.items()}
            assumed = masks.assumed
        factor = self._scaled(self.literal(1), stage.goal.factor)
        self.describe()
        if stage.goal.factor.plain:
            self.equal = {n: assumed or self.partial[got] for n, (got, want) in pairs.items() if got == want}
            pairs = {n: pair for n, pair in pairs.items() if n not in self.equal}
            if not pairs:
                return {}
            parts = self._in_parts(pairs) if in_parts else {}
            if parts:
                found = self._with_symbols(parts, factor, assumed)
                if found.keys() == parts.keys():
                    self.by_parts = {n: assumed or self.partial[want] for n, (_, want) in pairs.items()}
                    return found
        return self._with_symbols(pairs, factor, assumed)

    def _in_parts(self, pairs: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
        """Parts of large elements, numbered behind them, such that the elements are equal if these are: where both sides do the same to
        real numbers that are made of the same symbols, those are compared. None if an element is not in parts."""
        last = max(max(pair) for pair in pairs.values()) + 1
        symbols = {n: at for at, n in enumerate(n for n in range(last) if self.keys[n][0] == "symbol")}
        if last * self._times < LARGE or last * len(symbols) > BITS:
            return {}
        masks: list[int] = []
        for n in range(last):
            op, _, args = self.keys[n]
            mask = 1 << symbols[n] if op == "symbol" else 0
            for a in args:
                mask |= masks[a]
            masks.append(mask)
        found: dict[tuple[int, int], bool] = {}
        seen: set[tuple[tuple[int, int], bool]] = set()
        whole = set(pairs.values())
        stack = [(pair, self._infinite) for pair in whole]
        while stack:
            pair, infinite = stack.pop()
            if (pair, infinite) in seen:
                continue
            seen.add((pair, infinite))
            (op, info, args), (other, same, theirs) = self.keys[pair[0]], self.keys[pair[1]]
            inner = [(a, b) for a, b in zip(args, theirs, strict=False) if a != b]
            same_function = op == other and info == same and len(args) == len(theirs) and op in ("dot", "map", "reduce")
            if same_function and all(masks[a] == masks[b] and self._number_for_sure(a) and self._number_for_sure(b) for a, b in inner):
                kept = {(args[k], theirs[k]) for k in finite_arguments(op, info, [self.picks[a] for a in args])}
                stack += [(p, infinite or p not in kept) for p in inner]
            elif pair in whole:
                return {}
            else:
                found[pair] = found.get(pair, False) or infinite
        first = len(self.stage.goal.ids)
        self._infinite_parts = {first + n for n, infinite in enumerate(found.values()) if infinite}
        return {first + n: pair for n, pair in enumerate(found)}

    def _number_for_sure(self, number: int) -> bool:
        """Whether an expression is a real number wherever it and the logical program are defined."""
        return self.real[number] and self.states[number] == FINITE

    def _with_symbols(self, pairs: dict[int, tuple[int, int]], factor: int, assumed: bool) -> dict[int, Short]:
        """With the largest common parts as symbols."""
        stops = {c for c in self._common(pairs) if self._may_stand(c)}
        left = VISITS
        for _ in range(ROUNDS):
            unmatched: set[int] = set()
            foreign: set[int] = set()
            for n, (got, want) in pairs.items():
                mine, visits = self._leaves((got, factor), stops)
                theirs, more = self._leaves((want,), stops)
                left -= visits + more
                unmatched |= {u for u in (mine ^ theirs) & stops if not self._anywhere(u)}
                if not theirs <= mine:
                    foreign.add(n)
                if left < 0:
                    return {}
            if not unmatched:
                return self._shorts({n: p for n, p in pairs.items() if n not in foreign}, factor, stops, assumed)
            stops -= unmatched
        return {}

    def _anywhere(self, number: int) -> bool:
        """Whether a part may stand in one side of an element only: of positions nothing more is known, if they surely have a value."""
        return self.keys[number][0] in ("hit", "row") and (self.total[number] or not self._each)

    def _common(self, pairs: dict[int, tuple[int, int]]) -> set[int]:
        """Parts that both sides have. Not what is turned into an integer, nor what may be without a value in a branch that is not taken,
        or infinite where nobody sees it, nor what is compared: it may be 0 because of a factor that it has."""
        got, want = zip(*pairs.values(), strict=True)
        infinite = {n: want for n, (_, want) in pairs.items() if self._infinite or n in self._infinite_parts}
        whole = {a for op, info, args in self.keys if op == "map" and info[0] in ("as_int", "as_bool") for a in args}
        hidden = self._parts(a for number in range(len(self.keys)) for a in self._unseen(number))
        doubtful = {b for b in self._parts(infinite.values()) | hidden if not self.total[b]}
        if doubtful:
            doubtful -= self._always([w for n, (_, w) in pairs.items() if n not in infinite], bool(infinite))
        compared = self._parts(self._compared(), enter=lambda n: [a for a in self.keys[n][2] if self._may_vanish(a)])
        wide = self._above(compared)
        found = self._parts(got) & self._parts(want)
        return found - whole - wide - doubtful

    def _always(self, want: Sequence[int], infinite: bool) -> set[int]:
        """Parts of the logical side that have a value wherever the logical program is defined, and what is to be shown has one; infinite if
        some of that may be infinite."""
        if self._infinite or (infinite and self._each):
            return set()
        if not self._each:
            return self._strict(want)
        every = [self._strict([w]) for w in dict.fromkeys(want)]
        return set.intersection(*every) if every else set()

    def _strict(self, numbers: Iterable[int]) -> set[int]:
        """Parts of these that have values where these have: not those in branches."""
        return self._parts(numbers, enter=self._demanded)

    def _demanded(self, number: int) -> list[int]:
        """What of an expression must be finite where that is."""
        op, info, args = self.keys[number]
        return [args[n] for n in finite_arguments(op, info, [self.picks[a] for a in args])]

    def _unseen(self, number: int) -> list[int]:
        """What of it need not."""
        op, info, args = self.keys[number]
        kept = finite_arguments(op, info, [self.picks[a] for a in args])
        return [] if len(kept) == len(args) else [a for n, a in enumerate(args) if n not in kept]

    def _divided(self) -> set[tuple[Any, int]]:
        """What ops of the logical side divide by, or take roots or logarithms of: all elements have values, not only the wanted."""
        part, found = self.stage.logical, set()
        for call, info, term in self.elements.divisors.of(self.stage):
            inside = self._inside.setdefault((part, call.at, call.row), {})
            found.add((info, self._term(part, call, inside, term)))
        return found

    def _compared(self) -> list[int]:
        """What is positive or 0, and something is said of which."""
        compared = [a for op, info, args in self.keys if op == "map" and FACTS[info[0]].compares for a in args]
        return [a for a in compared if self.signs[a] == "nonnegative" and self._may_vanish(a)]

    def _may_vanish(self, number: int) -> bool:
        """Whether an expression may be 0 because of a factor that it has."""
        return self.signs[number] != "positive" and self.keys[number][0] not in ("hit", "row", "real", "symbol")

    def _above(self, numbers: set[int]) -> set[int]:
        """These and everything that they are part of, if not of what is compared or sorted only."""
        found = set(numbers)
        for n, (op, _, args) in enumerate(self.keys):
            if op not in ("hit", "row") and not found.isdisjoint(args):
                found.add(n)
        return found if numbers else set()

    def _may_stand(self, number: int) -> bool:
        """Whether an expression is a number wherever the logical program is defined, and more than a symbol: a real one, or a position."""
        op, info, _ = self.keys[number]
        if self.states[number] != FINITE or op in ("symbol", "real"):
            return False
        return self.real[number] or (op == "row" and info[0] in POSITIONS)

    def _parts(self, numbers: Iterable[int], enter: Callable[[int], Sequence[int]] | None = None) -> set[int]:
        """Everything in these, or only what is reached by `enter`."""
        found = set(numbers)
        stack = list(found)
        while stack:
            number = stack.pop()
            for a in self.keys[number][2] if enter is None else enter(number):
                if a not in found:
                    found.add(a)
                    stack.append(a)
        return found

    def _leaves(self, numbers: tuple[int, ...], stops: set[int]) -> tuple[set[int], int]:
        """The symbols and stops that these are made of, and how much was looked at."""
        found: set[int] = set()
        seen = set(numbers)
        stack = list(numbers)
        while stack:
            number = stack.pop()
            op, _, args = self.keys[number]
            if op == "symbol" or number in stops:
                found.add(number)
                continue
            for a in args:
                if a not in seen:
                    seen.add(a)
                    stack.append(a)
        return found, len(seen)

    def _shorts(self, pairs: dict[int, tuple[int, int]], factor: int, stops: set[int], assumed: bool) -> dict[int, Short]:
        make = self.graph.terms.make
        known: dict[int, Term] = {}

        def term(number: int) -> Term:
            found = known.get(number)
            if found is None:
                op, info, args = self.keys[number]
                leaf = op == "symbol" or number in stops
                found = known[number] = make("leaf", number) if leaf else make(op, info, [term(a) for a in args])
            return found

        granted = {g: self._leaves((g,), stops)[0] for g in sorted(self._nonzero - stops) if self.signs[g] != "positive"}
        goals = {}
        for n, (got, want) in pairs.items():
            known_of = self._leaves((got, factor, want), stops)[0] if granted else set()
            more = [term(g) for g, leaves in granted.items() if leaves <= known_of]
            goals[n] = make("goal", None, [term(got), term(factor), term(want), *more])
        forms: dict[int, CanonicalTerm] = {n: self.graph.terms.canonical(goal) for n, goal in goals.items()}
        if len({form for form, _ in forms.values()}) > DIFFERENT:
            forms = {n: self.graph.terms.arranged(goal) for n, goal in goals.items()}
        made = {}
        facts = set(self.stage.facts)
        for n, canonical in forms.items():
            leaves: tuple[Any, ...] = canonical[1]
            if any(self.states[number] != FINITE for number in leaves):
                continue
            kinds = tuple([self._kind(number) for number in leaves])
            partial = assumed or any(self.partial[number] for number in leaves)
            shown = [self.keys[number][0] == "symbol" and self.keys[number][1] in facts for number in leaves]
            nonzero = tuple([k for k, number in enumerate(leaves) if shown[k] or number in self._nonzero])
            partial |= len(goals[n].args) > 3 or not self._nonzero.isdisjoint(leaves)
            infinite = self._infinite or n in self._infinite_parts
            made[n] = Short(canonical[0], kinds, self._vanishing(leaves), nonzero, partial, infinite)
        return made

    def _vanishing(self, leaves: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Which of these are 0 wherever which symbols among them are, as far as that is of interest."""
        at = {self.keys[number][1]: n for n, number in enumerate(leaves) if self.keys[number][0] == "symbol"}
        if not self.elements.supports:
            return ()
        pairs = [(n, at.get(i)) for n, number in enumerate(leaves) for i in self.support(number) or () if i in self.elements.supported]
        return tuple(sorted((n, other) for n, other in pairs if other is not None and other != n))

    def _kind(self, number: int) -> tuple[str, Any]:
        op, info, args = self.keys[number]
        if op == "symbol":
            return self.elements.symbol_kind(info)  # type: ignore[no-any-return]
        if op == "hit":
            return ("real", ("indicator", None, None))
        if not self.real[number]:  # where something is in a sorted row
            return ("int", ("ids", len(args), None))
        return ("real", None if self.signs[number] is None else (self.signs[number], None, None))
