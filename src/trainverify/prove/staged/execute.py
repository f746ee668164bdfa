"""Checking one stage: symbols are made, both pieces run in the element domain, and the goal is compared element by element."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any, Final

from trainverify.domains.element import Element
from trainverify.domains.polynomials import RESULT, Context, Need, Poly, Scalars, TooLarge, Unsupported, rational
from trainverify.prove.definedness import FINITE
from trainverify.prove.staged.check import equal, solved
from trainverify.prove.staged.elements import Elements
from trainverify.prove.staged.graphs import NOTHING, Call, Place
from trainverify.prove.staged.records import Factor, Part, Short, Stage
from trainverify.prove.staged.solver import Z3, Solver
from trainverify.prove.staged.terms import symbol, value


@dataclass(frozen=True)
class Limits:
    """Of one obligation."""

    seconds: float = 30.0
    terms: int = 100_000
    solver_seconds: float = 3.0
    solver_megabytes: int = 2000


DEFAULT: Final = Limits()
SHORT: Final = 5.0  # seconds for an element with common parts as symbols; it may still be shown otherwise


@dataclass(frozen=True)
class Result:
    proved: bool
    reason: str = ""
    how: str = ""  # the way of proof
    conditions: bool = False  # whether the logical side brought some
    model: Mapping[Any, Fraction] = field(default_factory=dict)  # id of an element → value, where the goal fails
    seconds: float = 0.0


def check(stage: Stage, n: int, elements: Elements, limits: Limits = DEFAULT, solver: Solver | None = None) -> Result:
    """Show one element of the goal of a stage from the relations of its leaves, or say why not. All symbols are made here."""
    began = time.process_time()
    solver = solver or Z3(limits.solver_seconds, limits.solver_megabytes)
    try:
        seconds = min(limits.seconds, SHORT) if n in stage.short else limits.seconds
        result = _Check(stage, elements, Scalars(limits.terms, began + seconds), solver).run(n)
    except (Unsupported, TooLarge) as error:
        result = Result(False, str(error))
    except RecursionError:
        result = Result(False, "expressions are nested too deeply")
    return replace(result, seconds=time.process_time() - began)


class _Check:
    def __init__(self, stage: Stage, elements: Elements, scalars: Scalars, solver: Solver):
        self.stage = stage
        self.elements = elements
        self.scalars = scalars
        self.solver = solver
        self.domain = Element(scalars)
        self.symbols: dict[int, Any] = {}
        self.met: set[int] = set()  # those that elements are made of; the others are there as some of these vanish with them
        self.values: dict[tuple[Part, Place, int, Context], Any] = {}
        self.sure: dict[tuple[Part, Place, int, Context], Any] = {}  # values in which no branch needs anything
        self.infinite = elements.infinite(stage.goal.ids)
        self.defined: dict[int, Poly] = {}  # atoms of scalars whose definition is at hand

    def run(self, n: int) -> Result:
        stage, s = self.stage, self.scalars
        if n in stage.short:
            return self.short(n, stage.short[n])
        for i, (place, part) in stage.extra.items():
            self.symbols[i] = self.value(part, place, 0)
        got = self.got(n)
        mine = self.noted() | s.guarded | s.unsure
        s.guarded, s.unsure = {}, {}
        if stage.value:
            return Result(not (mine or s.doubts), "a condition that only the plan needs: a scalar may have no value", "normal form")
        if stage.nonzero:
            return self.not_zero(got)
        factor = self.factor(stage.goal.factor)
        if stage.goal.factor.power < 0:
            mine |= s.needs
        s.needs = {}
        with s.within(infinite=self.infinite):
            want = s.mul(factor, self.wanted(int(stage.goal.ids[n])))
        given = self.noted()  # not what only a branch needs that may not be taken, nor what may be infinite
        facts = self.facts() | self.granted()
        if stage.written:  # to write them out takes time, and their names are enough as a rule
            known = self.judged(n, got, want, mine, given, facts, None)
            if known.proved:
                return known
            facts |= self.written()
            if equal(s, got, want, given | facts, None).how is None:
                got, want = self.spelled(got), self.spelled(want)
        return self.judged(n, got, want, mine, given, facts, self.solver)

    def judged(
        self,
        n: int,
        got: Poly,
        want: Poly,
        mine: Mapping[Need, None],
        given: dict[Need, None],
        facts: dict[Need, None],
        solver: Solver | None,
    ) -> Result:
        """Whether both are equal, and what the plan needs follows."""
        s, ask = self.scalars, self.stage.with_facts and solver is not None
        given = given | facts
        for doubt in s.doubts:
            if not self.implied(doubt, facts, ask):
                return Result(False, f"a condition inside a choice: {self.show(doubt)}")
        for need in s.unsure:
            if not self.implied(need, given, ask):
                return Result(False, f"something may be infinite: {self.show(need)}")
        checked = equal(s, got, want, given, solver)
        if checked.how is None:
            return Result(False, f"element {n}: {checked.reason}", model=checked.model)
        for need in mine:
            if not self.implied(need, given, ask):
                return Result(False, f"a condition that only the plan needs: {self.show(need)}")
        return Result(True, "", checked.how, bool(given))

    def noted(self) -> dict[Need, None]:
        """What was needed since the last time."""
        found, self.scalars.needs = self.scalars.needs, {}
        return found

    def short(self, n: int, short: Short) -> Result:
        """For any value of the parts that both sides have in common, by normal forms alone."""
        s, domain = self.scalars, self.domain
        symbols = [symbol(s, k, *kind) for k, kind in enumerate(short.kinds)]
        for x, y in short.vanishing:
            s.vanishes(symbols[x], symbols[y])
        got, factor, want, *granted = short.term.args
        mine = domain.real(value(got, symbols.__getitem__, domain))
        times = domain.real(value(factor, symbols.__getitem__, domain))
        needed = self.noted() | s.guarded | s.unsure
        s.unsure = {}
        with s.within(infinite=short.infinite):
            theirs = s.mul(times, domain.real(value(want, symbols.__getitem__, domain)))
        facts: dict[Need, None] = {("nonzero", frozenset(domain.real(symbols[k]).items())): None for k in short.nonzero}
        needs, doubts = self.noted(), dict(s.doubts)
        needed |= s.unsure
        facts |= {("nonzero", frozenset(domain.real(value(g, symbols.__getitem__, domain)).items())): None for g in granted}
        given = needs | facts
        if not all(self.implied(doubt, facts, ask=False) for doubt in doubts):
            return Result(False, "a condition inside a choice")
        checked = equal(s, mine, theirs, given, None)
        if checked.how is None:
            return Result(False, f"element {n}: not shown with common parts as symbols")
        if not all(self.implied(need, given, ask=False) for need in needed):
            return Result(False, "a condition that only the plan needs, with common parts as symbols")
        return Result(True, "", checked.how, bool(given))

    def facts(self) -> dict[Need, None]:
        """What other stages show: some scalars are not 0, by name."""
        return {("nonzero", frozenset(self.domain.real(self.symbol(i)).items())): None for i in self.stage.facts}

    def granted(self) -> dict[Need, None]:
        """What the logical program divides by in any case, of the symbols that are met by now: those are in its key."""
        a, part = self.elements, self.stage.logical
        known = {i for i in self.met if i not in self.stage.extra and a.definition(self.stage, i) is None}
        found: dict[Need, None] = {}
        for call, term, symbols in a.divisors.granted(self.stage):

            def leaf(info: Any, call: Call = call) -> Any:
                return self.value(part, *a.graph.leaf(call, info))

            if symbols <= known:
                made = self.surely(partial(value, term, leaf, self.domain))
                if made is not None:
                    found["nonzero", frozenset(made.items())] = None
        return found

    def surely(self, make: Callable[[], Any]) -> Poly | None:
        """What somebody makes, or None if a branch of it needs something: the solver would take that for granted. Of what was made before
        nothing is used but what is sure, as conditions are noted once."""
        s = self.scalars
        before = s.needs, s.doubts, s.guarded, s.unsure, self.values
        s.needs, s.doubts, s.guarded, s.unsure, self.values = {}, {}, {}, {}, self.sure
        with s.within(infinite=True):
            made = self.domain.real(make())
        fine = not (s.doubts or s.guarded or s.unsure)
        s.needs, s.doubts, s.guarded, s.unsure, self.values = before
        if not fine:
            self.sure = {}
        return made if fine else None

    def written(self) -> dict[Need, None]:
        """The same of their definitions."""
        found: dict[Need, None] = {}
        for i, part in self.stage.written.items():
            made = self.surely(partial(self.value, part, *self.elements.where(i)))
            if made is not None:
                found["nonzero", frozenset(made.items())] = None
                ((atom, _),) = self.scalars.factors[next(iter(self.symbol(i)))]
                self.defined[atom] = made
        return found

    def spelled(self, p: Poly) -> Poly:
        """p with scalars that are known by name replaced by their definitions."""
        s = self.scalars
        for atom, meaning in self.defined.items():
            made: Poly = {}
            for m, c in p.items():
                here = dict(s.factors[m])
                e = here.pop(atom, 0)
                s.fma(made, {s.sorted(here): c}, s.pow(meaning, e) if e else s.const(1))
            p = made
        return p

    def not_zero(self, p: Poly) -> Result:
        """A scalar follows to be not 0 from what some logical op needs."""
        for part in self.stage.divisions:
            self.scalars.needs, self.scalars.doubts = {}, {}
            last = part.calls[-1].outputs[0]
            try:
                for at in range(math.prod(self.elements.graph.shape(last))):
                    self.value(part, last, at)
            except Unsupported:
                continue
            if not self.scalars.doubts and self.implied(("nonzero", frozenset(p.items())), self.scalars.needs, ask=False):
                return Result(True, "", "normal form", True)
        return Result(False, "a condition that only the plan needs: it divides by a number that may be 0")

    def show(self, need: Need) -> str:
        kind, items = need
        return f"{kind} ({len(items)} terms)"

    def implied(self, need: Need, given: Mapping[Need, None], ask: bool = True) -> bool:
        kind, items = need
        enough = {"nonnegative": ("nonnegative", "positive"), "nonzero": ("nonzero", "positive"), "positive": ("positive",)}[kind]
        if any((k, items) in given for k in enough):
            return True
        p = dict(items)
        for other, its in given:
            if other in enough and not solved(self.scalars, self.scalars.sub(p, dict(its))):
                return True
        finite = {g: None for g in given if not self.scalars.may_be_infinite(dict(g[1]))}  # the solver would take 1/x for a number
        return ask and self.solver.implied(self.scalars, need, finite).status == "holds"

    # -- values ------------------------------------------------------------------------------------------------------

    def got(self, n: int) -> Poly:
        s = self.scalars
        total: Poly = {}
        for term in self.stage.goal.terms:
            value = self.value(self.stage.plan, term.place, int(term.elements[n]))
            total = s.add(total, s.scale(self.domain.real(value), rational(term.number)))
        return total

    def wanted(self, i: int) -> Poly:
        if i == NOTHING:
            return {}
        defined = self.elements.wanted(self.stage, i)
        return self.domain.real(self.symbol(i) if defined is None else self.value(*defined))

    def value(self, part: Part, place: Place, at: int) -> Any:
        """One element of a tensor, from the leaves of the piece of graph that it is in."""
        where = (part, place, at, RESULT)
        if where not in self.values:
            where = (part, place, at, self.scalars.context)  # its conditions are noted again if it is needed elsewhere
        if where not in self.values:
            self.values[where] = self._value(part, place, at)
        return self.values[where]

    def _value(self, part: Part, place: Place, at: int) -> Any:
        leaf = part.leaves.get(place)
        if leaf is None:
            term, leaves = self.elements.graph.definition(place, at)
            return value(term, lambda k: self.value(part, *leaves[k]), self.domain)
        ids, factor = leaf
        i = int(ids[at])
        if i == NOTHING:
            kind = self.elements.graph.kind(place)
            return {} if kind == "real" else 0 if kind == "int" else False
        cell = self.symbol(i)
        return cell if factor.plain else self.scalars.mul(self.factor(factor), cell)

    def factor(self, f: Factor) -> Poly:
        s = self.scalars
        made = s.const(f.number)
        if f.element is None:
            return made
        element = self.domain.real(self.symbol(f.element))
        return s.mul(made, element if f.power > 0 else s.inverse(element))

    def symbol(self, i: int) -> Any:
        self.met.add(i)
        return self._symbol(i)

    def _symbol(self, i: int) -> Any:
        if i not in self.symbols:
            defined = self.elements.definition(self.stage, i)
            if defined is not None:
                self.symbols[i] = self.value(*defined)
                return self.symbols[i]
            if self.elements.state(i) != FINITE:
                raise Unsupported("an element that may be infinite")
            self.symbols[i] = symbol(self.scalars, i, *self.elements.symbol_kind(i))
            for other in self.elements.supports.get(i, ()):
                if self.elements.definition(self.stage, other) is None:
                    self.scalars.vanishes(self.symbols[i], self._symbol(other))
        return self.symbols[i]
