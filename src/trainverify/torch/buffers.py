"""Flat buffers of many parameters, as ranks of a sharded optimizer exchange them: piece by piece instead of as a whole.

A buffer falls into one equal block for every rank, whatever parameters lie across the cuts. The rewrites are exact, element by element:
- a sum over ranks of a buffer is the sum of every piece, in the shape that it had before it was flattened;
- gathering all blocks is one broadcast of every piece from the rank that has it;
- reducing and scattering a buffer is one reduction of every piece to the rank whose block it is in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from trainverify.graph.types import TensorType
from trainverify.translate.emit import Emitter


@dataclass(frozen=True)
class Group:
    """A process group by its members, in order. Groups with the same members are told apart by number."""

    name: str
    members: tuple[int, ...]


def owned(group: Group, size: int, places: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Elements from start to stop that lie between two places and in one block, and the position of the rank whose block it is."""
    block = size // len(group.members)
    points = {0, size, *(p for p in places if 0 < p < size), *range(0, size, block)}
    for start, stop in pairwise(sorted(points)):
        yield start, stop, start // block


def _part(e: Emitter, x: str, start: int, stop: int) -> str:
    """Elements from start to stop; of a concatenation, those of the tensor that they are in, if it is one."""
    if (start, stop) == (0, e.shape(x)[0]):
        return x
    op, ends = e.made.get(x), pieces_of(e, x)
    if op is not None and ends is not None:
        at = bisect_right(ends, start) - 1
        if stop <= ends[at + 1]:
            return _part(e, str(op.inputs[at]), start - ends[at], stop - ends[at])
    return e.op("slice", (x,), {"dim": 0, "start": start, "stop": stop})


def gathered_apart(e: Emitter, group: Group, rank: int, x: str, places: Sequence[int]) -> str:
    """The blocks of all ranks one after the other; `x` is the block of this one."""
    block, dtype = e.shape(x)[0], e.tensors[x].dtype
    made = []
    for start, stop, at in owned(group, block * len(group.members), places):
        root = group.members[at]
        given = (_part(e, x, start - at * block, stop - at * block),) if root == rank else ()
        found = e.communicate("broadcast", given, {"group": group.name, "root": root}, TensorType((stop - start,), dtype))
        assert found is not None
        made.append(found)
    return e.op("concat", made, {"dim": 0})


def pieces_of(e: Emitter, name: str) -> list[int] | None:
    """Where the tensors begin and end of which a flat tensor is the concatenation; None for any other."""
    op = e.made.get(name)
    if op is None or op.name != "concat" or len(e.shape(name)) != 1:
        return None
    return list(accumulate((e.shape(str(i))[0] for i in op.inputs), initial=0))


def buffered(e: Emitter, name: str) -> list[tuple[str, int]] | None:
    """The tensors that a flat buffer is made of, each in the shape it had before, and their sizes; None for any other tensor."""
    op = e.made.get(name)
    if op is None or pieces_of(e, name) is None:
        return None
    return [(_unflattened(e, str(i)), e.shape(str(i))[0]) for i in op.inputs]


def in_order(e: Emitter, name: str) -> str:
    """The tensor that another has the elements of, in the same order."""
    while (op := e.made.get(name)) is not None and op.name == "reshape":
        name = str(op.inputs[0])
    return name


def _unflattened(e: Emitter, name: str) -> str:
    """The tensor that another is the flat form of, by itself or multiplied by a number."""
    op = e.made.get(name)
    if op is not None and op.name == "reshape":
        return str(op.inputs[0])
    if op is not None and op.name in ("mul", "div") and len(op.inputs) == 1:
        whole = _unflattened(e, str(op.inputs[0]))
        return e.op(op.name, (whole,), dict(op.attrs)) if whole != op.inputs[0] else name
    return name


def reduced_to_owners(e: Emitter, group: Group, rank: int, x: str, places: Sequence[int], op: str) -> str:
    """The block of this rank in what the ranks' buffers are together."""
    dtype, made = e.tensors[x].dtype, []
    for start, stop, at in owned(group, e.shape(x)[0], places):
        root = group.members[at]
        kind = TensorType((stop - start,), dtype) if root == rank else None
        found = e.communicate("reduce", (_part(e, x, start, stop),), {"group": group.name, "root": root, "op": op}, kind)
        if found is not None:
            made.append(found)
    return made[0] if len(made) == 1 else e.op("concat", made, {"dim": 0})
