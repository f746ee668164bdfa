"""What ops do, without the names of their tensors, as numbers: blocks of equal numbers are of one kind."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from trainverify.axes.rows import Rows
from trainverify.graph.program import ALONE, Op, Program, has_ref, refers
from trainverify.ops.table import OpTable


def sorts(programs: Sequence[Program], table: OpTable, rows: Rows) -> list[list[int]]:
    """Of the ops of the logical program and of every unit's, numbers that mean the same in all of them."""
    tokens: dict[Hashable, int] = {}
    found: list[list[int]] = []
    for u, program in enumerate(programs, -1):
        numbers: dict[int, int] = {ALONE: ALONE}
        found.append([])
        for op, sort in zip(program.ops, program.sorts, strict=True):
            if sort not in numbers:
                key = _sort(u, program, op, table, rows)
                numbers[sort] = ALONE if key is None else tokens.setdefault(key, len(tokens))
            found[-1].append(numbers[sort])
    return found


def _sort(u: int, program: Program, op: Op, table: OpTable, rows: Rows) -> Hashable:
    """What an op does; None for transfers between ranks, and where ranks have variants of it."""
    attrs: Hashable = op.attrs
    if u >= 0:
        definition = table.definitions.get(op.name)
        if definition is not None and definition.point_to_point:
            return None
        if refers(op) and any(has_ref(v) for k, v in op.attrs if k not in ("group", "root")):
            return None
        if definition is not None and definition.collective:
            attrs = tuple((k, rows.group(u, v) if k == "group" else rows.column(u, v)) for k, v in op.attrs)
    types = program.tensors
    inputs = tuple([None if i is None else types[i] for i in op.inputs])
    return (u >= 0, op.name, attrs, inputs, tuple([types[o] for o in op.outputs]))
