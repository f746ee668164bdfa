"""Smaller sizes for a plan that is not proved: where two readings of an axis do not align, it shrinks by size alone.

Such an axis keeps all its positions otherwise, and attention over them is quadratic. A difference at these sizes is no verdict: one wrong
order is wrong at any sizes, but several after each other may be none at all at some (25 times `[2, 901]` read as `[901, 2]` and transposed
is nothing). It says that full size is worth its while, and its cause is searched for here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from trainverify.axes.loose import LooseAxes
from trainverify.axes.reduction import NotABoundary
from trainverify.axes.system import System
from trainverify.evaluate.compare import DIFFERENT, Suspect, calm, compare
from trainverify.evaluate.run import NotComputed
from trainverify.evaluate.sample import Sample
from trainverify.evaluate.small import NotJoined, Small, TooMuch, extent, shrink_system
from trainverify.graph.lineage import Layout
from trainverify.graph.obligations import Obligation

BASES: Final = (4, 3, 2)
SMALL: Final = 50_000  # elements that are evaluated and enclosed in no time
FEW: Final = 50  # tensors as large as this part of them: less than that is no axis that did not shrink
FEWER: Final = 4  # times fewer elements, for it to be worth while


def looser(
    system: System, lineage: tuple[Layout, ...], wanted: Sequence[Obligation], proved: Collection[Obligation], kept: Sample, seed: int
) -> tuple[Small, list[Suspect]] | None:
    """An evaluation over looser axes, and what of it differs at several sizes that is not proved; None if nothing is known by that."""
    whole: int | None = None
    try:
        whole, largest = extent(system, kept)
        if whole <= SMALL or largest <= SMALL // FEW:
            return None
    except NotABoundary:
        pass
    try:
        loose = related_by_size(system)
        if whole is not None and FEWER * extent(loose, kept)[0] > whole:
            return None
        there = {o for o in wanted if o not in proved}
        for base in BASES:
            small = shrink_system(loose, base=base, kept=kept, most=None if whole is None else whole // FEWER)
            far = [s for s in compare(small, lineage, wanted, [seed])[0][0] if s.distance > DIFFERENT]
            there &= {s.obligation for s in far}
            noise = [s for s in far if s.obligation in proved]
            if not there or (noise and calm(small, lineage, noise, seed)):
                return None
        return small, [s for s in far if s.obligation in there]
    except (NotABoundary, TooMuch, NotJoined, NotComputed, ValueError):  # sizes that do not fit together
        return None


def related_by_size(system: System) -> System:
    """The same programs over axes that are related by size alone."""
    made = System(system.logical, system.plan, system.table, system.talk, system.schedule, system.flat, LooseAxes())
    return made.collect(system.obligations)
