"""Smaller sizes for a plan that is not proved: where two readings of an axis do not align, it shrinks by size alone.

Such an axis keeps all its positions otherwise, and attention over them is quadratic: a wrong transpose would cost more than any proof.
A difference at these sizes counts if it is there at three of them, if what is proved agrees there, and, where that is not too large,
if it is there with all positions of the axis too. One wrong order is wrong at any sizes, but several after each other may be none at all
at some: 25 times `[2, 901]` read as `[901, 2]` and transposed is nothing. So long chains count only with all positions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from trainverify.axes.inference import NodeAxes
from trainverify.axes.loose import LooseAxes
from trainverify.axes.reduction import NotABoundary
from trainverify.axes.structure import Axes, Axis
from trainverify.axes.system import System
from trainverify.evaluate.compare import DIFFERENT, calm, compare, needed_for
from trainverify.evaluate.run import NotComputed
from trainverify.evaluate.sample import Sample
from trainverify.evaluate.small import NotJoined, TooMuch, extent, shrink_system
from trainverify.graph.lineage import Layout
from trainverify.graph.obligations import Obligation
from trainverify.ops.table import Lowered
from trainverify.primitives.node import topological

BASES: Final = (2, 3, 4)
MOVING: Final = frozenset({"input", "const", "iota", "map", "select", "reshape", "transpose", "slice", "concat", "pad", "broadcast"})
SMALL: Final = 50_000  # elements that are evaluated and enclosed in no time
FEW: Final = 50  # tensors as large as this part of them: less than that is no axis that did not shrink
FEWER: Final = 4  # times fewer elements, for it to be worth while
IN_A_ROW: Final = 3  # readings in another order after each other that still count where the whole axis is too large
COMPARED: Final = 30_000_000  # elements up to which the whole axis is looked at too, for one obligation


def looser(
    system: System, lineage: tuple[Layout, ...], wanted: Sequence[Obligation], proved: Collection[Obligation], kept: Sample, seed: int
) -> System | None:
    """The same programs over looser axes, if they differ there in something that is not proved; None if nothing is known by that."""
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
        there = [o for o in wanted if o not in proved]
        for base in BASES:
            small = shrink_system(loose, base=base, kept=kept, most=None if whole is None else whole // FEWER)
            far = [s for s in compare(small, lineage, wanted, [seed])[0][0] if s.distance > DIFFERENT]
            there = [o for o in there if any(s.obligation == o for s in far)]
            noise = [s for s in far if s.obligation in proved]
            if not there or (noise and calm(small, lineage, noise, seed)):
                return None
        return loose if _with_all_positions(system, loose, lineage, there[0], kept, seed) else None
    except (NotABoundary, TooMuch, NotJoined, NotComputed, ValueError):  # sizes that do not fit together
        return None


def related_by_size(system: System) -> System:
    """The same programs over axes that are related by size alone."""
    made = System(system.logical, system.plan, system.table, system.talk, system.schedule, system.flat, LooseAxes())
    return made.collect(system.obligations)


def _with_all_positions(system: System, loose: System, lineage: tuple[Layout, ...], one: Obligation, kept: Sample, seed: int) -> bool:
    """Whether the difference is there if the axis keeps its positions, as far as that can be computed."""
    try:
        small = needed_for(shrink_system(system, kept=kept, most=COMPARED, alternate=False), [one])
    except (NotABoundary, TooMuch):
        return in_a_row(loose) <= IN_A_ROW
    return any(s.distance > DIFFERENT for s in compare(small, lineage, [one], [seed])[0][0])


def in_a_row(loose: System) -> int:
    """How often values are read in another order at most, one reading after the other, with nothing but elementwise ops between."""
    axes = loose.inference.axes
    met: dict[int, list[tuple[Lowered, NodeAxes]]] = {}
    for m in loose.meetings:
        if m.lowered is not None and m.axes is not None:
            for _, op in m.ops:
                met.setdefault(id(op), []).append((m.lowered, m.axes))
    longest = 0
    programs = [(loose.logical, loose.logical_ops), *zip(loose.unit_programs, loose.unit_ops, strict=True)]
    for program, local in programs:
        depth: dict[str, int] = {}
        for n, op in enumerate(program.ops):
            run = [(x.lowered, x.axes) for x in local.get(n, ())] + met.get(id(op), [])
            moved = all(node.prim in MOVING for lowered, _ in run for node in topological(lowered.outputs))
            before = max((depth.get(i, 0) for i in op.inputs if i is not None), default=0) if moved else 0
            again = any(_in_another_order(axes, *one) for one in run)
            depth.update(dict.fromkeys(op.outputs, before + again))
        longest = max(longest, *depth.values(), 0)
    return longest + any(_held_in_another_order(loose, lay, ranks) for lay, ranks in loose.holdings())


def _held_in_another_order(loose: System, lay: Layout, ranks: tuple[int, ...]) -> bool:
    """Whether a whole logical tensor and its local one are made of the same digits in another order."""
    axes, whole = loose.inference.axes, loose.scope.dims[lay.logical]
    local = [loose.unit_scopes[u].dims[lay.local] for u in loose.rows.by_unit(ranks)]
    return any(
        sorted(map(id, axes.leaves([a]))) == sorted(map(id, axes.leaves([b]))) and not _equal(axes, [a], [b])
        for dims in local
        if len(dims) == len(whole)
        for a, b in zip(whole, dims, strict=True)
    )


def _in_another_order(axes: Axes, lowered: Lowered, known: NodeAxes) -> bool:
    """Whether an op reads digits in another order than they have."""
    for node in topological(lowered.outputs):
        given = [known.dims[id(a)] for a in node.args]
        if node.prim == "reshape" and not _equal(axes, given[0], known.dims[id(node)]):
            return True
        if node.prim in ("map", "select") and any(not _equal(axes, [a], [b]) for d in given for a, b in zip(given[0], d, strict=True)):
            return True
        if node.prim == "contract":
            at: dict[int, Axis] = {}
            for i, a in ((i, a) for term, dims in zip(node.attrs[0], given, strict=True) for i, a in zip(term, dims, strict=True)):
                if not _equal(axes, [at.setdefault(i, a)], [a]):
                    return True
    return False


def _equal(axes: Axes, left: Sequence[Axis], right: Sequence[Axis]) -> bool:
    return list(map(id, axes.leaves(left))) == list(map(id, axes.leaves(right)))
