"""Integers, and conditions on them, that follow from constants alone: they are computed, and no data decides on them."""

from __future__ import annotations

import math
from typing import Final

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC
from trainverify.graph.program import Op
from trainverify.translate.emit import Emitter

MOST: Final = 1 << 24  # elements of a tensor that is computed


def decided(e: Emitter, name: str) -> bool | None:
    """The value of a condition that integers and booleans without any source lead to; None where data may decide."""
    found = value_of(e, name)
    return None if found is None else bool(found.reshape(()))


def value_of(e: Emitter, name: str) -> Array | None:
    """The integers or booleans of a tensor that no source leads to; None where data may decide."""
    order = ancestors(e, name)
    if order is None:
        return None
    values: dict[str | None, Array] = {}
    for op in order:
        lowered = e.table.lower(op.name, dict(op.attrs), tuple(None if i is None else e.tensors[i] for i in op.inputs))
        made = NUMERIC.run(lowered.outputs, [values[i] for i in op.inputs if i is not None])
        values.update(zip(op.outputs, made, strict=True))
    return values[name]


def ancestors(e: Emitter, name: str) -> list[Op] | None:
    """The ops that make a tensor, in order; None if one of them computes on real numbers, communicates, or reads a source."""
    found: dict[int, Op] = {}
    waiting: list[str | None] = [name]
    while waiting:
        here = waiting.pop()
        op = e.made.get(here)
        if op is None or None in op.inputs or not _exact(e, op):
            return None
        if id(op) not in found:
            found[id(op)] = op
            waiting += op.inputs
    at = {id(op): i for i, op in enumerate(e.ops)}
    return sorted(found.values(), key=lambda op: at[id(op)])


def _exact(e: Emitter, op: Op) -> bool:
    definition = e.table.definitions.get(op.name)
    if definition is None or definition.collective or definition.point_to_point:
        return False
    return all(e.tensors[o].kind in ("int", "bool") and math.prod(e.tensors[o].shape) <= MOST for o in op.outputs)
