"""Numbers for the expressions that elements of a stage are: one expression, one number, however often it occurs.

An element is the same expression on both sides if it has one number there, whatever ops it is cut into. Of the others, the largest parts
that both sides have in common need not be looked into: what holds for any value of them holds for theirs. Nothing is rewritten, but what
is multiplied by the number 0 is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from trainverify.prove.staged.align import Alignment, Factor
from trainverify.prove.staged.graphs import LOGICAL, Call, Place
from trainverify.prove.staged.lookup import NOTHING
from trainverify.prove.staged.signs import FINITE, POSITIONS, WILD, Sign, expression_sign, expression_state
from trainverify.prove.staged.supports import NOWHERE, Support, expression_support
from trainverify.prove.staged.terms import MAY_FAIL, Made, Term, finite_arguments, looks_up

if TYPE_CHECKING:
    from trainverify.prove.staged.stages import Part, Stage

Key = tuple[str, Any, tuple[int, ...]]  # op, info, numbers of arguments
FEW: Final = 300  # expressions of a stage that are looked through as they are
ROUNDS: Final = 12
DIFFERENT: Final = 16  # elements of a stage that differ in more than names, before the order of sums is looked at
LARGE: Final = 3_000  # expressions of a stage whose elements are taken apart
BITS: Final = 1_000_000_000  # expressions times symbols of a stage whose elements are taken apart
VISITS: Final = 2_000_000  # of expressions of a stage, in search for common parts
REAL: Final = frozenset(("exp", "log", "div", "pow", "sin", "cos", "tanh", "erf", "as_real"))  # functions whose values are real numbers
ARITHMETIC: Final = frozenset(("add", "sub", "mul", "neg", "max", "min", "abs", "detach"))  # whose values are so if an argument is
COMPARES: Final = frozenset(("lt", "le", "eq", "sign"))
_NOTHING: Final = {"real": Fraction(0), "int": 0, "bool": 0}


@dataclass(frozen=True)
class Short:
    """got, factor, want of an element, and what else is not 0, as the logical program divides by it; over numbered symbols: those of the
    stage, and parts that both sides have in common."""

    term: Term
    kinds: tuple[tuple[str, Any], ...]
    vanishing: tuple[tuple[int, int], ...]  # which of them are 0 wherever which others are
    nonzero: tuple[int, ...]  # which of them are not 0: other stages show it, or the logical program divides by them
    partial: bool  # whether it rests on what the logical program divides by, or takes a root or logarithm of
    loose: bool  # whether it may be infinite, for all that is said of it


class Expressions:
    """Of both sides of one stage."""

    def __init__(self, stage: Stage, alignment: Alignment, times: int = 1):
        self.stage = stage
        self._times = times  # how many elements each one that is looked at stands for
        self.alignment = alignment
        self.graph = alignment.graph
        self._numbers: dict[Key, int] = {}
        self._keys: list[Key] = []
        self._picks: list[bool] = []  # whether it says which elements are looked up
        self._masked = any(alignment.compares(c) for part in (stage.plan, stage.logical) for c in part.calls)  # then products have one form
        self._literals: dict[Fraction | int, int] = {}
        self._partial: list[bool] = []  # whether something in it divides, or takes a root or logarithm
        self._total: list[bool] = []  # whether nothing in it divides, or takes a root or logarithm, unless of what is positive
        self._states: list[int] = []
        self._signs: list[Sign] = []
        self._supports: dict[int, Support] = {}
        self._real: list[bool] = []  # whether it is known to be a real number, not an integer or a truth value
        self._elements: dict[tuple[int, Place, int], int] = {}
        self._inside: dict[tuple[int, int, int], dict[Term, int]] = {}  # piece and call → its terms
        self._nonzero: set[int] = set()  # what the logical program divides by
        self._loose = alignment.loose(stage.goal.ids)
        self._loose_parts: set[int] = set()  # of parts of elements, by number
        self._each = False  # whether some of what is to be shown may have no value, and says nothing of the rest
        self._counts: set[int] = set()  # sums of truth values
        self._zero = self._literal(0)
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
        self._describe()
        return self._partial[got]

    def _got(self, n: int) -> int:
        terms = [(t.number, self._element(self.stage.plan, t.place, int(t.elements[n]))) for t in self.stage.goal.terms]
        if len(terms) == 1 and terms[0][0] == 1:
            return terms[0][1]
        return self._number(("dot", (2,) * len(terms), tuple([x for c, e in terms for x in (self._literal(c), e)])))

    def _wanted(self, n: int) -> int:
        a, i = self.alignment, int(self.stage.goal.ids[n])
        if 0 <= i < a.count:
            place = (LOGICAL, 0, a.owner[i])
            if place in self.stage.logical:
                return self._element(self.stage.logical, place, i - a.start[a.owner[i]])
        return self._symbol(i, "real")

    def _number(self, key: Key) -> int:
        if self._masked and key[0] == "map" and key[1][0] == "mul":
            key = ("dot", (2,), key[2])
        found = self._numbers.setdefault(key, len(self._keys))
        if found == len(self._keys):
            self._keys.append(key)
            self._picks.append(looks_up(key[0], key[1], [self._picks[a] for a in key[2]]))
        return found

    def _simple(self, key: Key) -> int:
        """The number of an expression without what is multiplied by the number 0, if that surely has a value."""
        op, info, args = key
        if op == "dot" and args and self._counts_or_counted(args) and info.count(1) == len(info):
            return self._count(args)
        if self._zero not in args or op not in ("dot", "map"):
            return self._number(key)
        if op == "map":
            vanishes = info[0] in ("mul", "neg") or (info[0] == "div" and args[0] == self._zero and self._signs_of(args[1]) == "positive")
            return self._zero if vanishes and self._sure(args) else self._number(key)
        products: list[tuple[int, ...]] = []
        at = 0
        for n in info:
            product = args[at : at + n]
            at += n
            if self._zero not in product or not self._sure(product):
                products.append(product)
        if not products:
            return self._zero
        return self._number(("dot", tuple(map(len, products)), tuple([x for p in products for x in p])))

    def _counts_or_counted(self, args: tuple[int, ...]) -> bool:
        """Whether all of these are truth values as numbers, or sums of such."""
        return all(a in self._counts or (self._keys[a][0] == "map" and self._keys[a][1][0] == "as_real") for a in args)

    def _count(self, args: tuple[int, ...]) -> int:
        """How many of these are true: one expression, however ranks share the counting."""
        flat = sorted(x for a in args for x in (self._keys[a][2] if a in self._counts else (a,)))
        found = self._number(("dot", (1,) * len(flat), tuple(flat)))
        self._counts.add(found)
        return found

    def _signs_of(self, number: int) -> Sign:
        self._describe()
        return self._signs[number]

    def _sure(self, numbers: Iterable[int]) -> bool:
        """Whether expressions are real numbers, whatever the symbols in them are."""
        self._describe()
        return all(self._total[n] and self._states[n] == FINITE for n in numbers)

    def _describe(self) -> None:
        """What is known of all numbers so far."""
        partial, states, signs, real, total = self._partial, self._states, self._signs, self._real, self._total
        for op, info, args in self._keys[len(states) :]:
            if op == "symbol":
                kind, domain = self.alignment.symbol_kind(info)
                signed = domain is not None and domain[0] in ("positive", "nonnegative")
                real.append(kind == "real")
                signs.append(domain[0] if signed else None)
                partial.append(False)
                total.append(True)
                states.append(self.alignment.state(info))
                continue
            inner = [states[a] for a in args]
            real.append(_is_real(op, info, [real[a] for a in args]))
            signs.append(expression_sign(op, info, [signs[a] for a in args], inner, args, self._there(op, args)))
            may_fail = op == "map" and info[0] in MAY_FAIL
            partial.append(may_fail or any(partial[a] for a in args))
            total.append(not (may_fail and signs[args[-1]] != "positive") and all(total[a] for a in args))
            states.append(expression_state(op, info, inner))

    def _there(self, op: str, args: Sequence[int]) -> bool:
        """Whether something is looked up by a position in a row that is no longer than what it is looked up in."""
        if op != "pick":
            return False
        op, info, row = self._keys[args[0]]
        return op == "row" and info[0] in POSITIONS and len(row) < len(args)

    def _support(self, number: int) -> Support:
        """The symbols with which an expression vanishes."""
        found = self._supports.get(number)
        if number not in self._supports:
            op, info, args = self._keys[number]
            if op == "symbol":
                found = self.alignment.supports.get(info, NOWHERE) | {info}
            else:
                found = expression_support(op, info, [self._support(a) for a in args])
            self._supports[number] = found
        return found

    def _literal(self, value: Fraction | int) -> int:
        found = self._literals.get(value)
        if found is None:
            found = self._literals[value] = self._number(("real", Fraction(value), ()))
        return found

    def _symbol(self, i: int, kind: str) -> int:
        if i == NOTHING:
            return self._number((kind, _NOTHING[kind], ()))
        if i in self.stage.extra:
            place, part = self.stage.extra[i]
            return self._element(part, place, 0)
        defined = self.stage.definition(i, self.alignment)
        return self._number(("symbol", i, ())) if defined is None else self._element(*defined)

    def _scaled(self, number: int, factor: Factor) -> int:
        if factor.plain:
            return number
        made = self._number(("map", ("mul", None, "NoneType"), (self._literal(factor.number), number)))
        if factor.element is None:
            return made
        by = self._symbol(factor.element, "real")
        return self._number(("map", ("mul" if factor.power > 0 else "div", None, "NoneType"), (made, by)))

    def _element(self, part: Part, place: Place, at: int) -> int:
        where = (id(part), place, at)
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
        inside = self._inside.setdefault((id(part), call.at, call.row), {})
        return self._term(part, call, inside, self.graph.term(place, at))

    def _term(self, part: Part, call: Call, inside: dict[Term, int], term: Term) -> int:
        found = inside.get(term)
        if found is None:
            if term.op == "leaf":
                found = self._element(part, *self.graph.leaf(call, term.info))
            else:
                found = self._simple((term.op, term.info, tuple([self._term(part, call, inside, a) for a in term.args])))
            inside[term] = found
        return found

    # -- common parts ------------------------------------------------------------------------------------------------

    def short(self, elements: Sequence[int], in_parts: bool = True) -> dict[int, Short]:
        """These elements with common parts as symbols; none of those whose two sides do not speak of the same."""
        stage = self.stage
        if stage.nonzero or stage.extra:
            return {}
        pairs = {n: (self._got(n), self._wanted(n)) for n in elements}
        if not pairs or (len(self._keys) * self._times < FEW and not stage.with_facts):
            return {}
        self._each = any(i != NOTHING and self.alignment.state(i) == WILD for i in (int(stage.goal.ids[n]) for n in elements))
        divided = self._divided()
        self._nonzero = {number for info, number in divided if info[0] == "div"}
        if len(self._keys) * self._times < FEW and not self._nonzero:
            return {}
        assumed = False
        if any(self._is_mask(key) for key in self._keys):
            masks = Masks(self, self._always([want for _, want in pairs.values()]), divided)
            pairs = {n: (masks.outside(got), masks.outside(want)) for n, (got, want) in pairs.items()}
            assumed = masks.assumed
        factor = self._scaled(self._literal(1), stage.goal.factor)
        self._describe()
        if stage.goal.factor.plain:
            self.equal = {n: assumed or self._partial[got] for n, (got, want) in pairs.items() if got == want}
            pairs = {n: pair for n, pair in pairs.items() if n not in self.equal}
            if not pairs:
                return {}
            apart = self._apart(pairs) if in_parts else {}
            if apart:
                found = self._with_symbols(apart, factor, assumed)
                if found.keys() == apart.keys():
                    self.by_parts = {n: assumed or self._partial[want] for n, (_, want) in pairs.items()}
                    return found
        return self._with_symbols(pairs, factor, assumed)

    def _apart(self, pairs: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
        """Parts of large elements, numbered behind them, such that the elements are equal if these are: where both sides do the same to
        real numbers that are made of the same symbols, those are compared. None if an element is not in parts."""
        last = max(max(pair) for pair in pairs.values()) + 1
        symbols = {n: at for at, n in enumerate(n for n in range(last) if self._keys[n][0] == "symbol")}
        if last * self._times < LARGE or last * len(symbols) > BITS:
            return {}
        masks: list[int] = []
        for n in range(last):
            op, _, args = self._keys[n]
            mask = 1 << symbols[n] if op == "symbol" else 0
            for a in args:
                mask |= masks[a]
            masks.append(mask)
        found: dict[tuple[int, int], bool] = {}
        seen: set[tuple[tuple[int, int], bool]] = set()
        whole = set(pairs.values())
        stack = [(pair, self._loose) for pair in whole]
        while stack:
            pair, loose = stack.pop()
            if (pair, loose) in seen:
                continue
            seen.add((pair, loose))
            (op, info, args), (other, same, theirs) = self._keys[pair[0]], self._keys[pair[1]]
            inner = [(a, b) for a, b in zip(args, theirs, strict=False) if a != b]
            alike = op == other and info == same and len(args) == len(theirs) and op in ("dot", "map", "reduce")
            if alike and all(masks[a] == masks[b] and self._number_for_sure(a) and self._number_for_sure(b) for a, b in inner):
                kept = {(args[k], theirs[k]) for k in finite_arguments(op, info, [self._picks[a] for a in args])}
                stack += [(p, loose or p not in kept) for p in inner]
            elif pair in whole:
                return {}
            else:
                found[pair] = found.get(pair, False) or loose
        first = len(self.stage.goal.ids)
        self._loose_parts = {first + n for n, loose in enumerate(found.values()) if loose}
        return {first + n: pair for n, pair in enumerate(found)}

    def _number_for_sure(self, number: int) -> bool:
        """Whether an expression is a real number wherever it and the logical program are defined."""
        return self._real[number] and self._states[number] == FINITE

    def _with_symbols(self, pairs: dict[int, tuple[int, int]], factor: int, assumed: bool) -> dict[int, Short]:
        """With the largest common parts as symbols."""
        stops = {c for c in self._common(pairs.values()) if self._may_stand(c)}
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
        return self._keys[number][0] in ("hit", "row") and (self._total[number] or not self._each)

    def _common(self, pairs: Iterable[tuple[int, int]]) -> set[int]:
        """Parts that both sides have. Not what is turned into an integer, nor what may be without a value in a branch that is not taken,
        or infinite where nobody sees it, nor what is compared: it may be 0 because of a factor that it has."""
        got, want = zip(*pairs, strict=True)
        whole = {a for op, info, args in self._keys if op == "map" and info[0] in ("as_int", "as_bool") for a in args}
        hidden = self._parts(a for number in range(len(self._keys)) for a in self._unseen(number))
        doubtful = {b for b in (self._parts(want) | hidden if self._loose else hidden) if not self._total[b]}
        if doubtful:
            doubtful -= self._always(want) | self._strict(self._nonzero)
        compared = self._parts(self._compared(), enter=lambda n: [a for a in self._keys[n][2] if self._may_vanish(a)])
        wide = self._above(compared)
        found = self._parts(got) & self._parts(want)
        return found - whole - wide - doubtful

    def _always(self, want: Sequence[int]) -> set[int]:
        """Parts of the logical side that have a value wherever the logical program is defined, and what is to be shown has one."""
        if self._loose:
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
        op, info, args = self._keys[number]
        return [args[n] for n in finite_arguments(op, info, [self._picks[a] for a in args])]

    def _unseen(self, number: int) -> list[int]:
        """What of it need not."""
        op, info, args = self._keys[number]
        kept = finite_arguments(op, info, [self._picks[a] for a in args])
        return [] if len(kept) == len(args) else [a for n, a in enumerate(args) if n not in kept]

    def _divided(self) -> set[tuple[Any, int]]:
        """What ops of the logical side divide by, or take roots or logarithms of: all elements have values, not only the wanted."""
        part, found = self.stage.logical, set()
        for call, info, term in self.alignment.divisors.of(self.stage):
            inside = self._inside.setdefault((id(part), call.at, call.row), {})
            found.add((info, self._term(part, call, inside, term)))
        return found

    def _compared(self) -> list[int]:
        """What is positive or 0, and something is said of which."""
        compared = [a for op, info, args in self._keys if op == "map" and info[0] in COMPARES for a in args]
        return [a for a in compared if self._signs[a] == "nonnegative" and self._may_vanish(a)]

    def _may_vanish(self, number: int) -> bool:
        """Whether an expression may be 0 because of a factor that it has."""
        return self._signs[number] != "positive" and self._keys[number][0] not in ("hit", "row", "real", "symbol")

    def _above(self, numbers: set[int]) -> set[int]:
        """These and everything that they are part of, if not of what is compared or sorted only."""
        found = set(numbers)
        for n, (op, _, args) in enumerate(self._keys):
            if op not in ("hit", "row") and not found.isdisjoint(args):
                found.add(n)
        return found if numbers else set()

    def _of_a_row(self, number: int) -> bool:
        """Whether an expression is a position in a sorted row, or whether something is at one."""
        op, _, args = self._keys[number]
        return op == "row" or (op == "hit" and self._keys[args[0]][0] == "row")

    def _may_stand(self, number: int) -> bool:
        """Whether an expression is a number wherever the logical program is defined, and more than a symbol: a real one, or a position."""
        op, info, _ = self._keys[number]
        if self._states[number] != FINITE or op in ("symbol", "real"):
            return False
        return self._real[number] or (op == "row" and info[0] in POSITIONS)

    def _is_mask(self, key: Key) -> bool:
        """Whether an expression is 1 where something is positive, else 0."""
        op, info, args = key
        if op != "map" or info[0] != "as_real":
            return False
        op, info, args = self._keys[args[0]]
        return op == "map" and info[0] == "lt" and self._keys[args[0]][:2] == ("real", 0)

    def _parts(self, numbers: Iterable[int], enter: Callable[[int], Sequence[int]] | None = None) -> set[int]:
        """Everything in these, or only what is reached by `enter`."""
        found = set(numbers)
        stack = list(found)
        while stack:
            number = stack.pop()
            for a in self._keys[number][2] if enter is None else enter(number):
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
            op, _, args = self._keys[number]
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
                op, info, args = self._keys[number]
                leaf = op == "symbol" or number in stops
                found = known[number] = make("leaf", number) if leaf else make(op, info, [term(a) for a in args])
            return found

        granted = {g: self._leaves((g,), stops)[0] for g in sorted(self._nonzero - stops) if self._signs[g] != "positive"}
        goals = {}
        for n, (got, want) in pairs.items():
            known_of = self._leaves((got, factor, want), stops)[0] if granted else set()
            more = [term(g) for g, leaves in granted.items() if leaves <= known_of]
            goals[n] = make("goal", None, [term(got), term(factor), term(want), *more])
        forms: dict[int, Made] = {n: self.graph.terms.canonical(goal) for n, goal in goals.items()}
        if len({form for form, _ in forms.values()}) > DIFFERENT:
            forms = {n: self.graph.terms.arranged(goal) for n, goal in goals.items()}
        made = {}
        facts = set(self.stage.facts)
        for n, canonical in forms.items():
            leaves: tuple[Any, ...] = canonical[1]
            if any(self._states[number] != FINITE for number in leaves):
                continue
            kinds = tuple([self._kind(number) for number in leaves])
            partial = assumed or any(self._partial[number] for number in leaves)
            shown = [self._keys[number][0] == "symbol" and self._keys[number][1] in facts for number in leaves]
            nonzero = tuple([k for k, number in enumerate(leaves) if shown[k] or number in self._nonzero])
            partial |= len(goals[n].args) > 3 or not self._nonzero.isdisjoint(leaves)
            loose = self._loose or n in self._loose_parts
            made[n] = Short(canonical[0], kinds, self._vanishing(leaves), nonzero, partial, loose)
        return made

    def _vanishing(self, leaves: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Which of these are 0 wherever which symbols among them are, as far as that is of interest."""
        at = {self._keys[number][1]: n for n, number in enumerate(leaves) if self._keys[number][0] == "symbol"}
        if not self.alignment.supports:
            return ()
        pairs = [(n, at.get(i)) for n, number in enumerate(leaves) for i in self._support(number) or () if i in self.alignment.supported]
        return tuple(sorted((n, other) for n, other in pairs if other is not None and other != n))

    def _kind(self, number: int) -> tuple[str, Any]:
        op, info, args = self._keys[number]
        if op == "symbol":
            return self.alignment.symbol_kind(info)  # type: ignore[no-any-return]
        if op == "hit":
            return ("real", ("indicator", None, None))
        if not self._real[number]:  # where something is in a sorted row
            return ("int", ("ids", len(args), None))
        return ("real", None if self._signs[number] is None else (self._signs[number], None, None))


