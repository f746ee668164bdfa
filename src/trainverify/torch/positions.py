"""Positions that ranks count from different starts: arange(a, b) is arange(0, N)[a:b], for every N that is at least b.

The prover aligns slices of one range with the slices of what they number; ranges with different starts are related to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainverify.graph.program import Op, Program, attributes
from trainverify.graph.types import TensorType

Key = tuple[str, int, str]  # tensor, count, dtype: ranks that run the same code have the same
Range = tuple[int, int]


def aligned(logical: Program, programs: Sequence[Program]) -> list[Program]:
    """The programs with every range that starts at different positions on different ranks as a slice of one that starts at 0."""
    lengths = sorted(stop for op in logical.ops if op.name == "arange" for start, stop in _range(op) if start == 0)
    found: dict[Key, set[Range]] = {}
    for program in programs:
        for op in program.ops:
            for where in _range(op):
                found.setdefault(_key(op, where), set()).add(where)
    whole: dict[Key, int] = {}
    for key, ranges in found.items():
        if len(ranges) > 1 and min(ranges)[0] >= 0:
            last = max(stop for _, stop in ranges)
            whole[key] = next((n for n in lengths if n >= last), last)
    return [_sliced(p, whole) for p in programs] if whole else list(programs)


def _range(op: Op) -> Iterator[Range]:
    """The integers that an op counts one by one."""
    if op.name == "arange" and op.get("step", 1) == 1 and op.get("stop") > op.get("start", 0):
        yield op.get("start", 0), op.get("stop")


def _key(op: Op, where: Range) -> Key:
    return op.outputs[0], where[1] - where[0], str(op.get("dtype", "i64"))


def _sliced(program: Program, whole: Mapping[Key, int]) -> Program:
    tensors: dict[str, TensorType] = dict(program.tensors)
    ops: list[Op] = []
    for op in program.ops:
        where = next(_range(op), None)
        if where is None or (key := _key(op, where)) not in whole:
            ops.append(op)
            continue
        name, attrs = _unused(f"{op.outputs[0]}.whole", tensors), {"start": 0, "stop": whole[key], "dtype": key[2]}
        tensors[name] = TensorType((whole[key],), key[2])
        ops.append(replace(op, outputs=(name,), attrs=attributes(attrs)))
        cut: dict[str, Any] = {"dim": 0, "start": where[0], "stop": where[1]}
        ops.append(replace(op, name="slice", inputs=(name,), attrs=attributes(cut)))
    return replace(program, tensors=tensors, ops=tuple(ops))


def _unused(name: str, tensors: Mapping[str, TensorType]) -> str:
    while name in tensors:
        name += "'"
    return name
