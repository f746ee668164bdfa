"""Claims: what a proposer says of tensors, and what the engine may ask it. Records only; a claim counts once stages have shown it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.prove.staged.elements import Elements
from trainverify.prove.staged.graphs import LOGICAL, Place
from trainverify.prove.staged.records import PLAIN, Factor, Goal


@dataclass(frozen=True)
class Claim:
    """A tensor on a rank is, element by element, these elements of the logical program, times a factor."""

    place: Place
    ids: Array  # flat, of int64
    factor: Factor = PLAIN


class Proposer(Protocol):
    """Whoever proposes claims. No answer is believed: a wrong one costs time, or a proof."""

    @property
    def claims(self) -> Mapping[Place, Claim]: ...

    @property
    def scalars(self) -> Mapping[int, Place]:
        """id → a scalar of the plan that no logical scalar equals."""

    @property
    def compared(self) -> Collection[int]:
        """Elements that others may vanish with."""

    def agrees(self, goal: Goal) -> bool:
        """Whether it is worth a try to show a goal."""

    def violated(self, outputs: Sequence[str]) -> list[str]:
        """For each of these outputs, which differ, where the plan goes another way."""

    def another(self, place: Place) -> Claim | None:
        """Another meaning for a tensor whose claim fails."""

    def by_chance(self, claim: Claim) -> bool:
        """Whether a claim may hold for some values only."""

    def divides_by(self, place: Place) -> Sequence[Place]:
        """Outputs of logical ops that may divide by a scalar."""


class Claims:
    """The claims that stages are cut by. Whoever changes one has to cut everything again that rests on it."""

    def __init__(self, elements: Elements, proposer: Proposer):
        self.tensors = dict(proposer.claims)
        self.scalars = dict(proposer.scalars)
        self.scalar_at = {p: i for i, p in self.scalars.items()}
        self.dropped: set[Place] = set()  # claims that turned out to be unprovable
        self.same = np.arange(elements.count)  # logical element → the one that it is claimed to equal, or NOTHING
        for place, claim in self.tensors.items():
            if elements.graph.kind(place) != "real" or claim.ids.shape != (math.prod(elements.graph.shape(place)),):
                raise ValueError(f"a claim that is none: {elements.graph.show(place)}")
            if place[0] == LOGICAL:
                self.same[elements.ids[place[2]].reshape(-1)] = claim.ids
