"""Proposals: which elements of the logical program the elements of the plan's tensors seem to be.

Both programs are run on a few random points, and elements with equal values are paired, also up to a factor. Nothing here is believed:
every pair becomes a claim that a stage has to prove, and a claim that is not proved is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Final

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC
from trainverify.graph.lineage import Layout
from trainverify.graph.obligations import Obligation
from trainverify.primitives.node import topological
from trainverify.prove.propose.blocks import named
from trainverify.prove.propose.factors import Factors
from trainverify.prove.propose.points import LENIENT
from trainverify.prove.propose.structure import Structure
from trainverify.prove.propose.table import FAINT
from trainverify.prove.propose.values import Values, constant
from trainverify.prove.propose.violated import first_violated
from trainverify.prove.propose.zeros import Zeros
from trainverify.prove.staged.claims import Claim
from trainverify.prove.staged.elements import Elements
from trainverify.prove.staged.graphs import LOGICAL, NOTHING, Place
from trainverify.prove.staged.records import Factor

RANKS: Final = 2  # on which a tensor of a wrong plan was no multiple of anything, after which others are not looked at


class Proposal:
    """Claims about the plan's tensors, and about logical elements that seem to be equal."""

    def __init__(
        self, elements: Elements, lineage: tuple[Layout, ...], wanted: Sequence[Obligation] = (), seed: int = 0, merge: bool = True
    ):
        """Merge: elements of the logical program that have the same values are proposed to be equal."""
        self.elements = elements
        self.graph = elements.graph
        self.small = elements.small
        self.values = Values(elements, lineage, wanted, seed)
        self.table = self.values.table
        self.wrong = self.values.wrong
        self._uncertain = np.array([name in elements.doubtful for name in elements.owner], dtype=bool)
        if merge:
            self.table.first_of_equals(self._uncertain)
        self.merged = bool((self.table.same != np.arange(elements.count)).any())  # whether values say that logical elements are equal
        self._updates_are_new()
        self.structure = Structure(self.graph, self.table.same)
        self._number_logical()
        self.factors = Factors(self.values)
        self._factors_in: dict[Place, frozenset[Factor]] = {}  # unnamed tensor → factors that are in what it is made of
        # tensor of a class → multiples that it is on some ranks, and ranks on which none was found
        self._multiples: dict[tuple[int, str], tuple[list[tuple[int, Fraction | int]], list[Place]]] = {}
        self.claims = {p: Claim(p, np.array([i])) for p, i in self.factors.named.items()}
        for place in self.graph.order:
            if place[0] != LOGICAL:
                if self.graph.kind(place) == "real":
                    self._claim(place)
                self._note(place)
        self.scalars = self._settle()
        self.compared = frozenset(() if self.wrong else self._compared())

    # -- logical elements --------------------------------------------------------------------------------------------

    def _updates_are_new(self) -> None:
        """What an optimizer makes is not what it was given, however small the difference is."""
        for step in self.small.logical_steps:
            if step.op.phase == "optimizer":
                for name in step.outputs:
                    ids = self.elements.ids[name].reshape(-1)
                    if any(self.elements.owner[i] in self.small.logical.sources for i in self.table.same[ids].tolist()):
                        self.table.same[ids] = ids

    def _number_logical(self) -> None:
        """Numbers of all logical elements; those that have one number are the same, besides those of equal values."""
        a, structure = self.elements, self.structure
        zeros = Zeros(self.values, structure)
        for name, ids in a.ids.items():
            if name in a.start and not self.wrong:
                if name not in self.small.logical.sources:
                    zeros.name(name)
                structure.logical(name, a.start[name])
            structure.named((LOGICAL, 0, name), ids)
        if not self.wrong:
            same = np.array([structure.first[n] for n in structure.elements.tolist()], dtype=np.int64)
            uncertain = (same >= 0) & self._uncertain[same]  # what may have no value is no name for others
            self.table.same = np.where(uncertain, np.arange(a.count), same)
        for place, ids in a.sources.items():
            structure.named(place, ids)

    def _without_zeros(self, ids: Array) -> Array:
        """Elements that the logical program defines as the number 0 have no other name."""
        inside = self.elements.inside(ids)
        return np.where(inside & (self.table.same[np.where(inside, ids, 0)] == NOTHING), NOTHING, ids)

    def _settle(self) -> dict[int, Place]:
        """Drops names of zeros and of scalars that nothing speaks of, and claims that logical elements are equal; the scalars are left."""
        a = self.elements
        self.claims = {p: replace(c, ids=self._without_zeros(c.ids)) for p, c in self.claims.items()}
        used = {c.factor.element for c in self.claims.values()}
        self.claims = {p: c for p, c in self.claims.items() if (c.ids < a.count).all() or int(c.ids[0]) in used}
        for name in a.start:
            if name not in self.small.logical.sources and self.graph.kind((LOGICAL, 0, name)) == "real":
                ids = a.ids[name].reshape(-1)
                if (self.table.same[ids] != ids).any():
                    self.claims[LOGICAL, 0, name] = Claim((LOGICAL, 0, name), self.table.same[ids])
        return {i: p for i, p in self.factors.scalars.items() if i in used}

    def _compared(self) -> Iterator[int]:
        """Elements that are not negative, and that an op of either program compares with something."""
        a = self.elements
        for call in dict.fromkeys(self.graph.makers.values()):
            for place in call.inputs if a.compares(call) else ():
                known = None
                if place is not None and self.graph.kind(place) == "real":
                    known = a.ids[place[2]].reshape(-1) if place[0] == LOGICAL else (self._named(place) or (None,))[0]
                for i in () if known is None else known[a.inside(known)].tolist():
                    if a.signs[a.owner[i]].sign == "nonnegative":
                        yield i

    # -- claims ------------------------------------------------------------------------------------------------------

    def _claim(self, place: Place) -> None:
        v = self.values.of(place)
        if v is None or constant(v) or place in self.claims or place in self.factors.at:
            return
        if v.shape[1] > 1 and (v == np.round(v)).all():  # masks and counts: values that coincide, and need no name
            return
        if self._moved(place):
            return
        if not self.wrong and (self._made_alike(place, v) or self._scaled(place, v)):
            return
        ids = named(self.values, place, v)
        if ids is None and not self.wrong and self.values.rounding_only(place, v):
            ids = np.full(v.shape[1], NOTHING)
        if ids is not None:
            self.claims[place] = Claim(place, ids)
        else:
            self._claim_multiple(place, v)

    def _claim_multiple(self, place: Place, v: Array) -> None:
        """Claims that a tensor is some multiple of logical elements, on this rank as on others if possible."""
        quiet = self.values.quiet
        x = v[:, int(np.argmax(np.abs(v[:quiet]).max(axis=0)))]
        if not x[:quiet].any():
            return
        one = bool((v == v[:, :1]).all())
        known, failed = self._multiples.setdefault((place[0], place[2]), ([], []))
        if any(self._multiple(place, v, one, *k) for k in known) or (self.wrong and len(failed) >= RANKS):
            return
        for f, numbers in self.table.multiples(x[:, None] / self.factors.weights):
            for number in numbers:
                if self._multiple(place, v, one, f, number):
                    known.append((f, number))
                    return
        failed.append(place)

    def _multiple(self, place: Place, v: Array, one: bool, f: int, number: Fraction | int) -> bool:
        """Claims that a tensor is a number times a scalar times logical elements, if there are such."""
        w, factor = self.factors.every[f]
        if one and factor.element is not None and factor.element >= self.elements.count:
            return False  # two scalars of the plan and one of the other program: says nothing of how either is made
        if f == 0 and number == 1:
            return False
        ids = named(self.values, place, v / (w * float(number))[:, None])
        if ids is None or self._itself(factor, ids):
            return False
        self.claims[place] = Claim(place, ids, Factor(number, factor.element, factor.power))
        return True

    def _itself(self, factor: Factor, ids: Array) -> bool:
        """Whether a factor is one of the elements that it is said to multiply, or a multiple of one: a square is no such product."""
        i = factor.element
        if i is None or i >= self.elements.count:
            return i in ids
        rays = self.table.rays
        return bool((rays[ids[self.elements.inside(ids)]] == rays[i]).any())

    def _note(self, place: Place) -> None:
        """What later ops make of a tensor is told by its name, or by how it is made."""
        claim = self.claims.get(place)
        if claim is not None:
            self.structure.named(place, claim.ids)
        elif place in self.factors.at:
            self.structure.named(place, np.array([self.factors.at[place]]))
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
        found = self._alike(place)
        return found is not None and self._claim_times(place, v, found[0], [*(found[1] - {Factor()}), Factor()])

    def _alike(self, place: Place) -> tuple[Array, frozenset[Factor]] | None:
        """Logical elements that are made by the same terms from the same elements, and the factors that those have in the plan."""
        numbers = self.structure.made(place)
        ids = None if numbers is None else self.structure.meant(numbers)
        if ids is None or any(i != NOTHING and self.graph.kind(self.elements.where(i)[0]) != "real" for i in ids):
            return None
        return np.array(ids, dtype=np.int64), self._factors_of(place)

    def _scaled(self, place: Place, v: Array) -> bool:
        """Whether a tensor is an input of its op times a factor: then its elements keep their names, whichever have the same values."""
        call = self.graph.makers[place]
        for i in call.inputs if not call.collective else ():
            known = None if i is None else self._named(i)
            if known is None or len(known[0]) != v.shape[1] or v.shape[1] < 2 or (known[0] >= self.elements.count).any():
                continue
            by = self._scales(place, i)
            if by is None:
                continue
            if by != 1:  # a number, and nothing else
                factors = [replace(known[1], number=known[1].number * by)]
            else:
                every = dict.fromkeys((Factor(), known[1], *(f for _, f in self.factors.every)))
                factors = [f for f in every if f.element not in known[0]]
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
        most = self.values.points // 2
        for factor in factors:
            want = np.where(ids >= 0, self.table.values[:, ids], 0.0) * self.factors.value(factor)[:, None]
            sizes = np.abs(want).max(axis=1, keepdims=True)
            close = int((np.abs(v - want) <= LENIENT * sizes + FAINT * sizes.max()).all(axis=1).sum())
            if close > most:
                most = close
                self.claims[place] = Claim(place, ids, factor)
        return place in self.claims

    def _moved(self, place: Place) -> bool:
        """What only moves elements keeps their names."""
        call = self.graph.makers[place]
        if not self.elements.only_moves(place):
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
        else:
            moved = NUMERIC.run(call.nodes or (), args)
        ids = moved[call.outputs.index(place)]
        self.claims[place] = Claim(place, np.asarray(ids).reshape(-1), factors.pop())
        return True

    def _named(self, place: Place) -> tuple[Array, Factor] | None:
        if place in self.elements.sources:
            return self.elements.sources[place].reshape(-1), Factor()
        claim = self.claims.get(place)
        return None if claim is None else (claim.ids, claim.factor)

    # -- what a search asks -----------------------------------------------------------------------------------------

    def violated(self, outputs: Sequence[str]) -> list[str]:
        return first_violated(self.elements, self.table, self.claims.values(), outputs)

    def another(self, place: Place) -> Claim | None:
        """The meaning that a tensor has by how it is made, if that is another one: values agreed by chance."""
        found = self._alike(place)
        if found is None or (found[0] == self.claims[place].ids).all() or len(found[1]) != 1:
            return None
        self.claims[place] = claim = Claim(place, self._without_zeros(found[0]), next(iter(found[1])))
        self.structure.named(place, found[0])
        return claim

    def by_chance(self, claim: Claim) -> bool:
        """Whether another element has the same values on all points as one of these."""
        same = self.table.same
        shared = np.unique(same[same != np.arange(len(same))])
        return bool(np.isin(claim.ids[claim.ids != NOTHING], shared).any())
