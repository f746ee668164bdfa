"""Checking one stage: symbols are made, both pieces run in the element domain, and the goal is compared element by element."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.domains.element import Element, objects
from trainverify.domains.polynomials import Choice, Need, Poly, Scalars, TooLarge, Unsupported, rational
from trainverify.prove.staged.align import NOTHING, Alignment, Factor
from trainverify.prove.staged.check import equal, solved
from trainverify.prove.staged.graphs import LOGICAL, Place
from trainverify.prove.staged.solver import Z3, Solver
from trainverify.prove.staged.stages import Part, Stage


@dataclass(frozen=True)
class Limits:
    """Of one obligation."""

    seconds: float = 30.0
    terms: int = 100_000
    solver_seconds: float = 3.0
    solver_megabytes: int = 2000


DEFAULT: Final = Limits()


@dataclass(frozen=True)
class Result:
    proved: bool
    reason: str = ""
    how: Mapping[str, int] = field(default_factory=dict)  # elements by way of proof
    conditions: tuple[str, ...] = ()  # that the logical side brought: logical tensors
    model: Mapping[Any, Fraction] = field(default_factory=dict)  # id of an element → value, where the goal fails
    seconds: float = 0.0


class Shared:
    """Symbols and values that stages with the same logical side have in common."""

    def __init__(self, limits: Limits):
        self.scalars = Scalars(limits.terms)
        self.symbols: dict[int, Any] = {}
        self.logical: tuple[dict[Place, Array], dict[Need, None], dict[Need, None]] | None = None


def check(
    stage: Stage, alignment: Alignment, limits: Limits = DEFAULT, solver: Solver | None = None, shared: Shared | None = None
) -> Result:
    """Show the goal of a stage from the relations of its leaves, or say why not."""
    began = time.monotonic()
    shared = shared or Shared(limits)
    shared.scalars.deadline = began + limits.seconds
    solver = solver or Z3(limits.solver_seconds, limits.solver_megabytes)
    try:
        result = _Check(stage, alignment, shared, solver).run()
    except (Unsupported, TooLarge) as error:
        result = Result(False, str(error))
    except RecursionError:
        result = Result(False, "expressions are nested too deeply")
    return Result(result.proved, result.reason, result.how, result.conditions, result.model, time.monotonic() - began)


class _Check:
    def __init__(self, stage: Stage, alignment: Alignment, shared: Shared, solver: Solver):
        self.stage = stage
        self.alignment = alignment
        self.shared = shared
        self.scalars = shared.scalars
        self.scalars.needs, self.scalars.doubts = {}, {}
        self.solver = solver
        self.domain = Element(self.scalars)
        self.symbols = dict(shared.symbols) if stage.extra else shared.symbols
        self.defined: dict[int, Poly] = {}  # atoms of scalars whose definition is at hand

    def run(self) -> Result:
        stage, s = self.stage, self.scalars
        for i, (place, part) in stage.extra.items():
            (self.symbols[i],) = self.values(part)[place].flat
        local = self.values(stage.plan)
        got = self.got(local)
        mine, s.needs = s.needs, {}
        factor = self.factor(stage.goal.factor)
        if stage.goal.factor.power < 0:
            mine |= s.needs
        s.needs = {}
        logical = self.values(stage.logical)
        if stage.key[0] == "nonzero":
            return self.not_zero(got[0])
        want = [s.mul(factor, self.wanted(int(i), logical)) for i in stage.goal.ids.tolist()]
        given = s.needs
        facts = self.facts()
        given |= facts
        for doubt in s.doubts:
            if not self.implied(doubt, facts):
                return Result(False, f"a condition inside a choice: {self.show(doubt)}")
        how: Counter[str] = Counter()
        for n, (g, w) in enumerate(zip(got, want, strict=True)):
            checked = equal(s, g, w, given, None if self.defined else self.solver)
            if checked.how is None and self.defined:
                checked = equal(s, self.spelled(g), self.spelled(w), given, self.solver)
            if checked.how is None:
                return Result(False, f"element {n}: {checked.reason}", dict(how), model=checked.model)
            how[checked.how] += 1
        for need in mine:
            if not self.implied(need, given):
                return Result(False, f"a condition that only the plan needs: {self.show(need)}", dict(how))
        conditions = tuple(sorted({c.outputs[0][2] for c in stage.logical.calls})) if given else ()
        return Result(True, "", dict(how), conditions)

    def facts(self) -> dict[Need, None]:
        """What other stages show: some scalars are not 0, by name and written out."""
        found: dict[Need, None] = {}
        for i in self.stage.facts:
            found["nonzero", frozenset(self.domain.real(self.symbol(i)).items())] = None
            if i in self.stage.written:
                name = self.alignment.owner[i]
                (value,) = self.values(self.stage.written[i])[LOGICAL, 0, name].flat
                found["nonzero", frozenset(self.domain.real(value).items())] = None
                ((atom, _),) = self.scalars.factors[next(iter(self.symbol(i)))]
                self.defined[atom] = self.domain.real(value)
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
            try:
                self.values(part)
            except Unsupported:
                continue
            if not self.scalars.doubts and self.implied(("nonzero", frozenset(p.items())), self.scalars.needs, ask=False):
                return Result(True, "", {"normal form": 1}, (part.calls[-1].outputs[0][2],))
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
        return ask and self.solver.implied(self.scalars, need, given).status == "holds"

    # -- values ------------------------------------------------------------------------------------------------------

    def logical_values(self) -> dict[Place, Array]:
        """The logical side, once for all stages that share it."""
        s = self.scalars
        if self.shared.logical is None or self.stage.extra:
            mine, s.doubts = s.doubts, {}
            found = self.values(self.stage.logical)
            if self.stage.extra:
                s.doubts |= mine
                return found
            self.shared.logical = (found, s.needs, s.doubts)
            s.doubts = mine
        found, needs, doubts = self.shared.logical
        s.needs = {**s.needs, **needs}
        s.doubts = {**s.doubts, **doubts}
        return found

    def got(self, local: Mapping[Place, Array]) -> list[Poly]:
        s = self.scalars
        total: list[Poly] = [{} for _ in self.stage.goal.ids]
        for term in self.stage.goal.terms:
            flat = local[term.place].reshape(-1)
            for n, at in enumerate(term.elements.tolist()):
                total[n] = s.add(total[n], s.scale(self.domain.real(flat[at]), rational(term.number)))
        return total

    def wanted(self, i: int, logical: Mapping[Place, Array]) -> Poly:
        a = self.alignment
        if i == NOTHING:
            return {}
        if i < a.count:
            name = a.owner[i]
            made = logical.get((LOGICAL, 0, name))
            if made is not None:
                return self.domain.real(made.reshape(-1)[i - a.start[name]])
        return self.domain.real(self.symbol(i))

    def values(self, part: Part) -> dict[Place, Array]:
        found: dict[Place, Array] = {}
        graph = self.alignment.graph
        for place, (ids, factor) in part.leaves.items():
            kind = graph.kind(place)
            zero: Any = {} if kind == "real" else 0 if kind == "int" else False
            cells = [zero if i == NOTHING else self.symbol(i) for i in ids.tolist()]
            if factor != Factor():
                f = self.factor(factor)
                cells = [self.scalars.mul(f, c) for c in cells]
            found[place] = objects(cells, graph.shape(place))
        for call in part.calls:
            args = [None if i is None else found[i] for i in call.inputs]
            if call.collective:
                given = np.stack([np.asarray(x) for x in args])
                result = given if call.nodes is None else self.domain.run(call.nodes, [given])[0]
                outputs = [result[n, ...] for n in range(len(call.outputs))]
            else:
                assert call.nodes is not None
                outputs = self.domain.run(call.nodes, args)
            found.update(zip(call.outputs, (np.asarray(o) for o in outputs), strict=True))
        return found

    def factor(self, f: Factor) -> Poly:
        s = self.scalars
        made = s.const(f.number)
        if f.element is None:
            return made
        element = self.domain.real(self.symbol(f.element))
        return s.mul(made, element if f.power > 0 else s.inverse(element))

    def symbol(self, i: int) -> Any:
        if i not in self.symbols:
            self.symbols[i] = self._made(i, *self.stage.kinds[self.stage.numbers[i]])
        return self.symbols[i]

    def _made(self, number: int, kind: str, domain: Any) -> Any:
        s = self.scalars
        if kind == "bool" or (domain is not None and domain[0] == "indicator"):
            return s.flag(number)
        if kind == "int":
            if domain is None or domain[0] != "ids" or domain[1] is None:
                raise Unsupported("an integer input without a range")
            _, size, ignore = domain
            values = tuple(range(size)) + (() if ignore is None or 0 <= ignore < size else (ignore,))
            return s.choice(Choice(number, values))
        return s.symbol(number, domain[0] if domain is not None and domain[0] in ("positive", "nonnegative") else None)