class Masks:
    """Expressions with masks outside: what is 0 wherever a mask is 0, is the mask times what it is where the mask is 1.

    A mask is whether something is positive, as a number. Only what has a value also where the mask is 0, with the mask in it and without,
    is taken out of it, and only what always has a value is left out where it is multiplied by 0.
    """

    def __init__(self, expressions: Expressions, always: set[int], divided: set[tuple[Any, int]]):
        self.e = expressions
        partial = [self.e._keys[n] for n in always if self._may_fail(n)]
        self._granted = {(info, args[-1]) for _, info, args in partial} | divided  # what the logical program divides by, and takes roots of
        self.assumed = bool(self._granted)
        self._defined: list[bool] = []
        self._plain: list[bool] = []  # whether there is nothing to take out of it, nor to leave out
        self._known: dict[int, tuple[int, int | None, bool]] = {}
        self._outside: dict[int, int] = {}
        self._zeros: dict[tuple[int, int], bool] = {}

    def outside(self, number: int) -> int:
        """The same, with masks as far outside as they can be."""
        found = self._outside.get(number)
        if found is None:
            inner, mask, zero = self._split(number)
            if mask is None:
                found = inner
            elif zero and self._total(number, inner):
                found = inner if self._implied(mask, inner) else self._make("map", ("mul", None, "NoneType"), [mask, inner])
            else:
                op, info, args = self.e._keys[number]
                simpler = number if mask == number else self._make(op, info, [self._known_number(a) for a in args])
                if simpler != number:
                    found = self.outside(simpler)
                else:
                    found = number if mask == number else self._make(op, info, [self.outside(a) for a in args])
            self._outside[number] = found
        return found

    def _implied(self, mask: int, number: int) -> bool:
        """Whether an expression is 0 anyway wherever a mask is: what is compared is not negative, so it is 0 there, and so is one of its
        factors; each of them makes the expression 0, or is never 0 itself."""
        self.e._describe()
        (compared,) = self.e._keys[mask][2]
        y = self.e._keys[compared][2][1]
        if self.e._signs[y] not in ("nonnegative", "positive") or self.e._states[y] != FINITE:
            return False
        return all(self._vanishes(number, factor) for factor in self._factors(y))

    def _factors(self, number: int) -> list[int]:
        """Expressions one of which is 0 where this is; none that is always positive."""
        op, info, args = self.e._keys[number]
        if self.e._signs[number] == "positive" and self.e._states[number] == FINITE:
            return []
        if (op == "dot" and len(info) == 1) or (op == "map" and info[0] == "mul"):
            return [f for a in args for f in self._factors(a)]
        return self._factors(args[0]) if op == "map" and info[0] == "div" else [number]

    def _vanishes(self, number: int, factor: int) -> bool:
        """Whether an expression is 0 wherever another one is, by having it as a factor."""
        key = (number, factor)
        found = self._zeros.get(key)
        if found is None:
            found = self._zeros[key] = number == factor or self._vanishing(number, factor)
        return found

    def _vanishing(self, number: int, factor: int) -> bool:
        op, info, args = self.e._keys[number]
        match op:
            case "real":
                return bool(info == 0)
            case _ if factor > number:  # parts have smaller numbers
                return False
            case "dot":
                ends = list(accumulate(info))
                products = [args[end - n : end] for n, end in zip(info, ends, strict=True)]
                return all(factor in p or any(self._vanishes(a, factor) for a in p) for p in products)
            case "map" if info[0] == "mul":
                return any(self._vanishes(a, factor) for a in args)
            case "map" if info[0] in ("add", "sub"):
                return all(self._vanishes(a, factor) for a in args)
            case "map" if info[0] in ("neg", "div"):
                return self._vanishes(args[0], factor)
        return False

    def _split(self, number: int) -> tuple[int, int | None, bool]:
        """What an expression is where the only mask in it is 1, that mask, and whether it is 0 where that is 0."""
        found = self._known.get(number)
        if found is None:
            found = self._known[number] = self._look(number)
        return found

    def _look(self, number: int) -> tuple[int, int | None, bool]:
        op, info, args = self.e._keys[number]
        if not args or op == "row" or self._nothing_to_do(number):
            return number, None, False
        if self.e._is_mask(self.e._keys[number]):
            return self.e._literal(1), number, True
        plain = self._make(op, info, [self._known_number(a) for a in args])
        if plain != number:
            return self._split(plain)
        parts = [self._split(a) for a in args]
        masks = {m for _, m, _ in parts if m is not None}
        if len(masks) != 1:
            return self._make(op, info, [self.outside(a) for a in args]), None, False
        (mask,) = masks
        known = [frozenset((mask,)) if zero else None if m is None and self._is_zero(inner) else NOWHERE for inner, m, zero in parts]
        support = expression_support(op, info, known)
        return self._make(op, info, [inner for inner, _, _ in parts]), mask, support is None or mask in support

    def _nothing_to_do(self, number: int) -> bool:
        e = self.e
        known = (e._literal(0), e._literal(1))
        for n in range(len(self._plain), number + 1):
            op, info, args = key = e._keys[n]
            plain = all(self._plain[a] for a in args)
            if op == "dot":
                plain = plain and known[0] not in args and known[1] not in args
            elif plain and args and op in ("hit", "map"):
                plain = not e._is_mask(key) and self._constant(op, info, args) is None
            self._plain.append(plain)
        return self._plain[number]

    def _constant(self, op: str, info: Any, args: Sequence[int]) -> int | None:
        """Which position something known is at, and the same number as an integer or a real one; None for everything else."""
        kind, value, _ = self.e._keys[args[0]]
        if op == "hit" and kind == "int":
            return self.e._literal(1 if value == info else 0)
        if op == "map" and info[0] == "as_real" and kind in ("int", "bool"):
            return self.e._literal(value)
        if op == "map" and info[0] == "as_int" and kind == "real" and value in (0, 1):
            return self.e._number(("int", int(value), ()))
        return None

    def _known_number(self, number: int) -> int:
        """A number that an expression without symbols is, if it can be said; else the expression."""
        op, info, args = self.e._keys[number]
        return (
            self._make(op, info, [self._known_number(args[0])])
            if op == "hit" or (op == "map" and info[0] in ("as_real", "as_int"))
            else number
        )

    def _is_zero(self, number: int) -> bool:
        return self.e._keys[number][:2] == ("real", 0)

    def _may_fail(self, number: int) -> bool:
        op, info, _ = self.e._keys[number]
        return op == "map" and info[0] in MAY_FAIL

    def _total(self, *numbers: int) -> bool:
        """Whether expressions have values wherever the logical program is defined, for any values of masks."""
        self.e._describe()
        for n in range(len(self._defined), max(numbers) + 1):
            _, info, args = self.e._keys[n]
            fails = self._may_fail(n) and self.e._signs[args[-1]] != "positive" and (info, args[-1]) not in self._granted
            self._defined.append(not fails and all(self._defined[a] for a in args))
        return all(self._defined[n] and self.e._states[n] == FINITE for n in numbers)

    def _make(self, op: str, info: Any, args: Sequence[int]) -> int:
        e, one, zero = self.e, self.e._literal(1), self.e._literal(0)
        if op == "map" and info[0] == "mul":
            op, info = "dot", (2,)
        if op != "dot":
            known = self._constant(op, info, args)
            return e._number((op, info, tuple(args))) if known is None else known
        if one not in args and zero not in args:
            return args[0] if info == (1,) else e._number((op, info, tuple(args)))
        products: list[list[int]] = []
        at = 0
        for n in info:
            factors = args[at : at + n]
            at += n
            if zero in factors and self._total(*factors):
                continue
            products.append([f for f in factors if f != one] or [one])
        if not products:
            return zero
        if len(products) == 1 and len(products[0]) == 1:
            return products[0][0]
        return e._number(("dot", tuple(map(len, products)), tuple([f for p in products for f in p])))


def _is_real(op: str, info: Any, args: Sequence[bool]) -> bool:
    match op:
        case "real" | "hit" | "constant":
            return True
        case "map" if info[0] in REAL:
            return True
        case "map" if info[0] in ARITHMETIC:
            return any(args)
        case "dot":
            return any(args)
        case "reduce":
            return all(args)
        case "choose":
            return all(args[1:])
        case "pick":
            return bool(info == "real")
    return False
