"""Alignment: which elements of the logical program the elements of the plan's tensors seem to be.

Both programs are run on a few random points, and elements with equal values are paired, also up to a factor. Nothing
here is believed: every pair becomes a claim that a stage has to prove, and a claim that is not proved is dropped.
Lineage of sources is taken from the plan, as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Final

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.run import random_inputs
from trainverify.evaluate.small import Small
from trainverify.graph.lineage import Layout, region
from trainverify.graph.obligations import Obligation
from trainverify.primitives.node import topological
from trainverify.prove.propose.points import LENIENT, Digits, drawn
from trainverify.prove.propose.structure import Structure
from trainverify.prove.propose.table import CLOSE, FAINT, MISSING, NOISE, ROUGH, Table
from trainverify.prove.propose.zeros import Leaf, Made, Zeros
from trainverify.prove.signs import FINITE, WILD
from trainverify.prove.staged.divisors import Divisors
from trainverify.prove.staged.graphs import LARGE, LOGICAL, NOTHING, Call, Graph, Place, moves_only
from trainverify.prove.staged.needed import Needed
from trainverify.prove.staged.records import PLAIN, Factor
from trainverify.prove.staged.signs import leaves_of, tensors, term_state
from trainverify.prove.staged.supports import supports
from trainverify.prove.staged.terms import Term
from trainverify.prove.strict import Step, Strict

RANKS: Final = 2  # on which a tensor of a wrong plan was no multiple of anything, after which others are not looked at
MISSES: Final = (3, 50)  # elements of a tensor that are not 0 after all, different ones and all, after which no more are looked at
BEFORE: Final = 2  # gradients that are looked behind, for what is 0 by how they are made


class Contradiction(Exception):
    """Lineage that says two things about one element: anything would follow from it."""


@dataclass(frozen=True)
class Claim:
    """A tensor on a rank is, element by element, these elements of the logical program, times a factor."""

    place: Place
    ids: Array  # flat, of int64
    factor: Factor = PLAIN


class Alignment:
    """Ids of logical elements, and the claims about the plan's tensors."""

    def __init__(self, graph: Graph, lineage: tuple[Layout, ...], wanted: Sequence[Obligation] = (), seed: int = 0, apart: bool = False):
        """Apart: that elements of the logical program have the same values says nothing."""
        self.graph = graph
        self.small: Small = graph.small
        self.ids: dict[str, Array] = {}  # logical tensor → ids of its elements; a moved element keeps its id
        self.owner: list[str] = []  # id → the logical tensor that it is an element of
        self.start: dict[str, int] = {}  # first id of a tensor that owns its ids
        steps = [Step(s.inputs, s.outputs, s.nodes) for s in self.small.logical_steps]
        self.strict = Strict([o.tensor for o in self.small.logical.outputs], steps)
        self.signs = tensors(self.small, self.strict).tensors
        self.doubtful = {name for name, known in self.signs.items() if known.unsure}
        self._terms: dict[int, dict[Term, int]] = {}  # states of what logical ops make on the way
        self._states: dict[int, int] = {}  # of elements of tensors that are not all numbers
        self._kinds: dict[str, Any] = {}
        self._factors_in: dict[Place, frozenset[Factor]] = {}  # unnamed tensor → factors that are in what it is made of
        self.claims: dict[Place, Claim] = {}
        self.sources: dict[Place, Array] = {}
        self._moves: dict[int, bool] = {}
        self._compares: dict[int, bool] = {}
        self._zeros = Zeros()
        self._largest: dict[tuple[int, str], float] = {}  # number of a tensor of a class, on all ranks
        # tensor of a class → multiples that it is on some ranks, and ranks on which none was found
        self._multiples: dict[tuple[int, str], tuple[list[tuple[int, Fraction | int]], list[Place]]] = {}
        self.supports: dict[int, frozenset[int]] = {}  # element → those that it vanishes with
        self.extra: dict[int, Place] = {}  # id → a scalar of the plan that no logical scalar equals
        self._number_elements()
        self._read_lineage(lineage)
        graph.merge(self.sources)
        self.digits = Digits(self.small, lineage)
        self.apart = apart
        found = drawn(self.small, lineage, wanted, self.start, self.digits, seed)
        self.runs, self.ordinary, self.quiet, self.wrong = found.runs, found.ordinary, found.quiet, found.wrong
        self.points = len(self.runs)
        self._align()

    # -- ids ---------------------------------------------------------------------------------------------------------

    def _number_elements(self) -> None:
        small = self.small
        position = {place: n for n, place in enumerate(self.graph.order)}
        for n in small.logical.sources:
            self._fresh(n)
        for step in small.logical_steps:
            if moves_only(step.nodes):
                args = [None if i is None else self.ids[i] for i in step.inputs]
                self.ids.update(zip(step.outputs, NUMERIC.run(step.nodes, args), strict=True))
            else:
                for o in sorted(step.outputs, key=lambda o: position[LOGICAL, 0, o]):
                    self._fresh(o)
        self.count = len(self.owner)

    def _fresh(self, name: str) -> None:
        shape = self.small.shapes[name]
        self.start[name] = len(self.owner)
        self.ids[name] = np.arange(math.prod(shape)).reshape(shape) + len(self.owner)
        self.owner += [name] * math.prod(shape)

    def _read_lineage(self, lineage: tuple[Layout, ...]) -> None:
        small = self.small
        known = set(lineage)
        holders: dict[tuple[int, str], list[Layout]] = {}
        for lay, rank in small.parts:
            if lay in known:
                holders.setdefault((rank, lay.local), []).append(lay)
        for c, k in enumerate(small.classes):
            for n in k.program.sources:
                for row, rank in enumerate(k.ranks):
                    local = np.full(small.local_shapes[c][n], NOTHING)
                    for lay in holders.get((rank, n), []):
                        whole = self.ids[lay.logical].reshape(-1)
                        for part in small.parts[lay, rank]:
                            if not part.padding:
                                target = region(part, local)
                                new = whole[small.positions(part, lay.logical)].reshape(target.shape)
                                if ((target != NOTHING) & (target != new)).any():
                                    raise Contradiction(f"{lay} on rank {rank} contradicts another layout of {n}")
                                target[...] = new
                    self.sources[c, row, n] = local

    def where(self, i: int) -> tuple[Place, int]:
        """The logical tensor that an element belongs to, and its position there."""
        return (LOGICAL, 0, self.owner[i]), i - self.start[self.owner[i]]

    def owners(self, arrays: Iterable[Array]) -> list[str]:
        """The logical tensors that elements belong to, in the order of the program; what is no logical element belongs to none."""
        found: set[int] = set()
        for ids in arrays:
            inside = ids[(ids >= 0) & (ids < self.count)]
            if len(inside):
                found.update(np.unique(np.searchsorted(self._starts, inside, side="right")).tolist())
        return [self._tensors[n - 1] for n in sorted(found)]

    def inside(self, ids: Array, name: str) -> Array:
        """Which of these are elements of a logical tensor that owns its elements."""
        first = self.start[name]
        return (ids >= first) & (ids < first + math.prod(self.small.shapes[name]))

    @cached_property
    def _tensors(self) -> list[str]:
        """Logical tensors that have elements, in the order of these."""
        return list(dict.fromkeys(self.owner))

    @cached_property
    def _starts(self) -> Array:
        return np.array([self.start[name] for name in self._tensors])

    def numbers_only(self, name: str) -> bool:
        """Whether all elements of a logical tensor are numbers wherever the program is defined."""
        return self.signs[name].state == FINITE and name not in self.doubtful

    def loose(self, ids: Array) -> bool:
        """Whether some of these elements may be infinite where the outputs of the logical program are not."""
        if not self._unsure:
            return False
        return not self._unsure.isdisjoint({self.owner[i] for i in np.unique(ids).tolist() if 0 <= i < self.count})

    @cached_property
    def _unsure(self) -> set[str]:
        """Logical tensors that may be infinite where the outputs are not."""
        return self.strict.loose & self.doubtful

    def state(self, i: int) -> int:
        """Whether an element is a number wherever the logical program is defined; the −∞ of a mask is not, and no symbol stands for it."""
        if i >= self.count or self.numbers_only(self.owner[i]):
            return FINITE
        if self.owner[i] in self.doubtful:
            return WILD
        found = self._states.get(i)
        if found is None:
            found = self._states[i] = self._state(*self.where(i))
        return found

    def _state(self, place: Place, at: int) -> int:
        """Of an element that an op of the logical program makes; terms of an op share much."""
        call = self.graph.makers[place]
        inside, term = self._terms.setdefault(call.at, {}), self.graph.term(place, at)
        for leaf in leaves_of(term, inside):
            of, position = self.graph.leaf(call, leaf.info)
            inside[leaf] = self.state(int(self.ids[of[2]].reshape(-1)[position]))
        return term_state(term, inside)

    def symbol_kind(self, i: int) -> Any:
        """What a symbol stands for: (kind, domain)."""
        if i >= self.count:
            return ("real", None)
        name = self.owner[i]
        if name not in self._kinds:
            self._kinds[name] = self._kind(name)
        return self._kinds[name]

    def _kind(self, name: str) -> Any:
        small = self.small
        kind = small.logical.tensors[name].kind
        d = small.domains.get(name) if name in small.logical.sources else None
        if d is not None and d.kind in ("ids", "indicator"):
            return (kind, (d.kind, d.size, d.ignore))
        return (kind, None if self.signs[name].sign is None else (self.signs[name].sign, None, None))

    # -- values ------------------------------------------------------------------------------------------------------

    def _align(self) -> None:
        graph = self.graph
        values = np.zeros((self.points, self.count))
        usable = np.zeros(self.count, dtype=bool)
        scale = np.zeros((self.points, self.count))
        for name, first in self.start.items():
            if graph.kind((LOGICAL, 0, name)) != "real":
                continue
            size = math.prod(self.small.shapes[name])
            for p, (logical, _) in enumerate(self.runs):
                values[p, first : first + size] = logical[name].reshape(-1)
            own = values[:, first : first + size]
            usable[first : first + size] = size == 1 or (own != np.round(own)).any()
            scale[:, first : first + size] = np.abs(values[:, first : first + size]).max(axis=1, keepdims=True, initial=0.0)
        usable &= np.isfinite(values).all(axis=0)
        self.usable = usable
        values[:, ~usable] = 0.0
        self.uncertain = np.array([name in self.doubtful for name in self.owner], dtype=bool)
        self.table = Table(values, usable, scale, self.numbers, self.quiet)
        self.same = self.table.same if self.apart else self.table.first_of_equals(self.uncertain)
        self.merged = bool((self.same != np.arange(self.count)).any())  # whether values say that logical elements are equal
        self._updates_are_new()
        self._number_logical()
        self._scalars()
        for place in graph.order:
            if place[0] != LOGICAL:
                if graph.kind(place) == "real":
                    self._claim(place)
                self._note(place)
        self.claims = {p: replace(c, ids=self._without_zeros(c.ids)) for p, c in self.claims.items()}
        used = {c.factor.element for c in self.claims.values()}
        self.extra = {i: p for i, p in self.extra.items() if i in used}
        self.claims = {p: c for p, c in self.claims.items() if (c.ids < self.count).all() or int(c.ids[0]) in used}
        for name in self.start:
            if name not in self.small.logical.sources and graph.kind((LOGICAL, 0, name)) == "real":
                own = self.ids[name].reshape(-1)
                if (self.same[own] != own).any():
                    self.claims[LOGICAL, 0, name] = Claim((LOGICAL, 0, name), self.same[own])
        if not self.wrong:
            self.supports = supports(self.graph, self.ids, self._compared())

    def compares(self, call: Call) -> bool:
        """Whether an op says which elements of an input are positive."""
        if call.nodes is None or call.collective:
            return False
        if call.signature not in self._compares:
            less = [n.args for n in topological(call.nodes) if n.prim == "map" and n.attrs[0] == "lt"]
            known = [all(n.prim != "input" for n in topological((a,))) for a, _ in less]
            self._compares[call.signature] = any(k and moves_only((b,)) for k, (_, b) in zip(known, less, strict=True))
        return self._compares[call.signature]

    @cached_property
    def needed(self) -> Needed:
        return Needed(self.graph)

    @cached_property
    def divisors(self) -> Divisors:
        return Divisors(self.graph, self.needed, self.strict.tensors)

    @cached_property
    def supported(self) -> frozenset[int]:
        """Elements with which others vanish."""
        return frozenset().union(*self.supports.values())

    def vanishing(self, numbers: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
        """Which of these elements are 0 wherever which others are, by their numbers."""
        pairs = [(n, numbers.get(other)) for i, n in numbers.items() for other in self.supports.get(i, ())] if self.supports else []
        return tuple(sorted((n, other) for n, other in pairs if other is not None))

    def _compared(self) -> Iterator[int]:
        """Elements that are not negative, and that an op of either program compares with something."""
        for call in {id(c): c for c in self.graph.makers.values()}.values():
            for place in call.inputs if self.compares(call) else ():
                known = None
                if place is not None and self.graph.kind(place) == "real":
                    known = self.ids[place[2]].reshape(-1) if place[0] == LOGICAL else (self._named(place) or (None,))[0]
                for i in () if known is None else known.tolist():
                    if 0 <= i < self.count and self.signs[self.owner[i]].sign == "nonnegative":
                        yield i

    def _without_zeros(self, ids: Array) -> Array:
        """Elements that the logical program defines as the number 0 have no other name."""
        inside = (ids >= 0) & (ids < self.count)
        return np.where(inside & (self.same[np.where(inside, ids, 0)] == NOTHING), NOTHING, ids)

    def _name_zeros(self, name: str) -> None:
        """Elements of a logical tensor that are 0 by definition, or by the op that makes them from others; of gradients that are rounding
        only, by the ops before it too."""
        place, first = (LOGICAL, 0, name), self.start[name]
        own = slice(first, first + math.prod(self.small.shapes[name]))
        sizes = np.abs(self.table.values[:, own])
        maybe = self.usable[own] & ~sizes.any(axis=0)
        faint = self.usable[own] & (sizes[: self.quiet].max(axis=0, initial=0.0) <= NOISE * sizes[: self.quiet].max(initial=0.0))
        call = self.graph.makers[place]
        if not (maybe | faint).any() or self.graph.work(place) > LARGE:
            return
        different, every = self._zeros.missed + MISSES[0], MISSES[1]
        for n, at in enumerate(np.flatnonzero(maybe | faint).tolist()):
            if self._zeros.missed > different or (n > every and not (self.same[own] == NOTHING).any()):
                return
            for before in (0, BEFORE) if call.backward else (0,):
                made = self._made_of(place, at, before)
                if made is not None and self._zeros.zero(made, bool(faint[at] and not maybe[at])):
                    self.same[first + at] = NOTHING
                    break

    def _made_of(self, place: Place, at: int, before: int) -> Made | None:
        """How an element of a logical tensor is made, back behind so many gradients, and of what; None if some of it may be infinite."""
        term, leaves = self.graph.definition(place, at)
        found: list[Made | Leaf] = []
        for p, q in leaves:
            i = int(self.ids[p[2]].reshape(-1)[q])
            owner = (LOGICAL, 0, self.owner[i])
            call = self.graph.makers.get(owner)
            kind = self.symbol_kind(i)
            if kind[0] == "real" and not self.usable[i]:
                return None
            if before and self.same[i] != NOTHING and call is not None and call.backward and self.graph.work(owner) <= LARGE:
                made = self._made_of(owner, i - self.start[self.owner[i]], before - 1)
                if made is None:
                    return None
                found.append(made)
            else:
                number = int(self.structure.places[p][q])
                found.append(Leaf(NOTHING if number == self.structure.nothing else number, kind))
        return Made(term, tuple(found))

    @cached_property
    def numbers(self) -> Array:
        """id → the number of its tensor."""
        numbers = {name: n for n, name in enumerate(self.start)}
        return np.array([numbers[name] for name in self.owner])

    def value(self, place: Place) -> Array | None:
        """(points, elements), None where it was not computed or is not finite."""
        c, row, name = place
        rows = []
        for logical, plan in self.runs:
            v = logical.get(name) if c == LOGICAL else plan.get(c, row, name)
            if v is None:
                return None
            rows.append(np.asarray(v, dtype=np.float64).reshape(-1))
        made = np.stack(rows)
        return made if np.isfinite(made).all() else None

    def _scalars(self) -> None:
        """Factors that a tensor may have been multiplied by: scalars of both programs, those of equal value once."""
        found: list[tuple[Array, int]] = []
        for name in self.ids:
            if math.prod(self.small.shapes[name]) == 1 and self.graph.kind((LOGICAL, 0, name)) == "real":
                v = self.value((LOGICAL, 0, name))
                if v is not None:
                    found.append((v[:, 0], int(self.same[self.ids[name].reshape(-1)[0]])))
        for place in self.graph.order:
            if place[0] != LOGICAL and self.graph.shape(place) == () and self.graph.kind(place) == "real":
                v = self.value(place)
                if v is None or _constant(v) or self.table.find(v)[0] != MISSING:
                    continue
                near = [i for w, i in found if self._alike(w, v[:, 0])]
                if near:
                    self.claims[place] = Claim(place, np.array([near[0]]))
                else:
                    number = self.count + len(self.extra)
                    self.extra[number] = place
                    found.append((v[:, 0], number))
        self._extra_places = set(self.extra.values())
        self.factors: list[tuple[Array, Factor]] = []
        shapes: list[Array] = [np.ones(self.points)]
        for v, i in found:
            if i >= 0 and (v != 0).all() and not any(self._alike(v / v[0], s) or self._alike(v[0] / v, s) for s in shapes):
                shapes.append(v / v[0])
                self.factors += [(v, Factor(element=i)), (1 / v, Factor(element=i, power=-1))]
        self.factors.insert(0, (np.ones(self.points), Factor()))
        self.weights = np.stack([w for w, _ in self.factors], axis=1)

    def _alike(self, a: Array, b: Array) -> bool:
        """Whether two scalars have the same values on all points."""
        q = self.quiet
        loud = np.abs(a[q:] - b[q:]) <= ROUGH * np.maximum(np.abs(a[q:]), np.abs(b[q:]))
        return _near(a[:q], b[:q]) and bool(loud.all())

    def divides_by(self, place: Place) -> list[Place]:
        """Outputs of logical ops that seem to divide by a scalar of this value, or take its logarithm or root."""
        v = self.value(place)
        found: list[Place] = []
        if v is None:
            return found
        logical = self.runs[0][0]
        for step, strict in zip(self.small.logical_steps, self.strict.nodes, strict=True):
            nodes = [n for n in topological(step.nodes) if id(n) in strict]
            divisors = [n.args[-1] for n in nodes if n.prim == "map" and n.attrs[0] in ("div", "log", "pow")]
            if divisors and step.outputs[0] in self.strict.tensors:
                values = NUMERIC.run(divisors, [None if i is None else logical[i] for i in step.inputs])
                wanted = np.unique(v[0].reshape(-1))
                unique = [np.unique(x.reshape(-1)) for x in values]
                if any(wanted.size in (1, x.size) and _near(x, wanted) for x in unique):
                    found.append((LOGICAL, 0, step.outputs[0]))
        return found

    def _claim(self, place: Place) -> None:
        v = self.value(place)
        if v is None or _constant(v) or place in self.claims or place in self._extra_places:
            return
        if v.shape[1] > 1 and (v == np.round(v)).all():  # masks and counts: values that coincide, and need no name
            return
        if self._moved(place):
            return
        if not self.wrong and (self._made_alike(place, v) or self._scaled(place, v)):
            return
        ids = self._found(place, v)
        if ids is not None:
            self.claims[place] = Claim(place, ids)
            return
        if not self.wrong and self._rounding_only(place, v):
            self.claims[place] = Claim(place, np.full(v.shape[1], NOTHING))
            return
        x = v[:, int(np.argmax(np.abs(v[: self.quiet]).max(axis=0)))]
        if not x[: self.quiet].any():
            return
        one = bool((v == v[:, :1]).all())
        known, failed = self._multiples.setdefault((place[0], place[2]), ([], []))
        found = next((k for k in known if self._multiple(place, v, one, *k)), None)
        if found is not None or (self.wrong and len(failed) >= RANKS):
            return
        for f, numbers in self.table.multiples(x[:, None] / self.weights):
            for number in numbers:
                if self._multiple(place, v, one, f, number):
                    known.append((f, number))
                    return
        failed.append(place)

    def _rounding_only(self, place: Place, v: Array) -> bool:
        """Whether a tensor is rounding beside what other ranks have there: a shard with nothing but gradients that are 0."""
        key = place[0], place[2]
        if key not in self._largest:
            rows = [
                plan.get(place[0], row, place[2])
                for _, plan in self.runs[: self.quiet]
                for row in range(len(self.small.classes[place[0]].ranks))
            ]
            self._largest[key] = max((float(np.abs(w).max(initial=0.0)) for w in rows if w is not None), default=0.0)
        return bool(np.abs(v[: self.quiet]).max(initial=0.0) <= NOISE * self._largest[key])

    def _multiple(self, place: Place, v: Array, one: bool, f: int, number: Fraction | int) -> bool:
        """Claims that a tensor is a number times a scalar times logical elements, if there are such."""
        w, factor = self.factors[f]
        if one and factor.element is not None and factor.element >= self.count:
            return False  # two scalars of the plan and one of the other program: says nothing of how either is made
        if f == 0 and number == 1:
            return False
        ids = self._found(place, v / (w * float(number))[:, None])
        if ids is None or self._itself(factor, ids):
            return False
        self.claims[place] = Claim(place, ids, Factor(number, factor.element, factor.power))
        return True

    def _updates_are_new(self) -> None:
        """What an optimizer makes is not what it was given, however small the difference is."""
        for step in self.small.logical_steps:
            if step.op.phase == "optimizer":
                for name in step.outputs:
                    own = self.ids[name].reshape(-1)
                    if any(self.owner[i] in self.small.logical.sources for i in self.same[own].tolist()):
                        self.same[own] = own

    def _itself(self, factor: Factor, ids: Array) -> bool:
        """Whether a factor is one of the elements that it is said to multiply, or a multiple of one: a square is no such product."""
        i = factor.element
        if i is None or i >= self.count:
            return i in ids
        return bool((self.rays[ids[(ids >= 0) & (ids < self.count)]] == self.rays[i]).any())

    @cached_property
    def rays(self) -> Array:
        """For every element a number that proportional ones share."""
        return self.table.rays()

    def _number_logical(self) -> None:
        """Numbers of all logical elements; those that have one number are the same, besides those of equal values."""
        self.structure = Structure(self.graph, self.same)
        for name, ids in self.ids.items():
            if name not in self.start or self.wrong:
                pass
            else:
                if name not in self.small.logical.sources:
                    self._name_zeros(name)
                self.structure.logical(name, self.start[name])
            self.structure.named((LOGICAL, 0, name), ids)
        if not self.wrong:
            same = np.array([self.structure.first[n] for n in self.structure.elements.tolist()], dtype=np.int64)
            own = (same >= 0) & self.uncertain[same]  # what may have no value is no name for others
            self.same = self.table.same = np.where(own, np.arange(self.count), same)
        for place, ids in self.sources.items():
            self.structure.named(place, ids)

    def _note(self, place: Place) -> None:
        """What later ops make of a tensor is told by its name, or by how it is made."""
        claim = self.claims.get(place)
        if claim is not None:
            self.structure.named(place, claim.ids)
        elif place in self._extra_places:
            self.structure.named(place, np.array([next(i for i, p in self.extra.items() if p == place)]))
        elif not self.wrong:
            made = self.structure.made(place)
            if made is not None:
                self.structure.places[place] = made
                self._factors_in[place] = self._factors_of(place)

    def _factors_of(self, place: Place) -> frozenset[Factor]:
        """Factors of the tensors that a tensor is made of."""
        found: set[Factor] = set()
        for i in self.graph.makers[place].inputs:
            if i in self.claims:
                found.add(self.claims[i].factor)
            elif i is not None:
                found |= self._factors_in.get(i, frozenset((Factor(),)))
        return frozenset(found)

    def _made_alike(self, place: Place, v: Array) -> bool:
        """Whether logical elements are made by the same term from the same elements, up to a factor: no rounding in the way."""
        found = self.alike(place)
        return found is not None and self._claim_times(place, v, found[0], [*(found[1] - {Factor()}), Factor()])

    def _scaled(self, place: Place, v: Array) -> bool:
        """Whether a tensor is an input of its op times a factor: then its elements keep their names, whichever have the same values."""
        call = self.graph.makers[place]
        for i in call.inputs if not call.collective else ():
            known = None if i is None else self._named(i)
            if known is None or len(known[0]) != v.shape[1] or v.shape[1] < 2 or (known[0] >= self.count).any():
                continue
            by = self._scales(place, i)
            if by is None:
                continue
            if by != 1:  # a number, and nothing else
                factors = [replace(known[1], number=known[1].number * by)]
            else:
                factors = [f for f in dict.fromkeys((Factor(), known[1], *(f for _, f in self.factors))) if f.element not in known[0]]
            if self._claim_times(place, v, known[0], factors):
                return True
        return False

    def _scales(self, place: Place, of: Place | None) -> Fraction | int | None:
        """The number that an op multiplies an input by, 1 if it is a scalar; None if it does anything else, whatever its values."""
        term, leaves = self.graph.definition(place, 0)
        others = [p for p, _ in leaves if p != of]
        if term.op != "map" or term.info[0] not in ("mul", "div") or any(a.op not in ("leaf", "real") for a in term.args):
            return None
        if len(others) != len(leaves) - 1 or term.args[0] is term.args[-1]:  # a square is no multiple
            return None
        numbers = [a.info for a in term.args if a.op == "real"]
        if not numbers:
            return 1 if all(math.prod(self.graph.shape(p)) == 1 for p in others) else None
        (number,) = numbers
        if not isinstance(number, Fraction) or number == 0 or (term.info[0] == "div" and term.args[0].op == "real"):
            return None
        return number if term.info[0] == "mul" else 1 / number

    def _claim_times(self, place: Place, v: Array, ids: Array, factors: Sequence[Factor]) -> bool:
        """Claims that a tensor is these elements times the factor that fits on most points, if that is more than half of them."""
        most = self.points // 2
        for factor in factors:
            want = np.where(ids >= 0, self.table.values[:, ids], 0.0) * float(factor.number)
            if factor.element is not None:
                want = want * self._value_of(factor.element)[:, None] ** factor.power
            sizes = np.abs(want).max(axis=1, keepdims=True)
            close = int((np.abs(v - want) <= LENIENT * sizes + FAINT * sizes.max()).all(axis=1).sum())
            if close > most:
                most = close
                self.claims[place] = Claim(place, ids, factor)
        return place in self.claims

    def alike(self, place: Place) -> tuple[Array, frozenset[Factor]] | None:
        """Logical elements that are made by the same terms from the same elements, and the factors that those have in the plan."""
        numbers = self.structure.made(place)
        ids = None if numbers is None else self.structure.meant(numbers)
        if ids is None or any(i != NOTHING and self.graph.kind((LOGICAL, 0, self.owner[i])) != "real" for i in ids):
            return None
        return np.array(ids, dtype=np.int64), self._factors_of(place)

    def rename(self, claim: Claim) -> None:
        """Another meaning for a tensor."""
        self.claims[claim.place] = replace(claim, ids=self._without_zeros(claim.ids))
        self.structure.named(claim.place, claim.ids)

    @cached_property
    def shared(self) -> Array:
        """For every element whether another one has the same values on all points."""
        found = np.zeros(self.count + len(self.extra) + 1, dtype=bool)  # the last one is NOTHING
        found[self.same[self.same != np.arange(self.count)]] = True
        found[NOTHING] = False
        return found

    def _value_of(self, i: int) -> Array:
        """A scalar by its id, on all points."""
        if i < self.count:
            return np.asarray(self.table.values[:, i])
        made = self.value(self.extra[i])
        assert made is not None
        return np.asarray(made[:, 0])

    def _moved(self, place: Place) -> bool:
        """What only moves elements keeps their names."""
        call = self.graph.makers[place]
        if not self.only_moves(place):
            return False
        used = set(range(len(call.inputs))) if call.collective else {n.attrs[0] for n in topological(call.nodes or ()) if n.prim == "input"}
        args: list[Any] = [None] * len(call.inputs)
        factors = set()
        for n in used:
            place_of = call.inputs[n]
            known = None if place_of is None else self._named(place_of)
            if place_of is None or known is None:
                return False
            args[n] = known[0].reshape(self.graph.shape(place_of))
            factors.add(known[1])
        if len(factors) != 1:
            return False
        if call.collective:
            given = np.stack(args)
            moved = given if call.nodes is None else NUMERIC.run(call.nodes, [given])[0]
            ids = moved[call.outputs.index(place)]
        else:
            ids = NUMERIC.run(call.nodes or (), args)[call.outputs.index(place)]
        self.claims[place] = Claim(place, np.asarray(ids).reshape(-1), factors.pop())
        return True

    def only_moves(self, place: Place) -> bool:
        """Whether a tensor has the elements of others, in some order."""
        call = self.graph.makers[place]
        if call.nodes is None:
            return True
        if call.signature not in self._moves:
            self._moves[call.signature] = moves_only(call.nodes)
        return self._moves[call.signature]

    def _named(self, place: Place) -> tuple[Array, Factor] | None:
        if place in self.sources:
            return self.sources[place].reshape(-1), Factor()
        claim = self.claims.get(place)
        return None if claim is None else (claim.ids, claim.factor)

    def _found(self, place: Place, v: Array) -> Array | None:
        ids = self.table.find(v)
        placed = self._in_place(place, ids, v)
        return placed if placed is not None else None if (ids == MISSING).any() else ids

    def _in_place(self, place: Place, ids: Array, v: Array) -> Array | None:
        """Where several elements have one value, or it is 0 or too small to be looked up, the one that lies like its neighbours do."""
        named = ids[ids >= 0]
        if not named.size or named[0] >= self.count:
            return None
        owner = self.owner[int(named[0])]
        shape, whole = self.graph.shape(place), self.small.shapes[owner]
        first, size = self.start[owner], math.prod(whole)
        if not shape or ((named < first) | (named >= first + size)).any():
            return None
        here = np.stack(np.unravel_index(np.arange(ids.size), shape))
        if len(shape) == len(whole):
            steps = [math.prod(whole[d + 1 :]) for d in range(len(whole))]
        else:
            steps = [_step(ids.reshape(shape), d) for d in range(len(shape))]
        lies = sum((h * s for h, s in zip(here, steps, strict=True)), np.zeros_like(ids))
        if (ids >= 0).all() and len(np.unique(ids - lies)) == 1:
            return None
        found = self._block(ids, lies, v, first, size)
        if found is None and (ids < 0).any():
            found = self._block(ids, _apart(ids.reshape(shape)).reshape(-1), v, first, size)
        return found

    def _block(self, ids: Array, lies: Array, v: Array, first: int, size: int) -> Array | None:
        """Elements of one logical tensor that have these values and lie like that from each other, where most ids are."""
        starts, counts = np.unique((ids - lies)[ids >= 0], return_counts=True)
        for start in starts[np.argsort(-counts)][:4].tolist():
            block = lies + start
            if (block < first).any() or (block >= first + size).any():
                continue
            gap = np.abs(self.table.values[:, block] - v)
            if (gap <= self.table.tolerance(v)).all():
                return np.asarray(self.same[block])
        return None


def _step(ids: Array, d: int) -> int:
    """By how much ids grow along a dimension, most of the time."""
    low, high = (np.moveaxis(ids, d, 0)[k] for k in (slice(None, -1), slice(1, None)))
    steps, counts = np.unique((high - low)[(low >= 0) & (high >= 0)], return_counts=True)
    return int(steps[np.argmax(counts)]) if len(steps) else 0


def _apart(ids: Array) -> Array:
    """How far elements lie from each other, if every dimension counts by itself: what no token chose lies like what some chose."""
    lies = np.zeros(ids.shape, dtype=np.int64)
    for d in range(ids.ndim):
        rows = np.moveaxis(ids, d, 0).reshape(ids.shape[d], -1)
        off = np.zeros(len(rows), dtype=np.int64)
        known = np.zeros(len(rows), dtype=bool)
        known[np.argmax((rows >= 0).sum(axis=1))] = True
        changed = True
        while changed and not known.all():
            changed = False
            for n in np.flatnonzero(~known).tolist():
                both = (rows[n] >= 0) & (rows >= 0) & known[:, None]
                if both.any():
                    steps, counts = np.unique((rows[n] - rows + off[:, None])[both], return_counts=True)
                    off[n], known[n], changed = steps[np.argmax(counts)], True, True
        lies += off.reshape([-1 if k == d else 1 for k in range(ids.ndim)])
    return lies


def _constant(v: Array) -> bool:
    """The same on all points: needs no name."""
    return bool((v == v[:1]).all())


def _near(a: Array, b: Array) -> bool:
    return bool((np.abs(a - b) <= CLOSE * max(np.abs(a).max(initial=0.0), np.abs(b).max(initial=0.0))).all())


def inputs_of(small: Small, values: Mapping[str, Any]) -> dict[str, Array]:
    """Random inputs with some elements replaced."""
    inputs = random_inputs(small, 0)
    for name, cells in values.items():
        flat = inputs[name].reshape(-1).copy()
        for at, v in cells.items():
            flat[at] = v
        inputs[name] = flat.reshape(inputs[name].shape)
    return inputs
