"""The solver behind one small interface: is a polynomial zero wherever some conditions hold? Today's solver is Z3.

Reals, no floats. Functions are uninterpreted, with the few facts about them that are written here.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final, Literal, Protocol

import z3

from trainverify.domains.polynomials import Mono, Need, Poly, Scalars, fraction

Status = Literal["holds", "fails", "unknown", "error"]


@dataclass(frozen=True)
class Answer:
    """The default is an error: an answer has to be earned."""

    status: Status = "error"
    reason: str = "no answer"
    model: dict[Hashable, Fraction] = field(default_factory=dict)  # symbols and choices, where it fails


class Solver(Protocol):
    """What a second solver would have to offer."""

    def zero(self, scalars: Scalars, p: Poly, given: Iterable[Need]) -> Answer:
        """Is p = 0 wherever `given` holds?"""

    def implied(self, scalars: Scalars, need: Need, given: Iterable[Need]) -> Answer:
        """Does `need` follow?"""


class Z3:
    def __init__(self, seconds: float = 10.0, megabytes: int = 2000):
        self.seconds = seconds
        self.megabytes = megabytes

    def zero(self, scalars: Scalars, p: Poly, given: Iterable[Need]) -> Answer:
        return _Query(scalars, self).ask(lambda q: q.poly(p) != 0, given)

    def implied(self, scalars: Scalars, need: Need, given: Iterable[Need]) -> Answer:
        return _Query(scalars, self).ask(lambda q: z3.Not(q.need(need)), given)


_FACTS: Final = {"positive": lambda x: x > 0, "nonnegative": lambda x: x >= 0, "nonzero": lambda x: x != 0}


PATIENCE: Final = 0.2  # seconds after its limit
HIGHEST: Final = 1000  # power or root that is written out as a product


class _Query:
    """One question, in a context of its own, so that its memory goes away with it."""

    def __init__(self, scalars: Scalars, limits: Z3):
        self.scalars = scalars
        self.seconds = limits.seconds
        self.context = z3.Context()
        self.solver = z3.Then("simplify", "solve-eqs", "smt", ctx=self.context).solver()
        self.solver.set("timeout", max(1, int(1000 * limits.seconds)))
        self.solver.set("max_memory", limits.megabytes)
        self.terms: dict[int, Any] = {}
        self.roots: dict[tuple[int, int], Any] = {}  # of an atom, by which root
        self.groups: dict[Any, dict[int, Any]] = {}
        self.functions: dict[str, Any] = {}
        self.fresh = 0

    def ask(self, question: Any, given: Iterable[Need]) -> Answer:
        try:
            for need in given:
                self.solver.add(self.need(need))
            asked = question(self)
            self.solver.push()
            self.solver.add(asked)
            result = self._check()
            if result == z3.unsat:
                self.solver.pop()
                alone = self._check()
                if alone == z3.unsat:  # anything would follow
                    return Answer("error", "solver: the conditions contradict each other")
                if alone != z3.sat:
                    return Answer("unknown", "solver: the conditions may contradict each other")
                return Answer("holds", "unsatisfiable")
            if result == z3.sat:
                return Answer("fails", "satisfiable", self.model())
            return Answer("unknown", f"solver: {self.solver.reason_unknown()}")
        except z3.Z3Exception as error:
            return Answer("error", f"solver: {error}")

    def _check(self) -> Any:
        """Z3's own limit is lost if it passes before the search begins: from then on it is told again until it listens."""
        done = threading.Event()

        def remind() -> None:
            if not done.wait(self.seconds + PATIENCE):
                while not done.wait(PATIENCE):
                    self.context.interrupt()

        watch = threading.Thread(target=remind, daemon=True)
        watch.start()
        try:
            return self.solver.check()
        finally:
            done.set()
            watch.join()

    def need(self, need: Need) -> Any:
        kind, items = need
        return _FACTS[kind](self.poly(dict(items)))

    def poly(self, p: Poly) -> Any:
        terms = [self.number(c) * self.mono(m) if m else self.number(c) for m, c in p.items()]
        return z3.Sum(terms) if terms else z3.RealVal(0, self.context)

    def number(self, c: Any) -> Any:
        q = fraction(c)
        return z3.RealVal(f"{q.numerator}/{q.denominator}", self.context)

    def mono(self, m: Mono) -> Any:
        made: Any = None
        for x, e in self.scalars.factors[m]:
            factor = self.power(x, Fraction(e))
            made = factor if made is None else made * factor
        return made

    def real(self, name: str) -> Any:
        self.fresh += 1
        return z3.Real(f"{name}.{self.fresh}", self.context)

    def power(self, atom: int, e: Fraction) -> Any:
        """x^e through x^(1/q), a root that is positive where x is."""
        if max(abs(e.numerator), e.denominator) > HIGHEST:
            raise z3.Z3Exception("a power that is too high")
        base = self.atom(atom)
        if e.denominator != 1:
            root = self.roots.get((atom, e.denominator))
            if root is None:
                root = self.roots[atom, e.denominator] = self.real("root")
                product = root
                for _ in range(e.denominator - 1):
                    product = product * root
                self.solver.add(product == base, root >= 0)
            base = root
        n = abs(e.numerator)
        made = base
        for _ in range(n - 1):
            made = made * base
        if e > 0:
            return made
        inverse = self.real("inverse")
        self.solver.add(inverse * made == 1)
        return inverse

    def atom(self, number: int) -> Any:
        if number not in self.terms:
            self.terms[number] = self._made(number)
        return self.terms[number]

    def _made(self, number: int) -> Any:
        atom = self.scalars.atoms[number]
        match atom.kind:
            case "sum":
                return self.poly(dict(atom.args[0]))
            case "number":
                return z3.RealVal(atom.args[0], self.context)
            case "choice":
                return self._chosen(*atom.args)
            case "flag":
                made = self.real("flag")
                self.solver.add(z3.Or(made == 0, made == 1))
                return made
            case "positive":
                return z3.If(self.poly(dict(atom.args[0])) > 0, z3.RealVal(1, self.context), z3.RealVal(0, self.context))
            case "max":
                made = self.real("max")
                values = [self.poly(dict(p)) for p in atom.args[0]]
                self.solver.add(*(made >= v for v in values), z3.Or(*(made == v for v in values)))
                return made
            case "abs":
                inner = self.poly(dict(atom.args[0]))
                return z3.If(inner >= 0, inner, -inner)
            case "symbol":
                made = self.real("x")
            case "pi" | "one_minus_power":
                made = self.real(atom.kind)
            case "exp":
                made = self.apply("exp", self.mono(atom.args[0]) if atom.args[0] else z3.RealVal(1, self.context))
            case _:
                made = self.apply(atom.kind, self.poly(dict(atom.args[0])))
        if atom.sign is not None:
            self.solver.add(_FACTS[atom.sign](made))
        return made

    def apply(self, name: str, argument: Any) -> Any:
        if name not in self.functions:
            sort = z3.RealSort(self.context)
            self.functions[name] = z3.Function(name, sort, sort)
        return self.functions[name](argument)

    def _chosen(self, choice: Any, value: int) -> Any:
        if choice not in self.groups:
            flags = {v: self.real("is") for v in choice.values[:-1]}
            self.groups[choice] = flags
            self.solver.add(*(z3.Or(f == 0, f == 1) for f in flags.values()), z3.Sum([*flags.values(), z3.RealVal(0, self.context)]) <= 1)
        return self.groups[choice][value]

    def model(self) -> dict[Hashable, Fraction]:
        model = self.solver.model()
        found: dict[Hashable, Fraction] = {}
        for number, term in list(self.terms.items()):
            if self.scalars.atoms[number].kind in ("symbol", "flag"):
                found[self.scalars.atoms[number].args[0]] = _value(model.eval(term, model_completion=True))
        for choice, flags in self.groups.items():
            hits = [v for v, f in flags.items() if _value(model.eval(f, model_completion=True)) == 1]
            found[choice.key] = Fraction(hits[0] if hits else choice.values[-1])
        return found


def _value(term: Any) -> Fraction:
    if z3.is_algebraic_value(term):
        term = term.approx(20)
    return Fraction(term.as_fraction()) if z3.is_rational_value(term) else Fraction(0)
