"""Which tensors come out of gathered flat buckets: lineage says where in a bucket a parameter lies, slices and views take it out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from trainverify.graph.communication import Communication
from trainverify.graph.lineage import Layout, Parts
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Plan
from trainverify.graph.program import Op, Program

_JOINS: Final = frozenset({"concat", "concat.grad", "slice", "slice.grad", "all_gather", "reduce_scatter"})


@dataclass(frozen=True)
class Joined:
    """Tensors that ops join and cut; and with them the rows as long that ops compute from them or into them."""

    tensors: frozenset[str]
    rows: frozenset[str]


def joined(program: Program) -> Joined:
    tensors = frozenset(t for op in program.ops if op.name in _JOINS for t in (*op.inputs, *op.outputs) if t is not None)
    found = set(tensors)
    rows = [row for op in program.ops if op.name not in _JOINS for row in [_one_row(program, op)] if len(row) > 1]
    for ops in (rows, rows[::-1]):
        for row in ops:
            if not found.isdisjoint(row):
                found.update(row)
    return Joined(tensors, frozenset(found))


def _one_row(program: Program, op: Op) -> list[str]:
    """The tensors of an op that are rows as long as its result."""
    shape = program.tensors[op.outputs[0]].shape if op.outputs else ()
    return [t for t in (*op.inputs, *op.outputs) if t is not None and program.tensors[t].shape == shape] if len(shape) == 1 else []


def taken_out(logical: Program, plan: Plan, talk: Communication, program: Program, u: int) -> Iterator[tuple[str, str]]:
    """(tensor of a unit, logical tensor) pairs of one shape: the first is cut out of a bucket where the second lies."""
    flat: dict[str, list[Layout]] = {}
    for lay in plan.lineage:
        if isinstance(lay.form, Parts) and lay.local in program.sources and len(program.tensors[lay.local].shape) == 1:
            flat.setdefault(lay.local, []).append(lay)
    for op in program.ops:
        if op.name == "all_gather" and op.inputs[0] in flat:
            rank = talk.units[u].ranks[0]
            members = talk.groups[str(talk.value(rank, op.get("group")))]
            size = program.tensors[str(op.inputs[0])].shape[0]
            for lay in flat[str(op.inputs[0])]:
                start = _start(logical, plan.mesh, lay, members, size)
                if start is not None:
                    yield from ((t, lay.logical) for t in _cut_out(logical, program, op.outputs[0], start, lay.logical))


def _start(logical: Program, mesh: Mesh, lay: Layout, members: tuple[int, ...], size: int) -> int | None:
    """Where a logical tensor begins in the bucket that is gathered, if it lies there in one piece."""
    shape = logical.tensors[lay.logical].shape
    found: set[int] = set()
    for j, rank in enumerate(members):
        for part in lay.parts(mesh, rank, shape):
            if not part.padding:
                if not part.flat or part.logical[0].count > 1:
                    return None
                found.add(j * size + part.local[0] - part.logical[0].start)
    return found.pop() if len(found) == 1 else None


def _cut_out(logical: Program, program: Program, bucket: str, start: int, name: str) -> Iterator[str]:
    """Views of the slice of a bucket from a position on, in the shape of a logical tensor."""
    kind = logical.tensors[name]
    slices = {bucket} if start == 0 else set()
    for op in program.ops:
        if op.name == "slice" and op.inputs[0] == bucket and op.get("start") == start:
            slices.add(op.outputs[0])
        elif op.name in ("reshape", "view") and op.inputs[0] in slices and program.tensors[op.outputs[0]].shape == kind.shape:
            yield op.outputs[0]
