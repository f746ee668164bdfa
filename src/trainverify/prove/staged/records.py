"""Records of stages: what is claimed of an element, what a stage consists of, and what it has to show."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, Final, Literal

from trainverify.domains.arrays import Array
from trainverify.prove.staged.graphs import Call, Graph, Place
from trainverify.prove.staged.terms import Term

Uses = frozenset[Place]
Granted = tuple[Call, Term, frozenset[int]]  # the op, what it divides by, over inputs of the op, and the symbols in that


@dataclass(frozen=True)
class Factor:
    """number · element^power; `element` is an id of a scalar."""

    number: Fraction | int = 1
    element: int | None = None
    power: int = 1

    @property
    def plain(self) -> bool:
        return self.element is None and self.number == 1


PLAIN: Final = Factor()


@dataclass(frozen=True)
class Summand:
    """number · some elements of a tensor on a rank."""

    number: Fraction
    place: Place
    elements: Array  # flat positions


@dataclass(frozen=True)
class Goal:
    """Σ terms = factor · logical elements `ids`."""

    name: str  # of the logical tensor
    terms: tuple[Summand, ...]
    ids: Array
    factor: Factor = PLAIN
    ids_in_tensor: Array | None = None  # positions in the tensor of that name, for goals of obligations

    @cached_property
    def key(self) -> Hashable:
        """What it says."""
        terms = tuple([(t.number, t.place, t.elements.tobytes()) for t in self.terms])
        return self.name, terms, self.ids.tobytes(), self.factor

    def wanted(self) -> dict[Place, list[Array]]:
        """The positions of the plan's tensors that it speaks of."""
        found: dict[Place, list[Array]] = {}
        for t in self.terms:
            found.setdefault(t.place, []).append(t.elements)
        return found


@dataclass(eq=False)
class Part:
    """A piece of a graph: calls in order, and where it stops."""

    calls: list[Call] = field(default_factory=list)
    leaves: dict[Place, tuple[Array, Factor]] = field(default_factory=dict)

    def __contains__(self, place: Place) -> bool:
        return place in self.leaves or any(place in c.outputs for c in self.calls)


@dataclass(frozen=True)
class Short:
    """got, factor, want of an element, and what else is not 0, as the logical program divides by it; over numbered symbols: those of the
    stage, and parts that both sides have in common."""

    term: Term
    kinds: tuple[tuple[str, Any], ...]
    vanishing: tuple[tuple[int, int], ...]  # which of them are 0 wherever which others are
    nonzero: tuple[int, ...]  # which of them are not 0: other stages show it, or the logical program divides by them
    partial: bool  # whether it rests on what the logical program divides by, or takes a root or logarithm of
    infinite: bool  # whether it may be infinite, for all that is said of it


@dataclass(eq=False)
class Stage:
    goal: Goal
    plan: Part
    logical: Part
    extra: dict[int, tuple[Place, Part]]  # scalars of the plan that are written out
    uses: Uses
    with_facts: bool = False  # whether facts may be used; only then the solver is asked about conditions
    facts: tuple[int, ...] = ()  # scalars of the plan that are assumed not to be 0, which other stages prove
    written: dict[int, Part] = field(default_factory=dict)  # definitions of those, over the inputs
    defined: dict[str, Part] = field(default_factory=dict)  # logical tensors that only the plan's side speaks of, written out
    divisions: list[Part] = field(default_factory=list)  # logical ops one of which may need what is to be shown
    kind: Literal["equal", "nonzero", "value"] = "equal"  # or that it is not 0; or only that it has a value, whatever the inputs are
    compares: bool = False  # some leaves have elements that the plan compares
    some_gradients: bool = False  # some leaves are gradients, others are not
    granted: list[Granted] | None = None  # what is not 0, as the logical program divides by it, once asked for
    tasks: tuple[tuple[Any, int], ...] = ()  # (key, an element of the goal): equal keys differ in names only
    short: dict[int, Short] = field(default_factory=dict)  # elements of tasks that are shown for any value of common parts
    in_parts: bool = False  # whether some of these are parts of elements, numbered behind all of them
    identical: int = 0  # elements that are the same expression on both sides
    partial: bool = False  # some of those divide, or take roots or logarithms
    foreign: bool = False  # the logical side speaks of elements that the plan's side does not know

    @property
    def nonzero(self) -> bool:
        """Whether nothing is compared: the goal is that something is not 0, or has a value."""
        return self.kind != "equal"

    @property
    def value(self) -> bool:
        return self.kind == "value"

    def parts(self) -> list[Part]:
        """All pieces of both graphs in it."""
        extra = [part for _, part in self.extra.values()]
        return [self.plan, self.logical, *extra, *self.written.values(), *self.defined.values(), *self.divisions]

    def described(self, graph: Graph) -> str:
        """With the names of its tensors."""
        leaves = [graph.show(p) for p in self.plan.leaves]
        shown = ", ".join(leaves[:4]) + (f" and {len(leaves) - 4} more" if len(leaves) > 4 else "")
        made = ", ".join(dict.fromkeys(graph.show(t.place) for t in self.goal.terms))
        size = f"{len(self.plan.calls)} plan ops, {len(self.logical.calls)} logical ops"
        return f"stage {self.goal.name}: {made} from {shown or 'constants'} ({size})"
