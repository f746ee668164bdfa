"""The programs that stages compare: both at reduced sizes, with all ranks or, of a large plan, with some of every sort."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from trainverify.axes.cells import NoCells
from trainverify.axes.reduction import NotABoundary
from trainverify.axes.system import System
from trainverify.evaluate.classed import NoValue
from trainverify.evaluate.compare import DIFFERENT
from trainverify.evaluate.full_size import ByClasses
from trainverify.evaluate.run import NotComputed, elements
from trainverify.evaluate.small import Small, TooMuch
from trainverify.graph.lineage import Layout
from trainverify.graph.obligations import Obligation
from trainverify.prove.propose.points import clearly_different
from trainverify.prove.staged.reduce import reduced, unreduced, with_fewer

MAX_ELEMENTS: Final = 6_000_000
MANY: Final = 300_000  # elements of a plan that is looked at with fewer ranks, and less to choose from
AS_IT_IS: Final = 50_000  # elements of what is not reduced


class NoStages(Exception):
    """Why there is nothing to cut."""

    def __init__(self, why: str, too_large: bool = False):
        super().__init__(why)
        self.too_large = too_large


def looked_at(system: System, wanted: Sequence[Obligation], lineage: tuple[Layout, ...]) -> Small:
    """Both programs as they are looked at."""
    try:
        small = _with_fewer(system, _small(system), wanted, lineage)
    except NotABoundary as error:
        raise NoStages(f"no small sizes keep the structure of the plan: {error}") from error
    if elements(small) > MAX_ELEMENTS:
        raise NoStages("too large, even at reduced sizes", too_large=True)
    return small


def _small(system: System) -> Small:
    """At reduced sizes; as it is if none keep the structure and it is small enough."""
    try:
        return reduced(system)
    except NotABoundary:
        try:
            return unreduced(system, AS_IT_IS)
        except TooMuch:
            pass
        raise


def _with_fewer(system: System, small: Small, wanted: Sequence[Obligation], lineage: tuple[Layout, ...]) -> Small:
    """The same, or with fewer ranks and less to choose from if that is much less.

    Not if the programs differ then: a number may count ranks. One that should and does not may look right with two of a sort, not also with
    three."""
    if elements(small) <= MANY:
        return small
    try:
        two, three = with_fewer(system, 2), with_fewer(system, 3)
        if two is None or three is None or 2 * elements(two) > elements(small):
            return small
        return small if any(clearly_different(few, wanted, lineage) for few in (two, three)) else two
    except (NotABoundary, NotComputed):
        return small


def different(system: System, wanted: Sequence[Obligation], lineage: tuple[Layout, ...]) -> Collection[Obligation]:
    """What differs although there are too many elements to prove anything of: on classes, at full size."""
    try:
        seen = ByClasses(system, lineage, wanted, seed=0).seen(wanted)
    except (NoCells, NoValue):
        return ()
    return tuple(c.obligation for c in seen.differs if c.gap > DIFFERENT)
