"""Claims: what is said of tensors by whoever proposes it. Records only; a claim counts once stages have shown it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.prove.staged.elements import Elements
from trainverify.prove.staged.graphs import LOGICAL, Place
from trainverify.prove.staged.records import PLAIN, Factor


@dataclass(frozen=True)
class Claim:
    """A tensor on a rank is, element by element, these elements of the logical program, times a factor."""

    place: Place
    ids: Array  # flat, of int64
    factor: Factor = PLAIN


class Claims:
    """The claims that stages are cut by. Whoever changes one has to cut everything again that rests on it."""

    def __init__(self, elements: Elements, tensors: Mapping[Place, Claim], scalars: Mapping[int, Place]):
        self.tensors = dict(tensors)
        self.scalars = dict(scalars)  # id → a scalar of the plan that no logical scalar equals
        self.scalar_at = {p: i for i, p in self.scalars.items()}
        self.dropped: set[Place] = set()  # claims that turned out to be unprovable
        self.same = np.arange(elements.count)  # logical element → the one that it is claimed to equal, or NOTHING
        for place, claim in self.tensors.items():
            self.check(elements, claim)
            if place[0] == LOGICAL:
                self.same[elements.ids[place[2]].reshape(-1)] = claim.ids

    def check(self, elements: Elements, claim: Claim) -> None:
        """A claim is about real numbers, and about every element of its tensor."""
        graph = elements.graph
        if graph.kind(claim.place) != "real" or claim.ids.shape != (math.prod(graph.shape(claim.place)),):
            raise ValueError(f"not a claim: {graph.show(claim.place)}")
