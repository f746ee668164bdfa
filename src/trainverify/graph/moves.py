"""Edits that only change the order in which a rank runs its ops, or in which it adds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from trainverify.graph.communication import events
from trainverify.graph.plan import Plan, Template, units
from trainverify.graph.program import Op, Program
from trainverify.ops.table import OpTable


def without_moves(plan: Plan, table: OpTable) -> Plan:
    """A plan that computes the same as a well-formed one, with fewer ranks of their own.

    A tensor is made once and is the same wherever its op stands. Messages and collectives must keep their order, which says who
    meets whom, and what is used between them; whether anyone waits for ever was checked with the order as it is. A sum is the same
    whichever summand is written first.
    """
    ranks = {e.rank for e in plan.edits}
    if not ranks:
        return plan
    edited = {t.ranks[0]: t for t in units(plan) if t.ranks[0] in ranks}
    moved = {t.ranks[i] for t in plan.templates for i, r in enumerate(t.ranks) if r in ranks and _only_moved(plan, t, edited[r], r, table)}
    return replace(plan, edits=tuple(e for e in plan.edits if e.rank not in moved)) if moved else plan


def _only_moved(plan: Plan, template: Template, edited: Template, rank: int, table: OpTable) -> bool:
    before, after = template.program, edited.program
    if any(len(e.path) != 1 or e.tensors for e in plan.edits if e.rank == rank):
        return False
    gone, new = Counter(before.ops) - Counter(after.ops), Counter(after.ops) - Counter(before.ops)
    if Counter(_written(before, op, table) for op in gone.elements()) != Counter(_written(after, op, table) for op in new.elements()):
        return False
    return events(template, plan.functions, table) == events(edited, plan.functions, table)


def _written(program: Program, op: Op, table: OpTable) -> Op:
    """The same op with the summands of a sum in one order."""
    if len(op.inputs) != 2 or op.name not in table or table[op.name].collective or table[op.name].point_to_point:
        return op
    types = tuple([None if i is None else program.tensors[i] for i in op.inputs])
    if types[0] != types[1] or not table.lower(op.name, op.attributes, types).adds:
        return op
    return replace(op, inputs=tuple(sorted(map(str, op.inputs))))
