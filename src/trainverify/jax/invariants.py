"""State that is never negative if it starts so: second moments, which grow by squares, and numbers of steps.

That a result has the structure of an argument does not make it that argument's new value: it may be a metric. So the new value has to be
made of the old one: kept, or multiplied by what no data enters, and increased by something that is never negative. Then it is not negative
where the old one is not. Of real state, only what a root, a logarithm or a power depends on is of interest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from trainverify.graph.program import Domain, Op, Output
from trainverify.jax.emit import RankEmitter
from trainverify.jax.trace import Argument, Traced
from trainverify.translate.emit import Unmapped
from trainverify.translate.integers import tensor_bounds
from trainverify.translate.signs import Signs

_ROOTS: Final = frozenset(("sqrt", "rsqrt", "log", "pow"))
_MOVES: Final = frozenset(("identity", "to", "reshape", "expand", "permute", "flip", "slice", "select", "squeeze", "unsqueeze"))
_JOINS: Final = frozenset(("concat", "stack"))
Growth = dict[str, bool]  # arguments that a tensor is made of in such a way, and whether something was added


def never_negative_state(e: RankEmitter, arguments: Sequence[Argument], outputs: Sequence[Output]) -> tuple[str, ...]:
    """The arguments, real ones."""
    new = {o.of: o.tensor for o in outputs if o.role == "state"}
    named = {a.name for a in arguments if a.kind == "state" and a.domain is None and a.starts_nonnegative is not False and a.name in new}
    found = {n for n in named & _under_roots(e) if e.kind(n) == "real"}
    while (kept := growing(e, arguments, found, new)) != found:
        found = kept
    return tuple(sorted(found))


def counted(e: RankEmitter, arguments: Sequence[Argument], outputs: Sequence[Output]) -> None:
    """Refuse integers that are taken for numbers of steps, and do not grow from step to step.

    What a step leaves as it is, or sets to a number, is accepted if its content is known, and is not negative.
    """
    new = {o.of: o.tensor for o in outputs if o.role == "state"}
    taken = {a.name: a for a in arguments if a.presumed}
    growth = _growth(e, arguments, set(taken))
    for n, a in taken.items():
        if not growth.increases(n, new.get(n)) and not (a.starts_nonnegative and growth.leaves(n, new.get(n))):
            how = "with tvj.Ids(shape, below) or tvj.Count()"
            raise Unmapped(f"argument {n} holds integers that the step does not count up: say which, {how}")


def growing(e: RankEmitter, arguments: Sequence[Argument], found: set[str], new: Mapping[str | None, str]) -> set[str]:
    """State that grows if all of this is not negative."""
    growth = _growth(e, arguments, found)
    return {n for n in found if growth.increases(n, new[n])}


def _growth(e: RankEmitter, arguments: Sequence[Argument], found: set[str]) -> _Growth:
    return _Growth(e, found, {a.name for a in arguments if a.kind != "state"} | set(e.draws))


class _Growth:
    """What every tensor of a program has of the old values of some state."""

    def __init__(self, e: RankEmitter, found: set[str], data: set[str]):
        self.e = e
        self.signs = Signs(e, lambda n: n in found or n in e.nonnegative or e.bounds.get(n, (-1, 0))[0] >= 0, e.column, e.shared)
        self.data = data  # tensors that arguments other than state enter
        self.of: dict[str, Growth] = {n: {n: False} for n in found}
        for op in e.ops:
            if any(i in self.data for i in op.inputs):
                self.data.update(op.outputs)
            if any(i in self.of for i in op.inputs) and (growth := self._after(op)):
                self.of.update(dict.fromkeys(op.outputs, growth))

    def increases(self, old: str, new: str | None) -> bool:
        return self.of.get(new or "", {}).get(old, False)

    def leaves(self, old: str, new: str | None) -> bool:
        """Whether a new value is what the old one was, or a number."""
        return new is not None and (old in self.of.get(new, {}) or (self.e.is_constant(new) and self.nonnegative(new)))

    def _after(self, op: Op) -> Growth:
        given = [str(i) for i in op.inputs if i is not None]
        literals = [v for v in self.e.column(op.get("value")) if v is not None]
        if op.get("alpha", 1) != 1:
            return {}
        if op.name in _MOVES:
            return self.of.get(given[0], {})
        if op.name in _JOINS:
            return self._all(given)
        if op.name == "add":
            return self._added(given, literals)
        if op.name == "maximum":
            return self._greatest(given, literals)
        if op.name in ("mul", "div"):
            return self._scaled(op.name, given, literals)
        if op.name == "where":
            return self._all([i for i in given[1:] if i in self.of or not self.nonnegative(i)])
        if op.name == "mod" and len(given) == 1 and all(v > 0 for v in literals):
            return self.of[given[0]]
        return {}

    def nonnegative(self, name: str) -> bool:
        bounds = tensor_bounds(self.e, name)
        return (bounds is not None and bounds[0] >= 0) or self.signs.never_negative(name)

    def _all(self, given: Sequence[str]) -> Growth:
        """Of what is one of several: each is made of the old value, and one of them grows."""
        parts = [self.of.get(i, {}) for i in given]
        return {n: any(p[n] for p in parts) for n in (parts[0] if parts else ()) if all(n in p for p in parts)}

    def _added(self, given: Sequence[str], literals: Sequence[float]) -> Growth:
        if any(v < 0 for v in literals):
            return {}
        found: Growth = {}
        for n in {n for i in given for n in self.of.get(i, {})}:
            others = [i for i in given if n not in self.of.get(i, {})]
            if all(self.nonnegative(i) for i in others):
                found[n] = bool(others) or any(v > 0 for v in literals) or any(self.of[i][n] for i in given)
        return found

    def _greatest(self, given: Sequence[str], literals: Sequence[float]) -> Growth:
        """What is not below the old value; it counts only if it is the greatest of what is not negative."""
        found: Growth = {}
        for n in {n for i in given for n in self.of.get(i, {})}:
            others = [i for i in given if n not in self.of.get(i, {})]
            if all(v >= 0 for v in literals) and all(self.nonnegative(i) or self._corrected(i) for i in others):
                found[n] = bool(others) or any(self.of[i][n] for i in given if n in self.of.get(i, {}))
        return found

    def _corrected(self, name: str) -> bool:
        """Whether something that is never negative is divided by a function of state alone: v / (1 - 0.9**t)."""
        op = self.e.made.get(name)
        return (
            op is not None
            and op.name == "div"
            and len(op.inputs) == 2
            and self.nonnegative(str(op.inputs[0]))
            and op.inputs[1] not in self.data
        )

    def _scaled(self, name: str, given: Sequence[str], literals: Sequence[float]) -> Growth:
        """Times what is never negative and no data enters: a mean of weighted examples has their weights as factors too."""
        if any(v < 0 for v in literals):
            return {}
        if len(given) == 1:
            return self.of[given[0]]
        sides = (given, given[::-1]) if name == "mul" else (given,)
        return {n: g for one, other in sides if self._is_rate(other) for n, g in self.of.get(one, {}).items()}

    def _is_rate(self, name: str) -> bool:
        return name not in self.data and self.nonnegative(name)


def _under_roots(e: RankEmitter) -> set[str]:
    """Inputs of the program that an argument of such a function depends on."""
    waiting = [str(op.inputs[0]) for op in e.ops if op.name in _ROOTS and op.inputs]
    seen = set(waiting)
    while waiting:
        op = e.made.get(waiting.pop())
        fresh = {i for i in (op.inputs if op is not None else ()) if i is not None} - seen
        seen |= fresh
        waiting += fresh
    return {n for n in seen if n not in e.made}


def declared(traced: Traced, names: Iterable[str]) -> Traced:
    """A step of which arguments are said not to be negative."""
    domains: Mapping[str, Domain] = dict.fromkeys(names, Domain("nonnegative"))
    return replace(traced, arguments=tuple(replace(a, domain=domains.get(a.name, a.domain)) for a in traced.arguments))


__all__ = ["counted", "declared", "never_negative_state"]
