"""What follows from constants alone: integers and conditions on them, which no data decides on; tables, told from numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC
from trainverify.graph.program import Op
from trainverify.primitives.node import Node, ordered
from trainverify.translate.emit import Emitter

SMALL: Final = 4096  # elements of a constant that ranks and the reference start with, up to which it is computed
POSITIONAL: Final = frozenset(("arange", "tril", "triu", "stack", "concat", "pad", "one_hot", "cumsum"))  # of one number they make several
MOVING: Final = frozenset(("identity", "to", "reshape", "transpose", "permute", "slice", "concat", "stack", "expand", "flip"))
MOST: Final = 1 << 24  # elements of a tensor that is computed


def decided(e: Emitter, name: str) -> bool | None:
    """The value of a condition that integers and booleans without any source lead to; None where data may decide."""
    found = value_of(e, name)
    return None if found is None else bool(found.reshape(()))


def value_of(e: Emitter, name: str) -> Array | None:
    """The integers or booleans of a tensor that no source leads to; None where data may decide."""
    return None if ancestors(e, name) is None else computed(e, [name], {})[name]


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


def numbers_of(e: Emitter, constant: str) -> tuple[float, ...] | None:
    """The numbers of a constant: one, if it is so everywhere; None of many."""
    if (value := everywhere(e, constant)) is not None:
        return (float(value),)
    if math.prod(e.shape(constant)) > SMALL:
        return None
    return tuple(float(v) for v in np.ravel(computed(e, [constant], {})[constant]))


def everywhere(e: Emitter, constant: str) -> Any:
    """The number that a constant is at all positions, where its formula shows that; else None."""
    seen, waiting, found = set[str | None](), [constant], list[Any]()
    while waiting:
        op = e.made[waiting.pop()]
        if op.name == "full":
            found.append(op.get("value"))
        elif op.name not in MOVING or (op.name == "to" and e.kind(op.outputs[0]) != "real"):
            return None
        waiting += [str(i) for i in op.inputs if i not in seen]
        seen.update(op.inputs)
    return found[0] if all(v == found[0] for v in found) else None


def is_table(e: Emitter, constant: str) -> bool:
    """Whether a constant depends on the position: what begins as one number everywhere is often changed by steps."""
    seen, waiting = set[str | None](), list[str | None]([constant])
    while waiting:
        op = e.made[str(waiting.pop())]
        if op.name in POSITIONAL:
            return True
        waiting += [i for i in op.inputs if i not in seen]
        seen.update(op.inputs)
    return False


def computed(e: Emitter, wanted: Sequence[str], given: Mapping[str, Array]) -> dict[str, Array]:
    """The wanted tensors of a program under construction, where its sources have these values."""
    values = dict(given)
    for op in _needed(e, wanted):
        made = NUMERIC.run(_nodes(e, op), [values[i] if i is not None else np.zeros(0) for i in op.inputs])
        values.update(zip(op.outputs, made, strict=True))
    return {n: values[n] for n in wanted}


def _nodes(e: Emitter, op: Op) -> tuple[Node, ...]:
    return e.table.lower(op.name, dict(op.attrs), tuple(None if i is None else e.tensors[i] for i in op.inputs)).outputs


def work(e: Emitter, wanted: Sequence[str]) -> int:
    """How many numbers are computed for these tensors."""
    return sum(math.prod(node.shape) for op in _needed(e, wanted) for node in ordered(_nodes(e, op)))


def _needed(e: Emitter, wanted: Sequence[str]) -> list[Op]:
    needed = set(wanted)
    kept: list[Op] = []
    for op in reversed(e.ops):
        if not needed.isdisjoint(op.outputs):
            kept.append(op)
            needed.update(i for i in op.inputs if i is not None)
    return kept[::-1]
