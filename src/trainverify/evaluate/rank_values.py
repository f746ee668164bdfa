"""Ranks that run one program with values of their own, told apart by these values.

A template binds values to ranks: integers (offsets, peers), names of groups, floats, tuples. Integers say nothing new about a rank, nor
do floats and tuples that grow evenly along the mesh. Any other value, or a comparison that comes out differently (`rank == 4173`), does:
such ranks are units of their own, so that each of them is evaluated and none is taken for another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC
from trainverify.graph.linear import uneven
from trainverify.graph.plan import Plan, Template, pick, units
from trainverify.graph.program import CallError, Op, Value, bind, inline, refers, refs
from trainverify.ops.table import OpError, OpTable
from trainverify.primitives.node import topological

KINDS: Final = 16  # of values, up to which ranks are told apart by them
MOST: Final = 1 << 25  # elements of one tensor on all ranks of a template


def told_apart(plan: Plan, table: OpTable) -> tuple[Template, ...]:
    """The units of a plan; ranks of a unit compute the same from their own values, integers aside, or too many different things."""
    return tuple([part for unit in units(plan) for part in _split(unit, _differing(plan, unit, table))])


def alike(plan: Plan, unit: Template, table: OpTable) -> bool:
    """Whether ranks of a unit differ in nothing but integers that say where something is: none is a number that data meets."""
    return not _differing(plan, unit, table) and not _Decided(plan, unit, table).meets_data()


def _split(unit: Template, differing: Sequence[Sequence[object]]) -> list[Template]:
    """A unit by what its ranks differ in, where that takes few different values."""
    keys: list[tuple[object, ...]] = [()] * len(unit.ranks)
    for column in differing:
        more = [(*k, v) for k, v in zip(keys, column, strict=True)]
        if len(set(more)) <= KINDS:
            keys = more
    rows: dict[tuple[object, ...], list[int]] = {}
    for row, k in enumerate(keys):
        rows.setdefault(k, []).append(row)
    return [pick(unit, some) for some in rows.values()]


def _differing(plan: Plan, unit: Template, table: OpTable) -> list[list[object]]:
    """What ranks of a unit differ in, one value per rank: columns that are not integers, and what integers alone decide."""
    found: list[list[object]] = []
    if len(unit.ranks) < 2 or not unit.bindings:
        return found
    for column in unit.bindings.values():
        if not all(isinstance(v, str) and v in plan.groups for v in column) and not _places(plan, unit, column):
            found.append([(type(v).__name__, repr(v)) for v in column])
    found += _Decided(plan, unit, table).columns()
    return [column for column in found if len(set(column)) > 1]


def _places(plan: Plan, unit: Template, column: Sequence[Value]) -> bool:
    """Whether values say where something is: integers, or floats and tuples that grow evenly along the mesh."""
    if all(type(v) is int for v in column):  # those that are out of line are in every sample
        return True
    closed = set(unit.ranks) == set(range(plan.size))
    return closed and not uneven(dict(zip(unit.ranks, column, strict=True)), set(plan.mesh.names), plan.mesh)


class _Decided:
    """What ranks of a unit compute from their own integers and constants alone."""

    def __init__(self, plan: Plan, unit: Template, table: OpTable):
        self.unit = unit
        self.table = table
        try:
            self.program = inline(unit.program, plan.functions)
        except CallError:
            self.program = replace(unit.program, ops=())
        self._makers = {o: op for op in self.program.ops for o in op.outputs}
        self._values: dict[str, Array] = {}  # one row per rank
        self._large: set[str] = set()  # depend on integers of ranks too, and are too large to compute for all of them

    def columns(self) -> list[list[object]]:
        """Results that are no integers, one value per rank; one that is too large counts as different on every rank."""
        found: list[list[object]] = []
        for op in self.program.ops:
            if not self._depends(op):
                continue
            made = None if self._large.intersection(op.inputs) else self._computed(op, self._values)
            if made is not None:
                self._values.update(zip(op.outputs, made, strict=True))
                found += [[row.tobytes() for row in np.ascontiguousarray(v)] for v in made if v.dtype.kind != "i"]
            elif self._local(op):
                self._large.update(op.outputs)
                if any(self.program.tensors[o].kind != "int" for o in op.outputs):
                    found.append(list(range(len(self.unit.ranks))))
        return found

    def meets_data(self) -> bool:
        """Whether an op with data has a number that is another one on other ranks: what that makes, say by a comparison, is not linear."""
        self.columns()
        types, unit = self.program.tensors, self.unit
        for op in self.program.ops:
            if not refers(op) or self._depends(op) or not self._local(op):
                continue
            names = sorted({r.name for _, v in op.attrs for r in refs(v)})
            seen: set[tuple[object, ...]] = set()
            for bound in dict.fromkeys(zip(*(unit.bindings[n] for n in names), strict=True)):
                here = bind(op, dict(zip(names, bound, strict=True)))
                try:
                    lowered = self.table.lower(here.name, here.attributes, tuple([None if i is None else types[i] for i in op.inputs]))
                except OpError:
                    return True
                seen.add(tuple([n.attrs for n in topological(lowered.outputs) if n.prim == "const"]))
                if len(seen) > 1:
                    return True
        return False

    def _local(self, op: Op) -> bool:
        definition = self.table.definitions.get(op.name)
        return definition is None or not (definition.collective or definition.point_to_point)

    def _depends(self, op: Op) -> bool:
        """Whether an op has values of ranks, or reads what they compute from these, and nothing else but constants. A range of positions
        that begins elsewhere on every rank is not told by its numbers."""
        read = [i for i in op.inputs if i is not None]
        known = [i for i in read if i in self._values or i in self._large]
        own = refers(op) and (not read or all(math.prod(self.program.tensors[o].shape) == 1 for o in op.outputs))
        return (own or bool(known)) and all(i in known or self._constant(i) is not None for i in read)

    def _constant(self, name: str) -> Op | None:
        """The op without inputs that makes a tensor."""
        maker = self._makers.get(name)
        return maker if maker is not None and not maker.inputs and not refers(maker) and self._local(maker) else None

    def _computed(self, op: Op, values: Mapping[str, Array]) -> list[Array] | None:
        """The outputs of an op on every rank; None where that is too much, or communication."""
        unit, types = self.unit, self.program.tensors
        size = sum(math.prod(types[o].shape) for o in op.outputs) * len(unit.ranks)
        if not self._local(op) or size > MOST:
            return None
        inputs: list[Array | None] = []
        for i in op.inputs:
            if i is None or i in values:
                inputs.append(None if i is None else values[i])
                continue
            maker = self._constant(i)
            made = None if maker is None else self._computed(maker, {})
            if made is None or maker is None:
                return None
            inputs.append(made[maker.outputs.index(i)])
        names = sorted({r.name for _, v in op.attrs for r in refs(v)})
        rows: dict[tuple[Value, ...], list[int]] = {}
        for row in range(len(unit.ranks)):
            rows.setdefault(tuple([unit.bindings[n][row] for n in names]), []).append(row)
        found: list[Array] | None = None
        for bound, some in rows.items():
            here = bind(op, dict(zip(names, bound, strict=True)))
            try:
                lowered = self.table.lower(here.name, here.attributes, tuple([None if i is None else types[i] for i in op.inputs]))
            except OpError:
                return None
            made = NUMERIC.run(lowered.outputs, [None if x is None else x[some] for x in inputs], (len(some),))
            if found is None:
                found = [np.empty((len(unit.ranks), *m.shape[1:]), dtype=m.dtype) for m in made]
            for whole, m in zip(found, made, strict=True):
                whole[some] = m
        return found
